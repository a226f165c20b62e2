"""Submitting ops: the checks before the engine gets an op, and the handling of its result.

An op that means the same in any ring is *run*: the engine retries it by itself after an abort. An op whose arguments
depend on the ring (a size, a rank, a minimum of members) is *bound* to one epoch: it is submitted while that epoch
cannot change, is never retried by the engine, and is retried here with new arguments.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from ringfold._native import Blocks, OpRequest, OpResult
from ringfold.errors import CollectiveAborted, RingfoldError, StateError, UsageError
from ringfold.peer.buffers import Spans
from ringfold.peer.codes import DTYPES, QUANTISABLE, QUANTISATIONS, REDUCE_OPS, OpKind, OpStatus, Retry
from ringfold.peer.cuda_copies import Pipeline
from ringfold.peer.outcome import Handle, ReduceInfo, error_of_op
from ringfold.peer.session import S, Session
from ringfold.peer.staging import Event, join
from ringfold.runtime import threads
from ringfold.state.shared import SharedState
from ringfold.wire.descriptor import NO_STEP
from ringfold.wire.messages import Record

OK = int(OpStatus.OK)
"""Every op is compared with it: an int compares faster than a member of an enumeration."""

Submit = Callable[[Record, bool], int]
"""Submits a bound op, given the record of the epoch that runs, and whether it is another attempt of the same call;
returns the engine's number for it."""

BINDING: ContextVar[Callable[[Record], None] | None] = ContextVar("binding", default=None)
"""Called with the record of the epoch in which an op of this thread is about to be submitted; it may raise
`TooFewPeers`. While there is one, every op of the thread is bound to its epoch."""


@contextmanager
def bound(binding: Callable[[Record], None]) -> Iterator[None]:
    """Inside, every op of this thread is bound to its epoch, and `binding` is called before it is submitted."""
    token = BINDING.set(binding)
    try:
        yield
    finally:
        BINDING.reset(token)


class Ops:
    """The ops of one session."""

    def __init__(self, session: Session, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.timeout_ns = positive_ns(timeout_s)
        self.final_tags = session.final_tags
        self.in_flight: dict[int, Handle] = {}
        """Handles by tag, until the program has seen their end."""
        self._seen = threads.Local()
        """Of each thread: which run-wide call it saw its last op after (`_calls`), and of the ops whose end it has seen
        since then the one with the highest count of registrations.

        At the same point of its program a thread has seen the end of the same ops on all peers. What other threads have
        seen by then differs from peer to peer."""
        self._calls = 0
        self._step_lock = threads.Lock()
        self.step_due: int | None = None
        """The engine's number of the step that it learns of with the next op."""
        self.use_session(session)
        self.state: SharedState | None = None
        """The shared state that was synced last: while it is torn, no op is submitted."""
        self._last_result: OpResult | None = None

    def use_session(self, session: Session) -> None:
        """Use a new session: nothing is in flight there, and nothing has returned."""
        with self._step_lock:
            self.session = session
            self.engine = session.engine
            self.step_due = None
        self.in_flight.clear()
        self.call_returned()

    def call_returned(self) -> None:
        """A run-wide call has changed members or rings: what threads have seen before does not count any more."""
        self._calls += 1

    @property
    def last(self) -> OpResult | None:
        """Of the ops whose end this thread has seen since the last run-wide call, the one with the highest count."""
        seen: tuple[int, OpResult] | None = getattr(self._seen, "last", None)
        return seen[1] if seen is not None and seen[0] == self._calls else None

    @property
    def last_info(self) -> ReduceInfo:
        """The op that returned last, in this thread or another."""
        assert self._last_result is not None
        return info_of(self._last_result)

    def run(
        self,
        operation: str,
        kind: OpKind,
        reduce_op: int,
        tag: int,
        source: Spans,
        target: Spans | None = None,
        *,
        retry: bool = True,
        timeout_s: float | None = None,
        quantisation: int = 0,
        contribute: bool = True,
    ) -> ReduceInfo:
        """An op that means the same in any ring, driven from this thread to its end."""
        is_pipelined = kind == OpKind.ALL_REDUCE and (source.cuda or (target and target.cuda)) is not None
        if is_pipelined or BINDING.get() is not None:
            submit = partial(
                self.submit,
                operation,
                kind,
                reduce_op,
                tag,
                0,
                source,
                target,
                timeout_s=timeout_s,
                quantisation=quantisation,
                contribute=contribute,
            )
            pipeline = source.pipeline(target, *self._place) if is_pipelined else None
            return self._run_submitted(operation, tag, source, target, submit, pipeline, retry=retry)
        self.check_tag(operation, tag)
        self.apply_step()
        try:
            result = self.engine.collective(
                OpRequest(
                    kind=kind,
                    reduce_op=reduce_op,
                    tag=tag,
                    source=source.arrays,
                    target=None if target is None else target.arrays,
                    dtypes=source.codes,
                    retry=Retry.ENGINE if retry else Retry.NEVER,
                    timeout_ns=self.timeout_of(tag, timeout_s),
                    quantisation=quantisation,
                    contribute=contribute,
                )
            )
        except (ValueError, TypeError) as error:
            raise refusal(operation, tag, error) from None
        info = self.returned(operation, result)
        (target or source).give_back()
        return info

    @property
    def _place(self) -> tuple[int, int]:
        """This peer's rank in the ring, and the ring's size."""
        machine = self.session.machine
        peers = [] if machine.record is None else [member.peer for member in machine.record.members]
        return (peers.index(machine.peer), len(peers)) if machine.peer in peers else (0, 1)

    def _run_submitted(
        self,
        operation: str,
        tag: int,
        source: Spans,
        target: Spans | None,
        submit: Callable[..., int],
        pipeline: Pipeline | None,
        *,
        retry: bool,
    ) -> ReduceInfo:
        """The same for an op that is bound, or whose arrays have copies that `pipeline` makes while the op runs."""
        blocks = None if pipeline is None else pipeline.blocks

        def begin(record: Record | None, again: bool) -> int:
            how = by_caller(retry) if record is not None else Retry.ENGINE if retry else Retry.NEVER
            if pipeline is not None:
                pipeline.check()
            number = submit(retry=how, again=again, blocks=blocks)
            if pipeline is not None:
                pipeline.give_up_by(partial(self.engine.cancel, number))
            return number

        self.check_tag(operation, tag)
        check = partial(self.session.check_usable, operation)
        try:
            if pipeline is None:
                source.wait_filled(check)
            else:
                pipeline.begin(check)
            if BINDING.get() is not None:
                info = self.run_bound(operation, tag, begin, retry=retry)
            else:
                info = self.returned(operation, self.engine.run_op(begin(None, False)))
        except BaseException:
            if pipeline is not None:
                pipeline.end()
                pipeline.check()
            raise
        (target or source).give_back(pipeline)
        return info

    def begin(
        self,
        operation: str,
        reduce_op: int,
        tag: int,
        source: Spans,
        target: Spans | None,
        *,
        retry: bool,
        timeout_s: float | None,
        quantisation: int = 0,
        contribute: bool = True,
    ) -> Handle:
        """An all_reduce that the engine's own thread drives."""
        self.check_tag(operation, tag)
        number = self.submit(
            operation,
            OpKind.ALL_REDUCE,
            reduce_op,
            tag,
            0,
            source,
            target,
            retry=Retry.ENGINE if retry else Retry.NEVER,
            timeout_s=timeout_s,
            quantisation=quantisation,
            contribute=contribute,
        )

        written: list[Event] = []

        def finished(result: OpResult) -> ReduceInfo | RingfoldError:
            self.in_flight.pop(tag, None)
            if result.status != OK:
                return self.error(operation, result)
            written.extend((target or source).copy_back())
            return info_of(result)

        def seen(result: OpResult) -> None:
            self._note(result)
            join(written)

        handle = self.in_flight[tag] = Handle(
            self.engine, number, operation, (source, target), finished, self.session.check_process, seen
        )
        return handle

    def run_bound(
        self,
        operation: str,
        tag: int,
        submit: Submit,
        *,
        retry: bool = False,
        fixed_size: bool = False,
    ) -> ReduceInfo:
        """An op that is bound to one epoch. With `retry` it is retried in the next one, unless its size is fixed."""
        self.check_tag(operation, tag)
        binding, again = BINDING.get(), False
        while True:
            sizes: list[int] = []

            def noted(record: Record, sizes: list[int] = sizes, again: bool = again) -> int:
                sizes.append(len(record.members))
                if binding is not None:
                    binding(record)
                return submit(record, again)

            number = self.session.submit_in_epoch(operation, noted)
            try:
                return self.returned(operation, self.engine.run_op(number))
            except CollectiveAborted:
                record = self.session.machine.record
                assert record is not None
                if not retry or (fixed_size and [len(record.members)] != sizes):
                    raise
                again = True

    def submit(
        self,
        operation: str,
        kind: OpKind,
        reduce_op: int,
        tag: int,
        root: int,
        source: Spans,
        target: Spans | None,
        *,
        retry: Retry = Retry.NEVER,
        timeout_s: float | None = None,
        quantisation: int = 0,
        again: bool = False,
        contribute: bool = True,
        blocks: Blocks | None = None,
    ) -> int:
        self.apply_step()
        try:
            return self.engine.submit(
                OpRequest(
                    kind=kind,
                    reduce_op=reduce_op,
                    tag=tag,
                    root=root,
                    source=source.arrays,
                    target=None if target is None else target.arrays,
                    dtypes=source.codes,
                    retry=retry,
                    timeout_ns=self.timeout_of(tag, timeout_s),
                    quantisation=quantisation,
                    again=again,
                    contribute=contribute,
                    blocks=blocks,
                )
            )
        except (ValueError, TypeError) as error:
            raise refusal(operation, tag, error) from None

    def poll(self, operation: str, number: int) -> ReduceInfo | RingfoldError | None:
        """The outcome of a submitted op; None while it is in flight."""
        try:
            result = self.engine.poll(number)
            return None if result is None else self.returned(operation, result)
        except RingfoldError as error:
            return error

    def set_step(self, step: int | None) -> None:
        """The program begins this step, or is outside of any: its calls are counted from 0 again.

        It counts from the next op on. A command to the engine wakes the engine's thread, which would then compete with
        what the program computes before that op.
        """
        with self._step_lock:
            self.step_due = NO_STEP if step is None else step

    def apply_step(self) -> None:
        """An op is about to be submitted. Another thread's op waits until the engine knows the step."""
        if self.step_due is None:
            return
        with self._step_lock:
            if self.step_due is not None:
                self.engine.set_step(self.step_due)
                self.step_due = None

    def returned(self, operation: str, result: OpResult) -> ReduceInfo:
        if result.status != OK:
            raise self.error(operation, result)
        self._note(result)
        return info_of(result)

    def _note(self, result: OpResult) -> None:
        """This thread has seen the end of an op."""
        if result.status != OK:
            return
        epoch, last = result.epoch, self.last
        self._last_result = result
        if last is None or (epoch, result.registrations) > (last.epoch, last.registrations):
            self._seen.last = self._calls, result

    def error(self, operation: str, result: OpResult) -> RingfoldError:
        # The session fails its ops and sets its error in one step: the lock waits for the end of that step.
        ended, me = self.session.locked(lambda machine: (self.session.error, machine.peer))
        return error_of_op(result, operation, ended, me)

    def check_tag(self, operation: str, tag: int) -> None:
        self.session.check_usable(operation)
        if tag in self.in_flight:
            raise UsageError(f"{operation}: an op with tag {tag} is in flight; wait for it, or use another tag")
        if self.state is not None and self.state.torn:
            text = f"{operation}: the shared state is only partly written, because its last sync failed"
            raise StateError(f"{text}; sync it again, or load a checkpoint")

    def check_none_in_flight(self, operation: str) -> None:
        """Only collectives may overlap. An op is in flight until the program has seen its end, on every peer alike."""
        self.session.check_process(operation)
        tags = sorted({*self.in_flight, *self.engine.tags_in_flight()})
        if tags:
            listed = ", ".join(map(str, tags))
            raise UsageError(f"{operation}: ops are in flight (tag {listed}); wait for them to end first")

    def timeout_of(self, tag: int, timeout_s: float | None) -> int:
        """The timeout of a call on this tag. With the default timeout, peers that are absent after it are evicted."""
        if timeout_s is None:
            self.final_tags.discard(tag)
            return self.timeout_ns
        timeout_ns = positive_ns(timeout_s)
        self.final_tags.add(tag)
        return timeout_ns


def info_of(result: OpResult) -> ReduceInfo:
    return ReduceInfo(result.contributors, result.epoch, result.sent_bytes, result.received_bytes)


def reduce_code(op: str) -> int:
    number = REDUCE_OPS.get(op)
    if number is None:
        raise UsageError(f"unknown op {op!r}; there are {', '.join(REDUCE_OPS)}")
    return number


def quantisation_code(quantize: str | None, op: str, codes: Iterable[int]) -> int:
    """The number of a quantisation, if an `op` over arrays of these dtypes can have one."""
    if quantize is None:
        return 0
    number = QUANTISATIONS.get(quantize)
    if number is None:
        raise UsageError(f"unknown quantize={quantize!r}; there are {', '.join(QUANTISATIONS)}, and None")
    if op == "prod":
        raise UsageError(
            f"quantize={quantize!r} does not go with op='prod': every factor's error would grow with all the others; "
            f"use sum, avg, min or max, or quantize=None"
        )
    names = {code: name for name, code in DTYPES.items()}
    if unfit := sorted({names[code] for code in codes if code not in QUANTISABLE}):
        fit = ", ".join(names[code] for code in sorted(QUANTISABLE))
        raise UsageError(
            f"quantize={quantize!r} is for {fit}, but there is an array of {' and of '.join(unfit)}: "
            f"integers are meant exactly, and float64 is chosen for its precision; reduce those with quantize=None"
        )
    return number


def by_caller(retry: bool) -> Retry:
    """How a bound op is retried, if at all."""
    return Retry.CALLER if retry else Retry.NEVER


def positive_ns(seconds: float) -> int:
    if not 0 < seconds <= 1e9:
        raise UsageError(f"a timeout is a positive number of seconds, not {seconds!r}")
    return int(seconds * S)


def refusal(operation: str, tag: object, error: Exception) -> UsageError:
    """The error for arguments that the engine refuses. A bad tag is the most likely one, so it is checked here."""
    if not isinstance(tag, int) or not 0 <= tag < 1 << 64:
        return UsageError(f"{operation}: a tag is an integer from 0 to 2**64 - 1, not {tag!r}")
    return UsageError(f"{operation}: {error}")
