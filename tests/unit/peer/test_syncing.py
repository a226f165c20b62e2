"""Syncs between peers' machines that are wired together in memory; the test plays the master and the network."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Literal, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from ringfold.errors import MasterUnreachable, StateError
from ringfold.peer.effects import (
    CallFinished,
    CloseConn,
    Dial,
    Effect,
    Ended,
    ExpectBlocks,
    Install,
    SealEngine,
    SendBlocks,
    SendMessage,
    SyncSucceeded,
    WriteBlocks,
)
from ringfold.peer.engine import Commands, RawBlock
from ringfold.peer.events import (
    Accepted,
    BlocksReceived,
    CallGivenUp,
    CallJoin,
    CallVote,
    Closed,
    Dialled,
    EngineInstalled,
    EngineSealed,
    Event,
    MessageReceived,
    Opened,
    Tick,
)
from ringfold.peer.machine import PeerMachine
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.peer.sync.sync_call import SyncInfo, sync_state
from ringfold.peer.sync.syncing import MAX_CONNECT_ATTEMPTS, PROGRESS_REPORT_INTERVAL_NS, SOURCE_TIMEOUT_NS
from ringfold.peer.sync.transfer import BlockTransfer
from ringfold.state import blocks, hashing, serve
from ringfold.state.blocks import BLOCK_BYTES
from ringfold.state.election import ElectedState, elect
from ringfold.state.fetch import HASHES_KEYS
from ringfold.state.hashing import block_hash
from ringfold.state.serve import BlockRefusal, BlockServer
from ringfold.state.shared import SharedState, set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.wire import frames
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.messages import (
    BlocksWanted,
    CallFailed,
    Challenge,
    Hashes,
    HashesWanted,
    Installed,
    Liveness,
    Member,
    Message,
    Offer,
    Reason,
    Record,
    Seal,
    SyncDone,
    SyncExtended,
    SyncPlan,
    SyncReport,
    Vote,
    VoteWithdrawn,
    Welcome,
    World,
)
from ringfold.wire.proof import prove

MS = 1_000_000
MIB = BLOCK_BYTES
CONTROL = 1
TIMINGS = PeerTimings()
NONCE = b"n" * 32
Numbers = npt.NDArray[np.uint8]
T = TypeVar("T")


@dataclass
class Batch:
    """A batch that a node's engine expects on a connection."""

    number: int
    blocks: Sequence[RawBlock]
    here: int = 0
    bad: list[int] = field(default_factory=list)


class Node:
    """A peer: its machine, and as much of an engine as a sync needs."""

    def __init__(self, net: "Net", peer: int) -> None:
        self.net, self.peer = net, peer
        identity = Identity(group=0, host="h", name="n", addresses=(f"10.0.0.{peer}",), port=1)
        self.machine = PeerMachine(identity, TIMINGS)
        self.transfer: BlockTransfer | None = None
        self.manifest = Snapshot.take(SharedState(w=np.zeros(1))).manifest
        self.expected: dict[int, deque[Batch]] = {}
        self.to_master: list[Message] = []
        self.finished: dict[int, object] = {}
        self.ended: Exception | None = None
        self.ballot = 0

    def step(self, event: Event) -> None:
        for effect in self.machine.step(self.net.now_ns, event):
            self.carry_out(effect)

    def receives_from_master(self, message: Message) -> None:
        """The master says something."""
        self.step(MessageReceived(CONTROL, frames.encode(message)))

    def reports(self, outcome: str) -> list[SyncReport]:
        reports = [message for message in self.to_master if isinstance(message, SyncReport)]
        return [report for report in reports if report.outcome == outcome]

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Dial(0):
                self.step(Dialled(0, CONTROL))
            case Dial(key, host):
                self.net.dial(self, key, host)
            case SendMessage(conn, message) if conn == CONTROL:
                self.to_master.append(message)
            case SendMessage(conn, message):
                self.net.send(self, conn, message)
            case CloseConn(conn):
                self.expected.pop(conn, None)
                self.net.close(self, conn)
            case SealEngine(epoch):
                self.step(EngineSealed(epoch, ()))
            case Install(epoch):
                self.step(EngineInstalled(epoch))
            case ExpectBlocks() | WriteBlocks() | SendBlocks():
                self.move_blocks(effect)
            case CallFinished(ballot, outcome):
                self.finished[ballot] = outcome
                assert not any(self.expected.values()), "blocks are still expected after the call has returned"
            case Ended(error):
                self.ended = error
                assert not any(self.expected.values()), "blocks are still expected after the end"

    def calls_sync(self, snapshot: Snapshot, offer: Offer, deadline_ns: int) -> None:
        """The program calls sync_shared_state."""
        self.ballot += 1
        self.transfer, self.manifest = BlockTransfer(snapshot), snapshot.manifest
        self.step(CallVote(self.ballot, "sync", 0, deadline_ns, (), offer, snapshot.manifest))

    def move_blocks(self, effect: ExpectBlocks | WriteBlocks | SendBlocks) -> None:
        assert self.transfer is not None
        engine = cast(Commands, self)  # as much of it as a transfer uses
        match effect:
            case ExpectBlocks():
                self.transfer.expect(engine, effect)
            case WriteBlocks():
                self.step(self.transfer.write(effect))
            case SendBlocks():
                changed = self.transfer.send(engine, effect)
                if changed is not None:
                    self.step(changed)

    def expect_blocks(self, conn: int, batch: int, blocks: Sequence[RawBlock]) -> None:
        if (self.peer, conn) in self.net.pipes:
            self.expected.setdefault(conn, deque()).append(Batch(batch, blocks))

    def send_blocks(self, conn: int, blocks: Sequence[RawBlock]) -> list[int]:
        content = [bytes(memory[offset : offset + length]) for memory, offset, length, _ in blocks]
        assert content, "the engine refuses to send no blocks"
        changed = [place for place, each in enumerate(blocks) if not _has_hash(content[place], each[3])]
        for each in [] if changed else content:
            self.net.send(self, conn, each)
        return changed

    def receives(self, conn: int, content: bytes) -> None:
        """A block has come: it is written where it was expected, and only there."""
        batch = self.expected[conn][0]
        memory, offset, length, expected = batch.blocks[batch.here]
        assert len(content) == length
        memory[offset : offset + length] = np.frombuffer(content, np.uint8)
        if not _has_hash(content, expected):
            batch.bad.append(batch.here)
        batch.here += 1
        if batch.here == len(batch.blocks):
            self.expected[conn].popleft()
            self.step(BlocksReceived(conn, batch.number, tuple(batch.bad)))


def _has_hash(content: bytes, expected: int | None) -> bool:
    return expected is None or int.from_bytes(block_hash(content, "rf64"), "little") == expected


class Net:
    """All nodes, the connections between them, and what is on its way."""

    def __init__(self, *peers: int) -> None:
        self.now_ns = 0
        self.pipes: dict[tuple[int, int], tuple[int, int]] = {}
        self.in_flight: deque[tuple[int, int, bytes | Event]] = deque()
        self.unreachable: set[int] = set()
        self.lies: Callable[[int, Message | bytes], Message | bytes] = lambda source, sent: sent
        self.epoch = self.syncs = 0
        self.last_conn = 100
        self.nodes = {peer: Node(self, peer) for peer in peers}
        for node in self.nodes.values():
            self._join(node)
        self.record(peers)

    def __getitem__(self, peer: int) -> Node:
        return self.nodes[peer]

    def _join(self, node: Node) -> None:
        node.step(CallJoin((("10.0.0.100", 48148),), self.now_ns + 10_000 * MS))
        node.step(Opened(CONTROL, NONCE))
        node.receives_from_master(Challenge(NONCE, VERSION, VERSION))
        node.receives_from_master(Welcome(node.peer, 1, prove(b"", "welcome", NONCE, NONCE), Liveness()))

    # What a network does

    def dial(self, node: Node, key: int, host: str) -> None:
        self.last_conn += 2
        here, there = self.last_conn, self.last_conn + 1
        target = int(host.rpartition(".")[2])
        node.step(Dialled(key, here))
        if target in self.unreachable or target not in self.nodes:
            self.in_flight.append((node.peer, here, Closed(here, "no route")))
            return
        self.pipes[node.peer, here], self.pipes[target, there] = (target, there), (node.peer, here)
        self.in_flight.append((node.peer, here, Opened(here, NONCE)))
        self.in_flight.append((target, there, Accepted(there, f"10.0.0.{node.peer}:9", NONCE)))

    def send(self, node: Node, conn: int, sent: Message | bytes) -> None:
        there = self.pipes.get((node.peer, conn))
        if there is not None:
            actual = self.lies(node.peer, sent)
            event = actual if isinstance(actual, bytes) else MessageReceived(there[1], frames.encode(actual))
            self.in_flight.append((*there, event))

    def close(self, node: Node, conn: int) -> None:
        there = self.pipes.pop((node.peer, conn), None)
        if there is not None:
            self.in_flight.append((*there, Closed(there[1], "closed by the other side")))

    def cut(self, one: int, other: int) -> None:
        """Break all connections between two nodes, as a cable does when it is noticed at both ends."""
        for (peer, conn), (there, _) in list(self.pipes.items()):
            if {peer, there} == {one, other}:
                del self.pipes[peer, conn]
                self.nodes[peer].expected.pop(conn, None)
                self.in_flight.append((peer, conn, Closed(conn, "reset")))

    def turn(self) -> bool:
        """Deliver one thing. False if nothing is on its way."""
        if not self.in_flight:
            return False
        peer, conn, what = self.in_flight.popleft()
        node = self.nodes.get(peer)
        is_lost = isinstance(what, Closed)
        if node is None or ((peer, conn) not in self.pipes and not is_lost):
            return True
        if is_lost:
            self.pipes.pop((peer, conn), None)
            node.expected.pop(conn, None)
        if isinstance(what, bytes):
            node.receives(conn, what)
        else:
            node.step(what)
        return True

    def run(self, until: Callable[[], object] = lambda: False) -> None:
        """Deliver until something is true, or everything has arrived."""
        while not until() and self.turn():
            pass

    def wait(self, ms: int) -> None:
        """Let time pass for all peers, deadline by deadline, and deliver what comes of it."""
        end_ns = self.now_ns + ms * MS
        while True:
            due = [(time, node.peer) for node in self.nodes.values() if (time := node.machine.next_deadline_ns())]
            if not due or min(due)[0] > end_ns:
                break
            at_ns, peer = min(due)
            self.now_ns = max(self.now_ns, at_ns)
            self.nodes[peer].step(Tick())
            self.run()
        self.now_ns = end_ns

    # What a master does

    def record(self, ring: Iterable[int], seal: bool = False) -> None:
        members = [_member(peer) for peer in ring]
        previous, self.epoch = self.epoch, self.epoch + 1
        for member in members if seal else ():
            self[member.peer].receives_from_master(Seal(previous, "a test"))
        made = Record(
            group=0,
            epoch=self.epoch,
            fence=1,
            previous=previous,
            reason="a test",
            members=members,
            dialers=[member.peer for member in members] if len(members) > 1 else [],
            newcomers=[],
            secret=b"of the epoch",
            evidence="ring",
            small_bytes=1,
            segment_bytes=1,
            lanes=1,
            registrations=len(members),
            pending=False,
            verdicts=[],
            world=World(len(members), 1, len(members)),
        )
        for member in members:
            self[member.peer].receives_from_master(made)
        self.run()
        for member in members:
            self[member.peer].receives_from_master(Installed(self.epoch, made.world))

    def vote(self, states: dict[int, SharedState], timeout_ms: int = 60_000) -> dict[int, Offer]:
        """All peers call sync_shared_state. Returns the offers."""
        offers = {}
        for peer, state in states.items():
            node = self[peer]
            snapshot = Snapshot.take(state)
            offer = snapshot.manifest.offer("enforce-popular")
            node.calls_sync(snapshot, offer, self.now_ns + timeout_ms * MS)
            vote = node.to_master[-1]
            assert isinstance(vote, Vote)
            assert vote.offer is not None
            offers[peer] = vote.offer
        return offers

    def plan(self, offers: dict[int, Offer], late: Iterable[int] = ()) -> ElectedState:
        """Decide the sync, and send the plans, except to the `late` peers."""
        decision = elect(offers, None)
        assert isinstance(decision, ElectedState)
        self.syncs += 1
        self.plans = {peer: self.plan_for(peer, decision) for peer in decision.participants}
        for peer, plan in self.plans.items():
            if peer not in late:
                self[peer].receives_from_master(plan)
        return decision

    def plan_for(self, peer: int, decision: ElectedState) -> SyncPlan:
        return SyncPlan(
            ballot=self[peer].ballot,
            sync=self.syncs,
            revision=decision.revision,
            secret=b"of sync %d" % self.syncs,
            holders=[_member(holder) for holder in decision.holders],
            receivers=[_member(receiver) for receiver in sorted(decision.fetch)],
            fetch=decision.fetch.get(peer, []),
        )

    def done(self, *peers: int) -> None:
        for peer in peers:
            self[peer].receives_from_master(SyncDone(self[peer].ballot, self.syncs, 7))


def _member(peer: int) -> Member:
    return Member(peer, f"n{peer}", "h", [f"10.0.0.{peer}"], 1)


def state(seed: int, revision: int = 0, blocks: int = 6, kind: Literal["rf64", "blake3"] = "rf64") -> SharedState:
    rng = np.random.default_rng(seed)
    small = {f"s{number}": rng.integers(0, 256, 5, np.uint8) for number in range(3)}
    return SharedState(small, w=rng.integers(0, 256, blocks * MIB - 7, np.uint8), revision=revision, hash=kind)


def content(of: SharedState) -> bytes:
    return b"".join(bytes(array) for array in of.arrays.values())  # type: ignore[call-overload]


def begun(net: Net, holders: int = 1, **more: object) -> dict[int, SharedState]:
    """The first so many nodes have the state that wins; the others fetch it. The plans are out."""
    winners = set(sorted(net.nodes)[:holders])
    states = {peer: state(0, 7) if peer in winners else state(peer) for peer in net.nodes}
    net.plan(net.vote(states), **more)  # type: ignore[arg-type]
    return states


def are_open(net: Net) -> list[int]:
    """How many connections each node has, beside its two lanes."""
    return [sum(peer == node for node, _ in net.pipes) - 2 for peer in net.nodes]


# What goes well


def test_a_receiver_ends_with_the_holders_bytes() -> None:
    net = Net(1, 2)
    states = begun(net)
    net.run()
    assert len(net[2].reports("complete")) == 1
    net.done(1, 2)
    assert content(states[2]) == content(states[1])
    moved = len(content(states[1]))
    assert net[2].finished == {1: SyncSucceeded(7, 0, moved)}
    assert net[1].finished == {1: SyncSucceeded(7, moved, 0)}
    net.run()
    assert are_open(net) == [0, 0]


def test_receivers_get_it_from_each_other_as_well() -> None:
    net = Net(1, 2, 3)
    states = {1: state(0, 7, blocks=24), 2: state(2, blocks=24), 3: state(3, blocks=24)}
    net.plan(net.vote(states))
    net.run()
    net.done(1, 2, 3)
    assert content(states[1]) == content(states[2]) == content(states[3])
    sent = [net[peer].finished[1].tx_bytes for peer in (1, 2, 3)]  # type: ignore[attr-defined]
    assert sum(sent) == 2 * len(content(states[1]))
    assert sent[1] + sent[2] > 0


def test_a_holder_that_receives_the_plan_last_accepts_its_receivers_then() -> None:
    net = Net(1, 2)
    states = begun(net, late=[1])
    net.run()
    assert net[2].reports("complete") == []
    net[1].receives_from_master(net.plans[1])
    net.run()
    assert len(net[2].reports("complete")) == 1
    assert content(states[2]) == content(states[1])


def test_one_sync_after_another() -> None:
    net = Net(1, 2)
    for revision in (7, 8):
        states = {1: state(revision, revision), 2: state(2)}
        net.plan(net.vote(states))
        net.run()
        net.done(1, 2)
        assert content(states[1]) == content(states[2])
    assert len(net[2].reports("complete")) == 2


def test_blake3_is_checked_by_the_peer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def blake3(data: Numbers | bytes, max_threads: int = 1) -> object:
        return blake2b(bytes(data), digest_size=32)

    blake3.AUTO = -1  # type: ignore[attr-defined]
    for module in (blocks, hashing):
        monkeypatch.setattr(module, "load_blake3", lambda: SimpleNamespace(blake3=blake3))
    net = Net(1, 2, 3)
    net.lies = flipping(1, 1)
    states = {peer: state(0 if peer < 3 else 3, 7 if peer < 3 else 0, kind="blake3") for peer in (1, 2, 3)}
    net.plan(net.vote(states))
    net.run()
    assert len(net[3].reports("corrupt")) == 1
    assert len(net[3].reports("complete")) == 1
    assert content(states[3]) == content(states[1])


def flipping(liar: int, which: int) -> Callable[[int, Message | bytes], Message | bytes]:
    """One block of `liar` comes with a bit flipped."""
    count = 0

    def lie(source: int, sent: Message | bytes) -> Message | bytes:
        nonlocal count
        if source != liar or not isinstance(sent, bytes) or len(sent) < MIB:
            return sent
        count += 1
        return sent if count != which else bytes([sent[0] ^ 1]) + sent[1:]

    return lie


# Failures during a sync


def test_a_holder_that_is_lost_in_the_middle_costs_only_what_it_owed() -> None:
    net = Net(1, 2, 3)
    states = begun(net, holders=2)
    net.run(lambda: any(net[3].expected.values()))
    net.cut(1, 3)
    net.unreachable.add(1)
    net.run()
    assert len(net[3].reports("complete")) == 1
    assert content(states[3]) == content(states[2])


def test_a_holder_that_is_evicted_while_it_is_frozen_is_not_waited_for() -> None:
    """Its connection stands, and nothing comes on it."""
    net = Net(1, 2, 3)
    states = begun(net, holders=2)
    net.run(lambda: any(net[3].expected.values()))
    del net.nodes[1]
    net.run()
    assert net[3].reports("complete") == []
    net.record((2, 3), seal=True)
    net.run()
    assert len(net[3].reports("complete")) == 1
    assert content(states[3]) == content(states[2])


def test_a_source_that_lives_but_sends_nothing_is_not_waited_for() -> None:
    """It is not evicted: its heartbeats come from native code, but its Python hangs."""
    net = Net(1, 2, 3)
    states = begun(net, holders=2)
    net.run(lambda: any(net[3].expected.values()))
    del net.nodes[1]
    net.run()
    assert net[3].reports("complete") == []
    net.wait(SOURCE_TIMEOUT_NS // MS + 10_000)
    assert len(net[3].reports("complete")) == 1
    assert content(states[3]) == content(states[2])


def test_a_source_that_was_idle_for_long_gets_the_full_timeout_when_it_is_used_again() -> None:
    net = Net(1, 2)
    begun(net)
    net.run(lambda: any(net[2].expected.values()))
    net.now_ns += SOURCE_TIMEOUT_NS - 1
    net.turn()
    net.run()
    assert len(net[2].reports("complete")) == 1
    assert net[2].machine.next_deadline_ns() == 60_000 * MS, "nothing is owed any more"


def test_a_sync_that_moves_does_not_run_out_of_time() -> None:
    net = Net(1, 2)
    states = {1: state(0, 7), 2: state(2)}
    net.plan(net.vote(states, timeout_ms=8_000))
    net.run(lambda: any(net[2].expected.values()))
    net.now_ns += PROGRESS_REPORT_INTERVAL_NS
    net.run()
    assert [report.outcome for report in net[2].reports("progress")] == ["progress"]
    for node in (net[1], net[2]):
        node.receives_from_master(SyncExtended(1))
        assert node.machine.next_deadline_ns() == PROGRESS_REPORT_INTERVAL_NS + 8_000 * MS


def test_a_connection_that_breaks_is_opened_again() -> None:
    """The holder is still there: a hiccup of the network is no reason to leave a receiver with half a state."""
    net = Net(1, 2)
    states = begun(net)
    for _ in range(MAX_CONNECT_ATTEMPTS - 1):
        net.run(lambda: any(net[2].expected.values()))
        net.cut(1, 2)
        net.run()
        assert not any(net[2].expected.values())
        net.wait(1_000)
    net.run()
    assert len(net[2].reports("complete")) == 1
    assert net[2].reports("stuck") == []
    assert content(states[2]) == content(states[1])


def test_a_holder_that_cannot_be_reached_is_given_up_after_some_tries() -> None:
    net = Net(1, 2)
    begun(net, late=[2])
    net.unreachable.add(1)
    net[2].receives_from_master(net.plans[2])
    net.run()
    assert net[2].reports("stuck") == []
    net.wait(5_000)
    assert len(net[2].reports("stuck")) == 1
    assert net[2].machine.next_deadline_ns() == 60_000 * MS, "only the call itself waits for something"


def test_a_source_that_is_out_of_the_run_is_not_connected_to_again() -> None:
    net = Net(1, 2, 3)
    begun(net, holders=2)
    net.run(lambda: any(net[3].expected.values()))
    net.cut(1, 3)
    net.run()
    del net.nodes[1]
    net.record((2, 3), seal=True)
    net.wait(5_000)
    assert len(net[3].reports("complete")) == 1
    assert net[3].machine.next_deadline_ns() == 60_000 * MS


def test_the_only_holder_gone_leaves_a_receiver_stuck() -> None:
    net = Net(1, 2, 3)
    begun(net)
    net.run(lambda: any(net[2].expected.values()) and any(net[3].expected.values()))
    del net.nodes[1]
    net.record((2, 3), seal=True)
    net.run()
    for peer in (2, 3):
        assert [report.blame for report in net[peer].reports("stuck")] == [[1]]


def test_a_corrupt_block_is_reported_and_fetched_from_another_source() -> None:
    net = Net(1, 2, 3)
    net.lies = flipping(1, 1)
    states = begun(net, holders=2)
    net.run()
    (report,) = net[3].reports("corrupt")
    assert report.blame == [1]
    assert "'w'" in report.text
    assert content(states[3]) == content(states[1])


def test_a_source_that_refuses_is_given_up() -> None:
    net = Net(1, 2, 3)
    states = begun(net, holders=2)
    net[1].receives_from_master(CallFailed(1, Reason("deadline", "its time was over")))
    net.run()
    assert len(net[3].reports("complete")) == 1
    assert content(states[3]) == content(states[2])


def test_a_peer_that_changes_its_state_during_the_sync_reports_itself_and_serves_no_more() -> None:
    net = Net(1, 2, 3)
    states = begun(net, holders=2)
    net.run(lambda: any(net[3].expected.values()))
    winner = content(states[2])
    for array in states[1].arrays.values():
        array[:] = 0  # type: ignore[index]
    net.run()
    (report,) = net[1].reports("changed")
    assert "'s0', 's1', 's2' were written to" in report.text
    assert content(states[3]) == winner


def test_a_receiver_that_is_complete_still_reports_that_it_was_changed() -> None:
    """It would hold, and vote for, a state that no peer has."""
    net = Net(1, 2, 3)
    states = {1: state(0, 7, blocks=24), 2: state(2, blocks=24), 3: state(3, blocks=24)}
    net.plan(net.vote(states), late=[3])
    net.run()
    assert len(net[2].reports("complete")) == 1
    states[2].arrays["w"][:] = 0  # type: ignore[index]
    net[3].receives_from_master(net.plans[3])
    net.run()
    assert len(net[2].reports("changed")) == 1
    assert content(states[3]) == content(states[1])


def test_a_withdrawn_sync_writes_no_more_bytes() -> None:
    net = Net(1, 2)
    states = begun(net)
    net.run(lambda: any(net[2].expected.values()))
    net[2].step(CallGivenUp(1))
    before = content(states[2])
    net.run()
    assert isinstance(net[2].to_master[-1], VoteWithdrawn)
    assert content(states[2]) == before
    assert net[2].machine.has_written(net[2].manifest)
    assert are_open(net) == [0, 0]


def test_a_failed_sync_writes_no_more_bytes() -> None:
    net = Net(1, 2)
    states = begun(net)
    net.run(lambda: any(net[2].expected.values()))
    reason = Reason("deadline", "its time was over")
    net[2].receives_from_master(CallFailed(1, reason))
    before = content(states[2])
    net.run()
    assert net[2].finished == {1: reason}
    assert content(states[2]) == before


def test_a_sync_whose_time_is_over_writes_no_more_bytes_although_the_master_is_silent() -> None:
    net = Net(1, 2)
    states = {1: state(0, 7), 2: state(2)}
    net.plan(net.vote(states, timeout_ms=500))
    net.run(lambda: any(net[2].expected.values()))
    net.now_ns += 500 * MS
    net[2].step(Tick())
    net.now_ns += TIMINGS.answer_ms * MS
    net[2].step(Tick())
    assert isinstance(net[2].finished[1], Reason)
    before = content(states[2])
    net.run()
    assert content(states[2]) == before
    assert are_open(net) == [0, 0]


def test_a_sync_can_begin_after_one_that_the_master_never_ended() -> None:
    net = Net(1, 2)
    net.plan(net.vote({1: state(0, 7), 2: state(2)}, timeout_ms=500), late=[1])
    net.wait(500 + TIMINGS.answer_ms)
    assert isinstance(net[2].finished[1], Reason)
    states = begun(net)
    net.run()
    assert content(states[2]) == content(states[1])


def test_the_end_of_the_session_ends_the_sync() -> None:
    net = Net(1, 2)
    states = begun(net)
    net.run(lambda: any(net[2].expected.values()))
    net[2].step(Closed(CONTROL, "reset"))
    assert isinstance(net[2].ended, MasterUnreachable)
    before = content(states[2])
    net.run()
    assert content(states[2]) == before


def test_a_plan_for_a_call_that_was_given_up_is_ignored() -> None:
    net = Net(1, 2)
    states = begun(net, late=[2])
    net[2].step(CallGivenUp(1))
    net[2].receives_from_master(net.plans[2])
    net.run()
    assert not net[2].machine.has_written(net[2].manifest)
    assert content(states[2]) == content(state(2))


def test_a_receiver_does_not_wait_at_the_door_of_a_holder_that_gave_the_sync_up() -> None:
    net = Net(1, 2)
    begun(net, late=[1])
    net.run()
    net[1].step(CallGivenUp(1))
    net[1].receives_from_master(net.plans[1])
    net.run()
    assert len(net[2].reports("stuck")) == 1


# What becomes of the program's state


class Program:
    """A session of which the test says how its next sync goes."""

    def __init__(self, node: Node, sync: Callable[[Snapshot], SyncSucceeded]) -> None:
        self._node, self._sync = node, sync

    def sync(self, offer: Offer, snapshot: Snapshot, min_world: int, timeout_s: float, *, final: bool) -> SyncSucceeded:
        return self._sync(snapshot)

    def locked(self, look: Callable[[PeerMachine], T]) -> T:
        return look(self._node.machine)


def interrupted(snapshot: Snapshot) -> SyncSucceeded:
    raise KeyboardInterrupt


def synced(net: Net, mine: SharedState, end: Callable[[], SyncSucceeded]) -> SyncInfo:
    """Node 2 of two calls `sync_state`, and fetches the state of node 1, until `end` says how its call ends."""

    def sync(snapshot: Snapshot) -> SyncSucceeded:
        offers = net.vote({1: state(0, 7)})
        offer = snapshot.manifest.offer("enforce-popular")
        net[2].calls_sync(snapshot, offer, net.now_ns + 60_000 * MS)
        net.plan({**offers, 2: offer})
        return end()

    return sync_state(Program(net[2], sync), mine, strategy="enforce-popular", timeout_s=1)


def whole(net: Net) -> SyncSucceeded:
    net.run()
    net.done(1, 2)
    outcome = net[2].finished[net[2].ballot]
    assert isinstance(outcome, SyncSucceeded)
    return outcome


def test_a_sync_that_ends_well_takes_the_tear_away() -> None:
    net, mine = Net(1, 2), state(2)
    set_torn(mine, True)
    assert synced(net, mine, lambda: whole(net)).revision == 7
    assert (mine.revision, mine.torn) == (7, False)


def test_a_sync_that_ends_in_the_middle_leaves_the_state_torn() -> None:
    net, mine = Net(1, 2), state(2)

    def interrupt() -> SyncSucceeded:
        net.run(lambda: any(net[2].expected.values()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synced(net, mine, interrupt)
    assert (mine.revision, mine.torn) == (0, True)


def test_a_sync_that_ends_before_the_first_byte_leaves_the_state_as_it_was() -> None:
    for before in (False, True):
        mine = state(2)
        set_torn(mine, before)
        with pytest.raises(KeyboardInterrupt):
            sync_state(Program(Net(1, 2)[2], interrupted), mine, strategy="enforce-popular", timeout_s=1)
        assert mine.torn is before


def test_a_sync_that_cannot_even_begin_does_not_tear_what_an_earlier_one_wrote() -> None:
    """The master is gone, say: what was received and verified long ago is still worth a checkpoint."""
    net, mine = Net(1, 2), state(2)
    synced(net, mine, lambda: whole(net))
    with pytest.raises(KeyboardInterrupt):
        sync_state(Program(net[2], interrupted), mine, strategy="enforce-popular", timeout_s=1)
    assert not mine.torn


def test_an_interrupt_in_the_last_moment_leaves_a_state_that_the_next_sync_heals() -> None:
    """Its content is the run's, its revision is not yet: if it voted, it would be refused for ever."""
    net, mine = Net(1, 2), state(2)

    def interrupt() -> SyncSucceeded:
        whole(net)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synced(net, mine, interrupt)
    assert mine.torn


def test_another_call_does_not_make_the_tear_forgotten() -> None:
    """Another thread may vote for something before the one that synced has looked."""
    net, mine = Net(1, 2), state(2)

    def fail() -> SyncSucceeded:
        net.run(lambda: any(net[2].expected.values()))
        net[2].receives_from_master(CallFailed(net[2].ballot, Reason("state", "a test")))
        net[2].step(CallVote(99, "update", 0, net.now_ns + 1_000 * MS))
        raise StateError("a test")

    with pytest.raises(StateError):
        synced(net, mine, fail)
    assert mine.torn


def test_a_state_of_other_objects_is_taken_over_while_it_still_counts_as_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    net, mine = Net(1, 2), state(2)
    called: list[object] = []
    monkeypatch.setattr(mine, "_before_read", lambda: called.append("read"))
    monkeypatch.setattr(mine, "_after_write", lambda: called.append(("write", mine.torn)))
    synced(net, mine, lambda: whole(net))
    assert called == ["read", ("write", True)]


def test_a_state_of_other_objects_is_not_taken_over_if_the_sync_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    net, mine = Net(1, 2), state(2)
    called: list[object] = []
    monkeypatch.setattr(mine, "_after_write", lambda: called.append("write"))

    def interrupt() -> SyncSucceeded:
        whole(net)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synced(net, mine, interrupt)
    assert (called, mine.torn) == ([], True)


def test_objects_that_do_not_take_the_state_leave_it_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    net, mine = Net(1, 2), state(2)

    def refuse() -> None:
        raise StateError("a test")

    monkeypatch.setattr(mine, "_after_write", refuse)
    with pytest.raises(StateError):
        synced(net, mine, lambda: whole(net))
    assert (mine.revision, mine.torn) == (0, True)


# Peers that lie


def liar(wanted: Message) -> Callable[[int, Message | bytes], Message | bytes]:
    """Peer 2 requests something else than its machine decides."""
    return lambda source, sent: wanted if source == 2 and isinstance(sent, BlocksWanted | HashesWanted) else sent


@pytest.mark.parametrize(
    "wanted",
    [
        BlocksWanted([(0, 99)]),
        BlocksWanted([]),
        BlocksWanted([(3, 0)] * 100),
        HashesWanted([99]),
        Hashes([]),
    ],
    ids=["no such block", "no block", "too much", "no such key", "out of turn"],
)
def test_a_peer_that_requests_nonsense_gets_nothing_and_does_no_harm(wanted: Message) -> None:
    net = Net(1, 2, 3)
    net.lies = liar(wanted)
    states = begun(net)
    net.run()
    net.wait(10_000)
    assert len(net[3].reports("complete")) == 1
    assert len(net[2].reports("stuck")) + len(net[2].reports("complete")) == 1
    assert net[1].ended is None
    assert content(states[3]) == content(states[1])


def test_a_request_for_more_hashes_than_a_fetch_makes_is_refused() -> None:
    server = BlockServer(Snapshot.take(state(0)).manifest)
    assert isinstance(server.hashes_for([0]), list)
    assert isinstance(server.hashes_for([0] * (HASHES_KEYS + 1)), BlockRefusal)
    assert isinstance(server.hashes_for([]), BlockRefusal)


def test_many_long_hash_lists_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HASHES_BYTES", 40)
    server = BlockServer(Snapshot.take(state(0)).manifest)
    assert isinstance(server.hashes_for([3]), list), "the list of one key may be as long as it is"
    assert isinstance(server.hashes_for([0, 3]), BlockRefusal)


@pytest.mark.parametrize(
    "fetch",
    [[(99, bytes(8))], [(0, b"short")], [(0, bytes(8)), (0, bytes(8))]],
    ids=["no such key", "no root", "twice the same"],
)
def test_a_plan_that_makes_no_sense_costs_the_master_its_peer(fetch: list[tuple[int, bytes]]) -> None:
    net = Net(1, 2)
    begun(net, late=[2])
    net[2].receives_from_master(msgspec.structs.replace(net.plans[2], fetch=fetch))
    assert isinstance(net[2].ended, MasterUnreachable)
    assert "sync" in str(net[2].ended)


def test_a_plan_that_does_not_count_its_receiver_costs_the_master_its_peer() -> None:
    net = Net(1, 2)
    begun(net, late=[2])
    net[2].receives_from_master(msgspec.structs.replace(net.plans[2], receivers=[]))
    assert isinstance(net[2].ended, MasterUnreachable)


def test_a_plan_in_the_middle_of_a_sync_costs_the_master_its_peer() -> None:
    net = Net(1, 2)
    begun(net)
    net[2].receives_from_master(msgspec.structs.replace(net.plans[2], sync=9))
    assert isinstance(net[2].ended, MasterUnreachable)


def test_a_plan_for_another_call_costs_the_master_its_peer() -> None:
    net = Net(1, 2)
    begun(net, late=[2])
    net[2].step(CallGivenUp(1))
    net[2].step(CallVote(2, "update", 0, net.now_ns + 1_000 * MS))
    net[2].receives_from_master(msgspec.structs.replace(net.plans[2], ballot=2))
    assert isinstance(net[2].ended, MasterUnreachable)


def lying_about(block: int) -> Callable[[int, Message | bytes], Message | bytes]:
    """Peer 1 sends one block wrong to every peer that requests it."""
    right = bytes(state(0).arrays["w"][block * MIB : (block + 1) * MIB])  # type: ignore[index]
    return lambda source, sent: bytes(len(right)) if source == 1 and sent == right else sent


@pytest.mark.parametrize("receivers", [2, 7])
def test_receivers_do_not_wait_for_each_other_for_what_the_holder_sends_wrong(receivers: int) -> None:
    """Each of them has a holder, but none can get this block from it, and none ever will."""
    net = Net(*range(1, 2 + receivers))
    net.lies = lying_about(2)
    begun(net)
    net.run()
    for peer in range(2, 2 + receivers):
        (report,) = net[peer].reports("stuck")
        assert 1 in report.blame
