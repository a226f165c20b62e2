"""A soak of some seconds, its watchdog, and its end on Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringfold.tools.cluster import LocalCluster
from ringfold.tools.soak import iterations, peers
from ringfold.tools.soak.checks import Hang, left_by, of_sessions
from ringfold.tools.soak.iterations import IterationSoak, checks
from ringfold.tools.soak.peers import PeerSoak
from ringfold.tools.stores import missing


def soak(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ringfold.cli", "soak", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_short_soak_keeps_every_promise() -> None:
    """With this seed the leader is killed while a peer is missing, and none is killed with it: that would take 10 s."""
    process = soak("--minutes", "0.1", "--peers", "4", "--every-s", "0.5", "--state", "4M", "--seed", "3", "--json")
    reported, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, reported + complaints
    shown = json.loads(reported)
    assert shown["tally"]["kills"] + shown["tally"]["freezes"] >= 2
    assert shown["tally"]["masters_killed"] >= 1
    assert all(check["kept"] for check in shown["checks"])


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    # The files of the cluster go where this test can see them.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "ringfold.cli", "soak", "--peers", "4", "--state", "1M"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        while not list(tmp_path.glob("rf-cluster-*/peer-0.log")):
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in complaints
    assert not list(tmp_path.iterdir())


def test_a_peer_that_hangs_is_named_with_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog does not know that this peer was frozen by the test, and the master does not evict."""
    monkeypatch.setattr(peers, "HANG_S", 2.0)
    monkeypatch.setattr(peers, "LIVENESS", {"evict_after_ms": 600_000})
    with LocalCluster() as cluster:
        plot = PeerSoak(cluster, 4, 1_000, 1, 1 << 20)

        def freeze_once(seconds: float) -> None:
            if plot.tally.step > 3:
                os.kill(cluster.pid("veteran-0"), signal.SIGSTOP)

        with pytest.raises(Hang) as raised:
            plot.direct(1.0, freeze_once)
        assert "hangs: no step for 2 s" in raised.value.text
        assert raised.value.status is not None
        assert "veteran-" in raised.value.name + raised.value.text
    assert not of_sessions(plot.pids)


def test_a_short_soak_of_iterations_keeps_every_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "MAX_AWAY_S", 1.0)
    kinds = [kind for kind in ("sqlite", "redis") if not missing(kind)]
    with LocalCluster() as cluster:
        plot = IterationSoak(cluster, kinds, 3, 0.1, 1)
        outcome = plot.direct(0.02)
    outcome.left_behind += left_by(cluster, plot.pids, set())
    assert sum(outcome.faults.values()) >= 2
    assert [check for check in checks(outcome) if not check.kept] == []


def test_a_rank_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog does not know that this one was frozen by the test."""
    with LocalCluster() as cluster:
        plot = IterationSoak(cluster, ["sqlite"], 3, 1_000, 1)

        def freeze_soon(seconds: float) -> None:
            monkeypatch.setattr(iterations, "HANG_S", 1.5)
            if seconds > 0.5:
                os.kill(cluster.pid("sqlite-rank-0.1"), signal.SIGSTOP)

        with pytest.raises(Hang) as raised:
            plot.direct(1.0, freeze_soon)
    assert "hangs: no iteration for 2 s" in raised.value.text
    assert "sqlite-rank-0.1" in raised.value.name + raised.value.text
    assert not of_sessions(plot.pids)
