"""The web server of a dashboard: files of the page, and one WebSocket for each page.

A page's first message has the token. A page with a wrong one gets a close code of 4401, and not a status of 401, which
a browser would write to its console. After that a page may say which run it shows, whether it wants the links, and in a
replay, which time. Nothing that a page sends changes anything but what it is sent.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from ringfold.config import is_loopback, split_address
from ringfold.errors import ConfigError
from ringfold.observe.dashboard.access import may_look, why_refused
from ringfold.observe.view import Json

DASHBOARD_PORT = 48_150
PORTS_TRIED = 32
MAX_PAGES = 512
MAX_MESSAGE_BYTES = 4_096
HELLO_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 30.0
"""A page that takes nothing for so long is closed."""
CLOSE_WRONG_TOKEN = 4401
CLOSE_TOO_MANY = 4429
_PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_log = logging.getLogger(__name__)


class Session(Protocol):
    """What one page sees of a source of states."""

    async def receive(self, message: dict[str, Json]) -> None:
        """Take in a message of the page."""

    async def run(self) -> None:
        """Send to the page, until cancelled."""

    def close(self) -> None:
        """The page is gone."""


class Source(Protocol):
    """Where the states come from: live runs, or finished ones."""

    def open(self, page: "PageSocket") -> Session:
        """A session for a page that may look."""


class PageSocket:
    """The WebSocket of a page."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket

    async def send(self, message: bytes) -> None:
        """Send a JSON text. Waits while the page takes nothing; a page that takes nothing for long is closed."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.send_frame(message, WSMsgType.TEXT)
        except (TimeoutError, ConnectionError):
            await self._socket.close(code=WSCloseCode.GOING_AWAY, drain=False)
            raise ConnectionResetError("the page takes nothing") from None


class DashboardServer:
    """Serves a source of states to pages. `token` is empty on loopback without a join token."""

    def __init__(self, source: Source, token: str = "") -> None:
        self._source, self._token = source, token
        self._files = {path.name: path.read_bytes() for path in _PAGE.iterdir() if path.suffix in _TYPES}
        self._sockets: set[web.WebSocketResponse] = set()
        self._runner: web.AppRunner | None = None
        self._only_loopback = True
        self.address = ""

    @property
    def pages(self) -> int:
        return len(self._sockets)

    @property
    def url(self) -> str:
        """The address for a browser, with the token."""
        host, port = split_address(self.address)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/{f'#token={self._token}' if self._token else ''}"

    async def start(self, listen: str, *, or_next: bool = False) -> None:
        """Listen on `host:port`; `or_next`: on the next free port if that one is in use."""
        host, port = split_address(listen, DASHBOARD_PORT)
        self._only_loopback = is_loopback(host)
        if not self._only_loopback and not self._token:
            raise ConfigError(f"a dashboard on {host} can be reached from other machines, and needs a join token")
        app = web.Application()
        app.router.add_get("/live", self._live)
        app.router.add_get("/{name:[a-z]*[.]?[a-z]*}", self._file)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        for tried in range(PORTS_TRIED if or_next and port else 1):
            site = web.TCPSite(self._runner, host, port + tried, reuse_address=True)
            try:
                await site.start()
            except OSError as error:
                if tried + 1 < PORTS_TRIED and or_next and port and error.errno == 98:
                    continue
                raise ConfigError(f"the dashboard cannot listen on {host}:{port}: {error.strerror}") from error
            break
        bound = self._runner.addresses[0]
        shown = host if host not in ("0.0.0.0", "::", "") else _own_name()
        self.address = f"[{shown}]:{bound[1]}" if ":" in shown else f"{shown}:{bound[1]}"

    async def stop(self) -> None:
        """Close all pages and the port."""
        for socket in list(self._sockets):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(0.5):
                    await socket.close(code=WSCloseCode.GOING_AWAY, drain=False)
        if self._runner is not None:
            await self._runner.cleanup()

    def _refusal(self, request: web.Request) -> web.Response | None:
        why = why_refused(request.host, request.headers.get("Origin"), only_loopback=self._only_loopback)
        return web.Response(status=403, text=f"refused: {why}\n", headers=_HEADERS) if why else None

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"] or "index.html"
        if refusal := self._refusal(request):
            return refusal
        if name == "favicon.ico":
            return web.Response(status=204, headers=_HEADERS)
        content = self._files.get(name)
        if content is None:
            return web.Response(status=404, text=f"there is no {name}\n", headers=_HEADERS)
        kind = _TYPES[Path(name).suffix]
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        socket = web.WebSocketResponse(heartbeat=20.0, max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        if len(self._sockets) >= MAX_PAGES:
            await socket.close(code=CLOSE_TOO_MANY, message=b"too many pages")
            return socket
        self._sockets.add(socket)
        try:
            if may_look(self._token, await _hello(socket)):
                await self._serve(socket)
            else:
                await socket.close(code=CLOSE_WRONG_TOKEN, message=b"wrong token")
        finally:
            self._sockets.discard(socket)
        return socket

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        """Send and receive, until either ends."""
        session = self._source.open(PageSocket(socket))
        async with _ended(asyncio.create_task(_sending(session))):
            try:
                async for message in _messages(socket):
                    await session.receive(message)
            finally:
                session.close()


async def _sending(session: Session) -> None:
    with contextlib.suppress(ConnectionError):
        await session.run()


@contextlib.asynccontextmanager
async def _ended(task: "asyncio.Task[None]") -> AsyncIterator[None]:
    """A task that ends with the block; its failure is logged."""
    try:
        yield
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception:
            _log.exception("a page's updates failed")


async def _hello(socket: web.WebSocketResponse) -> str | None:
    """The token in the first message of a page; None if it sends something else, or nothing."""
    with contextlib.suppress(TimeoutError, TypeError, ConnectionError):
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await socket.receive()
        message = _decoded(first.data) if first.type is WSMsgType.TEXT else None
        token = None if message is None else message.get("token", "")
        return token if isinstance(token, str) else None
    return None


async def _messages(socket: web.WebSocketResponse) -> AsyncIterator[dict[str, Json]]:
    async for message in socket:
        if message.type is WSMsgType.TEXT and (decoded := _decoded(message.data)) is not None:
            yield decoded


def _decoded(text: str) -> dict[str, Json] | None:
    try:
        message = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return message if isinstance(message, dict) else None


def _own_name() -> str:
    from ringfold.runtime.network import host_name

    return host_name()
