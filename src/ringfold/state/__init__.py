"""Shared state: the arrays that must be bit-identical on all peers.

Read `shared.py` (what a program holds), `memory.py` (an array as bytes), `hashing.py` (blocks and roots), `manifest.py`
(what a peer offers), `election.py` (whose state wins), then `fetch.py` with its leaves `wishes.py` and `pool.py` (how
a receiver gets what it lacks) and `serve.py` (what it is given). `checkpoint.py` puts a state on disk. Nothing here
opens a connection: the peer's shell carries out what `fetch.py` asks for.
"""
