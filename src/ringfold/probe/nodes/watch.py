"""A look into the window that is still open: does the line of the last one hold? Pure.

A packet cannot arrive before it was sent. So all that arrived lately must lie on the right side of the last line, with
room for what the line itself does not know; if it does not, a clock has jumped, or runs at another rate than before.
Congestion never makes a false alarm here: it only moves points further away from the line.
"""

from collections.abc import Iterable

import numpy as np

from ringfold.probe.base import EdgeWindow
from ringfold.wire.probing import EdgeFit, NodeId


class Watch:
    """The newest lines of a node's edges."""

    def __init__(self) -> None:
        self._lines: dict[tuple[NodeId, NodeId], EdgeFit] = {}

    def fitted(self, fits: Iterable[EdgeFit]) -> None:
        """A window was closed: these are its lines."""
        for fit in fits:
            if fit.refused:
                self._lines.pop((fit.src, fit.dst), None)
            else:
                self._lines[fit.src, fit.dst] = fit

    def forget(self) -> None:
        """The edges are others now."""
        self._lines.clear()

    def look(self, windows: Iterable[EdgeWindow]) -> list[tuple[NodeId, NodeId, int]]:
        """By how many nanoseconds each edge's newest exchanges contradict its line: (src, dst, residual)."""
        found = []
        for window in windows:
            line = self._lines.get((window.src, window.dst))
            if line is not None and len(window.exchanges):
                found.append((window.src, window.dst, _contradiction(line, window)))
        return found


def _contradiction(line: EdgeFit, window: EdgeWindow) -> int:
    rows = window.exchanges
    forward, backward = rows[(rows[:, 0] != 0) & (rows[:, 1] != 0)], rows[(rows[:, 4] != 0) & (rows[:, 5] != 0)]
    over = _distances(line, forward[:, 0], forward[:, 1] - forward[:, 0])
    under = _distances(line, backward[:, 5], backward[:, 4] - backward[:, 5])
    too_low = float(over.min()) if over.size else 0.0
    too_high = float(under.max()) if under.size else 0.0
    if too_low < 0:
        return int(too_low)
    return max(0, int(too_high))


def _distances(line: EdgeFit, at: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """How far points lie above the line."""
    since = (at - line.t0_ns).astype(np.float64)
    return (offset - line.beta_ns).astype(np.float64) - line.alpha * since
