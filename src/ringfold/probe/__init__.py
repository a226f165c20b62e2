"""Measuring links and clocks with small UDP packets.

Read `base.py` (the terms), then in the order of a measurement: the prober (native; `nodes/prober.py` is its handle)
collects exchanges in windows, `fit.py` turns a window of an edge into a line (`models.py` makes windows whose truth is
known), `rounds/` makes all nodes do it at the same time, `graph/` combines all edges into one clock per node, `logs/`
writes down what came of it and reads it again. `nodes/` has the processes: a peer, a process that only probes, and one
that probes without a master.
"""
