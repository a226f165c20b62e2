"""Cables that take time and lose packets: a TAP device at either end, and the native relay between them.

A kernel without netem can do neither. A TAP device is an interface whose frames a process reads and writes: one is made
in the host's namespace and one in the switch's, and the relay carries frames from one to the other. Shapers, bridge,
addresses and cuts are as with a plain cable. Such a device offers no offloads, so packets are cut to the path's MTU and
checksums are real; the price is a core for about 1 Gbit/s in packets of 1,500 bytes.

One thread serves all cables of a lab. Two hosts that are `rtt_ms` apart have two cables between them, each of which
takes a quarter of it in each direction.
"""

import contextlib
import fcntl
import os
import struct

from ringfold.runtime.development import require_testing_module
from ringfold.tools.lab.model import Cable

DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUNSETCARRIER = 0x400454E2
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000

Key = tuple[int, int]


def missing() -> str | None:
    """Why packets cannot be delayed or lost here, or None when they can (as far as one can tell without trying)."""
    return None if os.path.exists(DEVICE) else f"delay and loss need {DEVICE}, which is not there (modprobe tun)"


def open_tap(name: str) -> int:
    """A new TAP device in the namespace of the calling thread, as a descriptor. It is gone when that is closed."""
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Relayed:
    """The relayed cables of a lab, by (host, path)."""

    def __init__(self, seed: int) -> None:
        require_testing_module()
        from ringfold._native_testing import Relay

        self._relay, self._seed = Relay(), seed
        self._numbers: dict[Key, int] = {}
        self._ends: dict[Key, tuple[int, int]] = {}

    def lay(self, key: Key, near: int, far: int, cable: Cable) -> None:
        """Join two descriptors, which are ours from now on: `near` is the host's."""
        self._ends[key] = (near, far)
        seed = (self._seed << 16 | key[0] << 8 | key[1]) & (1 << 64) - 1
        self._numbers[key] = self._relay.add(near, far, _delay_ns(cable), cable.loss, seed)

    def set(self, key: Key, cable: Cable) -> None:
        self._relay.set(self._numbers[key], _delay_ns(cable), cable.loss)

    def set_carrier(self, key: Key, up: bool) -> None:
        """Whether the host's interface has a cable in it."""
        fcntl.ioctl(self._ends[key][0], _TUNSETCARRIER, struct.pack("i", up))

    def stats(self, key: Key) -> tuple[dict[str, int], dict[str, int]]:
        """Counts of the packets that went up the cable, and of those that came down."""
        return self._relay.stats(self._numbers[key])

    def close(self) -> None:
        self._relay.close()
        while self._ends:
            for descriptor in self._ends.popitem()[1]:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _delay_ns(cable: Cable) -> int:
    return round(cable.rtt_ms * 1e6 / 4)
