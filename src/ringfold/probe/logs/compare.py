"""Several runs side by side: skew, latency, overhead and loss of each, from the rounds in their logs. Pure.

The figures of a run are over all its rounds: *skew* is how much faster the clock at one end of an edge runs than the
other (alpha, without its sign), *latency* the median one-way delay of an edge, *overhead* how long probing paused after
a window, *loss* the share of pairs without a response. Of skew, latency and overhead there are the median, the 99th
percentile and the largest. Edges are the same in two runs if the names of their nodes are.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct, field

from ringfold.errors import UsageError
from ringfold.probe.logs.lines import Line, RoundLine
from ringfold.wire.probing import EdgeFit

MIN_RUNS = 2


class Spread(Struct, frozen=True):
    """A figure over edges and rounds, or over rounds."""

    p50: float
    p99: float
    max: float


class EdgeFigures(Struct, frozen=True):
    """One edge in one run, by the names of its nodes."""

    src: str
    dst: str
    skew_ppm: float
    """Of the median round, with its sign."""
    latency_us: float
    loss: float


class RunFigures(Struct, frozen=True):
    """One run. A figure is None if no round has it."""

    name: str
    rounds: int
    nodes: int
    incomplete: int
    """Rounds in which a participant was missing."""
    skew_ppm: Spread | None
    latency_us: Spread | None
    overhead_ms: Spread | None
    overhead_share: float | None
    """The median pause, relative to the median window and pause."""
    loss: float | None
    edges: list[EdgeFigures]


class _Edge(Struct):
    skew_ppm: list[float] = field(default_factory=list)
    latency_us: list[float] = field(default_factory=list)
    sent: int = 0
    lost: int = 0

    def add(self, fit: EdgeFit) -> None:
        self.sent += fit.sent
        self.lost += fit.lost
        if not fit.refused:
            self.skew_ppm.append(fit.alpha * 1e6)
            self.latency_us.append(fit.delay_p50_ns / 1e3)


def figures(name: str, lines: Iterable[Line]) -> RunFigures:
    """The figures of one run. UsageError if its log has no round."""
    edges: dict[tuple[str, str], _Edge] = {}
    nodes: set[str] = set()
    rounds = incomplete = 0
    pauses_ns: list[int] = []
    windows_ns: list[int] = []
    for line in lines:
        if not isinstance(line, RoundLine):
            continue
        summary = line.summary
        rounds += 1
        incomplete += bool(summary.missing)
        if summary.metrics.total_ns:
            pauses_ns.append(summary.metrics.total_ns)
        if summary.end_ns > summary.begin_ns:
            windows_ns.append(summary.end_ns - summary.begin_ns)
        for view in summary.edges:
            src, dst = (line.names.get(str(node)) or str(node) for node in (view.fit.src, view.fit.dst))
            nodes |= {src, dst}
            edges.setdefault((src, dst), _Edge()).add(view.fit)
    if not rounds:
        raise UsageError(f"{name} has no rounds: compare the logs of runs (run.jsonl), written with probe_export")
    sent, lost = sum(edge.sent for edge in edges.values()), sum(edge.lost for edge in edges.values())
    share = None
    if pauses_ns and windows_ns:
        pause_ns, window_ns = float(np.median(pauses_ns)), float(np.median(windows_ns))
        share = pause_ns / (window_ns + pause_ns)
    return RunFigures(
        name=name,
        rounds=rounds,
        nodes=len(nodes),
        incomplete=incomplete,
        skew_ppm=_spread([abs(each) for edge in edges.values() for each in edge.skew_ppm]),
        latency_us=_spread([each for edge in edges.values() for each in edge.latency_us]),
        overhead_ms=_spread([each / 1e6 for each in pauses_ns]),
        overhead_share=share,
        loss=lost / sent if sent else None,
        edges=[_edge(ends, edge) for ends, edge in sorted(edges.items()) if edge.latency_us],
    )


def _edge(ends: tuple[str, str], edge: _Edge) -> EdgeFigures:
    return EdgeFigures(
        src=ends[0],
        dst=ends[1],
        skew_ppm=float(np.median(edge.skew_ppm)),
        latency_us=float(np.median(edge.latency_us)),
        loss=edge.lost / edge.sent if edge.sent else 0.0,
    )


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p99, most = (float(np.percentile(values, percent)) for percent in (50, 99, 100))
    return Spread(p50, p99, most)


def common_edges(runs: Sequence[RunFigures]) -> list[tuple[EdgeFigures, ...]]:
    """The edges that all runs have: of each its figures in every run."""
    tables = [{(edge.src, edge.dst): edge for edge in run.edges} for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [tuple(table[ends] for table in tables) for ends in shared]
