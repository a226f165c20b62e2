"""The spanning tree of the most certain edges, the parts of a graph, and the loops.

A graph with m edges between n connected nodes has m - n + 1 independent loops: every edge outside a spanning tree
closes one, together with the way through the tree between its ends. Around a loop the offsets must add up to zero; by
how much they do not is the only thing about errors that measurements alone can show.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Forest:
    """A spanning tree for each connected part: the edges in it, and for each node the number of its part."""

    edges: Ints
    part: Ints


@dataclass(frozen=True, slots=True)
class Tree:
    """A spanning tree as seen from its root (node 0): nodes in an order in which every parent comes first.

    `edge[i]` is the edge between node i and `parent[i]`, and `down[i]` is True if it leads from the parent to the node.
    """

    order: list[int]
    parent: list[int]
    edge: list[int]
    down: list[bool]
    depth: list[int]

    def renumbered(self, place: Ints) -> "Tree":
        """The same tree where edge e is at place[e] now."""
        edge = [int(place[edge]) if edge >= 0 else -1 for edge in self.edge]
        return Tree(self.order, self.parent, edge, self.down, self.depth)


def spanning_forest(size: int, src: Ints, dst: Ints, cost: Floats) -> Forest:
    """The forest with the least cost; among edges of equal cost, the first ones. Kruskal: O(m log m)."""
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
    """The tree made of these edges, seen from node 0. It must reach all nodes."""
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
    """The edges outside the tree, and what `values` (one for each edge) add up to around the loop of each.

    A loop is walked along its closing edge, and back through the tree.
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
    """The nodes of the loop that the edge from `start` to `end` closes, beginning with these two."""
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
    # The way is start -> end, from there up to where both ways meet, and down to start again.
    if not from_start:
        return [start, *from_end[:-1]]
    return [start, *from_end, *reversed(from_start[1:])]
