"""Programs that live and do not work: they hang, or are slow all at once, or say that they are busy.

A step of a training loop (`workloads.py`) may begin with a pause, drawn from (seed, group, step) for all members alike:

* a few hang, for longer than the watchdog allows: they may be evicted, and no others;
* all are slow, with different speeds: none may be evicted;
* one is busy by its own report, for as long: it must not be evicted; or it stays longer than it reported, and may be.

Judged at each eviction for a stall (`judge_stall`), by what programs really do then: those that are evicted had hung,
were a strict minority where the watchdog decided it, and no other member was at its own work. In the end, as in every
run, all others must have finished their steps.
"""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from ringfold.testing.checks import Violation
from ringfold.testing.program import BusyFor, Program, Self, Sleep
from ringfold.testing.scheduler import MS

if TYPE_CHECKING:
    from ringfold.testing.simulation import Simulation
    from ringfold.wire.notices import PeersStalled

NOTICED_AFTER_MS = 300
"""A program that went on so short a time ago may not be known to have done so."""
FIRST_STALL = 4
"""The first calls do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """How a program's steps begin. The shares are of steps."""

    seed: int
    timeout_ms: int
    """What the watchdog allows."""
    longest_ms: int
    """The longest pause of a peer that hangs."""
    hangs: float = 0.1
    slow: float = 0.1
    busy: float = 0.1


def pause(stalls: Stalls, me: Self, step: int) -> Program:
    """What comes before the calls of a step."""
    if step < FIRST_STALL:
        return
    draw = Random(f"{stalls.seed}/{me.group}/{step} stalls")
    kind, mine = draw.random(), Random(f"{stalls.seed}/{me.peer}/{step} mine")
    chosen = draw.random()
    is_chosen = me.peer == sorted(me.members)[int(chosen * len(me.members))]
    timeout = stalls.timeout_ms
    if kind < stalls.hangs:
        if is_chosen or mine.random() < 0.2:
            me.may_be_evicted()
            yield Sleep(mine.uniform(1.2 * timeout, stalls.longest_ms))
    elif kind < stalls.hangs + stalls.slow:
        yield Sleep(draw.uniform(1.1, 1.8) * timeout + mine.uniform(0, 0.5) * timeout)
    elif kind < stalls.hangs + stalls.slow + stalls.busy and is_chosen:
        length = mine.uniform(0.5, 2.0) * timeout
        if mine.random() < 0.3:
            me.may_be_evicted()  # it reports too short a time
            yield BusyFor(0.5 * length)
        else:
            yield BusyFor(length + 1_000)
        yield Sleep(length)
        yield BusyFor(0)


def judge_stall(sim: "Simulation", run: str, notice: "PeersStalled") -> None:
    """An eviction for a stall in a run, at the moment of its decision."""
    by_id = {peer.peer: peer for peer in sim.peers if peer.run == run and peer.host.alive and peer.peer}
    sim.injected["evicted for a stall"] += len(notice.peers)
    for number in notice.peers:
        if number in by_id and by_id[number].name not in sim.touched:
            raise Violation(f"peer {number} is evicted for a stall, and has neither hung nor met a fault: {notice}")
    if notice.limit.startswith("stall_timeout_s"):
        if len(notice.peers) >= len(notice.waiting):
            raise Violation(f"the peers evicted for a stall are no minority: {notice}")
        working = [number for number in notice.waiting if number in by_id and _works(sim, by_id[number].at_work_since)]
        if working:
            raise Violation(f"peers {working} are at their own work, and others are evicted for a stall: {notice}")


def _works(sim: "Simulation", since_ns: int | None) -> bool:
    return since_ns is not None and sim.scheduler.now - since_ns > NOTICED_AFTER_MS * MS
