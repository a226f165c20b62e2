"""SIGTERM as a request to end well: what was begun may end within a grace period, then the signal takes its effect.

Its effect is that of the *former handler*, the one that was there before: by default the process ends, with the status
of a process that SIGTERM ended. Nothing of that is lost, it is only later.

A handler runs in the main thread, between any two of its instructions, so it must not take a lock that the main thread
may hold. It notes the request, and a thread keeps the time. When the grace is over, that thread calls `abort`, which
ends every wait of the main thread, and interrupts the main thread. There are two cases:

- The main thread is inside the code that uses this class (`is_inside`). That code notices by itself: its waits fail,
  and `is_overdue` says why.
- It is anywhere else, in code that knows nothing of this: then the former handler runs at that place.

A forked child, such as a data loader, has the former handler. SIGTERM is blocked until it is back, because the
interpreter forgets a signal that comes while it forks.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType

from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns

_log = logging.getLogger("ringfold.sigterm")

EXIT_STATUS = 128 + signal.SIGTERM
AGAIN_S = 0.1
"""How often the main thread is interrupted: a signal that comes right before a system call does not end that call."""
ABORT_S = 5.0
"""How long the former handler waits for the end of `abort`, which has deadlines of its own."""
_S = 1_000_000_000


class Sigterm:
    """SIGTERM, for as long as it is installed. Everything but `abort` is for the main thread."""

    def __init__(self, grace_s: float, abort: Callable[[], None]) -> None:
        self._grace_s, self._abort = grace_s, abort
        self._former: object = None
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike a lock, it may be used in a signal handler
        self._once = threads.Lock()
        self._aborted = threads.Event()
        self._is_waiting = self._is_interrupting = self._is_delivered = self._is_over = False
        self.is_inside = True
        """Set by the user of this class: whether the main thread is inside code that ends by itself after an abort."""
        self.is_requested = False
        self.is_overdue = False
        """The grace is over, and `abort` was called, or is being called."""

    @property
    def is_installed(self) -> bool:
        return self in _installed

    def install(self) -> bool:
        """Take over SIGTERM. Not outside the main thread, and not where it is ignored, or handled by other than Python:
        then nothing is changed, and False is returned.
        """
        former = signal.getsignal(signal.SIGTERM)
        if former is None or former is signal.SIG_IGN or not threads.is_main():
            return False
        self._former = former
        threads.start("ringfold-sigterm", self._watch)
        signal.signal(signal.SIGTERM, self._handle)
        _installed.append(self)
        return True

    def uninstall(self) -> None:
        """Put the former handler back. A request whose effect is still due gets it now, or a moment later."""
        if not self.is_installed:
            return
        _installed.remove(self)
        self._put_back()
        if self._is_due:
            self.abort()
            if self._former is signal.SIG_DFL:
                signal.raise_signal(signal.SIGTERM)
            # What another handler raises would be lost inside a generator that is being closed. So the thread sends the
            # signal again, and that handler is put back then.
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, self._handle)
        self._is_over = True
        self._wake.put(None)

    @property
    def _is_due(self) -> bool:
        return self.is_requested and not self._is_delivered

    def _put_back(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:  # else the program has set another one since
            with suppress(ValueError):  # the garbage collector calls in another thread: see `_handle`
                signal.signal(signal.SIGTERM, self._former)  # type: ignore[arg-type]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits for what may take any time: a request is granted no grace."""
        self._is_waiting = True
        if self.is_installed:
            self._wake.put(None)
        try:
            yield
        finally:
            self._is_waiting = False

    def abort(self) -> None:
        """Give up what was begun, once. Returns when that is done, also if another thread does it."""
        with self._once:
            if not self._aborted.is_set():
                try:
                    self._abort()
                finally:
                    self._aborted.set()

    def deliver(self) -> None:
        """Let the signal take its effect, unless it has. Returns only where the former handler does."""
        if not self._is_delivered:
            self._deliver()

    def _deliver(self) -> None:
        self._is_delivered, self._is_interrupting = True, False
        signal.signal(signal.SIGTERM, self._former)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            self._deliver()
        elif self._is_interrupting:
            self._is_interrupting = False
            if not self.is_inside:
                self._aborted.wait(ABORT_S)
                self.deliver()
        elif self.is_requested:
            self._deliver()  # the second one acts at once
        else:
            self.is_requested = True
            self._wake.put(None)

    def _watch(self) -> None:
        deadline_ns: int | None = None
        while True:
            left_s = None if deadline_ns is None or self.is_overdue else max(0, deadline_ns - monotonic_ns()) / _S
            with suppress(Empty):
                self._wake.get(timeout=AGAIN_S if self._is_interrupting or self._is_over else left_s)
            if self._is_over and not self._is_due:
                return
            if self._is_interrupting or self._is_over:
                self._interrupt_main()
                continue
            if not self.is_requested or self.is_overdue:
                continue
            if deadline_ns is None:
                deadline_ns = monotonic_ns() + int(self._grace_s * _S)
                _log.info("SIGTERM: what was begun may end within %g s; another one acts at once", self._grace_s)
            if self._is_waiting or monotonic_ns() >= deadline_ns:
                self.is_overdue = self._is_interrupting = True
                self._interrupt_main()
                self.abort()

    def _interrupt_main(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)


_installed: list[Sigterm] = []
_forking: dict[int, set[signal.Signals]] = {}
"""By thread: what it had blocked before."""


def _before_fork() -> None:
    if _installed:
        _forking[threads.current()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # type: ignore[assignment]


def _in_forking_parent() -> None:
    mask = _forking.pop(threads.current(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_forked_child() -> None:
    while _installed:
        _installed.pop()._put_back()
    _in_forking_parent()
    _forking.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_forking_parent, after_in_child=_in_forked_child)
