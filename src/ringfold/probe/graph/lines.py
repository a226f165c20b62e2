"""All clocks as straight lines over one common time: the heart of the graph calculation.

While a window lasts, clocks run evenly, so node i reads

    C_i = anchor_i + a_i * (tau + offset_i)

at the common time tau, which is zero near the middle of the window and counts in nanoseconds. An edge from s to d says
that d reads t0 + beta when s reads t0, and that d runs 1 + alpha times as fast. Both are linear, without any
approximation, in the right variables:

    log a_d - log a_s      = log(1 + alpha)
    offset_d - offset_s    = (beta - (anchor_d - anchor_s) - (a_d / a_s - 1) * (t0 - anchor_s)) / a_d

So drifts are solved first; they move each edge's beta from its own t0 to tau = 0; then the offsets are solved. Clocks
may differ by years: anchors and betas are integers, their difference is taken in integers, and only what is left,
which is small, becomes a float. The anchors come from the spanning tree and need only be near: the equation holds for
any.
"""

from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.edges import Edges
from ringfold.probe.graph.potentials import Potentials, least_squares
from ringfold.probe.graph.tree import Floats, Ints, Tree


@dataclass(frozen=True, slots=True)
class Lines:
    """The clocks of a connected graph. `rate` holds log a, `offset` nanoseconds; both have the mean zero."""

    anchor: Ints
    rate: Potentials
    offset: Potentials
    excess: float
    """By how much the offsets' errors are larger than the edges' own standard errors say, at least 1."""


def solve_lines(edges: Edges, tree: Tree, sigmas: Floats) -> Lines:
    """The weighted least squares over a connected graph, drifts first. `sigmas` are of the offset and the skew."""
    size = len(tree.order)
    sigma, sigma_alpha = sigmas[:, 0], sigmas[:, 1]
    skew = np.log1p(edges.alpha)
    rate = least_squares(size, edges.src, edges.dst, skew, sigma_alpha)
    anchor = centred(edges, anchors(edges, tree), rate.values)
    values, moved = moved_betas(edges, anchor, rate.values)
    # What an uncertain drift adds over the way from t0 to tau = 0
    rate_excess = _excess(edges, skew, rate.values, sigma_alpha)
    spread = np.sqrt(sigma**2 + (moved * rate_excess) ** 2 * rate.variance_along(edges.src, edges.dst))
    offset = least_squares(size, edges.src, edges.dst, values, spread)
    return Lines(anchor, rate, offset, _excess(edges, values, offset.values, spread))


def anchors(edges: Edges, tree: Tree) -> Ints:
    """What each node's clock reads at about the same instant, by the edges of the tree alone."""
    first = tree.edge[tree.order[1]]
    t0, beta, alpha = edges.t0.tolist(), edges.beta.tolist(), edges.alpha.tolist()
    reading = [0] * len(tree.order)
    reading[0] = t0[first] if tree.down[tree.order[1]] else t0[first] + beta[first]
    for node in tree.order[1:]:
        edge, above = tree.edge[node], reading[tree.parent[node]]
        if tree.down[node]:
            since = above - t0[edge]
            reading[node] = above + beta[edge] + round(alpha[edge] * since)
        else:
            since = above - t0[edge] - beta[edge]
            reading[node] = t0[edge] + since - round(since * alpha[edge] / (1 + alpha[edge]))
    return np.array(reading, np.int64)


def centred(edges: Edges, anchor: Ints, rates: Floats) -> Ints:
    """The anchors moved to the instant in the middle of all edges' t0."""
    middle = float(np.median(edges.t0 - anchor[edges.src]))
    moved: Ints = anchor + np.rint(middle * np.exp(rates)).astype(np.int64)
    return moved


def moved_betas(edges: Edges, anchor: Ints, rates: Floats) -> tuple[Floats, Floats]:
    """What the edges say about offset_d - offset_s, and how far each was moved for that, in nanoseconds."""
    since = (edges.t0 - anchor[edges.src]).astype(np.float64)
    apart = (edges.beta - (anchor[edges.dst] - anchor[edges.src])).astype(np.float64)
    drift = np.expm1(rates[edges.dst] - rates[edges.src])
    return (apart - drift * since) / np.exp(rates[edges.dst]), since


def consensus(edges: Edges, lines: Lines) -> tuple[Floats, Ints, Floats]:
    """Alpha and beta of each edge (at its own t0) as the whole graph says, and by how much its own beta differs."""
    rates, offsets = lines.rate.values, lines.offset.values
    values, _ = moved_betas(edges, lines.anchor, rates)
    alpha = np.expm1(rates[edges.dst] - rates[edges.src])
    residual = (values - (offsets[edges.dst] - offsets[edges.src])) * np.exp(rates[edges.dst])
    return alpha, edges.beta - np.rint(residual).astype(np.int64), residual


def residuals(edges: Edges, lines: Lines) -> Floats:
    """What each edge says minus what the graph says, of the offset (ns) and of the skew (as logarithm)."""
    rates = lines.rate.values
    skew = np.log1p(edges.alpha) - (rates[edges.dst] - rates[edges.src])
    return np.stack([consensus(edges, lines)[2], skew], axis=1)


def _excess(edges: Edges, values: Floats, found: Floats, sigma: Floats) -> float:
    """The root of the reduced chi-square, if the graph has loops to judge by; at least 1."""
    loops = len(edges) - len(found) + 1
    if loops < 1:
        return 1.0
    left = (values - (found[edges.dst] - found[edges.src])) / sigma
    return max(1.0, float(np.sqrt(left @ left / loops)))
