"""Threads and the ways to wait for one another. Rooms that need them take them from here."""

import threading
from collections.abc import Callable

Condition = threading.Condition
Event = threading.Event
Lock = threading.Lock
RLock = threading.RLock
Thread = threading.Thread


def start(name: str, target: Callable[[], None]) -> Thread:
    """A daemon thread: it never keeps a process alive that wants to end."""
    thread = Thread(name=name, target=target, daemon=True)
    thread.start()
    return thread


def is_current(thread: Thread | None) -> bool:
    return thread is threading.current_thread()


def current() -> int:
    """The number of the calling thread; a forked child's only thread keeps that of the one that forked."""
    return threading.get_ident()
