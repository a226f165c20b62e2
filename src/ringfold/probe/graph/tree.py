"""The spanning tree of the most certain edges, the connected components of a graph, and its loops.

A graph with m edges between n connected nodes has m - n + 1 independent loops: every edge outside a spanning tree
closes one, together with the path through the tree between its ends. Around a loop the offsets must add up to zero. The
residual of a loop is the only measure of errors that the measurements alone give.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Forest:
    """A spanning tree for each connected component: its edges, and for each node the number of its component."""

    edges: Ints
    component: Ints


@dataclass(frozen=True, slots=True)
class Tree:
    """A spanning tree with node 0 as its root: `order` has every node after its parent.

    `edge[i]` is the edge between node i and `parent[i]`, and `down[i]` is True if it leads from the parent to the node.
    """

    order: list[int]
    parent: list[int]
    edge: list[int]
    down: list[bool]
    depth: list[int]

    def renumbered(self, place: Ints) -> "Tree":
        """The same tree, where edge e has the index place[e] now."""
        edge = [int(place[edge]) if edge >= 0 else -1 for edge in self.edge]
        return Tree(self.order, self.parent, edge, self.down, self.depth)


def spanning_forest(size: int, src: Ints, dst: Ints, cost: Floats) -> Forest:
    """The minimum spanning forest; among edges of equal cost, the first ones. Kruskal: O(m log m)."""
    root = list(range(size))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    order = np.argsort(cost, kind="stable")
    chosen = []
    for edge, a, b in zip(order.tolist(), src[order].tolist(), dst[order].tolist(), strict=True):
        a, b = find(a), find(b)
        if a != b:
            root[max(a, b)] = min(a, b)
            chosen.append(edge)
            if len(chosen) == size - 1:
                break
    return Forest(np.array(chosen, np.int64), np.array([find(node) for node in range(size)], np.int64))


def rooted(size: int, src: Ints, dst: Ints, edges: Ints) -> Tree:
    """The tree of these edges, with node 0 as its root. It must reach all nodes."""
    near: list[list[tuple[int, int, bool]]] = [[] for _ in range(size)]
    for edge, a, b in zip(edges.tolist(), src[edges].tolist(), dst[edges].tolist(), strict=True):
        near[a].append((b, edge, True))
        near[b].append((a, edge, False))
    tree = Tree([0], [-1] * size, [-1] * size, [False] * size, [0] * size)
    for node in tree.order:
        for other, edge, down in near[node]:
            if other != tree.parent[node]:
                tree.order.append(other)
                tree.parent[other], tree.edge[other], tree.down[other] = node, edge, down
                tree.depth[other] = tree.depth[node] + 1
    assert len(tree.order) == size, "the tree reaches all nodes"
    return tree


def loop_residuals(tree: Tree, src: Ints, dst: Ints, values: Floats) -> tuple[Ints, Floats]:
    """The edges outside the tree, and for each the sum of `values` (one for each edge) around its loop.

    A loop follows its closing edge, and returns through the tree.
    """
    along = values.tolist()
    height = [0.0] * len(tree.order)
    for node in tree.order[1:]:
        step = along[tree.edge[node]]
        height[node] = height[tree.parent[node]] + (step if tree.down[node] else -step)
    heights = np.array(height)
    outside = np.ones(len(values), np.bool_)
    outside[[edge for edge in tree.edge if edge >= 0]] = False
    closing = np.flatnonzero(outside)
    return closing, values[closing] - (heights[dst[closing]] - heights[src[closing]])


def loop_nodes(tree: Tree, start: int, end: int) -> Sequence[int]:
    """The nodes of the loop that the edge from `start` to `end` closes, these two first."""
    from_start, from_end = [start], [end]
    a, b = start, end
    while a != b:
        if tree.depth[a] >= tree.depth[b]:
            a = tree.parent[a]
            from_start.append(a)
        else:
            b = tree.parent[b]
            from_end.append(b)
    from_start.pop()
    # The path is start -> end, from there up to the common ancestor, and down to start.
    if not from_start:
        return [start, *from_end[:-1]]
    return [start, *from_end, *reversed(from_start[1:])]
