"""The bandwidth store: what replaces, raises or confirms an entry, and what must be measured again."""

import math

import pytest

from ringfold.errors import UsageError
from ringfold.topology.links import BandwidthStore, LinkBandwidth

STALE = 1_000


def store_with(*edges: tuple[int, int], at: int = 0) -> BandwidthStore:
    store = BandwidthStore()
    for edge in edges:
        store.measured(edge, 1e6, 200, at)
    return store


def test_directions_are_apart_and_the_delay_is_half_the_round_trip() -> None:
    store = BandwidthStore()
    store.measured((1, 2), 5e6, 301, now=7)
    assert store.get(1, 2) == LinkBandwidth(5e6, 150, 7, "measured")
    assert store.get(2, 1) is None


def test_a_measurement_replaces_also_downwards() -> None:
    store = store_with((1, 2))
    store.measured((1, 2), 10.0, 4, now=9)
    assert store.get(1, 2) == LinkBandwidth(10.0, 2, 9, "measured")


def test_a_collective_raises_an_entry_and_keeps_its_delay() -> None:
    store = store_with((1, 2))
    store.observed((1, 2), 2e6, now=9)
    assert store.get(1, 2) == LinkBandwidth(2e6, 100, 9, "collective")


@pytest.mark.parametrize(("figure", "at"), [(0.95e6, 9), (0.9e6, 9), (0.89e6, 0), (1.0, 0)])
def test_a_collective_just_below_confirms_and_one_far_below_changes_nothing(figure: float, at: int) -> None:
    store = store_with((1, 2))
    store.observed((1, 2), figure, now=9)
    assert store.get(1, 2) == LinkBandwidth(1e6, 100, at, "measured")


def test_a_pair_is_missing_once_if_either_direction_is() -> None:
    store = store_with((1, 2), (2, 1), (1, 3))
    assert store.missing([3, 2, 1, 2], now=0, stale_ns=STALE) == [(1, 3), (2, 3)]


def test_an_entry_is_stale_at_its_age_and_a_collective_keeps_it_fresh() -> None:
    store = store_with((1, 2), (2, 1))
    assert store.missing([1, 2], now=STALE - 1, stale_ns=STALE) == []
    assert store.missing([1, 2], now=STALE, stale_ns=STALE) == [(1, 2)]
    store.observed((1, 2), 1e6, now=500)
    store.observed((2, 1), 1e6, now=500)
    assert store.missing([1, 2], now=STALE, stale_ns=STALE) == []


def test_an_entry_of_another_clock_is_stale() -> None:
    assert store_with((1, 2), (2, 1), at=10).missing([1, 2], now=9, stale_ns=STALE) == [(1, 2)]


def test_a_lower_bound_alone_still_has_to_be_measured() -> None:
    store = BandwidthStore()
    store.observed((1, 2), 1e6, now=0)
    store.observed((2, 1), 1e6, now=0)
    assert store.missing([1, 2], now=0, stale_ns=STALE) == [(1, 2)]


def test_a_peer_that_is_gone_leaves_nothing() -> None:
    store = store_with((1, 2), (2, 3), (3, 1))
    store.forget_peer(2)
    assert list(store.known([1, 2, 3])) == [(3, 1)]


def test_a_full_store_drops_the_oldest_news() -> None:
    store = BandwidthStore(most=2)
    store.measured((1, 2), 1e6, 0, now=0)
    store.measured((2, 1), 1e6, 0, now=1)
    store.observed((1, 2), 1e6, now=2)
    store.measured((1, 3), 1e6, 0, now=3)
    assert [edge for edge, _ in store.entries()] == [(1, 2), (1, 3)]


def test_news_of_a_known_link_drops_nothing() -> None:
    store = BandwidthStore(most=2)
    store.measured((1, 2), 1e6, 0, now=0)
    store.measured((2, 1), 1e6, 0, now=1)
    store.measured((2, 1), 2e6, 0, now=2)
    assert [edge for edge, _ in store.entries()] == [(1, 2), (2, 1)]


def test_news_of_a_known_link_makes_it_the_newest() -> None:
    store = store_with((1, 2), (2, 1))
    store.observed((1, 2), 1e6, now=3)
    assert [edge for edge, _ in store.entries()] == [(2, 1), (1, 2)]


def test_entries_can_be_put_back() -> None:
    store = store_with((1, 2), (2, 1))
    store.observed((1, 2), 3e6, now=4)
    again = BandwidthStore()
    for edge, entry in store.entries():
        again.restore(edge, entry)
    assert list(again.entries()) == list(store.entries())


@pytest.mark.parametrize("figure", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_rate_is_refused(figure: float) -> None:
    with pytest.raises(UsageError, match="1->2"):
        BandwidthStore().measured((1, 2), figure, 0, now=0)
    with pytest.raises(UsageError, match="1->2"):
        BandwidthStore().observed((1, 2), figure, now=0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="itself"):
        BandwidthStore().measured((1, 1), 1.0, 0, now=0)
    with pytest.raises(UsageError, match="RTT"):
        BandwidthStore().measured((1, 2), 1.0, -1, now=0)
    with pytest.raises(UsageError, match="at least one"):
        BandwidthStore(most=0)
