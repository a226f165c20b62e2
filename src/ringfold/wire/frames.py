"""How messages become bytes on a control connection, and the fixed frames that native code reads and writes itself.

A frame is `u32 length | u8 kind | body`, little-endian; the length counts the kind and the body. MESSAGE bodies are
msgpack of the types in `messages.py`. The other kinds have fixed layouts because a peer's engine handles them without
Python: heartbeats must flow while the GIL is held, and evidence must not wait for it. A bulk session has two more
kinds, which only engines send and read: 4 (a block of shared state) and 5 (filler, to measure a link with).
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from ringfold.errors import RemoteProtocolError
from ringfold.wire.decoding import decode
from ringfold.wire.messages import BulkMessage, FromMaster, Handshake, Message, ToMaster
from ringfold.wire.status import DURATION_BOUNDS_US, OpTotals, Progress

MAX_HANDSHAKE_BYTES = 16 * 1024
"""The largest frame accepted from an unauthenticated client."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""The largest frame of an authenticated control connection: a verdict may carry all payloads of several small ops."""
MAX_BULK_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest message of a bulk session: the block hashes of a key of two terabytes fit."""


class FrameKind(IntEnum):
    MESSAGE = 0
    HEARTBEAT = 1
    DONE = 2
    EVIDENCE = 3


_HEAD = struct.Struct("<IB")
HEAD_BYTES = _HEAD.size
_HEARTBEAT_NUMBERS = struct.Struct("<QQ")
_REPORT = struct.Struct("<IIIIQQQH")
_ANNOUNCED = struct.Struct("<QIIIB")
_TOTALS = struct.Struct(f"<11Q{len(DURATION_BOUNDS_US) + 1}QI")
"""Eleven counters, the durations, and the length of the program's report."""
_DONE = struct.Struct("<IQII48sQB")
_EVIDENCE = struct.Struct("<IQIIQH")

MAX_REPORT_BYTES = 32 * 1024
"""The largest report of a program in a heartbeat."""
DESCRIPTOR_BYTES = 48
NO_PAYLOAD = 0xFFFF_FFFF
"""In evidence, in place of a payload's length: that rank contributes nothing."""

M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_to_master: msgspec.msgpack.Decoder[ToMaster] = msgspec.msgpack.Decoder(ToMaster)
_from_master: msgspec.msgpack.Decoder[FromMaster] = msgspec.msgpack.Decoder(FromMaster)
_handshake: msgspec.msgpack.Decoder[Handshake] = msgspec.msgpack.Decoder(Handshake)
_progress: msgspec.msgpack.Decoder[Progress] = msgspec.msgpack.Decoder(Progress)
_on_visit: msgspec.msgpack.Decoder[BulkMessage] = msgspec.msgpack.Decoder(BulkMessage)


def encode(message: Message) -> bytes:
    """The msgpack body of a message, without its frame (the peer's engine frames it)."""
    return _encoder.encode(message)


def frame(kind: FrameKind, body: bytes) -> bytes:
    return _HEAD.pack(len(body) + 1, kind) + body


def message_frame(message: Message) -> bytes:
    return frame(FrameKind.MESSAGE, _encoder.encode(message))


def decode_to_master(body: bytes) -> ToMaster:
    return decode(_to_master.decode, body, what=_NO_MESSAGE)


def decode_from_master(body: bytes) -> FromMaster:
    return decode(_from_master.decode, body, what=_NO_MESSAGE)


def decode_handshake(body: bytes) -> Handshake:
    return decode(_handshake.decode, body, what=_NO_MESSAGE)


def decode_bulk(body: bytes) -> BulkMessage:
    return decode(_on_visit.decode, body, what=_NO_MESSAGE)


_NO_MESSAGE = "not a message of this protocol: "


class FrameReader:
    """Cuts a byte stream into frames. `limit` may be raised after the other side is authenticated."""

    def __init__(self, limit: int = MAX_HANDSHAKE_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def is_inside(self) -> bool:
        """Whether a part of a frame has arrived, and not its end."""
        return bool(self._buffer)

    def feed(self, chunk: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield the frames that are complete now. A bad length or kind raises before memory is used for it."""
        self._buffer += chunk
        while len(self._buffer) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._buffer)
            if not 1 <= length <= self.limit:
                raise RemoteProtocolError(f"a frame of {length} bytes (limit {self.limit})")
            if kind not in FrameKind._value2member_map_:
                raise RemoteProtocolError(f"unknown frame kind {kind}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[_HEAD.size : 4 + length])
            del self._buffer[: 4 + length]
            yield FrameKind(kind), body


class Announced(msgspec.Struct, frozen=True):
    """An op that has been in flight for a while, as a heartbeat announces it."""

    tag: int
    sequence: int
    age_ms: int
    fingerprint: int
    done: bool


class Heartbeat(msgspec.Struct, frozen=True):
    """A peer's heartbeat: `echo` is the highest number received from the master; the rest is about the peer's ops.

    `totals` counts since the peer joined. `progress` is None if it has not changed since the last heartbeat.

    `out_stalled_ms`: an op has bytes for the next peer, and none were acknowledged for this long. `in_starved_ms`: an
    op waits for the previous peer, and nothing arrived for this long. `back_stalled_ms`: an op has bytes for the
    *previous* peer (the reverse direction of a lane, or its half of an exchange), and none were acknowledged for this
    long. `received` counts the bytes from the master: during a large record they show that the peer receives, although
    its echo advances only after the record. `out_rate` is the best rate, in bytes per second, at which an op's payload
    went to the next peer since the last heartbeat: only ops that sent 4 MiB or more count, from their start to the end
    of their local part; 0 if there are none.
    """

    number: int
    echo: int
    epoch: int = 0
    out_stalled_ms: int = 0
    in_starved_ms: int = 0
    committed: int = 0
    ops: list[Announced] = []
    received: int = 0
    out_rate: int = 0
    back_stalled_ms: int = 0
    totals: OpTotals = OpTotals()
    progress: Progress | None = None


class Done(msgspec.Struct, frozen=True):
    """A peer's local part of an op is done (evidence by the master). A small op's payload travels inside; it is None if
    the peer contributes nothing.
    """

    epoch: int
    tag: int
    sequence: int
    rank: int
    descriptor: bytes
    registrations: int
    payload: bytes | None


class Evidence(msgspec.Struct, frozen=True):
    """Done of every member has arrived; `payloads` are by rank (empty ones for a large op, None as in `Done`)."""

    epoch: int
    tag: int
    sequence: int
    fingerprint: int
    registrations: int
    payloads: list[bytes | None]


def master_heartbeat(number: int, echo: int) -> bytes:
    return frame(FrameKind.HEARTBEAT, _HEARTBEAT_NUMBERS.pack(number, echo))


def decode_master_heartbeat(body: bytes) -> tuple[int, int]:
    number, echo = _unpack(_HEARTBEAT_NUMBERS, body, exact=True)
    return number, echo


def heartbeat_frame(heartbeat: Heartbeat) -> bytes:
    parts = [
        _HEARTBEAT_NUMBERS.pack(heartbeat.number, heartbeat.echo),
        _REPORT.pack(
            heartbeat.epoch,
            heartbeat.out_stalled_ms,
            heartbeat.in_starved_ms,
            heartbeat.back_stalled_ms,
            heartbeat.committed,
            heartbeat.received,
            heartbeat.out_rate,
            len(heartbeat.ops),
        ),
    ]
    parts += [_ANNOUNCED.pack(op.tag, op.sequence, op.age_ms, op.fingerprint, op.done) for op in heartbeat.ops]
    *counters, durations = msgspec.structs.astuple(heartbeat.totals)
    report = b"" if heartbeat.progress is None else encode_progress(heartbeat.progress)
    parts += [_TOTALS.pack(*counters, *durations, len(report)), report]
    return frame(FrameKind.HEARTBEAT, b"".join(parts))


def decode_heartbeat(body: bytes) -> Heartbeat:
    number, echo = _unpack(_HEARTBEAT_NUMBERS, body)
    epoch, out_ms, in_ms, back_ms, committed, received, out_rate, count = _unpack(
        _REPORT, body, _HEARTBEAT_NUMBERS.size
    )
    first = _HEARTBEAT_NUMBERS.size + _REPORT.size
    at = first + count * _ANNOUNCED.size
    *numbers, length = _unpack(_TOTALS, body, at)
    totals = msgspec.convert([*numbers[:11], numbers[11:]], OpTotals)
    at += _TOTALS.size
    if len(body) != at + length:
        raise RemoteProtocolError(f"a heartbeat of {len(body)} bytes that names {count} ops and {length} bytes more")
    ops = [
        Announced(tag, sequence, age_ms, fingerprint, bool(done))
        for tag, sequence, age_ms, fingerprint, done in _ANNOUNCED.iter_unpack(
            body[first : first + count * _ANNOUNCED.size]
        )
    ]
    progress = _decode_progress(body[at:]) if length else None
    return Heartbeat(number, echo, epoch, out_ms, in_ms, committed, ops, received, out_rate, back_ms, totals, progress)


def encode_progress(progress: Progress) -> bytes:
    """What the engine puts at the end of the next heartbeat."""
    return _encoder.encode(progress)


def _decode_progress(body: bytes) -> Progress:
    if len(body) > MAX_REPORT_BYTES:
        raise RemoteProtocolError(f"a report of {len(body)} bytes in a heartbeat (limit {MAX_REPORT_BYTES})")
    return decode(_progress.decode, body, what="not a report of a peer: ")


def done_frame(done: Done) -> bytes:
    contributes = done.payload is not None
    head = _DONE.pack(done.epoch, done.tag, done.sequence, done.rank, done.descriptor, done.registrations, contributes)
    return frame(FrameKind.DONE, head + (done.payload or b""))


def decode_done(body: bytes) -> Done:
    epoch, tag, sequence, rank, descriptor, registrations, contributes = _unpack(_DONE, body)
    payload = body[_DONE.size :]
    if payload and not contributes:
        raise RemoteProtocolError(f"a Done that contributes nothing, and {len(payload)} bytes of it")
    return Done(epoch, tag, sequence, rank, descriptor, registrations, payload if contributes else None)


def evidence_frame(evidence: Evidence) -> bytes:
    payloads = evidence.payloads
    head = _EVIDENCE.pack(
        evidence.epoch,
        evidence.tag,
        evidence.sequence,
        evidence.fingerprint,
        evidence.registrations,
        len(payloads),
    )
    lengths = [NO_PAYLOAD if payload is None else len(payload) for payload in payloads]
    return frame(
        FrameKind.EVIDENCE, head + struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(filter(None, payloads))
    )


def _unpack(layout: struct.Struct, body: bytes, at: int = 0, *, exact: bool = False) -> tuple[Any, ...]:
    if len(body) < at + layout.size or (exact and len(body) != at + layout.size):
        raise RemoteProtocolError(f"a fixed frame of {len(body)} bytes where {at + layout.size} are needed")
    return layout.unpack_from(body, at)
