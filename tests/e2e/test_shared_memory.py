"""Lanes in shared memory between real processes: peers that die, freeze and come, and unauthenticated clients."""

import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext, descriptors_of, until
from training_program import check_same_bits, end_training, start_training, step_with, train

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.tools.shaped import ShapedNetwork

PIPE = "ringfold-lane"


def pipes_of(pid: int) -> int:
    """How many pipes a process has mapped: the first page of each is a mapping of its own."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(PIPE in line and line.split()[2] == "00000000" for line in lines)


def reduce_once(me: ProgramContext) -> None:
    """Join, reduce once for every size, and say what carries the lanes."""
    os.environ.update(me.options.get("env", {}))
    world = me.options["world"]
    with me.join() as run:
        while run.group_size < world:
            run.update_topology(min_world=world)
        right = True
        for size in (100, 50_000, 3_000_000):
            values = np.full(size, run.rank + 1, np.float32)
            run.all_reduce(values)
            right = right and bool((values == world * (world + 1) / 2).all())
        lanes = run._session.engine.lanes()
        me.report("reduced", right=right, lanes=len(lanes), in_memory=sum(lane.in_memory for lane in lanes))
        me.receive()


def ring_links(cluster: ProgramCluster) -> tuple[list[tuple[str, int]], str]:
    """What `ringfold status` says about the ring's links, as JSON and as text."""
    assert cluster.master is not None
    shown = [
        cluster.start_command(f"status{number}", "status", cluster.master.address, *arguments)
        for number, arguments in enumerate((["--json"], []))
    ]
    assert [command.wait() for command in shown] == [0, 0]
    (group,) = json.loads(shown[0].stdout.text())["groups"]
    return [(link["transport"], link["lanes"]) for link in group["ring_links"]], shown[1].stdout.text()


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_peers_of_one_host_share_memory_unless_told_otherwise(
    cluster: ProgramCluster, transport: str, threads: str
) -> None:
    env = {"RINGFOLD_TRANSPORT": transport, "RINGFOLD_THREADS": threads}
    cluster.start_master()
    peers = cluster.start_program(reduce_once, 3, world=3, env=env)
    for peer in peers:
        lanes = 2 * int(threads)
        peer.expect("reduced", right=True, lanes=lanes, in_memory=lanes if transport == "auto" else 0)
        assert pipes_of(peer.pid) == (lanes if transport == "auto" else 0)
    links, text = ring_links(cluster)
    assert links == [("shm" if transport == "auto" else "tcp", int(threads))] * 3
    assert ("1 => 2 => 3 => 1" if transport == "auto" else "1 -> 2 -> 3 -> 1") in text
    assert ("in shared memory" in text, "over TCP" in text) == (transport == "auto", transport == "tcp")
    for peer in peers:
        peer.send()
        peer.wait_success()


def test_a_peer_that_wants_tcp_gets_it_from_the_others(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(reduce_once, 2, world=3)
    peers += cluster.start_program(reduce_once, 1, world=3, env={"RINGFOLD_TRANSPORT": "tcp"})
    for peer, in_memory in zip(peers, (1, 1, 0), strict=True):
        peer.expect("reduced", right=True, lanes=2, in_memory=in_memory)
    links, text = ring_links(cluster)
    assert sorted(links) == [("shm", 1), ("tcp", 1), ("tcp", 1)]
    assert "=>: in shared memory; ->: over TCP" in text
    for peer in peers:
        peer.send()
        peer.wait_success()


@pytest.mark.netns
def test_peers_in_separate_network_namespaces_fall_back_to_tcp(cluster: ProgramCluster, network: ShapedNetwork) -> None:
    """As containers on one host do: the same host name, and no common name of a socket."""
    network.add_host()
    master = cluster.start_master(
        listen=f"{network.address(0)}:48148", arguments=["--insecure"], inside=network.inside(0)
    )
    join = {"host": "same"}
    peers = [
        cluster.start_program(reduce_once, 1, world=2, join=join, inside=network.inside(host), address=master.address)[
            0
        ]
        for host in (0, 1)
    ]
    for peer in peers:
        peer.expect("reduced", right=True, in_memory=0)
    for peer in peers:
        peer.send()
        peer.wait_success()


def test_a_killed_peer_leaves_no_mapping_and_no_descriptor(cluster: ProgramCluster) -> None:
    """Killed at any time of an op, again and again; the others go on with the same bits."""
    cluster.start_master()
    peers = start_training(cluster, 3, floats=1_500_000)
    stays = peers[:2]
    before = [(pipes_of(peer.pid), len(descriptors_of(peer.pid))) for peer in stays]
    assert [pipes for pipes, _ in before] == [2, 2]
    rng = random.Random(7)
    victim = peers[2]
    for _ in range(8):
        time.sleep(rng.uniform(0, 0.02))
        killed = victim.kill()
        for peer in stays:
            step_with(peer, 2, after=killed)
        until(lambda: [pipes_of(peer.pid) for peer in stays] == [2, 2], "the mappings of the dead peer are gone")
        (victim,) = cluster.start_program(train, 1, world=1, floats=1_500_000)
        step_with(victim, 3)
        for peer in stays:
            step_with(peer, 3, after=killed)
    until(lambda: [pipes_of(peer.pid) for peer in stays] == [2, 2], "as many mappings as before")
    for peer, (_, descriptors) in zip(stays, before, strict=True):
        assert len(descriptors_of(peer.pid)) <= descriptors + 1, "one may be an accepted connection"
    end_training([*stays, victim])


def test_a_frozen_peer_is_evicted_and_comes_back(cluster: ProgramCluster) -> None:
    cluster.start_master(evict_after_ms=1_000, suspect_after_ms=500)
    peers = start_training(cluster, 3, floats=1_500_000)
    frozen = peers[2].freeze()
    for peer in peers[:2]:
        step_with(peer, 2, after=frozen)
    thawed = peers[2].thaw()
    for peer in peers:
        step_with(peer, 3, after=thawed)
    check_same_bits(peers)
    end_training(peers)


def names_of(pid: int) -> list[str]:
    """The names at which a process listens for peers of its host."""
    inodes = {
        link.removeprefix("socket:[").removesuffix("]") for link in descriptors_of(pid) if link.startswith("socket:[")
    }
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7][1:] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("@ringfold-")]


def test_unauthenticated_clients_at_the_local_name_do_no_harm(cluster: ProgramCluster, tmp_path: Path) -> None:
    cluster.start_master()
    peers = start_training(cluster, 2, floats=100_000)
    (name,) = {name for name in names_of(peers[0].pid)}
    address = "\0" + name
    with (tmp_path / "file").open("wb") as file:
        offers = [
            (b"", []),
            (b"x", []),
            (b"x" * 8, []),
            (b"x" * 5_000, []),
            (b"x" * 8, [file.fileno()]),
            (b"x" * 8, [file.fileno()] * 3),
        ]
        clients = []
        for data, files in offers * 5:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.connect(address)
            if data:
                socket.send_fds(client, [data], files)
            clients.append(client)
        sent = time.monotonic()
        for peer in peers:
            step_with(peer, 2, after=sent)
        for client in clients:
            client.close()
    until(lambda: not any("file" in link for link in descriptors_of(peers[0].pid)), "no client's file is kept")
    end_training(peers)


def test_memory_is_shared_inside_a_process_too() -> None:
    """Two peers in one process, as tests and notebooks have them."""
    in_memory = []

    def reduce(address: str) -> None:
        with rf.join(address) as run:
            while run.group_size < 2:
                run.update_topology(min_world=2)
            values = np.ones(2_000_000, np.float32)
            for _ in range(5):
                run.all_reduce(values)
            assert (values == 2.0**5).all()
            in_memory.append(sum(lane.in_memory for lane in run._session.engine.lanes()))
            run.barrier()

    with MasterThread() as master:
        threads = [threading.Thread(target=reduce, args=(master.address,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert in_memory == [2, 2]


def heavy(me: ProgramContext) -> None:
    """Train with much memory: the kernel frees it before it closes the connections of a process that was killed. There
    is no guardian, which might see the death before the neighbours do."""
    os.environ["RINGFOLD_GUARDIAN"] = "off"
    ballast = np.ones(me.options["ballast_bytes"] // 8)
    train(me)
    del ballast


def test_the_death_of_a_large_process_is_seen_before_its_connections_end(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    stays = start_training(cluster, 2, floats=100_000)
    (victim,) = cluster.start_program(heavy, 1, world=1, floats=100_000, ballast_bytes=1 << 30)
    step_with(victim, 3)
    killed = victim.kill()
    for peer in stays:
        step_with(peer, 2, after=killed)
    assert "its process has died, as peer" in master.expect_log("was lost:")
    end_training(stays)
