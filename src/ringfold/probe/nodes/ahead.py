"""Lines before their window is over. Pure.

Between ROUND_END and the next ROUND_START nobody probes, and the fits of all nodes would be most of that time. But a
node knows how long its window will be: a moment before that it fits what there is, and when the window is then over as
expected, its lines are there already. The few exchanges that came after are counted and exported like all others; they
are not part of the line. Where they would matter (the window went on for much longer, or a clock stepped) the window is
fitted anew.
"""

from collections.abc import Callable, Iterable

from msgspec import structs

from ringfold.probe.base import EdgeWindow
from ringfold.wire.probing import EdgeFit, NodeId

AHEAD_NS = 20_000_000
SHORTEST_NS = 10 * AHEAD_NS
"""In a shorter window the last moments are too large a part of it."""
LEAST_SHARE = 0.9
"""Of the exchanges of a window, for a line through them to stand for all."""


class Ahead:
    """The lines of the open window, as far as they are there."""

    def __init__(self) -> None:
        self.due_ns: int | None = None
        """When `fit` should be called."""
        self._lines: dict[tuple[NodeId, NodeId], tuple[EdgeFit, int, int]] = {}
        """With the window's beginning, and how many exchanges there were."""

    def plan(self, opened_ns: int, window_ns: int) -> None:
        """A window begins that should be so long."""
        self._lines.clear()
        self.due_ns = opened_ns + window_ns - AHEAD_NS if window_ns >= SHORTEST_NS else None

    def forget(self) -> None:
        """The window is over, or the clock by which it was planned is another one."""
        self._lines.clear()
        self.due_ns = None

    def fit(self, windows: Iterable[EdgeWindow], fit: Callable[[EdgeWindow], EdgeFit]) -> None:
        """Take the window as it is now."""
        self.due_ns = None
        for window in windows:
            found = fit(window)
            if not found.refused:
                self._lines[window.src, window.dst] = found, window.begin_ns, len(window.exchanges)

    def line(self, window: EdgeWindow) -> EdgeFit | None:
        """The line of a window that is over now, with that window's counts; None if there is none that holds for it."""
        found, begin_ns, exchanges = self._lines.get((window.src, window.dst), (None, 0, 0))
        if found is None or window.stepped or window.begin_ns != begin_ns:
            return None
        if exchanges < LEAST_SHARE * len(window.exchanges):
            return None
        counts = {"sent": window.sent, "lost": window.lost, "duplicates": window.duplicates}
        return structs.replace(found, **counts, filtered=window.filtered)
