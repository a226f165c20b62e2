"""The processes that probe.

Read `prober.py` (the handle on the native prober), `shell.py` (the shell of a node's round machine) with `ahead.py` and
`watch.py` (a look into the open window), then `joined.py` (a process that only probes, with a master), `file.py` (the
nodes file) and `alone.py` (`rf.Prober`, without a master).
"""
