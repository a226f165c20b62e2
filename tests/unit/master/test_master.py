"""The master machine, rule by rule, and against peers that send invalid messages."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.master.effects import (
    CloseConnection,
    Effect,
    Notify,
    RaiseFrameLimit,
    SendEvidence,
    SendHeartbeat,
    SendMessage,
)
from ringfold.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    DoneReceived,
    Event,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
    Tick,
)
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.descriptor import Descriptor
from ringfold.wire.frames import Announced, Done, Heartbeat
from ringfold.wire.messages import FromMaster, ToMaster
from ringfold.wire.notices import ConnectionDropped, Notice, PeerGone
from ringfold.wire.proof import derive, prove, proven

MS = 1_000_000
TOKEN = b"a token"
SECRET = b"run secret"
CALLED = Descriptor(0, retry=1).pack()
NONCE = b"n" * 32


class MasterHarness:
    """A master and its peers, named by their ids; connection and peer have the same number by default."""

    def __init__(self, **changed: object) -> None:
        self.now = 0
        self.master = Master(MasterSettings(**changed), TOKEN, SECRET, started_ns=0)  # type: ignore[arg-type]
        self.effects: list[Effect] = []
        self.heartbeats: dict[int, int] = {}
        self.frozen: set[int] = set()
        self.conns: list[int] = []
        self.last_heartbeat = 0

    def step(self, event: Event) -> list[Effect]:
        effects = self.master.step(self.now, event)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, SendHeartbeat):
                self.last_heartbeat = effect.number
            if isinstance(effect, CloseConnection) and effect.conn in self.conns:
                self.conns.remove(effect.conn)
        return effects

    def receive(self, conn: int, message: ToMaster) -> list[FromMaster]:
        """What the connection itself is answered."""
        return [
            each.message
            for each in self.step(MessageReceived(conn, message))
            if isinstance(each, SendMessage) and each.conn == conn
        ]

    def open(self, conn: int) -> None:
        self.step(ConnectionOpened(conn, f"host:{conn}", bytes([conn % 256]) * 32))

    def join(self, conn: int, group: int = 0, token: bytes = TOKEN) -> list[FromMaster]:
        self.open(conn)
        self.conns.append(conn)
        return self.receive(conn, hello(conn, group, token))

    def ring(self, size: int) -> None:
        """Peers 1 to `size`, in one group, in epoch 2 (epoch 1 if there is one)."""
        for conn in range(1, size + 1):
            self.join(conn)
        self.receive(1, m.Attached(1))
        if size > 1:
            self.receive(1, m.Vote(1, "update", 1))
            self.seal_and_attach(1, [1], range(1, size + 1))

    def seal_and_attach(self, epoch: int, sealing: "range | list[int]", attaching: "range | list[int]") -> None:
        for conn in sealing:
            self.receive(conn, m.Sealed(epoch, []))
        for conn in attaching:
            self.receive(conn, m.Attached(epoch + 1))

    def wait(self, ms: int, **report: object) -> None:
        end = self.now + ms * MS
        while self.now < end:
            self.now += 50 * MS
            if self.now % (250 * MS) == 0:
                for conn in [conn for conn in self.conns if conn not in self.frozen]:
                    self.heartbeats[conn] = self.heartbeats.get(conn, 0) + 1
                    self.step(HeartbeatReceived(conn, Heartbeat(self.heartbeats[conn], self.last_heartbeat, **report)))  # type: ignore[arg-type]
            self.step(Tick())

    def sent(self, conn: int, kind: type[FromMaster]) -> list[FromMaster]:
        return [
            e.message
            for e in self.effects
            if isinstance(e, SendMessage) and e.conn == conn and isinstance(e.message, kind)
        ]

    def record(self, conn: int) -> m.Record:
        record = self.sent(conn, m.Record)[-1]
        assert isinstance(record, m.Record)
        return record

    def notices(self, kind: type[Notice]) -> list[Notice]:
        return [e.notice for e in self.effects if isinstance(e, Notify) and isinstance(e.notice, kind)]

    def closed(self) -> list[int]:
        return [e.conn for e in self.effects if isinstance(e, CloseConnection)]


def hello(conn: int, group: int = 0, token: bytes = TOKEN, **changed: object) -> m.Hello:
    proof = prove(token, "hello", bytes([conn % 256]) * 32, NONCE)
    whole = m.Hello(VERSION, group, "host", f"p{conn}", ["10.0.0.1"], 9, NONCE, proof)
    return msgspec.structs.replace(whole, **changed)


# Connections


def test_both_sides_prove_the_token() -> None:
    harness = MasterHarness()
    welcome = harness.join(1)[0]
    assert isinstance(welcome, m.Welcome)
    assert proven(TOKEN, welcome.proof, "welcome", NONCE, bytes([1]) * 32)
    assert RaiseFrameLimit(1) in harness.effects


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        (hello(1, token=b"wrong"), "wrong token: it is not the one that this master was started with"),
        (hello(1, token=b""), "this master needs a token, and none was given: set RINGFOLD_TOKEN_FILE"),
        (hello(1, version=0), "version 0"),
        (hello(1, group=-1), "group -1"),
        (hello(1, group=2**40), "group"),
        (hello(1, port=0), "port 0"),
        (hello(1, addresses=[]), "reach"),
        (hello(1, name="two\nlines"), "printable"),
        (hello(1, nonce=b""), "nonce"),
        (m.Leave(), "Leave where Hello"),
        (m.StatusRequest(VERSION, NONCE, b"wrong"), "wrong token"),
    ],
)
def test_a_wrong_claim_is_refused_with_its_reason(claim: ToMaster, why: str) -> None:
    harness = MasterHarness()
    harness.open(1)
    (refused,) = harness.receive(1, claim)
    assert isinstance(refused, m.Refused)
    assert why in refused.reason
    assert harness.closed() == [1]
    assert [type(each) for each in harness.notices(Notice)] == [ConnectionDropped]


def test_heartbeats_and_done_of_unauthenticated_clients_are_refused() -> None:
    for event in (
        HeartbeatReceived(1, Heartbeat(1, 0)),
        DoneReceived(1, Done(1, 0, 0, 0, b"d" * 32, 0, b"")),
        MalformedReceived(1, "garbage"),
    ):
        harness = MasterHarness()
        harness.open(1)
        harness.step(event)
        assert harness.closed() == [1]


def test_a_neighbour_that_died_is_lost_at_once() -> None:
    """Its own connection ends only when the kernel has freed its memory."""
    harness = MasterHarness()
    harness.ring(3)
    harness.receive(1, m.LinkLost(2, 1, 2, "its process has died", died=True))
    assert 2 in harness.closed()
    assert [gone.how for gone in harness.notices(PeerGone)] == ["lost"]  # type: ignore[attr-defined]
    harness.seal_and_attach(2, [1, 3], [1, 3])
    assert [member.peer for member in harness.record(1).members] == [1, 3]
    harness.receive(3, m.LinkLost(3, 3, 2, "its process has died", died=True))
    assert 3 in harness.closed(), "it has no such link"


def test_only_a_peer_of_the_same_host_can_know_of_a_death() -> None:
    harness = MasterHarness()
    for conn, host in ((1, "a"), (2, "b")):
        harness.open(conn)
        harness.conns.append(conn)
        harness.receive(conn, hello(conn, host=host))
    harness.receive(1, m.Attached(1))
    harness.receive(1, m.Vote(1, "update", 1))
    harness.seal_and_attach(1, [1], [1, 2])
    harness.receive(1, m.LinkLost(2, 1, 2, "its process has died", died=True))
    assert 2 not in harness.closed()


def test_the_oldest_unproven_connection_makes_room() -> None:
    harness = MasterHarness(max_unproven=3)
    harness.ring(1)
    for conn in range(10, 15):
        harness.open(conn)
    assert harness.closed() == [10, 11]


def test_a_connection_that_proves_nothing_in_time_is_closed() -> None:
    harness = MasterHarness()
    harness.open(7)
    harness.wait(4950)
    assert harness.closed() == []
    harness.wait(50)
    assert harness.closed() == [7]


def test_a_status_client_may_send_more_requests_and_counts_as_authenticated() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.open(9)
    proof = prove(TOKEN, "status", bytes([9]) * 32, NONCE)
    for _ in range(2):
        (status,) = harness.receive(9, m.StatusRequest(VERSION, NONCE, proof))
        assert isinstance(status, m.Status)
        assert [peer.peer for peer in status.peers] == [1, 2]
    harness.wait(6000)
    assert 9 not in harness.closed()
    assert isinstance(harness.receive(9, m.Leave())[0], m.Refused)


# Registration and admission


def test_every_registration_is_counted_and_sent_to_members_only() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2)
    harness.join(3)
    assert harness.sent(1, m.Registrations) == [m.Registrations(2), m.Registrations(3)]
    assert harness.sent(2, m.Registrations) == []


def test_the_record_has_the_registration_up_to_which_all_are_admitted() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.join(3)
    harness.step(ConnectionClosed(2, ""))
    harness.receive(1, m.Sealed(2, []))
    assert (harness.record(1).registrations, harness.record(1).pending) == (2, True)
    harness.receive(1, m.Attached(3))
    harness.receive(1, m.Vote(2, "update", 3))
    harness.join(4)
    harness.seal_and_attach(3, [1], [1, 3])
    assert (harness.record(3).registrations, harness.record(3).pending) == (3, True)
    assert harness.sent(3, m.Registrations) == [m.Registrations(4)], "a newcomer must know what the others know"


def test_when_all_members_are_gone_the_waiting_peers_are_accepted() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2)
    harness.join(3, group=5)
    harness.step(ConnectionClosed(1, ""))
    assert [member.peer for member in harness.record(2).members] == [2]
    assert harness.record(2).epoch == 2, "no epoch number comes twice in a group"
    assert harness.record(3).epoch == 1


def test_a_newcomer_that_dies_during_its_admission_does_not_hold_it_up() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2)
    harness.receive(1, m.Vote(2, "update", 1))
    harness.step(ConnectionClosed(2, ""))
    harness.seal_and_attach(1, [1], [1])
    assert [type(each) for each in harness.sent(1, m.CallDone)] == [m.CallDone]
    assert [member.peer for member in harness.record(1).members] == [1]


def test_a_newcomer_may_leave_before_its_first_epoch() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2)
    harness.receive(1, m.Vote(2, "update", 1))
    assert harness.receive(2, m.Leave()) == [m.Left()]
    harness.seal_and_attach(1, [1], [1])
    assert harness.record(1).newcomers == []


# Epoch changes


def test_the_secret_of_each_epoch_is_its_own() -> None:
    harness = MasterHarness()
    harness.ring(2)
    assert harness.record(1).secret == derive(SECRET, "epoch", 0, 2)
    assert harness.record(2).dialers == [1, 2]


def test_a_group_of_one_has_nothing_to_dial() -> None:
    harness = MasterHarness()
    harness.ring(1)
    assert harness.record(1).dialers == []


def test_the_survivors_keep_their_order_and_newcomers_follow_by_id() -> None:
    harness = MasterHarness()
    harness.ring(4)
    harness.join(5)
    harness.step(ConnectionClosed(2, ""))
    harness.seal_and_attach(2, [1, 3, 4], [1, 3, 4])
    for conn in (1, 3, 4):
        harness.receive(conn, m.Vote(5, "update", 3))
    harness.seal_and_attach(3, [1, 3, 4], [1, 3, 4, 5])
    assert [member.peer for member in harness.record(5).members] == [1, 3, 4, 5]
    assert harness.record(1).newcomers == [5]


def test_a_dead_peers_seal_does_not_count() -> None:
    """Peer 2 alone had the small op's result, sealed it, and died: no survivor has it for the others."""
    harness = MasterHarness()
    harness.ring(3)
    op = m.OpRef(0, 0)
    harness.step(ConnectionClosed(3, ""))
    harness.receive(2, m.Sealed(2, [m.SealedOp(op, "committed", 3, [b"x"] * 3, CALLED)]))
    harness.step(ConnectionClosed(2, ""))
    harness.receive(1, m.Sealed(2, [m.SealedOp(op, "unfinished", 3, None, CALLED)]))
    (verdict,) = harness.record(1).verdicts
    assert not verdict.commit
    assert verdict.reason is not None
    assert verdict.reason.peers == [2, 3]


def test_a_leaver_counts_as_a_survivor_for_the_verdict() -> None:
    harness = MasterHarness()
    harness.ring(2)
    op = m.OpRef(0, 0)
    harness.receive(2, m.Leave())
    harness.receive(1, m.Sealed(2, [m.SealedOp(op, "done", 2, None, CALLED)]))
    harness.receive(2, m.Sealed(2, [m.SealedOp(op, "unfinished", 2, None, CALLED)]))
    assert [verdict.commit for verdict in harness.record(1).verdicts] == [False]
    assert harness.sent(2, m.Left) == [m.Left()]


def test_a_peer_that_does_not_seal_in_time_is_evicted() -> None:
    harness = MasterHarness(seal_ms=2000)
    harness.ring(3)
    harness.step(ConnectionClosed(3, ""))
    harness.receive(1, m.Sealed(2, []))
    harness.wait(2000)
    assert harness.sent(2, m.Evicted) == [m.Evicted("it did not seal epoch 2 in time (seal_ms 2000)")]
    assert [member.peer for member in harness.record(1).members] == [1]


def test_after_too_many_failed_proposals_the_worst_member_goes() -> None:
    """Each time another edge of peer 3 fails, so that none becomes bad."""
    harness = MasterHarness(max_proposals=2)
    harness.ring(4)
    harness.step(ConnectionClosed(4, ""))
    for conn in (1, 2, 3):
        harness.receive(conn, m.Sealed(2, []))
    for epoch, (conn, source, target) in ((3, (2, 2, 3)), (4, (1, 3, 1))):
        for other in {1, 2, 3} - {conn}:
            harness.receive(other, m.Attached(epoch))
        harness.receive(conn, m.AttachFailed(epoch, [m.EdgeFailure(source, target, "refused")]))
        for other in (1, 2, 3):
            harness.receive(other, m.Sealed(epoch, []))
    assert harness.notices(PeerGone)[-1].peer == 3  # type: ignore[attr-defined]


def test_a_suspended_master_evicts_no_peer_when_it_resumes() -> None:
    harness = MasterHarness()
    harness.ring(3)
    harness.wait(1000)
    harness.now += 60_000 * MS
    harness.step(Tick())
    harness.wait(1000)
    assert harness.closed() == []
    harness.frozen = {2}
    harness.wait(5250)
    assert harness.closed() == [2], "but it judges as usual afterwards"


def test_a_peer_that_no_longer_receives_from_the_master_is_evicted() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.wait(1000)
    stuck = harness.last_heartbeat
    for _ in range(110):
        harness.now += 50 * MS
        for conn in (1, 2):
            harness.heartbeats[conn] += 1
            if conn in harness.conns:
                harness.step(
                    HeartbeatReceived(
                        conn, Heartbeat(harness.heartbeats[conn], harness.last_heartbeat if conn == 1 else stuck)
                    )
                )
        harness.step(Tick())
    assert harness.closed() == [2]


def test_the_master_sends_heartbeats_to_registered_peers_too() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2)
    harness.wait(500)
    heartbeats = [effect for effect in harness.effects if isinstance(effect, SendHeartbeat) and effect.conn == 2]
    assert [heartbeat.number for heartbeat in heartbeats] == [1, 2]


# Calls


def test_an_epoch_change_voids_votes_and_the_next_cast_counts() -> None:
    harness = MasterHarness()
    harness.ring(3)
    harness.receive(1, m.Vote(2, "update", 2))
    harness.receive(2, m.Vote(2, "update", 2))
    harness.step(ConnectionClosed(3, ""))
    harness.seal_and_attach(2, [1, 2], [1, 2])
    assert harness.sent(2, m.CallDone) == []
    assert harness.receive(2, m.Vote(2, "update", 2)) == [], "a vote of the old epoch is void"
    harness.receive(1, m.Vote(2, "update", 3))
    assert [type(each) for each in harness.receive(2, m.Vote(2, "update", 3))] == [m.CallDone]


def test_voters_are_answered_after_a_death_during_their_admission() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.join(3)
    harness.receive(1, m.Vote(2, "update", 2))
    harness.receive(2, m.Vote(2, "update", 2))
    harness.seal_and_attach(2, [1, 2], [])
    harness.step(ConnectionClosed(2, ""))
    harness.seal_and_attach(3, [1, 3], [1, 3])
    assert len(harness.sent(1, m.CallDone)) == 2
    assert harness.record(1).newcomers == [3], "no installed epoch has had it yet"


def test_a_call_withdrawn_during_its_admission_fails_and_is_not_answered_again() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2)
    harness.receive(1, m.Vote(5, "update", 1))
    (failed,) = harness.receive(1, m.VoteWithdrawn(5, 3000))
    assert isinstance(failed, m.CallFailed)
    assert (failed.reason.kind, failed.reason.waited_ms) == ("deadline", 3000)
    harness.seal_and_attach(1, [1], [1, 2])
    assert harness.sent(1, m.CallDone) == []


def test_pending_is_a_call_of_the_whole_run() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.join(2, group=1)
    harness.receive(1, m.Vote(2, "update", 1))
    harness.receive(2, m.Attached(1))
    assert harness.receive(1, m.Vote(3, "pending", 1)) == []
    harness.join(3)
    answers = harness.receive(2, m.Vote(1, "pending", 1))
    assert answers == [m.CallDone(1, True, m.World(2, 2, 1), 3, {1: 3, 2: 1}, 2)]
    assert harness.sent(1, m.CallDone)[-1] == m.CallDone(3, True, m.World(2, 2, 1), 3, {1: 3, 2: 1}, 2)


def test_a_peer_that_leaves_does_not_hold_up_a_vote() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.receive(1, m.Vote(2, "update", 2))
    harness.receive(2, m.Leave())
    harness.seal_and_attach(2, [1, 2], [1])
    assert [type(each) for each in harness.receive(1, m.Vote(2, "update", 3))] == [m.CallDone]


def test_status_shows_ops_by_what_all_members_announce() -> None:
    harness = MasterHarness()
    harness.ring(2)
    op = Announced(0, 3, 1200, 7, False)
    harness.step(HeartbeatReceived(1, Heartbeat(1, 0, 2, committed=3, ops=[op])))
    assert [peer.ops for peer in harness.master.status(0).peers] == [
        ["tag 0 seq 3: VOTE_INITIATE_COLLECTIVE_COMMS (1.2 s)"],
        [],
    ]
    (waiting,) = harness.master.waiting(0)
    assert (waiting.waiting, waiting.missing, waiting.since_ms) == ([1], [2], 1200)
    harness.step(HeartbeatReceived(2, Heartbeat(1, 0, 2, ops=[op])))
    assert harness.master.status(0).peers[1].ops == ["tag 0 seq 3: PERFORM_COLLECTIVE_COMMS (1.2 s)"]
    harness.step(HeartbeatReceived(2, Heartbeat(2, 0, 2, ops=[Announced(0, 3, 1300, 7, True)])))
    assert [peer.ops[0][:22] for peer in harness.master.status(0).peers] == ["tag 0 seq 3: VOTE_COMP"] * 2
    assert [op.state for op in harness.master.status(0).peers[0].op_states] == ["VOTE_COMPLETE_COLLECTIVE_COMMS"]
    first = harness.master.status(0).peers[0]
    assert (first.phase, first.state) == ("PEER_ACCEPTED", "COLLECTIVE_COMMUNICATIONS_RUNNING")


def test_status_shows_what_carries_each_link_of_the_ring() -> None:
    """As its source reports with its attachment; the next epoch begins without a report."""

    def links() -> list[tuple[int, int, str, int, int]]:
        (group,) = harness.master.status(0).groups
        return [(link.source, link.target, link.transport, link.lanes, link.in_memory) for link in group.ring_links]

    harness = MasterHarness()
    for conn in (1, 2, 3, 4):
        harness.join(conn)
    harness.receive(1, m.Attached(1))
    assert links() == []
    harness.receive(1, m.Vote(1, "update", 1))
    harness.receive(1, m.Sealed(1, []))
    harness.receive(1, m.Attached(2, lanes=4, in_memory=4))
    harness.receive(2, m.Attached(2, lanes=4))
    harness.receive(3, m.Attached(2, lanes=4, in_memory=1))
    mixed = [(1, 2, "shm", 4, 4), (2, 3, "tcp", 4, 0), (3, 4, "mixed", 4, 1)]
    assert links() == [*mixed, (4, 1, "unknown", 0, 0)]
    harness.receive(4, m.Attached(2))
    assert links() == [*mixed, (4, 1, "unknown", 0, 0)], "a peer of an earlier version reports no lanes"
    harness.step(ConnectionClosed(4, ""))
    harness.seal_and_attach(2, [1, 2, 3], [1])
    assert {transport for _, _, transport, _, _ in links()} == {"unknown"}


@pytest.mark.parametrize(("lanes", "in_memory"), [(1, 2), (-1, -1), (1, -1), (1 << 40, 0)])
def test_impossible_numbers_of_lanes_are_refused(lanes: int, in_memory: int) -> None:
    harness = MasterHarness()
    harness.join(1)
    harness.receive(1, m.Attached(1, lanes, in_memory))
    assert 1 not in harness.conns


def test_a_planted_verdict_is_used() -> None:
    """The seam that a simulation needs to show that it finds wrong verdicts."""

    class CommitsAll(Master):
        def _verdicts(self, seals, causes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            return [m.Verdict(m.OpRef(0, 9), commit=True)]

    harness = MasterHarness()
    harness.master = CommitsAll(MasterSettings(), TOKEN, SECRET, started_ns=0)
    harness.ring(2)
    harness.step(ConnectionClosed(2, ""))
    harness.receive(1, m.Sealed(2, []))
    assert harness.record(1).verdicts == [m.Verdict(m.OpRef(0, 9), commit=True)]


# Liars


LIES: list[ToMaster] = [
    hello(2),
    m.StatusRequest(VERSION, NONCE, b""),
    m.Vote(1, "update", 3),
    m.Sealed(2, []),
    m.Sealed(7, []),
    m.Attached(3),
    m.AttachFailed(2, []),
    m.AttachFailed(2, [m.EdgeFailure(1, 3, "not an edge")]),
    m.LinkLost(2, 3, 1, "not its edge"),
    m.OpMismatch(2, m.OpRef(0, 0), 9, bytes(32), bytes(32)),
    m.OpMismatch(2, m.OpRef(0, 0), 1, b"", b""),
    m.OpTimeout(9, m.OpRef(0, 0), 1, CALLED),
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: type(lie).__name__)
def test_an_invalid_message_evicts_its_sender_and_no_other(lie: ToMaster) -> None:
    harness = MasterHarness()
    harness.ring(3)
    harness.receive(2, lie)
    assert harness.closed() == [2]
    harness.seal_and_attach(2, [1, 3], [1, 3])
    assert [member.peer for member in harness.record(1).members] == [1, 3]


@pytest.mark.parametrize(
    "seal",
    [
        [m.SealedOp(m.OpRef(-1, 0), "done", 0, None, CALLED)],
        [m.SealedOp(m.OpRef(0, 1 << 32), "done", 0, None, CALLED)],
        [m.SealedOp(m.OpRef(0, 0), "done", 0, None, CALLED)] * 2,
        [m.SealedOp(m.OpRef(0, 0), "done", 0, None, CALLED[:-1])],
        [m.SealedOp(m.OpRef(0, 0), "done", 99, None, CALLED)],
        [m.SealedOp(m.OpRef(0, 0), "committed", 0, [b"x"], CALLED)],
    ],
)
def test_an_invalid_seal_evicts_its_sender(seal: list[m.SealedOp]) -> None:
    harness = MasterHarness()
    harness.ring(3)
    harness.step(ConnectionClosed(3, ""))
    harness.receive(2, m.Sealed(2, seal))
    assert harness.closed() == [2]


small = st.integers(-1, 4)
refs = st.builds(m.OpRef, small, small)
edges = st.builds(m.EdgeFailure, small, small, st.just("refused"))
ops = st.builds(
    m.SealedOp, refs, st.sampled_from(["unfinished", "done", "committed"]), small, st.none() | st.just([b""] * 3)
)
descriptors = st.sampled_from([bytes(48), Descriptor(4).pack(), b"short"])
spoken = st.one_of(
    st.builds(m.Vote, small, st.sampled_from(["update", "pending", "optimize"]), small, small, st.just([(0, 1)])),
    st.builds(m.VoteWithdrawn, small, small),
    st.builds(m.LinkMeasured, small, small, st.floats(), small, st.sampled_from(["", "no route"])),
    st.builds(m.Sealed, small, st.lists(ops, max_size=2)),
    st.builds(m.Attached, small),
    st.builds(m.AttachFailed, small, st.lists(edges, max_size=2)),
    st.builds(m.LinkLost, small, small, small, st.just("reset")),
    st.builds(m.OpMismatch, small, refs, small, descriptors, descriptors),
    st.builds(m.OpTimeout, small, refs, small),
    st.builds(m.OpCancelled, small, refs),
    st.just(m.Leave()),
)
unsigned = st.integers(0, 4)
heartbeats = st.builds(
    Heartbeat,
    unsigned,
    unsigned,
    unsigned,
    st.sampled_from([0, 3000]),
    st.sampled_from([0, 3000]),
    unsigned,
    st.lists(st.builds(Announced, unsigned, unsigned, st.sampled_from([0, 900]), unsigned, st.booleans()), max_size=2),
)
dones = st.builds(
    Done, unsigned, unsigned, unsigned, unsigned, st.sampled_from([b"d" * 32, b"e" * 32]), unsigned, st.just(b"")
)
conns = st.integers(1, 6)
events = st.one_of(
    st.builds(MessageReceived, conns, spoken),
    st.builds(HeartbeatReceived, conns, heartbeats),
    st.builds(DoneReceived, conns, dones),
    st.builds(MalformedReceived, conns, st.just("garbage")),
    st.builds(ConnectionClosed, conns, st.just("")),
    st.just("answer"),
    st.just("join"),
    st.just("tick"),
)


@given(st.sampled_from(["ring", "master"]), st.lists(events, max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_input_breaks_the_machine_and_honest_peers_end_up_in_an_epoch(
    evidence: str, script: list[Event | str]
) -> None:
    """Anything in any order. Afterwards the remaining peers respond correctly, and every change ends."""
    harness = MasterHarness(evidence=evidence)
    harness.ring(3)
    for number, event in enumerate(script, 100):
        match event:
            case "answer":
                answer_honestly(harness)
            case "join":
                harness.join(number, group=number % 2)
            case "tick":
                harness.wait(300)
            case _:
                assert not isinstance(event, str)
                harness.step(event)
                if isinstance(event, ConnectionClosed) and event.conn in harness.conns:
                    harness.conns.remove(event.conn)
    for _ in range(40):
        answer_honestly(harness)
    status = harness.master.status(harness.now)
    assert all(group.phase == "idle" for group in status.groups)
    assert len(status.peers) == len(harness.conns)
    sent = [effect for effect in harness.effects if isinstance(effect, SendEvidence)]
    assert evidence == "master" or not sent


def answer_honestly(harness: MasterHarness) -> None:
    """All peers answer the last Seal or Record that they got, as far as the master waits for them."""
    waited_for = {peer for waiting in harness.master.waiting(harness.now) for peer in waiting.missing}
    status = harness.master.status(harness.now)
    peers = {peer.peer: peer for peer in status.peers}
    groups = {group.group: group for group in status.groups}
    for conn in list(harness.conns):
        last = [e.message for e in harness.effects if isinstance(e, SendMessage) and e.conn == conn]
        welcome = next(message for message in last if isinstance(message, m.Welcome))
        peer = peers.get(welcome.peer)
        if peer is None or peer.peer not in waited_for or peer.group not in groups:
            continue
        group = groups[peer.group]
        if group.phase == "sealing":
            harness.step(MessageReceived(conn, m.Sealed(group.epoch, [])))
        elif group.phase == "attaching":
            harness.step(MessageReceived(conn, m.Attached(group.epoch)))
        status = harness.master.status(harness.now)
        groups = {each.group: each for each in status.groups}
        waited_for = {each for waiting in harness.master.waiting(harness.now) for each in waiting.missing}


def test_a_slow_client_may_try_again_and_an_idle_status_client_is_closed() -> None:
    """A refusal ends a join, so a connection that was only silent is closed without one."""
    master = Master(MasterSettings(), b"", b"s" * 32)
    master.step(0, ConnectionOpened(1, "slow", b"n" * 32))
    master.step(0, ConnectionOpened(2, "watcher", b"n" * 32))
    proof = prove(b"", "status", b"n" * 32, b"w" * 32)
    master.step(0, MessageReceived(2, m.StatusRequest(VERSION, b"w" * 32, proof)))
    gone: dict[int, list[Effect]] = {}
    for ms in range(0, 125_000, 50):
        for effect in master.step(ms * 1_000_000, Tick()):
            if isinstance(effect, SendMessage | CloseConnection):
                gone.setdefault(ms, []).append(effect)
    assert [type(effect) for effect in gone[5_000]] == [CloseConnection]
    assert [type(effect) for effect in gone[120_000]] == [CloseConnection]
    assert len(gone) == 2


def test_a_newcomer_is_sent_every_second_which_peers_it_waits_for() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.receive(1, m.Vote(2, "pending", 2))
    harness.join(3)
    harness.wait(950)
    assert not harness.sent(3, m.AdmissionWaits)
    harness.wait(1_100)
    assert harness.sent(3, m.AdmissionWaits) == [
        m.AdmissionWaits(
            "these have not called update_topology: peer 1 (p1) waits in meet; "
            f"peer 2 (p2) has been in its own code for {second}.0 s",
            [1, 2],
        )
        for second in (1, 2)
    ]
    assert not harness.sent(2, m.AdmissionWaits)


def test_a_newcomer_is_sent_progress_as_long_as_steps_take() -> None:
    harness = MasterHarness()
    harness.ring(2)
    for committed in (1, 2):
        harness.wait(2_000, committed=committed, epoch=2)
    harness.join(3)
    harness.heartbeats[3] = 0
    moving = []
    for _ in range(6):
        harness.frozen = {3}  # only members name an epoch in their heartbeats
        harness.wait(1_000, committed=2, epoch=2)
        moving.append(harness.sent(3, m.AdmissionWaits)[-1].moving)  # type: ignore[union-attr]
    assert moving == [True, True, False, False, False, False]


def test_a_newcomer_is_sent_how_many_peers_its_group_waits_for() -> None:
    harness = MasterHarness()
    harness.ring(1)
    harness.receive(1, m.Vote(2, "update", 1, min_world=3))
    harness.join(2)
    harness.wait(1_000)
    [waits] = harness.sent(2, m.AdmissionWaits)
    assert waits == m.AdmissionWaits("peer 1 (p1) wants 3 peers in its group, 2 are there: start more peers", [])


def test_a_newcomer_is_sent_which_peers_delay_an_epoch_change() -> None:
    harness = MasterHarness()
    harness.ring(2)
    harness.join(3)
    for peer in (1, 2):
        harness.receive(peer, m.Vote(2, "update", 2))
    harness.receive(1, m.Sealed(2, []))
    harness.wait(1_000)
    [waits] = harness.sent(3, m.AdmissionWaits)
    assert waits == m.AdmissionWaits("the epoch changes, and peer 2 (p2) has not responded yet", [2])
