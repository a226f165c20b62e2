"""The graph calculation: from the lines of all edges to one clock for each node. Pure.

Read `draw.py` (which node probes which), `edges.py` (reported edges as columns), then `clocks.py` (the calculation) and
its parts: `tree.py` (spanning tree and loops), `least_squares.py`, `outliers.py`, `bounds.py` and `gauge.py`.
"""
