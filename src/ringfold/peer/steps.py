"""The training loop that users write: admission, sync, waiting for peers and retry, between and inside numbered steps.

Everything here must come out the same on all members, although each of them learns of an epoch change at another
moment. Three rules see to that:

1. A step begins with one question: is anybody pending? Whoever was just admitted does not ask, because it is the
   answer. After an admission all members, old and new, do one thing next: sync. Then the step, without another
   question.
2. An op that must not run in a group that is too small is bound to one epoch, and looks at *that* epoch's size. So a
   member that did not see the group shrink is turned back at its op, and meets those who saw it in the same vote.
3. A sync is a single broadcast of the step's number, the revision and all arrays: all members have it, or none.

The source of a sync is the member with the lowest id of those that were there before the admission; in a fresh run,
where nobody was, the lowest id of all.

Wait inside a step: the group may be too small only for the first op of a step. A newcomer that is admitted then begins
at the first op, too. Later in the step it could not follow, so a group that is too small by then is an error.
"""

import logging
import zlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ringfold.dataplane.buffers import Buffers, spans_of, view_of
from ringfold.dataplane.codes import OpKind
from ringfold.errors import CollectiveAborted, StateError, TooFewPeers, UsageError
from ringfold.peer.ops import Ops, reduce_code
from ringfold.peer.outcome import ReduceInfo
from ringfold.state.shared import SharedState
from ringfold.wire.messages import Record

_log = logging.getLogger("ringfold.steps")
SYNC_TAG = (1 << 64) - 1
"""The tag of syncs; programs count theirs from 0."""


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
    def unsynced(self) -> frozenset[int]: ...
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
    ) -> ReduceInfo: ...


def steps(
    run: Run, ops: Ops, state: SharedState | None, *, until: int | None, min_world: int, wait_s: float
) -> Iterator["Step"]:
    """The steps of `Communicator.steps`; the arguments are checked at the call, not at the first step."""
    if min_world < 1:
        raise UsageError(f"min_world must be at least 1, not {min_world}")
    if state is not None:
        for name, array in state.arrays.items():
            view_of(array, f"the shared array {name!r}")
    return Loop(run, ops, state, min_world, wait_s).steps(until)


class Step:
    """One step of the run. `number` is the same on all peers."""

    __slots__ = ("_loop", "number")

    def __init__(self, number: int, loop: "Loop") -> None:
        self.number, self._loop = number, loop

    def all_reduce(
        self,
        buffers: Buffers,
        *,
        op: str = "sum",
        tag: int = 0,
        out: Buffers | None = None,
        dtype: str | None = None,
        timeout_s: float | None = None,
    ) -> ReduceInfo:
        """`Communicator.all_reduce` with at least `min_world` peers: with fewer, the attempt is discarded and waits.

        A peer that is alone where it may be (`min_world=1`) gets its own buffers back.
        """
        return self._loop.all_reduce(self.number, buffers, op, tag, out, dtype, timeout_s)

    def __index__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<Step {self.number}>"


class _NobodyIsNew(Exception):
    """The newcomers are gone again, so that there is nothing to sync."""


class Loop:
    """The loop of one program, and what it shares with its steps."""

    def __init__(self, run: Run, ops: Ops, state: SharedState | None, min_world: int, wait_s: float) -> None:
        self._run, self._ops, self._state = run, ops, state
        self._min_world, self._wait_s = min_world, wait_s
        self._reduced_in: int | None = None  # the step in which an op has committed

    def steps(self, until: int | None) -> Iterator[Step]:
        number = 0 if self._state is None else self._state.revision
        while until is None or number < until:
            number = self._gather(self._admit(number))
            if until is not None and number >= until:
                return  # the run was further than this newcomer
            yield Step(number, self)
            number += 1
            if self._state is not None:
                self._state.revision = number

    def all_reduce(
        self,
        number: int,
        buffers: Buffers,
        op: str,
        tag: int,
        out: Buffers | None,
        dtype: str | None,
        timeout_s: float | None,
    ) -> ReduceInfo:
        while True:
            try:
                info = self._attempt(buffers, op, tag, out, dtype, timeout_s)
            except TooFewPeers:
                if self._min_world == 1:
                    _copy_to_out(buffers, out, dtype)
                    return ReduceInfo(1, self._run.epoch, 0, 0)
                if self._reduced_in == number:
                    raise
                self._gather(number)
            except CollectiveAborted:
                if self._min_world <= 2:
                    raise
            else:
                self._reduced_in = number
                return info

    def _attempt(
        self, buffers: Buffers, op: str, tag: int, out: Buffers | None, dtype: str | None, timeout_s: float | None
    ) -> ReduceInfo:
        if self._min_world <= 2:
            # The engine refuses a group of one by the epoch's size, so it may retry by itself.
            return self._run.all_reduce(buffers, op=op, tag=tag, out=out, dtype=dtype, timeout_s=timeout_s)
        ops, reduce_op = self._ops, reduce_code(op)
        source = spans_of(buffers, dtype, writable=out is None)
        target = None if out is None else spans_of(out, dtype)
        if target is not None and source.layout != target.layout:
            raise UsageError("out= must have as many arrays as the buffers, each with the same dtype and size")

        def submit(record: Record) -> int:
            if len(record.members) < self._min_world:
                raise TooFewPeers(len(record.members), self._min_world)
            return ops.submit("all_reduce", OpKind.ALL_REDUCE, reduce_op, tag, 0, source, target, timeout_s=timeout_s)

        return ops.run_bound("all_reduce", tag, submit)

    # Admission, waiting, sync

    def _admit(self, number: int) -> int:
        """Rule 1: ask once, admit, sync."""
        run = self._run
        # With several groups the question costs as much as the vote, and those who wait for peers are in a vote.
        if not run.unsynced and (run.spans_groups or run.are_peers_pending()):
            # Another group of the run may be waiting for peers, and this vote waits with it.
            run.update_topology(timeout_s=max(self._wait_s, self._ops.timeout_s))
        return self._sync(number)

    def _gather(self, number: int) -> int:
        """Wait until the group has `min_world` members."""
        run, needed = self._run, self._min_world
        while run.group_size < needed:
            text = "step %d: %d of at least %d peers are there; waiting up to %g s for more"
            _log.warning(text, number, run.group_size, needed, self._wait_s)
            run.update_topology(min_world=needed, timeout_s=self._wait_s)
            number = self._sync(number)
        return number

    def _sync(self, number: int) -> int:
        """Rule 3: give newcomers the run's state. Returns the run's step."""
        run, state = self._run, self._state
        while run.unsynced:
            is_new = run.peer_id in run.unsynced
            header = np.array([number, 0 if state is None else state.revision, _names_of(state)], np.int64)
            arrays: list[object] = [header, *(() if state is None else state.arrays.values())]
            try:
                self._broadcast_from_the_oldest(arrays)
            except (_NobodyIsNew, TooFewPeers):
                self._forget_newcomers()
            except CollectiveAborted:
                pass  # somebody died: look again who is there
            else:
                self._forget_newcomers()
                return self._adopt(number, header, is_new=is_new)
        return number

    def _broadcast_from_the_oldest(self, arrays: list[object]) -> None:
        ops, spans = self._ops, spans_of(arrays)

        def submit(record: Record) -> int:
            ring = [member.peer for member in record.members]
            new = ops.session.machine.unsynced
            if new.isdisjoint(ring):
                raise _NobodyIsNew
            source = min((peer for peer in ring if peer not in new), default=min(ring))
            return ops.submit("sync", OpKind.BROADCAST, 0, SYNC_TAG, ring.index(source), spans, None)

        ops.run_bound("sync", SYNC_TAG, submit)

    def _adopt(self, number: int, header: "np.ndarray[tuple[int], np.dtype[np.int64]]", *, is_new: bool) -> int:
        """Take over the run's step and revision. Who was there before must have had the same."""
        told, revision, names = (int(value) for value in header)
        if names != _names_of(self._state):
            raise StateError("the shared state has other names here than on the peer that it comes from")
        if not is_new and told != number:
            raise StateError(f"this peer is at step {number}, but the run is at step {told}")
        if self._state is not None:
            self._state.revision = revision
        if is_new and told != number:
            _log.info("joined the run at step %d", told)
        return told

    def _forget_newcomers(self) -> None:
        self._ops.session.locked(lambda machine: machine.unsynced.clear())


def _names_of(state: SharedState | None) -> int:
    return 0 if state is None else zlib.crc32("\n".join(state).encode())


def _copy_to_out(buffers: Buffers, out: Buffers | None, dtype: str | None) -> None:
    if out is None:
        return
    source, target = spans_of(buffers, dtype, writable=False), spans_of(out, dtype)
    for here, there in zip(source.arrays, target.arrays, strict=True):
        there.reshape(-1)[:] = here.reshape(-1)
