"""Threads and the ways to wait for one another. Rooms that need them take them from here."""

import threading
from collections.abc import Callable

Condition = threading.Condition
Event = threading.Event
Lock = threading.Lock
RLock = threading.RLock
Thread = threading.Thread


def start(name: str, target: Callable[[], None], *, daemon: bool = True) -> Thread:
    """A daemon thread never keeps a process alive that wants to end; for another one the process waits."""
    thread = Thread(name=name, target=target, daemon=daemon)
    thread.start()
    return thread


def is_current(thread: Thread | None) -> bool:
    return thread is threading.current_thread()


def is_main() -> bool:
    """Whether this is the main thread, in which alone signals are handled."""
    return threading.current_thread() is threading.main_thread()


def current() -> int:
    """The number of the calling thread; a forked child's only thread keeps that of the one that forked."""
    return threading.get_ident()


def is_main_over() -> bool:
    """Whether the program has run to its end, and the process only waits for threads that are no daemons."""
    return not threading.main_thread().is_alive()
