"""Rounds: all nodes probe for the same window, report, and get one result. Two pure machines and what they share.

Read `events.py` (events and effects of both machines), `settings.py`, `node.py` (a node's part), `master.py` (the
master's part) with `asks.py` (who waits for a labelled round), `gather.py` (which reports count) and `metrics.py` (what
a round cost). `calculation.py` is done when a round ends, `advice.py` is its conclusion for the next one. `gloo.py` has
rounds without a master, over the process group of `gloo_group.py`.
"""
