"""A ring whose links are all fast enough, for many members: a walk over covers.

Take only the links that are at least as fast as some *threshold*. A *cover* sends every member to one successor over
such links, and to every member one predecessor: it is a set of disjoint cycles. A ring is a cover with one cycle.

Covers are easy to find (a bipartite matching), and easy to change: give a member a new successor, and let the others
move up along an alternating path until everybody has one again. The walk does that with a link from one cycle to
another, which is what must happen to join them, along a short path, and keeps the change if there are no more cycles
than before (and now and then if there are more, or it would get stuck). In a random graph that has a ring at all, it
takes some dozens of changes. It is a search: not finding a ring proves nothing. What does prove something is the bound.

The *bound* is the fastest threshold at which every member can reach every other one, there is a cover, and whichever
member is taken out, some other one still reaches all the rest and some other one is still reached by all. A ring has
all of that (without one member it is a path, with a first and a last), so no ring has a faster slowest link.

Sets of members are Python integers, bit i for place i.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Rows = list[int]

WORSE_ONE_IN = 24
"""How often the walk takes a change that makes more cycles."""


class Draw:
    """Numbers that look random and follow from the seed alone (the splitmix64 generator)."""

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
    everybody = (1 << len(rows)) - 1
    return (
        _reached(rows, 0, everybody) == everybody == _reached(columns, 0, everybody)
        and cover_of(rows, []) is not None
        and all(
            _one_reaches_all(side, everybody ^ 1 << place) for place in range(len(rows)) for side in (rows, columns)
        )
    )


def _one_reaches_all(rows: Rows, inside: int) -> bool:
    """Whether some place reaches all the others without leaving the set."""
    left, last = inside, 0
    while left:
        last = (left & -left).bit_length() - 1
        left &= ~_reached(rows, last, left)
    # If any place does, the last one that had to be tried does: nobody before it reached it.
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

    `turn` says with which place to begin to look, so that different turns find different paths.
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
    """How many cycles, and for every place the set of places in its cycle."""
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


def ring_within(rows: Rows, hint: Sequence[int], draw: Draw, steps: int) -> tuple[list[int] | None, int]:
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
        changed = _changed(rows, successor, cycle, draw)
        if changed is None:
            continue
        new_count, new_cycle = cycles_of(changed)
        if new_count <= count or draw.below(WORSE_ONE_IN) == 0:
            successor, count, cycle = changed, new_count, new_cycle
    return (_read(successor) if count == 1 else None), used


def _changed(rows: Rows, successor: list[int], cycle: list[int], draw: Draw) -> list[int] | None:
    """The cover with a link from one cycle to another in it; None if none leads out of a place that was drawn."""
    size = len(rows)
    place = draw.below(size)
    out = rows[place] & ~cycle[place]
    if not out:
        return None
    nth = draw.below(out.bit_count())
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
    if _augment(rows, successor, predecessor, robbed, 1 << after, draw.below(size)):
        return successor
    return None


def _read(successor: Sequence[int]) -> list[int]:
    ring = [0]
    while successor[ring[-1]] != 0:
        ring.append(successor[ring[-1]])
    return ring
