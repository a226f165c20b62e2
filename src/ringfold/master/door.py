"""One connection of the master's server: bytes in, events out."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringfold.errors import RemoteProtocolError
from ringfold.master.events import Beat, Conn, DoneSeen, Event, Malformed, Piece, Received
from ringfold.runtime import asyncio_support
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.frames import FrameKind, FrameReader, decode_done, decode_heartbeat, decode_to_master

if TYPE_CHECKING:
    from ringfold.master.server import MasterServer

SILENCE_S = 60
"""Peers have heartbeats; this is for nodes that only probe, and for watchers."""
MAX_QUEUED_BYTES = 256 * 1024 * 1024
"""A peer with more than this queued for it does not read, and is given up."""


class Door(asyncio.Protocol):
    """One connection: bytes in, events out."""

    def __init__(self, server: "MasterServer") -> None:
        self._server = server
        self.frames = FrameReader()
        self.transport: asyncio.Transport | None = None
        self.conn: Conn = 0
        self._fd = -1
        self._chunks: deque[bytes] = deque()
        self._uncut: Iterator[tuple[FrameKind, bytes]] = iter(())
        """Frames that are not handled yet, of the chunk that is being cut, and the chunks after it."""
        self.has_frames = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._fd = transport.get_extra_info("socket").fileno()
        close_on_fork(self._fd)
        asyncio_support.no_delay(transport)
        asyncio_support.keep_alive(transport, SILENCE_S)
        transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        if self._server.is_stopping:
            transport.abort()  # it slipped in while the doors were being closed
            return
        self.conn = self._server.opened(self, asyncio_support.remote_name(transport))

    def data_received(self, chunk: bytes) -> None:
        if not self._server.is_open(self.conn):
            return
        self._chunks.append(chunk)
        if not self.has_frames:
            self.has_frames = True
            self._server.arrived(self)
        elif self.transport is not None:
            self.transport.pause_reading()  # it waits for its turn, with a chunk or two at most

    def handle(self, most: int) -> int:
        """Turn up to so many frames into events; how many there were. Nothing is read while some are left."""
        count = self._handle(most)
        if self.transport is not None and self._server.is_open(self.conn):
            (self.transport.pause_reading if self.has_frames else self.transport.resume_reading)()
        return count

    def _handle(self, most: int) -> int:
        count = 0
        try:
            while count < most:
                frame = next(self._uncut, None)
                if frame is not None:
                    count += 1
                    self._server.step(self._event(*frame))
                    if not self._server.is_open(self.conn):
                        break
                elif self._chunks:
                    self._uncut = self.frames.feed(self._chunks.popleft())
                else:
                    if self.frames.is_inside:
                        self._server.step(Piece(self.conn))
                    break
            else:
                return count
        except RemoteProtocolError as error:
            self._server.step(Malformed(self.conn, str(error)))
        self._chunks.clear()
        self.has_frames = False
        return count

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
        keep_on_fork(self._fd)
        self._server.lost(self, str(exc) if exc is not None else "")
