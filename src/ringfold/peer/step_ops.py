"""The async ops of a step. Their results are the same on all members, in whatever order each member waits for them.

An op is *outstanding* until it has ended. With `min_world` up to 2 the engine retries an aborted op by itself, and
refuses a group of one. With a higher `min_world` an op is bound to an epoch with enough members (see `ops.py`), and an
aborted op is submitted again from here. Before a member waits for any op of the step, it submits all of its aborted
ops again, in the epoch that runs: otherwise two members that wait for different ops would wait for each other.

Whether `min_world` still holds depends on whether an op of the step was committed, and all members decide this alike.
Verdicts settle every op of an epoch before the next one begins, so members know of the same commits there. And in an
epoch that is too small no op is committed, unless one was committed before it.

An op on tensors of a device is submitted when they are in host memory, by the first call of the loop after that. So a
copy that hangs looks to the others as if this member had not called the op.
"""

from collections.abc import Callable

from ringfold.errors import CollectiveAborted, Evicted, RingfoldError, TooFewPeers, UsageError
from ringfold.peer.buffers import Buffers, Spans, in_and_out
from ringfold.peer.codes import OpKind, Retry
from ringfold.peer.ops import Ops, quantisation_code, reduce_code
from ringfold.peer.outcome import ReduceInfo
from ringfold.peer.sampling import Order
from ringfold.peer.staging import Event, join
from ringfold.runtime import threads
from ringfold.wire.messages import Record

POLL_S = 50e-6
"""How often copies from a device are looked at."""


class StepOp:
    """An `all_reduce` of a step, from its call to its end."""

    def __init__(
        self,
        buffers: Buffers,
        out: Buffers | None,
        dtype: str | None,
        *,
        op: str,
        tag: int,
        timeout_s: float | None,
        quantize: str | None,
        skip_none: bool,
        contribute: bool,
        order: Order,
    ) -> None:
        self.source, self.target = in_and_out(buffers, out, dtype, skip_none=skip_none, read=contribute, wait=False)
        self.reduce_op = reduce_code(op)
        self.tag = tag
        self.timeout_s = timeout_s
        self.contribute = contribute
        self.order = order
        self.quantisation = quantisation_code(quantize, op, self.source.codes)
        self.operation = f"all_reduce (tag {tag})"
        self.number: int | None = None
        """The engine's number of the op; None while it is not submitted."""
        self.again = False
        """Whether the next submission is another attempt of the same call."""
        self.is_alone = False
        """The last attempt found no other member."""
        self.outcome: ReduceInfo | RingfoldError | None = None
        self._written: list[Event] = []
        self.source.fill()

    @property
    def is_filled(self) -> bool:
        """Whether its arrays are in host memory, so that it can be submitted."""
        return self.source.is_filled()

    def join(self) -> None:
        """Whatever this thread's streams are given from now on follows the result."""
        join(self._written)

    def end(self, outcome: ReduceInfo | RingfoldError) -> None:
        self.outcome = outcome
        if isinstance(outcome, ReduceInfo):
            self._written = (self.target or self.source).copy_back()
        self.source, self.target = Spans([], []), None  # the caller's arrays

    def end_alone(self, info: ReduceInfo) -> None:
        """The group has one member, which is enough: its own operand, or zeros, is the result."""
        write_alone(self.source, self.target, contribute=self.contribute)
        self.end(info if self.contribute else info._replace(contributors=()))


class StepHandle:
    """An `all_reduce` of a step in flight. Only the thread that runs the loop may use it."""

    def __init__(self, op: StepOp, look: Callable[[], None], wait_for: Callable[[StepOp, float | None], None]) -> None:
        """`wait_for` returns when the op is committed, or raises its error."""
        self._op = op
        self._look = look
        self._wait_for = wait_for

    def done(self) -> bool:
        """Whether the op has ended, so that `wait` returns at once. Never blocks.

        Only `wait`, and other ops of the step, wait for peers and retry aborted ops.
        """
        if self._op.outcome is None:
            self._look()
        self._op.join()
        return self._op.outcome is not None

    def wait(self, timeout: float | None = None) -> ReduceInfo:
        """Block until the op has ended; return its information, or raise its error. A timeout leaves the op running.

        It does not count while the group is too small: all members wait for peers together, up to the loop's `wait_s`.
        """
        if not isinstance(self._op.outcome, ReduceInfo):
            self._wait_for(self._op, timeout)
        assert isinstance(self._op.outcome, ReduceInfo)
        self._op.join()
        return self._op.outcome

    def __repr__(self) -> str:
        return f"<StepHandle of {self._op.operation}, {'ended' if self._op.outcome is not None else 'in flight'}>"


class Outstanding:
    """The async ops of a step that have not ended, in the order they were begun.

    `check_size` raises `TooFewPeers` if a group of that size is too small; `committed` is called for each commit, with
    the op's place among those of the step.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        is_bound: bool,
        check_size: Callable[[int], None],
        committed: Callable[[Order, ReduceInfo], None],
    ) -> None:
        self._ops = ops
        self._is_bound = is_bound
        self._check_size = check_size
        self._committed = committed
        self._begun: list[StepOp] = []
        self.contributes = True
        """False: what this peer has computed belongs to another step."""

    @property
    def first(self) -> StepOp | None:
        return self._begun[0] if self._begun else None

    def check_tag(self, operation: str, tag: int) -> None:
        if any(op.tag == tag for op in self._begun):
            raise UsageError(f"{operation}: an op with tag {tag} is in flight; wait for it, or use another tag")

    def begin(self, op: StepOp) -> None:
        """Submit an op; if it cannot be submitted now, the next wait does it."""
        self.check_tag("all_reduce_async", op.tag)
        self._begun.append(op)
        try:
            self._ops.check_tag("all_reduce_async", op.tag)
            self.submit()
        except (TooFewPeers, Evicted):
            return
        except BaseException:
            self._begun = [one for one in self._begun if one is not op]
            raise

    @property
    def are_submitted(self) -> bool:
        """Whether `submit` has left none behind. Otherwise copies from a device still run."""
        return not self._unsubmitted

    def submit_all(self) -> None:
        """Submit all ops that the engine does not have. Waits for copies from a device."""
        self.submit()
        while not self.are_submitted:
            threads.pause(POLL_S)
            self._ops.session.check_usable("all_reduce")
            self.submit()

    def submit(self) -> None:
        """Submit the ops that the engine does not have, except those whose arrays are still being copied from a device.

        Raises `TooFewPeers` if the group is too small.
        """
        self.look()
        self.submit_rest()

    def submit_rest(self) -> None:
        """The same after a `look`."""
        if not any(op.is_filled for op in self._unsubmitted):
            return
        if self._is_bound:
            self._ops.session.submit_in_epoch("all_reduce", self.submit_in)
            return
        self._ops.session.check_usable("all_reduce")
        self._submit_filled()

    def submit_in(self, record: Record) -> None:
        """The same, in the epoch of this record, which cannot change during the call."""
        self.look()
        self._check_size(len(record.members))
        self._submit_filled()

    def look(self) -> None:
        """Poll the ops, and note the outcomes of those that have ended."""
        for op in list(self._begun):
            number = op.number
            ended = None if number is None else self._ops.poll(op.operation, number)
            if number is None or ended is None:
                continue
            self._ops.engine.release(number)
            op.number = None
            match ended:
                case TooFewPeers():
                    op.is_alone = True
                case CollectiveAborted() if self._is_bound:
                    op.again = True
                case Evicted():
                    pass  # the next submission raises it, too
                case _:
                    self._begun.remove(op)
                    op.end(ended)
                    if isinstance(ended, ReduceInfo):
                        self._committed(op.order, ended)

    def restart(self) -> None:
        """Peers were admitted: they begin with the first call of the step, and all members count from 0 again."""
        for op in self._begun:
            op.number, op.again, op.is_alone = None, False, False

    def end_alone(self, info: ReduceInfo) -> list[StepOp]:
        """The group has one member, which is enough: end the ops that found no other."""
        alone = [op for op in self._begun if op.is_alone]
        self._begun = [op for op in self._begun if not op.is_alone]
        for op in alone:
            op.contribute &= self.contributes
            op.end_alone(info)
        return alone

    def abandon(self) -> None:
        """The loop is over: release the ops; the engine forgets each when it has ended."""
        for op in self._begun:
            if op.number is not None:
                self._ops.engine.release(op.number)
            op.end(UsageError(f"{op.operation}: the loop has ended before the op; wait for it inside its step"))
        self._begun.clear()

    @property
    def _unsubmitted(self) -> list[StepOp]:
        return [op for op in self._begun if op.number is None and not op.is_alone]

    def _submit_filled(self) -> None:
        for op in self._unsubmitted:
            if not op.is_filled:
                continue
            op.number = self._ops.submit(
                op.operation,
                OpKind.ALL_REDUCE,
                op.reduce_op,
                op.tag,
                0,
                op.source,
                op.target,
                retry=Retry.CALLER if self._is_bound else Retry.ENGINE,
                timeout_s=op.timeout_s,
                quantisation=op.quantisation,
                again=op.again,
                contribute=op.contribute and self.contributes,
            )


def write_alone(source: Spans, target: Spans | None, *, contribute: bool) -> None:
    """The reduction of a group of one: its own operand, or zeros if it does not contribute."""
    result = target or source
    for given, there in zip(source.arrays, result.arrays, strict=True):
        if not contribute:
            there.reshape(-1)[:] = 0
        elif target is not None:
            there.reshape(-1)[:] = given.reshape(-1)
