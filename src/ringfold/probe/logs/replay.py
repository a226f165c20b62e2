"""Recorded logs, calculated again: windows are fitted again with any estimator, and fits of several nodes are combined
into rounds without a master. Pure; the fit and the graph calculation are arguments.

Nodes number and end their windows independently, so equal numbers mean nothing. Windows are matched by the time of day
at their end, which every line has (`end_ns + utc_ns`). It must be right only to a fraction of a window. In that order
fits are taken until an edge occurs for the second time, or a window's length has passed: that is one *gathering*. An
edge without a fit in it is represented by its newest earlier one, unless that ended more than two and a half windows
before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

from msgspec import Struct

from ringfold.errors import UsageError
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.logs.lines import FitLine, HeaderLine, Line, RoundLine, WindowLine, edge_window
from ringfold.wire.probing import EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId, RoundId, RoundSummary

MAX_AGE_WINDOWS = 2.5
_Edge = tuple[NodeId, NodeId]

Fit = Callable[[EdgeWindow, str], EdgeFit]
"""Turns a window into a line with the estimator of that name."""


class Refit(Struct, frozen=True):
    """One edge and window: the fit in the log (None: there is none), and the new one."""

    src: NodeId
    dst: NodeId
    node: NodeId
    window: int
    round_id: RoundId
    label: str
    begin_ns: int
    end_ns: int
    old: EdgeFit | None
    new: EdgeFit
    moved_ns: float | None
    """How far the new line is above the old one at the old t0; None if one of them was refused."""


def replay(lines: Iterable[Line], fit: Fit, estimator: str) -> Iterator[Refit]:
    """Every recorded window fitted again, in the order of the log; needs the memory of one window.

    Windows without points are skipped; a log that has only such ones is a UsageError.
    """
    waiting: dict[tuple[NodeId, NodeId], WindowLine] = {}
    current: tuple[NodeId, int] | None = None
    recorded = without_points = 0
    for line in lines:
        if isinstance(line, RoundLine):
            continue
        place = None if isinstance(line, HeaderLine) else (line.node, line.window)
        if place != current:
            yield from (_refit(left, None, fit, estimator) for left in waiting.values())
            waiting.clear()
            current = place
        match line:
            case WindowLine(exchanges=None):
                without_points += 1
            case WindowLine():
                waiting[line.src, line.dst] = line
                recorded += 1
            case FitLine(fit=old) if (found := waiting.pop((old.src, old.dst), None)) is not None:
                yield _refit(found, old, fit, estimator)
    yield from (_refit(left, None, fit, estimator) for left in waiting.values())
    if not recorded:
        what = "was written without its points (--points writes them)" if without_points else "has no windows of a node"
        raise UsageError(f"the log {what}, so nothing can be fitted again")


def _refit(line: WindowLine, old: EdgeFit | None, fit: Fit, estimator: str) -> Refit:
    window = edge_window(line)
    assert window is not None
    new = fit(window, estimator)
    return Refit(
        src=line.src,
        dst=line.dst,
        node=line.node,
        window=line.window,
        round_id=line.round_id,
        label=line.label,
        begin_ns=line.begin_ns,
        end_ns=line.end_ns,
        old=old,
        new=new,
        moved_ns=None if old is None else moved_ns(old, new),
    )


def moved_ns(old: EdgeFit, new: EdgeFit) -> float | None:
    """How far the new line is above the old one at the old t0. The large parts are subtracted as integers."""
    if old.refused or new.refused:
        return None
    return (new.beta_ns - old.beta_ns) + new.alpha * (old.t0_ns - new.t0_ns)


class Gathering(Struct, frozen=True):
    """The input of one calculation: the newest fit of each edge, and CLOCK_REALTIME minus the clock of each node that
    reported. Begin and end are times of day; round and label are those of the newest fit.
    """

    round_id: RoundId
    label: str
    begin_ns: int
    end_ns: int
    fits: list[EdgeFit]
    utc: dict[NodeId, int]


def gather(lines: Iterable[FitLine]) -> list[Gathering]:
    """All gatherings of any number of nodes' logs, oldest first; the order of the lines does not matter."""
    timed = sorted(((line.end_ns + line.utc_ns, line.fit.src, line.fit.dst, line) for line in lines), key=_when)
    if not timed:
        return []
    lengths = sorted(line.end_ns - line.begin_ns for *_, line in timed)
    window_ns = max(1, lengths[len(lengths) // 2])
    newest: dict[_Edge, tuple[int, FitLine]] = {}
    gatherings = []
    for batch in _batches([(end, line) for end, _, _, line in timed], window_ns):
        newest |= {_edge(line): (end, line) for end, line in batch}
        last = batch[-1][0]
        newest = {edge: found for edge, found in newest.items() if last - found[0] <= MAX_AGE_WINDOWS * window_ns}
        gatherings.append(_gathering(newest, batch[-1][1]))
    return gatherings


_History = TypeVar("_History", covariant=True)


class GraphCalculation(Protocol[_History]):
    """The result of a graph calculation: clocks, and the history for the next one."""

    @property
    def reference(self) -> NodeId: ...
    @property
    def nodes(self) -> list[NodeClock]: ...
    @property
    def edges(self) -> list[EdgeView]: ...
    @property
    def loops(self) -> list[LoopResidual]: ...
    @property
    def missing(self) -> Mapping[NodeId, str]: ...
    @property
    def history(self) -> _History: ...


_Kept = TypeVar("_Kept")


def combine(
    gatherings: Iterable[Gathering],
    calculate: Callable[[Sequence[EdgeFit], Mapping[NodeId, int], _Kept | None], GraphCalculation[_Kept]],
) -> list[RoundSummary]:
    """The result of each gathering, as a master would have published it; each calculation gets the last history."""
    history: _Kept | None = None
    summaries = []
    for gathering in gatherings:
        result = calculate(gathering.fits, gathering.utc, history)
        history = result.history
        summaries.append(
            RoundSummary(
                round=gathering.round_id,
                kind="local",
                label=gathering.label,
                begin_ns=gathering.begin_ns,
                end_ns=gathering.end_ns,
                reference=result.reference,
                nodes=result.nodes,
                edges=result.edges,
                loops=result.loops,
                missing={str(node): why for node, why in sorted(result.missing.items())},
            )
        )
    return summaries


_when = itemgetter(0, 1, 2)


def _edge(line: FitLine) -> _Edge:
    return line.fit.src, line.fit.dst


def _batches(timed: list[tuple[int, FitLine]], window_ns: int) -> Iterator[list[tuple[int, FitLine]]]:
    """Intervals in which no edge occurs twice, none longer than a window."""
    batch: list[tuple[int, FitLine]] = []
    edges: set[_Edge] = set()
    for end, line in timed:
        if batch and (_edge(line) in edges or end - batch[0][0] >= window_ns):
            yield batch
            batch, edges = [], set()
        batch.append((end, line))
        edges.add(_edge(line))
    yield batch


def _gathering(newest: dict[_Edge, tuple[int, FitLine]], last: FitLine) -> Gathering:
    found = [newest[edge] for edge in sorted(newest)]
    by_time = sorted(found, key=lambda each: (each[0], each[1].node))
    return Gathering(
        round_id=last.round_id,
        label=last.label,
        begin_ns=min(line.begin_ns + line.utc_ns for _, line in found),
        end_ns=max(end for end, _ in found),
        fits=[line.fit for _, line in found],
        utc={line.node: line.utc_ns for _, line in by_time},
    )
