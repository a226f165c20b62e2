"""Potentials: one number for each node, such that the differences along the edges fit what was measured.

Drifts are such numbers (in logarithms), and so are offsets; the same few lines solve both. With B the incidence matrix
and W the weights 1/sigma^2, the normal equations are L x = B' W y, where L = B' W B is the graph's Laplacian. L knows
nothing of a constant added to all nodes, so the solution with mean zero is taken, by the pseudo-inverse. That one also
says how uncertain any difference is: var(x_i - x_j) = P_ii + P_jj - 2 P_ij.

A single bad edge pulls the least squares of all its neighbours. To find it, `robust_residuals` minimises the sum of
absolute errors instead: there always is a spanning tree that such a solution follows exactly, so whatever it finds
fault with can be dropped, and the graph still holds together. Where loops cannot tell who lies (two edges that differ,
and nothing else) the last round's prediction decides; it is weak, and gives in to what several edges agree about.
"""

from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.tree import Floats, Ints

ROBUST_TURNS = 6
"""Enough for the weights to settle within a few percent; what is a fault differs by far more."""
LEAST_WEIGHT, LEAST_ROBUST = 1e-12, 1e-10
"""In relation to the best edge. A matrix of floats has 16 digits: where weights differ by nearly as many, the solution
is noise, and where they differ by more, the matrix is singular. So a standard error of more than a million times the
best one is not told apart from that; and who only looks for faults (`robust_residuals`) can do with less."""
SOLVED = 3
"""So many times, each but the first for what is left over. Each gains the digits that the matrix still has."""
BLOCK = 32
UNSHARED = 1 << 17
"""Matrix products of no more multiplications than this stay in one thread (OpenBLAS: up to 2^18)."""


@dataclass(frozen=True, slots=True)
class Potentials:
    """The least-squares solution with mean zero, and its covariance (before any scaling by the residuals)."""

    values: Floats
    covariance: Floats

    def variance_along(self, src: Ints, dst: Ints) -> Floats:
        """Of the differences between the ends of edges."""
        own = np.diagonal(self.covariance)
        along: Floats = own[src] + own[dst] - 2 * self.covariance[src, dst]
        return np.maximum(along, 0.0)


def least_squares(size: int, src: Ints, dst: Ints, values: Floats, sigma: Floats) -> Potentials:
    """Solve for potentials x with x[dst] - x[src] = values, weighted by 1/sigma^2. The graph must be connected.

    Solved several times, each for what the last left over: where the weights differ by many orders of magnitude, that
    makes up for the digits that the matrix loses.
    """
    scale = float(np.min(sigma))
    weight = np.maximum((scale / sigma) ** 2, LEAST_WEIGHT)
    lift = float(np.mean(weight))
    inverse = inverted(laplacian(size, src, dst, weight) + lift / size)
    found = np.zeros(size)
    for _ in range(SOLVED):
        left = values - (found[dst] - found[src])
        found = found + np.einsum("ij,j->i", inverse, _divergence(size, src, dst, weight * left))
    covariance: Floats = (inverse - 1 / (lift * size)) * scale**2
    return Potentials(found - np.mean(found), covariance)


def robust_residuals(
    size: int, src: Ints, dst: Ints, values: Floats, sigma: Floats, guess: Floats, guess_sigma: Floats
) -> Floats:
    """What is left of `values` by the least sum of absolute errors (squares, for errors below sigma).

    `guess` are the predicted potentials with their standard errors; NaN where there is none. A constant added to all
    of them changes nothing.
    """
    known = _believable(size, src, dst, values, sigma, guess, guess_sigma)
    start = np.where(known, guess, 0.0)
    left = values - (start[dst] - start[src])
    scale = float(np.min(sigma))
    pull = np.where(known, (scale / guess_sigma) ** 2, 0.0)
    prior = np.diag(pull)
    if np.any(known):
        prior -= np.outer(pull, pull) / pull.sum()
    both = known[src] & known[dst]
    residual = np.where(both, left, 0.0)
    for _ in range(ROBUST_TURNS):
        weight = (scale / sigma) ** 2 * np.minimum(1.0, sigma / np.maximum(np.abs(residual), 1e-300))
        weight = np.maximum(weight, LEAST_ROBUST)
        matrix = laplacian(size, src, dst, weight) + prior + float(np.mean(weight)) / size
        found = np.einsum("ij,j->i", inverted(matrix), _divergence(size, src, dst, weight * left))
        residual = left - (found[dst] - found[src])
    return residual


def laplacian(size: int, src: Ints, dst: Ints, weight: Floats) -> Floats:
    """The weighted Laplacian, dense."""
    across: Floats = np.bincount(src * size + dst, weight, size * size).astype(np.float64).reshape(size, size)
    matrix: Floats = -(across + across.T)
    matrix[np.diag_indices(size)] -= matrix.sum(axis=1)
    return matrix


def inverted(matrix: Floats) -> Floats:
    """The inverse of a positive definite matrix, in the calling thread.

    BLAS shares larger products among threads, and waits for all of them. On a machine whose cores are busy that wait
    made the inverse of a 128 x 128 matrix take 48 ms one time in twenty, instead of 0.4 ms. So this sweeps a few
    columns at a time (block Gauss-Jordan), in products that are too small to be shared.
    """
    work = matrix.copy()
    size = len(work)
    rows = max(1, UNSHARED // (size * BLOCK))
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


def _divergence(size: int, src: Ints, dst: Ints, flow: Floats) -> Floats:
    into, out = np.bincount(dst, flow, size), np.bincount(src, flow, size)
    return (into - out).astype(np.float64)


def _believable(
    size: int, src: Ints, dst: Ints, values: Floats, sigma: Floats, guess: Floats, guess_sigma: Floats
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Which predictions to use. If most edges of a node say that it moved, it did (its process may be a new one)."""
    known = np.isfinite(guess) & np.isfinite(guess_sigma)
    both = known[src] & known[dst]
    a, b = src[both], dst[both]
    off = np.abs(values[both] - (guess[b] - guess[a]))
    surprised = off > 3 * np.sqrt(sigma[both] ** 2 + guess_sigma[a] ** 2 + guess_sigma[b] ** 2)
    votes = np.bincount(a, minlength=size) + np.bincount(b, minlength=size)
    against = np.bincount(a, surprised, size) + np.bincount(b, surprised, size)
    believed = known & (2 * against <= votes)
    return believed if believed.sum() > 1 else np.zeros(size, np.bool_)
