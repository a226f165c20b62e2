"""The requests and responses of an agent's socket in a fixed layout, for programs without msgpack (C, C++).

A body of the fixed layout stands in a MESSAGE frame like any other. It begins with MARK, a byte that no msgpack value
begins with, so the first body of a connection says which layout its client uses. The responses come in the same one. A
client that changes its layout is disconnected. docs/reference/agent-socket.md describes the bytes;
include/ringfold_agent.h writes and reads them in C.

The layout has what a transport needs: AgentHello, Register, Renew, Deregister and Measured. Consoles use msgpack.
"""

import ipaddress
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import get_args

from ringfold.errors import RemoteProtocolError
from ringfold.limits import MAX_PATHS
from ringfold.states import Transitions
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    Deregister,
    Deregistered,
    Flow,
    FromAgent,
    Measured,
    RefusalKind,
    Register,
    Registered,
    Renew,
    ToAgent,
    agent_frame,
    decode_to_agent,
)
from ringfold.wire.decoding import decode
from ringfold.wire.frames import FrameKind, frame

FIXED_VERSION = 1
MARK = 0xC1
NAME_BYTES = 64
TEXT_BYTES = 112
"""Of the reason of a refusal; a longer one is cut."""
ADDRESS_BYTES = 32
"""An IPv6 address (IPv4 as ::ffff:a.b.c.d), and the name of the interface of a link-local one."""
REFUSAL_KINDS: tuple[RefusalKind, ...] = get_args(RefusalKind)
"""A refusal's number in the layout is its index here, from 1. New kinds are added at the end."""

_HEAD = struct.Struct("<BBBBIQ")
_FLOW = struct.Struct(f"<{ADDRESS_BYTES}s{ADDRESS_BYTES}s{NAME_BYTES}s{NAME_BYTES}s")
_PATH = struct.Struct(f"<{ADDRESS_BYTES}s{ADDRESS_BYTES}s")
_RATE = struct.Struct("<QII")
_PLACE = struct.Struct("<II")
_IP_BYTES = 16


class FixedType(IntEnum):
    """What a body is. Requests are below 128."""

    HELLO = 1
    REGISTER = 2
    RENEW = 3
    DEREGISTER = 4
    MEASURED = 5
    WELCOME = 129
    REGISTERED = 130
    DEREGISTERED = 131
    REFUSED = 132


class Layout(Enum):
    """The layout of one connection."""

    UNDECIDED = "undecided"
    MSGPACK = "msgpack"
    FIXED = "fixed"


LAYOUTS = Transitions(
    {Layout.UNDECIDED: {Layout.MSGPACK, Layout.FIXED}, Layout.MSGPACK: set(), Layout.FIXED: set()},
)


@dataclass(slots=True)
class ClientCodec:
    """Decodes the requests of one connection, and encodes its responses in the same layout."""

    layout: Layout = Layout.UNDECIDED

    def decode(self, kind: FrameKind, body: bytes) -> ToAgent:
        """The request in a frame; anything else raises RemoteProtocolError."""
        found = Layout.FIXED if is_fixed(body) else Layout.MSGPACK
        if self.layout is Layout.UNDECIDED:
            self.layout = LAYOUTS.move(self.layout, found)
        if self.layout is not found:
            raise RemoteProtocolError(f"a {found.value} request on a connection with the {self.layout.value} layout")
        return decode_fixed_request(kind, body) if found is Layout.FIXED else decode_to_agent(kind, body)

    def encode(self, message: FromAgent) -> bytes:
        """The frame of a response. A refusal before the first request is msgpack."""
        return fixed_response(message) if self.layout is Layout.FIXED else agent_frame(message)


def is_fixed(body: bytes) -> bool:
    """Whether a body claims to be of the fixed layout."""
    return body[:1] == bytes((MARK,))


# Requests


def fixed_request(message: ToAgent) -> bytes:
    """The frame of a request, as the C header writes it. Raises ValueError for what the layout does not have."""
    match message:
        case AgentHello(_, name):
            return _frame(FixedType.HELLO, 0, 0, 0, _text(name, NAME_BYTES))
        case Register(request, flow):
            ends = _FLOW.pack(
                _address_bytes(flow.source),
                _address_bytes(flow.destination),
                _text(flow.source_host, NAME_BYTES),
                _text(flow.destination_host, NAME_BYTES),
            )
            paths = b"".join(_PATH.pack(_address_bytes(one), _address_bytes(other)) for one, other in flow.paths)
            return _frame(FixedType.REGISTER, len(flow.paths), request, flow.connection, ends + paths)
        case Renew(request, connection):
            return _frame(FixedType.RENEW, 0, request, connection)
        case Deregister(request, connection):
            return _frame(FixedType.DEREGISTER, 0, request, connection)
        case Measured(connection, rates, srtt_us, min_rtt_us):
            unknown = (0,) * len(rates)
            rows = zip(rates, srtt_us or unknown, min_rtt_us or unknown, strict=True)
            return _frame(FixedType.MEASURED, len(rates), 0, connection, b"".join(_RATE.pack(*row) for row in rows))
        case _:
            raise ValueError(f"the fixed layout has no {type(message).__name__}")


def decode_fixed_request(kind: FrameKind, body: bytes) -> ToAgent:
    """The request in a frame of the fixed layout; anything else raises RemoteProtocolError."""
    if kind is not FrameKind.MESSAGE:
        raise RemoteProtocolError(f"a {kind.name} frame on an agent's socket")
    return decode(_decode_request, body, what="not a request of the fixed layout: ")


def _decode_request(body: bytes) -> ToAgent:
    kind, count, request, connection, rest = _split(body)
    match kind:
        case FixedType.HELLO:
            _check_zero(count, request, connection)
            return AgentHello(AGENT_PROTOCOL, _read_text(rest, NAME_BYTES))
        case FixedType.REGISTER:
            return Register(request, _read_flow(connection, count, rest))
        case FixedType.RENEW | FixedType.DEREGISTER:
            _check_zero(count)
            _check_size(rest, 0)
            return Renew(request, connection) if kind is FixedType.RENEW else Deregister(request, connection)
        case FixedType.MEASURED:
            _check_zero(request)
            return _read_measured(connection, count, rest)
        case _:
            raise ValueError(f"{kind.name} is a response")


def _read_flow(connection: int, count: int, rest: bytes) -> Flow:
    _check_count(count)
    _check_size(rest, _FLOW.size + count * _PATH.size)
    source, destination, source_host, destination_host = _FLOW.unpack_from(rest)
    paths = tuple(
        (_address_text(local), _address_text(remote)) for local, remote in _PATH.iter_unpack(rest[_FLOW.size :])
    )
    return Flow(
        connection,
        _address_text(source),
        _address_text(destination),
        paths,
        _read_text(source_host, NAME_BYTES),
        _read_text(destination_host, NAME_BYTES),
    )


def _read_measured(connection: int, count: int, rest: bytes) -> Measured:
    _check_count(count)
    _check_size(rest, count * _RATE.size)
    rates, srtt_us, min_rtt_us = zip(*_RATE.iter_unpack(rest), strict=True)
    return Measured(connection, rates, srtt_us, min_rtt_us)


# Responses


def fixed_response(message: FromAgent) -> bytes:
    """The frame of a response. Raises ValueError for one that no fixed request leads to."""
    match message:
        case AgentWelcome(_, generation, requests_per_hint):
            return _frame(FixedType.WELCOME, 0, requests_per_hint, generation)
        case Registered(request, connection, slot, generation):
            return _frame(FixedType.REGISTERED, 0, request, connection, _PLACE.pack(slot, generation))
        case Deregistered(request, connection):
            return _frame(FixedType.DEREGISTERED, 0, request, connection)
        case AgentRefused(request, kind, text):
            return _frame(FixedType.REFUSED, REFUSAL_KINDS.index(kind) + 1, request, 0, _text(text, TEXT_BYTES))
        case _:
            raise ValueError(f"the fixed layout has no {type(message).__name__}")


def decode_fixed_response(kind: FrameKind, body: bytes) -> FromAgent:
    """The response in a frame of the fixed layout; anything else raises RemoteProtocolError."""
    if kind is not FrameKind.MESSAGE:
        raise RemoteProtocolError(f"a {kind.name} frame on an agent's socket")
    return decode(_decode_response, body, what="not a response of the fixed layout: ")


def _decode_response(body: bytes) -> FromAgent:
    kind, count, request, connection, rest = _split(body)
    match kind:
        case FixedType.WELCOME:
            _check_zero(count)
            _check_size(rest, 0)
            return AgentWelcome(AGENT_PROTOCOL, connection, max(1, request))
        case FixedType.REGISTERED:
            _check_zero(count)
            _check_size(rest, _PLACE.size)
            return Registered(request, connection, *_PLACE.unpack(rest))
        case FixedType.DEREGISTERED:
            _check_zero(count)
            _check_size(rest, 0)
            return Deregistered(request, connection)
        case FixedType.REFUSED:
            if not 1 <= count <= len(REFUSAL_KINDS):
                raise ValueError(f"there is no refusal {count}")
            _check_zero(connection)
            return AgentRefused(request, REFUSAL_KINDS[count - 1], _read_text(rest, TEXT_BYTES))
        case _:
            raise ValueError(f"{kind.name} is a request")


# Parts


def _frame(kind: FixedType, count: int, request: int, connection: int, rest: bytes = b"") -> bytes:
    try:
        head = _HEAD.pack(MARK, FIXED_VERSION, kind, count, request, connection)
    except struct.error as error:
        raise ValueError(str(error)) from None
    return frame(FrameKind.MESSAGE, head + rest)


def _split(body: bytes) -> tuple[FixedType, int, int, int, bytes]:
    if len(body) < _HEAD.size:
        raise ValueError(f"{len(body)} bytes, and the head has {_HEAD.size}")
    _, version, kind, count, request, connection = _HEAD.unpack_from(body)
    if version != FIXED_VERSION:
        raise ValueError(f"version {version}; this side has version {FIXED_VERSION}: install the same Ringfold")
    return FixedType(kind), count, request, connection, body[_HEAD.size :]


def _check_zero(*fields: int) -> None:
    if any(fields):
        raise ValueError("a reserved field is not 0")


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_PATHS:
        raise ValueError(f"{count} paths; there are 1 to {MAX_PATHS}")


def _check_size(rest: bytes, size: int) -> None:
    if len(rest) != size:
        raise ValueError(f"{len(rest)} bytes behind the head instead of {size}")


def _text(text: str, size: int) -> bytes:
    """Text in `size` bytes, filled with zeros. What does not fit is cut between two characters."""
    raw = text.replace("\0", " ").encode("utf-8", "replace")[: size - 1]
    return raw.decode("utf-8", "ignore").encode().ljust(size, b"\0")


def _read_text(raw: bytes, size: int) -> str:
    _check_size(raw, size)
    text, _, padding = raw.partition(b"\0")
    if len(text) == size or padding.strip(b"\0"):
        raise ValueError("a text does not end with zeros")
    return text.decode("utf-8", "replace")


@lru_cache(maxsize=8_192)
def _address_text(raw: bytes) -> str:
    """The text of an address. Whether it is a valid one is the registry's decision."""
    address = ipaddress.IPv6Address(raw[:_IP_BYTES])
    interface = _read_text(raw[_IP_BYTES:], ADDRESS_BYTES - _IP_BYTES)
    text = str(address.ipv4_mapped or address)
    return f"{text}%{interface}" if interface else text


def _address_bytes(text: str) -> bytes:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return (bytes(10) + b"\xff\xff" + address.packed).ljust(ADDRESS_BYTES, b"\0")
    interface = (address.scope_id or "").encode()
    if len(interface) >= ADDRESS_BYTES - _IP_BYTES:
        raise ValueError(f"{text} names no interface of Linux")
    return (address.packed + interface).ljust(ADDRESS_BYTES, b"\0")
