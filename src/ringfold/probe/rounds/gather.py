"""What a round has gathered: which reports count, are awaited, or are missing; and the requests for rounds.

There are two methods. Where one message ends all windows (`master`, and `gloo` by its collective), a report counts for
the round that it names (`OpenRound.received`). With `master`, a report that is late for its round counts for the next
one, if its node has no report of that round (`OpenRound.late`), and for no later one. Where windows end by the nodes'
own clocks (`time`), ids do not say which windows belong together: the newest of each edge are combined, if they are
recent (`NewestWindows`).

*The age of a window in `time`.* Clocks cannot tell, because they may step, and messages may be delayed. But a report
names the last round that its node had received when the window ended. So the window ended after ROUND_START of that
round was *sent*, and the master knows by its own clock how long ago that was. If it is at most two windows, the report
is certainly not older than two windows.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from ringfold.probe.graph.edges import MAX_TIME_NS
from ringfold.probe.rounds.calculation import RoundResult
from ringfold.probe.rounds.events import MS
from ringfold.probe.rounds.liveness import half_again
from ringfold.probe.rounds.metrics import ReceivedReport, measure, node_windows, window_ends
from ringfold.wire.probing import Cadence, EdgeFit, NodeId, RoundId, RoundKind, RoundReport, RoundSummary

LATE_MS = 100
LATE_GRACE_MS = 100
"""How much longer a master waits, once, if it was late itself."""
MAX_ROUNDS_KEPT = 8
MAX_AGE_WINDOWS = 2
MAX_COUNT = 1 << 40
MAX_SEQUENCE = (1 << 63) - 1
MAX_TEXT = 500
MAX_ROUND_REQUESTS = 64

Edge = tuple[NodeId, NodeId]


@dataclass(frozen=True, slots=True)
class TakenReports:
    """The reports that count for a round, by node, with their fits; and the missing nodes with the reason."""

    received: dict[NodeId, ReceivedReport]
    fits: list[EdgeFit]
    missing: dict[NodeId, str]
    late: dict[NodeId, ReceivedReport] = field(default_factory=dict)
    """Late reports of the round before, of nodes that are not in `received`."""

    @property
    def all(self) -> dict[NodeId, ReceivedReport]:
        return self.received | self.late

    def without_invalid_edges(self) -> "TakenReports":
        """The same reports; edges with impossible values are refused, with the reason."""
        received = {node: without_invalid_edges(one) for node, one in self.received.items()}
        late = {node: without_invalid_edges(one) for node, one in self.late.items()}
        every = (*received.values(), *late.values())
        if all(one is other for one, other in zip(every, (*self.received.values(), *self.late.values()), strict=True)):
            return self
        checked = {(fit.src, fit.dst): fit for one in every for fit in one.report.edges}
        return TakenReports(received, [checked[fit.src, fit.dst] for fit in self.fits], self.missing, late)


@dataclass(slots=True)
class RoundRequest:
    """A client that waits for the summary of a labelled round. `round` is set when it is known which one that is."""

    requester: int
    label: str
    deadline_ns: int
    timeout_ms: int
    round: RoundId | None = None


@dataclass(slots=True)
class RoundRequests:
    """All pending requests, the oldest first. Each leaves by `take` or `expire`, so each gets one response."""

    pending: list[RoundRequest] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pending)

    @property
    def is_full(self) -> bool:
        """Whether there may be no more: each label takes a round of its own."""
        return len(self.pending) >= MAX_ROUND_REQUESTS

    @property
    def has_unbound(self) -> bool:
        """Whether a request waits for a round that has not ended yet."""
        return any(request.round is None for request in self.pending)

    def add(self, now_ns: int, requester: int, label: str, round_ms: int, grace_ms: int) -> None:
        """Every other pending label takes a round of its own, of at most `round_ms`, and one may be in progress."""
        ahead = len({request.label for request in self.pending} - {label})
        timeout_ms = (ahead + 2) * round_ms + grace_ms
        self.pending.append(RoundRequest(requester, label, now_ns + timeout_ms * MS, timeout_ms))

    def bind(self, round: RoundId) -> str:
        """Assign this round to the oldest request and all with the same label. Returns the label."""
        unbound = [request for request in self.pending if request.round is None]
        if not unbound or any(request.round == round for request in self.pending):
            return ""
        for request in unbound:
            if request.label == unbound[0].label:
                request.round = round
        return unbound[0].label

    def take(self, round: RoundId | None = None) -> list[RoundRequest]:
        """Remove and return the requests for this round, or all."""
        taken = [request for request in self.pending if round is None or request.round == round]
        self.pending = [request for request in self.pending if request not in taken]
        return taken

    def expire(self, now_ns: int) -> list[RoundRequest]:
        """Remove and return the requests whose deadline has passed."""
        expired = [request for request in self.pending if now_ns >= request.deadline_ns]
        self.pending = [request for request in self.pending if now_ns < request.deadline_ns]
        return expired


@dataclass(slots=True)
class OpenRound:
    """The round whose window is open, or whose reports are being gathered."""

    id: RoundId
    label: str
    participants: frozenset[NodeId]
    cadence: Cadence
    begun_ns: int
    end_due_ns: int | None
    """When its window ends; None where it has no end."""
    end_sent_ns: int = 0
    deadline_ns: int = 0
    wait_ms: int = 0
    """How long after its window reports are awaited."""
    look_ns: int | None = None
    """When the master looks whether the deadline is earlier by now; None: it will not be."""
    was_extended: bool = False
    anomaly: str = ""
    received: dict[NodeId, ReceivedReport] = field(default_factory=dict)
    absent: dict[NodeId, str] = field(default_factory=dict)
    listeners: frozenset[NodeId] = frozenset()
    """The other nodes of its graph: they only respond."""
    present: set[NodeId] = field(default_factory=set)
    """Nodes that have been connected since it began: one that connects again may have another clock."""
    late: dict[NodeId, ReceivedReport] = field(default_factory=dict)
    """Reports of the round before that arrived after its end."""

    def forget(self, node: NodeId) -> None:
        """A node's connection is lost: what was measured with its clock before does not count later."""
        self.present.discard(node)
        self.late.pop(node, None)
        for other, one in self.late.items():
            self.late[other] = one.without_edges_to(node)

    def end_by(self, due_ns: int) -> None:
        """End the window not later than this."""
        self.end_due_ns = due_ns if self.end_due_ns is None else min(self.end_due_ns, due_ns)

    @property
    def is_complete(self) -> bool:
        """Whether no report is awaited. All that are counted are participants, and none is counted twice."""
        return len(self.received) + len(self.absent) == len(self.participants)

    def is_over(self, now_ns: int) -> bool:
        """Whether the deadline has passed, and the master was running at that time."""
        if now_ns < self.deadline_ns:
            return False
        if now_ns - self.deadline_ns > LATE_MS * MS and not self.was_extended:
            self.was_extended = True
            self.deadline_ns = now_ns + LATE_GRACE_MS * MS
            return False
        return True

    @property
    def due_ns(self) -> int:
        """When the master needs a Tick to end the gathering in time."""
        return self.deadline_ns if self.look_ns is None else min(self.deadline_ns, self.look_ns)

    def look(self, now_ns: int) -> None:
        """Plan the next look. The last nodes get half as long again as the others took, so what arrives from now on
        cannot move the deadline to an earlier instant than half as long again from now."""
        if self.look_ns is not None and now_ns >= self.look_ns:
            self.look_ns = self.end_sent_ns + half_again(now_ns - self.end_sent_ns)

    def waiting_for(self) -> list[NodeId]:
        """Participants whose reports are still awaited."""
        return [node for node in self.participants if node not in self.received and node not in self.absent]


@dataclass(slots=True)
class GatheredRound:
    """A round that is expired, and not combined yet."""

    round: OpenRound
    taken: TakenReports
    excluded: Mapping[NodeId, str]
    """Nodes that are out of the graph, with the reason."""
    requests: list[RoundRequest]
    """The clients that wait for its summary."""
    sequence_skew: int
    due_ns: int


@dataclass(slots=True)
class NewestWindows:
    """The newest report of each node and the newest fit of each edge, where windows end by the nodes' clocks."""

    reports: dict[NodeId, ReceivedReport] = field(default_factory=dict)
    fits: dict[Edge, tuple[EdgeFit, RoundId]] = field(default_factory=dict)
    combined: dict[NodeId, int] = field(default_factory=dict)
    """The newest window of each node that was part of a result."""
    started: dict[RoundId, tuple[int, int]] = field(default_factory=dict)
    """Round -> when its ROUND_START was sent, and the length of its windows."""

    def start(self, round: RoundId, sent_ns: int, window_ms: int) -> None:
        self.started[round] = (sent_ns, window_ms * MS)
        while len(self.started) > MAX_ROUNDS_KEPT:
            del self.started[next(iter(self.started))]

    def add(self, node: NodeId, received: ReceivedReport, members: Container[NodeId]) -> bool:
        """Add a report, unless a newer window of this node is known; of its edges, those that lead to a member."""
        known = self.reports.get(node)
        if known is not None and received.report.window <= known.report.window:
            return False
        self.reports[node] = received
        for fit in received.report.edges:
            if fit.dst not in members:
                continue
            self.fits[fit.src, fit.dst] = (fit, received.report.round)
        return True

    def forget(self, node: NodeId) -> None:
        """A node that connects again may have another clock: what was measured with the old one does not count."""
        self.reports.pop(node, None)
        self.combined.pop(node, None)
        self.fits = {edge: kept for edge, kept in self.fits.items() if node not in edge}

    def is_recent(self, now_ns: int, round: RoundId) -> bool:
        """Whether a window that ended when `round` was the newest is certainly at most two windows old."""
        if round not in self.started:
            return False
        sent_ns, window_ns = self.started[round]
        newest_ns = next(reversed(self.started.values()))[1]
        return now_ns - sent_ns <= MAX_AGE_WINDOWS * max(window_ns, newest_ns)

    def is_fresh(self, now_ns: int, node: NodeId) -> bool:
        """Whether there is a recent window of this node that was in no result yet."""
        known = self.reports.get(node)
        if known is None or known.report.window <= self.combined.get(node, -1):
            return False
        return self.is_recent(now_ns, known.report.round)

    def take(self, now_ns: int, nodes: Iterable[NodeId]) -> tuple[dict[NodeId, ReceivedReport], list[EdgeFit]]:
        """What is recent of these nodes: their newest reports, and the newest fit of each of their edges."""
        recent = {node: self.reports[node] for node in sorted(nodes) if node in self.reports}
        recent = {node: one for node, one in recent.items() if self.is_recent(now_ns, one.report.round)}
        self.fits = {edge: kept for edge, kept in self.fits.items() if self.is_recent(now_ns, kept[1])}
        self.combined |= {node: one.report.window for node, one in recent.items()}
        return recent, [self.fits[edge][0] for edge in sorted(self.fits) if edge[0] in recent]


def select_edges(
    edges: Iterable[Edge], received: Mapping[NodeId, ReceivedReport], fits: Iterable[EdgeFit]
) -> tuple[list[EdgeFit], dict[NodeId, str]]:
    """The fits of edges between nodes of this graph, and the nodes without one, with the reason."""
    members = {node for edge in edges for node in edge}
    about = [fit for fit in fits if fit.dst in members]
    counted = {(fit.src, fit.dst) for fit in about}
    empty = {
        node: "its window has no edge of this graph" if one.report.edges else "it had no window"
        for node, one in received.items()
        if not any((node, fit.dst) in counted for fit in one.report.edges)
    }
    return about, empty


def report_fault(node: NodeId, report: RoundReport) -> str:
    """Why a report is invalid; empty if it is valid."""
    edges = set()
    for fit in report.edges:
        if fit.src != node:
            return f"it reports edge {fit.src} -> {fit.dst}, which is not its own"
        edges.add(fit.dst)
    if len(edges) < len(report.edges):
        return "it reports an edge twice"
    if report.window < 0:
        return f"window number {report.window} is negative"
    clock = (report.begin_ns, report.end_ns, report.sent_ns, report.resumed_ns, report.held_ns, report.fit_ns)
    if max(map(abs, (*clock, report.end_sent_ns))) >= MAX_TIME_NS or abs(report.utc_ns) >= 2 * MAX_TIME_NS:
        return "a time in it is out of range"
    if not 0 <= report.retries < MAX_COUNT:
        return "a count in it is out of range"
    sequences = (report.first_sequence, report.last_sequence, report.next_sequence)
    if min(sequences) < 0 or max(sequences) > MAX_SEQUENCE:
        return "a count in it is out of range"
    return ""


def without_invalid_edges(received: ReceivedReport) -> ReceivedReport:
    """The report; edges with impossible values are refused, with the reason."""
    report = received.report
    faults = [_edge_fault(fit) for fit in report.edges]
    if not any(faults):
        return received
    pairs = zip(report.edges, faults, strict=True)
    edges = [EdgeFit(fit.src, fit.dst, refused=why) if why else fit for fit, why in pairs]
    return replace(received, report=structs.replace(report, edges=edges))


def _edge_fault(fit: EdgeFit) -> str:
    """Why the values of a fit are invalid; empty if they are not. Its line is checked in `graph/edges.py`."""
    # This runs for every edge of the graph in every round: no generators, and one text in place of three.
    if not math.isfinite(fit.alpha + fit.sigma_ns + fit.sigma_alpha + fit.residual_ns):
        return "a value is not finite"
    counts = (fit.sent, fit.pairs, fit.lost, fit.duplicates, fit.filtered)
    if min(counts) < 0 or max(counts) >= MAX_COUNT:
        return "a count is out of range"
    delays = (fit.delay_min_ns, fit.delay_p50_ns, fit.delay_p99_ns)
    if max(delays) >= MAX_TIME_NS or min(delays) <= -MAX_TIME_NS:
        return "a delay is out of range"
    texts = fit.estimator + fit.why + fit.refused
    if len(texts) > MAX_TEXT and max(map(len, (fit.estimator, fit.why, fit.refused))) > MAX_TEXT:
        return f"its text is longer than {MAX_TEXT} characters"
    return "" if texts.isprintable() else "its text is not printable"


def summarise(kind: RoundKind, gathered: GatheredRound, result: RoundResult | None) -> RoundSummary:
    """A round's summary. Without a result (there was nothing to combine) it still names the missing nodes."""
    round, taken = gathered.round, gathered.taken
    received = taken.received
    result = result or RoundResult(reference=-1, nodes=(), edges=())
    clocks = {clock.node: clock for clock in result.nodes}
    begin_ns, end_ns = window_ends((clocks[node], one.report) for node, one in received.items() if node in clocks)
    reasons = {**result.missing, **taken.missing}
    return RoundSummary(
        round=round.id,
        kind=kind,
        label=round.label,
        begin_ns=begin_ns,
        end_ns=end_ns,
        reference=result.reference,
        nodes=list(result.nodes),
        edges=list(result.edges),
        loops=list(result.loops),
        missing={str(node): why for node, why in sorted(reasons.items())},
        anomaly="; ".join(text for text in (round.anomaly, result.anomaly) if text),
        advice=result.advice,
        late={str(node): one.report.round.sequence for node, one in sorted(taken.late.items())},
        excluded={str(node): why for node, why in sorted(gathered.excluded.items())},
        windows=node_windows(taken.all),
        participants=sorted(round.participants),
        listeners=sorted(round.listeners),
        metrics=measure(
            received,
            clocks,
            start_sent_ns=round.begun_ns,
            end_sent_ns=round.end_sent_ns,
            calculate_ns=result.took_ns,
            sequence_skew=gathered.sequence_skew,
        ),
    )
