"""Calls into code that may block for ever: they are made in a thread that can be left behind."""

import queue
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Pending(Generic[Value]):
    """A call under way. `result` waits for it, as often as one likes."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[Value, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def result(self, timeout_s: float) -> Value:
        """What the call returned or raised, once; TimeoutError if it is still going on."""
        try:
            value, error = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def run(self, function: Callable[[], Value]) -> None:
        try:
            self._answers.put((function(), None))
        except BaseException as error:
            self._answers.put((None, error))


class Caller:
    """A thread that makes one call after the other. Whoever has lost patience leaves it behind with `leave`."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(name=name, target=self._go, daemon=True).start()

    def start(self, function: Callable[[], Value]) -> Pending[Value]:
        pending: Pending[Value] = Pending()
        self._work.put(lambda: pending.run(function))
        return pending

    def leave(self) -> None:
        """Make no further calls. The thread ends when the present one returns."""
        self._work.put(None)

    def _go(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def can_connect(host: str, port: int, timeout_s: float) -> str:
    """Why nobody answers at an address; empty when somebody does."""
    try:
        socket.create_connection((host, port), max(0.001, timeout_s)).close()
    except OSError as error:
        return str(error)
    return ""


def listening(host: str, port: int) -> tuple[int, int]:
    """The descriptor and the port of a socket that listens at just this address. It belongs to the caller."""
    kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(kind, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.listen(1024)
        bound: int = one.getsockname()[1]
        return one.detach(), bound
