"""The communicator: what a training process holds, from `join` to `leave`.

`all_reduce` of one array is the hot path: a few checks, then the engine does everything from the calling thread. The
rest of this file handles changes of the group during a call:

* all_reduce, barrier and broadcast from rank 0 mean the same in any ring, so the engine itself retries them.
* all_gather, reduce_scatter and broadcast from another rank depend on the size or the order of the ring, so they are
  bound to an epoch (see `ops.py`).
* The result of `are_peers_pending` depends only on what all members share: the ops whose end the calling thread has
  seen, with the facts of their epochs, or the master's one answer to a numbered question. Messages that this process
  has received since do not count, nor does what other threads have seen.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

import numpy as np

from ringfold.clock.global_clock import GlobalClock
from ringfold.errors import UsageError
from ringfold.peer.buffers import (
    CODES,
    ArrayLike,
    Buffers,
    ResultBuffer,
    Source,
    Spans,
    in_and_out,
    spans_of,
)
from ringfold.peer.codes import REDUCE_OPS, OpKind
from ringfold.peer.counting import Counter
from ringfold.peer.ops import BINDING, Ops, by_caller, positive_ns, quantisation_code, reduce_code, refusal
from ringfold.peer.outcome import Handle, Meeting, ReduceInfo
from ringfold.peer.recording import Recording
from ringfold.peer.sampling import Sampling
from ringfold.peer.session import Session
from ringfold.peer.staging import Array
from ringfold.peer.steps import Step, StepParts, StepSettings, steps
from ringfold.peer.sync.sync_call import (
    OnDivergence,
    SyncInfo,
    check_diverged,
    check_on_divergence,
    check_unchanged,
    sync_state,
)
from ringfold.probe.nodes.callbacks import OnClock, OnRound, OnWindow, ProbeEvents
from ringfold.runtime import master_client, threads
from ringfold.runtime.sigterm import Sigterm
from ringfold.state.shared import SharedState
from ringfold.wire.messages import PendingQuestion, Record, SyncStrategy

_ndarray = np.ndarray


class Communicator:
    """A process's membership in a run. Make one with `ringfold.join`; leave with `leave()` or at the end of `with`."""

    _sigterm_type: Callable[[float, Callable[[], None]], Sigterm] = Sigterm
    _sampling_type: type[Sampling] = Sampling

    def __init__(
        self,
        session: Session,
        op_timeout_s: float,
        sigterm_grace_s: float = 20.0,
        join_again: "Callable[[], tuple[Session, Callable[[], None]]] | None" = None,
        recording: Recording | None = None,
    ) -> None:
        """`join_again` makes another session with the same settings, and a function with which it joins."""
        self._asking = threads.Lock()
        """Held while a thread asks, so that questions get their numbers in order."""
        self._sigterm_grace_s = sigterm_grace_s
        self._join_again = join_again
        self._recording = recording
        self._ops = Ops(session, op_timeout_s)
        self._shown = session
        """The session whose peers are shown: while this peer joins again, the one before."""
        self._has_left = False
        self._step: Step | None = None
        self._hold(session)
        self._begin_session()

    def _hold(self, session: Session) -> None:
        self._session = session
        self._close = weakref.finalize(self, session.close)

    def _begin_session(self) -> None:
        """The session has joined."""
        session = self._shown = self._session
        self._ops.use_session(session)
        self._all_reduce = session.engine.all_reduce
        admission = session.joined_with
        assert admission is not None, "a communicator exists only after the join"
        self._note_call(admission.call, admission.world.groups)

    def _at_end(self, callback: Callable[[], None]) -> None:
        """Call it once when this peer has left the run for good, and everything else is closed."""
        before = self._session.at_end

        def end() -> None:
            if before is not None:
                before()
            callback()

        self._session.at_end = end

    def _note_call(self, call: int, groups: int) -> None:
        """A run-wide call has changed members or rings, or this peer has joined: questions are counted from here."""
        with self._asking:
            self._ops.call_returned()
            self._call, self._questions, self._groups = call, 0, groups

    # This peer and its group

    @property
    def _record(self) -> Record:
        record = self._shown.machine.record
        assert record is not None, "a communicator exists only after the join"
        return record

    @property
    def peer_id(self) -> int:
        """This peer's id in the run. Ids only grow: lower ids joined earlier."""
        return self._shown.machine.peer

    @property
    def epoch(self) -> int:
        """The number of the group's newest epoch."""
        return self._record.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The peer ids of the group, in ring order."""
        return tuple(member.peer for member in self._record.members)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The peers that were admitted with the newest epoch."""
        return tuple(self._record.newcomers)

    @property
    def unsynced(self) -> frozenset[int]:
        """The members that were admitted since the last sync (all that were ever admitted, without one)."""
        return self._shown.locked(lambda machine: frozenset(machine.unsynced)) & frozenset(self.members)

    @property
    def has_newcomers(self) -> bool:
        """Whether a peer was admitted since the last sync, even if it is gone by now: the same on all members."""
        return self._shown.locked(lambda machine: bool(machine.unsynced))

    @property
    def rank(self) -> int:
        """This peer's place in the ring."""
        return self.members.index(self.peer_id)

    @property
    def group_size(self) -> int:
        return len(self._record.members)

    @property
    def world_size(self) -> int:
        """The accepted peers of the run, over all groups."""
        return self._shown.machine.world.peers

    @property
    def groups(self) -> int:
        """How many groups the run has."""
        return self._shown.machine.world.groups

    @property
    def largest_group(self) -> int:
        """The size of the run's largest group."""
        return self._shown.machine.world.largest_group

    @property
    def spans_groups(self) -> bool:
        """Whether the run has several groups: the same on all members of this one at the same point of the program."""
        last = self._ops.last
        groups = self._groups if last is None else self._shown.machine.facts[last.epoch].groups
        return groups > 1

    @property
    def clock(self) -> GlobalClock:
        """Global time, the same on all nodes that probe; available once the first round of probing has ended."""
        return self._session.clock

    def on_window(self, callback: OnWindow) -> None:
        """Call it with each window of this peer's probing from now on, with its fits. Needs `probe=True`.

        Callbacks run in a thread of their own, one after another. Those that fall behind by 64 events miss the oldest.
        """
        self._probe_events().on_window(callback)

    def on_clock(self, callback: OnClock) -> None:
        """Call it with each new mapping of this peer's clock to global time, one a round. Needs `probe=True`."""
        self._probe_events().on_clock(callback)

    def on_round(self, callback: OnRound) -> None:
        """Call it with the summary of each round of probing, which is requested from the master for that."""
        self._probe_events().on_round(callback)

    def _probe_events(self) -> ProbeEvents:
        if self._session.probing is None:
            raise UsageError("this peer does not probe: join with probe=True")
        return self._session.probe_events

    # Collectives

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
    ) -> ReduceInfo:
        """Reduce `buffers` in place (or into `out`) over the group and return which peers contributed.

        `buffers` is an array, or a list, tuple or dict of arrays, fused into one op. `op` is sum, avg, prod, min or
        max. Every survivor ends with the same bytes. If the op is aborted, the buffers are exactly as passed in.
        Unless `retry` is off, an abort is not visible: the op runs again with the survivors.

        With `skip_none` the buffers that are None (parameters without a gradient) are left out, and so is None in `out`
        at the same places. All peers must leave out the same ones; if they do not, all get an error.

        `quantize` sends float16, bfloat16 and float32 as 8 or 4 bits each: minmax8, minmax4, zeroscale8 or zeroscale4.
        The result is then approximate, and still the same bytes on every survivor; small ops stay exact.

        A peer with `contribute=False` adds nothing and gets the result of the others: an average is over the peers that
        contributed. The content of its buffers before the call is ignored. It is the same call as the others', so each
        peer may choose for itself. If no peer contributes, the result is zeros.
        """
        ops = self._ops
        if type(buffers) is _ndarray and out is None and dtype is None and quantize is None and contribute:
            code = CODES.get(buffers.dtype)
            reduce_op = REDUCE_OPS.get(op)
            free = tag not in ops.in_flight and (ops.state is None or not ops.state.torn) and not self._session.is_over
            free = free and BINDING.get() is None
            if code is not None and reduce_op is not None and free and buffers.flags.carray:
                is_usual = timeout_s is None and tag not in ops.final_tags
                timeout_ns = ops.timeout_ns if is_usual else ops.timeout_of(tag, timeout_s)
                ops.apply_step()
                try:
                    result = self._all_reduce(buffers, code, reduce_op, tag, 1 if retry else 0, timeout_ns)
                except (ValueError, TypeError) as error:
                    raise refusal("all_reduce", tag, error) from None
                return ops.returned("all_reduce", result)
        source, target = in_and_out(buffers, out, dtype, skip_none=skip_none, read=contribute, wait=False)
        number, quantisation = reduce_code(op), quantisation_code(quantize, op, source.codes)
        return ops.run(
            "all_reduce",
            OpKind.ALL_REDUCE,
            number,
            tag,
            source,
            target,
            retry=retry,
            timeout_s=timeout_s,
            quantisation=quantisation,
            contribute=contribute,
        )

    def all_reduce_async(
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
    ) -> Handle:
        """Begin an `all_reduce` and return a handle on it. One op per tag may be in flight, and many tags.

        Do not touch the buffers until the handle is done. Wait for every handle before `update_topology` and the other
        run-wide calls. Staged arrays have their results when `done` is True or `wait` has returned.
        """
        source, target = in_and_out(buffers, out, dtype, skip_none=skip_none, read=contribute)
        operation, number = f"all_reduce (tag {tag})", reduce_code(op)
        quantisation = quantisation_code(quantize, op, source.codes)
        return self._ops.begin(
            operation,
            number,
            tag,
            source,
            target,
            retry=retry,
            timeout_s=timeout_s,
            quantisation=quantisation,
            contribute=contribute,
        )

    def broadcast(
        self,
        buffers: Buffers,
        *,
        root: int = 0,
        tag: int = 0,
        retry: bool = True,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> ReduceInfo:
        """Copy the buffers of rank `root`, in the epoch in which the op commits, to all members."""
        ops, source, kind = self._ops, spans_of(buffers, dtype), OpKind.BROADCAST
        if root == 0:
            return ops.run("broadcast", kind, 0, tag, source, retry=retry, timeout_s=timeout_s)

        def submit(record: Record, again: bool) -> int:
            if not 0 <= root < len(record.members):
                raise UsageError(f"broadcast: rank {root} does not exist, the group has {len(record.members)} members")
            return ops.submit(
                "broadcast", kind, 0, tag, root, source, None, retry=by_caller(retry), timeout_s=timeout_s, again=again
            )

        info = ops.run_bound("broadcast", tag, submit, retry=retry)
        source.give_back()
        return info

    def all_gather(
        self,
        array: ArrayLike,
        *,
        out: ArrayLike | None = None,
        tag: int = 0,
        retry: bool = True,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> Array:
        """The arrays of all members, stacked by rank: the result's first dimension is the group's size.

        With `out` the size is fixed: when an abort leaves a group of another size, the error is raised, not retried.
        The result is a NumPy array: on the memory of `out`, or a copy of it if that is on a device.
        """
        ops = self._ops
        source = Source(array, dtype)
        result = ResultBuffer(source, out, dtype)

        def submit(record: Record, again: bool) -> int:
            target, kind = result.of_shape((len(record.members), *source.shape)), OpKind.ALL_GATHER
            given, how = source.spans, by_caller(retry)
            return ops.submit("all_gather", kind, 0, tag, 0, given, target, retry=how, timeout_s=timeout_s, again=again)

        ops.run_bound("all_gather", tag, submit, retry=retry, fixed_size=out is not None)
        return result.written()

    def reduce_scatter(
        self,
        array: ArrayLike,
        *,
        op: str = "sum",
        out: ArrayLike | None = None,
        tag: int = 0,
        retry: bool = True,
        dtype: str | None = None,
        timeout_s: float | None = None,
        contribute: bool = True,
    ) -> Array:
        """This rank's chunk of the reduced array: the flattened array is cut into one equal chunk per member.

        `contribute` is as in `all_reduce`.
        """
        ops, reduce_op = self._ops, reduce_code(op)
        source = Source(array, dtype)
        result = ResultBuffer(source, out, dtype)

        def submit(record: Record, again: bool) -> int:
            size, kind, elements = len(record.members), OpKind.REDUCE_SCATTER, source.operand.size
            if elements % size:
                raise UsageError(f"reduce_scatter: {elements} elements cannot be cut into {size} equal chunks")
            target, given, how = result.of_shape((elements // size,)), source.spans, by_caller(retry)
            return ops.submit(
                "reduce_scatter",
                kind,
                reduce_op,
                tag,
                0,
                given,
                target,
                retry=how,
                timeout_s=timeout_s,
                again=again,
                contribute=contribute,
            )

        ops.run_bound("reduce_scatter", tag, submit, retry=retry, fixed_size=out is not None)
        return result.written()

    def barrier(self, *, tag: int = 0, timeout_s: float | None = None) -> ReduceInfo:
        """Return when every member has called it."""
        return self._ops.run("barrier", OpKind.BARRIER, 0, tag, Spans([], []), timeout_s=timeout_s)

    # Run-wide calls

    def update_topology(self, min_world: int = 0, timeout_s: float | None = None) -> None:
        """Admit all peers that have registered. Returns when all accepted peers of the run have called it.

        With `min_world` it also waits until the group has that many members. Newcomers have no state yet: sync it
        before the next op (`steps` does). A better ring that the master's background search has found since the last
        call is adopted, too.
        """
        self._update(min_world, self._seconds(timeout_s), final=timeout_s is not None)

    def _admit(self, timeout_s: float) -> None:
        """The same for the step loop: its timeout is not one that the program chose."""
        self._update(0, timeout_s, final=False)

    def _update(self, min_world: int, timeout_s: float, *, final: bool) -> None:
        self._ops.check_none_in_flight("update_topology")
        outcome = self._session.vote("update", "update_topology", min_world, timeout_s, final=final)
        self._note_call(outcome.call, outcome.groups)

    def optimize_topology(self, timeout_s: float | None = None) -> None:
        """Give every group the best ring for its links. Returns when all accepted peers of the run have called it.

        Links whose rates are unknown or too old are measured first: a few hundred milliseconds for each of n - 1
        rounds. Raises `TopologyFailed` if too many could not be measured; the rings are then as they were.
        """
        self._ops.check_none_in_flight("optimize_topology")
        seconds, final = self._seconds(timeout_s), timeout_s is not None
        outcome = self._session.vote("optimize", "optimize_topology", 0, seconds, final=final)
        self._note_call(outcome.call, outcome.groups)

    def are_peers_pending(self) -> bool:
        """Whether peers wait to be admitted. The same on every peer at the same point of the program.

        Legal from any thread at any time, also while ops are in flight, except while another thread waits in a run-wide
        call. The point of the program is that of the calling thread: what counts are the ops whose end it has seen
        since the last run-wide call. A thread that has seen none gets the master's answer, which costs one round trip:
        the answer to its first, second, third call since then is the same on every peer.
        """
        self._session.check_usable("are_peers_pending")
        last = self._ops.last
        if last is not None and self.group_size > 1 and not self.spans_groups:
            return last.registrations > self._session.machine.facts[last.epoch].registrations
        with self._asking:
            question = PendingQuestion(self._call, self._questions + 1)
            pending = self._session.ask(question, "are_peers_pending", self._seconds(None))
            self._questions += 1
        return pending

    def meet(self, timeout_s: float | None = None) -> Meeting:
        """Wait until every accepted peer of all groups has called it; return the run's numbers at that moment.

        All peers get the same result. So the next step of a program may depend on it, in all groups alike: whether
        every group has joined, and whether to call `update_topology`. A peer that was just admitted calls this first.
        """
        self._ops.check_none_in_flight("meet")
        seconds, final = self._seconds(timeout_s), timeout_s is not None
        outcome = self._session.vote("pending", "meet", 0, seconds, final=final)
        world = outcome.world
        return Meeting(world.peers, world.groups, world.largest_group, outcome.pending)

    def sync_shared_state(
        self,
        state: SharedState,
        *,
        strategy: SyncStrategy = "enforce-popular",
        expect_unchanged: bool = False,
        rollback: bool = False,
        on_divergence: OnDivergence = "repair",
        timeout_s: float | None = None,
    ) -> SyncInfo:
        """Make `state` the same, bit by bit, on every member of the group. Returns when all of them have called it.

        The most popular content at the expected revision wins; only blocks that differ are sent. Between two syncs the
        revision goes up by at most one (`state.push_revision()`). `strategy` is "enforce-popular", or "send-only" and
        "receive-only" where one side is to win. `expect_unchanged` raises `HashMismatch` if anything was received.
        `rollback` agrees to go on from an older revision when the last one is lost.

        A member that took part in the last sync, and holds other content than the winner at the same revision, has
        diverged: all peers warn and name it. It gets the winner's content; with `on_divergence="raise"` the call then
        raises `StateDiverged` there.
        """
        check_on_divergence(on_divergence)
        if strategy not in get_args(SyncStrategy):
            raise UsageError(f"sync_shared_state: strategy must be one of {', '.join(get_args(SyncStrategy))}")
        self._ops.check_none_in_flight("sync_shared_state")
        seconds, final = self._seconds(timeout_s), timeout_s is not None
        self._ops.state = state
        info = sync_state(self._session, state, strategy=strategy, timeout_s=seconds, rollback=rollback, final=final)
        if expect_unchanged:
            check_unchanged(info)
        check_diverged(info, self.peer_id, on_divergence)
        return info

    def steps(
        self,
        state: SharedState | None = None,
        *,
        until: int | None = None,
        passes: int | None = None,
        min_world: int = 1,
        wait_s: float = 600.0,
        check_every: int = 100,
        checkpoint: str | Path | None = None,
        every: int = 100,
        keep: int = 3,
        expect_unchanged: bool = False,
        rollback: bool = False,
        counter: Counter | None = None,
        handle_sigterm: bool = True,
        on_divergence: OnDivergence = "repair",
        rejoin: bool = True,
    ) -> Iterator[Step]:
        """The training loop: yields numbered steps, and between them admits peers, waits for peers and syncs `state`.

        A newcomer begins at the run's step and `state`. With fewer than `min_world` members the loop waits, up to
        `wait_s`, also in a step's first op; later ops go on with the rest. The state is compared after admissions and
        aborts, every `check_every` steps, and at the end. A member that has diverged is named on all peers and gets the
        run's state; `on_divergence="raise"`: it raises `StateDiverged`. If the state has a `Sampler`, `step.shard()` is
        this peer's part of the data, and the loop ends after `passes`.

        With `checkpoint=DIR` the state is saved there every `every` steps, the last `keep` stay, and the loop begins
        with the newest one. If all peers were killed, the run resumes from the newest one of its own history, after a
        wait for the peers that took part in the last sync (the setting `resume_wait_s`).

        With `counter=GlobalIteration(store, rank, world)` a step's number is the iteration that several groups or runs
        agree on, each being one rank: it begins when all active ranks have finished the one before. All peers of a
        group give the same rank and get the same numbers. A number that it missed is skipped (`step.missed`).

        A peer that is evicted joins again by itself: between steps, or in a step's first op. That op then belongs to
        the group's present step: this peer adds nothing. Elsewhere, with a counter or `rejoin=False`, `Evicted` is
        raised.

        SIGTERM ends the loop at a step boundary: the present step has `sigterm_grace_s` seconds (a setting), a wait for
        peers ends at once. This peer leaves, saves the last step boundary if it has a `checkpoint`, and the signal does
        what it did before the loop. Outside the main thread, or with `handle_sigterm=False`, it is left alone.
        """
        settings = StepSettings(
            until=until,
            passes=passes,
            min_world=min_world,
            wait_s=wait_s,
            check_every=check_every,
            checkpoint=checkpoint,
            every=every,
            keep=keep,
            expect_unchanged=expect_unchanged,
            rollback=rollback,
            counter=counter,
            on_divergence=on_divergence,
            rejoin=rejoin,
            **self._parts_of_steps(handle_sigterm),
        )
        return steps(self, self._ops, state, settings)

    @property
    def step(self) -> Step | None:
        """The step that the program is in: the one that `steps` yielded last, until it is asked for the next."""
        return self._step

    def _set_step(self, step: Step | None) -> None:
        self._step = step

    def _parts_of_steps(self, handle_sigterm: bool) -> StepParts:
        return {
            "sigterm_grace_s": self._sigterm_grace_s if handle_sigterm else None,
            "sigterm_type": self._sigterm_type,
            "sampling_type": self._sampling_type,
            "recording": self._recording,
        }

    def log(self, **values: float) -> None:
        """Show values of the program, such as a loss, in `ringfold top`, the dashboard and the run's record.

        A number that is not finite is shown as such. In a step of `steps` it is the same as `Step.log`.
        """
        if self._recording is not None:
            self._recording.log(values)

    # Membership

    def busy(self, up_to_s: float) -> AbstractContextManager[None]:
        """Report to the master that this program does something long of its own: an evaluation, a save on rank 0.

            with run.busy(up_to_s=900):
                evaluate()

        Other peers may wait in an op or a call at the same time: this peer is not evicted for that until the block ends
        or `up_to_s` is over. Legal from any thread; if several overlap, the peer is busy until the last one ends.
        """
        return self._session.busy(up_to_s)

    def evict(self, peer: int | str, reason: str = "") -> None:
        """Evict another peer (by id or name): the run goes on without it, and it may join again.

        Its error names this peer and the reason. Raises `UsageError` if there is no such peer, or several of that name,
        or if it is the last one of its group; for this peer itself, `leave`.
        """
        self._session.check_usable("evict")
        machine, wanted = self._session.machine, str(peer)
        identity = machine.identity
        if wanted in (str(machine.peer), identity.name):
            raise UsageError(f"evict: {wanted} is this peer itself: call leave()")
        by = f"peer {machine.peer} ({identity.name})"
        response = master_client.ask(
            machine.masters,
            identity.token,
            lambda client: client.evict(wanted, reason, by),
            run=identity.run,
            is_run_token=True,
        )
        if not response.done:
            raise UsageError(f"evict: {response.text}")

    def rejoin(self) -> None:
        """Join the run again after an eviction (`Evicted`), with the same settings, as a newcomer with a new id.

        Sync state before the next op. `steps` does all of this by itself.
        """
        if self._join_again is None:
            raise UsageError("rejoin: this communicator does not know how it was made; call ringfold.join again")
        old = self._session
        if not old.is_over:
            raise UsageError("rejoin: this peer is still in the run; call leave first to come back as a newcomer")
        self._has_left = False
        # A master in this process stays, and the new session closes it.
        at_end, old.at_end = old.at_end, None
        old.close()
        self._close.detach()
        try:
            session, join_run = self._join_again()
        except BaseException:
            if at_end is not None:
                at_end()
            raise
        session.at_end = at_end
        session.probe_events.inherit(old.probe_events)
        self._hold(session)  # from here on `leave` in another thread ends the join
        if self._has_left:  # it was called before
            self._close()
            raise UsageError("rejoin: leave() was called meanwhile")
        join_run()
        self._begin_session()

    def leave(self) -> None:
        """Leave the run. The others go on without this peer; a second call does nothing."""
        self._has_left = True
        self._close()
        if self._session.is_shut_down:
            # A handle that is not waited for is part of a reference cycle with this object: the engine's memory would
            # stay until the garbage collector runs, which may be never in a program that joins again and again.
            self._ops.in_flight.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.stopped |= kind is not None
        try:
            if isinstance(error, Exception) and self._recording is not None:
                self._recording.dump(f"the program raised {error!r}")
        finally:
            self.leave()

    def __repr__(self) -> str:
        state = "over" if self._session.is_over else f"epoch {self.epoch}, rank {self.rank} of {self.group_size}"
        return f"<Communicator: peer {self.peer_id}, {state}>"

    def _seconds(self, timeout_s: float | None) -> float:
        seconds = self._ops.timeout_s if timeout_s is None else timeout_s
        positive_ns(seconds)
        return seconds
