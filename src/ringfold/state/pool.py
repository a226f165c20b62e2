"""Which block a receiver requests next, and from which source. Pure: a leaf of `fetch.py`.

All blocks that may be fetched are numbered consecutively, key after key. A block is *free* while it is wanted and not
requested from any source. The receivers of one sync begin at different positions of the numbering (`start`) and wrap
around. So each takes another part of the state from the holders first, and finds the rest at the *relays*, the other
receivers, when it gets there.

A relay is sent requests only for what it announced. A holder has everything, but what a relay has as well is requested
from a holder last: the holders' links are the bottleneck when many peers join at once.

The heaps are cleaned lazily: a block may be in several of them, and counts only while it is free.
"""

from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush

from ringfold.wire.messages import PeerId


class BlockPool:
    """The free blocks. A block that is taken belongs to the caller until it is put back."""

    def __init__(self, total: int, start: int) -> None:
        self._total, self._start = total, start
        self._free: set[int] = set()
        self._rare: list[int] = []
        """A heap of blocks, as distances from `start`: those that no relay had when they were last considered."""
        self._common: list[int] = []
        self._held: dict[PeerId, bytearray] = {}
        self._by_relay: dict[PeerId, list[int]] = {}
        self._refused: dict[int, set[PeerId]] = {}

    def put(self, blocks: Iterable[int]) -> None:
        """These are wanted, and not requested from any source."""
        fresh = [block for block in blocks if block not in self._free]
        self._free.update(fresh)
        places = [self._place(block) for block in fresh]
        _push_all(self._rare, places)
        for relay, held in self._held.items():
            theirs = [place for place, block in zip(places, fresh, strict=True) if held[block]]
            _push_all(self._by_relay[relay], theirs)

    def announce(self, relay: PeerId, first: int, last: int) -> None:
        """A relay has the blocks from `first` up to `last`."""
        held = self._held.setdefault(relay, bytearray(self._total))
        heap = self._by_relay.setdefault(relay, [])
        new = [block for block in range(first, last) if block in self._free and not held[block]]
        held[first:last] = b"\1" * (last - first)
        _push_all(heap, [self._place(block) for block in new])

    def forget(self, relay: PeerId) -> None:
        """A relay is lost, with what it had."""
        self._held.pop(relay, None)
        self._by_relay.pop(relay, None)

    def refuse(self, peer: PeerId, block: int) -> None:
        """Never take this block from this peer again."""
        self._refused.setdefault(block, set()).add(peer)

    def take(self, peer: PeerId, is_holder: bool, max_cost: int, cost: Callable[[int], int]) -> list[int]:
        """The next blocks for this source, of a total cost up to `max_cost`, but at least one if it has any."""
        heaps = [self._rare, self._common] if is_holder else [self._by_relay.get(peer, [])]
        taken: list[int] = []
        skipped: list[int] = []
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
                    skipped.append(place)
                    continue
                if taken and cost(block) > max_cost:
                    heappush(heap, place)
                    break
                max_cost -= cost(block)
                self._free.remove(block)
                taken.append(block)
            if taken:
                break
        if is_holder:
            _push_all(self._rare, skipped)
        return taken

    def has_source(self, block: int, holders: Iterable[PeerId], candidates: Iterable[PeerId]) -> bool:
        """Whether this block can still come from a holder, from a relay, or from a candidate, which may get it yet."""
        refused = self._refused.get(block, ())
        with_it = (relay for relay, held in self._held.items() if held[block])
        return any(peer not in refused for peers in (holders, with_it, candidates) for peer in peers)

    def holds_any(self, relay: PeerId, first: int, last: int) -> bool:
        """Whether a relay announced one of these blocks."""
        held = self._held.get(relay)
        return held is not None and held.find(1, first, last) >= 0

    @property
    def has_refused(self) -> bool:
        """Whether any source sent a block wrong."""
        return bool(self._refused)

    @property
    def free(self) -> frozenset[int]:
        """All free blocks."""
        return frozenset(self._free)

    @property
    def refused(self) -> list[int]:
        """The free blocks that some source sent wrong."""
        return sorted(block for block in self._refused if block in self._free)

    def refused_of(self, peers: Collection[PeerId]) -> list[int]:
        """The blocks that all of these sent wrong."""
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
