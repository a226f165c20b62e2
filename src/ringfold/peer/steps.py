"""The training loop that users write: admission, waiting for peers, sync, checkpoints and retry, in numbered steps.

Everything here must come out the same on all members, although each of them learns of an epoch change at another
moment. These rules see to that:

1. A step begins with one question: is anybody pending? Whoever was just admitted does not ask, because it is the
   answer. After an admission all members, old and new, do the same: wait until the group is large enough, then sync.
2. What runs in a group that may be too small is bound to an epoch, and goes by *that* epoch's size: an op is submitted
   in it, a sync is voted for in it. So a member that did not see the group shrink is turned back, and meets those who
   saw it in the same update.
3. Whether a step needs a sync is decided by what all members share: admissions since the last sync, the epochs in which
   the ops of the last steps were committed (another one means an abort, or a death), and the step's number.

A step's number is the revision of the shared state, so a newcomer learns both in the sync. Where a counter gives the
numbers (see `counting.py`), the group may have missed some: then all set the revision to the number they were given.

Wait inside a step: the group may be too small only for the first op of a step. A newcomer that is admitted then begins
at the first op, too. Later in the step it could not follow, so the survivors finish the step without waiting.

SIGTERM is looked at between steps, and wherever the loop would wait for peers (`runtime/sigterm.py` has the rest). What
is saved then is a state that no step has begun to change: that of a boundary, or of a step that no op has committed in,
which is what a newcomer would get, too. It was not compared with the others', because nobody is waited for. So a master
that still knows the last sync may refuse it (`StateLost`); the loop then goes back to what was saved after that sync.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ringfold.dataplane.buffers import Buffers, in_and_out
from ringfold.dataplane.codes import OpKind, Retry
from ringfold.errors import (
    CollectiveAborted,
    RevisionViolation,
    RingfoldError,
    StateError,
    StateLost,
    TooFewPeers,
    UsageError,
)
from ringfold.peer.counting import TAG, Counter, Counting, NotYet
from ringfold.peer.ops import Ops, quantisation_code, reduce_code
from ringfold.peer.outcome import ReduceInfo
from ringfold.peer.states import (
    OnDivergence,
    SyncInfo,
    check_diverged,
    check_on_divergence,
    check_unchanged,
    sync_state,
)
from ringfold.runtime.sigterm import EXIT_STATUS, Sigterm
from ringfold.state.checkpoint import Checkpoints
from ringfold.state.shared import SharedState
from ringfold.wire.messages import Record

_log = logging.getLogger("ringfold.steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a caller of `Communicator.steps` may choose."""

    until: int | None = None
    min_world: int = 1
    wait_s: float = 600.0
    check_every: int = 100
    """A sync at least every so many steps, even when nothing has happened."""
    checkpoint: str | Path | None = None
    every: int = 100
    keep: int = 3
    expect_unchanged: bool = False
    rollback: bool = False
    counter: Counter | None = None
    """What numbers the steps, if not the revision of the state alone."""
    sigterm_grace_s: float | None = None
    """How long a step may still take after SIGTERM; None: the signal is left alone."""
    on_divergence: OnDivergence = "repair"

    def __post_init__(self) -> None:
        for name in ("min_world", "check_every", "every", "keep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        check_on_divergence(self.on_divergence)


class Run(Protocol):
    """As much of a communicator as the loop calls."""

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
    ) -> ReduceInfo: ...
    def leave(self) -> None: ...


def steps(run: Run, ops: Ops, state: SharedState | None, settings: StepSettings) -> Iterator["Step"]:
    """The steps of `Communicator.steps`; the arguments are checked at the call, not at the first step."""
    if state is None:
        if settings.checkpoint is not None:
            raise UsageError("a checkpoint needs a shared state: steps(state, checkpoint=...)")
        state = SharedState._without_arrays()
    checkpoints = None
    if settings.checkpoint is not None:
        checkpoints = Checkpoints(settings.checkpoint, keep=settings.keep)
        newest = max(checkpoints.revisions(), default=0)
        # A program that has gone on since, and begins a second loop, is not taken back to what it saved before.
        if state.torn or newest >= state.revision:
            revision = checkpoints.load_newest(state)
            if revision is not None:
                _log.info("revision %d was loaded from %s", revision, settings.checkpoint)
    return Loop(run, ops, state, settings, checkpoints).steps()


class Step:
    """One step of the run. `number` is the same on all peers; `sync` tells what the sync before it did.

    `missed` is how many numbers of a counter passed by without this group since its last step.
    """

    __slots__ = ("_loop", "missed", "number", "sync")

    def __init__(self, number: int, sync: SyncInfo, loop: "Loop", missed: int = 0) -> None:
        self.number, self.sync, self._loop, self.missed = number, sync, loop, missed

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
    ) -> ReduceInfo:
        """`Communicator.all_reduce` with at least `min_world` peers: with fewer, the attempt is discarded and waits.

        A peer that is alone where it may be (`min_world=1`) gets its own buffers back.
        """
        return self._loop.all_reduce(self.number, _Call(buffers, op, tag, out, dtype, timeout_s, quantize, skip_none))

    def __index__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<Step {self.number}>"


class Loop:
    """The loop of one program, and what it shares with its steps."""

    def __init__(
        self, run: Run, ops: Ops, state: SharedState, settings: StepSettings, checkpoints: Checkpoints | None
    ) -> None:
        self._run, self._ops, self._state, self._settings = run, ops, state, settings
        self._checkpoints = checkpoints
        counter = settings.counter
        self._counting = None if counter is None else Counting(counter, settings.until)
        self._min_world = settings.min_world
        self._reduced_in: int | None = None  # the step in which an op has committed
        self._epoch: int | None = None  # of the ops since the last sync
        self._is_shaken = False  # whether that epoch has changed since
        self._is_member = False  # whether this peer has taken part in a sync
        self._sigterm = Sigterm(settings.sigterm_grace_s or 0.0, self._leave)
        self._committed = 0  # ops of this peer, when the step began
        self._is_cut_off = False  # whether this peer left in the middle of a step that the program ended all the same

    def steps(self) -> Iterator[Step]:
        if self._settings.sigterm_grace_s is not None:
            self._sigterm.install()
        # Who leaves before the loop has come to its end has not finished the run.
        self._ops.session.stopped = self._settings.until is not None
        try:
            yield from self._steps()
            self._ops.session.stopped = False
            self._end_counting(is_over=True)
        except RingfoldError as error:
            if not self._is_stopped_by(error):
                raise
            self._stop()
        finally:
            self._ops.set_step(None)
            self._end_counting(is_over=False)
            self._sigterm.uninstall()

    def _end_counting(self, *, is_over: bool) -> None:
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.end(leave=is_over or self._run.group_size == 1)

    def _steps(self) -> Iterator[Step]:
        state, until = self._state, self._settings.until
        while until is None or state.revision < until:
            self._admit()
            info = self._prepare()
            due = state.revision
            if until is not None and due >= until:
                # The run was further than this newcomer. It goes on without it, so nobody would come to a last sync.
                self._save()
                return
            while (number := self._count()) is None:
                self._check_sigterm()
                if self._admit():
                    info = self._prepare()
            if until is not None and number >= until:
                break  # the others have finished without this group
            state.revision = number
            self._ops.set_step(number)
            self._note_committed()
            self._sigterm.is_inside = False
            self._check_sigterm()
            yield Step(number, info, self, number - due)
            self._sigterm.is_inside, self._is_cut_off = True, self._sigterm.is_overdue
            if state.revision not in (number, number + 1):
                raise RevisionViolation(number + 1, state.revision)
            self._finish(number)
            self._check_sigterm()
        if self._checkpoints is not None or len(state):
            self._prepare(last=True)  # what went wrong in the last steps would not be noticed otherwise
        if until is not None and state.revision == until:
            # The last step is over when everybody has finished it: who leaves then leaves nobody behind.
            while self._count(last=True) is None:
                self._check_sigterm()
                if self._admit():
                    self._prepare(last=True)

    def _finish(self, number: int) -> None:
        self._state.revision = number + 1
        if self._counting is not None:
            self._counting.finish()

    # SIGTERM

    def _check_sigterm(self) -> None:
        if self._sigterm.is_requested:
            raise _Stopped

    def _is_stopped_by(self, error: RingfoldError) -> bool:
        """Whether an error of the loop's own calls means that SIGTERM has ended it. A state's own is raised."""
        return isinstance(error, _Stopped) or (self._sigterm.is_overdue and not isinstance(error, StateError))

    def _leave(self) -> None:
        self._ops.session.stopped = True
        self._run.leave()

    def _stop(self, step: int | None = None) -> None:
        """Leave, so that nobody waits for this peer; save what is whole; then the signal takes its effect."""
        self._sigterm.is_inside = True
        _log.warning("SIGTERM: this peer leaves the run at step %d", self._state.revision)
        self._sigterm.abort()
        self._end_counting(is_over=False)
        is_whole = not self._is_cut_off if step is None else step == self._state.revision and not self._has_committed()
        if self._is_member and is_whole:
            self._save()
        self._sigterm.deliver()

    def _note_committed(self) -> None:
        if self._checkpoints is not None and self._sigterm.is_installed:
            self._committed = self._ops.engine.stats()["committed"]

    def _has_committed(self) -> bool:
        """Whether an op was committed since the step began: from then on the program may have changed the state."""
        return self._checkpoints is None or self._ops.engine.stats()["committed"] != self._committed

    def all_reduce(self, number: int, call: "_Call") -> ReduceInfo:
        self._check_whole()
        self._sigterm.is_inside = True
        try:
            return self._all_reduce(number, call)
        except RingfoldError as error:
            if not self._is_stopped_by(error):
                raise
            self._stop(number)
            # The former handler lets the program go on. This step cannot.
            raise SystemExit(EXIT_STATUS) from None
        finally:
            self._sigterm.is_inside = False

    def _all_reduce(self, number: int, call: "_Call") -> ReduceInfo:
        # The first op of a step waits for peers. Those that have committed it go on with those that are left.
        needed, again = 1 if self._reduced_in == number else self._min_world, False
        while True:
            try:
                info = self._attempt(call, needed, again)
            except TooFewPeers:
                again = False  # who is admitted begins with this call, and all count from 0 again
                if needed == 1:
                    self._committed = -1  # as good as committed
                    _copy_to_out(call)
                    return ReduceInfo(1, self._run.epoch, 0, 0)
                self._prepare()
                self._count()  # which newcomers begin with, too
                self._note_committed()
            except CollectiveAborted:
                if needed <= 2:
                    raise
                again = True
            else:
                self._reduced_in = number
                self._note(info)
                return info

    def _note(self, info: ReduceInfo) -> None:
        self._is_shaken |= self._epoch not in (None, info.epoch)
        self._epoch = info.epoch

    def _count(self, *, last: bool = False) -> int | None:
        """The number of the step that is due, or of the one that is on; None if it is not agreed yet.

        Without a counter it is the revision.
        """
        counting, run = self._counting, self._run
        if counting is None:
            return self._state.revision
        needed, again = 1 if last else self._min_world, False
        while True:
            self._ops.set_step(self._state.revision)
            facts = counting.facts(run.peer_id, self._state.revision - 1)
            timeout_s = counting.wait_s + self._ops.timeout_s
            try:
                self._note(self._attempt(_Call(facts, "max", TAG, timeout_s=timeout_s), needed, again))
            except TooFewPeers:
                if needed > 1:
                    self._prepare()
                    again = False
                    continue
                # Alone, one's own facts are all there are.
            except CollectiveAborted:
                if needed <= 2:
                    raise
                again = True
                continue
            match counting.judge(run.peer_id, facts):
                case int(number):
                    return number
                case NotYet():
                    return None

    def _attempt(self, call: "_Call", needed: int, again: bool) -> ReduceInfo:
        buffers, op, tag, out, dtype, timeout_s, quantize, skip_none = call
        if needed <= 2:
            # The engine refuses a group of one by the epoch's size, so it may retry by itself.
            return self._run.all_reduce(
                buffers,
                op=op,
                tag=tag,
                out=out,
                dtype=dtype,
                timeout_s=timeout_s,
                quantize=quantize,
                skip_none=skip_none,
            )
        ops, reduce_op, kind = self._ops, reduce_code(op), OpKind.ALL_REDUCE
        source, target = in_and_out(buffers, out, dtype, skip_none=skip_none)
        number = quantisation_code(quantize, op, source.codes)

        def submit(record: Record, again: bool) -> int:
            if len(record.members) < needed:
                raise TooFewPeers(len(record.members), needed)
            return ops.submit(
                "all_reduce",
                kind,
                reduce_op,
                tag,
                0,
                source,
                target,
                retry=Retry.CALLER,
                timeout_s=timeout_s,
                quantisation=number,
                again=again,
            )

        info = ops.run_bound("all_reduce", tag, submit, again=again)
        (target or source).copy_back()
        return info

    # Admission, waiting, sync

    def _admit(self) -> bool:
        """Rule 1: ask once, and admit. Returns whether there was a vote about it."""
        run = self._run
        # With several groups the question costs as much as the vote, and those who wait for peers are in a vote.
        if not run.has_newcomers and (run.spans_groups or run.are_peers_pending()):
            run.update_topology(timeout_s=max(self._settings.wait_s, self._ops.timeout_s))
            return True
        return False

    def _prepare(self, *, last: bool = False) -> SyncInfo:
        """Wait until the group is large enough, sync where rule 3 says so, and save where it is time."""
        while True:
            if not last:
                self._gather()
            number = self._state.revision
            is_due = last or (self._checkpoints is not None and number % self._settings.every == 0)
            if not (self._run.has_newcomers or self._is_shaken or number % self._settings.check_every == 0 or is_due):
                self._check_whole()
                return SyncInfo(number, checked=False)
            try:
                info = self._sync(0 if last else self._min_world)
            except TooFewPeers:
                continue  # the group has shrunk: those who saw it wait for peers already
            if is_due and self._state.revision == number:
                self._save()
            return info

    def _check_whole(self) -> None:
        """A sync that failed here, but not elsewhere, leaves this peer with a state that no step may go on from."""
        if self._state.torn:
            raise StateError(
                "the shared state is torn: a sync or a checkpoint was only partly written. "
                "Leave and join again, so that the run syncs it, or load a checkpoint"
            )

    def _gather(self) -> None:
        """Wait until the group has `min_world` members."""
        run, needed, wait_s = self._run, self._min_world, self._settings.wait_s
        while run.group_size < needed:
            text = "step %d: %d of at least %d peers are there; waiting up to %g s for more"
            self._check_sigterm()
            _log.warning(text, self._state.revision, run.group_size, needed, wait_s)
            with self._sigterm.waiting():
                run.update_topology(min_world=needed, timeout_s=wait_s)

    def _sync(self, min_world: int) -> SyncInfo:
        """The run's state and step, on all members."""
        state, before = self._state, self._state.revision
        self._ops.state = state
        try:
            info = self._sync_once(min_world)
        except StateLost as error:
            if self._checkpoints is None:
                raise
            self._load_lost(self._checkpoints, error.revision)
            info = self._sync_once(min_world)
        if self._is_member and self._settings.expect_unchanged:
            check_unchanged(info)
        check_diverged(info, self._run.peer_id, self._settings.on_divergence)
        if state.revision != before:
            log = _log.warning if self._is_member else _log.info
            log("went from step %d to the run's step %d", before, state.revision)
        self._is_member, self._is_shaken, self._epoch = True, False, None
        return info

    def _sync_once(self, min_world: int) -> SyncInfo:
        return sync_state(
            self._ops.session,
            self._state,
            strategy="enforce-popular",
            timeout_s=self._ops.timeout_s,
            stepped=True,
            rollback=self._settings.rollback,
            min_world=min_world,
        )

    def _load_lost(self, checkpoints: Checkpoints, revision: int) -> None:
        """Nobody is left who took part in the last sync, and the newest checkpoint is not of that sync: load the one
        that is. One member that has it is enough, so all of them sync again.
        """
        try:
            checkpoints.load(self._state, revision)
        except (StateError, OSError) as error:
            _log.warning("revision %d is lost, and cannot be loaded here: %s", revision, error)
        else:
            _log.warning("the run goes on from revision %d, the last one that was synced", revision)

    def _save(self) -> None:
        """A disk that fails must not end the training: the next checkpoint may succeed."""
        if self._checkpoints is None:
            return
        try:
            self._checkpoints.save(self._state)
        except (StateError, OSError) as error:
            _log.error("no checkpoint of step %d: %s", self._state.revision, error)


class _Stopped(RingfoldError):
    """SIGTERM came: the loop ends here. It never leaves this file."""


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


def _copy_to_out(call: _Call) -> None:
    if call.out is None:
        return
    source, target = in_and_out(call.buffers, call.out, call.dtype, skip_none=call.skip_none)
    if target is None:
        return
    for here, there in zip(source.arrays, target.arrays, strict=True):
        there.reshape(-1)[:] = here.reshape(-1)
    target.copy_back()
