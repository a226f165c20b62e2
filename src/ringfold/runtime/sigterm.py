"""SIGTERM as a request to end cleanly: the current step may end within a grace period, then the signal takes effect.

Its effect is that of the *former handler*, the one that was installed before: by default the process ends, with the
status of a process that SIGTERM ended. The effect is only delayed.

A handler runs in the main thread, between any two of its instructions, so it must not take a lock that the main thread
may hold. It records the request, and a thread measures the time. When the grace period is over, that thread calls
`abort`, which ends every wait of the main thread, and interrupts the main thread. There are two cases:

- The main thread is inside the code that uses this class (`is_inside`). That code handles it: its waits fail, and
  `is_overdue` is the reason.
- It is in other code: then the former handler runs there.

A forked child, such as a data loader, gets the former handler back. SIGTERM is blocked until then, because the
interpreter loses a signal that arrives during a fork.
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
from ringfold.units import S

_log = logging.getLogger("ringfold.sigterm")

EXIT_STATUS = 128 + signal.SIGTERM
INTERRUPT_INTERVAL_S = 0.1
"""How often the main thread is interrupted: a signal right before a system call does not interrupt that call."""
ABORT_TIMEOUT_S = 5.0
"""How long the former handler waits until `abort` has ended, which has deadlines of its own."""


class Sigterm:
    """Handles SIGTERM while it is installed. Only the main thread may call its methods, except `abort`."""

    def __init__(self, grace_s: float, abort: Callable[[], None]) -> None:
        self._grace_s, self._abort = grace_s, abort
        self._former: object = None
        self._wake: SimpleQueue[None] = SimpleQueue()  # unlike a lock, it may be used in a signal handler
        self._once = threads.Lock()
        self._aborted = threads.Event()
        self._is_waiting = self._is_interrupting = self._is_delivered = self._is_over = False
        self.is_inside = True
        """Set by the user of this class: whether the main thread is in code that ends by itself after an abort."""
        self.is_requested = False
        self.is_overdue = False
        """The grace period is over, and `abort` was called, or is running."""

    @property
    def is_installed(self) -> bool:
        return self in _installed

    def install(self) -> bool:
        """Install the handler. Outside the main thread, or if SIGTERM is ignored or handled by other code than Python,
        nothing is changed, and False is returned.
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
        """Restore the former handler. A request that has not taken effect does so now, or a moment later."""
        if not self.is_installed:
            return
        _installed.remove(self)
        self._restore_former()
        if self._is_due:
            self.abort()
            if self._former is signal.SIG_DFL:
                signal.raise_signal(signal.SIGTERM)
            # An exception of another handler would be lost inside a generator that is being closed. So the thread sends
            # the signal again, and the handler is restored then.
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, self._handle)
        self._is_over = True
        self._wake.put(None)

    @property
    def _is_due(self) -> bool:
        return self.is_requested and not self._is_delivered

    def _restore_former(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._handle:  # else the program has installed another one since
            with suppress(ValueError):  # the garbage collector calls in another thread: see `_handle`
                signal.signal(signal.SIGTERM, self._former)  # type: ignore[arg-type]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits without a bound: a request gets no grace period."""
        self._is_waiting = True
        if self.is_installed:
            self._wake.put(None)
        try:
            yield
        finally:
            self._is_waiting = False

    def abort(self) -> None:
        """Abort the current step, once. Returns when that is done, also if another thread does it."""
        with self._once:
            if not self._aborted.is_set():
                try:
                    self._abort()
                finally:
                    self._aborted.set()

    def deliver(self) -> None:
        """Let the signal take effect, unless it has. Returns only if the former handler returns."""
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
                self._aborted.wait(ABORT_TIMEOUT_S)
                self.deliver()
        elif self.is_requested:
            self._deliver()  # the second one takes effect at once
        else:
            self.is_requested = True
            self._wake.put(None)

    def _watch(self) -> None:
        deadline_ns: int | None = None
        while True:
            left_s = None if deadline_ns is None or self.is_overdue else max(0, deadline_ns - monotonic_ns()) / S
            with suppress(Empty):
                self._wake.get(timeout=INTERRUPT_INTERVAL_S if self._is_interrupting or self._is_over else left_s)
            if self._is_over and not self._is_due:
                return
            if self._is_interrupting or self._is_over:
                self._interrupt_main()
                continue
            if not self.is_requested or self.is_overdue:
                continue
            if deadline_ns is None:
                deadline_ns = monotonic_ns() + int(self._grace_s * S)
                _log.info(
                    "SIGTERM: the current step may end within %g s; a second one takes effect at once",
                    self._grace_s,
                )
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
"""By thread: the signals that it had blocked before."""


def _before_fork() -> None:
    if _installed:
        _forking[threads.current()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # type: ignore[assignment]


def _in_forking_parent() -> None:
    mask = _forking.pop(threads.current(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_forked_child() -> None:
    while _installed:
        _installed.pop()._restore_former()
    _in_forking_parent()
    _forking.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_forking_parent, after_in_child=_in_forked_child)
