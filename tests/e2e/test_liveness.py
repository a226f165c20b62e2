"""Killed, frozen, woken, busy and paused: what the others notice, how soon, and that they go on."""

import ctypes
import itertools
import time

import numpy as np
import pytest
from programs import FAST, ClusterProcess, ProgramCluster, ProgramContext, until
from training_program import check_same_bits, end_training, gradients, start_training, step_with, train

EVICT_S = FAST["evict_after_ms"] / 1_000
SLACK_S = 0.5
"""How much later than the configured time the others may go on."""
LARGE = 1_000_000


@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_survivors_of_a_kill_inside_an_op_go_on_with_the_same_bits(cluster: ProgramCluster, evidence: str) -> None:
    cluster.start_master(evidence=evidence)
    peers = start_training(cluster, 4, floats=LARGE, strike="SIGKILL")
    killed = peers.pop(1)
    killed.send("strike")
    for peer in peers:
        step_with(peer, 3)
    check_same_bits([*peers, killed])
    end_training(peers)


@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_survivors_of_a_kill_between_small_ops_go_on_with_the_same_bits(cluster: ProgramCluster, evidence: str) -> None:
    cluster.start_master(evidence=evidence)
    peers = start_training(cluster, 4, floats=1_000)
    killed = peers.pop(2)
    killed.kill()
    for peer in peers:
        step_with(peer, 3)
    check_same_bits([*peers, killed])
    end_training(peers)


def test_a_retried_op_is_the_sum_over_the_survivors(cluster: ProgramCluster) -> None:
    """It starts again from the buffers as they were passed in, so nothing of the dead peer is left in it."""
    cluster.start_master()
    peers = start_training(cluster, 3, floats=LARGE, strike="SIGKILL")
    ids = [peer.reports("joined")[0]["peer"] for peer in peers]
    killed = peers.pop(2)
    killed.send("strike")
    retried = step_with(peers[0], 2)
    end_training(peers)
    expected = sum(gradients(peer, retried["number"], LARGE).astype(np.float64) for peer in ids[:2])
    assert retried["total"] == pytest.approx(expected.sum(), abs=1.0)


def test_a_frozen_peer_is_evicted_in_time_and_rejoins(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_training(cluster, 3, floats=LARGE, strike="SIGSTOP")
    sleeper = peers.pop(0)
    sleeper.send("strike")
    sleeper.wait_frozen()
    frozen = time.monotonic()
    usual_s = max(_longest_step_s(peer) for peer in peers)
    seen = max(step_with(peer, 2)["at"] for peer in peers)
    # Two steps end after the eviction: the one that it was struck in may be committed with it, the next is without it.
    assert seen - frozen < EVICT_S + SLACK_S + 2 * usual_s
    woken = sleeper.thaw()
    assert sleeper.expect("intact")["intact"], "an op that ends with Evicted leaves its buffer as it was passed in"
    assert "silent for" in sleeper.expect("evicted")["message"]
    for peer in [*peers, sleeper]:
        step_with(peer, 3, after=woken)
    end_training([*peers, sleeper])


def _longest_step_s(peer: ClusterProcess) -> float:
    """What a step of all peers takes here: it computes, too, and that is no part of what is measured."""
    ends = [fact["at"] for fact in peer.reports("step") if fact["contributors"] == 3]
    return max(later - sooner for sooner, later in itertools.pairwise(ends))


def test_a_peer_that_holds_the_gil_is_alive(cluster: ProgramCluster) -> None:
    """Heartbeats come from native code: a GIL held for three evictions' worth of time evicts no peer."""
    cluster.start_master()
    peers = cluster.start_program(hold_the_gil, 3)
    for peer in peers:
        assert peer.expect("reduced")["contributors"] == 3
        peer.wait_success()


def hold_the_gil(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        if run.rank == 0:
            ctypes.PyDLL(None).usleep(int(3 * EVICT_S * 1e6))
        info = run.all_reduce(np.ones(100_000, np.float32))
        me.report("reduced", contributors=len(info.contributors))


@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_a_paused_master_evicts_no_peer(cluster: ProgramCluster, evidence: str) -> None:
    """With evidence on the ring, ops go on while the master is away. It wakes, and admits peers again."""
    master = cluster.start_master(evidence=evidence)
    peers = start_training(cluster, 3)
    paused = master.freeze()
    if evidence == "ring":
        for peer in peers:
            step_with(peer, 3, after=paused + 2 * EVICT_S)
    else:
        until(lambda: time.monotonic() > paused + 2 * EVICT_S, "the pause")
    woken = master.thaw()
    for peer in peers:
        step_with(peer, 3, after=woken + EVICT_S)
    peers += cluster.start_program(train)
    for peer in peers:
        step_with(peer, 4)
    end_training(peers)
    assert {event["how"] for event in master.events("peer_gone")} <= {"left"}


def test_a_peer_that_never_calls_the_op_is_named(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(wait_for_the_absent, 3)
    _check_the_absent_is_named(peers)
    [late] = [fact for peer in peers for fact in peer.reports("late")]
    assert late["error"] == "DeadlineExceeded"


def wait_for_the_absent(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3, timeout_s=30)
        absent = run.rank == 1
        me.report("joined", peer=run.peer_id, absent=absent)
        if not absent:
            buffer = np.arange(50_000.0)
            with me.failing("deadline") as facts:
                try:
                    run.all_reduce(buffer, timeout_s=1.0)
                finally:
                    facts["intact"] = bool((buffer == np.arange(50_000.0)).all())
        me.receive()
        if absent:
            with me.failing("late"):  # a deadline of the others is one of this peer, too
                run.all_reduce(np.arange(50_000.0), timeout_s=30)
        me.report("reduced", contributors=len(run.all_reduce(np.ones(10), timeout_s=30).contributors))


def test_a_peer_that_never_votes_is_named(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(vote_without_the_absent, 3)
    _check_the_absent_is_named(peers)


def vote_without_the_absent(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        absent = run.rank == 2
        me.report("joined", peer=run.peer_id, absent=absent)
        if not absent:
            with me.failing("deadline", intact=True):
                run.update_topology(timeout_s=1.0)
        me.receive()
        run.update_topology()
        me.report("reduced", contributors=len(run.all_reduce(np.ones(10)).contributors))


def _check_the_absent_is_named(peers: list[ClusterProcess]) -> None:
    """The waiting peers get the names of the missing ones at their timeout; then all continue together."""
    joined = [peer.expect("joined") for peer in peers]
    [absent] = [fact["peer"] for fact in joined if fact["absent"]]
    for peer, fact in zip(peers, joined, strict=True):
        if fact["absent"]:
            continue
        late = peer.expect("deadline")
        assert late["error"] == "DeadlineExceeded"
        assert late["peers"] == [absent]
        assert f"for peer {absent}" in late["message"]
        assert late["waited_ms"] >= 1_000
        assert 1.0 <= late["took_s"] < 5.0
        assert late["intact"]
    for peer in peers:
        peer.send()
    for peer in peers:
        assert peer.expect("reduced")["contributors"] == 3
        peer.wait_success()
