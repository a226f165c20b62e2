"""All peers are killed, repeatedly: simulated runs that continue from checkpoints.

A schedule has a few names, each with a disk of its own that outlives its processes, and some phases. In a phase some of
them are started, at different moments, with the production loop of `steps` over their disk; then all are killed, and
now and then the master too. Between phases disks lose files: a save that was cut off, a damaged file, a new disk. Where
a run finds that its state is lost, the next phase begins with `rollback=True`. In the last phase all come, and the
schedule ends when they are through.

The checks are those of every sync (`sync_checks.py`). Besides, `StateLost` must not reach a program while a peer
could have loaded a checkpoint of the run's history.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol, cast

import numpy as np

from ringfold.config import DEFAULT_RUN
from ringfold.errors import DeadlineExceeded, StateError, StateLost
from ringfold.peer.steps import Step
from ringfold.state.ancestry import branch_of, is_abandoned_by_any
from ringfold.state.manifest import LoadedCheckpoint, digest_of
from ringfold.state.shared import SharedState, lineage_of, set_lineage, set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.testing.blocking import SimRun, blocking
from ringfold.testing.checks import Violation
from ringfold.testing.masters import lead
from ringfold.testing.network import Weather
from ringfold.testing.program import Array, ProgramOf, Self, SmallState
from ringfold.testing.scenario import Outcome
from ringfold.testing.scheduler import SimulationFailure
from ringfold.testing.simulation import Book, Setup, Simulation, quick_settings
from ringfold.testing.sync_checks import SyncHistory, bits_of
from ringfold.testing.workloads import gradient
from ringfold.wire.messages import Branch, Lineage

NAMES = ("a", "b", "c", "d")
LIMIT_MS = 120_000
KEEP = 3


@dataclass(slots=True)
class _File:
    revision: int
    lineage: Lineage | None
    arrays: dict[str, Array]
    is_damaged: bool = False

    @property
    def branch(self) -> Branch:
        assert self.lineage is not None
        return branch_of(self.lineage, self.revision)


class SimDisk:
    """The checkpoints of one name, as `Checkpoints` keeps them in a directory."""

    def __init__(self, history: SyncHistory) -> None:
        self.files: list[_File] = []
        """The one that was saved last comes first."""
        self._history = history

    def save(self, state: SharedState) -> None:
        saved = _File(state.revision, lineage_of(state), {name: np.array(each) for name, each in state.arrays.items()})
        self._history.saved(saved.branch, bits_of(Snapshot.take(state))[0])
        others = [file for file in self.files if file.branch != saved.branch]
        self.files = [saved, *others[: 2 * KEEP - 1]]

    def load_newest(self, state: SharedState) -> int | None:
        known = [file.lineage for file in self.files if file.lineage is not None]
        for file in self._newest_first():
            if not is_abandoned_by_any(file.branch, known) and not file.is_damaged:
                return self._load(state, file)
        return None

    def load(self, state: SharedState, revision: int) -> int:
        return self._load(state, next((file for file in self.files if file.revision == revision), None))

    def load_branch(self, state: SharedState, branch: Branch) -> int:
        return self._load(state, next((file for file in self.files if file.branch == branch), None))

    def revisions(self) -> list[int]:
        return [file.revision for file in self._newest_first()]

    def branches(self) -> list[Branch]:
        return [file.branch for file in self._newest_first()]

    def _newest_first(self) -> list[_File]:
        return sorted(self.files, key=lambda file: -file.revision)

    def _load(self, state: SharedState, file: _File | None) -> int:
        if file is None or file.is_damaged:
            raise StateError("there is no such checkpoint, or it is damaged")
        for name, array in state.arrays.items():
            array[...] = file.arrays[name]  # type: ignore[index]
        state.revision = file.revision
        digest = digest_of(Snapshot.take(state).manifest.offer("enforce-popular"))
        set_lineage(state, file.lineage, LoadedCheckpoint(file.revision, digest))
        set_torn(state, False)
        return file.revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One life of the run: which peers come when, how it steps, and how it ends."""

    starts: tuple[tuple[str, float], ...]
    every: int
    check_every: int
    min_world: int
    length_ms: float
    kill_within_ms: float
    kills_master: bool


@dataclass(frozen=True, slots=True)
class ResumeSchedule:
    """Everything that is decided before it begins."""

    setup: Setup
    phases: tuple[Phase, ...]
    size: int
    think_ms: float
    run: str
    """The default run begins again where no peer has anything to continue from, and a named one is lost."""


class ResumedModel(Protocol):
    """The state of one process, and what a step does to it."""

    @property
    def state(self) -> SharedState: ...

    def train(self, run: SimRun, me: Self, step: Step) -> None: ...


class PlainModel:
    """One array, to which each step adds what its op gives."""

    def __init__(self, schedule: ResumeSchedule, life: int) -> None:
        self._schedule = schedule
        self._weights = np.full(schedule.size, life, np.int64)
        self.state: SharedState = SmallState(weights=self._weights)

    def train(self, run: SimRun, me: Self, step: Step) -> None:
        reduced = gradient(me.peer, step.number, 0, self._schedule.size, "int64")
        step.all_reduce(reduced)
        self._weights += reduced
        run.sleep(self._schedule.think_ms * (1 + (me.peer * 7 + step.number * 3) % 5) / 5)


@dataclass(slots=True)
class _ResumeRun:
    """What all processes of a schedule share."""

    sim: Simulation
    schedule: ResumeSchedule
    model: Callable[[int], ResumedModel]
    """Makes the model of a process, given its phase."""
    disks: dict[str, SimDisk] = field(default_factory=dict)
    is_lost: bool = False
    until: int = 1 << 30
    newest: int = 0
    lives: int = 0
    """How many phases have begun. Each has fresh arrays of its own, so that contents tell histories apart."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def book(self) -> Book:
        return self.sim.book(self.schedule.run)


def draw_resume(seed: int, base: Setup | None = None) -> ResumeSchedule:
    """The schedule of a seed. `base` may bring other machines."""
    rng = Random(f"resume {seed}")
    names = NAMES[: rng.choice((1, 2, 2, 3, 3, 4))]
    settings = quick_settings(resume_wait_ms=rng.choice((0, 100, 400)), return_ms=400)
    weather = Weather(latency_us=rng.choice(((20, 200), (20, 2_000))), bytes_per_ms=(20_000, 1_000_000))
    setup = replace(base or Setup(), settings=settings, weather=weather, journal=True)
    phases = [_draw_phase(rng, names) for _ in range(rng.choice((2, 3, 4, 5)))]
    last = _draw_phase(rng, names)
    starts = tuple((name, rng.uniform(0, 50)) for name in names)
    phases.append(replace(last, starts=starts, kills_master=False))
    size, think_ms = rng.choice((20, 100)), rng.choice((0.0, 2.0, 5.0))
    return ResumeSchedule(setup, tuple(phases), size, think_ms, rng.choice((DEFAULT_RUN, "story")))


def _draw_phase(rng: Random, names: tuple[str, ...]) -> Phase:
    there = [name for name in names if rng.random() < 0.75] or [rng.choice(names)]
    latest = rng.choice((5, 30, 150))
    return Phase(
        starts=tuple((name, rng.uniform(0, latest)) for name in there),
        every=rng.choice((1, 3, 10, 30)),
        check_every=rng.choice((1, 3, 10)),
        min_world=rng.randint(1, len(there)),
        length_ms=latest + rng.choice((30, 100, 300)) * rng.uniform(0.5, 1.5),
        kill_within_ms=rng.choice((0, 5, 40)),
        kills_master=rng.random() < 0.4,
    )


def run_resume(
    seed: int,
    base: Setup | None = None,
    *,
    echo: Callable[[str], None] | None = None,
    model: Callable[[int], ResumedModel] | None = None,
) -> Outcome:
    """Run one schedule to its end; a violation raises SimulationFailure."""
    schedule = draw_resume(seed, base)
    sim = Simulation(seed, schedule.setup, echo=echo)
    resumed = _ResumeRun(sim, schedule, model or (lambda life: PlainModel(schedule, life)))
    try:
        _run_phases(resumed)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--resume") from failure
    syncs, history = resumed.book.syncs, resumed.book.history
    counts = Counter(finished=syncs.finished, rollbacks=syncs.rollbacks, resumes=syncs.resumes, **resumed.counts)
    committed, digest = len(history.committed), sim.scheduler.trace.digest
    return Outcome(seed, committed, history.aborted, sim.epochs, sim.now_ms, digest, counts)


def _run_phases(resumed: _ResumeRun) -> None:
    sim, phases = resumed.sim, resumed.schedule.phases
    for phase in phases[:-1]:
        _start(resumed, phase)
        _run_for(sim, phase.length_ms)
        if phase.kills_master:
            sim.master.die("is killed")
        for peer in sim.peers:
            if peer.busy:
                sim.crash(peer, within_ms=phase.kill_within_ms)
        sim.run_until(sim.is_over, limit_ms=LIMIT_MS)
        if phase.kills_master:
            lead(sim)
        _wear(resumed)
    resumed.until = resumed.newest + 3
    for _ in range(2):  # a state that is lost for good needs one more try
        _start(resumed, phases[-1])
        sim.run_until(sim.is_over, limit_ms=LIMIT_MS)
        if not resumed.is_lost:
            return


def _run_for(sim: Simulation, length_ms: float) -> None:
    end_ms = sim.now_ms + length_ms
    sim.run_until(lambda: sim.now_ms >= end_ms, limit_ms=LIMIT_MS)


def _start(resumed: _ResumeRun, phase: Phase) -> None:
    sim, rollback, resumed.is_lost = resumed.sim, resumed.is_lost, False
    resumed.lives += 1
    for name, after_ms in phase.starts:
        program = _program(resumed, phase, name, rollback)
        sim.join(program, name=name, at_ms=sim.now_ms + after_ms, run=resumed.schedule.run)


def _wear(resumed: _ResumeRun) -> None:
    """What may happen to disks while nothing runs."""
    rng = resumed.sim.rng
    for _, disk in sorted(resumed.disks.items()):
        kind = rng.random()
        newest = max(disk.files, key=lambda file: file.revision, default=None)
        if newest is None:
            continue
        if kind < 0.25:
            newest.is_damaged = True
        elif kind < 0.4:
            disk.files.remove(newest)
        elif kind < 0.5:
            disk.files = [file for file in disk.files if rng.random() < 0.5]
        elif kind < 0.55:
            disk.files.clear()


def _program(resumed: _ResumeRun, phase: Phase, name: str, rollback: bool) -> ProgramOf:
    disk = resumed.disks.setdefault(name, SimDisk(resumed.book.syncs))
    life = resumed.lives

    def main(run: SimRun, me: Self) -> None:
        model = resumed.model(life)
        state = model.state
        try:
            for step in run.steps(
                state,
                until=resumed.until,
                min_world=phase.min_world,
                wait_s=3.0,
                check_every=phase.check_every,
                checkpoint=cast(Any, disk),
                every=phase.every,
                rollback=rollback,
            ):
                me.step_begins(state)
                resumed.newest = max(resumed.newest, step.number)
                model.train(run, me, step)
        except StateLost as error:
            _check_lost(resumed, me, disk, error)
            resumed.is_lost = True
            resumed.counts["lost"] += 1
        except (StateError, DeadlineExceeded):
            resumed.counts["gave up"] += 1
        me.digest = f"{state.revision}"

    return blocking(main)


def _check_lost(resumed: _ResumeRun, me: Self, disk: SimDisk, error: StateLost) -> None:
    """A program must not end for a state that its own disk could have replaced."""
    good = [file.branch for file in disk.files if not file.is_damaged]
    if any(resumed.book.syncs.is_reached(me.group, branch) for branch in good):
        raise Violation(f"peer {me.peer} ends with {error}, and has a checkpoint of the run's history")
