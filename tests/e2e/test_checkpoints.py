"""Checkpoints of real runs: all peers die, and the run goes on where it was saved; disks that are full or read-only."""

import os
import resource
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from programs import ClusterProcess, Message, ProgramCluster, ProgramContext

pytestmark = pytest.mark.waiting

COUNT = 200_000


def train(me: ProgramContext) -> None:
    """`steps` with a checkpoint every 5 steps. Each step adds ones, so that the weights show how many there were."""
    import ringfold as rf

    if limit := me.options.get("largest_file"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    weights = np.zeros(COUNT, np.float32)
    state = rf.SharedState(weights=weights)
    more = {name: me.options[name] for name in ("rollback", "until") if name in me.options}
    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        with me.failing("failed") if me.options.get("fails") else nullcontext():
            for step in run.steps(state, checkpoint=me.options["directory"], every=5, min_world=2, **more):
                ones = np.ones(COUNT, np.float32)
                step.all_reduce(ones, op="avg")
                weights += ones
                me.report("step", number=step.number, weight=weights[-1], digest=zlib.crc32(weights.data))
                if step.number == me.options.get("pause_at"):
                    me.receive()
    me.report("end", revision=state.revision)


def run_until_killed(cluster: ProgramCluster, directory: Path, at: int = 12, **settings: object) -> None:
    """Two peers take the steps up to `at` and are killed there."""
    cluster.start_master(**settings)
    peers = cluster.start_program(train, 2, directory=str(directory), pause_at=at)
    for peer in peers:
        peer.expect("step", number=at)
    for peer in peers:
        peer.kill()
        peer.wait()


def revisions(directory: Path) -> list[int]:
    from ringfold import Checkpoints

    return Checkpoints(directory).revisions()


def first_step(peers: list[ClusterProcess]) -> Message:
    """Where all of them began, and that it was the same."""
    facts = [peer.expect("step") for peer in peers]
    assert len({(fact["number"], fact["digest"]) for fact in facts}) == 1
    return facts[0]


def check_weights(fact: Message) -> None:
    assert fact["weight"] == fact["number"] + 1, "the weights are not those of this step"


@pytest.mark.parametrize("master", ["the same", "a new"])
def test_a_run_goes_on_after_all_peers_were_killed(cluster: ProgramCluster, tmp_path: Path, master: str) -> None:
    run_until_killed(cluster, tmp_path)
    assert revisions(tmp_path) == [10, 5, 0]
    if master == "a new":
        cluster.start_master()
    peers = cluster.start_program(train, 2, directory=str(tmp_path), until=20)
    fact = first_step(peers)
    assert fact["number"] == 10
    check_weights(fact)
    for peer in peers:
        assert peer.expect("end")["revision"] == 20
        peer.wait_success()
    assert revisions(tmp_path) == [20, 15, 10]


def test_one_peer_with_a_checkpoint_is_enough(cluster: ProgramCluster, tmp_path: Path) -> None:
    """The other one's disk is new: it gets the state from the first."""
    run_until_killed(cluster, tmp_path / "old")
    cluster.start_master()
    peers = cluster.start_program(train, directory=str(tmp_path / "new"), until=20)
    peers += cluster.start_program(train, directory=str(tmp_path / "old"), until=20)
    fact = first_step(peers)
    assert fact["number"] == 10
    check_weights(fact)
    for peer in peers:
        peer.wait_success()
    assert revisions(tmp_path / "new")[0] == 20


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def test_a_damaged_file_is_skipped_for_the_one_before_it(cluster: ProgramCluster, tmp_path: Path) -> None:
    run_until_killed(cluster, tmp_path)
    damage(max(tmp_path.glob("state-*")))
    cluster.start_master()
    peers = cluster.start_program(train, 2, directory=str(tmp_path), until=8)
    fact = first_step(peers)
    assert fact["number"] == 5
    check_weights(fact)
    for peer in peers:
        peer.expect_log("skipped a checkpoint")
        peer.wait_success()


def test_an_older_checkpoint_is_taken_where_the_last_revision_is_damaged(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    """The master knows that revision 10 was there. It is lost, and revision 5 is of the same history."""
    run_until_killed(cluster, tmp_path, resume_wait_s=0)
    damage(max(tmp_path.glob("state-*")))
    peers = cluster.start_program(train, 2, directory=str(tmp_path), until=8)
    fact = first_step(peers)
    assert fact["number"] == 5
    check_weights(fact)
    for peer in peers:
        peer.expect_log("revision 10 is lost with all peers that had it: the run goes on from revision 5 of peer ")
        peer.wait_success()


def test_a_rollback_takes_it(cluster: ProgramCluster, tmp_path: Path) -> None:
    run_until_killed(cluster, tmp_path)
    damage(max(tmp_path.glob("state-*")))
    peers = cluster.start_program(train, 2, directory=str(tmp_path), until=8, rollback=True)
    fact = first_step(peers)
    assert fact["number"] == 5
    check_weights(fact)
    for peer in peers:
        peer.wait_success()


# Disks. Training is worth more than a checkpoint: it goes on, and logs that nothing was saved.


def check_trains_without_saving(cluster: ProgramCluster, directory: Path, text: str, **options: object) -> None:
    cluster.start_master()
    peers = cluster.start_program(train, 2, directory=str(directory), until=12, **options)
    for peer in peers:
        assert peer.expect("end")["revision"] == 12
        peer.wait_success()
        peer.expect_log("no checkpoint of step 5")
        peer.expect_log(text)
    assert revisions(directory) == []
    assert not [path for path in directory.iterdir() if path.name.endswith(".saving")], "an unfinished file was left"


def test_a_file_that_may_not_grow_does_not_end_the_training(cluster: ProgramCluster, tmp_path: Path) -> None:
    check_trains_without_saving(cluster, tmp_path, "File too large", largest_file=COUNT * 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is smaller than one checkpoint."""
    yield from _mounted(tmp_path / "small", "size=256k")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    yield from _mounted(tmp_path / "fixed", "ro")


def _mounted(where: Path, option: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", option, "ringfold-test", str(where)]
    if (ran := subprocess.run(command, capture_output=True, text=True, check=False)).returncode != 0:
        pytest.skip(f"mount: {ran.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_does_not_end_the_training(cluster: ProgramCluster, small_disk: Path) -> None:
    check_trains_without_saving(cluster, small_disk, "No space left on device")


def test_a_read_only_disk_does_not_end_the_training(cluster: ProgramCluster, read_only_disk: Path) -> None:
    check_trains_without_saving(cluster, read_only_disk, "Read-only file system")
