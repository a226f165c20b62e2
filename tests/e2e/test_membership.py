"""Peers come and go: one, many, alone, in groups, cleanly or not; and all give the same answers about it."""

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext, by_id
from training_program import end_training, gradients, start_training, step_with, train

pytestmark = pytest.mark.waiting


def test_peers_join_a_running_loop_one_after_another(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_training(cluster, 2, floats=5_000)
    for world in (3, 4):
        peers += cluster.start_program(train, floats=5_000)
        for peer in peers:
            step_with(peer, world)
    end_training(peers)


def test_eight_peers_are_admitted_by_one_vote(cluster: ProgramCluster) -> None:
    """More than eight members: with "auto" the evidence now travels through the master."""
    master = cluster.start_master()
    peers = cluster.start_program(admit_on_request, 2)
    for peer in peers:
        peer.expect("together", size=2)
    peers += cluster.start_program(admit_on_request, 8)
    master.expect_events("peer_registered", 10)
    for peer in peers[:2]:
        peer.send()
    facts = [peer.expect("together", size=10) for peer in peers]
    assert len({(fact["epoch"], tuple(fact["members"])) for fact in facts}) == 1
    assert all(len(fact["newcomers"]) == 8 for fact in facts)
    assert sorted(fact["rank"] for fact in facts) == list(range(10))
    for peer in peers:
        assert peer.expect("reduced")["contributors"] == 10
        peer.wait_success()


def admit_on_request(me: ProgramContext) -> None:
    with me.join() as run:
        if run.group_size < 10:
            if run.group_size < 2:
                run.update_topology(min_world=2)
            _say_where(me, run)
            me.receive()
            run.update_topology()
        _say_where(me, run)
        me.report("reduced", contributors=len(run.all_reduce(np.ones(30_000)).contributors))


def _say_where(me: ProgramContext, run: Any) -> None:  # noqa: ANN401 - a communicator
    facts = {"epoch": run.epoch, "members": run.members, "newcomers": run.newcomers, "rank": run.rank}
    me.report("together", size=run.group_size, **facts)


def test_a_lone_peers_plain_loop_admits_newcomers(cluster: ProgramCluster) -> None:
    cluster.start_master()
    first = cluster.start_one(plain_loop)
    first.expect("alone")
    second = cluster.start_one(plain_loop)
    for peer in (first, second):
        for number in range(5):
            assert peer.expect("reduced")["number"] == number
        peer.wait_success()


def plain_loop(me: ProgramContext) -> None:
    """The loop that users write without `steps`: if peers are pending, update; if this peer is alone, wait."""
    with me.join() as run:
        reduced = 0
        while reduced < 5:
            if run.are_peers_pending():
                run.update_topology()
            if run.world_size < 2:
                me.report("alone")
                time.sleep(0.02)  # the waiting of a user's program
                continue
            assert len(run.all_reduce(np.ones(100)).contributors) == 2
            me.report("reduced", number=reduced)
            reduced += 1
        me.report("end")


def test_a_peer_that_leaves_cleanly_is_not_lost(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = cluster.start_program(leave_on_request, 3)
    for peer in peers:
        peer.expect("joined")
    peers[0].send("leave")
    for peer in peers[1:]:
        peer.send("reduce")
    peers[0].wait_success()
    for peer in peers[1:]:
        # The others may have begun before or after the seal: in both cases the op is theirs alone.
        assert peer.expect("reduced")["contributors"] == 2
        peer.wait_success()
    master.expect_log("left: it sent Leave")
    assert {event["how"] for event in master.expect_events("peer_gone")} == {"left"}


def test_a_peer_that_leaves_during_an_op_of_the_others_does_not_fail_it(cluster: ProgramCluster) -> None:
    """The others sit in an op that waits for the leaver; it is retried without it."""
    cluster.start_master()
    peers = cluster.start_program(leave_on_request, 3)
    for peer in peers:
        peer.expect("joined")
    for peer in peers[1:]:
        peer.send("reduce")
        peer.expect("reducing")
    peers[0].send("leave")
    for peer in [peers[0], *peers[1:]]:
        peer.wait_success()
    for peer in peers[1:]:
        assert peer.expect("reduced")["contributors"] == 2


def leave_on_request(me: ProgramContext) -> None:
    run = me.join()
    while run.group_size < 3:
        run.update_topology(min_world=3)
    me.report("joined", peer=run.peer_id)
    if me.receive()["what"] == "leave":
        run.leave()
        return
    me.report("reducing")
    me.report("reduced", contributors=len(run.all_reduce(np.ones(50_000)).contributors))
    run.leave()


def test_a_survivor_that_is_alone_gets_too_few_peers(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = by_id(cluster.start_program(be_left_alone, 2))
    peers[1].expect("reducing")
    peers[2].kill()
    alone = peers[1].expect("alone")
    assert alone["error"] == "TooFewPeers"
    assert (alone["world"], alone["needed"]) == (1, 2)
    assert alone["intact"]
    # And a peer that comes later is admitted.
    late = cluster.start_one(be_left_alone)
    for peer in (peers[1], late):
        assert peer.expect("reduced")["contributors"] == 2
        peer.wait_success()


def be_left_alone(me: ProgramContext) -> None:
    """Peer 1 reduces with peer 2, which does not come; then with peer 3, which does."""
    with me.join() as run:
        while run.group_size < 2:
            run.update_topology(min_world=2)
        me.report("joined", peer=run.peer_id)
        if run.peer_id == 2:
            me.receive()
        if run.peer_id == 1:
            buffer = gradients(0, 0, 50_000)
            me.report("reducing")
            with me.failing("alone") as facts:
                try:
                    run.all_reduce(buffer)
                finally:
                    facts["intact"] = bool((buffer == gradients(0, 0, 50_000)).all())
            run.update_topology(min_world=2)
        me.report("reduced", contributors=len(run.all_reduce(np.ones(10)).contributors))


def test_without_retry_a_death_is_an_error_and_the_buffer_is_intact(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = by_id(cluster.start_program(reduce_without_retry, 3))
    for peer in (peers[1], peers[3]):
        lost = peer.expect("lost")
        assert lost["error"] == "PeerLost"
        assert lost["peers"] == [2]
        assert lost["intact"]
        assert peer.expect("reduced")["contributors"] == 2
        peer.wait_success()


def reduce_without_retry(me: ProgramContext) -> None:
    """Peer 2 kills itself in the middle of the op, when all three are in it: before its call a peer sees no abort."""
    count = 8_000_000
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        me.report("joined", peer=run.peer_id)
        buffer = gradients(run.peer_id, 0, count)
        before = buffer.copy()
        if run.peer_id == 2:
            total = sum(gradients(peer, 0, count)[::1024] for peer in (1, 2, 3))
            threading.Thread(target=_kill_this_once_summed, args=(buffer[::1024], total), daemon=True).start()
        with me.failing("lost") as facts:
            try:
                run.all_reduce(buffer, retry=False)
            finally:
                facts["intact"] = bool((buffer == before).all())
        me.report("reduced", contributors=len(run.all_reduce(buffer).contributors))


def _kill_this_once_summed(samples: Any, total: Any) -> None:  # noqa: ANN401 - arrays
    while np.isclose(samples, total, rtol=1e-5, atol=1e-6).sum() < 100:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


# Groups


def test_groups_of_one_run_reduce_apart_and_are_counted_together(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = _start_groups(cluster, 3, 2)
    for peer in peers:
        where = peer.expect("where")
        assert (where["world"], where["groups"], where["largest"]) == (5, 2, 3)
        assert where["size"] == (3 if where["group"] == 0 else 2)
        assert where["contributors"] == where["size"]
    for peer in peers:
        peer.send("end")
        peer.wait_success()


def test_a_death_in_one_group_aborts_no_op_of_another(cluster: ProgramCluster) -> None:
    """The op may not be retried, and waits for a member while the other group loses one and goes on."""
    cluster.start_master()
    three, two = [], []
    for peer in _start_groups(cluster, 3, 2):
        (three if peer.expect("where")["group"] == 0 else two).append(peer)
    two[0].send("reduce")
    two[0].expect("reducing")
    for peer in three[1:]:
        peer.send("reduce")
        peer.expect("reducing")
    three[0].kill()
    for peer in three[1:]:
        assert peer.expect("lost")["error"] == "PeerLost"
    two[1].send("reduce")
    epochs = {(fact["contributors"], fact["epoch"]) for fact in (peer.expect("reduced") for peer in two)}
    assert len(epochs) == 1
    assert epochs.pop()[0] == 2


def _start_groups(cluster: ProgramCluster, *sizes: int) -> list[ClusterProcess]:
    """Groups with so many members each, all of them accepted."""
    total = sum(sizes)
    return [
        peer
        for group, size in enumerate(sizes)
        for peer in cluster.start_program(work_in_a_group, size, join={"group": group}, total=total, group=group)
    ]


def work_in_a_group(me: ProgramContext) -> None:
    with me.join() as run:
        # A member votes until all are in: an update also admits peers of other groups.
        while run.world_size < me.options["total"]:
            run.update_topology()
        contributors = len(run.all_reduce(np.ones(30_000)).contributors)
        where = {"world": run.world_size, "groups": run.groups, "largest": run.largest_group, "size": run.group_size}
        me.report("where", contributors=contributors, group=me.options["group"], **where)
        if me.receive()["what"] == "end":
            return
        me.report("reducing")
        try:
            info = run.all_reduce(np.ones(30_000), retry=False)
            me.report("reduced", contributors=len(info.contributors), epoch=info.epoch)
        except Exception as error:
            me.report("lost", error=type(error).__name__)
        me.receive()


# are_peers_pending


def test_all_peers_agree_on_whether_peers_are_pending(cluster: ProgramCluster) -> None:
    """Three peers call are_peers_pending after each op, while others register at times of their own."""
    cluster.start_master()
    peers = cluster.start_program(ask_after_each_op, 3, asks=True)
    for peer in peers:
        peer.expect("answer", lambda fact: fact["step"] >= 20)
    for world in (4, 5, 6):
        cluster.start_program(ask_after_each_op, asks=False)
        for peer in peers:
            peer.expect("admitted", size=world)
    for peer in peers:
        peer.send("end")
    for peer in cluster.peers:
        peer.wait_success()
    answers = [[fact["pending"] for fact in peer.reports("answer")] for peer in peers]
    assert answers[0] == answers[1] == answers[2]
    assert sum(answers[0]) == 3


def ask_after_each_op(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        step, ended = 0, 0
        while not ended:
            state = np.array([step + 1, me.has_message()], np.int64)
            run.all_reduce(state, op="max")
            step, ended = int(state[0]), int(state[1])
            pending = run.are_peers_pending()
            me.report("answer", step=step, pending=pending)
            if pending:
                run.update_topology()
                me.report("admitted", size=run.group_size)
