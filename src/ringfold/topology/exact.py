"""The best ring over few members, proven: dynamic programming over sets of members.

A ring may be read from any member, so let it begin at place 0. For every set of other places and every place v in it,
the table keeps the best path that begins at 0, visits exactly the set, and ends at v. A path to v over a set is a path
over the set without v, plus one link. Sets are taken by size, all sets of one size at once: NumPy does the n * 2^n
entries with n looks each, which is 3.9 million looks for 16 members.

It is done twice. First for the slowest link: a path's worth is its slowest link. Then for the rest, with only the links
that are at least that fast: a path's worth is its sum of rates, and among equal sums its smaller cost. Rates and costs
are whole numbers (in floats, exact up to 2^53), so equal sums are equal.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


def widest(rate: Matrix) -> float:
    """The slowest link of the ring whose slowest link is fastest; -inf if every ring needs a link of -inf."""
    size = len(rate)
    width = np.full((1 << (size - 1), size - 1), -np.inf)
    for place in range(size - 1):
        width[1 << place, place] = rate[0, place + 1]
    for place, sets, before in _sets_by_size(size - 1):
        width[sets, place] = np.minimum(width[before], rate[1:, place + 1]).max(axis=1)
    return float(np.minimum(width[-1], rate[1:, 0]).max())


def richest(rate: Matrix, cost: Matrix) -> list[int]:
    """The ring with the largest sum of rates, then the smallest sum of costs; a rate of -inf is no link.

    One that needs no such link must exist. Among equals the answer is always the same one.
    """
    size = len(rate)
    total = np.full((1 << (size - 1), size - 1), -np.inf)
    spent = np.full_like(total, np.inf)
    for place in range(size - 1):
        total[1 << place, place], spent[1 << place, place] = rate[0, place + 1], cost[0, place + 1]
    for place, sets, before in _sets_by_size(size - 1):
        totals = total[before] + rate[1:, place + 1]
        best = totals.max(axis=1)
        total[sets, place] = best
        costs = np.where(totals == best[:, None], spent[before] + cost[1:, place + 1], np.inf)
        spent[sets, place] = costs.min(axis=1)
    return _walk_back(rate, cost, total, spent)


def _walk_back(rate: Matrix, cost: Matrix, total: Matrix, spent: Matrix) -> list[int]:
    """Read the ring from its end: at each step, the lowest place that the best path can have come from."""
    ring, after, left = [], 0, len(total) - 1
    while left:
        totals = total[left] + rate[1:, after]
        costs = np.where(totals == totals.max(), spent[left] + cost[1:, after], np.inf)
        place = int(costs.argmin())
        ring.append(place + 1)
        after, left = place + 1, left ^ 1 << place
    return [0, *reversed(ring)]


@cache
def _by_size(count: int) -> list[Places]:
    sets = np.arange(1 << count)
    sizes = sum((sets >> place) & 1 for place in range(count))
    return [np.flatnonzero(sizes == size) for size in range(count + 1)]


def _sets_by_size(count: int) -> Iterator[tuple[int, Places, Places]]:
    """For all sets of two and more places, small ones first: (a place, the sets that hold it, those without it)."""
    for sets in _by_size(count)[2:]:
        for place in range(count):
            holding = sets[(sets >> place) & 1 == 1]
            yield place, holding, holding ^ (1 << place)
