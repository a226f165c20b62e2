"""The peer's machine, driven by hand: what it says, connects, installs and reports."""

from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from ringfold.errors import ConfigError, DeadlineExceeded, Evicted, MasterUnreachable, RingfoldError
from ringfold.peer.effects import (
    CallFinished,
    CallSucceeded,
    CloseConn,
    Dial,
    Effect,
    Ended,
    FailAll,
    Fill,
    Install,
    Joined,
    MakeBulk,
    MakeControl,
    Notify,
    Promote,
    ResumeReading,
    SealEngine,
    SendMessage,
    SetRegistrations,
    Settle,
)
from ringfold.peer.events import (
    Accepted,
    CallBusy,
    CallGivenUp,
    CallJoin,
    CallLeave,
    CallVote,
    Closed,
    DialFailed,
    Dialled,
    EngineInstalled,
    EngineSealed,
    Event,
    LinkLost,
    MessageReceived,
    OpCancelled,
    Opened,
    OpMismatched,
    OpTimedOut,
    Sampled,
    Silent,
    Tick,
)
from ringfold.peer.machine import PeerMachine
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.wire import frames, messages
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.descriptor import Descriptor
from ringfold.wire.messages import (
    Challenge,
    Hello,
    LaneHello,
    LaneWelcome,
    Liveness,
    Member,
    Message,
    OpRef,
    Reason,
    Record,
    SealedOp,
    Verdict,
    Welcome,
    World,
)
from ringfold.wire.notices import ConnectionDropped
from ringfold.wire.proof import link_key, prove, proven

MS = 1_000_000
TOKEN = b"a token"
SECRET = b"the secret of the epoch"
KEY = link_key(TOKEN, SECRET)
CALLED = Descriptor(0, retry=1).pack()
CONTROL = 1
MASTER_NONCE, NONCE = b"m" * 32, b"p" * 32
TIMINGS = PeerTimings()
ME = 5


class Peer:
    """A machine with a clock and a supply of connection numbers; collects what it wants done."""

    def __init__(self, timings: PeerTimings = TIMINGS) -> None:
        identity = Identity(group=0, host="h", name="n", addresses=("10.0.0.5",), port=48149, token=TOKEN)
        self.machine = PeerMachine(identity, timings)
        self.now_ns = 0
        self.last_conn = 0
        self.in_memory: tuple[int, ...] = ()
        """The connections that the engine reports as lanes in shared memory."""

    def step(self, event: Event) -> list[Effect]:
        """Apply an event. Dials are answered with a connection at once, and an install, as the shell does."""
        effects = self.machine.step(self.now_ns, event)
        for effect in effects:
            if isinstance(effect, Dial):
                self.last_conn += 1
                effects = effects + self.machine.step(self.now_ns, Dialled(effect.key, self.last_conn))
            elif isinstance(effect, Install):
                effects = effects + self.machine.step(self.now_ns, EngineInstalled(effect.epoch, self.in_memory))
        return effects

    def receives(self, conn: int, message: Message) -> list[Effect]:
        return self.step(MessageReceived(conn, frames.encode(message)))

    def later(self, ms: int) -> list[Effect]:
        """Let time pass, tick by tick as the deadlines fall due."""
        effects: list[Effect] = []
        until = self.now_ns + ms * MS
        while (due := self.machine.next_deadline_ns()) is not None and due <= until:
            self.now_ns = max(self.now_ns, due)
            effects += self.step(Tick())
        self.now_ns = until
        return effects + self.step(Tick())


def joining(peer: Peer, masters: tuple[tuple[str, int], ...] = (("10.0.0.1", 48148),)) -> list[Effect]:
    return peer.step(CallJoin(masters, peer.now_ns + 10_000 * MS))


def registered(timings: PeerTimings = TIMINGS) -> Peer:
    peer = Peer(timings)
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    peer.receives(CONTROL, Challenge(MASTER_NONCE, VERSION, VERSION))
    peer.receives(CONTROL, Welcome(ME, 1, prove(TOKEN, "welcome", NONCE, MASTER_NONCE), Liveness()))
    return peer


def record(epoch: int, ring: list[int], **changes: object) -> Record:
    members = [Member(peer, f"n{peer}", "h", [f"10.0.0.{peer}"], 48149) for peer in ring]
    made = Record(
        group=0,
        epoch=epoch,
        fence=1,
        previous=epoch - 1,
        reason="a test",
        members=members,
        dialers=list(ring) if len(ring) > 1 else [],
        newcomers=[],
        secret=SECRET,
        evidence="ring",
        small_bytes=16_384,
        segment_bytes=262_144,
        lanes=1,
        registrations=3,
        pending=False,
        verdicts=[],
        world=World(len(ring), 1, len(ring)),
    )
    return msgspec.structs.replace(made, **changes)


def with_addresses(made: Record, index: int, addresses: list[str]) -> Record:
    members = list(made.members)
    members[index] = msgspec.structs.replace(members[index], addresses=addresses)
    return msgspec.structs.replace(made, members=members)


def lane_hello(source: int, target: int, epoch: int, challenge: bytes, *, lane: int = 0, key: bytes = KEY) -> LaneHello:
    nonce = b"l" * 32
    parts = [number.to_bytes(8, "little") for number in (epoch, source, target, lane)]
    return LaneHello(VERSION, epoch, source, target, lane, nonce, prove(key, "lane", challenge, nonce, *parts))


def lane_welcome(dialler_nonce: bytes, challenge: bytes) -> LaneWelcome:
    return LaneWelcome(prove(KEY, "lane_welcome", dialler_nonce, challenge))


def attach(peer: Peer, made: Record, guest: int = 100) -> list[Effect]:
    """Bring a peer into an epoch of two or more members in which every source dials. Returns all effects."""
    effects = peer.receives(CONTROL, made)
    dialled = peer.last_conn
    effects += peer.step(Opened(dialled, NONCE))
    effects += peer.receives(dialled, Challenge(MASTER_NONCE, VERSION, VERSION))
    effects += peer.receives(dialled, lane_welcome(NONCE, MASTER_NONCE))
    ring = [member.peer for member in made.members]
    before = ring[ring.index(ME) - 1]
    effects += peer.step(Accepted(guest, "10.0.0.9:1", NONCE))
    return effects + peer.receives(guest, lane_hello(before, ME, made.epoch, NONCE))


def member(ring: list[int] | None = None, timings: PeerTimings = TIMINGS) -> Peer:
    """A peer in the installed epoch 1 of a ring, by default [4, 5]."""
    peer = registered(timings)
    attach(peer, record(1, ring or [4, ME]))
    peer.receives(CONTROL, messages.Installed(1, World(2, 1, 2)))
    return peer


def sent(effects: list[Effect], conn: int = CONTROL) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, SendMessage) and effect.conn == conn]


def only(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def end_of(effects: list[Effect]) -> RingfoldError | None:
    ended = [effect for effect in effects if isinstance(effect, Ended)]
    assert len(ended) == 1
    return ended[0].error


# Reaching the master


def test_hello_proves_the_token_over_both_nonces() -> None:
    peer = Peer()
    assert joining(peer) == [Dial(0, "10.0.0.1", 48148, 5_000)]
    peer.step(Opened(CONTROL, NONCE))
    effects = peer.receives(CONTROL, Challenge(MASTER_NONCE, VERSION, VERSION))
    [hello] = sent(effects)
    assert isinstance(hello, Hello)
    assert proven(TOKEN, hello.proof, "hello", MASTER_NONCE, NONCE)
    assert (hello.group, hello.port, hello.addresses) == (0, 48149, ["10.0.0.5"])
    assert effects[-1] == ResumeReading(CONTROL)


def test_welcome_makes_the_control_connection() -> None:
    peer = Peer()
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    peer.receives(CONTROL, Challenge(MASTER_NONCE, VERSION, VERSION))
    proof = prove(TOKEN, "welcome", NONCE, MASTER_NONCE)
    effects = peer.receives(CONTROL, Welcome(ME, 1, proof, Liveness(100, 400, 2_000)))
    assert effects == [MakeControl(CONTROL, 100, 6 * 2_000)]
    assert peer.machine.peer == ME


def test_a_master_that_does_not_know_the_token_is_not_believed() -> None:
    peer = Peer()
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    peer.receives(CONTROL, Challenge(MASTER_NONCE, VERSION, VERSION))
    effects = peer.receives(CONTROL, Welcome(ME, 1, prove(b"other", "welcome", NONCE, MASTER_NONCE), Liveness()))
    assert isinstance(end_of(effects), ConfigError)
    assert not only(effects, MakeControl)


def test_a_refusal_ends_the_join_with_its_reason() -> None:
    peer = Peer()
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    peer.receives(CONTROL, Challenge(MASTER_NONCE, VERSION, VERSION))
    error = end_of(peer.receives(CONTROL, messages.Refused("wrong token")))
    assert isinstance(error, ConfigError)
    assert "wrong token" in str(error)


def test_a_master_of_another_version_is_refused() -> None:
    peer = Peer()
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    effects = peer.receives(CONTROL, Challenge(MASTER_NONCE, VERSION + 1, VERSION + 2))
    assert isinstance(end_of(effects), ConfigError)
    assert not sent(effects)


def test_a_newcomer_that_one_of_several_masters_refuses_goes_on_to_the_next() -> None:
    """Another process may listen at a dead master's port, and proves nothing. A peer gives up only if all refuse it."""
    peer = Peer()
    joining(peer, (("10.0.0.1", 1), ("10.0.0.2", 2)))
    peer.step(Opened(CONTROL, NONCE))
    assert only(peer.receives(CONTROL, Challenge(MASTER_NONCE, 7, 9)), Dial) == [Dial(0, "10.0.0.2", 2, 5_000)]
    assert peer.machine._control._reasons["10.0.0.1:1"].startswith("it speaks protocol versions 7 to 9, this peer ")
    peer.step(Opened(peer.last_conn, NONCE))
    peer.receives(peer.last_conn, Challenge(MASTER_NONCE, VERSION, VERSION))
    error = end_of(peer.receives(peer.last_conn, messages.Refused("wrong token")))
    assert isinstance(error, ConfigError)
    assert "7 to 9" in str(error)


def test_masters_are_tried_in_turn_and_again_after_a_pause() -> None:
    peer = Peer()
    joining(peer, (("10.0.0.1", 1), ("10.0.0.2", 2)))
    assert only(peer.step(Closed(1, "refused")), Dial) == [Dial(0, "10.0.0.2", 2, 5_000)]
    assert only(peer.step(Closed(2, "refused")), Dial) == []
    assert only(peer.later(49), Dial) == []
    assert only(peer.later(1), Dial) == [Dial(0, "10.0.0.1", 1, 5_000)]


def test_an_unreachable_master_is_reported_at_the_deadline_with_the_last_reason() -> None:
    peer = Peer()
    joining(peer)
    peer.step(Closed(1, "Connection refused"))
    effects: list[Effect] = []
    while not peer.machine.ended:
        effects = peer.later(100)
        if not peer.machine.ended and only(effects, Dial):
            effects = peer.step(Closed(peer.last_conn, "Connection refused"))
    error = end_of(effects)
    assert isinstance(error, MasterUnreachable)
    assert "Connection refused" in str(error)
    assert peer.now_ns == 10_000 * MS


def test_the_log_shows_at_once_and_every_five_seconds_why_no_master_can_be_reached() -> None:
    peer = Peer()
    joining(peer, (("10.0.0.1", 1), ("::1", 2)))
    assert not only(peer.step(Closed(1, "Connection refused")), Notify)
    notices = [(peer.now_ns, effect) for effect in only(peer.step(Closed(2, "No route to host")), Notify)]
    while peer.now_ns < 9_900 * MS:
        effects = peer.later(100)
        while only(effects, Dial):
            effects = peer.step(Closed(peer.last_conn, "Connection refused"))
        notices += [(peer.now_ns, effect) for effect in only(effects, Notify)]
    assert [now_ns // (1_000 * MS) for now_ns, _ in notices] == [0, 5]
    first = notices[0][1]
    assert isinstance(first, Notify)
    assert first.notice.level == "warning"
    assert str(first.notice) == (
        "the master at 10.0.0.1:1 cannot be reached: nothing listens there (Connection refused): start `ringfold "
        "master` there, or correct the address; the master at [::1]:2 cannot be reached: that machine cannot be "
        "reached (No route to host): correct the address, or let it through the firewall. Trying for another 10 s "
        "(join_timeout_s)"
    )


def test_a_server_without_the_token_at_the_masters_port_is_left_for_another_attempt() -> None:
    peer = Peer()
    joining(peer)
    peer.step(Opened(CONTROL, NONCE))
    effects = peer.step(MessageReceived(CONTROL, b"HTTP/1.1 400"))
    assert only(effects, CloseConn)
    assert only(peer.later(50), Dial)


def test_a_dial_that_cannot_be_tried_counts_as_failed() -> None:
    peer = Peer()
    peer.machine.step(0, CallJoin((("nonsense", 1), ("10.0.0.2", 2)), 10_000 * MS))
    assert only(peer.step(DialFailed(0, "not an address")), Dial) == [Dial(0, "10.0.0.2", 2, 5_000)]


WAITS = messages.AdmissionWaits("these have not called update_topology: peer 1 (gpu-1) is in op tag 0 sequence 3", [1])


def test_a_join_that_times_out_names_the_peers_it_waited_for_and_the_setting() -> None:
    peer = registered()
    assert peer.receives(CONTROL, WAITS) == []
    error = end_of(peer.later(10_000))
    assert isinstance(error, DeadlineExceeded)
    assert error.peers == (1,)
    assert str(error) == (
        "join: peer 5 (n, you) was not admitted within 10.0 s: these have not called update_topology: peer 1 (gpu-1) "
        "is in op tag 0 sequence 3. `steps` calls update_topology between steps; other programs must call it on all "
        "peers. The setting join_timeout_s (10 s) says how long to wait while nothing moves"
    )


def test_a_join_waits_on_while_the_run_makes_progress_and_logs_it_every_ten_seconds() -> None:
    peer = registered()
    notices: list[tuple[int, str]] = []
    for second in range(1, 32):
        assert not peer.machine.ended
        peer.later(1_000)
        moving = second <= 25
        for effect in only(peer.receives(CONTROL, structs.replace(WAITS, moving=moving)), Notify):
            assert isinstance(effect, Notify)
            notices.append((second, str(effect.notice)))
    text = f"not admitted after %d s: {WAITS.text}. Waiting %s"
    assert notices == [
        (10, text % (10, "as long as they make progress")),
        (20, text % (20, "as long as they make progress")),
        (30, text % (30, "for another 5 s (join_timeout_s)")),
    ]
    assert isinstance(end_of(peer.later(4_000)), DeadlineExceeded)
    assert peer.now_ns == 35_000 * MS


def test_a_member_ignores_a_notice_to_wait() -> None:
    peer = member()
    peer.now_ns = 20_000 * MS
    assert peer.receives(CONTROL, WAITS) == []


def test_a_master_that_ends_while_a_peer_leaves_it_is_no_error() -> None:
    peer = member()
    peer.step(CallLeave())
    effects = peer.step(Closed(CONTROL, "closed by the other side"))
    assert end_of(effects) is None
    assert not only(effects, Notify)


def test_a_peer_that_is_never_admitted_raises_and_leaves() -> None:
    peer = registered()
    effects = peer.later(10_000)
    assert sent(effects) == [messages.Leave()]
    error = end_of(effects)
    assert isinstance(error, DeadlineExceeded)
    assert error.operation == "join"


# Connecting the ring


def test_a_group_of_one_attaches_at_once() -> None:
    peer = registered()
    effects = peer.receives(CONTROL, record(1, [ME], newcomers=[ME]))
    [install] = only(effects, Install)
    assert isinstance(install, Install)
    assert (install.epoch, install.rank, install.members) == (1, 0, (ME,))
    assert sent(effects) == [messages.Attached(1)]
    effects = peer.receives(CONTROL, messages.Installed(1, World(1, 1, 1)))
    assert len(only(effects, Joined)) == 1
    assert peer.machine.unsynced == {ME}


def test_a_peer_dials_its_edge_and_takes_the_other() -> None:
    peer = registered()
    effects = attach(peer, record(1, [4, ME, 6]))
    assert only(effects, Dial) == [Dial(1, "10.0.0.6", 48149, 2_000)]
    assert only(effects, Promote) == [Promote(2, True, 6, 0), Promote(100, False, 4, 0)]
    assert effects[-2:] == [
        Install(1, 1, (4, ME, 6), False, 16_384, 262_144, 3),
        SendMessage(CONTROL, messages.Attached(1, lanes=1)),
    ]


@pytest.mark.parametrize(("in_memory", "counted"), [((2, 100), 1), ((100,), 0), ((), 0)])
def test_the_master_learns_how_many_lanes_to_the_next_member_are_in_shared_memory(
    in_memory: tuple[int, ...], counted: int
) -> None:
    """Lane 100 leads to the member before, which reports it."""
    peer = registered()
    peer.in_memory = in_memory
    assert sent(attach(peer, record(1, [4, ME, 6])))[-1] == messages.Attached(1, lanes=1, in_memory=counted)


def test_two_members_have_two_links_between_them() -> None:
    effects = attach(registered(), record(1, [4, ME]))
    assert only(effects, Promote) == [Promote(2, True, 4, 0), Promote(100, False, 4, 0)]


def test_the_other_end_dials_if_the_record_names_it() -> None:
    peer = registered()
    effects = peer.receives(CONTROL, record(1, [4, ME], dialers=[ME, 4]))
    assert only(effects, Dial) == [Dial(1, "10.0.0.4", 48149, 2_000)]
    peer.step(Opened(2, NONCE))
    [hello] = sent(peer.receives(2, Challenge(MASTER_NONCE, VERSION, VERSION)), conn=2)
    assert isinstance(hello, LaneHello)
    assert (hello.source, hello.target) == (4, ME)
    assert only(peer.receives(2, lane_welcome(NONCE, MASTER_NONCE)), Promote) == [Promote(2, False, 4, 0)]


def test_lanes_begin_at_different_addresses() -> None:
    peer = registered()
    made = with_addresses(record(1, [4, ME], lanes=3), 0, ["10.0.0.4", "10.1.0.4"])
    dials = only(peer.receives(CONTROL, made), Dial)
    assert [(dial.host, dial.timeout_ms) for dial in dials if isinstance(dial, Dial)] == [
        ("10.0.0.4", 1_000),
        ("10.1.0.4", 1_000),
        ("10.0.0.4", 1_000),
    ]


def test_a_refused_dial_goes_to_the_next_address_then_pauses() -> None:
    peer = registered()
    peer.receives(CONTROL, with_addresses(record(1, [4, ME]), 0, ["10.0.0.4", "10.1.0.4"]))
    [again] = only(peer.step(Closed(2, "refused")), Dial)
    assert isinstance(again, Dial)
    assert again.host == "10.1.0.4"
    assert only(peer.step(Closed(3, "refused")), Dial) == []
    [third] = only(peer.later(20), Dial)
    assert isinstance(third, Dial)
    assert third.host == "10.0.0.4"


def test_lanes_that_are_not_dialled_are_reported_at_the_deadline_all_at_once() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME, 6]))
    assert sent(peer.later(3_999)) == []
    [failed] = sent(peer.later(1))
    assert isinstance(failed, messages.AttachFailed)
    assert [(edge.source, edge.target) for edge in failed.edges] == [(4, ME), (ME, 6)]
    assert sent(peer.later(5_000)) == []


def test_a_dialler_alone_in_trouble_reports_when_it_gives_up() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME], dialers=[4, ME]))
    peer.step(Accepted(100, "r", NONCE))
    peer.receives(100, lane_hello(4, ME, 1, NONCE))
    reports: list[Message] = []
    while not reports and peer.now_ns < 10_000 * MS:
        effects = peer.step(Closed(peer.last_conn, "refused")) + peer.later(20)
        reports = sent(effects)
    [failed] = reports
    assert isinstance(failed, messages.AttachFailed)
    assert [(edge.source, edge.target) for edge in failed.edges] == [(ME, 4)]
    assert "10.0.0.4:48149: refused" in failed.edges[0].reason
    assert 2_000 * MS <= peer.now_ns < 2_200 * MS


def test_a_lane_of_an_epoch_that_is_not_known_yet_is_parked() -> None:
    peer = registered()
    peer.step(Accepted(100, "r", NONCE))
    assert peer.receives(100, lane_hello(4, ME, 1, NONCE)) == []
    effects = peer.receives(CONTROL, record(1, [4, ME]))
    assert only(effects, Promote) == [Promote(100, False, 4, 0)]
    [welcome] = sent(effects, conn=100)
    assert isinstance(welcome, LaneWelcome)
    assert proven(KEY, welcome.proof, "lane_welcome", b"l" * 32, NONCE)


def test_a_parked_lane_whose_record_never_comes_is_dropped() -> None:
    peer = registered()
    peer.step(Accepted(100, "r", NONCE))
    peer.receives(100, lane_hello(4, ME, 1, NONCE))
    effects = peer.later(5_000)
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [100]


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (lane_hello(4, ME, 1, NONCE, key=b"guessed"), "secret"),
        (lane_hello(4, ME, 1, b"an old challenge"), "secret"),
        (lane_hello(6, ME, 1, NONCE), "not a lane"),
        (lane_hello(4, ME, 1, NONCE, lane=7), "not a lane"),
        (lane_hello(ME, 4, 1, NONCE), "is dialled by"),
        (lane_hello(4, ME, 0, NONCE), "is over"),
        (LaneHello(9, 1, 4, ME, 0, b"", b""), "version 9"),
        (LaneHello(VERSION, 1, -4, ME, 0, b"", b""), "out of range"),
    ],
)
def test_a_wrong_lane_is_refused_and_reported(hello: LaneHello, words: str) -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    peer.step(Accepted(100, "1.2.3.4:5", NONCE))
    effects = peer.receives(100, hello)
    assert not only(effects, Promote)
    [refused] = sent(effects, conn=100)
    assert isinstance(refused, messages.Refused)
    assert words in refused.reason
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [100]
    [notice] = [effect.notice for effect in effects if isinstance(effect, Notify)]
    assert isinstance(notice, ConnectionDropped)
    assert notice.remote == "1.2.3.4:5"


@pytest.mark.parametrize(
    ("reason", "level"), [("closed by the other side", "info"), ("Connection reset by peer", "info"), ("x", "warning")]
)
def test_a_client_that_closes_an_unauthenticated_connection_is_no_warning(reason: str, level: str) -> None:
    peer = registered()
    peer.step(Accepted(100, "1.2.3.4:5", NONCE))
    [notice] = [effect.notice for effect in peer.step(Closed(100, reason)) if isinstance(effect, Notify)]
    assert (notice.level, "1.2.3.4:5" in str(notice)) == (level, True)


def test_garbage_on_the_data_port_is_dropped_and_reported() -> None:
    peer = registered()
    peer.step(Accepted(100, "1.2.3.4:5", NONCE))
    effects = peer.step(MessageReceived(100, b"\x00garbage"))
    assert only(effects, CloseConn)
    assert only(effects, Notify)


def test_an_inbound_connection_that_sends_nothing_is_closed_in_time() -> None:
    peer = registered()
    peer.step(Accepted(100, "r", NONCE))
    assert only(peer.later(4_999), CloseConn) == []
    assert len(only(peer.later(1), CloseConn)) == 1


def test_guests_are_capped_and_the_oldest_silent_one_goes() -> None:
    peer = registered()
    for conn in range(100, 164):
        peer.step(Accepted(conn, f"r{conn}", NONCE))
    peer.receives(100, lane_hello(4, ME, 1, NONCE))
    effects = peer.step(Accepted(200, "r200", NONCE))
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [101]


def test_a_newer_connection_replaces_a_stale_lane_during_the_attachment() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    for conn in (100, 101):
        peer.step(Accepted(conn, "r", NONCE))
        effects = peer.receives(conn, lane_hello(4, ME, 1, NONCE))
    closed = [effect.conn for effect in effects if isinstance(effect, CloseConn)]
    assert closed == [100]
    assert only(effects, Promote) == [Promote(101, False, 4, 0)]
    assert effects.index(CloseConn(100, "the neighbour has opened a newer connection")) < effects.index(
        Promote(101, False, 4, 0)
    )


def test_after_the_installation_a_newer_connection_means_that_the_link_is_lost() -> None:
    peer = member()
    peer.step(Accepted(101, "r", NONCE))
    effects = peer.receives(101, lane_hello(4, ME, 1, NONCE))
    assert not only(effects, Promote)
    assert {effect.conn for effect in effects if isinstance(effect, CloseConn)} == {100, 101}
    [lost] = sent(effects)
    assert isinstance(lost, messages.LinkLost)
    assert (lost.epoch, lost.source, lost.target) == (1, 4, ME)


def test_lanes_that_are_still_right_are_kept() -> None:
    peer = member([4, ME, 6])
    peer.receives(CONTROL, messages.Seal(1, "7 joins"))
    effects = peer.receives(CONTROL, record(2, [4, ME, 7]))
    # 4 -> me stays; me -> 6 is closed, me -> 7 dialled.
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [2]
    assert [effect.host for effect in effects if isinstance(effect, Dial)] == ["10.0.0.7"]


def test_an_unchanged_ring_is_installed_without_dialling() -> None:
    peer = member()
    peer.receives(CONTROL, messages.Seal(1, "a bad edge"))
    effects = peer.receives(CONTROL, record(2, [4, ME]))
    assert not only(effects, Dial)
    assert len(only(effects, Install)) == 1


def with_paths(made: Record, paths: int) -> Record:
    members = [
        msgspec.structs.replace(member, addresses=[f"10.{path}.0.{member.peer}" for path in range(paths)], paths=paths)
        for member in made.members
    ]
    return msgspec.structs.replace(made, members=members)


def on_two_paths() -> Peer:
    """A member whose links have two paths: connections 2 and 3 to its neighbour, 100 and 101 from it."""
    peer = registered()
    peer.receives(CONTROL, with_paths(record(1, [4, ME]), 2))
    for conn in (2, 3):
        peer.step(Opened(conn, NONCE))
        peer.receives(conn, Challenge(MASTER_NONCE, VERSION, VERSION))
        peer.receives(conn, lane_welcome(NONCE, MASTER_NONCE))
    for conn, lane in ((100, 0), (101, 1)):
        peer.step(Accepted(conn, "r", NONCE))
        effects = peer.receives(conn, lane_hello(4, ME, 1, NONCE, lane=lane))
    [install] = only(effects, Install)
    assert isinstance(install, Install)
    assert install.multipath
    return peer


def test_every_path_is_dialled_from_its_own_address() -> None:
    peer = registered()
    dials = only(peer.receives(CONTROL, with_paths(record(1, [4, ME], lanes=2), 2)), Dial)
    ways = [(dial.source, dial.host) for dial in dials if isinstance(dial, Dial)]
    assert ways == [(f"10.{path}.0.{ME}", f"10.{path}.0.4") for path in (0, 1, 0, 1)]


def test_a_link_goes_on_without_a_lane_and_dials_it_again() -> None:
    peer = on_two_paths()
    effects = peer.step(Closed(2, "reset"))
    assert not sent(effects)
    [again] = only(peer.later(20), Dial)
    assert isinstance(again, Dial)
    assert again.host == "10.0.0.4"


def test_a_lane_that_stays_away_is_dialled_less_and_less_often() -> None:
    peer = on_two_paths()
    peer.step(Closed(2, "reset"))
    conn, dials = 4, 0
    for _ in range(100):
        if only(peer.later(200), Dial):
            dials += 1
            peer.step(Closed(conn, "no route"))
            conn += 1
    assert 10 <= dials <= 30  # of twenty seconds, with a pause of two in the end


def test_a_link_is_lost_with_its_last_lane() -> None:
    peer = on_two_paths()
    assert not sent(peer.step(Closed(2, "reset")))
    effects = peer.step(LinkLost(4, True, "reset too"))
    assert sent(effects) == [messages.LinkLost(1, ME, 4, "reset too")]


def test_a_lane_that_the_neighbour_brings_again_is_taken_in_the_running_epoch() -> None:
    peer = on_two_paths()
    peer.step(Accepted(102, "r", NONCE))
    effects = peer.receives(102, lane_hello(4, ME, 1, NONCE, lane=1))
    taken = Promote(102, False, 4, 1, shared=True, path=1, paths=2, epoch=1)
    closed = CloseConn(101, "the neighbour has opened a newer connection")
    assert effects.index(taken) < effects.index(closed)


def test_an_epoch_does_not_wait_for_ever_for_a_path() -> None:
    peer = registered()
    peer.receives(CONTROL, with_paths(record(1, [4, ME]), 2))
    peer.step(Opened(2, NONCE))
    peer.receives(2, Challenge(MASTER_NONCE, VERSION, VERSION))
    peer.receives(2, lane_welcome(NONCE, MASTER_NONCE))
    peer.step(Accepted(100, "r", NONCE))
    assert not only(peer.receives(100, lane_hello(4, ME, 1, NONCE)), Install)
    assert only(peer.later(300), Install)


def test_lanes_of_a_link_that_lost_one_are_kept_for_the_next_epoch() -> None:
    peer = on_two_paths()
    peer.receives(CONTROL, messages.Seal(1, "x"))
    peer.step(Closed(2, "reset"))
    effects = peer.receives(CONTROL, with_paths(record(2, [4, ME]), 2))
    assert len(only(effects, Dial)) == 1
    assert not [effect for effect in effects if isinstance(effect, CloseConn)]


def test_a_lane_that_breaks_during_the_attachment_is_dialled_again() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    peer.step(Opened(2, NONCE))
    peer.receives(2, Challenge(MASTER_NONCE, VERSION, VERSION))
    peer.receives(2, lane_welcome(NONCE, MASTER_NONCE))
    effects = peer.step(LinkLost(4, True, "reset"))
    assert len(only(effects, Dial)) == 1
    assert not sent(effects)


def test_a_lost_link_of_the_installed_epoch_is_reported() -> None:
    effects = member().step(LinkLost(4, True, "reset"))
    assert sent(effects) == [messages.LinkLost(1, ME, 4, "reset")]


def test_a_report_about_a_link_that_was_reconnected_since_is_ignored() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    for conn in (100, 101):
        peer.step(Accepted(conn, "r", NONCE))
        peer.receives(conn, lane_hello(4, ME, 1, NONCE))
    peer.step(LinkLost(4, False, "the old one broke", live_conns=(101,)))
    peer.step(Opened(2, NONCE))
    peer.receives(2, Challenge(MASTER_NONCE, VERSION, VERSION))
    assert only(peer.receives(2, lane_welcome(NONCE, MASTER_NONCE)), Install)


def test_an_acceptor_without_the_secret_is_not_believed() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    peer.step(Opened(2, NONCE))
    peer.receives(2, Challenge(MASTER_NONCE, VERSION, VERSION))
    effects = peer.receives(2, LaneWelcome(b"x" * 32))
    assert not only(effects, Promote)
    assert only(effects, CloseConn)
    assert only(peer.later(20), Dial)


# Seals and records


def test_a_seal_is_answered_with_what_the_engine_lists() -> None:
    peer = member()
    effects = peer.receives(CONTROL, messages.Seal(1, "x"))
    assert effects == [SealEngine(1)]
    ops = (SealedOp(OpRef(0, 3), "done", 2),)
    assert sent(peer.step(EngineSealed(1, ops))) == [messages.Sealed(1, list(ops))]


def test_a_seal_during_the_attachment_stops_the_dialling() -> None:
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    effects = peer.receives(CONTROL, messages.Seal(1, "x"))
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [2]
    assert effects[-1] == SealEngine(1)
    assert sent(peer.later(5_000)) == []


def test_verdicts_settle_the_old_epoch_before_anything_is_connected() -> None:
    peer = member([4, ME, 6])
    peer.receives(CONTROL, messages.Seal(1, "peer 6 died"))
    commit = Verdict(OpRef(0, 1), True, registrations=7, descriptor=CALLED)
    abort = Verdict(OpRef(1, 1), False, descriptor=CALLED)
    usage = Verdict(OpRef(2, 1), False, reason=Reason("usage", "mismatch", [4]), descriptor=CALLED)
    effects = peer.receives(CONTROL, record(2, [4, ME], reason="peer 6 died", verdicts=[commit, abort, usage]))
    settle = effects[0]
    assert isinstance(settle, Settle)
    assert settle.epoch == 1
    assert settle.default_reason == Reason("lost", "peer 6 died", [6])
    explained = Verdict(OpRef(1, 1), False, reason=settle.default_reason, descriptor=CALLED)
    assert settle.verdicts == (commit, explained, usage)


def test_with_all_members_alive_the_default_reason_is_the_edge() -> None:
    peer = member()
    peer.receives(CONTROL, messages.Seal(1, "x"))
    settle = peer.receives(CONTROL, record(2, [4, ME]))[0]
    assert isinstance(settle, Settle)
    assert settle.default_reason.kind == "edge"


def test_verdicts_about_an_epoch_that_was_never_installed_here_are_not_applied() -> None:
    peer = member([4, ME, 6])
    peer.receives(CONTROL, messages.Seal(1, "x"))
    assert only(peer.receives(CONTROL, record(2, [4, ME, 7])), Settle)
    peer.receives(CONTROL, messages.Seal(2, "7 cannot be had"))
    effects = peer.receives(CONTROL, record(3, [4, ME], verdicts=[Verdict(OpRef(0, 0), True, descriptor=CALLED)]))
    assert not only(effects, Settle)


def test_a_record_with_another_fence_than_the_masters_or_of_the_past_is_ignored() -> None:
    peer = member()
    assert not only(peer.receives(CONTROL, record(2, [4, ME], fence=2)), Install)
    assert not only(peer.receives(CONTROL, record(1, [4, ME])), Settle)
    assert peer.machine.record is not None
    assert peer.machine.record.epoch == 1


def test_registrations_reach_the_engine() -> None:
    assert registered().receives(CONTROL, messages.Registrations(9)) == [SetRegistrations(9)]


def test_newcomers_of_repeated_proposals_add_up() -> None:
    peer = member()
    peer.machine.unsynced.clear()
    peer.receives(CONTROL, messages.Seal(1, "x"))
    peer.receives(CONTROL, record(2, [4, ME, 7], newcomers=[7]))
    peer.receives(CONTROL, messages.Seal(2, "x"))
    peer.receives(CONTROL, record(3, [4, 7, ME], newcomers=[]))
    assert peer.machine.unsynced == {7}


# Ops


def test_what_the_master_sent_is_not_enough_to_bring_a_lane() -> None:
    """An attacker that overheard the record knows the epoch's secret. The key of a lane also needs the token."""
    peer = registered()
    peer.receives(CONTROL, record(1, [4, ME]))
    peer.step(Accepted(100, "10.0.0.9:1", NONCE))
    effects = peer.receives(100, lane_hello(4, ME, 1, NONCE, key=SECRET))
    assert not only(effects, Promote)
    [refused] = sent(effects, 100)
    assert isinstance(refused, messages.Refused)
    assert "secret" in refused.reason


def test_what_the_engine_reports_of_ops_goes_to_the_master() -> None:
    peer = member()
    mine, theirs = b"a" * 32, b"b" * 32
    assert sent(peer.step(OpMismatched(4, 1, 0, 1, mine, theirs))) == [
        messages.OpMismatch(1, OpRef(0, 1), 4, mine, theirs)
    ]
    assert sent(peer.step(OpTimedOut(1, 0, 1, 300, CALLED))) == [messages.OpTimeout(1, OpRef(0, 1), 300, CALLED)]
    usual = OpTimedOut(1, 0, 1, 300, CALLED, final=False)
    assert sent(peer.step(usual)) == [messages.OpTimeout(1, OpRef(0, 1), 300, CALLED, final=False)]
    assert sent(peer.step(OpCancelled(1, 0, 1))) == [messages.OpCancelled(1, OpRef(0, 1))]


def test_reports_of_a_sealed_epoch_are_outdated() -> None:
    peer = member()
    peer.receives(CONTROL, messages.Seal(1, "x"))
    assert peer.step(OpMismatched(4, 1, 0, 1, b"", b"")) == []
    assert peer.step(OpTimedOut(1, 0, 1, 300)) == []
    assert sent(peer.step(LinkLost(4, True, "reset"))) == []


def test_reports_of_an_older_epoch_do_not_accuse_an_op_of_the_newest() -> None:
    """They were queued before the epoch changed; there, the same tag and sequence are another op."""
    peer = member()
    installed = peer.machine.engine_epoch
    for event in (OpMismatched(4, 0, 0, 1, b"", b""), OpTimedOut(0, 0, 1, 300), OpCancelled(0, 0, 1)):
        assert event.epoch != installed
        assert peer.step(event) == []


# Votes


def vote(ballot: int = 1, timeout_ms: int = 1_000, progress: tuple[tuple[int, int], ...] = ()) -> CallVote:
    return CallVote(ballot, "update", 2, timeout_ms * MS, progress)


def test_a_call_has_waited_since_the_program_made_it() -> None:
    """Not since its event was taken: an error would tell of less time than the program gave."""
    peer = member()
    peer.now_ns += 40 * MS
    peer.step(replace(vote(timeout_ms=1_000), called_ns=peer.now_ns - 30 * MS, deadline_ns=peer.now_ns + 970 * MS))
    [withdrawn] = [each for each in sent(peer.later(970)) if isinstance(each, messages.VoteWithdrawn)]
    assert withdrawn.waited_ms == 1_000


def test_a_vote_is_cast_in_the_steady_epoch_with_its_progress() -> None:
    effects = member().step(vote(progress=((0, 4),)))
    assert sent(effects) == [messages.Vote(1, "update", 1, 2, [(0, 4)])]


def test_a_vote_waits_for_the_end_of_an_epoch_change_and_is_cast_once() -> None:
    peer = member()
    peer.receives(CONTROL, messages.Seal(1, "x"))
    assert sent(peer.step(vote(progress=((0, 4),)))) == []
    assert sent(peer.receives(CONTROL, record(2, [4, ME]))) == [messages.Attached(2, lanes=1)]
    assert sent(peer.receives(CONTROL, messages.Installed(2, World()))) == [messages.Vote(1, "update", 2, 2, [])]
    assert sent(peer.receives(CONTROL, messages.Installed(2, World()))) == []


def test_a_vote_is_cast_again_in_every_new_epoch_until_it_is_answered() -> None:
    peer = member()
    peer.step(vote())
    for epoch in (2, 3):
        peer.receives(CONTROL, messages.Seal(epoch - 1, "x"))
        peer.receives(CONTROL, record(epoch, [4, ME]))
        again = sent(peer.receives(CONTROL, messages.Installed(epoch, World())))
        assert again == [messages.Vote(1, "update", epoch, 2, [])]
    world = World(3, 1, 3)
    effects = peer.receives(CONTROL, messages.CallDone(1, True, world))
    assert effects == [CallFinished(1, CallSucceeded(True, 1, world))]
    peer.receives(CONTROL, messages.Seal(3, "x"))
    peer.receives(CONTROL, record(4, [4, ME]))
    assert sent(peer.receives(CONTROL, messages.Installed(4, World()))) == []


def test_an_installed_that_crossed_a_seal_casts_nothing() -> None:
    peer = member()
    peer.step(vote())
    peer.receives(CONTROL, messages.Seal(1, "x"))
    assert peer.receives(CONTROL, messages.Installed(1, World())) == []


def test_the_call_that_admitted_newcomers_answers_with_their_record() -> None:
    peer = member()
    peer.step(vote())
    peer.receives(CONTROL, messages.Seal(1, "x"))
    # The newcomer connects in between 4 and this peer; the outgoing lane stays.
    made = record(2, [4, 7, ME], newcomers=[7], pending=False, dialers=[4, 7, ME])
    peer.receives(CONTROL, made)
    peer.step(Accepted(101, "r", NONCE))
    peer.receives(101, lane_hello(7, ME, 2, NONCE))
    peer.receives(CONTROL, messages.Installed(2, World(3, 1, 3)))
    done = peer.receives(CONTROL, messages.CallDone(1, True, World(3, 1, 3)))
    assert done == [CallFinished(1, CallSucceeded(False, 1, World(3, 1, 3)))]
    # The next call changed nothing, so its own answer counts.
    peer.step(vote(2))
    done = peer.receives(CONTROL, messages.CallDone(2, True, World(3, 1, 3)))
    assert done == [CallFinished(2, CallSucceeded(True, 1, World(3, 1, 3)))]


def test_at_its_deadline_a_call_requests_the_missing_peers() -> None:
    peer = member()
    peer.step(vote())
    assert sent(peer.later(999)) == []
    assert sent(peer.later(1)) == [messages.VoteWithdrawn(1, 1_000)]
    reason = Reason("deadline", "peer 4 has not voted", [4], 1_000)
    assert peer.receives(CONTROL, messages.CallFailed(1, reason)) == [CallFinished(1, reason)]


def test_a_call_with_the_default_timeout_continues_if_the_master_extends_it() -> None:
    peer = member()
    peer.step(replace(vote(), final=False))
    assert sent(peer.later(1_000)) == [messages.VoteWithdrawn(1, 1_000, final=False)]
    assert peer.receives(CONTROL, messages.CallExtended(1)) == []
    assert peer.later(999) == [], "as long again"
    peer.receives(CONTROL, messages.Seal(1, "peer 9 was evicted"))
    peer.receives(CONTROL, record(2, [4, ME]))
    cast = sent(peer.receives(CONTROL, messages.Installed(2, World())))
    assert cast == [messages.Vote(1, "update", 2, 2, [])]
    assert sent(peer.later(1)) == [messages.VoteWithdrawn(1, 2_000, final=False)]
    assert peer.receives(CONTROL, messages.CallExtended(77)) == [], "a call that no program waits in"


def test_a_program_that_is_busy_reports_for_how_long() -> None:
    peer = member()
    assert sent(peer.step(CallBusy(peer.now_ns + 1_500 * MS))) == [messages.Busy(1_500)]
    assert sent(peer.step(CallBusy(0))) == [messages.Busy(0)]


def test_a_call_fails_by_itself_if_the_master_does_not_report_the_missing_peers() -> None:
    peer = member()
    peer.step(vote())
    peer.later(1_000)
    [finished] = only(peer.later(1_000), CallFinished)
    assert isinstance(finished, CallFinished)
    assert isinstance(finished.outcome, Reason)
    assert finished.outcome.kind == "deadline"


def test_a_call_that_is_given_up_is_withdrawn_and_its_answer_ignored() -> None:
    peer = member()
    peer.step(vote())
    assert sent(peer.step(CallGivenUp(1))) == [messages.VoteWithdrawn(1, 0)]
    assert peer.receives(CONTROL, messages.CallDone(1, False, World())) == []


# The end


def test_leaving_answers_the_seal_and_ends_at_the_masters_word() -> None:
    peer = member()
    assert sent(peer.step(CallLeave())) == [messages.Leave()]
    assert peer.receives(CONTROL, messages.Seal(1, "peer 5 leaves")) == [SealEngine(1)]
    peer.step(EngineSealed(1, ()))
    effects = peer.receives(CONTROL, messages.Left())
    assert end_of(effects) is None
    assert only(effects, FailAll)
    assert {effect.conn for effect in effects if isinstance(effect, CloseConn)} == {CONTROL, 2, 100}


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (MessageReceived(CONTROL, frames.encode(messages.Evicted("silent"))), Evicted, "silent"),
        (Closed(CONTROL, "reset"), MasterUnreachable, "reset"),
        (Silent(CONTROL, 5_001), MasterUnreachable, "5001 ms"),
        (MessageReceived(CONTROL, b"garbage"), MasterUnreachable, "protocol"),
    ],
)
def test_whatever_ends_the_session_fails_every_op_and_closes_everything(
    event: Event, kind: type[RingfoldError], words: str
) -> None:
    effects = member().step(event)
    error = end_of(effects)
    assert isinstance(error, kind)
    assert words in str(error)
    assert len(only(effects, FailAll)) == 1
    assert {effect.conn for effect in effects if isinstance(effect, CloseConn)} >= {2, 100}


def test_after_the_end_nothing_is_sent_and_no_connection_accepted() -> None:
    peer = member()
    peer.receives(CONTROL, messages.Evicted("x"))
    assert peer.step(Accepted(300, "r", NONCE)) == [CloseConn(300, "this peer is out of the run")]
    assert peer.receives(CONTROL, messages.Seal(1, "x")) == []
    assert peer.machine.next_deadline_ns() is None


def test_leaving_before_there_is_a_master_just_ends() -> None:
    peer = Peer()
    joining(peer)
    assert end_of(peer.step(CallLeave())) is None


@pytest.mark.parametrize("wrong", [{"redial_ms": 0}, {"connect_ms": 5_000}, {"unproven_most": 0}])
def test_timings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        replace(TIMINGS, **wrong)


def test_a_peer_that_registered_and_left_is_not_pending_for_ever() -> None:
    """An update that finds no peer to admit settles the registrations that all its members have received."""
    peer = member()
    peer.receives(CONTROL, messages.Registrations(9))
    peer.step(CallVote(1, "update", 0, 10**12, ()))
    peer.receives(CONTROL, messages.CallDone(1, False, World(2, 1, 2), 9))
    assert peer.machine.facts[peer.machine.engine_epoch].registrations == 9


# Measuring


def measure(test: int = 1, *, dials: bool = True) -> messages.Measure:
    return messages.Measure(test, Member(4, "n4", "h", ["10.0.0.4"], 48149), dials, SECRET, 4_000)


def in_optimize() -> Peer:
    """A member whose program waits in optimize_topology, and has its vote at the master."""
    peer = member()
    peer.step(CallVote(1, "optimize", 0, peer.now_ns + 100 * MS))
    return peer


def test_a_peer_that_does_not_wait_in_the_call_measures_nothing() -> None:
    peer = member()
    effects = peer.receives(CONTROL, measure())
    [refusal] = sent(effects)
    assert isinstance(refusal, messages.LinkMeasured)
    assert "does not wait in optimize_topology" in refusal.failed
    assert not only(effects, Dial)


def session_open(peer: Peer, test: int = 1) -> list[Effect]:
    """The host's part of a visit that the peer has set out for."""
    conn = peer.last_conn
    peer.step(Opened(conn, NONCE))
    peer.now_ns += 3 * MS
    peer.receives(conn, Challenge(MASTER_NONCE, VERSION, VERSION))
    peer.now_ns += 2 * MS
    return peer.receives(conn, messages.BulkWelcome(prove(KEY, "visit_welcome", NONCE, MASTER_NONCE)))


def test_a_visit_to_measure_is_filled_and_its_rate_reported_with_the_round_trip() -> None:
    peer = in_optimize()
    assert len(only(peer.receives(CONTROL, measure()), Dial)) == 1
    conn = peer.last_conn
    assert session_open(peer) == [MakeBulk(conn), Fill(conn, True, 25 * MS)]
    reports: list[Message] = []
    for sample in range(1, 16):
        reports += sent(peer.step(Sampled(conn, sample * 25 * MS, sample * 25 * MS, sample * 1_250_000)))
    assert reports == [messages.LinkMeasured(1, 4, pytest.approx(5e7), 2_000)]


def test_a_visitor_that_comes_before_the_masters_word_is_let_in_with_it() -> None:
    peer = in_optimize()
    peer.step(Accepted(50, "10.0.0.4:1", NONCE))
    nonce, parts = b"v" * 32, [b"measure", *(number.to_bytes(8, "little") for number in (1, 4, ME))]
    peer.now_ns += 7 * MS
    hello = messages.BulkHello(VERSION, "measure", 1, 4, ME, nonce, prove(KEY, "visit", NONCE, nonce, *parts))
    assert peer.receives(50, hello) == []
    effects = peer.receives(CONTROL, measure(dials=False))
    assert only(effects, MakeBulk) == [MakeBulk(50)]
    assert only(effects, Fill) == [Fill(50, True, 25 * MS)]
    reports: list[Message] = []
    for sample in range(1, 16):
        reports += sent(peer.step(Sampled(50, sample * 25 * MS, sample * 25 * MS, sample * 1_250_000)))
    assert reports == [messages.LinkMeasured(1, 4, pytest.approx(5e7), 7_000)]


@pytest.mark.parametrize("end", ["done", "failed", "given up", "deadline"])
def test_the_measurement_ends_with_the_call(end: str) -> None:
    peer = in_optimize()
    peer.receives(CONTROL, measure())
    conn = peer.last_conn
    session_open(peer)
    match end:
        case "done":
            effects = peer.receives(CONTROL, messages.CallDone(1, False, World(2, 1, 2)))
        case "failed":
            effects = peer.receives(CONTROL, messages.CallFailed(1, Reason("topology", "no")))
        case "given up":
            effects = peer.step(CallGivenUp(1))
        case _:
            peer.now_ns += 100 * MS
            effects = peer.step(Tick())
    assert conn in [effect.conn for effect in only(effects, CloseConn) if isinstance(effect, CloseConn)]
