"""A peer's part in a measurement, driven by hand."""

import pytest

from ringfold.peer.effects import CloseConn, Dial, Effect, Fill, SendMessage
from ringfold.peer.events import Sampled
from ringfold.peer.measure.link_rate import SAMPLE_NS, LinkMeasurement
from ringfold.peer.settings import MS, PeerTimings
from ringfold.peer.side_channels import BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.wire import frames
from ringfold.wire.messages import Have, LinkMeasured, Measure, Member, Message, Rate

MASTER, CONN = 1, 7
TASK: TaskId = ("measure", 3)
OTHER = Member(9, "nine", "host", ["10.0.0.9"], 48149)


class Bench:
    """A `LinkMeasurement` with its sessions, and a clock."""

    def __init__(self, *, dials: bool = False, most_ms: int = 4_000) -> None:
        self.now_ns = 0
        self.sessions = BulkSessions(PeerTimings())
        self.sessions.me = 5
        self.measurement = LinkMeasurement(self.sessions, lambda message: [SendMessage(MASTER, message)])
        self.begun = self.measurement.begin(0, Measure(3, OTHER, dials, b"secret", most_ms))

    def arrive(self, round_trip_ms: float = 0.1, conn: int = CONN) -> list[Effect]:
        visit = SessionOpened(TASK, 9, conn, False, int(round_trip_ms * MS))
        self.sessions.open[conn] = visit
        return self.measurement.session_opened(self.now_ns, visit)

    def flow(self, mbit: float, ms: int, since_ms: int = 0) -> list[Effect]:
        """Filler arrives at an even rate; ends early when there are effects."""
        for sample in range(since_ms * MS, ms * MS, SAMPLE_NS):
            self.now_ns = sample + SAMPLE_NS
            received = int(mbit * 125_000 * self.now_ns / 1e9)
            effects = self.measurement.sampled(Sampled(CONN, self.now_ns, self.now_ns, received))
            if effects:
                return effects
        return []

    def receives(self, message: Message) -> list[Effect]:
        return self.measurement.message(self.now_ns, CONN, frames.encode(message))

    def later(self, ms: int) -> list[Effect]:
        """To the next deadline, which must be `ms` after the beginning."""
        assert self.measurement.next_deadline_ns() == ms * MS
        assert self.measurement.tick(ms * MS - 1) == []
        self.now_ns = ms * MS
        return self.measurement.tick(self.now_ns)


def sent(effects: list[Effect], conn: int = MASTER) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, SendMessage) and effect.conn == conn]


def report_of(effects: list[Effect]) -> LinkMeasured:
    [report] = sent(effects)
    assert isinstance(report, LinkMeasured)
    return report


def test_the_dialler_dials_and_the_other_end_waits() -> None:
    [dial] = Bench(dials=True).begun
    assert isinstance(dial, Dial)
    assert (dial.host, dial.port) == ("10.0.0.9", 48149)
    assert Bench(dials=False).begun == []


def test_an_open_session_is_filled() -> None:
    assert Bench().arrive() == [Fill(CONN, True, SAMPLE_NS)]


def test_a_steady_rate_is_sent_to_the_other_end_and_to_the_master() -> None:
    bench = Bench()
    bench.arrive(round_trip_ms=0.4)
    effects = bench.flow(mbit=400, ms=800)
    assert bench.now_ns < 400 * MS
    report = report_of(effects)
    assert (report.test, report.other, report.round_trip_us, report.failed) == (3, 9, 400, "")
    assert report.settled
    assert report.bytes_per_s == pytest.approx(400 * 125_000, rel=0.01)
    assert sent(effects, CONN) == [Rate(report.bytes_per_s)]
    assert not [effect for effect in effects if isinstance(effect, CloseConn)]


def test_the_link_is_filled_until_the_other_end_has_its_rate() -> None:
    bench = Bench()
    bench.arrive()
    bench.flow(mbit=400, ms=800)
    assert bench.measurement.is_busy
    assert bench.receives(Rate(1.0)) == [CloseConn(CONN, "measured")]
    assert not bench.measurement.is_busy


def test_the_end_that_received_the_rate_first_closes_with_its_own() -> None:
    bench = Bench()
    bench.arrive()
    bench.receives(Rate(1.0))
    effects = bench.flow(mbit=400, ms=800)
    assert report_of(effects).bytes_per_s > 0
    assert effects[-1] == CloseConn(CONN, "measured")


def test_when_the_other_end_has_its_rate_it_is_not_filled_any_more() -> None:
    bench = Bench()
    bench.arrive()
    assert bench.receives(Rate(1.0)) == [Fill(CONN, False, SAMPLE_NS)]
    assert bench.measurement.is_busy


def test_an_other_end_that_never_has_its_rate_is_dropped_at_the_deadline() -> None:
    bench = Bench()
    bench.arrive()
    bench.flow(mbit=400, ms=800)
    effects = bench.later(4_000)
    assert [type(effect) for effect in effects] == [CloseConn]
    assert not bench.measurement.is_busy


def test_an_unsteady_rate_is_taken_at_the_deadline_as_it_is() -> None:
    bench = Bench()
    bench.arrive(round_trip_ms=0)
    total = 0
    for number in range(1, 32):
        total += number * 100_000
        assert bench.measurement.sampled(Sampled(CONN, number * SAMPLE_NS, number * SAMPLE_NS, total)) == []
    report = report_of(bench.later(1_425))
    assert not report.settled
    # The last look: 27 to 31 times 100 kB, and 200 ms of it less a burst.
    assert report.bytes_per_s == pytest.approx(27.5 * 100_000 / 0.025 - 64 * 1024 / 0.2, rel=0.02)


def test_bytes_count_at_the_time_of_their_count() -> None:
    """Samples that are late, and not equally, show an even rate all the same."""
    bench = Bench()
    bench.arrive()
    for number in range(1, 20):
        counted_ns = number * SAMPLE_NS
        late_ns = counted_ns + (number % 3) * 8 * MS
        if effects := bench.measurement.sampled(Sampled(CONN, late_ns, counted_ns, number * 100_000)):
            break
    assert report_of(effects).bytes_per_s == pytest.approx(4e6)


def test_a_high_rtt_path_has_more_time_and_must_be_steady_for_two_round_trips() -> None:
    bench = Bench()
    bench.arrive(round_trip_ms=120)
    bench.flow(mbit=100, ms=800)
    assert bench.now_ns >= 2 * 120 * MS
    slow = Bench()
    slow.arrive(round_trip_ms=120)
    assert slow.measurement.next_deadline_ns() == (20 * 120 + 120 + 25) * MS


def test_the_masters_limit_bounds_the_time_of_a_path_with_a_very_high_rtt() -> None:
    bench = Bench(most_ms=1_500)
    bench.arrive(round_trip_ms=900)
    bench.flow(mbit=100, ms=1_400)
    assert report_of(bench.later(1_500)).bytes_per_s == pytest.approx(100 * 125_000, rel=0.01)
    assert not bench.measurement.is_busy


def test_nothing_arrived() -> None:
    bench = Bench()
    bench.arrive(round_trip_ms=0)
    assert report_of(bench.later(1_425)).failed == "nothing arrived from peer 9"
    assert not bench.measurement.is_busy


def test_a_test_without_a_connection_fails() -> None:
    assert report_of(Bench().later(4_000)).failed == "peer 9 did not connect within 4000 ms"


def test_no_route_to_the_other_end() -> None:
    bench = Bench(dials=True)
    effects = bench.measurement.session_failed(0, SessionFailed(TASK, 9, None, True, "Connection refused"))
    assert report_of(effects).failed == "no route to peer 9: Connection refused"


def test_a_connection_that_breaks_before_the_rate_is_a_failure() -> None:
    bench = Bench()
    bench.arrive()
    del bench.sessions.open[CONN]
    effects = bench.measurement.session_failed(0, SessionFailed(TASK, 9, CONN, False, "reset"))
    assert report_of(effects).failed == "the connection with peer 9 ended: reset"


def test_a_connection_that_ends_after_the_rate_is_none() -> None:
    bench = Bench()
    bench.arrive()
    bench.flow(mbit=400, ms=800)
    del bench.sessions.open[CONN]
    assert bench.measurement.session_failed(0, SessionFailed(TASK, 9, CONN, False, "closed")) == []
    assert not bench.measurement.is_busy


def test_a_message_out_of_turn_ends_it() -> None:
    bench = Bench()
    bench.arrive()
    assert "Have out of turn" in report_of(bench.receives(Have([]))).failed


def test_a_second_connection_for_the_same_measurement_is_dropped() -> None:
    bench = Bench()
    bench.arrive()
    assert [type(effect) for effect in bench.arrive(conn=8)] == [CloseConn]
    assert bench.flow(mbit=400, ms=800)


def test_the_next_request_of_the_master_ends_the_measurement_before() -> None:
    bench = Bench()
    bench.arrive()
    effects = bench.measurement.begin(0, Measure(4, OTHER, True, b"secret", 4_000))
    assert [type(effect) for effect in effects] == [CloseConn, Dial]
    assert bench.flow(mbit=400, ms=800) == []


def test_samples_of_another_connection_do_not_count() -> None:
    bench = Bench()
    bench.arrive()
    for number in range(1, 32):
        assert bench.measurement.sampled(Sampled(8, number * SAMPLE_NS, number * SAMPLE_NS, number * 1_000_000)) == []
