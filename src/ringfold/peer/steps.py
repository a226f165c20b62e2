"""The training loop that users write: admission, waiting for peers, sync, checkpoints and retry, in numbered steps.

All decisions here must be the same on all members, although each member learns of an epoch change at another moment.
These rules ensure that:

1. A step begins with one question: are peers pending? A peer that was just admitted skips the question. After an
   admission all members, old and new, do the same: wait until the group is large enough, then sync.
2. What runs in a group that may be too small is bound to an epoch, and uses the size of *that* epoch: an op is
   submitted in it, a sync is voted for in it. So a member that did not see the group shrink is refused, and calls the
   same update as the members that saw it.
3. Whether a step needs a sync is decided by what all members share: admissions since the last sync, the epochs in which
   the ops of the last steps were committed (another epoch means an abort, or a lost peer), and the step's number.

A step's number is the revision of the shared state, so a newcomer learns both in the sync. If a counter gives the
numbers (see `counting.py`), the group may have missed some: then all members set the revision to the number they got.

Waiting inside a step: the group may be too small only for the first op of a step. A newcomer that is admitted then
begins at the first op, too. Later in the step it could not follow, so the survivors finish the step without waiting.

A peer that is evicted joins again by itself, as a newcomer: between steps, and in the first op of a step. There it gets
the state of the group's present step, and goes on with that one: it enters the op without a contribution, because its
own was computed for another step. In a later op of a step it could not follow, and the eviction is raised. It does not
join again after an eviction on request, nor after an eviction for its calls (`CallMismatch`), which it would repeat.

SIGTERM is checked between steps, and before the loop waits for peers (`runtime/sigterm.py` does the rest). The loop
then saves a state that no step has begun to change: that of a step boundary, or of a step in which no op has committed;
a newcomer would get the same. It is not compared with the other members' state, because the loop does not wait for
them. So a master that still knows the last sync may request an older checkpoint instead (`sync/resume.py`).

If the state has a sampler, `sampling.py` says whose share is which, and what was consumed at the end of a step.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypedDict, TypeVar

from ringfold.data.sampler import Share
from ringfold.errors import (
    DeadlineExceeded,
    Evicted,
    RevisionViolation,
    RingfoldError,
    StateError,
    StateLost,
    TooFewPeers,
    UsageError,
)
from ringfold.peer.buffers import ArrayLike, Buffers, in_and_out, result_alone
from ringfold.peer.counting import TAG, Counter, Counting, NotYet
from ringfold.peer.ops import Ops, bound
from ringfold.peer.outcome import SLICE_S, ReduceInfo, copy_error
from ringfold.peer.recording import Recording
from ringfold.peer.sampling import Order, Sampling, sampler_of
from ringfold.peer.staging import Array
from ringfold.peer.step_ops import POLL_S, Outstanding, StepHandle, StepOp, write_alone
from ringfold.peer.sync.resume import CheckpointStore, Resuming, check_used
from ringfold.peer.sync.sync_call import (
    OnDivergence,
    SyncInfo,
    check_diverged,
    check_on_divergence,
    check_unchanged,
    sync_state,
)
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.sigterm import EXIT_STATUS, Sigterm
from ringfold.state.checkpoint import Checkpoints
from ringfold.state.shared import SharedState, lineage_of, note_saved
from ringfold.units import MS
from ringfold.wire.events import CheckpointSaved
from ringfold.wire.messages import Record

_log = logging.getLogger("ringfold.steps")

MAX_REJOINS = 3
"""How often a peer joins again without a finished step in between: the cause of the evictions will not go away."""
T = TypeVar("T")


class StepParts(TypedDict):
    """What a loop has from its communicator; a simulation replaces some of it."""

    sigterm_grace_s: float | None
    sigterm_type: Callable[[float, Callable[[], None]], Sigterm]
    sampling_type: type[Sampling]
    recording: Recording | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The arguments of `Communicator.steps`."""

    until: int | None = None
    passes: int | None = None
    """How many passes over the data of the state's sampler the loop makes."""
    min_world: int = 1
    wait_s: float = 600.0
    check_every: int = 100
    """A sync at least every so many steps, even if no peer was admitted or lost."""
    checkpoint: str | Path | CheckpointStore | None = None
    every: int = 100
    keep: int = 3
    expect_unchanged: bool = False
    rollback: bool = False
    counter: Counter | None = None
    """What numbers the steps, if it is not the revision of the state."""
    sigterm_grace_s: float | None = None
    """How long a step may still take after SIGTERM; None: the signal is left alone."""
    sigterm_type: Callable[[float, Callable[[], None]], Sigterm] = Sigterm
    """How the signal is handled; a simulation has a class of its own."""
    on_divergence: OnDivergence = "repair"
    rejoin: bool = True
    """Whether a peer that is evicted joins again. With a counter it does not: only one peer speaks for a group."""
    sampling_type: type[Sampling] = Sampling
    """How samples are given out; a simulation plants bugs here."""
    recording: Recording | None = None
    """What the steps are recorded in."""

    def __post_init__(self) -> None:
        for name in ("min_world", "check_every", "every", "keep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.passes is not None and self.counter is not None:
            raise UsageError("a loop with a counter ends with the other ranks: give it until=, not passes=")
        check_on_divergence(self.on_divergence)


class Run(Protocol):
    """The part of a communicator that the loop calls."""

    @property
    def peer_id(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def spans_groups(self) -> bool: ...
    @property
    def has_newcomers(self) -> bool: ...
    def are_peers_pending(self) -> bool: ...
    def update_topology(self, min_world: int = 0, timeout_s: float | None = None) -> None: ...
    def _admit(self, timeout_s: float) -> None: ...
    def all_reduce(
        self,
        buffers: Buffers,
        *,
        op: str = "sum",
        tag: int = 0,
        out: Buffers | None = None,
        retry: bool = True,
        dtype: str | None = None,
        timeout_s: float | None = None,
        quantize: str | None = None,
        skip_none: bool = False,
        contribute: bool = True,
    ) -> ReduceInfo: ...
    def broadcast(
        self,
        buffers: Buffers,
        *,
        root: int = 0,
        tag: int = 0,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> ReduceInfo: ...
    def all_gather(
        self,
        array: ArrayLike,
        *,
        out: ArrayLike | None = None,
        tag: int = 0,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> Array: ...
    def reduce_scatter(
        self,
        array: ArrayLike,
        *,
        op: str = "sum",
        out: ArrayLike | None = None,
        tag: int = 0,
        dtype: str | None = None,
        timeout_s: float | None = None,
        contribute: bool = True,
    ) -> Array: ...
    def barrier(self, *, tag: int = 0, timeout_s: float | None = None) -> ReduceInfo: ...
    def rejoin(self) -> None: ...
    def leave(self) -> None: ...
    def _set_step(self, step: "Step | None") -> None: ...


def steps(run: Run, ops: Ops, state: SharedState | None, settings: StepSettings) -> Iterator["Step"]:
    """The steps of `Communicator.steps`; the arguments are checked at the call, not at the first step."""
    if state is None:
        if settings.checkpoint is not None:
            raise UsageError("a checkpoint needs a shared state: steps(state, checkpoint=...)")
        state = SharedState._without_arrays()
    if settings.passes is not None and sampler_of(state) is None:
        raise UsageError("passes= needs a sampler in the shared state: SharedState(..., data=Sampler(size))")
    checkpoints = _store(settings)
    if checkpoints is not None:
        note_saved(state)
        newest = max(checkpoints.revisions(), default=0)
        # A program that begins a second loop with a newer state must not go back to its checkpoint.
        if state.torn or newest >= state.revision:
            revision = checkpoints.load_newest(state)
            if revision is not None:
                _log.info("revision %d was loaded from %s", revision, settings.checkpoint)
    return Loop(run, ops, state, settings, checkpoints).steps()


def _store(settings: StepSettings) -> CheckpointStore | None:
    if isinstance(settings.checkpoint, str | Path):
        return Checkpoints(settings.checkpoint, keep=settings.keep)
    return settings.checkpoint


class Step:
    """One step of the run. `number` is the same on all peers; `sync` describes the sync before it.

    `missed` is how many numbers of a counter passed without this group since its last step. If this peer is evicted in
    the step's first op and joins again there, all three become those of the group's present step.
    """

    __slots__ = ("_loop", "missed", "number", "sync")

    def __init__(self, number: int, sync: SyncInfo, loop: "Loop", missed: int = 0) -> None:
        self.number = number
        self.sync = sync
        self.missed = missed
        self._loop = loop

    def log(self, **values: float) -> None:
        """Show values of this step, such as a loss, in `ringfold top`, the dashboard and the run's record.

        Numbers that are not finite are shown as such. It is cheap: nothing is sent for it but the next heartbeat.
        """
        self._loop.log(values)

    def shard(self, n: int | None = None) -> Share:
        """This peer's samples of this step, by the `Sampler` in the shared state: `n`, or its `batch_size`, or fewer.

        Call it before the step's first op. They are consumed if this peer contributes to the last op of the step that
        reduces (`all_reduce` or `reduce_scatter`), and go back to the queue otherwise. If there are none for this peer,
        at the end of a pass, the ops of the step contribute nothing.
        """
        return self._loop.shard(n)

    def predicted_shards(self, steps: int) -> list[Share]:
        """This peer's shares of the next steps, if no member comes or goes, and all contribute: for prefetching.

        A share that was predicted is the real one if both are equal; otherwise, what was loaded for it is of no use.
        """
        return self._loop.predicted_shards(steps)

    def all_reduce(
        self,
        buffers: Buffers,
        *,
        op: str = "sum",
        tag: int = 0,
        out: Buffers | None = None,
        dtype: str | None = None,
        timeout_s: float | None = None,
        quantize: str | None = None,
        skip_none: bool = False,
        contribute: bool = True,
    ) -> ReduceInfo:
        """`Communicator.all_reduce`; the first op of a step with at least `min_world` peers: with fewer, the attempt is
        discarded and the op waits for peers. Once it has committed, the others go on with those that are left, even
        with one: `ReduceInfo.contributors` has them.

        A peer that is alone then, or with `min_world=1`, gets its own buffers back, or zeros if it contributes nothing.
        """
        return self._loop.all_reduce(
            self, _Call(buffers, op, tag, out, dtype, timeout_s, quantize, skip_none, contribute)
        )

    def all_reduce_async(
        self,
        buffers: Buffers,
        *,
        op: str = "sum",
        tag: int = 0,
        out: Buffers | None = None,
        dtype: str | None = None,
        timeout_s: float | None = None,
        quantize: str | None = None,
        skip_none: bool = False,
        contribute: bool = True,
    ) -> StepHandle:
        """Begin an `all_reduce` of this step and return a handle on it. One op per tag may be in flight, and many tags.

        Its `wait` waits for peers and retries as `all_reduce` does. Members may wait for their handles in any order.
        While no op of the step is committed, all ops in flight count as its first: if the group falls below
        `min_world`, they are discarded and run together when it is large enough again. At the end of the step the loop
        waits for the handles that the program has not waited for.
        """
        begun = StepOp(
            buffers,
            out,
            dtype,
            op=op,
            tag=tag,
            timeout_s=timeout_s,
            quantize=quantize,
            skip_none=skip_none,
            contribute=contribute,
            order=self._loop.called("all_reduce_async", contribute=contribute),
        )
        return self._loop.all_reduce_async(self, begun)

    @property
    def _is_here(self) -> bool:
        """Whether the calling thread is the one that runs the loop."""
        return self._loop.thread == threads.current()

    def _call_for_buckets(self, *, contribute: bool) -> Order:
        """Several ops, the buckets of a backward pass, are about to begin as one call."""
        return self._loop.called("backward", contribute=contribute)

    def _begin_bucket(
        self, call: Order, number: int, arrays: Sequence[ArrayLike], *, tag: int, quantize: str | None, contribute: bool
    ) -> StepHandle:
        """Begin one of these, averaged. Which one is the last op of the step does not depend on who begins when."""
        begun = StepOp(
            arrays,
            None,
            None,
            op="avg",
            tag=tag,
            timeout_s=None,
            quantize=quantize,
            skip_none=False,
            contribute=contribute,
            order=(call[0], number),
        )
        return self._loop.all_reduce_async(self, begun)

    def _reduce_bucket(
        self, call: Order, number: int, array: ArrayLike, *, tag: int, quantize: str | None, contribute: bool
    ) -> ReduceInfo:
        """The same for one that nothing overlaps with: it is driven by this thread, to its end."""
        order = (call[0], number)
        return self._loop.all_reduce(self, _Call(array, "avg", tag, quantize=quantize, contribute=contribute), order)

    def broadcast(
        self,
        buffers: Buffers,
        *,
        root: int = 0,
        tag: int = 0,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> ReduceInfo:
        """`Communicator.broadcast`, with retries and waits as in `all_reduce`."""
        run = self._loop._run
        return self._loop.collective(
            self,
            lambda: run.broadcast(buffers, root=root, tag=tag, dtype=dtype, timeout_s=timeout_s),
            self._loop.info_alone,
        )

    def all_gather(
        self,
        array: ArrayLike,
        *,
        out: ArrayLike | None = None,
        tag: int = 0,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """`Communicator.all_gather`, with retries and waits as in `all_reduce`."""
        run = self._loop._run
        return self._loop.collective(
            self,
            lambda: run.all_gather(array, out=out, tag=tag, dtype=dtype, timeout_s=timeout_s),
            lambda: result_alone(array, out, dtype, gathers=True),
        )

    def reduce_scatter(
        self,
        array: ArrayLike,
        *,
        op: str = "sum",
        out: ArrayLike | None = None,
        tag: int = 0,
        dtype: str | None = None,
        timeout_s: float | None = None,
        contribute: bool = True,
    ) -> Array:
        """`Communicator.reduce_scatter`, with retries and waits as in `all_reduce`."""
        loop = self._loop
        return loop.collective(
            self,
            lambda: loop._run.reduce_scatter(
                array,
                op=op,
                out=out,
                tag=tag,
                dtype=dtype,
                timeout_s=timeout_s,
                contribute=contribute and loop.contributes,
            ),
            lambda: result_alone(array, out, dtype, gathers=False, contribute=contribute and loop.contributes),
            order=loop.called("reduce_scatter", contribute=contribute),
            contribute=contribute,
        )

    def barrier(self, *, tag: int = 0, timeout_s: float | None = None) -> ReduceInfo:
        """`Communicator.barrier`, with retries and waits as in `all_reduce`."""
        run = self._loop._run
        return self._loop.collective(self, lambda: run.barrier(tag=tag, timeout_s=timeout_s), self._loop.info_alone)

    def __index__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<Step {self.number}>"


class Loop:
    """The loop of one program, and the state that it shares with its steps."""

    def __init__(
        self, run: Run, ops: Ops, state: SharedState, settings: StepSettings, checkpoints: CheckpointStore | None
    ) -> None:
        self._run = run
        self._ops = ops
        self._state = state
        self._settings = settings
        self._checkpoints = checkpoints
        self._resuming = Resuming(checkpoints)
        counter = settings.counter
        self._counting = None if counter is None else Counting(counter, settings.until)
        self._min_world = settings.min_world
        self._step: int | None = None  # the present step
        self._reduced_in: int | None = None  # the step in which an op has committed
        self._epoch: int | None = None  # the epoch of the ops since the last sync
        self._epoch_changed = False  # since the last sync
        self._is_member = False  # whether this peer has taken part in a sync
        self._rejoins = 0  # since the last finished step
        self._sigterm = settings.sigterm_type(settings.sigterm_grace_s or 0.0, self._leave)
        self._committed = 0  # how many ops of this peer were committed when the step began
        self._outstanding = Outstanding(
            ops, is_bound=self._is_bound, check_size=self._check_size, committed=self._note_async_commit
        )
        self._recording = settings.recording
        self._is_cut_off = False  # whether this peer left the run during a step that the program has finished
        self._sampling = settings.sampling_type(state, lambda: run.peer_id, self._members_of)
        self.thread = threads.current()
        """The thread that runs the loop. What it has seen decides about votes, so it must see the end of the ops."""

    def steps(self) -> Iterator[Step]:
        if self._settings.sigterm_grace_s is not None:
            self._sigterm.install()
        # A peer that leaves before the end of the loop has not finished the run.
        self._ops.session.stopped = self._has_end
        try:
            yield from self._steps()
            self._ops.session.stopped = False
            self._end_counting(is_over=True)
        except RingfoldError as error:
            if not self._is_stopped_by(error):
                raise
            self._stop()
        finally:
            self._run._set_step(None)
            self._ops.set_step(None)
            self._outstanding.abandon()
            if self._recording is not None:
                self._recording.abandon_step()
            self._end_counting(is_over=False)
            self._sigterm.uninstall()

    def _end_counting(self, *, is_over: bool) -> None:
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.end(leave=is_over or self._run.group_size == 1)

    def _steps(self) -> Iterator[Step]:
        state, until = self._state, self._settings.until
        while not self._is_at_end:
            since_ns = monotonic_ns()
            step = self._with_rejoin(self._begin)
            if step is None:
                # The run is beyond this loop's end. It goes on without this newcomer: no member would join a last sync.
                self._save()
                return
            if until is not None and step.number >= until:
                break  # the other ranks have finished without this group
            self._enter(step)
            self._sigterm.is_inside = False
            self._check_sigterm()
            self._outstanding.contributes = True
            self._run._set_step(step)
            self._sampling.begin()
            if self._recording is not None:
                sync_ns = monotonic_ns() - since_ns
                self._recording.begin_step(step.number, self._run.epoch, self._run.group_size, sync_ns)
            self.thread = threads.current()
            yield step
            self._run._set_step(None)
            self._wait_for_rest(step)
            if self._recording is not None:
                self._recording.end_step()
            self._sigterm.is_inside, self._is_cut_off = True, self._sigterm.is_overdue
            number = step.number
            if state.revision not in (number, number + 1):
                raise RevisionViolation(number + 1, state.revision)
            self._finish(number)
            self._check_sigterm()
        if self._checkpoints is not None or len(state):
            self._prepare(last=True)  # else a divergence in the last steps would not be noticed
        if until is not None and state.revision == until:
            # The last step is over when all ranks have finished it: no rank waits for a peer that leaves then.
            while self._count(last=True) is None:
                self._check_sigterm()
                if self._admit():
                    self._prepare(last=True)

    def _begin(self) -> Step | None:
        """Get to the group's next step; None if the run is beyond the end of this loop."""
        self._admit()
        info = self._prepare()
        due = self._state.revision
        if self._is_at_end:
            return None
        while (number := self._count()) is None:
            self._check_sigterm()
            if self._admit():
                info = self._prepare()
        return Step(number, info, self, number - due)

    def _enter(self, step: Step) -> None:
        self._state.revision = self._step = step.number
        self._ops.set_step(step.number)
        self._note_committed()

    @property
    def _has_end(self) -> bool:
        return self._settings.until is not None or self._settings.passes is not None

    @property
    def _is_at_end(self) -> bool:
        """Decided by the state, which is the same on all members."""
        until, passes, sampler = self._settings.until, self._settings.passes, self._sampling.sampler
        are_done = passes is not None and sampler is not None and sampler.passes_done >= passes
        return are_done or (until is not None and self._state.revision >= until)

    def _finish(self, number: int) -> None:
        self._sampling.finish()
        self._state.revision = number + 1
        self._rejoins = 0
        if self._counting is not None:
            self._counting.finish()

    # Eviction

    def _with_rejoin(self, do: Callable[[], T]) -> T:
        """Call `do`; each time that this peer is evicted in it, join again and call it again."""
        while True:
            try:
                return do()
            except Evicted as error:
                self._rejoin(error)

    def _rejoin(self, error: Evicted) -> None:
        may_rejoin = self._settings.rejoin and self._counting is None and not error.on_request
        if not may_rejoin or self._rejoins >= MAX_REJOINS:
            raise error
        self._check_sigterm()
        self._rejoins += 1
        _log.warning("joining again, as a newcomer (attempt %d of %d): %s", self._rejoins, MAX_REJOINS, error)
        with self._sigterm.waiting():
            self._run.rejoin()
        self._ops.session.stopped = self._has_end
        self._is_member = False
        self._epoch_changed = False
        self._epoch = None
        self._reduced_in = None

    def _rejoin_in(self, step: Step, error: Evicted) -> None:
        """Join again in the first op of a step, and make that step the group's present one."""
        self._rejoin(error)
        now = self._with_rejoin(self._begin)
        until = self._settings.until
        if now is None or (until is not None and now.number >= until):
            raise Evicted(f"{error.reason}. In the meantime the others have finished the run", error.who)
        if now.number != step.number:
            _log.warning("went on from step %d to the group's step %d", step.number, now.number)
        step.number, step.sync, step.missed = now.number, now.sync, now.missed
        self._enter(step)

    # SIGTERM

    def _check_sigterm(self) -> None:
        if self._sigterm.is_requested:
            raise _Stopped

    def _is_stopped_by(self, error: RingfoldError) -> bool:
        """Whether an error of the loop's own calls means that SIGTERM has ended it. A `StateError` is raised."""
        return isinstance(error, _Stopped) or (self._sigterm.is_overdue and not isinstance(error, StateError))

    def _leave(self) -> None:
        self._ops.session.stopped = True
        self._run.leave()

    def _stop(self, step: int | None = None) -> None:
        """Leave, so that no peer waits for this one; save a consistent state; then the signal takes effect."""
        self._sigterm.is_inside = True
        _log.warning("SIGTERM: this peer leaves the run at step %d", self._state.revision)
        self._sigterm.abort()
        self._end_counting(is_over=False)
        is_boundary = not self._is_cut_off
        if step is not None:
            is_boundary = step == self._state.revision and not self._has_committed()
        if self._is_member and is_boundary:
            self._save()
        self._sigterm.deliver()

    def _note_committed(self) -> None:
        if self._checkpoints is not None and self._sigterm.is_installed:
            self._committed = self._ops.engine.stats()["committed"]

    def _has_committed(self) -> bool:
        """Whether an op was committed since the step began: from then on the program may have changed the state."""
        return self._checkpoints is None or self._ops.engine.stats()["committed"] != self._committed

    # Ops

    def shard(self, n: int | None) -> Share:
        share = self._sampling.take(n)
        self._outstanding.contributes &= self._sampling.contributes
        return share

    def predicted_shards(self, steps: int) -> list[Share]:
        return self._sampling.predict(steps)

    def called(self, operation: str, *, contribute: bool) -> Order:
        """The program calls an op that reduces: its place among those of the step."""
        return self._sampling.called(operation, contribute=contribute and self.contributes)

    def all_reduce(self, step: Step, call: "_Call", order: Order | None = None) -> ReduceInfo:
        """`order` is that of a call that `called` knows already."""
        if order is None:
            order = self.called("all_reduce", contribute=call.contribute)
        attempt, alone = (lambda: self._reduce(call)), (lambda: self._reduce_alone(call))
        return self.collective(step, attempt, alone, order=order, contribute=call.contribute)

    def collective(
        self,
        step: Step,
        attempt: Callable[[], T],
        alone: Callable[[], T],
        *,
        order: Order | None = None,
        contribute: bool = True,
    ) -> T:
        """An op of a step. `alone` makes its result in a group of one, if that is enough.

        `order` is the place of an op that reduces, `contribute` whether the program wants this peer to contribute.
        """

        self._note_wait()

        def do() -> T:
            self._outstanding.submit_all()
            with bound(self._outstanding.submit_in) if self._is_bound else nullcontext():
                result = attempt()
            info = result if isinstance(result, ReduceInfo) else self._ops.last_info
            self._note_commit(info.epoch)
            if order is not None:
                self._sampling.committed(order, info.contributors, info.epoch)
            return result

        def do_alone() -> T:
            result = alone()
            if order is not None:
                me = self._run.peer_id
                self._sampling.committed_alone(order, (me,) if contribute and self.contributes else ())
            return result

        return self._guarded(step, lambda: self._among_enough(step, do, do_alone))

    def all_reduce_async(self, step: Step, op: StepOp) -> StepHandle:
        self._guarded(step, lambda: self._outstanding.begin(op))
        return StepHandle(op, self._outstanding.look, lambda op, timeout: self._wait(step, op, timeout))

    def log(self, values: Mapping[str, float]) -> None:
        if self._recording is not None:
            self._recording.log(values)

    def _note_wait(self) -> None:
        if self._recording is not None:
            self._recording.wait_begins()

    def _guarded(self, step: Step, do: Callable[[], T]) -> T:
        """Call `do`, unless SIGTERM ends the loop."""
        self._check_not_torn()
        self._sigterm.is_inside = True
        try:
            return do()
        except RingfoldError as error:
            if not self._is_stopped_by(error):
                raise
            self._stop(step.number)
            # The previous handler lets the program go on. This step cannot.
            raise SystemExit(EXIT_STATUS) from None
        finally:
            self._sigterm.is_inside = False

    def _among_enough(self, step: Step, do: Callable[[], T], alone: Callable[[], T]) -> T:
        """Call `do` again each time that the group was too small for it, or that this peer has joined again.

        The first op of a step waits for peers. Members that have committed it go on with those that are left.
        """
        is_too_small = False
        while True:
            try:
                if is_too_small:
                    self._prepare()
                    self._count()  # newcomers begin with this op, too
                    self._note_committed()
                    self._outstanding.restart()
                    self._outstanding.contributes &= self._sampling.contributes
                    is_too_small = False
                return do()
            except TooFewPeers:
                self._outstanding.look()
                if self._needed == 1:
                    self._committed = -1  # counts as committed
                    return alone()
                is_too_small = True
            except Evicted as error:
                self._outstanding.look()
                if self._reduced_in == step.number:
                    raise
                self._rejoin_in(step, error)
                self._outstanding.restart()
                # What this peer has computed belongs to another step.
                self._outstanding.contributes = is_too_small = False

    def _wait(self, step: Step, op: StepOp, timeout: float | None = None) -> None:
        self._note_wait()
        left_s = float("inf") if timeout is None else max(0.0, timeout)

        def do() -> None:
            nonlocal left_s
            while True:
                self._outstanding.look()
                if op.outcome is None:
                    self._outstanding.submit_rest()
                if isinstance(op.outcome, RingfoldError):
                    raise copy_error(op.outcome)
                if op.outcome is not None:
                    return
                if op.is_alone:
                    raise TooFewPeers(1)
                if left_s <= 0:
                    waited_ms = int((timeout or 0.0) * 1_000)
                    text = f"{op.operation} still runs after {waited_ms} ms"
                    raise DeadlineExceeded("wait", (), waited_ms, text)
                seconds = min(left_s, SLICE_S if self._outstanding.are_submitted else POLL_S)
                if op.number is not None:
                    self._ops.engine.wait_op(op.number, seconds)
                else:
                    self._ops.session.check_usable("all_reduce")
                    threads.pause(seconds)
                left_s -= seconds

        def alone() -> None:
            for ended in self._outstanding.end_alone(self.info_alone()):
                assert isinstance(ended.outcome, ReduceInfo)
                self._sampling.committed_alone(ended.order, ended.outcome.contributors)

        self._guarded(step, lambda: self._among_enough(step, do, alone))

    def _wait_for_rest(self, step: Step) -> None:
        """The step is over when all of its ops are; the first error is raised."""
        while (op := self._outstanding.first) is not None:
            self._wait(step, op)

    @property
    def contributes(self) -> bool:
        """Whether what this peer has computed belongs to this step."""
        return self._outstanding.contributes

    @property
    def _is_bound(self) -> bool:
        # The engine refuses a group of one by the epoch's size, so up to two it may retry by itself.
        return self._min_world > 2

    @property
    def _needed(self) -> int:
        """How many members the group must have for an op of this step."""
        return 1 if self._reduced_in == self._step else self._min_world

    def _check_size(self, size: int) -> None:
        if size < self._needed:
            raise TooFewPeers(size, self._needed)

    def _note_commit(self, epoch: int) -> None:
        self._reduced_in = self._step
        self._note(epoch)

    def _note_async_commit(self, order: Order, info: ReduceInfo) -> None:
        self._note_commit(info.epoch)
        self._sampling.committed(order, info.contributors, info.epoch)

    def _members_of(self, epoch: int) -> tuple[int, ...]:
        return self._ops.session.locked(lambda machine: machine.facts[epoch].members)

    def info_alone(self) -> ReduceInfo:
        return ReduceInfo((self._run.peer_id,), self._run.epoch, 0, 0)

    def _reduce_alone(self, call: "_Call") -> ReduceInfo:
        contribute = call.contribute and self.contributes
        if call.out is not None or not contribute:
            source, target = in_and_out(call.buffers, call.out, call.dtype, skip_none=call.skip_none)
            write_alone(source, target, contribute=contribute)
            (target or source).give_back()
        info = self.info_alone()
        return info if contribute else info._replace(contributors=())

    def _reduce(self, call: "_Call") -> ReduceInfo:
        return self._run.all_reduce(
            call.buffers,
            op=call.op,
            tag=call.tag,
            out=call.out,
            dtype=call.dtype,
            timeout_s=call.timeout_s,
            quantize=call.quantize,
            skip_none=call.skip_none,
            contribute=call.contribute and self.contributes,
        )

    def _note(self, epoch: int) -> None:
        self._epoch_changed |= self._epoch not in (None, epoch)
        self._epoch = epoch

    def _count(self, *, last: bool = False) -> int | None:
        """The number of the next step, or of the present one; None if it is not agreed yet.

        Without a counter it is the revision.
        """
        counting, run = self._counting, self._run
        if counting is None:
            return self._state.revision
        needed = 1 if last else self._min_world

        def check_size(record: Record) -> None:
            if len(record.members) < needed:
                raise TooFewPeers(len(record.members), needed)

        while True:
            self._ops.set_step(self._state.revision)
            facts = counting.facts(run.peer_id, self._state.revision - 1)
            timeout_s = counting.wait_s + self._ops.timeout_s
            try:
                with bound(check_size) if needed > 2 else nullcontext():
                    self._note(run.all_reduce(facts, op="max", tag=TAG, timeout_s=timeout_s).epoch)
            except TooFewPeers:
                if needed > 1:
                    self._prepare()
                    continue
                # Alone, this peer's facts are all there are.
            match counting.judge(run.peer_id, facts):
                case int(number):
                    return number
                case NotYet():
                    return None

    # Admission, waiting, sync

    def _admit(self) -> bool:
        """Rule 1: vote once, and admit. Returns whether there was a vote."""
        run = self._run
        # With several groups the question costs as much as the vote, and members that wait for peers are in a vote.
        if not run.has_newcomers and (run.spans_groups or run.are_peers_pending()):
            run._admit(timeout_s=max(self._settings.wait_s, self._ops.timeout_s))
            return True
        return False

    def _prepare(self, *, last: bool = False) -> SyncInfo:
        """Wait until the group is large enough, sync if rule 3 requires it, and save if it is due."""
        while True:
            if not last:
                self._wait_for_peers()
            number = self._state.revision
            is_due = last or (self._checkpoints is not None and number % self._settings.every == 0)
            if not (
                self._run.has_newcomers or self._epoch_changed or number % self._settings.check_every == 0 or is_due
            ):
                self._check_not_torn()
                return SyncInfo(number, checked=False, participants=self._sampling.participants)
            try:
                info = self._sync(0 if last else self._min_world)
            except TooFewPeers:
                continue  # the group has shrunk: members that saw it wait for peers already
            if is_due and self._state.revision == number:
                self._save()
            return info

    def _check_not_torn(self) -> None:
        """A sync that failed only here leaves this peer with a state that no step may use."""
        if self._state.torn:
            raise StateError(
                "the shared state is torn: a sync or a checkpoint was only partly written. "
                "Leave and join again, so that the run syncs it, or load a checkpoint"
            )

    def _wait_for_peers(self) -> None:
        """Wait until the group has `min_world` members."""
        run, needed, wait_s = self._run, self._min_world, self._settings.wait_s
        while run.group_size < needed:
            text = "step %d: %d of at least %d peers are there; waiting up to %g s for more"
            self._check_sigterm()
            _log.warning(text, self._state.revision, run.group_size, needed, wait_s)
            with self._sigterm.waiting():
                run.update_topology(min_world=needed, timeout_s=wait_s)

    def _sync(self, min_world: int) -> SyncInfo:
        """Get the run's state and step, on all members."""
        state, before = self._state, self._state.revision
        brought = None if self._is_member else lineage_of(state)
        self._ops.state = state
        is_listing = not self._is_member
        while True:
            try:
                info = self._sync_once(min_world, is_listing=is_listing)
                break
            except StateLost as error:
                is_listing = True
                if not self._resuming.goes_on(state, error):
                    raise
        check_used(brought, before, state)
        if self._is_member and self._settings.expect_unchanged:
            check_unchanged(info)
        check_diverged(info, self._run.peer_id, self._settings.on_divergence)
        if state.revision != before:
            log = _log.warning if self._is_member else _log.info
            log("went from step %d to the run's step %d", before, state.revision)
        self._is_member = True
        self._epoch_changed = False
        self._epoch = None
        self._sampling.synced(info.participants)
        return info

    def _sync_once(self, min_world: int, *, is_listing: bool) -> SyncInfo:
        return sync_state(
            self._ops.session,
            self._state,
            strategy="enforce-popular",
            timeout_s=self._ops.timeout_s,
            stepped=True,
            rollback=self._settings.rollback,
            min_world=min_world,
            final=False,
            checkpoints=self._resuming.listed() if is_listing else (),
        )

    def _save(self) -> None:
        """Save a checkpoint. A disk that fails must not end the training: the next one may succeed."""
        if self._checkpoints is None:
            return
        try:
            with self._ops.session.busy(self._ops.timeout_s):  # the others may have nothing to save, and wait
                since_ns = monotonic_ns()
                self._checkpoints.save(self._state)
            if self._recording is not None:
                took_ms = (monotonic_ns() - since_ns) // MS
                self._recording.emit(CheckpointSaved(self._state.revision, took_ms))
        except (StateError, OSError) as error:
            _log.error("no checkpoint of step %d: %s", self._state.revision, error)


class _Stopped(RingfoldError):
    """SIGTERM has arrived: the loop ends here. It never leaves this file."""


class _Call(NamedTuple):
    """The arguments of a step's all_reduce."""

    buffers: Buffers
    op: str
    tag: int
    out: Buffers | None = None
    dtype: str | None = None
    timeout_s: float | None = None
    quantize: str | None = None
    skip_none: bool = False
    contribute: bool = True
