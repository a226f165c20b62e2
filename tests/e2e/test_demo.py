"""The demo with real processes: it keeps its promises, and it leaves nothing behind when it is interrupted."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import Recorded, opened_browser

from ringfold.observe.records import read_directory
from ringfold.observe.summary import summarise

LIMIT_S = 90.0
FREE = ("begun", "lost", "joined", "left", "ended")
"""Incidents whose number differs from run to run: a late kill is repeated, and the first peer may leave alone."""
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


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the first demo records its run."""
    return tmp_path_factory.mktemp("demo") / "events"


def test_the_demo_keeps_its_promises(environment: dict[str, str], tmp_path: Path, events: Path) -> None:
    command = [*DEMO, "--events", str(events)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
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
    assert f"\nreport        {events / 'report.html'}\n" in ended.stdout
    assert f"\ntrace         {events / 'trace.json.gz'} " in ended.stdout
    dashboard = "dashboard at http://127.0.0.1:" if find_spec("aiohttp") else "pip install 'ringfold[dashboard]'"
    assert dashboard in ended.stdout
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_report_of_the_demo_tells_what_the_demo_did(events: Path) -> None:
    """The disturbances are in the records, with their reasons and costs, and nothing else is."""
    summary = summarise(read_directory(events))
    trained_s = summary.first_step_s or 0.0
    kinds = [one.kind for one in summary.incidents if one.at_s > trained_s and one.kind not in FREE]
    assert kinds.count("evicted") >= 1
    assert kinds.count("failover") >= 1
    assert set(kinds) == {"evicted", "failover"}
    lost = [one for one in summary.incidents if one.kind == "lost"]
    assert lost, "the killed peer"
    assert all(one.aborted_ops or one.next_commit_s is not None for one in lost)
    assert summary.ended == "finished"
    assert (summary.first_step, summary.last_step) == (0, 239)
    assert summary.costs.lost_steps == 0
    assert summary.costs.paused_s is not None
    # The frozen peer was silent for 1.5 s before it was evicted.
    assert summary.costs.paused_s > 1.3
    assert any(series.name == "loss" and series.points for series in summary.logged)


def test_the_report_of_the_demo_fits_into_a_browser(events: Path) -> None:
    """From a file, on a desk and on a phone, light and dark: no errors, no sideways scrolling, one chart of each."""
    with opened_browser() as browser:
        for width, scheme in ((1_280, "light"), (1_280, "dark"), (390, "light")):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = Recorded(context)
            page.page.goto((events / "report.html").as_uri())
            assert page.page.evaluate("document.documentElement.scrollWidth") <= width
            shown = "[...document.querySelectorAll('svg')].filter(one => one.getClientRects().length).length"
            assert page.page.evaluate(shown) == page.page.locator("svg").count() / 2
            assert not page.errors
            assert [url for url in page.requests if not url.startswith("file:")] == []
            context.close()


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
        until = time.monotonic() + LIMIT_S
        while b"step" not in (line := demo.stdout.readline()):
            assert line, "the demo has ended"
            assert time.monotonic() < until, "no progress"
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
