"""The hashes of shared state: one per block of 1 MiB of an array's memory.

There are two kinds. `rf64` is Ringfold's own (`docs/reference/hash.md`): it runs at memory speed and finds accidental
damage. `blake3` costs more and also withstands peers that lie; it is the package of that name, and is imported only by
runs that use it. The root over the hashes of an array is in `blocks.py`.
"""

from typing import assert_never

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.runtime.hardware import usable_cores
from ringfold.state.blocks import BLOCK_BYTES, load_blake3, load_native
from ringfold.wire.messages import HashKind

MIN_THREADED_BYTES = 8 * BLOCK_BYTES
"""Smaller arrays are hashed by one thread."""

Bytes = npt.NDArray[np.uint8]


def check_available(kind: HashKind) -> None:
    """Raise a `UsageError` that says what to install, or that there is no such hash."""
    match kind:
        case "rf64":
            return
        case "blake3":
            load_blake3()
        case _:
            raise UsageError(f"there is no hash {kind!r}: choose 'rf64' or 'blake3'")


def block_hashes(memory: Bytes, kind: HashKind, threads: int = 0, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The hashes of all blocks of a contiguous array, one after the other. `threads` 0 means one per core.

    An empty array has no blocks. The GIL is released meanwhile. If the array is written to meanwhile, the result is
    worthless.
    """
    if block_bytes != BLOCK_BYTES:  # in a simulation
        starts = range(0, memory.nbytes, block_bytes)
        return b"".join(block_hash(memory[at : at + block_bytes], kind) for at in starts)
    match kind:
        case "rf64":
            if threads == 0:
                threads = usable_cores() if memory.nbytes >= MIN_THREADED_BYTES else 1
            hashes: bytes = load_native().hash_blocks(memory, threads)
            return hashes
        case "blake3":
            # The package spreads each block over threads: all of them at little cost, some by making a pool per block.
            hasher = load_blake3().blake3
            limit = threads or hasher.AUTO
            starts = range(0, memory.nbytes, BLOCK_BYTES)
            return b"".join(hasher(memory[at : at + BLOCK_BYTES], max_threads=limit).digest() for at in starts)
        case _:
            assert_never(kind)


def block_hash(block: Bytes | bytes, kind: HashKind) -> bytes:
    """The hash of one block, on the calling thread."""
    match kind:
        case "rf64":
            number: int = load_native().hash_block(block)
            return number.to_bytes(8, "little")
        case "blake3":
            digest: bytes = load_blake3().blake3(block).digest()
            return digest
        case _:
            assert_never(kind)
