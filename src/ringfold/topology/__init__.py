"""From what is known about links to a ring order. Pure: no clock, no socket, no randomness.

Read in this order: `ring.py` finds a ring that uses no bad edge. `links.py` has what was measured, and says what must
be measured again; `schedule.py` groups those measurements so that none disturbs another; `estimate.py` turns the
arrivals of one measurement into a rate. `solve.py` chooses the ring: exactly for few members, with `search.py` for
many. `moonshot.py` is the same choice with far more steps, as a program of its own.
"""
