"""All clocks as straight lines over one common time, by least squares: the core of the graph calculation.

*Clocks.* During a window clocks run evenly, so node i reads

    C_i = anchor_i + a_i * (tau + offset_i)

at the common time tau, which is zero near the middle of the window and counts in nanoseconds. An edge from s to d says
that d reads t0 + beta when s reads t0, and that d runs 1 + alpha times as fast. Both are linear, without any
approximation, in the right variables:

    log a_d - log a_s      = log(1 + alpha)
    offset_d - offset_s    = (beta - (anchor_d - anchor_s) - (a_d / a_s - 1) * (t0 - anchor_s)) / a_d

So drifts are solved first; they move each edge's beta from its own t0 to tau = 0; then the offsets are solved. Clocks
may differ by years: anchors and betas are integers, their difference is taken in integers, and only the rest, which is
small, becomes a float. The anchors come from the spanning tree and need only be near: the equation holds for any.

*Potentials.* Drifts (as logarithms) and offsets are potentials: one number for each node, such that the differences
along the edges fit the measurements. With B the incidence matrix and W the weights 1/sigma^2, the normal equations are
L x = B' W y, where L = B' W B is the graph's Laplacian. L does not determine a constant added to all nodes, so the
solution with mean zero is taken, by the pseudo-inverse P. It also gives the variance of any difference:
var(x_i - x_j) = P_ii + P_jj - 2 P_ij.

*Outliers.* A single bad edge pulls the least squares of all its neighbours. To find it, `robust_residuals` minimises
the sum of absolute errors instead. There is always a spanning tree that such a solution follows exactly. So every edge
with a large residual can be dropped, and the graph stays connected. Where loops cannot tell which edge is wrong (two
edges that differ, and nothing else), the last round's prediction decides. Its weight is low: several edges that agree
override it.
"""

from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.edges import Edges
from ringfold.probe.graph.tree import Floats, Ints, Tree

ROBUST_ITERATIONS = 6
"""Enough for the weights to converge within a few percent; a faulty edge differs by far more."""
MIN_WEIGHT, MIN_ROBUST_WEIGHT = 1e-12, 1e-10
"""Relative to the best edge. A matrix of floats has 16 digits: where weights differ by nearly as many, the solution is
noise, and where they differ by more, the matrix is singular. So a standard error of more than a million times the best
one counts as a million times; `robust_residuals` only looks for faults, and needs less."""
REFINEMENTS = 3
"""How often the system is solved: after the first time for the residual, to gain precision."""
BLOCK, SOLVED_BLOCK = 32, 64
"""Rows and columns at a time in `invert` and `solve`."""
SINGLE_THREAD_PRODUCTS = 1 << 17
"""Matrix products of no more multiplications than this stay in one thread (OpenBLAS: up to 2^18)."""


@dataclass(frozen=True, slots=True)
class Potentials:
    """The least-squares solution with mean zero, and its covariance (not scaled by the residuals)."""

    values: Floats
    covariance: Floats

    def variance_along(self, src: Ints, dst: Ints) -> Floats:
        """Of the differences between the ends of edges."""
        own = np.diagonal(self.covariance)
        along: Floats = own[src] + own[dst] - 2 * self.covariance[src, dst]
        return np.maximum(along, 0.0)


def least_squares(size: int, src: Ints, dst: Ints, values: Floats, sigma: Floats) -> Potentials:
    """Solve for potentials x with x[dst] - x[src] = values, weighted by 1/sigma^2. The graph must be connected.

    Solved several times, each time for the residual of the last: where the weights differ by many orders of magnitude,
    that restores the digits that the matrix loses (iterative refinement).
    """
    scale = float(np.min(sigma))
    weight = np.maximum((scale / sigma) ** 2, MIN_WEIGHT)
    lift = float(np.mean(weight))
    inverse = invert(laplacian(size, src, dst, weight) + lift / size)
    found = np.zeros(size)
    for _ in range(REFINEMENTS):
        left = values - (found[dst] - found[src])
        found = found + np.einsum("ij,j->i", inverse, _divergence(size, src, dst, weight * left))
    covariance: Floats = (inverse - 1 / (lift * size)) * scale**2
    return Potentials(found - np.mean(found), covariance)


def robust_residuals(
    size: int, src: Ints, dst: Ints, values: Floats, sigma: Floats, guess: Floats, guess_sigma: Floats
) -> Floats:
    """The residuals of `values` by the least sum of absolute errors (squares, for errors below sigma).

    `guess` are the predicted potentials with their standard errors; NaN where there is none. A constant added to all
    of them changes nothing.
    """
    known = _usable_predictions(size, src, dst, values, sigma, guess, guess_sigma)
    start = np.where(known, guess, 0.0)
    left = values - (start[dst] - start[src])
    scale = float(np.min(sigma))
    pull = np.where(known, (scale / guess_sigma) ** 2, 0.0)
    prior = np.diag(pull)
    if np.any(known):
        prior -= np.outer(pull, pull) / pull.sum()
    both = known[src] & known[dst]
    residual = np.where(both, left, 0.0)
    for _ in range(ROBUST_ITERATIONS):
        weight = (scale / sigma) ** 2 * np.minimum(1.0, sigma / np.maximum(np.abs(residual), 1e-300))
        weight = np.maximum(weight, MIN_ROBUST_WEIGHT)
        matrix = laplacian(size, src, dst, weight) + prior + float(np.mean(weight)) / size
        found = solve(matrix, _divergence(size, src, dst, weight * left))
        residual = left - (found[dst] - found[src])
    return residual


def laplacian(size: int, src: Ints, dst: Ints, weight: Floats) -> Floats:
    """The weighted Laplacian, dense."""
    across: Floats = np.bincount(src * size + dst, weight, size * size).astype(np.float64).reshape(size, size)
    matrix: Floats = -(across + across.T)
    matrix[np.diag_indices(size)] -= matrix.sum(axis=1)
    return matrix


def invert(matrix: Floats) -> Floats:
    """The inverse of a positive definite matrix, in the calling thread.

    BLAS distributes larger products over threads, and waits for all of them. On a machine whose cores are busy that
    wait made the inverse of a 128 x 128 matrix take 48 ms one time in twenty, instead of 0.4 ms. So this eliminates a
    few columns at a time (block Gauss-Jordan), in products that are too small to be distributed.
    """
    work = matrix.copy()
    size = len(work)
    rows = max(1, SINGLE_THREAD_PRODUCTS // (size * BLOCK))
    for begin in range(0, size, BLOCK):
        block = slice(begin, min(begin + BLOCK, size))
        pivot = np.linalg.inv(work[block, block])
        columns = work[:, block].copy()
        across = np.hstack([pivot @ work[block, at : at + BLOCK] for at in range(0, size, BLOCK)])
        for top in range(0, size, rows):
            part = slice(top, top + rows)
            work[part] -= columns[part] @ across
            work[part, block] = -(columns[part] @ pivot)
        work[block] = across
        work[block, block] = pivot
    return work


def solve(matrix: Floats, right: Floats) -> Floats:
    """The solution of a positive definite system, in the calling thread, for less than half of the cost of `invert`.

    A few rows at a time are eliminated from those below them (block Gauss), and replaced from the last to the first.
    """
    size = len(matrix)
    work = np.column_stack([matrix, right])
    for begin in range(0, size, SOLVED_BLOCK):
        end = min(begin + SOLVED_BLOCK, size)
        block = work[begin:end, begin:end].copy()
        lefts = range(end, max(end + 1, size), SOLVED_BLOCK)
        for left in lefts:  # the right side goes with the last columns
            part = slice(left, size + 1 if left == lefts[-1] else left + SOLVED_BLOCK)
            above = np.linalg.solve(block, work[begin:end, part])
            work[begin:end, part] = above
            for top in range(end, size, BLOCK):
                below = slice(top, top + BLOCK)
                work[below, part] -= work[below, begin:end] @ above
    found = np.empty(size)
    for begin in reversed(range(0, size, SOLVED_BLOCK)):
        end = min(begin + SOLVED_BLOCK, size)
        found[begin:end] = work[begin:end, size] - np.einsum("ij,j->i", work[begin:end, end:size], found[end:])
    return found


def _divergence(size: int, src: Ints, dst: Ints, flow: Floats) -> Floats:
    into, out = np.bincount(dst, flow, size), np.bincount(src, flow, size)
    return (into - out).astype(np.float64)


def _usable_predictions(
    size: int, src: Ints, dst: Ints, values: Floats, sigma: Floats, guess: Floats, guess_sigma: Floats
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Which predictions to use. If most edges of a node contradict its prediction, it is wrong (a new process)."""
    known = np.isfinite(guess) & np.isfinite(guess_sigma)
    both = known[src] & known[dst]
    a, b = src[both], dst[both]
    off = np.abs(values[both] - (guess[b] - guess[a]))
    contradicts = off > 3 * np.sqrt(sigma[both] ** 2 + guess_sigma[a] ** 2 + guess_sigma[b] ** 2)
    votes = np.bincount(a, minlength=size) + np.bincount(b, minlength=size)
    against = np.bincount(a, contradicts, size) + np.bincount(b, contradicts, size)
    is_usable = known & (2 * against <= votes)
    return is_usable if is_usable.sum() > 1 else np.zeros(size, np.bool_)


@dataclass(frozen=True, slots=True)
class Lines:
    """The clocks of a connected graph. `rate` is log a, `offset` is in nanoseconds; both have the mean zero."""

    anchor: Ints
    rate: Potentials
    offset: Potentials
    excess: float
    """The ratio of the offsets' errors to the edges' own standard errors, at least 1."""


def solve_lines(edges: Edges, tree: Tree, sigmas: Floats) -> Lines:
    """The weighted least squares over a connected graph, drifts first. `sigmas` are of the offset and the skew."""
    size = len(tree.order)
    sigma, sigma_alpha = sigmas[:, 0], sigmas[:, 1]
    skew = np.log1p(edges.alpha)
    rate = least_squares(size, edges.src, edges.dst, skew, sigma_alpha)
    anchor = centred(edges, anchors(edges, tree), rate.values)
    values, moved = moved_betas(edges, anchor, rate.values)
    # An uncertain drift adds an error over the time from t0 to tau = 0
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
    """offset_d - offset_s of each edge, and how far it was moved in time for that, in nanoseconds."""
    since = (edges.t0 - anchor[edges.src]).astype(np.float64)
    apart = (edges.beta - (anchor[edges.dst] - anchor[edges.src])).astype(np.float64)
    drift = np.expm1(rates[edges.dst] - rates[edges.src])
    return (apart - drift * since) / np.exp(rates[edges.dst]), since


def consensus(edges: Edges, lines: Lines) -> tuple[Floats, Ints, Floats]:
    """Alpha and beta of each edge (at its own t0) by the whole graph, and how far its own beta differs."""
    rates, offsets = lines.rate.values, lines.offset.values
    values, _ = moved_betas(edges, lines.anchor, rates)
    alpha = np.expm1(rates[edges.dst] - rates[edges.src])
    residual = (values - (offsets[edges.dst] - offsets[edges.src])) * np.exp(rates[edges.dst])
    return alpha, edges.beta - np.rint(residual).astype(np.int64), residual


def residuals(edges: Edges, lines: Lines) -> Floats:
    """The value of each edge minus that of the graph, for the offset (ns) and the skew (as logarithm)."""
    rates = lines.rate.values
    skew = np.log1p(edges.alpha) - (rates[edges.dst] - rates[edges.src])
    return np.stack([consensus(edges, lines)[2], skew], axis=1)


def _excess(edges: Edges, values: Floats, found: Floats, sigma: Floats) -> float:
    """The root of the reduced chi-square, if the graph has loops; at least 1."""
    loops = len(edges) - len(found) + 1
    if loops < 1:
        return 1.0
    left = (values - (found[edges.dst] - found[edges.src])) / sigma
    return max(1.0, float(np.sqrt(left @ left / loops)))
