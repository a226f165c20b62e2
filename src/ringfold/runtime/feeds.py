"""The sources of telemetry feeds: standard input, a file or FIFO, a Unix socket, or an HTTP page that is polled.

-                    standard input
/path/to/file        a FIFO, or a file that grows (followed like `tail -F`, from its beginning), once it exists
unix:/path/to/sock   a Unix stream socket; connected again when it ends
http://host/page     polled (https, too); each response is complete
"""

import asyncio
import http.client
import os
import stat
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import aclosing

_CHUNK_BYTES = 1 << 16
_MAX_PAGE_BYTES = 16 << 20
_RETRY_S = 1.0
_FOLLOW_INTERVAL_S = 0.05


async def chunks(where: str, poll_s: float = 1.0) -> AsyncGenerator[bytes, None]:
    """The content of a feed, in chunks. A newline follows the end of a page or of a connection.

    Standard input ends. Other feeds go on until the iterator is closed, and are opened again after an error. The event
    loop runs between two chunks. Raises OSError for a file that cannot be read.
    """
    if where.startswith(("http://", "https://")):
        source = _pages(where, poll_s)
    elif where.startswith("unix:"):
        source = _connections(where.removeprefix("unix:"))
    elif where == "-":
        source = _pipe(os.dup(sys.stdin.fileno()))
    else:
        source = _file(where)
    async with aclosing(source):
        async for chunk in source:
            for start in range(0, len(chunk), _CHUNK_BYTES):
                yield chunk[start : start + _CHUNK_BYTES]
                await asyncio.sleep(0)


def is_missing(where: str) -> bool:
    """Whether a feed is a file that does not exist yet."""
    return where != "-" and not where.startswith(("http://", "https://", "unix:")) and not os.path.exists(where)


async def _pages(url: str, poll_s: float) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            page = await asyncio.to_thread(_fetch, url)
        except (OSError, ValueError, http.client.HTTPException):
            page = b""
        if page:
            yield page + b"\n"
        await asyncio.sleep(poll_s)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as response:
        page: bytes = response.read(_MAX_PAGE_BYTES)
        return page


async def _connections(path: str) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(_RETRY_S)
            continue
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                yield chunk
        except OSError:
            pass
        finally:
            writer.close()
        yield b"\n"
        await asyncio.sleep(_RETRY_S)


async def _pipe(descriptor: int) -> AsyncGenerator[bytes, None]:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # standard input may be a file
        with os.fdopen(descriptor, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
        yield b"\n"
        return
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            yield chunk
        yield b"\n"
    finally:
        transport.close()


async def _file(path: str) -> AsyncGenerator[bytes, None]:
    """A FIFO or a file. Waits until it exists: collectors start in any order."""
    while is_missing(path):  # noqa: ASYNC110 - there is no event for a new file
        await asyncio.sleep(_RETRY_S)
    if stat.S_ISFIFO(os.stat(path).st_mode):
        # Opened for writing, too: it has no end when the writer closes it, and opening does not wait for a writer.
        source = _pipe(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    else:
        source = _followed(path)
    async with aclosing(source):
        async for chunk in source:
            yield chunk


async def _followed(path: str) -> AsyncGenerator[bytes, None]:
    """Follow a file from its beginning. If another file takes its name, or it shrinks, start from the beginning
    again."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # while it is replaced
            await asyncio.sleep(_FOLLOW_INTERVAL_S)
            continue
        try:
            while not _is_replaced(path, descriptor):
                while chunk := os.read(descriptor, _CHUNK_BYTES):
                    yield chunk
                await asyncio.sleep(_FOLLOW_INTERVAL_S)
        finally:
            os.close(descriptor)
        yield b"\n"


def _is_replaced(path: str, descriptor: int) -> bool:
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False  # it does not exist for now
    return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < os.lseek(descriptor, 0, 1)
