"""Programs that simulated peers run: a training loop, and what its steps consist of.

All members of a group must make the same calls in the same order, so a step's ops are a function of (seed, group, step)
and of nothing else. What a peer passes in is a function of (peer, step, position) in small whole numbers: exact in
every dtype and in any order of summation, and different for every peer and step, so that a sum over the wrong members
or of the wrong steps shows. The "model" is a number that only grows with every reduced gradient, so a newcomer that
starts with zero gets it, together with the step, from one all-reduce with `max`.
"""

import zlib
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from ringfold.errors import CallMismatch, CollectiveAborted, DeadlineExceeded, TooFewPeers, TopologyFailed
from ringfold.testing.program import (
    AGREE_TAG,
    AllReduce,
    ArePending,
    Array,
    Barrier,
    Broadcast,
    Collective,
    Leave,
    OptimizeTopology,
    Program,
    ProgramOf,
    Request,
    Self,
    Sleep,
    UpdateTopology,
    Wait,
)
from ringfold.testing.stalling import Stalls, pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a training loop behaves. `leave_after` lets single peers (by name) leave early."""

    seed: int
    steps: int = 12
    ops: tuple[int, int] = (1, 2)
    """Calls in a row per step."""
    largest: int = 1_500
    """Elements of the largest buffer."""
    tags: int = 1
    """More than one: steps are also made of async ops under so many tags."""
    retry: float = 1.0
    """The share of steps that retry inside the call."""
    think_ms: float = 3.0
    patience: int = 40
    """How often a peer that is alone looks for others before it gives up."""
    asks_again: bool = False
    """Whether an admission is followed by `are_peers_pending`, before the first op."""
    leave_after: tuple[tuple[int, int], ...] = ()
    """(peer id, steps it takes part in) for those that leave early."""
    burst: int = 0
    """Some steps are made of about so many async ops at once, each under a tag of its own, in an order of each peer's
    own; and some peers come late to them."""
    timeout_ms: int = 0
    """The first deadline of some calls, which are made again with a longer one when it has passed; 0: none is near."""
    founders: int = 0
    """Peers with higher ids join a run that trains already,"""
    wrong: float = 0.0
    """and this share of them makes calls that no other peer makes."""
    stalls: Stalls | None = None
    """What steps begin with: a peer hangs, or all are slow."""
    optimise_every: int = 0
    """Before every so many steps the links are measured and the ring is chosen again; 0: never."""
    update_every: int = 0
    """Before every so many steps the topology is updated, also if no peer is pending; 0: never."""
    silent: float = 0.0
    """The share of reductions to which a peer contributes nothing; to some none does, if it is not 0."""


def training(work: Training) -> ProgramOf:
    """The loop that a user writes with the explicit calls."""

    def program(me: Self) -> Program:
        step = weights = taken = alone = 0
        fresh, is_wrong, updated = True, False, -1
        quota = dict(work.leave_after).get(me.peer, work.steps)
        while step < work.steps and taken < quota:
            try:
                while (not fresh or me.world < 2 or work.asks_again) and (yield ArePending()):
                    yield UpdateTopology()
                    fresh = True
                if me.world < 2:
                    alone += 1
                    if alone > work.patience:
                        break
                    yield Sleep(20)
                    continue
                if fresh:
                    agreed = np.array([step, weights], np.int64)
                    yield AllReduce(agreed, "max", AGREE_TAG)
                    step, weights, fresh = int(agreed[0]), int(agreed[1]), False
                    updated = step
                    is_wrong |= taken == 0 and step > 1 and _goes_wrong(work, me)
                if is_wrong:
                    yield from _insist(AllReduce(np.ones(work.largest + 1), place=(step, -1)))
                if work.update_every and step != updated and step % work.update_every == 0:
                    yield UpdateTopology()
                    fresh = True
                    continue
                if work.optimise_every and step % work.optimise_every == 0:
                    yield from _optimise()
                if work.stalls is not None:
                    yield from pause(work.stalls, me, step)
                weights += yield from _step(work, me, step)
                step += 1
                me.digest = f"{step}:{weights}"
                taken += 1
                if work.think_ms:
                    yield Sleep(work.think_ms * (1 + (me.peer * 7 + step * 3) % 5) / 5)
            except TooFewPeers:
                continue
            except CallMismatch:
                if is_wrong or (work.wrong and not any(peer <= work.founders for peer in me.members)):
                    return  # among newcomers alone it is the most that are right
                raise
        yield Leave()

    return program


def _goes_wrong(work: Training, me: Self) -> bool:
    return me.peer > work.founders and Random(f"{work.seed}/{me.peer} wrong").random() < work.wrong


def _optimise() -> Program:
    """A link that cannot be measured is no reason to stop: the ring is as it was."""
    with suppress(TopologyFailed):
        yield OptimizeTopology()


def _step(work: Training, me: Self, step: int) -> Generator[Request, Any, int]:
    """The ops of one step; returns what the model learned from them."""
    draw = Random(f"{work.seed}/{me.group}/{step}")
    retry = draw.random() < work.retry
    if work.burst and draw.random() < 0.5:
        return (yield from _burst(work, me, step, draw, retry))
    if work.tags > 1 and draw.random() < 0.6:
        return (yield from _overlapping(work, me, step, draw, retry))
    learned = 0
    for position in range(draw.randint(*work.ops)):
        shape = draw.random()
        if shape < 0.06:
            yield from _insist(Barrier(retry=retry))
            continue
        size, dtype, op = _size(work, draw), _dtype(draw), _op(draw)
        if shape < 0.14:
            array = gradient(me.peer, step, position, size, dtype)
            yield from _insist(Broadcast(array, retry=retry))
        else:
            place = f"{work.seed}/{me.group}/{step}/{position}"
            how, op = _quantisation(place, dtype), _averaged(place, op)
            call = _reduction(work, me, (step, position), size, dtype, retry)
            call, array = replace(call, op=op, quantisation=how), call.array
            if work.timeout_ms and shape > 0.6:
                yield from _come_late(work, me, step)
                call = replace(call, timeout_ms=work.timeout_ms)
            yield from _insist(call)
        learned += zlib.crc32(array.tobytes())
    return learned


def _insist(call: Collective) -> Program:
    """Call again what was aborted, as the error says.

    The same call, not the whole step: a member that comes to it only after the abort knows nothing of the abort.
    """
    while True:
        try:
            yield call
            return
        except CollectiveAborted:
            continue
        except DeadlineExceeded:
            call = replace(call, timeout_ms=2 * call.timeout_ms)


def _come_late(work: Training, me: Self, step: int) -> Program:
    """Some peers have something else to do first."""
    mine = Random(f"{work.seed}/{me.peer}/{step} late")
    if mine.random() < 0.4:
        yield Sleep(mine.choice((5.0, 50.0, 400.0)) * mine.random())


def _burst(work: Training, me: Self, step: int, draw: Random, retry: bool) -> Generator[Request, Any, int]:
    """Hundreds of ops in flight at once. No peer may be evicted because others have called what it has not."""
    sizes = [_size(work, draw) for _ in range(draw.randint(work.burst // 2, work.burst))]
    # Low tags are for small ops; the others go around the ring, however small they are.
    first = draw.choice((100, 1_000))
    calls = {
        first + place: replace(_reduction(work, me, (step, first + place), size, "float32", retry), tag=first + place)
        for place, size in enumerate(sizes)
    }
    mine = Random(f"{work.seed}/{me.peer}/{step} order")
    order = list(calls)
    if mine.random() < 0.5:
        mine.shuffle(order)
    yield from _come_late(work, me, step)
    handles = []
    for tag in order:
        handles.append((yield replace(calls[tag], wait=False)))
        if mine.random() < 0.01:
            yield Sleep(mine.uniform(0, 5))
    failure: TooFewPeers | None = None
    for tag, handle in sorted(zip(order, handles, strict=True)):
        try:
            try:
                yield Wait(handle)
            except CollectiveAborted:
                yield from _insist(calls[tag])
        except TooFewPeers as error:
            failure = error
    if failure is not None:
        raise failure
    return sum(zlib.crc32(call.array.tobytes()) for call in calls.values())


def _overlapping(work: Training, me: Self, step: int, draw: Random, retry: bool) -> Generator[Request, Any, int]:
    """Several ops in flight at once, one per tag; every one is waited for, whatever became of the others."""
    calls = [
        replace(_reduction(work, me, (step, tag), _size(work, draw), _dtype(draw), retry), tag=tag)
        for tag in range(1, work.tags + 1)
    ]
    handles = []
    for call in calls:
        handles.append((yield replace(call, wait=False)))
    yield from _ask_in_flight(work, step)
    failure: TooFewPeers | None = None
    for call, handle in zip(calls, handles, strict=True):
        try:
            try:
                yield Wait(handle)
            except CollectiveAborted:
                yield from _insist(call)
        except TooFewPeers as error:
            failure = error
    if failure is not None:
        raise failure
    return sum(zlib.crc32(call.array.tobytes()) for call in calls)


def _ask_in_flight(work: Training, step: int) -> Program:
    """At some steps the program asks who is pending while its ops are in flight, in this thread and in another one."""
    rng = Random(f"{work.seed}/{step} asks")
    if rng.random() < 0.5:
        yield ArePending()
    for _ in range(rng.choice((0, 0, 1, 3))):
        yield ArePending(elsewhere=True)


def _reduction(work: Training, me: Self, place: tuple[int, int], size: int, dtype: str, retry: bool) -> Collective:
    """An all-reduce of a peer's gradient, or of what plays no part if it contributes nothing here."""
    step, position = place
    array = gradient(me.peer, step, position, size, dtype)
    contribute = contributes(work.seed, work.silent, me, place)
    if not contribute:
        array.fill(np.nan if array.dtype.kind == "f" else 113)
    return AllReduce(array, retry=retry, contribute=contribute, place=place)


def contributes(seed: int, silent: float, me: Self, place: tuple[int, int]) -> bool:
    """Whether a peer contributes at a place of the program; at some places no peer does."""
    if not silent or Random(f"{seed}/{me.group}/{place} nobody").random() < 0.1:
        return not silent
    return Random(f"{seed}/{me.peer}/{place} silent").random() >= silent


def gradient(peer: int, step: int, position: int, size: int, dtype: str) -> Array:
    """What a peer passes in: small whole numbers that tell peers, steps and places apart."""
    base = (peer * 31 + step * 7 + position * 3) % 97
    return ((np.arange(size, dtype=np.int64) * 5 + base) % 23 + 1).astype(dtype)


def _size(work: Training, draw: Random) -> int:
    """Small ones, ones that need several segments, empty ones, and fewer elements than there are peers."""
    kind = draw.random()
    if kind < 0.06:
        return 0
    if kind < 0.15:
        return draw.randint(1, 3)
    if kind < 0.4:
        return draw.randint(4, 40)
    return draw.randint(41, max(work.largest, 42))


def _dtype(draw: Random) -> str:
    return draw.choice(("float32", "float32", "float32", "float64", "int64", "int32", "float16", "uint16"))


def _quantisation(place: str, dtype: str) -> int:
    """Every other op of a type that can be: to 8 bits, by one scheme or the other."""
    return Random(place).choice((0, 0, 1, 3)) if dtype in ("float32", "float16") else 0


def _averaged(place: str, op: str) -> str:
    """Some sums are averages."""
    return "avg" if op == "sum" and Random(f"{place} average").random() < 0.3 else op


def _op(draw: Random) -> str:
    return draw.choice(("sum", "sum", "sum", "max", "min"))
