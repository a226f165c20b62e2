"""A node's part in rounds: a pure state machine, `step(now, event) -> effects`.

A *window* is a period of probing, numbered by the node; it is open from ResumeProbing to RotateWindow. A *round* is the
result that the master makes of windows. How windows and rounds relate depends on the kind of round, which is part of
the probe graph:

* `master`: RoundStart opens a window, RoundEnd closes it. The node does not probe until the next start.
* `gloo`: RoundStart opens a window, the node's clock closes it; then as above.
* `time`: RoundStart starts probing. Windows follow each other without a pause, by the node's clock, and each is
  reported. They end at multiples of the window's length in UTC: nodes with good clocks end them at about the same time.
* `local`: the same, and nothing is reported.

**States.** TRANSITIONS has the legal changes; a window is open in PROBING and in ALONE, and in no other state.

    IDLE      no round has started, or this node has no edge to probe
    PROBING   a window of a round is open
    WAITING   the window is closed; the node waits for the next RoundStart
    ALONE     no master follows up: windows of the last known length, fitted and exported, not reported
    HALTED    the master has halted probing

**The position of a node** is one value, (round, step), where the steps of a round are start, end and halt in this
order. A message that is not higher is ignored: that one comparison covers messages that are repeated, reordered, from
an older master or from an older round. Steps may be skipped: an end without its start is an end.

**Alone.** Every wait has a deadline, which the message before it gave. When it passes, the node opens a window and
continues alone. The next higher message of any master ends that. Only a halted node stays silent.

The clock is the node's. It should never step, but the migration of a virtual machine may step it. A step back moves all
deadlines with it (as soon as it is noticed: the shell ticks every second). A step forward makes them pass. In both
cases the next message synchronises the node again.

Invariants: a window number is used once and they grow; the round of a report is the one that ended its window (or the
last one received, if none did), and a window reported with round r ended after r was received. The master relies on
that.
"""

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from msgspec import structs

from ringfold.probe.rounds.effects import (
    AdoptClock,
    ConfigureProber,
    ExportWindow,
    LogNote,
    NodeEffect,
    PauseProbing,
    ResumeProbing,
    RotateWindow,
    SendToMaster,
)
from ringfold.probe.rounds.events import (
    MS,
    FromRoundMaster,
    MasterConnected,
    MasterDisconnected,
    MasterMessageReceived,
    NodeEvent,
    ResidualObserved,
    Tick,
    WindowFitted,
)
from ringfold.states import Transitions
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
MAX_FITTING = 8
"""Windows whose fits are awaited; older ones are dropped."""


class NodeState(Enum):
    """See the head of this file."""

    IDLE = "idle"
    PROBING = "probing"
    WAITING = "waiting"
    ALONE = "alone"
    HALTED = "halted"


TRANSITIONS = Transitions(
    {
        NodeState.IDLE: {NodeState.PROBING, NodeState.WAITING, NodeState.ALONE, NodeState.HALTED},
        NodeState.PROBING: {NodeState.IDLE, NodeState.WAITING, NodeState.ALONE, NodeState.HALTED},
        NodeState.WAITING: {NodeState.IDLE, NodeState.PROBING, NodeState.ALONE, NodeState.HALTED},
        NodeState.ALONE: {NodeState.IDLE, NodeState.PROBING, NodeState.WAITING, NodeState.HALTED},
        NodeState.HALTED: {NodeState.IDLE, NodeState.PROBING, NodeState.WAITING},
    }
)
"""A halted node never continues alone: only a message of a higher round ends a halt."""

OPEN_STATES = (NodeState.PROBING, NodeState.ALONE)


@dataclass(slots=True)
class _ClosedWindow:
    """A window that is being fitted."""

    round: RoundId
    label: str
    is_reported: bool
    is_alone: bool
    resumed_ns: int
    end_received_ns: int
    """When the RoundEnd was received; 0 without one."""
    end_sent_ns: int = 0


@dataclass(slots=True)
class _PendingReport:
    """A report that no RoundStart has followed yet."""

    report: RoundReport
    end_received_ns: int


class RoundNode:
    """One node. `first_window` is the number of its first window, `last` the newest round that it knows of."""

    def __init__(self, *, first_window: int = 1, last: RoundId = NEVER) -> None:
        self._node: NodeId | None = None
        self._anomaly_ns = 0
        self._position = (last, START)
        self._adopted = NEVER
        self._state = NodeState.IDLE
        self._kind: RoundKind = "master"
        self._graph = 0
        self._has_edges = False
        self._cadence = Cadence()
        self._label = ""
        self._is_connected = False
        self._next_window = first_window
        self._open_window: int | None = None
        self._opened_ns = 0
        self._boundary_ns: int | None = None
        self._deadline_ns: int | None = None
        self._fitting: dict[int, _ClosedWindow] = {}
        self._pending_report: _PendingReport | None = None
        self._early_start: RoundStart | None = None
        """A start that was received while there was no edge to probe; its graph may still be in flight."""
        self._last_alarm: RoundId | None = None
        self._utc_ns = 0
        self._last_step_ns: int | None = None

    # For the shell

    @property
    def last(self) -> RoundId:
        """The newest round received: for NodeHello."""
        return self._position[0]

    @property
    def state(self) -> NodeState:
        return self._state

    @property
    def is_alone(self) -> bool:
        """Whether it continues without a master."""
        return self._state is NodeState.ALONE

    @property
    def kind(self) -> RoundKind:
        return self._kind

    def next_deadline_ns(self) -> int | None:
        """When Tick is due, in the node's clock; None if nothing has a deadline.

        The shell ticks at least once a second anyway: so a clock that stepped back is noticed.
        """
        times = [time for time in (self._deadline_ns, self._boundary_ns) if time is not None]
        return min(times, default=None)

    def step(self, now_ns: int, event: NodeEvent) -> list[NodeEffect]:
        """Apply one event; return what the shell must now do, in order."""
        self._shift_deadlines(now_ns)
        effects = self._apply(now_ns, event)
        is_open = self._open_window is not None
        assert is_open == (self._state in OPEN_STATES), f"window open: {is_open}, in state {self._state}"
        return effects

    def _apply(self, now_ns: int, event: NodeEvent) -> list[NodeEffect]:
        match event:
            case MasterConnected(node):
                return self._connect(now_ns, node)
            case MasterDisconnected():
                return self._disconnect(now_ns)
            case MasterMessageReceived(message):
                return self._receive(now_ns, message)
            case WindowFitted():
                return self._report_window(now_ns, event)
            case ResidualObserved():
                return self._check_residual(now_ns, event)
            case Tick():
                return self._tick(now_ns)
            case _:
                assert_never(event)

    def _move_to(self, state: NodeState) -> None:
        if state is not self._state:
            self._state = TRANSITIONS.move(self._state, state)

    def _shift_deadlines(self, now_ns: int) -> None:
        """A clock that stepped back moves every stored instant with it."""
        if self._last_step_ns is not None and now_ns < self._last_step_ns:
            back = self._last_step_ns - now_ns
            self._opened_ns -= back
            if self._deadline_ns is not None:
                self._deadline_ns -= back
            if self._boundary_ns is not None:
                self._boundary_ns -= back
            for closed in self._fitting.values():
                closed.resumed_ns -= back
                closed.end_received_ns -= back if closed.end_received_ns else 0
            if self._pending_report is not None:
                self._pending_report.end_received_ns -= back
        self._last_step_ns = now_ns

    # Messages of the master

    def _connect(self, now_ns: int, node: NodeId) -> list[NodeEffect]:
        """Send the report again that the last connection may have lost. The next graph is the newest.

        If the node has another id now, nothing is sent again: the ids of its neighbours may have changed, too.

        The number of the next graph need not be higher. If the last master sent its graph and died before it sent the
        start, no node has seen that round, and the next master uses its number again.
        """
        self._is_connected = True
        self._graph = 0
        if node != self._node:
            self._node = node
            self._pending_report = None
            for closed in self._fitting.values():
                closed.is_reported = False
        pending = self._pending_report
        if pending is None or self._state is not NodeState.WAITING or pending.report.round != self.last:
            return []
        held_ns = max(0, now_ns - pending.end_received_ns)
        retries = pending.report.retries + 1
        pending.report = structs.replace(pending.report, sent_ns=now_ns, held_ns=held_ns, retries=retries)
        return [SendToMaster(pending.report)]

    def _disconnect(self, now_ns: int) -> list[NodeEffect]:
        """A master may return before the deadline; a broken group of ranks never does."""
        self._is_connected = False
        if self._kind == "gloo" and self._state in (NodeState.PROBING, NodeState.WAITING):
            return self._continue_alone(now_ns)
        return []

    def _receive(self, now_ns: int, message: FromRoundMaster) -> list[NodeEffect]:
        match message:
            case RoundClock(round, clock) if round > self._adopted:
                self._adopted = round
                return [AdoptClock(clock)]
            case ProbeGraph():
                return self._new_graph(now_ns, message)
            case RoundStart(round) if self._is_higher(round, START):
                return self._start_round(now_ns, message)
            case RoundEnd(round) if self._is_higher(round, END):
                return self._end_round(now_ns, message)
            case ProbeHalt(round) if self._is_higher(round, HALT):
                return self._halt(now_ns, message)
            case _:
                return []

    def _is_higher(self, round: RoundId, step: int) -> bool:
        """Whether a message is new: after a higher round a lower one is ignored."""
        return (round, step) > self._position

    def _is_newer(self, graph: ProbeGraph) -> bool:
        """A graph's number is the sequence of its first round: within one connection a lower one is old."""
        return graph.number > self._graph

    def _new_graph(self, now_ns: int, graph: ProbeGraph) -> list[NodeEffect]:
        """No window has probes of two graphs. If a window is open, the next one opens at once: perhaps no RoundStart
        follows."""
        if not self._is_newer(graph):
            return []
        effects: list[NodeEffect] = []
        was_open = self._open_window is not None
        if was_open:
            effects.append(PauseProbing())
            effects += self._close_window(now_ns, is_reported=self._kind == "time", is_alone=self.is_alone)
        self._graph = graph.number
        self._kind = graph.kind
        self._has_edges = bool(graph.out)
        effects.append(ConfigureProber(graph.key, graph.out, graph.into))
        if not self._has_edges:
            self._deadline_ns = self._boundary_ns = None
            if self._state is not NodeState.HALTED:
                self._move_to(NodeState.IDLE)
        elif was_open or self._early_start is not None:
            if self._early_start is not None and self._early_start.deadline_ms > 0:
                self._deadline_ns = now_ns + self._early_start.deadline_ms * MS
            has_no_end = self._deadline_ns is None and self._kind in ("master", "gloo")
            effects += self._resume(now_ns, NodeState.ALONE if self.is_alone or has_no_end else NodeState.PROBING)
        self._early_start = None
        return effects

    def _start_round(self, now_ns: int, start: RoundStart) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        is_continuous = self._kind in ("time", "local")
        if self._open_window is not None and not (is_continuous and start.cadence == self._cadence):
            # Continuous windows are closed only for a new cadence; any other open window is one that was never ended.
            # Either way it belongs to the time before this start.
            is_alone = self.is_alone or not is_continuous
            effects += self._close_window(now_ns, is_reported=self._kind == "time", is_alone=is_alone)
        self._position = (start.round, START)
        self._pending_report = None
        self._cadence = start.cadence
        self._label = start.label
        self._anomaly_ns = start.anomaly_ns
        self._deadline_ns = now_ns + start.deadline_ms * MS if start.deadline_ms > 0 else None
        if not self._has_edges:
            self._move_to(NodeState.IDLE)
            self._deadline_ns = self._boundary_ns = None
            self._early_start = start
        elif self._open_window is None:
            effects += self._resume(now_ns, NodeState.PROBING)
        else:
            self._move_to(NodeState.PROBING)
        return effects

    def _end_round(self, now_ns: int, end: RoundEnd) -> list[NodeEffect]:
        self._position = (end.round, END)
        self._early_start = None
        self._label = end.label or self._label
        if not self._has_edges:
            # It is out of the graph, and is asked whether it is back.
            return [SendToMaster(self._empty_report(now_ns, end))] if self._is_connected else []
        was_alone = self.is_alone
        self._deadline_ns = now_ns + end.deadline_ms * MS
        self._boundary_ns = None
        self._move_to(NodeState.WAITING)
        if self._open_window is None:
            # The start was never received. An empty report is sent at once, so that the master does not wait.
            return [SendToMaster(self._empty_report(now_ns, end))] if self._is_connected else []
        closing = self._close_window(now_ns, is_reported=True, is_alone=was_alone, end=end)
        return [PauseProbing(), *closing]

    def _empty_report(self, now_ns: int, end: RoundEnd) -> RoundReport:
        return RoundReport(end.round, self._next_window - 1, now_ns, now_ns, 0, [], now_ns, end.sent_ns)

    def _halt(self, now_ns: int, halt: ProbeHalt) -> list[NodeEffect]:
        effects: list[NodeEffect] = [LogNote(f"probing halts: {halt.reason}")]
        if self._open_window is not None:
            effects.append(PauseProbing())
            effects += self._close_window(now_ns, is_reported=False, is_alone=self.is_alone)
        self._position = (halt.round, HALT)
        self._move_to(NodeState.HALTED)
        self._early_start = self._pending_report = None
        self._deadline_ns = self._boundary_ns = None
        return effects

    # Windows

    def _resume(self, now_ns: int, state: NodeState) -> list[NodeEffect]:
        """Start to probe, in a new window."""
        self._move_to(state)
        self._begin_window(now_ns)
        assert self._open_window is not None
        return [ResumeProbing(self._cadence, self._open_window)]

    def _begin_window(self, now_ns: int) -> None:
        self._open_window = self._next_window
        self._opened_ns = now_ns
        self._next_window += 1
        window_ns = self._cadence.window_ms * MS
        if self._kind == "master" and not self.is_alone:
            self._boundary_ns = None
        elif self._kind in ("time", "local"):
            self._boundary_ns = next_boundary(now_ns, self._utc_ns, window_ns)
        else:
            self._boundary_ns = now_ns + window_ns

    def _close_window(
        self, now_ns: int, *, is_reported: bool, is_alone: bool, end: RoundEnd | None = None
    ) -> list[NodeEffect]:
        """The open window is over; its fits follow later."""
        assert self._open_window is not None
        window, self._open_window = self._open_window, None
        closed = _ClosedWindow(self.last, self._label, is_reported, is_alone, self._opened_ns, now_ns if end else 0)
        closed.end_sent_ns = end.sent_ns if end else 0
        self._fitting[window] = closed
        while len(self._fitting) > MAX_FITTING:
            del self._fitting[next(iter(self._fitting))]
        return [RotateWindow(window)]

    def _report_window(self, now_ns: int, event: WindowFitted) -> list[NodeEffect]:
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
                held_ns=max(0, now_ns - closed.end_received_ns) if closed.end_received_ns else 0,
                fit_ns=event.fit_ns,
                resumed_ns=closed.resumed_ns,
                first_sequence=event.first_sequence,
                last_sequence=event.last_sequence,
                next_sequence=event.next_sequence,
            )
            if self._state is NodeState.WAITING and closed.round == self.last:
                self._pending_report = _PendingReport(report, closed.end_received_ns or now_ns)
            if self._is_connected:
                effects.append(SendToMaster(report))
        effects.append(
            ExportWindow(
                round=closed.round,
                label=closed.label,
                window=event.window,
                begin_ns=event.begin_ns,
                end_ns=event.end_ns,
                edges=list(event.edges),
                is_alone=closed.is_alone,
            )
        )
        return effects

    def _check_residual(self, now_ns: int, event: ResidualObserved) -> list[NodeEffect]:
        """A residual over the threshold requests an early end: once a round, because one edge is enough."""
        has_master = self._is_connected and self._kind in ("master", "time")
        if not has_master or self._state is not NodeState.PROBING or self._last_alarm == self.last:
            return []
        if abs(event.residual_ns) <= self._anomaly_ns:
            return []
        self._last_alarm = self.last
        return [SendToMaster(RoundAlarm(self.last, event.src, event.dst, event.residual_ns, now_ns))]

    # Time

    def _tick(self, now_ns: int) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            effects += self._continue_alone(now_ns)
        if self._boundary_ns is not None and now_ns >= self._boundary_ns:
            effects += self._end_by_clock(now_ns)
        return effects

    def _continue_alone(self, now_ns: int) -> list[NodeEffect]:
        """No message was received by the deadline."""
        self._deadline_ns = None
        effects: list[NodeEffect] = [LogNote(f"nothing follows round {self.last.sequence}: goes on alone")]
        if self._open_window is None:
            return [*effects, *self._resume(now_ns, NodeState.ALONE)]
        self._move_to(NodeState.ALONE)
        if self._kind == "master":
            # The round that opened this window will not close it any more.
            effects += self._close_window(now_ns, is_reported=False, is_alone=True)
            self._begin_window(now_ns)
        return effects

    def _end_by_clock(self, now_ns: int) -> list[NodeEffect]:
        """A window ends by the node's clock."""
        assert self._open_window is not None
        if self._kind == "gloo" and not self.is_alone:
            self._boundary_ns = None
            self._move_to(NodeState.WAITING)
            return [PauseProbing(), *self._close_window(now_ns, is_reported=True, is_alone=False)]
        effects = self._close_window(now_ns, is_reported=self._kind == "time", is_alone=self.is_alone)
        self._begin_window(now_ns)
        return effects


def next_boundary(now_ns: int, utc_ns: int, window_ns: int) -> int:
    """The instant, in the node's clock, at which a window that opens now ends.

    That is a multiple of the window's length in UTC, and between a half and one and a half lengths away, even if UTC
    has stepped in the meantime.
    """
    earliest = now_ns + utc_ns + window_ns // 2
    return -(-earliest // window_ns) * window_ns - utc_ns
