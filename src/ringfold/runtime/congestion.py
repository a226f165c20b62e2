"""Which congestion controls the kernel lets this process have."""

import contextlib
import socket
from pathlib import Path

_KNOWN = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def congestion_missing(name: str) -> str | None:
    """Why TCP connections of this process cannot have this congestion control, or None when they can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except PermissionError:
            return f"{name!r} is kept for processes with CAP_NET_ADMIN (see tcp_allowed_congestion_control)"
        except (OSError, ValueError):
            known = ""
            with contextlib.suppress(OSError):
                known = _KNOWN.read_text().strip()
            return f"this kernel has no {name!r}" + (f", but {known}" if known else "")
    return None
