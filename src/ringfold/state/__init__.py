"""Shared state: the arrays that must be bit-identical on all peers. Read `shared.py`."""
