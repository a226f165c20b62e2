"""What a receiver gets, and what is refused; and receivers that relay to each other from one holder."""

import numpy as np
import pytest

from ringfold.errors import RemoteProtocolError
from ringfold.state.blocks import BLOCK_BYTES
from ringfold.state.election import ElectedState, elect
from ringfold.state.fetch import Fetch
from ringfold.state.fetch_effects import AnnounceBlocks, FetchComplete, FetchEffect, RequestBlocks, RequestHashes
from ringfold.state.hashing import block_hash
from ringfold.state.serve import BlockRefusal, BlockServer, wanted_of
from ringfold.state.shared import MayDiffer, SharedState
from ringfold.state.snapshot import Snapshot

MIB = BLOCK_BYTES


def state_of(seed: int) -> SharedState:
    rng = np.random.default_rng(seed)
    arrays = {f"tiny{i:03}": rng.standard_normal(5).astype(np.float32) for i in range(200)}
    large = rng.integers(0, 256, 7 * MIB + 11, np.uint8)
    return SharedState(arrays, large=large, own=MayDiffer(np.array([seed])), same=np.ones(MIB // 4))


def test_a_holder_serves_blocks_with_the_hash_that_they_have() -> None:
    snapshot = Snapshot.take(state_of(1))
    blocks = BlockServer(snapshot.manifest).blocks_for([(0, 7), (0, 0)])
    assert isinstance(blocks, list)
    assert [(block.key, block.offset, block.nbytes) for block in blocks] == [(0, 7 * MIB, 11), (0, 0, MIB)]
    for block in blocks:
        assert block_hash(snapshot.memories[0].read(block.offset, block.offset + block.nbytes), "rf64") == block.digest


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([(0, 8)], "no block 8 of key 0"),
        ([(0, -1)], "no block -1"),
        ([(999, 0)], "key 999"),
        ([(-1, 0)], "key -1"),
        ([(1, 0)], "no block 0 of key 1"),
        ([(0, 0)] * 10, "bytes at once"),
        ([(2, 0)] * 5000, "5000 blocks"),
    ],
    ids=["past the end", "before the begin", "no key", "negative key", "may differ", "too much", "too many"],
)
def test_what_is_not_here_is_refused_with_a_text(blocks: list[tuple[int, int]], words: str) -> None:
    refusal = BlockServer(Snapshot.take(state_of(1)).manifest).blocks_for(blocks)
    assert isinstance(refusal, BlockRefusal)
    assert words in refusal.text


def test_hashes_of_what_may_differ_are_refused() -> None:
    assert isinstance(BlockServer(Snapshot.take(state_of(1)).manifest).hashes_for([1]), BlockRefusal)


def test_a_receiver_serves_only_what_it_has_verified() -> None:
    winner, mine = Snapshot.take(state_of(1)).manifest, Snapshot.take(state_of(2)).manifest
    fetch = Fetch(wanted_of(mine, [(0, winner.keys[0].root)]), "rf64", [1])
    server = BlockServer(mine, fetch)
    assert isinstance(server.hashes_for([0]), BlockRefusal)
    fetch.start()
    fetch.source_ready(1)
    requests = [effect for effect in fetch.hashes(1, [(0, winner.hashes[0])]) if isinstance(effect, RequestBlocks)]
    assert isinstance(server.blocks_for(requests[0].blocks), BlockRefusal)
    fetch.blocks(1, requests[0].batch)
    assert isinstance(server.blocks_for(requests[0].blocks), list)
    assert isinstance(server.blocks_for(requests[1].blocks), BlockRefusal)
    assert server.hashes_for([0]) == [(0, winner.hashes[0])]


def test_announcements_list_what_is_here_and_are_empty_only_at_the_end() -> None:
    holder = Snapshot.take(SharedState(a=np.ones(3))).manifest
    mine = Snapshot.take(SharedState(a=np.zeros(3))).manifest
    fetch = Fetch(wanted_of(mine, [(0, holder.keys[0].root)]), "rf64", [1], [2])
    fetch.start()
    assert BlockServer(mine, fetch).announcements() == []
    assert BlockServer(holder).announcements() == [[(0, 0, 1)], []]
    fetch.source_lost(1)
    assert BlockServer(mine, fetch).announcements() == [[]]


@pytest.mark.parametrize("fetch", [[(0, b"short")], [(1, bytes(8))], [(999, bytes(8))]])
def test_a_plan_that_makes_no_sense_here_is_refused(fetch: list[tuple[int, bytes]]) -> None:
    with pytest.raises(RemoteProtocolError, match="key"):
        wanted_of(Snapshot.take(state_of(1)).manifest, fetch)


class LocalSync:
    """All peers in one process. Each source answers one request per turn, as if its uplink were the narrow place."""

    def __init__(self, states: dict[int, SharedState]) -> None:
        self.states = states
        self.snapshots = {peer: Snapshot.take(state) for peer, state in states.items()}
        plan = elect({peer: each.manifest.offer("enforce-popular") for peer, each in self.snapshots.items()}, None)
        assert isinstance(plan, ElectedState)
        self.plan = plan
        turns = sorted(plan.fetch)
        self.fetches = {
            peer: Fetch(
                wanted_of(self.snapshots[peer].manifest, keys),
                "rf64",
                plan.holders,
                [other for other in turns if other != peer],
                (turns.index(peer), len(turns)),
            )
            for peer, keys in plan.fetch.items()
        }
        self.servers = {
            peer: BlockServer(snapshot.manifest, self.fetches.get(peer)) for peer, snapshot in self.snapshots.items()
        }
        self.todo: list[tuple[int, FetchEffect]] = []
        self.complete: set[int] = set()
        self.turns = 0

    def run(self) -> None:
        for peer, fetch in self.fetches.items():
            self.add(peer, fetch.start())
            for source in (*self.plan.holders, *(other for other in self.fetches if other != peer)):
                self.add(peer, fetch.source_ready(source))
                for ranges in self.servers[source].announcements() if source in self.fetches else []:
                    self.add(peer, fetch.have(source, ranges))
        while self.todo:
            self.turns += 1
            turn, self.todo, busy = self.todo, [], set()
            for peer, effect in turn:
                if isinstance(effect, RequestBlocks) and effect.peer in busy:
                    self.todo.append((peer, effect))
                    continue
                busy |= {effect.peer} if isinstance(effect, RequestBlocks) else set()
                self.carry_out(peer, effect)

    def add(self, peer: int, effects: list[FetchEffect]) -> None:
        self.todo += [(peer, effect) for effect in effects]

    def carry_out(self, peer: int, effect: FetchEffect) -> None:
        fetch = self.fetches[peer]
        match effect:
            case RequestHashes(source, keys):
                lists = self.servers[source].hashes_for(keys)
                assert isinstance(lists, list)
                self.add(peer, fetch.hashes(source, lists))
            case RequestBlocks(source, batch, blocks):
                refs = self.servers[source].blocks_for(blocks)
                assert isinstance(refs, list)
                assert refs == [fetch.block_ref(key, block) for key, block in blocks]
                for ref in refs:
                    first, last = ref.offset, ref.offset + ref.nbytes
                    buffer = self.snapshots[peer].memories[ref.key].receive_buffer(first, last)
                    buffer[:] = self.snapshots[source].memories[ref.key].read(first, last)
                    assert block_hash(buffer, "rf64") == ref.digest
                self.add(peer, fetch.blocks(source, batch))
            case AnnounceBlocks(ranges):
                for other in self.fetches.keys() - {peer}:
                    self.add(other, self.fetches[other].have(peer, ranges))
            case FetchComplete():
                self.complete.add(peer)
            case _:
                raise AssertionError(effect)


def test_receivers_end_with_the_holders_bytes() -> None:
    states = {peer: state_of(peer) for peer in (1, 2, 3, 4)}
    states[1].revision = 10
    sync = LocalSync(states)
    sync.run()
    assert sync.complete == {2, 3, 4}
    for name in (name for name in states[1] if name != "own"):
        assert len({np.asarray(state.arrays[name]).tobytes() for state in states.values()}) == 1
    assert len({np.asarray(state.arrays["own"]).tobytes() for state in states.values()}) == 4
    size = 7 * MIB + 11 + 200 * 20
    assert all(sum(fetch.received.values()) == size for fetch in sync.fetches.values())


def test_receivers_relieve_the_holder() -> None:
    """Three receivers would need 3 x 40 blocks of the holder; they need little more than each block once."""
    winner = np.random.default_rng(1).integers(0, 256, 40 * MIB, np.uint8)
    states = {peer: SharedState(large=np.zeros(40 * MIB, np.uint8)) for peer in (2, 3, 4)}
    sync = LocalSync({1: SharedState(large=winner, revision=10), **states})
    sync.run()
    assert all(np.array_equal(state.arrays["large"], winner) for state in states.values())  # type: ignore[arg-type]
    sent = sum(fetch.received[1] for fetch in sync.fetches.values()) // MIB
    assert 40 <= sent < 60
