"""Links with several paths: lost lanes and paths cost no op and no epoch, and come back."""

from functools import partial

import pytest

from ringfold.testing import Cluster, Simulation, Training, Weather, quick_settings, training
from ringfold.testing.simulation import Setup

UNEQUAL = Weather(latency_us=(20, 5_000), jitter_us=(0, 500), bytes_per_ms=(200, 20_000), window_bytes=(1_024, 8_192))


def simulated(seed: int, *, paths: int = 2, lanes: int = 1, lines: list[str] | None = None) -> Simulation:
    settings = quick_settings(lanes=lanes, small_bytes=0, segment_bytes=256)
    setup = Setup(settings=settings, weather=UNEQUAL, paths=paths)
    return Simulation(seed, setup, echo=None if lines is None else lines.append)


def attached(sim: Simulation, cluster: Cluster) -> None:
    peers = cluster.peers
    sim.run_until(lambda: all(peer.machine.is_running and peer.world == len(peers) for peer in peers), limit_ms=60_000)


def counts(sim: Simulation, what: str) -> int:
    return sum(peer.core.stats()[what] for peer in sim.peers)


@pytest.mark.parametrize("peers", [2, 3, 4])
def test_paths_that_are_cut_again_and_again_cost_neither_an_op_nor_an_epoch(peers: int) -> None:
    """One path at a time, silently or with an end to its connections; it is back before all others have been cut."""
    lost = reissued = 0
    for seed in range(6):
        lines: list[str] = []
        sim = simulated(seed, paths=3, lines=lines)
        cluster = sim.cluster(peers=peers, program=training(Training(seed=seed, steps=30, largest=1_500, tags=2)))
        attached(sim, cluster)
        for number in range(10):
            one, two = sim.rng.sample(cluster.peers, 2)
            path, gone_after_ms = number % 3, sim.rng.choice((1, 1_000))
            begin_ns = int((120 * number + sim.rng.uniform(0, 5)) * 1e6)
            cut = partial(sim.cut_path, one, two, path, for_ms=30, gone_after_ms=gone_after_ms)
            sim.scheduler.after(begin_ns, cut)
        sim.run_until(cluster.finished, limit_ms=60_000)
        sealed = [line for line in lines if "is sealed" in line]
        assert all(line.endswith(("join", "joins", "leave", "leaves")) for line in sealed), sealed
        assert sim.history.aborted == 0
        lost += counts(sim, "lanes_lost")
        reissued += counts(sim, "reissued")
    assert lost > 0
    assert reissued > lost


def test_a_lane_that_ends_is_brought_again() -> None:
    sim = simulated(3, lanes=2)
    cluster = sim.cluster(peers=2, program=training(Training(seed=3, steps=40, think_ms=10)))
    one, two = cluster.peers
    attached(sim, cluster)
    sim.reset_lanes(one, two, 1)
    assert len(one.core.lanes()) == 4
    sim.run_until(lambda: len(one.core.lanes()) == len(two.core.lanes()) == 8, limit_ms=60_000)
    sim.run_until(cluster.finished, limit_ms=60_000)


def test_a_path_that_is_away_at_the_beginning_joins_later() -> None:
    sim = simulated(4)
    cluster = sim.cluster(peers=2, program=training(Training(seed=4, steps=60, think_ms=10)))
    one, two = cluster.peers
    sim.cut_path(one, two, 1, for_ms=500, gone_after_ms=1_000)
    attached(sim, cluster)
    assert sim.now_ms < 400  # while the path is still away
    sim.run_until(lambda: one.core.path_bytes(True)[1] > 0, limit_ms=60_000)
    sim.run_until(cluster.finished, limit_ms=60_000)
    assert sim.history.aborted == 0


def test_a_vetoed_path_gets_no_segment_until_the_veto_ends() -> None:
    sim = simulated(5)
    cluster = sim.cluster(peers=2, program=training(Training(seed=5, steps=60, largest=1_500, think_ms=5)))
    one, two = cluster.peers
    attached(sim, cluster)
    one.core.set_path_shares(two.peer, [], 1 << 1)
    before = one.core.path_bytes(True)
    sim.run_until(lambda: one.core.path_bytes(True)[0] > before[0] + 10_000, limit_ms=60_000)
    assert one.core.path_bytes(True)[1] == before[1]
    one.core.set_path_shares(two.peer, [], 0)
    sim.run_until(lambda: one.core.path_bytes(True)[1] > before[1], limit_ms=60_000)
    sim.run_until(cluster.finished, limit_ms=60_000)
