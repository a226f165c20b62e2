"""The best ring for the measured links.

The objectives, in this order:

1. the *slowest* link as fast as possible: every byte of an all-reduce crosses every link of the ring, so the ring runs
   at the rate of that one (docs/adr/0013);
2. the largest sum of rates;
3. the smallest sum of delays;
4. as many links of the present ring as possible, because every changed one costs a connection.

Up to EXACT_MEMBERS the result is proven best in all four (the end of this file). Beyond, the slowest link is searched
from the bound downwards (`search.py`): at the bound itself a ring is nearly always found, and then that part is proven
too. The rest is local search. The result depends on the arguments alone: steps are counted, nothing is timed.

Rates are compared in whole bytes a second, so that equal sums are equal.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.topology import search
from ringfold.topology.ring import Edge, edges_of, ring_order
from ringfold.topology.search import SegmentExchange

Matrix = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Figure = Callable[[int, int], float]
"""What is known about the link from the first member to the second."""

EXACT_MEMBERS = 16
BUDGET = 8_000
"""Steps; one is a row of exchanges, or CHANGES changes of a cover, which take as long. 64 members: half a second."""
CHANGES = 16
ATTEMPTS = 16
"""The search for the slowest link may take half the budget; one attempt takes this part of it."""
_MAX_FIGURE = 2.0**48
"""Sums of whole numbers up to here over a ring are exact."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A ring, and its figures. No ring has a faster slowest link than `bound`.

    `exact`: proven best in all objectives. `kept`: it is the ring that was passed as `start`. `slowest` and `total` are
    bytes a second, `delay` has the unit of the delays.
    """

    ring: tuple[int, ...]
    slowest: float
    total: float
    delay: float
    bound: float
    exact: bool
    kept: bool
    reason: str


@dataclass(frozen=True, slots=True)
class NoRing:
    """Every ring needs a forbidden edge (`proven`), or none without one was found."""

    proven: bool
    reason: str


def known_or(table: Mapping[Edge, float], unknown: float) -> Figure:
    """A figure for every link: the one in the table, else `unknown`."""
    return lambda source, target: table.get((source, target), unknown)


def ring_value(ring: Sequence[int], rate: Figure, delay: Figure) -> tuple[float, float, float]:
    """The value of a ring: of two rings over the same members, the one with the greater value is better."""
    links = edges_of(ring)
    rates = [float(round(rate(*link))) for link in links]
    return min(rates, default=0.0), sum(rates), -sum(float(round(delay(*link))) for link in links)


def bottleneck_bound(members: Sequence[int], rate: Figure, forbidden: Set[Edge] = frozenset()) -> float:
    """No ring over the members has a faster slowest link; -inf if all need a forbidden edge. Needs two members."""
    return search.bound(_matrix(sorted(members), rate, forbidden))


def best_ring(
    members: Sequence[int],
    rate: Figure,
    delay: Figure,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    start: Sequence[int] | None = None,
    forbidden: Set[Edge] = frozenset(),
    margin: float = 0.0,
) -> Solution | NoRing:
    """The best ring without forbidden edges; equal arguments give equal results, in any order of the members.

    `start` is the present ring. It is kept unless the new one is better by more than `margin` (a share, as 0.05), in
    the slowest link, or no slower there and better in the sum, or no worse in both and better in the delay. It may have
    other members: its common edges still count. The ring begins where `start` does, else at the lowest id.
    """
    places = sorted(members)
    if len(set(places)) != len(places):
        raise UsageError(f"a ring has every member once; members: {places}")
    if margin < 0 or budget < 1:
        raise UsageError(f"need margin >= 0 and budget >= 1, not {margin} and {budget}")
    problem = _RingProblem(places, rate, delay, tuple(start or ()), forbidden)
    if len(places) < 3:
        return problem.only_ring()
    found, bound, reason = problem.exactly() if len(places) <= EXACT_MEMBERS else problem.by_search(seed, budget)
    if found is None:
        return NoRing(bound == -math.inf, reason)
    return problem.keep_or_change(found, bound, reason, margin)


class _RingProblem:
    """One problem. Members are the places 0..n-1, in the order of their ids."""

    def __init__(
        self, members: list[int], rate: Figure, delay: Figure, start: tuple[int, ...], forbidden: Set[Edge]
    ) -> None:
        self._members = members
        self._rate_of = rate
        self._delay_of = delay
        self._start = start
        self._forbidden = forbidden
        self._rate = _matrix(members, rate, forbidden)
        self._cost = self._costs(delay)

    def only_ring(self) -> Solution | NoRing:
        ring = self._rotated(self._members)
        if any(edge in self._forbidden for edge in edges_of(ring)):
            return NoRing(True, "two members have one ring, and it needs a forbidden edge")
        return self._solution(ring, self._value(ring)[0], True, ring == self._start, "there is no other ring")

    def exactly(self) -> tuple[tuple[int, ...] | None, float, str]:
        slowest = fastest_bottleneck(self._rate)
        if slowest == -math.inf:
            return None, slowest, "every ring needs a forbidden edge"
        allowed = np.where(self._rate >= slowest, self._rate, -np.inf)
        return self._named(largest_sum_ring(allowed, self._cost)), slowest, "proven best"

    def by_search(self, seed: int, budget: int) -> tuple[tuple[int, ...] | None, float, str]:
        random = search.SplitMix64(seed)
        bound = search.bound(self._rate)
        if bound == -math.inf:
            return None, bound, "every ring needs a forbidden edge"
        ring, left = self._fast_ring(bound, random, budget)
        if ring is None:
            return None, bound, f"no ring without a forbidden edge was found in {budget} steps"
        ring = SegmentExchange(self._rate, self._cost, self._rate >= self._slowest(ring), random, left).improve(ring)
        slowest = self._slowest(ring)
        how = "proven best" if slowest >= bound else f"{slowest / bound:.1%} of the bound"
        return self._named(ring), bound, f"slowest link {how}, the rest by search"

    def _fast_ring(self, bound: float, random: search.SplitMix64, budget: int) -> tuple[list[int] | None, int]:
        """A ring with the fastest slowest link that the search finds, and the remaining steps.

        The bound is tried first, then the middle between the last level that failed and the best ring so far.
        """
        levels = np.unique(self._rate[np.isfinite(self._rate)])
        levels = levels[levels <= bound][::-1]
        left = budget * CHANGES
        half, attempt = left // 2, left // 2 // ATTEMPTS
        best = self._present()
        if best is None:
            best, used = search.ring_within(search.rows_of(self._rate >= levels[-1]), [], random, half)
            best, left = best or self._last_resort(), left - used
        if best is None:
            return None, 0
        fails = -1
        while fails + 1 < (fits := int(np.searchsorted(-levels, -self._slowest(best)))) and left > half:
            level = (fails + fits) // 2 if fails >= 0 else 0
            rows = search.rows_of(self._rate >= levels[level])
            ring, used = search.ring_within(rows, self._hint(best), random, attempt)
            best, left = ring or best, left - used
            if ring is None:
                fails = level
        return best, left // CHANGES

    def _last_resort(self) -> list[int] | None:
        ring = ring_order(self._members, self._forbidden)
        return ring and [self._members.index(member) for member in ring]

    def _present(self) -> list[int] | None:
        """The present ring as places, if it has these members and no forbidden edge."""
        if sorted(self._start) != self._members or self._value(self._start)[0] == -math.inf:
            return None
        return [self._members.index(member) for member in self._start]

    def _hint(self, ring: list[int]) -> list[int]:
        successor = [-1] * len(self._members)
        for source, target in edges_of(ring):
            successor[source] = target
        return successor

    def _slowest(self, ring: list[int]) -> float:
        return float(self._rate[ring, np.roll(ring, -1)].min())

    def keep_or_change(self, found: tuple[int, ...], bound: float, reason: str, margin: float) -> Solution:
        proven = len(self._members) <= EXACT_MEMBERS
        if self._present() is None:
            return self._solution(found, bound, proven, False, reason)
        gain = self._clearly_better(self._value(found), self._value(self._start), margin)
        if gain:
            return self._solution(found, bound, proven, False, f"{gain}; {reason}")
        best = proven and self._value(found) == self._value(self._start)
        within = f" by more than {margin:.0%}" if margin else ""
        return self._solution(self._start, bound, best, True, f"kept: no ring that was found is better{within}")

    @staticmethod
    def _clearly_better(new: tuple[float, ...], old: tuple[float, ...], margin: float) -> str:
        """In which objective the new ring is better by more than the margin; empty: in none."""
        if new[0] > old[0] * (1 + margin):
            return f"the slowest link goes from {old[0]:.3g} to {new[0]:.3g} B/s"
        if new[0] >= old[0] and new[1] > old[1] * (1 + margin):
            return f"the slowest link stays, the sum goes from {old[1]:.3g} to {new[1]:.3g} B/s"
        if new[0] >= old[0] and new[1] >= old[1] and new[2] < old[2] * (1 - margin):
            return f"rates stay, the sum of delays goes from {old[2]:.3g} to {new[2]:.3g}"
        return ""

    def _value(self, ring: Sequence[int]) -> tuple[float, float, float]:
        """Slowest, sum and delay, in the whole numbers that rings are compared by."""
        edges = edges_of(ring)
        if not edges or any(edge in self._forbidden for edge in edges):
            return (-math.inf if edges else 0.0), 0.0, 0.0
        rates = [float(round(self._rate_of(*edge))) for edge in edges]
        return min(rates), sum(rates), sum(float(round(self._delay_of(*edge))) for edge in edges)

    def _solution(self, ring: tuple[int, ...], bound: float, exact: bool, kept: bool, reason: str) -> Solution:
        slowest, total, delay = self._value(ring)
        return Solution(self._rotated(ring), slowest, total, delay, bound, exact, kept, reason)

    def _named(self, places: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._members[place] for place in places)

    def _rotated(self, ring: Sequence[int]) -> tuple[int, ...]:
        """The ring rotated to begin at the first member of the present one."""
        if not ring:
            return ()
        first = self._start[0] if self._start and self._start[0] in self._members else min(ring)
        place = ring.index(first)
        return (*ring[place:], *ring[:place])

    def _costs(self, delay: Figure) -> Matrix:
        """Delays, and as the last digit whether the link is new."""
        present = set(edges_of(self._start))
        size = len(self._members)
        costs = np.zeros((size, size))
        for (i, source), (j, target) in _links(self._members):
            figure = round(_checked("delay", source, target, delay(source, target)))
            costs[i, j] = figure * (size + 1) + ((source, target) not in present)
        return costs


def _matrix(members: list[int], rate: Figure, forbidden: Set[Edge]) -> Matrix:
    rates = np.full((len(members), len(members)), -np.inf)
    for (i, source), (j, target) in _links(members):
        figure = _checked("rate", source, target, rate(source, target))
        if (source, target) not in forbidden:
            rates[i, j] = round(figure)
    return rates


def _links(members: list[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(a, b) for a in enumerate(members) for b in enumerate(members) if a != b]


def _checked(what: str, source: int, target: int, figure: float) -> float:
    if not 0 <= figure <= _MAX_FIGURE:
        raise UsageError(f"link {source}->{target}: a {what} of {figure}")
    return figure


# The exact solution for few members: dynamic programming over sets of members (Held and Karp).
#
# A ring may be read from any member, so let it begin at place 0. For every set of other places and every place v in it,
# the table has the best path that begins at 0, visits exactly the set, and ends at v. A path to v over a set is a path
# over the set without v, plus one link. Sets are taken by size, all sets of one size at once: NumPy computes the
# n * 2^n entries with n comparisons each, which is 3.9 million for 16 members.
#
# It is done twice. First for the slowest link: the value of a path is its slowest link. Then for the rest, with only
# the links that are at least that fast: the value of a path is its sum of rates, and among equal sums its lower cost.
# Rates and costs are whole numbers (in floats, exact up to 2^53), so equal sums are equal.


def fastest_bottleneck(rate: Matrix) -> float:
    """The slowest link of the ring whose slowest link is fastest; -inf if every ring needs a link of -inf."""
    size = len(rate)
    width = np.full((1 << (size - 1), size - 1), -np.inf)
    for place in range(size - 1):
        width[1 << place, place] = rate[0, place + 1]
    for place, sets, before in _sets_by_size(size - 1):
        width[sets, place] = np.minimum(width[before], rate[1:, place + 1]).max(axis=1)
    return float(np.minimum(width[-1], rate[1:, 0]).max())


def largest_sum_ring(rate: Matrix, cost: Matrix) -> list[int]:
    """The ring with the largest sum of rates, then the smallest sum of costs; a rate of -inf means no link.

    A ring without such a link must exist. Among equals the result is always the same one.
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
    """Read the ring from its end: at each step, the lowest place that is a predecessor on the best path."""
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
