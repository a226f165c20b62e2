"""All peers are killed, and the run continues by itself: from the newest checkpoint of its own history."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from programs import ClusterProcess, Message, ProgramCluster, ProgramContext

pytestmark = pytest.mark.waiting

COUNT = 50_000


def train(me: ProgramContext) -> None:
    """`steps` with a checkpoint every 5 steps. Each step adds ones, so that the weights show how many there were."""
    import ringfold as rf

    weights = np.zeros(COUNT, np.float32)
    state = rf.SharedState(weights=weights)
    names = ("rollback", "until", "check_every", "min_world")
    chosen = {name: me.options[name] for name in names if name in me.options}
    if me.options.get("directory"):
        chosen |= {"checkpoint": me.options["directory"], "every": 5}
    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        with me.failing("failed") if me.options.get("fails") else nullcontext():
            for step in run.steps(state, **chosen):
                ones = np.ones(COUNT, np.float32)
                step.all_reduce(ones, op="avg")
                weights += ones
                me.report("step", number=step.number, weight=weights[-1])
                if step.number in me.options.get("pauses", ()):
                    me.receive()
    me.report("end", revision=state.revision)


class Stage:
    """A master with a journal that can be started again in its place, and peers with names and disks of their own."""

    def __init__(self, cluster: ProgramCluster, tmp_path: Path, run: str = "default", **settings: object) -> None:
        self.cluster, self.path, self.run, self.settings = cluster, tmp_path, run, settings
        self.port = free_port()
        self.start_master()

    def start_master(self) -> None:
        journal = self.path / "journal.db"
        self.master = self.cluster.start_master(listen=f"127.0.0.1:{self.port}", journal=journal, **self.settings)

    def start(self, *names: str, **options: object) -> list[ClusterProcess]:
        options = {"min_world": len(names), **options}
        return [
            self.cluster.start_one(
                train, join={"name": name, "run": self.run}, **{"directory": str(self.path / name), **options}
            )
            for name in names
        ]

    def kill(self, peers: list[ClusterProcess], *, master: bool = False) -> None:
        for each in (*peers, self.master) if master else peers:
            each.kill()
        for each in (*peers, self.master) if master else peers:
            each.wait()
        if master:
            self.start_master()

    def revisions(self, name: str) -> list[int]:
        from ringfold import Checkpoints

        return Checkpoints(self.path / name).revisions()

    def remove(self, name: str, revision: int) -> None:
        for path in (self.path / name).glob(f"state-{revision:012}-*"):
            path.unlink()


def all_at(peers: list[ClusterProcess], number: int) -> None:
    for peer in peers:
        peer.expect("step", number=number)


def first_step(peers: list[ClusterProcess]) -> int:
    """Where all of them began, and that the weights were those of this step."""
    facts: list[Message] = [peer.expect("step") for peer in peers]
    assert {fact["weight"] for fact in facts} == {facts[0]["number"] + 1}
    assert len({fact["number"] for fact in facts}) == 1
    return int(facts[0]["number"])


@pytest.mark.parametrize("master", ["is there", "is killed, too"])
def test_a_run_that_was_synced_after_its_last_checkpoint_goes_on_from_that(
    cluster: ProgramCluster, tmp_path: Path, master: str
) -> None:
    """A join makes all sync at revision 13. The newest checkpoint is that of 10."""
    stage = Stage(cluster, tmp_path)
    peers = stage.start("a", "b", pauses=[11, 14])
    all_at(peers, 11)
    newcomer = stage.start("c", min_world=2, pauses=[14])
    stage.master.expect_events("peer_registered", 3)
    for peer in peers:
        peer.send("go on")
    assert first_step(newcomer) == 13
    all_at([*peers, *newcomer], 14)
    stage.kill([*peers, *newcomer], master=master == "is killed, too")

    peers = stage.start("a", "b", "c", until=20)
    assert first_step(peers) == 10
    for peer in peers:
        peer.wait_success()
        peer.expect_log("revision 13 is lost with all peers that had it: the run goes on from revision 10 of peer ")
        peer.expect_log("3 steps are lost")
        assert peer.reports("end")[0]["revision"] == 20
    [shown] = stage.master.expect_events("state_rolled_back")
    assert (shown["rollback"]["revision"], shown["rollback"]["lost"]) == (10, 13)
    assert stage.revisions("c") == [20, 15]


@pytest.mark.parametrize("holder", ["another", "the same"])
def test_an_abandoned_checkpoint_does_not_win_although_its_revision_is_higher(
    cluster: ProgramCluster, tmp_path: Path, holder: str
) -> None:
    """The right one is on another disk, or behind the abandoned one on the same disk."""
    stage = Stage(cluster, tmp_path, resume_wait_s=1)
    peers = stage.start("a", "b", pauses=[16])
    all_at(peers, 16)
    stage.kill(peers)
    stage.remove("b", 15)
    # The peer with revision 15 stays away, and the run goes on from 10 without it.
    peers = stage.start("b", "c", pauses=[13], check_every=1)
    assert first_step(peers) == 10
    peers[0].expect_log("it waits for 'a'")
    all_at(peers, 13)
    stage.kill(peers)
    stage.remove("c", 10)
    if holder == "the same":
        for revision in stage.revisions("b"):
            stage.remove("b", revision)
    assert stage.revisions("a")[:2] == [15, 10]
    # Now it is back, with a branch that the run has left. One of the others has no directory any more.
    how = {"until": 16, "min_world": 3, "check_every": 5}
    peers = [*stage.start("a", "b", **how), *stage.start("c", directory=None, **how)]
    assert first_step(peers) == 10
    for peer in peers:
        peer.wait_success()
        peer.expect_log("revision 13 is lost with all peers that had it: the run goes on from revision 10 of peer ")
    if holder == "the same":
        peers[0].expect_log("revision 10 was loaded, for the run to go on from")
    peers[0].expect_log("the checkpoint of revision 15 that was loaded here is not used: it belongs to a branch")


def test_the_first_to_come_back_waits_for_the_one_with_the_newest_checkpoint(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    stage = Stage(cluster, tmp_path)
    peers = stage.start("a", "b", pauses=[17], check_every=1)
    all_at(peers, 17)
    stage.kill(peers, master=True)
    stage.remove("b", 15)
    [first] = stage.start("b", min_world=1, until=19)
    first.expect_log("revision 17 is lost with all peers that had it. Before the run goes on")
    first.expect_log("it waits for 'a', which may have a newer one")
    status = [sys.executable, "-m", "ringfold.cli", "status", f"127.0.0.1:{stage.port}", "--json"]
    shown = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    assert "revision 17 is lost; before a checkpoint is taken, 'a' may come: for another" in shown
    assert not first.reports("step")
    peers = [first, *stage.start("a", min_world=1, until=19)]
    assert first_step(peers) == 15
    for peer in peers:
        peer.wait_success()


def test_without_any_checkpoint_the_error_has_a_remedy_that_works(cluster: ProgramCluster, tmp_path: Path) -> None:
    """In a run that has a name of its own: the default run would begin again."""
    stage = Stage(cluster, tmp_path, run="nightly")
    peers = [*stage.start("a", min_world=1, until=100, pauses=[3], check_every=1)]
    all_at(peers, 3)
    stage.kill(peers)
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    [peer] = stage.start("a", fails=True)
    failed = peer.expect("failed", error="StateLost", revision=3)
    assert "start all peers with rollback=True" in failed["message"]
    assert "start a peer that has them, with steps(state, checkpoint=DIR)" in failed["message"]
    assert "to start run nightly again: `ringfold runs forget nightly`" in failed["message"]
    peer.wait_success()
    [peer] = stage.start("a", rollback=True, until=5)
    assert first_step([peer]) == 0
    peer.wait_success()
