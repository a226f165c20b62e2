"""optimize_topology between real processes: links are measured, rings change, ops go on, deaths cost nobody else."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext, by_id, until

from ringfold.runtime import master_client
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, missing
from ringfold.wire.status import Status


def look(address: str) -> Status:
    with master_client.connect([address], b"") as connection:
        return connection.status()


def optimize(me: ProgramContext) -> None:
    """Join with others, optimise on request, and reduce before and after."""
    with me.join() as run:
        while run.group_size < me.options["peers"]:
            run.update_topology(min_world=me.options["peers"])
        me.report("joined", peer=run.peer_id, pid=Path("/proc/self").resolve().name)
        run.all_reduce(np.ones(100_000, np.float32))
        me.receive()
        run.optimize_topology(timeout_s=30)
        values = np.ones(100_000, np.float32)
        info = run.all_reduce(values)
        right = bool((values == len(info.contributors)).all())
        me.report("reduced", contributors=len(info.contributors), right=right, members=run.members, epoch=run.epoch)
        me.receive()


def test_all_links_are_measured_and_ops_go_on(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = cluster.start_program(optimize, 3, peers=3)
    by_id(peers)
    for peer in peers:
        peer.send()
    facts = [peer.expect("reduced", contributors=3, right=True) for peer in peers]
    assert len({(tuple(fact["members"]), fact["epoch"]) for fact in facts}) == 1
    [measured] = master.events("links_measured")
    assert (measured["pairs"], measured["failed"]) == (3, [])
    assert measured["rounds"] >= 3
    links = look(master.address).links
    assert {(link.source, link.target) for link in links} == set(itertools.permutations((1, 2, 3), 2))
    assert all(link.bytes_per_s > 1e6 and link.delay_us is not None for link in links)
    for peer in peers:
        peer.send()
        peer.wait_success()


def test_a_peer_killed_during_the_measurement_costs_only_its_own_links(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = by_id(cluster.start_program(optimize, 4, peers=4))
    for peer in peers.values():
        peer.send()
    until(lambda: any(peer.phase == "OPTIMIZE_TOPOLOGY" for peer in look(master.address).peers), "links are measured")
    peers[3].kill()
    left = [peers[number] for number in (1, 2, 4)]
    facts = [peer.expect("reduced", contributors=3, right=True) for peer in left]
    assert {tuple(sorted(fact["members"])) for fact in facts} == {(1, 2, 4)}
    known = {(link.source, link.target) for link in look(master.address).links}
    assert known == set(itertools.permutations((1, 2, 4), 2))
    for peer in left:
        peer.send()
        peer.wait_success()


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_shaped_links_are_estimated_and_the_slow_one_is_avoided(cluster: ProgramCluster) -> None:
    """One pair of four hosts is slow; in the ring that is chosen the two are no neighbours."""
    slow = {(0, 1): 10.0, (1, 0): 10.0}
    pairs = {pair: slow.get(pair, 60.0) for pair in itertools.permutations(range(4), 2)}
    with ShapedNetwork([Shape()] * 4, pairs) as network:
        address = f"{network.address(HUB)}:48148"
        inside = network.inside(HUB, [])
        master = cluster.start_master(listen=address, arguments=["--insecure"], inside=inside, evict_after_ms=3_000)
        peers = [cluster.start_one(optimize, inside=network.inside(host, []), peers=4) for host in range(4)]
        hosts = {number: peers.index(peer) for number, peer in by_id(peers).items()}
        for peer in peers:
            peer.send()
        [ring] = {tuple(peer.expect("reduced", contributors=4, right=True)["members"]) for peer in peers}
        used = {(hosts[a], hosts[b]) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
        assert not used & slow.keys()
        with network.within(HUB):
            links = look(master.address).links
        errors = {
            (link.source, link.target): link.bytes_per_s / (pairs[hosts[link.source], hosts[link.target]] * 125_000) - 1
            for link in links
        }
        assert len(errors) == 12
        assert max(abs(error) for error in errors.values()) <= 0.1, errors
        for peer in peers:
            peer.send()
            peer.wait_success()
