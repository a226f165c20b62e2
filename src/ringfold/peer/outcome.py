"""How an op or a call ends for the program: a value, an exception that says what to do next, or a handle to wait for
either.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from ringfold._native import OpResult
from ringfold.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    EpochChanged,
    Evicted,
    HashMismatch,
    PeerLost,
    RevisionViolation,
    RingfoldError,
    StateError,
    StateLost,
    TooFewPeers,
    TopologyFailed,
    UsageError,
)
from ringfold.peer.codes import OpStatus
from ringfold.peer.engine import Engine, decode_reason
from ringfold.runtime import threads
from ringfold.wire.diagnostics import with_you
from ringfold.wire.messages import Epoch, PeerId, Reason


class ReduceInfo(NamedTuple):
    """A committed op: which peers contributed, in which epoch it was committed, and the bytes that this peer moved.

    `contributors` are the sorted ids of the peers that the result was computed from, the same on every member. For an
    op that reduces nothing they are all members.
    """

    contributors: tuple[int, ...]
    epoch: int
    tx_bytes: int
    rx_bytes: int


class Meeting(NamedTuple):
    """The run at the moment when all its peers had called `meet`: the same numbers on all of them.

    `world_size`, `groups` and `largest_group` are those of the communicator, which change at any time; these do not.
    `pending`: peers wait to be admitted.
    """

    world_size: int
    groups: int
    largest_group: int
    pending: bool


_WAIT_LONGER = "; `ringfold status` shows what they do, and op_timeout_s (or timeout_s=) says how long to wait"


def error_of_op(result: OpResult, operation: str, ended: RingfoldError | None, me: PeerId) -> RingfoldError:
    """The exception for an op that did not succeed. `ended` is why the session is over, if it is."""
    match OpStatus(result.status):
        case OpStatus.ABORTED:
            return error_of(decode_reason(result.reason), operation, result.epoch, me)
        case OpStatus.TOO_FEW:
            return TooFewPeers(len(result.contributors))
        case OpStatus.FAILED:
            return copy_error(ended) if ended is not None else UsageError(f"{operation}: this peer has left the run")
        case OpStatus.CANCELLED:
            return CollectiveAborted(f"{operation} was cancelled here", result.epoch)
        case OpStatus.OK:
            raise AssertionError("a committed op is no error")


def error_of(reason: Reason, operation: str, epoch: Epoch, me: PeerId) -> RingfoldError:
    """The exception that a reason of the master stands for, as peer `me` reads it."""
    text = f"{operation}: {with_you(reason.text, me)}"
    match reason.kind:
        case "lost":
            return PeerLost(text, epoch, reason.peers)
        case "edge" | "cancelled":
            return EpochChanged(text, epoch, reason.peers)
        case "usage":
            return UsageError(text, reason.peers)
        case "deadline":
            return DeadlineExceeded(operation, reason.peers, reason.waited_ms, f"{text}{_WAIT_LONGER}")
        case "evicted":
            return Evicted(reason.text)
        case "state":
            return StateError(text)
        case "revision":
            return RevisionViolation(_number(reason, 0), _number(reason, 1), text)
        case "hash":
            return HashMismatch(text, reason.peers)
        case "state_lost":
            wanted = reason.checkpoint
            return StateLost(_number(reason, 0), text, None if wanted is None else (wanted.lineage, wanted.revision))
        case "topology":
            return TopologyFailed(text, reason.peers)
        case "too_few":
            return TooFewPeers(_number(reason, 0), _number(reason, 1))


def _number(reason: Reason, place: int) -> int:
    """One of the numbers of a reason; 0 if the master has left it out."""
    return reason.numbers[place] if place < len(reason.numbers) else 0


def copy_error(error: RingfoldError) -> RingfoldError:
    """A copy of the error, so that threads that raise it do not share a traceback."""
    return type(error)(*error.args)


SLICE_S = 0.1
"""A wait is cut into slices of this length, because Ctrl-C is noticed only between two of them."""


class Handle:
    """An op in flight. Usable from any thread, several times; the result is always the same."""

    def __init__(
        self,
        engine: Engine,
        op: int,
        operation: str,
        keep: object,
        finished: Callable[[OpResult], ReduceInfo | RingfoldError],
        check_process: Callable[[str], None],
        seen: Callable[[OpResult], None],
    ) -> None:
        """`finished` is called once; `seen` in every thread that sees the end of the op, whenever a call shows it."""
        self._engine = engine
        self._op = op
        self.operation = operation
        self._keep: object = keep  # the caller's arrays, until the op has ended
        self._finished: Callable[[OpResult], ReduceInfo | RingfoldError] | None = finished
        self._check_process = check_process
        self._seen = seen
        self._ended: OpResult | None = None
        self._lock = threads.Lock()
        self._waiters = 0
        self._released = False
        self._outcome: ReduceInfo | RingfoldError | None = None

    def done(self) -> bool:
        """Whether the op has ended, successfully or not. Never blocks; if True, staged arrays have their results."""
        self._check_process(self.operation)
        with self._lock:
            is_over = self._poll()
        if is_over and self._ended is not None:
            self._seen(self._ended)
        return is_over

    def wait(self, timeout: float | None = None) -> ReduceInfo:
        """Block until the op has ended; return its information, or raise its error. A timeout leaves the op running."""
        self._check_process(self.operation)
        left_s = float("inf") if timeout is None else max(0.0, timeout)
        while not self._wait_slice(min(left_s, SLICE_S)):
            left_s -= SLICE_S
            if left_s <= 0:
                waited_ms = int((timeout or 0.0) * 1_000)
                raise DeadlineExceeded("wait", (), waited_ms, f"{self.operation} still runs after {waited_ms} ms")
        return self._result()

    def __await__(self) -> Generator[Any, None, ReduceInfo]:
        """Wait inside an asyncio loop without blocking it. A cancelled await leaves the op running."""
        import asyncio

        if not self.done():
            stop = threads.Event()
            try:
                yield from asyncio.get_running_loop().run_in_executor(None, self._wait_until, stop).__await__()
            finally:
                stop.set()
        return self._result()

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
                ended = self._poll()
        return ended

    def _poll(self) -> bool:
        """Poll the engine, keep the result, and release the op when no thread waits for it inside the engine."""
        if self._outcome is None:
            result = self._engine.poll(self._op)
            if result is None:
                return False
            assert self._finished is not None
            self._ended, self._outcome = result, self._finished(result)
            self._keep = self._finished = None  # both refer to the caller's arrays
        if self._waiters == 0 and not self._released:
            self._released = True
            self._engine.release(self._op)
        return True

    def _result(self) -> ReduceInfo:
        outcome = self._outcome
        assert outcome is not None
        if self._ended is not None:
            self._seen(self._ended)
        if isinstance(outcome, RingfoldError):
            raise copy_error(outcome)
        return outcome

    def __repr__(self) -> str:
        return f"<Handle of {self.operation}, {'ended' if self._outcome is not None else 'in flight'}>"
