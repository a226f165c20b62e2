"""The queues of the interfaces that flows go out by: read often, told to the steering and to the switches.

An interface is watched while a registered flow has a path from one of its addresses. The queues are read every LOOK_NS
while anything waits in one of them, or did a moment ago; every REST_NS while all are empty and bytes go out; and every
IDLE_NS while hardly any do, because a queue cannot be full where nothing is sent, and an agent must cost nothing then.
What is slower to ask for (pause frames, the speed of the link) is asked for every SLOW_NS, or every IDLE_SLOW_NS.
Without flows nothing is read.
"""

import logging
from collections.abc import Iterable

from ringfold.agent.monitors import NicReading, open_monitors, overlay
from ringfold.runtime.network import interfaces
from ringfold.wire.telemetry import address_number

LOOK_NS = 1_000_000
REST_NS = 10_000_000
IDLE_NS = 50_000_000
CALM_NS = 100_000_000
SLOW_NS = 50_000_000
IDLE_SLOW_NS = 500_000_000
HARDLY_BYTES_S = 1_000_000
"""Less than this goes out of an interface that is not in use: it takes a second to fill what drains in 50 ms."""
ADDRESSES_NS = 1_000_000_000
FAST = ("qdisc",)
SLOW = ("ethtool", "sys")

_log = logging.getLogger("ringfold.agent")
Nics = dict[tuple[str, int], NicReading]


class NicWatch:
    """Reads the interfaces of the addresses that it is told. `more` are monitors from other packages.

    Raises ConfigError for a name that no package has; a monitor that does not work is left out.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._slow = open_monitors([*SLOW, *(name for name in more if name not in (*FAST, *SLOW))])
        self._fast = open_monitors(FAST)
        self._counts: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._named_ns: int | None = None
        self._slow_readings: dict[str, NicReading] = {}
        self._slow_ns: int | None = None
        self._busy_ns = self._moved_ns = 0
        self._sent: dict[str, tuple[int, int]] = {}

    def use(self, address: str) -> None:
        """A path goes out from this address."""
        self._counts[address] = self._counts.get(address, 0) + 1
        self._named_ns = None

    def leave(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    @property
    def is_idle(self) -> bool:
        """Nothing is to be watched."""
        return not self._counts

    def states(self) -> dict[str, str]:
        """By its name, why a monitor is not used; empty: it is."""
        return {**self._fast.states, **self._slow.states}

    def look(self, now_ns: int) -> Nics:
        """What is known of each interface, by its name and the address that flows use."""
        self._look_up(now_ns)
        used = [(name, address) for address in self._counts if (name := self._interface(address))]
        names = sorted({name for name, _ in used})
        slow_ns = IDLE_SLOW_NS if self._is_idle(now_ns) else SLOW_NS
        if self._slow_ns is None or now_ns - self._slow_ns >= slow_ns or not self._slow_readings.keys() >= set(names):
            self._slow_readings, self._slow_ns = {name: self._slow.read(name) for name in names}, now_ns
        queues = {name: self._fast.read(name) for name in names}
        if any([self._moves(now_ns, name, queue.sent_bytes) for name, queue in queues.items()]):
            self._moved_ns = now_ns
        readings = {name: overlay(queue, self._slow_readings[name]) for name, queue in queues.items()}
        if any(reading.tx_bytes or reading.is_paused for reading in readings.values()):
            self._busy_ns = now_ns
        return {(name, address_number(address)): readings[name] for name, address in used}

    def next_ns(self, now_ns: int) -> int:
        """When to look again."""
        if now_ns - self._busy_ns <= CALM_NS:
            return now_ns + LOOK_NS
        return now_ns + (IDLE_NS if self._is_idle(now_ns) else REST_NS)

    def _is_idle(self, now_ns: int) -> bool:
        return now_ns - max(self._busy_ns, self._moved_ns) > CALM_NS

    def _moves(self, now_ns: int, name: str, sent: int | None) -> bool:
        """Whether an interface with a queue sent something worth mentioning since it was looked at last."""
        if sent is None:
            return False
        at_ns, before = self._sent.get(name, (0, 0))
        if sent >= before and now_ns - at_ns < REST_NS:
            return False  # too short a time to say
        self._sent[name] = (now_ns, sent)
        return (sent - before) * 1_000_000_000 >= HARDLY_BYTES_S * (now_ns - at_ns)

    def close(self) -> None:
        self._fast.close()
        self._slow.close()

    def _interface(self, address: str) -> str:
        """The name of its interface, which a link-local address says itself; empty if it is none of this host's."""
        plain, _, scope = address.partition("%")
        return scope if scope in self._names.values() else self._names.get(plain, "")

    def _look_up(self, now_ns: int) -> None:
        """Addresses move between interfaces now and then; flows with new addresses are looked up at once."""
        if self._named_ns is None or now_ns - self._named_ns >= ADDRESSES_NS:
            self._named_ns = now_ns
            try:
                self._names = interfaces()
            except OSError as error:
                _log.warning("the addresses of this host are not to be had: %s", error)


def pressures(nics: Nics) -> dict[int, float]:
    """By address, how full the queue of its interface is, where that is known."""
    known = ((address, reading.pressure()) for (_, address), reading in nics.items())
    return {address: pressure for address, pressure in known if pressure is not None}
