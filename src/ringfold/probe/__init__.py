"""Measuring links and clocks with small UDP packets.

Read `exchanges.py` (the terms) and `fit.py` (the line of one edge), then in the order of a measurement: `nodes/` has
the processes that probe and collect exchanges in windows, `rounds/` makes all nodes do it at the same time, `regions/`
does so for more nodes than one master should have connections, `graph/` combines all edges into one clock per node,
`logs/` writes the results and reads them again. `models.py` makes windows whose truth is known, to compare estimators,
and `courses.py` follows edges over several of them, to judge the filter.
"""
