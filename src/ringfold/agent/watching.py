"""The queues of the interfaces that flows go out by: read often, told to the steering and to the switches.

An interface is watched while a registered flow has a path from one of its addresses. Its queue is read every LOOK_NS
while anything waits in one of them, or did a moment ago, and every REST_NS while all are empty. What is slower to ask
for (pause frames, the speed of the link) is asked for every SLOW_NS. Without flows nothing is read.
"""

import logging
from collections.abc import Iterable

from ringfold.agent.monitors import NicMonitors, NicReading, open_monitors, overlay
from ringfold.errors import ConfigError
from ringfold.runtime.interfaces import interfaces
from ringfold.wire.telemetry import address_number

LOOK_NS = 1_000_000
REST_NS = 10_000_000
CALM_NS = 100_000_000
SLOW_NS = 50_000_000
ADDRESSES_NS = 1_000_000_000
FAST = ("qdisc",)
SLOW = ("ethtool", "sys")

_log = logging.getLogger("ringfold.agent")
Nics = dict[tuple[str, int], NicReading]


class NicWatch:
    """Reads the interfaces of the addresses that it is told. `more` are monitors from other packages."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._fast, self._slow = _opened(FAST), _opened([*SLOW, *more], is_wanted=more)
        self._counts: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._named_ns: int | None = None
        self._slow_readings: dict[str, NicReading] = {}
        self._slow_ns: int | None = None
        self._busy_ns = 0

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

    def look(self, now_ns: int) -> Nics:
        """What is known of each interface, by its name and the address that flows use."""
        self._look_up(now_ns)
        used = [(self._names[address], address) for address in self._counts if address in self._names]
        names = sorted({name for name, _ in used})
        if self._slow_ns is None or now_ns - self._slow_ns >= SLOW_NS:
            self._slow_readings, self._slow_ns = {name: self._slow.read(name) for name in names}, now_ns
        readings = {name: overlay(self._fast.read(name), self._slow_readings.get(name, NicReading())) for name in names}
        if any(reading.tx_bytes or reading.is_paused for reading in readings.values()):
            self._busy_ns = now_ns
        return {(name, address_number(address)): readings[name] for name, address in used}

    def next_ns(self, now_ns: int) -> int:
        """When to look again."""
        return now_ns + (LOOK_NS if now_ns - self._busy_ns <= CALM_NS else REST_NS)

    def close(self) -> None:
        self._fast.close()
        self._slow.close()

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


def _opened(names: Iterable[str], is_wanted: Iterable[str] = ()) -> NicMonitors:
    """The monitors that work here. One that the user named must work; the usual ones need not."""
    wanted, working = set(is_wanted), []
    for name in names:
        try:
            working.append(open_monitors([name]))
        except ConfigError as error:
            if name in wanted:
                raise
            _log.info("%s", error)
    return NicMonitors(working)
