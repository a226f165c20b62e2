"""Which edges to leave out of a round: those that contradict the graph more than they did before.

The *residual* of an edge is its own value minus that of the graph, once for its offset and once for its skew. It does
not change when a node's clock changes, because the graph follows the clock; it changes when the edge itself is wrong.
The residuals of the last windows of every edge are kept, also of windows in which it was left out. An edge is an
outlier if its residual is further than 3 MAD from the median of its own. The MAD counts as no smaller than the edge's
standard error, and than the spread of the whole graph in this round: general noise is no reason to drop every edge. An
edge with too little history is compared with zero, and with the graph's spread alone.

An edge that is permanently wrong returns after some windows, when its own history is as bad as its present. It does no
harm then: its weight depends on its past residuals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ringfold.probe.graph.edges import EdgeName
from ringfold.probe.graph.filter import EdgeFilters
from ringfold.probe.graph.tree import Floats, Ints
from ringfold.wire.probing import NodeClock, NodeId

NORMAL = 1.4826
"""The MAD of normally distributed numbers, times this, is their standard deviation."""


@dataclass(frozen=True, slots=True)
class ResidualHistory:
    """The residuals of edges in the last windows: a row each, the newest window in the last column; NaN: absent.

    The last axis is offset and skew.
    """

    names: tuple[EdgeName, ...] = ()
    values: Floats = field(default_factory=lambda: np.empty((0, 0, 2)))

    def of(self, names: Sequence[EdgeName]) -> Floats:
        """The rows of these edges, all NaN for an unknown one."""
        if tuple(names) == self.names:
            return self.values
        row = {name: number for number, name in enumerate(self.names)}
        padded = np.concatenate([self.values, np.full((1, *self.values.shape[1:]), np.nan)])
        found: Floats = padded[[row.get(name, -1) for name in names]]
        return found

    def with_window(self, names: Sequence[EdgeName], newest: Floats, windows: int) -> "ResidualHistory":
        """Add a window. An edge without a residual in any of the last `windows` is removed."""
        present = set(names)
        gone = tuple(name for name in self.names if name not in present)
        every = (*names, *gone)
        column = np.concatenate([newest, np.full((len(gone), 2), np.nan)])[:, None, :]
        values = np.concatenate([self.of(every), column], axis=1)[:, -windows:]
        if not gone:
            return ResidualHistory(every, values)
        alive = np.isfinite(values).any(axis=(1, 2))
        return ResidualHistory(
            tuple(name for name, is_alive in zip(every, alive, strict=True) if is_alive), values[alive]
        )


@dataclass(frozen=True, slots=True)
class GraphHistory:
    """What a calculation passes to the next one. Start with `GraphHistory()`."""

    clocks: Mapping[NodeId, NodeClock] = field(default_factory=dict)
    """The newest mapping of each node to global time,"""
    ages: Mapping[NodeId, int] = field(default_factory=dict)
    """and how many rounds ago that was."""
    reference: NodeId = -1
    residuals: ResidualHistory = field(default_factory=ResidualHistory)
    instability_ns: tuple[float, ...] = ()
    """Of the last rounds (see `GraphResult.instability_ns`), the newest last."""
    filters: EdgeFilters = field(default_factory=EdgeFilters)


@dataclass(frozen=True, slots=True)
class EdgeQuality:
    """How good edges are by their past residuals, a row each. The columns are offset and skew."""

    sigma: Floats
    """Its standard error of this window, no less than the floor."""
    trusted: Floats
    """The standard error for its weight: no less than its past residuals."""
    middle: Floats
    """The median of its residuals; zero with too little history."""
    spread: Floats
    """Their MAD, as a standard deviation; zero with too little history."""

    def only(self, which: npt.NDArray[np.bool_]) -> "EdgeQuality":
        return EdgeQuality(self.sigma[which], self.trusted[which], self.middle[which], self.spread[which])


def edge_quality(sigma: Floats, past: Floats, min_windows: int) -> EdgeQuality:
    """Rate edges by their past residuals, if there are at least `min_windows`."""
    count = np.isfinite(past[:, :, 0]).sum(axis=1)
    enough = count >= min_windows
    middle, spread, typical = np.zeros_like(sigma), np.zeros_like(sigma), np.zeros_like(sigma)
    if enough.any():
        known, count = past[enough], count[enough]
        median = _median(known, count)
        middle[enough] = median
        spread[enough] = NORMAL * _median(np.abs(known - median[:, None]), count)
        typical[enough] = NORMAL * _median(np.abs(known), count)
    return EdgeQuality(sigma, np.maximum(sigma, typical), middle, spread)


def find_outliers(residuals: Floats, edge_quality: EdgeQuality, mads: float) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Which residuals (rows by columns, as in `EdgeQuality`) are outliers, and the limit of each."""
    # The lower median: of two edges that differ, the better one defines what is normal.
    graph = NORMAL * np.sort(np.abs(residuals), axis=0)[(len(residuals) - 1) // 2]
    limit = mads * np.maximum(np.maximum(edge_quality.sigma, graph), edge_quality.spread)
    # An edge that is right again after it was wrong for long is not an outlier.
    off = np.minimum(np.abs(residuals), np.abs(residuals - edge_quality.middle))
    return off > limit, limit


def _median(values: Floats, count: Ints) -> Floats:
    """The median over the second of three axes, without the NaNs; there are `count` other values."""
    ordered = np.sort(values, axis=1)  # NaNs go last
    rows = np.arange(len(values))
    both: Floats = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return both
