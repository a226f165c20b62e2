"""Certified bounds: how far a node's line can be from the truth, if no timestamp is wrong.

Each edge has a corridor that contains the true difference of its two clocks. Around the consensus the corridor of an
edge is [low, high] at any common time; corridors along a path add up. The narrowest path from the reference to a node
(by the widths at tau = 0) gives the node's bound. One path, and not the intersection of all: an intersection is
narrower, but a single wrong timestamp anywhere would break it. Here only one on that path can.

Every line inside a corridor is straight, so beyond the corridor's ends it is no steeper than from the lowest point of
one end to the highest of the other.
"""

from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.edges import Edges
from ringfold.probe.graph.least_squares import Lines
from ringfold.probe.graph.tree import Floats


@dataclass(frozen=True, slots=True)
class NodeBounds:
    """For each node: low <= (its true clock - its line) <= high at tau = 0, in common nanoseconds, and the growth.

    `growth` is how much either side grows for each nanosecond away from there.
    """

    low: Floats
    high: Floats
    growth: Floats


def node_bounds(edges: Edges, lines: Lines, residual: Floats, reference: int) -> NodeBounds:
    """Bounds of all nodes against the reference, whose own line counts as true."""
    half = float(np.median(edges.half))
    low, high = corridors(edges, lines, residual, np.array([-half, 0.0, half]))
    lows, highs = _along_narrowest(edges, low, high, reference, len(lines.anchor))
    ends = [0, 2]
    inside = np.maximum(highs[:, ends] - highs[:, 1:2], lows[:, 1:2] - lows[:, ends]).max(axis=1) / half
    beyond = np.maximum(highs[:, 2] - lows[:, 0], highs[:, 0] - lows[:, 2]) / (2 * half)
    growth = np.maximum(np.maximum(inside, beyond), 0.0)
    # Each edge's corridor is evaluated at the previous node's clock, which may be off by as much as its bound.
    slack = growth * np.maximum(np.abs(lows[:, 1]), np.abs(highs[:, 1]))
    return NodeBounds(lows[:, 1] - slack, highs[:, 1] + slack, growth)


def corridors(edges: Edges, lines: Lines, residual: Floats, taus: Floats) -> tuple[Floats, Floats]:
    """For each edge and each common time, how far the truth may be from the consensus, in common nanoseconds."""
    rates, offsets = lines.rate.values, lines.offset.values
    speed = np.exp(rates[edges.src])[:, None]
    t0 = (edges.t0 - lines.anchor[edges.src])[:, None] / speed - offsets[edges.src][:, None]
    x = (taus[None, :] - t0) * speed
    half = edges.half[:, None]
    beyond = np.maximum(np.abs(x) - half, 0.0)
    inner = np.clip(x / half, -1.0, 1.0)
    right, left = np.maximum(inner, 0.0), np.maximum(-inner, 0.0)

    def joined(at: Floats) -> Floats:
        """Linear interpolation between the three points."""
        curve: Floats = at[:, 1:2] + right * (at[:, 2:] - at[:, 1:2]) + left * (at[:, :1] - at[:, 1:2])
        return curve

    rising = (edges.high[:, 2:] - edges.low[:, :1]) / (2 * half)
    falling = (edges.high[:, :1] - edges.low[:, 2:]) / (2 * half)
    steepest_up = np.where(x > 0, rising, falling) * beyond
    steepest_down = np.where(x > 0, falling, rising) * beyond
    alpha = np.expm1(rates[edges.dst] - rates[edges.src])
    shift = residual[:, None] + (edges.alpha - alpha)[:, None] * x
    to_common = np.exp(-rates[edges.dst])[:, None]
    return (
        (joined(edges.low) - steepest_down + shift) * to_common,
        (joined(edges.high) + steepest_up + shift) * to_common,
    )


def _along_narrowest(edges: Edges, low: Floats, high: Floats, start: int, size: int) -> tuple[Floats, Floats]:
    """Sum the corridors along the narrowest path from `start` to each node (Bellman-Ford, all nodes at once)."""
    count = len(edges)
    origin = np.concatenate([edges.src, edges.dst])
    target = np.concatenate([edges.dst, edges.src])
    width = np.tile(np.maximum(high[:, 1] - low[:, 1], 1e-3), 2)  # never zero: no path may have a cycle
    order = np.argsort(target, kind="stable")
    begins = np.flatnonzero(np.diff(target[order], prepend=-1))
    distance = np.full(size, np.inf)
    distance[start] = 0.0
    while True:
        reached = np.minimum(distance, np.minimum.reduceat((distance[origin] + width)[order], begins))
        if np.array_equal(reached, distance):
            break
        distance = reached
    arrives = np.flatnonzero(distance[origin] + width == distance[target])
    last = np.zeros(size, np.int64)
    last[target[arrives[::-1]]] = arrives[::-1]
    lows, highs = np.zeros((size, 3)), np.zeros((size, 3))
    for node in np.argsort(distance, kind="stable").tolist():
        if node == start:
            continue
        arc = int(last[node])
        edge, before = arc % count, origin[arc]
        lows[node] = lows[before] + (low[edge] if arc < count else -high[edge])
        highs[node] = highs[before] + (high[edge] if arc < count else -low[edge])
    return lows, highs
