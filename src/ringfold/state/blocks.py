"""How an array is cut into blocks, how a block is named, and which hashes stand for it. Pure.

A block is the unit of hashing and of transfer. The machines decide about blocks by number, size and digest; only the
shell reads or writes the bytes (`peer/sync/transfer.py`).
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, assert_never

from ringfold.errors import UsageError
from ringfold.wire.messages import HashKind

BLOCK_BYTES = 1 << 20
"""The size of a block. The last block of an array may be shorter."""

BlockRange = tuple[int, int, int]
"""Consecutive blocks of one array, as (key, first, count)."""


class BlockRef(NamedTuple):
    """One block of one array: the array's key, the byte range in it, and the digest that the content must have."""

    key: int
    offset: int
    nbytes: int
    digest: bytes


def block_count(nbytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many blocks an array of so many bytes has. An empty array has none."""
    return -(-nbytes // block_bytes)


def block_range(block: int, nbytes: int, block_bytes: int = BLOCK_BYTES) -> tuple[int, int]:
    """Where a block begins and ends in an array of so many bytes."""
    first = block * block_bytes
    return first, min(first + block_bytes, nbytes)


def block_ref(key: int, block: int, nbytes: int, hashes: bytes, kind: HashKind, block_bytes: int) -> BlockRef:
    """The block with this number, of an array of so many bytes with this hash list."""
    first, last = block_range(block, nbytes, block_bytes)
    size = digest_bytes(kind)
    return BlockRef(key, first, last - first, hashes[block * size : (block + 1) * size])


def digest_bytes(kind: HashKind) -> int:
    """The size of one hash, of a block or of a root."""
    match kind:
        case "rf64":
            return 8
        case "blake3":
            return 32
        case _:
            assert_never(kind)


def root_hash(hashes: bytes, total_bytes: int, kind: HashKind) -> bytes:
    """The hash of an array of `total_bytes`, computed from the hashes of its blocks.

    Never raises on what another peer may have sent: a list that is too long, too short or cut off has another root.
    """
    match kind:
        case "rf64":
            number: int = load_native().hash_root(hashes, total_bytes)
            return number.to_bytes(8, "little")
        case "blake3":
            digest: bytes = load_blake3().blake3(hashes + total_bytes.to_bytes(8, "little")).digest()
            return digest
        case _:
            assert_never(kind)


@cache
def load_native() -> ModuleType:
    """The module with the rf64 functions."""
    return import_module("ringfold._native")


@cache
def load_blake3() -> ModuleType:
    """The package `blake3`; raises a `UsageError` that says how to install it."""
    try:
        return import_module("blake3")
    except ImportError as error:
        raise UsageError(
            f"hash='blake3' needs the package blake3 ({error}): pip install 'ringfold[blake3]', or use hash='rf64'"
        ) from error
