"""The rim: the only Python code that touches sockets, clocks, randomness, threads and processes.

Each file is one seam and decides nothing. `clock.py`, `entropy.py`, `threads.py` and `resolve.py` hand the rest of the
package what it may not take itself; `server.py` and `process.py` are what a master needs of its process, `sigterm.py`
is what a training loop does; `ask.py` looks at a running master;
`machine.py` and `doctor.py` read what this machine is and judge it; `http.py`, `calls.py` and `inotify.py` are what the
stores need: questions to a server, calls that may never return, a bell for a file. `log_limit.py` keeps
strangers from filling the log. `development.py` checks that the native test module is there.
"""
