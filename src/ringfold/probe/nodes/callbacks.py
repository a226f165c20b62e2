"""What a program sees of a node's probing: its windows, its clocks and the rounds, by callback or by waiting.

The thread that steps the node publishes; it never waits for the program. Callbacks run in a thread of their own, one
after another, so they may take their time and use the communicator. If they fall behind, the oldest events are dropped.
An exception in a callback is logged, and changes nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ringfold.errors import DeadlineExceeded, RingfoldError, UsageError
from ringfold.probe.exchanges import EdgeWindow
from ringfold.runtime import threads
from ringfold.wire.probing import EdgeFit, NodeClock, RoundId, RoundSummary

MAX_PENDING = 64
"""Events that no callback, or no waiting thread, has seen yet."""

_NO_ROUND = RoundId()

_log = logging.getLogger("ringfold.probe")


@dataclass(frozen=True, slots=True)
class ProbeWindow:
    """A window: its fits, one per node that was probed, and the exchanges behind them."""

    number: int
    begin_ns: int
    end_ns: int
    utc_ns: int
    """CLOCK_REALTIME minus the node's clock. All other times are of the node's clock."""
    fits: list[EdgeFit]
    edges: list[EdgeWindow]
    round: RoundId = _NO_ROUND
    """In a run: the round that ended it, or the last one known."""
    label: str = ""
    is_alone: bool = False
    """Whether the node probed without a master, because it was away."""


OnWindow = Callable[[ProbeWindow], object]
OnClock = Callable[[NodeClock], object]
OnRound = Callable[[RoundSummary], object]
ProbeEvent = ProbeWindow | NodeClock
Event = TypeVar("Event")


class ProbeEvents:
    """The events of one node. Any thread may register callbacks or wait; one publishes.

    `fetch` reads the newest round from the master. It is called in the callbacks' thread, after each new clock, and
    only if a callback wants rounds: summaries are large, so the master sends none that nobody requested.
    """

    def __init__(self, fetch: Callable[[], RoundSummary | None]) -> None:
        self._fetch = fetch
        self._changed = threads.Condition()
        self._windows: deque[ProbeWindow] = deque(maxlen=MAX_PENDING)
        self._window_count = 0
        self._pending: deque[ProbeEvent] = deque(maxlen=MAX_PENDING)
        self._on_window: list[OnWindow] = []
        self._on_clock: list[OnClock] = []
        self._on_round: list[OnRound] = []
        self._last_round: RoundId | None = None
        self._thread: threads.Thread | None = None
        self._is_closed = False
        self.dropped = 0
        """Events that no callback has seen, because earlier ones took too long."""

    def on_window(self, callback: OnWindow) -> None:
        """Call it with every window of this node from now on."""
        self._register(self._on_window, callback)

    def on_clock(self, callback: OnClock) -> None:
        """Call it with every new mapping of this node's clock to global time."""
        self._register(self._on_clock, callback)

    def on_round(self, callback: OnRound) -> None:
        """Call it with the summary of every round, as far as it is read before the next one."""
        self._register(self._on_round, callback)

    def inherit(self, former: "ProbeEvents") -> None:
        """Take the callbacks of a node over that this one replaces."""
        for on_window in former._on_window:
            self.on_window(on_window)
        for on_clock in former._on_clock:
            self.on_clock(on_clock)
        for on_round in former._on_round:
            self.on_round(on_round)

    def publish(self, event: ProbeEvent) -> None:
        """An event of the node. Does not wait."""
        with self._changed:
            if isinstance(event, ProbeWindow):
                self._windows.append(event)
                self._window_count += 1
            if self._thread is not None:
                self.dropped += len(self._pending) == MAX_PENDING
                self._pending.append(event)
            self._changed.notify_all()

    def windows(self, timeout_s: float) -> Iterator[ProbeWindow]:
        """The windows that end from now on, in order. Raises DeadlineExceeded if none ends for `timeout_s`."""
        with self._changed:
            return self._windows_after(self._window_count, timeout_s)

    def _windows_after(self, seen: int, timeout_s: float) -> Iterator[ProbeWindow]:
        while True:
            window, seen = self._next_window(seen, timeout_s)
            yield window

    def _next_window(self, seen: int, timeout_s: float) -> tuple[ProbeWindow, int]:
        """The window that follows the first `seen` ones, or the oldest that is kept; and how many were seen then."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._window_count > seen or self._is_closed, timeout_s):
                text = f"no window ended within {timeout_s:g} s: is probing on?"
                raise DeadlineExceeded("window", (), round(timeout_s * 1_000), text)
            if self._window_count <= seen:
                raise UsageError("this prober is closed")
            place = max(seen, self._window_count - len(self._windows))
            return self._windows[place - self._window_count], place + 1

    def close(self, timeout_s: float = 1.0) -> None:
        """No event follows. Waits a moment for a callback that is being called, unless it is the one that closes."""
        with self._changed:
            self._is_closed = True
            self._fetch = _no_round  # a method of the node's owner: without it both are freed at once
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and not threads.is_current(thread):
            thread.join(timeout_s)

    def _register(self, callbacks: "list[Callable[[Event], object]]", callback: "Callable[[Event], object]") -> None:
        with self._changed:
            callbacks.append(callback)
            if self._thread is None and not self._is_closed:
                self._thread = threads.start("ringfold-probe-callbacks", self._serve)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if self._is_closed:
                    return
                event = self._pending.popleft()
                on_window, on_clock, on_round = [*self._on_window], [*self._on_clock], [*self._on_round]
            if isinstance(event, ProbeWindow):
                _call_each(on_window, event)
                continue
            _call_each(on_clock, event)
            summary = self._newest_round() if on_round else None
            if summary is not None:
                _call_each(on_round, summary)

    def _newest_round(self) -> RoundSummary | None:
        """The newest round, if it was not reported before."""
        try:
            summary = self._fetch()
        except RingfoldError as error:
            _log.warning("the newest round cannot be read: %s", error)
            return None
        if summary is None or summary.round == self._last_round:
            return None
        self._last_round = summary.round
        return summary


def _call_each(callbacks: "list[Callable[[Event], object]]", event: Event) -> None:
    for callback in callbacks:
        try:
            callback(event)
        except Exception:
            _log.exception("a callback of probing failed; probing goes on")


def _no_round() -> RoundSummary | None:
    return None
