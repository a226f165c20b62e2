"""The graph calculation: from the lines of all edges to one clock for each node. Pure.

Read `draw.py` (which node probes which), `edges.py` (reported edges as columns), `filter.py` (several windows of an
edge combined), then `clocks.py` (the calculation) and its parts: `tree.py` (spanning tree and loops),
`least_squares.py`, `outliers.py`, `bounds.py` and `gauge.py`.
"""
