"""Sending datagrams: what a benchmark, a command or a reporter throws at a UDP port and expects no answer to."""

import contextlib
import socket
from types import TracebackType


class DatagramSender:
    """Sends to one address. What cannot be sent now is lost, as a datagram may always be; it is counted."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError if there is no such host."""
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self.lost = 0
        with contextlib.suppress(OSError):  # as good as sending to nobody
            self._socket.connect(where)

    def send(self, content: bytes) -> None:
        try:
            self._socket.send(content)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "DatagramSender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
