"""The probe graph: connected, with loops, even, seeded."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.errors import UsageError
from ringfold.probe.graph.draw import Edge, draw

SIZES = st.integers(2, 40)


def connected(nodes: set[int], edges: list[Edge]) -> bool:
    near: dict[int, set[int]] = {node: set() for node in nodes}
    for a, b in edges:
        if a in nodes and b in nodes:
            near[a].add(b)
            near[b].add(a)
    seen = {min(nodes)}
    front = list(seen)
    while front:
        fresh = near[front.pop()] - seen
        seen |= fresh
        front.extend(fresh)
    return seen == nodes


@st.composite
def cases(draw_: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    nodes = draw_(st.lists(st.integers(0, 10_000), min_size=2, max_size=40, unique=True))
    listeners = draw_(st.lists(st.sampled_from(nodes), max_size=len(nodes) - 1, unique=True))
    return nodes, listeners, draw_(st.integers(1, 12)), draw_(st.integers(0, 2**64))


@given(cases())
def test_every_node_is_connected_with_every_other(case: tuple[list[int], list[int], int, int]) -> None:
    assert connected(set(case[0]), draw(*case))


@given(cases())
def test_listeners_probe_nobody_and_are_probed(case: tuple[list[int], list[int], int, int]) -> None:
    edges = draw(*case)
    assert not {src for src, _ in edges} & set(case[1])
    assert set(case[1]) <= {dst for _, dst in edges}


@given(cases())
def test_a_prober_has_k_neighbours_and_more_only_for_the_sake_of_listeners(
    case: tuple[list[int], list[int], int, int],
) -> None:
    nodes, listeners, neighbours, _ = case
    edges = draw(*case)
    assert len(set(edges)) == len(edges)
    assert all(src != dst for src, dst in edges)
    probers, degree = len(nodes) - len(listeners), min(neighbours, len(nodes) - 1)
    out = Counter(src for src, _ in edges)
    assert min(out.values()) >= degree
    spare = probers * (degree - 1) if probers > 1 else degree
    if spare >= len(listeners):
        assert set(out.values()) == {degree}
    else:
        assert max(out.values()) <= max(degree, 1 + -(-len(listeners) // probers))


@given(cases())
def test_nodes_of_a_kind_are_probed_equally_often(case: tuple[list[int], list[int], int, int]) -> None:
    nodes, listeners, _, _ = case
    times = Counter(dst for _, dst in draw(*case))
    for kind in (set(listeners), set(nodes) - set(listeners)):
        counts = [times[node] for node in kind]
        assert not counts or max(counts) - min(counts) <= 1


@given(SIZES, st.integers(1, 12), st.integers(0, 99))
def test_without_listeners_each_is_probed_as_often_as_it_probes(size: int, neighbours: int, seed: int) -> None:
    edges = draw(range(size), (), neighbours, seed)
    degree = min(neighbours, size - 1)
    assert set(Counter(dst for _, dst in edges).values()) == {degree}
    assert len(edges) == size * degree


@given(st.integers(3, 25), st.integers(0, 10), st.integers(2, 6), st.integers(0, 99))
def test_no_single_node_holds_the_graph_together(probers: int, listeners: int, neighbours: int, seed: int) -> None:
    """With two neighbours or more, and enough of them for the listeners: without any one node the rest is connected."""
    nodes = set(range(probers + listeners))
    edges = draw(sorted(nodes), range(probers, probers + listeners), neighbours, seed)
    if probers * (min(neighbours, len(nodes) - 1) - 1) < 2 * listeners:
        return
    assert all(connected(nodes - {node}, edges) for node in nodes)


@given(st.integers(5, 40), st.integers(0, 99), st.data())
def test_no_pair_is_probed_from_both_ends_before_all_are_probed(size: int, seed: int, data: st.DataObject) -> None:
    neighbours = data.draw(st.integers(1, (size - 1) // 2))
    edges = set(draw(range(size), (), neighbours, seed))
    assert not {(b, a) for a, b in edges} & edges


@given(cases())
def test_the_order_of_the_nodes_makes_no_difference(case: tuple[list[int], list[int], int, int]) -> None:
    nodes, listeners, neighbours, seed = case
    assert draw(*case) == draw(nodes[::-1], set(listeners), neighbours, seed)


def test_another_seed_gives_another_graph() -> None:
    assert len({tuple(draw(range(16), (), 3, seed)) for seed in range(20)}) > 15


def test_a_node_alone_and_listeners_alone_have_no_edges() -> None:
    assert draw([4], (), 3, 0) == []
    assert draw([4, 5, 6], (4, 5, 6), 3, 0) == []


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one neighbour"):
        draw([1, 2], (), 0, 0)
    with pytest.raises(UsageError, match="occurs twice"):
        draw([1, 2, 1], (), 2, 0)
