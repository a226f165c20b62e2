"""Training loops with a sampler: every sample is used exactly once per pass, whatever happens to the peers.

The model of these programs is a count for each sample: how often it was in the result of a step's last op. A peer
passes in a one for each sample of its share, so the op itself shows what was used: the counts are the committed
history, and they go back with the state where the run does. Checked at the beginning of every step, and at the end:

- a sample that the sampler calls consumed in this pass was used once more than there were passes, and the others
  exactly as often: none is lost, none is used twice;
- as in all loops, members that took part in the same sync hold the same bits, the sampler's arrays included.

A seed is a scenario with faults (`scenario.py`), the same with masters that are lost, or one in which all peers are
killed and come back with their checkpoints (`resuming.py`); now and then a peer gets SIGTERM inside a step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import numpy as np

from ringfold.data.sampler import Sampler, consumed_positions
from ringfold.errors import DeadlineExceeded, StateError, StateLost, TooFewPeers
from ringfold.peer.steps import Step
from ringfold.testing.blocking import SimRun, blocking
from ringfold.testing.checks import Violation
from ringfold.testing.program import ProgramOf, Self, SmallState
from ringfold.testing.resuming import run_resume
from ringfold.testing.scenario import Outcome, Scenario, draw, draw_failover, run_scenario
from ringfold.testing.scheduler import SimulationFailure
from ringfold.testing.simulation import Setup
from ringfold.testing.stateful import Disk, Looping, Overlap, Syncing, restart, sigterm_at_ms
from ringfold.testing.workloads import contributes, gradient

MAX_MEMBERS = 6
"""Some groups have more members, and some queues as many ranges as they may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """How a training loop with a sampler behaves."""

    seed: int
    size: int = 50
    batch_size: int = 3
    passes: int = 2
    shuffle: bool = True
    ops: int = 1
    overlap: Overlap = "none"
    silent: float = 0.0
    """The share of ops to which a peer contributes nothing."""
    varies: bool = False
    """Whether the size of a share changes from step to step."""
    think_ms: float = 2.0
    min_world: int = 1
    check_every: int = 4
    wait_s: float = 2.0
    rejoin: bool = True
    rollback: bool = False
    foreign: float = 0.0
    """The share of processes that begin with a state of another history."""
    sigterm: Literal["", "one", "all"] = ""


class SampledModel:
    """The arrays of one process: how often each sample was used, and the sampler."""

    def __init__(self, work: Sampled, life: int = 0) -> None:
        self.work = work
        self.used = np.zeros(work.size, np.int64)
        self.sampler = Sampler(
            work.size, work.batch_size, seed=work.seed, shuffle=work.shuffle, max_members=MAX_MEMBERS
        )
        self.state = SmallState(used=self.used, data=self.sampler, life=np.full(1, life, np.int64))

    def make_foreign(self, draw: Random) -> None:
        """The state of a process that was in another run, some steps into a pass. It is not at the end of the loop, as
        in other loops: peers that begin there would not wait for others."""
        for revision in range(draw.randint(1, 6)):
            members = tuple(sorted(draw.sample(range(1, 9), draw.randint(1, 4))))
            plan = self.sampler.plan(members)
            assert plan is not None
            contributors = {member for member in members if draw.random() < 0.7}
            if plan.settle(contributors).passes_done == self.work.passes:
                return
            for member in contributors:
                self.used[self.sampler.share(plan, member).indices] += 1
            self.sampler.settle(plan.settle(contributors), members, run=draw.randint(1, 3), batch_size=None)
            self.state.revision = revision + 1

    def check(self, peer: int) -> None:
        """The counts must be those that the sampler stands for."""
        expected = np.full(self.work.size, self.sampler.passes_done, np.int64)
        positions = np.array(sorted(consumed_positions(self.sampler)), np.int64)
        expected[self.sampler._order.samples(self.sampler.passes_done, positions)] += 1
        wrong = np.flatnonzero(self.used != expected)
        if wrong.size:
            sample = int(wrong[0])
            found = f"sample {sample} was used {self.used[sample]} times, and by the sampler {expected[sample]} times"
            raise Violation(
                f"peer {peer}, step {self.state.revision}: {found} ({wrong.size} samples differ; {self.sampler})"
            )

    def train(self, run: SimRun, me: Self, step: Step) -> None:
        """One step."""
        work = self.work
        self.check(me.peer)
        share = step.shard()
        calls = [gradient(me.peer, step.number, place, 7, "int64") for place in range(work.ops - 1)]
        calls.append(np.zeros(work.size, np.int64))
        calls[-1][share.indices] = 1
        order = Random(f"{work.seed}/{me.peer}/{step.number} order")
        handles = []
        for place, array in enumerate(calls):
            contribute = contributes(work.seed, work.silent, me, (step.number, place))
            if work.overlap == "all" or (work.overlap == "first" and place == 0):
                handles.append(step.all_reduce_async(array, tag=place, contribute=contribute))
                run.sleep(order.choice((0.0, 0.0, 3.0)))
            else:
                step.all_reduce(array, tag=place, contribute=contribute)
        order.shuffle(handles)
        for handle in handles:
            handle.wait()
        self.used += calls[-1]
        if work.varies:
            self.sampler.batch_size = 1 + step.number % 5
        run.sleep(work.think_ms * (1 + (me.peer * 7 + step.number * 3) % 5) / 5)


def sampled(work: Sampled) -> ProgramOf:
    """The loop that users write, over the production code of `steps`."""
    disk = Disk()

    def main(run: SimRun, me: Self) -> None:
        model, draw = SampledModel(work), Random(f"{work.seed}/{me.peer}")
        if draw.random() < work.foreign:
            model.make_foreign(draw)
        run.sigterm_at_ms = sigterm_at_ms(work.seed, work.sigterm, me)
        try:
            for step in run.steps(
                model.state,
                passes=work.passes,
                min_world=work.min_world,
                wait_s=work.wait_s,
                check_every=work.check_every,
                rollback=work.rollback or disk.is_lost,
                rejoin=work.rejoin,
            ):
                me.step_begins(model.state)
                model.train(run, me, step)
            if not model.state.torn:  # SIGTERM may end the loop inside a sync
                model.check(me.peer)
        except StateError as error:
            disk.is_lost |= isinstance(error, StateLost)
            restart(me, disk)
        except TooFewPeers:
            restart(me, disk)
        except SystemExit:
            if run.sigterm_at_ms is None:
                raise
        except DeadlineExceeded:
            pass  # no peer came
        me.digest = f"{model.state.revision}"

    return blocking(main)


def draw_sampled(seed: int, peers: int) -> Sampled:
    rng = Random(f"samples {seed}")
    return Sampled(
        seed=seed,
        size=rng.choice((1, 7, 40, 40, 120)),
        batch_size=rng.choice((1, 2, 3, 8)),
        passes=rng.choice((1, 2, 3)),
        shuffle=rng.random() < 0.7,
        ops=rng.choice((1, 1, 2, 3)),
        overlap=rng.choice(("none", "none", "first", "all")),
        silent=rng.choice((0.0, 0.0, 0.2, 0.5)),
        varies=rng.random() < 0.3,
        think_ms=rng.choice((0.0, 2.0, 10.0)),
        min_world=rng.choice((1, 1, 2, 2, 3)) if peers > 2 else rng.choice((1, 2)),
        check_every=rng.choice((1, 3, 10, 100)),
        rejoin=rng.random() < 0.7,
        rollback=rng.random() < 0.3,
        foreign=rng.choice((0.0, 0.0, 0.3)),
        sigterm=rng.choice(("", "", "one", "all")),
    )


def run_samples(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed of loops with samplers; a violation raises SimulationFailure."""
    kind = Random(f"kind of samples {seed}").random()
    try:
        if kind < 0.25:
            work = replace(draw_sampled(seed, 3), passes=1 << 30, foreign=0.0)
            return run_resume(seed, base, echo=echo, model=lambda life: SampledModel(work, life))
        scenario = _with_state(seed, base, draw_failover if kind < 0.5 else draw)
        work = draw_sampled(seed, scenario.peers)
        return run_scenario(seed, replace(scenario, limit_ms=3 * scenario.limit_ms), program=sampled(work), echo=echo)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--samples") from failure


def _with_state(seed: int, base: Setup | None, draw_one: Callable[[int, Setup | None], Scenario]) -> Scenario:
    """A scenario with faults that are meant for programs with state."""
    return next(
        found
        for found in (draw_one(number, base) for number in range(1_000 * seed, 1_000 * seed + 1_000))
        if isinstance(found.work, Looping | Syncing)
    )
