"""The order of a pass: a permutation, the same for ever, and another one for each seed and pass."""

import numpy as np
import pytest

from ringfold.data.order import permute


def order(size: int, seed: int = 0, pass_number: int = 0) -> list[int]:
    return permute(np.arange(size, dtype=np.int64), size, seed, pass_number).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1_000, 4_097])
def test_every_sample_occurs_once(size: int) -> None:
    for pass_number in range(3):
        assert sorted(order(size, 7, pass_number)) == list(range(size))


def test_the_order_never_changes() -> None:
    """Checkpoints hold positions in it."""
    assert order(10) == GOLDEN[0]
    assert order(10, pass_number=1) == GOLDEN[1]
    assert order(10, seed=123456789) == GOLDEN[2]
    assert permute(np.array([0, 10**12 - 1], np.int64), 10**12, 5, 3).tolist() == GOLDEN[3]


def test_seeds_and_passes_differ() -> None:
    orders = {tuple(order(50, seed, number)) for seed in range(20) for number in range(20)}
    assert len(orders) == 400


def test_positions_can_be_computed_one_by_one() -> None:
    whole = order(1_000, 3, 2)
    assert [int(permute(np.array([place], np.int64), 1_000, 3, 2)[0]) for place in range(0, 1_000, 37)] == whole[::37]


def test_small_sets_are_well_mixed() -> None:
    """Over many passes each sample is at each position about equally often."""
    size, passes = 10, 4_000
    counts = np.zeros((size, size))
    for number in range(passes):
        counts[np.arange(size), order(size, 1, number)] += 1
    expected = passes / size
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


GOLDEN = [
    [1, 0, 9, 3, 5, 6, 2, 8, 7, 4],
    [0, 3, 9, 5, 8, 4, 2, 7, 1, 6],
    [5, 1, 8, 2, 7, 3, 0, 9, 6, 4],
    [969890316718, 72219073571],
]
