"""A small eBPF program without a compiler or a library: the peak of every interface's queue, counted in the kernel.

The program is attached to the tracepoint `qdisc_enqueue`: it runs whenever a packet has been queued, and keeps the
largest backlog of the interface until it is read. So a burst that comes and drains between two reads is seen. Where
the fields of the kernel's structures lie is read from its type information (BTF, /sys/kernel/btf/vmlinux), once; the
program itself is forty instructions that are put together here. Raw tracepoints need neither tracefs nor kprobes.

It needs Linux 5.8 or newer, built with BTF, and root (CAP_BPF and CAP_PERFMON).
"""

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

BTF_FILE = "/sys/kernel/btf/vmlinux"
MAX_INTERFACES = 4_096
"""Interfaces with a higher index are not counted."""
_SYSCALLS = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _MAP_LOOKUP, _MAP_UPDATE, _PROGRAM_LOAD, _RAW_TRACEPOINT_OPEN = 0, 1, 2, 5, 17
_MAP_OF_ARRAY, _RAW_TRACEPOINT = 2, 17
_ATTRIBUTE_BYTES = 128
_LOG_BYTES = 64 * 1024
_VALUE = struct.Struct("=QQ")
_HELPER_LOOKUP, _HELPER_READ_KERNEL = 1, 113
_BTF_HEADER = struct.Struct("=HBBIIIII")
_BTF_MAGIC = 0xEB9F
_BTF_EXTRA_BYTES = {1: (4, 0), 3: (12, 0), 4: (0, 12), 5: (0, 12), 6: (0, 8), 13: (0, 8), 14: (4, 0), 15: (0, 12)}
_BTF_EXTRA_BYTES |= {17: (4, 0), 19: (0, 12)}
"""By kind of type: bytes behind its head, fixed and for each of its members."""
_BTF_STRUCT, _BTF_UNION = 4, 5


@dataclass(frozen=True, slots=True)
class QueueOffsets:
    """Where the fields lie that the program follows, in bytes."""

    backlog: int
    device: int
    index: int
    network: int
    inode: int

    @classmethod
    def from_kernel(cls, raw: bytes) -> "QueueOffsets":
        """From the kernel's type information. Raises OSError if it has no such fields."""
        types = _Types(raw)
        return cls(
            backlog=types.offset("Qdisc", "qstats") + types.offset("gnet_stats_queue", "backlog"),
            device=types.offset("netdev_queue", "dev"),
            index=types.offset("net_device", "ifindex"),
            network=types.offset("net_device", "nd_net"),
            inode=types.offset("net", "ns") + types.offset("ns_common", "inum"),
        )


class _Types:
    """The structures of a kernel by name. Only what is needed of BTF is read."""

    def __init__(self, raw: bytes) -> None:
        if len(raw) < _BTF_HEADER.size:
            raise OSError(errno.EINVAL, "not BTF")
        magic, _, _, head, type_at, type_bytes, text_at, _ = _BTF_HEADER.unpack_from(raw)
        if magic != _BTF_MAGIC:
            raise OSError(errno.EINVAL, "not BTF of this machine")
        self._raw, self._text = raw, head + text_at
        self._at: list[int] = [0]
        self._named: dict[str, int] = {}
        at, end = head + type_at, head + type_at + type_bytes
        while at < end:
            name, info, _ = struct.unpack_from("=III", raw, at)
            kind, count = info >> 24 & 0x1F, info & 0xFFFF
            if kind == _BTF_STRUCT and name:
                self._named.setdefault(self._name(name), len(self._at))
            self._at.append(at)
            fixed, each = _BTF_EXTRA_BYTES.get(kind, (0, 0))
            at += 12 + fixed + each * count

    def offset(self, structure: str, member: str) -> int:
        """The offset of a member, also of one in an anonymous part."""
        if structure not in self._named or (bits := self._find(self._named[structure], member)) is None:
            raise OSError(errno.ENOENT, f"this kernel has no {structure}.{member}")
        return bits // 8

    def _find(self, number: int, member: str) -> int | None:
        at = self._at[number]
        _, info, _ = struct.unpack_from("=III", self._raw, at)
        if info >> 24 & 0x1F not in (_BTF_STRUCT, _BTF_UNION):
            return None
        for row in range(info & 0xFFFF):
            name, kind, bits = struct.unpack_from("=III", self._raw, at + 12 + 12 * row)
            bits &= 0xFFFFFF if info >> 31 else 0xFFFFFFFF
            if name and self._name(name) == member:
                return int(bits)
            if not name and (inner := self._find(kind, member)) is not None:
                return int(bits) + inner
        return None

    def _name(self, at: int) -> str:
        begin = self._text + at
        return self._raw[begin : self._raw.index(b"\0", begin)].decode()


def _instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | target, offset, value)


def queue_program(map_fd: int, offsets: QueueOffsets, namespace: int) -> bytes:
    """The program: of packets in this network namespace, keep the largest backlog by interface index, and count."""
    move, move_number, add, load8, load4, call, exit_ = 0xBF, 0xB7, 0x07, 0x79, 0x61, 0x85, 0x95

    def read(target: int, size: int, base: int, offset: int) -> list[bytes]:
        """Copy `size` bytes at register `base` + offset to the stack at `target`."""
        return [
            _instruction(move, 1, 10),
            _instruction(add, 1, value=target),
            _instruction(move_number, 2, value=size),
            _instruction(move, 3, base),
            _instruction(add, 3, value=offset),
            _instruction(call, value=_HELPER_READ_KERNEL),
        ]

    end = [_instruction(move_number, 0), _instruction(exit_)]
    count = [
        _instruction(load4, 1, 10, -8),  # the backlog
        _instruction(load8, 2, 0, 0),  # the largest so far
        _instruction(0x3D, 2, 1, 1),  # not larger: skip the store
        _instruction(0x7B, 0, 1, 0),
        _instruction(move_number, 3, value=1),
        _instruction(0xDB, 0, 3, 8),  # an atomic addition to the number of packets
    ]
    look_up = [
        _instruction(0x18, 1, 1, value=map_fd),
        _instruction(0),
        _instruction(move, 2, 10),
        _instruction(add, 2, value=-24),
        _instruction(call, value=_HELPER_LOOKUP),
        _instruction(0x15, 0, 0, len(count), 0),
    ]
    in_namespace = [
        *read(-24, 4, 8, offsets.index),
        *read(-8, 4, 6, offsets.backlog),
        *look_up,
        *count,
    ]
    head = [
        _instruction(load8, 6, 1, 0),  # the arguments of the tracepoint: the queue,
        _instruction(load8, 7, 1, 8),  # and the transmit queue of its device
        *read(-16, 8, 7, offsets.device),
        _instruction(load8, 8, 10, -16),
        *read(-16, 8, 8, offsets.network),
        _instruction(load8, 9, 10, -16),
        *read(-24, 4, 9, offsets.inode),
        _instruction(load4, 1, 10, -24),
        _instruction(0x18, 2, value=namespace - (1 << 32) if namespace >> 31 else namespace),
        _instruction(0),
        _instruction(0x5D, 1, 2, len(in_namespace)),  # another namespace
    ]
    return b"".join([*head, *in_namespace, *end])


class QueuePeaks:
    """The peaks of the queues of this network namespace. Raises OSError where the kernel does not allow it."""

    def __init__(self) -> None:
        number = _SYSCALLS.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"eBPF is not known on {platform.machine()}")
        self._number, self._libc = number, ctypes.CDLL(None, use_errno=True)
        self._fds: list[int] = []
        self._key, self._value = ctypes.create_string_buffer(4), ctypes.create_string_buffer(_VALUE.size)
        self._zero = ctypes.create_string_buffer(_VALUE.size)
        try:
            with open(BTF_FILE, "rb") as file:
                offsets = QueueOffsets.from_kernel(file.read())
            create = struct.pack("=IIII", _MAP_OF_ARRAY, 4, _VALUE.size, MAX_INTERFACES)
            self._map = self._open(_MAP_CREATE, create, "create a map")
            program = self._load(queue_program(self._map, offsets, os.stat("/proc/thread-self/ns/net").st_ino))
            name = ctypes.create_string_buffer(b"qdisc_enqueue")
            attach = struct.pack("=QI", ctypes.addressof(name), program)
            self._open(_RAW_TRACEPOINT_OPEN, attach, "attach to qdisc_enqueue")
        except BaseException:
            self.close()
            raise

    def take(self, index: int) -> tuple[int, int]:
        """The largest backlog of an interface since the last call, in bytes, and how many packets were queued."""
        if not 0 <= index < MAX_INTERFACES:
            return 0, 0
        self._key.raw = struct.pack("=I", index)
        where = [ctypes.addressof(each) for each in (self._key, self._value)]
        self._call(_MAP_LOOKUP, struct.pack("=IIQQ", self._map, 0, *where), "read a map")
        peak, packets = _VALUE.unpack(self._value.raw)
        if packets:
            # A packet between the two calls may be lost: it is queued, and the next one shows the same queue.
            where[1] = ctypes.addressof(self._zero)
            self._call(_MAP_UPDATE, struct.pack("=IIQQQ", self._map, 0, *where, 0), "write a map")
        return int(peak), int(packets)

    def close(self) -> None:
        """Detach the program. May be called more than once."""
        while self._fds:
            os.close(self._fds.pop())

    def _load(self, program: bytes) -> int:
        code, licence = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"GPL")
        log = ctypes.create_string_buffer(_LOG_BYTES)
        where = [ctypes.addressof(each) for each in (code, licence, log)]
        attributes = struct.pack(
            "=IIQQIIQ", _RAW_TRACEPOINT, len(program) // 8, where[0], where[1], 1, _LOG_BYTES, where[2]
        )
        try:
            return self._open(_PROGRAM_LOAD, attributes, "load a program")
        except OSError as error:
            last = log.value.decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(error.errno, f"{error.strerror}{': ' if last else ''}{''.join(last)[:200]}") from None

    def _open(self, command: int, attributes: bytes, what: str) -> int:
        fd = self._call(command, attributes, what)
        self._fds.append(fd)
        return fd

    def _call(self, command: int, attributes: bytes, what: str) -> int:
        buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTE_BYTES)
        result = self._libc.syscall(self._number, command, buffer, _ATTRIBUTE_BYTES)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot {what}: {os.strerror(number)}")
        return int(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
