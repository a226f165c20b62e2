"""Fixed shares of paths: every peer splits its link to the next one by shares that bind, and paths break and come back.

One seed draws peers, paths of any rates, the shares of each peer, a training loop with one or several ops in flight,
and paths whose connections end in mid-transfer. The bytes that a peer gives to each path may differ from its share by
MAX_SEGMENTS_OFF segments, and by those that were sent twice between lanes of one path. It is checked all the time, over
any number of ops, from a moment in which all lanes are there and no op is in flight. When a lane is lost, or the epoch
changes, counting begins again with the next such moment: a path that is back carries its share from then on, no more
and no less.

Links are never so slow that a path looks silent: a silent path is waited for, and catches up later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ringfold.peer.engine import FIXED
from ringfold.testing.checks import Violation
from ringfold.testing.network import Weather
from ringfold.testing.peers import SimPeer
from ringfold.testing.scenario import LIMIT_MS, Outcome, outcome_of
from ringfold.testing.scheduler import MS, SimulationFailure
from ringfold.testing.simulation import Setup, Simulation, quick_settings
from ringfold.testing.workloads import Training, training

MAX_SEGMENTS_OFF = 3.0
SEGMENT_BYTES = 256
CHECK_EVERY_NS = MS // 2
WEATHER = Weather(latency_us=(20, 2_000), jitter_us=(0, 300), bytes_per_ms=(1_000, 20_000), window_bytes=(1_024, 8_192))


@dataclass(slots=True)
class _Count:
    """What a peer had sent over each path when counting began, and under which conditions."""

    epoch: int
    lanes_lost: int
    reissued: int
    sent: list[int]


class ShareWatch:
    """Checks what one peer sends over each path to the next one."""

    def __init__(self, sim: Simulation, peer: SimPeer, shares: list[int], lanes: int) -> None:
        self._sim, self._peer, self._shares, self._lanes = sim, peer, shares, lanes
        self._count: _Count | None = None
        self.checked_bytes = 0
        """Of all stretches that were checked."""

    def start(self) -> None:
        self._peer.advised(self._shares, FIXED)
        self._look()

    def _look(self) -> None:
        if not self._peer.busy or self._peer.gone:
            return
        self._check()
        self._sim.scheduler.after(CHECK_EVERY_NS, self._look)

    def _check(self) -> None:
        core, machine = self._peer.core, self._peer.machine
        is_whole = machine.is_running and sum(lane.outgoing for lane in core.lanes()) == self._lanes
        stats = core.stats()
        lost, reissued = stats["lanes_lost"], stats["reissued"]
        before = self._count
        if before is not None and (before.epoch, before.lanes_lost) != (machine.engine_epoch, lost):
            before = self._count = None
        if not is_whole:
            return
        sent = core.path_bytes(True)
        if before is None:
            if core.tags_in_flight():
                return  # what is left of a fault is made up for within the transfer
            self._count = _Count(machine.engine_epoch, lost, reissued, sent)
            return
        moved = [now - was for now, was in zip(sent, before.sent, strict=True)]
        self.checked_bytes = max(self.checked_bytes, sum(moved))
        for path, share in enumerate(self._shares):
            off = (moved[path] - share / sum(self._shares) * sum(moved)) / SEGMENT_BYTES
            if abs(off) > MAX_SEGMENTS_OFF + reissued - before.reissued:
                raise Violation(
                    f"{self._peer.name} gave path {path} {moved[path]} of {sum(moved)} bytes, "
                    f"{off:+.1f} segments from its share of {share / sum(self._shares):.1%}"
                )


def run_shares(seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed with fixed shares; a broken promise raises SimulationFailure."""
    try:
        return outcome_of(simulate_shares(seed, base, echo=echo)[0])
    except SimulationFailure as failure:
        raise SimulationFailure(failure.seed, failure.text, failure.tail, "--shares") from failure


def simulate_shares(
    seed: int, base: Setup | None = None, *, echo: Callable[[str], None] | None = None
) -> tuple[Simulation, list[ShareWatch]]:
    """The same, with what was checked."""
    rng = Random(f"shares {seed}")
    peers, paths, lanes = rng.choice((2, 2, 3, 4)), rng.choice((2, 2, 3)), rng.choice((1, 1, 2))
    settings = quick_settings(lanes=lanes, small_bytes=0, segment_bytes=SEGMENT_BYTES)
    bug = "" if base is None else base.planted
    sim = Simulation(seed, Setup(settings=settings, weather=WEATHER, paths=paths, planted=bug), echo=echo)
    work = Training(seed=seed, steps=rng.randint(15, 40), tags=rng.choice((1, 2)), think_ms=0.0, ops=(2, 4))
    cluster = sim.cluster(peers, program=training(work))

    def is_attached() -> bool:
        return all(peer.machine.is_running and peer.world == peers for peer in cluster.peers)

    sim.run_until(is_attached, limit_ms=LIMIT_MS)
    watches = [ShareWatch(sim, peer, _draw_shares(rng, paths), paths * lanes) for peer in cluster.peers]
    for watch in watches:
        watch.start()
    for _ in range(rng.choice((0, 1, 3))):
        one, two = rng.sample(cluster.peers, 2)
        _break_path(sim, rng, one, two, rng.randrange(paths))
    sim.run_until(cluster.finished, limit_ms=LIMIT_MS)
    return sim, watches


def _draw_shares(rng: Random, paths: int) -> list[int]:
    return [rng.choice((1, 2, 5, 20, rng.randint(1, 100))) * 500 for _ in range(paths)]


def _break_path(sim: Simulation, rng: Random, one: SimPeer, two: SimPeer, path: int) -> None:
    """The connections of a path end; perhaps it stays away for a while."""
    at_ns, away_ms = int(rng.uniform(0, 60) * MS), rng.choice((0.0, 30.0))

    def end() -> None:
        if away_ms:
            sim.cut_path(one, two, path, for_ms=away_ms, gone_after_ms=0.1)
        else:
            sim.reset_lanes(one, two, path)
        sim.injected["broken path"] += 1

    sim.scheduler.after(at_ns, end)
