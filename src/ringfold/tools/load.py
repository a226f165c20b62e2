"""Work that is in the way: cores that are busy, links that are. For measurements of what other work does to a figure.

The work is done by children of a crew, each a run of this file as a script: `load.py LINE NAME busy CORE` keeps one
core busy, and `load.py LINE NAME bursts ADDRESS PORT BYTES PERIOD_US` sends so many bytes of UDP at once in every
period. A *burst* larger than a shaper's bucket waits in its queue, and what is sent just after it waits behind it. They
end with their crew.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

from ringfold.tools.spawn import Crew, Line

START_S = 30.0
_DATAGRAM_BYTES = 1_400


def busy_cores(crew: Crew) -> list[str]:
    """Keep every core busy that this process may use, one child each; returns their names once all of them run."""
    names = []
    for core in sorted(os.sched_getaffinity(0)):
        names.append(f"busy-{core}")
        crew.start(names[-1], _command(crew, names[-1], "busy", str(core)))
    crew.meet(names, START_S)
    return names


def bursts(
    crew: Crew,
    name: str,
    to: tuple[str, int],
    burst_bytes: int,
    period_us: int,
    wrap: Callable[[Sequence[str]], list[str]] = list,
) -> None:
    """Send a burst to an address in every period. `wrap` makes the command run elsewhere, as in a namespace.

    The child runs when this returns. Whether anybody listens there does not matter.
    """
    crew.start(name, wrap(_command(crew, name, "bursts", to[0], str(to[1]), str(burst_bytes), str(period_us))))
    crew.meet([name], START_S)


def _command(crew: Crew, name: str, *what: str) -> list[str]:
    return [sys.executable, "-P", __file__, crew.address, name, *what]


def _busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def _bursts(address: str, port: int, burst_bytes: int, period_us: int) -> None:
    payload, count = bytes(_DATAGRAM_BYTES), max(1, round(burst_bytes / _DATAGRAM_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * burst_bytes)
        begin, number = time.monotonic(), 0
        while True:
            for _ in range(count):
                try:
                    sender.sendto(payload, (address, port))
                except OSError:  # nobody listens, or no room: this is no transfer
                    continue
            number += 1
            time.sleep(max(0.0, begin + number * period_us / 1e6 - time.monotonic()))


def _main(arguments: Sequence[str]) -> None:
    address, name, what, *rest = arguments
    line = Line.dial(address, name)  # kept: its end would be the child's end to the crew
    assert line
    if what == "busy":
        _busy(int(rest[0]))
    else:
        _bursts(rest[0], int(rest[1]), int(rest[2]), int(rest[3]))


if __name__ == "__main__":
    _main(sys.argv[1:])
