"""Search for a good ring over many members: first for the slowest link, then for the sum of rates.

**The slowest link: a walk over covers.** Take only the links that are at least as fast as some *threshold*. A *cover*
gives every member one successor over such links, and every member one predecessor: it is a set of disjoint cycles. A
ring is a cover with one cycle.

Covers are easy to find (a bipartite matching), and easy to change: give a member a new successor, and reassign others
along an alternating path until every member has one again. The walk does that with a link from one cycle to another,
because that is what joins them, along a short path. It keeps the change if there are no more cycles than before (and
occasionally if there are more, or it would get stuck). In a random graph that has a ring, it takes some dozens of
changes. It is a search: not finding a ring proves nothing. The bound does prove something.

The *bound* is the fastest threshold at which every member can reach every other one, there is a cover, and whichever
member is removed, some other one still reaches all the rest and some other one is still reached by all. A ring has all
of that (without one member it is a path, with a first and a last), so no ring has a faster slowest link.

Sets of members are Python integers, bit i for place i.

**The sum of rates: exchanging segments (or-3-opt).** Cut the ring behind the places i < j < k, and exchange the two
segments between the cuts. Every segment keeps its direction: a link back is another link. Three links are replaced. Let
m[a, b] be the gain when the member at a is followed by the successor of b, instead of by its own. Then the exchange
gains m[i, j] + m[j, k] + m[k, i], so all pairs (j, k) of one i are evaluated with three additions of matrices: a *row*.
The best of a row is taken if it gains. When no row does, the ring is *kicked* (the double bridge: four segments are put
in the reverse order, which no single exchange can undo), improved again, and the better ring is kept.

A link that is not allowed gains a very negative amount. So a kick may use some, and the exchanges remove them again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Rows = list[int]

WORSE_ONE_IN = 24
"""How often the walk accepts a change that makes more cycles."""
ROW_PAIRS = 64 * 64


class SplitMix64:
    """Pseudo-random numbers that depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._state = seed & 0xFFFF_FFFF_FFFF_FFFF

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF
        mixed = self._state
        mixed = ((mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9) & 0xFFFF_FFFF_FFFF_FFFF
        mixed = ((mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB) & 0xFFFF_FFFF_FFFF_FFFF
        return (mixed ^ mixed >> 31) % limit


def rows_of(allowed: npt.NDArray[np.bool_]) -> Rows:
    """Row i as a set of places."""
    packed = np.packbits(allowed, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def bound(rate: Matrix) -> float:
    """No ring has a slowest link faster than this; -inf if there is no ring without a link of -inf."""
    levels = np.unique(rate[np.isfinite(rate)])
    low, high = 0, len(levels)  # levels[:low] pass, levels[high:] do not
    while low < high:
        middle = (low + high) // 2
        if _may_hold_a_ring(rate >= levels[middle]):
            low = middle + 1
        else:
            high = middle
    return float(levels[low - 1]) if low else float("-inf")


def _may_hold_a_ring(allowed: npt.NDArray[np.bool_]) -> bool:
    rows, columns = rows_of(allowed), rows_of(allowed.T)
    all_members = (1 << len(rows)) - 1
    return (
        _reached(rows, 0, all_members) == all_members == _reached(columns, 0, all_members)
        and cover_of(rows, []) is not None
        and all(
            _one_reaches_all(side, all_members ^ 1 << place) for place in range(len(rows)) for side in (rows, columns)
        )
    )


def _one_reaches_all(rows: Rows, inside: int) -> bool:
    """Whether some place reaches all the others without leaving the set."""
    left, last = inside, 0
    while left:
        last = (left & -left).bit_length() - 1
        left &= ~_reached(rows, last, left)
    # If any place does, the last one that had to be tried does: none before it reached it.
    return _reached(rows, last, inside) == inside


def _reached(rows: Rows, start: int, inside: int) -> int:
    seen = fresh = 1 << start
    while fresh:
        place = (fresh & -fresh).bit_length() - 1
        grown = rows[place] & inside & ~seen
        seen |= grown
        fresh = fresh & (fresh - 1) | grown
    return seen


def cover_of(rows: Rows, hint: Sequence[int]) -> list[int] | None:
    """Every place's successor, keeping those of the hint that the rows allow (-1: none); None if there is no cover."""
    successor, predecessor = [-1] * len(rows), [-1] * len(rows)
    for place, after in enumerate(hint):
        if after >= 0 and rows[place] >> after & 1 and predecessor[after] < 0:
            successor[place], predecessor[after] = after, place
    for place in range(len(rows)):
        if successor[place] < 0 and not _augment(rows, successor, predecessor, place, 0, 0):
            return None
    return successor


def _augment(rows: Rows, successor: list[int], predecessor: list[int], start: int, taken: int, turn: int) -> bool:
    """Give `start` a successor; others on a shortest alternating path get another one. `taken` successors stay.

    `turn` is the place at which the search begins, so that different turns find different paths.
    """
    came_from: dict[int, int] = {}
    open_to = ~taken
    queue = [start]
    for place in queue:
        found = rows[place] & open_to
        open_to &= ~found
        upper = found >> turn << turn
        for part in (upper, found ^ upper):
            while part:
                after = (part & -part).bit_length() - 1
                part &= part - 1
                came_from[after] = place
                if predecessor[after] < 0:
                    _move_up(successor, predecessor, came_from, start, after)
                    return True
                queue.append(predecessor[after])
    return False


def _move_up(successor: list[int], predecessor: list[int], came_from: dict[int, int], start: int, after: int) -> None:
    while True:
        place = came_from[after]
        freed = successor[place]
        successor[place], predecessor[after] = after, place
        if place == start:
            return
        after = freed


def cycles_of(successor: Sequence[int]) -> tuple[int, list[int]]:
    """The number of cycles, and for every place the set of places in its cycle."""
    cycle = [0] * len(successor)
    count = 0
    for start in range(len(successor)):
        if cycle[start]:
            continue
        count += 1
        inside, place = [start], successor[start]
        while place != start:
            inside.append(place)
            place = successor[place]
        together = sum(1 << place for place in inside)
        for place in inside:
            cycle[place] = together
    return count, cycle


def ring_within(rows: Rows, hint: Sequence[int], random: SplitMix64, steps: int) -> tuple[list[int] | None, int]:
    """A ring over allowed links as a list of places, or None if none was found; and how many steps it took.

    `hint` has every place's successor in a ring to start from, or -1.
    """
    successor = cover_of(rows, hint)
    if successor is None:
        return None, 1
    count, cycle = cycles_of(successor)
    used = 1
    while count > 1 and used < steps:
        used += 1
        changed = _changed(rows, successor, cycle, random)
        if changed is None:
            continue
        new_count, new_cycle = cycles_of(changed)
        if new_count <= count or random.below(WORSE_ONE_IN) == 0:
            successor, count, cycle = changed, new_count, new_cycle
    return (_read(successor) if count == 1 else None), used


def _changed(rows: Rows, successor: list[int], cycle: list[int], random: SplitMix64) -> list[int] | None:
    """The cover with a new link between two cycles; None if no such link leaves the place that was drawn."""
    size = len(rows)
    place = random.below(size)
    out = rows[place] & ~cycle[place]
    if not out:
        return None
    nth = random.below(out.bit_count())
    for _ in range(nth):
        out &= out - 1
    after = (out & -out).bit_length() - 1
    successor = list(successor)
    predecessor = [0] * size
    for before, its in enumerate(successor):
        predecessor[its] = before
    robbed, freed = predecessor[after], successor[place]
    successor[place], predecessor[after] = after, place
    successor[robbed], predecessor[freed] = -1, -1
    if _augment(rows, successor, predecessor, robbed, 1 << after, random.below(size)):
        return successor
    return None


def _read(successor: Sequence[int]) -> list[int]:
    ring = [0]
    while successor[ring[-1]] != 0:
        ring.append(successor[ring[-1]])
    return ring


class SegmentExchange:
    """Improves one ring. Rates and costs are whole numbers; a step is a row, or ROW_PAIRS pairs of it."""

    def __init__(
        self, rate: Matrix, cost: Matrix, allowed: npt.NDArray[np.bool_], random: SplitMix64, steps: int
    ) -> None:
        size = len(rate)
        worst = -1.0 - size * float(rate[allowed].max())
        self._rate = np.where(allowed, rate, worst)
        self._cost = cost
        self._random = random
        self._upper = np.where(np.triu(np.ones((size, size), dtype=bool), 1), 0.0, -np.inf)
        self._row_steps = max(1, size * size // ROW_PAIRS)
        self._steps_left = steps

    def improve(self, ring: Sequence[int]) -> list[int]:
        """A ring at least as good as the given one. It uses allowed links only if the given one does."""
        best = self._settle(np.array(ring, dtype=np.intp))
        value = self._value(best)
        while self._steps_left > 0 and len(best) >= 8:
            tried = self._settle(self._kick(best))
            if (new := self._value(tried)) > value:
                best, value = tried, new
        return [int(place) for place in best]

    def _value(self, ring: npt.NDArray[np.intp]) -> tuple[float, float]:
        after = np.roll(ring, -1)
        return float(self._rate[ring, after].sum()), -float(self._cost[ring, after].sum())

    def _kick(self, ring: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        size = len(ring)
        length = min(size, 24)  # near each other, so that most of the ring is kept
        turned = np.roll(ring, -self._random.below(size))
        cuts: set[int] = set()
        while len(cuts) < 3:
            cuts.add(1 + self._random.below(length - 1))
        a, b, c = sorted(cuts)
        return np.concatenate([turned[:a], turned[c:length], turned[b:c], turned[a:b], turned[length:]])

    def _settle(self, ring: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Exchange segments until no row gains."""
        quiet, row = 0, 0
        while quiet < len(ring) and self._steps_left > 0:
            self._steps_left -= self._row_steps
            better = self._best_of_row(np.roll(ring, -row))
            if better is None:
                quiet += 1
                row = (row + 1) % len(ring)
            else:
                ring, quiet, row = better, 0, 0
        return ring

    def _best_of_row(self, ring: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | None:
        """The best exchange with a cut behind the first place, if it gains: a larger sum, or an equal one for less."""
        gain = self._row(self._rate, ring)
        most = gain.max(initial=-np.inf)
        if most < 0:
            return None
        costs = np.where(gain == most, self._row(self._cost, ring), np.inf)
        j, k = divmod(int(costs.argmin()), costs.shape[1])
        if most == 0 and costs[j, k] >= 0:
            return None
        j, k = j + 1, k + 1
        return np.concatenate([ring[:1], ring[j + 1 : k + 1], ring[1 : j + 1], ring[k + 1 :]])

    def _row(self, value: Matrix, ring: npt.NDArray[np.intp]) -> Matrix:
        """m[0, j] + m[j, k] + m[k, 0] for all 0 < j < k, at [j - 1, k - 1]."""
        after = np.roll(ring, -1)
        m = value[np.ix_(ring, after)]
        m = m - m.diagonal()[:, None]
        return m[0, 1:, None] + m[1:, 1:] + m[1:, 0] + self._upper[1:, 1:]
