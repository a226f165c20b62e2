"""Which interface of this host has which address, by getifaddrs(3)."""

import ctypes
import socket
import struct


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("stats", ctypes.c_void_p),
]


def interfaces() -> dict[str, str]:
    """The interface's name by each address of this host, IPv4 and IPv6. Raises OSError if the kernel does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: dict[str, str] = {}
    try:
        each = first
        while each:
            entry = each.contents
            if entry.address and (address := _text(entry.address)):
                found.setdefault(address, entry.name.decode("utf-8", "replace"))
            each = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


def _text(address: int) -> str:
    (family,) = struct.unpack("=H", ctypes.string_at(address, 2))
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(address + 8, 16))
    return ""
