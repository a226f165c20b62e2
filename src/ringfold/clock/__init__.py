"""The global clock that probing gives, with a bound on its error.

Read `global_clock.py` (the clock itself), then `prober.py` (`rf.Prober`: a process that probes and does not train, with
its clock).
"""
