"""Several nodes' logs, put together without a master: which fits belong to one calculation.

Nodes number their windows alone and end them when they like, so equal numbers mean nothing. What brings windows
together is the time of day at their end, which every line has (`end_ns + utc_ns`); it need only be right to a fraction
of a window. In that order, fits are taken until an edge comes for the second time, or a window's length has passed:
that is one *gathering*. An edge without a fit in it is represented by its newest one before, unless that ended more
than two windows earlier, give or take half a one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar

from msgspec import Struct

from ringfold.probe.logs.lines import FitLine
from ringfold.wire.probing import EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId, RoundId, RoundSummary

MOST_WINDOWS_OLD = 2.5

_Edge = tuple[NodeId, NodeId]


class Gathering(Struct, frozen=True):
    """What one calculation gets: the newest fit of each edge, and of each node that reported CLOCK_REALTIME minus its
    clock. Begin and end are by the time of day; round and label are those of the newest fit.
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
        newest = {edge: found for edge, found in newest.items() if last - found[0] <= MOST_WINDOWS_OLD * window_ns}
        gatherings.append(_gathering(newest, batch[-1][1]))
    return gatherings


_History = TypeVar("_History", covariant=True)


class Calculated(Protocol[_History]):
    """What a graph calculation gives: clocks, and what the next one wants to know."""

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
    calculate: Callable[[Sequence[EdgeFit], Mapping[NodeId, int], _Kept | None], Calculated[_Kept]],
) -> list[RoundSummary]:
    """The result of each gathering, as a master would have published it; each calculation gets the history before."""
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
    """Stretches in which no edge comes twice, none longer than a window."""
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
