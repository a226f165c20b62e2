"""Steps of the core, carried out on a real store.

Several threads may carry out courses of one machine. They take turns by a lock, which is held while a step is worked
out and never while the store is asked.
"""

from contextlib import suppress
from typing import TypeVar, assert_never

from ringfold.errors import LeaseLost, RingfoldError, StoreError, StoreUnreachable
from ringfold.iteration.operations import (
    Answer,
    Beat,
    CompareAndSet,
    Delete,
    Get,
    ListKeys,
    Operation,
    Outcome,
    Pause,
    Steps,
    WaitFor,
    sent,
)
from ringfold.runtime import clock, threads
from ringfold.store.base import Lease, Store

Value = TypeVar("Value")


class Stopped(Exception):
    """The thread that carries out a course has to end."""


class Carrier:
    """Carries out courses on one store, and holds the lease that shows life there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threads.Lock()
        self._lease: Lease | None = None

    def let_go(self, timeout_s: float) -> None:
        """Give the lease up, if there is one."""
        if self._lease is not None:
            with suppress(StoreError):
                self._lease.release(timeout_s)

    def carry_out(self, course: Steps[Value], stop: threads.Event | None = None) -> Value:
        """Take the steps of a course until it is over; raises Stopped between two of them once `stop` is set."""
        answer: Answer | None = None
        while True:
            with self._lock:
                try:
                    operation = next(course) if answer is None else sent(course, answer)
                except StopIteration as over:
                    value: Value = over.value
                    return value
            outcome: Outcome
            try:
                outcome = self._asked(operation, stop)
            except RingfoldError as error:
                outcome = error
            if stop is not None and stop.is_set():
                raise Stopped
            answer = Answer(clock.monotonic_ns(), outcome)

    def _asked(self, operation: Operation, stop: threads.Event | None) -> Outcome:
        store = self._store
        match operation:
            case Get(key):
                return store.get(key)
            case ListKeys(prefix):
                return store.list(prefix)
            case CompareAndSet(key, expected, value, lasting):
                return store.compare_and_set(key, expected, value, lasting=lasting)
            case Delete(key, expected):
                store.delete(key, expected)
            case WaitFor(key, seen, timeout_s):
                return store.wait(key, seen, timeout_s)
            case Beat(key, value, ttl_s):
                self._beat(key, value, ttl_s)
            case Pause(seconds):
                (stop or threads.Event()).wait(seconds)
            case _:
                assert_never(operation)
        return None

    def _beat(self, key: str, value: bytes, ttl_s: float) -> None:
        """Hold the key by a lease, or write it anew where there are none."""
        if not self._store.has_leases:
            self._store.set(key, value, lasting=False)
            return
        if self._lease is not None:
            try:
                self._lease.renew()
                return
            except LeaseLost:
                self._lease = None
        self._lease = self._store.lease(key, value, ttl_s)
        if self._lease is None:
            # An earlier try was made after all, or this process was away for long: nobody else uses this key.
            self._store.delete(key)
            self._lease = self._store.lease(key, value, ttl_s)
        if self._lease is None:
            raise StoreUnreachable(getattr(self._store, "name", ""), "the lease that shows life could not be taken")
