"""A peer's part in the measurement of one link, from the master's request to the report. Pure.

Both ends do the same at the same time, whichever dialled:

    Measure --> bulk session --> fill the link, count what arrives --> Rate to the other end, LinkMeasured to the master
                                  (keep filling until the other end's Rate has arrived, then close)

When the estimate of the arriving rate has settled, this end has its rate. The other end may not have its own yet, and
needs filler until it sends `Rate`. No longer than that: a queue in one direction delays the acknowledgements of the
other, and a fast direction beside a slow one reaches its rate only when the slow one is quiet. The end that has sent
and received `Rate` closes the session. The other end has reported by then, so it ignores the close.

How long the link is filled depends on its RTT: TCP needs up to about ten round trips to reach its rate on a high-RTT
path, and arrivals are steady only from then on. The master's `most_ms` bounds everything. At a deadline the best
estimate is reported as not settled; without any, the measurement has failed, and the report says why.

There is one measurement at a time: the next request of the master ends the one before. The states are in `states.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import Effect, Fill, SendMessage
from ringfold.peer.events import Sampled
from ringfold.peer.settings import MS
from ringfold.peer.side_channels import BulkSessions, SessionFailed, SessionOpened, TaskId
from ringfold.peer.states import MEASURE_TRANSITIONS, MeasureInput, MeasureState, next_state
from ringfold.topology.estimate import DEADLINE_NS, Estimate, RateEstimate
from ringfold.wire import frames
from ringfold.wire.messages import LinkMeasured, Measure, Message, Rate

SAMPLE_NS = 25 * MS
ROUND_TRIPS = 20
"""A slow start from 10 segments takes 11 round trips to 25 MB in flight, which is 1 Gbit/s around the world."""


@dataclass(slots=True)
class _Measurement:
    """The measurement in progress. `deadline_ns` ends all of it, `fill_deadline_ns` the estimate of this end."""

    request: Measure
    task: TaskId
    deadline_ns: int
    state: MeasureState = MeasureState.CONNECTING
    estimate: RateEstimate = field(default_factory=RateEstimate)
    conn: int | None = None
    round_trip_ns: int = 0
    fill_deadline_ns: int = 0

    def enter(self, given: MeasureInput) -> None:
        self.state = next_state(MEASURE_TRANSITIONS, self.state, given)

    @property
    def is_estimating(self) -> bool:
        """Whether the session is open and this end has not reported."""
        return self.state in (MeasureState.FILLING, MeasureState.PEER_DONE)

    @property
    def has_reported(self) -> bool:
        return self.state in (MeasureState.REPORTED, MeasureState.DONE)

    @property
    def next_deadline_ns(self) -> int:
        return self.fill_deadline_ns if self.is_estimating else self.deadline_ns


class LinkMeasurement:
    """The measurement that this peer takes part in, if there is one."""

    def __init__(self, sessions: BulkSessions, send_to_master: Callable[[Message], list[Effect]]) -> None:
        self._sessions = sessions
        self._send_to_master = send_to_master
        self._present: _Measurement | None = None

    @property
    def is_busy(self) -> bool:
        return self._present is not None

    def begin(self, now_ns: int, request: Measure) -> list[Effect]:
        """The master requests the rate of the link to another peer."""
        effects = self.end("the next measurement begins")
        task: TaskId = ("measure", request.test)
        self._present = present = _Measurement(request, task, now_ns + request.most_ms * MS)
        self._sessions.expect(task, request.secret, () if request.dials else (request.other.peer,))
        if request.dials:
            more, failed = self._sessions.dial(now_ns, task, request.other)
            effects += more
            for failure in failed:
                effects += self._fail(present, f"no route to peer {request.other.peer}: {failure.reason}")
        return effects

    def refuse(self, request: Measure) -> list[Effect]:
        """The program does not wait in `optimize_topology` any more: its links must not be filled."""
        reason = "it does not wait in optimize_topology any more"
        return self._send_to_master(LinkMeasured(request.test, request.other.peer, failed=reason))

    def end(self, reason: str) -> list[Effect]:
        """End the measurement without a report."""
        present, self._present = self._present, None
        return [] if present is None else self._sessions.stop(present.task, reason)

    # Sessions

    def session_opened(self, now_ns: int, session: SessionOpened) -> list[Effect]:
        """The two are connected: fill the link."""
        present = self._present
        if present is None or session.task != present.task or present.conn is not None:
            return self._sessions.drop(session.conn, "the measurement is over, or has its connection")
        present.enter(MeasureInput.OPENED)
        present.conn = session.conn
        present.round_trip_ns = session.round_trip_ns
        longest_ns = max(DEADLINE_NS, ROUND_TRIPS * session.round_trip_ns)
        present.estimate = RateEstimate(longest_ns, session.round_trip_ns)
        # The estimate's clock begins with the first byte that arrives: at most one RTT from here.
        fill_deadline_ns = now_ns + longest_ns + session.round_trip_ns + SAMPLE_NS
        present.fill_deadline_ns = min(fill_deadline_ns, present.deadline_ns)
        return [Fill(session.conn, True, SAMPLE_NS)]

    def session_failed(self, now_ns: int, failed: SessionFailed) -> list[Effect]:
        """The other peer cannot be reached, or the connection is gone."""
        present = self._present
        if present is None or failed.task != present.task:
            return []
        if failed.conn is not None and failed.conn != present.conn:
            return []
        if failed.conn is None:
            return self._fail(present, f"no route to peer {failed.peer}: {failed.reason}")
        return self._fail(present, f"the connection with peer {failed.peer} ended: {failed.reason}")

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """The other end has its rate."""
        present = self._present
        if present is None or conn != present.conn:
            return self._sessions.drop(conn, "the measurement is over")
        try:
            message = frames.decode_bulk(body)
            if not isinstance(message, Rate):
                raise RemoteProtocolError(f"it sent {type(message).__name__} out of turn")
        except RemoteProtocolError as error:
            return self._fail(present, f"peer {present.request.other.peer} breaks the protocol: {error}")
        present.enter(MeasureInput.RATE_RECEIVED)
        return self.end("measured") if present.has_reported else [Fill(conn, False, SAMPLE_NS)]

    # Rates

    def sampled(self, event: Sampled) -> list[Effect]:
        """The bytes that have arrived by now."""
        present = self._present
        if present is None or event.conn != present.conn or present.has_reported:
            return []
        estimate = present.estimate.sample(event.elapsed_ns, event.received, event.counted_ns)
        return [] if estimate is None else self._report(present, estimate)

    def tick(self, now_ns: int) -> list[Effect]:
        """The deadlines: of this end's estimate, and of the measurement."""
        present = self._present
        if present is None or now_ns < present.next_deadline_ns:
            return []
        if present.has_reported:
            return self.end("the other end did not report its rate")
        if present.conn is None:
            verb = "could not be reached" if present.request.dials else "did not connect"
            return self._fail(present, f"peer {present.request.other.peer} {verb} within {present.request.most_ms} ms")
        effects = self._report(present, present.estimate.best())
        return effects + (self.end("no time is left") if now_ns >= present.deadline_ns else [])

    def next_deadline_ns(self) -> int | None:
        return None if self._present is None else self._present.next_deadline_ns

    def _report(self, present: _Measurement, estimate: Estimate) -> list[Effect]:
        """This end has its rate. It keeps filling until the other one has, too."""
        assert present.conn is not None
        request = present.request
        if estimate.bytes_per_s <= 0:
            return self._fail(present, f"nothing arrived from peer {request.other.peer}")
        present.enter(MeasureInput.REPORTED)
        round_trip_us = max(1, present.round_trip_ns // 1_000)
        report = LinkMeasured(request.test, request.other.peer, estimate.bytes_per_s, round_trip_us, estimate.settled)
        effects: list[Effect] = [SendMessage(present.conn, Rate(estimate.bytes_per_s)), *self._send_to_master(report)]
        return effects + (self.end("measured") if present.state is MeasureState.DONE else [])

    def _fail(self, present: _Measurement, reason: str) -> list[Effect]:
        """The measurement is over here. A report that was sent before still counts."""
        closing = self.end(reason)
        if present.has_reported:
            return closing
        request = present.request
        return [*closing, *self._send_to_master(LinkMeasured(request.test, request.other.peer, failed=reason))]
