"""Threads, locks, and calls with a timeout into code that has none. Only `runtime` imports `threading`."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Condition = threading.Condition
Event = threading.Event
Local = threading.local
Lock = threading.Lock
RLock = threading.RLock
Thread = threading.Thread

Value = TypeVar("Value")


def start(name: str, target: Callable[[], None], *, daemon: bool = True) -> Thread:
    """Start a thread. The process does not wait for a daemon thread when it exits."""
    thread = Thread(name=name, target=target, daemon=daemon)
    thread.start()
    return thread


def pause(seconds: float) -> None:
    """Sleep. Ctrl-C interrupts it."""
    Event().wait(seconds)


def yield_gil() -> None:
    """Let other threads of this process run first. For long work in Python beside a thread that must not wait for it:
    without this, that thread gets the GIL after 5 ms."""
    time.sleep(2e-5)  # of zero, this thread would have the GIL again before the other one has woken up


def is_current(thread: Thread | None) -> bool:
    return thread is threading.current_thread()


def is_main() -> bool:
    """Whether this is the main thread, the only one that handles signals."""
    return threading.current_thread() is threading.main_thread()


def current() -> int:
    """The identifier of the calling thread. The only thread of a forked child keeps that of the thread that forked."""
    return threading.get_ident()


def is_main_over() -> bool:
    """Whether the main thread has ended, so that the process only waits for threads that are not daemons."""
    return not threading.main_thread().is_alive()


def names() -> dict[int, str]:
    """The names of all threads, by their identifiers."""
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}


class PendingCall(Generic[Value]):
    """A call that another thread makes. `result` waits for it and may be called again after a timeout."""

    def __init__(self) -> None:
        self._outcomes: queue.SimpleQueue[tuple[Value, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def result(self, timeout_s: float) -> Value:
        """What the call returned or raised, once; TimeoutError while it still runs."""
        try:
            value, error = self._outcomes.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def run(self, function: Callable[[], Value]) -> None:
        try:
            self._outcomes.put((function(), None))
        except BaseException as error:
            self._outcomes.put((None, error))


class CallThread:
    """A daemon thread that makes one call after another, for code that may block for ever. `abandon` gives it up."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(name=name, target=self._run, daemon=True).start()

    def start(self, function: Callable[[], Value]) -> PendingCall[Value]:
        pending: PendingCall[Value] = PendingCall()
        self._work.put(lambda: pending.run(function))
        return pending

    def abandon(self) -> None:
        """Make no further calls. The thread ends when the current one returns."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
