"""Guardians of real processes: what they report, when they end, and what they keep of their peer."""

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from programs import MasterProcess, ProgramCluster, ProgramContext, until
from training_program import end_training, start_training, step_with, train

from ringfold.tools.shaped import ShapedNetwork

LIFE, GUARDIAN = "ringfold-life", "ringfold-guard"
SAW = "its process has died, as its guardian saw"
BALLAST_BYTES = 1 << 30
_PR_SET_THP_DISABLE = 41


def lives_of(pid: int, access: str) -> set[str]:
    """The pages by which deaths are seen that a process has mapped with this access, by their inodes."""
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if LIFE in line]
    except OSError:
        return set()
    return {line[4] for line in lines if line[1] == access}


def guardians_of(pid: int) -> list[int]:
    """The guardians that watch this process."""
    mine = lives_of(pid, "rw-s")
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and is_guardian(int(path.name)) and lives_of(int(path.name), "r--s") & mine
    ]


def is_guardian(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == GUARDIAN
    except OSError:
        return False


def guardian_of(pid: int) -> int:
    """The only guardian of a process, once it is there."""
    until(lambda: len(guardians_of(pid)) == 1, f"process {pid} has a guardian")
    return guardians_of(pid)[0]


def gone(master: MasterProcess, peer: str) -> str:
    """Why a peer is gone, as the master's log says."""
    return master.expect_log(f"({peer}) lost: ")


def heavy(me: ProgramContext) -> None:
    """Train with much memory in small pages: the kernel takes a tenth of a second to free it."""
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    ballast = np.ones(me.options["ballast_bytes"] // 8)
    train(me)
    del ballast


@pytest.mark.netns
def test_the_death_of_a_large_peer_alone_on_its_host_is_seen_before_its_connections_end(
    cluster: ProgramCluster, network: ShapedNetwork
) -> None:
    for _ in range(2):
        network.add_host()
    where = f"{network.address(0)}:48148"
    master = cluster.start_master(listen=where, arguments=["--insecure"], inside=network.inside(0))
    stays = [
        cluster.start_program(train, 1, world=2, floats=100_000, inside=network.inside(host))[0] for host in (0, 1)
    ]
    for peer in stays:
        step_with(peer, 2)
    (victim,) = cluster.start_program(
        heavy, 1, world=1, floats=100_000, ballast_bytes=BALLAST_BYTES, inside=network.inside(2)
    )
    step_with(victim, 3)
    guardian = guardian_of(victim.pid)
    killed = victim.kill()
    for peer in stays:
        step_with(peer, 2, after=killed)
    assert SAW in gone(master, "p2")
    until(lambda: not is_guardian(guardian), "the guardian has ended")
    end_training(stays)


def test_a_guardian_that_is_killed_changes_nothing(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = start_training(cluster, 3, floats=10_000)
    victim = peers[2]
    os.kill(guardian_of(victim.pid), signal.SIGKILL)
    until(lambda: not guardians_of(victim.pid), "the guardian is gone")
    killed = time.monotonic()
    for peer in peers:
        step_with(peer, 3, after=killed)
    assert not master.events("peer_gone")
    end_training(peers)


def test_guardians_end_when_their_peers_leave(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_training(cluster, 2, floats=10_000)
    guardians = [guardian_of(peer.pid) for peer in peers]
    for guardian in guardians:
        os.kill(guardian, signal.SIGTERM)  # as a scheduler does that stops a whole group of processes
    end_training(peers)
    until(lambda: not any(map(is_guardian, guardians)), "the guardians have ended")


def test_a_guardian_keeps_nothing_of_its_peer_and_is_not_its_child(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_training(cluster, 2, floats=10_000)
    peer, guardian = peers[0], guardian_of(peers[0].pid)
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{guardian}/status").read_text().splitlines() if ":" in line
    )
    assert int(status["PPid"]) != peer.pid
    assert os.getsid(guardian) == guardian
    assert os.readlink(f"/proc/{guardian}/cwd") == "/"
    files = [os.readlink(each) for each in Path(f"/proc/{guardian}/fd").iterdir()]
    assert sorted(each.partition(":")[0] for each in files) == ["/dev/null"] * 3 + ["socket"]
    rollup = Path(f"/proc/{guardian}/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private"))
    assert private < 1_024, f"{private} KiB"
    end_training(peers)


def test_at_a_new_master_each_peer_has_a_new_guardian(cluster: ProgramCluster, tmp_path: Path) -> None:
    listen, store = f"127.0.0.1:{free_port()}", f"sqlite://{tmp_path}/journal.db"
    first = cluster.start_master(listen=listen, store=store, lease_s=3.0)
    peers = start_training(cluster, 2, floats=10_000)
    old = [guardian_of(peer.pid) for peer in peers]
    first.kill()
    first.wait()
    second = cluster.start_master(listen=listen, store=store, lease_s=3.0)
    for peer, guardian in zip(peers, old, strict=True):
        until(lambda: not is_guardian(guardian), "the guardian of the old connection has ended")  # noqa: B023
        assert guardian_of(peer.pid) != guardian
    (victim,) = cluster.start_program(heavy, 1, world=1, floats=10_000, ballast_bytes=BALLAST_BYTES)
    step_with(victim, 3)
    new = guardian_of(victim.pid)
    killed = victim.kill()
    for peer in peers:
        step_with(peer, 2, after=killed)
    assert "its process has died" in gone(second, "p2"), "a neighbour on its host may be the first to see it"
    until(lambda: not is_guardian(new), "the guardian has ended")
    end_training(peers)


def without(me: ProgramContext) -> None:
    os.environ["RINGFOLD_GUARDIAN"] = "off"
    with me.join() as run:
        me.report("joined", starter=run._session.guardian is not None)


def test_a_peer_that_wants_no_guardian_has_none(cluster: ProgramCluster) -> None:
    cluster.start_master()
    (peer,) = cluster.start_program(without, 1)
    peer.expect("joined", starter=False)
    peer.wait_success()
