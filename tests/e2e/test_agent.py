"""The agent as a process: it is killed, started again, queried and configured from the command line."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from typer.testing import CliRunner

from ringfold import _native
from ringfold.agent.client import AgentClient, AgentConsole
from ringfold.cli.agent import app
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.local import LocalConnection
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    HINTS_NAME,
    SOCKET_NAME,
    AgentHello,
    AgentRefused,
    Flow,
    FlowList,
    FromAgent,
    ListFlows,
    Register,
    Registered,
    SetShares,
    ToAgent,
    agent_frame,
    decode_from_agent,
)
from ringfold.wire.frames import FrameReader

PATHS = [("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2")]
WAIT_S = 60.0
MAIN = [sys.executable, "-c", "from ringfold.cli import main; main()", "agent"]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline_ns, pause = monotonic_ns() + int(WAIT_S * 1e9), threads.Event()
    while not holds():
        assert monotonic_ns() < deadline_ns, what
        pause.wait(0.01)


@contextmanager
def agent(directory: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A running agent; ended in any case."""
    command = [*MAIN, "--dir", str(directory), "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving at ")
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(*arguments: object) -> str:
    """What `ringfold agent ...` prints. The command runs in this process: only the agent needs one of its own."""
    reported = CliRunner().invoke(
        app, [str(word) for word in arguments], env={"COLUMNS": "200"}, catch_exceptions=False
    )
    assert reported.exit_code == 0, reported.output
    return reported.output


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "agent"


def test_flows_outlive_a_killed_agent(directory: Path) -> None:
    """SIGKILL leaves its socket and its table; the next one takes both over, and clients need not do anything."""
    telemetry = ("--telemetry", f"127.0.0.1:{free_port()}")
    with AgentClient([directory], "job") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        with agent(directory, "--policy", "static:1", *telemetry) as first:
            assert client.wait(lambda each: each.place(flow) is not None, WAIT_S)
            old, inode = client.place(flow), (directory / HINTS_NAME).stat().st_ino
            assert old is not None
            reader = _native.HintReader(str(directory / HINTS_NAME))
            assert reader.read(*old) == ([0, 65535], 0)
            first.send_signal(signal.SIGKILL)
            assert client.wait(lambda each: each.place(flow) is None, WAIT_S)
        until(lambda: reader.look() == "stale", "a dead agent's hints are still taken for fresh")
        with agent(directory, "--policy", "static:0", *telemetry):
            assert client.wait(lambda each: each.place(flow) is not None, WAIT_S)
            new = client.place(flow)
            assert new is not None
            until(lambda: reader.look() == "fresh", "the new agent's hints are not seen")
            assert (reader.read(*old), reader.read(*new)) == (None, ([65535, 0], 0))
            assert (directory / HINTS_NAME).stat().st_ino == inode


def test_a_killed_clients_flows_are_freed(directory: Path) -> None:
    program = (
        "import sys, pathlib; from ringfold.agent.client import AgentClient\n"
        "client = AgentClient([pathlib.Path(sys.argv[1])], 'victim')\n"
        f"flow = client.register('10.0.0.1', '10.0.0.2', {PATHS!r})\n"
        "client.wait(lambda each: each.place(flow) is not None, 60)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with agent(directory, "--telemetry", f"127.0.0.1:{free_port()}"):
        arguments = [sys.executable, "-c", program, str(directory)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
            try:
                assert victim.stdout is not None
                assert victim.stdout.readline() == "ready\n"
                for order in (("status", "--json", "--dir", directory), ("--dir", directory, "status", "--json")):
                    assert json.loads(ask(*order))["listed"][0]["pid"] == victim.pid
            finally:
                victim.kill()
        with AgentConsole([directory]) as console:
            until(lambda: not console.status().flows, "the flow is still there")


def test_it_is_steered_from_the_command_line_and_ends_cleanly(directory: Path) -> None:
    port = free_port()
    with (
        agent(directory, "--telemetry", f"127.0.0.1:{port}") as process,
        AgentClient([directory], "job") as client,
    ):
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        assert client.wait(lambda each: each.place(flow) is not None, WAIT_S)
        place = client.place(flow)
        assert place is not None
        reader = _native.HintReader(str(directory / HINTS_NAME))
        assert "25 %" in ask("set", "10.0.0.1,10.0.0.2", "--share", "0.25", "--dir", directory)
        assert reader.read(*place) == ([49151, 16384], 0)
        ask("set", "1", "--share", "auto", "--dir", directory)
        assert reader.read(*place) is None

        def held() -> str:
            """The agent's state of a path that was just reported as congested: it lasts some milliseconds."""
            ask("inject", "10.1.0.1", "10.1.0.2", "--path", 1, "--congestion", 250, "--to", f"127.0.0.1:{port}")
            return ask("status", "--dir", directory) if reader.read(*place) == ([65535, 0], 2) else ""

        until(lambda: "held by backpressure" in held(), "backpressure does not show")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert reader.look() == "stale"
    assert os.listdir(directory) == [HINTS_NAME]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_registers_and_reads_and_can_do_no_more() -> None:
    """Of an agent that serves all: hints are his to read, not to write, and shares are not his to fix."""
    with tempfile.TemporaryDirectory(prefix="ringfold-agent-") as made:
        os.chmod(made, 0o755)
        directory = Path(made) / "agent"
        with agent(directory, "--shared", "--policy", "static:1", "--telemetry", f"127.0.0.1:{free_port()}"):
            child = os.fork()
            if child == 0:
                try:
                    os.setresuid(12_345, 12_345, 12_345)
                    _as_another_user(directory)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _as_another_user(directory: Path) -> None:
    connection, reader = LocalConnection(directory / SOCKET_NAME), FrameReader(1 << 20)

    def ask_agent(message: ToAgent) -> FromAgent:
        connection.send(agent_frame(message))
        while not (answers := [decode_from_agent(*each) for each in reader.feed(connection.wait(WAIT_S) or b"")]):
            pass
        return answers[0]

    ask_agent(AgentHello(AGENT_PROTOCOL, "guest"))
    flow = Flow(1, "10.0.0.1", "10.0.0.2", tuple(PATHS))
    registered = ask_agent(Register(1, flow))
    assert isinstance(registered, Registered)
    hints = _native.HintReader(str(directory / HINTS_NAME))
    assert hints.read(registered.slot, registered.generation) == ([0, 65535], 0)
    refused = ask_agent(SetShares(2, "10.0.0.1", "10.0.0.2", (0.5, 0.5)))
    assert isinstance(refused, AgentRefused)
    assert refused.kind == "forbidden"
    listed = ask_agent(ListFlows(3))
    assert isinstance(listed, FlowList)
    assert [each.uid for each in listed.flows] == [12_345]
    with pytest.raises(PermissionError):
        (directory / HINTS_NAME).open("r+b")
    with pytest.raises(RuntimeError, match="Permission denied"):
        _native.HintWriter(str(directory / HINTS_NAME), 1, 0o644)
    with pytest.raises(PermissionError):
        (directory / SOCKET_NAME).unlink()
