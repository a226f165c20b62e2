"""The graph calculation: from the lines of all edges to one clock for each node. Pure.

Read `draw.py` (who probes whom), `edges.py` (reported edges as columns), then `clocks.py` (the calculation) and its
parts: `tree.py`, `potentials.py`, `lines.py`, `gauge.py`, `bounds.py`, `outliers.py`.
"""
