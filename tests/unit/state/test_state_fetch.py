"""How a receiver fetches: single rules by hand, and whole fetches against simulated sources that die and lie."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.state import fetch as fetching
from ringfold.state.blocks import BLOCK_BYTES, block_count, block_range, digest_bytes, root_hash
from ringfold.state.fetch import Fetch
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
from ringfold.state.hashing import block_hash

MIB = BLOCK_BYTES
KIND = "rf64"


def content(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def hashes_of(array: np.ndarray, block_bytes: int) -> bytes:
    ranges = [block_range(block, array.size, block_bytes) for block in range(block_count(array.size, block_bytes))]
    return b"".join(block_hash(array[first:last], KIND) for first, last in ranges)


class Winner:
    """The content that won, and one receiver's idea of it."""

    def __init__(self, sizes: list[int], same: list[list[int]] | None = None, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.arrays = [content(key, size) for key, size in enumerate(sizes)]
        self.hashes = [hashes_of(array, block_bytes) for array in self.arrays]
        self.mine = [np.zeros(size, np.uint8) for size in sizes]
        for key, blocks in enumerate(same or []):
            for block in blocks:
                first, last = block_range(block, sizes[key], block_bytes)
                self.mine[key][first:last] = self.arrays[key][first:last]

    def wanted(self) -> list[WantedKey]:
        return [
            WantedKey(key, root_hash(hashes, array.size, KIND), array.size, hashes_of(mine, self.block_bytes))
            for key, (array, hashes, mine) in enumerate(zip(self.arrays, self.hashes, self.mine, strict=True))
        ]

    def lists(self, keys: list[int]) -> list[tuple[int, bytes]]:
        return [(key, self.hashes[key]) for key in keys]


def of_kind(kind: type, effects: list[FetchEffect]) -> list:  # type: ignore[type-arg]
    return [effect for effect in effects if isinstance(effect, kind)]


def started(winner: Winner, holders: list[int], relays: list[int] | None = None, **more: object) -> Fetch:
    """A fetch whose sources are ready and whose hash lists are known, with the first blocks requested."""
    fetch = Fetch(winner.wanted(), KIND, holders, relays or [], **more)  # type: ignore[arg-type]
    fetch.start()
    return fetch


def listed(fetch: Fetch, winner: Winner, holder: int) -> list[FetchEffect]:
    """Connect one holder and let it give all hash lists."""
    [request] = of_kind(RequestHashes, fetch.source_ready(holder))
    return fetch.hashes(holder, winner.lists(request.keys))


def test_nothing_to_fetch_is_complete_at_once() -> None:
    assert Fetch([], KIND, [1]).start() == [AnnounceBlocks([]), FetchComplete()]


def test_only_blocks_that_differ_are_requested() -> None:
    winner = Winner([5 * MIB + 3], same=[[0, 2, 5]])
    effects = listed(started(winner, [1]), winner, 1)
    assert of_kind(AnnounceBlocks, effects) == [AnnounceBlocks([(0, 0, 1), (0, 2, 1), (0, 5, 1)])]
    assert sorted(block for request in of_kind(RequestBlocks, effects) for block in request.blocks) == [
        (0, 1),
        (0, 3),
        (0, 4),
    ]


def test_no_more_than_a_window_is_outstanding_at_a_source() -> None:
    winner = Winner([20 * MIB])
    fetch = started(winner, [1])
    requests = of_kind(RequestBlocks, listed(fetch, winner, 1))
    assert len(requests) == 4
    assert all(len(request.blocks) == 1 for request in requests)
    [more] = of_kind(RequestBlocks, fetch.blocks(1, requests[0].batch))
    assert more.blocks == [(0, 4)]


def test_a_block_larger_than_the_window_is_requested_alone() -> None:
    winner = Winner([3 * MIB])
    fetch = started(winner, [1], window_bytes=1000)
    assert [request.blocks for request in of_kind(RequestBlocks, listed(fetch, winner, 1))] == [[(0, 0)]]


def test_small_blocks_share_a_batch() -> None:
    winner = Winner([100] * 3000)
    fetch = started(winner, [1])
    [first] = of_kind(RequestHashes, fetch.source_ready(1))
    effects = fetch.hashes(1, winner.lists(first.keys))
    assert [len(request.blocks) for request in of_kind(RequestBlocks, effects)] == [1024]
    [second] = of_kind(RequestHashes, effects)
    assert len(second.keys) == 1024


def test_blocks_are_requested_from_each_source_that_has_room() -> None:
    winner = Winner([12 * MIB])
    fetch = started(winner, [1, 2])
    requests = of_kind(RequestBlocks, listed(fetch, winner, 1))
    assert {request.peer for request in requests} == {1}
    late = of_kind(RequestBlocks, fetch.source_ready(2))
    assert [request.peer for request in late] == [2, 2, 2, 2]
    assert not {b for a in requests for b in a.blocks} & {b for a in late for b in a.blocks}


def test_a_lost_source_costs_only_what_it_still_owed() -> None:
    winner = Winner([8 * MIB])
    fetch = started(winner, [1, 2])
    requests = of_kind(RequestBlocks, listed(fetch, winner, 1))
    fetch.blocks(1, requests[0].batch)
    fetch.source_ready(2)
    fetch.source_lost(1)
    assert fetch.missing_blocks == 7
    assert fetch.has(0, requests[0].blocks[0][1])
    assert fetch.received == {1: MIB}


def test_a_hash_list_that_does_not_give_the_root_costs_the_source_its_trust() -> None:
    winner = Winner([2 * MIB])
    fetch = started(winner, [1, 2])
    fetch.source_ready(1)
    fetch.source_ready(2)
    wrong, drop, again = fetch.hashes(1, [(0, bytes(16))])
    assert wrong == CorruptBlock(1, 0, None)
    assert isinstance(drop, DropSource)
    assert drop.peer == 1
    assert again == RequestHashes(2, [0])
    assert [type(effect) for effect in fetch.source_ready(1)] == [DropSource]


def test_a_source_that_sends_hashes_that_were_not_requested_is_dropped() -> None:
    winner = Winner([2 * MIB])
    fetch = started(winner, [1, 2])
    fetch.source_ready(1)
    fetch.source_ready(2)
    assert of_kind(DropSource, fetch.hashes(2, winner.lists([0])))


def test_a_wrong_block_is_requested_from_another_source() -> None:
    winner = Winner([MIB])
    fetch = started(winner, [1, 2])
    [request] = of_kind(RequestBlocks, listed(fetch, winner, 1))
    assert fetch.blocks(1, request.batch, [0]) == [CorruptBlock(1, 0, 0)]
    [again] = fetch.source_ready(2)
    assert isinstance(again, RequestBlocks)
    assert again.peer == 2
    assert fetch.blocks(2, again.batch)[-1] == FetchComplete()
    assert (fetch.received, fetch.wasted_bytes) == ({1: 0, 2: MIB}, MIB)


def test_a_block_that_the_only_holder_sends_wrong_leaves_the_fetch_stuck() -> None:
    winner = Winner([MIB])
    fetch = started(winner, [1])
    [request] = of_kind(RequestBlocks, listed(fetch, winner, 1))
    corrupt, at_end, stuck = fetch.blocks(1, request.batch, [0])
    assert (corrupt, at_end) == (CorruptBlock(1, 0, 0), AnnounceBlocks([]))
    assert isinstance(stuck, FetchStuck)
    assert stuck.blame == [1]


def test_a_source_of_several_wrong_blocks_is_dropped_before_its_blocks_are_requested_elsewhere() -> None:
    winner = Winner([8 * MIB])
    fetch = started(winner, [1, 2])
    requests = of_kind(RequestBlocks, listed(fetch, winner, 1))
    fetch.source_ready(2)
    for request in requests[:2]:
        fetch.blocks(1, request.batch, [0])
    effects = fetch.blocks(1, requests[2].batch, [0])
    assert [type(effect) for effect in effects[:2]] == [CorruptBlock, DropSource]
    assert fetch.blocks(1, requests[3].batch) == []


def test_the_loss_of_the_last_holder_is_announced_to_the_relays_which_may_still_help() -> None:
    winner = Winner([2 * MIB])
    fetch = started(winner, [1], [5])
    listed(fetch, winner, 1)
    fetch.source_ready(5)
    assert fetch.source_lost(1) == [AnnounceBlocks([])]
    [request] = of_kind(RequestBlocks, fetch.have(5, [(0, 0, 2)]))[:1]
    assert request.peer == 5
    assert fetch.at_end


def test_two_receivers_without_holders_do_not_wait_for_each_other_for_ever() -> None:
    winner = Winner([2 * MIB])
    fetch = started(winner, [1], [5])
    listed(fetch, winner, 1)
    fetch.source_ready(5)
    fetch.source_lost(1)
    fetch.have(5, [(0, 0, 1)])
    [stuck] = of_kind(FetchStuck, fetch.have(5, []))
    assert "block 1 of key 0" in stuck.text


def test_two_receivers_that_got_the_same_wrong_block_do_not_wait_for_each_other_for_ever() -> None:
    """The holder has sent too little nonsense to be dropped, but this block will not be requested from it again."""
    winner = Winner([2 * MIB])
    fetch = started(winner, [1], [5])
    wrong, right = of_kind(RequestBlocks, listed(fetch, winner, 1))
    fetch.source_ready(5)
    assert of_kind(AnnounceBlocks, fetch.blocks(1, wrong.batch, [0])) == []
    assert fetch.blocks(1, right.batch) == [AnnounceBlocks([(0, 1, 1)]), AnnounceBlocks([])]
    [stuck] = of_kind(FetchStuck, fetch.have(5, []))
    assert "block 0 of key 0" in stuck.text


def test_hash_lists_come_from_a_relay_when_no_holder_is_left() -> None:
    winner = Winner([2 * MIB, MIB])
    fetch = started(winner, [1], [5])
    fetch.source_ready(5)
    fetch.have(5, [(1, 0, 1)])
    effects = fetch.source_lost(1)
    assert RequestHashes(5, [1]) in effects


def test_relays_give_what_they_have_and_holders_the_rest() -> None:
    winner = Winner([8 * MIB])
    fetch = started(winner, [1], [5])
    fetch.source_ready(5)
    fetch.have(5, [(0, 0, 4)])
    requests = of_kind(RequestBlocks, listed(fetch, winner, 1))
    by = {
        peer: [block for request in requests if request.peer == peer for _, block in request.blocks] for peer in (1, 5)
    }
    assert by == {5: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


def test_receivers_begin_at_different_places() -> None:
    winner = Winner([4 * MIB, 4 * MIB])
    firsts = []
    for turn in range(4):
        fetch = started(winner, [1], place=(turn, 4))
        effects = listed(fetch, winner, 1)
        firsts.append(of_kind(RequestBlocks, effects)[0].blocks[0])
    assert firsts == [(0, 0), (0, 2), (1, 0), (1, 2)]


@pytest.mark.parametrize("ranges", [[(0, 0, 3)], [(0, -1, 1)], [(0, 1, 10**15)], [(0, 0, 0)]])
def test_an_announcement_of_blocks_that_do_not_exist_costs_the_relay_its_trust(ranges: list[tuple]) -> None:  # type: ignore[type-arg]
    fetch = started(Winner([2 * MIB]), [1], [5])
    fetch.source_ready(5)
    assert of_kind(DropSource, fetch.have(5, ranges))


def test_an_announcement_of_a_key_that_is_not_fetched_means_nothing() -> None:
    fetch = started(Winner([2 * MIB]), [1], [5])
    fetch.source_ready(5)
    assert fetch.have(5, [(77, 0, 3)]) == []


def test_nothing_follows_the_end() -> None:
    winner = Winner([MIB])
    fetch = started(winner, [1])
    [request] = of_kind(RequestBlocks, listed(fetch, winner, 1))
    assert fetch.blocks(1, request.batch)[-1] == FetchComplete()
    assert fetch.source_lost(1) == []
    assert fetch.source_ready(2) == []


# Whole fetches, with every source in one loop and chance in charge


@dataclass
class World:
    """A receiver, its sources, and what happens to them. Blocks are tiny here, so that there are many."""

    winner: Winner
    fetch: Fetch
    draw: st.DataObject
    good: set[int]
    liars: set[int]
    relays: dict[int, list[tuple[int, int]]]
    queue: list[FetchEffect] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    requested: dict[tuple[int, int], int] = field(default_factory=dict)
    """Blocks that are outstanding, and at which source."""
    verified: set[tuple[int, int]] = field(default_factory=set)
    end: FetchEffect | None = None

    def take(self, effects: list[FetchEffect]) -> None:
        """Carry out what needs no chance at once; keep requests for later."""
        for effect in effects:
            assert self.end is None, "something followed the end"
            match effect:
                case RequestBlocks(peer, _, blocks):
                    assert peer in self.open
                    for each in blocks:
                        assert each not in self.requested, "requested twice at the same time"
                        assert each not in self.verified, "requested again after it was verified"
                        assert peer not in self.relays or each in self.relays[peer]
                        self.requested[each] = peer
                    self.queue.append(effect)
                case RequestHashes(peer, _):
                    assert peer in self.open
                    self.queue.append(effect)
                case DropSource(peer, _):
                    assert peer in self.liars
                    self.close(peer)
                case FetchComplete() | FetchStuck():
                    self.end = effect
                case AnnounceBlocks(ranges):
                    self.verified |= {(key, first + i) for key, first, count in ranges for i in range(count)}
                case CorruptBlock(peer, _, _):
                    assert peer in self.liars

    def close(self, peer: int) -> None:
        self.open.discard(peer)
        self.queue = [effect for effect in self.queue if effect.peer != peer]  # type: ignore[union-attr]
        self.requested = {block: at for block, at in self.requested.items() if at != peer}

    def answer(self, effect: FetchEffect) -> None:
        match effect:
            case RequestHashes(peer, keys):
                lists = self.winner.lists(keys)
                if peer in self.liars and self.draw.draw(st.booleans()):
                    lists[-1] = (lists[-1][0], bytes(len(lists[-1][1])))
                self.take(self.fetch.hashes(peer, lists))
            case RequestBlocks(peer, batch, blocks):
                bad = []
                for place, (key, block) in enumerate(blocks):
                    first, last = block_range(block, self.winner.arrays[key].size, self.winner.block_bytes)
                    good = self.winner.arrays[key][first:last]
                    lie = peer in self.liars and self.draw.draw(st.booleans())
                    self.winner.mine[key][first:last] = good ^ 1 if lie else good
                    hashes = self.fetch.hashes_of(key)
                    assert hashes is not None
                    size = digest_bytes(KIND)
                    if block_hash(self.winner.mine[key][first:last], KIND) != hashes[block * size : (block + 1) * size]:
                        bad.append(place)
                    del self.requested[key, block]
                self.take(self.fetch.blocks(peer, batch, bad))
            case _:
                raise AssertionError(effect)


@settings(max_examples=150)
@given(data=st.data())
def test_a_fetch_completes_with_the_winners_bytes_or_reports_that_it_cannot(data: st.DataObject) -> None:
    """Whatever dies or lies: complete and right if an honest holder stays; else complete and right, or stuck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "BATCH_BLOCKS", 4)
        patch.setattr(fetching, "HASHES_KEYS", 2)
        run_fetch(data)


def run_fetch(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 700), min_size=1, max_size=5))
    same = [data.draw(st.lists(st.integers(0, -(-size // 64) - 1), max_size=4)) if size else [] for size in sizes]
    winner = Winner(sizes, same, block_bytes=64)
    holders = set(range(1, 1 + data.draw(st.integers(1, 3))))
    liars = data.draw(st.sets(st.sampled_from(sorted(holders | {11, 12})), max_size=3))
    doomed = data.draw(st.sets(st.sampled_from(sorted(holders | {11, 12})), max_size=5))
    every = [(key, block) for key, size in enumerate(sizes) for block in range(-(-size // 64))]
    relays: dict[int, list[tuple[int, int]]] = {11: [], 12: []}
    place = data.draw(st.integers(0, 2)), 3
    fetch = Fetch(winner.wanted(), KIND, holders, relays, place, block_bytes=64)
    world = World(winner, fetch, data, holders - liars - doomed, liars, relays)
    world.take(fetch.start())
    unannounced = {peer: list(every) for peer in relays}
    unopened = sorted(holders | {11, 12})
    alive = set(unopened)
    hiccups = 3
    while world.end is None:
        moves = ["answer"] * bool(world.queue) + ["open"] * bool(unopened) + ["die"] * bool(alive & doomed)
        moves += ["hiccup"] * bool(hiccups and world.open)
        moves += ["announce"] * any(peer in world.open and unannounced[peer] for peer in unannounced)
        if not moves:
            for peer in sorted(set(relays) & world.open):  # the relays have announced everything
                world.take(fetch.have(peer, []) if world.end is None else [])
            break
        match data.draw(st.sampled_from(moves)):
            case "answer":
                world.answer(world.queue.pop(data.draw(st.integers(0, len(world.queue) - 1))))
            case "open":
                peer = unopened.pop(data.draw(st.integers(0, len(unopened) - 1)))
                world.open.add(peer)
                world.take(fetch.source_ready(peer))
            case "die":
                peer = data.draw(st.sampled_from(sorted(alive & doomed)))
                alive.discard(peer)
                unopened = [each for each in unopened if each != peer]
                world.close(peer)
                world.take(fetch.source_lost(peer))
            case "hiccup":
                hiccups -= 1
                peer = data.draw(st.sampled_from(sorted(world.open)))
                unopened.append(peer)
                world.close(peer)
                if peer in relays:  # it greets again
                    unannounced[peer], relays[peer] = relays[peer] + unannounced[peer], []
                world.take(fetch.source_away(peer))
            case "announce":
                peer = next(peer for peer in unannounced if peer in world.open and unannounced[peer])
                count = data.draw(st.integers(1, len(unannounced[peer])))
                announced, unannounced[peer] = unannounced[peer][:count], unannounced[peer][count:]
                relays[peer] += announced
                world.take(fetch.have(peer, [(key, block, 1) for key, block in announced]))
    while world.end is None and world.queue:
        world.answer(world.queue.pop())
    assert world.end is not None, "it waits for something that cannot come"
    if world.good:
        assert world.end == FetchComplete()
    if world.end == FetchComplete():
        for mine, right in zip(winner.mine, winner.arrays, strict=True):
            assert mine.tobytes() == right.tobytes()
