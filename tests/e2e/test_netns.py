"""Cut links: every process in a network namespace of its own, joined by a bridge, as on separate machines."""

import pytest
from probe_nodes import SHORT, Rounds, start_nodes
from programs import FAST, ClusterProcess, MasterProcess, ProgramCluster, by_id, until
from training_program import check_same_bits, step_with, train

from ringfold.tools.cluster import MASTER_PORT
from ringfold.tools.shaped import ShapedNetwork

pytestmark = pytest.mark.netns

EVICT_S = FAST["evict_after_ms"] / 1_000
SLACK_S = 1.0


def start_hosts(
    cluster: ProgramCluster, network: ShapedNetwork, count: int, *cuts: tuple[int, int]
) -> tuple[MasterProcess, list[ClusterProcess]]:
    """A master on host 0, and peer n on host n, for n from 1 on. `cuts` are there from the beginning."""
    address = f"{network.address(0)}:{MASTER_PORT}"
    master = cluster.start_master(listen=address, arguments=["--insecure"], inside=network.inside(0))
    for _ in range(count):
        network.add_host()
    for source, target in cuts:
        network.cut(source, target)
    started = []
    for number in range(1, count + 1):
        started += cluster.start_program(
            train, inside=network.inside(number), address=address, world=count, floats=300_000
        )
        master.expect_events("peer_registered", number)
    peers = by_id(started)
    for peer in started:
        step_with(peer, count)
    return master, [peers[number] for number in range(1, count + 1)]


BOTH = [(1, 2), (2, 1)]


@pytest.mark.parametrize(
    "cuts", [BOTH, BOTH[:1], BOTH[1:]], ids=["both directions", "with the ring", "against the ring"]
)
def test_the_ring_is_planned_around_a_cut_between_two_peers(
    cluster: ProgramCluster, network: ShapedNetwork, cuts: list[tuple[int, int]]
) -> None:
    """Both peers live and reach all others: none is evicted, and all four continue."""
    master, peers = start_hosts(cluster, network, 4)
    at = max(network.cut(*cut) for cut in cuts)
    for peer in peers:
        step_with(peer, 4, after=at + 1)
        around = step_with(peer, 4, after=at + 1)
    [bad] = {tuple(sorted((event["source"], event["target"]))) for event in master.expect_events("edge_bad")}
    assert bad == (1, 2)

    def rings() -> list[list[int]]:
        return [event["ring"] for event in master.events("epoch_recorded") if event["epoch"] == around["epoch"]]

    until(lambda: len(rings()) == 1, "the master's log has the epoch")
    [ring] = rings()
    assert abs(ring.index(1) - ring.index(2)) == 2, ring
    assert not master.events("peer_gone")
    check_same_bits(peers)


def test_an_edge_that_cannot_be_connected_is_planned_around(cluster: ProgramCluster, network: ShapedNetwork) -> None:
    """The link was cut before any peer joined: neither end can connect to the other."""
    master, peers = start_hosts(cluster, network, 4, *BOTH)
    master.expect_log("neither end could connect it")
    assert not master.events("peer_gone")
    check_same_bits(peers)


def test_without_another_ring_one_end_of_a_cut_is_evicted(cluster: ProgramCluster, network: ShapedNetwork) -> None:
    """Three peers have one ring only."""
    _, peers = start_hosts(cluster, network, 3)
    at = max(network.cut(*cut) for cut in BOTH)
    assert "no ring without the bad edges 1 - 2 exists" in peers[1].expect("evicted")["message"]
    for peer in (peers[0], peers[2]):
        step_with(peer, 2, after=at)
    check_same_bits(peers)


def test_a_peer_that_cannot_reach_the_master_is_evicted_in_time(
    cluster: ProgramCluster, network: ShapedNetwork
) -> None:
    """The master does not receive from it, only the reverse. Whether the eviction reaches it is up to TCP."""
    _, peers = start_hosts(cluster, network, 3)
    at = network.cut(3, 0)
    for peer in peers[:2]:
        assert step_with(peer, 2, after=at)["at"] - at < EVICT_S + SLACK_S
    learns_that_it_is_out(peers[2], peers[0])
    check_same_bits(peers)


def test_a_peer_that_the_master_cannot_reach_is_evicted_in_time(
    cluster: ProgramCluster, network: ShapedNetwork
) -> None:
    """The master receives its heartbeats, but they echo nothing new. The eviction cannot reach it."""
    master, peers = start_hosts(cluster, network, 3)
    at = network.cut(0, 3)
    for peer in peers[:2]:
        assert step_with(peer, 2, after=at)["at"] - at < EVICT_S + SLACK_S
    [gone] = master.expect_events("peer_gone")
    assert gone["how"] == "evicted"
    assert gone["peer"] == 3
    learns_that_it_is_out(peers[2], peers[0])
    check_same_bits(peers)


def test_a_peer_that_is_cut_off_entirely_is_evicted_in_time(cluster: ProgramCluster, network: ShapedNetwork) -> None:
    _, peers = start_hosts(cluster, network, 3)
    at = network.unplug(3)
    for peer in peers[:2]:
        assert step_with(peer, 2, after=at)["at"] - at < EVICT_S + SLACK_S
    learns_that_it_is_out(peers[2], peers[0])
    check_same_bits(peers)


def test_a_probing_node_that_loses_power_is_dropped_in_time(cluster: ProgramCluster, network: ShapedNetwork) -> None:
    """It sends nothing, and its kernel does not acknowledge either. It joins again when it is back."""
    address = f"{network.address(0)}:{MASTER_PORT}"
    master = cluster.start_master(listen=address, arguments=["--insecure"], inside=network.inside(0), **SHORT)
    hosts = [network.add_host() for _ in range(3)]
    names = [f"n{host}" for host in hosts]
    start_nodes(cluster, names, inside=[network.inside(host) for host in hosts])
    rounds = Rounds(master)
    rounds.whole(*names)
    network.unplug(hosts[2])
    dropped = master.expect_log(f"({names[2]})")
    assert f"silent for {FAST['evict_after_ms']} ms" in dropped or "silent for 2" in dropped
    rounds.whole(*names[:2])
    network.plug(hosts[2])
    rounds.whole(*names)


def learns_that_it_is_out(peer: ClusterProcess, other: ClusterProcess) -> None:
    """It learns of its eviction, or gives the master up by itself; its program does not wait forever.

    That takes its time: the others end first, which would only keep the cores busy.
    """
    other.send("stop")
    other.wait_success()
    until(
        lambda: peer.reports("evicted") or "MasterUnreachable" in peer.stderr.text(),
        f"{peer.name} learns that it is out",
    )
