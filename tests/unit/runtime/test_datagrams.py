"""Sending datagrams: what cannot be sent is lost and counted, and later ones are not."""

import asyncio
import socket
from itertools import pairwise

import pytest

from ringfold.runtime.datagrams import DatagramPort, DatagramSender


class Unplugged:
    """A socket on a host whose network comes up at the second try."""

    def __init__(self) -> None:
        self.tries = 0
        self.sent: list[bytes] = []

    def connect(self, where: object) -> None:
        self.tries += 1
        if self.tries < 2:
            raise OSError("Network is unreachable")

    def send(self, content: bytes) -> None:
        if self.tries < 2:
            raise OSError("Destination address required")
        self.sent.append(content)

    def setblocking(self, flag: bool) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_sender_that_started_before_its_network_sends_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cable = Unplugged()
    monkeypatch.setattr(socket, "socket", lambda *_: cable)
    with DatagramSender("127.0.0.1", 9) as sender:
        sender.send(b"first")
        sender.send(b"second")
    assert (cable.sent, sender.lost) == ([b"first", b"second"], 0)


def test_a_datagram_to_a_closed_port_of_this_host_is_noticed_at_once() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with DatagramSender("127.0.0.1", port) as sender:
            sender.send(b"received")
            assert not sender.was_refused
    with DatagramSender("127.0.0.1", port) as sender:
        sender.send(b"lost")
        assert sender.was_refused


def test_a_paused_port_receives_later_what_came_meanwhile() -> None:
    async def receive() -> list[bytes]:
        taken: list[bytes] = []
        all_came = asyncio.Event()

        def received(content: bytes, host: str) -> None:
            assert host == "127.0.0.1"
            taken.append(content)
            times.append(asyncio.get_running_loop().time())
            port.pause(0.002)
            if len(taken) == 5:
                all_came.set()

        times: list[float] = []
        port = DatagramPort("127.0.0.1", 0, received)
        name = port.name
        assert isinstance(name, tuple)
        with DatagramSender(*name) as sender:
            for number in range(5):
                sender.send(b"%d" % number)
        async with asyncio.timeout(20):
            await all_came.wait()
        port.close()
        port.close()
        assert all(after - before > 0.001 for before, after in pairwise(times))
        return taken

    assert asyncio.run(receive()) == [b"0", b"1", b"2", b"3", b"4"]
