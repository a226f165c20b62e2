"""The benchmarks: targets are judged rightly, figures leave as promised, and no process outlives a measurement."""

import _thread
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ringfold.errors import ConfigError
from ringfold.tools import shaped
from ringfold.tools.bench import allreduce, app, iteration, multipath, quantize, report, targets, wan, why
from ringfold.tools.bench import allreduce_worker as workers
from ringfold.tools.cluster import LocalCluster, ProcessFailed

WAIT_S = 20.0
Row = dict[str, float | int | str | bool | None]


@pytest.fixture
def target_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(condition: str) -> Path:
        path = tmp_path / "targets.toml"
        path.write_text(f'[[target]]\nid = "a"\ntext = "as asked"\nbench = "b"\nfigure = "x"\n{condition}\n')
        return path

    return write


def verdicts(path: Path, rows: list[Row], skipped: dict[str, str] | None = None, *, cores: int = 2) -> list[str]:
    return [found.verdict for found in targets.check("b", rows, skipped or {}, cores, path)]


def test_the_worst_row_decides(target_file: Callable[[str], Path]) -> None:
    path = target_file("at_least = 2.0")
    assert verdicts(path, [{"x": 2.0}, {"x": 9.0}]) == ["hit"]
    assert verdicts(path, [{"x": 9.0}, {"x": 1.9}]) == ["miss"]


@pytest.mark.parametrize(
    ("bound", "at_the_limit"), [("at_least", "hit"), ("above", "miss"), ("at_most", "hit"), ("below", "miss")]
)
def test_bounds_at_their_limit(target_file: Callable[[str], Path], bound: str, at_the_limit: str) -> None:
    assert verdicts(target_file(f"{bound} = 3"), [{"x": 3.0}]) == [at_the_limit]


@pytest.mark.parametrize(("bound", "good", "bad"), [("at_most", 2.9, 3.1), ("below", 2.9, 3.1), ("above", 3.1, 2.9)])
def test_bounds_on_both_sides(target_file: Callable[[str], Path], bound: str, good: float, bad: float) -> None:
    assert verdicts(target_file(f"{bound} = 3"), [{"x": good}]) == ["hit"]
    assert verdicts(target_file(f"{bound} = 3"), [{"x": bad}]) == ["miss"]


def test_a_target_is_about_its_rows_only(target_file: Callable[[str], Path]) -> None:
    path = target_file("at_least = 2.0\nwhere = { world = 2, size = { max = 10 } }")
    good: Row = {"world": 2, "size": 10, "x": 3.0}
    assert verdicts(path, [good, {"world": 4, "size": 10, "x": 1.0}, {"world": 2, "size": 11, "x": 1.0}]) == ["hit"]
    assert verdicts(path, [good, {"world": 2, "size": 1, "x": 1.0}]) == ["miss"]


def test_a_skipped_library_is_a_miss_with_the_reason(target_file: Callable[[str], Path]) -> None:
    [found] = targets.check("b", [{"x": None}], {"gloo": "torch is not installed"}, 2, target_file("at_least = 1"))
    assert found.verdict == "miss"
    assert "torch is not installed" in found.measured


def test_what_was_not_selected_is_no_hit(target_file: Callable[[str], Path]) -> None:
    assert targets.check("b", [{"y": 1.0}], {}, 2, target_file("at_least = 1")) == []


@pytest.mark.parametrize(
    ("wanted", "cores", "verdict"),
    [
        ("16", 16, "miss"),
        ("16", 2, "other machine"),
        ("{ min = 4 }", 16, "miss"),
        ("{ min = 4 }", 2, "other machine"),
        ("{ max = 4 }", 4, "miss"),
    ],
)
def test_a_target_is_judged_on_its_machines_only(
    target_file: Callable[[str], Path], wanted: str, cores: int, verdict: str
) -> None:
    assert verdicts(target_file(f"at_least = 2.0\ncores = {wanted}"), [{"x": 1.0}], cores=cores) == [verdict]


def test_a_table_of_sizes_is_a_target_for_each(target_file: Callable[[str], Path]) -> None:
    path = target_file("where = { world = 2 }\nat_least = { 4K = 3, 1M = 2 }")
    rows: list[Row] = [{"world": 2, "size_bytes": size, "x": 2.5} for size in (4096, 1 << 20)]
    found = targets.check("b", rows, {}, 2, path)
    assert [(one.id, one.text, one.verdict) for one in found] == [
        ("a:4K", "as asked, 4 KiB", "miss"),
        ("a:1M", "as asked, 1 MiB", "hit"),
    ]


def test_the_output_names_the_targets_for_other_machines_once(target_file: Callable[[str], Path]) -> None:
    result = report.report("b", {}, [{"x": 1.0}])
    path = target_file("cores = 999\nat_least = { 4K = 3, 1M = 2 }")
    result.checks = targets.check("b", result.figures, {}, result.machine.cores, path)
    shown = io.StringIO()
    report.render(result, [], Console(file=shown, width=200))
    assert "not judged, for machines with 999 cores: a\n" in shown.getvalue()
    assert "no target applies to what was measured here" in shown.getvalue()


@pytest.mark.parametrize(
    "condition",
    [
        "",
        "at_least = 1\nbelow = 2",
        "at_leest = 1",
        "at_least = {}",
        "at_least = { big = 1 }",
        "at_least = { 4K = 1 }\nwhere = { size_bytes = 4096 }",
    ],
)
def test_a_target_needs_exactly_one_bound(target_file: Callable[[str], Path], condition: str) -> None:
    with pytest.raises(ConfigError):
        targets.load(target_file(condition))


def test_the_targets_of_this_project_are_about_figures_that_exist() -> None:
    """A misspelt key would make a target "not asked" for ever."""
    figures = {
        "allreduce": {"gloo_over_ringfold", "mpi_over_ringfold", "mpi_shm_over_ringfold", "ringfold_median_us"}
        | {"world", "size_bytes", "transport"},
        "quantize": {"gb_per_s", "f32_over_quantised", "part", "bits", "mbit", "size_bytes"},
        "topology": {"took_us", "worst_error", "best_share", "slowest_over_best", "part", "peers", "matrices"},
        "recovery": {*report.spread([1]), "signal", "worst_beyond_eviction_us"},
        "failover": {*report.spread([1]), "what", "median_beyond_lease_us"},
        "join": {*report.spread([1]), "mode", "newcomers"},
        "memory": {"extra_over_buffer", "size_bytes"},
        "master": {"ops_per_s", "connections"},
        "state": {"gb_per_s", "over_one_holder", "beyond_hashing_us", "rx_bytes", "what", "links", "holders"},
        "clock": {"p50_ns", "p99_ns", "outside", "missing", "beyond_ns", "cpu_share"}
        | {"part", "column", "out_edges", "in_edges", "asymmetry_rms_ns", "asymmetry_p50_ns", "covered", "ahead_ratio"},
        "dashboard": {"median_ratio", "idle_master_share", "load", "peers", "pages"},
        "why": {"right_part", "case", "runs"},
        "events": {"median_ratio", "p99_ratio", "steps_per_s", "part", "mode", "size_bytes"},
        "rounds": {"p99_ms", "of_window", "exponent", "per_node_ms", "kind", "nodes", "mode", "steps", "window_ms"}
        | {"silent", "root_messages"},
        "iteration": {*report.spread([1]), "waiting_cpu_percent", "operations_per_rank", "store", "ranks"},
        "hints": {*report.spread([1]), "read_ns", "flows_per_s", "torn", "part", "flows", "reads"},
        "multipath": {"share", "over_best", "succeeded", "latency_ms", "std", "off", "part", "way", "size_bytes"},
        "wan": {"share", "extra_ms", "part"},
        "ddp": {"gloo_over_ringfold", "communication_share", "world", "model"},
        "gpu": {"cuda_speed", "hidden", "part", "size_bytes", "backward_over_communication"},
        "torchft": {"torchft_over_ringfold", "what", "replicas"},
    }
    loaded = targets.load()
    assert {target.bench for target in loaded} == figures.keys()
    for target in loaded:
        assert {target.figure, *target.where} <= figures[target.bench], target.id


def finish(figures: list[report.Row], *, check: bool) -> None:
    result = report.report("memory", {}, figures)
    report.finish(result, [report.Column("x", "x")], as_json=True, against_targets=check)


def test_json_is_one_object_with_machine_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    finish([{"size_bytes": 1 << 28, "extra_over_buffer": 1.0}], check=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert printed["versions"]["numpy"] == np.__version__
    assert [check["verdict"] for check in printed["checks"]] == ["hit"]


@pytest.mark.parametrize("row", [{"size_bytes": 1 << 28, "extra_over_buffer": 1.2}, {"size_bytes": 1}])
def test_a_miss_and_nothing_to_check_exit_with_1(row: report.Row, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised:
        finish([row], check=True)
    assert raised.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["figures"] == [row]


def test_spread_is_in_microseconds() -> None:
    figures = report.spread(list(range(1_000, 101_001, 1_000)))
    assert (figures["median_us"], figures["p10_us"], figures["p90_us"]) == (51.0, 11.0, 91.0)
    assert (figures["p99_us"], figures["worst_us"], figures["count"]) == (100.0, 101.0, 101)


@pytest.mark.parametrize(("text", "size"), [("4K", 4096), ("1M", 1 << 20), ("2GiB", 2 << 30), ("17", 17)])
def test_sizes_are_binary(text: str, size: int) -> None:
    assert report.size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4T"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        report.size_bytes(text)


@pytest.mark.parametrize(
    ("op_ns", "size", "iterations"),
    [(1_000_000, 4096, 1_000), (100, 4096, allreduce.MAX_ITERATIONS), (10**9, 4096, 20), (10**9, 1 << 28, 7)],
)
def test_rounds_are_long_enough_and_end(op_ns: int, size: int, iterations: int) -> None:
    plan = allreduce.AllReducePlan([2], [size], [], "f32", min_time_s=1.0, rounds=3)
    assert allreduce.iterations_for([op_ns] * 3, size, plan) == iterations


ORDER = {"dtype": "f32", "size_bytes": 4000, "warm_up": 1, "iterations": 5, "digest": True, "tags": 1}


def test_a_round_times_every_op() -> None:
    reply = workers.round_of(lambda buffer, tags: lambda: None, 1, 0, ORDER)
    assert reply["verified"]
    assert len(reply["durations_ns"]) == 5
    assert sum(reply["durations_ns"]) == reply["block_ns"]


def test_a_round_notices_a_wrong_sum_at_one_place() -> None:
    def wrong(buffer: workers.Array) -> None:
        buffer *= 3
        buffer[700] = 0

    assert workers.round_of(lambda buffer, tags: lambda: buffer.__imul__(3), 2, 0, ORDER)["verified"]
    assert not workers.round_of(lambda buffer, tags: lambda: wrong(buffer), 2, 0, ORDER)["verified"]


def test_different_bits_have_different_digests() -> None:
    buffer = np.zeros(1000, np.float32)
    exact = workers.digest_of_op(lambda: None, buffer, 0)

    def off_by_one_bit() -> None:
        buffer[500] = np.nextafter(buffer[500], np.float32(1))

    assert exact == workers.digest_of_op(lambda: None, buffer, 0)
    assert exact != workers.digest_of_op(off_by_one_bit, buffer, 0)


def gone(pid: int) -> bool:
    """Wait until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle, "rb"):
        return bool(select.select([handle], [], [], WAIT_S)[0])


def test_a_cluster_ends_its_processes_and_removes_its_files() -> None:
    with LocalCluster() as cluster:
        cluster.start("sleeper", ["sleep", "1000"])
        pid, directory = cluster.pid("sleeper"), cluster.directory
        os.kill(pid, 0)
    assert gone(pid)
    assert not directory.exists()


def test_a_process_that_ends_early_is_named_with_its_last_output() -> None:
    with LocalCluster() as cluster:
        cluster.start("speaker", ["sh", "-c", "echo no luck today; exit 3"])
        with pytest.raises(ProcessFailed, match=r"speaker: ended with status 3\nno luck today"):
            cluster.wait_connected(["speaker"], WAIT_S)


def test_a_process_that_reports_an_error_fails_the_wait() -> None:
    code = "import sys; from ringfold.tools.cluster import Channel; c = Channel.connect(sys.argv[1], 'w')"
    code += "; c.send({'error': 'it broke'}); c.receive()"
    with LocalCluster() as cluster:
        cluster.start("w", [sys.executable, "-c", code, cluster.address])
        cluster.wait_connected(["w"], WAIT_S)
        with pytest.raises(ProcessFailed, match="it broke"):
            cluster.gather(["w"], WAIT_S)


def test_a_signal_that_interrupts_no_system_call_ends_a_wait_all_the_same() -> None:
    """As one does that arrives just before the call: the interpreter knows of it, and epoll_wait does not."""
    me = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
    is_waiting = threading.Event()

    def interrupt() -> None:
        is_waiting.wait()
        while me.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)  # meanwhile the main thread gets on
        _thread.interrupt_main()

    with LocalCluster() as cluster:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - only from here on may it come
            is_waiting.set()
            cluster.receive(10 * WAIT_S)
        assert time.monotonic() - began < WAIT_S
        interrupting.join()


PARENT = """
import sys
from ringfold.tools.cluster import LocalCluster
stubborn = "import signal as s\\nfor n in s.SIGINT, s.SIGTERM: s.signal(n, s.SIG_IGN)\\nwhile True: s.pause()"
with LocalCluster() as cluster:
    cluster.start("stubborn", [sys.executable, "-c", stubborn])
    print(cluster.pid("stubborn"), cluster.directory, flush=True)
    cluster.receive(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_parent(number: signal.Signals) -> None:
    """Whatever ends the parent, and though the child ignores polite signals."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        parent.send_signal(number)
        try:
            parent.wait(WAIT_S)
        finally:
            parent.kill()  # else the end of this block would wait for it without a deadline
    assert gone(int(pid))
    if number is not signal.SIGKILL:
        assert not Path(directory).exists()
    else:
        for path in Path(directory).iterdir():
            path.unlink()
        Path(directory).rmdir()


def test_every_bench_can_print_json_and_check_itself() -> None:
    benches = [command for command in app.registered_commands if command.name != "plot"]
    assert {command.name for command in benches} == {
        "allreduce",
        "quantize",
        "topology",
        "recovery",
        "failover",
        "join",
        "memory",
        "master",
        "dashboard",
        "state",
        "clock",
        "events",
        "rounds",
        "iteration",
        "hints",
        "multipath",
        "ddp",
        "gpu",
        "torchft",
        "wan",
        "why",
    }
    for command in benches:
        # Rich folds the help to the terminal's width; a wide one keeps the options whole.
        shown = CliRunner().invoke(app, [str(command.name), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert "--json" in shown.output
        assert "--check" in shown.output


@pytest.mark.parametrize("arguments", [["--ranks", "none"], ["--ranks", "0"], ["--store", "file"]])
def test_unknown_stores_and_numbers_of_ranks_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["iteration", *arguments]).exit_code == 2


def test_ranks_on_a_fresh_store_are_measured() -> None:
    row = iteration.measured("sqlite", world=2, iterations=5, wait_s=0.2)
    assert row["count"] == 4
    assert row["from_last_count"] == 5
    assert isinstance(row["median_us"], float)
    assert row["median_us"] > 0
    assert "waiting_cpu_percent" in row


def test_unknown_libraries_and_dtypes_are_refused() -> None:
    for arguments in (["--against", "nccl"], ["--dtype", "f8"]):
        assert CliRunner().invoke(app, ["allreduce", *arguments]).exit_code == 2


@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_the_other_libraries_pass_the_same_verification(library: str) -> None:
    if reason := allreduce.missing_libraries([library]).get(library):
        pytest.skip(reason)
    plan = allreduce.AllReducePlan([2], [4096], [library], "f32", min_time_s=0.01, rounds=1)
    with LocalCluster() as cluster:
        allreduce.start_team(cluster, library, 2)
        outcome = allreduce.play(cluster, library, 2, 4096, plan, 20, digest=True)
    assert outcome["verified"]
    assert len(outcome["durations_ns"]) == 20


REAL = {
    "allreduce": ["--world", "2", "--sizes", "4K,1M", "--against", "none", "--min-time", "0.02", "--rounds", "1"],
    "quantize": ["--world", "2", "--size", "256K", "--mbit", "400", "--rounds", "1"],
    "topology": ["--peers", "3", "--matrices", "1"],
    "recovery": ["--peers", "3", "--size", "64K", "--kills", "2"],
    "failover": ["--peers", "2", "--size", "64K", "--kills", "1"],
    "join": ["--peers", "2", "--repeats", "1"],
    "memory": ["--size", "16M"],
    "master": ["--connections", "8", "--min-time", "0.1"],
    "clock": ["--nodes", "3", "--rounds", "1", "--window-ms", "300", "--seeds", "1"],
    "events": ["--size", "64K", "--rounds", "3", "--step-rounds", "1"],
    "rounds": ["--nodes", "2,3,9", "--rounds", "2", "--long-rounds", "0", "--kinds", "master,local"],
    "state": ["--size", "4M", "--holders", "1,2", "--mbit", "400", "--rounds", "1"],
}


@pytest.mark.parametrize("bench", sorted(REAL))
def test_a_short_run_of_each_bench_gives_figures(bench: str) -> None:
    """Real processes; the figures of a run this short are only looked at for being there."""
    pytest.importorskip("ringfold._native")
    ended = CliRunner().invoke(app, [bench, *REAL[bench], "--json"])
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    assert printed["figures"]
    assert printed["bench"] == bench


def test_paths_that_cannot_be_made_are_misses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipath.labs, "missing", lambda: "network namespaces need root")
    ended = CliRunner().invoke(app, ["multipath", "--json", "--check"])
    assert ended.exit_code == 1
    printed = json.loads(ended.stdout)
    assert "need root" in printed["skipped"]["paths"]
    assert {found["verdict"] for found in printed["checks"]} == {"miss"}


def test_a_long_path_that_cannot_be_made_is_a_miss_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan.labs, "missing", lambda delay: "delay and loss need /dev/net/tun")
    ended = CliRunner().invoke(app, ["wan", "--json", "--check"])
    assert ended.exit_code == 1
    printed = json.loads(ended.stdout)
    assert "/dev/net/tun" in printed["skipped"]["lab"]
    assert {found["verdict"] for found in printed["checks"]} == {"miss"}


def test_hosts_that_cannot_be_made_are_misses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "missing", lambda: "network namespaces need root")
    ended = CliRunner().invoke(app, ["why", "--json", "--check"])
    assert ended.exit_code == 1
    printed = json.loads(ended.stdout)
    assert "need root" in printed["skipped"]["why"]
    assert {found["verdict"] for found in printed["checks"]} == {"miss"}


def test_one_wrong_diagnosis_is_a_miss() -> None:
    rows: list[Row] = [
        {"case": "healthy", "runs": 20, "right_part": 1.0},
        {"case": "all", "runs": 20, "right_part": 0.95},
    ]
    found = {one.id: one.verdict for one in targets.check("why", rows, {}, 2)}
    assert found == {"why-all": "miss", "why-healthy": "hit", "why-right": "miss"}


@pytest.mark.parametrize(
    "arguments", [["--rtt", "0"], ["--loss", "1"], ["--lanes", "65"], ["--lanes", "many"], ["--congestion", "none"]]
)
def test_a_long_path_that_makes_no_sense_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["wan", *arguments]).exit_code == 2


def large_row(lanes: int, share: float, rtt_ms: float = 20.0) -> report.Row:
    return {"part": "large", "rtt_ms": rtt_ms, "loss": 0.0, "congestion": "auto", "lanes": lanes, "share": share}


def test_the_fewest_lanes_that_reach_the_rate_are_enough() -> None:
    rows = [large_row(16, 0.97), large_row(1, 0.89), large_row(4, 0.9), large_row(8, 0.99)]
    assert [(row["lanes"], row["part"]) for row in wan.enough(rows)] == [(4, "enough")]


def test_where_no_number_of_lanes_is_enough_the_best_is_named_for_each_way() -> None:
    rows = [large_row(1, 0.5), large_row(4, 0.8), large_row(8, 0.7), large_row(1, 0.95, rtt_ms=80.0)]
    assert [(row["rtt_ms"], row["lanes"]) for row in wan.enough(rows)] == [(20.0, 4), (80.0, 1)]


def test_an_op_is_judged_by_its_median_and_by_the_round_trips_beyond_its_bytes() -> None:
    second = 1_000_000_000
    row = wan.judged([3 * second, second, 2 * second], 1_000_000, ceiling=1_000_000.0, rtt_ms=500.0)
    assert (row["share"], row["worst_share"], row["beyond_trips"]) == (0.5, pytest.approx(1 / 3), 2.0)


@pytest.mark.parametrize("layouts", ["200", "200+", "200+0", "fast+slow"])
def test_a_layout_has_two_rates_or_more(layouts: str) -> None:
    assert CliRunner().invoke(app, ["multipath", "--layouts", layouts]).exit_code == 2


def test_links_that_cannot_be_shaped_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are measured all the same, and what was not measured is a miss."""
    monkeypatch.setattr(quantize, "missing", lambda: "network namespaces need root")
    monkeypatch.setattr(quantize, "KERNEL_BYTES", 1 << 20)
    ended = CliRunner().invoke(app, ["quantize", "--json", "--check"])
    assert ended.exit_code == 1
    printed = json.loads(ended.stdout)
    assert printed["skipped"] == {"links": "network namespaces need root; run it as root"}
    assert {row["scheme"] for row in printed["figures"] if row.get("gb_per_s")} == set(quantize.QUANTISATIONS)
    [links] = [check for check in printed["checks"] if check["id"] == "quantize-links"]
    assert links["verdict"] == "miss"
    assert "need root" in links["measured"]


def test_a_state_on_links_that_cannot_be_shaped_is_a_miss_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped, "missing", lambda: "network namespaces need root")
    ended = CliRunner().invoke(app, ["state", "--size", "1M", "--rounds", "1", "--json", "--check"])
    printed = json.loads(ended.stdout)
    assert printed["skipped"] == {"shaped links": "network namespaces need root"}
    assert [row["rx_bytes"] for row in printed["figures"] if row["links"] == "loopback"] == [1 << 20, 1 << 20, 0]
    [links] = [check for check in printed["checks"] if check["id"] == "state-three-holders"]
    assert links["verdict"] == "miss"
    assert "need root" in links["measured"]


def test_backpressure_is_as_late_as_the_last_segment_of_a_path_in_use() -> None:
    ms = 1_000_000
    given = [50 * ms, 99 * ms, 104 * ms, 360 * ms, 900 * ms]
    holds = [(100 * ms, 300 * ms), (800 * ms, 850 * ms)]  # at the second, the path had not been in use
    row = multipath.judged({"given_ns": given}, holds)
    assert (row["packets"], row["latency_ms"], row["back_ms"]) == (1, 4.0, 60.0)
    assert multipath.judged({"given_ns": []}, holds)["latency_ms"] is None


def test_a_fixed_share_is_compared_with_what_both_sides_gave_each_path() -> None:
    first, second = multipath.fixed_rows([0.7, 0.3], [69_400, 30_600], [70_500, 29_500])
    assert (first["measured"], second["measured"], second["on_wire"]) == (0.694, 0.306, 0.295)
    assert second["off"] == pytest.approx(0.02)
    assert first["off"] == pytest.approx(0.006 / 0.7)


@pytest.mark.parametrize("arguments", [["--fixed", "--hints"], ["--fixed", "--fixed-sizes", "64K"]])
def test_parts_of_multipath_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["multipath", *arguments]).exit_code == 2


def test_every_figure_of_multipath_is_whole_in_80_columns() -> None:
    """The layout with the longest name, and figures as wide as they get."""
    layout = "120+60+30"
    base: report.Row = {"layout": layout, "size_bytes": 32 << 20, "median_us": 18_340.0}
    figures: list[report.Row] = [
        {"part": "ceiling", "layout": layout, "way": "plain TCP", "mbit": 196.4, "share": 1.0},
        {**base, "part": "transfer", "way": "equal split", "mbit": 196.4, "share": 0.991, "reissued": 1_234},
        {**base, "part": "swap", "way": "ringfold", "over_best": 1.005, "reissued": 1_234},
        {**base, "part": "cut", "way": "ringfold", "path": 1, "over_best": 1.009, "reissued": 1_234, "back_s": 12.3},
        {**base, "part": "fixed", "path": 1, "asked": 0.3, "measured": 0.29871, "on_wire": 0.30219, "off": 0.0043},
        {**base, "part": "few segments", "way": "ringfold"},
        {**base, "part": "few segments", "way": "with hints", "median_us": 9_170.0, "gain": 2.0},
        {"part": "switch", "way": "ringfold", "size_bytes": 1 << 14, "median_us": 28_110.0},
        {"part": "switch", "way": "with hints", "size_bytes": 1 << 14, "median_us": 14_060.0, "gain": 1.999},
        {"part": "backpressure", "packets": 10, "median_us": 0.0, "latency_ms": 1.293, "returned": 10, "back_ms": 23.1},
        {"part": "steady", "way": "with hints", "layout": "switch", "samples": 1_234, "mean": 0.333, "std": 0.106},
    ]
    shown = io.StringIO()
    found = multipath.sheets(figures)
    report.render(report.report("multipath", {}, figures), found, Console(file=shown, width=80))
    lines = [re.split(r"\s{2,}", channel.strip()) for channel in shown.getvalue().splitlines()]
    assert "…" not in shown.getvalue()
    for sheet in found:
        for row in sheet.rows:
            cells = [report._cell(column, row) for column in sheet.columns]
            assert cells in lines
        assert [column.heading for column in sheet.columns] in lines
    assert [layout, "32 MiB", "18.34 ms", "9.17 ms", "2.00x"] in lines


def test_a_table_on_a_narrow_terminal_loses_nothing() -> None:
    shown = io.StringIO()
    sheet = report.Sheet("x", [{"a": 30 * "ж", "b": 30 * "щ"}], [report.Column(name, name) for name in "ab"])
    report.render(report.report("x", {}, []), [sheet], Console(file=shown, width=30))
    assert (shown.getvalue().count("ж"), shown.getvalue().count("щ")) == (30, 30)
