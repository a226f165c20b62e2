"""`ringfold bench dashboard`: its arithmetic, its loads, and that nothing is left of a run that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from ringfold.observe.records import read_directory
from ringfold.tools.bench import app, dashboard, targets
from ringfold.tools.bench.master_worker import ControlPeer, ControlPeers
from ringfold.tools.bench.report import Row
from ringfold.wire.events import OpEnded

MS, S = 1_000_000, 1_000_000_000
WAIT_S = 30.0
NOTHING, _, PAGES, EVERYTHING = dashboard.loads(100)


def turn(op_ms: float, ops: int = 10, *, idle_cpu_ms: int = 0, scrapes: int = 0) -> dashboard.Turn:
    """A turn of one second of ops, and one without."""
    peers = {"durations_ns": [int(op_ms * MS)] * ops, "ops_ns": S, "ops_cpu_ns": 300 * MS}
    peers |= {"idle_ns": S, "idle_cpu_ns": idle_cpu_ms * MS}
    observers = {"messages": 400, "bytes": 204_800, "scrapes": scrapes, "scraped_bytes": 1024}
    return dashboard.Turn(peers, observers, 20 * MS, 2048)


def test_a_machine_that_gets_slower_changes_no_ratio() -> None:
    turns = {NOTHING: [turn(1), turn(1), turn(5)], EVERYTHING: [turn(1.02), turn(1.1), turn(5)]}
    plain, everything = dashboard.rows(64, turns)
    assert (plain["median_ratio"], plain["lowest_ratio"], plain["highest_ratio"]) == (1, 1, 1)
    assert everything["median_ratio"] == pytest.approx(1.02)
    assert everything["lowest_ratio"] == pytest.approx(1)
    assert everything["highest_ratio"] == pytest.approx(1.1)


def test_shares_and_rates_are_those_of_all_turns() -> None:
    turns = {NOTHING: [turn(1), turn(1)], EVERYTHING: [turn(1, idle_cpu_ms=40, scrapes=4), turn(1, idle_cpu_ms=60)]}
    _, row = dashboard.rows(64, turns)
    assert row["idle_master_share"] == pytest.approx(0.05)
    assert row["ops_master_share"] == pytest.approx(0.3)
    assert row["dashboard_share"] == pytest.approx(0.01)
    assert (row["messages_per_s"], row["kib_per_s"]) == (2, 1)
    assert (row["scrapes"], row["scraped_kib"], row["events_kib"]) == (4, 2, 4)


def test_every_load_is_once_the_first_of_a_round() -> None:
    every = dashboard.loads(100)
    rounds = [dashboard.in_turn(every, number) for number in range(len(every))]
    assert [loads[0] for loads in rounds] == list(every)
    assert all(set(loads) == set(every) for loads in rounds)


def test_the_targets_are_about_everything_with_100_pages_and_64_peers() -> None:
    def verdicts(**changed: object) -> list[str]:
        row = {"load": "everything", "peers": 64, "pages": 100, "median_ratio": 1.05, "idle_master_share": 0.1}
        return [found.verdict for found in targets.check("dashboard", [cast(Row, row | changed)], {}, 2)]

    assert verdicts() == ["hit", "miss"]
    assert verdicts(median_ratio=1.06, idle_master_share=0.09) == ["miss", "hit"]
    assert not verdicts(load="pages")
    assert not verdicts(peers=32)
    assert not verdicts(pages=99)


def test_each_load_is_what_it_says() -> None:
    """Real processes; the figures of a run this short are only looked at for being there."""
    pytest.importorskip("aiohttp")
    arguments = ["--pages", "3", "--peers", "4", "--rounds", "1", "--min-time", "0.6", "--json"]
    ended = CliRunner().invoke(app, ["dashboard", *arguments])
    assert ended.exit_code == 0, ended.output
    rows = {row["load"]: row for row in json.loads(ended.stdout)["figures"]}
    assert list(rows) == ["nothing", "dashboard", "pages", "everything"]
    assert all(row["median_us"] > 0 for row in rows.values())
    assert [name for name, row in rows.items() if row["messages_per_s"]] == ["pages", "everything"]
    assert [name for name, row in rows.items() if row["scrapes"]] == ["everything"]
    assert [name for name, row in rows.items() if row["events_kib"]] == ["everything"]
    assert [row["pages"] for row in rows.values()] == [0, 0, 3, 3]


def test_the_ops_of_a_peer_are_recorded_as_events(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    from ringfold.tools.bench.dashboard_worker import OpRecord

    peer = ControlPeer(cast(ControlPeers, None), 0)
    peer.peer, peer.epoch = 7, 3
    record = OpRecord(tmp_path, peer)
    record.ended(20, 1_000, 2_000)
    record.close()
    [read] = read_directory(tmp_path)
    [event] = [event for event in read.events() if isinstance(event.notice, OpEnded)]
    assert (event.stamp.peer, event.stamp.at) == (7, 2_000)
    assert isinstance(event.notice, OpEnded)
    assert (event.notice.sequence, event.notice.epoch, event.notice.outcome) == (20, 3, "committed")


INTERRUPTED = """
import signal
from ringfold.tools.bench import dashboard, report
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
with report.guarded(as_json=True):
    dashboard.measure(4, dashboard.loads(2)[-1], 60.0)
"""


def test_nothing_is_left_of_a_run_that_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C while everything is there: no process of it runs on, and its files are gone."""
    pytest.importorskip("aiohttp")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([sys.executable, "-c", INTERRUPTED], env=environment, stderr=subprocess.PIPE, text=True)
    with bench:
        deadline = time.monotonic() + WAIT_S
        while not list(tmp_path.glob("rf-cluster-*/events/peer-*")) and time.monotonic() < deadline:
            assert bench.poll() is None
            time.sleep(0.01)
        assert len(processes_of(tmp_path)) > 4
        bench.send_signal(signal.SIGINT)
        try:
            _, printed = bench.communicate(timeout=WAIT_S)
        finally:
            bench.kill()
    assert "interrupted; all child processes are ended" in printed
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def processes_of(directory: Path) -> list[int]:
    """Processes that were started with this directory for temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if f"TMPDIR={directory}".encode() in variables:
            found.append(int(path.parent.name))
    return found
