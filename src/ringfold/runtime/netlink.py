"""What the kernel knows about the queues of a network interface: qdiscs over rtnetlink, statistics over ethtool.

A question about one interface costs about 10 microseconds, because it is one small request and one small answer, taken
apart at fixed places. A library that builds the whole message as Python objects needs thirty times as long for one
queue, and milliseconds on a host with many (ADR 0026); the agent asks every millisecond.

Two habits of the kernel shape the code. The answer to a GET is an echo (NLM_F_ECHO); without that flag it only goes to
the listeners of a multicast group, and whoever asked waits in vain. And a qdisc that the kernel keeps hidden gets no
answer at all: so each request asks for an acknowledgement too (NLM_F_ACK), and one without an answer means "no queue".

The root qdisc stands for all: `mq`, `htb`, `prio` and `tbf` count what waits in their children.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_NLMSG_ERROR, _RTM_GETQDISC, _RTM_NEWQDISC = 2, 38, 36
_REQUEST_ACK_ECHO = 0x1 | 0x4 | 0x8
_ROOT = 0xFFFFFFFF
_KIND, _OPTIONS, _STATS2 = 1, 2, 7
_STATS_BASIC, _STATS_QUEUE = 1, 3
_TBF_PARAMETERS, _TBF_RATE64 = 1, 4
_ASK = struct.Struct("=IHHIIBBHiIII")
_HEADER = struct.Struct("=IHHII")
_TCMSG_BYTES = 20
_ATTRIBUTE = struct.Struct("=HH")
_BASIC = struct.Struct("=QI")
_QUEUE = struct.Struct("=IIIII")
_TIMEOUT_S = 1.0

_SIOCETHTOOL = 0x8946
_GSSET_INFO, _GSTRINGS, _GSTATS = 0x37, 0x1B, 0x1D
_SS_STATS, _STRING_BYTES = 1, 32
_MOST_STATISTICS = 16_384


@dataclass(frozen=True, slots=True)
class Qdisc:
    """The root queue of an interface: what waits in it now, and what it sent and dropped since it was made.

    `limit_bytes` and `rate_bytes_s` are how much it takes and how fast it drains, where its kind says so, else 0.
    """

    kind: str
    backlog_bytes: int
    packets: int
    drops: int
    overlimits: int
    sent_bytes: int
    sent_packets: int
    limit_bytes: int = 0
    rate_bytes_s: int = 0


def interface_index(name: str) -> int:
    """The kernel's number of an interface of this network namespace. Raises OSError if there is none of this name."""
    return socket.if_nametoindex(name)


class QdiscReader:
    """Asks for queues. It belongs to the network namespace in which it was made; not for several threads at once."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        # The kernel answers within the call. If it ever does not, nobody hangs.
        self._socket.settimeout(_TIMEOUT_S)
        self._answer = bytearray(1 << 16)
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def root(self, index: int) -> Qdisc | None:
        """The root queue of an interface; None if it has none (then nothing ever waits there).

        Raises OSError (ENODEV) if there is no such interface.
        """
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        ask = _ASK.pack(_ASK.size, _RTM_GETQDISC, _REQUEST_ACK_ECHO, self._sequence, 0, 0, 0, 0, index, 0, _ROOT, 0)
        self._socket.send(ask)
        found: Qdisc | None = None
        while True:
            size = self._socket.recv_into(self._answer)
            view = memoryview(self._answer)[:size]
            for kind, sequence, body in _messages(view):
                if sequence != self._sequence:
                    continue  # the late answer to a question that timed out
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    if number == errno.ENOENT:
                        return None
                    if number:
                        raise OSError(number, f"qdisc of interface {index}: {os.strerror(number)}")
                    return found
                if kind == _RTM_NEWQDISC:
                    found = parse_qdisc(body)


def parse_qdisc(body: bytes | memoryview) -> Qdisc:
    """A qdisc out of the body of an RTM_NEWQDISC message."""
    kind, backlog, packets, drops, overlimits, sent, sent_packets, limit, rate = "", 0, 0, 0, 0, 0, 0, 0, 0
    options: memoryview | None = None
    for number, value in _attributes(memoryview(body)[_TCMSG_BYTES:]):
        if number == _KIND:
            kind = bytes(value).rstrip(b"\0").decode("ascii", "replace")
        elif number == _OPTIONS:
            options = value
        elif number == _STATS2:
            for part, figures in _attributes(value):
                if part == _STATS_QUEUE and len(figures) >= _QUEUE.size:
                    packets, backlog, drops, _, overlimits = _QUEUE.unpack_from(figures)
                elif part == _STATS_BASIC and len(figures) >= _BASIC.size:
                    sent, sent_packets = _BASIC.unpack_from(figures)
    if options is not None:
        limit, rate = _bounds(kind, options)
    return Qdisc(kind, backlog, packets, drops, overlimits, sent, sent_packets, limit, rate)


def _bounds(kind: str, options: memoryview) -> tuple[int, int]:
    """(limit in bytes, rate in bytes a second) of the kinds that have them, else zeros."""
    if kind == "bfifo" and len(options) >= 4:
        return struct.unpack_from("=I", options)[0], 0
    limit = rate = 0
    if kind == "tbf":
        for number, value in _attributes(options):
            if number == _TBF_PARAMETERS and len(value) >= 28:
                rate = rate or struct.unpack_from("=I", value, 8)[0]
                limit = struct.unpack_from("=I", value, 24)[0]
            elif number == _TBF_RATE64 and len(value) >= 8:
                rate = struct.unpack_from("=Q", value)[0]
    return limit, rate


def _messages(view: memoryview) -> list[tuple[int, int, memoryview]]:
    """(type, sequence, body) of each netlink message in a datagram."""
    found, start = [], 0
    while start + _HEADER.size <= len(view):
        length, kind, _, sequence, _ = _HEADER.unpack_from(view, start)
        if length < _HEADER.size:
            break
        found.append((kind, sequence, view[start + _HEADER.size : start + length]))
        start += (length + 3) & ~3
    return found


def _attributes(view: memoryview) -> list[tuple[int, memoryview]]:
    found, start = [], 0
    while start + _ATTRIBUTE.size <= len(view):
        length, kind = _ATTRIBUTE.unpack_from(view, start)
        if length < _ATTRIBUTE.size:
            break
        found.append((kind & 0x3FFF, view[start + _ATTRIBUTE.size : start + length]))
        start += (length + 3) & ~3
    return found


class EthtoolReader:
    """The statistics that a driver counts for an interface, by the driver's own names.

    The names are kept while there are as many. Drivers that have none give an empty mapping. This is the ioctl: the
    netlink side of ethtool has no driver's own statistics, and the per-priority pause counters are among those.

    Most kernels fill in as many as the driver has *now* and do not look how much room there is, and the number changes
    with the number of queues, or when another interface takes the name. So there is always room for the most that is
    taken.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._names: dict[str, list[str]] = {}
        self._room = bytearray(8 + 8 * _MOST_STATISTICS)

    def close(self) -> None:
        self._socket.close()

    def statistics(self, interface: str) -> dict[str, int]:
        """All counters of an interface now. Raises OSError if it is gone."""
        count = self._count(interface)
        names = self._names.get(interface)
        if names is None or len(names) != count:
            names = self._names[interface] = self._ask_names(interface, count)
        if not names:
            return {}
        struct.pack_into("=II", self._room, 0, _GSTATS, len(names))
        self._call(interface, self._room)
        if struct.unpack_from("=I", self._room, 4)[0] != len(names):
            return {}  # it has just become another number; next time
        return dict(zip(names, struct.unpack_from(f"={len(names)}Q", self._room, 8), strict=True))

    def _count(self, interface: str) -> int:
        """How many there are; 0 also if there are more than anybody wants to read."""
        room = bytearray(20)
        struct.pack_into("=IIQ", room, 0, _GSSET_INFO, 0, 1 << _SS_STATS)
        try:
            self._call(interface, room)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return 0
            raise
        _, _, mask, count = struct.unpack_from("=IIQI", room)
        return int(count) if mask and count <= _MOST_STATISTICS else 0

    def _ask_names(self, interface: str, count: int) -> list[str]:
        if not count:
            return []
        room = bytearray(12 + _STRING_BYTES * _MOST_STATISTICS)
        struct.pack_into("=III", room, 0, _GSTRINGS, _SS_STATS, count)
        self._call(interface, room)
        texts = struct.unpack_from(f"{_STRING_BYTES}s" * count, room, 12)
        return [text.split(b"\0")[0].decode("ascii", "replace") for text in texts]

    def _call(self, interface: str, room: bytearray) -> None:
        """SIOCETHTOOL with a pointer to `room`, which the kernel reads and fills."""
        name = interface.encode()
        if not 0 < len(name) < 16:
            raise OSError(errno.ENODEV, f"no interface {interface!r}")
        target = (ctypes.c_char * len(room)).from_buffer(room)
        request = struct.pack("16sP16x", name, ctypes.addressof(target))
        fcntl.ioctl(self._socket, _SIOCETHTOOL, request)
