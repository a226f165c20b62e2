"""Rounds of probing between real processes: nodes that come, die, freeze and wake, and a master that is killed."""

from pathlib import Path

import pytest
from probe_nodes import (
    SHORT,
    WINDOW_MS,
    Rounds,
    check_never_back,
    excluded,
    missing,
    rounds_in,
    start_nodes,
    windows_of,
)
from programs import ProgramCluster, until

REPORT_TIMEOUT_MS = 1_000


@pytest.mark.parametrize("count", [2, 4])
def test_rounds_follow_each_other(cluster: ProgramCluster, count: int) -> None:
    master = cluster.start_master(**SHORT)
    names = [f"n{number}" for number in range(count)]
    start_nodes(cluster, names)
    rounds = Rounds(master)
    first, second = rounds.whole(*names), rounds.whole(*names)
    assert second["round"] > first["round"]
    assert len(second["edges"]) == count * (count - 1)
    assert all(edge["fit"]["pairs"] >= 10 for edge in second["edges"])
    assert second["metrics"]["report_bytes"] > 0


def test_a_killed_master_stops_nobody_and_rounds_go_on_above(cluster: ProgramCluster, tmp_path: Path) -> None:
    """Killed in the middle of a window; the nodes go on alone, and find the next master at the same port."""
    names = ["n0", "n1", "n2"]
    master = cluster.start_master(probe_export=tmp_path / "run", **SHORT)
    nodes = start_nodes(cluster, names, export=tmp_path)
    Rounds(master).whole(*names)
    until(lambda: rounds_in(tmp_path / "run"), "a round of the first master is written")
    before = len(rounds_in(tmp_path / "run"))
    master.kill()
    master.wait()
    for node in nodes:
        node.expect_log("goes on alone")
    seen = {name: windows_of(tmp_path / name)[-1].window for name in names}
    until(lambda: all(windows_of(tmp_path / name)[-1].window >= seen[name] + 2 for name in names), "windows go on")
    again = cluster.start_master(listen=master.address, probe_export=tmp_path / "run", **SHORT)
    Rounds(again).whole(*names)
    until(lambda: len(rounds_in(tmp_path / "run")) > before + 1, "rounds of the second master are written")
    assert all(node.is_running for node in nodes)
    check_never_back([line.round_id for line in rounds_in(tmp_path / "run")], may_repeat=False)
    for name in names:
        check_never_back([line.round_id for line in windows_of(tmp_path / name)], may_repeat=True)


def test_a_killed_node_is_named_as_missing_and_the_others_go_on(cluster: ProgramCluster) -> None:
    # A window that is long enough for this test to act inside it.
    master = cluster.start_master(**{**SHORT, "probe_window_ms": 2_000})
    nodes = start_nodes(cluster, ["n0", "n1", "n2"])
    rounds = Rounds(master)
    rounds.whole("n0", "n1", "n2")
    nodes[1].kill()
    assert "its connection was lost" in missing(rounds.without("n1"))["n1"]
    rounds.whole("n0", "n2")


def test_a_frozen_node_is_named_as_missing_and_comes_back_when_it_wakes(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    master = cluster.start_master(**SHORT)
    names = ["n0", "n1", "n2"]
    nodes = start_nodes(cluster, names, export=tmp_path)
    rounds = Rounds(master)
    rounds.whole(*names)
    nodes[1].freeze()
    assert "n1" in missing(rounds.without("n1"))
    rounds.whole("n0", "n2")
    nodes[1].thaw()
    rounds.whole(*names)
    for name in names:
        check_never_back([line.round_id for line in windows_of(tmp_path / name)], may_repeat=True)


def test_a_frozen_node_costs_the_others_nothing(cluster: ProgramCluster) -> None:
    """It is suspected by its heartbeats before it is dropped, and the rounds in between do not wait for it."""
    master = cluster.start_master(**{**SHORT, "evict_after_ms": 60_000})
    names = ["n0", "n1", "n2", "n3"]
    nodes = start_nodes(cluster, names)
    rounds = Rounds(master)
    rounds.whole(*names)
    nodes[1].freeze()
    suspected = rounds.next(lambda summary: "silent for" in missing(summary).get("n1", ""), "n1 is suspected")
    out = rounds.next(lambda summary: "n1" in excluded(summary), "n1 is out of the graph")
    assert out["round"][1] <= suspected["round"][1] + 3
    whole = rounds.whole("n0", "n2", "n3")
    assert whole["metrics"]["gather_ns"] < REPORT_TIMEOUT_MS * 1_000_000 // 2
    nodes[1].thaw()
    rounds.whole(*names)
    master.expect_log("reports again, and is in the next graph")


def test_a_silent_node_is_dropped_and_joins_again_when_it_wakes(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    names = ["n0", "n1", "n2"]
    nodes = start_nodes(cluster, names)
    rounds = Rounds(master)
    rounds.whole(*names)
    nodes[1].freeze()
    assert "silent for" in master.expect_log("(n1)")
    rounds.whole("n0", "n2")
    nodes[1].thaw()
    rounds.whole(*names)


def test_a_frozen_master_is_left_and_joined_again(cluster: ProgramCluster) -> None:
    """Its kernel still acknowledges: only its heartbeats are missing."""
    master = cluster.start_master(**SHORT)
    nodes = start_nodes(cluster, ["n0", "n1"])
    Rounds(master).whole("n0", "n1")
    master.freeze()
    for node in nodes:
        node.expect_log("it was silent for")
    master.thaw()
    rounds = Rounds(master)
    rounds.whole("n0", "n1")
    rounds.whole("n0", "n1")


def test_a_restarted_node_is_part_of_the_next_graph(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    nodes = start_nodes(cluster, ["n0", "n1"])
    rounds = Rounds(master)
    rounds.whole("n0", "n1")
    nodes[1].kill()
    start_nodes(cluster, ["n2"])
    rounds.whole("n0", "n2")


def test_nobody_waits_for_a_node_that_only_listens(cluster: ProgramCluster) -> None:
    """Even when it is frozen: a round that waited for it would last at least a window and the report timeout."""
    master = cluster.start_master(**SHORT)
    probing = ["n0", "n1", "n2"]
    start_nodes(cluster, probing)
    listener, *_ = start_nodes(cluster, ["ear"], "--listen-only")
    rounds = Rounds(master)
    whole = rounds.whole(*probing, "ear")
    sources = {edge["fit"]["src"] for edge in whole["edges"]}
    assert {whole["names"][str(node)] for node in sources} == set(probing), "a listener probes nobody"
    listener.freeze()
    rounds.next(lambda summary: "ear" in missing(summary), "the listener has no clock")
    before = rounds.next()

    def is_quick(summary: dict[str, object]) -> bool:
        nonlocal before
        took_ns = _begin_ns(summary) - _begin_ns(before)
        before = summary
        return 0 < took_ns < (WINDOW_MS + REPORT_TIMEOUT_MS) * 1_000_000

    quick = rounds.next(is_quick, "that waited for nobody")
    assert missing(quick).keys() == {"ear"}
    assert "no report" not in missing(quick)["ear"]
    listener.thaw()
    rounds.whole(*probing, "ear")


def _begin_ns(summary: dict[str, object]) -> int:
    begin = summary["begin_ns"]
    assert isinstance(begin, int)
    return begin


def test_a_full_disk_ends_the_log_of_the_run_and_nothing_else(cluster: ProgramCluster, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    master = cluster.start_master(probe_export=tmp_path, **SHORT)
    start_nodes(cluster, ["n0", "n1"])
    rounds = Rounds(master)
    rounds.whole("n0", "n1")
    assert "No space left on device" in master.expect_log("the log ")
    rounds.whole("n0", "n1")


def test_a_directory_that_cannot_be_written_is_said_at_the_start(cluster: ProgramCluster, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    refused = cluster.start_command(
        "a master", "master", "--listen", "127.0.0.1:0", probe_export=tmp_path / "logs", log_level="error"
    )
    assert refused.wait() == 2
    refused.expect_log("cannot be written")


def test_a_summary_has_the_sequences_of_each_window_and_lines_are_logged_on_request(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT, arguments=["--log-fits"])
    names = ["n0", "n1"]
    nodes = start_nodes(cluster, names, "--log-fits")
    rounds = Rounds(master)
    one, next_one = rounds.whole(*names), rounds.whole(*names)
    by_node = {window["node"]: window for window in one["windows"]}
    for window in next_one["windows"]:
        before = by_node[window["node"]]
        assert window["window"] > before["window"]
        assert window["sent"] == window.get("received", 0) + window.get("lost", 0) > 0
        if window["round"][1] == before["round"][1] + 1:
            assert window["first_sequence"] == before["next_sequence"] == before["last_sequence"] + 1
        probes = window["last_sequence"] - window["first_sequence"] + 1
        assert probes >= window["sent"], "a pair on the only edge has a sequence of its own"
    master.expect_log("alpha")
    for node in nodes:
        assert "beta" in node.expect_log("alpha")
