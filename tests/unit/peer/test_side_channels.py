"""BulkSessions between members: the handshake, who is let in, who waits, and for how long."""

import pytest

from ringfold.peer.effects import CloseConn, Dial, Effect, MakeBulk, ResumeReading, SendMessage
from ringfold.peer.settings import PeerTimings
from ringfold.peer.side_channels import FIRST_KEY, BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.wire import frames
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.messages import Challenge, Member, Message, Refused, VisitHello, VisitWelcome
from ringfold.wire.proof import link_key, prove

MS = 1_000_000
SECRET = b"of the visit"
TOKEN = b"of the run"
KEY = link_key(TOKEN, SECRET)
ERRAND: TaskId = ("state", 3)
GUEST, HOST = 5, 6
NONCE, CHALLENGE = b"v" * 32, b"c" * 32
TIMINGS = PeerTimings(connect_ms=1_000, handshake_ms=2_000)
PATIENCE_NS = 3_000 * MS


class Visitor:
    """The visits of a peer that wants to visit another one; the test plays the host and the network."""

    def __init__(self, addresses: int = 1) -> None:
        self.visits = BulkSessions(TIMINGS, TOKEN)
        self.visits.me = GUEST
        self.visits.expect(ERRAND, SECRET, [GUEST])
        self.now_ns = 0
        self.last_conn = 0
        self.host = Member(HOST, "n", "h", [f"10.0.0.{number}" for number in range(addresses)], 1)
        self.dials: list[Dial] = []
        self.failures: list[SessionFailed] = []

    def sets_out(self) -> None:
        self.take(*self.visits.dial(self.now_ns, ERRAND, self.host))

    def take(self, effects: list[Effect], outcomes: list[SessionFailed]) -> list[Effect]:
        """Dials are answered with a connection at once, as the shell does."""
        self.failures += outcomes
        for dial in [effect for effect in effects if isinstance(effect, Dial)]:
            self.dials.append(dial)
            self.last_conn += 1
            assert self.visits.dialled(dial.key, self.last_conn) == []
        return effects

    def hears(self, message: Message) -> tuple[list[Effect], list[SessionOpened | SessionFailed]]:
        effects, outcomes = self.visits.message(self.now_ns, self.last_conn, frames.encode(message))
        self.take(effects, [each for each in outcomes if isinstance(each, SessionFailed)])
        return effects, outcomes

    def at_the_door(self) -> VisitHello:
        """Dialled, connected, challenged: the hello is on its way."""
        self.visits.opened(self.last_conn, NONCE)
        effects, _ = self.hears(Challenge(CHALLENGE, VERSION, VERSION))
        (sent,) = [effect.message for effect in effects if isinstance(effect, SendMessage)]
        assert isinstance(sent, VisitHello)
        assert ResumeReading(self.last_conn) in effects
        return sent


def setting_out(addresses: int = 1) -> Visitor:
    visitor = Visitor(addresses)
    visitor.sets_out()
    return visitor


def welcome(key: bytes = KEY) -> VisitWelcome:
    return VisitWelcome(prove(key, "visit_welcome", NONCE, CHALLENGE))


def host(visitors: tuple[int, ...] = (GUEST,), task: TaskId = ERRAND) -> BulkSessions:
    visits = BulkSessions(TIMINGS, TOKEN)
    visits.me = HOST
    visits.expect(task, SECRET, visitors)
    return visits


def hello(key: bytes = KEY, **changes: object) -> VisitHello:
    """What an honest visitor says, with changes that it has proven."""
    claim = {"purpose": "state", "number": 3, "source": GUEST, "target": HOST, **changes}
    numbers = [claim[name].to_bytes(8, "little") for name in ("number", "source", "target")]  # type: ignore[attr-defined]
    proof = prove(key, "visit", CHALLENGE, NONCE, claim["purpose"].encode(), *numbers)  # type: ignore[attr-defined]
    return VisitHello(VERSION, claim["purpose"], claim["number"], claim["source"], claim["target"], NONCE, proof)  # type: ignore[arg-type]


# The visitor


def test_a_visitor_proves_the_secret_and_is_open_with_the_welcome() -> None:
    visitor = setting_out()
    assert visitor.at_the_door() == hello()
    visitor.now_ns = 7 * MS
    effects, outcomes = visitor.hears(welcome())
    assert effects == [MakeBulk(visitor.last_conn)]
    assert outcomes == [SessionOpened(ERRAND, HOST, visitor.last_conn, True, round_trip_ns=7 * MS)]
    assert visitor.visits.open == {visitor.last_conn: outcomes[0]}
    assert visitor.visits.next_deadline_ns() is None


def test_the_dials_of_visits_are_told_from_those_of_lanes() -> None:
    assert all(dial.key > FIRST_KEY for dial in setting_out().dials)


def test_a_host_that_does_not_know_the_secret_is_left() -> None:
    visitor = setting_out()
    visitor.at_the_door()
    effects, outcomes = visitor.hears(welcome(b"another"))
    assert effects == [CloseConn(visitor.last_conn, "it does not know the secret of this session")]
    assert [(each.reason, each.conn) for each in outcomes if isinstance(each, SessionFailed)] == [
        ("it does not know the secret of this session", None)
    ]
    assert visitor.visits.open == {}


@pytest.mark.parametrize("message", [welcome(), Refused("no"), hello()], ids=["welcome", "refused", "hello"])
def test_what_is_said_out_of_turn_ends_the_visit(message: Message) -> None:
    visitor = setting_out()
    visitor.visits.opened(visitor.last_conn, NONCE)
    visitor.hears(message)
    assert len(visitor.failures) == 1


def test_what_is_no_message_ends_the_visit() -> None:
    visitor = setting_out()
    visitor.visits.opened(visitor.last_conn, NONCE)
    _, outcomes = visitor.visits.message(0, visitor.last_conn, b"\xc1")
    assert isinstance(outcomes[0], SessionFailed)


def test_every_address_is_tried() -> None:
    visitor = setting_out(addresses=3)
    visitor.take(*visitor.visits.dial_failed(0, visitor.dials[-1].key, "no route"))
    over = visitor.visits.closed(0, visitor.last_conn, "connection refused")
    assert over is not None
    visitor.take(*over)
    assert [dial.host for dial in visitor.dials] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    visitor.at_the_door()
    _, outcomes = visitor.hears(welcome())
    assert isinstance(outcomes[0], SessionOpened)
    assert visitor.failures == []


def test_when_no_address_is_left_the_last_reason_is_told() -> None:
    visitor = setting_out(addresses=2)
    for reason in ("no route", "connection refused"):
        over = visitor.visits.closed(0, visitor.last_conn, reason)
        assert over is not None
        visitor.take(*over)
    assert [failure.reason for failure in visitor.failures] == ["connection refused"]
    assert visitor.visits.next_deadline_ns() is None


def test_a_host_without_an_address_cannot_be_visited() -> None:
    visitor = setting_out(addresses=0)
    assert [(failure.reason, failure.peer) for failure in visitor.failures] == [("it has no address", HOST)]


def test_a_host_that_does_not_answer_is_left_at_the_deadline() -> None:
    visitor = setting_out(addresses=2)
    visitor.at_the_door()
    assert visitor.visits.next_deadline_ns() == PATIENCE_NS
    assert visitor.visits.tick(PATIENCE_NS - 1) == ([], [])
    effects = visitor.take(*visitor.visits.tick(PATIENCE_NS))
    assert effects[0] == CloseConn(1, "no response in time")
    assert len(visitor.dials) == 2
    visitor.take(*visitor.visits.tick(2 * PATIENCE_NS))
    assert [failure.reason for failure in visitor.failures] == ["no response in time"]


def test_a_connection_that_comes_too_late_is_closed() -> None:
    visitor = setting_out(addresses=2)
    first = visitor.dials[0].key
    visitor.take(*visitor.visits.tick(PATIENCE_NS))
    assert visitor.visits.dialled(first, 77) == [CloseConn(77, "no longer needed")]
    assert visitor.visits.dial_failed(0, first, "too late") == ([], [])


def test_the_end_of_an_open_visit_is_told_with_its_connection() -> None:
    visitor = setting_out()
    visitor.at_the_door()
    visitor.hears(welcome())
    assert visitor.visits.closed(0, visitor.last_conn, "reset") == (
        [],
        [SessionFailed(ERRAND, HOST, visitor.last_conn, True, "reset")],
    )
    assert visitor.visits.closed(0, visitor.last_conn, "reset") is None


def test_a_stopped_errand_closes_what_is_open_and_what_is_on_its_way() -> None:
    visitor = setting_out()
    visitor.at_the_door()
    visitor.hears(welcome())
    visitor.sets_out()
    assert visitor.visits.stop(ERRAND, "over") == [CloseConn(2, "over"), CloseConn(1, "over")]
    assert visitor.visits.open == {}
    assert visitor.visits.next_deadline_ns() is None
    assert visitor.visits.closed(0, 1, "reset") is None


def test_stopping_one_errand_leaves_the_others_alone() -> None:
    visitor = setting_out()
    assert visitor.visits.stop(("state", 2), "over") == []
    assert visitor.visits.is_dialling(visitor.last_conn)


def test_the_end_closes_everything() -> None:
    visitor = setting_out()
    assert visitor.visits.end("over") == [CloseConn(1, "over")]


def test_a_visit_may_begin_with_a_pause() -> None:
    visitor = Visitor()
    visitor.take(*visitor.visits.dial(0, ERRAND, visitor.host, 250))
    assert visitor.dials == []
    assert visitor.visits.next_deadline_ns() == 250 * MS
    visitor.take(*visitor.visits.tick(250 * MS))
    assert len(visitor.dials) == 1
    visitor.at_the_door()
    _, outcomes = visitor.hears(welcome())
    assert isinstance(outcomes[0], SessionOpened)


def test_who_turns_back_leaves_nothing_behind() -> None:
    visitor = setting_out()
    assert visitor.visits.cancel_dial(ERRAND, HOST + 1, "gone") == []
    assert visitor.visits.cancel_dial(ERRAND, HOST, "gone") == [CloseConn(1, "gone")]
    assert visitor.visits.next_deadline_ns() is None
    assert visitor.visits.closed(0, 1, "reset") is None


def test_a_host_that_says_no_is_told_from_one_that_cannot_be_reached() -> None:
    refused, broken = setting_out(), setting_out()
    refused.at_the_door()
    refused.hears(Refused("this is over here"))
    over = broken.visits.closed(0, broken.last_conn, "reset")
    assert over is not None
    broken.take(*over)
    assert [failure.is_refused for failure in (*refused.failures, *broken.failures)] == [True, False]
    assert refused.failures[0].reason == "refused: this is over here"


# The host


def test_a_guest_that_proves_the_secret_is_let_in() -> None:
    visits = host()
    verdict = visits.accept(9, CHALLENGE, hello())
    arrived = SessionOpened(ERRAND, GUEST, 9, False)
    assert verdict == ([SendMessage(9, welcome()), MakeBulk(9)], arrived)
    assert visits.open == {9: arrived}


def test_a_guest_waits_until_its_errand_is_announced() -> None:
    visits = BulkSessions(TIMINGS, TOKEN)
    visits.me = HOST
    assert visits.accept(9, CHALLENGE, hello()) is None
    visits.expect(ERRAND, SECRET, [GUEST])
    assert not isinstance(visits.accept(9, CHALLENGE, hello()), str | None)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (hello(source=7), "no session"),
        (hello(target=8), "no session"),
        (VisitHello(VERSION, "state", 3, GUEST, HOST, NONCE, b"x" * 32), "secret"),
        (hello(key=SECRET), "secret"),  # overheard, without the token
        (VisitHello(VERSION, "state", 3, GUEST, HOST, b"o" * 32, hello().proof), "secret"),
        (VisitHello(VERSION, "state", 3, -1, HOST, NONCE, b"x" * 32), "out of range"),
        (VisitHello(99, "state", 3, GUEST, HOST, NONCE, hello().proof), "version 99"),
    ],
    ids=["not expected", "overheard", "for another", "wrong proof", "another nonce", "negative", "another version"],
)
def test_a_guest_that_has_no_business_here_is_turned_away(said: VisitHello, words: str) -> None:
    visits = host()
    verdict = visits.accept(9, CHALLENGE, said)
    assert isinstance(verdict, str)
    assert words in verdict
    assert visits.open == {}


def test_a_proof_for_one_challenge_is_none_for_another() -> None:
    assert isinstance(host().accept(9, b"d" * 32, hello()), str)


def test_a_guest_of_an_errand_that_is_over_is_turned_away_at_once() -> None:
    """It would stand at the door until its patience ends, and its own call with it."""
    visits = host()
    visits.stop(ERRAND, "over")
    verdict = visits.accept(9, CHALLENGE, hello())
    assert isinstance(verdict, str)
    assert "over" in verdict


def test_a_guest_of_an_errand_in_which_the_host_takes_no_part_is_turned_away_at_once() -> None:
    visits = BulkSessions(TIMINGS, TOKEN)
    visits.me = HOST
    visits.stop(ERRAND, "the call was given up before its plan came")
    assert isinstance(visits.accept(9, CHALLENGE, hello()), str)
    assert visits.accept(9, CHALLENGE, hello(number=4)) is None
