"""The gauge: which of all possible common times is the global one.

Measurements give clocks relative to each other. Any straight line over the common time tau could be global time; this
file chooses one, so that global time reads like Unix time and never jumps when nodes join or leave (see `clocks.py`).

A node's old mapping predicts global time at tau = 0. The median of the predictions is taken, and the median of the
predicted rates. With means instead of medians this could be stated exactly: the mean clock of the nodes that stay keeps
its rate and its reading, so errors of measurement do not add up from round to round. Medians do nearly the same, and
are robust against one wrong clock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.bounds import NodeBounds
from ringfold.probe.graph.edges import MAX_TIME_NS
from ringfold.probe.graph.least_squares import Lines
from ringfold.probe.graph.outliers import GraphHistory
from ringfold.probe.graph.tree import Floats
from ringfold.wire.probing import NodeClock, NodeId

MAX_PREDICTION_ERROR_NS = 1_000_000_000
"""A node whose old mapping is off by more than this has another clock now."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """Global time is whole_ns + part_ns + tau * exp(rate)."""

    whole_ns: int
    part_ns: float
    rate: float
    why: str
    prediction_errors_ns: Floats
    """The error of each node's prediction; only nodes that had one."""


def choose_gauge(nodes: Sequence[NodeId], lines: Lines, utc: Mapping[NodeId, int], history: GraphHistory) -> Gauge:
    """Continue global time if any node has a mapping already, else start it."""
    readings, early = readings_at_zero(lines)
    places = [place for place, node in enumerate(nodes) if history.ages.get(node, -1) == 0]
    if not places:
        places = [place for place, node in enumerate(nodes) if node in history.clocks]
    if places:
        return _continued([nodes[place] for place in places], places, lines, readings, early, history)
    rate = float(np.median(lines.rate.values))
    known = sorted(readings[place] + utc[node] for place, node in enumerate(nodes) if node in utc)
    if not known:
        return Gauge(readings[0], 0.0, rate, f"starts as node {nodes[0]}'s clock: no node knows Unix time", _NONE)
    middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) // 2
    return Gauge(middle, 0.0, rate, f"starts as the median Unix time of {len(known)} nodes", _NONE)


def readings_at_zero(lines: Lines) -> tuple[list[int], list[float]]:
    """What each clock reads at tau = 0, in whole nanoseconds, and the tau at which it reads exactly that."""
    speed, offset = np.exp(lines.rate.values), lines.offset.values
    whole = np.rint(offset * speed)
    readings: list[int] = (lines.anchor + whole.astype(np.int64)).tolist()
    early: list[float] = (whole / speed - offset).tolist()
    return readings, early


def node_clocks(
    nodes: Sequence[NodeId], lines: Lines, gauge: Gauge, bounds: NodeBounds, reference: int, wander: float
) -> list[NodeClock]:
    """Each node's mapping. Bounds are rounded outwards; those of the reference are zero by definition."""
    readings, early = readings_at_zero(lines)
    stretch = math.exp(gauge.rate)
    rates = np.expm1(gauge.rate - lines.rate.values).tolist()
    others = np.full(len(nodes), reference, np.int64)
    sigmas = (np.sqrt(lines.offset.variance_along(np.arange(len(nodes)), others)) * lines.excess).tolist()
    lows, highs, growths = bounds.low.tolist(), bounds.high.tolist(), bounds.growth.tolist()
    clocks = []
    for place, node in enumerate(nodes):
        is_reference = place == reference
        # A clock that is ahead of its line makes global time late: the signs change. One nanosecond is for rounding.
        low, high = math.floor(-stretch * highs[place] - 1), math.ceil(-stretch * lows[place] + 1)
        low, high = max(low, -MAX_TIME_NS), min(high, MAX_TIME_NS)
        clocks.append(
            NodeClock(
                node=node,
                t0_ns=readings[place],
                global_ns=gauge.whole_ns + round(gauge.part_ns + stretch * early[place]),
                rate=rates[place],
                sigma_ns=0.0 if is_reference else sigmas[place],
                low_ns=0 if is_reference else low,
                high_ns=0 if is_reference else high,
                growth=wander + growths[place] * stretch,
            )
        )
    return clocks


def _continued(
    staying: list[NodeId],
    places: list[int],
    lines: Lines,
    readings: list[int],
    early: list[float],
    history: GraphHistory,
) -> Gauge:
    whole, small = [], []
    for node, place in zip(staying, places, strict=True):
        clock = history.clocks[node]
        since = readings[place] - clock.t0_ns
        whole.append(clock.global_ns + since)
        small.append(clock.rate * since - early[place])
    pivot = whole[_pivot(staying, whole, history.reference)]
    values = np.array([float(a - pivot) for a in whole]) + np.array(small)
    same = np.abs(values - values[whole.index(pivot)]) < MAX_PREDICTION_ERROR_NS
    values = values[same]
    old_rates = np.log1p([history.clocks[node].rate for node in staying])
    rates = (old_rates + lines.rate.values[places])[same]
    part = float(np.median(values))
    return Gauge(
        pivot, part, float(np.median(rates)), f"continues on {len(values)} of {len(readings)} nodes", values - part
    )


def _pivot(nodes: list[NodeId], values: list[int], reference: NodeId) -> int:
    """The prediction that is taken as approximately right: the middle one, or, of two, that of the reference."""
    if len(nodes) < 3:
        return nodes.index(reference) if reference in nodes else 0
    return sorted(range(len(values)), key=values.__getitem__)[len(values) // 2]


_NONE: Floats = np.empty(0)
