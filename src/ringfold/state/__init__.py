"""Shared state: the arrays that must be bit-identical on all peers.

What a program holds: `shared.py` (named arrays and a revision). As bytes and hashes: `blocks.py` (how an array is cut
and named), `array_memory.py` (an array's memory, on the host or on a device), `hashing.py` (the hashes of blocks), with
`gpu_hash.py` and `gpu_hash_kernels.py` (the same hashes computed on a GPU), `manifest.py` (names, sizes and hashes,
without the bytes) and `snapshot.py` (a manifest with the memory). A sync: `ancestry.py` (which revisions are in the
past of a lineage), `election.py` (whose state wins), `fetch.py` with its leaves `fetch_effects.py` and `pool.py` (how a
receiver gets what it lacks) and `serve.py` (what a peer sends to receivers). On disk: `checkpoint.py`.

Nothing here opens a connection. The modules that say Pure touch no array either: the peer's shell reads and writes the
blocks that they name (`peer/sync/transfer.py`).
"""
