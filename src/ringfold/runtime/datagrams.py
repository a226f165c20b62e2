"""Datagrams: what a benchmark, a command or a reporter throws at a UDP port, without an answer, and such a port."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import TracebackType


class DatagramSender:
    """Sends to one address. What cannot be sent now is lost, as a datagram may always be; it is counted."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if there is no such host."""
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        self._where: tuple[str | int | bytes, ...] = where
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self.lost = 0
        self._is_connected = False
        with contextlib.suppress(OSError):
            self._connect()

    def _connect(self) -> None:
        """Fails while there is no network: a service may start before it."""
        self._socket.connect(self._where)
        self._is_connected = True

    def send(self, content: bytes) -> None:
        try:
            if not self._is_connected:
                self._connect()
            self._socket.send(content)
        except OSError:
            self.lost += 1

    @property
    def was_refused(self) -> bool:
        """Whether the last one found nobody. On this host that is known at once; of others, perhaps later."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "DatagramSender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DatagramPort:
    """Takes datagrams at an address, in the running loop: up to MOST_AT_ONCE, then it is others' turn. `heard` is told
    what each one says and which host sent it. What nobody takes in time the kernel drops."""

    MOST_AT_ONCE = 32
    MOST_BYTES = 2_048
    """What is longer is cut off here: nobody sends such a thing."""

    def __init__(self, host: str, port: int, heard: Callable[[bytes, str], None]) -> None:
        """Raises OSError if the address is not to be had."""
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )[0]
        self._heard, self._loop = heard, asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setblocking(False)
            self._socket.bind(where)
        except BaseException:
            self._socket.close()
            raise
        self._listen()

    @property
    def name(self) -> object:
        """Where it listens, as the kernel says it."""
        return self._socket.getsockname()

    def pause(self, rest_s: float) -> None:
        """Take nothing for a while."""
        if self._pause is None and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(rest_s, self._listen)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._ready)

    def _ready(self) -> None:
        for _ in range(self.MOST_AT_ONCE):
            try:
                content, address = self._socket.recvfrom(self.MOST_BYTES)
            except OSError:  # there are no more, or it was closed
                return
            self._heard(content, address[0])
            if self._pause is not None:
                return
