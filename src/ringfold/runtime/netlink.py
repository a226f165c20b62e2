"""The queues of a network interface as the kernel reports them: qdiscs over rtnetlink, statistics over ethtool.

A request about one interface costs about 10 microseconds: it is one small request and one small response, unpacked at
fixed offsets. A library that builds the whole message as Python objects needs thirty times as long for one queue, and
milliseconds on a host with many (ADR 0026); the agent reads every millisecond.

Two properties of the kernel shape the code. The response to a GET is an echo (NLM_F_ECHO); without that flag it only
goes to the listeners of a multicast group, and the requester waits in vain. And for a hidden qdisc there is no response
at all. So each request also asks for an acknowledgement (NLM_F_ACK), and one without a response means "no queue".

The root qdisc includes all others: `mq`, `htb`, `prio` and `tbf` count what waits in their children.
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

_NLMSG_ERROR = 2
_RTM_GETQDISC = 38
_RTM_NEWQDISC = 36
_REQUEST_ACK_ECHO = 0x1 | 0x4 | 0x8
_ROOT = 0xFFFFFFFF
_KIND = 1
_OPTIONS = 2
_STATS2 = 7
_STATS_BASIC = 1
_STATS_QUEUE = 3
_TBF_PARAMETERS = 1
_TBF_RATE64 = 4
_REQUEST = struct.Struct("=IHHIIBBHiIII")
_HEADER = struct.Struct("=IHHII")
_TCMSG_BYTES = 20
_ATTRIBUTE = struct.Struct("=HH")
_BASIC = struct.Struct("=QI")
_QUEUE = struct.Struct("=IIIII")
_TIMEOUT_S = 1.0

_SIOCETHTOOL = 0x8946
_GSSET_INFO = 0x37
_GSTRINGS = 0x1B
_GSTATS = 0x1D
_SS_STATS = 1
_STRING_BYTES = 32
_MAX_STATISTICS = 16_384


@dataclass(frozen=True, slots=True)
class Qdisc:
    """The root queue of an interface: what waits in it now, and what it sent and dropped since it was created.

    `limit_bytes` and `rate_bytes_s` are its size and the rate at which it drains, for kinds that have them, else 0.
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
    """The kernel's index of an interface of this network namespace. Raises OSError if there is none of this name."""
    return socket.if_nametoindex(name)


class QdiscReader:
    """Reads queues, of the network namespace in which it was created. Not thread-safe."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        # The kernel responds within the call. The timeout is for the case that it does not.
        self._socket.settimeout(_TIMEOUT_S)
        self._response = bytearray(1 << 16)
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
        """The root queue of an interface; None if it has none, so that nothing ever waits there.

        Raises OSError (ENODEV) if there is no such interface.
        """
        self._sequence = (self._sequence + 1) & 0x7FFFFFFF
        request = _REQUEST.pack(
            _REQUEST.size, _RTM_GETQDISC, _REQUEST_ACK_ECHO, self._sequence, 0, 0, 0, 0, index, 0, _ROOT, 0
        )
        self._socket.send(request)
        found: Qdisc | None = None
        while True:
            size = self._socket.recv_into(self._response)
            view = memoryview(self._response)[:size]
            for kind, sequence, body in _messages(view):
                if sequence != self._sequence:
                    continue  # the late response to a request that timed out
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
    """The qdisc in the body of an RTM_NEWQDISC message."""
    kind = ""
    packets = backlog = drops = overlimits = 0
    sent = sent_packets = 0
    limit = rate = 0
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

    The names are cached while their number stays the same. A driver without statistics has an empty mapping. This uses
    the ioctl: the netlink interface of ethtool lacks driver statistics, and the per-priority pause counters are among
    those.

    Most kernels write as many values as the driver has *now* without checking the size of the buffer, and the number
    changes with the number of queues, or when another interface takes the name. So the buffer always has the maximum
    size.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._names: dict[str, list[str]] = {}
        self._buffer = bytearray(8 + 8 * _MAX_STATISTICS)

    def close(self) -> None:
        self._socket.close()

    def statistics(self, interface: str) -> dict[str, int]:
        """All counters of an interface now. Raises OSError if it is gone."""
        count = self._count(interface)
        names = self._names.get(interface)
        if names is None or len(names) != count:
            names = self._names[interface] = self._read_names(interface, count)
        if not names:
            return {}
        struct.pack_into("=II", self._buffer, 0, _GSTATS, len(names))
        self._call(interface, self._buffer)
        if struct.unpack_from("=I", self._buffer, 4)[0] != len(names):
            return {}  # the number has just changed; read again next time
        return dict(zip(names, struct.unpack_from(f"={len(names)}Q", self._buffer, 8), strict=True))

    def _count(self, interface: str) -> int:
        """The number of statistics; 0 if there are more than the maximum."""
        buffer = bytearray(20)
        struct.pack_into("=IIQ", buffer, 0, _GSSET_INFO, 0, 1 << _SS_STATS)
        try:
            self._call(interface, buffer)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                return 0
            raise
        _, _, mask, count = struct.unpack_from("=IIQI", buffer)
        return int(count) if mask and count <= _MAX_STATISTICS else 0

    def _read_names(self, interface: str, count: int) -> list[str]:
        if not count:
            return []
        buffer = bytearray(12 + _STRING_BYTES * _MAX_STATISTICS)
        struct.pack_into("=III", buffer, 0, _GSTRINGS, _SS_STATS, count)
        self._call(interface, buffer)
        texts = struct.unpack_from(f"{_STRING_BYTES}s" * count, buffer, 12)
        return [text.split(b"\0")[0].decode("ascii", "replace") for text in texts]

    def _call(self, interface: str, buffer: bytearray) -> None:
        """SIOCETHTOOL with a pointer to `buffer`, which the kernel reads and fills."""
        name = interface.encode()
        if not 0 < len(name) < 16:
            raise OSError(errno.ENODEV, f"no interface {interface!r}")
        target = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        request = struct.pack("16sP16x", name, ctypes.addressof(target))
        fcntl.ioctl(self._socket, _SIOCETHTOOL, request)
