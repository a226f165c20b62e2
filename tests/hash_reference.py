"""rf64 once more, in NumPy, written from `docs/reference/hash.md`: what the native core and the GPU are compared with.

Slow (some tens of MB a second) and short. It imports nothing of Ringfold, so that it also runs where only the sources
are: a GPU machine without a compiler can load this file by its path.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

BLOCK_BYTES = 1 << 20
TILE_BYTES = 1 << 14
ROW_BYTES = 256
LANES = 32

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_STRIDE = np.uint64(0x9216D5D98979FB1B)


def block_hash(block: bytes) -> int:
    """The hash of one block."""
    return _message(block, purpose=96)


def block_hashes(array: bytes) -> bytes:
    """The hashes of all blocks of an array, 8 little-endian bytes each."""
    starts = range(0, len(array), BLOCK_BYTES)
    return b"".join(block_hash(array[start : start + BLOCK_BYTES]).to_bytes(8, "little") for start in starts)


def root_hash(hashes: bytes, total_bytes: int) -> int:
    """The hash of an array from its blocks' hashes."""
    return _message(hashes + total_bytes.to_bytes(8, "little"), purpose=97)


def _message(message: bytes, purpose: int) -> int:
    outer = _keys(32)
    for start in range(0, len(message), TILE_BYTES):
        outer = _absorb(outer, _tile(message[start : start + TILE_BYTES]))
    total = _scatter(outer ^ _keys(64)).sum(dtype=np.uint64, keepdims=True)
    total += np.array([len(message)], np.uint64) * _STRIDE + _keys(purpose)[:1]
    return int(_scatter(total)[0])


def _tile(tile: bytes) -> Words:
    rows = -(-len(tile) // ROW_BYTES)
    states = _keys(0)
    for row in np.frombuffer(tile.ljust(rows * ROW_BYTES, b"\0"), "<u8").reshape(rows, LANES):
        states = _absorb(states, row.astype(np.uint64))
    return states


def _absorb(states: Words, row: Words) -> Words:
    x = states ^ row
    x = x + (x & _LOW) * np.uint64(0xB5470916)
    x = (x << _HALF) | (x >> _HALF)
    return x + (x & _LOW) * np.uint64(0xD1310BA6)


def _keys(first: int) -> Words:
    numbers = np.arange(first, first + LANES, dtype=np.uint64)
    return _scatter((numbers + np.uint64(1)) * _STRIDE)


def _scatter(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xBE5466CF34E90C6D)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xC97C50DD3F84D5B5)
    return x ^ (x >> np.uint64(32))
