"""What a run records about itself: run directories, flight records, and `ringfold events`."""

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext, until

import ringfold as rf
from ringfold.observe.records import Record, read_directory
from ringfold.runtime import master_client
from ringfold.wire.events import (
    ClockSampled,
    Event,
    FlightDumped,
    LeaderChanged,
    OpEnded,
    PeerEvicted,
    PeerJoined,
    StacksDumped,
    StateSynced,
    StatusSampled,
    StepEnded,
    decode_event,
)
from ringfold.wire.notices import EpochRecorded, Notice, PeerGone, PeerRegistered

pytestmark = pytest.mark.waiting

Kind = TypeVar("Kind", bound=Notice)


def train(me: ProgramContext) -> None:
    """Steps until the test sends a message. What is in `environment` is set before the peer joins."""
    import os
    import resource
    import threading

    computation = threading.Event()
    os.environ.update(me.options.get("environment", {}))
    weights = np.zeros(50_000, np.float32)
    fails: AbstractContextManager[object] = me.failing("refused") if me.options.get("fails") else nullcontext()
    with fails, me.join() as run:
        me.report("joined", peer=run.peer_id)
        state = rf.SharedState(weights=weights)
        run.log(started=1)
        for step in run.steps(state, min_world=me.options.get("world", 1)):
            gradients = np.ones(50_000, np.float32)
            stop = np.full(1, me.has_message(), np.float32)
            if me.options.get("is_evicted"):  # after the first op of a step it could not go on with the others
                step.all_reduce([gradients, stop], op="avg")
            else:
                step.all_reduce(gradients, op="avg")
                step.all_reduce(stop, op="max", tag=1)
            weights += gradients
            computation.wait(0.004)  # some hundred steps a second: a record has all of their ops
            step.log(loss=1.0 / (step.number + 1), bad=float("nan"))
            me.report("step", number=step.number, peer=run.peer_id, world=run.group_size)
            if limit := me.options.pop("limit", 0):
                # As a disk that is full: no file of this process grows beyond this any more.
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if stop[0]:
                break
    me.report("end", revision=state.revision)


def start(cluster: ProgramCluster, count: int, events: Path, **options: Any) -> list[ClusterProcess]:  # noqa: ANN401 - as `start_program`
    return cluster.start_program(train, count, environment={"RINGFOLD_EVENTS_DIR": str(events)}, **options)


def end(peers: list[ClusterProcess]) -> None:
    for peer in peers:
        peer.send("stop")
    for peer in peers:
        peer.expect("end")
        peer.wait_success()


def notices(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event.notice for event in events if isinstance(event.notice, kind)]


def events_of(path: Path) -> list[Event]:
    return [event for line in path.read_bytes().splitlines() if (event := decode_event(line)) is not None]


def by_name(directory: Path) -> dict[str, Record]:
    return {"master" if each.begun.role == "master" else each.begun.name: each for each in read_directory(directory)}


def output_of(command: ClusterProcess) -> str:
    assert command.wait() == 0, command.describe()
    return command.stdout.text()


def check_ops(events: list[Event]) -> dict[int, set[tuple[int, int, int]]]:
    """The committed ops of each step. Their times are in order."""
    found: dict[int, set[tuple[int, int, int]]] = {}
    for event in events:
        op = event.notice
        if not isinstance(op, OpEnded):
            continue
        assert 0 < op.called_ns <= event.stamp.at
        if op.started_ns == 0:  # it waited for an epoch that never came
            assert op.outcome != "committed"
            continue
        assert op.called_ns <= op.started_ns <= event.stamp.at
        assert op.started_ns <= op.local_ns <= event.stamp.at or op.local_ns == 0
        assert 0 <= op.blocked_ns <= event.stamp.at - op.started_ns
        if op.outcome == "committed" and op.step >= 0:
            found.setdefault(op.step, set()).add((op.tag, op.sequence, op.epoch))
    return found


def test_the_record_of_a_run_with_a_kill_and_a_join(cluster: ProgramCluster, tmp_path: Path) -> None:
    events = tmp_path / "events"
    master = cluster.start_master(arguments=("--events", str(events)))
    peers = start(cluster, 3, events, world=3)
    gone = peers[2].expect("joined")["peer"]
    for peer in peers:
        peer.expect("step", world=3)
    peers.pop().kill()
    [late] = start(cluster, 1, events, world=3)
    came = late.expect("joined")["peer"]
    first = late.expect("step", world=3)["number"]
    peers.append(late)
    for peer in peers[:2]:
        peer.expect("step", where=lambda step: step["number"] > first)
    live = cluster.start_command("events", "events", master.address, "--json", "--kind", "peer_joined")
    joined = {json.loads(line)["by"] for line in output_of(live).splitlines()}
    assert {came} <= joined, "what peers report is with the master"
    end(peers)
    master.send_signal(signal.SIGTERM)
    master.wait()

    records = by_name(events)
    assert set(records) == {"master", "p0", "p1", "p2", "p3"}
    of_master = list(records["master"].events())
    assert {each.peer for each in notices(of_master, PeerRegistered)} >= {gone, came}
    [lost] = [each for each in notices(of_master, PeerGone) if each.how != "left"]
    assert lost.peer == gone
    assert notices(of_master, LeaderChanged)
    assert notices(of_master, StatusSampled)
    assert notices(of_master, ClockSampled)
    assert any(each.aborted or len(each.ring) == 2 for each in notices(of_master, EpochRecorded))
    survivors = [list(records[name].events()) for name in ("p0", "p1")]
    ops = [check_ops(each) for each in survivors]
    check_ops(list(records["p2"].events()))
    assert ops[0] == ops[1], "both have the same ops"
    assert all(len(found) == 2 for found in ops[0].values())
    for found in survivors:
        steps = {each.step: each for each in notices(found, StepEnded)}
        assert set(steps) == set(ops[0]) - {max(ops[0])}, "the program left its loop in the last one"
        assert all(step.logged == {"loss": 1.0 / (number + 1), "bad": None} for number, step in steps.items())
        assert notices(found, StateSynced)
    by_late = list(records["p3"].events())
    assert [each.peer for each in notices(by_late, PeerJoined)] == [came]
    assert any(each.received_bytes > 0 for each in notices(by_late, StateSynced))

    of_files = cluster.start_command("events", "events", str(events), "--kind", "peer_gone")
    assert f"peer {gone} (p2) lost" in output_of(of_files)
    losses = cluster.start_command("events", "events", str(events), "--json", "--kind", "step_ended", "--peer", "p3")
    parsed = [json.loads(line) for line in output_of(losses).splitlines()]
    assert {each["by"] for each in parsed} == {came}
    assert [each["step"] for each in parsed] == sorted(each["step"] for each in parsed)
    assert all(each["message"].startswith(f"step {each['step']} ") for each in parsed)


def test_a_peer_that_freezes_leaves_flight_records_and_continues_its_record(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    events, flights = tmp_path / "events", tmp_path / "flights"
    cluster.start_master(flight_dir=flights, evict_after_ms=1_000)
    both = {"RINGFOLD_EVENTS_DIR": str(events), "RINGFOLD_FLIGHT_DIR": str(flights)}
    peers = cluster.start_program(train, 2, environment=both, world=2, is_evicted=True)
    frozen = peers[1]
    before = frozen.expect("joined")["peer"]
    for peer in peers:
        peer.expect("step", world=2)
    frozen.freeze()
    until(lambda: list(flights.glob("flight-master-*.jsonl")), "the flight record of the master")
    frozen.thaw()
    until(lambda: list(flights.glob("flight-peer-p1-*.jsonl")), "the flight record of the peer")
    after = frozen.expect("step", where=lambda step: step["peer"] != before)["peer"]
    end(peers)

    [of_peer], [of_master] = flights.glob("flight-peer-p1-*.jsonl"), flights.glob("flight-master-*.jsonl")
    until(lambda: notices(events_of(of_master), FlightDumped), "the end of the flight record")
    [dumped] = notices(events_of(of_master), FlightDumped)
    assert dumped.reason.startswith(f"peer {before} (p1) evicted: ")
    found = events_of(of_peer)
    assert notices(found, PeerEvicted)
    assert notices(found, OpEnded)
    [stacks] = notices(found, StacksDumped)
    assert any("train" in text for text in stacks.stacks.values()), "where the program was"
    assert any(name.startswith("ringfold") for name in stacks.stacks)

    record = by_name(events)["p1"]
    assert len(record.parts) == 1, "both sessions share one record"
    whole = list(record.events())
    assert [each.peer for each in notices(whole, PeerJoined)] == [before, after]
    assert len(notices(whole, PeerEvicted)) == 1
    ops = [event for event in whole if isinstance(event.notice, OpEnded)]
    assert {event.stamp.peer for event in ops} == {before, after}
    check_ops(whole)


def test_a_record_that_cannot_be_written_is_an_error_at_the_start(cluster: ProgramCluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = cluster.start_master(arguments=("--events", str(tmp_path / "file")), wait=False)
    failed.expect_log(f"events_dir: no record can be written in {tmp_path / 'file'}")
    assert failed.wait() != 0
    assert "Traceback" not in failed.stderr.text()
    cluster.start_master()
    [peer] = start(cluster, 1, tmp_path / "file", fails=True)
    refused = peer.expect("refused")
    assert refused["error"] == "ConfigError"
    assert f"events_dir: no record can be written in {tmp_path / 'file'}" in refused["message"]


def test_a_full_disk_ends_the_record_and_not_the_training(cluster: ProgramCluster, tmp_path: Path) -> None:
    events = tmp_path / "events"
    cluster.start_master()
    peers = start(cluster, 2, events, world=2, limit=60_000)
    begins = [peer.expect_log("ends here: File too large") for peer in peers]
    assert len(begins) == 2
    last = max(peer.reports("step")[-1]["number"] for peer in peers)
    for peer in peers:
        peer.expect("step", where=lambda step: step["number"] > last + 20)
    end(peers)
    for peer in peers:
        assert peer.stderr.text().count("ends here") == 1
    for record in read_directory(events):
        assert list(record.events()), "what was written before can be read"
        assert sum(part.stat().st_size for part in record.parts) <= 60_000


@pytest.mark.parametrize("source", ["a master", "a directory"])
def test_ctrl_c_ends_following(cluster: ProgramCluster, tmp_path: Path, source: str) -> None:
    events = tmp_path / "events"
    events.mkdir()
    master = cluster.start_master(arguments=("--events", str(events)))
    where = {"a master": master.address, "a directory": str(events)}[source]
    following = cluster.start_command("following", "events", where, "--follow")
    following.expect_output("leads (fence")
    peers = start(cluster, 1, events)
    following.expect_output("(p0, 127.0.0.1")
    following.expect_output("joined group 0 as peer 1")
    end(peers)
    following.expect_output("(p0) left")
    following.send_signal(signal.SIGINT)
    assert following.wait() == 0, following.describe()
    assert "Traceback" not in following.stderr.text()
    assert following.stdout.text().count("joined group 0 as peer 1") == 1


def test_a_report_is_shown_when_the_program_pauses(cluster: ProgramCluster) -> None:
    """The last values that were logged are not left behind by the limit of the rate of reports."""
    master = cluster.start_master()
    peer = cluster.start_one(log_and_pause)
    peer.expect("joined")
    peer.expect("paused")

    def look(holds: Callable[[dict[str, float | None]], bool]) -> bool:
        with master_client.MasterClient(master.address, b"") as client:
            return any(holds(each.progress.logged) for each in client.status().peers)

    until(lambda: look(lambda logged: logged.get("number") == 99), "the last report")
    peer.send("stop")
    peer.wait_success()


def log_and_pause(me: ProgramContext) -> None:
    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        for number in range(100):
            run.log(number=number)
        me.report("paused")
        me.receive()
