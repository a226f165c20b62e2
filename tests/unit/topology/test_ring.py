"""A ring without bad edges: unchanged if possible, exact for few members, never with a bad edge."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.topology.ring import Edge, edges_of, ring_order, with_newcomers


def both_ways(*pairs: Edge) -> set[Edge]:
    return {edge for a, b in pairs for edge in ((a, b), (b, a))}


def test_a_ring_without_bad_edges_is_left_alone() -> None:
    assert ring_order([3, 1, 2], both_ways((1, 9))) == [3, 1, 2]
    assert ring_order([], set()) == []
    assert ring_order([5], {(5, 5)}) == [5]


def test_a_ring_of_two_has_two_edges() -> None:
    assert edges_of([1, 2]) == [(1, 2), (2, 1)]
    assert ring_order([1, 2], {(2, 1)}) is None


def test_a_bad_edge_in_a_ring_of_three_leaves_no_ring() -> None:
    assert ring_order([1, 2, 3], both_ways((1, 2))) is None


def test_one_member_moves_and_the_rest_keep_their_order() -> None:
    ring = ring_order([1, 2, 3, 4, 5, 6], both_ways((3, 4)))
    assert ring is not None
    assert not both_ways((3, 4)) & set(edges_of(ring))
    assert len(set(edges_of(ring)) & set(edges_of([1, 2, 3, 4, 5, 6]))) >= 3


def test_a_large_ring_with_many_bad_edges_is_found() -> None:
    members = list(range(64))
    bad = both_ways(*((i, i + 1) for i in range(0, 62, 2)), *((i, i + 7) for i in range(50)))
    ring = ring_order(members, bad)
    assert ring is not None
    assert sorted(ring) == members
    assert not bad & set(edges_of(ring))


@given(st.integers(1, 7), st.data())
@settings(max_examples=300, deadline=None)
def test_none_means_that_no_ring_exists(size: int, data: st.DataObject) -> None:
    """Compare with trying all orders; bad edges may be bad in one direction only."""
    members = list(range(1, size + 1))
    edges = [(a, b) for a in members for b in members if a != b]
    bad = data.draw(st.sets(st.sampled_from(edges)) if edges else st.just(set()))
    ring = ring_order(members, bad)
    exists = any(not bad & set(edges_of([members[0], *rest])) for rest in permutations(members[1:]))
    assert (ring is not None) == exists
    if ring is not None:
        assert sorted(ring) == members
        assert not bad & set(edges_of(ring))
        assert ring == ring_order(members, bad)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_ten_members_are_solved_exactly(data: st.DataObject) -> None:
    """Hide one ring among bad edges: it must be found."""
    members = list(range(10))
    hidden = [0, *data.draw(st.permutations(members[1:]))]
    bad = {(a, b) for a in members for b in members if a != b} - set(edges_of(hidden))
    assert ring_order(members, bad) == hidden


@pytest.mark.parametrize(
    ("ring", "newcomers", "expected"),
    [
        ([], [1, 2, 3], [1, 3, 2]),
        ([1, 2], [3, 4], [1, 3, 2, 4]),
        ([2, 1], [3], [2, 1, 3]),
        ([1, 3, 2, 4], [5, 7], [1, 3, 5, 7, 2, 4]),
        ([4, 1], [], [4, 1]),
    ],
)
def test_newcomers_stand_beside_the_members_of_their_host(
    ring: list[int], newcomers: list[int], expected: list[int]
) -> None:
    hosts = {peer: "odd" if peer % 2 else "even" for peer in range(1, 8)}
    assert with_newcomers(ring, newcomers, hosts) == expected
