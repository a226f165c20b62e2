"""Cut cables: every process in a network namespace of its own, joined by a bridge, as on separate machines.

A cut is one-directional: the sender's neighbour table gets a hardware address for the other end that nobody has. Frames
then vanish on the bridge without a word to either side, connections stay open, and the other direction still works.
"""

import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from cluster import FAST, Cluster, Master, Peer, by_id, until
from training import check_same_bits, step_with, train

pytestmark = pytest.mark.netns

EVICT_S = FAST["evict_after_ms"] / 1_000
SLACK_S = 1.0
NOBODY = "02:00:00:00:00:99"
PORT = 48148


def _ip(*words: str) -> None:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {ran.stderr.strip()}")


class Network:
    """A bridge in a namespace of its own, and hosts around it. Host n has the address 10.77.0.n."""

    def __init__(self) -> None:
        self._prefix = f"rf{os.getpid()}"
        self._spaces: list[str] = []
        self.hub = self._new("hub")
        _ip("-n", self.hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self.hub, "link", "set", "br0", "up")

    def _new(self, name: str) -> str:
        space = f"{self._prefix}{name}"
        _ip("netns", "add", space)
        self._spaces.append(space)
        return space

    def add_host(self, number: int) -> None:
        space = self._new(f"h{number}")
        _ip("-n", self.hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self.hub, "link", "set", f"port{number}", "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def on(self, number: int) -> list[str]:
        """The prefix of commands that run on a host."""
        return ["ip", "netns", "exec", f"{self._prefix}h{number}"]

    def cut(self, source: int, target: int) -> float:
        """From now on nothing of host `source` reaches host `target`. The time just before."""
        at = time.monotonic()
        table = ("-n", f"{self._prefix}h{source}", "neigh", "replace", f"10.77.0.{target}")
        _ip(*table, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        return at

    def unplug(self, number: int) -> float:
        """Take a host off the bridge. The time just before."""
        at = time.monotonic()
        _ip("-n", self.hub, "link", "set", f"port{number}", "down")
        return at

    def close(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture
def network(cluster: Cluster) -> Iterator[Network]:
    made = None
    try:
        try:
            made = Network()
            made.add_host(1)
        except OSError as error:
            pytest.skip(f"network namespaces do not work here: {error}")
        yield made
    finally:
        cluster.close()  # processes before the namespaces that they run in
        if made is not None:
            made.close()


def start_hosts(cluster: Cluster, network: Network, count: int, *cuts: tuple[int, int]) -> tuple[Master, list[Peer]]:
    """A master on host 1, and peer n on host 10 + n, for n from 1 on. `cuts` are there from the beginning."""
    address = f"10.77.0.1:{PORT}"
    master = cluster.start_master(listen=address, arguments=["--insecure"], inside=network.on(1))
    for number in range(1, count + 1):
        network.add_host(10 + number)
    for source, target in cuts:
        network.cut(source, target)
    started = []
    for number in range(1, count + 1):
        started += cluster.start(train, inside=network.on(10 + number), address=address, world=count, floats=300_000)
        master.expect_registered(number)
    peers = by_id(started)
    for peer in started:
        step_with(peer, count)
    return master, [peers[number] for number in range(1, count + 1)]


BOTH = [(11, 12), (12, 11)]


@pytest.mark.parametrize("cuts", [BOTH, BOTH[:1], BOTH[1:]], ids=["both ways", "with the ring", "against the ring"])
def test_the_ring_is_planned_around_a_cut_between_two_peers(
    cluster: Cluster, network: Network, cuts: list[tuple[int, int]]
) -> None:
    """Both peers live and reach everybody else: nobody is evicted, and all four go on."""
    master, peers = start_hosts(cluster, network, 4)
    at = max(network.cut(*cut) for cut in cuts)
    for peer in peers:
        step_with(peer, 4, after=at + 1)
        around = step_with(peer, 4, after=at + 1)
    [bad] = {tuple(sorted((event["source"], event["target"]))) for event in master.events("edge_bad")}
    assert bad == (1, 2)
    [ring] = [event["ring"] for event in master.events("epoch_recorded") if event["epoch"] == around["epoch"]]
    assert abs(ring.index(1) - ring.index(2)) == 2, ring
    assert not master.events("peer_gone")
    check_same_bits(peers)


def test_an_edge_that_cannot_be_connected_is_planned_around(cluster: Cluster, network: Network) -> None:
    """The cable was cut before anybody came: neither end can dial the other, and the ring goes another way."""
    master, peers = start_hosts(cluster, network, 4, *BOTH)
    master.expect_log("neither end could connect it")
    assert not master.events("peer_gone")
    check_same_bits(peers)


def test_without_another_ring_one_end_of_a_cut_is_evicted(cluster: Cluster, network: Network) -> None:
    """Three peers have one ring only."""
    _, peers = start_hosts(cluster, network, 3)
    at = max(network.cut(*cut) for cut in BOTH)
    assert "no ring without the bad edges 1 - 2 exists" in peers[1].expect("evicted")["words"]
    for peer in (peers[0], peers[2]):
        step_with(peer, 2, after=at)
    check_same_bits(peers)


def test_who_cannot_reach_the_master_is_evicted_in_time(cluster: Cluster, network: Network) -> None:
    """It hears the master, but is not heard. Whether it can be told so is up to TCP, which misses acknowledgements."""
    _, peers = start_hosts(cluster, network, 3)
    at = network.cut(13, 1)
    for peer in peers[:2]:
        assert step_with(peer, 2, after=at)["at"] - at < EVICT_S + SLACK_S
    learns_that_it_is_out(peers[2])
    check_same_bits(peers)


def test_whom_the_master_cannot_reach_is_evicted_in_time(cluster: Cluster, network: Network) -> None:
    """It is heard, but its heartbeats echo nothing new. It cannot be told, and gives the master up by itself."""
    master, peers = start_hosts(cluster, network, 3)
    at = network.cut(1, 13)
    for peer in peers[:2]:
        assert step_with(peer, 2, after=at)["at"] - at < EVICT_S + SLACK_S
    [gone] = master.events("peer_gone")
    assert gone["how"] == "evicted"
    assert gone["peer"] == 3
    learns_that_it_is_out(peers[2])
    check_same_bits(peers)


def test_who_is_cut_off_entirely_is_evicted_in_time(cluster: Cluster, network: Network) -> None:
    _, peers = start_hosts(cluster, network, 3)
    at = network.unplug(13)
    for peer in peers[:2]:
        assert step_with(peer, 2, after=at)["at"] - at < EVICT_S + SLACK_S
    learns_that_it_is_out(peers[2])
    check_same_bits(peers)


def learns_that_it_is_out(peer: Peer) -> None:
    """It is told, or gives the master up by itself; its program is not left waiting."""
    until(
        lambda: peer.said("evicted") or "MasterUnreachable" in str(peer.log.all), f"{peer.name} learns that it is out"
    )
