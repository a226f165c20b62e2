"""The agent on real sockets, in a thread: clients come and go, agents too, and garbage harms nobody."""

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringfold import _native
from ringfold.agent import client as client_module
from ringfold.agent.client import AgentClient, AgentConsole
from ringfold.agent.connections import MAX_QUEUED_BYTES
from ringfold.agent.daemon import (
    HINTS_NAME,
    SOCKET_NAME,
    AgentServer,
    AgentSettings,
    AgentThread,
)
from ringfold.agent.monitors import Monitor, NicWatch
from ringfold.agent.registry import Quota
from ringfold.agent.steering import MAX_URGENT_PER_CALL
from ringfold.agent.telemetry import ReportSettings
from ringfold.cli.agent import _settings
from ringfold.config import load, split_address
from ringfold.errors import AgentUnreachable, ConfigError, UsageError
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.log_limit import MAX_REPEATS
from ringfold.wire.agent import AgentHello, AgentRefused, AskAgent, agent_frame, decode_from_agent
from ringfold.wire.frames import FrameReader
from ringfold.wire.telemetry import (
    Congestion,
    FlowAdded,
    FlowPath,
    FlowRemoved,
    GateSettings,
    Packet,
    address_number,
    decode,
    encode,
)

PATHS = [("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2")]
NOTHING: dict[str, object] = {}
WAIT_S = 20.0


def settings(directory: Path, **more: object) -> AgentSettings:
    return AgentSettings(directory=directory, telemetry=(), **more)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "agent"


@pytest.fixture
def agent(directory: Path) -> Iterator[AgentThread]:
    with AgentThread(settings(directory, policy="static:0.25")) as made:
        yield made


def placed(client: AgentClient, connection: int) -> tuple[int, int]:
    assert client.wait(lambda each: each.place(connection) is not None, WAIT_S), client.refusal(connection)
    place = client.place(connection)
    assert place is not None
    return place


def strange(directory: Path, content: bytes) -> list[object]:
    """What an agent answers to these bytes until it closes the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(str(directory / SOCKET_NAME))
        answers: list[object] = []
        reader = FrameReader(1 << 20)
        try:
            sock.sendall(content)
            while chunk := sock.recv(65_536):
                answers += [decode_from_agent(*each) for each in reader.feed(chunk)]
        except ConnectionError:
            pass
        return answers


def test_a_registered_flow_reads_its_hint(agent: AgentThread, directory: Path) -> None:
    with AgentClient([directory], "job") as client:
        place = placed(client, client.register("10.0.0.1", "10.0.0.2", PATHS))
        reader = client.reader()
        assert reader is not None
        assert reader.look() == "fresh"
        assert reader.read(*place) == ([49151, 16384], 0)


def test_a_client_without_an_agent_goes_by_its_local_policy_and_does_not_wait(directory: Path) -> None:
    with AgentClient([directory], "job") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        client.measured(flow, (1, 2))
        assert (client.place(flow), client.hints, client.reader()) == (None, None, None)
        client.deregister(flow)


def test_a_new_flow_is_reason_enough_to_look_for_an_agent_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threads.Event()

    def never_again(_away_s: float) -> float:
        looked.set()
        return 3_600.0

    monkeypatch.setattr(client_module, "reconnect_delay_s", never_again)
    with AgentClient([directory], "job") as client:
        assert looked.wait(WAIT_S)
        with AgentThread(settings(directory)):
            placed(client, client.register("10.0.0.1", "10.0.0.2", PATHS))


def test_a_client_finds_an_agent_that_starts_later_and_one_that_comes_back(directory: Path) -> None:
    with AgentClient([directory], "job") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        with AgentThread(settings(directory, policy="static:1")):
            first = placed(client, flow)
            reader = client.reader()
            assert reader is not None
            assert reader.read(*first) == ([0, 65535], 0)
        assert client.wait(lambda each: each.place(flow) is None, WAIT_S)
        assert (reader.look(), reader.read(*first)) == ("stale", None)
        with AgentThread(settings(directory, policy="static:0")):
            second = placed(client, flow)
            assert second != first
            assert (reader.look(), reader.read(*second), reader.read(*first)) == ("fresh", ([65535, 0], 0), None)


def test_the_end_of_a_client_frees_its_flows(agent: AgentThread, directory: Path) -> None:
    with AgentClient([directory], "stays") as stays:
        placed(stays, stays.register("10.0.0.1", "10.0.0.9", PATHS))
        with AgentClient([directory], "leaves") as leaves:
            place = placed(leaves, leaves.register("10.0.0.1", "10.0.0.2", PATHS))
        reader = stays.reader()
        assert reader is not None
        with AgentConsole([directory]) as console:
            until(lambda: console.status().flows == 1)
        assert reader.read(*place) is None


def test_a_slot_with_a_new_owner_is_not_read_by_the_old_one(directory: Path) -> None:
    """The old owner holds on to its place, as a reader does that has not noticed anything yet."""
    whole = settings(directory, policy="static:0.25", quota=Quota(slots=5_000))
    with AgentThread(whole), AgentClient([directory], "job") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        old = placed(client, flow)
        reader = client.reader()
        assert reader is not None
        client.deregister(flow)
        flows = [
            client.register("10.0.0.1", f"10.{1 + number // 250}.2.{number % 250}", PATHS) for number in range(4_096)
        ]
        new = placed(client, flows[-1])
        assert (new[0], new[1] != old[1]) == (old[0], True)
        assert (reader.read(*new), reader.read(*old)) == (([49151, 16384], 0), None)
        assert "slots are in use" in _refused(client, client.register("10.0.0.1", "10.99.0.1", PATHS))


def _refused(client: AgentClient, flow: int) -> str:
    assert client.wait(lambda each: each.refusal(flow) != "", WAIT_S)
    return client.refusal(flow)


def test_shares_are_fixed_by_hand_and_handed_back(agent: AgentThread, directory: Path) -> None:
    with AgentClient([directory], "job") as client, AgentConsole([directory]) as console:
        place = placed(client, client.register("10.0.0.1", "10.0.0.2", PATHS))
        reader = client.reader()
        assert reader is not None
        assert console.set_shares("10.0.0.1", "10.0.0.2", (0.5, 0.5)) == 1
        assert reader.read(*place) == ([32768, 32767], 0)
        console.set_shares("10.0.0.1", "10.0.0.2", ())
        assert reader.read(*place) == ([49151, 16384], 0)
        with pytest.raises(UsageError, match="no flow"):
            console.set_shares("10.0.0.1", "10.0.0.77", (0.5, 0.5))


def test_a_list_says_whose_a_flow_is_and_what_it_is_told(agent: AgentThread, directory: Path) -> None:
    with AgentClient([directory], "job") as client, AgentConsole([directory]) as console:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS, source_host="a", destination_host="b")
        place = placed(client, flow)
        (listed,) = console.flows()
    assert (listed.pid, listed.uid, listed.client) == (os.getpid(), os.getuid(), "job")
    assert ((listed.slot, listed.generation), listed.flow.destination_host) == (place, "b")
    assert (listed.shares, listed.backpressure) == ((0.75, 0.25), (False, False))


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n",
        b"\xff" * 64,
        b"\0" * 64,
        struct.pack("<IB", 5, 0) + b"junk",
        struct.pack("<IB", 17, 1) + b"\0" * 16,
        struct.pack("<IB", 1 << 30, 0),
        struct.pack("<IB", 10, 0) + b"\x81\xa4type\xa2\xff\xfe",
        struct.pack("<IB", 15_004, 0) + b"\x82\xa1x" + b"\x91" * 15_000,
    ],
)
def test_garbage_is_refused_counted_and_harmless(agent: AgentThread, directory: Path, content: bytes) -> None:
    answers = strange(directory, content)
    assert all(isinstance(answer, AgentRefused) for answer in answers)
    with AgentConsole([directory]) as console:
        assert console.status().refused == {"invalid": 1}


def test_a_client_that_registers_without_end_meets_its_quota(directory: Path) -> None:
    with AgentThread(settings(directory, quota=Quota(flows=3))), AgentClient([directory], "greedy") as client:
        flows = [client.register("10.0.0.1", "10.0.0.2", PATHS) for _ in range(10)]
        assert "the most that are allowed" in _refused(client, flows[-1])
        assert [client.place(flow) is not None for flow in flows] == [True] * 3 + [False] * 7


def test_a_flow_gets_its_place_when_there_is_room_again(directory: Path) -> None:
    with AgentThread(settings(directory, quota=Quota(flows=1))), AgentClient([directory], "patient") as client:
        first, second = (client.register("10.0.0.1", "10.0.0.2", PATHS) for _ in range(2))
        _refused(client, second)
        client.deregister(first)
        placed(client, second)


def deaf(directory: Path) -> socket.socket:
    """A connection that asks for more than it takes, until nobody takes its questions any more."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(str(directory / SOCKET_NAME))
    sock.sendall(agent_frame(AgentHello(1, "deaf")))
    sock.setblocking(False)
    questions = agent_frame(AskAgent(1)) * 1_000
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while True:
            sock.send(questions)
    return sock


def test_a_client_that_does_not_read_is_not_read_from_and_harms_nobody(agent: AgentThread, directory: Path) -> None:
    with deaf(directory) as sock, AgentConsole([directory]) as console:
        assert console.status().clients == 2
        taken = 0
        sock.settimeout(WAIT_S)
        while taken < 4 * MAX_QUEUED_BYTES:  # and when it reads, it is served again
            taken += len(sock.recv(65_536))


def test_of_many_that_do_not_read_some_are_given_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.MAX_UNREAD_BYTES", 3 * MAX_QUEUED_BYTES)
    with AgentThread(settings(directory)), contextlib.ExitStack() as stack, AgentConsole([directory]) as console:
        for _ in range(4):
            stack.enter_context(deaf(directory))
        until(lambda: console.status().clients < 5)
        assert console.status().clients > 1


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 0)], ids=["removed", "truncated"])
def test_an_agent_whose_table_was_taken_away_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("ringfold.agent.daemon.CHECK_FILES_EVERY", 1)
    agent = AgentThread(settings(directory))
    spoil(directory / HINTS_NAME)
    with pytest.raises(ConfigError, match=r"hints was removed, replaced or truncated"):
        agent.join()


def test_an_agent_removes_no_other_agents_socket(directory: Path) -> None:
    with AgentThread(settings(directory)):
        (directory / SOCKET_NAME).unlink()
        (directory / SOCKET_NAME).touch()
    assert (directory / SOCKET_NAME).exists()


def test_the_log_tells_of_few_of_many_dropped_clients(
    agent: AgentThread, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(MAX_REPEATS + 20):
        strange(directory, b"garbage!")
    assert sum("is disconnected" in each.message for each in caplog.records) == MAX_REPEATS
    with AgentConsole([directory]) as console:
        assert console.status().refused == {"invalid": MAX_REPEATS + 20}


def test_one_agent_serves_a_directory(agent: AgentThread, directory: Path) -> None:
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        AgentServer(settings(directory))
    with AgentConsole([directory]) as console:
        assert console.status().generation == 1


def test_a_socket_that_a_killed_agent_left_is_replaced(directory: Path) -> None:
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / SOCKET_NAME))
    with pytest.raises(AgentUnreachable):
        AgentConsole([directory])
    with AgentThread(settings(directory)), AgentConsole([directory]) as console:
        assert console.status().clients == 1


def test_an_end_leaves_the_table_and_no_socket(directory: Path) -> None:
    with AgentThread(settings(directory)):
        assert (directory / SOCKET_NAME).is_socket()
    assert [each.name for each in directory.iterdir()] == [HINTS_NAME]
    assert _native.HintReader(str(directory / HINTS_NAME)).look() == "stale"


@pytest.mark.parametrize(("shared", "modes"), [(True, (0o755, 0o666, 0o644)), (False, (0o700, 0o600, 0o600))])
def test_modes_follow_from_whom_it_serves(directory: Path, shared: bool, modes: tuple[int, int, int]) -> None:
    with AgentThread(settings(directory, is_shared=shared)):
        found = [directory, directory / SOCKET_NAME, directory / HINTS_NAME]
        assert tuple(stat.S_IMODE(each.stat().st_mode) for each in found) == modes


def test_something_else_in_the_sockets_place_is_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / SOCKET_NAME).write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        AgentThread(settings(directory))
    assert (directory / SOCKET_NAME).read_text() == "precious"


def test_a_directory_that_is_a_link_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    directory.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a directory"):
        AgentServer(settings(directory))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        AgentServer(settings(directory))


def test_a_client_does_not_trust_a_table_that_others_can_write(agent: AgentThread, directory: Path) -> None:
    (directory / HINTS_NAME).chmod(0o666)
    with AgentClient([directory], "careful") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        assert client.wait(lambda each: each.distrusted != "", WAIT_S)
        assert client.place(flow) is None
        (directory / HINTS_NAME).chmod(0o644)
        placed(client, flow)


def test_a_directory_that_may_not_be_looked_into_is_as_good_as_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of root's private agent, for one; here because of its name, which stops root as well. Later is another look."""
    closed = directory / ("x" * 300)
    with AgentThread(settings(directory)), AgentClient([closed], "job") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        with pytest.raises(AgentUnreachable, match=r"too long"):
            AgentConsole([closed])
        monkeypatch.setattr(client, "_directories", [directory])
        placed(client, flow)


def test_a_client_complains_once_of_each_agent_that_it_does_not_trust(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    with AgentThread(settings(directory)) as _, AgentThread(settings(other)) as _:
        for each in (directory, other):
            (each / HINTS_NAME).chmod(0o666)
        with AgentClient([directory, other], "careful") as client:
            for _ in range(6):  # three looks at both
                before = client.distrusted
                assert client.wait(lambda each, before=before: each.distrusted != before, WAIT_S)  # type: ignore[misc]
    assert sum("is not trusted" in each.message for each in caplog.records) == 2


def test_one_connection_too_many_is_told_so(directory: Path) -> None:
    with AgentThread(settings(directory, quota=Quota(clients=1))), AgentConsole([directory]) as first:
        with pytest.raises(UsageError, match="the most that are allowed"):
            AgentConsole([directory])
        assert first.status().refused == {"quota": 1}


def test_a_console_passes_over_a_socket_that_a_killed_agent_left(directory: Path, tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(left / SOCKET_NAME))
    with AgentThread(settings(directory)), AgentConsole([left, directory]) as console:
        assert console.status().hints.startswith(str(directory))


@pytest.mark.parametrize(
    ("source", "paths", "why"),
    [
        (ipaddress.ip_address("10.0.0.1"), PATHS, "are text"),
        (b"\x0a\x00\x00\x01", PATHS, "are text"),
        ("10.0.0.1", [PATHS[0], (b"\x0a\x01\x00\x01", "10.1.0.2")], "are text"),
        ("10.0.0.1", [PATHS[0], (*PATHS[1], "10.1.0.3")], "a pair"),
        ("10.0.0.1", [PATHS[0], ("10.1.0.1",)], "a pair"),
        ("10.0.0.1", ["10.0.0.1", "10.1.0.1"], "a pair"),
        ("10.0.0.1", [PATHS[0], 5], "are pairs"),
    ],
)
def test_a_flow_of_wrong_types_is_a_mistake_of_the_caller_and_its_others_stay(
    agent: AgentThread, directory: Path, source: object, paths: object, why: str
) -> None:
    with AgentClient([directory], "job") as client:
        first = client.register("10.0.0.1", "10.0.0.2", PATHS)
        placed(client, first)
        with pytest.raises(UsageError, match=why):
            client.register(source, "10.0.0.2", paths)  # type: ignore[arg-type]
        placed(client, client.register("10.0.0.1", "10.0.0.3", PATHS))
        assert client.place(first) is not None
        with AgentConsole([directory]) as console:
            assert console.status().refused == NOTHING


def test_text_of_other_types_is_converted(agent: AgentThread, directory: Path) -> None:
    with AgentClient([directory], "job \udcff") as client:
        text = np.str_("10.0.0.1")
        placed(client, client.register(text, "10.0.0.2", [[text, "10.0.0.2"], PATHS[1]]))  # type: ignore[list-item]


@pytest.mark.parametrize("rates", [np.array([1, 2]), [1.9, 2.0], np.array([1.5, 2.5]), (True, np.int64(2))])
def test_measurements_of_any_numbers_are_reported(agent: AgentThread, directory: Path, rates: list[int]) -> None:
    with AgentClient([directory], "job") as client, AgentConsole([directory]) as console:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        placed(client, flow)
        client.measured(np.int64(flow), rates)  # type: ignore[arg-type]
        until(lambda: tuple(console.flows()[0].bytes_per_s) == (1, 2))
        client.deregister(np.int64(flow))  # type: ignore[arg-type]
        until(lambda: not console.flows())


@pytest.mark.parametrize("rates", [[2**64, 1], [-1, 1], [float("nan"), 1], [float("inf"), 1], ["x", 1], [None, 1], 5])
def test_measurements_that_are_no_numbers_are_a_mistake_of_the_caller(
    agent: AgentThread, directory: Path, rates: list[int]
) -> None:
    with AgentClient([directory], "job") as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        placed(client, flow)
        with pytest.raises(UsageError, match="what was measured"):
            client.measured(flow, rates)
        placed(client, client.register("10.0.0.1", "10.0.0.3", PATHS))
        assert client.place(flow) is not None


def test_a_callback_that_raises_is_logged_and_ends_nothing(
    agent: AgentThread, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(connection: int, place: object) -> None:
        raise RuntimeError("planted")

    with AgentClient([directory], "job", on_place=fail) as client:
        for number in (2, 3):
            placed(client, client.register("10.0.0.1", f"10.0.0.{number}", PATHS))
    assert "on_place failed" in caplog.text


# Telemetry


def congestion(path: int, pressure: int, sequence: int) -> bytes:
    local, remote = PATHS[path]
    body = Congestion(address_number(local), address_number(remote), path, pressure)
    return encode(Packet(body, sequence, unix_ns()))


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that rings no bell. The agent is a thread of this process, so it is let run meanwhile."""
    deadline_ns = monotonic_ns() + int(WAIT_S * 1e9)
    pause = threads.Event()
    while not holds():
        assert monotonic_ns() < deadline_ns, "it did not come to that"
        pause.wait(0.001)


def hint_that(client: AgentClient, place: tuple[int, int], holds: Callable[[list[int], int], bool]) -> list[int]:
    """The shares, once they and the backpressure are as they should be."""
    reader = client.reader()
    assert reader is not None
    seen: list[list[int]] = []

    def is_so() -> bool:
        hint = reader.read(*place)
        seen[:] = [hint[0]] if hint is not None else []
        return hint is not None and holds(*hint)

    until(is_so)
    return seen[0]


@pytest.fixture
def heard(directory: Path) -> Iterator[tuple[AgentClient, tuple[int, int], Callable[[bytes], None]]]:
    """A client with a flow, its place, and how to send telemetry to its agent."""
    listening = AgentSettings(directory=directory, telemetry=("127.0.0.1:0",))
    with AgentThread(listening) as agent, AgentClient([directory], "job") as client, _udp(agent) as send:
        yield client, placed(client, client.register("10.0.0.1", "10.0.0.2", PATHS)), send


@contextmanager
def _udp(agent: AgentThread) -> Iterator[Callable[[bytes], None]]:
    host, port = split_address(agent.server.telemetry[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:

        def send(content: bytes) -> None:
            sock.sendto(content, (host, port))

        yield send


Heard = tuple[AgentClient, tuple[int, int], Callable[[bytes], None]]


def test_without_telemetry_there_is_no_advice(heard: Heard) -> None:
    client, place, _ = heard
    reader = client.reader()
    assert reader is not None
    assert (reader.look(), reader.read(*place)) == ("fresh", None)


def test_backpressure_in_a_packet_takes_the_path_away(heard: Heard) -> None:
    client, place, send = heard
    send(congestion(0, 255, 1))
    assert hint_that(client, place, lambda _, backpressure: backpressure == 1) == [0, 65535]


def test_backpressure_on_many_pairs_reaches_all(directory: Path) -> None:
    listening = AgentSettings(directory=directory, telemetry=("127.0.0.1:0",))
    with AgentThread(listening) as agent, AgentClient([directory], "job") as client, _udp(agent) as send:
        ends = [("10.0.0.1", f"10.2.0.{number}") for number in range(2 * MAX_URGENT_PER_CALL)]
        flows = [client.register(*end, [end, PATHS[1]]) for end in ends]
        placed(client, flows[-1])
        body = Congestion(0, address_number("10.2.0.0"), 0, 255, 0, 0, 120)
        send(encode(Packet(body, 1, unix_ns())))
        for flow in flows:
            hint_that(client, placed(client, flow), lambda _, backpressure: backpressure == 1)


def test_the_less_congested_path_gets_more(heard: Heard) -> None:
    client, place, send = heard
    send(congestion(0, 200, 1))
    send(congestion(1, 10, 2))
    shares = hint_that(client, place, lambda shares, _: shares[1] > shares[0])
    assert sum(shares) == 65_535


def test_a_sender_that_falls_silent_leaves_no_advice(heard: Heard) -> None:
    """Stale is unknown, and of the unknown there is no advice."""
    client, place, send = heard
    send(congestion(0, 100, 1))
    hint_that(client, place, lambda shares, _: shares[0] > 0)
    reader = client.reader()
    assert reader is not None
    until(lambda: reader.read(*place) is None)


def test_bad_telemetry_is_counted_and_changes_nothing(heard: Heard, directory: Path) -> None:
    client, place, send = heard
    good = congestion(0, 255, 1)
    send(b"garbage")
    send(b"\0" * 2_000)
    send(good[:-1])
    send(good)
    send(good)
    hint_that(client, place, lambda _, backpressure: backpressure == 1)
    with AgentConsole([directory]) as console:
        until(lambda: "telemetry replayed" in console.status().refused)
        assert console.status().refused == {"telemetry length": 3, "telemetry replayed": 1}


def test_a_default_address_that_is_in_use_is_a_warning_and_a_chosen_one_an_error(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        where = (f"127.0.0.1:{taken.getsockname()[1]}",)
        chosen = AgentSettings(directory=directory, telemetry=where)
        with pytest.raises(ConfigError, match="in use"):
            AgentThread(chosen)
        with AgentThread(replace(chosen, is_telemetry_optional=True)) as agent, AgentConsole([directory]) as console:
            assert (agent.server.telemetry, console.status().telemetry) == ([], ())
    assert f"cannot receive telemetry at {where[0]}" in caplog.text
    assert _settings(load({"agent_dir": tmp_path})).is_telemetry_optional
    assert not _settings(load({"agent_dir": tmp_path, "agent_telemetry": list(where)})).is_telemetry_optional


def _snippets(page: str) -> list[str]:
    text = (Path(__file__).resolve().parents[3] / "docs" / "guides" / page).read_text()
    return [block.split("```")[0] for block in text.split("```python\n")[1:]]


def test_the_packet_of_the_guide_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(WAIT_S)
        receiver.bind(("127.0.0.1", 0))
        monkeypatch.setattr("ringfold.config.TELEMETRY_PORT", receiver.getsockname()[1])
        exec(_snippets("telemetry.md")[0], {})
        packet = decode(receiver.recv(2_048))
    assert isinstance(packet, Packet)
    assert packet.body == Congestion(address_number("10.0.0.1"), address_number("10.0.0.2"), 1, 180, 65_536)


def test_the_monitor_of_the_guide_reads_what_its_driver_reports() -> None:
    names: dict[str, type[Monitor]] = {}
    exec(next(block for block in _snippets("telemetry.md") if "class Rings" in block), names)
    with pytest.raises(OSError, match="ring_bytes"):
        names["Rings"]().read("lo")


def test_the_client_of_the_guide_runs_with_an_agent(agent: AgentThread, directory: Path) -> None:
    [snippet] = _snippets("agent.md")
    waits = snippet.replace("/run/ringfold", str(directory)).replace("...", "placed(client, flow)", 1)
    names: dict[str, object] = {"placed": placed}
    exec(waits, names)
    assert names["hint"] == ([49151, 16384], 0)


def test_telemetry_from_beyond_this_host_needs_a_list_or_a_key(directory: Path) -> None:
    with pytest.raises(ConfigError, match="can send telemetry"):
        AgentSettings(directory=directory, telemetry=("0.0.0.0:0",))
    AgentSettings(directory=directory, telemetry=("0.0.0.0:0",), gate=GateSettings(allow=["10.0.0.0/8"]))


# Around it


def test_the_interface_of_an_address_is_watched_while_a_flow_uses_it() -> None:
    watch = NicWatch()
    assert watch.is_idle
    watch.add_address("127.0.0.1")
    assert [name for name, _ in watch.read(monotonic_ns())] == ["lo"]
    watch.remove_address("127.0.0.1")
    assert watch.is_idle
    assert watch.read(monotonic_ns()) == {}
    watch.close()


def test_switches_are_told_of_flows_and_queues(directory: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as switch:
        switch.bind(("127.0.0.1", 0))
        switch.settimeout(WAIT_S)
        where = f"127.0.0.1:{switch.getsockname()[1]}"
        with AgentThread(settings(directory, report_to=(where,))), AgentClient([directory], "job") as client:
            flow = client.register("127.0.0.1", "127.0.0.1", [("127.0.0.1", "127.0.0.1")] * 2)
            slot, generation = placed(client, flow)
            heard: set[str] = set()
            while not heard >= {"FlowAdded", "FlowPath", "NicQueues"}:
                heard.add(_body(switch, slot, generation))
            client.deregister(flow)
            while _body(switch, slot, generation) != "FlowRemoved":
                pass


def test_flows_are_repeated_also_by_an_agent_that_watches_no_interfaces(directory: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as switch:
        switch.bind(("127.0.0.1", 0))
        switch.settimeout(WAIT_S)
        where = f"127.0.0.1:{switch.getsockname()[1]}"
        often = ReportSettings(repeat_ms=50)
        quiet = settings(directory, report_to=(where,), reports=often, watch_nics=False)
        with AgentThread(quiet), AgentClient([directory], "job") as client:
            place = placed(client, client.register("127.0.0.1", "127.0.0.1", [("127.0.0.1", "127.0.0.1")] * 2))
            assert [_body(switch, *place) for _ in range(6)] == ["FlowAdded", "FlowPath", "FlowPath"] * 2


def _body(switch: socket.socket, slot: int, generation: int) -> str:
    packet = decode(switch.recv(2_000))
    assert isinstance(packet, Packet)
    if isinstance(packet.body, FlowAdded | FlowPath | FlowRemoved):
        assert (packet.body.slot, packet.body.generation) == (slot, generation)
    return type(packet.body).__name__


def test_a_feed_is_read_like_telemetry(directory: Path, tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    feed.write_text("")
    with AgentThread(settings(directory, feeds=(f"json={feed}",))), AgentClient([directory], "job") as client:
        place = placed(client, client.register("10.0.0.1", "10.0.0.2", PATHS))
        with feed.open("a") as file:
            file.write('nonsense\n{"source": "10.0.0.1", "destination": "10.0.0.2", "path": 0, "congestion": 255}\n')
        assert hint_that(client, place, lambda _, backpressure: backpressure == 1) == [0, 65535]
        with AgentConsole([directory]) as console:
            assert console.status().refused == {"telemetry feed": 1}


def test_a_flow_is_told_when_its_place_changes(directory: Path) -> None:
    told: list[tuple[int, bool]] = []
    with AgentClient([directory], "job", on_place=lambda flow, place: told.append((flow, place is not None))) as client:
        flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
        with AgentThread(settings(directory)):
            placed(client, flow)
        assert client.wait(lambda each: each.place(flow) is None, WAIT_S)
    assert told == [(flow, True), (flow, False)]


def test_a_closed_client_takes_no_more_flows(agent: AgentThread, directory: Path) -> None:
    client = AgentClient([directory], "job")
    flow = client.register("10.0.0.1", "10.0.0.2", PATHS)
    placed(client, flow)
    client.close()
    client.close()
    client.deregister(flow)
    client.measured(flow, (1, 2))
    with pytest.raises(UsageError, match="closed"):
        client.register("10.0.0.1", "10.0.0.2", PATHS)


def test_a_request_that_breaks_the_agent_costs_only_its_client(
    agent: AgentThread, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are looked at afterwards; as long as they are sound, the others go on."""
    with AgentClient([directory], "a bystander") as bystander:
        flow = bystander.register("10.0.0.1", "10.0.0.2", PATHS)
        placed(bystander, flow)
        with monkeypatch.context() as patch:
            patch.setattr(agent.server._machine, "status", lambda *_: NOTHING["missing"])
            [_, refused] = strange(
                directory, agent_frame(AgentHello(1, "unlucky")) + agent_frame(AskAgent(1)) + agent_frame(AskAgent(2))
            )
        assert isinstance(refused, AgentRefused)
        assert "the agent failed on its AskAgent" in refused.text
        assert bystander.place(flow) is not None
    with AgentConsole([directory]) as console:
        assert console.status().refused == {"invalid": 1}


def test_an_agent_whose_tables_are_not_sound_after_a_fault_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = AgentThread(settings(directory))
    monkeypatch.setattr(agent.server._machine, "status", lambda *_: NOTHING["missing"])
    monkeypatch.setattr(agent.server._machine, "check", lambda: NOTHING["unsound"])
    strange(directory, agent_frame(AgentHello(1, "unlucky")) + agent_frame(AskAgent(1)))
    with pytest.raises(KeyError, match="missing"):
        agent.join()
