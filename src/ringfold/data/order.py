"""The order of the samples in a pass over the data: a permutation that is computed, not stored.

A Feistel network permutes the numbers of 2k bits, for the smallest k with room for all samples. A number that comes out
beyond the last sample is permuted again until it is one ("cycle walking"): that is a permutation of the samples, and at
most four rounds of it are needed on average. So a set of any size needs no memory, and a sample costs a few operations.

The order depends on the size, the seed and the number of the pass, and on nothing else: not on the world, not on the
machine. `tests/unit/data/test_order.py` has some orders as numbers, because a checkpoint must mean the same for ever.
"""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ROUNDS = 8
_WORD = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def permute(positions: Indices, size: int, seed: int, pass_number: int) -> Indices:
    """The samples at these positions of a shuffled pass."""
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, pass_number)
    words = _encrypt(positions.astype(np.uint64), half, keys)
    while (outside := words >= size).any():
        words[outside] = _encrypt(words[outside], half, keys)
    return words.astype(np.int64)


def _encrypt(words: _Words, half: int, keys: list[int]) -> _Words:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> shift, words & mask
    for key in keys:
        left, right = right, left ^ (_mix_words(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _keys(seed: int, pass_number: int) -> list[int]:
    state, keys = _mix(_mix(seed & _WORD) + pass_number), []
    for _ in range(ROUNDS):
        state = (state + _STRIDE) & _WORD
        keys.append(_mix(state))
    return keys


def _mix(number: int) -> int:
    """The output function of SplitMix64."""
    number = ((number ^ (number >> 30)) * _FIRST) & _WORD
    number = ((number ^ (number >> 27)) * _SECOND) & _WORD
    return number ^ (number >> 31)


def _mix_words(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))
