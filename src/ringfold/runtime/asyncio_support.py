"""What a server built on asyncio needs from the operating system: socket options, fork safety, a thread to live in."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from ringfold.runtime import threads

_guarded: set[int] = set()


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small frames at once: a commit must not wait for Nagle's algorithm."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def keep_alive(transport: asyncio.BaseTransport, idle_s: int) -> None:
    """Let the kernel ask a silent other end whether it is there: one that lost power would be waited for for ever.

    A connection that was silent for `idle_s` and is not answered for as long again is lost.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def remote_name(transport: asyncio.BaseTransport) -> str:
    """The other end, as logs name it."""
    return address_text(transport.get_extra_info("peername"))


def address_text(name: Any) -> str:  # noqa: ANN401 - whatever the kernel calls an address
    """`host:port` or `[host]:port` of a socket name."""
    if not name:
        return "somebody"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def guard(fd: int) -> None:
    """Close this socket in forked children: a child that outlives its parent must not keep its connections open."""
    _guarded.add(fd)


def unguard(fd: int) -> None:
    _guarded.discard(fd)


def _close_guarded_in_child() -> None:
    # The file numbers stay taken, by /dev/null: objects that the child inherited will close them once more.
    if not _guarded:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _guarded:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _guarded.clear()


os.register_at_fork(after_in_child=_close_guarded_in_child)


class LoopThread:
    """A thread with an event loop of its own that runs one coroutine to its end.

    `main` is given a function to call when `wait_ready` may return. Without `daemon` the process stays up until the
    coroutine has ended.
    """

    def __init__(
        self, name: str, main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]], *, daemon: bool = True
    ) -> None:
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threads.Event()
        self._failure: BaseException | None = None
        self._thread = threads.start(name, self._run, daemon=daemon)

    def _run(self) -> None:
        try:
            asyncio.run(self._body())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _body(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._main(self._ready.set)

    def wait_ready(self) -> None:
        """Wait until the coroutine is ready; raises what it died of before that."""
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the loop, from any thread. Nothing happens once the loop has ended."""
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def join(self) -> None:
        """Wait for the end; raises what the coroutine died of."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
