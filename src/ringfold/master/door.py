"""One connection of the master's server: bytes in, events out."""

import asyncio
from typing import TYPE_CHECKING

from ringfold.errors import RemoteProtocolError
from ringfold.master.events import Beat, Conn, DoneSeen, Event, Malformed, Piece, Received
from ringfold.runtime import server as rim
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
