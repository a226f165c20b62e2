"""optimize_topology in the simulation: the production machines and engine core measure simulated links."""

import numpy as np
import pytest

from ringfold.errors import TopologyFailed
from ringfold.testing import (
    AllReduce,
    OptimizeTopology,
    Program,
    ProgramOf,
    Self,
    Setup,
    Simulation,
    Sleep,
    UpdateTopology,
    Weather,
)

SLOW = Setup(weather=Weather(bytes_per_ms=(200, 2_000), latency_us=(100, 2_000), window_bytes=(4_096, 65_536)))
"""Links of 0.2 to 2 MB/s: a measurement is a few thousand pieces."""


def optimising(members: int, times: int = 2) -> ProgramOf:
    """Meet, then optimise and reduce in turns. A peer that loses others meanwhile continues with the rest."""

    def program(me: Self) -> Program:
        while me.world < members:
            yield UpdateTopology(min_world=members)
        for _ in range(times):
            try:
                yield OptimizeTopology()
            except TopologyFailed:
                me.digest += "failed "
            array = np.full(300, me.peer, np.int64)
            yield AllReduce(array)
            me.digest += f"{array[0]} "
            yield Sleep(3)

    return program


@pytest.mark.parametrize("seed", range(4))
def test_links_are_measured_and_all_members_continue_in_the_same_ring(seed: int) -> None:
    sim = Simulation(seed, SLOW)
    cluster = sim.cluster(peers=4, program=optimising(4))
    sim.run_until(cluster.finished, limit_ms=120_000)
    assert cluster.alive == cluster.peers
    assert {peer.digest for peer in cluster.peers} == {"10 10 "}


@pytest.mark.parametrize("seed", range(6))
def test_a_crash_at_any_instant_of_the_measurement_costs_no_other_member(seed: int) -> None:
    sim = Simulation(seed, SLOW)
    cluster = sim.cluster(peers=4, program=optimising(4))
    sim.run_until(lambda: sim.master.machine._run.optimisation is not None, limit_ms=60_000)
    sim.crash(sim.rng.choice(cluster.peers), within_ms=1_000)
    sim.run_until(cluster.finished, limit_ms=120_000)
    assert len(cluster.alive) == 3
    assert len({peer.digest for peer in cluster.alive}) == 1


def test_two_groups_are_measured_together() -> None:
    sim = Simulation(1, SLOW)
    cluster = sim.cluster(peers=6, groups=2, program=optimising(3, times=1))
    sim.run_until(cluster.finished, limit_ms=120_000)
    assert cluster.alive == cluster.peers
