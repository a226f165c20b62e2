"""The clock benchmark: an injected error is found, and a run has all its figures."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ringfold.probe.exchanges import BACKWARD_KEPT, FORWARD_KEPT, EdgeWindow
from ringfold.probe.models import Sample
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.bench import app, clock
from ringfold.tools.bench.clock_truth import (
    INSTANTS,
    VirtualClock,
    asymmetry_ns,
    edge_outside,
    floors_ns,
    node_errors,
    spread_clocks,
    with_truth,
)
from ringfold.tools.cluster import LocalCluster
from ringfold.wire.probing import EdgeFit, NodeClock

ANCHOR = 10**13
SECOND = 10**9
CLOCKS = {1: VirtualClock(ANCHOR, 0, 0), 2: VirtualClock(ANCHOR, 50_000_000, 30_000)}
INSTANTS_NS = [ANCHOR + SECOND + step * 40_000_000 for step in range(101)]


def perfect(node: int, *, error_ns: int = 0, bound_ns: int = 5, rate_error: float = 0.0) -> NodeClock:
    """The mapping to raw time as global time, exact at the middle of the instants except for what is injected."""
    middle = INSTANTS_NS[50]
    drift = CLOCKS[node].drift_ppb / 1e9
    return NodeClock(
        node=node,
        t0_ns=CLOCKS[node].at(middle),
        global_ns=middle + error_ns,
        rate=1 / (1 + drift) - 1 + rate_error,
        sigma_ns=1.0,
        low_ns=-bound_ns,
        high_ns=bound_ns,
        growth=0.0,
    )


def sample_with_delays(alpha_pair: tuple[int, int], forward_ns: list[int], backward_ns: list[int]) -> Sample:
    """A window in which packets took exactly so long: first from node `alpha_pair[0]` to the other, then back."""
    src, dst = (CLOCKS[node] for node in alpha_pair)
    rows = []
    for number, (there, back) in enumerate(zip(forward_ns, backward_ns, strict=True)):
        sent = ANCHOR + SECOND + number * 4_000_000
        row = []
        for begin in (sent, sent + 800_000):
            row += [src.at(begin), dst.at(begin + there)]
        for begin in (sent + 100_000, sent + 900_000):
            row += [dst.at(begin), src.at(begin + back)]
        rows.append(row)
    window = EdgeWindow(
        src=alpha_pair[0],
        dst=alpha_pair[1],
        begin_ns=src.at(ANCHOR + SECOND),
        end_ns=src.at(ANCHOR + 2 * SECOND),
        exchanges=np.array(rows, np.int64),
        kept=np.full(len(rows), FORWARD_KEPT | BACKWARD_KEPT, np.uint8),
        sent=len(rows),
        lost=0,
        duplicates=0,
        filtered=0,
        threshold_ns=1_000,
        stamps="kernel",
    )
    return with_truth(window, CLOCKS)


def test_clocks_are_spread_both_ways_and_the_same_every_time() -> None:
    clocks = spread_clocks(8, 50_000_000, 30_000, ANCHOR)
    assert clocks == spread_clocks(8, 50_000_000, 30_000, ANCHOR)
    assert sorted(clocks) == list(range(1, 9))
    offsets, drifts = ({getattr(each, name) for each in clocks.values()} for name in ("offset_ns", "drift_ppb"))
    assert (min(offsets), max(offsets), len(offsets)) == (-50_000_000, 50_000_000, 8)
    assert (min(drifts), max(drifts), len(drifts)) == (-30_000, 30_000, 8)
    ratios = {round(each.drift_ppb / each.offset_ns, 9) for each in clocks.values()}
    assert len(ratios) > 4, "drifts follow from offsets"


def test_exact_clocks_have_no_error() -> None:
    found = node_errors([perfect(1), perfect(2)], 1, CLOCKS, INSTANTS_NS)
    assert found.errors.shape == (1, 101)
    assert np.abs(found.errors).max() <= 1
    assert found.outside == 0


def test_an_injected_error_is_found() -> None:
    found = node_errors([perfect(1), perfect(2, error_ns=700)], 1, CLOCKS, INSTANTS_NS)
    assert np.abs(found.errors - 700).max() <= 1


def test_a_rate_that_is_wrong_shows_at_the_ends_of_the_window() -> None:
    found = node_errors([perfect(1), perfect(2, rate_error=1e-7)], 1, CLOCKS, INSTANTS_NS)
    assert found.errors[0, 0] == pytest.approx(-200, abs=2)
    assert found.errors[0, 50] == pytest.approx(0, abs=1)
    assert found.errors[0, -1] == pytest.approx(200, abs=2)


def test_errors_are_against_the_reference_whose_own_error_counts_for_the_others() -> None:
    found = node_errors([perfect(1), perfect(2, error_ns=-40)], 2, CLOCKS, INSTANTS_NS)
    assert np.abs(found.errors - 40).max() <= 1


def test_a_bound_that_is_too_narrow_is_counted_at_every_instant() -> None:
    found = node_errors([perfect(1), perfect(2, error_ns=50, bound_ns=20)], 1, CLOCKS, INSTANTS_NS)
    assert found.outside == 101
    found = node_errors([perfect(1), perfect(2, error_ns=50, bound_ns=60)], 1, CLOCKS, INSTANTS_NS)
    assert found.outside == 0
    assert found.bounds.min() >= 60


def test_without_any_clock_there_is_no_error_to_look_at() -> None:
    assert node_errors([], -1, CLOCKS, INSTANTS_NS).errors.size == 0


@pytest.mark.parametrize("pair", [(1, 2), (2, 1)])
def test_the_true_line_of_an_edge_is_that_of_its_clocks(pair: tuple[int, int]) -> None:
    sample = sample_with_delays(pair, [1_000], [1_000])
    src, dst = (CLOCKS[node] for node in pair)
    for raw_ns in (ANCHOR, ANCHOR + 7 * SECOND, ANCHOR + 60 * SECOND):
        truth = sample.truth(src.at(raw_ns)) + sample.offset_ns
        assert truth == pytest.approx(dst.at(raw_ns) - src.at(raw_ns), abs=2)


@pytest.mark.parametrize("pair", [(1, 2), (2, 1)])
def test_the_floors_are_the_shortest_true_delays_of_each_direction(pair: tuple[int, int]) -> None:
    sample = sample_with_delays(pair, [9_000, 5_000, 70_000], [3_000, 1_000, 2_000])
    assert floors_ns(sample) == (pytest.approx(5_000, abs=3), pytest.approx(1_000, abs=3))
    assert asymmetry_ns(sample) == pytest.approx(2_000, abs=3)


def test_packets_that_were_filtered_do_not_count_for_the_floor() -> None:
    sample = sample_with_delays((1, 2), [5_000, 9_000], [1_000, 1_000])
    sample.window.kept[0] = BACKWARD_KEPT
    assert floors_ns(sample)[0] == pytest.approx(9_000, abs=3)
    sample.window.kept[:] = FORWARD_KEPT
    assert np.isnan(asymmetry_ns(sample))


def corridor(sample: Sample, *, off_ns: int = 0, tilt: float = 0.0, high_ns: int = 100) -> EdgeFit:
    """A fit that is off by so much, with a corridor of 100 ns below it and `high_ns` above."""
    t0 = CLOCKS[1].at(ANCHOR + 2 * SECOND)
    truth = round(sample.truth(t0)) + sample.offset_ns
    low, high = (-100, -100, -100), (high_ns, high_ns, high_ns)
    return EdgeFit(1, 2, t0, SECOND, sample.alpha + tilt, truth + off_ns, low=low, high=high)


def test_a_corridor_that_holds_the_truth_is_not_counted() -> None:
    sample = sample_with_delays((1, 2), [1_000], [1_000])
    assert edge_outside(sample, corridor(sample)) == 0
    assert edge_outside(sample, corridor(sample, off_ns=90)) == 0


def test_a_corridor_that_misses_the_truth_is_counted_at_each_instant() -> None:
    sample = sample_with_delays((1, 2), [1_000], [1_000])
    assert edge_outside(sample, corridor(sample, off_ns=110)) == INSTANTS
    assert edge_outside(sample, corridor(sample, off_ns=-110)) == INSTANTS
    assert edge_outside(sample, corridor(sample, off_ns=-110, high_ns=120)) == 0
    # 150 ns at either end of a second: a third of the window is beyond 100 ns.
    assert edge_outside(sample, corridor(sample, tilt=1.5e-7)) == pytest.approx(INSTANTS / 3, abs=2)


def test_a_fit_that_was_refused_promises_nothing() -> None:
    sample = sample_with_delays((1, 2), [1_000], [1_000])
    assert edge_outside(sample, EdgeFit(1, 2, refused="fewer than 10 pairs")) == 0


def test_a_short_run_has_all_figures_and_its_bounds_hold() -> None:
    pytest.importorskip("ringfold._native")
    arguments = ["clock", "--nodes", "3", "--rounds", "1", "--window-ms", "300", "--columns", "idle", "--seeds", "1"]
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    nodes, *estimators = printed["figures"]
    assert (nodes["part"], nodes["column"]) == ("nodes", "idle")
    assert nodes["instants"] == 2 * INSTANTS
    assert 0 <= nodes["p50_ns"] <= nodes["p99_ns"] <= nodes["max_ns"] < nodes["bound_max_ns"]
    assert (nodes["outside"], nodes["missing"], nodes["refused"]) == (0, 0, 0)
    assert (nodes["out_edges"], nodes["in_edges"], nodes["windows"]) == (2, 2, 6)
    assert nodes["cpu_share"] > 0
    real = [row for row in estimators if row["part"] == "edges"]
    assert [row["estimator"] for row in real] == ["auto", "quantile", "hull", "svm", "least-squares", "min-rtt"]
    assert all(row["windows"] == 6 and row["outside"] == 0 and row["ends_rms_ns"] >= 0 for row in real)
    assert real[0]["beyond_ns"] >= 0
    assert {"mixed-early", "loopback"} <= {row["column"] for row in estimators if row["part"] == "models"}


def test_the_text_has_a_table_of_nodes_and_one_line_a_column_for_the_estimators() -> None:
    pytest.importorskip("ringfold._native")
    arguments = ["clock", "--nodes", "2", "--rounds", "1", "--window-ms", "200", "--columns", "idle", "--seeds", "0"]
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert ended.exit_code == 0, ended.output
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["column", "auto", "quantile", "hull", "svm", "least-squares", "min-rtt", "enough"] in lines
    assert sum(words[:1] == ["idle"] for words in lines) == 7, "nodes, two densities, two filters, two of estimators"


def test_windows_are_compared_alone_and_combined_and_densities_with_their_cost() -> None:
    pytest.importorskip("ringfold._native")
    asked = ["clock", "--nodes", "3", "--rounds", "4", "--window-ms", "300", "--columns", "idle", "--seeds", "1"]
    ended = CliRunner().invoke(app, [*asked, "--json"])
    assert ended.exit_code == 0, ended.output
    figures = json.loads(ended.stdout)["figures"]
    filters = {row["windows"]: row for row in figures if row["part"] == "filter"}
    assert set(filters) == {"alone", "combined"}
    for row in filters.values():
        assert row["rounds"] == 2
        assert 0 <= row["ahead_p50_ns"] <= row["ahead_p99_ns"]
        assert 0 <= row["covered"] <= 1
    densities = {row["density"]: row for row in figures if row["part"] == "density"}
    assert {"default", "dense"} <= set(densities)
    assert all(row["pairs_per_s"] > 0 for row in densities.values())
    models = [row for row in figures if row["part"] == "filter-models"]
    assert {row["wander"] for row in models} == {0.0, 3e-9, 3e-8}


def test_an_unknown_density_is_refused() -> None:
    ended = CliRunner().invoke(app, ["clock", "--densities", "default,thick"])
    assert ended.exit_code == 2
    assert "thick" in ended.output


def test_links_that_cannot_be_shaped_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not measured is a miss."""
    monkeypatch.setattr(clock, "missing", lambda: "network namespaces need root")
    ended = CliRunner().invoke(app, ["clock", "--columns", "shaped", "--seeds", "0", "--json", "--check"])
    assert ended.exit_code == 1
    printed = json.loads(ended.stdout)
    assert printed["skipped"] == {"shaped": "network namespaces need root; run it as root"}
    assert [found["id"] for found in printed["checks"] if found["verdict"] == "miss"] == ["clock-bound"]


def test_an_unknown_column_is_refused() -> None:
    ended = CliRunner().invoke(app, ["clock", "--columns", "idle,asleep"])
    assert ended.exit_code == 2
    assert "asleep" in ended.output


def test_busy_processes_run_on_every_core_and_end_with_their_cluster() -> None:
    with LocalCluster() as cluster:
        pids = [cluster.pid(name) for name in clock.start_busy_cores(cluster)]
        deadline = monotonic_ns() + 20 * SECOND
        while not all(_used_ticks(pid) > 5 for pid in pids):
            assert monotonic_ns() < deadline, "a busy process does not use its core"
            cluster.pause(0.01)
        cores = [line for pid in pids for line in _status(pid) if line.startswith("Cpus_allowed_list")]
    assert len(set(cores)) == len(pids)
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)


def _status(pid: int) -> list[str]:
    return Path("/proc", str(pid), "status").read_text().splitlines()


def _used_ticks(pid: int) -> int:
    """Of the processor, in user mode."""
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[11])
