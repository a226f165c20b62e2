"""The lab: paths with the rates that were set, changed and cut while it runs, and nothing left behind."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path as File

import pytest

from ringfold.config import TELEMETRY_PORT
from ringfold.tools.lab import SWITCH, Lab, Path, Queues, Sample, Telemetry, TelemetrySender, missing
from ringfold.wire.telemetry import Congestion, Packet, address_number, decode

pytestmark = [pytest.mark.netns, pytest.mark.skipif(missing(delay=True) is not None, reason=str(missing(delay=True)))]

BURST = 68_000
TRIES = 6


def spaces() -> set[str]:
    return {path.name for path in File("/run/netns").glob("ringfold-lab-*")}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    paths = [Path(name="fast", rate="200mbit"), Path(name="slow", down="40mbit"), Path(name="far", relay=True)]
    with Lab(hosts=["a", "b", "c"], paths=paths) as made:
        yield made


def mbit_once(lab: Lab, source: str, target: str, path: str, size: int = 1_000_000) -> float:
    """The rate of one TCP connection, its burst left out."""
    with lab.within(target):
        server = socket.create_server((lab.address(target, path), 5001))
    with lab.within(source):
        client = socket.create_connection((lab.address(target, path), 5001), 10)
    accepted, _ = server.accept()
    with server, client, accepted:
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        start, got = time.monotonic(), 0
        sender.start()
        while got < size:
            got += len(accepted.recv(1 << 20))
        took = time.monotonic() - start
        sender.join()
    return (size - BURST) * 8 / took / 1e6


def is_between(low: float, lab: Lab, source: str, target: str, path: str, high: float) -> bool:
    """No connection is faster than `high`, and one of a few as fast as `low`: a busy machine only slows links down."""
    for _ in range(TRIES):
        mbit = mbit_once(lab, source, target, path)
        if mbit >= high:
            return False
        if mbit > low:
            return True
    return False


class Receiver:
    """A UDP socket of one host that receives what another sends."""

    def __init__(self, lab: Lab, source: str, target: str, path: str) -> None:
        with lab.within(target):
            self._ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._ear.bind((lab.address(target, path), 0))
        with lab.within(source):
            self._mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._said = 0

    def receives(self, timeout_s: float) -> bool:
        """Whether a packet gets through, sent repeatedly: an interface takes a moment to come up."""
        self._said += 1
        word, deadline = str(self._said).encode(), time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._mouth.sendto(word, self._ear.getsockname())
            self._ear.settimeout(min(left, 0.2))
            with contextlib.suppress(TimeoutError):
                while True:
                    if self._ear.recv(16) == word:
                        return True
        return False

    def close(self) -> None:
        self._ear.close()
        self._mouth.close()


@pytest.fixture(params=["fast", "far"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(lab: Lab, path: str) -> Iterator[Receiver]:
    made = Receiver(lab, "a", "b", path)
    yield made
    lab.restore(path)
    made.close()


def test_paths_have_their_own_rates(lab: Lab) -> None:
    assert is_between(150, lab, "a", "b", "fast", 201)
    assert is_between(32, lab, "a", "b", "slow", 41)


def test_a_rate_changes_for_one_host_and_comes_back(lab: Lab) -> None:
    lab.set_rate("fast", up="30mbit", host="c")
    assert is_between(24, lab, "c", "a", "fast", 31)
    assert is_between(60, lab, "a", "c", "fast", 201)
    lab.set_rate("fast", up="200mbit", host="c")
    assert is_between(60, lab, "c", "a", "fast", 201)


@pytest.mark.parametrize("unplug", [False, True], ids=["silent", "unplugged"])
def test_a_path_that_is_cut_carries_nothing_until_it_is_restored(
    lab: Lab, path: str, receiver: Receiver, unplug: bool
) -> None:
    assert receiver.receives(5)
    lab.cut(path, host="b", unplug=unplug)
    assert not receiver.receives(0.1)
    seen = lab.run("b", ["ip", "-oneline", "link", "show", path]).stdout
    assert ("NO-CARRIER" in seen) == unplug
    lab.restore(path, host="b")
    assert receiver.receives(5)


@pytest.mark.parametrize("path", ["far"])
def test_a_long_path_takes_half_of_its_round_trip_in_each_direction(lab: Lab, receiver: Receiver) -> None:
    lab.set_distance("far", rtt_ms=40)
    took = []
    for _ in range(TRIES):
        start = time.monotonic()
        assert receiver.receives(5)
        took.append(time.monotonic() - start)
    lab.set_distance("far", rtt_ms=0)
    assert 0.020 <= min(took) < 0.035


@pytest.mark.parametrize("path", ["far"])
def test_a_bad_path_loses_what_goes_up_the_cable(lab: Lab, receiver: Receiver) -> None:
    lab.set_distance("far", loss=1, host="a")
    assert not receiver.receives(0.1)
    lab.set_distance("far", loss=0, host="a")
    assert receiver.receives(5)


def test_a_plain_path_refuses_to_become_long(lab: Lab) -> None:
    with pytest.raises(ValueError, match="relay=True"):
        lab.set_distance("fast", rtt_ms=10)


def test_commands_run_on_their_host_and_on_the_switch(lab: Lab) -> None:
    for host in ("b", SWITCH):
        seen = lab.run(host, ["ip", "-brief", "-4", "addr"]).stdout
        assert all(address in seen for address in lab.addresses(host))
    with pytest.raises(subprocess.CalledProcessError):
        lab.run("a", ["false"])


KILLED = """
import os, signal, sys
from ringfold.tools.lab import Lab, Path
lab = Lab(hosts=1, paths=[Path()])
lab.__enter__()
child = lab.start(0, ["sleep", "1000"])
print(lab.space(0), child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_lab_left_is_removed_by_the_next(lab: Lab) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    space, pid = killed.stdout.split()
    assert space in spaces()
    with Lab(hosts=1) as following:
        assert space in following.removed
        assert space not in spaces()
        assert lab.space("a") in spaces()
        deadline = time.monotonic() + 5
        while File("/proc", pid).exists() and "zombie" not in File("/proc", pid, "status").read_text():
            assert time.monotonic() < deadline
    assert following.space(0) not in spaces()


@pytest.fixture
def full(lab: Lab) -> Iterator[Lab]:
    """A lab in which datagrams from a to b wait in the switch, on the path `slow`."""
    lab.set_rate("slow", down="100kbit", host="b")
    with lab.within("a"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
        for _ in range(150):
            mouth.sendto(bytes(1_400), (lab.address("b", "slow"), 9))
    yield lab
    lab.set_rate("slow", down="40mbit", host="b")


def test_what_waits_in_the_switch_is_seen_there_and_nowhere_else(full: Lab) -> None:
    with Queues(full) as queues:
        waiting = [queue for queue in queues.read() if queue.backlog_bytes]
    assert [(queue.host, queue.path, queue.end) for queue in waiting] == [("b", "slow", "down")]
    assert 50_000 < waiting[0].backlog_bytes <= waiting[0].limit_bytes


def test_the_switch_tells_every_sender_of_a_queue(full: Lab) -> None:
    key = b"sixteen bytes or more"
    with contextlib.ExitStack() as stack:
        ears = {}
        for host in ("a", "c"):
            with full.within(host):
                ears[host] = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                ears[host].bind((full.address(host, "fast"), TELEMETRY_PORT))
                ears[host].settimeout(10)
        send = stack.enter_context(TelemetrySender(full, via="fast", key=key, key_id=3))
        stack.enter_context(Telemetry(full, send, every_ms=2))
        for host, receiver in ears.items():
            source, destination = (address_number(full.address(end, "slow")) for end in (host, "b"))
            # Queues that are empty are reported, too.
            while True:
                packet = decode(receiver.recv(2_048), {3: key})
                assert isinstance(packet, Packet)
                assert isinstance(packet.body, Congestion)
                if packet.body.congestion:
                    break
            assert (packet.body.source, packet.body.destination, packet.body.path) == (source, destination, 1)
            assert packet.body.depth_bytes > 50_000


def test_a_host_that_telemetry_cannot_reach_does_not_delay_others(lab: Lab) -> None:
    lab.set_rate("fast", down="8kbit", host="b")
    with contextlib.ExitStack() as stack:
        stack.callback(lab.set_rate, "fast", down="200mbit", host="b")
        with lab.within("a"):
            receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            receiver.bind((lab.address("a", "fast"), TELEMETRY_PORT))
        with lab.within("b"):
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).bind(("0.0.0.0", TELEMETRY_PORT))
        with lab.within("c"):
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).bind(("0.0.0.0", TELEMETRY_PORT))
        send = stack.enter_context(TelemetrySender(lab, via="fast"))
        is_stuck = threading.Event()

        def tell(sample: Sample) -> None:
            send(sample)
            if send.lost:
                is_stuck.set()

        stack.enter_context(Telemetry(lab, tell, every_ms=1))
        assert is_stuck.wait(10)
        receiver.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                receiver.recv(2_048)
        receiver.settimeout(10)
        assert receiver.recv(2_048)


SCRIPT = """
hosts = 1
[[path]]
name = "one"
[[command]]
name = "first"
host = "h0"
run = "sh -c 'echo at {h0.one}; sleep 1000'"
[[command]]
name = "stubborn"
host = "h0"
run = "sh -c 'trap : TERM; sleep 1000'"
[[change]]
at_s = 0.1
path = "one"
rate = "10mbit"
[[change]]
at_s = 0.2
command = "stubborn"
"""


def test_an_interrupted_lab_ends_what_it_started_and_leaves_nothing(tmp_path: File) -> None:
    (tmp_path / "lab.toml").write_text(SCRIPT)
    command = [sys.executable, "-m", "ringfold.cli", "lab", "--json", str(tmp_path / "lab.toml")]
    events, interrupted = [], False
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            events.append(json.loads(line))
            seen = {(each["event"], each["command"]) for each in events if "command" in each}
            if not interrupted and {("line", "first"), ("ended", "stubborn")} <= seen:
                child.send_signal(signal.SIGINT)
                interrupted = True
    assert child.returncode == 130
    assert [each["text"] for each in events if each["event"] == "line"] == ["at 10.79.0.1"]
    assert [each["text"] for each in events if each["event"] == "changed"] == ["one: rate 10mbit"]
    assert [(each["command"], each["status"]) for each in events if each["event"] == "ended"] == [
        ("stubborn", -signal.SIGKILL),
        ("first", -signal.SIGTERM),
    ]
    assert not any(name.startswith(f"ringfold-lab-{child.pid}-") for name in spaces())
