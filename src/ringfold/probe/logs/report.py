"""A log in a few figures: edges with delay, loss and line; nodes with offset, drift and uncertainty. Pure.

Lines are added to a `ReportCollector` one by one, so a log of any length needs little memory: delays are counted in a
histogram with bins of 2 %, and a few numbers are kept of fits and clocks. Edges come from the node's own log if there
is one; else from the rounds.

A node's *offset* is how far its clock is ahead of the reference node's at the same instant, its *drift* how much faster
it runs than global time. A *track* is clock minus global time from round to round.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from ringfold.probe.exchanges import COLUMNS, EdgeWindow
from ringfold.probe.logs.lines import FitLine, HeaderLine, Line, RoundLine, WindowLine, edge_window
from ringfold.wire.probing import EdgeFit, NodeClock, NodeId, RoundSummary

Edge = tuple[NodeId, NodeId]

RESTART_NS = 100_000_000
"""No clock changes so much between two rounds: it is another clock, of a machine that was restarted."""


class Delays(Struct, frozen=True):
    """One-way delays of packets. Without `points` only the median window is known, and the quartiles are None."""

    points: int
    min_ns: int
    p50_ns: int
    p99_ns: int
    p05_ns: int | None = None
    p25_ns: int | None = None
    p75_ns: int | None = None
    p95_ns: int | None = None


class EdgeReport(Struct, frozen=True):
    """An edge over the whole log. Its line is that of the newest window that has one, else it is None."""

    src: NodeId
    dst: NodeId
    windows: int
    refused: int
    why_refused: str
    sent: int
    lost: int
    loss: float
    delays: Delays | None
    alpha: float | None
    beta_ns: int | None
    t0_ns: int | None
    sigma_ns: float | None
    dropped: str
    """Why the newest round did not use it."""
    in_tree: bool


class NodeReport(Struct, frozen=True):
    """A node's clock in the newest round that has it. `low_ns` and `high_ns` are the certified bound at its t0."""

    node: NodeId
    name: str
    is_reference: bool
    offset_ns: int
    drift_ppm: float
    sigma_ns: float
    low_ns: int
    high_ns: int


class TrackPoint(Struct, frozen=True):
    """A point of a track: clock minus global time, at a global time."""

    at_ns: int
    ahead_ns: int
    sigma_ns: float


class LogReport(Struct, frozen=True):
    """The whole report. A node's track has several pieces, a new one for each restart of its clock."""

    windows: int
    rounds: int
    edges: list[EdgeReport]
    nodes: list[NodeReport]
    missing: dict[str, str]
    anomaly: str
    names: dict[NodeId, str]
    tracks: dict[NodeId, list[list[TrackPoint]]]


class Histogram:
    """Counts of positive times in bins of 2 %; quantiles are exact to that."""

    _BINS_PER_OCTAVE = 32
    _OCTAVES = 48

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(self._BINS_PER_OCTAVE * self._OCTAVES, np.int64)
        self.least = 0

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def add(self, values: npt.NDArray[np.int64]) -> None:
        if not values.size:
            return
        least = int(values.min())
        self.least = least if not self.total else min(self.least, least)
        bins = (np.log2(np.maximum(values, 1)) * self._BINS_PER_OCTAVE).astype(np.int64)
        self.counts += np.bincount(np.minimum(bins, self.counts.size - 1), minlength=self.counts.size)

    def quantile(self, share: float) -> int:
        """The middle of the bin in which that share of the values is reached; never below the minimum."""
        reached = int(np.searchsorted(np.cumsum(self.counts), share * self.total, side="left"))
        return max(self.least, round(2 ** ((reached + 0.5) / self._BINS_PER_OCTAVE)))

    def delays(self) -> Delays:
        p05, p25, p50, p75, p95, p99 = (self.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99))
        return Delays(self.total, self.least, p50, p99, p05, p25, p75, p95)


def delays_of(window: EdgeWindow) -> npt.NDArray[np.int64]:
    """Half of each RTT, without the time at the responder; only of exchanges that have all timestamps."""
    t1_tx, t1_rx, r1_tx, r1_rx = (window.exchanges[:, COLUMNS.index(c)] for c in ("t1_tx", "t1_rx", "r1_tx", "r1_rx"))
    whole = (t1_tx != 0) & (t1_rx != 0) & (r1_tx != 0) & (r1_rx != 0)
    delays: npt.NDArray[np.int64] = (((r1_rx - t1_tx) - (r1_tx - t1_rx)) // 2)[whole]
    return delays


class _Tally(Struct):
    """The figures of an edge so far."""

    windows: int = 0
    refused: int = 0
    why_refused: str = ""
    sent: int = 0
    lost: int = 0
    newest: EdgeFit | None = None
    fitted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Pairs, minimum, median and 99th percentile of the delay, of each window that was fitted."""

    def add(self, fit: EdgeFit) -> None:
        self.windows += 1
        self.sent += fit.sent
        self.lost += fit.lost
        if fit.refused:
            self.refused += 1
            self.why_refused = fit.refused
        else:
            self.newest = fit
            self.fitted.append((fit.pairs, fit.delay_min_ns, fit.delay_p50_ns, fit.delay_p99_ns))

    def delays(self) -> Delays | None:
        """Of the median window: the medians over windows."""
        if not self.fitted:
            return None
        _, least, p50, p99 = zip(*self.fitted, strict=True)
        return Delays(0, min(least), int(np.median(p50)), int(np.median(p99)))


class ReportCollector:
    """Takes the lines of logs (logs in any order, each log's lines in their order), and makes a report."""

    def __init__(self) -> None:
        self._windows = self._rounds = 0
        self._of_nodes: dict[Edge, _Tally] = {}
        self._of_rounds: dict[Edge, _Tally] = {}
        self._histograms: dict[Edge, Histogram] = {}
        self._names: dict[NodeId, str] = {}
        self._tracks: dict[NodeId, list[list[TrackPoint]]] = {}
        self._clocks: dict[NodeId, NodeClock] = {}
        self._last: RoundSummary | None = None

    def add(self, line: Line) -> None:
        """Add one line."""
        match line:
            case HeaderLine():
                if line.node is not None and line.name:
                    self._names[line.node] = line.name
            case WindowLine():
                self._windows += 1
                if (window := edge_window(line)) is not None:
                    self._histograms.setdefault((line.src, line.dst), Histogram()).add(delays_of(window))
            case FitLine(fit=fit):
                self._of_nodes.setdefault((fit.src, fit.dst), _Tally()).add(fit)
            case RoundLine():
                self._names |= {int(node): name for node, name in line.names.items() if node.isdecimal()}
                self.add_round(line.summary)

    def add_round(self, summary: RoundSummary) -> None:
        """Add a round's result, from a log or calculated now; rounds are added in their order."""
        self._rounds += 1
        self._last = summary
        for view in summary.edges:
            self._of_rounds.setdefault((view.fit.src, view.fit.dst), _Tally()).add(view.fit)
        middle = (summary.begin_ns + summary.end_ns) // 2
        for clock in summary.nodes:
            self._clocks[clock.node] = clock
            sample = TrackPoint(middle, ahead_ns(clock, middle), clock.sigma_ns)
            pieces = self._tracks.setdefault(clock.node, [[]])
            if pieces[-1] and abs(sample.ahead_ns - pieces[-1][-1].ahead_ns) > RESTART_NS:
                pieces.append([])
            pieces[-1].append(sample)

    @property
    def has_rounds(self) -> bool:
        return self._rounds > 0

    def report(self) -> LogReport:
        """The report of all lines so far."""
        tallies = self._of_rounds | self._of_nodes
        views = {(view.fit.src, view.fit.dst): view for view in (self._last.edges if self._last else [])}
        edges = []
        for edge in sorted(tallies.keys() | self._histograms.keys()):
            view = views.get(edge)
            tally, histogram = tallies.get(edge, _Tally()), self._histograms.get(edge)
            dropped, in_tree = (view.dropped, view.in_tree) if view else ("", False)
            edges.append(_edge_report(edge, tally, histogram, dropped, in_tree=in_tree))
        return LogReport(
            windows=self._windows,
            rounds=self._rounds,
            edges=edges,
            nodes=_node_reports(self._clocks, self._last, self._names),
            missing=self._last.missing if self._last else {},
            anomaly=self._last.anomaly if self._last else "",
            names=self._names,
            tracks=self._tracks,
        )


def collect(lines: Iterable[Line]) -> ReportCollector:
    """A collector with all lines."""
    collector = ReportCollector()
    for line in lines:
        collector.add(line)
    return collector


def ahead_ns(clock: NodeClock, at_ns: int) -> int:
    """The node's clock minus global time, when global time is `at_ns`. Only the small parts are floats."""
    since = at_ns - clock.global_ns
    return clock.t0_ns - clock.global_ns - round(since * (clock.rate / (1 + clock.rate)))


def drift_ppm(clock: NodeClock) -> float:
    """How much faster than global time the node's clock runs."""
    return -clock.rate / (1 + clock.rate) * 1e6


def _edge_report(edge: Edge, tally: _Tally, histogram: Histogram | None, dropped: str, *, in_tree: bool) -> EdgeReport:
    newest = tally.newest
    return EdgeReport(
        src=edge[0],
        dst=edge[1],
        windows=tally.windows,
        refused=tally.refused,
        why_refused=tally.why_refused,
        sent=tally.sent,
        lost=tally.lost,
        loss=tally.lost / tally.sent if tally.sent else 0.0,
        delays=histogram.delays() if histogram is not None and histogram.total else tally.delays(),
        alpha=newest.alpha if newest else None,
        beta_ns=newest.beta_ns if newest else None,
        t0_ns=newest.t0_ns if newest else None,
        sigma_ns=newest.sigma_ns if newest else None,
        dropped=dropped,
        in_tree=in_tree,
    )


def _node_reports(
    clocks: Mapping[NodeId, NodeClock], last: RoundSummary | None, names: Mapping[NodeId, str]
) -> list[NodeReport]:
    if last is None:
        return []
    middle = (last.begin_ns + last.end_ns) // 2
    reference = clocks.get(last.reference)
    base = ahead_ns(reference, middle) if reference else 0
    return [
        NodeReport(
            node=node,
            name=names.get(node, ""),
            is_reference=node == last.reference,
            offset_ns=ahead_ns(clock, middle) - base,
            drift_ppm=drift_ppm(clock),
            sigma_ns=clock.sigma_ns,
            low_ns=clock.low_ns,
            high_ns=clock.high_ns,
        )
        for node, clock in sorted(clocks.items())
    ]
