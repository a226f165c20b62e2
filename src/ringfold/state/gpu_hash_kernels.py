"""rf64 in Triton. Read `docs/reference/hash.md` for the words: row, lane, tile, outer states, keys, scatter.

Two steps. `_tiles` runs through all tiles at once, a thread per lane or two, and writes the 32 states that each tile
ends with: the tensor is read once, row by row, neighbouring threads reading neighbouring words. `_blocks` lets the
outer states of every block absorb those, 1/64 of the bytes, and scatters and adds them up.

A tensor may start anywhere and have any length, but a GPU loads `WIDTH` bytes at once only from a multiple of `WIDTH`.
So whole tiles are read in the widest pieces that the start allows, and the last, shorter tile in the widest that its
length allows as well; bytes past the end are never read.

This module needs torch and Triton to be imported. Only `gpu_hash.py` imports it.
"""

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 1 << 20
TILE_BYTES = 1 << 14
SLICE_BLOCKS = 1024
"""How many blocks are worked on at once: enough to fill a GPU, and little memory for the tiles' states."""

_BLOCK = tl.constexpr(BLOCK_BYTES)
_TILES_OF_BLOCK = tl.constexpr(BLOCK_BYTES // TILE_BYTES)
_ROW = tl.constexpr(256)
_ROWS = tl.constexpr(64)
_LANES = tl.constexpr(32)
_AT_ONCE = tl.constexpr(8)  # rows whose loads are in flight together

_FIRST = tl.constexpr(0xB5470916)
_SECOND = tl.constexpr(0xD1310BA6)
_STRIDE = tl.constexpr(0x9216D5D98979FB1B)
_SCATTER_1 = tl.constexpr(0xBE5466CF34E90C6D)
_SCATTER_2 = tl.constexpr(0xC97C50DD3F84D5B5)


def block_hashes(memory: torch.Tensor) -> torch.Tensor:
    """The hashes of all blocks of a 1-d uint8 tensor that is not empty, as int64 beside it, on the current stream."""
    total = memory.numel()
    hashes = torch.empty(triton.cdiv(total, BLOCK_BYTES), dtype=torch.int64, device=memory.device)
    most = min(total, SLICE_BLOCKS * BLOCK_BYTES)
    states = torch.empty(triton.cdiv(most, TILE_BYTES) * 32, dtype=torch.int64, device=memory.device)
    for first in range(0, len(hashes), SLICE_BLOCKS):
        slice_ = memory[first * BLOCK_BYTES : (first + SLICE_BLOCKS) * BLOCK_BYTES]
        _hash_slice(slice_, states, hashes[first : first + SLICE_BLOCKS])
    return hashes


def _hash_slice(memory: torch.Tensor, states: torch.Tensor, hashes: torch.Tensor) -> None:
    total = memory.numel()
    whole, rest = divmod(total, TILE_BYTES)
    start = _alignment(memory.data_ptr())
    if whole:
        per_program = 8 if whole >= 4096 else 1
        grid = (triton.cdiv(whole, per_program),)
        warps = 4 if per_program == 8 else 1
        _tiles[grid](memory, states, 0, whole, None, WIDTH=start, TILES=per_program, num_warps=warps)
    if rest:
        width = min(start, _alignment(rest))
        _tiles[(1,)](memory, states, whole, whole + 1, total, WIDTH=width, TILES=1, num_warps=1)
    _blocks[(len(hashes),)](states, hashes, whole + (rest > 0), total, num_warps=1)


def _alignment(number: int) -> int:
    """The largest of 8, 4, 2 and 1 that divides `number`."""
    return min(8, number & -number) if number else 8


@triton.jit
def _scatter(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 32)) * _SCATTER_1
    x = (x ^ (x >> 29)) * _SCATTER_2
    return x ^ (x >> 32)


@triton.jit
def _keys(number: tl.tensor) -> tl.tensor:
    return _scatter((number.to(tl.uint64) + 1) * _STRIDE)


@triton.jit
def _absorb(states: tl.tensor, words: tl.tensor) -> tl.tensor:
    x = states ^ words
    # Widened 32-bit numbers: the compiler sees that the multiplication is one of 32 by 32 bits.
    x += x.to(tl.uint32).to(tl.uint64) * _FIRST
    x = (x << 32) | (x >> 32)
    return x + x.to(tl.uint32).to(tl.uint64) * _SECOND


@triton.jit
def _words(source: tl.tensor, index: tl.tensor, there: tl.tensor, total: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """The words with these numbers, put together from pieces of WIDTH bytes; zero where not `there` or from `total` on.

    `total` may be None: then all bytes of a word are there.
    """
    if WIDTH == 8:
        pieces = source.to(tl.pointer_type(tl.uint64))
    elif WIDTH == 4:
        pieces = source.to(tl.pointer_type(tl.uint32))
    elif WIDTH == 2:
        pieces = source.to(tl.pointer_type(tl.uint16))
    else:
        pieces = source
    words = tl.zeros(index.shape, tl.uint64)
    for part in tl.static_range(8 // WIDTH):
        at = index * (8 // WIDTH) + part
        mask = there if total is None else there & (at * WIDTH < total)
        words |= tl.load(pieces + at, mask=mask, other=0).to(tl.uint64) << (8 * WIDTH * part)
    return words


@triton.jit(do_not_specialize=("first", "end", "total"))
def _tiles(
    source: tl.tensor,
    states: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    total: tl.tensor,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Write the states that the tiles from `first` to `end` end with; TILES of them per program.

    `total` is the number of bytes where the last of the tiles is cut short, and None where all are whole.
    """
    tile = (first + tl.program_id(0) * TILES + tl.arange(0, TILES)).to(tl.int64)[:, None]
    there = tile < end
    lane = tl.arange(0, _LANES)[None, :]
    x = _keys(lane + tl.zeros((TILES, _LANES), tl.int32))
    for rows in range(0, _ROWS, _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            row = tile * _ROWS + (rows + ahead)
            absorbed = _absorb(x, _words(source, row * _LANES + lane, there, total, WIDTH))
            x = absorbed if total is None else tl.where(row * _ROW < total, absorbed, x)
    tl.store(states + tile * _LANES + lane, x.to(tl.int64, bitcast=True), mask=there)


@triton.jit(do_not_specialize=("tiles", "total"))
def _blocks(states: tl.tensor, hashes: tl.tensor, tiles: tl.tensor, total: tl.tensor) -> None:
    """Write the hash of one block per program from the states of its tiles."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _LANES)
    x = _keys(lane + 32)
    for rows in range(0, _TILES_OF_BLOCK, _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            at = (block * _TILES_OF_BLOCK + rows + ahead) * _LANES + lane
            inner = tl.load(states + at, mask=at < tiles * _LANES, other=0)
            x = tl.where(at < tiles * _LANES, _absorb(x, inner.to(tl.uint64, bitcast=True)), x)
    length = tl.minimum(total - block * _BLOCK, _BLOCK).to(tl.uint64)
    purpose = tl.sum(tl.where(lane == 0, _keys(lane + 96), 0))
    hashed = _scatter(tl.sum(_scatter(x ^ _keys(lane + 64))) + length * _STRIDE + purpose)
    tl.store(hashes + block, hashed.to(tl.int64, bitcast=True))
