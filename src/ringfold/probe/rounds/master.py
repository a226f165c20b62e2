"""The master's part in rounds: a pure state machine, `step(now, event) -> effects`.

Nodes connect and disconnect. While probing is on and there are edges to probe, one *round* follows another:

    IDLE --> PROBING --(the window ends)--> GATHERING --(all reported, or the deadline)--> PROBING of the next round
                 local rounds have no GATHERING: a round lasts until the members change

TRANSITIONS has all legal changes of state. Reports are combined after the next start, with `master` in a later step: no
node waits while the master calculates. So the nodes' clocks follow their RoundStart, and advice about the cadence takes
effect one round later.

Between two rounds, and only there, the machine looks at its members: if they have changed it draws a new graph with a
new key, once for all nodes that connected in the meantime. *Participants* of a round are the nodes that probe in its
graph, fixed when it begins. Only their reports are awaited, not those of listeners or newcomers; and a participant
whose connection is lost is not awaited either. A round always gets its summary by its deadline, and the summary names
each participant that is missing from it.

**Nodes that are on time do not wait for one that is not** (`liveness.py`). The deadline follows what reports usually
take. A node without heartbeats is not awaited, and one that misses several rounds is out of the graph until it reports
again: RoundEnd is sent to it, too, as a request to report. A late report counts for the next round.

**Ids never decrease.** A round's id is (fence, sequence). Nodes send the newest round that they have seen when they
connect, and their reports contain it too; the next id is above all of them. So the sequence continues over masters. A
graph has the sequence of the first round that uses it, so its numbers never decrease either.

**Early ends.** A command (`round`) or an anomaly ends a window early, but never earlier than `least_window_ms` after
its beginning; an anomaly does so once a round, and not again for `alarm_rest_ms`.

**A late master.** If the machine notices a deadline long after it has passed, the master itself was suspended or
starved, and reports may be unread in its sockets: once a round it waits LATE_GRACE_MS more.

The kinds differ in few places: what ends a window (`_end_window`), which reports count (`_add_report`,
`_take_reports`), and when a round is complete (`_is_complete`). With `gloo` this machine runs on rank 0, and
collectives carry its messages (`gloo.py`).
"""

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import assert_never

from ringfold.probe.graph.draw import listed_edges, neighbours
from ringfold.probe.rounds.calculation import CalculateRound, DrawGraph, advised
from ringfold.probe.rounds.effects import LogNote, MasterEffect, PublishSummary, SendProbeResponse, SendToNode
from ringfold.probe.rounds.events import (
    MS,
    AlarmReceived,
    CommandReceived,
    FromRoundMaster,
    MasterEvent,
    NodeConnected,
    NodeDisconnected,
    NodeRecovered,
    NodeSuspected,
    ReportReceived,
    Tick,
)
from ringfold.probe.rounds.gather import (
    MAX_ROUND_REQUESTS,
    GatheredRound,
    NewestWindows,
    OpenRound,
    RoundRequests,
    TakenReports,
    report_fault,
    select_edges,
    summarise,
    without_invalid_edges,
)
from ringfold.probe.rounds.liveness import NodeTable, are_last
from ringfold.probe.rounds.metrics import ReceivedReport
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.states import Transitions
from ringfold.wire.probing import (
    NodeId,
    ProbeAnswer,
    ProbeGraph,
    ProbeHalt,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundStart,
    RoundSummary,
)

MAX_ID = 1 << 53
"""No master counts so far: a higher fence or sequence is false or corrupt."""


class MasterState(Enum):
    """What the present round is doing; IDLE without one."""

    IDLE = "idle"
    PROBING = "probing"
    GATHERING = "gathering"


TRANSITIONS = Transitions(
    {
        MasterState.IDLE: {MasterState.IDLE, MasterState.PROBING},
        MasterState.PROBING: {MasterState.PROBING, MasterState.GATHERING, MasterState.IDLE},
        MasterState.GATHERING: {MasterState.PROBING, MasterState.IDLE},
    }
)


class RoundMaster:
    """The rounds of one run.

    `key` gives a new 16-byte key for a graph's number. `sequence` is the last one in the journal; without a journal,
    the nodes know it.
    """

    def __init__(
        self,
        settings: RoundSettings,
        fence: int,
        key: Callable[[int], bytes],
        draw: DrawGraph,
        calculate: CalculateRound,
        *,
        sequence: int = 0,
    ) -> None:
        self.settings = settings
        self._key = key
        self._draw_edges = draw
        self._calculate = calculate
        self._highest = RoundId(fence, sequence)
        self._members: dict[NodeId, NodeConnected] = {}
        self._nodes = NodeTable(settings.max_missed)
        self._edges: list[tuple[NodeId, NodeId]] = []
        self._is_graph_stale = True
        self._state = MasterState.IDLE
        self._round: OpenRound | None = None
        self._previous: OpenRound | None = None
        """The round just before the present one, whose late reports count for the present one."""
        self._begin_due_ns: int | None = None
        self._boundary_ns: int | None = None
        self._is_on = settings.is_on
        self._label = ""
        self._requests = RoundRequests()
        self._cadence = settings.cadence
        self._newest_windows = NewestWindows()
        self._history: object = None
        self._gathered: GatheredRound | None = None
        self._last_summary: RoundSummary | None = None
        self._sequence_skew = 0
        self._alarms_ignored_until_ns: int | None = None
        self._out: list[MasterEffect] = []
        self.relay_wait_ms = 0
        """How much longer reports are awaited where relays may hold them for a node that is late."""

    # For the shell

    @property
    def is_on(self) -> bool:
        return self._is_on

    @property
    def sequence(self) -> int:
        """The highest sequence of any known round: for a journal."""
        return self._highest.sequence

    @property
    def summary(self) -> RoundSummary | None:
        """The newest result."""
        return self._last_summary

    @property
    def round(self) -> RoundId | None:
        """The present round."""
        return self._round.id if self._round else None

    @property
    def wait_ms(self) -> int:
        """How long the present round waits for reports after its RoundEnd."""
        return self._round.wait_ms if self._round else 0

    @property
    def owes_summary(self) -> bool:
        """Whether a round is in progress, or not combined yet."""
        return self._round is not None or self._gathered is not None

    @property
    def is_gathering(self) -> bool:
        """Whether the window of the present round is over."""
        return self._state is MasterState.GATHERING

    def waiting_for(self) -> list[NodeId]:
        """The nodes whose reports are still awaited; empty while the window is open."""
        return sorted(self._pending_nodes(self._round)) if self._round and self.is_gathering else []

    def next_deadline_ns(self) -> int | None:
        """When Tick is due; None if nothing has a deadline."""
        times = [self._begin_due_ns, *(request.deadline_ns for request in self._requests.pending)]
        if self._round is not None:
            times.append(self._round.due_ns if self.is_gathering else self._round.end_due_ns)
        if self._gathered is not None:
            times.append(self._gathered.due_ns)
        return min((time for time in times if time is not None), default=None)

    def step(self, now_ns: int, event: MasterEvent) -> list[MasterEffect]:
        """Apply one event; return what the shell must now do, in order."""
        out = self._out = []
        match event:
            case NodeConnected():
                self._add_node(now_ns, event)
            case NodeDisconnected(node, reason):
                self._remove_node(now_ns, node, reason)
            case NodeSuspected(node, silent_ms):
                self._nodes.suspect(node, silent_ms)
                if self._round is not None and self.is_gathering:
                    self._stop_awaiting(self._round)
            case NodeRecovered(node):
                self._nodes.recover(node)
            case ReportReceived():
                self._add_report(now_ns, event)
            case AlarmReceived():
                self._handle_alarm(now_ns, event)
            case CommandReceived():
                self._handle_command(now_ns, event)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._advance(now_ns)
        has_round = self._round is not None
        assert has_round == (self._state is not MasterState.IDLE), f"a round: {has_round}, in state {self._state}"
        return out

    def _move_to(self, state: MasterState) -> None:
        self._state = TRANSITIONS.move(self._state, state)

    def _advance(self, now_ns: int) -> None:
        """Do what is due: expire requests, combine a gathered round, end, finish and begin rounds."""
        for request in self._requests.expire(now_ns):
            self._respond(request.requester, f"no summary within {request.timeout_ms} ms", done=False)
        if self._gathered is not None and now_ns >= self._gathered.due_ns:
            self._combine(self._gathered)
        while True:
            round = self._round
            if round is None:
                if self._begin_due_ns is None or now_ns < self._begin_due_ns:
                    return
                self._begin_round(now_ns)
            elif self.is_gathering:
                if not self._is_complete(now_ns, round) and not round.is_over(now_ns):
                    round.look(now_ns)
                    return
                self._finish_round(now_ns, round)
            else:
                is_due = round.end_due_ns is not None and now_ns >= round.end_due_ns
                if not is_due and (self.settings.kind != "gloo" or self._pending_nodes(round)):
                    return
                self._end_window(now_ns, round)

    # Nodes

    def _add_node(self, now_ns: int, event: NodeConnected) -> None:
        if event.node in self._members:
            self._remove_node(now_ns, event.node, "it connected again")
        self._raise_highest(event.last, event.node)
        self._members[event.node] = event
        self._nodes.add(event.node)
        self._newest_windows.forget(event.node)
        self._is_graph_stale = True
        if not self._is_on and self._round is None:
            self._send(event.node, ProbeHalt(self._highest, "probing is off"))
        self._members_changed(now_ns)

    def _remove_node(self, now_ns: int, node: NodeId, reason: str) -> None:
        if self._members.pop(node, None) is None:
            return
        self._nodes.remove(node)
        self._newest_windows.forget(node)
        self._is_graph_stale = True
        round, gathered = self._round, self._gathered
        for begun in (round, self._previous, gathered.round if gathered else None):
            if begun is not None:
                begun.forget(node)
        if round is not None and node in round.participants and node not in round.received:
            round.absent[node] = f"its connection was lost{f': {reason}' if reason else ''}"
        self._members_changed(now_ns)

    def _members_changed(self, now_ns: int) -> None:
        round = self._round
        if round is None:
            self._schedule(now_ns + self.settings.settle_ms * MS)
        elif self.settings.kind == "local":
            round.end_by(now_ns + self.settings.settle_ms * MS)
        elif not self.is_gathering and not round.participants & self._members.keys():
            self._abandon_round(now_ns, "every participant left")

    def _schedule(self, due_ns: int) -> None:
        """Begin a round at `due_ns`, or sooner if that is already scheduled; not at all if there is nothing to do."""
        if not self._has_edges() or not (self._is_on or self._requests):
            self._begin_due_ns = None
        elif self._begin_due_ns is None or due_ns < self._begin_due_ns:
            self._begin_due_ns = due_ns

    def _has_edges(self) -> bool:
        return self._can_probe(self._members.values())

    def _can_probe(self, members: Collection[NodeConnected]) -> bool:
        """Whether a graph of these nodes has an edge."""
        return bool(self._given_edges(members)) if self.settings.graph else _has_edges(members)

    def _graph_members(self) -> list[NodeId]:
        """The nodes that the next graph has: not those that are excluded, unless too few would be left."""
        active = [member for node, member in self._members.items() if not self._nodes.is_excluded(node)]
        return sorted(member.node for member in (active if self._can_probe(active) else self._members.values()))

    def _given_edges(self, members: Iterable[NodeConnected]) -> list[tuple[NodeId, NodeId]]:
        """The edges of the neighbour lists between these nodes."""
        names = {member.node: member.facts.name for member in members}
        listeners = [node for node in names if self._members[node].listen_only]
        return listed_edges(names, listeners, self.settings.graph)

    def _raise_highest(self, seen: RoundId, node: NodeId) -> None:
        """A node has seen this round: the next one will be above it."""
        if not (0 <= seen.fence < MAX_ID and 0 <= seen.sequence < MAX_ID):
            self._out.append(LogNote(f"node {node} reports round {seen}, which is out of range: ignored"))
            return
        if seen > self._highest and self._last_summary is not None:
            self._out.append(LogNote(f"node {node} has seen round {seen}; the next one will be above it"))
        self._highest = RoundId(max(self._highest.fence, seen.fence), max(self._highest.sequence, seen.sequence))

    # Rounds

    def _next_id(self) -> RoundId:
        return RoundId(self._highest.fence, self._highest.sequence + 1)

    def _begin_round(self, now_ns: int) -> None:
        """Draw a graph if members changed, and start the next window."""
        self._begin_due_ns = None
        self._round = None
        if not self._has_edges():
            self._halt_nodes("there is nobody to probe")
            return
        self._highest = id = self._next_id()
        if self._is_graph_stale:
            self._draw_graph(id.sequence)
        cadence, settings = self._cadence, self.settings
        participants = frozenset(src for src, _ in self._edges)
        round = OpenRound(id, self._label, participants, cadence, now_ns, self._end_due_ns(now_ns))
        round.present = set(self._members)
        round.listeners = frozenset(dst for _, dst in self._edges) - participants
        self._round = round
        self._move_to(MasterState.PROBING)
        if not self._is_on:
            round.label = self._requests.bind(id) or round.label
        self._newest_windows.start(id, now_ns, cadence.window_ms)
        start = RoundStart(id, round.label, cadence, settings.deadline_ms(cadence), now_ns, settings.anomaly_ns)
        for node in sorted(self._members):
            self._send(node, start)
        if self._requests.has_unbound:
            round.end_by(now_ns + settings.least_window_ms * MS)

    def _end_due_ns(self, now_ns: int) -> int | None:
        window_ns = self._cadence.window_ms * MS
        match self.settings.kind:
            case "local":
                return None
            case "time":
                # Boundaries stay periodic, however long the gathering took.
                late = 0 if self._boundary_ns is None else max(0, now_ns - self._boundary_ns) % window_ns
                self._boundary_ns = now_ns + window_ns - late
                return self._boundary_ns
            case _:
                return now_ns + window_ns

    def _draw_graph(self, number: int) -> None:
        members = self._graph_members()
        listeners = [node for node in members if self._members[node].listen_only]
        if self.settings.graph:
            self._edges = self._given_edges(self._members[node] for node in members)
        else:
            self._edges = self._draw_edges(members, listeners, self.settings.neighbours, self.settings.seed)
        self._is_graph_stale = False
        facts = {node: self._members[node].facts for node in sorted(self._members)}
        key = self._key(number)
        for node, (out, into) in neighbours(facts, self._edges).items():
            self._send(node, ProbeGraph(number, self.settings.kind, key, out, into))

    def _end_window(self, now_ns: int, round: OpenRound) -> None:
        """The window is over: send RoundEnd where the nodes do not know it by themselves, and wait for the reports."""
        if self.settings.kind == "local":
            self._begin_round(now_ns)
            return
        round.label = self._requests.bind(round.id) or round.label
        gather_ms = self.settings.gather_ms(round.cadence)
        round.wait_ms = gather_ms
        self._move_to(MasterState.GATHERING)
        if self.settings.kind == "master":
            awaited = filter(self._nodes.is_awaited, round.participants)
            usual_ms = self._nodes.wait_ms(awaited, self.settings.report_floor_ms, gather_ms)
            round.wait_ms = min(usual_ms + self.relay_wait_ms, gather_ms)
            round.end_sent_ns = now_ns
            if not self.relay_wait_ms:
                round.look_ns = now_ns + self.settings.report_floor_ms * MS
            end = RoundEnd(round.id, now_ns, round.label, gather_ms + self.settings.grace_ms)
            for node in sorted((round.participants | self._nodes.excluded().keys()) & self._members.keys()):
                self._send(node, end)
        round.deadline_ns = now_ns + round.wait_ms * MS
        self._stop_awaiting(round)

    def _stop_awaiting(self, round: OpenRound) -> None:
        """Do not wait for silent and excluded nodes. If there are no others, nobody waits in vain: then wait for them.

        Their reports still count if they arrive in time.
        """
        if self.settings.kind == "gloo":
            return
        pending = round.waiting_for()
        absent = {node: self._nodes.reason(node) for node in pending if not self._nodes.is_awaited(node)}
        if len(absent) < len(pending) or round.received:
            round.absent |= absent

    def _hurry(self, now_ns: int, round: OpenRound) -> None:
        """Once only the last nodes are missing, do not wait for them longer than this round's reports take. Not with
        relays: they hold the reports of a whole region for as long as the deadline allowed when the window ended."""
        received = len(round.received)
        pending = len(round.participants) - received - len(round.absent)
        if not are_last(pending, received + pending):
            return
        round.look_ns = None
        took_ns, floor_ms = now_ns - round.end_sent_ns, self.settings.report_floor_ms
        wait_ms = self._nodes.last_wait_ms(round.waiting_for(), took_ns, floor_ms)
        if wait_ms is not None and wait_ms < round.wait_ms:
            round.wait_ms = wait_ms
            round.deadline_ns = round.end_sent_ns + wait_ms * MS

    def _pending_nodes(self, round: OpenRound) -> list[NodeId]:
        return round.waiting_for()

    def _is_complete(self, now_ns: int, round: OpenRound) -> bool:
        """Whether all nodes that can still report have."""
        if self.settings.kind == "time":
            return all(self._newest_windows.is_fresh(now_ns, node) for node in round.participants - round.absent.keys())
        return round.is_complete

    def _finish_round(self, now_ns: int, round: OpenRound) -> None:
        """Start the next window; then combine the reports of this one."""
        if self._gathered is not None:
            self._combine(self._gathered)
        taken = self._take_reports(now_ns, round)
        self._count_missed(round, taken)
        requests = self._requests.take(round.id)
        due_ns = now_ns + self.settings.combine_after_ms * MS
        gathered = GatheredRound(round, taken, self._nodes.excluded(), requests, self._sequence_skew, due_ns)
        self._gathered = gathered
        self._sequence_skew = 0
        self._previous, self._round = round, None
        if self._is_on or self._requests:
            self._begin_round(now_ns)
        else:
            self._halt_nodes("one round was asked for")
        if self.settings.kind != "master":
            self._combine(gathered)  # one broadcast carries both (`gloo`), or no node waits meanwhile (`time`)

    def _count_missed(self, round: OpenRound, taken: TakenReports) -> None:
        """Exclude the nodes that have missed too many rounds. If no node reported, no other node waited for them."""
        if self.settings.kind not in ("master", "time") or not taken.received:
            return
        for node in sorted(round.participants & self._members.keys()):
            if self._is_missed(round, node, taken) and self._nodes.missed(node):
                self._is_graph_stale = True
                self._out.append(LogNote(f"node {node} is out of the graph: {self._nodes.reason(node)}"))

    def _is_missed(self, round: OpenRound, node: NodeId, taken: TakenReports) -> bool:
        """Whether a round has ended without any report of a node, a late one included."""
        if self.settings.kind == "time":
            return node in taken.missing
        return node not in round.received and node not in round.late

    def _combine(self, gathered: GatheredRound) -> None:
        """The result of a round: each node gets its clock, and the summary is published."""
        self._gathered = None
        gathered.taken = taken = gathered.taken.without_invalid_edges()
        round = gathered.round
        if round.end_sent_ns:
            for node in taken.received.keys() & round.present:
                self._nodes.took(node, taken.received[node].at_ns - round.end_sent_ns)
        result = None
        if taken.fits:
            utc = {node: one.report.utc_ns for node, one in taken.all.items() if one.report.edges}
            result = self._calculate(taken.fits, utc, self._history)
            self._history = result.history
            if result.advice is not None:
                self._cadence = advised(self._cadence, result.advice)
            for clock in result.nodes:
                if clock.node in round.present:
                    self._send(clock.node, RoundClock(round.id, clock))
        self._last_summary = summary = summarise(self.settings.kind, gathered, result)
        self._out.append(PublishSummary(summary))
        text = f"round {round.id.sequence}: {len(taken.received)} of {len(round.participants)} reported"
        for request in gathered.requests:
            self._respond(request.requester, text, summary=summary)

    def _take_reports(self, now_ns: int, round: OpenRound) -> TakenReports:
        """The reports that count, their fits, and why others are missing."""
        if self.settings.kind == "time":
            stale = [node for node in sorted(round.participants) if not self._newest_windows.is_fresh(now_ns, node)]
            received, fits = self._newest_windows.take(now_ns, round.participants)
            silent = {node: "no new window" if node in received else "no window of the last two" for node in stale}
            fits, empty = select_edges(self._edges, received, fits)
            return TakenReports(received, fits, empty | silent | round.absent)
        received = round.received
        late = {node: one for node, one in round.late.items() if node not in received}
        reports = received | late
        fits = [fit for _, one in sorted(reports.items()) for fit in one.report.edges]
        fits, empty = select_edges(self._edges, reports, fits)
        late = {node: one for node, one in late.items() if node not in empty}
        silent = {node: f"no report within {round.wait_ms} ms" for node in round.waiting_for()}
        missing = {node: why for node, why in (empty | silent | round.absent).items() if node not in late}
        return TakenReports(received, fits, missing, late)

    def _halt_nodes(self, reason: str) -> None:
        """Close all windows, and stay without a round."""
        self._round = self._previous = None
        self._begin_due_ns = self._boundary_ns = None
        self._move_to(MasterState.IDLE)
        for node in sorted(self._members):
            self._send(node, ProbeHalt(self._highest, reason))

    def _abandon_round(self, now_ns: int, reason: str) -> None:
        """The present round gets no result."""
        round = self._round
        assert round is not None
        self._out.append(LogNote(f"round {round.id.sequence} is abandoned: {reason}"))
        self._fail_requests(reason, round.id)
        self._halt_nodes(reason)
        self._schedule(now_ns + self.settings.settle_ms * MS)

    # Reports and alarms

    def _add_report(self, now_ns: int, event: ReportReceived) -> None:
        node = event.node
        report = event.report
        round = self._round
        if node not in self._members:
            return
        if fault := report_fault(node, report):
            self._out.append(LogNote(f"a report of node {node} is ignored: {fault}"))
            return
        if self._nodes.reported(node):
            self._is_graph_stale = True
            self._out.append(LogNote(f"node {node} reports again, and is in the next graph"))
        if report.round > self._highest:
            self._raise_highest(report.round, node)
            return
        if round is None:
            return
        self._sequence_skew = max(self._sequence_skew, abs(round.id.sequence - report.round.sequence))
        retransmits = self._nodes.retransmitted(node, event.retransmits)
        # All other nodes wait for this. What the next start does not depend on is done when the round is combined.
        received = ReceivedReport(report, now_ns, event.bytes, retransmits)
        if self.settings.kind == "time":
            self._newest_windows.add(node, without_invalid_edges(received), self._members)
        elif self._is_counted(round, node, received):
            round.received[node] = received
            round.absent.pop(node, None)
            if len(round.received) == 1:
                self._stop_awaiting(round)
            if round.look_ns is not None:
                self._hurry(now_ns, round)
        elif report.round < round.id:
            self._add_late_report(now_ns, round, node, received)

    def _add_late_report(self, now_ns: int, round: OpenRound, node: NodeId, received: ReceivedReport) -> None:
        """A report of the round before counts for the present one, unless a report of the present one follows."""
        previous = self._previous
        behind = round.id.sequence - received.report.round.sequence
        self._out.append(LogNote(f"the report of node {node} was {behind} round(s) late"))
        if self.settings.kind != "master" or previous is None or received.report.round != previous.id:
            return
        is_first = node in previous.participants and node not in previous.received and node not in round.late
        if is_first and node in round.participants and node in previous.present:
            self._nodes.took(node, now_ns - previous.end_sent_ns)
            for fit in received.report.edges:
                if fit.dst not in previous.present:
                    received = received.without_edges_to(fit.dst)
            round.late[node] = received

    def _is_counted(self, round: OpenRound, node: NodeId, received: ReceivedReport) -> bool:
        """Whether a report belongs to this round: of a participant, with this id, the first one, and in time."""
        is_open = self.is_gathering or self.settings.kind == "gloo"
        is_first = node in round.participants and node not in round.received
        return is_open and is_first and received.report.round == round.id

    def _handle_alarm(self, now_ns: int, event: AlarmReceived) -> None:
        alarm = event.alarm
        round = self._round
        if round is None or alarm.round != round.id or event.node not in round.participants or round.anomaly:
            return
        if alarm.src != event.node or abs(alarm.residual_ns) <= self.settings.anomaly_ns:
            return
        round.anomaly = f"edge {alarm.src} -> {alarm.dst} strays by {alarm.residual_ns} ns"
        is_ignored = self._alarms_ignored_until_ns is not None and now_ns < self._alarms_ignored_until_ns
        if self.settings.kind == "master" and not self.is_gathering and not is_ignored:
            self._alarms_ignored_until_ns = now_ns + self.settings.alarm_rest_ms * MS
            round.end_by(max(now_ns, round.begun_ns + self.settings.least_window_ms * MS))

    # Commands

    def _handle_command(self, now_ns: int, event: CommandReceived) -> None:
        match event.action:
            case "show":
                self._respond(event.requester, self._status_text(), summary=self._last_summary)
            case "start":
                was_on = self._is_on
                self._is_on = True
                self._label = event.label
                if self._round is None:
                    self._schedule(now_ns)
                on = f"probing is on; {self._node_count()}"
                self._respond(event.requester, "probing was on already" if was_on else on)
            case "stop":
                self._is_on = False
                self._label = ""
                self._fail_requests("probing was stopped")
                self._halt_nodes("stopped by command")
                self._respond(event.requester, "probing is off")
            case "round":
                self._request_round(now_ns, event)
            case _:
                assert_never(event.action)

    def _request_round(self, now_ns: int, event: CommandReceived) -> None:
        settings = self.settings
        if settings.kind in ("local", "gloo"):
            why = f"{settings.kind} rounds are not controlled by the master: it cannot run one"
            self._respond(event.requester, why, done=False)
            return
        if not self._has_edges():
            self._respond(event.requester, f"there is nobody to probe: {self._node_count()}", done=False)
            return
        if self._requests.is_full:
            self._respond(event.requester, f"{MAX_ROUND_REQUESTS} requests for a round are already pending", done=False)
            return
        round_ms = self._cadence.window_ms + settings.gather_ms(self._cadence)
        self._requests.add(now_ns, event.requester, event.label, round_ms, settings.settle_ms + settings.grace_ms)
        if self._round is None:
            self._schedule(now_ns)
        elif not self.is_gathering:
            self._round.end_by(max(now_ns, self._round.begun_ns + settings.least_window_ms * MS))

    def _fail_requests(self, reason: str, round: RoundId | None = None) -> None:
        """Respond to all requests (for this round, or for any) that there will be no summary."""
        for request in self._requests.take(round):
            self._respond(request.requester, reason, done=False)

    def _node_count(self) -> str:
        return "1 node" if len(self._members) == 1 else f"{len(self._members)} nodes"

    def _status_text(self) -> str:
        nodes = self._node_count()
        round = self._round
        if round is None:
            return f"{nodes}, no window is open"
        if excluded := self._nodes.excluded():
            nodes += f" ({', '.join(map(str, excluded))} out of the graph)"
        if pending := self.waiting_for():
            named = f"{', '.join(map(str, pending[:8]))}{' ...' if len(pending) > 8 else ''}"
            return f"{nodes}, round {round.id.sequence} waits for {named}"
        return f"{nodes}, round {round.id.sequence} probes"

    def _respond(self, requester: int, text: str, *, done: bool = True, summary: RoundSummary | None = None) -> None:
        self._out.append(SendProbeResponse(requester, ProbeAnswer(done, text, self._is_on, summary)))

    def _send(self, node: NodeId, message: FromRoundMaster) -> None:
        self._out.append(SendToNode(node, message))


def _has_edges(members: Collection[NodeConnected]) -> bool:
    """Whether there is an edge to probe between these nodes."""
    return len(members) >= 2 and any(not member.listen_only for member in members)
