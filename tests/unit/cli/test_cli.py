"""The commands: what they print, how they end, and that they stay light."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Literal

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import ringfold.cli
from ringfold.cli import COMMANDS, agent, build, logs, output, runs
from ringfold.cli.probe import control
from ringfold.cli.status import render
from ringfold.config import load, state_directory
from ringfold.errors import ConfigError, MasterUnreachable, RingfoldError, UsageError
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings, master_settings
from ringfold.runtime import doctor, master_client
from ringfold.runtime.hardware import Hardware, cpu_level, read_hardware
from ringfold.tools.cluster import free_port
from ringfold.wire.agent import AgentStatus
from ringfold.wire.frames import FrameKind, FrameReader, decode_to_master, frame, message_frame
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    EvictRequest,
    EvictResponse,
    Refused,
    Status,
    StatusRequest,
    World,
)
from ringfold.wire.notices import PeerSuspected
from ringfold.wire.probing import EdgeFit, EdgeView, NodeClock, RelayInfo, RoundId, RoundSummary
from ringfold.wire.proof import proven
from ringfold.wire.status import (
    CollectiveStatus,
    Divergence,
    GroupStatus,
    LinkStatus,
    PeerStatus,
    RingLink,
    RunInfo,
    RunList,
    Waiting,
)

NONCE = bytes(range(32))
DIVERGED = Divergence(2, "two", 300, 200, ["model", "momentum"], 9, 4_096)
STATUS = Status(
    fence=1,
    uptime_ms=65_000,
    registrations=3,
    epochs=4,
    world=World(3, 1, 3),
    peers=[
        PeerStatus(1, "one", "host-a", 0, "PEER_ACCEPTED", ["10.0.0.1"], 48149, 20, False, 7, [], "IDLE"),
        PeerStatus(
            2,
            "[red]two",
            "host-b",
            0,
            "PEER_ACCEPTED",
            ["fe80::2"],
            48150,
            1_500,
            True,
            6,
            ["tag 0 seq 6: PERFORM_COLLECTIVE_COMMS (1.2 s)"],
            "COLLECTIVE_COMMUNICATIONS_RUNNING",
            [CollectiveStatus(0, 6, "PERFORM_COLLECTIVE_COMMS", 1_200)],
        ),
    ],
    groups=[GroupStatus(0, 4, "installed", [2, 1, 3], "ring", [(1, 2)], [DIVERGED], 5)],
    waiting=[Waiting("update_topology", [1], [2, 3], 4_200)],
    links=[
        LinkStatus(1, 2, 11_762_500.0, 150, 3_000, "measured"),
        LinkStatus(2, 1, 293_750_000.0, None, 12_000, "collective"),
    ],
    known_links=7,
)


class FakeMaster:
    """A listener that sends what a test wants it to send to one client after the other, until it is closed."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._talk = talk
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                self._talk(client)

    def close(self) -> None:
        # Only shutdown wakes a thread that waits in accept; close alone would leave it there.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def fake_master() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Start a fake master with a given talk; its address comes back."""
    started: list[FakeMaster] = []

    def start(talk: Callable[[socket.socket], None]) -> str:
        started.append(FakeMaster(talk))
        return started[-1].address

    yield start
    for each in started:
        each.close()


def answering(token: bytes) -> Callable[[socket.socket], None]:
    """A master that checks the proof and answers every question on a connection."""

    def talk(client: socket.socket) -> None:
        client.sendall(message_frame(Challenge(NONCE, PROTOCOL_VERSION, PROTOCOL_VERSION)))
        reader = FrameReader()
        while chunk := client.recv(4096):
            for kind, body in reader.feed(chunk):
                assert kind is FrameKind.MESSAGE
                question = decode_to_master(body)
                assert isinstance(question, StatusRequest)
                if not proven(token, question.proof, "status", NONCE, question.nonce):
                    client.sendall(message_frame(Refused("wrong token")))
                    return
                client.sendall(message_frame(STATUS))

    return talk


def sending(stream: bytes) -> Callable[[socket.socket], None]:
    """A client that sends something and then only reads."""

    def talk(client: socket.socket) -> None:
        client.sendall(stream)
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass

    return talk


@pytest.fixture
def ringfold_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run `ringfold ...` in this process, in an empty directory and home; exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ringfold", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            ringfold.cli.main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


Run = Callable[..., tuple[int, str, str]]
Start = Callable[[Callable[[socket.socket], None]], str]


# The frame around all commands


def test_help_loads_neither_numpy_nor_the_native_core() -> None:
    code = (
        "import sys\nsys.argv = ['ringfold', '--help']\nfrom ringfold.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'torch', 'ringfold._native', 'ringfold.peer', 'ringfold.master'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    for command in COMMANDS:
        assert command.name in ended.stdout


def test_help_is_the_same_whether_commands_are_loaded_or_not() -> None:
    """`--help` shows the commands without loading them; no difference may be visible."""
    brief, full = (CliRunner().invoke(build(load), ["--help"], env={"COLUMNS": "200"}) for load in ((), None))
    assert brief.exit_code == full.exit_code == 0
    assert brief.output == full.output


def test_a_missing_command_is_a_usage_error(ringfold_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = ringfold_command("mater", capsys=capsys)
    assert code == 2
    assert "mater" in errors


@pytest.mark.parametrize(
    ("error", "code", "hint"),
    [
        (UsageError("bad call"), 2, ""),
        (ConfigError("bad setting"), 2, "ringfold config"),
        (MasterUnreachable("here:1", "refused"), 1, "ringfold master"),
        (RingfoldError("other"), 1, ""),
    ],
)
def test_an_error_is_one_line_and_a_hint(
    error: RingfoldError, code: int, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output.print_error(error) == code
    printed = capsys.readouterr().err
    assert f"error: {error}" in printed
    assert hint in printed
    assert len(printed.splitlines()) == (2 if hint else 1)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ringfold.toml").write_text("lane = 1\n")
    monkeypatch.setattr(sys, "argv", ["ringfold", "--debug", "config"])
    with pytest.raises(ConfigError):
        ringfold.cli.main()


# config


def test_config_shows_value_and_origin(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ringfold.toml").write_text("lanes = 3\n")
    (tmp_path / "token").write_text("hush")
    monkeypatch.setenv("RINGFOLD_SPIN_US", "9")
    monkeypatch.setenv("RINGFOLD_TOKEN_FILE", str(tmp_path / "token"))
    code, text, _ = ringfold_command("config", "--json", capsys=capsys)
    shown = json.loads(text)
    assert code == 0
    assert shown["settings"]["lanes"] == {"value": 3, "origin": f"{tmp_path / 'ringfold.toml'}:1"}
    assert shown["settings"]["spin_us"] == {"value": 9, "origin": "environment RINGFOLD_SPIN_US"}
    assert shown["settings"]["heartbeat_ms"] == {"value": 250, "origin": "default"}
    assert shown["settings"]["token_file"]["value"] == str(tmp_path / "token")
    assert "hush" not in text
    code, text, _ = ringfold_command("config", capsys=capsys)
    assert code == 0
    assert "lanes" in text
    assert "hush" not in text


def test_a_broken_setting_is_a_red_line_and_code_2(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ringfold.toml").write_text("lane = 3\n")
    code, text, errors = ringfold_command("config", capsys=capsys)
    assert (code, text) == (2, "")
    assert "did you mean 'lanes'?" in errors
    assert "Traceback" not in errors


# status


def test_status_fits_a_terminal_of_80_columns_and_breaks_no_state_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.console, "_width", 80)
    host, phase, state = "rack7-node13.example.org", "PEER_REGISTERED", "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS"
    name, addresses = f"{host}:17202", ["10.10.10.7", "2001:db8::17"]
    ops = [CollectiveStatus(0, 12, "VOTE_INITIATE_COLLECTIVE_COMMS", 1_200)]
    peers = [
        PeerStatus(peer, name, host, 0, phase, addresses, 48149, 3_200, True, 1_843_200, [], state, ops)
        for peer in range(100, 112)
    ]
    ring = [peer.peer for peer in peers]
    links = [LinkStatus(a, b, 1e8 + a, 120.5, 4_000, "measured", 0.01) for a in ring for b in ring if a != b]
    waiting = [
        Waiting("to be accepted, by update_topology of all accepted peers", [112], ring, 62_000),
        Waiting("group 0: op tag 0 sequence 1843200", ring[1:], [100], 52_000, "in 8.0 s", 8_000),
        Waiting("group 1: op tag 0 sequence 7", [1, 2, 3], [4], 152_000, "busy for another 12.0 s"),
    ]
    groups = [GroupStatus(0, 25, "attaching", ring, "master", [(100, 101)])]
    status = msgspec.structs.replace(STATUS, peers=peers, groups=groups, links=links, waiting=waiting, known_links=132)
    with output.console.capture() as captured:
        output.console.print(render("127.0.0.1:48148", status))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    op = "tag 0 seq 12  VOTE_INITIATE_COLLECTIVE_COMMS  1.2 s"
    for piece in (phase, state, op, "1843200", "suspected", "10.10.10.7:48149", "[2001:db8::17]:48149"):
        assert text.count(piece) >= len(peers), piece
    assert "links (the ring, then the slowest; 24 of 132)" in text
    assert text.index("111 -> 100  ") < text.index("100 -> 102  ")
    assert "800 Mbit/s, 120.5 us, 1 % lost, 4.0 s ago" in text
    assert "in 8.0 s" in text
    assert "eviction" in text


@pytest.mark.parametrize(
    ("transports", "channels", "ring", "lanes", "legend"),
    [
        (["shm", "shm", "shm"], 1, "2 => 1 => 3 => 2", "1", "=>: in shared memory"),
        (["tcp", "shm", "tcp"], 4, "2 -> 1 => 3 -> 2", "4 (4 channels)", "=>: in shared memory; ->: over TCP"),
        (["mixed", "unknown", "tcp"], 2, "2 ~> 1 ?> 3 -> 2", "2 (2 channels)", "?>: not connected yet"),
    ],
)
def test_status_draws_what_carries_each_link(
    transports: list[Literal["shm", "tcp", "mixed", "unknown"]],
    channels: int,
    ring: str,
    lanes: str,
    legend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = [
        RingLink(source, target, transport, 0 if transport == "unknown" else channels)
        for (source, target), transport in zip([(2, 1), (1, 3), (3, 2)], transports, strict=True)
    ]
    groups = [GroupStatus(0, 4, "installed", [2, 1, 3], "ring", ring_links=links, channels=channels)]
    monkeypatch.setattr(output.console, "_width", 120)
    with output.console.capture() as captured:
        output.console.print(render("127.0.0.1:48148", msgspec.structs.replace(STATUS, groups=groups)))
    text = captured.get()
    assert f"{ring}  {lanes} " in text
    assert legend in text


def test_evict_names_the_peer_the_reason_and_the_requester(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], fake_master: Start
) -> None:
    requests: list[EvictRequest] = []

    def talk(client: socket.socket) -> None:
        client.sendall(message_frame(Challenge(NONCE, PROTOCOL_VERSION, PROTOCOL_VERSION)))
        for _, body in FrameReader().feed(client.recv(4096)):
            question = decode_to_master(body)
            assert isinstance(question, EvictRequest)
            assert proven(b"", question.proof, "evict", NONCE, question.nonce)
            requests.append(question)
            is_known = question.peer == "[red]two"
            text = "peer 2 ([red]two) is evicted; it may join again" if is_known else "there is no such peer"
            client.sendall(message_frame(EvictResponse(is_known, text, 2, "[red]two")))

    master = fake_master(talk)
    code, text, errors = ringfold_command("evict", "[red]two", master, "--reason", "broken", capsys=capsys)
    assert (code, text, errors) == (0, "peer 2 ([red]two) is evicted; it may join again\n", "")
    code, text, errors = ringfold_command("evict", "3", master, "--json", capsys=capsys)
    assert (code, errors) == (1, "")
    assert json.loads(text)["done"] is False
    code, text, errors = ringfold_command("evict", "3", master, capsys=capsys)
    assert (code, text, errors) == (1, "", "error: there is no such peer\n")
    assert [(each.peer, each.reason) for each in requests] == [("[red]two", "broken"), ("3", ""), ("3", "")]
    assert " on " in requests[0].by


def test_status_prints_the_run(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], fake_master: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.console, "_width", 200)
    code, text, errors = ringfold_command("status", fake_master(answering(b"")), capsys=capsys)
    assert (code, errors) == (0, "")
    for piece in (
        "3 peers in 1 group, up 1 min 5 s, 4 epochs so far",
        "one ",
        "host-a",
        "[red]two",
        "[fe80::2]:48150",
        "suspected",
        "PEER_ACCEPTED  COLLECTIVE_COMMUNICATIONS_RUNNING",
        "tag 0 seq 6  PERFORM_COLLECTIVE_COMMS  1.2 s",
        "2 -> 1 -> 3 -> 2",
        "1 -> 2",
        "update_topology",
        "4.2 s",
        "94.1 Mbit/s, 3.0 s ago",
        ">= 2.35 Gbit/s, 12.0 s ago",
        "7 links are known, --json has 2 of them",
        "diverged from the run's state, and repaired (5 in all)",
        "model, momentum and 7 more",
        "4096 bytes",
    ):
        assert piece in text


def test_status_as_json_is_the_message(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], fake_master: Start
) -> None:
    code, text, _ = ringfold_command("status", fake_master(answering(b"")), "--json", capsys=capsys)
    assert code == 0
    assert msgspec.json.decode(text, type=Status) == STATUS


def test_status_proves_the_token(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], fake_master: Start, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hush\n")
    (tmp_path / "token").chmod(0o600)
    address = fake_master(answering(b"hush"))
    assert ringfold_command("status", address, "--token-file", str(tmp_path / "token"), capsys=capsys)[0] == 0
    code, _, errors = ringfold_command("status", address, capsys=capsys)
    assert code == 2
    assert "refused: wrong token" in errors


def test_a_connection_can_ask_again(fake_master: Start) -> None:
    with master_client.MasterClient(fake_master(answering(b"")), b"") as connection:
        assert connection.status() == connection.status() == STATUS
        seen = connection.watch(0)
        assert [next(seen), next(seen)] == [STATUS, STATUS]


def test_status_shows_the_next_leader_when_the_first_is_gone(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    with MasterThread(journal=store) as one, MasterThread(journal=store) as two:
        masters = [one.address, two.address]
        for _ in range(5_000):  # until one of them has taken the lead
            with suppress(MasterUnreachable), master_client.connect(masters, b""):
                break
        seen = master_client.follow_status(masters, b"", 0.01)
        where = next(look[0] for look in seen if isinstance(look, tuple))
        first, second = (one, two) if where == one.address else (two, one)
        first.stop()
        assert next(look[0] for look in seen if isinstance(look, tuple) and look[0] != where) == second.address


def test_if_no_master_leads_the_reason_of_each_is_shown(fake_master: Start) -> None:
    silent = f"127.0.0.1:{free_port()}"

    def stands_by(connection: socket.socket) -> None:
        connection.sendall(message_frame(Refused("this master stands by", again=True)))

    with pytest.raises(MasterUnreachable, match=r"stands by.*Connection refused"):
        master_client.connect([fake_master(stands_by), silent], b"")


def test_no_master_there_is_code_1_with_a_hint(ringfold_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, _, errors = ringfold_command("status", address, capsys=capsys)
    assert code == 1
    assert f"the master at {address} is unreachable" in errors
    assert "ringfold master" in errors


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"no Ringfold master: it began with 'HTTP' \(a web server\?\)"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", r"no Ringfold master: it began with 'SSH-' \(an SSH server\?\)"),
        (b"\xff\xff\xff\xff\xff", "no Ringfold master, or one of another version"),
        (b"", "it closed the connection"),
        (message_frame(Challenge(NONCE, 98, 99)), "speaks protocol versions 98 to 99"),
        (message_frame(STATUS), "did not begin with a challenge"),
        (frame(FrameKind.HEARTBEAT, bytes(16)), "HEARTBEAT frame"),
        (frame(FrameKind.MESSAGE, b"\xc1"), "not a message"),
    ],
)
def test_another_server_on_the_port_is_named_not_believed(fake_master: Start, stream: bytes, complaint: str) -> None:
    with pytest.raises(RingfoldError, match=complaint):
        master_client.MasterClient(fake_master(sending(stream)), b"")


def test_silence_ends_at_the_deadline(fake_master: Start) -> None:
    def silent(client: socket.socket) -> None:
        while client.recv(4096):
            pass

    with pytest.raises(MasterUnreachable, match=r"sent nothing within 0\.05 s, and a Ringfold master sends first"):
        master_client.MasterClient(fake_master(silent), b"", timeout_s=0.05)


def test_the_first_address_that_answers_is_used(fake_master: Start) -> None:
    unused = f"127.0.0.1:{free_port()}"
    address = fake_master(answering(b""))
    with master_client.connect([unused, address], b"") as connection:
        assert connection.address == address
    with pytest.raises(MasterUnreachable, match=unused):
        master_client.connect([unused], b"")


# Text of others


HOSTILE = "[/x] [red]red[/red] :warning:"


@pytest.fixture
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is folded."""
    monkeypatch.setattr(output.console, "_width", 300)


@pytest.mark.usefixtures("wide_console")
def test_labels_names_and_reasons_of_others_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A label or a name with brackets is no markup: neither an error, nor a colour, nor left out."""
    fit = EdgeFit(1, 2, refused=HOSTILE)
    summary = RoundSummary(
        RoundId(1, 2), "master", HOSTILE, 0, 1, 1, [NodeClock(1, 0, 0, 0.0, 1.0, -1, 1, 0.0)], [EdgeView(fit)], [],
        {"2": HOSTILE}, HOSTILE, excluded={"3": HOSTILE}, names={"1": HOSTILE},
    )  # fmt: skip
    control.show_summary(summary)
    control.show_relays([RelayInfo(HOSTILE, HOSTILE, 1, 1, 1, 1, 0)])
    runs._show(HOSTILE, RunList([RunInfo("a", "broken", why=HOSTILE)]), as_json=False)
    output.console.print(HOSTILE)
    output.error_console.print(HOSTILE)
    shown = capsys.readouterr()
    text = " ".join(shown.out.split())
    assert text.count("[/x]") == text.count("[red]red[/red]") == text.count(":warning:") == 11
    assert HOSTILE in shown.err


def test_a_table_parses_neither_its_title_nor_its_headings_nor_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever console shows it."""
    Console(width=200).print(output.table(HOSTILE, [HOSTILE], [[HOSTILE]]))
    assert capsys.readouterr().out.count(HOSTILE) == 3


@pytest.mark.usefixtures("wide_console")
def test_the_status_of_an_agent_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {HOSTILE: 1}
    found = AgentStatus(
        1, 2, 3, 4, HOSTILE, 0, 0, 0, 8, "hints", [], counts, counts, (HOSTILE,), monitors={HOSTILE: HOSTILE}
    )
    agent._render(found, [])
    assert " ".join(capsys.readouterr().out.split()).count("[/x]") == 6


# master


@pytest.mark.parametrize("arguments", [("--version",), ("--debug", "--version"), ("--version", "status")])
def test_the_version_is_shown_without_a_command(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert ringfold_command(*arguments, capsys=capsys) == (0, f"ringfold {ringfold.__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--listen", "0.0.0.0:0"), ("--listen", "127.0.0.1:0", "--listen", "[::]:0")])
def test_the_master_refuses_an_open_door(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, _, errors = ringfold_command("master", *arguments, capsys=capsys)
    assert code == 2
    assert "can be reached from other machines, and there is no token: make one with (umask 077; python3" in errors
    assert "Traceback" not in errors


@pytest.fixture
def real_master(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`ringfold master` as a process of its own on a free port, and where it listens."""
    command = [sys.executable, "-m", "ringfold.cli", "master", "--listen", "127.0.0.1:0", "--log-json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"HOME": str(tmp_path)}
    ) as child:
        try:
            assert child.stdout is not None
            yield child, child.stdout.readline().removeprefix("listening on ").strip()
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_master_answers_and_ends_cleanly(
    real_master: tuple["subprocess.Popen[str]", str], number: signal.Signals
) -> None:
    """A client that stays connected does not keep it from ending; the log is JSON from the first line to the last."""
    child, address = real_master
    with master_client.MasterClient(address, b"") as connection:
        assert connection.status().world == World()
        child.send_signal(number)
        _, errors = child.communicate(timeout=20)
    assert child.returncode == 0, errors
    printed = [json.loads(line)["message"] for line in errors.splitlines()]
    assert any(address in message for message in printed)
    assert f"{number.name}: the master stops" in printed


def test_a_taken_address_is_one_line(ringfold_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, _, errors = ringfold_command("master", "--listen", address, capsys=capsys)
    assert code == 2
    assert f"cannot listen on {address}" in errors
    assert "Traceback" not in errors


def test_master_settings_are_those_of_the_registry() -> None:
    """What the registry calls the default is what a master does without any setting."""
    made = master_settings(load({}, environment={}, directory=Path("/"), home=Path("/")))
    assert made.flight_dir == state_directory() / "flight"
    assert replace(made, flight_dir=None) == MasterSettings()
    without = load({"flight": False}, environment={}, directory=Path("/"), home=Path("/"))
    assert master_settings(without).flight_dir is None


@pytest.mark.parametrize(("given", "ms"), [("off", "off"), ("auto", "auto"), (2.5, 2_500)])
def test_the_stall_timeout_of_a_master_is_a_word_or_seconds(given: object, ms: object) -> None:
    arguments = {"stall_timeout_s": given, "op_timeout_s": 40}
    settings = master_settings(load(arguments, environment={}, directory=Path("/"), home=Path("/")))
    assert (settings.stall_timeout_ms, settings.op_timeout_ms) == (ms, 40_000)


def test_members_that_notice_late_that_a_master_is_gone_are_waited_for() -> None:
    settings = load({"evict_after_ms": 20_000}, environment={}, directory=Path("/"), home=Path("/"))
    assert master_settings(settings).return_ms > 20_000


# doctor


def machine(**changes: object) -> Hardware:
    """A good machine, with changes."""
    good = Hardware("h", "6", "x86_64", "cpu", "x86-64-v3", ["avx2", "f16c"], 8, 2**34, 2**33, "3.11", {})
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize(
    ("check", "outcome"),
    [
        (doctor.judge_cpu(machine()), "ok"),
        (doctor.judge_cpu(machine(cpu_features=["sse4_2"])), "warn"),
        (doctor.judge_cpu(machine(architecture="aarch64", cpu_features=["asimd"])), "ok"),
        (doctor.judge_cores(machine(cores=1)), "warn"),
        (doctor.judge_memory(machine(memory_free_bytes=2**20)), "warn"),
        (doctor.judge_open_files(None), "ok"),
        (doctor.judge_open_files(256), "warn"),
        (doctor.judge_open_files(16), "fail"),
        (doctor.judge_locked_memory(0), "warn"),
        (doctor.judge_clock_source("hpet"), "warn"),
        (doctor.judge_clock_source("tsc"), "ok"),
        (doctor.judge_clock_sync(0, 0, 1500), "ok"),
        (doctor.judge_clock_sync(5, 0, 0), "warn"),
        (doctor.judge_clock_sync(0, 0x40, 0), "warn"),
        (doctor.judge_buffers("4096 16384 4194304", "4096 131072 6291456", "", ""), "ok"),
        (doctor.judge_buffers("4096 16384 262144", "4096 131072 6291456", "212992", "212992"), "warn"),
        (doctor.judge_buffers("", "", "", ""), "warn"),
        (doctor.judge_congestion("reno cubic"), "ok"),
        (doctor.judge_congestion("reno"), "warn"),
        (doctor.judge_huge_pages("always madvise [never]"), "warn"),
        (doctor.check_shared_memory("/nowhere"), "warn"),
        (doctor.check_memory_lanes(), "ok"),
    ],
)
def test_the_doctor_judges(check: doctor.Check, outcome: str) -> None:
    assert check.outcome == outcome
    assert bool(check.advice) == (outcome != "ok")


def test_a_taken_port_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert doctor.check_port(port, "data port").outcome == "warn"


def test_cpu_levels_have_no_gaps() -> None:
    v2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
    v3 = v2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert [cpu_level("x86_64", flags) for flags in (set(), v2, v3, v3 | v4, v2 | v4)] == [
        "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v2",
    ]  # fmt: skip
    assert cpu_level("aarch64", set()) == "aarch64"


def test_this_machine_can_be_looked_at() -> None:
    seen = read_hardware()
    assert seen.cores >= 1
    assert seen.memory_bytes >= seen.memory_free_bytes > 0


def test_the_doctor_queries_a_named_master(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], fake_master: Start
) -> None:
    _, text, _ = ringfold_command("doctor", "--json", "--master", fake_master(answering(b"")), capsys=capsys)
    found = json.loads(text)
    [master] = [check for check in found["checks"] if check["name"] == "master"]
    assert (master["outcome"], "3 peers in 1 groups" in master["found"]) == ("ok", True)
    assert found["machine"]["cores"] >= 1


def test_the_doctor_fails_when_the_master_does_not_take_the_token(
    ringfold_command: Run, capsys: pytest.CaptureFixture[str], fake_master: Start
) -> None:
    code, text, _ = ringfold_command("doctor", "--json", "--master", fake_master(answering(b"hush")), capsys=capsys)
    [master] = [check for check in json.loads(text)["checks"] if check["name"] == "master"]
    assert (code, master["outcome"]) == (1, "fail")
    assert "wrong token" in master["found"]


# logs


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The Ringfold logger, put back as it was afterwards."""
    logger = logging.getLogger("ringfold")
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.level, logger.propagate = before


def test_json_lines_carry_the_event(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.start("info", as_json=True)
    log.warning("%s", PeerSuspected(3, 1200))
    log.debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    printed = json.loads(line)
    assert printed["event"] == "peer_suspected"
    assert (printed["peer"], printed["silent_ms"], printed["level"]) == (3, 1200, "warning")
    assert printed["message"] == "peer 3 is suspected: silent for 1200 ms"


def test_text_lines_are_whole_when_the_output_is_not_a_terminal(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.start("debug", as_json=False)
    log.debug("x" * 500)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("x" * 500)


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(3, "3 ms"), (4_200, "4.2 s"), (65_000, "1 min 5 s"), (7_500_000, "2 h 5 min")]
)
def test_durations(milliseconds: int, text: str) -> None:
    assert output.duration(milliseconds) == text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--master", "127.0.0.1:1", "--windows", "3"], "--windows goes with --nodes, not with --master"),
        (["--nodes", "nodes.toml", "--listen-only"], "--listen-only goes with --master, not with --nodes"),
        (["--report", "logs", "--export", "x"], "--export goes with --master or --nodes, not with --report"),
        (["--master", "127.0.0.1:1", "--json"], "--json goes with --nodes or --report, not with --master"),
    ],
)
def test_an_option_of_probe_that_would_have_no_effect_is_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(build(["probe"]), ["probe", *arguments])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == complaint


def test_the_help_of_probe_lists_its_usages() -> None:
    shown = CliRunner().invoke(build(["probe"]), ["probe", "--help"]).output
    assert "needs no run" in " ".join(shown.split())
    assert "the extra `report`" in " ".join(shown.replace("│", " ").split())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"probe_stable_ns": 300, "probe_unstable_ns": 300}, "probe_stable_ns < probe_unstable_ns"),
        ({"probe_kind": "time", "probe_window_ms": 1_000}, "probe_window_ms above 1000"),
    ],
)
def test_settings_of_probing_that_do_not_go_together_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(values)
