"""The ring: as trying all of them finds it for few members, near the bound for many, and no change without a gain."""

from collections.abc import Callable
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.errors import UsageError
from ringfold.topology import solve
from ringfold.topology.ring import Edge, edges_of
from ringfold.topology.solve import NoRing, Solution, best_ring, bottleneck_bound, known_or

Table = dict[Edge, float]
KINDS = ("log", "uniform", "ties", "symmetric", "uplinks")


def table(size: int, kind: str, seed: int) -> Table:
    """Made-up rates between 0..size-1, whole numbers."""
    random = Random(f"{kind} {size} {seed}")
    draw: dict[str, Callable[[], float]] = {
        "log": lambda: 10 ** random.uniform(6, 9),
        "uniform": lambda: random.uniform(1e6, 1e9),
        "ties": lambda: float(random.choice([1, 2, 2, 3])),
        "symmetric": lambda: random.uniform(1e6, 1e9),
        "uplinks": lambda: random.uniform(1e6, 1e9),
    }
    up = [draw[kind]() for _ in range(size)]
    rates: Table = {}
    for a in range(size):
        for b in range(size):
            if a == b:
                continue
            rate = draw[kind]()
            if kind == "symmetric" and a > b:
                rate = rates[b, a]
            rates[a, b] = float(round(min(rate, up[a]) if kind == "uplinks" else rate))
    return rates


def delays(size: int, seed: int) -> Table:
    random = Random(seed)
    return {(a, b): float(random.randint(0, 50)) for a in range(size) for b in range(size) if a != b}


def worth(ring: tuple[int, ...], rates: Table, late: Table) -> tuple[float, float, float]:
    edges = edges_of(ring)
    return min(rates[e] for e in edges), sum(rates[e] for e in edges), -sum(late[e] for e in edges)


def brute(size: int, rates: Table, late: Table, forbidden: set[Edge]) -> tuple[float, float, float] | None:
    rings = ((0, *rest) for rest in permutations(range(1, size)))
    return max((worth(ring, rates, late) for ring in rings if not forbidden & set(edges_of(ring))), default=None)


def solved(size: int, rates: Table, late: Table | None = None, **more: object) -> Solution:
    found = best_ring(range(size), known_or(rates, 0), known_or(late or {}, 0), **more)  # type: ignore[arg-type]
    assert isinstance(found, Solution)
    assert sorted(found.ring) == list(range(size))
    assert (found.slowest, found.total, -found.delay) == worth(found.ring, rates, late or dict.fromkeys(rates, 0.0))
    assert found.slowest <= found.bound
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 4, 5, 6, 7])
def test_few_members_get_the_ring_that_trying_all_finds(size: int, kind: str) -> None:
    """Ten matrices each: the same slowest link, the same sum and the same delay, also with forbidden edges."""
    for seed in range(10):
        rates, late = table(size, kind, seed), delays(size, seed)
        forbidden = set(Random(seed).sample(sorted(rates), seed % 4))
        best = brute(size, rates, late, forbidden)
        found = best_ring(range(size), known_or(rates, 0), known_or(late, 0), forbidden=forbidden)
        if best is None:
            assert isinstance(found, NoRing)
            assert found.proven
        else:
            assert isinstance(found, Solution)
            assert found.exact
            assert (found.slowest, found.total, -found.delay) == best == worth(found.ring, rates, late)
            assert not forbidden & set(edges_of(found.ring))


def test_eight_members_get_the_ring_that_trying_all_finds() -> None:
    for seed in range(3):
        rates, late = table(8, "ties", seed), delays(8, seed)
        found = solved(8, rates, late)
        assert (found.slowest, found.total, -found.delay) == brute(8, rates, late, set())


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_finds_what_the_proof_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve members, solved both ways: the same slowest link, and a sum within 5 %."""
    for seed in range(4):
        rates = table(12, kind, seed)
        proven = solved(12, rates)
        monkeypatch.setattr(solve, "EXACT_MEMBERS", 2)
        searched = solved(12, rates, budget=2_000)
        monkeypatch.undo()
        assert proven.exact
        assert not searched.exact
        assert searched.slowest == proven.slowest <= searched.bound
        assert 0.95 * proven.total <= searched.total <= proven.total


@pytest.mark.parametrize("kind", KINDS)
def test_sixty_four_members_come_within_a_twentieth_of_the_bound(kind: str) -> None:
    for seed in range(2):
        rates = table(64, kind, seed)
        found = solved(64, rates, budget=1_000)
        bound = bottleneck_bound(range(64), known_or(rates, 0))
        assert 0.95 * bound <= found.slowest <= bound == found.bound


def test_a_ring_hidden_among_slow_links_is_found() -> None:
    """The only good ring of 48, and beside it good links that make small cycles."""
    random = Random(5)
    hidden = random.sample(range(48), 48)
    rates = {edge: 1.0 for edge in table(48, "ties", 0)}
    others = random.sample(range(48), 48)
    cycles = [edge for start in range(0, 48, 4) for edge in edges_of(others[start : start + 4])]
    rates.update(dict.fromkeys([*edges_of(hidden), *cycles], 9.0))
    assert solved(48, rates).slowest == 9.0


def test_more_steps_give_no_smaller_sum() -> None:
    rates = table(24, "log", 1)
    totals = [solved(24, rates, budget=budget).total for budget in (200, 1_000, 5_000)]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


def test_equal_questions_get_equal_answers() -> None:
    rates, late = table(20, "ties", 3), delays(20, 3)
    answers = {
        best_ring(members, known_or(rates, 0), known_or(late, 0), budget=400, seed=9)
        for members in (range(20), list(reversed(range(20))))
    }
    assert len(answers) == 1


@given(st.integers(3, 9), st.sampled_from(KINDS), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_no_ring_exceeds_the_bound(size: int, kind: str, seed: int) -> None:
    rates = table(size, kind, seed)
    assert bottleneck_bound(range(size), known_or(rates, 0)) >= solved(size, rates).slowest


def bound_of(size: int, fast: set[Edge]) -> float:
    """The bound where these edges do 9, and all others 1."""
    return bottleneck_bound(range(size), known_or(dict.fromkeys(fast, 9.0), 1.0))


def test_the_bound_sees_that_a_member_must_be_passed_twice() -> None:
    """From {2, 3, 4} to {5, 6, 7} and back, all ways lead through 0; also with all links turned around."""
    sides = ((2, 3, 4), (5, 6, 7))
    fast = {(a, b) for side in sides for a in side for b in side if a != b}
    fast |= {(0, 1)} | {edge for side in sides for a in side for edge in ((0, a), (1, a), (a, 0))}
    assert bound_of(8, fast) == 1
    assert bound_of(8, {(b, a) for a, b in fast}) == 1
    assert bound_of(8, fast | {(2, 5)}) == 9


def test_the_bound_sees_that_not_all_members_can_have_a_successor() -> None:
    """Three members and four, fast from one side to the other only: a ring would need as many on both."""
    assert bound_of(7, {edge for a in range(3) for b in range(3, 7) for edge in ((a, b), (b, a))}) == 1
    assert bound_of(8, {edge for a in range(4) for b in range(4, 8) for edge in ((a, b), (b, a))}) == 9


def test_the_bound_sees_that_a_member_cannot_be_left() -> None:
    assert bound_of(5, {(a, b) for a in range(5) for b in range(5) if a not in (b, 2)}) == 1


# The present ring


def test_a_ring_that_is_as_good_is_kept() -> None:
    rates = dict.fromkeys(table(6, "ties", 0), 5.0)
    found = solved(6, rates, start=(3, 1, 5, 0, 2, 4))
    assert found.ring == (3, 1, 5, 0, 2, 4)
    assert found.kept
    assert found.exact


@pytest.mark.parametrize("size", [8, 24])
def test_a_better_ring_replaces_the_present_one_and_begins_with_the_same_member(size: int) -> None:
    rates = table(size, "uniform", 2)
    start = tuple(Random(1).sample(range(size), size))
    found = solved(size, rates, start=start)
    assert not found.kept
    assert found.ring[0] == start[0]
    assert found.slowest > worth(start, rates, rates)[0]
    assert "slowest link goes from" in found.reason
    assert solved(size, rates, start=found.ring).kept


def test_a_gain_within_the_margin_is_not_worth_a_change() -> None:
    start = (0, 1, 2, 3)
    rates = {edge: 1000.0 for edge in table(4, "ties", 0)} | {(0, 1): 970.0}
    kept = solved(4, rates, start=start, margin=0.05)
    assert kept.ring == start
    assert not kept.exact
    assert "5%" in kept.reason
    assert solved(4, rates, start=start).slowest == 1000


def test_a_larger_sum_is_a_reason_to_change_if_the_slowest_link_stays() -> None:
    """Member 0 sends slowly to all others: all rings have the same slowest link, one has a far larger sum."""
    rates = {edge: 10.0 for edge in table(4, "ties", 0)} | dict.fromkeys(edges_of((0, 2, 1, 3)), 90.0) | {(0, 2): 10.0}
    found = solved(4, rates, start=(0, 1, 2, 3), margin=0.1)
    assert found.ring == (0, 2, 1, 3)
    assert "sum goes from 120 to 280" in found.reason


def test_among_equals_the_smaller_delay_wins() -> None:
    rates = dict.fromkeys(table(5, "ties", 0), 7.0)
    late = dict.fromkeys(rates, 1000.0) | dict.fromkeys(edges_of((0, 3, 1, 4, 2)), 3.0)
    found = solved(5, rates, late, start=(0, 1, 2, 3, 4))
    assert found.ring == (0, 3, 1, 4, 2)
    assert "delays" in found.reason


def test_among_equals_the_links_of_the_present_ring_stay() -> None:
    """One edge became forbidden; of all the rings that are left, one with as few new links as possible is taken."""
    start = (0, 1, 2, 3, 4, 5, 6)
    rates = dict.fromkeys(table(7, "ties", 0), 7.0)
    found = solved(7, rates, start=start, forbidden={(2, 3)})
    assert len(set(edges_of(found.ring)) - set(edges_of(start))) == 3


def test_a_present_ring_of_other_members_still_counts_where_it_fits() -> None:
    rates = dict.fromkeys(table(6, "ties", 0), 7.0)
    found = solved(6, rates, start=(4, 2, 9, 0, 5, 1))
    assert {(4, 2), (0, 5), (5, 1), (1, 4)} <= set(edges_of(found.ring))
    assert found.ring[0] == 4
    assert not found.kept


# Forbidden edges and small or bad questions


@pytest.mark.parametrize("size", [6, 20])
def test_a_forbidden_edge_is_avoided_even_if_it_is_the_fastest(size: int) -> None:
    rates = table(size, "uniform", 0)
    forbidden = {edge for edge, rate in rates.items() if rate > 5e8}
    found = solved(size, rates, forbidden=forbidden)
    assert not forbidden & set(edges_of(found.ring))


@pytest.mark.parametrize("size", [2, 5, 20])
def test_the_result_shows_that_every_ring_needs_a_forbidden_edge(size: int) -> None:
    rates = table(size, "uniform", 0)
    forbidden = {edge for edge in rates if edge[0] == 1}
    found = best_ring(range(size), known_or(rates, 0), known_or({}, 0), forbidden=forbidden)
    assert isinstance(found, NoRing)
    assert found.proven
    assert "forbidden" in found.reason


def test_unknown_links_have_the_rate_that_the_caller_gives() -> None:
    rates = {(0, 1): 5.0, (1, 2): 5.0, (2, 0): 5.0}
    for unknown, ring in ((1.0, (0, 1, 2)), (9.0, (0, 2, 1))):
        found = best_ring([0, 1, 2], known_or(rates, unknown), known_or({}, 0))
        assert isinstance(found, Solution)
        assert found.ring == ring


@pytest.mark.parametrize("members", [(), (7,), (7, 4)])
def test_up_to_two_members_have_one_ring(members: tuple[int, ...]) -> None:
    found = best_ring(members, known_or({}, 3), known_or({}, 0))
    assert isinstance(found, Solution)
    assert found.ring == tuple(sorted(members))
    assert found.exact
    assert found.slowest == (3 if len(members) == 2 else 0)


def test_nonsense_is_refused() -> None:
    def figure(source: int, target: int) -> float:
        return 1.0

    with pytest.raises(UsageError, match="once"):
        best_ring([1, 2, 1], figure, figure)
    with pytest.raises(UsageError, match="1->2: a rate of nan"):
        best_ring([1, 2, 3], known_or({(1, 2): float("nan")}, 1), figure)
    with pytest.raises(UsageError, match="1->2: a delay of -1"):
        best_ring([1, 2, 3], figure, known_or({(1, 2): -1}, 1))
    with pytest.raises(UsageError, match="margin"):
        best_ring([1, 2, 3], figure, figure, margin=-0.1)
    with pytest.raises(UsageError, match="budget"):
        best_ring([1, 2, 3], figure, figure, budget=0)
