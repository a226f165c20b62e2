"""How one receiver of a sync gets what it lacks. Pure: what happened in, what to do out; the shell owns connections.

Terms. A *source* is a peer from which blocks can be fetched: a *holder* has them all; a *relay* is another receiver,
and has what it announced. The *window* is what may be outstanding at one source. It is requested in *batches*, so that
the next one is in flight while the last one arrives.

The life of a block: the hash list of its key comes from some source and is checked against the key's root, which the
master sent. If the hash of the block differs from the one that is here, the block is wanted. It is requested from a
source that has room in its window. It arrives verified, or wrong, or not at all. If it is wrong or does not arrive, it
is wanted again; a source that sent it wrong is not used for it again. If it is verified, it is announced to the relays,
and never requested again.

Invariants:
- A block is requested from at most one source at a time: bytes are received right into the array, and two writers at
  once would leave neither's. So a source that is no longer trusted is dropped (its connection is closed) *before* its
  blocks are requested elsewhere: the effects are carried out in the order in which they are returned.
- A hash list counts only if it has the root, and a block only if it has its hash. So a source that lies can waste time,
  but do no damage (with rf64: unless it forges hashes on purpose).

When is a receiver stuck? A receiver that is complete, has lost all holders, or lacks only what all of them sent wrong,
reports that by announcing nothing (an empty list) after it announced everything. From then on it can get only
what some relay has, and relays announce everything to each other. So a block that can come from no holder, that no
relay has, and that no relay with a holder may still get, will never come: then, and only then, the receiver is stuck.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ringfold.state.blocks import (
    BLOCK_BYTES,
    BlockRange,
    BlockRef,
    block_count,
    block_range,
    block_ref,
    digest_bytes,
    root_hash,
)
from ringfold.state.fetch_effects import (
    AnnounceBlocks,
    CorruptBlock,
    DropSource,
    FetchComplete,
    FetchEffect,
    FetchStuck,
    RequestBlocks,
    RequestHashes,
    WantedKey,
)
from ringfold.state.pool import BlockPool
from ringfold.wire.messages import HashKind, PeerId

WINDOW_BLOCKS = 4
"""A window is as large as so many whole blocks, and a batch as one."""
BATCH_BLOCKS = 1024
"""The most blocks in a batch, however small they are."""
HASHES_KEYS = 1024
"""How many keys' hash lists are requested at once,"""
HASHES_BYTES = 1 << 20
"""and how long they may be together, unless it is the list of one key."""
MAX_WRONG_BLOCKS = 3
"""After so many wrong blocks a source is not used any more."""


@dataclass(slots=True)
class _Key:
    """A key that is fetched. Its blocks are numbered from `base` on."""

    wanted: WantedKey
    base: int
    count: int
    hashes: bytes | None = None


@dataclass(slots=True)
class _Source:
    """A peer that may send blocks. It is expected from the start, `ready` when connected, and lost when not `live`."""

    peer: PeerId
    is_holder: bool
    ready: bool = False
    live: bool = True
    trusted: bool = True
    at_end: bool = False
    """A relay that will have nothing new any more, except from other relays."""
    owed_hashes: set[int] = field(default_factory=set)
    """Keys whose hash lists were requested from it."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    outstanding: int = 0
    wrong: int = 0


class Fetch:
    """One receiver's progress. Call `start`, then one method per event; carry out what they return, in order."""

    def __init__(
        self,
        wanted: Sequence[WantedKey],
        kind: HashKind,
        holders: Iterable[PeerId],
        relays: Iterable[PeerId] = (),
        place: tuple[int, int] = (0, 1),
        block_bytes: int = BLOCK_BYTES,
        window_bytes: int | None = None,
    ) -> None:
        """`place` (i, n): this is the i-th of n receivers, counted from 0. Each begins with other blocks."""
        self._kind = kind
        self._digest = digest_bytes(kind)
        self._block_bytes = block_bytes
        self._window = WINDOW_BLOCKS * block_bytes if window_bytes is None else window_bytes
        base = 0
        self._keys: list[_Key] = []
        for each in sorted(wanted, key=lambda each: each.key):
            count = block_count(each.nbytes, block_bytes)
            assert len(each.own) == count * self._digest, "the hash list of what is here does not fit its size"
            self._keys.append(_Key(each, base, count))
            base += count
        self._total = base
        self._bases = [key.base for key in self._keys]
        self._by_number = {key.wanted.key: key for key in self._keys}
        turn, receivers = place
        start = base * turn // receivers if base else 0
        self._pool = BlockPool(base, start)
        first = max(bisect_right(self._bases, start) - 1, 0)
        self._unrequested = deque(key.wanted.key for key in self._keys[first:] + self._keys[:first])
        self._unlisted = len(self._keys)
        self._here = bytearray(base)
        self._missing = 0
        self._batch = 0
        self._over = False
        self._without_holders = False
        self._recheck_stuck = True
        sources = [_Source(peer, True) for peer in sorted(holders)] + [_Source(peer, False) for peer in sorted(relays)]
        self._sources = {source.peer: source for source in sources}
        self._order = _rotated([s for s in sources if not s.is_holder], turn) + _rotated(
            [s for s in sources if s.is_holder], turn
        )
        self.received: dict[PeerId, int] = {}
        """Verified bytes by source."""
        self.wasted_bytes = 0

    # Queries

    def has(self, key: int, block: int) -> bool:
        """Whether this block of a key that is fetched is here and verified."""
        found = self._by_number[key]
        return 0 <= block < found.count and bool(self._here[found.base + block])

    def hashes_of(self, key: int) -> bytes | None:
        """The verified hash list of a key that is fetched, when it is known."""
        return self._by_number[key].hashes

    def block_ref(self, key: int, block: int) -> BlockRef:
        """A block of a fetched key whose hash list is known: where it belongs, and its digest."""
        found = self._by_number[key]
        assert found.hashes is not None, "a block is requested only when its hash is known"
        return block_ref(key, block, found.wanted.nbytes, found.hashes, self._kind, self._block_bytes)

    def fetches(self, key: int) -> bool:
        """Whether this key is fetched."""
        return key in self._by_number

    def here(self) -> list[BlockRange]:
        """All blocks of the fetched keys that are here and verified: what a relay that connects now must be sent."""
        return self._ranges(block for block in range(self._total) if self._here[block])

    @property
    def at_end(self) -> bool:
        """Whether the empty announcement was made: nothing new will be here, except what relays have."""
        return self._without_holders

    def owes(self, peer: PeerId) -> bool:
        """Whether something was requested from this source that has not arrived."""
        source = self._sources[peer]
        return bool(source.batches or source.owed_hashes)

    @property
    def missing_blocks(self) -> int:
        """How many blocks are known to be missing."""
        return self._missing

    # Events

    def start(self) -> list[FetchEffect]:
        """Begin. FetchComplete at once if there is nothing to fetch."""
        return self._continue([])

    def source_ready(self, peer: PeerId) -> list[FetchEffect]:
        """The connection to a source is open."""
        source = self._sources.get(peer)
        if self._over or source is None:
            return []
        if not source.trusted:
            return [DropSource(peer, "it was dropped before")]
        source.ready = source.live = True
        return self._continue([])

    def source_lost(self, peer: PeerId) -> list[FetchEffect]:
        """A source cannot be reached, or its connection is lost: it writes nothing more."""
        source = self._sources.get(peer)
        if self._over or source is None or not source.live:
            return []
        self._lose(source)
        return self._continue([])

    def source_away(self, peer: PeerId) -> list[FetchEffect]:
        """The connection to a source is lost, and is being opened again. What it owed is requested elsewhere.
        `source_ready` or `source_lost` follows.
        """
        source = self._sources.get(peer)
        if self._over or source is None or not source.live:
            return []
        self._lose(source)
        source.live, source.at_end = True, False
        return self._continue([])

    def hashes(self, peer: PeerId, lists: Sequence[tuple[int, bytes]]) -> list[FetchEffect]:
        """Hash lists were received from a source, as (key, list)."""
        source = self._connected(peer)
        if source is None:
            return []
        effects: list[FetchEffect] = []
        equal: list[int] = []
        for number, hashes in lists:
            if number not in source.owed_hashes:
                self._distrust(source, f"it sent hashes of key {number}, which were not requested", effects)
                break
            key = self._by_number[number]
            fits = len(hashes) == key.count * self._digest
            if not fits or root_hash(hashes, key.wanted.nbytes, self._kind) != key.wanted.root:
                effects.append(CorruptBlock(peer, number, None))
                self._distrust(source, f"its block hashes of key {number} do not have the key's root", effects)
                break
            source.owed_hashes.remove(number)
            equal += self._list_known(key, hashes)
        self._announce(equal, effects)
        return self._continue(effects)

    def have(self, peer: PeerId, ranges: Sequence[BlockRange]) -> list[FetchEffect]:
        """A relay announced blocks."""
        source = self._connected(peer)
        if source is None or source.is_holder:
            return []
        effects: list[FetchEffect] = []
        if not ranges:
            source.at_end = self._recheck_stuck = True
        for number, first, count in ranges:
            key = self._by_number.get(number)
            if key is None:
                continue
            if first < 0 or not 0 < count <= key.count - first:
                text = f"it announced {count} blocks from {first} on of key {number}, which has {key.count}"
                self._distrust(source, text, effects)
                break
            self._pool.announce(peer, key.base + first, key.base + first + count)
        return self._continue(effects)

    def blocks(self, peer: PeerId, batch: int, bad: Sequence[int] = ()) -> list[FetchEffect]:
        """A batch is in; `bad` are the places in it whose content does not have its hash."""
        source = self._connected(peer)
        if source is None or batch not in source.batches:
            return []
        effects: list[FetchEffect] = []
        blocks = source.batches.pop(batch)
        source.outstanding -= sum(map(self._cost, blocks))
        wrong = [blocks[index] for index in sorted(set(bad))]
        good = [block for index, block in enumerate(blocks) if index not in set(bad)]
        for block in wrong:
            key = self._key_of(block)
            effects.append(CorruptBlock(peer, key.wanted.key, block - key.base))
            self._pool.refuse(peer, block)
            self._recheck_stuck = True
            self.wasted_bytes += self._length(block)
        for block in good:
            self._here[block] = 1
        self._missing -= len(good)
        self.received[peer] = self.received.get(peer, 0) + sum(map(self._length, good))
        self._pool.put(wrong)
        source.wrong += len(wrong)
        if source.wrong >= MAX_WRONG_BLOCKS:
            self._distrust(source, f"{source.wrong} blocks that it sent were wrong", effects)
        self._announce(good, effects)
        return self._continue(effects)

    # Decisions

    def _continue(self, effects: list[FetchEffect]) -> list[FetchEffect]:
        """Request more from each source that has room; see whether the fetch has ended."""
        if self._over:
            return effects
        complete = not self._unlisted and not self._missing
        if not self._without_holders and (complete or not self._holders_may_help()):
            self._without_holders = True
            effects.append(AnnounceBlocks([]))
        if complete:
            self._over = True
            return [*effects, FetchComplete()]
        if text := self._why_stuck():
            self._over = True
            blame = sorted(source.peer for source in self._sources.values() if source.wrong or not source.live)
            return [*effects, FetchStuck(text, blame)]
        ready = [source for source in self._order if source.live and source.ready]
        for source in ready:
            self._request_hashes(source, effects)
        with_room = ready
        while with_room:
            with_room = [source for source in with_room if self._request_blocks(source, effects)]
        self._check_invariants()
        return effects

    def _holders_may_help(self) -> bool:
        """Whether some holder may still send something that is not here."""
        holders = [source.peer for source in self._live() if source.is_holder]
        if not holders or self._unlisted or not self._pool.has_refused:
            return bool(holders)
        refused = self._pool.refused_of(holders)
        return self._missing > sum(not self._here[block] for block in refused)

    def _request_hashes(self, source: _Source, effects: list[FetchEffect]) -> None:
        """One request at a time. From a relay only when no holder is left, and for keys that it knows."""
        if source.owed_hashes or not self._unrequested or (not source.is_holder and not self._without_holders):
            return
        keys: list[int] = []
        size = 0
        for number in list(self._unrequested):
            key = self._by_number[number]
            size += key.count * self._digest
            if keys and (len(keys) == HASHES_KEYS or size > HASHES_BYTES):
                break
            if source.is_holder or self._pool.holds_any(source.peer, key.base, key.base + key.count):
                keys.append(number)
        if keys:
            source.owed_hashes.update(keys)
            chosen = set(keys)
            self._unrequested = deque(number for number in self._unrequested if number not in chosen)
            effects.append(RequestHashes(source.peer, keys))

    def _request_blocks(self, source: _Source, effects: list[FetchEffect]) -> bool:
        """Request one more batch, if there is room for it and the source has something."""
        room = self._window - source.outstanding
        if source.outstanding and room < self._block_bytes:
            return False
        blocks = self._pool.take(source.peer, source.is_holder, min(room, self._block_bytes), self._cost)
        if not blocks:
            return False
        source.batches[self._batch] = blocks
        source.outstanding += sum(map(self._cost, blocks))
        named = [(key.wanted.key, block - key.base) for block in blocks for key in (self._key_of(block),)]
        effects.append(RequestBlocks(source.peer, self._batch, named))
        self._batch += 1
        return True

    def _list_known(self, key: _Key, hashes: bytes) -> list[int]:
        """A key's hash list is verified: put what differs into the pool, return what is here already."""
        key.hashes = hashes
        self._unlisted -= 1
        self._recheck_stuck = True
        pairs = zip(_split(hashes, self._digest), _split(key.wanted.own, self._digest), strict=True)
        equal = [theirs == own for theirs, own in pairs]
        differs = [block for block, is_equal in enumerate(equal, key.base) if not is_equal]
        same = [block for block, is_equal in enumerate(equal, key.base) if is_equal]
        for block in same:
            self._here[block] = 1
        self._missing += len(differs)
        self._pool.put(differs)
        return same

    def _lose(self, source: _Source) -> None:
        """What a source owed is wanted again; what it sent stays."""
        source.ready = source.live = False
        self._recheck_stuck = True
        self._unrequested.extendleft(sorted(source.owed_hashes, reverse=True))
        source.owed_hashes.clear()
        for blocks in source.batches.values():
            self._pool.put(blocks)
        source.batches.clear()
        source.outstanding = 0
        self._pool.forget(source.peer)

    def _distrust(self, source: _Source, text: str, effects: list[FetchEffect]) -> None:
        source.trusted = False
        self._lose(source)
        effects.append(DropSource(source.peer, text))

    def _announce(self, blocks: list[int], effects: list[FetchEffect]) -> None:
        if blocks:
            effects.append(AnnounceBlocks(self._ranges(sorted(blocks))))

    def _why_stuck(self) -> str:
        """Why the rest can never come; empty while it can. Computed again only after something got worse."""
        if not self._recheck_stuck:
            return ""
        self._recheck_stuck = False
        live = self._live()
        holders = [source.peer for source in live if source.is_holder]
        candidates = [source.peer for source in live if not source.is_holder and not source.at_end]
        for block in self._pool.refused if holders or candidates else sorted(self._pool.free):
            if not self._pool.has_source(block, holders, candidates):
                key = self._key_of(block)
                return f"block {block - key.base} of key {key.wanted.key} is lost: no peer that is left has it"
        if holders or candidates:
            return ""
        for number in self._unrequested:
            key = self._by_number[number]
            if not any(self._pool.holds_any(source.peer, key.base, key.base + key.count) for source in live):
                return f"the block hashes of key {number} are lost: no peer that is left has them"
        return ""

    # Leaves

    def _live(self) -> list[_Source]:
        return [source for source in self._sources.values() if source.live]

    def _connected(self, peer: PeerId) -> _Source | None:
        source = self._sources.get(peer)
        return source if source is not None and source.live and source.ready and not self._over else None

    def _key_of(self, block: int) -> _Key:
        return self._keys[bisect_right(self._bases, block) - 1]

    def _length(self, block: int) -> int:
        key = self._key_of(block)
        first, last = block_range(block - key.base, key.wanted.nbytes, self._block_bytes)
        return last - first

    def _cost(self, block: int) -> int:
        """A block's share of a window. A tiny one counts for more than its bytes, so that a batch is bounded."""
        return max(self._length(block), self._block_bytes // BATCH_BLOCKS)

    def _ranges(self, blocks: Iterable[int]) -> list[BlockRange]:
        """Ascending blocks as (key, first, count)."""
        ranges: list[BlockRange] = []
        for block in blocks:
            key = self._key_of(block)
            number, place = key.wanted.key, block - key.base
            if ranges and ranges[-1][0] == number and sum(ranges[-1][1:]) == place:
                ranges[-1] = (number, ranges[-1][1], ranges[-1][2] + 1)
            else:
                ranges.append((number, place, 1))
        return ranges

    def _check_invariants(self) -> None:
        for source in self._sources.values():
            assert source.live or not (source.batches or source.owed_hashes)
            assert source.outstanding <= max(self._window, self._block_bytes)


def _split(hashes: bytes, size: int) -> Iterator[bytes]:
    return (hashes[at : at + size] for at in range(0, len(hashes), size))


def _rotated(sources: list[_Source], turn: int) -> list[_Source]:
    """Rotate, so that not all receivers begin with the same source."""
    start = turn % len(sources) if sources else 0
    return sources[start:] + sources[:start]
