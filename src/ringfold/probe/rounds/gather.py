"""What a round has gathered: whose reports count, who is still waited for, and who is missing.

Two ways. Where one message ends all windows (`master`, and `gloo` by its collective), a report counts for the round
that it names and for no other (`OpenRound.received`). Where windows end by the nodes' own clocks (`time`), ids say
nothing about which windows belong together: the newest of each edge are combined, if they are young enough (`Newest`).

How old is a window in `time`? Clocks cannot tell, for they may step and messages may be long on their way. But a report
names the last round that its node had heard of when the window ended. So the window ended after ROUND_START of that
round was *sent*, and the master knows by its own clock how long ago that was. If it is at most two windows, then the
report is not older than two windows, for certain.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from ringfold.probe.graph.edges import LARGEST_NS
from ringfold.probe.rounds.events import MS, Calculated
from ringfold.probe.rounds.metrics import Received, measure, window_ends
from ringfold.wire.probing import Cadence, EdgeFit, NodeId, RoundId, RoundKind, RoundReport, RoundSummary

LATE_MS = 100
PATIENCE_MS = 100
"""What a master that was late itself waits longer, once."""
ROUNDS_KEPT = 8
OLDEST_WINDOWS = 2
MOST_COUNTED = 1 << 40
LONGEST_TEXT = 500
MOST_ASKS = 64

Edge = tuple[NodeId, NodeId]


@dataclass(slots=True)
class Ask:
    """Somebody who waits. `round` is set when it is clear which round that is."""

    asker: int
    label: str
    deadline_ns: int
    waits_ms: int
    round: RoundId | None = None


@dataclass(slots=True)
class Asks:
    """All of them, the oldest first. Each leaves by `take` or `expire`, so each is answered once."""

    waiting: list[Ask] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether nobody else may wait: each label takes a round of its own."""
        return len(self.waiting) >= MOST_ASKS

    @property
    def has_free(self) -> bool:
        """Whether somebody waits for a round that has not ended yet."""
        return any(ask.round is None for ask in self.waiting)

    def add(self, now_ns: int, asker: int, label: str, round_ms: int, grace_ms: int) -> None:
        """Every other label that waits takes a round of its own, of at most `round_ms`, and one may be under way."""
        ahead = len({ask.label for ask in self.waiting} - {label})
        waits_ms = (ahead + 2) * round_ms + grace_ms
        self.waiting.append(Ask(asker, label, now_ns + waits_ms * MS, waits_ms))

    def bind(self, round: RoundId) -> str:
        """This round is what the oldest, and all with the same label, wait for. Returns the label."""
        free = [ask for ask in self.waiting if ask.round is None]
        if not free or any(ask.round == round for ask in self.waiting):
            return ""
        for ask in free:
            if ask.label == free[0].label:
                ask.round = round
        return free[0].label

    def take(self, round: RoundId | None = None) -> list[Ask]:
        """Those who wait for this round, or all."""
        taken = [ask for ask in self.waiting if round is None or ask.round == round]
        self.waiting = [ask for ask in self.waiting if ask not in taken]
        return taken

    def expire(self, now_ns: int) -> list[Ask]:
        """Those who have waited long enough."""
        over = [ask for ask in self.waiting if now_ns >= ask.deadline_ns]
        self.waiting = [ask for ask in self.waiting if now_ns < ask.deadline_ns]
        return over


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
    is_gathering: bool = False
    end_sent_ns: int = 0
    deadline_ns: int = 0
    was_patient: bool = False
    anomaly: str = ""
    received: dict[NodeId, Received] = field(default_factory=dict)
    gone: dict[NodeId, str] = field(default_factory=dict)
    present: set[NodeId] = field(default_factory=set)
    """Nodes that have been here since it began: whoever comes again may have another clock."""

    def end_by(self, due_ns: int) -> None:
        """End the window not later than this."""
        self.end_due_ns = due_ns if self.end_due_ns is None else min(self.end_due_ns, due_ns)

    @property
    def is_complete(self) -> bool:
        """Whether nobody is waited for. All who are counted are participants, and none is counted twice."""
        return len(self.received) + len(self.gone) == len(self.participants)

    def is_over(self, now_ns: int) -> bool:
        """Whether the deadline has passed, and the master was there to see it."""
        if now_ns < self.deadline_ns:
            return False
        if now_ns - self.deadline_ns > LATE_MS * MS and not self.was_patient:
            self.was_patient, self.deadline_ns = True, now_ns + PATIENCE_MS * MS
            return False
        return True

    def waiting_for(self) -> list[NodeId]:
        """Participants that may still report."""
        return [node for node in self.participants if node not in self.received and node not in self.gone]


@dataclass(slots=True)
class Gathered:
    """A round that is over, and not combined yet."""

    round: OpenRound
    received: Mapping[NodeId, Received]
    fits: list[EdgeFit]
    missing: Mapping[NodeId, str]
    asks: list[Ask]
    """Who wants to know its summary."""
    sequence_skew: int
    due_ns: int


@dataclass(slots=True)
class Newest:
    """The newest report of each node and the newest fit of each edge, where windows end by the nodes' clocks."""

    reports: dict[NodeId, Received] = field(default_factory=dict)
    fits: dict[Edge, tuple[EdgeFit, RoundId]] = field(default_factory=dict)
    combined: dict[NodeId, int] = field(default_factory=dict)
    """The newest window of each node that was part of a result."""
    started: dict[RoundId, tuple[int, int]] = field(default_factory=dict)
    """Round -> when its ROUND_START was sent, and the length of its windows."""

    def start(self, round: RoundId, sent_ns: int, window_ms: int) -> None:
        self.started[round] = (sent_ns, window_ms * MS)
        while len(self.started) > ROUNDS_KEPT:
            del self.started[next(iter(self.started))]

    def add(self, node: NodeId, received: Received, members: Container[NodeId]) -> bool:
        """Take a report, unless a newer window of this node is known; of its edges, those that lead to a member."""
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
        """A node that comes again may have another clock: nothing that was measured with the old one counts."""
        self.reports.pop(node, None)
        self.combined.pop(node, None)
        self.fits = {edge: kept for edge, kept in self.fits.items() if node not in edge}

    def is_young(self, now_ns: int, round: RoundId) -> bool:
        """Whether a window that ended when `round` was the newest is at most two windows old, for certain."""
        if round not in self.started:
            return False
        sent_ns, window_ns = self.started[round]
        newest_ns = next(reversed(self.started.values()))[1]
        return now_ns - sent_ns <= OLDEST_WINDOWS * max(window_ns, newest_ns)

    def is_fresh(self, now_ns: int, node: NodeId) -> bool:
        """Whether there is a window of this node that was in no result yet, and is young."""
        known = self.reports.get(node)
        if known is None or known.report.window <= self.combined.get(node, -1):
            return False
        return self.is_young(now_ns, known.report.round)

    def take(self, now_ns: int, nodes: Iterable[NodeId]) -> tuple[dict[NodeId, Received], list[EdgeFit]]:
        """What is young of these nodes: their newest reports, and the newest fit of each of their edges."""
        young = {node: self.reports[node] for node in sorted(nodes) if node in self.reports}
        young = {node: one for node, one in young.items() if self.is_young(now_ns, one.report.round)}
        self.fits = {edge: kept for edge, kept in self.fits.items() if self.is_young(now_ns, kept[1])}
        self.combined |= {node: one.report.window for node, one in young.items()}
        return young, [self.fits[edge][0] for edge in sorted(self.fits) if edge[0] in young]


def of_graph(
    edges: Iterable[Edge], received: Mapping[NodeId, Received], fits: Iterable[EdgeFit]
) -> tuple[list[EdgeFit], dict[NodeId, str]]:
    """The fits that are about nodes of this graph, and who has none of them, and why."""
    members = {node for edge in edges for node in edge}
    about = [fit for fit in fits if fit.dst in members]
    counted = {(fit.src, fit.dst) for fit in about}
    empty = {
        node: "its window has no edge of this graph" if one.report.edges else "it had no window"
        for node, one in received.items()
        if not any((node, fit.dst) in counted for fit in one.report.edges)
    }
    return about, empty


def fault_of(node: NodeId, report: RoundReport) -> str:
    """Why a report cannot be true; empty if it can."""
    foreign = [fit for fit in report.edges if fit.src != node]
    if foreign:
        return f"it reports edge {foreign[0].src} -> {foreign[0].dst}, which is not its own"
    edges = {fit.dst for fit in report.edges}
    if len(edges) < len(report.edges):
        return "it reports an edge twice"
    if report.window < 0:
        return f"windows do not count from {report.window}"
    clock = (report.begin_ns, report.end_ns, report.sent_ns, report.resumed_ns, report.held_ns, report.fit_ns)
    if max(map(abs, (*clock, report.end_sent_ns))) >= LARGEST_NS or abs(report.utc_ns) >= 2 * LARGEST_NS:
        return "a time in it is out of range"
    if not (0 <= report.retries < MOST_COUNTED and 0 <= report.queue_depth < MOST_COUNTED):
        return "a count in it is out of range"
    return ""


def sound(report: RoundReport) -> RoundReport:
    """The report, without the figures of those edges that no node can mean."""
    faults = [_unsound(fit) for fit in report.edges]
    if not any(faults):
        return report
    pairs = zip(report.edges, faults, strict=True)
    edges = [EdgeFit(fit.src, fit.dst, refused=why) if why else fit for fit, why in pairs]
    return structs.replace(report, edges=edges)


def _unsound(fit: EdgeFit) -> str:
    """What would be wrong with this fit in anybody's table; empty if nothing is. Its line is judged elsewhere."""
    if not math.isfinite(fit.alpha + fit.sigma_ns + fit.sigma_alpha + fit.residual_ns):
        return "a value is not finite"
    counts = (fit.sent, fit.pairs, fit.lost, fit.duplicates, fit.filtered)
    if min(counts) < 0 or max(counts) >= MOST_COUNTED:
        return "a count is out of range"
    delays = (fit.delay_min_ns, fit.delay_p50_ns, fit.delay_p99_ns)
    if max(map(abs, delays)) >= LARGEST_NS:
        return "a delay is out of range"
    if not all(len(text) <= LONGEST_TEXT and text.isprintable() for text in (fit.estimator, fit.why, fit.refused)):
        return f"its words are not printable, or more than {LONGEST_TEXT} letters"
    return ""


def summarise(kind: RoundKind, gathered: Gathered, result: Calculated | None) -> RoundSummary:
    """A round's summary. Without a result (nobody had anything to combine) it still names who is missing."""
    round, received = gathered.round, gathered.received
    result = result or Calculated(reference=-1, nodes=(), edges=())
    clocks = {clock.node: clock for clock in result.nodes}
    begin_ns, end_ns = window_ends((clocks[node], one.report) for node, one in received.items() if node in clocks)
    reasons = {**result.missing, **gathered.missing}
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
        metrics=measure(
            received,
            clocks,
            start_sent_ns=round.begun_ns,
            end_sent_ns=round.end_sent_ns,
            calculate_ns=result.took_ns,
            sequence_skew=gathered.sequence_skew,
        ),
    )
