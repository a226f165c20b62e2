"""The hashes of shared state: one per block of 1 MiB, and a root over them that stands for a whole array.

Two kinds. `rf64` is ours (`docs/reference/hash.md`): memory speed, and finds whatever goes wrong by itself. `blake3`
costs more and also withstands peers that lie; it is the package of that name, imported only by runs that ask for it.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import assert_never

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.runtime.hardware import usable_cores
from ringfold.wire.messages import HashKind

BLOCK_BYTES = 1 << 20
"""What is hashed and transferred as one; the last block of an array may be shorter."""

_WORTH_THREADS = 8 * BLOCK_BYTES

Bytes = npt.NDArray[np.uint8]


def digest_bytes(kind: HashKind) -> int:
    """The size of one hash, of a block or of a root."""
    match kind:
        case "rf64":
            return 8
        case "blake3":
            return 32
        case _:
            assert_never(kind)


def check_available(kind: HashKind) -> None:
    """Raise a `UsageError` that says what to install, or that there is no such hash."""
    match kind:
        case "rf64":
            return
        case "blake3":
            _blake3()
        case _:
            raise UsageError(f"there is no hash {kind!r}: choose 'rf64' or 'blake3'")


def block_hashes(memory: Bytes, kind: HashKind, threads: int = 0, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The hashes of all blocks of a contiguous array, one after the other. `threads` 0 means one per core.

    An empty array has no blocks. The GIL is released meanwhile; whoever writes to the array makes the result worthless.
    """
    if block_bytes != BLOCK_BYTES:  # in a simulation
        starts = range(0, memory.nbytes, block_bytes)
        return b"".join(block_hash(memory[at : at + block_bytes], kind) for at in starts)
    match kind:
        case "rf64":
            if threads == 0:
                threads = usable_cores() if memory.nbytes >= _WORTH_THREADS else 1
            hashes: bytes = _native().hash_blocks(memory, threads)
            return hashes
        case "blake3":
            # The package spreads each block over threads: all of them at little cost, some by making a pool per block.
            hasher = _blake3().blake3
            limit = threads or hasher.AUTO
            starts = range(0, memory.nbytes, BLOCK_BYTES)
            return b"".join(hasher(memory[at : at + BLOCK_BYTES], max_threads=limit).digest() for at in starts)
        case _:
            assert_never(kind)


def block_hash(block: Bytes | bytes, kind: HashKind) -> bytes:
    """The hash of one block, on the calling thread."""
    match kind:
        case "rf64":
            number: int = _native().hash_block(block)
            return number.to_bytes(8, "little")
        case "blake3":
            digest: bytes = _blake3().blake3(block).digest()
            return digest
        case _:
            assert_never(kind)


def root_hash(hashes: bytes, total_bytes: int, kind: HashKind) -> bytes:
    """The hash of an array of `total_bytes` from its blocks' hashes.

    Never raises on what another peer may have sent: hashes that are too many, too few or cut off give another root.
    """
    match kind:
        case "rf64":
            number: int = _native().hash_root(hashes, total_bytes)
            return number.to_bytes(8, "little")
        case "blake3":
            digest: bytes = _blake3().blake3(hashes + total_bytes.to_bytes(8, "little")).digest()
            return digest
        case _:
            assert_never(kind)


@cache
def _native() -> ModuleType:
    return import_module("ringfold._native")


@cache
def _blake3() -> ModuleType:
    try:
        return import_module("blake3")
    except ImportError as error:
        raise UsageError(
            f"hash='blake3' needs the package blake3 ({error}): pip install 'ringfold[blake3]', or use hash='rf64'"
        ) from error
