"""Bytes <-> typed messages. No sockets, no clocks.

Read `messages.py` first (what is said on a control connection and in a lane's handshake), then `frames.py` (how a
message becomes bytes, and the fixed frames that native code reads and writes itself), then `proof.py` (how a secret is
proven without being sent), `decoding.py` (how bytes from outside are decoded and checked) and `events.py` (what the
rooms tell observers).
"""
