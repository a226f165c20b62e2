"""The network as this host sees it: host names, its own addresses and interfaces, and what its TCP can do."""

import contextlib
import ctypes
import socket
import struct
from pathlib import Path

_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def host_name() -> str:
    return socket.gethostname()


def literals(host: str, port: int) -> list[str]:
    """The IP literals that `host` resolves to, the system's preferred one first. Raises OSError if there are none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of the name is empty, or too long
        raise OSError(f"{host!r} is no name of a host: {error}") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def local_address_towards(literal: str, port: int) -> str:
    """The source address of packets from this host to `literal`. Sends nothing; raises OSError without a route."""
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((literal, port))
        return str(probe.getsockname()[0])


def own_address(*, v6: bool) -> str:
    """The source address of this host's default route; loopback if it has none. Sends nothing."""
    outside = "2001:db8::1" if v6 else "192.0.2.1"  # reserved for documentation: no machine has these addresses
    try:
        return local_address_towards(outside, 9)
    except OSError:
        return "::1" if v6 else "127.0.0.1"


def can_connect(host: str, port: int, timeout_s: float) -> str:
    """Why a TCP connection to an address fails; empty if it succeeds."""
    try:
        socket.create_connection((host, port), max(0.001, timeout_s)).close()
    except (OSError, UnicodeError, OverflowError) as error:  # a name of a host may not be one, nor a port
        return str(error)
    return ""


def listening(host: str, port: int) -> tuple[int, int]:
    """The descriptor and the port of a socket that listens at exactly this address. The caller owns it."""
    kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(kind, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        bound: int = listener.getsockname()[1]
        return listener.detach(), bound


def congestion_missing(name: str) -> str | None:
    """Why TCP connections of this process cannot use this congestion control; None if they can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except PermissionError:
            return f"{name!r} is reserved for processes with CAP_NET_ADMIN (see tcp_allowed_congestion_control)"
        except (OSError, ValueError):
            known = ""
            with contextlib.suppress(OSError):
                known = _CONGESTION_CONTROLS.read_text().strip()
            return f"this kernel has no {name!r}" + (f", but {known}" if known else "")
    return None


class _Ifaddrs(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3)."""


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
    """The name of the interface of each address of this host, IPv4 and IPv6. Raises OSError if getifaddrs(3) fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found: dict[str, str] = {}
    try:
        each = first
        while each:
            entry = each.contents
            if entry.address and (address := _address_text(entry.address)):
                found.setdefault(address, entry.name.decode("utf-8", "replace"))
            each = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


def _address_text(address: int) -> str:
    """The IP address in a struct sockaddr; empty for other families."""
    (family,) = struct.unpack("=H", ctypes.string_at(address, 2))
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(address + 8, 16))
    return ""
