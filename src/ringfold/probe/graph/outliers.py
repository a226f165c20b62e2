"""Which edges to leave out of a round: those that contradict the graph more than they ever did.

The *residual* of an edge is what it says minus what the graph says, once for its offset and once for its skew. It
does not change when a node's clock does something new, because the graph follows the clock; it changes when the edge
itself is wrong. Every edge's residuals of the last windows are kept, those of windows in which it was left out, too.
An edge is an outlier if its residual is further than 3 MAD from the median of its own, and the MAD counts as no
smaller than the edge's standard error, and than what the whole graph shows in this round: a noisy hour is no reason
to drop every edge. An edge with too little history is judged against zero, and by the graph's spread alone.

An edge that is wrong for good comes back after some windows, when its own history is as bad as its present. It does no
harm then: its weight goes by what its residuals have been.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ringfold.probe.graph.tree import Floats, Ints
from ringfold.wire.probing import NodeClock, NodeId

NORMAL = 1.4826
"""The MAD of normally distributed numbers, times this, is their standard deviation."""

EdgeName = tuple[NodeId, NodeId]


@dataclass(frozen=True, slots=True)
class Residuals:
    """The residuals of edges in the last windows: a row each, the newest window in the last column; NaN: not there.

    The last axis holds the offset's and the skew's.
    """

    names: tuple[EdgeName, ...] = ()
    values: Floats = field(default_factory=lambda: np.empty((0, 0, 2)))

    def of(self, names: Sequence[EdgeName]) -> Floats:
        """The rows of these edges, all NaN for one that is not known."""
        if tuple(names) == self.names:
            return self.values
        row = {name: number for number, name in enumerate(self.names)}
        padded = np.concatenate([self.values, np.full((1, *self.values.shape[1:]), np.nan)])
        found: Floats = padded[[row.get(name, -1) for name in names]]
        return found

    def followed_by(self, names: Sequence[EdgeName], newest: Floats, windows: int) -> "Residuals":
        """One more window. An edge that has no residual in any of the last `windows` is forgotten."""
        present = set(names)
        gone = tuple(name for name in self.names if name not in present)
        every = (*names, *gone)
        column = np.concatenate([newest, np.full((len(gone), 2), np.nan)])[:, None, :]
        values = np.concatenate([self.of(every), column], axis=1)[:, -windows:]
        if not gone:
            return Residuals(every, values)
        alive = np.isfinite(values).any(axis=(1, 2))
        return Residuals(tuple(name for name, is_alive in zip(every, alive, strict=True) if is_alive), values[alive])


@dataclass(frozen=True, slots=True)
class History:
    """What a calculation passes on to the next one. Begin with `History()`."""

    clocks: Mapping[NodeId, NodeClock] = field(default_factory=dict)
    """The newest mapping of each node to global time,"""
    ages: Mapping[NodeId, int] = field(default_factory=dict)
    """and how many rounds ago that was."""
    reference: NodeId = -1
    residuals: Residuals = field(default_factory=Residuals)
    instability_ns: tuple[float, ...] = ()
    """How much each of the last rounds surprised (see `GraphResult.instability_ns`), the newest last."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What an edge's past says about it, a row each. The columns are the offset's and the skew's."""

    sigma: Floats
    """Its standard error of this window, no less than the floor."""
    trusted: Floats
    """The standard error to weigh it by: the same, and no less than its residuals have been."""
    middle: Floats
    """The median of its residuals; zero with too little history."""
    spread: Floats
    """Their MAD, as a standard deviation; zero with too little history."""

    def only(self, which: npt.NDArray[np.bool_]) -> "Standing":
        return Standing(self.sigma[which], self.trusted[which], self.middle[which], self.spread[which])


def standing(sigma: Floats, past: Floats, min_windows: int) -> Standing:
    """Judge edges by their past residuals, if there are at least `min_windows`."""
    count = np.isfinite(past[:, :, 0]).sum(axis=1)
    enough = count >= min_windows
    middle, spread, typical = np.zeros_like(sigma), np.zeros_like(sigma), np.zeros_like(sigma)
    if enough.any():
        known, count = past[enough], count[enough]
        median = _median(known, count)
        middle[enough] = median
        spread[enough] = NORMAL * _median(np.abs(known - median[:, None]), count)
        typical[enough] = NORMAL * _median(np.abs(known), count)
    return Standing(sigma, np.maximum(sigma, typical), middle, spread)


def judge(residuals: Floats, standing: Standing, mads: float) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Which residuals (rows by columns, as in `Standing`) are outliers, and how large each might be."""
    # The lower median: of two edges that differ, the better one tells what is usual.
    graph = NORMAL * np.sort(np.abs(residuals), axis=0)[(len(residuals) - 1) // 2]
    limit = mads * np.maximum(np.maximum(standing.sigma, graph), standing.spread)
    # One that is right again after it was wrong for long is no outlier.
    off = np.minimum(np.abs(residuals), np.abs(residuals - standing.middle))
    return off > limit, limit


def _median(values: Floats, count: Ints) -> Floats:
    """Over the second axis of three, without the NaNs; there are `count` others."""
    ordered = np.sort(values, axis=1)  # NaNs go last
    rows = np.arange(len(values))
    both: Floats = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return both
