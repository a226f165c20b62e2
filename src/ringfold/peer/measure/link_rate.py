"""A peer's part in a measurement of one link, from the master's word to the report. Pure.

Both ends do the same, and at the same time, whoever dialled:

    Measure --> visit --> fill the link, count what comes --> Rate to the other end, Measured to the master --> close
                                                              (but keep filling until the other end's Rate is here)

When the estimate of what comes has settled, this end knows its figure. The other end may not have its own yet, and must
be sent filler until it says so; not longer, because what is queued on the way there delays the acknowledgements of what
comes from there, and a fast direction beside a slow one finds its pace only when the slow one is quiet. The one that
has said `Rate` and heard it closes; the other one has reported by then, so that the end of the connection means nothing
to it any more.

How long the link is filled at most depends on the way: TCP needs up to about ten round trips to find its pace on a long
one, and only from then on the arrivals are steady. The master's `most_ms` bounds everything. At a deadline the best
estimate is taken, and reported as not settled; without any, the measurement failed, and the report says why.

One measurement at a time: the master's next word ends the one before, because it knows more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import Effect, Fill, SendMessage
from ringfold.peer.events import Sampled
from ringfold.peer.settings import MS
from ringfold.peer.side_channels import BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.topology.estimate import DEADLINE_NS, Estimate, RateEstimate
from ringfold.wire import frames
from ringfold.wire.messages import Measure, Measured, Message
from ringfold.wire.visiting import Rate

SAMPLE_NS = 25 * MS
ROUND_TRIPS = 20
"""A slow start from 10 segments takes 11 round trips to 25 MB in flight, which is 1 Gbit/s around the world."""


@dataclass(slots=True)
class _Test:
    """The measurement in progress. `until_ns` is the end of it all, `fill_until_ns` that of this end's own figure."""

    order: Measure
    task: TaskId
    until_ns: int
    estimate: RateEstimate = field(default_factory=RateEstimate)
    conn: int | None = None
    round_trip_ns: int = 0
    fill_until_ns: int = 0
    has_reported: bool = False
    has_heard: bool = False
    """Whether the other end has its figure."""

    @property
    def deadline_ns(self) -> int:
        return self.until_ns if self.conn is None or self.has_reported else self.fill_until_ns


class LinkMeasurement:
    """The measurement that this peer takes part in, if there is one."""

    def __init__(self, visits: BulkSessions, say: Callable[[Message], list[Effect]]) -> None:
        self._visits = visits
        self._say = say
        self._test: _Test | None = None

    @property
    def is_busy(self) -> bool:
        return self._test is not None

    def begin(self, now_ns: int, order: Measure) -> list[Effect]:
        """The master wants the link to another peer measured."""
        effects = self.end("the next measurement begins")
        task: TaskId = ("measure", order.test)
        self._test = test = _Test(order, task, now_ns + order.most_ms * MS)
        self._visits.expect(task, order.secret, () if order.dials else (order.other.peer,))
        if order.dials:
            more, failed = self._visits.dial(now_ns, task, order.other)
            effects += more
            for failure in failed:
                effects += self._fail(test, f"no way to peer {order.other.peer}: {failure.reason}")
        return effects

    def refuse(self, order: Measure) -> list[Effect]:
        """The program does not wait in the call any more: this peer's links are its own again."""
        reason = "it does not wait in optimize_topology any more"
        return self._say(Measured(order.test, order.other.peer, failed=reason))

    def end(self, reason: str) -> list[Effect]:
        """No measurement any more, without a word."""
        test, self._test = self._test, None
        return [] if test is None else self._visits.stop(test.task, reason)

    # BulkSessions

    def session_opened(self, now_ns: int, visit: SessionOpened) -> list[Effect]:
        """The two are connected: fill."""
        test = self._test
        if test is None or visit.task != test.task or test.conn is not None:
            return self._visits.drop(visit.conn, "the measurement is over, or has its connection")
        test.conn, test.round_trip_ns = visit.conn, visit.round_trip_ns
        longest = max(DEADLINE_NS, ROUND_TRIPS * visit.round_trip_ns)
        test.estimate = RateEstimate(longest, visit.round_trip_ns)
        # The estimate's clock begins with the first byte that comes: a round trip from here, at the latest.
        test.fill_until_ns = min(now_ns + longest + visit.round_trip_ns + SAMPLE_NS, test.until_ns)
        return [Fill(visit.conn, True, SAMPLE_NS)]

    def session_failed(self, now_ns: int, failed: SessionFailed) -> list[Effect]:
        """The other one cannot be reached, or the connection is gone."""
        test = self._test
        if test is None or failed.task != test.task:
            return []
        if failed.conn is not None and failed.conn != test.conn:
            return []
        if failed.conn is None:
            return self._fail(test, f"no way to peer {failed.peer}: {failed.reason}")
        return self._fail(test, f"the connection with peer {failed.peer} ended: {failed.reason}")

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """The other end has its figure."""
        test = self._test
        if test is None or conn != test.conn:
            return self._visits.drop(conn, "the measurement is over")
        try:
            said = frames.decode_on_visit(body)
            if not isinstance(said, Rate):
                raise RemoteProtocolError(f"it said {type(said).__name__} out of turn")
        except RemoteProtocolError as error:
            return self._fail(test, f"peer {test.order.other.peer} does not keep to the protocol: {error}")
        test.has_heard = True
        return self.end("measured") if test.has_reported else [Fill(conn, False, SAMPLE_NS)]

    # Figures

    def sampled(self, event: Sampled) -> list[Effect]:
        """So much has come by now."""
        test = self._test
        if test is None or event.conn != test.conn or test.has_reported:
            return []
        estimate = test.estimate.sample(event.elapsed_ns, event.received, event.counted_ns)
        return [] if estimate is None else self._report(test, estimate)

    def tick(self, now_ns: int) -> list[Effect]:
        """Deadlines: of the own figure, and of everything."""
        test = self._test
        if test is None or now_ns < test.deadline_ns:
            return []
        if test.has_reported:
            return self.end("the other end did not say that it has its figure")
        if test.conn is None:
            verb = "could not be visited" if test.order.dials else "did not come"
            return self._fail(test, f"peer {test.order.other.peer} {verb} within {test.order.most_ms} ms")
        effects = self._report(test, test.estimate.best())
        return effects + (self.end("no time is left") if now_ns >= test.until_ns else [])

    def next_deadline_ns(self) -> int | None:
        return None if self._test is None else self._test.deadline_ns

    def _report(self, test: _Test, estimate: Estimate) -> list[Effect]:
        """This end has its figure. It stays until the other one has, too."""
        assert test.conn is not None
        if estimate.bytes_per_s <= 0:
            return self._fail(test, f"nothing came from peer {test.order.other.peer}")
        test.has_reported = True
        round_trip_us = max(1, test.round_trip_ns // 1_000)
        report = Measured(test.order.test, test.order.other.peer, estimate.bytes_per_s, round_trip_us, estimate.settled)
        effects: list[Effect] = [SendMessage(test.conn, Rate(estimate.bytes_per_s)), *self._say(report)]
        return effects + (self.end("measured") if test.has_heard else [])

    def _fail(self, test: _Test, reason: str) -> list[Effect]:
        """It is over here. What this end has reported before still counts."""
        closing = self.end(reason)
        if test.has_reported:
            return closing
        return [*closing, *self._say(Measured(test.order.test, test.order.other.peer, failed=reason))]
