"""A small HTTP server for pages that a program makes on request, in a thread of its own.

It serves GET and HEAD of a few fixed paths, one request after the other. Each page is made at most every `REUSE_S`,
however many clients request it; in between they get the same bytes. What a client can cost is bounded: connections,
the size of a request, and the time until it is complete.

On loopback a request is accepted from any process of the machine, but not from a web page that has rebound its host
name to loopback: the Host header must be a loopback address. Beyond loopback a request needs the bearer token.
"""

import asyncio
import contextlib
import gzip
import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringfold.config import check_exposure, is_loopback, split_address
from ringfold.runtime import asyncio_support
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.process import close_on_fork, keep_on_fork

REUSE_S = 0.2
"""For how long a page may be sent again."""
IDLE_S = 120.0
"""A connection without a request for so long is closed; servers that scrape keep theirs."""
REQUEST_S, SEND_S = 5.0, 10.0
"""How long a request may take to arrive, and a response to be read."""
MAX_REQUEST_BYTES = 16 * 1024
MAX_CONNECTIONS = 64
MIN_GZIP_BYTES = 16 * 1024
GZIP_LEVEL = 1

_log = logging.getLogger("ringfold.http")


@dataclass(frozen=True, slots=True)
class Page:
    """The content of one path at one instant."""

    content: bytes
    content_type: str = "text/plain; version=0.0.4; charset=utf-8"


class PageUnavailable(Exception):
    """The page cannot be made now; the text says why. The response has status 503."""


Pages = Mapping[str, Callable[[], Page]]


@dataclass(slots=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    keeps_open: bool


@dataclass(slots=True)
class _Response:
    status: str
    page: Page
    headers: tuple[str, ...] = ()


class PageServer:
    """Serves `pages` at `listen`, addresses like `127.0.0.1:48146`, until `stop`.

    Addresses beyond loopback need the join token `secret` with 16 bytes or more, or `insecure`; `viewer` is the bearer
    token that requests to them must have ("": none). Port 0 is replaced by a free one, and with `tries` the next ports
    are tried where one is in use.
    """

    def __init__(
        self,
        pages: Pages,
        listen: Sequence[str],
        *,
        secret: bytes = b"",
        viewer: str = "",
        insecure: bool = False,
        default_port: int = 0,
        tries: int = 1,
    ) -> None:
        """Returns when it listens; raises ConfigError or OSError if it cannot."""
        self._pages, self._viewer, self._tries = pages, viewer, tries
        self._listen = [split_address(address, default_port) for address in listen]
        for host, _ in self._listen:
            check_exposure(host, secret, insecure=insecure)
        self.addresses: list[str] = []
        """Where it listens."""
        self._made: dict[str, tuple[int, Page]] = {}
        self._packed: dict[str, tuple[Page, bytes]] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Event | None = None
        self._thread = asyncio_support.LoopThread("ringfold-http", self._serve)
        self._thread.wait_ready()

    @property
    def port(self) -> int:
        """The port of the first address."""
        return split_address(self.addresses[0])[1]

    def stop(self) -> None:
        """Close all sockets, and end the thread. May be called again."""
        self._thread.call(lambda: self._stopping.set() if self._stopping is not None else None)
        self._thread.join()

    async def _serve(self, ready: Callable[[], None]) -> None:
        self._stopping = asyncio.Event()
        servers: list[asyncio.Server] = []
        try:
            for host, port in self._listen:
                servers.append(await self._open(host, port))
            ready()
            await self._stopping.wait()
        finally:
            for server in servers:
                for sock in server.sockets:
                    keep_on_fork(sock.fileno())
                server.close()
            for client in list(self._clients):
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _open(self, host: str, port: int) -> asyncio.Server:
        needs_token = not is_loopback(host)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(self._clients) >= MAX_CONNECTIONS:
                writer.transport.abort()
                return
            client = asyncio.create_task(self._client(reader, writer, needs_token=needs_token), name="ringfold http")
            self._clients.add(client)
            client.add_done_callback(self._clients.discard)

        for number in range(self._tries):
            try:
                server = await asyncio.start_server(accept, host, port + number, limit=MAX_REQUEST_BYTES)
                break
            except OSError:
                if number + 1 == self._tries or not port or port + number + 1 > 65_535:
                    raise
        for sock in server.sockets:
            close_on_fork(sock.fileno())
            self.addresses.append(asyncio_support.address_text(sock.getsockname()))
        return server

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, needs_token: bool) -> None:
        fd = writer.get_extra_info("socket").fileno()
        close_on_fork(fd)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer, needs_token=needs_token):
                    pass
        except (TimeoutError, asyncio.LimitOverrunError, ValueError):
            writer.transport.abort()
        except Exception:
            _log.exception("a request broke")
        finally:
            keep_on_fork(fd)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, needs_token: bool) -> bool:
        """One request and its response. False if the connection is to be closed."""
        async with asyncio.timeout(IDLE_S):
            first = await reader.readexactly(1)
        async with asyncio.timeout(REQUEST_S):
            request = _parse(first + await reader.readuntil(b"\r\n\r\n"))
        response = self._respond(request, needs_token=needs_token)
        body, more = response.page.content, list(response.headers)
        if len(body) >= MIN_GZIP_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
            body = self._gzipped(request.path, response.page)
            more.append("Content-Encoding: gzip")
        keeps_open = request.keeps_open and response.status == "200 OK"
        head = [
            f"HTTP/1.1 {response.status}",
            f"Content-Type: {response.page.content_type}",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            f"Connection: {'keep-alive' if keeps_open else 'close'}",
            *more,
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + (b"" if request.method == "HEAD" else body))
        async with asyncio.timeout(SEND_S):
            await writer.drain()
        return keeps_open

    def _respond(self, request: _Request, *, needs_token: bool) -> _Response:
        if refusal := self._refusal(request, needs_token=needs_token):
            return refusal
        if request.method not in ("GET", "HEAD"):
            return _text("405 Method Not Allowed", "only GET and HEAD are served here", "Allow: GET, HEAD")
        if request.path not in self._pages:
            return _text("404 Not Found", f"there is {', '.join(self._pages)}")
        try:
            return _Response("200 OK", self._page(request.path))
        except PageUnavailable as error:
            return _text("503 Service Unavailable", str(error))

    def _refusal(self, request: _Request, *, needs_token: bool) -> _Response | None:
        if not needs_token:
            host = request.headers.get("host", "localhost").strip()
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if is_loopback(name):
                return None
            return _text("403 Forbidden", f"this is served on loopback only, and not as {name!r}")
        given = request.headers.get("authorization", "")
        if not self._viewer or hmac.compare_digest(given.encode(), f"Bearer {self._viewer}".encode()):
            return None
        text = "a bearer token is needed: `ringfold viewer-token` prints it"
        return _text("401 Unauthorized", text, 'WWW-Authenticate: Bearer realm="ringfold"')

    def _page(self, path: str) -> Page:
        now_ns = monotonic_ns()
        made = self._made.get(path)
        if made is None or now_ns - made[0] >= REUSE_S * 1e9:
            made = self._made[path] = now_ns, self._pages[path]()
        return made[1]

    def _gzipped(self, path: str, page: Page) -> bytes:
        """The same bytes for all clients that get the same page. Compressing releases the GIL."""
        packed = self._packed.get(path)
        if packed is None or packed[0] is not page:
            packed = self._packed[path] = page, gzip.compress(page.content, GZIP_LEVEL)
        return packed[1]


def _text(status: str, text: str, *headers: str) -> _Response:
    return _Response(status, Page(f"{text}\n".encode(), "text/plain; charset=utf-8"), headers)


def _parse(raw: bytes) -> _Request:
    """The head of a request; ValueError if it is none, or has a body."""
    first, *lines = raw.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise ValueError("a request with a body")
    wants = headers.get("connection", "").lower()
    keeps_open = wants != "close" if version == "HTTP/1.1" else wants == "keep-alive"
    return _Request(method, target.partition("?")[0], headers, keeps_open)
