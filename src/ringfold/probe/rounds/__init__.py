"""Rounds: all nodes probe for the same window, report, and get one result. Two pure state machines and what they share.

Read `events.py` and `effects.py` (of both machines), `settings.py`, `node.py` (a node's part), then `master.py` (the
master's part) with `gather.py` (requested rounds, and which reports count), `liveness.py` (which nodes are awaited, and
for how long) and `metrics.py` (what a round cost).
`calculation.py` is the calculation at the end of a round. `gloo.py` has rounds without a master.
"""
