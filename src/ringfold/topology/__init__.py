"""From what is known about links to a ring order. Pure: no clock, no socket, no randomness.

Read in this order: `ring.py` finds a ring that uses no bad edge. `bandwidth.py` keeps what was measured, and says what
must be measured again; `rounds.py` groups those measurements so that none disturbs another; `estimate.py` turns the
arrivals of one measurement into a rate. `solve.py` chooses the ring: exactly for few members (`exact.py`), by search
for many (`covers.py` for the slowest link, `exchange.py` for the sum). `moonshot.py` is the same choice with far more
steps, as a program of its own.
"""
