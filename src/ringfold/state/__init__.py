"""Shared state: the arrays that must be bit-identical on all peers.

Read `shared.py` (what a program holds), `array_memory.py` (an array as bytes), `hashing.py` (blocks and roots) with
`gpu_hash.py` and `gpu_hash_kernels.py` (the same hashes computed on a GPU), `manifest.py` (what a peer offers),
`ancestry.py` (which revisions are in a lineage's past), `election.py` (whose state wins), then `fetch.py` with its
leaves `fetch_effects.py` and `pool.py` (how a receiver gets what it lacks) and `serve.py` (what a peer sends to
receivers). `checkpoint.py` puts a state on disk. Nothing here opens a connection: the peer's shell carries out what
`fetch.py` decides.
"""
