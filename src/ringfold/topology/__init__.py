"""From what is known about links to a ring order. Pure: no clock, no socket, no randomness.

`ring.py` finds a ring that uses no bad edge.
"""
