"""Masters on separate machines, and etcd on a third: the leader's cable is pulled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from netns import PORT, Network
from programs import WAIT_S, ProgramCluster
from stores import Etcd
from training import end_training, start_training, step_with

pytestmark = pytest.mark.netns

LEASE_S = 1.0
MASTERS = ("10.77.0.1", "10.77.0.2")
STORE = "10.77.0.3"


def start_etcd(cluster: ProgramCluster, network: Network, folder: Path) -> str:
    """etcd on host 3; its address."""
    network.add_host(3)
    here, peers = f"http://{STORE}:2379", f"http://{STORE}:2380"
    where = ["--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", peers]
    where += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"m={peers}"]
    command = [*network.on(3), "etcd", "--name", "m", "--data-dir", str(folder), "--log-level", "info", *where]
    cluster.start("etcd", command).expect_log("ready to serve client requests")
    return f"etcd://{STORE}:2379?timeout_s=1"


def leader_of(network: Network, master: str) -> str:
    """Who leads, by what `ringfold status` of a master says on the peers' machine."""
    command = [sys.executable, "-c", "from ringfold.cli import main; main()", "status", master, "--json"]
    ran = subprocess.run([*network.on(11), *command], capture_output=True, check=True, timeout=WAIT_S)
    leader: str = json.loads(ran.stdout)["leader"]
    return leader


def test_a_leader_that_is_cut_off_is_replaced_and_does_no_harm(
    cluster: ProgramCluster, network: Network, tmp_path: Path
) -> None:
    if missing := Etcd.missing():
        pytest.skip(missing)
    store = start_etcd(cluster, network, tmp_path / "etcd")
    network.add_host(2)
    masters = []
    for number, host in enumerate(MASTERS, start=1):
        masters.append(
            cluster.start_master(
                listen=f"{host}:{PORT}",
                arguments=["--insecure"],
                inside=network.on(number),
                store=store,
                lease_s=LEASE_S,
                evidence="master",
            )
        )
        masters[-1].expect_log("leading with fence 1" if number == 1 else "stands by")
    leader, standby = masters
    network.add_host(11)
    both = f"{leader.address},{standby.address}"
    peers = start_training(cluster, 2, floats=10_000, address=both, inside=network.on(11))
    cut = network.unplug(1)
    standby.expect_log("leading with fence 2")
    leader.expect_log("does not lead any more")
    for peer in peers:
        step_with(peer, 2, after=cut)
    assert leader_of(network, standby.address) == standby.address
    plugged = network.plug(1)
    leader.expect_log(f"stands by ({standby.address} leads)")
    for peer in peers:
        step_with(peer, 2, after=plugged)
    assert len(standby.events("epoch_recorded")) == 1, "the deposed leader's return changed nothing"
    assert not any(peer.reports("evicted") for peer in peers)
    end_training(peers)
