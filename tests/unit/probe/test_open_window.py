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
    ahead.fit([seen], fitted)
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
    ahead.fit([window(5)], lambda seen: EdgeFit(seen.src, seen.dst, refused="too few pairs"))
    assert ahead.line(window(5)) is None


def test_it_is_due_once_a_moment_before_the_end_and_not_in_a_short_window() -> None:
    ahead = EarlyFits()
    ahead.plan(5 * S, 4 * S)
    assert ahead.due_ns == 9 * S - LEAD_NS
    ahead.fit([], fitted)
    assert ahead.due_ns is None
    ahead.plan(5 * S, 5 * LEAD_NS)
    assert ahead.due_ns is None
