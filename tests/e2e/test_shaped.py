"""Shaped networks: the rates that were set, and nothing left behind."""

import math
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, missing

pytestmark = [pytest.mark.netns, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SIZE = 2_000_000
BURST = 68_000
TRIES = 8


def spaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("ringfold-shaped-*")}


def mbit_once(network: ShapedNetwork, source: int, target: int) -> float:
    """The rate of one TCP connection, its burst left out."""
    with network.within(target):
        server = socket.create_server((network.address(target), 5001))
    with network.within(source):
        client = socket.create_connection((network.address(target), 5001), 10)
    accepted, _ = server.accept()
    with server, client, accepted:
        sender = threading.Thread(target=client.sendall, args=(bytes(SIZE),))
        # Before the first byte leaves: a thread that is not run for a while makes the rate too low, never too high.
        start, got = time.monotonic(), 0
        sender.start()
        while got < SIZE:
            got += len(accepted.recv(1 << 20))
        took = time.monotonic() - start
        sender.join()
    return (SIZE - BURST) * 8 / took / 1e6


def is_between(low: float, network: ShapedNetwork, source: int, target: int, high: float = math.inf) -> bool:
    """No connection is faster than `high`, and one of a few as fast as `low`: a busy machine only slows links down."""
    for _ in range(TRIES):
        mbit = mbit_once(network, source, target)
        if mbit >= high:
            return False
        if mbit > low:
            return True
    return False


def test_a_host_sends_and_receives_at_its_own_rates() -> None:
    with ShapedNetwork([Shape(up_mbit=100, down_mbit=40), Shape(), Shape()]) as network:
        assert is_between(80, network, 0, 1, 101)
        assert is_between(32, network, 1, 0, 41)
        assert is_between(200, network, 1, 2)


def test_a_pair_has_a_rate_of_its_own_in_one_direction() -> None:
    with ShapedNetwork([Shape(up_mbit=100)] * 3, {(0, 1): 30.0}) as network:
        assert is_between(24, network, 0, 1, 31)
        assert is_between(80, network, 0, 2, 101)
        assert is_between(80, network, 1, 0, 101)


def test_commands_run_on_their_host() -> None:
    with ShapedNetwork([Shape()]) as network:
        for host in (0, HUB):
            command = network.inside(host, ["ip", "-brief", "-4", "addr"])
            assert network.address(host) in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_when_the_context_ends_in_an_error() -> None:
    before = spaces()

    def interrupted() -> None:
        with ShapedNetwork([Shape()] * 2):
            assert len(spaces() - before) == 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert spaces() == before


def test_what_a_killed_process_left_is_removed_by_the_next_network() -> None:
    program = (
        "import os, signal\n"
        "from ringfold.tools.shaped import Shape, ShapedNetwork\n"
        "with ShapedNetwork([Shape()]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.Popen([sys.executable, "-c", program])
    child.wait()
    assert any(f"-{child.pid}-" in name for name in spaces())
    with ShapedNetwork([Shape()]):
        assert not any(f"-{child.pid}-" in name for name in spaces())


@pytest.mark.parametrize("bench", ["quantize --size 64M --mbit 10", "topology --peers 8 --matrices 1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_no_network_and_no_process(number: signal.Signals, bench: str) -> None:
    code = "from ringfold.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", *bench.split(), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        mine, deadline = f"ringfold-shaped-{running.pid}-0-", time.monotonic() + 60
        try:
            while not (inside := pids_in(mine + "1")):
                assert running.poll() is None
                assert time.monotonic() < deadline
            running.send_signal(number)
            running.wait(30)
        finally:
            running.kill()
    assert not any(name.startswith(mine) for name in spaces())
    assert not any(Path("/proc", pid).exists() for pid in inside)


def pids_in(space: str) -> list[str]:
    """The processes in a namespace, once it exists and has one."""
    return subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout.split()


def test_rates_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="positive number"):
        Shape(up_mbit=0)
    with pytest.raises(ValueError, match="makes no sense"):
        ShapedNetwork([Shape()], {(0, 1): 5.0})
