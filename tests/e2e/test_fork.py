"""Trainers fork data loaders. A child must not keep its dead parent alive, nor touch the parent's membership."""

import gc
import os
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from programs import ProgramCluster, ProgramContext, until
from training_program import end_training, start_training, step_with

from ringfold.agent.client import AgentConsole
from ringfold.agent.daemon import AgentSettings, AgentThread
from ringfold.errors import UsageError


def outlive_the_parent(me: ProgramContext) -> None:
    """In a forked child: live until the test closes the channel, then end."""
    poll = select.poll()
    poll.register(me.fileno(), 0)  # hang-ups only: what the test sends is for the parent
    poll.poll()
    os._exit(0)


def sockets(channel: int = -1) -> list[str]:
    """What this process holds of the network."""
    held = []
    for name in set(os.listdir("/proc/self/fd")) - {str(channel)}:
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")):
            held.append(target)
    return held


def test_the_death_of_a_trainer_with_living_children_is_seen_at_once(cluster: ProgramCluster) -> None:
    """It would take 60 s to be evicted. A closed connection is death at once, and children hold none."""
    cluster.start_master(heartbeat_ms=250, suspect_after_ms=1_000, evict_after_ms=60_000)
    peers = start_training(cluster, 2)
    forker = cluster.start_one(train_with_children, children=3)
    children = forker.expect("forked")["children"]
    for peer in peers:
        step_with(peer, 3)
    killed = forker.kill()
    for peer in peers:
        assert step_with(peer, 2, after=killed)["at"] - killed < 10
    for child in children:
        os.kill(child, 0)  # still there
    end_training(peers)


def train_with_children(me: ProgramContext) -> None:
    from training_program import gradients

    with me.join() as run:
        children = []
        for _ in range(me.options["children"]):
            child = os.fork()
            if child == 0:
                outlive_the_parent(me)
            children.append(child)
        me.report("forked", children=children)
        while True:
            run.all_reduce(np.zeros(2, np.int64), op="max", tag=1)
            run.all_reduce(gradients(run.peer_id, 0, 100_000))


def test_children_forked_in_the_middle_of_ops_hold_nothing_and_end(cluster: ProgramCluster) -> None:
    """Whatever the engine's threads were doing at the fork: the child closes the sockets, and its objects can go."""
    cluster.start_master()
    peers = cluster.start_program(fork_in_the_middle, 2)
    for peer in peers:
        for fact in [peer.expect("child") for _ in range(8)]:
            assert fact["status"] == 0
        assert peer.expect("reduced")["right"]
        peer.wait_success()


def fork_in_the_middle(me: ProgramContext) -> None:
    run = me.join()
    while run.group_size < 2:
        run.update_topology(min_world=2)
    right = True
    for number in range(8):
        arrays = [np.full(200_000, float(run.rank + 1)) for _ in range(4)]
        handles = [run.all_reduce_async(array, tag=tag) for tag, array in enumerate(arrays)]
        child = os.fork()
        if child == 0:
            held = sockets(me.fileno())
            del handles, run
            gc.collect()
            # A clean end, not os._exit: finalizers and destructors must not wait for threads that are not here.
            sys.exit(f"holds {held}" if held else 0)
        for handle in handles:
            handle.wait(30)
        right = right and all(bool((array == 3).all()) for array in arrays)
        me.report("child", number=number, status=os.waitpid(child, 0)[1])
    me.report("reduced", right=right)
    run.leave()


def test_a_child_waits_for_nothing_whatever_a_thread_held_at_the_fork(cluster: ProgramCluster) -> None:
    """A thread of the parent waits in a call and has locks; it does not exist in the child."""
    cluster.start_master()
    forker, other = cluster.start_program(fork_beside_a_call, 2)
    for peer in (forker, other):
        peer.expect("joined")
    forker.send("fork")
    assert forker.expect("child")["status"] == 0
    other.send("vote")
    for peer in (forker, other):
        peer.send("end")
        peer.wait_success()


def fork_beside_a_call(me: ProgramContext) -> None:
    import signal
    import threading

    from ringfold import SharedState

    with me.join() as run:
        while run.group_size < 2:
            run.update_topology(min_world=2)
        me.report("joined")
        if me.receive()["what"] == "fork":
            session = run._session
            handle = run.all_reduce_async(np.ones(10), tag=5)  # the other one never calls it
            held, let_go = threading.Event(), threading.Event()

            def hold_the_lock() -> None:
                with session._changed:
                    held.set()
                    let_go.wait(60)

            holder = threading.Thread(target=hold_the_lock)
            holder.start()
            held.wait(60)
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a call that waits for ever ends the child by SIGALRM
                calls = (
                    run.update_topology,
                    run.are_peers_pending,
                    run.barrier,
                    lambda: run.sync_shared_state(SharedState(a=np.ones(3))),
                    handle.wait,
                    handle.done,
                )
                for call in calls:
                    with pytest.raises(UsageError, match="forked"):
                        call()
                repr(run), run.epoch
                run.leave()
                os._exit(0)
            let_go.set()
            holder.join()
            me.report("child", status=os.waitpid(child, 0)[1])
        else:
            run.all_reduce(np.ones(10), tag=5)
        me.receive("end")


def test_a_child_cannot_use_the_parents_membership_but_may_join_itself(cluster: ProgramCluster) -> None:
    cluster.start_master()
    parent = cluster.start_one(fork_a_peer)
    refused = parent.expect("refused")
    assert refused["error"] == "UsageError"
    assert "forked" in refused["message"]
    assert {parent.expect("reduced")["by"], parent.expect("reduced")["by"]} == {"parent", "child"}
    parent.wait_success()


def fork_a_peer(me: ProgramContext) -> None:
    run = me.join()
    child = os.fork()
    if child == 0:
        with me.failing("refused"):
            run.all_reduce(np.ones(10))
        run.leave()  # of the copy: nothing happens to the parent
        who, run = "child", me.join(name="the child")
    else:
        who = "parent"
        run.update_topology(min_world=2)
    me.report("reduced", by=who, contributors=len(run.all_reduce(np.ones(100_000)).contributors))
    run.leave()
    if who == "parent":
        assert os.waitpid(child, 0)[1] == 0


def test_a_program_that_a_trainer_starts_inherits_no_socket(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peer = cluster.start_one(start_a_program)
    assert peer.expect("held")["sockets"] == []
    peer.wait_success()


def start_a_program(me: ProgramContext) -> None:
    with me.join():
        code = "import test_fork; print(test_fork.sockets())"
        ran = subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True, check=True)
        me.report("held", sockets=[name for name in ran.stdout.strip("[]\n").split(", ") if name])


def test_the_death_of_a_hosted_master_is_seen_although_its_process_forked(cluster: ProgramCluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    host = cluster.start_one(host_the_master, address=address)
    guest = cluster.start_one(lose_the_master, address=address)
    guest.expect("joined")
    host.expect("forked")
    killed = host.kill()
    lost = guest.expect("lost")
    assert lost["error"] == "MasterUnreachable"
    assert lost["at"] - killed < 2.5, "heartbeats would need longer than a closed connection"


def host_the_master(me: ProgramContext) -> None:
    with me.join(host_master=True) as run:
        while run.group_size < 2:
            run.update_topology(min_world=2)
        if os.fork() == 0:
            outlive_the_parent(me)
        me.report("forked")
        me.receive()


def lose_the_master(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < 2:
            run.update_topology(min_world=2)
        me.report("joined")
        with me.failing("lost"):
            run.barrier()


def test_a_child_takes_nothing_from_the_flows_and_hints_of_its_parent(cluster: ProgramCluster, tmp_path: Path) -> None:
    """Three peers with two paths each have six flows with the agent, and they are the same ones after a child's end.

    The engine goes on reading the parent's hints, for both neighbours: what is set now decides where segments go.
    """
    directory = tmp_path / "agent"
    with AgentThread(AgentSettings(directory=directory, telemetry=(), watch_nics=False)):
        cluster.start_master()
        forker, *others = (
            cluster.start_one(
                fork_with_flows, join={"advertise": [f"127.0.0.{host}", f"127.0.1.{host}"]}, agent=str(directory)
            )
            for host in (11, 12, 13)
        )
        with AgentConsole([directory]) as console:
            until(lambda: len(console.flows()) == 6, "each peer has a flow to each neighbour")
            before = console.flows()
            assert sorted(flow.pid for flow in before) == sorted(2 * [forker.pid, *(peer.pid for peer in others)])
            forker.send("fork")
            assert forker.expect("child")["status"] == 0
            assert [flow.number for flow in console.flows()] == [flow.number for flow in before]
            for listed in before:
                if listed.pid == forker.pid:
                    assert console.set_shares(listed.flow.source, listed.flow.destination, (0.0, 1.0)) == 1
            for peer in (forker, *others):
                peer.send("reduce")
            sent = forker.expect("reduced")["path_bytes"]
        assert (sent[0], sent[1] > 0) == (0, True)
        for peer in (forker, *others):
            peer.send("end")
            peer.wait_success()


def fork_with_flows(me: ProgramContext) -> None:
    os.environ["RINGFOLD_AGENT_DIR"] = me.options["agent"]
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        if me.receive()["what"] == "fork":
            child = os.fork()
            if child == 0:
                run.leave()  # of the copy: nothing happens to the parent
                client = run._session.path_shares._client
                with pytest.raises(UsageError, match="belongs to the parent process"):
                    client.register("10.0.0.1", "10.0.0.2", [("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2")])
                client.deregister(1)
                client.close()
                gc.collect()
                sys.exit(f"holds {held}" if (held := sockets(me.fileno())) else 0)
            me.report("child", status=os.waitpid(child, 0)[1])
            me.receive("reduce")
        engine = run._session.engine
        before = engine.path_bytes(True)
        run.all_reduce(np.ones(500_000, np.float32))
        moved = [now - old for now, old in zip(engine.path_bytes(True), before, strict=True)]
        me.report("reduced", path_bytes=moved[:2])
        me.receive("end")
