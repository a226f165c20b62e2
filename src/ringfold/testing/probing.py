"""Rounds under faults: the production round machines of all kinds, drawn from a seed.

One seed is a kind of round, some nodes and listeners with clocks of their own, and a plan of faults: crashes and
restarts of nodes and of the master, freezes, lost power, nodes that are stuck (they send heartbeats and nothing else),
lost connections, messages that are late, repeated or overtaken, clocks
that jump by a millisecond to an hour, slow fits, alarms, commands, joins and leaves. At `faults_ms` all of it is over,
and everything that is gone for no good reason is started again: from there a whole round must come within a bound.

    python -m ringfold.testing --probing --seeds 1000

`probing_world.py` is what it happens in, `probing_checks.py` are the promises, `tests/planted/probing.py`
proves that broken ones are found.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, get_args

from ringfold.probe.rounds.events import MS, CommandReceived, ResidualObserved
from ringfold.probe.rounds.master import RoundMaster
from ringfold.probe.rounds.node import RoundNode
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
from ringfold.testing.checks import Violation
from ringfold.testing.probing_world import Clock, GlooGroup, Messages, ProbingWorld, SimNode, Trap
from ringfold.testing.scheduler import Scheduler, SimulationFailure, Trace
from ringfold.wire.probing import Cadence, ProbeAction, ProbeGraph, RoundEnd, RoundId, RoundKind, RoundStart

FaultKind = Literal[
    "crash",
    "freeze",
    "cut",
    "jump",
    "messy",
    "slow_fits",
    "master_crash",
    "master_freeze",
    "join",
    "leave",
    "command",
    "alarm",
    "memory",
    "stuck",
    "power",
]
SILENT: tuple[FaultKind, ...] = ("stuck", "power", "freeze")
"""Drawn apart from the others: nodes that do nothing, and whose connections stay open."""
SILENT_SHARE, SILENT_SHARE_WITH_CRASH = 0.5, 0.15
"""In how many seeds there are silent nodes. Each of them makes a new graph in the end, which would hide most mistakes
in the graphs of a master that takes over."""
COMMON: tuple[FaultKind, ...] = ("crash", "freeze", "cut", "messy", "master_crash")


@dataclass(frozen=True, slots=True)
class ProbingSetup:
    """Which machines run; a planted bug brings its own."""

    master: type[RoundMaster] = RoundMaster
    node: type[RoundNode] = RoundNode
    kinds: tuple[RoundKind, ...] = get_args(RoundKind)
    """Kinds of round in which the bug can be seen."""


@dataclass(frozen=True, slots=True)
class RoundFault:
    """One thing that goes wrong. `who` is a place in the list of nodes."""

    kind: FaultKind
    at_ms: float
    for_ms: float
    who: int


@dataclass(frozen=True, slots=True)
class RoundScenario:
    """Everything about a run that is decided before it begins."""

    settings: RoundSettings
    probers: int
    listeners: int
    faults: tuple[RoundFault, ...]
    faults_ms: float

    @property
    def bound_ms(self) -> float:
        """Within what time after the faults a whole round must be there: dial, end what is under way, one round."""
        longest = self.settings.adaptive.window_max_ms
        cadence = Cadence(window_ms=longest)
        return 3_000 + 4 * (longest + self.settings.gather_ms(cadence) + self.settings.grace_ms)


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a seed led to, when nothing was wrong with it."""

    seed: int
    kind: RoundKind
    rounds: int
    whole: int
    windows: int
    virtual_ms: float
    digest: str
    faults: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        broken = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())) or "nothing"
        return (
            f"{self.kind}: {self.rounds} rounds ({self.whole} whole), {self.windows} windows, "
            f"{self.virtual_ms:.0f} ms; faults: {broken}; trace {self.digest}"
        )


def draw_rounds(seed: int) -> RoundScenario:
    """The scenario of a seed."""
    rng = Random(f"rounds {seed}")
    kind = rng.choice(get_args(RoundKind))
    window_ms = rng.choice((800, 1_500, 4_000))
    settings = RoundSettings(
        kind=kind,
        window_ms=window_ms,
        report_timeout_ms=rng.choice((100, 400)),
        time_margin_ms=window_ms // 4,
        gloo_timeout_ms=rng.choice((500, 2_000)),
        grace_ms=rng.choice((100, 500)),
        settle_ms=rng.choice((0, 20, 100)),
        least_window_ms=200,
        alarm_rest_ms=rng.choice((0, 3_000)),
        report_floor_ms=Random(f"floor {seed}").choice((5, 25, 100)),
        adaptive=Adaptive(window_min_ms=window_ms // 2, window_max_ms=2 * window_ms),
        is_on=rng.random() < 0.9,
    )
    probers, listeners = rng.choice((2, 2, 3, 3, 4, 6)), rng.choice((0, 0, 0, 1, 2))
    horizon_ms = rng.choice((6, 12)) * (window_ms + settings.gather_ms(settings.cadence))
    mixed = [kind for kind in get_args(FaultKind) if kind not in ("stuck", "power")]
    kinds: list[FaultKind] = [*rng.sample(mixed, 3), rng.choice(COMMON)]
    faults = []
    for _ in range(rng.randint(1, 6)):
        for_ms = rng.choice((50, 500, 3_000, 10_000)) * rng.uniform(0.5, 1)
        fault = RoundFault(rng.choice(kinds), rng.uniform(0, horizon_ms), for_ms, rng.randrange(probers + listeners))
        faults.append(fault)
    has_crash = any(fault.kind == "master_crash" for fault in faults)
    share = SILENT_SHARE_WITH_CRASH if has_crash else SILENT_SHARE
    faults += _silent_faults(Random(f"silent nodes {seed}"), share, probers + listeners, horizon_ms, window_ms)
    faults_ms = max((fault.at_ms + fault.for_ms for fault in faults), default=0) + 100
    if rng.random() < 0.2:
        settings = replace(settings, graph=_neighbour_lists(probers))
    return RoundScenario(settings, probers, listeners, tuple(faults), faults_ms)


def _silent_faults(rng: Random, share: float, nodes: int, horizon_ms: float, window_ms: int) -> list[RoundFault]:
    """In this share of all seeds: nodes that fall silent for a part of a window, or for many."""
    if rng.random() < 1 - share:
        return []
    return [
        RoundFault(
            rng.choice(SILENT),
            rng.uniform(0, horizon_ms),
            window_ms * rng.choice((0.3, 1, 3, 6)) * rng.uniform(0.5, 1),
            rng.randrange(nodes),
        )
        for _ in range(rng.randint(1, 3))
    ]


def _neighbour_lists(probers: int) -> dict[str, tuple[str, ...]]:
    """Each of the first nodes probes the others of them. Listeners and newcomers have no list."""
    names = [f"node{place}" for place in range(probers)]
    return {name: tuple(other for other in names if other != name) for name in names}


class RoundSimulation:
    """One drawn run."""

    mode = "--probing"
    head_start_ns = 0
    """When the first nodes start."""

    def __init__(
        self, seed: int, scenario: RoundScenario, setup: ProbingSetup, echo: Callable[[str], None] | None = None
    ) -> None:
        self.seed, self.scenario = seed, scenario
        self.scheduler = Scheduler(seed, Trace(echo=echo))
        self.world = ProbingWorld(self.scheduler, scenario.settings, setup.master, setup.node)
        self.rng = self.scheduler.rng
        self.injected: Counter[str] = Counter()
        self._asker = 0
        self._is_healed = False
        self._healed_published = 0
        self._healed_exports: dict[int, int] = {}
        world = self.world
        world.advises = self.rng.random() < 0.3
        self._prepare()
        for place in range(scenario.probers + scenario.listeners):
            self._add(listen_only=place >= scenario.probers)
        if scenario.settings.kind != "gloo":
            world.start_master()
        for fault in scenario.faults:
            self.scheduler.at(int(fault.at_ms * MS), self._inject, fault)
        self.scheduler.at(int(scenario.faults_ms * MS), self._heal)
        if scenario.settings.kind == "gloo":
            self._regroup()

    def _prepare(self) -> None:
        """Before the nodes are added."""

    def run(self) -> RoundOutcome:
        """To the end; a broken promise raises SimulationFailure."""
        scenario, world = self.scenario, self.world
        limit_ms = scenario.faults_ms + scenario.bound_ms
        try:
            if not self.scheduler.run_until(self._is_whole, int(limit_ms * MS)):
                asked = sorted(world.master.asked.values()) if world.master else []
                still = f"; not answered: {', '.join(asked)}" if asked else ""
                raise Violation(f"no whole round within {scenario.bound_ms:.0f} ms after the last fault{still}")
        except AssertionError as error:
            text = str(error) or "an assertion failed"
            raise SimulationFailure(self.seed, text, self.scheduler.trace.tail(), self.mode) from error
        published = world.history.published
        whole = sum(not summary.missing for summary in published)
        windows, digest = sum(world.history.exports.values()), self.scheduler.trace.digest
        ms = self.scheduler.now / MS
        return RoundOutcome(
            self.seed, scenario.settings.kind, len(published), whole, windows, ms, digest, self.injected
        )

    def _add(self, *, listen_only: bool, last: RoundId | None = None) -> SimNode:
        world, rng = self.world, self.rng
        offset_ns = rng.choice((0, rng.randint(-(10**9), 10**9), rng.randint(-(10**17), 10**17)))
        clock = Clock(offset_ns, rng.uniform(-1e-4, 1e-4))
        node = SimNode(world, f"node{len(world.nodes)}", clock, listen_only=listen_only)
        world.nodes.append(node)
        self.scheduler.after(
            self.head_start_ns + rng.randint(0, 300 * MS), node.start, *(() if last is None else (last,))
        )
        return node

    # Faults

    def _inject(self, fault: RoundFault) -> None:
        world, rng, for_ns = self.world, self.rng, int(fault.for_ms * MS)
        node = world.nodes[fault.who]
        self.injected[fault.kind] += 1
        match fault.kind:
            case "crash":
                node.stop()
                self.scheduler.after(for_ns, self._revive, node)
            case "freeze":
                node.freeze(for_ns)
                if fault.for_ms > 5_000 and node.conn is not None and rng.random() < 0.5:
                    world.cut(node.conn)
            case "stuck":
                node.freeze(for_ns, has_heartbeats=True)
            case "power":
                node.lose_power()
                self.scheduler.after(for_ns, self._revive, node)
            case "cut":
                if node.conn is not None:
                    world.cut(node.conn)
            case "jump":
                node.jump(rng.choice((-1, 1)) * rng.choice((1, 50, 3_000, 3_600_000)) * MS)
            case "messy":
                world.messages = Messages((50, 50_000), 0.3, rng.choice((0.0, 0.3)), rng.choice((0.05, 0.4)), 6_000)
                self.scheduler.after(for_ns, setattr, world, "messages", Messages())
            case "slow_fits":
                world.slow_fits = 0.4
                self.scheduler.after(for_ns, setattr, world, "slow_fits", 0.0)
            case "master_crash":
                self._set_trap(for_ns, node) if rng.random() < 0.7 else self._crash_master(for_ns)
            case "master_freeze":
                if world.master is not None:
                    world.master.freeze(for_ns)
            case "join":
                if self.scenario.settings.kind != "gloo":
                    self._add(listen_only=rng.random() < 0.3)
            case "leave":
                self._leave(node)
            case "command":
                self._handle_command(rng.choice(("start", "stop", "round", "round", "show")))
                if rng.random() < 0.4:
                    self.scheduler.after(rng.randint(0, 600 * MS), self._handle_command, rng.choice(("stop", "round")))
            case "alarm":
                if node.is_alive:
                    node.event(ResidualObserved(node.id, node.id + 1, 10**9))
            case "memory":
                self._remember()

    def _set_trap(self, for_ns: int, node: SimNode) -> None:
        """The master will die between two messages that belong together."""
        after = self.rng.choice((ProbeGraph, ProbeGraph, RoundStart, RoundEnd))
        self.world.trap = Trap(after, lambda: self._crash_master(for_ns))
        if after is ProbeGraph:  # so that there will be one
            if self.world.group is not None:
                self.world.group.end("it is broken, as drawn")
            elif node.conn is not None:
                self.world.cut(node.conn)

    def _crash_master(self, for_ns: int) -> None:
        world = self.world
        if self._is_healed:
            return
        if world.group is not None:
            world.group.ranks[0].stop()
            return
        world.stop_master()
        self.scheduler.after(for_ns, self._restart_master)

    def _restart_master(self) -> None:
        if self.world.master is None and self.scenario.settings.kind != "gloo":
            self.world.start_master()

    def _revive(self, node: SimNode) -> None:
        if not node.is_alive and not node.has_left:
            node.start()

    def _leave(self, node: SimNode) -> None:
        """For good; but enough stay."""
        if sum(each is not node for each in self._probers()) >= 2:
            node.has_left = True
            node.stop()

    def _probers(self) -> list[SimNode]:
        """The nodes that probe: where neighbour lists were given, those that have one."""
        lists = self.scenario.settings.graph
        nodes = [node for node in self.world.nodes if not node.has_left and not node.listen_only]
        return [node for node in nodes if not lists or node.name in lists]

    def _remember(self) -> None:
        """Somebody comes who has seen a much later round of this master."""
        if self.scenario.settings.kind != "gloo" and self.world.fence:
            self._add(listen_only=False, last=RoundId(self.world.fence, self.rng.randint(50, 500)))

    def _handle_command(self, action: ProbeAction) -> None:
        master, settings = self.world.master, self.scenario.settings
        if master is None or settings.kind == "gloo" or (self._is_healed and action == "stop"):
            return
        self._asker += 1
        asker = self._asker
        master.asked[asker] = action
        label = self.rng.choice(("", "a", "b"))
        freezes = master.freezes
        longest = Cadence(window_ms=settings.adaptive.window_max_ms)
        limit_ms = 5 * (longest.window_ms + settings.gather_ms(longest)) + settings.grace_ms + 1_000

        def look() -> None:
            if master.is_alive and master.freezes == freezes and asker in master.asked:
                self.world.history.unanswered(action, limit_ms)

        self.scheduler.after(limit_ms * MS, look)
        master.event(CommandReceived(asker, action, label))

    # The end

    def _heal(self) -> None:
        """All faults are over: who is gone for no good reason comes back."""
        world = self.world
        world.note("world", "all faults are over")
        world.messages, world.slow_fits, self._is_healed = Messages(), 0.0, True
        world.trap = None
        self._restart_master()
        for node in world.nodes:
            node.wake()
            if not node.is_alive and not node.has_left:
                node.start()
        if world.master is not None:
            world.master.wake()
            if not world.master.machine.is_on:
                self._handle_command("start")
        self._healed_published = len(world.history.published)
        self._healed_exports = dict(world.history.exports)

    def _regroup(self) -> None:
        """What a launcher of ranks does: when all are there and there is no group, make a new one."""
        world = self.world
        ranks = [node for node in world.nodes if not node.has_left]
        group = world.group
        if group is not None and any(rank.has_left for rank in group.ranks):
            group.end("a rank has left")
        ready = all(node.is_alive and not node.is_frozen for node in ranks)
        if world.group is None and ready and sum(not node.listen_only for node in ranks) >= 1 and len(ranks) >= 2:
            GlooGroup(world, ranks)
        self.scheduler.after(200 * MS, self._regroup)

    def _is_whole(self) -> bool:
        """Whether, after all faults, a round with everybody is there, and nobody waits for an answer."""
        if not self._is_healed or self.world.master is None or self.world.master.asked:
            return False
        history = self.world.history
        probers = self._probers()
        if self.scenario.settings.kind == "local":
            before = self._healed_exports
            return all(history.exports.get(node.process, 0) > before.get(node.process, 0) for node in probers)
        ids = {node.id for node in probers}
        return any(history.is_whole(summary, ids) for summary in history.published[self._healed_published :])


def run_rounds(
    seed: int, setup: ProbingSetup | None = None, *, echo: Callable[[str], None] | None = None
) -> RoundOutcome:
    """Run one seed to its end; a broken promise raises SimulationFailure."""
    return RoundSimulation(seed, draw_rounds(seed), setup or ProbingSetup(), echo).run()
