"""The shell of the master machine: asyncio sockets in, effects out. It decides nothing.

One `_Door` per connection cuts bytes into frames and turns them into events; `MasterServer` steps the machine and does
what its effects say, in order. Everything runs in one loop, so a step is never interrupted.

A connection that does not read is no danger to the others: what is queued for it is bounded, and what must still be
flushed when it is closed has FLUSH_S to go.

The result of a round of probing is written down when the machine tells it, which is after the next window's starts were
sent. A disk that is full ends the log, and nothing else.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import assert_never

import msgspec

from ringfold.config import is_loopback, split_address
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.master.events import (
    Beat,
    Close,
    Closed,
    Conn,
    DoneSeen,
    Effect,
    Event,
    Malformed,
    MoonshotFound,
    Opened,
    Piece,
    Received,
    Send,
    SendBeat,
    SendEvidence,
    StartMoonshot,
    Tell,
    Tick,
    Trust,
)
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.probe.log import ExportSettings, Log
from ringfold.runtime import server as rim
from ringfold.runtime.aside import ask_aside
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.entropy import random_bytes
from ringfold.topology.moonshot import Answer, Question
from ringfold.wire.events import Notice, RoundDone
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    decode_done,
    decode_heartbeat,
    decode_to_master,
    evidence_frame,
    master_beat,
    message_frame,
)
from ringfold.wire.messages import FromMaster, GroupId
from ringfold.wire.proof import NONCE_BYTES

TICK_S = 0.05
MOONSHOT_S = 60.0
SILENCE_S = 60
"""Peers have heartbeats; this is for nodes that only probe, and for watchers."""
FLUSH_S = 1.0
MAX_QUEUED_BYTES = 256 * 1024 * 1024
"""A peer with more than this queued for it does not read, and is given up."""

_log = logging.getLogger("ringfold.master")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class MasterServer:
    """A master on real sockets. `listen` holds addresses like `127.0.0.1:48148`, `[::1]:0` or `localhost:48148`.

    Other addresses than loopback need a token, or `insecure` said aloud.
    """

    def __init__(
        self,
        settings: MasterSettings,
        listen: Sequence[str],
        token: bytes = b"",
        insecure: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self._listen = [split_address(address) for address in listen]
        if not self._listen:
            raise ConfigError("the master needs an address to listen on")
        for host, _ in self._listen:
            if not (token or insecure or is_loopback(host)):
                raise ConfigError(f"listening on {host} lets others join: give a token, or say insecure")
        self._on_notice = on_notice
        self._export = settings.export
        self._rounds: Log | None = None
        self._machine = Master(settings, token, random_bytes(32), started_ns=monotonic_ns(), now_ns=monotonic_ns)
        self._doors: dict[Conn, _Door] = {}
        self._servers: list[asyncio.Server] = []
        self._leaving: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._last_conn = 0
        self._encoded: tuple[FromMaster, bytes] | None = None
        self._moonshot: asyncio.Task[None] | None = None
        self._one_left = asyncio.Event()
        self._stopping: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self.addresses: list[str] = []
        """Where it listens, once it does; with the ports that the kernel chose for port 0."""

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Listen, and serve until `stop`. `ready` is called once peers may come.

        Raises OSError if it cannot listen, and ConfigError if it cannot write rounds down where it should.
        """
        self._stopping = asyncio.Event()
        ticking: asyncio.Task[None] | None = None
        try:
            await self._open()
            ticking = asyncio.create_task(self._tick(), name="ringfold master ticks")
            _log.info("listening on %s", ", ".join(self.addresses))
            if ready is not None:
                ready()
            await self._stopping.wait()
        finally:
            tasks = [task for task in (ticking, self._moonshot) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shut()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `serve`: all sockets are closed when it returns. Call it in the server's loop."""
        if self._stopping is not None:
            self._stopping.set()

    async def _open(self) -> None:
        if self._export is not None:
            self._rounds = Log(ExportSettings(directory=self._export))
        loop = asyncio.get_running_loop()
        for host, port in self._listen:
            server = await loop.create_server(lambda: _Door(self), host, port, reuse_address=True, backlog=1024)
            self._servers.append(server)
            for sock in server.sockets:
                rim.guard(sock.fileno())
                self.addresses.append(rim.address_text(sock.getsockname()))

    async def _shut(self) -> None:
        for server in self._servers:
            for sock in server.sockets:
                rim.unguard(sock.fileno())
            server.close()
        for door in list(self._doors.values()):
            self._say_goodbye(door)
        self._doors.clear()
        # Each connection that is leaving has its timer, so this wait ends.
        while self._leaving:
            self._one_left.clear()
            await self._one_left.wait()
        for server in self._servers:
            await server.wait_closed()
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.step(Tick())

    # Events in, effects out

    def step(self, event: Event) -> None:
        """Step the machine and do what it says. If it breaks, its state is worth nothing: the server ends."""
        if self._failure is not None:
            return
        try:
            for effect in self._machine.step(monotonic_ns(), event):
                self._do(effect)
        except Exception as error:
            _log.exception("the master machine broke at %r", event)
            self._failure = error
            self.stop()

    def _do(self, effect: Effect) -> None:
        match effect:
            case SendEvidence(conns, evidence):
                frame = evidence_frame(evidence)
                for conn in conns:
                    self._write(conn, frame)
            case Send(conn, message):
                self._write(conn, self._encode(message))
            case SendBeat(conn, number, echo):
                self._write(conn, master_beat(number, echo))
            case Trust(conn):
                if conn in self._doors:
                    self._doors[conn].frames.limit = MAX_FRAME_BYTES
            case Close(conn, _):
                door = self._doors.pop(conn, None)
                if door is not None:
                    self._say_goodbye(door)
            case Tell(notice):
                self._tell(notice)
            case StartMoonshot(group, question):
                if self._moonshot is None or self._moonshot.done():
                    self._moonshot = asyncio.create_task(self._search(group, question), name="ringfold moonshot")
            case _:
                assert_never(effect)

    async def _search(self, group: GroupId, question: Question) -> None:
        """The long search for a better ring. Nobody waits for it, so that its failure is only logged."""
        try:
            said = await ask_aside("ringfold.topology.moonshot", msgspec.json.encode(question), MOONSHOT_S)
        except OSError as error:
            _log.warning("the long search for a better ring cannot be started: %s", error)
            return
        if said is None:
            _log.info("the long search for a better ring of group %d came to nothing", group)
            return
        found = msgspec.json.decode(said, type=Answer)
        if found.solution is not None:
            self.step(MoonshotFound(group, found.solution))

    def _tell(self, notice: Notice) -> None:
        """Log it, write a round down, pass it to the observer. A run does not end because its observer does."""
        _log.log(_LEVELS[notice.level], "%s", notice)
        try:
            if self._rounds is not None and isinstance(notice, RoundDone):
                self._rounds.round(notice.summary)
            if self._on_notice is not None:
                self._on_notice(notice)
        except Exception:
            _log.exception("an observer failed at %r", notice)

    def _encode(self, message: FromMaster) -> bytes:
        """A record goes to every member and may be large: it is encoded once and its bytes are shared."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, message_frame(message))
        return self._encoded[1]

    def _write(self, conn: Conn, frame: bytes) -> None:
        door = self._doors.get(conn)
        if door is not None and door.transport is not None:
            door.transport.write(frame)

    def _say_goodbye(self, door: "_Door") -> None:
        """Close after what is queued has been sent, or FLUSH_S later."""
        transport = door.transport
        if transport is None:
            return
        timer = asyncio.get_running_loop().call_later(FLUSH_S, transport.abort)
        self._leaving[transport] = timer
        transport.close()

    # Doors

    def opened(self, door: "_Door", remote: str) -> Conn:
        self._last_conn += 1
        self._doors[self._last_conn] = door
        self.step(Opened(self._last_conn, remote, random_bytes(NONCE_BYTES)))
        return self._last_conn

    def lost(self, door: "_Door", reason: str) -> None:
        """The connection is gone; the machine is told unless it closed it itself."""
        if door.transport is not None and (timer := self._leaving.pop(door.transport, None)) is not None:
            timer.cancel()
            self._one_left.set()
        if self._doors.pop(door.conn, None) is not None:
            self.step(Closed(door.conn, reason))

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def is_open(self, conn: Conn) -> bool:
        return conn in self._doors


class _Door(asyncio.Protocol):
    """One connection: bytes in, events out."""

    def __init__(self, server: MasterServer) -> None:
        self._server = server
        self.frames = FrameReader()
        self.transport: asyncio.Transport | None = None
        self.conn: Conn = 0
        self._fd = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._fd = transport.get_extra_info("socket").fileno()
        rim.guard(self._fd)
        rim.no_delay(transport)
        rim.keep_alive(transport, SILENCE_S)
        transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        if self._server.is_stopping:
            transport.abort()  # it slipped in while the doors were being closed
            return
        self.conn = self._server.opened(self, rim.remote_name(transport))

    def data_received(self, chunk: bytes) -> None:
        if not self._server.is_open(self.conn):
            return
        try:
            for kind, body in self.frames.feed(chunk):
                self._server.step(self._event(kind, body))
                if not self._server.is_open(self.conn):
                    return
            if self.frames.is_inside:
                self._server.step(Piece(self.conn))
        except RemoteProtocolError as error:
            self._server.step(Malformed(self.conn, str(error)))

    def _event(self, kind: FrameKind, body: bytes) -> Event:
        match kind:
            case FrameKind.DONE:
                return DoneSeen(self.conn, decode_done(body))
            case FrameKind.HEARTBEAT:
                return Beat(self.conn, decode_heartbeat(body))
            case FrameKind.MESSAGE:
                return Received(self.conn, decode_to_master(body), len(body))
            case FrameKind.EVIDENCE:
                raise RemoteProtocolError("evidence is the master's to send")

    def pause_writing(self) -> None:
        # The queue was filled by the effects of a step that is still being carried out: tell the machine after it.
        assert self.transport is not None
        reason = f"it does not read: more than {MAX_QUEUED_BYTES} bytes are queued for it"
        asyncio.get_running_loop().call_soon(self._server.lost, self, reason)
        self.transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        rim.unguard(self._fd)
        self._server.lost(self, str(exc) if exc is not None else "")


class MasterThread:
    """A master in a thread of its own: for `rf.join(host_master=True)`, notebooks and tests. Use it with `with`."""

    def __init__(
        self,
        settings: MasterSettings | None = None,
        listen: Sequence[str] = ("127.0.0.1:0",),
        token: bytes = b"",
        insecure: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        """Returns once it listens; raises OSError if it cannot."""
        self._server = MasterServer(settings or MasterSettings(), listen, token, insecure, on_notice)
        self._thread = rim.LoopThread("ringfold-master", self._server.serve)
        self._thread.wait_ready()

    @property
    def address(self) -> str:
        """The first address it listens on."""
        return self._server.addresses[0]

    @property
    def addresses(self) -> list[str]:
        return list(self._server.addresses)

    def stop(self) -> None:
        """End the master and wait until its sockets are closed. May be called again."""
        self._thread.call(self._server.stop)
        self._thread.join()

    def __enter__(self) -> "MasterThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
