"""Requests to an HTTP server over persistent connections, and streams whose content is ignored.

The error of a failed request says how far it came: `NotSent` if the server cannot have received it, `NoAnswer` if it
may have.
"""

import http.client
import os
import select
import socket
import ssl
import threading
from collections.abc import Mapping

Headers = Mapping[str, str]


class NotSent(OSError):
    """The server has not received the request."""


class NoAnswer(OSError):
    """The request was sent, and no response arrived."""


class HttpClient:
    """A client of one server, for any number of threads. `post` uses an idle connection, or opens one."""

    def __init__(self, host: str, port: int, *, tls: bool = False) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()

    def post(self, path: str, body: bytes, headers: Headers, timeout_s: float) -> tuple[int, bytes]:
        """The status and the body of the response; each socket operation has a timeout of `timeout_s`."""
        connection = self._free() or self._connect(timeout_s)
        connection.sock.settimeout(max(0.001, timeout_s))
        try:
            connection.request("POST", path, body, dict(headers))
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(str(error) or type(error).__name__) from error
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return response.status, content

    def stream(self, path: str, body: bytes, headers: Headers, timeout_s: float) -> "HttpStream":
        """Send a request with a streaming response; returns after its first line."""
        connection = self._connect(timeout_s)
        try:
            connection.request("POST", path, body, dict(headers))
            response = connection.getresponse()
            return HttpStream(connection, response.status, response.readline(1 << 20))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(str(error) or type(error).__name__) from error

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _free(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not closed."""
        while True:
            with self._lock:
                if self._pid != os.getpid():  # after a fork they belong to the parent
                    self._pid, self._idle = os.getpid(), []
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not is_readable(connection.sock, 0):
                return connection
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        timeout_s = max(0.001, timeout_s)
        connection = (
            http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s)
            if self._tls
            else http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        )
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, UnicodeError) as error:  # a name of a host may not be one
            connection.close()
            raise NotSent(str(error)) from error
        return connection


class HttpStream:
    """A streaming response. Only its first line is read; after that any data only shows that something happened."""

    def __init__(self, connection: http.client.HTTPConnection, status: int, first: bytes) -> None:
        self._connection, self.status, self.first = connection, status, first
        self._socket = connection.sock

    def wait(self, timeout_s: float) -> bool:
        """Whether data arrived before the timeout. Raises NoAnswer when the stream has ended."""
        try:
            if not is_readable(self._socket, timeout_s):
                return False
            if not self._socket.recv(1 << 16):
                raise NoAnswer("the server ended the stream")
        except NoAnswer:
            raise
        except OSError as error:
            raise NoAnswer(str(error)) from error
        return True

    def close(self) -> None:
        self._connection.close()


def is_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Whether a socket becomes readable before the timeout, or was closed by the remote side."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1_000))
