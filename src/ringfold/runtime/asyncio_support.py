"""What asyncio lacks for a server: socket options, readable socket names, and an event loop in a thread."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from ringfold.runtime import threads
from ringfold.runtime.clock import random_bytes

_TCP_INFO_BYTES, _MIN_RTT_AT, _UNKNOWN_RTT = 256, 148, 0xFFFF_FFFF
"""The offset of tcpi_min_rtt in Linux's struct tcp_info, in microseconds, and its value as long as it is not known."""

TOTAL_RETRANS = slice(100, 104)
"""The field tcpi_total_retrans of struct tcp_info (linux/tcp.h)."""


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Send small frames at once: a commit must not wait for Nagle's algorithm."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def keep_alive(transport: asyncio.BaseTransport, idle_s: int) -> None:
    """Turn on TCP keepalive, which detects that the remote host has lost power.

    The connection is reset after `idle_s` of silence and as long again without a response to keepalive probes.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle_s // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def user_timeout(transport: asyncio.BaseTransport, timeout_ms: int) -> None:
    """Close the connection if sent bytes are not acknowledged for so long: the remote host has lost power, or the path
    is broken. (A process that is stopped does not matter here: its kernel acknowledges.)"""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def retransmits(transport: asyncio.BaseTransport | None) -> int:
    """How many segments the kernel has sent again on this connection; 0 where it does not tell."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        facts: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TOTAL_RETRANS.stop)
    except OSError:
        return 0
    return int.from_bytes(facts[TOTAL_RETRANS], sys.byteorder)


def min_rtt_ns(transport: asyncio.BaseTransport) -> int:
    """The shortest round-trip time that the kernel has seen on this connection; 0 if it does not know one.

    It is tcpi_min_rtt of TCP_INFO. The smoothed one contains delayed acknowledgements.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return 0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _MIN_RTT_AT + 4:
        return 0
    rtt_us = int.from_bytes(info[_MIN_RTT_AT : _MIN_RTT_AT + 4], sys.byteorder)
    return 0 if rtt_us == _UNKNOWN_RTT else rtt_us * 1_000


def jittered(pause_s: float) -> float:
    """A pause between a half and one and a half times as long: processes that lost one server do not connect to the
    next one at the same instant."""
    return pause_s * (0.5 + int.from_bytes(random_bytes(4), "little") / (1 << 32))


async def run_until_first_ends(name: str, *parts: Coroutine[Any, Any, object]) -> None:
    """Run coroutines side by side until one of them ends, and cancel the others. Raises what that one raised."""
    tasks = [asyncio.create_task(part, name=name) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def remote_name(transport: asyncio.BaseTransport) -> str:
    """The remote address, as logs print it."""
    return address_text(transport.get_extra_info("peername"))


def address_text(name: Any) -> str:  # noqa: ANN401 - a socket name of any family
    """`host:port` or `[host]:port` of a socket name."""
    if not name:
        return "unknown address"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class LoopThread:
    """A thread with an event loop of its own that runs one coroutine to its end.

    `main` gets a function that it calls when `wait_ready` may return. Without `daemon` the process waits for the
    coroutine when it exits.
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
        """Wait until the coroutine is ready; raises the error that ended it before."""
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the loop, from any thread. No effect after the loop has ended."""
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def join(self) -> None:
        """Wait for the end; raises the error that ended the coroutine."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
