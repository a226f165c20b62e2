"""Lanes between members that are no neighbours, between real processes: Done straight to all, ops host by host."""

import os
import time

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext

DEADLINE_S = 30


def direct_lanes(run: object) -> int:
    return sum(lane.direct for lane in run._session.engine.lanes())  # type: ignore[attr-defined]


def reduce_all(me: ProgramContext) -> None:
    """Reduce until there are as many direct lanes as expected, then once for every size; again for every message."""
    os.environ.update(me.options.get("env", {}))
    world, direct = me.options["world"], me.options["direct"]
    with me.join() as run:
        while run.group_size < world:
            run.update_topology(min_world=world)
        while True:
            ended = np.zeros(1, np.int64)
            deadline = time.monotonic() + DEADLINE_S
            # All members go on together: each says in the same op whether it has its lanes. How many took part in an
            # op is the same for all of them; `group_size`, like the lanes, may be that of the next epoch already.
            contributors = world
            while ended[0] < contributors and time.monotonic() < deadline:
                shown = direct_lanes(run)
                ended[0] = shown >= direct
                contributors = len(run.all_reduce(ended).contributors)
            right = True
            for size in (1, 1_000, 16_000, 250_000, 2_000_000):
                for _ in range(3):
                    values = np.full(size, run.rank + 1, np.float32)
                    run.all_reduce(values)
                    right = right and bool((values == contributors * (contributors + 1) / 2).all())
            me.report("reduced", right=right, direct=shown, world=contributors)
            order = me.receive()
            if order.get("leave"):
                return
            direct = order["direct"]
            while len(run.all_reduce(np.ones(1, np.float32)).contributors) == contributors:
                pass
            world = contributors - 1


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_members_that_are_no_neighbours_connect_and_a_death_is_survived(
    cluster: ProgramCluster, transport: str, threads: str
) -> None:
    env = {"RINGFOLD_TRANSPORT": transport, "RINGFOLD_THREADS": threads}
    cluster.start_master()
    lanes = 2 * int(threads)
    peers = cluster.start_program(reduce_all, 5, world=5, direct=lanes, env=env)
    for peer in peers:
        peer.expect("reduced", right=True, direct=lanes, world=5)
    peers[2].kill()
    for peer in peers[:2] + peers[3:]:
        peer.send(direct=int(threads))
    for peer in peers[:2] + peers[3:]:
        peer.expect("reduced", right=True, direct=int(threads), world=4)
        peer.send(leave=True)
    for peer in peers[:2] + peers[3:]:
        peer.wait_success()


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabbb", "aabbcc"])
def test_ops_are_reduced_host_by_host(cluster: ProgramCluster, hosts: str) -> None:
    """Hosts by name only: a peer stands beside those of its host, in whatever order they come."""
    world, count = len(hosts), len(set(hosts))
    size, across = world // count, 1 if count == 2 else 2
    cluster.start_master(direct_lanes=False)
    peers = [cluster.start_program(reduce_all, world=world, direct=across, join={"host": host})[0] for host in hosts]
    shown = [peer.expect("reduced", right=True, world=world)["direct"] for peer in peers]
    # The first and the last member of a host are neighbours, or need a lane for the ring inside their host.
    wanted = [across + (size > 2 and place in (0, size - 1)) for place in range(size) for _ in range(count)]
    assert sorted(shown) == sorted(wanted)
    for peer in peers:
        peer.send(leave=True)
    for peer in peers:
        peer.wait_success()


def test_settings_switch_both_off(cluster: ProgramCluster) -> None:
    cluster.start_master(direct_lanes=False, hierarchical=False)
    peers = [cluster.start_program(reduce_all, world=4, direct=0, join={"host": host})[0] for host in "aabb"]
    for peer in peers:
        peer.expect("reduced", right=True, direct=0, world=4)
        peer.send(leave=True)
    for peer in peers:
        peer.wait_success()
