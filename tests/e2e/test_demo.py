"""The demo with real processes: it keeps its promises, and it leaves nothing behind when it is interrupted."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 90.0
DEMO = [sys.executable, "-m", "ringfold.cli", "demo", "--fast", "--peers", "3"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """All temporary files go to a folder of the test, and the demo's processes are recognised by their environment."""
    return {**os.environ, "TMPDIR": str(tmp_path), "DEMO_OF": str(tmp_path), "COLUMNS": "120"}


def processes_of(mark: Path) -> list[int]:
    """Every living process with the mark in its environment, zombies aside."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"DEMO_OF={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue  # it ended meanwhile, or belongs to another user
    return found


def test_the_demo_keeps_its_promises(environment: dict[str, str], tmp_path: Path) -> None:
    ended = subprocess.run(DEMO, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "killed inside the all-reduce of step" in ended.stdout
    assert "sees that it was evicted" in ended.stdout
    assert "that was inside its all-reduce; started again -> ring of" in ended.stdout
    happened, promised = ended.stdout.split("What happened")[1].split("What was promised")
    for row in ("aborts", "retries", "recovery from SIGKILL", "recovery from SIGSTOP", "joined", "rejoined"):
        assert f"\n{row} " in happened
    assert "evictions              peer" in happened
    assert "\nskipped " in happened
    assert promised.count("\nok ") == 8
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_demo_speaks_json(environment: dict[str, str]) -> None:
    command = [*DEMO, "--json", "--seed", "2", "--steps", "160"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcome = json.loads(ended.stdout)
    assert all(check["kept"] for check in outcome["checks"])
    assert len(outcome["digests"]) == 3
    assert len(set(outcome["digests"].values())) == 1
    assert outcome["aborts"] >= 1
    assert [fault["signal"] for fault in outcome["faults"]][-1] == "SIGSTOP"
    assert outcome["evictions"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_behind(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        assert demo.stdout is not None
        assert select.select([demo.stdout], [], [], LIMIT_S)[0], "no progress"
        assert b"step" in demo.stdout.readline()
        assert len(processes_of(tmp_path)) >= 5  # the parent, a master, three peers
        demo.send_signal(number)
        reported = demo.stdout.read().decode()
        assert demo.wait(LIMIT_S) == code, reported
    assert "Traceback" not in reported
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_demo_takes_its_processes_along(environment: dict[str, str], tmp_path: Path) -> None:
    """SIGKILL leaves the parent no chance to tidy up; the kernel does it."""
    with subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        assert demo.stdout is not None
        assert select.select([demo.stdout], [], [], LIMIT_S)[0], "no progress"
        demo.kill()
    deadline = time.monotonic() + 10
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        pass
    assert left == []
