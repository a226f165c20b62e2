"""Probing without a run: real processes of `ringfold probe --nodes`, what they write down, and `rf.Prober`."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

import ringfold as rf
from ringfold.errors import ConfigError

DEADLINE_S = 120.0
OFFSETS_NS = {"alpha": 0, "beta": 7_000_000, "gamma": -3_000_000}


@pytest.fixture
def nodes() -> dict[str, str]:
    return {name: f"127.0.0.1:{port}" for name, port in zip(OFFSETS_NS, free_ports(3), strict=True)}


@pytest.fixture
def file(nodes: dict[str, str], tmp_path: Path) -> Path:
    path = tmp_path / "nodes.toml"
    path.write_text("[nodes]\n" + "".join(f'{name} = "{address}"\n' for name, address in nodes.items()))
    return path


def ringfold(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from ringfold.cli import main; main()", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    return out


@pytest.fixture
def logs(file: Path, tmp_path: Path) -> Iterator[Path]:
    """What three nodes wrote. They may end at different times, so some windows of the last to end are half empty."""
    where = tmp_path / "logs"
    arguments = ("probe", "--nodes", file, "--windows", 3, "--window-ms", 700, "--export", where, "--points", "--json")
    running = [ringfold(*arguments, "--me", name, "--offset-ns", offset) for name, offset in OFFSETS_NS.items()]
    try:
        for process in running:
            output(process)
        yield where
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_nodes_of_a_file_find_each_others_clocks(logs: Path) -> None:
    report = json.loads(output(ringfold("probe", "--report", logs, "--json")))
    offsets = {node["name"]: node["offset_ns"] for node in report["nodes"]}
    assert set(offsets) == set(OFFSETS_NS)
    for name, offset in OFFSETS_NS.items():
        expected = offset - OFFSETS_NS["alpha"]
        assert abs(offsets[name] - offsets["alpha"] - expected) < 50_000, offsets


def test_a_recorded_log_is_fitted_again(logs: Path) -> None:
    log = min(logs.glob("*.jsonl"))
    refits = json.loads(output(ringfold("probe", "replay", log, "--estimator", "hull", "--json")))["refits"]
    fitted = [refit["new"] for refit in refits if not refit["new"].get("refused")]
    assert fitted
    assert {fit["estimator"] for fit in fitted} == {"hull"}


def test_a_wrong_name_lists_the_nodes(file: Path) -> None:
    process = ringfold("probe", "--nodes", file, "--me", "delta")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "the nodes are alpha, beta, gamma" in " ".join(err.split())


def first_round_of(process: subprocess.Popen[str], count: int) -> dict[str, Any]:
    """The first round that a process prints in which so many nodes have a clock and nobody is missing."""
    assert process.stdout is not None
    deadline = threading.Timer(DEADLINE_S, process.kill)
    deadline.start()
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                summary: dict[str, Any] = json.loads("".join(lines))
                lines.clear()
                if len(summary["nodes"]) == count and not summary.get("missing"):
                    return summary
    finally:
        deadline.cancel()
    raise AssertionError(f"no such round within {DEADLINE_S:g} s")


def test_the_chosen_node_hosts_the_master(file: Path) -> None:
    """Started in any order. The root prints the rounds of all; beta is not the first by name."""
    arguments = ("probe", "--nodes", file, "--rounds", "master", "--root", "beta", "--window-ms", 500, "--json")
    running = {name: ringfold(*arguments, "--me", name) for name in ("alpha", "gamma", "beta")}
    try:
        whole = first_round_of(running["beta"], 3)
        assert sorted(whole["names"].values()) == ["alpha", "beta", "gamma"]
        assert len(whole["participants"]) == 3
        running["beta"].terminate()
        output(running["beta"])
        for name in ("alpha", "gamma"):
            assert running[name].poll() is None, "it outlives the master"
            running[name].terminate()
            assert output(running[name]) == "", "only the root has results"
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def test_nodes_of_a_hosted_master_have_the_addresses_of_the_file(tmp_path: Path) -> None:
    """Two nodes of one machine at the same port of different addresses; the third one only listens, and ends too."""
    port, third = free_ports(2)
    path = tmp_path / "nodes.toml"
    addresses = {"alpha": f"127.0.0.1:{port}", "beta": f"127.0.0.2:{port}", "gamma": f"127.0.0.3:{third}"}
    lines = [f'{name} = "{address}"' for name, address in addresses.items()]
    path.write_text("\n".join(['listeners = ["gamma"]', "[nodes]", *lines]))
    arguments = ("probe", "--nodes", path, "--rounds", "master", "--window-ms", 500, "--windows", 3)
    where = tmp_path / "logs"
    others = [ringfold(*arguments, "--me", name, "--export", where) for name in ("gamma", "beta")]
    root = ringfold(*arguments, "--me", "alpha", "--json")
    try:
        whole = first_round_of(root, 3)
        assert sorted(whole["names"].values()) == ["alpha", "beta", "gamma"]
        for process in (root, *others):
            output(process)
    finally:
        for process in (root, *others):
            process.kill()
            process.communicate()


def test_a_root_needs_nodes_that_calculate_together(file: Path) -> None:
    process = ringfold("probe", "--nodes", file, "--me", "alpha", "--root", "beta")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "--rounds gloo or --rounds master" in " ".join(err.split())


def test_a_prober_measures_in_a_program(nodes: dict[str, str]) -> None:
    with (
        rf.Prober(nodes, me="alpha") as alpha,
        rf.Prober(nodes, me="beta", offset_ns=5_000_000),
        rf.Prober(nodes, me="gamma"),
    ):
        window = alpha.window(0.7)
    fits = {alpha.names[fit.dst]: fit for fit in window.fits}
    assert set(fits) == {"beta", "gamma"}
    assert fits["beta"].refused == ""
    assert abs(fits["beta"].beta_ns - 5_000_000) < 50_000
    assert fits["beta"].delay_min_ns > 0


def test_a_listener_only_answers(nodes: dict[str, str]) -> None:
    with (
        rf.Prober(nodes, me="alpha", listeners=["alpha"]) as alpha,
        rf.Prober(nodes, me="beta", listeners=["alpha"]) as beta,
        rf.Prober(nodes, me="gamma", listeners=["alpha"]),
    ):
        assert alpha.is_listener
        window = beta.window(0.7)
        assert alpha.window(0.01).fits == []
    to_alpha = [fit for fit in window.fits if fit.dst == alpha.node]
    assert [fit.refused for fit in to_alpha] == [""]


def test_a_port_that_is_taken_is_named(nodes: dict[str, str]) -> None:
    with rf.Prober(nodes, me="alpha"), pytest.raises(ConfigError, match="the port is taken"):
        rf.Prober(nodes, me="alpha")


def test_nodes_meet_through_gloo(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    where = tmp_path / "logs"
    arguments = ("probe", "--nodes", file, "--rounds", "gloo", "--windows", 2, "--window-ms", 700, "--export", where)
    running = [ringfold(*arguments, "--me", name, "--offset-ns", offset) for name, offset in OFFSETS_NS.items()]
    try:
        for process in running:
            output(process)
    finally:
        for process in running:
            process.kill()
            process.wait()
    rounds = [json.loads(line) for line in (where / "run.jsonl").read_text().splitlines()]
    assert [line["round_id"] for line in rounds if line["kind"] == "round"] == [[1, 1], [1, 2]]
