"""Several runs on one master, with real processes: they end, break and are killed apart from each other."""

import json
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from ports import free_port, free_ports
from programs import ClusterProcess, ProgramCluster, ProgramContext, until
from test_failover import check_no_step_is_lost, start_on
from training_program import end_training, start_training, step_with

import ringfold as rf
from ringfold.master.effects import Effect
from ringfold.master.events import Event
from ringfold.master.machine import Master as Machine
from ringfold.master.server import MasterThread
from ringfold.runtime import master_client, threads

pytestmark = pytest.mark.waiting

TOKEN = "a token of 16 bytes or more"


def learn(me: ProgramContext) -> None:
    """A loop with a state, from step to step. It says each step, and pauses for ever at `pause_at`."""
    weights = np.zeros(1_000, np.float32)
    options = me.options
    with me.join() as run:
        me.report("joined", peer=run.peer_id, members=run.members)
        state = rf.SharedState(weights=weights)
        world = options.get("world", 1)
        for step in run.steps(state, until=options.get("until", 10), min_world=world, check_every=1):
            gradient = np.ones(1_000, np.float32)
            step.all_reduce(gradient, op="avg")
            weights += gradient
            me.report("step", number=step.number, weight=float(weights[0]))
            if step.number == options.get("pause_at"):
                me.receive()
        me.report("end", revision=state.revision)


def try_to_learn(me: ProgramContext) -> None:
    with me.failing("failed"):
        learn(me)


def kill(peers: list[ClusterProcess]) -> None:
    for peer in peers:
        peer.kill()
        peer.wait()


def forget(cluster: ProgramCluster, name: str) -> None:
    assert cluster.master is not None
    command = cluster.start_command("forget", "runs", "forget", name, cluster.master.address)
    command.expect_output(f"run {name} is forgotten")
    assert command.wait() == 0


def states(cluster: ProgramCluster) -> dict[str, tuple[str, int]]:
    assert cluster.master is not None
    with master_client.connect([cluster.master.address], b"") as connection:
        return {run.name: (run.state, run.revision) for run in connection.runs().runs}


def test_after_a_killed_test_run_the_next_one_begins_at_once(cluster: ProgramCluster) -> None:
    """The run has no name, and no peer has a checkpoint: then no peer wants the lost state back."""
    master = cluster.start_master()
    peers = cluster.start_program(learn, 2, world=2, pause_at=5)
    for peer in peers:
        peer.expect("step", number=5)
    kill(peers)
    again = cluster.start_program(learn, 2, world=2)
    for peer in again:
        assert peer.expect("step")["number"] == 0
        peer.expect("end", revision=10)
        peer.wait_success()
    master.expect_log("run default begins again, as incarnation 2: it was abandoned at revision")


def test_the_end_of_a_named_run_is_final_until_it_is_forgotten(cluster: ProgramCluster) -> None:
    cluster.start_master()
    named = {"run": "nightly-7"}
    for peer in cluster.start_program(learn, 2, world=2, join=named):
        peer.wait_success()
    late = cluster.start_one(try_to_learn, join=named)
    failed = late.expect("failed", error="ConfigError")
    assert "run nightly-7 finished at revision 10" in failed["message"]
    assert "`ringfold runs forget nightly-7`" in failed["message"]
    assert failed["took_s"] < 20, "it is refused at once, and not at its timeout"
    assert states(cluster) == {"nightly-7": ("finished", 10)}
    forget(cluster, "nightly-7")
    again = cluster.start_one(learn, join=named)
    again.expect("end", revision=10)
    again.wait_success()


def test_a_named_run_that_was_killed_keeps_its_lost_state(cluster: ProgramCluster) -> None:
    cluster.start_master()
    named = {"run": "nightly-7"}
    victim = cluster.start_one(learn, join=named, pause_at=5)
    victim.expect("step", number=5)
    refused = cluster.start_command("forget", "runs", "forget", "nightly-7", "--master", cluster.master.address)  # type: ignore[union-attr]
    refused.expect_log("run nightly-7 has 1 peers: stop them first")
    assert refused.wait() != 0
    kill([victim])
    heir = cluster.start_one(try_to_learn, join=named)
    assert "`ringfold runs forget nightly-7`" in heir.expect("failed", error="StateLost")["message"]
    heir.wait_success()
    assert states(cluster)["nightly-7"][0] == "abandoned"
    forget(cluster, "nightly-7")
    cluster.start_one(learn, join=named).wait_success()


def test_a_run_goes_on_bit_by_bit_while_others_are_killed_finish_and_begin(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    port = free_port()
    master = start_on(cluster, port, tmp_path / "journal.db")
    going = start_training(cluster, 2, floats=10_000, join={"run": "going"})
    killed = start_training(cluster, 2, floats=10_000, join={"run": "killed"})
    kill(killed)
    for peer in cluster.start_program(learn, 2, world=2, join={"run": "short"}):
        peer.wait_success()
    for peer in going:
        step_with(peer, 2)
    until(lambda: states(cluster)["killed"][0] == "abandoned", "the death of the others is noticed")
    found = states(cluster)
    assert found["going"][0] == "running"
    assert found["short"] == ("finished", 10)
    check_no_step_is_lost(going)
    for event in master.events("epoch_recorded"):
        assert len(event["ring"]) <= 2


def test_a_standby_takes_over_all_runs(cluster: ProgramCluster, tmp_path: Path) -> None:
    one, two = free_ports(2)
    leader = start_on(cluster, one, tmp_path / "journal.db", evidence="master")
    leader.expect_log("leading with fence 1")
    standby = start_on(cluster, two, tmp_path / "journal.db", evidence="master")
    standby.expect_log("stands by")
    where = f"{leader.address},{standby.address}"
    for peer in cluster.start_program(learn, 1, join={"run": "over"}, address=where):
        peer.wait_success()
    names = ("a", "b", "default")
    runs = [start_training(cluster, 2, floats=10_000, join={"run": run}, address=where) for run in names]
    killed = leader.kill()
    standby.expect_log("waiting up to")
    for peers in runs:
        for peer in peers:
            step_with(peer, 2, after=killed)
    cluster.master = standby
    found = states(cluster)
    assert found["over"][0] == "finished", "what has ended stays ended"
    assert {found[name][0] for name in names} == {"running"}
    for peers in runs:
        check_no_step_is_lost(peers)
    assert not any(peer.reports("evicted") for peers in runs for peer in peers)


def test_a_token_is_proven_for_a_run() -> None:
    with MasterThread(token=TOKEN.encode()) as master:
        kwargs = {"timeout_s": 30.0, "token": TOKEN}
        with rf.join(master.address, run="a", **kwargs) as a, rf.join(master.address, **kwargs) as default:  # type: ignore[arg-type]
            assert (a.peer_id, a.group_size) == (default.peer_id, default.group_size) == (1, 1)
            with master_client.connect([master.address], TOKEN.encode(), run="a") as connection:
                assert [peer.peer for peer in connection.status().peers] == [1]
        with pytest.raises(rf.ConfigError, match="wrong token"):
            rf.join(master.address, run="a", timeout_s=30, token="another one of 16 bytes")


def test_a_name_that_cannot_be_is_an_error_before_anything_is_tried() -> None:
    with pytest.raises(rf.ConfigError, match="'a b' is not a valid name of a run"):
        rf.join("127.0.0.1:1", run="a b")


def test_the_commands_show_runs(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = start_training(cluster, 2, join={"run": "a"}, floats=1_000)
    listed = cluster.start_command("runs", "runs", master.address, "--json")
    assert listed.wait() == 0
    runs = json.loads(listed.stdout.text())
    assert [(run["name"], run["state"], run["peers"]) for run in runs["runs"]] == [("a", "running", 2)]
    shown = cluster.start_command("status", "status", master.address)
    shown.expect_output("run a of ")
    wrong = cluster.start_command("status", "status", master.address, "--run", "b")
    wrong.expect_log("there is no run b here; there are: a")
    late = cluster.start_one(learn, pause_at=5)
    late.expect("step", number=5)
    both = cluster.start_command("status", "status", master.address)
    both.expect_output("it also serves other runs: a")
    late.send()
    late.wait_success()
    end_training(peers)


def host_or_join(me: ProgramContext) -> None:
    """The same script in every process: one of them hosts the master."""
    with me.join(host_master=True) as run:
        while run.group_size < me.options["world"]:
            run.update_topology(min_world=me.options["world"])
        total = np.ones(10, np.float32)
        if run.group_size > 1:
            run.all_reduce(total, op="sum")
        hosts = any(thread.name == "ringfold-master" for thread in threading.enumerate())
        me.report("reduced", total=float(total[0]), peer=run.peer_id, hosts=hosts)
        me.receive()
        if me.options.get("outlives"):
            with me.failing("lost"):
                run.all_reduce(total)
                run.update_topology()


def test_the_same_script_in_several_processes_has_one_master(cluster: ProgramCluster) -> None:
    """Started at the same instant, in any order: the first process hosts."""
    port = free_port()
    for _ in range(2):
        peers = cluster.start_program(host_or_join, 3, address=f"127.0.0.1:{port}", world=3)
        facts = [peer.expect("reduced", total=3.0) for peer in peers]
        assert sorted(fact["peer"] for fact in facts) == [1, 2, 3]
        hosts = [fact["hosts"] for fact in facts]
        assert sorted(hosts) == [False, False, True]
        # The host ends last, so that the others can leave.
        for _, peer in sorted(zip(hosts, peers, strict=True), key=lambda pair: pair[0]):
            peer.send()
            peer.wait_success()


def test_a_peer_that_hosts_is_replaced_after_it_was_killed(cluster: ProgramCluster) -> None:
    port = free_port()
    [first] = cluster.start_program(host_or_join, 1, address=f"127.0.0.1:{port}", world=1)
    first.expect("reduced", total=1.0)
    kill([first])
    [second] = cluster.start_program(host_or_join, 1, address=f"127.0.0.1:{port}", world=1)
    second.expect("reduced", total=1.0)
    second.send()
    second.wait_success()


def test_the_end_of_the_host_is_the_end_of_the_run(cluster: ProgramCluster) -> None:
    port = free_port()
    peers = cluster.start_program(host_or_join, 2, address=f"127.0.0.1:{port}", world=2, outlives=True)
    # Another process than the host may have been the first to join.
    by_role = {peer.expect("reduced", total=2.0)["hosts"]: peer for peer in peers}
    kill([by_role[True]])
    by_role[False].send()
    by_role[False].expect("lost", error="MasterUnreachable")
    by_role[False].wait_success()


def test_a_run_that_breaks_in_the_master_goes_on_from_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its member comes back to it under a higher fence; the member of another run notices nothing."""
    step, breaks = Machine.step, [False]

    def fragile(self: Machine, now_ns: int, event: Event) -> list[Effect]:
        if breaks[0] and self._run.name == "a":
            breaks[0] = False
            raise ZeroDivisionError("planted")
        return step(self, now_ns, event)

    monkeypatch.setattr(Machine, "step", fragile)
    with (
        MasterThread(journal=f"sqlite://{tmp_path}/journal.db") as master,
        rf.join(master.address, run="a", timeout_s=30) as a,
        rf.join(master.address, run="b", timeout_s=30) as b,
    ):
        epochs = a.epoch, b.epoch
        breaks[0] = True
        until(lambda: not breaks[0], "the run breaks at its next event")
        until(lambda: a.epoch > epochs[0], "its member is back, in a new epoch")
        a.update_topology()
        b.update_topology()
        assert b.epoch == epochs[1]
        for run, fence in (("a", 2), ("b", 1)):
            with master_client.connect([master.address], b"", run=run) as connection:
                assert connection.status().fence == fence


def test_a_peer_that_hosts_waits_for_the_port_of_a_host_that_was_just_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is free already, and its port is not: the first try finds it in use, and the next one has it."""
    port = free_port()
    dying, pause = socket.create_server(("127.0.0.1", port)), threads.pause

    def port_is_freed(seconds: float) -> None:
        dying.close()
        pause(seconds)

    monkeypatch.setattr(threads, "pause", port_is_freed)
    with dying, rf.join(f"127.0.0.1:{port}", host_master=True, timeout_s=30) as run:
        assert run.peer_id == 1
