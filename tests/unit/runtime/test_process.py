"""A long computation runs in a process of its own, which never outlives the call."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from ringfold.runtime.process import run_in_subprocess

MODULE = "ringfold.topology.moonshot"
SLOW = """
import pathlib, os, sys, time
pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
sys.stdin.read()
time.sleep(600)
"""


@pytest.fixture
def slow_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that never answers; the file has its process id once it runs."""
    tmp_path.joinpath("slow_program.py").write_text(SLOW)
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return pid_file


def wait_until_it_runs(pid_file: Path) -> None:
    deadline = time.monotonic() + 30
    while not pid_file.exists() or not pid_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid_file: Path) -> bool:
    return not Path("/proc", pid_file.read_text()).exists()


def test_the_answer_comes_back() -> None:
    question = {"members": [1, 2, 3], "rates": [[1, 2, 5.0], [2, 3, 5.0], [3, 1, 5.0]]}
    output = asyncio.run(run_in_subprocess(MODULE, json.dumps(question).encode(), 60))
    assert output is not None
    assert json.loads(output)["solution"]["ring"] == [1, 2, 3]


def test_a_program_that_fails_has_no_answer() -> None:
    assert asyncio.run(run_in_subprocess(MODULE, b"nonsense", 60)) is None


def test_a_program_that_takes_too_long_is_ended(slow_program: Path) -> None:
    async def call() -> bytes | None:
        task = asyncio.create_task(run_in_subprocess("slow_program", b"", 2.0))
        return await task

    assert asyncio.run(call()) is None
    assert not slow_program.exists() or is_gone(slow_program)


def test_cancelling_the_call_ends_the_program(slow_program: Path) -> None:
    async def call() -> None:
        task = asyncio.create_task(run_in_subprocess("slow_program", b"", 60))
        await asyncio.to_thread(wait_until_it_runs, slow_program)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(call())
    assert is_gone(slow_program)
