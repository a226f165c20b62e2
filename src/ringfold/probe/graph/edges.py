"""The reported edges as columns of numbers, and which of them can be used in the calculation.

A node may report anything; all values are checked here before the calculation uses them. Times are int64 nanoseconds:
below 2^61 each, so that the difference of two sums cannot overflow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfold.probe.graph.tree import Floats, Ints
from ringfold.wire.probing import EdgeFit, NodeId

EdgeName = tuple[NodeId, NodeId]

MAX_TIME_NS = 1 << 61
MAX_SIGMA_NS = 1e12
MAX_SIGMA_ALPHA = 1.0
"""A line that is less certain than this is useless: its weight could not be distinguished from zero."""


@dataclass(frozen=True, slots=True)
class Edges:
    """A row for each usable edge. `row` is its index among the fits; `src` and `dst` are indices of nodes.

    `low` and `high` have three columns: at t0 - half, at t0 and at t0 + half.
    """

    row: Ints
    src: Ints
    dst: Ints
    t0: Ints
    beta: Ints
    half: Floats
    alpha: Floats
    sigma: Floats
    sigma_alpha: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.row)

    def only(self, which: npt.NDArray[np.bool_]) -> "Edges":
        return Edges(*(getattr(self, name)[which] for name in self.__slots__))

    def renumbered(self, place: Ints) -> "Edges":
        """The same edges, where node i has the index place[i] now."""
        rest = [getattr(self, name) for name in self.__slots__[3:]]
        return Edges(self.row, place[self.src], place[self.dst], *rest)


def fault(fit: EdgeFit, max_skew: float) -> str:
    """Why the line of an edge cannot be used; empty if it can."""
    if fit.src == fit.dst:
        return "it leads to its own source"
    numbers = (fit.alpha, fit.sigma_ns, fit.sigma_alpha)
    if not all(map(math.isfinite, numbers)):
        return "a value is not finite"
    if abs(fit.alpha) > max_skew:
        return f"a skew of {fit.alpha:.2e} is more than {max_skew:.0e}: no clock is that inaccurate"
    if fit.sigma_ns < 0 or fit.sigma_alpha < 0 or fit.half_ns <= 0:
        return "a standard error or the length of the window is negative or missing"
    if fit.sigma_ns > MAX_SIGMA_NS or fit.sigma_alpha > MAX_SIGMA_ALPHA:
        return "a standard error is so large that the line is useless"
    # In floats, as in `_is_usable`: next to the limit they round.
    t0, beta = float(fit.t0_ns), float(fit.beta_ns)
    if max(abs(t0), abs(beta), abs(t0 + beta)) >= MAX_TIME_NS:
        return "a time is out of range"
    if max(abs(float(end)) for end in fit.low + fit.high) >= MAX_TIME_NS or float(fit.half_ns) >= MAX_TIME_NS:
        return "a bound is out of range"
    if any(low > high for low, high in zip(fit.low, fit.high, strict=True)):
        return "its bounds cross"
    return ""


def usable(fits: Sequence[EdgeFit], place: Mapping[NodeId, int], max_skew: float) -> tuple[Edges, list[str]]:
    """The edges that can be used, and for each fit why it cannot (empty if it can).

    Of two reports about one edge the newer one counts. `place` is the index of each node; it must have all of them.
    """
    faults = [fit.refused for fit in fits]
    _mark_older(fits, faults)
    try:
        edges = _columns(fits, faults, place)
    except OverflowError:  # a number beyond 64 bits: check each one
        faults = [why or fault(fit, max_skew) for fit, why in zip(fits, faults, strict=True)]
        edges = _columns(fits, faults, place)
    is_usable = _is_usable(edges, max_skew)
    for row in edges.row[~is_usable].tolist():
        faults[row] = fault(fits[row], max_skew)
        assert faults[row], "an edge that is not usable has a fault"
    return edges.only(is_usable), faults


def _mark_older(fits: Sequence[EdgeFit], faults: list[str]) -> None:
    """Of several reports about an edge, all but the newest have a fault."""
    newest: dict[tuple[NodeId, NodeId], int] = {}
    for row, fit in enumerate(fits):
        before = row if faults[row] else newest.setdefault((fit.src, fit.dst), row)
        if before != row:
            older = row if fits[before].t0_ns > fit.t0_ns else before
            faults[older] = "there is a newer report about this edge"
            newest[fit.src, fit.dst] = before + row - older


def _is_usable(edges: Edges, max_skew: float) -> npt.NDArray[np.bool_]:
    """What `fault` checks, for all edges at once and without the reason."""
    finite = np.isfinite(edges.alpha) & np.isfinite(edges.sigma) & np.isfinite(edges.sigma_alpha)
    positive = (edges.sigma >= 0) & (edges.sigma_alpha >= 0) & (edges.half > 0)
    certain = (edges.sigma <= MAX_SIGMA_NS) & (edges.sigma_alpha <= MAX_SIGMA_ALPHA)
    bounded = (np.abs(edges.low) < MAX_TIME_NS).all(axis=1) & (np.abs(edges.high) < MAX_TIME_NS).all(axis=1)
    t0, beta = edges.t0.astype(np.float64), edges.beta.astype(np.float64)
    ranged = (np.abs(t0) < MAX_TIME_NS) & (np.abs(beta) < MAX_TIME_NS) & (np.abs(t0 + beta) < MAX_TIME_NS)
    ordered = (edges.low <= edges.high).all(axis=1)
    skewed = np.abs(edges.alpha) <= max_skew
    other = edges.src != edges.dst
    conditions = (finite, positive, certain, bounded, ranged, ordered, skewed, other, edges.half < MAX_TIME_NS)
    good: npt.NDArray[np.bool_] = np.logical_and.reduce(conditions)
    return good


def _columns(fits: Sequence[EdgeFit], faults: Sequence[str], place: Mapping[NodeId, int]) -> Edges:
    rows = [row for row, why in enumerate(faults) if not why]
    good = [fits[row] for row in rows]
    return Edges(
        np.array(rows, np.int64),
        np.array([place[fit.src] for fit in good], np.int64),
        np.array([place[fit.dst] for fit in good], np.int64),
        np.array([fit.t0_ns for fit in good], np.int64),
        np.array([fit.beta_ns for fit in good], np.int64),
        np.array([fit.half_ns for fit in good], np.float64),
        np.array([fit.alpha for fit in good], np.float64),
        np.array([fit.sigma_ns for fit in good], np.float64),
        np.array([fit.sigma_alpha for fit in good], np.float64),
        np.array([fit.low for fit in good], np.float64).reshape(-1, 3),
        np.array([fit.high for fit in good], np.float64).reshape(-1, 3),
    )
