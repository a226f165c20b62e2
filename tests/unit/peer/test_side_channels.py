"""BulkSessions between members: the handshake, which are accepted, which wait, and for how long."""

import pytest

from ringfold.peer.effects import CloseConn, Dial, Effect, MakeBulk, ResumeReading, SendMessage
from ringfold.peer.settings import PeerTimings
from ringfold.peer.side_channels import FIRST_KEY, BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.wire import frames
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.messages import BulkHello, BulkWelcome, Challenge, Member, Message, Refused
from ringfold.wire.proof import link_key, prove

MS = 1_000_000
SECRET = b"of the visit"
TOKEN = b"of the run"
KEY = link_key(TOKEN, SECRET)
TASK: TaskId = ("state", 3)
DIALLER, ACCEPTOR = 5, 6
NONCE, CHALLENGE = b"v" * 32, b"c" * 32
TIMINGS = PeerTimings(connect_ms=1_000, handshake_ms=2_000)
DEADLINE_NS = 3_000 * MS


class Dialler:
    """The sessions of a peer that wants to visit another one; the test plays the host and the network."""

    def __init__(self, addresses: int = 1) -> None:
        self.sessions = BulkSessions(TIMINGS, TOKEN)
        self.sessions.me = DIALLER
        self.sessions.expect(TASK, SECRET, [DIALLER])
        self.now_ns = 0
        self.last_conn = 0
        self.target = Member(ACCEPTOR, "n", "h", [f"10.0.0.{number}" for number in range(addresses)], 1)
        self.dials: list[Dial] = []
        self.failures: list[SessionFailed] = []

    def dials_target(self) -> None:
        self.take(*self.sessions.dial(self.now_ns, TASK, self.target))

    def take(self, effects: list[Effect], outcomes: list[SessionFailed]) -> list[Effect]:
        """Dials are answered with a connection at once, as the shell does."""
        self.failures += outcomes
        for dial in [effect for effect in effects if isinstance(effect, Dial)]:
            self.dials.append(dial)
            self.last_conn += 1
            assert self.sessions.dialled(dial.key, self.last_conn) == []
        return effects

    def receives(self, message: Message) -> tuple[list[Effect], list[SessionOpened | SessionFailed]]:
        effects, outcomes = self.sessions.message(self.now_ns, self.last_conn, frames.encode(message))
        self.take(effects, [each for each in outcomes if isinstance(each, SessionFailed)])
        return effects, outcomes

    def sends_hello(self) -> BulkHello:
        """Dialled, connected, challenged: the hello is sent."""
        self.sessions.opened(self.last_conn, NONCE)
        effects, _ = self.receives(Challenge(CHALLENGE, VERSION, VERSION))
        (sent,) = [effect.message for effect in effects if isinstance(effect, SendMessage)]
        assert isinstance(sent, BulkHello)
        assert ResumeReading(self.last_conn) in effects
        return sent


def dialling(addresses: int = 1) -> Dialler:
    dialler = Dialler(addresses)
    dialler.dials_target()
    return dialler


def welcome(key: bytes = KEY) -> BulkWelcome:
    return BulkWelcome(prove(key, "visit_welcome", NONCE, CHALLENGE))


def acceptor(diallers: tuple[int, ...] = (DIALLER,), task: TaskId = TASK) -> BulkSessions:
    sessions = BulkSessions(TIMINGS, TOKEN)
    sessions.me = ACCEPTOR
    sessions.expect(task, SECRET, diallers)
    return sessions


def hello(key: bytes = KEY, **changes: object) -> BulkHello:
    """What an honest dialler says, with changes that it has proven."""
    claim = {"purpose": "state", "number": 3, "source": DIALLER, "target": ACCEPTOR, **changes}
    numbers = [claim[name].to_bytes(8, "little") for name in ("number", "source", "target")]  # type: ignore[attr-defined]
    proof = prove(key, "visit", CHALLENGE, NONCE, claim["purpose"].encode(), *numbers)  # type: ignore[attr-defined]
    return BulkHello(VERSION, claim["purpose"], claim["number"], claim["source"], claim["target"], NONCE, proof)  # type: ignore[arg-type]


# The dialler


def test_a_dialler_proves_the_secret_and_is_open_with_the_welcome() -> None:
    dialler = dialling()
    assert dialler.sends_hello() == hello()
    dialler.now_ns = 7 * MS
    effects, outcomes = dialler.receives(welcome())
    assert effects == [MakeBulk(dialler.last_conn)]
    assert outcomes == [SessionOpened(TASK, ACCEPTOR, dialler.last_conn, True, round_trip_ns=7 * MS)]
    assert dialler.sessions.open == {dialler.last_conn: outcomes[0]}
    assert dialler.sessions.next_deadline_ns() is None


def test_the_dial_keys_of_sessions_differ_from_those_of_lanes() -> None:
    assert all(dial.key > FIRST_KEY for dial in dialling().dials)


def test_an_acceptor_that_does_not_know_the_secret_is_dropped() -> None:
    dialler = dialling()
    dialler.sends_hello()
    effects, outcomes = dialler.receives(welcome(b"another"))
    assert effects == [CloseConn(dialler.last_conn, "it does not know the secret of this session")]
    assert [(each.reason, each.conn) for each in outcomes if isinstance(each, SessionFailed)] == [
        ("it does not know the secret of this session", None)
    ]
    assert dialler.sessions.open == {}


@pytest.mark.parametrize("message", [welcome(), Refused("no"), hello()], ids=["welcome", "refused", "hello"])
def test_a_message_out_of_turn_ends_the_session(message: Message) -> None:
    dialler = dialling()
    dialler.sessions.opened(dialler.last_conn, NONCE)
    dialler.receives(message)
    assert len(dialler.failures) == 1


def test_bytes_that_are_no_message_end_the_session() -> None:
    dialler = dialling()
    dialler.sessions.opened(dialler.last_conn, NONCE)
    _, outcomes = dialler.sessions.message(0, dialler.last_conn, b"\xc1")
    assert isinstance(outcomes[0], SessionFailed)


def test_every_address_is_tried() -> None:
    dialler = dialling(addresses=3)
    dialler.take(*dialler.sessions.dial_failed(0, dialler.dials[-1].key, "no route"))
    over = dialler.sessions.closed(0, dialler.last_conn, "connection refused")
    assert over is not None
    dialler.take(*over)
    assert [dial.host for dial in dialler.dials] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    dialler.sends_hello()
    _, outcomes = dialler.receives(welcome())
    assert isinstance(outcomes[0], SessionOpened)
    assert dialler.failures == []


def test_when_no_address_is_left_the_last_reason_is_reported() -> None:
    dialler = dialling(addresses=2)
    for reason in ("no route", "connection refused"):
        over = dialler.sessions.closed(0, dialler.last_conn, reason)
        assert over is not None
        dialler.take(*over)
    assert [failure.reason for failure in dialler.failures] == ["connection refused"]
    assert dialler.sessions.next_deadline_ns() is None


def test_a_target_without_an_address_cannot_be_dialled() -> None:
    dialler = dialling(addresses=0)
    assert [(failure.reason, failure.peer) for failure in dialler.failures] == [("it has no address", ACCEPTOR)]


def test_an_acceptor_that_does_not_respond_is_dropped_at_the_deadline() -> None:
    dialler = dialling(addresses=2)
    dialler.sends_hello()
    assert dialler.sessions.next_deadline_ns() == DEADLINE_NS
    assert dialler.sessions.tick(DEADLINE_NS - 1) == ([], [])
    effects = dialler.take(*dialler.sessions.tick(DEADLINE_NS))
    assert effects[0] == CloseConn(1, "no response in time")
    assert len(dialler.dials) == 2
    dialler.take(*dialler.sessions.tick(2 * DEADLINE_NS))
    assert [failure.reason for failure in dialler.failures] == ["no response in time"]


def test_a_connection_that_is_established_too_late_is_closed() -> None:
    dialler = dialling(addresses=2)
    first = dialler.dials[0].key
    dialler.take(*dialler.sessions.tick(DEADLINE_NS))
    assert dialler.sessions.dialled(first, 77) == [CloseConn(77, "no longer needed")]
    assert dialler.sessions.dial_failed(0, first, "too late") == ([], [])


def test_the_end_of_an_open_session_is_reported_with_its_connection() -> None:
    dialler = dialling()
    dialler.sends_hello()
    dialler.receives(welcome())
    assert dialler.sessions.closed(0, dialler.last_conn, "reset") == (
        [],
        [SessionFailed(TASK, ACCEPTOR, dialler.last_conn, True, "reset")],
    )
    assert dialler.sessions.closed(0, dialler.last_conn, "reset") is None


def test_a_stopped_task_closes_open_sessions_and_dials() -> None:
    dialler = dialling()
    dialler.sends_hello()
    dialler.receives(welcome())
    dialler.dials_target()
    assert dialler.sessions.stop(TASK, "over") == [CloseConn(2, "over"), CloseConn(1, "over")]
    assert dialler.sessions.open == {}
    assert dialler.sessions.next_deadline_ns() is None
    assert dialler.sessions.closed(0, 1, "reset") is None


def test_stopping_one_task_leaves_the_others_alone() -> None:
    dialler = dialling()
    assert dialler.sessions.stop(("state", 2), "over") == []
    assert dialler.sessions.is_dialling(dialler.last_conn)


def test_the_end_closes_everything() -> None:
    dialler = dialling()
    assert dialler.sessions.end("over") == [CloseConn(1, "over")]


def test_a_dial_may_begin_with_a_pause() -> None:
    dialler = Dialler()
    dialler.take(*dialler.sessions.dial(0, TASK, dialler.target, 250))
    assert dialler.dials == []
    assert dialler.sessions.next_deadline_ns() == 250 * MS
    dialler.take(*dialler.sessions.tick(250 * MS))
    assert len(dialler.dials) == 1
    dialler.sends_hello()
    _, outcomes = dialler.receives(welcome())
    assert isinstance(outcomes[0], SessionOpened)


def test_a_cancelled_dial_leaves_nothing_behind() -> None:
    dialler = dialling()
    assert dialler.sessions.cancel_dial(TASK, ACCEPTOR + 1, "gone") == []
    assert dialler.sessions.cancel_dial(TASK, ACCEPTOR, "gone") == [CloseConn(1, "gone")]
    assert dialler.sessions.next_deadline_ns() is None
    assert dialler.sessions.closed(0, 1, "reset") is None


def test_a_refusal_differs_from_a_target_that_cannot_be_reached() -> None:
    refused, broken = dialling(), dialling()
    refused.sends_hello()
    refused.receives(Refused("this is over here"))
    over = broken.sessions.closed(0, broken.last_conn, "reset")
    assert over is not None
    broken.take(*over)
    assert [failure.is_refused for failure in (*refused.failures, *broken.failures)] == [True, False]
    assert refused.failures[0].reason == "refused: this is over here"


# The host


def test_a_peer_that_proves_the_secret_is_accepted() -> None:
    sessions = acceptor()
    verdict = sessions.accept(9, CHALLENGE, hello())
    arrived = SessionOpened(TASK, DIALLER, 9, False)
    assert verdict == ([SendMessage(9, welcome()), MakeBulk(9)], arrived)
    assert sessions.open == {9: arrived}


def test_a_connection_waits_until_its_task_is_announced() -> None:
    sessions = BulkSessions(TIMINGS, TOKEN)
    sessions.me = ACCEPTOR
    assert sessions.accept(9, CHALLENGE, hello()) is None
    sessions.expect(TASK, SECRET, [DIALLER])
    assert not isinstance(sessions.accept(9, CHALLENGE, hello()), str | None)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (hello(source=7), "no session"),
        (hello(target=8), "no session"),
        (BulkHello(VERSION, "state", 3, DIALLER, ACCEPTOR, NONCE, b"x" * 32), "secret"),
        (hello(key=SECRET), "secret"),  # overheard, without the token
        (BulkHello(VERSION, "state", 3, DIALLER, ACCEPTOR, b"o" * 32, hello().proof), "secret"),
        (BulkHello(VERSION, "state", 3, -1, ACCEPTOR, NONCE, b"x" * 32), "out of range"),
        (BulkHello(99, "state", 3, DIALLER, ACCEPTOR, NONCE, hello().proof), "version 99"),
    ],
    ids=["not expected", "overheard", "for another", "wrong proof", "another nonce", "negative", "another version"],
)
def test_a_wrong_hello_is_refused(wrong: BulkHello, reason: str) -> None:
    sessions = acceptor()
    verdict = sessions.accept(9, CHALLENGE, wrong)
    assert isinstance(verdict, str)
    assert reason in verdict
    assert sessions.open == {}


def test_a_proof_for_one_challenge_is_none_for_another() -> None:
    assert isinstance(acceptor().accept(9, b"d" * 32, hello()), str)


def test_a_connection_for_a_task_that_is_over_is_refused_at_once() -> None:
    """It would wait until its deadline, and its own call with it."""
    sessions = acceptor()
    sessions.stop(TASK, "over")
    verdict = sessions.accept(9, CHALLENGE, hello())
    assert isinstance(verdict, str)
    assert "over" in verdict


def test_a_connection_for_a_task_without_this_peer_is_refused_at_once() -> None:
    sessions = BulkSessions(TIMINGS, TOKEN)
    sessions.me = ACCEPTOR
    sessions.stop(TASK, "the call was given up before its plan came")
    assert isinstance(sessions.accept(9, CHALLENGE, hello()), str)
    assert sessions.accept(9, CHALLENGE, hello(number=4)) is None
