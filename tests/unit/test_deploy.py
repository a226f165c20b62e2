"""What is in deploy/: the unit of the agent is one that systemd understands, and starts what there is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from ringfold.cli.agent import app

UNIT = Path(__file__).parents[2] / "deploy" / "ringfold-agent.service"


def values(name: str) -> list[str]:
    """What the unit says of one directive, each time that it does."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_no_fault_with_the_unit() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(UNIT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_unit_starts_the_agent_with_options_that_it_has() -> None:
    words = values("ExecStart")[0].split()
    assert words[:3] == ["/usr/bin/env", "ringfold", "agent"]
    chosen = get_command(app).make_context("agent", words[3:]).params
    assert (str(chosen["directory"]), chosen["shared"]) == ("/run/ringfold", True)


def test_the_unit_makes_the_directory_that_clients_look_at_and_keeps_it_over_a_restart() -> None:
    assert values("RuntimeDirectory") == ["ringfold"]
    assert values("RuntimeDirectoryMode") == ["0755"]
    assert values("RuntimeDirectoryPreserve") == ["restart"]
    assert values("Restart") == ["always"]


def test_the_agent_has_none_of_roots_powers() -> None:
    assert values("CapabilityBoundingSet") == [""]
