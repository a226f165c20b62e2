"""Rounds of measurements: every pair once, no peer twice at a time, hardly ever a round too many."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.errors import UsageError
from ringfold.topology.schedule import Pair, disjoint_rounds


def check(pairs: set[Pair]) -> int:
    """The rules that hold for every answer; how many rounds there are."""
    rounds = disjoint_rounds(pairs)
    assert sorted(pair for met in rounds for pair in met) == sorted(pairs)
    for met in rounds:
        assert max(Counter(peer for pair in met for peer in pair).values()) == 1
    return len(rounds)


@pytest.mark.parametrize("peers", range(2, 20))
def test_all_pairs_take_the_fewest_rounds(peers: int) -> None:
    assert check(set(combinations(range(10, 10 + peers), 2))) == (peers - 1 if peers % 2 == 0 else peers)


@given(st.integers(2, 14), st.data())
@settings(max_examples=300, deadline=None)
def test_some_pairs_take_at_most_one_round_more_than_the_busiest_peer_has_pairs(size: int, data: st.DataObject) -> None:
    pairs = data.draw(st.sets(st.sampled_from(list(combinations(range(size), 2))), min_size=1))
    busiest = max(Counter(peer for pair in pairs for peer in pair).values())
    assert busiest <= check(pairs) <= busiest + 1


def test_one_newcomer_meets_the_others_one_by_one() -> None:
    assert check({(peer, 9) for peer in range(8)}) == 8


def test_the_order_and_direction_of_the_pairs_do_not_matter() -> None:
    pairs = list(combinations(range(7), 2))[:-3]
    assert disjoint_rounds(pairs) == disjoint_rounds([(b, a) for a, b in reversed(pairs)])


def test_no_pairs_need_no_round() -> None:
    assert disjoint_rounds([]) == []


def test_a_pair_of_one_is_refused() -> None:
    with pytest.raises(UsageError, match="peer 3"):
        disjoint_rounds([(1, 2), (3, 3)])
