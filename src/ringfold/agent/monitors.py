"""The host's own queues: what waits in its NICs, and whether they are paused.

A monitor reads one NIC at a time, in some microseconds, and says what it knows; what it does not know is None. Several
monitors are laid over each other (`NicMonitors`): each part is taken from the first one that knows it.

    qdisc    the root queue of the NIC: bytes that wait, the queue's limit, drops        (netlink, about 15 us)
    ethtool  pause frames that came in since the last look, from the driver's counters   (ioctl; real NICs only)
    sys      the speed of the link, bytes and drops so far, what waits to be received    (/sys and /proc)

Monitors are found by entry points of the group `ringfold.monitors`: a callable without arguments that gives a
`Monitor`. Those three are declared in pyproject.toml as other packages declare theirs; BUILT_IN has them besides for
a source tree that was not installed, and so that no package replaces one of them by taking its name.

A monitor of another package may fail in any way. One that does not load is left out; one that raises something else
than OSError is left out from then on. Both are logged once, and `NicMonitors.states` says why.

Linux has no queue of bytes received per NIC: what the NIC has delivered and no core has looked at yet waits in the
cores' input queues (softnet), which all NICs share, counted in packets. `rx_bytes` is that count times 1,500: a rough
figure, and the same for every NIC.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Protocol

from ringfold.errors import ConfigError
from ringfold.runtime.netlink import EthtoolReader, QdiscReader, interface_index

ENTRY_POINTS = "ringfold.monitors"
FULL_BYTES = 1 << 20
"""What counts as a full queue if neither its limit nor its rate is known."""
FULL_S = 0.05
"""A queue that takes this long to drain is full, whatever its limit allows."""
PACKET_BYTES = 1_500

_log = logging.getLogger("ringfold.agent")


@dataclass(frozen=True, slots=True)
class NicReading:
    """What is known about one NIC now."""

    tx_bytes: int | None = None
    tx_limit_bytes: int | None = None
    rate_bytes_s: int | None = None
    """How fast it drains: of its shaper, or of the link."""
    rx_bytes: int | None = None
    drops: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    is_paused: bool | None = None
    """Pause frames told it to stop since the last look."""

    def pressure(self) -> float | None:
        """Its congestion, 0 to 255, as `PathInput.local` wants it; None if nothing is known.

        It is how full the queue is: of its limit, or of what drains in 50 ms, whichever is less.
        """
        if self.is_paused:
            return 255.0
        if self.tx_bytes is None:
            return None if self.is_paused is None else 0.0
        bounds = [self.tx_limit_bytes or 0, int((self.rate_bytes_s or 0) * FULL_S)]
        full = min((bound for bound in bounds if bound > 0), default=FULL_BYTES)
        return 255.0 * min(1.0, self.tx_bytes / full)


class Monitor(Protocol):
    """One way to look at a NIC. `read` raises OSError if the NIC is gone; knowing nothing is an empty reading."""

    def read(self, nic: str) -> NicReading: ...

    def close(self) -> None: ...


class QdiscMonitor:
    """The root qdisc, over netlink."""

    def __init__(self) -> None:
        self._reader = QdiscReader()
        self._indices: dict[str, int] = {}

    def read(self, nic: str) -> NicReading:
        index = self._indices.get(nic)
        if index is None:
            index = self._indices[nic] = interface_index(nic)
        try:
            queue = self._reader.root(index)
        except OSError:
            # The NIC may have come back under the same name with another number: look it up next time.
            del self._indices[nic]
            raise
        if queue is None:
            return NicReading(tx_bytes=0)
        return NicReading(
            tx_bytes=queue.backlog_bytes,
            tx_limit_bytes=queue.limit_bytes or None,
            rate_bytes_s=queue.rate_bytes_s or None,
            drops=queue.drops,
            sent_bytes=queue.sent_bytes,
        )

    def close(self) -> None:
        self._reader.close()


class EthtoolMonitor:
    """Pause frames received (802.3x and per priority), by whatever name the driver counts them."""

    def __init__(self, reader: EthtoolReader | None = None) -> None:
        self._reader = reader or EthtoolReader()
        self._last: dict[str, int] = {}

    def read(self, nic: str) -> NicReading:
        pauses = pause_count(self._reader.statistics(nic))
        if pauses is None:
            return NicReading()
        last = self._last.get(nic, pauses)
        self._last[nic] = pauses
        return NicReading(is_paused=pauses > last)

    def close(self) -> None:
        self._reader.close()


_PAUSE = re.compile(r"rx.*(pause|pfc|xoff)|(pause|pfc|xoff).*rx")
_NOT_A_COUNT = re.compile(r"duration|transition|xon")


def pause_count(statistics: Mapping[str, int]) -> int | None:
    """How often the network told the NIC to stop, of a driver's statistics; None if the driver does not count it.

    Pauses that were *received* count: those are the ones that stop us. What the NIC sent, and storms of that (mlx5),
    stop the others. Durations and transitions count the same twice, and XON says to go on.
    """
    found = [
        value
        for name, value in statistics.items()
        if _PAUSE.search(name.lower()) and not _NOT_A_COUNT.search(name.lower())
    ]
    return sum(found) if found else None


class SysMonitor:
    """Counters and the speed of the link, out of /sys/class/net, and the cores' input queues out of /proc."""

    def __init__(self, sys: str = "/sys/class/net", softnet: str = "/proc/net/softnet_stat") -> None:
        self._sys, self._softnet = sys, softnet

    def read(self, nic: str) -> NicReading:
        if not os.path.isdir(os.path.join(self._sys, nic)):
            raise OSError(f"no interface {nic}")
        speed = self._number(nic, "speed")
        backlog = self._waiting()
        return NicReading(
            # Mbit/s; -1 of links that are down or have no speed
            rate_bytes_s=speed * 125_000 if speed is not None and speed > 0 else None,
            rx_bytes=None if backlog is None else backlog * PACKET_BYTES,
            drops=self._number(nic, "statistics/tx_dropped"),
            sent_bytes=self._number(nic, "statistics/tx_bytes"),
            received_bytes=self._number(nic, "statistics/rx_bytes"),
        )

    def close(self) -> None:
        pass

    def _number(self, nic: str, name: str) -> int | None:
        try:
            with open(os.path.join(self._sys, nic, name), "rb", buffering=0) as file:
                return int(file.read(64))
        except (OSError, ValueError):
            return None

    def _waiting(self) -> int | None:
        """Packets in all cores' input queues. The kernel says so since 5.10, in the twelfth column."""
        try:
            with open(self._softnet, "rb", buffering=0) as file:
                rows = [row.split() for row in file.read(1 << 20).splitlines()]
            return sum(int(row[11], 16) for row in rows)
        except (OSError, ValueError, IndexError):
            return None


BUILT_IN: dict[str, Callable[[], Monitor]] = {"qdisc": QdiscMonitor, "ethtool": EthtoolMonitor, "sys": SysMonitor}


def known_monitors() -> dict[str, Callable[[], Callable[[], Monitor]]]:
    """By name, what loads each monitor that is to be had: those of this package, and what other packages declare."""
    found = {point.name: point.load for point in entry_points(group=ENTRY_POINTS)}
    return {**found, **{name: partial(_itself, make) for name, make in BUILT_IN.items()}}


def _itself(make: Callable[[], Monitor]) -> Callable[[], Monitor]:
    return make


def open_monitors(names: Sequence[str]) -> "NicMonitors":
    """The monitors of these names. One that does not work here is left out and says why; a name that nobody has is the
    caller's mistake, and raises ConfigError."""
    known = known_monitors()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no NIC monitor {unknown[0]!r}; known are {', '.join(sorted(known))}")
    monitors, broken = {}, {}
    for name in names:
        try:
            monitors[name] = known[name]()()
        except Exception as error:
            broken[name] = _why(error)
            _log.warning("the NIC monitor %r does not work here: %s", name, broken[name])
    return NicMonitors(monitors, broken)


class NicMonitors:
    """Several monitors as one. What one cannot read is left out; a NIC that none can read has an empty reading."""

    def __init__(self, monitors: Mapping[str, Monitor], broken: Mapping[str, str] | None = None) -> None:
        self._monitors = dict(monitors)
        self.states = {**dict.fromkeys(monitors, ""), **(broken or {})}
        """By name, why a monitor is not used any more; empty: it is."""
        self.failures = 0

    def read(self, nic: str) -> NicReading:
        whole = NicReading()
        for name, monitor in list(self._monitors.items()):
            try:
                part = monitor.read(nic)
                whole = overlay(whole, part)
            except OSError:
                self.failures += 1
            except Exception as error:
                self._leave_out(name, error)
        return whole

    def close(self) -> None:
        for name, monitor in self._monitors.items():
            _close(name, monitor)

    def _leave_out(self, name: str, error: Exception) -> None:
        self.states[name] = _why(error)
        _log.error("the NIC monitor %r broke and is not asked any more", name, exc_info=error)
        _close(name, self._monitors.pop(name))


def _close(name: str, monitor: Monitor) -> None:
    try:
        monitor.close()
    except Exception as error:
        _log.warning("the NIC monitor %r does not close: %s", name, _why(error))


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def overlay(first: NicReading, second: NicReading) -> NicReading:
    """What `first` knows, and besides what only `second` does."""
    gaps = {
        name: value
        for name in NicReading.__dataclass_fields__
        if getattr(first, name) is None and (value := getattr(second, name)) is not None
    }
    return replace(first, **gaps) if gaps else first
