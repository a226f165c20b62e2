"""A node's part in rounds: a pure state machine, `step(now, event) -> effects`.

A *window* is a stretch of probing, numbered by the node; it is open from Resume to Rotate. A *round* is what the master
makes of windows. How the two meet depends on the kind of round, which comes with the probe graph:

* `master`: RoundStart opens a window, RoundEnd closes it. The node is silent in between (it waits for the next start).
* `gloo`: RoundStart opens a window, the node's clock closes it; then as above.
* `time`: RoundStart sets probing going. Windows follow each other without a pause, by the node's clock, and each is
  reported. They end at multiples of the window's length in UTC: nodes with good clocks cut at about the same instant.
* `local`: the same, and nothing is reported.

**Where a node stands** is one value, (round, step), where the steps of a round are start, end and halt in this order.
A message that is not higher is ignored: that one comparison covers what is repeated, reordered, from an older master
or from an older round. What is skipped is skipped: an end without its start is an end.

**Alone.** Every wait has a deadline, which the message before it named. When it passes, the node opens a window of its
own and goes on in windows of the last known length: fitted and exported, not reported. The next higher message of any
master brings it back. Only a node that was told to halt stays silent.

The clock is the node's. It should never step, but a virtual machine that moves may make it: a step back moves all
deadlines with it (as soon as it is noticed: the shell ticks every second), a step forward makes them pass; either way
the node is back with the next message.

Invariants: a window number is used once and they grow; the round of a report is the one that ended its window (or the
last one heard, if none did), and a window reported with round r ended after r was heard. The master relies on that.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec import structs

from ringfold.probe.rounds.events import (
    MS,
    Adopt,
    Configure,
    Connected,
    Disconnected,
    Export,
    FromRoundMaster,
    Heard,
    NodeEffect,
    NodeEvent,
    Note,
    PauseProbing,
    Resume,
    Rotate,
    Say,
    Tick,
    Watched,
    WindowFitted,
)
from ringfold.wire.probing import (
    Cadence,
    NodeId,
    ProbeGraph,
    ProbeHalt,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundKind,
    RoundReport,
    RoundStart,
)

START, END, HALT = 0, 1, 2
NEVER = RoundId()
MOST_FITTING = 8
"""Windows whose fits are awaited; older ones are given up."""

Phase = Literal["idle", "probing", "waiting", "halted"]


@dataclass(slots=True)
class _Closed:
    """A window that is being fitted."""

    round: RoundId
    label: str
    is_reported: bool
    is_alone: bool
    resumed_ns: int
    heard_ns: int
    """When the RoundEnd came; 0 without one."""
    end_sent_ns: int = 0


@dataclass(slots=True)
class _Unanswered:
    """A report that no RoundStart has followed yet."""

    report: RoundReport
    heard_ns: int


class RoundNode:
    """One node. `first_window` is the number of its first window, `last` the newest round that it knows of."""

    def __init__(self, *, first_window: int = 1, last: RoundId = NEVER) -> None:
        self._node: NodeId | None = None
        self._anomaly_ns = 0
        self._position = (last, START)
        self._adopted = NEVER
        self._phase: Phase = "idle"
        self._kind: RoundKind = "master"
        self._graph = 0
        self._probes = False
        self._cadence = Cadence()
        self._label = ""
        self._is_connected = False
        self._is_alone = False
        self._next_window = first_window
        self._open: int | None = None
        self._opened_ns = 0
        self._boundary_ns: int | None = None
        self._deadline_ns: int | None = None
        self._fitting: dict[int, _Closed] = {}
        self._unanswered: _Unanswered | None = None
        self._early: RoundStart | None = None
        """A start that came while there was nobody to probe; perhaps its graph is still on the way."""
        self._alarmed: RoundId | None = None
        self._utc_ns = 0
        self._now_ns: int | None = None

    # What the shell and the curious may look at

    @property
    def last(self) -> RoundId:
        """The newest round heard of: for NodeHello."""
        return self._position[0]

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_alone(self) -> bool:
        """Whether it goes on without a master."""
        return self._is_alone

    @property
    def kind(self) -> RoundKind:
        return self._kind

    def next_deadline_ns(self) -> int | None:
        """When Tick is due, in the node's clock; None when nothing is waited for.

        The shell ticks at least once a second all the same: that is how a clock that went back is noticed.
        """
        times = [time for time in (self._deadline_ns, self._boundary_ns) if time is not None]
        return min(times, default=None)

    def step(self, now_ns: int, event: NodeEvent) -> list[NodeEffect]:
        """Apply one event; return what the shell must now do, in order."""
        self._mind_the_clock(now_ns)
        match event:
            case Connected(node):
                return self._connected(now_ns, node)
            case Disconnected():
                return self._disconnected(now_ns)
            case Heard(message):
                return self._heard(now_ns, message)
            case WindowFitted():
                return self._fitted(now_ns, event)
            case Watched():
                return self._watched(now_ns, event)
            case Tick():
                return self._tick(now_ns)
            case _:
                assert_never(event)

    def _mind_the_clock(self, now_ns: int) -> None:
        """A clock that went back takes every stored instant with it."""
        if self._now_ns is not None and now_ns < self._now_ns:
            back = self._now_ns - now_ns
            self._opened_ns -= back
            if self._deadline_ns is not None:
                self._deadline_ns -= back
            if self._boundary_ns is not None:
                self._boundary_ns -= back
            for closed in self._fitting.values():
                closed.resumed_ns -= back
                closed.heard_ns -= back if closed.heard_ns else 0
            if self._unanswered is not None:
                self._unanswered.heard_ns -= back
        self._now_ns = now_ns

    # The master

    def _connected(self, now_ns: int, node: NodeId) -> list[NodeEffect]:
        """Say again what the last connection may have swallowed. The first graph that comes now is the newest.

        A node that has another number now has nothing to say again: who its edges led to may have other ones, too.

        Its number need not be higher: if the last master said its graph and died before it said the start, nobody has
        seen that round, and the next master uses its number again.
        """
        self._is_connected, self._graph = True, 0
        if node != self._node:
            self._node, self._unanswered = node, None
            for closed in self._fitting.values():
                closed.is_reported = False
        waits = self._unanswered
        if waits is None or self._phase != "waiting" or waits.report.round != self.last:
            return []
        held_ns, retries = max(0, now_ns - waits.heard_ns), waits.report.retries + 1
        waits.report = structs.replace(waits.report, sent_ns=now_ns, held_ns=held_ns, retries=retries)
        return [Say(waits.report)]

    def _disconnected(self, now_ns: int) -> list[NodeEffect]:
        """A master may come back before the deadline; a broken group of ranks never does."""
        self._is_connected = False
        if self._kind == "gloo" and self._phase in ("probing", "waiting") and not self._is_alone:
            return self._go_on_alone(now_ns)
        return []

    def _heard(self, now_ns: int, message: FromRoundMaster) -> list[NodeEffect]:
        match message:
            case RoundClock(round, clock) if round > self._adopted:
                self._adopted = round
                return [Adopt(clock)]
            case ProbeGraph():
                return self._new_graph(now_ns, message)
            case RoundStart(round) if self._is_higher(round, START):
                return self._start(now_ns, message)
            case RoundEnd(round) if self._is_higher(round, END):
                return self._end(now_ns, message)
            case ProbeHalt(round) if self._is_higher(round, HALT):
                return self._halt(now_ns, message)
            case _:
                return []

    def _is_higher(self, round: RoundId, step: int) -> bool:
        """Whether a message is news. Who has seen a higher round ignores a lower one."""
        return (round, step) > self._position

    def _is_newer(self, graph: ProbeGraph) -> bool:
        """A graph's number is the sequence of its first round: within one connection a lower one is old."""
        return graph.number > self._graph

    def _new_graph(self, now_ns: int, graph: ProbeGraph) -> list[NodeEffect]:
        """No window holds probes of two graphs. Who probes when it comes goes on, for a RoundStart may never follow."""
        if not self._is_newer(graph):
            return []
        effects: list[NodeEffect] = []
        was_open = self._open is not None
        if was_open:
            effects.append(PauseProbing())
            effects += self._close(now_ns, is_reported=self._kind == "time", is_alone=self._is_alone)
        self._graph, self._kind, self._probes = graph.number, graph.kind, bool(graph.out)
        effects.append(Configure(graph.key, graph.out, graph.into))
        if not self._probes:
            self._deadline_ns = self._boundary_ns = None
            self._phase, self._is_alone = "halted" if self._phase == "halted" else "idle", False
        elif was_open or self._early is not None:
            if self._early is not None and self._early.deadline_ms > 0:
                self._deadline_ns = now_ns + self._early.deadline_ms * MS
            self._is_alone |= self._deadline_ns is None and self._kind in ("master", "gloo")
            effects += self._open_window(now_ns)
        self._early = None
        return effects

    def _start(self, now_ns: int, start: RoundStart) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        flows = self._kind in ("time", "local")
        if self._open is not None and not (flows and start.cadence == self._cadence):
            # Windows that flow are cut only for a new cadence; any other is one that nobody has ended. Either way it
            # belongs to what was before this start.
            effects += self._close(now_ns, is_reported=self._kind == "time", is_alone=self._is_alone or not flows)
        self._position = (start.round, START)
        self._is_alone, self._unanswered = False, None
        self._cadence, self._label, self._anomaly_ns = start.cadence, start.label, start.anomaly_ns
        self._deadline_ns = now_ns + start.deadline_ms * MS if start.deadline_ms > 0 else None
        if not self._probes:
            self._phase, self._deadline_ns, self._boundary_ns, self._early = "idle", None, None, start
        elif self._open is None:
            effects += self._open_window(now_ns)
        return effects

    def _end(self, now_ns: int, end: RoundEnd) -> list[NodeEffect]:
        self._position, self._early = (end.round, END), None
        self._label = end.label or self._label
        if not self._probes:
            return []
        was_alone, self._is_alone = self._is_alone, False
        self._deadline_ns, self._boundary_ns = now_ns + end.deadline_ms * MS, None
        self._phase = "waiting"
        if self._open is None:
            # It never heard the start. It says so at once, so that nobody waits for it.
            nothing = RoundReport(end.round, self._next_window - 1, now_ns, now_ns, 0, [], now_ns, end.sent_ns)
            return [Say(nothing)] if self._is_connected else []
        closing = self._close(now_ns, is_reported=True, is_alone=was_alone, end=end)
        return [PauseProbing(), *closing]

    def _halt(self, now_ns: int, halt: ProbeHalt) -> list[NodeEffect]:
        effects: list[NodeEffect] = [Note(f"probing halts: {halt.reason}")]
        if self._open is not None:
            effects.append(PauseProbing())
            effects += self._close(now_ns, is_reported=False, is_alone=self._is_alone)
        self._position, self._early = (halt.round, HALT), None
        self._phase, self._is_alone, self._unanswered = "halted", False, None
        self._deadline_ns = self._boundary_ns = None
        return effects

    # Windows

    def _open_window(self, now_ns: int) -> list[NodeEffect]:
        self._phase = "probing"
        self._begin_window(now_ns)
        assert self._open is not None
        return [Resume(self._cadence, self._open)]

    def _begin_window(self, now_ns: int) -> None:
        self._open, self._opened_ns = self._next_window, now_ns
        self._next_window += 1
        window_ns = self._cadence.window_ms * MS
        if self._kind == "master" and not self._is_alone:
            self._boundary_ns = None
        elif self._kind in ("time", "local"):
            self._boundary_ns = next_boundary(now_ns, self._utc_ns, window_ns)
        else:
            self._boundary_ns = now_ns + window_ns

    def _close(
        self, now_ns: int, *, is_reported: bool, is_alone: bool, end: RoundEnd | None = None
    ) -> list[NodeEffect]:
        """The open window is over; its fits come later."""
        assert self._open is not None
        window, self._open = self._open, None
        closed = _Closed(self.last, self._label, is_reported, is_alone, self._opened_ns, now_ns if end else 0)
        closed.end_sent_ns = end.sent_ns if end else 0
        self._fitting[window] = closed
        while len(self._fitting) > MOST_FITTING:
            del self._fitting[next(iter(self._fitting))]
        return [Rotate(window)]

    def _fitted(self, now_ns: int, event: WindowFitted) -> list[NodeEffect]:
        closed = self._fitting.pop(event.window, None)
        if closed is None:
            return []
        self._utc_ns = event.utc_ns
        effects: list[NodeEffect] = []
        if closed.is_reported:
            report = RoundReport(
                round=closed.round,
                window=event.window,
                begin_ns=event.begin_ns,
                end_ns=event.end_ns,
                utc_ns=event.utc_ns,
                edges=list(event.edges),
                sent_ns=now_ns,
                end_sent_ns=closed.end_sent_ns,
                held_ns=max(0, now_ns - closed.heard_ns) if closed.heard_ns else 0,
                fit_ns=event.fit_ns,
                resumed_ns=closed.resumed_ns,
                queue_depth=event.queue_depth,
            )
            if self._phase == "waiting" and closed.round == self.last:
                self._unanswered = _Unanswered(report, closed.heard_ns or now_ns)
            if self._is_connected:
                effects.append(Say(report))
        ends = (event.window, event.begin_ns, event.end_ns)
        effects.append(Export(closed.round, closed.label, *ends, list(event.edges), closed.is_alone))
        return effects

    def _watched(self, now_ns: int, event: Watched) -> list[NodeEffect]:
        """A residual over the threshold asks for an early end: once a round, for one edge is as good as all."""
        listens = self._is_connected and not self._is_alone and self._kind in ("master", "time")
        if not listens or self._phase != "probing" or self._alarmed == self.last:
            return []
        if abs(event.residual_ns) <= self._anomaly_ns:
            return []
        self._alarmed = self.last
        return [Say(RoundAlarm(self.last, event.src, event.dst, event.residual_ns, now_ns))]

    # Time

    def _tick(self, now_ns: int) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            effects += self._go_on_alone(now_ns)
        if self._boundary_ns is not None and now_ns >= self._boundary_ns:
            effects += self._at_boundary(now_ns)
        return effects

    def _go_on_alone(self, now_ns: int) -> list[NodeEffect]:
        """Nothing came by the deadline."""
        self._deadline_ns, self._is_alone = None, True
        effects: list[NodeEffect] = [Note(f"nothing follows round {self.last.sequence}: goes on alone")]
        if self._open is None:
            return [*effects, *self._open_window(now_ns)]
        if self._kind == "master":
            # The round that opened this window will not close it any more.
            effects += self._close(now_ns, is_reported=False, is_alone=True)
            self._begin_window(now_ns)
        return effects

    def _at_boundary(self, now_ns: int) -> list[NodeEffect]:
        """A window ends by the node's clock."""
        assert self._open is not None
        if self._kind == "gloo" and not self._is_alone:
            self._boundary_ns, self._phase = None, "waiting"
            return [PauseProbing(), *self._close(now_ns, is_reported=True, is_alone=False)]
        effects = self._close(now_ns, is_reported=self._kind == "time", is_alone=self._is_alone)
        self._begin_window(now_ns)
        return effects


def next_boundary(now_ns: int, utc_ns: int, window_ns: int) -> int:
    """The instant, in the node's clock, at which a window that opens now ends.

    That is a multiple of the window's length in UTC, and between a half and one and a half lengths away, whatever UTC
    has done in the meantime.
    """
    earliest = now_ns + utc_ns + window_ns // 2
    return -(-earliest // window_ns) * window_ns - utc_ns
