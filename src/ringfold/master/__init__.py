"""The master: the pure state machine of a run, and the server around it.

Read `machine.py` first: it tells what a master does, and takes every event. Then `run.py` (the state), `epochs.py` (the
one mechanism that changes a group) with `verdicts.py` (why a commit is safe), and `calls.py` (votes and admission). The
leaves are short: `edges.py`, `evidence.py`, `liveness.py`, `meeting.py`, `status.py`. `server.py` carries the effects
out over real sockets.
"""
