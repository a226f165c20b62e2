"""The graph calculation: from the lines of all edges to one clock for each node. Pure.

In this order, each in a file of its own:

1. `edges.py`: invalid edges are refused, the others become columns. `filter.py`: the line of each is combined with
   those of its former windows. Only the largest connected component is used.
2. `least_squares.py`, `outliers.py`: edges that contradict the graph by more than 3 MAD are dropped, but not all edges
   of a node, unless they are proven wrong (see `_bridges`). Then again the largest component.
3. `least_squares.py`: drifts first and offsets then; every node gets a straight line over a common time tau.
4. `tree.py`: the loops and their residuals. `bounds.py`: the certified bound of each node.
5. `gauge.py`: the *gauge*, which defines global time. Measurements give clocks relative to each other; tau could be
   stretched and shifted arbitrarily. In the first round global time is the median of the nodes' Unix time, and runs at
   the rate of the median node. From then on it continues: at the new round's instant, and in its rate, the median node
   sees no change. So it does not matter which nodes join or leave, or which one is the reference. Global time is never
   corrected towards UTC: it is steady, and slowly departs from UTC as its nodes' oscillators do.

The *reference* is the node that bounds are relative to: its own mapping counts as true. It stays as long as it is
connected; then the node with the most certain offset follows. docs/concepts/graph-calculation.md has the mathematics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfold.errors import ConfigError
from ringfold.probe.graph.bounds import node_bounds
from ringfold.probe.graph.edges import Edges, usable
from ringfold.probe.graph.filter import Combined, EdgeFilters, combine
from ringfold.probe.graph.gauge import choose_gauge, node_clocks
from ringfold.probe.graph.least_squares import (
    Lines,
    anchors,
    centred,
    consensus,
    moved_betas,
    residuals,
    robust_residuals,
    solve_lines,
)
from ringfold.probe.graph.outliers import EdgeQuality, GraphHistory, ResidualHistory, edge_quality, find_outliers
from ringfold.probe.graph.tree import Floats, Ints, Tree, loop_nodes, loop_residuals, rooted, spanning_forest
from ringfold.wire.probing import EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId

PREDICTED_RATE_ERROR = 2e-7
"""The assumed change of a clock's rate until the next round. Generous: predictions only break ties."""
GROSS = 4.0
"""An error of more standard errors than this distorts other edges, and needs the robust solution."""
MAX_CLOCK_AGE_ROUNDS = 64
"""How long the mapping of an absent node is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """How outliers are found, and what is assumed about clocks."""

    max_skew: float = 1e-3
    outlier_mads: float = 3.0
    windows: int = 12
    """The residuals of an edge are compared over so many of its last windows,"""
    min_windows: int = 4
    """if there are at least so many."""
    floor_ns: float = 5.0
    """The minimum standard error of an edge."""
    wander: float = 2e-8
    """How much a rate may change after the window: bounds grow by this, beyond what the corridors give."""
    loops: int = 64
    """How many loops are reported, the worst first."""
    combine_windows: bool = True
    """Whether the lines of several windows are combined (`filter.py`)."""

    def __post_init__(self) -> None:
        if not (0 < self.max_skew < 0.1 and self.outlier_mads > 0 and self.floor_ns > 0 and self.wander >= 0):
            raise ConfigError("need 0 < max_skew < 0.1, outlier_mads > 0, floor_ns > 0 and wander >= 0")
        if not (1 <= self.min_windows <= self.windows and self.loops >= 0):
            raise ConfigError("need 1 <= min_windows <= windows, and loops >= 0")


@dataclass(frozen=True, slots=True)
class GraphResult:
    """A round's clocks as in messages, and what the next calculation needs. `edges` are in the fits' order.

    Without any usable edge there is no clock: `nodes` is empty, `reference` is -1, and `missing` has the reasons.
    """

    reference: NodeId
    nodes: list[NodeClock]
    edges: list[EdgeView]
    loops: list[LoopResidual]
    """The worst, the largest first."""
    loop_count: int
    loop_rms_ns: float
    missing: dict[NodeId, str]
    instability_ns: float
    """The larger of the 90th percentiles of loop residuals and of errors of predictions."""
    gauge: str
    """How global time was determined, as text."""
    history: GraphHistory


@dataclass(frozen=True, slots=True)
class _Component:
    """A connected component: its nodes in ascending order, its edges between indices of them, and their quality."""

    nodes: list[NodeId]
    edges: Edges
    past: EdgeQuality
    tree: Tree


@dataclass(frozen=True, slots=True)
class _Round:
    """The input, and the state of each fit: `dropped` is the reason why it is not used, or empty."""

    fits: Sequence[EdgeFit]
    utc: Mapping[NodeId, int]
    history: GraphHistory
    settings: GraphSettings
    nodes: list[NodeId]
    dropped: list[str]
    filters: EdgeFilters
    """After this round."""
    windows: Mapping[int, int]
    """Of how many windows the line of each fit is made."""


DEFAULTS = GraphSettings()
_DISCONNECTED = "it is not connected with the larger part of the graph"


def calculate(
    fits: Sequence[EdgeFit],
    utc: Mapping[NodeId, int],
    history: GraphHistory | None = None,
    settings: GraphSettings = DEFAULTS,
) -> GraphResult:
    """Combine the edges of a round. `utc` holds CLOCK_REALTIME minus the node's clock for every node that reported.

    Every node of `utc` and of `fits` is in the result: with a clock, or in `missing` with the reason. The result's
    `history` is an argument of the next round's call.
    """
    history = history or GraphHistory()
    nodes = sorted({*utc, *(fit.src for fit in fits), *(fit.dst for fit in fits)})
    reported, dropped = usable(fits, {node: place for place, node in enumerate(nodes)}, settings.max_skew)
    names = [(fits[row].src, fits[row].dst) for row in reported.row.tolist()]
    if settings.combine_windows:
        combined = combine(reported, names, history.filters)
    else:
        combined = Combined(reported, np.ones(len(reported), np.int64), EdgeFilters())
    windows = dict(zip(reported.row.tolist(), combined.windows.tolist(), strict=True))
    this = _Round(fits, utc, history, settings, nodes, dropped, combined.filters, windows)
    edges = combined.edges
    if not len(edges):
        return _empty_result(this)
    past = edge_quality(_floored_sigmas(edges, settings), history.residuals.of(names), settings.min_windows)
    component = _largest_component(nodes, edges, past, history.reference)
    lines = solve_lines(component.edges, component.tree, component.past.trusted)
    outliers = _outliers(component, lines, history, settings)
    if outliers:
        for place, why in outliers.items():
            dropped[int(component.edges.row[place])] = why
        if outliers.keys() & set(component.tree.edge):
            keep = np.array([not dropped[row] for row in edges.row.tolist()])
            if not keep.any():
                return _empty_result(this)
            component = _largest_component(nodes, edges.only(keep), past.only(keep), history.reference)
        else:
            component = _without(component, list(outliers))
        lines = solve_lines(component.edges, component.tree, component.past.trusted)
    return _result(this, reported, edges, component, lines)


def _largest_component(nodes: list[NodeId], edges: Edges, past: EdgeQuality, reference: NodeId) -> _Component:
    """The component with the most nodes; of equal ones that with the reference, or the lowest id."""
    forest = spanning_forest(len(nodes), edges.src, edges.dst, edges.sigma)
    if not forest.component.any():
        return _Component(nodes, edges, past, rooted(len(nodes), edges.src, edges.dst, forest.edges))
    sizes = np.bincount(forest.component, minlength=len(nodes))
    home = forest.component[nodes.index(reference)] if reference in nodes else -1
    best = min(range(len(nodes)), key=lambda each: (-sizes[each], each != home, each))
    inside = forest.component == best
    place = np.cumsum(inside) - 1
    within = inside[edges.src]
    chosen = edges.only(within).renumbered(place)
    row = np.cumsum(within) - 1
    branches = row[forest.edges[within[forest.edges]]]
    members = [node for node, is_in in zip(nodes, inside.tolist(), strict=True) if is_in]
    return _Component(members, chosen, past.only(within), rooted(len(members), chosen.src, chosen.dst, branches))


def _without(component: _Component, places: list[int]) -> _Component:
    """The component without these edges. None of them is in its tree, so the tree stays."""
    keep = np.ones(len(component.edges), np.bool_)
    keep[places] = False
    return _Component(
        component.nodes,
        component.edges.only(keep),
        component.past.only(keep),
        component.tree.renumbered(np.cumsum(keep) - 1),
    )


def _floored_sigmas(edges: Edges, settings: GraphSettings) -> Floats:
    """The standard errors of offset and skew, no smaller than the floor, also at the ends of the window."""
    floor = settings.floor_ns
    return np.stack([np.maximum(edges.sigma, floor), np.maximum(edges.sigma_alpha, floor / edges.half)], axis=1)


def _outliers(component: _Component, lines: Lines, history: GraphHistory, settings: GraphSettings) -> dict[int, str]:
    """The edges (by index in the component) that contradict the graph, each with the reason."""
    edges = component.edges
    loops = len(edges) - len(component.nodes) + 1
    if not loops:
        return {}  # a tree: there is no redundancy
    left = residuals(edges, lines)
    gross = GROSS * np.sqrt(loops / len(edges))  # least squares leave this much of an edge's error in its residual
    if np.any(np.abs(left) > gross * component.past.trusted):
        left = _robust(component, history, settings)
    is_out, limit = find_outliers(left, component.past, settings.outlier_mads)
    out: npt.NDArray[np.bool_] = np.logical_or.reduce(is_out, axis=1)
    if out.any():
        out[_bridges(component, left, limit, out)] = False
    why: dict[int, str] = {}
    for place in np.flatnonzero(out).tolist():
        if is_out[place, 0]:
            text = f"its offset is {left[place, 0]:.0f} ns off the graph's; the limit is {limit[place, 0]:.0f} ns"
        else:
            text = f"its skew is {left[place, 1]:.2e} off the graph's; the limit is {limit[place, 1]:.2e}"
        why[place] = f"{text} ({settings.outlier_mads:g} MAD)"
    return why


def _bridges(component: _Component, left: Floats, limit: Floats, out: npt.NDArray[np.bool_]) -> Ints:
    """The outliers without which nodes would be disconnected: those with the smallest residuals.

    Where edges are exact to a few nanoseconds, small asymmetries make outliers, and sometimes of all edges of a node. A
    slightly wrong clock is better than none. But an edge that contradicts the graph by more than its own corridor
    allows has a wrong timestamp, and is never used.
    """
    edges = component.edges
    ends = np.array([-1.0, 0.0, 1.0]) * edges.half[:, None]
    truth = -(left[:, :1] + left[:, 1:] * ends)  # by the graph, relative to the edge's line
    allowed = ((edges.low <= truth) & (truth <= edges.high)).all(axis=1)
    excess = np.where(out, (np.abs(left) / limit).max(axis=1), 0.0)
    able = np.flatnonzero(~out | allowed)
    forest = spanning_forest(len(component.nodes), edges.src[able], edges.dst[able], excess[able])
    chosen = able[forest.edges]
    needed: Ints = chosen[out[chosen]]
    return needed


def _robust(component: _Component, history: GraphHistory, settings: GraphSettings) -> Floats:
    """Residuals that are robust against a few bad edges, with the help of the last round's predictions."""
    edges, size, sigma = component.edges, len(component.nodes), component.past.sigma
    clocks = [history.clocks.get(node) for node in component.nodes]
    rates = np.array([np.nan if clock is None else -np.log1p(clock.rate) for clock in clocks])
    skews = np.log1p(edges.alpha)
    within = np.full(size, PREDICTED_RATE_ERROR)
    skew = robust_residuals(size, edges.src, edges.dst, skews, sigma[:, 1], rates, within)
    found = _potentials_of(component, skews - skew)
    anchor = centred(edges, anchors(edges, component.tree), found)
    values, _ = moved_betas(edges, anchor, found)
    guess, guess_sigma = _predicted(clocks, anchor.tolist(), found - rates, settings.floor_ns)
    offset = robust_residuals(size, edges.src, edges.dst, values, sigma[:, 0], guess, guess_sigma)
    return np.stack([offset, skew], axis=1)


def _potentials_of(component: _Component, along: Floats) -> Floats:
    """The potentials whose differences are `along` the edges, with mean zero, by the tree."""
    steps, tree = along.tolist(), component.tree
    height = [0.0] * len(tree.order)
    for node in tree.order[1:]:
        step = steps[tree.edge[node]]
        height[node] = height[tree.parent[node]] + (step if tree.down[node] else -step)
    heights = np.array(height)
    return heights - float(np.mean(heights))


def _predicted(
    clocks: list[NodeClock | None], anchor: list[int], stretches: Floats, floor_ns: float
) -> tuple[Floats, Floats]:
    """The offsets that the last mappings predict for these anchors, with standard errors; NaN without a mapping.

    `stretches` are the logarithms of the rate of global time against the common time, as each node sees it.
    """
    origin = next((clock.global_ns + at - clock.t0_ns for clock, at in zip(clocks, anchor, strict=True) if clock), 0)
    guess, sigma = np.full(len(clocks), np.nan), np.full(len(clocks), np.nan)
    for place, (clock, at) in enumerate(zip(clocks, anchor, strict=True)):
        if clock is not None:
            since = at - clock.t0_ns
            guess[place] = -((clock.global_ns + since - origin) + clock.rate * since)
            sigma[place] = max(clock.sigma_ns, floor_ns) + PREDICTED_RATE_ERROR * abs(since)
    known = stretches[np.isfinite(stretches)]
    return guess / np.exp(np.median(known) if len(known) else 0.0), sigma


def _result(this: _Round, reported: Edges, edges: Edges, component: _Component, lines: Lines) -> GraphResult:
    """The result of the round, from the lines of the component that was solved."""
    history = this.history
    settings = this.settings
    reference = _reference(component, lines, history)
    residual = consensus(component.edges, lines)[2]
    bounds = node_bounds(component.edges, lines, residual, reference)
    gauge = choose_gauge(component.nodes, lines, this.utc, history)
    clocks = node_clocks(component.nodes, lines, gauge, bounds, reference, settings.wander)
    closing, loops = loop_residuals(component.tree, component.edges.src, component.edges.dst, residual)
    instability_ns = max(_percentile_90(loops), _percentile_90(gauge.prediction_errors_ns))
    within = _within(this.nodes, edges, component)
    return GraphResult(
        reference=component.nodes[reference],
        nodes=clocks,
        edges=_views(this, component, _within(this.nodes, reported, component), lines),
        loops=_worst_loops(component, closing, loops, settings.loops),
        loop_count=len(loops),
        loop_rms_ns=float(np.sqrt(np.mean(loops**2))) if len(loops) else 0.0,
        missing=_missing(this, component),
        instability_ns=instability_ns,
        gauge=gauge.why,
        history=GraphHistory(
            *_kept_clocks(history, clocks),
            reference=component.nodes[reference],
            residuals=_kept_residuals(this, within, lines),
            instability_ns=(*history.instability_ns, instability_ns)[-settings.windows :],
            filters=this.filters,
        ),
    )


def _reference(component: _Component, lines: Lines, history: GraphHistory) -> int:
    """The previous one; else, of those that had a clock before, the one with the most certain offset."""
    if history.reference in component.nodes:
        return component.nodes.index(history.reference)
    places = [place for place, node in enumerate(component.nodes) if node in history.clocks] or range(
        len(component.nodes)
    )
    variance = np.diagonal(lines.offset.covariance).tolist()
    return min(places, key=lambda place: (round(variance[place], 3), component.nodes[place]))


def _within(nodes: list[NodeId], edges: Edges, component: _Component) -> Edges:
    """All usable edges between nodes of the component, also those that were dropped as outliers."""
    if len(nodes) == len(component.nodes):
        return edges
    members = {node: place for place, node in enumerate(component.nodes)}
    place = np.array([members.get(node, -1) for node in nodes], np.int64)
    return edges.only((place[edges.src] >= 0) & (place[edges.dst] >= 0)).renumbered(place)


def _views(this: _Round, component: _Component, within: Edges, lines: Lines) -> list[EdgeView]:
    alpha, beta, residual = consensus(within, lines)
    branches = {int(component.edges.row[edge]) for edge in component.tree.edge if edge >= 0}
    columns = zip(within.row.tolist(), alpha.tolist(), beta.tolist(), residual.tolist(), strict=True)
    solved = {
        row: EdgeView(this.fits[row], skew, offset, left, this.dropped[row], row in branches, this.windows[row])
        for row, skew, offset, left in columns
    }
    return [
        solved.get(row) or EdgeView(fit, dropped=this.dropped[row] or _DISCONNECTED)
        for row, fit in enumerate(this.fits)
    ]


def _worst_loops(component: _Component, closing: Ints, loops: Floats, count: int) -> list[LoopResidual]:
    src, dst = component.edges.src, component.edges.dst
    worst = np.argsort(-np.abs(loops), kind="stable")[:count]
    return [
        LoopResidual(
            [component.nodes[place] for place in loop_nodes(component.tree, int(src[edge]), int(dst[edge]))], residual
        )
        for edge, residual in zip(closing[worst].tolist(), loops[worst].tolist(), strict=True)
    ]


def _missing(this: _Round, component: _Component | None) -> dict[NodeId, str]:
    """The nodes that get no clock from this round, with the reason."""
    outside = set(this.nodes) - set(component.nodes if component else ())
    troubles: dict[NodeId, list[str]] = {node: [] for node in outside}
    isolated = dict.fromkeys(outside, True)
    for fit, why in zip(this.fits, this.dropped, strict=True):
        for node in {fit.src, fit.dst} & outside:
            isolated[node] &= bool(why)
            if why:
                troubles[node].append(f"{fit.src}->{fit.dst}: {why}")
    solved = len(component.nodes) if component else 0
    missing = {}
    for node in sorted(outside):
        if not isolated[node]:
            missing[node] = f"its part of the graph has no edge to the larger one, of {solved} nodes"
        elif troubles[node]:
            missing[node] = f"none of its {len(troubles[node])} edges could be used ({troubles[node][0]})"
        else:
            missing[node] = "no edge from it or to it was reported"
    return missing


def _kept_clocks(history: GraphHistory, clocks: list[NodeClock]) -> tuple[dict[NodeId, NodeClock], dict[NodeId, int]]:
    """The newest mapping of every node that had one recently, and how many rounds ago that was."""
    fresh = {clock.node: clock for clock in clocks}
    ages = {node: age + 1 for node, age in history.ages.items() if age < MAX_CLOCK_AGE_ROUNDS} | dict.fromkeys(fresh, 0)
    return {node: clock for node, clock in history.clocks.items() if node in ages} | fresh, ages


def _kept_residuals(this: _Round, within: Edges, lines: Lines) -> ResidualHistory:
    names = [(this.fits[row].src, this.fits[row].dst) for row in within.row.tolist()]
    return this.history.residuals.with_window(names, residuals(within, lines), this.settings.windows)


def _empty_result(this: _Round) -> GraphResult:
    """A round without any usable edge. The next one continues with the same history."""
    views = [EdgeView(fit, dropped=why) for fit, why in zip(this.fits, this.dropped, strict=True)]
    return GraphResult(-1, [], views, [], 0, 0.0, _missing(this, None), 0.0, "no usable edge", this.history)


def _percentile_90(values: Floats) -> float:
    return float(np.quantile(np.abs(values), 0.9)) if len(values) else 0.0
