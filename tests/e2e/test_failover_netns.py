"""Masters on separate machines, and etcd on a third: the leader's cable is pulled."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import WAIT_S, ProgramCluster
from store_servers import Etcd
from training_program import end_training, start_training, step_with

from ringfold.tools.cluster import MASTER_PORT
from ringfold.tools.shaped import ShapedNetwork

pytestmark = pytest.mark.netns

LEASE_S = 3.0
"""Longer than a loaded machine delays a master: the cable is the only reason to lose it."""
MASTERS, STORE, PEERS = (0, 1), 2, 3
"""Hosts."""


def start_etcd(cluster: ProgramCluster, network: ShapedNetwork, folder: Path) -> str:
    """etcd on a host of its own; its address."""
    address = network.address(STORE)
    here, peers = f"http://{address}:2379", f"http://{address}:2380"
    where = ["--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", peers]
    where += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"m={peers}"]
    command = [*network.inside(STORE), "etcd", "--name", "m", "--data-dir", str(folder), "--log-level", "info", *where]
    cluster.start("etcd", command).expect_log("ready to serve client requests")
    return f"etcd://{address}:2379?timeout_s=1"


def leader_of(network: ShapedNetwork, master: str) -> str:
    """The leader, by `ringfold status` of a master, on the peers' host."""
    command = [sys.executable, "-c", "from ringfold.cli import main; main()", "status", master, "--json"]
    ran = subprocess.run([*network.inside(PEERS), *command], capture_output=True, check=True, timeout=WAIT_S)
    leader: str = json.loads(ran.stdout)["leader"]
    return leader


def test_a_leader_that_is_cut_off_is_replaced_and_does_no_harm(
    cluster: ProgramCluster, network: ShapedNetwork, tmp_path: Path
) -> None:
    if missing := Etcd.missing():
        pytest.skip(missing)
    for _ in (*MASTERS[1:], STORE, PEERS):
        network.add_host()
    store = start_etcd(cluster, network, tmp_path / "etcd")
    masters = []
    for host in MASTERS:
        masters.append(
            cluster.start_master(
                listen=f"{network.address(host)}:{MASTER_PORT}",
                arguments=["--insecure"],
                inside=network.inside(host),
                store=store,
                lease_s=LEASE_S,
                evidence="master",
            )
        )
        masters[-1].expect_log("leading with fence 1" if host == MASTERS[0] else "stands by")
    leader, standby = masters
    both = f"{leader.address},{standby.address}"
    peers = start_training(cluster, 2, floats=10_000, address=both, inside=network.inside(PEERS))
    network.unplug(MASTERS[0])
    standby.expect_log("leading with fence 2")
    leader.expect_log("does not lead any more")
    standby.expect_events("epoch_recorded")  # the ops that were in flight end in it, as only a master tells their ends
    led = time.monotonic()
    for peer in peers:
        step_with(peer, 2, after=led)
    assert leader_of(network, standby.address) == standby.address
    recorded = len(standby.events("epoch_recorded"))
    plugged = network.plug(MASTERS[0])
    leader.expect_log(f"stands by ({standby.address} leads)")
    for peer in peers:
        step_with(peer, 2, after=plugged)
    assert len(standby.events("epoch_recorded")) == recorded, "the deposed leader's return changed nothing"
    assert not any(peer.reports("evicted") for peer in peers)
    end_training(peers)
