"""The handle on an op that runs while the program does something else."""

from collections.abc import Callable, Generator
from typing import Any

from ringfold.errors import DeadlineExceeded, RingfoldError
from ringfold.peer.engine import Engine, OpResult
from ringfold.peer.outcome import ReduceInfo, again
from ringfold.runtime import threads

SLICE_S = 0.1
"""Waiting goes by slices of this length, because Ctrl-C is noticed between two of them only."""


class Handle:
    """An op in flight. Usable from any thread; whoever asks, and however often, gets the same answer."""

    def __init__(
        self,
        engine: Engine,
        op: int,
        operation: str,
        keep: object,
        finished: Callable[[OpResult], ReduceInfo | RingfoldError],
        check_process: Callable[[str], None],
    ) -> None:
        self._engine, self._op, self.operation = engine, op, operation
        self._keep: object = keep  # the caller's arrays, until the op has ended
        self._finished: Callable[[OpResult], ReduceInfo | RingfoldError] | None = finished
        self._check_process = check_process
        self._lock = threads.Lock()
        self._waiters = 0
        self._released = False
        self._outcome: ReduceInfo | RingfoldError | None = None

    def done(self) -> bool:
        """Whether the op has ended, well or not. Never waits; staged arrays have their results when it says so."""
        self._check_process(self.operation)
        with self._lock:
            return self._look()

    def wait(self, timeout: float | None = None) -> ReduceInfo:
        """Block until the op has ended; its information, or its error. A wait that ends early leaves the op running."""
        self._check_process(self.operation)
        left_s = float("inf") if timeout is None else max(0.0, timeout)
        while not self._wait_slice(min(left_s, SLICE_S)):
            left_s -= SLICE_S
            if left_s <= 0:
                waited_ms = int((timeout or 0.0) * 1_000)
                raise DeadlineExceeded("wait", (), waited_ms, f"{self.operation} still runs after {waited_ms} ms")
        return self._answer()

    def __await__(self) -> Generator[Any, None, ReduceInfo]:
        """Wait inside an asyncio loop without blocking it. A cancelled await leaves the op running."""
        import asyncio

        if not self.done():
            stop = threads.Event()
            try:
                yield from asyncio.get_running_loop().run_in_executor(None, self._wait_until, stop).__await__()
            finally:
                stop.set()
        return self._answer()

    def _wait_until(self, stop: threads.Event) -> None:
        while not stop.is_set() and not self._wait_slice(SLICE_S):
            pass

    def _wait_slice(self, seconds: float) -> bool:
        with self._lock:
            if self._outcome is not None:
                return True
            self._waiters += 1  # keeps the op known to the engine while this thread is inside it
        try:
            self._engine.wait_op(self._op, seconds)
        finally:
            with self._lock:
                self._waiters -= 1
                ended = self._look()
        return ended

    def _look(self) -> bool:
        """Ask the engine once, keep the answer, and let the op go when nobody is inside the engine for it."""
        if self._outcome is None:
            result = self._engine.poll(self._op)
            if result is None:
                return False
            assert self._finished is not None
            self._outcome = self._finished(result)
            self._keep = self._finished = None  # both refer to the caller's arrays
        if self._waiters == 0 and not self._released:
            self._released = True
            self._engine.release(self._op)
        return True

    def _answer(self) -> ReduceInfo:
        outcome = self._outcome
        assert outcome is not None
        if isinstance(outcome, RingfoldError):
            raise again(outcome)
        return outcome

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}, {'ended' if self._outcome is not None else 'in flight'}>"
