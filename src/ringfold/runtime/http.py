"""Questions to an HTTP server, over connections that are kept; and streams, of which only the pulse counts.

A question that fails says how far it came: `NotSent` if the server cannot have seen it, `NoAnswer` if perhaps it has.
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
    """The server has not seen the question."""


class NoAnswer(OSError):
    """The question was sent, and its answer did not come."""


class HttpClient:
    """One server, any number of threads. `post` uses a connection that is free, or opens one."""

    def __init__(self, host: str, port: int, *, tls: bool = False) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()

    def post(self, path: str, body: bytes, headers: Headers, timeout_s: float) -> tuple[int, bytes]:
        """The status and the body of the answer; each step of it takes at most `timeout_s`."""
        connection = self._free() or self._connect(timeout_s)
        connection.sock.settimeout(max(0.001, timeout_s))
        try:
            connection.request("POST", path, body, dict(headers))
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(str(error) or type(error).__name__) from error
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return answer.status, said

    def stream(self, path: str, body: bytes, headers: Headers, timeout_s: float) -> "HttpStream":
        """Ask a question whose answer goes on; returns when its first line is there."""
        connection = self._connect(timeout_s)
        try:
            connection.request("POST", path, body, dict(headers))
            answer = connection.getresponse()
            return HttpStream(connection, answer.status, answer.readline(1 << 20))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NoAnswer(str(error) or type(error).__name__) from error

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _free(self) -> http.client.HTTPConnection | None:
        """A connection that was left open, unless the server has closed it meanwhile."""
        while True:
            with self._lock:
                if self._pid != os.getpid():  # after a fork they are the parent's
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
        except OSError as error:
            connection.close()
            raise NotSent(str(error)) from error
        return connection


class HttpStream:
    """An answer that goes on. Whatever arrives is a pulse; only the first line is ever read."""

    def __init__(self, connection: http.client.HTTPConnection, status: int, first: bytes) -> None:
        self._connection, self.status, self.first = connection, status, first
        self._socket = connection.sock

    def pulse(self, timeout_s: float) -> bool:
        """Whether something came within the time. Raises NoAnswer when the stream has ended."""
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


def is_readable(one: socket.socket, timeout_s: float) -> bool:
    """Whether a socket has something to read within the time, or was closed by the other side."""
    if isinstance(one, ssl.SSLSocket) and one.pending():
        return True
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1_000))
