"""Measuring links and clocks with small UDP packets.

Read `base.py` (words), then along the way of a measurement: the prober (native; `prober.py` is its handle) collects
exchanges in windows, `fit.py` turns a window of an edge into a line, `rounds_node.py` and `rounds_master.py` make nodes
do it at the same time (`rounds_events.py` has their words), `graph.py` combines all edges into one clock per node. What
came of it is written down: `export.py` has the lines of a log (`pack.py` their exchanges), `log.py` its files;
`replay.py`, `offline.py` and `report.py` read them again.

A node's machine has its shell in `shell.py`, which a peer and `joined.py` (a process that only probes) put to use;
`alone.py` probes without a master.
"""
