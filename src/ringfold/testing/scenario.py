"""What one seed stands for: a cluster, a program, weather, settings and faults, all drawn from it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Literal

from ringfold.master.settings import MasterSettings
from ringfold.testing import faults
from ringfold.testing.faults import ADVICE, COMMON, KINDS, OF_PATHS, OF_STATE, Fault, FaultKind
from ringfold.testing.masters import MasterFault, draw_masters, inject_master
from ringfold.testing.network import Weather
from ringfold.testing.program import ProgramOf
from ringfold.testing.scheduler import MS, SimulationFailure
from ringfold.testing.simulation import Setup, Simulation, quick_settings
from ringfold.testing.stalling import Stalls
from ringfold.testing.stateful import Looping, Overlap, Syncing, looping, syncing
from ringfold.testing.workloads import Training, training

LIMIT_MS = 120_000
"""Virtual time by which everything must have come to its end; faults are over long before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed led to, when nothing was wrong with it."""

    seed: int
    committed: int
    aborted: int
    epochs: int
    virtual_ms: float
    digest: str
    syncs: Counter[str] = field(default_factory=Counter)
    rings: Counter[str] = field(default_factory=Counter)
    """What came of the votes to optimise the ring."""
    faults: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        broken = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())) or "nothing"
        return (
            f"{self.committed} ops committed, {self.aborted} calls aborted, {self.epochs} epochs, "
            f"{self.syncs['finished']} syncs, {self.virtual_ms:.0f} ms; faults: {broken}; trace {self.digest}"
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about a run that is decided before it begins."""

    setup: Setup
    peers: int
    groups: int
    work: Training | Looping | Syncing
    plan: tuple[Fault, ...]
    rejoin: bool
    masters: tuple[MasterFault, ...] = ()
    limit_ms: float = LIMIT_MS
    searches_ms: tuple[float, ...] = ()
    """When the moonshot search finds a better ring for every group."""

    @property
    def program(self) -> ProgramOf:
        match self.work:
            case Training():
                return training(self.work)
            case Looping():
                return looping(self.work)
            case Syncing():
                return syncing(self.work)


def draw(seed: int, base: Setup | None = None) -> Scenario:
    """The scenario of a seed. `base` may bring other machines, or a planted bug."""
    # A source of its own: the run's draws stay the same when a scenario has one more thing to draw.
    rng = Random(f"scenario {seed}")
    peers = rng.choice((2, 3, 3, 4, 4, 5, 6))
    groups = 2 if peers >= 4 and rng.random() < 0.2 else 1
    settings = quick_settings(
        evidence=rng.choice(("ring", "ring", "master")),
        lanes=rng.choice((1, 1, 2, 3)),
        small_bytes=rng.choice((0, 64, 64, 512)),
        segment_bytes=rng.choice((128, 256, 1_024)),
    )
    weather = Weather(
        latency_us=rng.choice(((20, 200), (20, 2_000), (20, 20_000), (500, 20_000))),
        jitter_us=rng.choice(((0, 50), (0, 500), (0, 5_000))),
        bytes_per_ms=rng.choice(((50, 1_000), (500, 20_000), (20_000, 1_000_000))),
        window_bytes=rng.choice(((256, 1_024), (1_024, 65_536))),
        split_chance=rng.choice((0.05, 0.3)),
    )
    kinds: list[FaultKind] = [*rng.sample(KINDS, rng.randint(1, 3)), rng.choice(COMMON)]
    work: Training | Looping | Syncing
    kind = rng.random()
    if kind < 0.5:
        work = _training(rng, seed, peers)
        if groups == 1 and rng.random() < 0.25:
            work = replace(work, optimise_every=rng.choice((2, 5)))
            settings = replace(settings, measure_ms=rng.choice((150, 400)))
            # Filler takes what a link has: over fast ones in small pieces a measurement would be millions of events.
            weather = replace(weather, bytes_per_ms=(50, 2_000), window_bytes=(4_096, 65_536))
    else:
        work = _looping(rng, seed, peers) if kind < 0.75 else _syncing(rng, seed)
        kinds = [*kinds[-2:], *OF_STATE, "join", "join"]
    if isinstance(work, Training):
        work = _crowded(seed, work)
        is_plain = groups == 1 and work.tags == 1 and not work.burst and not work.optimise_every
        if is_plain and Random(f"wrong {seed}").random() < 0.4:
            work = replace(work, founders=peers, wrong=Random(f"share {seed}").choice((0.5, 1.0)))
            kinds += ["join", "join", "join"]
        work = replace(work, silent=Random(f"silent {seed}").choice((0.0, 0.0, 0.2, 0.6)))
        if work.burst:
            # Over the slowest links hundreds of headers, and a seal that lists them, take longer than silence may last.
            weather = replace(weather, bytes_per_ms=(2_000, 100_000), window_bytes=(4_096, 65_536))
    plan = faults.draw(rng, peers, rng.choice((60, 200, 500)), settings.liveness.evict_after_ms, kinds)
    paths, of_paths = _paths(seed, peers, settings)
    first_sequence = Random(f"sequences {seed}").choice((0, 0, 0, (1 << 32) - 3))
    setup = replace(base or Setup(), settings=settings, weather=weather, paths=paths, first_sequence=first_sequence)
    plan = [*plan, *of_paths, *_advice(seed, peers, paths)]
    scenario = Scenario(setup, peers, groups, work, tuple(plan), rng.random() < 0.6)
    return _with_searches(seed, scenario)


def _with_searches(seed: int, scenario: Scenario) -> Scenario:
    """In some worlds better rings are found again and again, and adopted by updates between steps."""
    rng, work = Random(f"searches {seed}"), scenario.work
    is_plain = isinstance(work, Training) and not work.wrong and scenario.groups == 1
    if not isinstance(work, Training) or not is_plain or scenario.peers < 3 or rng.random() < 0.5:
        return scenario
    horizon_ms = rng.choice((60, 200, 800))
    searches = tuple(rng.uniform(0, horizon_ms) for _ in range(rng.randint(4, 16)))
    return replace(scenario, work=replace(work, update_every=rng.choice((1, 2, 3))), searches_ms=searches)


def _paths(seed: int, peers: int, settings: MasterSettings) -> tuple[int, list[Fault]]:
    """How many paths peers have, and which faults single paths and lanes get: none where there is only one of them."""
    rng = Random(f"paths {seed}")
    paths = rng.choice((1, 1, 1, 2, 3))
    kinds: tuple[FaultKind, ...] = OF_PATHS if paths > 1 else ("reset_lanes",) if settings.lanes > 1 else ()
    if not kinds:
        return paths, []
    plan = []
    for _ in range(rng.randint(0, 4)):
        who = tuple(rng.sample(range(peers), 2))
        at_ms, for_ms = rng.uniform(0, rng.choice((0.5, 5, 40))), rng.uniform(1, 300)
        plan.append(Fault(rng.choice(kinds), at_ms, for_ms, who, rng.randint(1, 25)))
    return paths, plan


def _advice(seed: int, peers: int, paths: int) -> list[Fault]:
    """When peers receive hints about their paths, where they have several."""
    rng = Random(f"advice {seed}")
    if paths == 1 or rng.random() < 0.3:
        return []
    chosen = rng.sample(range(peers), rng.randint(1, peers))
    return [Fault(ADVICE, rng.uniform(0, 10), rng.uniform(1, 600), (peer, peer), rng.randint(1, 10)) for peer in chosen]


def draw_failover(seed: int, base: Setup | None = None) -> Scenario:
    """The scenario of a seed in which masters are lost and replaced, besides everything else that happens in it."""
    scenario = draw(seed, base)
    rng = Random(f"masters {seed}")
    settings = replace(scenario.setup.settings, return_ms=2_500)
    timings = replace(scenario.setup.timings, master_patience=1, reconnect_try_ms=200)
    write_us = rng.choice(((10, 100), (20, 2_000), (500, 10_000)))
    setup = replace(scenario.setup, settings=settings, timings=timings, journal=True, write_us=write_us)
    plan = scenario.plan if rng.random() < 0.6 else ()
    masters = draw_masters(rng, rng.choice((30, 100, 300, 800)))
    return replace(scenario, setup=setup, plan=plan, masters=tuple(masters), limit_ms=3 * LIMIT_MS)


def draw_stalls(seed: int, base: Setup | None = None) -> Scenario:
    """The scenario of a seed in which programs hang, or are slow, in addition to other faults."""
    rng = Random(f"stalls {seed}")
    scenario = next(each for each in (draw(number, base) for number in count(seed)) if isinstance(each.work, Training))
    assert isinstance(scenario.work, Training)
    timeout_ms = rng.choice((800, 1_500))
    op_timeout_ms = rng.choice((6 * timeout_ms, 10 * timeout_ms))
    longest_ms = rng.choice((2.5, 8)) * timeout_ms
    shares = {name: rng.choice((0.0, 0.15, 0.3)) for name in ("slow", "busy")}
    hangs = rng.choice((0.0, 0.15, 0.3, 0.4))
    stalls = Stalls(seed=seed, timeout_ms=timeout_ms, longest_ms=int(longest_ms), hangs=hangs, **shares)
    steps = rng.randint(6, 14)
    work = replace(scenario.work, stalls=stalls, steps=steps, burst=0, timeout_ms=0, wrong=0.0, optimise_every=0)
    work = replace(work, update_every=0)
    setting: int | Literal["auto", "off"] = rng.choice((timeout_ms, timeout_ms, "auto", "off"))
    settings = replace(
        scenario.setup.settings,
        stall_timeout_ms=setting,
        min_stall_ms=timeout_ms,
        op_timeout_ms=op_timeout_ms,
    )
    setup = replace(scenario.setup, settings=settings, op_timeout_ms=op_timeout_ms)
    masters: tuple[MasterFault, ...] = ()
    if rng.random() < 0.25:
        settings, timings = replace(settings, return_ms=2_500), replace(setup.timings, reconnect_try_ms=200)
        timings = replace(timings, master_patience=1)
        setup = replace(setup, settings=settings, timings=timings, journal=True)
        masters = tuple(draw_masters(rng, rng.choice((1_000, 5_000))))
    plan = scenario.plan if rng.random() < 0.4 else ()
    return replace(scenario, setup=setup, work=work, plan=plan, masters=masters, limit_ms=5 * LIMIT_MS)


def draw_channels(seed: int, base: Setup | None = None) -> Scenario:
    """The scenario of a seed with 2 to 4 channels: their lanes move, break and are late in any order."""
    scenario = draw(seed, base)
    channels = Random(f"channels {seed}").choice((2, 3, 4))
    settings = replace(scenario.setup.settings, channels=channels)
    return replace(scenario, setup=replace(scenario.setup, settings=settings), limit_ms=3 * LIMIT_MS)


def draw_hosts(seed: int, base: Setup | None = None) -> Scenario:
    """The scenario of a seed with several peers on each host: lanes between all members, ops host by host."""
    rng = Random(f"hosts {seed}")
    scenario = draw(seed, replace(base or Setup(), hosts=rng.choice((2, 2, 3, 1))))
    settings = replace(
        scenario.setup.settings,
        evidence="ring",
        lanes=1,
        channels=rng.choice((1, 1, 2, 3)),
        direct_lanes=rng.random() < 0.7,
    )
    timings = replace(scenario.setup.timings, direct_pause_ms=rng.choice((0, 1, 10)))
    setup = replace(scenario.setup, settings=settings, timings=timings, paths=1)
    plan = tuple(fault for fault in scenario.plan if fault.kind not in (*OF_PATHS, "reset_lanes", ADVICE))
    peers, work = rng.choice((4, 4, 6, 6, 8, 9)), scenario.work
    if isinstance(work, Training):
        work = replace(work, optimise_every=0)  # measuring all links of nine peers would be too many events
    # A burst of ops that are called again one after the other takes its time around a slow ring of nine.
    return replace(scenario, setup=setup, peers=peers, groups=1, work=work, plan=plan, limit_ms=3 * LIMIT_MS)


def _training(rng: Random, seed: int, peers: int) -> Training:
    steps = rng.choice((rng.randint(4, 12), rng.randint(12, 40)))
    return Training(
        seed=seed,
        steps=steps,
        ops=rng.choice(((1, 1), (1, 2), (2, 4))),
        largest=rng.choice((60, 400, 1_500)),
        tags=rng.choice((1, 1, 2, 4)),
        retry=rng.choice((1.0, 1.0, 0.5, 0.0)),
        think_ms=rng.choice((0.0, 2.0, 10.0)),
        asks_again=rng.random() < 0.3,
        leave_after=_leavers(rng, peers, steps),
    )


def _crowded(seed: int, work: Training) -> Training:
    """Now and then hundreds of ops at once, with peers that come late; and calls whose deadline passes."""
    rng = Random(f"crowd {seed}")
    if rng.random() < 0.15:
        work = replace(work, burst=rng.choice((60, 200, 400)), steps=min(work.steps, 5), largest=min(work.largest, 400))
    if rng.random() < 0.25:
        # Every deadline that passes costs all of them a round.
        work = replace(work, timeout_ms=rng.choice((20, 100)), steps=min(work.steps, 12))
    return work


def _looping(rng: Random, seed: int, peers: int) -> Looping:
    work = _plain_looping(rng, seed, peers)
    draw = Random(f"overlap {seed}")
    overlap: Overlap = draw.choice(("none", "none", "first", "all"))
    ops = work.ops if overlap == "none" else draw.randint(2, 3)
    return replace(work, overlap=overlap, ops=ops, silent=draw.choice((0.0, 0.0, 0.3, 0.6)))


def _plain_looping(rng: Random, seed: int, peers: int) -> Looping:
    return Looping(
        seed=seed,
        until=rng.randint(4, 25),
        min_world=rng.choice((1, 1, 2, 2, 3)) if peers > 2 else rng.choice((1, 2)),
        check_every=rng.choice((1, 3, 10)),
        size=rng.choice((20, 100, 600)),
        ops=rng.choice((1, 1, 2)),
        think_ms=rng.choice((0.0, 2.0, 10.0)),
        rollback=rng.random() < 0.3,
        foreign=rng.choice((0.0, 0.3)),
        rejoin=Random(f"rejoin {seed}").random() < 0.6,
        sigterm=Random(f"sigterm {seed}").choice(("", "", "", "one", "all")),
        skips=Random(f"skips {seed}").choice((0.0, 0.0, 0.0, 0.02)),
    )


def _syncing(rng: Random, seed: int) -> Syncing:
    calm = rng.random() < 0.3
    return Syncing(
        seed=seed,
        rounds=rng.randint(3, 15),
        size=rng.choice((20, 100, 600)),
        one_sender=rng.random() < 0.25,
        foreign=rng.choice((0.0, 0.3)),
        flips=0.0 if calm else rng.choice((0.1, 0.4)),
        jumps=0.0 if calm else rng.choice((0.0, 0.1)),
        meddles=0.0 if calm else rng.choice((0.0, 0.15)),
        misfits=0.0 if calm else 0.05,
        misuses=0.0 if calm else 0.02,
        hurries=0.0 if calm else rng.choice((0.0, 0.15)),
        think_ms=rng.choice((0.0, 2.0, 10.0)),
    )


def _leavers(rng: Random, peers: int, steps: int) -> tuple[tuple[int, int], ...]:
    if rng.random() < 0.7:
        return ()
    return tuple((peer, rng.randint(1, steps)) for peer in rng.sample(range(1, peers + 1), rng.randint(1, peers - 1)))


def run_seed(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed to its end; a broken promise raises SimulationFailure."""
    return run_scenario(seed, draw(seed, base), echo=echo)


def run_failover(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed with masters that are lost; a broken promise raises SimulationFailure."""
    try:
        return run_scenario(seed, draw_failover(seed, base), echo=echo)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--failover") from failure


def run_stalls(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed with programs that hang, or are slow; a broken promise raises SimulationFailure."""
    try:
        return run_scenario(seed, draw_stalls(seed, base), echo=echo)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--stalls") from failure


def run_channels(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed with several channels; a broken promise raises SimulationFailure."""
    try:
        return run_scenario(seed, draw_channels(seed, base), echo=echo)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--channels") from failure


def run_hosts(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed with several peers on each host; a broken promise raises SimulationFailure."""
    try:
        return run_scenario(seed, draw_hosts(seed, base), echo=echo)
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--hosts") from failure


def run_scenario(
    seed: int, scenario: Scenario, *, program: ProgramOf | None = None, echo: Callable[[str], None] | None = None
) -> Outcome:
    """Run what was drawn to its end; `program` instead of the one that was drawn."""
    sim = Simulation(seed, scenario.setup, echo=echo)
    sim.rejoin = scenario.rejoin
    sim.judges_evictions = True
    cluster = sim.cluster(scenario.peers, groups=scenario.groups, program=program or scenario.program)
    for fault in scenario.plan:
        faults.inject(sim, fault)
    for master_fault in scenario.masters:
        inject_master(sim, master_fault)
    for at_ms in scenario.searches_ms:
        sim.scheduler.at(int(at_ms * MS), sim.find_rings)
    sim.run_until(cluster.finished, limit_ms=scenario.limit_ms)
    return outcome_of(sim)


def outcome_of(sim: Simulation) -> Outcome:
    """What a simulation has led to. The syncs are those of the default run."""
    history, syncs, seed = sim.history, sim.syncs, sim.seed
    counts = Counter(
        finished=syncs.finished,
        fetches=syncs.fetched,
        rollbacks=syncs.rollbacks,
        **{f"failed with {name}": count for name, count in syncs.errors.items()},
    )
    committed = sum(len(book.history.committed) for book in sim.books.values())
    digest = sim.scheduler.trace.digest
    return Outcome(seed, committed, history.aborted, sim.epochs, sim.now_ms, digest, counts, sim.rings, sim.injected)
