"""Lines that are there before their window is over."""

from dataclasses import replace

import numpy as np
import pytest

from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.nodes.open_window import LEAD_NS, EarlyFits
from ringfold.wire.probing import EdgeFit

S = 1_000_000_000


def window(exchanges: int, **changes: object) -> EdgeWindow:
    rows, kept = np.zeros((exchanges, 8), np.int64), np.zeros(exchanges, np.uint8)
    plain = EdgeWindow(1, 2, 5 * S, 9 * S, rows, kept, exchanges, 3, 0, 1, 0, "kernel")
    return replace(plain, **changes)  # type: ignore[arg-type]


def fitted(seen: EdgeWindow) -> EdgeFit:
    """Names the window by its number of exchanges."""
    return EdgeFit(seen.src, seen.dst, pairs=len(seen.exchanges), sent=seen.sent, lost=seen.lost)


def ahead_of(seen: EdgeWindow) -> EarlyFits:
    ahead = EarlyFits()
    ahead.plan(5 * S, 4 * S)
    ahead.begin([seen])
    ahead.fit_next(fitted)
    return ahead


def test_the_line_stands_for_a_window_that_ends_as_expected_with_its_counts() -> None:
    line = ahead_of(window(990)).line(window(1_000, lost=7))
    assert line is not None
    assert (line.pairs, line.sent, line.lost) == (990, 1_000, 7)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(window(1_200), id="it went on for longer"),
        pytest.param(window(1_000, stepped="by an hour"), id="a clock stepped"),
        pytest.param(window(1_000, begin_ns=6 * S), id="it is another window"),
        pytest.param(window(1_000, dst=3), id="it is another edge"),
    ],
)
def test_it_does_not_stand_for(changed: EdgeWindow) -> None:
    assert ahead_of(window(990)).line(changed) is None


def test_a_refused_fit_is_made_again() -> None:
    ahead = EarlyFits()
    ahead.begin([window(5)])
    ahead.fit_next(lambda seen: EdgeFit(seen.src, seen.dst, refused="too few pairs"))
    assert ahead.line(window(5)) is None


def test_it_is_due_once_a_moment_before_the_end_and_not_in_a_short_window() -> None:
    ahead = EarlyFits()
    ahead.plan(5 * S, 4 * S)
    assert ahead.due_ns == 9 * S - LEAD_NS
    ahead.begin([])
    ahead.fit_next(fitted)
    assert ahead.due_ns is None
    ahead.plan(5 * S, 5 * LEAD_NS)
    assert ahead.due_ns is None


def test_edges_are_fitted_one_at_a_time_and_each_counts_at_once() -> None:
    ahead = EarlyFits()
    ahead.plan(5 * S, 4 * S)
    ahead.begin([window(990), window(990, dst=3)])
    ahead.fit_next(fitted)
    assert ahead.due_ns is not None, "another edge is to be fitted"
    assert ahead.line(window(1_000)) is not None
    assert ahead.line(window(1_000, dst=3)) is None
    ahead.fit_next(fitted)
    assert ahead.due_ns is None
    assert {line.dst for line in ahead.lines()} == {2, 3}


@pytest.mark.parametrize(("took_ms", "lead_ms"), [(1, 20), (30, 70), (1_000, 320)])
def test_fits_that_took_longer_begin_earlier_the_next_time(took_ms: int, lead_ms: int) -> None:
    """Twice what the last ones took and a margin; but most of the window is fitted."""
    ahead = EarlyFits()
    ahead.plan(5 * S, 4 * S)
    ahead.begin([])
    ahead.fit_next(fitted)
    ahead.took(took_ms * S // 1_000)
    ahead.plan(9 * S, 4 * S)
    assert ahead.due_ns == 13 * S - lead_ms * S // 1_000
