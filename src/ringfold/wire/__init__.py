"""Bytes <-> typed messages. No sockets, no clocks.

Reading order: `base.py` (ids, and the base class of all messages), `messages.py` (control connections, handshakes and
bulk sessions), `status.py` (requests of commands), `probing.py` (rounds of probing), `regions.py` (relays between
nodes and master), `frames.py` (how a message becomes
bytes, and the fixed frames that native code reads and writes itself), `descriptor.py` (the 48 bytes that describe an
op), `proof.py` (how a secret is proven without being sent) and `decoding.py` (how bytes from outside are decoded and
checked). `notices.py` has the notices for observers: logs, metrics and traces;
`events.py` has those that are only recorded, and the lines of records. `diagnostics.py` has the texts that
several rooms share. The agent of a host has its own protocols: `agent.py` (its Unix socket), `agent_fixed.py` (the same
for C programs) and `telemetry.py` (packets from switches).
"""
