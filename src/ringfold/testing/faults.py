"""Faults drawn from a seed: what goes wrong, at which peer, when, and for how long.

A plan spares at least one peer, and everything that is not final ends by itself: cuts heal, the frozen wake, links
get fast again, dials go through. So after a plan's end every program that still runs must come to its own end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

from ringfold.testing.scheduler import MS

if TYPE_CHECKING:
    from ringfold.testing.simulation import Simulation

FaultKind = Literal[
    "crash",
    "power_off",
    "freeze_short",
    "freeze_long",
    "cut",
    "cut_one_way",
    "cut_from_master",
    "reset",
    "slow_link",
    "dials_fail",
    "dials_fail_one_way",
    "master_pause",
    "join",
    "garbage",
    "cut_path",
    "slow_path",
    "reset_lanes",
    "advice",
    "lie",
    "crash_holders",
    "crash_newcomer",
]
OF_STATE: tuple[FaultKind, ...] = ("lie", "crash_holders", "crash_newcomer")
"""Faults that are about syncs."""
OF_PATHS: tuple[FaultKind, ...] = ("cut_path", "slow_path", "reset_lanes")
"""Faults of one path among several, or of some lanes among several."""
ADVICE: FaultKind = "advice"
"""No fault, but a fickle agent: weights, fixed shares and vetoes of paths, changed again and again. It is no excuse."""
KINDS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind not in (*OF_STATE, *OF_PATHS, ADVICE))
COMMON: tuple[FaultKind, ...] = ("crash", "crash", "cut_from_master", "reset", "freeze_short")
"""Drawn more often than the others: they meet ops in more interesting states."""
FINAL: frozenset[FaultKind] = frozenset({"crash", "power_off", "freeze_long", "cut_from_master", "cut", "cut_one_way"})
"""Faults that may cost the run a peer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. `who` are places in the list of the cluster's first peers.

    It begins at an instant, or so long after the first of `who` has made its call number `call`: that is how a fault
    meets an op that is just half-way.
    """

    kind: FaultKind
    at_ms: float
    for_ms: float
    who: tuple[int, ...]
    call: int = 0

    def __str__(self) -> str:
        when = f"{self.at_ms:.1f} ms after call {self.call}" if self.call else f"at {self.at_ms:.1f} ms"
        return f"{self.kind} of {self.who} {when} for {self.for_ms:.1f} ms"


def draw(rng: Random, peers: int, horizon_ms: float, evict_after_ms: int, kinds: Sequence[FaultKind]) -> list[Fault]:
    """A plan for so many peers: spread over the horizon, or all at once, or in the middle of ops."""
    faults = []
    losses = 0
    storm = rng.random() < 0.5
    begin_ms, span_ms = (rng.uniform(0, horizon_ms), rng.choice((2, 10, 40))) if storm else (0, horizon_ms)
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(kinds)
        if kind in FINAL:
            if losses >= peers - 1:
                continue
            losses += 1
        who, length_ms = tuple(rng.sample(range(peers), 2)), _length_ms(rng, kind, evict_after_ms)
        if rng.random() < 0.5:
            faults.append(Fault(kind, rng.uniform(0, rng.choice((0.5, 5, 20))), length_ms, who, rng.randint(1, 25)))
        else:
            faults.append(Fault(kind, begin_ms + rng.uniform(0, span_ms), length_ms, who))
    return faults


def _length_ms(rng: Random, kind: FaultKind, evict_after_ms: int) -> float:
    match kind:
        case "freeze_long":
            return rng.uniform(1.1, 2.0) * evict_after_ms
        case "freeze_short":
            return rng.uniform(1, 0.6 * evict_after_ms)
        case "cut" | "cut_one_way" | "cut_from_master":
            return rng.choice((rng.uniform(1, 100), rng.uniform(1.1, 2.0) * evict_after_ms))
        case "crash_holders" | "crash_newcomer":
            return rng.choice((1, 10, 40))
        case "master_pause":
            return rng.uniform(50, 1.5 * evict_after_ms)
        case _:
            return rng.uniform(5, 300)


def inject(sim: "Simulation", fault: Fault) -> None:
    """Schedule a fault, and its end."""
    if fault.call:
        peer = sim.originals[fault.who[0] % len(sim.originals)]
        peer.on_call(fault.call, lambda: sim.scheduler.after(int(fault.at_ms * MS), _begin, sim, fault))
    else:
        sim.scheduler.at(int(fault.at_ms * MS), _begin, sim, fault)


def _begin(sim: "Simulation", fault: Fault) -> None:
    span_ms = fault.for_ms
    one, two = (sim.originals[place % len(sim.originals)] for place in fault.who)
    sim.note("fault", str(fault))
    sim.injected[fault.kind] += 1
    if fault.kind == "master_pause":
        # A peer gives up a master that is silent for too long, and may do so a little before it is evicted itself.
        sim.master_was_silent |= span_ms > 0.7 * sim.setup.settings.liveness.evict_after_ms
    elif fault.kind not in ("join", "garbage", ADVICE, *OF_STATE):
        sim.touched |= {one.name, two.name}
    match fault.kind:
        case "crash":
            sim.crash(one)
        case "power_off":
            sim.power_off(one)
        case "freeze_short" | "freeze_long":
            sim.freeze(one, for_ms=span_ms)
        case "cut":
            sim.partition(one, two, for_ms=span_ms)
        case "cut_one_way":
            sim.partition(one, two, for_ms=span_ms, one_way=True)
        case "cut_from_master":
            sim.partition(one, sim.master, for_ms=span_ms, one_way=sim.rng.random() < 0.5)
        case "reset":
            sim.network.reset_between(one.name, two.name)
        case "slow_link":
            sim.slow_link(one, two, for_ms=span_ms)
        case "dials_fail":
            sim.fail_dials(one, two, for_ms=span_ms)
            sim.fail_dials(two, one, for_ms=span_ms)
        case "dials_fail_one_way":
            sim.fail_dials(one, two, for_ms=span_ms)
        case "master_pause":
            sim.freeze(sim.master, for_ms=span_ms)
        case "join":
            sim.join()
        case "garbage":
            sim.throw_garbage(one)
        case "cut_path":
            sim.cut_path(one, two, _path(sim, fault), for_ms=span_ms, gone_after_ms=sim.rng.choice((1, 30, 400)))
        case "slow_path":
            sim.slow_path(one, two, _path(sim, fault), for_ms=span_ms)
        case "reset_lanes":
            sim.reset_lanes(one, two, _path(sim, fault))
        case "advice":
            sim.advise(one, for_ms=span_ms)
        case "lie":
            sim.lie(one, for_ms=span_ms)
        case "crash_holders":
            sim.crash_holders(within_ms=span_ms)
        case "crash_newcomer":
            sim.crash_newcomer(within_ms=span_ms)


def _path(sim: "Simulation", fault: Fault) -> int:
    """The path that a fault is about."""
    return int(fault.for_ms) % sim.setup.paths
