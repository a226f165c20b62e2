"""SIGTERM in the training loop: a peer leaves at a step boundary, saves it, and ends as SIGTERM ends a process."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext, until

pytestmark = pytest.mark.waiting

COUNT = 100_000
LONG_S = 600.0
"""A grace that no test waits for."""


def train(me: ProgramContext) -> None:
    """A loop of steps that add one to each weight. Options, all optional:

    `grace_s`: the setting. `pause_in`: the step in which the program waits for the test before its op; `pause_after`:
    after it; `pause_between`: between its ops, if it has two (`twice`). `careless_in`: the step in which the program
    does not care whether an op succeeds. `handler`: a handler of the program's own, see `own_handler`. `fork`: the
    first step forks a child. `loop`: more arguments of `steps`.
    """
    import ringfold as rf

    options = me.options
    os.environ["RINGFOLD_SIGTERM_GRACE_S"] = str(options.get("grace_s", LONG_S))
    if options.get("handler"):
        own_handler(me, options["handler"])
    weights = np.zeros(COUNT, np.float32)
    state = rf.SharedState(weights=weights)
    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        for step in run.steps(state, **{"min_world": 3, **options.get("loop", {})}):
            me.report("begins", number=step.number)
            if step.number == options.get("pause_in"):
                me.report("paused", number=step.number)
                me.receive()
            if step.number == 0 and options.get("fork"):
                fork(me)
            if step.number == options.get("careless_in"):
                me.report("careless")
                with contextlib.suppress(rf.RingfoldError):
                    run.barrier(tag=5)
                weights += 1
                continue
            if options.get("twice"):
                step.all_reduce(np.ones(1))
                me.report("half", number=step.number)
                if step.number == options.get("pause_between"):
                    me.report("paused", number=step.number)
                    me.receive()
            ones = np.ones(COUNT, np.float32)
            info = step.all_reduce(ones, op="avg")
            weights += ones
            me.report("step", number=step.number, weight=weights[-1], contributors=len(info.contributors))
            if step.number == options.get("pause_after"):
                me.report("paused", number=step.number)
                me.receive()
        me.report("end", revision=state.revision, restored=signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)


def own_handler(me: ProgramContext, kind: str) -> None:
    def handle(number: int, frame: object) -> None:
        me.report("handled")
        if kind == "exits":
            sys.exit(7)

    signal.signal(signal.SIGTERM, handle)


def fork(me: ProgramContext) -> None:
    """A child, as a data loader has them, is ended by SIGTERM as always."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    os.kill(child, signal.SIGTERM)  # at once: also a signal that comes while it forks must end it
    me.report("forked", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def begin(cluster: ProgramCluster, count: int = 3, **options: Any) -> list[ClusterProcess]:  # noqa: ANN401 - as `start_program`
    """So many peers, with a few steps behind them."""
    peers = cluster.start_program(train, count, **options)
    for peer in peers:
        peer.expect("step", lambda fact: fact["number"] >= 2)
    return peers


def expect_gone(cluster: ProgramCluster, *how: str) -> None:
    assert cluster.master is not None
    assert [fact["how"] for fact in cluster.master.expect_events("peer_gone", len(how))] == list(how)


def revisions(directory: Path) -> list[int]:
    from ringfold import Checkpoints

    return Checkpoints(directory).revisions()


def test_one_of_three_leaves_and_the_others_go_on(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = begin(cluster, loop={"min_world": 1})
    peers[0].send_signal(signal.SIGTERM)
    assert peers[0].wait() == -signal.SIGTERM
    expect_gone(cluster, "left")
    peers[0].expect_log("SIGTERM: this peer leaves the run")
    for peer in peers[1:]:
        peer.expect("step", contributors=2)
        assert peer.is_running


@pytest.mark.parametrize("master", ["the same", "a new"])
def test_all_at_once_end_and_the_run_goes_on_from_what_they_saved(
    cluster: ProgramCluster, tmp_path: Path, master: str
) -> None:
    """With a grace that is too long to wait for: a peer that is alone in a step must not wait for members that left."""
    cluster.start_master()
    loop = {"checkpoint": str(tmp_path), "every": 1_000, "check_every": 1_000}
    peers = begin(cluster, loop=loop)
    for peer in peers:
        peer.send_signal(signal.SIGTERM)
    assert [peer.wait() for peer in peers] == [-signal.SIGTERM] * 3
    expect_gone(cluster, "left", "left", "left")
    newest = max(revisions(tmp_path))
    done = max(fact["number"] for peer in peers for fact in peer.reports("step"))
    assert newest == done + 1
    if master == "a new":
        cluster.start_master()
    again = cluster.start_program(train, 3, loop=loop)
    for peer in again:
        peer.expect("step")
        first = peer.reports("step")[0]
        assert (first["number"], first["weight"]) == (newest, newest + 1.0)


def test_what_a_single_peer_saved_does_not_keep_the_others_from_their_last_sync(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    """One leaves after the last sync and saves; the others are killed. The master knows the sync, and nothing later."""
    cluster.start_master()
    loop = {"checkpoint": str(tmp_path), "every": 5, "check_every": 5, "min_world": 1}
    peers = cluster.start_program(train, 3, pause_in=7, loop={**loop, "min_world": 3})
    for peer in peers:
        peer.expect("paused")
    peers[0].send_signal(signal.SIGTERM)
    peers[0].send()
    for peer in peers[1:]:
        peer.send()
    assert peers[0].wait() == -signal.SIGTERM
    for peer in peers[1:]:
        peer.kill()
        peer.wait()
    expect_gone(cluster, "left", "lost", "lost")
    assert revisions(tmp_path) == [8, 5, 0]
    again = cluster.start_one(train, loop=loop)
    assert again.expect("step")["number"] == 5
    again.expect_log("revision 5 was loaded, for the run to go on from")


def test_a_wait_for_peers_ends_at_once(cluster: ProgramCluster, tmp_path: Path) -> None:
    """One before its first step, and one inside a step: all others have left."""
    cluster.start_master()
    first = cluster.start_one(train, loop={"checkpoint": str(tmp_path / "first")})
    first.expect_log("1 of at least 3 peers are there")
    others = cluster.start_program(train, 2, pause_in=5, loop={"checkpoint": str(tmp_path / "others")})
    for peer in others:
        peer.expect("paused")
    until(lambda: len(first.reports("step")) == 5, "it waits in the next step")
    for peer in others:
        peer.kill()
    first.expect_log("step 5: 1 of at least 3 peers are there")
    first.send_signal(signal.SIGTERM)
    assert first.wait() == -signal.SIGTERM
    expect_gone(cluster, "lost", "lost", "left")
    assert max(revisions(tmp_path / "first")) == 5

    alone = cluster.start_one(train, loop={"checkpoint": str(tmp_path / "alone")})
    alone.expect_log("1 of at least 3 peers are there")
    alone.send_signal(signal.SIGTERM)
    assert alone.wait() == -signal.SIGTERM
    expect_gone(cluster, "lost", "lost", "left", "left")
    assert revisions(tmp_path / "alone") == [], "what it holds was never the run's"


def test_a_stuck_op_is_aborted_when_the_grace_is_over(cluster: ProgramCluster, tmp_path: Path) -> None:
    cluster.start_master()
    late = cluster.start_one(train, pause_in=7, loop={"checkpoint": str(tmp_path / "late"), "every": 5})
    stuck = cluster.start_program(train, 2, grace_s=1.0, loop={"checkpoint": str(tmp_path / "stuck"), "every": 5})
    late.expect("paused")
    for peer in stuck:
        peer.expect("begins", number=7)  # at the boundary before it would stop at once
    at = min([peer.send_signal(signal.SIGTERM) for peer in stuck])
    assert [peer.wait() for peer in stuck] == [-signal.SIGTERM] * 2
    assert time.monotonic() - at >= 1.0
    expect_gone(cluster, "left", "left")
    assert max(revisions(tmp_path / "stuck")) == 7


def test_a_stuck_sync_is_aborted_when_the_grace_is_over(cluster: ProgramCluster, tmp_path: Path) -> None:
    """Nothing has been received yet, so the state is that of the boundary."""
    cluster.start_master()
    loop = {"min_world": 2, "check_every": 5, "every": 100}
    late = cluster.start_one(train, pause_after=4, loop={**loop, "checkpoint": str(tmp_path / "late")})
    stuck = cluster.start_one(train, grace_s=0.2, loop={**loop, "checkpoint": str(tmp_path / "stuck")})
    late.expect("paused")
    stuck.expect("step", number=4)
    stuck.send_signal(signal.SIGTERM)
    assert stuck.wait() == -signal.SIGTERM
    expect_gone(cluster, "left")
    assert max(revisions(tmp_path / "stuck")) == 5


def test_a_program_that_is_busy_is_interrupted_when_the_grace_is_over(cluster: ProgramCluster, tmp_path: Path) -> None:
    """It may have changed half of its state by then, so nothing is saved but what was."""
    cluster.start_master()
    loop = {"min_world": 1, "checkpoint": str(tmp_path), "every": 5}
    peer = cluster.start_one(train, grace_s=0.2, pause_in=7, loop=loop)
    peer.expect("paused")
    peer.send_signal(signal.SIGTERM)
    assert peer.wait() == -signal.SIGTERM
    expect_gone(cluster, "left")
    assert max(revisions(tmp_path)) == 5


def test_a_step_that_ends_within_the_grace_is_saved(cluster: ProgramCluster, tmp_path: Path) -> None:
    cluster.start_master()
    peer = cluster.start_one(train, pause_after=7, loop={"min_world": 1, "checkpoint": str(tmp_path), "every": 5})
    peer.expect("paused")
    peer.send_signal(signal.SIGTERM)
    peer.send()
    assert peer.wait() == -signal.SIGTERM
    expect_gone(cluster, "left")
    assert max(revisions(tmp_path)) == 8


def test_a_step_in_which_an_op_was_committed_is_not_saved(cluster: ProgramCluster, tmp_path: Path) -> None:
    """Its second op is stuck. By then the program may have changed the state."""
    cluster.start_master()
    loop = {"min_world": 2, "checkpoint": str(tmp_path), "every": 5}
    stuck = cluster.start_one(train, grace_s=0.2, twice=True, loop=loop)
    late = cluster.start_one(train, pause_between=7, twice=True, loop=loop)
    late.expect("paused")
    stuck.expect("half", number=7)
    stuck.send_signal(signal.SIGTERM)
    assert stuck.wait() == -signal.SIGTERM
    expect_gone(cluster, "left")
    assert max(revisions(tmp_path)) == 5


def test_a_step_that_went_on_without_its_ops_is_not_saved(cluster: ProgramCluster, tmp_path: Path) -> None:
    cluster.start_master()
    loop = {"min_world": 2, "checkpoint": str(tmp_path), "every": 5}
    careless = cluster.start_one(train, grace_s=0.2, careless_in=7, handler="returns", loop=loop)
    late = cluster.start_one(train, pause_in=7, loop=loop)
    late.expect("paused")
    careless.expect("careless")
    careless.send_signal(signal.SIGTERM)
    assert careless.expect("end")["revision"] == 8
    careless.wait_success()
    assert max(revisions(tmp_path)) == 5


@pytest.mark.parametrize(("kind", "status"), [("exits", 7), ("returns", 0)])
def test_the_programs_own_handler_runs_when_the_peer_has_left(cluster: ProgramCluster, kind: str, status: int) -> None:
    cluster.start_master()
    peer = begin(cluster, 1, handler=kind, loop={"min_world": 1})[0]
    peer.send_signal(signal.SIGTERM)
    peer.expect("handled")
    assert peer.wait() == status
    expect_gone(cluster, "left")
    assert len(peer.reports("handled")) == 1
    assert [fact["restored"] for fact in peer.reports("end")] == [True] * (kind == "returns")


def test_a_step_that_was_aborted_does_not_go_on_after_the_programs_own_handler(cluster: ProgramCluster) -> None:
    cluster.start_master()
    cluster.start_program(train, 1, pause_in=3)
    stuck = cluster.start_program(train, 2, grace_s=0.2, handler="returns")[0]
    stuck.expect("begins", number=3)
    stuck.send_signal(signal.SIGTERM)
    stuck.expect("handled")
    assert stuck.wait() == 143
    assert len(stuck.reports("handled")) == 1
    assert len(stuck.reports("step")) == 3


def test_a_second_signal_acts_at_once(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peer = cluster.start_one(train, pause_in=3, loop={"min_world": 1})
    peer.expect("paused")
    peer.send_signal(signal.SIGTERM)
    peer.expect_log("SIGTERM: the current step may end within 600 s")

    def again() -> bool:
        """The interpreter does not notice a signal that comes right before a system call, so there may be a third."""
        if peer.is_running:
            peer.send_signal(signal.SIGTERM)
        return not peer.is_running

    until(again, "it has ended")
    assert peer.wait() == -signal.SIGTERM
    expect_gone(cluster, "lost")


def test_with_the_handling_turned_off_the_signal_does_what_it_always_does(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peer = begin(cluster, 1, loop={"min_world": 1, "handle_sigterm": False})[0]
    peer.send_signal(signal.SIGTERM)
    assert peer.wait() == -signal.SIGTERM
    expect_gone(cluster, "lost")


def test_a_forked_child_is_ended_by_it_as_always(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peer = cluster.start_one(train, fork=True, loop={"min_world": 1, "until": 3})
    assert peer.expect("forked")["status"] == -signal.SIGTERM
    peer.wait_success()
