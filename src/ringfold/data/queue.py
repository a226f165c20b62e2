"""The queue of a pass: which positions of its order are still to be consumed, how a step's shares are cut from it, and
what becomes of them.

A *position* is a place in the order of a pass (`order.py`). The queue is what was given out and came back (`redo`,
sorted ranges of positions), then everything from `cursor` on. A step takes the front of it:

    redo [3,5) [9,12)   cursor 20            three members, 4 samples each
    shares  [3,5) [9,11)  |  [11,12) [20,23)  |  [23,27)
    the second one does not contribute  ->  redo [11,12) [20,23)   cursor 27

Nothing is padded and nothing is repeated: where fewer samples are left than a step takes, the shares are as even as
they can be, and some may be empty. A step takes samples of one pass. The pass is over when all are consumed.

What comes back is taken first, so `redo` never holds more samples than a step takes. Its *ranges* are limited, because
the queue is kept in arrays of a fixed size. A step can add one range per member, where the end of a share splits one.
If that might exceed the limit, the step is cut in another way: each member takes the front of a range of its own, and
nothing new. What comes back then joins the rest of its range, so that the ranges cannot become more.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""Positions from the first number up to the second, without it."""
Pieces = tuple[Range, ...]
"""One share: ranges of positions, sorted."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Where a pass stands."""

    size: int
    passes_done: int = 0
    cursor: int = 0
    redo: tuple[Range, ...] = ()

    @property
    def left(self) -> int:
        """How many samples of this pass are not consumed yet."""
        return self.size - self.cursor + count(self.redo)

    def cut(self, members: int, each: int, max_ranges: int) -> list[Pieces]:
        """The shares of a step with so many members, in their order."""
        if len(self.redo) + members + 1 > max_ranges:
            fronts = [((first, min(last, first + each)),) for first, last in self.redo[:members]]
            return [*fronts, *[()] * (members - len(fronts))]
        total = min(members * each, self.left)
        sizes = [total // members + (place < total % members) for place in range(members)]
        waiting = [*self.redo, (self.cursor, self.size)]
        waiting.reverse()
        return [_take(waiting, wanted) for wanted in sizes]

    def settle(self, shares: Sequence[Pieces], consumed: Collection[int]) -> "Queue":
        """The queue after a step: the shares at the places `consumed` are done with, the others come back."""
        taken = [piece for share in shares for piece in share]
        back = [piece for place, share in enumerate(shares) if place not in consumed for piece in share]
        cursor = max([self.cursor, *(last for _, last in taken)])
        redo = joined([*_without(self.redo, taken), *back])
        if redo and redo[-1][1] == cursor:
            cursor = redo.pop()[0]
        if cursor == self.size and not redo:
            return Queue(self.size, self.passes_done + 1)
        return Queue(self.size, self.passes_done, cursor, tuple(redo))


def count(ranges: Sequence[Range]) -> int:
    return sum(last - first for first, last in ranges)


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same positions in as few ranges as possible, sorted."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        elif first < last:
            found.append((first, last))
    return found


def _take(waiting: list[Range], wanted: int) -> Pieces:
    """So many positions from the front, which is the end of the list."""
    pieces = []
    while wanted:
        first, last = waiting.pop()
        end = min(last, first + wanted)
        if end < last:
            waiting.append((end, last))
        if first < end:
            pieces.append((first, end))
        wanted -= end - first
    return tuple(pieces)


def _without(ranges: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """What is left of the ranges. What was taken of one is its front."""
    gone: dict[int, int] = {}
    for first, last in joined(taken):
        gone[first] = last
    left = []
    for first, last in ranges:
        left.append((min(last, gone.get(first, first)), last))
    return left
