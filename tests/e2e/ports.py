"""Ports for servers that a test starts, and may kill and start again at the same place."""

import itertools
import os
import socket

_PER_WORKER = 1_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_OURS = itertools.cycle(range(21_000 + _PER_WORKER * _WORKER, 21_000 + _PER_WORKER * (_WORKER + 1)))


def is_free(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports that are free now, TCP and UDP. They are not ephemeral ones, which any connection or data port may take at
    any time, and no other worker of the test run looks among them."""
    found = list(itertools.islice(filter(is_free, itertools.islice(_OURS, _PER_WORKER)), count))
    assert len(found) == count, "no free ports"
    return found


def free_port() -> int:
    [port] = free_ports(1)
    return port
