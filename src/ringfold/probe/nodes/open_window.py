"""What is done with a window while it is still open: fit it early, and check it against the last line. Pure.

*Early fits.* Between ROUND_END and the next ROUND_START no node probes, and most of that time would be spent on fits.
But a node knows how long its window will be: it fits the window shortly before its end. When the window then ends as
expected, its lines are ready. The few exchanges after the early fit are counted and exported as all others; they are
not part of the line. Where they would matter (the window lasted much longer, or a clock stepped) the window is fitted
again. The fits begin early enough to be done before the end, as far as the last ones tell, and they are made one edge
at a time: a RoundEnd that arrives in between is handled at once.

*Residuals.* A packet cannot arrive before it was sent. So all recent exchanges must lie on the right side of the last
line, within its uncertainty. If they do not, a clock has stepped, or its rate has changed. Congestion never causes a
false alarm here: it only moves points further away from the line.
"""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from msgspec import structs

from ringfold.probe.exchanges import EdgeWindow
from ringfold.wire.probing import EdgeFit, NodeId

LEAD_NS = 20_000_000
MIN_WINDOW_NS = 10 * LEAD_NS
"""In a shorter window the end is too large a part of it."""
MAX_LEAD = 0.08
"""The share of a window that early fits may leave out, however long they take."""
MIN_SHARE = 0.9
"""The share of a window's exchanges that a line must be fitted to, to be used for all."""


class EarlyFits:
    """The lines of the open window that are already fitted."""

    def __init__(self) -> None:
        self.due_ns: int | None = None
        """When `begin`, and then `fit_next`, should be called."""
        self._lines: dict[tuple[NodeId, NodeId], tuple[EdgeFit, int, int]] = {}
        """With the beginning of the window, and the number of exchanges."""
        self._pending: deque[EdgeWindow] | None = None
        self._took_ns = self._last_took_ns = 0

    def plan(self, opened_ns: int, window_ns: int) -> None:
        """A window begins that should last `window_ns`."""
        self.forget()
        lead_ns = min(max(LEAD_NS, LEAD_NS // 2 + 2 * self._last_took_ns), int(MAX_LEAD * window_ns))
        self.due_ns = opened_ns + window_ns - lead_ns if window_ns >= MIN_WINDOW_NS else None

    def forget(self) -> None:
        """The window is over, or the clock that it was planned by has stepped."""
        self._lines.clear()
        self._pending = self.due_ns = None
        self._took_ns = 0

    @property
    def has_begun(self) -> bool:
        return self._pending is not None

    def begin(self, windows: Iterable[EdgeWindow]) -> None:
        """Fit these from now on: the window as it is now."""
        self._pending = deque(windows)

    def fit_next(self, fit: Callable[[EdgeWindow], EdgeFit]) -> None:
        """Fit the next edge. After the last one nothing is due any more."""
        assert self._pending is not None
        if self._pending:
            window = self._pending.popleft()
            found = fit(window)
            if not found.refused:
                self._lines[window.src, window.dst] = found, window.begin_ns, len(window.exchanges)
        if not self._pending:
            self.due_ns = None

    def took(self, took_ns: int) -> None:
        """How long one step of the fits took: those of the next window begin early enough."""
        self._took_ns += took_ns
        if self.due_ns is None:
            self._last_took_ns = self._took_ns

    def lines(self) -> list[EdgeFit]:
        """All lines so far."""
        return [found for found, _, _ in self._lines.values()]

    def line(self, window: EdgeWindow) -> EdgeFit | None:
        """The early line of a window that is over now, with that window's counts; None if there is none to use."""
        found, begin_ns, exchanges = self._lines.get((window.src, window.dst), (None, 0, 0))
        if found is None or window.stepped or window.begin_ns != begin_ns:
            return None
        if exchanges < MIN_SHARE * len(window.exchanges):
            return None
        counts = {"sent": window.sent, "lost": window.lost, "duplicates": window.duplicates}
        return structs.replace(found, **counts, filtered=window.filtered)


class ResidualMonitor:
    """Checks new exchanges against the newest line of each edge."""

    def __init__(self) -> None:
        self._lines: dict[tuple[NodeId, NodeId], EdgeFit] = {}

    def update(self, fits: Iterable[EdgeFit]) -> None:
        """A window was closed: these are its lines."""
        for fit in fits:
            if fit.refused:
                self._lines.pop((fit.src, fit.dst), None)
            else:
                self._lines[fit.src, fit.dst] = fit

    def forget(self) -> None:
        """The edges have changed."""
        self._lines.clear()

    def check(self, windows: Iterable[EdgeWindow]) -> list[tuple[NodeId, NodeId, int]]:
        """How far the newest exchanges of each edge contradict its line, in nanoseconds: (src, dst, residual)."""
        found = []
        for window in windows:
            line = self._lines.get((window.src, window.dst))
            if line is not None and len(window.exchanges):
                found.append((window.src, window.dst, _residual_ns(line, window)))
        return found


def _residual_ns(line: EdgeFit, window: EdgeWindow) -> int:
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
    """How far points are above the line."""
    since = (at - line.t0_ns).astype(np.float64)
    return (offset - line.beta_ns).astype(np.float64) - line.alpha * since
