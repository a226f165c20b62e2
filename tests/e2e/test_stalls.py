"""Peers that live and do not work: the peers that wait for them lose nothing, and they may come back."""

import json
import time
from typing import Any

import numpy as np
import pytest
from programs import ClusterProcess, Message, ProgramCluster, ProgramContext, until

STEPS = 12
HANGS_AT = 6


def test_a_hung_loader_is_evicted_and_the_others_finish(cluster: ProgramCluster) -> None:
    master = cluster.start_master(stall_timeout_s=1)
    peers = cluster.start_program(train_with_a_loader, 4)
    hung = _hang(peers)
    _check_finished([peer for peer in peers if peer is not hung], rest=3)
    hung.send("wake")
    evicted = hung.expect("evicted")
    assert "did not come (stall_timeout_s 1.0 s)" in evicted["message"]
    assert "run.busy(up_to_s=...)" in evicted["message"]
    assert evicted["message"].endswith("join again and sync state before the first op")
    hung.expect("joined again")
    hung.wait_success()
    [stalled] = master.expect_events("peers_stalled")
    assert len(stalled["waiting"]) == 3


@pytest.mark.parametrize("retry", [True, False])
def test_at_the_op_timeout_the_absent_are_evicted_and_the_others_finish(cluster: ProgramCluster, retry: bool) -> None:
    """Two of four are no minority: the watchdog leaves them alone, and the time of the op ends their membership."""
    master = cluster.start_master(stall_timeout_s="off")
    peers = cluster.start_program(train_with_a_loader, 4, join={"op_timeout_s": 1.0}, retry=retry)
    ranks = {peer.expect("joined")["rank"]: peer for peer in peers}
    hung = [ranks[0], ranks[1]]
    for peer in peers:
        peer.send("hang" if peer in hung else "train")
    for peer in hung:
        peer.expect("hangs")
    _check_finished([ranks[2], ranks[3]], rest=2)
    for peer in hung:
        peer.send("wake")
        assert "op_timeout_s 1." in peer.expect("evicted")["message"]
    assert not master.events("call_refused")


def test_a_peer_that_announces_to_be_busy_is_waited_for(cluster: ProgramCluster) -> None:
    """For longer than the stall timeout, and longer than the ops' own time."""
    master = cluster.start_master(stall_timeout_s=1)
    peers = cluster.start_program(train_with_a_loader, 4, join={"op_timeout_s": 1.5}, busy_s=60)
    busy = _hang(peers)
    until(lambda: _waiting(cluster, "busy for another"), "status shows the busy peer")
    until(lambda: _waited_ms(cluster) > 3_000, "three times the stall timeout, and twice that of an op")
    busy.send("wake")
    for peer in peers:
        finished = peer.expect("finished")
        assert finished["contributors"] == [4] * STEPS
    assert not master.events("peers_stalled")


def test_a_peer_that_is_busy_for_longer_than_announced_is_evicted(cluster: ProgramCluster) -> None:
    cluster.start_master(stall_timeout_s=1)
    peers = cluster.start_program(train_with_a_loader, 4, busy_s=1.0)
    busy = _hang(peers)
    _check_finished([peer for peer in peers if peer is not busy], rest=3)
    busy.send("wake")
    busy.expect("evicted")


def _hang(peers: list[ClusterProcess]) -> ClusterProcess:
    """Let the one with rank 1 hang in a step, and the others go on."""
    ranks = {peer.expect("joined")["rank"]: peer for peer in peers}
    for rank, peer in ranks.items():
        peer.send("hang" if rank == 1 else "train")
    ranks[1].expect("hangs")
    return ranks[1]


def _check_finished(peers: list[ClusterProcess], rest: int) -> None:
    """All have made all steps, the late ones without those that hung, with the sums of exactly the members."""
    for peer in peers:
        finished = peer.expect("finished")
        assert finished["contributors"] == [4] * HANGS_AT + [rest] * (STEPS - HANGS_AT)
        assert finished["sums"] == finished["contributors"]
        peer.wait_success()


def train_with_a_loader(me: ProgramContext) -> None:
    """Steps with a data loader that hangs once, on request; `busy_s`: it announces a wait of up to that long."""
    from ringfold import CollectiveAborted, Evicted

    with me.join() as run:
        while run.group_size < 4:
            run.update_topology(min_world=4, timeout_s=60)
        me.report("joined", peer=run.peer_id, rank=run.rank)
        hangs = me.receive()["what"] == "hang"
        contributors: list[int] = []
        sums: list[int] = []
        try:
            while len(sums) < STEPS:
                if len(sums) == HANGS_AT and hangs:
                    _hang_here(me, run)
                gradient = np.ones(10_000, np.float32)
                try:
                    info = run.all_reduce(gradient, retry=me.options.get("retry", True))
                    contributors.append(len(info.contributors))
                except CollectiveAborted:
                    continue
                sums.append(int(gradient[0]))
        except Evicted as error:
            me.report("evicted", message=str(error))
        else:
            me.report("finished", contributors=contributors, sums=sums)
            return
    with me.join():
        me.report("joined again")


def _hang_here(me: ProgramContext, run: Any) -> None:  # noqa: ANN401 - a communicator; Ringfold is imported by programs only
    busy_s = me.options.get("busy_s")
    if busy_s is None:
        me.report("hangs")
        me.receive("wake")
        return
    with run.busy(up_to_s=busy_s):
        me.report("hangs")
        me.receive("wake")


def _status(cluster: ProgramCluster) -> list[Message]:
    assert cluster.master is not None
    command = cluster.start_command("status", "status", cluster.master.address, "--json")
    assert command.wait() == 0
    waiting: list[Message] = json.loads(command.stdout.text())["waiting"]
    return waiting


def _waiting(cluster: ProgramCluster, text: str) -> bool:
    return any(text in wait["eviction"] for wait in _status(cluster))


def _waited_ms(cluster: ProgramCluster) -> int:
    return max((wait["since_ms"] for wait in _status(cluster)), default=0)


# In the step loop


def test_a_step_loop_goes_on_without_a_peer_that_hangs_and_takes_it_back(cluster: ProgramCluster) -> None:
    """A newcomer waits to be admitted meanwhile, so that the others may wait in a vote as well as in an op."""
    master = cluster.start_master(stall_timeout_s=1)
    peers = cluster.start_program(steps_with_a_loader, 3)
    hung = cluster.start_one(steps_with_a_loader, hangs=True)
    hung.expect("hangs")
    peers += cluster.start_program(steps_with_a_loader, 1)
    master.expect_log("peers_stalled")
    hung.send("wake")
    assert "stall_timeout_s 1.0 s" in hung.expect_log("joining again, as a newcomer")
    finished = [peer.expect("finished") for peer in [*peers, hung]]
    assert len({fact["weights"] for fact in finished}) == 1
    for peer in [*peers, hung]:
        peer.wait_success()
    assert len(master.expect_events("peers_stalled")) == 1


def steps_with_a_loader(me: ProgramContext) -> None:
    from ringfold import SharedState

    weights = np.zeros(1_000)
    with me.join() as run:
        for count, step in enumerate(run.steps(SharedState(weights=weights), until=300, min_world=3)):
            if me.options.get("hangs", False) and count == 8:
                me.report("hangs")
                me.receive("wake")
            time.sleep(0.01)
            gradient = np.ones(1_000)
            step.all_reduce(gradient, op="avg")
            weights += gradient
        me.report("finished", weights=float(weights.sum()))


# On request


@pytest.mark.parametrize("by", ["number", "name"])
def test_a_peer_is_evicted_by_the_command_line(cluster: ProgramCluster, by: str) -> None:
    master = cluster.start_master(stall_timeout_s="off")
    peers = cluster.start_program(train_with_a_loader, 4)
    hung = _hang(peers)
    number = hung.reports("joined")[0]["peer"]
    name = f"p{peers.index(hung)}"
    wanted = str(number) if by == "number" else name
    command = cluster.start_command("evict", "evict", wanted, master.address, "--reason", "its loader hangs")
    command.expect_output(f"peer {number} ({name}) is evicted; it may join again")
    assert command.wait() == 0
    _check_finished([peer for peer in peers if peer is not hung], rest=3)
    hung.send("wake")
    text = hung.expect("evicted")["message"]
    assert "requested it: its loader hangs; join again" in text
    hung.expect("joined again")
    hung.wait_success()
    unknown = cluster.start_command("evict", "evict", "77", master.address)
    unknown.expect_log("there is no peer '77' in this run")
    assert unknown.wait() == 1


def test_a_peer_evicts_another_one(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(evict_each_other, 3)
    ranks = {peer.expect("joined")["rank"]: peer for peer in peers}
    refusals = ranks[0].expect("refused")["message"]
    assert "is this peer itself: call leave()" in refusals[0]
    assert "there is no peer 'nobody' in this run" in refusals[1]
    assert ranks[1].expect("reduced")["contributors"] == 2
    assert ranks[0].expect("reduced")["contributors"] == 2
    ranks[2].send()
    me = ranks[0].reports("joined")[0]
    assert f"peer {me['peer']} ({me['name']}) requested it: too slow" in ranks[2].expect("evicted")["message"]


def evict_each_other(me: ProgramContext) -> None:
    from ringfold import Evicted, UsageError

    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        me.report("joined", peer=run.peer_id, rank=run.rank, name=me._join["name"])
        rank, last = run.rank, run.members[2]
        if rank == 0:
            text = []
            for wanted in (run.peer_id, "nobody"):
                try:
                    run.evict(wanted)
                except UsageError as error:
                    text.append(str(error))
            me.report("refused", message=text)
            run.evict(last, "too slow")
        if rank == 2:
            me.receive()
        try:
            me.report("reduced", contributors=len(run.all_reduce(np.ones(10)).contributors))
        except Evicted as error:
            me.report("evicted", message=str(error))
