"""Programs with shared state: the training loop of `Communicator.steps`, and one that calls for every sync itself.

Both keep a *disk*: what members saved after syncs, for all processes of a group to load. A process that starts has a
fresh state, or one from the disk, or a foreign one that belongs to another history (an old checkpoint): the rules of
voting decide what becomes of it.

A model changes by what an op gave, so members that hold the same bits and reduce together go on holding the same bits.
Whatever else may happen to a state happens in `Syncing`, to single peers, as a function of (seed, peer): a bit flips, a
revision is counted twice, an array has another shape, the program writes during a sync, a strategy does not fit.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np

from ringfold.errors import CallMismatch, DeadlineExceeded, StateError, StateLost, TooFewPeers, UsageError
from ringfold.peer.steps import Step
from ringfold.state.shared import MayDiffer, SharedState, set_torn
from ringfold.testing.blocking import SimRun, blocking
from ringfold.testing.program import (
    AGREE_TAG,
    AllReduce,
    ArePending,
    Array,
    Leave,
    Program,
    ProgramOf,
    Request,
    Self,
    Sleep,
    SmallState,
    Sync,
    UpdateTopology,
)
from ringfold.testing.workloads import contributes, gradient
from ringfold.wire.messages import SyncStrategy

Overlap = Literal["none", "first", "all"]
MAX_RESTARTS = 12
"""Of all processes together: a run that lost its state for good comes to an end."""
MAX_SYNCS = 25
"""How often members sync again before they give up, when one of them has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looping:
    """How a training loop over `Communicator.steps` behaves."""

    seed: int
    until: int = 12
    min_world: int = 1
    check_every: int = 4
    size: int = 200
    """Elements of the model, 8 bytes each."""
    ops: int = 1
    """Calls per step."""
    think_ms: float = 3.0
    wait_s: float = 2.0
    rollback: bool = False
    foreign: float = 0.15
    """The share of processes that begin with a state of another history."""
    rejoin: bool = False
    """Whether an evicted peer joins again in the loop. The arrays of an op then have the same size in all steps."""
    sigterm: Literal["", "one", "all"] = ""
    """Which peers get SIGTERM, at some time."""
    skips: float = 0.0
    """How often a peer leaves a step out, as a `continue` in the wrong place does. One side of that is evicted."""
    silent: float = 0.0
    """The share of ops to which a peer contributes nothing."""
    overlap: Overlap = "none"
    """Which ops of a step are in flight together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncing:
    """How a program behaves that calls for every sync itself."""

    seed: int
    rounds: int = 8
    size: int = 200
    one_sender: bool = False
    """One member sends and the others receive, instead of a vote."""
    foreign: float = 0.15
    flips: float = 0.1
    """How often a member's content differs after a change,"""
    jumps: float = 0.05
    """its revision is counted twice,"""
    meddles: float = 0.1
    """it is written to during a sync,"""
    misfits: float = 0.05
    """a process has arrays of another shape,"""
    misuses: float = 0.03
    """names a strategy that does not go with the others',"""
    hurries: float = 0.05
    """or waits for a sync for a moment only."""
    think_ms: float = 2.0
    patience: int = 40


class Disk:
    """What was saved, by group and revision."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], dict[str, Array]] = {}
        self.restarts = 0
        self.is_lost = False
        """A peer found that the state is lost, and not on the disk either: from now on all agree to a rollback."""

    def save(self, group: int, state: SharedState) -> None:
        self._saved[group, state.revision] = {name: np.array(array) for name, array in state.arrays.items()}

    def load(self, group: int, state: SharedState, revision: int | None = None) -> bool:
        """Load this revision, or the newest one. False if it is not there, or does not fit."""
        there = [number for owner, number in self._saved if owner == group]
        wanted = max(there, default=None) if revision is None else revision
        if wanted is None or wanted not in there:
            return False
        content = self._saved[group, wanted]
        if any(np.shape(content[name]) != np.shape(array) for name, array in state.arrays.items()):  # type: ignore[call-overload]
            return False
        for name, array in state.arrays.items():
            if not state.may_differ(name):
                array[...] = content[name]  # type: ignore[index]
        set_torn(state, False)
        state.revision = wanted
        return True


class SimulatedModel:
    """The arrays of one process, and how they change."""

    def __init__(self, size: int, *, misfit: bool = False) -> None:
        self.weights = np.zeros(size + misfit, np.int64)
        self.momentum = np.zeros((2, size // 4 + 1), np.float32)
        self.scale = np.ones((), np.float64)
        self.seen = np.zeros(20, np.int32)
        self.state = SmallState(
            weights=self.weights, momentum=self.momentum, scale=self.scale, seen=MayDiffer(self.seen), none=np.zeros(0)
        )

    def begin(self, me: Self, disk: Disk, draw: Random, foreign: float, newest: int) -> None:
        """The state that a process starts with."""
        kind = draw.random()
        self.seen += me.peer
        if kind < foreign:
            self.weights += np.random.default_rng(draw.randrange(1 << 30)).integers(0, 1000, self.weights.size)
            self.state.revision = draw.randint(0, newest)
        elif kind < 0.5:
            disk.load(me.group, self.state)

    def learn(self, reduced: Array) -> None:
        """What all members do with the result of an op."""
        self.weights[: reduced.size] += reduced[: self.weights.size]
        self.momentum[0] *= 0.5
        self.momentum[0, :3] += float(reduced[0])
        self.scale += 1 / (1 + float(reduced[0]))
        self.seen[0] += 1

    def flip(self, draw: Random) -> None:
        """One bit is not as it should be."""
        self.weights[draw.randrange(self.weights.size)] ^= 1 << draw.randrange(40)


def looping(work: Looping) -> ProgramOf:
    """The loop that users write, over the production code of `steps`."""
    disk = Disk()

    def main(run: SimRun, me: Self) -> None:
        draw = Random(f"{work.seed}/{me.peer}")
        model = SimulatedModel(work.size)
        model.begin(me, disk, draw, work.foreign, work.until - 1)
        rollback = work.rollback or disk.is_lost
        run.sigterm_at_ms = sigterm_at_ms(work.seed, work.sigterm, me)
        try:
            for step in run.steps(
                model.state,
                until=work.until,
                min_world=work.min_world,
                wait_s=work.wait_s,
                check_every=work.check_every,
                rollback=rollback,
                rejoin=work.rejoin,
            ):
                me.step_begins(model.state)
                if step.sync.checked:
                    disk.save(me.group, model.state)
                if Random(f"{work.seed}/{me.peer}/{step.number} skip").random() < work.skips:
                    continue
                size = 3 if work.rejoin else step.number
                calls = []
                for position in range(work.ops):
                    reduced = gradient(me.peer, step.number, position, 1 + (size * 37) % 150, "int64")
                    calls.append((reduced, contributes(work.seed, work.silent, me, (step.number, position))))
                _reduce(work, me, step, calls, run.sleep, model.learn)
                run.sleep(work.think_ms * (1 + (me.peer * 7 + step.number * 3) % 5) / 5)
        except StateError as error:
            disk.is_lost |= isinstance(error, StateLost) and not disk.load(me.group, model.state, error.revision)
            restart(me, disk)
        except TooFewPeers:
            restart(me, disk)
        except SystemExit:
            if run.sigterm_at_ms is None:
                raise
        except CallMismatch:
            if not work.skips:
                raise
        except DeadlineExceeded:
            pass  # no peer came
        me.digest = f"{model.state.revision}"

    return blocking(main)


def sigterm_at_ms(seed: int, which: str, me: Self) -> float | None:
    """When this peer gets SIGTERM, if it does: `which` is "one", "all" or "", none."""
    draw = Random(f"{seed} sigterm")
    who, at_ms = draw.randint(1, 4), draw.uniform(20, draw.choice((100, 500)))
    mine = Random(f"{seed}/{me.peer} sigterm").uniform(0, 30)
    return at_ms + mine if which == "all" or (which == "one" and me.peer == who) else None


def _reduce(
    work: Looping,
    me: Self,
    step: Step,
    calls: list[tuple[Array, bool]],
    sleep: Callable[[float], None],
    learn: Callable[[Array], None],
) -> None:
    """The ops of a step. Those in flight together are waited for in an order of each peer's own."""
    draw, handles, waited = Random(f"{work.seed}/{me.peer}/{step.number} order"), [], []
    for position, (reduced, contribute) in enumerate(calls):
        if work.overlap == "all" or (work.overlap == "first" and position == 0):
            handles.append(step.all_reduce_async(reduced, tag=position, contribute=contribute))
            waited.append(reduced)
            sleep(draw.choice((0.0, 0.0, 3.0)))
        else:
            step.all_reduce(reduced, tag=position, contribute=contribute)
            learn(reduced)
    draw.shuffle(handles)
    for handle in handles:
        handle.wait()
    for reduced in waited:
        learn(reduced)
    # Ops that are not waited for end with the step.
    if work.overlap != "none":
        step.all_reduce_async(np.ones(3, np.int64), tag=len(calls))


def restart(me: Self, disk: Disk) -> None:
    """The program starts again, a limited number of times."""
    disk.restarts += 1
    if disk.restarts <= MAX_RESTARTS:
        me.restart()


def syncing(work: Syncing) -> ProgramOf:
    """Rounds of one op, one change and one sync. After every sync all members agree whether it has to be repeated."""
    disk = Disk()

    def program(me: Self) -> Program:
        draw = Random(f"{work.seed}/{me.peer}")
        model = SimulatedModel(work.size, misfit=draw.random() < work.misfits)
        model.begin(me, disk, draw, work.foreign, work.rounds + 1)
        state, alone, fresh = model.state, 0, True
        while True:
            try:
                while (not fresh or me.world < 2) and (yield ArePending()):
                    yield UpdateTopology()
                    fresh = True
                if me.world < 2:
                    alone += 1
                    if alone > work.patience:
                        break
                    yield Sleep(20)
                    continue
                if not (yield from _sync(work, me, model, disk, draw)):
                    break
                fresh = False
                disk.save(me.group, state)
                me.digest = f"{state.revision}"
                if state.revision >= work.rounds:
                    break
                reduced = gradient(me.peer, state.revision, 0, 1 + (state.revision * 37) % 150, "int64")
                yield AllReduce(reduced)
                model.learn(reduced)
                state.push_revision()
                if draw.random() < work.flips:
                    model.flip(draw)
                if draw.random() < work.jumps:
                    state.push_revision()
                if work.think_ms:
                    yield Sleep(work.think_ms * (1 + me.peer % 3) / 3)
            except TooFewPeers:
                continue
        yield Leave()

    return program


def _sync(work: Syncing, me: Self, model: SimulatedModel, disk: Disk, draw: Random) -> Generator[Request, Any, bool]:
    """Sync until all members have succeeded. False if this one cannot go on."""
    state, attempt = model.state, 0
    while attempt < MAX_SYNCS:
        failed = np.zeros(1, np.int64)
        timeout_ms = draw.randint(1, 200) if draw.random() < work.hurries else 300_000
        meddle = (draw.uniform(0, 20), lambda: model.flip(draw)) if draw.random() < work.meddles else None
        # What cannot be repaired otherwise is, after a while, by continuing from what is there.
        rollback = disk.is_lost or attempt > 5
        try:
            strategy = _strategy(work, me, attempt, draw)
            yield Sync(state, strategy, rollback=rollback, timeout_ms=timeout_ms, meddle=meddle)
        except DeadlineExceeded as error:
            if " the state" not in str(error):
                continue  # there was no plan: the others are still to come, or out
            failed[0] = 1
        except StateLost as error:
            failed[0] = 1
            if attempt and not disk.load(me.group, state, error.revision) and not disk.load(me.group, state):
                disk.is_lost = True
                if state.torn:
                    _wipe(state)
        except StateError as error:
            failed[0] = 1
            if ", you): " in str(error):
                return False  # its arrays are not the others'
            if attempt > 10 and state.torn:
                _wipe(state)
        except UsageError as error:
            if "for all peers or for none" not in str(error):
                raise
            failed[0] = 1
        yield AllReduce(failed, "max", AGREE_TAG)
        if not failed[0]:
            return True
        yield Sleep(5 * attempt)
        attempt += 1
    return False


def _strategy(work: Syncing, me: Self, attempt: int, draw: Random) -> SyncStrategy:
    members = sorted(me.members)
    is_sender = members[attempt % len(members)] == me.peer
    alone: SyncStrategy = "send-only" if is_sender else "receive-only"
    if draw.random() < work.misuses:
        return "enforce-popular" if work.one_sender else alone
    return alone if work.one_sender else "enforce-popular"


def _wipe(state: SharedState) -> None:
    """Start again, where there is nothing to load."""
    for name, array in state.arrays.items():
        if not state.may_differ(name):
            array[...] = 0  # type: ignore[index]
    set_torn(state, False)
    state.revision = 0
