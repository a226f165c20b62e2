"""The graph calculation: from the lines of all edges to one clock for each node. Pure.

In this order, each in a file of its own:

1. `edges.py`: nonsense is refused, the rest becomes columns. The largest connected part goes on.
2. `potentials.py`, `outliers.py`: edges that contradict the graph more than 3 MAD are dropped, but not all that a node
   has, unless they are proven wrong (see `_bridges`). Then again the largest part.
3. `lines.py`: least squares, drifts first and offsets then, gives every node a straight line over a common time tau.
4. `tree.py`: the loops, and by how much they do not close. `bounds.py`: the certified bound of each node.
5. `gauge.py`: the *gauge*, which says what global time is. Measurements give clocks relative to each other; tau could
   be stretched and shifted at will. In the first round global time is the median of the nodes' Unix time, and runs as
   fast as the median node. From then on it continues: at the new round's instant, and in its rate, the median node
   sees no change. So it does not matter who comes, who leaves, or who is the reference. Global time is never drawn
   towards UTC again: it keeps even time, and slowly leaves UTC as its nodes' oscillators do.

The *reference* is the node that bounds are measured from: its own mapping counts as true. It stays as long as it is
there; then the one follows whose place in the graph is the most certain. docs/concepts/graph-calculation.md has the
mathematics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfold.errors import ConfigError
from ringfold.probe.graph.bounds import node_bounds
from ringfold.probe.graph.edges import Edges, usable
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
from ringfold.probe.graph.outliers import History, Residuals, Standing, judge, standing
from ringfold.probe.graph.tree import Floats, Ints, Tree, loop_nodes, loop_residuals, rooted, spanning_forest
from ringfold.wire.probing import EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId

PREDICTED_WITHIN = 2e-7
"""How much a clock's rate may change until the next round, as far as predictions go. Generous: they only break ties."""
GROSS = 4.0
"""An error of more standard errors than this pulls others along, and calls for the robust solution."""
KEPT_ROUNDS = 64
"""For how long the mapping of a node that is away is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSettings:
    """How edges are judged, and what is assumed about clocks."""

    max_skew: float = 1e-3
    outlier_mads: float = 3.0
    windows: int = 12
    """Over so many of the last windows an edge's residuals are compared,"""
    min_windows: int = 4
    """if there are at least so many."""
    floor_ns: float = 5.0
    """No edge is trusted to be better than this."""
    wander: float = 2e-8
    """By how much a rate may change after the window: what bounds grow by beyond what the corridors say."""
    loops: int = 64
    """How many loops are reported, the worst ones."""

    def __post_init__(self) -> None:
        if not (0 < self.max_skew < 0.1 and self.outlier_mads > 0 and self.floor_ns > 0 and self.wander >= 0):
            raise ConfigError("need 0 < max_skew < 0.1, outlier_mads > 0, floor_ns > 0 and wander >= 0")
        if not (1 <= self.min_windows <= self.windows and self.loops >= 0):
            raise ConfigError("need 1 <= min_windows <= windows, and loops >= 0")


@dataclass(frozen=True, slots=True)
class GraphResult:
    """A round's clocks, in terms of the wire, and what the next calculation needs. `edges` are in the fits' order.

    Without any usable edge there is no clock: `nodes` is empty, `reference` is -1, and `missing` says why.
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
    """How much this round surprised: the larger of what nine in ten loops and nine in ten predictions stay below."""
    gauge: str
    """What global time was taken from."""
    history: History


@dataclass(frozen=True, slots=True)
class _Part:
    """A connected part: its nodes in ascending order, its edges between places in there, and what is known of them."""

    nodes: list[NodeId]
    edges: Edges
    past: Standing
    tree: Tree


@dataclass(frozen=True, slots=True)
class _Round:
    """What was asked, and what became of each fit so far: `dropped` says why, or is empty."""

    fits: Sequence[EdgeFit]
    utc: Mapping[NodeId, int]
    history: History
    settings: GraphSettings
    nodes: list[NodeId]
    dropped: list[str]


DEFAULTS = GraphSettings()
_APART = "it is not connected with the larger part of the graph"


def calculate(
    fits: Sequence[EdgeFit],
    utc: Mapping[NodeId, int],
    history: History | None = None,
    settings: GraphSettings = DEFAULTS,
) -> GraphResult:
    """Combine the edges of a round. `utc` holds CLOCK_REALTIME minus the node's clock for every node that reported.

    Every node of `utc` and of `fits` is in the result: with a clock, or in `missing` with the reason. The result's
    `history` belongs into the next round's call.
    """
    history = history or History()
    nodes = sorted({*utc, *(fit.src for fit in fits), *(fit.dst for fit in fits)})
    edges, dropped = usable(fits, {node: place for place, node in enumerate(nodes)}, settings.max_skew)
    this = _Round(fits, utc, history, settings, nodes, dropped)
    if not len(edges):
        return _nothing(this)
    names = [(fits[row].src, fits[row].dst) for row in edges.row.tolist()]
    past = standing(_least_sigmas(edges, settings), history.residuals.of(names), settings.min_windows)
    part = _largest_part(nodes, edges, past, history.reference)
    lines = solve_lines(part.edges, part.tree, part.past.trusted)
    outliers = _outliers(part, lines, history, settings)
    if outliers:
        for place, why in outliers.items():
            dropped[int(part.edges.row[place])] = why
        if outliers.keys() & set(part.tree.edge):
            keep = np.array([not dropped[row] for row in edges.row.tolist()])
            if not keep.any():
                return _nothing(this)
            part = _largest_part(nodes, edges.only(keep), past.only(keep), history.reference)
        else:
            part = _without(part, list(outliers))
        lines = solve_lines(part.edges, part.tree, part.past.trusted)
    return _result(this, edges, part, lines)


def _largest_part(nodes: list[NodeId], edges: Edges, past: Standing, reference: NodeId) -> _Part:
    """The connected part with the most nodes; of equal ones that with the reference, or the lowest id."""
    forest = spanning_forest(len(nodes), edges.src, edges.dst, edges.sigma)
    if not forest.part.any():
        return _Part(nodes, edges, past, rooted(len(nodes), edges.src, edges.dst, forest.edges))
    sizes = np.bincount(forest.part, minlength=len(nodes))
    home = forest.part[nodes.index(reference)] if reference in nodes else -1
    best = min(range(len(nodes)), key=lambda part: (-sizes[part], part != home, part))
    inside = forest.part == best
    place = np.cumsum(inside) - 1
    within = inside[edges.src]
    chosen = edges.only(within).renumbered(place)
    row = np.cumsum(within) - 1
    branches = row[forest.edges[within[forest.edges]]]
    members = [node for node, is_in in zip(nodes, inside.tolist(), strict=True) if is_in]
    return _Part(members, chosen, past.only(within), rooted(len(members), chosen.src, chosen.dst, branches))


def _without(part: _Part, places: list[int]) -> _Part:
    """The part without these edges, none of which is in its tree: that one is as good as before."""
    keep = np.ones(len(part.edges), np.bool_)
    keep[places] = False
    return _Part(part.nodes, part.edges.only(keep), part.past.only(keep), part.tree.renumbered(np.cumsum(keep) - 1))


def _least_sigmas(edges: Edges, settings: GraphSettings) -> Floats:
    """The standard errors of offset and skew, no better than the floor, also at the ends of the window."""
    floor = settings.floor_ns
    return np.stack([np.maximum(edges.sigma, floor), np.maximum(edges.sigma_alpha, floor / edges.half)], axis=1)


def _outliers(part: _Part, lines: Lines, history: History, settings: GraphSettings) -> dict[int, str]:
    """The edges (by place in the part) that contradict the graph, each with the reason."""
    edges = part.edges
    loops = len(edges) - len(part.nodes) + 1
    if not loops:
        return {}  # a tree: nothing can contradict anything
    left = residuals(edges, lines)
    gross = GROSS * np.sqrt(loops / len(edges))  # least squares leave this much of an edge's error in its residual
    if np.any(np.abs(left) > gross * part.past.trusted):
        left = _robust(part, history, settings)
    is_out, limit = judge(left, part.past, settings.outlier_mads)
    out: npt.NDArray[np.bool_] = np.logical_or.reduce(is_out, axis=1)
    if out.any():
        out[_bridges(part, left, limit, out)] = False
    why: dict[int, str] = {}
    for place in np.flatnonzero(out).tolist():
        if is_out[place, 0]:
            text = f"its offset is {left[place, 0]:.0f} ns off the graph's; the limit is {limit[place, 0]:.0f} ns"
        else:
            text = f"its skew is {left[place, 1]:.2e} off the graph's; the limit is {limit[place, 1]:.2e}"
        why[place] = f"{text} ({settings.outlier_mads:g} MAD)"
    return why


def _bridges(part: _Part, left: Floats, limit: Floats, out: npt.NDArray[np.bool_]) -> Ints:
    """The outliers that nodes would be cut off without: the ones that are the least off.

    Where edges are exact to a few nanoseconds, small asymmetries make outliers, and now and then of all edges that a
    node has. A clock that is a little off is better than none. But an edge that contradicts the graph by more than its
    own corridor allows has a wrong stamp, and connects nothing.
    """
    edges = part.edges
    ends = np.array([-1.0, 0.0, 1.0]) * edges.half[:, None]
    truth = -(left[:, :1] + left[:, 1:] * ends)  # as the graph has it, from where the edge has its line
    allowed = ((edges.low <= truth) & (truth <= edges.high)).all(axis=1)
    excess = np.where(out, (np.abs(left) / limit).max(axis=1), 0.0)
    able = np.flatnonzero(~out | allowed)
    forest = spanning_forest(len(part.nodes), edges.src[able], edges.dst[able], excess[able])
    chosen = able[forest.edges]
    needed: Ints = chosen[out[chosen]]
    return needed


def _robust(part: _Part, history: History, settings: GraphSettings) -> Floats:
    """Residuals that a few bad edges cannot spoil, found with the help of the last round's predictions."""
    edges, size, sigma = part.edges, len(part.nodes), part.past.sigma
    clocks = [history.clocks.get(node) for node in part.nodes]
    rates = np.array([np.nan if clock is None else -np.log1p(clock.rate) for clock in clocks])
    skews = np.log1p(edges.alpha)
    within = np.full(size, PREDICTED_WITHIN)
    skew = robust_residuals(size, edges.src, edges.dst, skews, sigma[:, 1], rates, within)
    found = _potentials_of(part, skews - skew)
    anchor = centred(edges, anchors(edges, part.tree), found)
    values, _ = moved_betas(edges, anchor, found)
    guess, guess_sigma = _predicted(clocks, anchor.tolist(), found - rates, settings.floor_ns)
    offset = robust_residuals(size, edges.src, edges.dst, values, sigma[:, 0], guess, guess_sigma)
    return np.stack([offset, skew], axis=1)


def _potentials_of(part: _Part, along: Floats) -> Floats:
    """The potentials whose differences `along` the edges are, with mean zero, read off the tree."""
    steps, tree = along.tolist(), part.tree
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

    `stretches` are the logarithms of how fast global time runs against the common time, as each node sees it.
    """
    origin = next((clock.global_ns + at - clock.t0_ns for clock, at in zip(clocks, anchor, strict=True) if clock), 0)
    guess, sigma = np.full(len(clocks), np.nan), np.full(len(clocks), np.nan)
    for place, (clock, at) in enumerate(zip(clocks, anchor, strict=True)):
        if clock is not None:
            since = at - clock.t0_ns
            guess[place] = -((clock.global_ns + since - origin) + clock.rate * since)
            sigma[place] = max(clock.sigma_ns, floor_ns) + PREDICTED_WITHIN * abs(since)
    known = stretches[np.isfinite(stretches)]
    return guess / np.exp(np.median(known) if len(known) else 0.0), sigma


def _result(this: _Round, edges: Edges, part: _Part, lines: Lines) -> GraphResult:
    """Everything about the round, from the lines of the part that was solved."""
    history, settings = this.history, this.settings
    reference = _reference(part, lines, history)
    residual = consensus(part.edges, lines)[2]
    bounds = node_bounds(part.edges, lines, residual, reference)
    gauge = choose_gauge(part.nodes, lines, this.utc, history)
    clocks = node_clocks(part.nodes, lines, gauge, bounds, reference, settings.wander)
    closing, loops = loop_residuals(part.tree, part.edges.src, part.edges.dst, residual)
    instability_ns = max(_ninth_tenth(loops), _ninth_tenth(gauge.surprises))
    within = _within(this.nodes, edges, part)
    return GraphResult(
        reference=part.nodes[reference],
        nodes=clocks,
        edges=_views(this, part, within, lines),
        loops=_worst_loops(part, closing, loops, settings.loops),
        loop_count=len(loops),
        loop_rms_ns=float(np.sqrt(np.mean(loops**2))) if len(loops) else 0.0,
        missing=_missing(this, part),
        instability_ns=instability_ns,
        gauge=gauge.why,
        history=History(
            *_kept_clocks(history, clocks),
            reference=part.nodes[reference],
            residuals=_kept_residuals(this, within, lines),
            instability_ns=(*history.instability_ns, instability_ns)[-settings.windows :],
        ),
    )


def _reference(part: _Part, lines: Lines, history: History) -> int:
    """The one that it was; else, of those that had a clock before, the one whose place is the most certain."""
    if history.reference in part.nodes:
        return part.nodes.index(history.reference)
    places = [place for place, node in enumerate(part.nodes) if node in history.clocks] or range(len(part.nodes))
    variance = np.diagonal(lines.offset.covariance).tolist()
    return min(places, key=lambda place: (round(variance[place], 3), part.nodes[place]))


def _within(nodes: list[NodeId], edges: Edges, part: _Part) -> Edges:
    """All usable edges between nodes of the part, those that were dropped as outliers too."""
    if len(nodes) == len(part.nodes):
        return edges
    members = {node: place for place, node in enumerate(part.nodes)}
    place = np.array([members.get(node, -1) for node in nodes], np.int64)
    return edges.only((place[edges.src] >= 0) & (place[edges.dst] >= 0)).renumbered(place)


def _views(this: _Round, part: _Part, within: Edges, lines: Lines) -> list[EdgeView]:
    alpha, beta, residual = consensus(within, lines)
    branches = {int(part.edges.row[edge]) for edge in part.tree.edge if edge >= 0}
    columns = zip(within.row.tolist(), alpha.tolist(), beta.tolist(), residual.tolist(), strict=True)
    solved = {
        row: EdgeView(this.fits[row], skew, offset, left, this.dropped[row], row in branches)
        for row, skew, offset, left in columns
    }
    return [solved.get(row) or EdgeView(fit, dropped=this.dropped[row] or _APART) for row, fit in enumerate(this.fits)]


def _worst_loops(part: _Part, closing: Ints, loops: Floats, count: int) -> list[LoopResidual]:
    src, dst = part.edges.src, part.edges.dst
    worst = np.argsort(-np.abs(loops), kind="stable")[:count]
    return [
        LoopResidual([part.nodes[place] for place in loop_nodes(part.tree, int(src[edge]), int(dst[edge]))], residual)
        for edge, residual in zip(closing[worst].tolist(), loops[worst].tolist(), strict=True)
    ]


def _missing(this: _Round, part: _Part | None) -> dict[NodeId, str]:
    """The nodes that get no clock from this round, and why."""
    outside = set(this.nodes) - set(part.nodes if part else ())
    troubles: dict[NodeId, list[str]] = {node: [] for node in outside}
    isolated = dict.fromkeys(outside, True)
    for fit, why in zip(this.fits, this.dropped, strict=True):
        for node in {fit.src, fit.dst} & outside:
            isolated[node] &= bool(why)
            if why:
                troubles[node].append(f"{fit.src}->{fit.dst}: {why}")
    solved = len(part.nodes) if part else 0
    missing = {}
    for node in sorted(outside):
        if not isolated[node]:
            missing[node] = f"its part of the graph has no edge to the larger one, of {solved} nodes"
        elif troubles[node]:
            missing[node] = f"none of its {len(troubles[node])} edges could be used ({troubles[node][0]})"
        else:
            missing[node] = "no edge from it or to it was reported"
    return missing


def _kept_clocks(history: History, clocks: list[NodeClock]) -> tuple[dict[NodeId, NodeClock], dict[NodeId, int]]:
    """The newest mapping of every node that had one lately, and how many rounds ago that was."""
    fresh = {clock.node: clock for clock in clocks}
    ages = {node: age + 1 for node, age in history.ages.items() if age < KEPT_ROUNDS} | dict.fromkeys(fresh, 0)
    return {node: clock for node, clock in history.clocks.items() if node in ages} | fresh, ages


def _kept_residuals(this: _Round, within: Edges, lines: Lines) -> Residuals:
    names = [(this.fits[row].src, this.fits[row].dst) for row in within.row.tolist()]
    return this.history.residuals.followed_by(names, residuals(within, lines), this.settings.windows)


def _nothing(this: _Round) -> GraphResult:
    """A round without any edge to calculate with. The next one goes on from where the last one was."""
    views = [EdgeView(fit, dropped=why) for fit, why in zip(this.fits, this.dropped, strict=True)]
    return GraphResult(-1, [], views, [], 0, 0.0, _missing(this, None), 0.0, "nothing to calculate with", this.history)


def _ninth_tenth(values: Floats) -> float:
    return float(np.quantile(np.abs(values), 0.9)) if len(values) else 0.0
