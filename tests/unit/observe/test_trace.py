"""Traces of run directories: what is in them, and that a viewer can take them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ringfold.cli import build
from ringfold.errors import UsageError
from ringfold.observe import torch_traces
from ringfold.observe.align import align
from ringfold.observe.processes import Process, gather
from ringfold.observe.records import read_directory
from ringfold.observe.trace import OVERFLOW, TAGS, Window, lanes
from ringfold.observe.trace import build as build_trace
from ringfold.testing.recorded import Scene, play, write
from ringfold.testing.trace_checks import faults

SCENE = Scene(
    steps=40,
    ops=2,
    offsets_ms={1: 50, 2: -50},
    drifts_ppm={1: 30, 2: -30},
    slow_loader={3: 30.0},
    hiccups=0.2,
)


@pytest.fixture(scope="module")
def processes() -> list[Process]:
    return [gather(each.name, each.begun, each.events) for each in play(SCENE)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(SCENE, tmp_path / "run")
    return tmp_path / "run"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(build(["trace"]), ["trace", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def read(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def named(trace: dict[str, Any], phase: str, name: str = "") -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase and event["name"].startswith(name)]


def test_a_trace_has_everything_and_no_fault(directory: Path, tmp_path: Path) -> None:
    code, output = run(directory, "-o", tmp_path / "out.json.gz")
    trace = read(tmp_path / "out.json.gz")
    assert code == 0, output
    assert not faults(trace)
    assert len(named(trace, "X", "step ")) == 4 * 40
    assert len(named(trace, "X", "all_reduce")) == 4 * 80
    assert len(named(trace, "X", "evidence")) == 4 * 80
    assert {event["pid"] for event in named(trace, "X", "all_reduce")} == {1, 2, 3, 4}
    assert {event["name"] for event in named(trace, "C")} == {"MB/s", "steps/s"}
    assert len(named(trace, "b", "change to epoch 1")) == 1
    assert named(trace, "X", "epoch 1")
    first = named(trace, "X", "all_reduce")[0]
    assert first["args"]["raw_begin_ns"] > 1_000_000_000_000
    assert 0 < first["args"]["uncertainty_us"] < 1_000
    assert min(event["ts"] for event in trace["traceEvents"]) == 0
    assert "aligned by global clock" in output


def test_flows_lead_from_the_late_peer_to_those_that_waited(processes: list[Process]) -> None:
    trace = build_trace(processes, align(processes))
    starts = [event for event in trace.events if event["ph"] == "s" and event["name"] == "called late"]
    assert len(starts) > 3 * 30
    assert sum(event["pid"] == 3 for event in starts) > 0.8 * len(starts)


def test_the_phases_of_an_op_are_inside_it(processes: list[Process]) -> None:
    trace = build_trace(processes, align(processes))
    phases = {"waits for its start", "waits for a neighbour", "transfer", "own part", "evidence"}
    ops = [event for event in trace.events if event["ph"] == "X" and event["name"] == "all_reduce"]
    for op in ops[:50]:
        inside = [
            event
            for event in trace.events
            if event["ph"] == "X"
            and (event["pid"], event["tid"]) == (op["pid"], op["tid"])
            and op["ts"] <= event["ts"] <= op["ts"] + op["dur"]
            and event["name"] in phases
        ]
        assert sum(event["dur"] for event in inside) == pytest.approx(op["dur"], abs=0.01)


def test_a_window_of_steps_and_of_seconds(directory: Path, tmp_path: Path, processes: list[Process]) -> None:
    out = tmp_path / "out.json.gz"
    run(directory, "-o", out, "--steps", "10:12")
    trace = read(out)
    assert not faults(trace)
    shown = {event["args"]["step"] for event in named(trace, "X", "step ")}
    assert {10, 11, 12} <= shown <= {9, 10, 11, 12, 13}
    run(directory, "-o", out, "--seconds", "0.5:0.8")
    trace = read(out)
    assert not faults(trace)
    assert 0 < len(named(trace, "X", "all_reduce")) < 100
    with pytest.raises(UsageError, match="there are steps 0 to 39"):
        build_trace(processes, align(processes), Window(steps=(50, 60)))


def test_what_does_not_fit_is_left_out_and_said(processes: list[Process]) -> None:
    trace = build_trace(processes, align(processes), max_events=700)
    assert not faults({"traceEvents": trace.events})
    [line] = trace.left_out
    assert line.startswith("220 of 320 ops")
    assert "--steps" in line
    steps = [event["args"]["step"] for event in trace.events if event["ph"] == "X" and event["name"][:5] == "step "]
    assert min(steps) > 20


def test_slices_that_overlap_go_to_other_lanes() -> None:
    slices = [(0, 10, {"name": "a"}), (2, 8, {"name": "b"}), (5, 12, {"name": "c"}), (10, 12, {"name": "d"})]
    assert [(lane, event["name"]) for lane, _, _, event in lanes(slices)] == [(0, "a"), (0, "b"), (1, "c"), (0, "d")]
    assert TAGS < OVERFLOW


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ts": 500.0}, "is before"),
        ({"dur": 1e6}, "ns after the slice"),
        ({"tid": 77}, "has no name"),
        ({"ph": "Q"}, "unknown phase"),
        ({"ph": "s", "cat": "x", "id": 7}, "beginnings"),
        ({"ph": "e", "cat": "x", "id": 7}, "has not begun"),
        ({"ts": -1}, "before the beginning"),
    ],
)
def test_the_check_of_traces_can_fail(processes: list[Process], change: dict[str, Any], says: str) -> None:
    events = build_trace(processes, align(processes)).events
    at = [number for number, event in enumerate(events) if event["name"] == "evidence"][100]
    events[at] = {**events[at], **change}
    assert says in "".join(faults({"traceEvents": events}))


# PyTorch


def torch_trace(process: Process, at: int, **more: object) -> dict[str, Any]:
    """What the profiler writes of a slice of 2 ms at that time of the record, with a flow in it."""
    (near, sample) = min(process.clocks, key=lambda each: abs(each[0] - at))
    wall = sample.wall_ns + at - near
    base = wall // 7_889_238_000_000_000 * 7_889_238_000_000_000
    ts = (wall - base) / 1_000
    thread = {"pid": process.begun.pid, "tid": 77}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": ts, **thread, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": ts, "dur": 2_000.0, **thread, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": ts + 10, "dur": 2_500.0, "pid": 0, "tid": 7, "args": {}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "ts": ts + 5, **thread},
        {"ph": "f", "bp": "e", "cat": "ac2g", "name": "ac2g", "id": 5, "ts": ts + 11, "pid": 0, "tid": 7},
        {"ph": "X", "name": "PyTorch Profiler (0)", "ts": ts, "dur": 9.0, "pid": "Spans", "tid": "PyTorch Profiler"},
        {"ph": "i", "s": "g", "name": "Record Window End", "ts": ts + 9, "pid": "", "tid": ""},
    ]
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, **more, "traceEvents": events}


def test_traces_of_pytorch_are_merged_on_the_same_timeline(
    directory: Path, tmp_path: Path, processes: list[Process]
) -> None:
    """A kernel that ran in the middle of a step is in the middle of that step, on hosts with wrong, drifting clocks."""
    files = []
    for number in (1, 2):
        step = processes[number].steps[30]
        middle = (step.ended.began_ns + step.at) // 2
        path = tmp_path / f"trace-{number}.json"
        how = {"ringfold_peer": number} if number == 1 else {"host_name": processes[2].begun.host}
        path.write_text(json.dumps(torch_trace(processes[number], middle, **how)))
        files += ["--torch", path]
    code, output = run(directory, "-o", tmp_path / "out.json.gz", *files)
    assert code == 0, output
    trace = read(tmp_path / "out.json.gz")
    assert not faults(trace)
    kernels = named(trace, "X", "aten::mm")
    assert len(kernels) == 2
    for number, kernel in enumerate(kernels, 1) if kernels[0]["pid"] < kernels[1]["pid"] else ():
        [step_slice] = [each for each in named(trace, "X", "step 30") if each["pid"] == number]
        assert kernel["ts"] == pytest.approx(step_slice["ts"] + step_slice["dur"] / 2, abs=100)
    flows = {event["id"] for event in trace["traceEvents"] if event["ph"] == "s" and event["name"] == "ac2g"}
    assert flows == {"torch 0: 5", "torch 1: 5"}
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert "peer 2 (peer-2, host-2), PyTorch: python" in names
    assert len({event["pid"] for event in named(trace, "X", "sgemm")}) == 2


def test_a_pytorch_trace_is_matched_by_its_file_or_refused(processes: list[Process], tmp_path: Path) -> None:
    unnamed = torch_trace(processes[1], processes[1].steps[3].at)
    unnamed["traceEvents"][0]["pid"] = 4
    for name, index in (("worker.peer-3.json", 3), ("rank_4.pt.trace.json", 4), ("peer-2_17.json", 2)):
        assert torch_traces.match(tmp_path / name, unnamed, processes) == index
    with pytest.raises(UsageError, match="add_metadata_json"):
        torch_traces.match(tmp_path / "trace.json", unnamed, processes)
    with pytest.raises(UsageError, match="of which there is no record"):
        torch_traces.match(tmp_path / "trace.json", {**unnamed, "ringfold_peer": 9}, processes)


def test_a_real_trace_of_the_profiler_is_merged(directory: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        profiler.add_metadata_json("ringfold_peer", "2")
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    read_trace = json.loads((tmp_path / "torch.json").read_text())
    records = [gather(each.name, each.begun, each.events()) for each in read_directory(directory)]
    found = list(torch_traces.merged([tmp_path / "torch.json"], records, align(records)))
    assert {event["name"] for event in found if event["ph"] == "X"} >= {"aten::ones", "aten::matmul"}
    slices = [event for event in read_trace["traceEvents"] if event["ph"] == "X"]
    assert len([event for event in found if event["ph"] == "X"]) == len(slices)
    unpaired = [text for text in faults({"traceEvents": found}) if "before" not in text]
    assert not unpaired


# The command


def test_check_counts_impossible_orders(directory: Path) -> None:
    code, output = run(directory, "--check", "--json")
    found = json.loads(output)
    assert code == 0
    assert found["impossible"] == 0
    assert found["orders"]["part"]["impossible_before"] > 300
    assert found["orders"]["part"]["worst_before_ns"] > 90_000_000
    code, output = run(directory, "--check")
    assert "before and after alignment" in output


def test_why_prints_the_culprit(directory: Path) -> None:
    code, output = run(directory, "--why")
    assert code == 0
    assert output.startswith("peer 3 (peer-3): compute")
    code, output = run(directory, "--why", "--json", "--steps", "10:30")
    found = json.loads(output)
    assert [(each["cause"], each["kind"], each["peer"]) for each in found["findings"]] == [("compute", "loader", 3)]
    assert found["steps"] == 21


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--check", "--why"), "choose one"),
        (("--check", "-o", "x"), "leave out --output"),
        (("--steps", "5"), None),
        (("--steps", "9:5"), "is empty"),
        (("--steps", "a:b"), "FIRST:LAST"),
        (("--why", "--seconds", "1:2"), "--steps"),
    ],
)
def test_options_that_do_not_fit_are_refused(directory: Path, options: tuple[str, ...], says: str | None) -> None:
    if says is None:
        assert run(directory, *options)[0] == 0
        return
    with pytest.raises(UsageError, match=says):
        run(directory, *options)


def test_a_directory_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no records of events"):
        run(tmp_path)
