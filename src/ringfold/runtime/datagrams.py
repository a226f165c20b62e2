"""UDP: a sender that expects no responses, and a port that receives."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import TracebackType


class DatagramSender:
    """Sends to one address. A datagram that cannot be sent at once is lost, and counted."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if the host name cannot be resolved."""
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        self._where: tuple[str | int | bytes, ...] = where
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self.lost = 0
        self._is_connected = False
        with contextlib.suppress(OSError):
            self._connect()

    def _connect(self) -> None:
        """Connect. Fails while there is no network, because a service may start before it; `send` tries again."""
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
        """Whether no socket received the last datagram. On this host that is known at once, of other hosts perhaps
        later."""
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
    """Receives datagrams in the running event loop, up to MAX_BATCH at a time. `on_datagram` gets the content of each
    and the address of its sender. What is not received in time the kernel drops."""

    MAX_BATCH = 32
    MAX_BYTES = 2_048
    """A longer datagram is truncated: no valid one is."""

    def __init__(self, host: str, port: int, on_datagram: Callable[[bytes, str], None]) -> None:
        """Raises OSError if the address cannot be bound."""
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )[0]
        self._on_datagram, self._loop = on_datagram, asyncio.get_running_loop()
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
        """The address that it is bound to, as the kernel reports it."""
        return self._socket.getsockname()

    def pause(self, rest_s: float) -> None:
        """Receive nothing for this long."""
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
        for _ in range(self.MAX_BATCH):
            try:
                content, address = self._socket.recvfrom(self.MAX_BYTES)
            except OSError:  # no more datagrams, or it was closed
                return
            self._on_datagram(content, address[0])
            if self._pause is not None:
                return
