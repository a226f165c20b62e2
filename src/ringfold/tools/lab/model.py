"""The model of a lab: paths, cables, rates, queues, addresses. Pure.

A *host* is a network namespace. A *path* is a network of its own on which all hosts meet: a bridge in the *switch* (one
more namespace), and a *cable* from each host to it. So two hosts with three paths have three pairs of addresses, and a
packet from host a to host b passes two cables: up a's, and down b's.

Each end of a cable may have a shaper with a queue: the host's end bounds what the host sends (`up`), the switch's end
what it receives (`down`). Where the smaller rate is, the queue builds: with `up` alone it is the sender's own and the
sender can see it; with `down` alone it is in the switch, where the traffic of several senders meets.

A cable may also have delay and loss (`rtt_ms`, `loss`). Two hosts on a path with `rtt_ms` 20 are 20 ms apart, there and
back; a host and the switch 10. Of the packets that go up a cable the share `loss` is lost, none of those that come
down: between two hosts, a packet is exposed to it once.
"""

import math
import re
from dataclasses import dataclass, field, replace

from ringfold.limits import MAX_PATHS

SWITCH = "switch"
"""The namespace with the bridges, as a host: not shaped, has an address on every path."""
MAX_HOSTS = 200
MAX_RTT_MS = 10_000.0
BURST_BYTES = 65_536 + 1_514
"""What a shaper lets go at once: as large as the largest packet that the kernel hands over in one piece."""
QUEUE_MS = 50.0

Rate = str | float | None
_UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(kbit|mbit|gbit)(?:/s)?\s*", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,14}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path, as every cable of it is made. What is not given is not shaped, near, and loses nothing.

    Rates are texts ("200mbit", "1.5 gbit") or numbers of Mbit/s, of whole frames: TCP sees about 5 % less. `rate` is
    short for `up` and `down`. `queue_ms` is what waits in a queue before it drops, as time at its rate, at least four
    bursts; `queue_bytes` is the same in bytes, exactly. `relay` makes cables whose delay and loss can be set later, if
    there is none yet. `name` names the path and the hosts' interfaces on it.
    """

    name: str = ""
    rate: Rate = None
    up: Rate = None
    down: Rate = None
    burst_bytes: int = BURST_BYTES
    queue_ms: float = QUEUE_MS
    queue_bytes: int | None = None
    rtt_ms: float = 0.0
    loss: float = 0.0
    mtu: int = 1_500
    relay: bool = False

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a path: a letter, then up to 14 letters, digits, - and _")
        for rate in (self.rate, self.up, self.down):
            mbit_of(rate)
        if self.burst_bytes < self.mtu + 14:
            raise ValueError(f"a burst of {self.burst_bytes} bytes is less than one frame of {self.mtu + 14}")
        if self.queue_ms <= 0 or (self.queue_bytes is not None and self.queue_bytes < self.mtu + 14):
            raise ValueError("a queue has room for one frame at least")
        if not 576 <= self.mtu <= 9_000:
            raise ValueError(f"an mtu is 576 to 9000 bytes, not {self.mtu}")
        check_distance(self.rtt_ms, self.loss)

    @property
    def is_relayed(self) -> bool:
        """Whether packets pass through our relay on every cable, because the kernel cannot delay or lose them."""
        return self.relay or self.rtt_ms > 0 or self.loss > 0

    def cable(self) -> "Cable":
        """A cable of this path."""
        whole = mbit_of(self.rate)
        up, down = mbit_of(self.up), mbit_of(self.down)
        return Cable(
            up_mbit=whole if up is None else up,
            down_mbit=whole if down is None else down,
            burst_bytes=self.burst_bytes,
            queue_ms=self.queue_ms,
            queue_bytes=self.queue_bytes,
            rtt_ms=self.rtt_ms,
            loss=self.loss,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """What one host's cable to one path is like now."""

    up_mbit: float | None = None
    down_mbit: float | None = None
    burst_bytes: int = BURST_BYTES
    queue_ms: float = QUEUE_MS
    queue_bytes: int | None = None
    rtt_ms: float = 0.0
    loss: float = 0.0

    def limit_bytes(self, mbit: float) -> int:
        """What may wait at one end of the cable."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(4 * self.burst_bytes, int(mbit * 1e6 / 8 * self.queue_ms / 1_000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes different about the cables of a path: of one host, or of all. What is None stays as it is.

    A rate of "none" removes the shaper. `cut` is "silent" (frames vanish, and no host is notified), "unplug" (the
    host's interface goes down) or "no" (restored).
    """

    path: str | int
    host: str | int | None = None
    rate: Rate = None
    up: Rate = None
    down: Rate = None
    rtt_ms: float | None = None
    loss: float | None = None
    cut: str | None = None

    def __post_init__(self) -> None:
        for rate in (self.rate, self.up, self.down):
            if rate != "none":
                mbit_of(rate)
        if self.cut not in (None, "silent", "unplug", "no"):
            raise ValueError(f'cut is "silent", "unplug" or "no", not {self.cut!r}')
        check_distance(self.rtt_ms or 0.0, self.loss or 0.0)

    @property
    def needs_relay(self) -> bool:
        return self.rtt_ms is not None or self.loss is not None

    def applied(self, cable: Cable) -> Cable:
        """The cable after the change."""
        up = self.rate if self.up is None else self.up
        down = self.rate if self.down is None else self.down
        return replace(
            cable,
            up_mbit=cable.up_mbit if up is None else mbit_of(up),
            down_mbit=cable.down_mbit if down is None else mbit_of(down),
            rtt_ms=cable.rtt_ms if self.rtt_ms is None else self.rtt_ms,
            loss=cable.loss if self.loss is None else self.loss,
        )

    def __str__(self) -> str:
        where = f"{self.path}" if self.host is None else f"{self.path} of {self.host}"
        fields = ("rate", "up", "down", "rtt_ms", "loss", "cut")
        given = {name: value for name in fields if (value := getattr(self, name)) is not None}
        shown = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in given.items()
        ]
        return f"{where}: {', '.join(shown) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class LabLayout:
    """The names and addresses of a lab: hosts and paths by name and by number."""

    hosts: tuple[str, ...]
    paths: tuple[Path, ...]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = tuple(path.name or f"path{number}" for number, path in enumerate(self.paths))
        object.__setattr__(self, "names", names)
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise ValueError(f"a lab has 1 to {MAX_HOSTS} hosts, not {len(self.hosts)}")
        if not 1 <= len(self.paths) <= MAX_PATHS:
            raise ValueError(f"a lab has 1 to {MAX_PATHS} paths, not {len(self.paths)}")
        for what, given in (("host", self.hosts), ("path", names)):
            for name in given:
                if not _NAME.fullmatch(name) or name in (SWITCH, "lo"):
                    raise ValueError(f"{name!r} cannot be the name of a {what}")
                if given.count(name) > 1:
                    raise ValueError(f"there are two {what}s with the name {name!r}")

    def host(self, host: str | int) -> int:
        """The number of a host; that of the switch is the number of hosts."""
        if host == SWITCH:
            return len(self.hosts)
        return _number("host", host, self.hosts)

    def path(self, path: str | int) -> int:
        """The number of a path."""
        return _number("path", path, self.names)

    def address(self, host: str | int, path: str | int = 0) -> str:
        """The IPv4 address of a host, or of the switch, on a path: 10.79.(path).(host + 1), the switch 254."""
        number = self.host(host)
        return f"10.79.{self.path(path)}.{254 if number == len(self.hosts) else number + 1}"

    def hardware(self, host: str | int, path: str | int) -> str:
        """The hardware address that goes with it."""
        last = self.address(host, path).rsplit(".", 1)[1]
        return f"02:52:46:00:{self.path(path):02x}:{int(last):02x}"


def plan(hosts: int | tuple[str, ...] | list[str], paths: list[Path] | tuple[Path, ...]) -> LabLayout:
    """A plan of so many hosts (h0, h1, ...), or of hosts with these names."""
    named = tuple(f"h{number}" for number in range(hosts)) if isinstance(hosts, int) else tuple(hosts)
    return LabLayout(named, tuple(paths))


def mbit_of(rate: Rate) -> float | None:
    """A rate in Mbit/s. None and "none" are no rate: as fast as the machine."""
    if rate is None or rate == "none":
        return None
    if isinstance(rate, str):
        if (found := _RATE.fullmatch(rate)) is None:
            raise ValueError(f'{rate!r} is no rate: use "200mbit", "1.5 gbit", "800kbit" or "none"')
        rate = float(found[1]) * _UNITS[found[2].lower()]
    if not (math.isfinite(rate) and rate >= 0.008):
        raise ValueError(f"a rate is 8 kbit/s or more, not {rate} Mbit/s")
    return float(rate)


def check_distance(rtt_ms: float, loss: float) -> None:
    """Refuse a round-trip time or a loss that is out of range."""
    if not 0 <= rtt_ms <= MAX_RTT_MS:
        raise ValueError(f"a round-trip time is 0 to {MAX_RTT_MS:.0f} ms, not {rtt_ms}")
    if not 0 <= loss <= 1:
        raise ValueError(f"a loss is a share, 0 to 1, not {loss}")


def _number(what: str, given: str | int, names: tuple[str, ...]) -> int:
    if isinstance(given, int):
        if 0 <= given < len(names):
            return given
    elif given in names:
        return names.index(given)
    raise ValueError(f"there is no {what} {given!r}; there are {', '.join(names)}")
