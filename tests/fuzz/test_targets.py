"""The fuzz targets with a fixed set of scripts, and everything that they ever found.

`make fuzz` draws fresh ones for a given time; what it finds is written to `corpus/`, and is run here from then on.
"""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.targets import CORPUS, TARGETS, fault_of, keep, name_of, shrunk

SCRIPTS = {"parsers": 60, "master": 60, "peer": 200, "agent": 60}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", TARGETS)
def test_no_script_raises(target: str) -> None:
    for seed in range(SCRIPTS[target]):
        script, error = TARGETS[target].drawn(Random(seed))
        assert error is None, f"seed {seed} of {target}: {name_of(target, error)}: {error!r} at {script[-1]}"[:2_000]


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_stays_fixed(path: Path) -> None:
    found = json.loads(path.read_text())
    if found["target"] != "property":
        TARGETS[found["target"]].replayed(found["script"])
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=fuzz"]
    command += [f"--hypothesis-seed={found['seed']}", found["test"]]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stdout[-3_000:]


def test_a_finding_is_minimised_and_named_after_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is planted: the master's status fails while three peers are there."""
    monkeypatch.setattr("tests.fuzz.targets.CORPUS", tmp_path)
    monkeypatch.setattr("ringfold.master.status._changes", lambda *_: 1 // 0)
    script, error = TARGETS["master"].drawn(Random(1))
    assert isinstance(error, ZeroDivisionError)
    path = keep("master", script, error)
    kept = json.loads(path.read_text())
    assert kept["target"] == "master"
    assert len(kept["script"]) == 1
    assert isinstance(fault_of("master", kept["script"]), ZeroDivisionError)
    assert shrunk("master", kept["script"], name_of("master", error)) == kept["script"]


def test_the_exit_status_of_the_runner_shows_whether_it_found_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.fuzz.targets.CORPUS", tmp_path)
    monkeypatch.setattr("tests.fuzz.__main__.ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["fuzz", "--minutes", "0.01", "--only", "agent", "--seed", "1"])
    assert main() == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("ringfold.agent.registry.canonical", lambda text: 1 // 0)
    assert main() == 1
    [kept] = tmp_path.iterdir()
    assert kept.name.startswith("agent-ZeroDivisionError-")
    assert "1 found" in capsys.readouterr().err
