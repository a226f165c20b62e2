"""A client of the agent in C, with the header and nothing else: real agents that are killed, restarted and replaced."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from test_agent import agent, ask, until

from ringfold.agent.client import AgentClient, AgentConsole
from ringfold.runtime.local import LocalConnection
from ringfold.wire.agent import HINTS_NAME, SOCKET_NAME, AgentHello, AgentRefused, AgentWelcome
from ringfold.wire.agent_fixed import decode_fixed_response, fixed_request
from ringfold.wire.frames import FrameKind, FrameReader, frame

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
FLOW = "10.0.0.1 10.0.0.2 10.0.0.1,10.0.0.2 10.1.0.1,10.1.0.2"
WAIT_MS = 60_000
STALE = "4"
WAITING, PLACED, OVER_LIMIT = "1", "3", "5"


def compiler(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no {' or '.join(names)}")
    return found


@pytest.fixture(scope="module", params=["c99", "c++11"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client, as C and as C++."""
    built = tmp_path_factory.mktemp("c") / "agent_client"
    language = ["-x", "c++"] if request.param == "c++11" else []
    compile_with = compiler("c++", "g++", "clang++") if language else compiler("cc", "gcc", "clang")
    source = str(ROOT / "native" / "tests" / "agent_client.c")
    subprocess.run([compile_with, f"-std={request.param}", *FLAGS, *language, source, "-o", str(built)], check=True)
    return built


class Client:
    """The C program, and its answers."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def __call__(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the C client ended at {command!r}: {self.process.wait(10)}"
        return answer.rstrip("\n")

    def until(self, command: str, wanted: Callable[[str], bool] | str) -> str:
        """Poll, and repeat a command until its answer is the wanted one."""
        answer = ""

        def holds() -> bool:
            nonlocal answer
            self("poll")
            answer = self(command)
            return answer == wanted if isinstance(wanted, str) else wanted(answer)

        try:
            until(holds, f"{command} does not lead to {wanted}")
        except AssertionError as error:
            raise AssertionError(f"{error}; the last answer is {answer!r}") from None
        return answer


@contextmanager
def client(program: Path, directory: Path, name: str = "a transport") -> Iterator[Client]:
    pipe = subprocess.PIPE
    with subprocess.Popen([str(program), str(directory), name], text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield Client(process)
        finally:
            process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "agent"


@pytest.fixture
def options() -> list[str]:
    return ["--telemetry", f"127.0.0.1:{free_port()}"]


def test_it_registers_reports_renews_reads_and_removes(program: Path, directory: Path, options: list[str]) -> None:
    with agent(directory, "--policy", "static:0.25", *options), client(program, directory, "größer" * 20) as c:
        assert c(f"register {FLOW}") == "0"
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        assert c("hint 0") == "2 0 49151 16384"
        assert c("split 1000 100 0") == "75 25"
        c("report 0 25000000 5000000")
        c("renew 0")
        c.until("counts", "1 0 0")
        with AgentConsole([directory]) as console:
            until(lambda: bool(console.flows()[0].bytes_per_s), "the report did not arrive")
            [listed] = console.flows()
            assert listed.bytes_per_s == (25_000_000, 5_000_000)
            assert (listed.srtt_us, listed.min_rtt_us) == ((1, 2), (1, 2))
            assert (listed.pid, listed.client) == (c.process.pid, ("größer" * 20).encode()[:63].decode(errors="ignore"))
            assert console.status().counts["renewed"] >= 1
            assert c("remove 0") == "0"
            c("poll")
            until(lambda: not console.flows(), "the flow is still there")
            assert not console.status().refused
        assert c("hint 0") == "local"


def test_its_flows_share_slots_with_those_of_other_programs(program: Path, directory: Path, options: list[str]) -> None:
    """Any form of an address is the same address; sixteen paths and link-local addresses are registered as well."""
    with agent(directory, *options), client(program, directory) as c, AgentClient([directory], "other") as other:
        paths = [("::ffff:10.0.0.1", "10.0.0.2"), ("fe80::1%eth0", "2001:DB8::2")]
        flow = other.register("10.0.0.1", "10.0.0.2", paths)
        c("register 10.0.0.1 10.0.0.2 10.0.0.1,::ffff:10.0.0.2 fe80::1%eth0,2001:db8:0::2")
        many = [(f"10.0.{path}.1", f"10.0.{path}.2") for path in range(16)]
        wide = other.register("10.0.0.1", "10.0.0.2", many)
        c("register 10.0.0.1 10.0.0.2 " + " ".join(",".join(path) for path in many))
        assert other.wait(lambda each: None not in (each.place(flow), each.place(wide)), 60)
        for number, theirs in enumerate((flow, wide)):
            assert c(f"wait {number} {WAIT_MS}") == PLACED
            assert c(f"state {number}") == "3 {} {}".format(*(other.place(theirs) or ()))
        assert c("hint 1") == "local"
        assert c("register 10.0.0.1 nonsense 10.0.0.1,10.0.0.2 10.1.0.1,10.1.0.2") == "-1"
        assert c("register 10.0.0.1 10.0.0.2 10.0.0.1,10.0.0.2") == "-1"
        assert c("remove 17") == "-1"


def test_it_outlives_agents_that_are_killed_restarted_and_replaced(
    program: Path, directory: Path, options: list[str]
) -> None:
    with client(program, directory) as c:
        assert c(f"register {FLOW}") == "0"
        assert c("wait 0 0") == WAITING
        with agent(directory, "--policy", "static:1", *options) as first:
            assert c(f"wait 0 {WAIT_MS}") == PLACED
            assert c("hint 0") == "2 0 0 65535"
            place = c("state 0")
            first.send_signal(signal.SIGKILL)
            first.wait()
            c.until("state 0", lambda answer: answer.startswith(WAITING))
            assert c("hint 0") == "local"
        with agent(directory, "--policy", "static:0", *options) as second:
            c.until("hint 0", "2 0 65535 0")
            assert c("state 0") != place
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0
            c.until("hint 0", "local")
        shutil.rmtree(directory)  # the next one has another table, another inode
        with agent(directory, "--policy", "static:0.5", *options):
            c.until("hint 0", "2 0 32768 32767")
            c.until("counts", lambda answer: answer.endswith(" 0 0"))  # nothing was refused, all is answered


def test_a_frozen_agent_means_local_after_a_second(program: Path, directory: Path, options: list[str]) -> None:
    with agent(directory, "--policy", "static:1", *options) as process, client(program, directory) as c:
        c(f"register {FLOW}")
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        process.send_signal(signal.SIGSTOP)
        until(lambda: c("look") == STALE, "a frozen agent is taken for alive")
        assert c("hint 0") == "local"
        process.send_signal(signal.SIGCONT)
        c.until("hint 0", "2 0 0 65535")


@pytest.mark.parametrize("left", [0, 4_096 + 64 * 10])
def test_it_survives_a_table_that_is_truncated(program: Path, directory: Path, left: int, options: list[str]) -> None:
    """The agent ends then, and the next one lays the table out again: the C program goes on with it."""
    with client(program, directory) as c:
        with agent(directory, "--policy", "static:1", *options) as process:
            c(f"register {FLOW}")
            assert c(f"wait 0 {WAIT_MS}") == PLACED
            os.truncate(directory / HINTS_NAME, left)
            assert c("hint 0") in ("local", "2 0 0 65535")  # the page of its slot may be left
            c("look")
            assert process.wait(60) != 0
            c.until("hint 0", "local")
        with agent(directory, "--policy", "static:0", *options):
            c.until("hint 0", "2 0 65535 0")


@pytest.mark.parametrize("chosen_by", ["client", "agent"])
def test_a_hint_is_read_once_for_several_requests(
    program: Path, directory: Path, options: list[str], chosen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFOLD_AGENT_REQUESTS_PER_HINT", "4" if chosen_by == "agent" else "7")
    with agent(directory, "--policy", "static:1", *options), client(program, directory) as c:
        c("every 4" if chosen_by == "client" else "every 0")
        c(f"register {FLOW}")
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        assert c("hint 0") == "2 0 0 65535"
        ask("set", "1", "--share", "0", "--dir", directory)
        answers = [c("hint 0") for _ in range(4)]
        assert answers == ["2 0 0 65535"] * 3 + ["2 0 65535 0"]
        assert c("fixed 0") == "1"


def test_a_forked_child_changes_nothing(program: Path, directory: Path, options: list[str]) -> None:
    with agent(directory, "--policy", "static:1", *options), client(program, directory) as c:
        c(f"register {FLOW}")
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        assert c("fork") == "7"
        c("renew 0")
        c.until("counts", "1 0 0")
        assert c("hint 0") == "2 0 0 65535"


def test_a_closed_client_has_no_flows_although_a_child_has_its_socket(
    program: Path, directory: Path, options: list[str]
) -> None:
    with agent(directory, *options), client(program, directory) as c, AgentConsole([directory]) as console:
        c(f"register {FLOW}")
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        child = int(c("child"))
        try:
            assert len(console.flows()) == 1
            assert c("close") == "closed"
            until(lambda: not console.flows(), "the flow stays while the child lives")
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_garbage_in_the_fixed_layout_is_refused_counted_and_harmless(
    program: Path, directory: Path, options: list[str]
) -> None:
    with agent(directory, "--policy", "static:1", *options), client(program, directory) as c:
        c(f"register {FLOW}")
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        hello = fixed_request(AgentHello(1, "garbage"))
        for garbage in (b"\xc1", b"\xc1" * 5_000, b"\xc1\x02" + bytes(14), b"\xc1\x01\x02\x02" + bytes(12)):
            connection = LocalConnection(directory / SOCKET_NAME)
            connection.send(hello + frame(FrameKind.MESSAGE, garbage))
            received = bytearray()
            while chunk := connection.wait(60):
                received += chunk
            welcome, refused = (decode_fixed_response(*each) for each in FrameReader(1 << 16).feed(bytes(received)))
            assert isinstance(welcome, AgentWelcome)
            assert isinstance(refused, AgentRefused)
            assert (refused.request, refused.kind) == (0, "invalid")
            connection.close()
        with AgentConsole([directory]) as console:
            assert console.status().refused == {"invalid": 4}
        assert c("hint 0") == "2 0 0 65535"


def test_a_flow_over_the_quota_is_registered_when_there_is_room(
    program: Path, directory: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFOLD_AGENT_USER_FLOWS", "1")
    with agent(directory, "--policy", "static:1", *options), client(program, directory) as c:
        c(f"register {FLOW}")
        c("register 10.0.0.3 10.0.0.4 10.0.0.3,10.0.0.4 10.1.0.3,10.1.0.4")
        assert c(f"wait 0 {WAIT_MS}") == PLACED
        assert c(f"wait 1 {WAIT_MS}") == OVER_LIMIT
        assert c("refusal 1").startswith("5 user ")
        c("remove 0")
        c.until("state 1", lambda answer: answer.startswith(PLACED))


def test_a_directory_that_others_can_write_to_is_not_trusted(
    program: Path, directory: Path, options: list[str]
) -> None:
    with agent(directory, "--policy", "static:1", *options), client(program, directory) as c:
        os.chmod(directory, 0o777)
        c(f"register {FLOW}")
        assert c("wait 0 300") == WAITING
        os.chmod(directory, 0o700)
        assert c(f"wait 0 {WAIT_MS}") == PLACED


# The example transport

PATHS = ["127.0.0.1,127.0.0.1", "127.0.0.2,127.0.0.2"]
SEGMENT_BYTES = 65_536


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built by the line that it gives."""
    source = ROOT / "examples" / "transport" / "split.c"
    line = next(line for line in source.read_text().splitlines() if line.startswith(" *   cc ")).removeprefix(" *   ")
    built = tmp_path_factory.mktemp("example") / "split"
    words = line.replace("-o split", f"-Wall -Wextra -Wpedantic -Werror -o {built}").split()
    subprocess.run([compiler("cc", "gcc", "clang"), *words[1:]], cwd=ROOT, check=True)
    return built


@contextmanager
def transfer(split: Path, directory: Path, *options: str) -> Iterator[tuple[Callable[[str], str], Callable[[], str]]]:
    """A sender and its receiver: what waits for a line of the sender, and what the receiver prints at the end."""
    port = str(free_port())
    command = [str(split), "receive", port, *(path.partition(",")[2] for path in PATHS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        command = [str(split), "send", port, *PATHS, "--dir", str(directory), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
            lines: list[str] = []

            def line_with(text: str) -> str:
                assert sender.stdout is not None
                while not (lines and text in lines[-1]):
                    lines.append(sender.stdout.readline())
                    assert lines[-1], f"no line with {text!r} in {lines}"
                return lines[-1]

            def end() -> str:
                assert receiver.stdout is not None
                return receiver.stdout.read()

            try:
                yield line_with, end
            finally:
                sender.kill()
                receiver.kill()


@pytest.mark.parametrize("words", [["send", "7000"], ["receive", "7000"], ["send", "7000", PATHS[0]]])
def test_the_example_needs_paths(split: Path, words: list[str]) -> None:
    ran = subprocess.run([split, *words, "--mb", "1"], text=True, capture_output=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "paths" in ran.stderr


def test_the_example_splits_its_sends_by_the_hints(split: Path, directory: Path, options: list[str]) -> None:
    """Every byte that was posted by a hint is where the hint wanted it."""
    with agent(directory, "--policy", "static:0.25", *options):
        with transfer(split, directory, "--mb", "32", "--mbit", "100", "--requests-per-hint", "2") as (line, end):
            line("hint 75 % 25 %")
            sent = line("requests by hints").split()
            received = end()
        by_hint, by_rates = int(sent[sent.index("requests") - 1]), int(sent[sent.index("own") - 2])
        assert by_hint + by_rates == 32 * 16
        assert by_hint > by_rates
        assert "whole: " in received
        segments = int(received.split()[-1]) / SEGMENT_BYTES
        assert by_hint / 4 - 2 <= segments <= by_hint / 4 + by_rates + 2
        with AgentConsole([directory]) as console:
            until(lambda: not console.flows(), "the flow of the example is still there")
            assert not console.status().refused
            assert console.status().counts["measured"] > 0


@pytest.mark.waiting
def test_the_example_goes_on_by_its_own_rates_while_there_is_no_agent(
    split: Path, directory: Path, options: list[str]
) -> None:
    """Agents are killed, restarted and replaced in the middle of its transfer, and the table is truncated."""
    with transfer(split, directory, "--mb", "400", "--mbit", "100") as (line, end):
        line("local")
        with agent(directory, "--policy", "static:1", *options) as first:
            line("hint 0 % 100 %")
            first.kill()
            line("local")
        with agent(directory, "--policy", "static:0.25", *options) as second:
            line("hint 75 % 25 %")
            os.truncate(directory / HINTS_NAME, 0)
            line("local")
            assert second.wait(60) != 0
        with agent(directory, "--policy", "static:0", *options):
            line("hint 100 % 0 %")
            ask("set", "127.0.0.1,127.0.0.1", "--share", "0.5", "--dir", directory)
            line("hint 50 % 50 %")
            assert "requests by hints" in line("requests by hints")
            assert "whole: " in end()
