"""Regions: rounds of more nodes than one master should have connections. Two pure parts, one at each end of the
connection between a relay and the root master.

Read `events.py` and `effects.py` (of the relay), `relay.py` (the state machine of a relay), then `root.py` (which nodes
are behind which relay, for the master and for the simulation). The messages are in `wire/regions.py`, the relay's shell
in `nodes/relay.py`.
"""
