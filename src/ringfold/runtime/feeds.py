"""Where a feed of telemetry comes from: standard input, a file or FIFO, a Unix socket, or a page that is polled.

-                    standard input
/path/to/file        a FIFO, or a file that grows (followed like `tail -F`, from its beginning), once it is there
unix:/path/to/sock   a Unix stream socket; dialled again when it ends
http://host/page     fetched again and again (https too); each answer is a whole
"""

import asyncio
import http.client
import os
import stat
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import aclosing

_CHUNK = 1 << 16
_MOST_PAGE_BYTES = 16 << 20
_AGAIN_S = 1.0
_FOLLOW_S = 0.05


async def chunks(where: str, poll_s: float = 1.0) -> AsyncGenerator[bytes, None]:
    """What a feed says, in pieces; the end of a whole (a page, a connection) ends with a newline.

    Ends with standard input. Other feeds go on until the iterator is closed: what is away is tried again. However much
    a feed has to say, others get a word in between two pieces. Raises OSError for a file that may not be read.
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
            for start in range(0, len(chunk), _CHUNK):
                yield chunk[start : start + _CHUNK]
                await asyncio.sleep(0)


def is_missing(where: str) -> bool:
    """Whether a feed is a file that is not there yet."""
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
    with urllib.request.urlopen(url, timeout=5) as answer:
        page: bytes = answer.read(_MOST_PAGE_BYTES)
        return page


async def _connections(path: str) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(_AGAIN_S)
            continue
        try:
            while chunk := await reader.read(_CHUNK):
                yield chunk
        except OSError:
            pass
        finally:
            writer.close()
        yield b"\n"
        await asyncio.sleep(_AGAIN_S)


async def _pipe(descriptor: int) -> AsyncGenerator[bytes, None]:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # standard input may be a file
        with os.fdopen(descriptor, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
        yield b"\n"
        return
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        while chunk := await reader.read(_CHUNK):
            yield chunk
        yield b"\n"
    finally:
        transport.close()


async def _file(path: str) -> AsyncGenerator[bytes, None]:
    """A FIFO or a file. One that is not there yet is waited for: collectors start in any order."""
    while is_missing(path):  # noqa: ASYNC110 - files ring no bell
        await asyncio.sleep(_AGAIN_S)
    if stat.S_ISFIFO(os.stat(path).st_mode):
        # Opened for writing too: it does not end when the writer goes, and opening does not wait for one.
        source = _pipe(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    else:
        source = _followed(path)
    async with aclosing(source):
        async for chunk in source:
            yield chunk


async def _followed(path: str) -> AsyncGenerator[bytes, None]:
    """A file from its beginning; when another file takes its name, or it shrinks, from the beginning of that."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # between two of them
            await asyncio.sleep(_FOLLOW_S)
            continue
        try:
            while not _is_replaced(path, descriptor):
                while chunk := os.read(descriptor, _CHUNK):
                    yield chunk
                await asyncio.sleep(_FOLLOW_S)
        finally:
            os.close(descriptor)
        yield b"\n"


def _is_replaced(path: str, descriptor: int) -> bool:
    try:
        there, here = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False  # it is away for now
    return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino) or there.st_size < os.lseek(descriptor, 0, 1)
