"""Several runs on one master: what is drawn for them, and the checks that they are isolated.

One seed is a scenario of masters that are lost (`scenario.draw_failover`) in the default run, and one or two small runs
with names of their own, on the same masters. Each run has its own checkers, and all of them count peers and epochs from
one: a message that reaches a peer of another run breaks an invariant of that run. A fault in one run may not cost
another run a member.

A named run that has finished admits no peer: a peer that comes too late is refused with that reason, which is checked
as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ringfold.config import DEFAULT_RUN
from ringfold.master.effects import Effect, Notify, SendMessage
from ringfold.testing import faults
from ringfold.testing.checks import Violation
from ringfold.testing.masters import inject_master
from ringfold.testing.nodes import SimMaster
from ringfold.testing.program import ProgramOf
from ringfold.testing.scenario import Outcome, Scenario, draw_failover, outcome_of
from ringfold.testing.scheduler import SimulationFailure
from ringfold.testing.simulation import Setup, Simulation
from ringfold.testing.stateful import Looping, looping
from ringfold.testing.workloads import Training, training
from ringfold.wire.messages import Welcome
from ringfold.wire.notices import RunBegun, RunEnded


@dataclass(frozen=True, slots=True)
class ExtraRun:
    """One more run: its peers and their program, and which of them are killed, and when."""

    name: str
    peers: int
    work: Training | Looping
    kills: tuple[tuple[int, float], ...]
    within_ms: float

    @property
    def program(self) -> ProgramOf:
        return training(self.work) if isinstance(self.work, Training) else looping(self.work)


def draw_extra_runs(seed: int) -> list[ExtraRun]:
    """The runs in addition to the default one."""
    rng = Random(f"beside {seed}")
    return [_draw(rng, seed, f"run-{number}") for number in range(1, rng.choice((2, 2, 3)))]


def _draw(rng: Random, seed: int, name: str) -> ExtraRun:
    peers, think_ms = rng.choice((2, 2, 3)), rng.choice((0.0, 2.0, 10.0))
    work: Training | Looping
    if rng.random() < 0.5:
        work = Training(seed=seed, steps=rng.randint(4, 15), largest=rng.choice((60, 400)), think_ms=think_ms)
    else:
        work = Looping(seed=seed, until=rng.randint(4, 15), check_every=rng.choice((1, 3)), size=60, think_ms=think_ms)
    is_killed = rng.random() < 0.5
    kills = tuple((peer, rng.uniform(0, 300)) for peer in rng.sample(range(peers), rng.randint(1, peers)) if is_killed)
    return ExtraRun(name, peers, work, kills, rng.choice((20, 300)))


class SeveralMaster(SimMaster):
    """A master whose runs must end as they should."""

    def _watch(self, run: str, effect: Effect) -> None:
        super()._watch(run, effect)
        ended = self.sim.injected  # counted with what happened to the run
        match effect:
            case Notify(RunEnded(how=how)) if run != DEFAULT_RUN:
                ended[f"run {how}"] += 1
                if how == "finished":
                    self.sim.finished_runs.add(run)
            case Notify(RunBegun()) if run in self.sim.finished_runs:
                raise Violation(f"run {run} has finished, and begins again")
            case SendMessage(_, Welcome()) if run in self.sim.finished_runs:
                raise Violation(f"run {run} has finished, and admits a peer")
            case _:
                pass


def run_several(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed of several runs; a violation raises SimulationFailure."""
    scenario, extra_runs = draw_failover(seed, base or Setup(shell=SeveralMaster)), draw_extra_runs(seed)
    sim = Simulation(seed, scenario.setup, echo=echo)
    try:
        return _run(sim, scenario, extra_runs)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--runs") from failure


def _run(sim: Simulation, scenario: Scenario, extra_runs: list[ExtraRun]) -> Outcome:
    sim.rejoin, sim.judges_evictions = scenario.rejoin, True
    for other in extra_runs:
        sim.book(other.name)
    cluster = sim.cluster(scenario.peers, groups=scenario.groups, program=scenario.program)
    for fault in scenario.plan:
        faults.inject(sim, fault)
    for master_fault in scenario.masters:
        inject_master(sim, master_fault)
    for other in extra_runs:
        members = sim.cluster(other.peers, program=other.program, within_ms=other.within_ms, run=other.name).peers
        for peer, at_ms in other.kills:
            sim.touched.add(members[peer].name)
            sim.scheduler.at(int(at_ms * 1_000_000), members[peer].kill)
    sim.run_until(cluster.finished, limit_ms=scenario.limit_ms)
    return outcome_of(sim)
