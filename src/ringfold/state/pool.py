"""Which block a receiver requests next, and from which source. Pure: a leaf of `fetch.py`.

All blocks that may be fetched are numbered through, key after key. A block is *free* while it is wanted and asked of
nobody. Receivers of one sync begin at different places of the numbering (`start`) and go around: so each takes another
part of the state from the holders first, and finds the rest at its *fellows*, the other receivers, when it gets there.

A fellow is asked only for what it announced. A holder has everything, but what a fellow has as well comes last there:
the holders' links are the narrow place when many peers join at once.

The heaps are cleaned lazily: a block may lie in several of them, and counts only while it is free.
"""

from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush

from ringfold.wire.messages import PeerId


class BlockPool:
    """The free blocks. What is taken out is the caller's until it is put back."""

    def __init__(self, total: int, start: int) -> None:
        self._total, self._start = total, start
        self._free: set[int] = set()
        self._rare: list[int] = []
        """Blocks as distances from `start`, a heap: those that no fellow had when they were last looked at."""
        self._common: list[int] = []
        self._held: dict[PeerId, bytearray] = {}
        self._of_fellow: dict[PeerId, list[int]] = {}
        self._refused: dict[int, set[PeerId]] = {}

    def put(self, blocks: Iterable[int]) -> None:
        """These are wanted, and asked of nobody."""
        fresh = [block for block in blocks if block not in self._free]
        self._free.update(fresh)
        places = [self._place(block) for block in fresh]
        _push_all(self._rare, places)
        for fellow, held in self._held.items():
            theirs = [place for place, block in zip(places, fresh, strict=True) if held[block]]
            _push_all(self._of_fellow[fellow], theirs)

    def announce(self, fellow: PeerId, first: int, last: int) -> None:
        """A fellow has the blocks from `first` up to `last`."""
        held = self._held.setdefault(fellow, bytearray(self._total))
        heap = self._of_fellow.setdefault(fellow, [])
        new = [block for block in range(first, last) if block in self._free and not held[block]]
        held[first:last] = b"\1" * (last - first)
        _push_all(heap, [self._place(block) for block in new])

    def forget(self, fellow: PeerId) -> None:
        """A fellow is gone, with what it had."""
        self._held.pop(fellow, None)
        self._of_fellow.pop(fellow, None)

    def refuse(self, peer: PeerId, block: int) -> None:
        """Never take this block from this peer again."""
        self._refused.setdefault(block, set()).add(peer)

    def take(self, peer: PeerId, is_holder: bool, most: int, cost: Callable[[int], int]) -> list[int]:
        """The next blocks for this source, as many as `most` pays for, but at least one if it has any."""
        heaps = [self._rare, self._common] if is_holder else [self._of_fellow.get(peer, [])]
        taken: list[int] = []
        aside: list[int] = []
        for heap in heaps:
            while heap:
                place = heappop(heap)
                block = (place + self._start) % self._total
                if block not in self._free:
                    continue
                if heap is self._rare and any(held[block] for held in self._held.values()):
                    heappush(self._common, place)
                    continue
                if peer in self._refused.get(block, ()):
                    aside.append(place)
                    continue
                if taken and cost(block) > most:
                    heappush(heap, place)
                    break
                most -= cost(block)
                self._free.remove(block)
                taken.append(block)
            if taken:
                break
        if is_holder:
            _push_all(self._rare, aside)
        return taken

    def sources_of(self, block: int, holders: Iterable[PeerId], hopes: Iterable[PeerId]) -> bool:
        """Whether this block can still come from one of `holders`, from a fellow, or from one who may get it yet."""
        refused = self._refused.get(block, ())
        with_it = (fellow for fellow, held in self._held.items() if held[block])
        return any(peer not in refused for peers in (holders, with_it, hopes) for peer in peers)

    def holds_any(self, fellow: PeerId, first: int, last: int) -> bool:
        """Whether a fellow announced one of these blocks."""
        held = self._held.get(fellow)
        return held is not None and held.find(1, first, last) >= 0

    @property
    def has_refused(self) -> bool:
        """Whether anybody gave a block wrongly."""
        return bool(self._refused)

    @property
    def free(self) -> frozenset[int]:
        """All free blocks."""
        return frozenset(self._free)

    @property
    def refused(self) -> list[int]:
        """The free blocks that somebody gave wrongly."""
        return sorted(block for block in self._refused if block in self._free)

    def refused_of(self, peers: Collection[PeerId]) -> list[int]:
        """The blocks that all of these gave wrongly."""
        return [block for block, by in self._refused.items() if by.issuperset(peers)]

    def _place(self, block: int) -> int:
        return (block - self._start) % self._total


def _push_all(heap: list[int], places: list[int]) -> None:
    if len(places) > len(heap):
        heap.extend(places)
        heapify(heap)
    else:
        for place in places:
            heappush(heap, place)
