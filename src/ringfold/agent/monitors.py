"""The host's own queues: what waits in its NICs, whether they are paused, and when they are read.

A monitor reads one NIC at a time, in some microseconds, and returns what it knows; the rest is None. `NicMonitors`
combines several monitors: each field comes from the first one that knows it.

    qdisc    the root queue of the NIC: bytes that wait, the queue's limit, drops        (netlink, about 15 us)
    ethtool  pause frames that came in since the last read, and what each transmit queue
             has sent, from the driver's counters                                        (ioctl; real NICs only)
    sys      the speed of the link, bytes and drops so far, what waits to be received,
             and what each transmit queue has in flight to the device                    (/sys and /proc)
    ebpf     the peak of the root queue since the last read, counted in the kernel       (root; used if it is named)

Monitors are entry points of the group `ringfold.monitors`: a callable without arguments that returns a `Monitor`. These
four are declared in pyproject.toml as other packages declare theirs. BUILT_IN has them, too, for a source tree that is
not installed, and so that no package replaces one of them by taking its name.

A monitor of another package may fail in any way. One that does not load is not used. One that raises something else
than OSError, or returns something else than a reading, is not used again. Both are logged once, and
`NicMonitors.states` has the reason.

Linux has no queue of received bytes per NIC: packets that the NIC has delivered and no core has processed wait in the
input queues of the cores (softnet), which all NICs share. `rx_bytes` is their number times 1,500: an estimate, and the
same for every NIC.

`NicWatch` reads an interface while a registered flow has a path from one of its addresses. It reads the queues every
BUSY_INTERVAL_NS while one of them holds bytes, or did a moment ago; every ACTIVE_INTERVAL_NS while all are empty and
bytes are sent; and every IDLE_INTERVAL_NS while hardly any are sent, because no queue can fill then, and the agent must
cost nothing. Slower readings (pause frames, the speed of the link) have intervals of their own. Without flows nothing
is read.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Protocol

from ringfold.errors import ConfigError
from ringfold.runtime.bpf import QueuePeaks
from ringfold.runtime.netlink import EthtoolReader, QdiscReader, interface_index
from ringfold.runtime.network import interfaces
from ringfold.wire.telemetry import address_number

ENTRY_POINTS = "ringfold.monitors"
DEFAULT_LIMIT_BYTES = 1 << 20
"""The size of a full queue if neither its limit nor its rate is known."""
MAX_DRAIN_S = 0.05
"""A queue that takes this long to drain counts as full, whatever its limit."""
PACKET_BYTES = 1_500

_log = logging.getLogger("ringfold.agent")


@dataclass(frozen=True, slots=True)
class NicReading:
    """What is known about one NIC."""

    tx_bytes: int | None = None
    tx_limit_bytes: int | None = None
    rate_bytes_s: int | None = None
    """How fast it drains: the rate of its shaper, or of the link."""
    rx_bytes: int | None = None
    drops: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    is_paused: bool | None = None
    """It received pause frames since the last read."""
    interface_index: int | None = None
    queue_counts: Mapping[int, tuple[int | None, int | None]] | None = None
    """By transmit queue, the bytes and packets that it has sent."""
    queue_limits: Mapping[int, tuple[int, int]] | None = None
    """By transmit queue, the bytes in flight to the device, and their limit (byte queue limits)."""

    def pressure(self) -> float | None:
        """Its congestion, 0 to 255, for `PathInput.local`; None if nothing is known.

        It is the fill level of the queue, relative to its limit or to what drains in 50 ms, whichever is less.
        """
        if self.is_paused:
            return 255.0
        if self.tx_bytes is None:
            return None if self.is_paused is None else 0.0
        bounds = [self.tx_limit_bytes or 0, int((self.rate_bytes_s or 0) * MAX_DRAIN_S)]
        full = min((bound for bound in bounds if bound > 0), default=DEFAULT_LIMIT_BYTES)
        return 255.0 * min(1.0, self.tx_bytes / full)


class Monitor(Protocol):
    """A source of readings. `read` raises OSError if the NIC is gone; if nothing is known, the reading is empty."""

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
            # The NIC may exist again under the same name with another index: look it up next time.
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
    """Received pause frames (802.3x and per priority), under any name that drivers use."""

    def __init__(self, reader: EthtoolReader | None = None) -> None:
        self._reader = reader or EthtoolReader()
        self._last: dict[str, int] = {}

    def read(self, nic: str) -> NicReading:
        statistics = self._reader.statistics(nic)
        pauses, queues = pause_count(statistics), queue_counts(statistics) or None
        if pauses is None:
            return NicReading(queue_counts=queues)
        last = self._last.get(nic, pauses)
        self._last[nic] = pauses
        return NicReading(is_paused=pauses > last, queue_counts=queues)

    def close(self) -> None:
        self._reader.close()


_TX_QUEUE = (
    re.compile(r"tx[-_]?(?:queue[-_])?(?P<queue>\d+)[-_.](?P<what>bytes|packets)"),  # virtio, igb, ixgbe, i40e, mlx5
    re.compile(r"queue_(?P<queue>\d+)_tx_(?P<what>bytes|cnt)"),  # ena
    re.compile(r"tx_(?P<what>bytes|packets)\[(?P<queue>\d+)\]"),  # gve
)


def queue_counts(statistics: Mapping[str, int]) -> dict[int, tuple[int | None, int | None]]:
    """By transmit queue, the bytes and packets that it has sent, under any name that drivers use."""
    found: dict[int, tuple[int | None, int | None]] = {}
    for name, value in statistics.items():
        match = next((match for each in _TX_QUEUE if (match := each.fullmatch(name.lower()))), None)
        if match is not None:
            queue = int(match["queue"])
            sent_bytes, packets = found.get(queue, (None, None))
            found[queue] = (value, packets) if match["what"] == "bytes" else (sent_bytes, value)
    return found


_PAUSE = re.compile(r"rx.*(pause|pfc|xoff)|(pause|pfc|xoff).*rx")
_NOT_A_COUNT = re.compile(r"duration|transition|xon")


def pause_count(statistics: Mapping[str, int]) -> int | None:
    """The number of pause frames in a driver's statistics; None if the driver does not count them.

    Only *received* frames count: they stop this host. Frames that the NIC sent, and storms of those (mlx5), stop
    others. Durations and transitions would count the same frame twice, and XON ends a pause.
    """
    found = [
        value
        for name, value in statistics.items()
        if _PAUSE.search(name.lower()) and not _NOT_A_COUNT.search(name.lower())
    ]
    return sum(found) if found else None


class SysMonitor:
    """Counters and the speed of the link from /sys/class/net, and the cores' input queues from /proc."""

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
            interface_index=self._number(nic, "ifindex"),
            queue_limits=self._queue_limits(nic) or None,
        )

    def _queue_limits(self, nic: str) -> dict[int, tuple[int, int]]:
        """By transmit queue, what is in flight to the device and its limit, where the driver has byte queue limits."""
        found: dict[int, tuple[int, int]] = {}
        try:
            queues = os.listdir(os.path.join(self._sys, nic, "queues"))
        except OSError:
            return found
        for queue in queues:
            kind, _, number = queue.partition("-")
            limits = [self._number(nic, f"queues/{queue}/byte_queue_limits/{name}") for name in ("inflight", "limit")]
            if kind == "tx" and number.isdecimal() and limits[0] is not None and limits[1] is not None:
                found[int(number)] = limits[0], limits[1]
        return found

    def close(self) -> None:
        pass

    def _number(self, nic: str, name: str) -> int | None:
        try:
            with open(os.path.join(self._sys, nic, name), "rb", buffering=0) as file:
                return int(file.read(64))
        except (OSError, ValueError):
            return None

    def _waiting(self) -> int | None:
        """Packets in the input queues of all cores: the twelfth column, since Linux 5.10."""
        try:
            with open(self._softnet, "rb", buffering=0) as file:
                rows = [row.split() for row in file.read(1 << 20).splitlines()]
            return sum(int(row[11], 16) for row in rows)
        except (OSError, ValueError, IndexError):
            return None


class EbpfMonitor:
    """The largest backlog of the root qdisc since the last read. A sample misses what comes and drains between two."""

    def __init__(self) -> None:
        self._peaks = QueuePeaks()

    def read(self, nic: str) -> NicReading:
        # No peak is not an empty queue: the kernel may not count it here. What the others sampled stays.
        peak, _ = self._peaks.take(interface_index(nic))
        return NicReading(tx_bytes=peak) if peak else NicReading()

    def close(self) -> None:
        self._peaks.close()


BUILT_IN: dict[str, Callable[[], Monitor]] = {
    "qdisc": QdiscMonitor,
    "ethtool": EthtoolMonitor,
    "sys": SysMonitor,
    "ebpf": EbpfMonitor,
}


def known_monitors() -> dict[str, Callable[[], Callable[[], Monitor]]]:
    """By name, what loads each available monitor: those of this package, and those that other packages declare."""
    found = {point.name: point.load for point in entry_points(group=ENTRY_POINTS)}
    return {**found, **{name: partial(_itself, make) for name, make in BUILT_IN.items()}}


def _itself(make: Callable[[], Monitor]) -> Callable[[], Monitor]:
    return make


def open_monitors(names: Sequence[str]) -> "NicMonitors":
    """The monitors of these names. One that does not work here is not used, with the reason in `states`. Raises
    ConfigError for an unknown name."""
    known = known_monitors()
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no NIC monitor {unknown[0]!r}; there are {', '.join(sorted(known))}")
    monitors, failed = {}, {}
    for name in names:
        try:
            monitors[name] = known[name]()()
        except Exception as error:
            failed[name] = _error_text(error)
            _log.warning("the NIC monitor %r does not work here: %s", name, failed[name])
    return NicMonitors(monitors, failed)


class NicMonitors:
    """Several monitors as one. A NIC that no monitor can read has an empty reading."""

    def __init__(self, monitors: Mapping[str, Monitor], failed: Mapping[str, str] | None = None) -> None:
        self._monitors = dict(monitors)
        self.states = {**dict.fromkeys(monitors, ""), **(failed or {})}
        """By name, why a monitor is not used; empty: it is used."""
        self.failures = 0

    def read(self, nic: str) -> NicReading:
        whole = NicReading()
        for name, monitor in list(self._monitors.items()):
            try:
                part = monitor.read(nic)
                check_reading(part)
                whole = overlay(whole, part)
            except OSError:
                self.failures += 1
            except Exception as error:
                self._disable(name, error)
        return whole

    def close(self) -> None:
        for name, monitor in self._monitors.items():
            _close(name, monitor)

    def _disable(self, name: str, error: Exception) -> None:
        self.states[name] = _error_text(error)
        _log.error("the NIC monitor %r failed and is not used any more", name, exc_info=error)
        _close(name, self._monitors.pop(name))


def _close(name: str, monitor: Monitor) -> None:
    try:
        monitor.close()
    except Exception as error:
        _log.warning("the NIC monitor %r does not close: %s", name, _error_text(error))


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


MAX_COUNT = 2**64 - 1
MAX_INDEX = 2**32 - 1
MAX_QUEUE = 2**16 - 1


def check_reading(reading: object) -> None:
    """Raise TypeError or ValueError if a reading is not what it should be: it is computed with, and reported."""
    if not isinstance(reading, NicReading):
        raise TypeError(f"a reading is a NicReading, not {type(reading).__name__}")
    for name in _COUNTS:
        _check_count(name, getattr(reading, name))
    _check_count("interface_index", reading.interface_index, MAX_INDEX)
    if reading.is_paused is not None and not isinstance(reading.is_paused, bool):
        raise TypeError(f"is_paused is {reading.is_paused!r}")
    for name, queues in (("queue_counts", reading.queue_counts), ("queue_limits", reading.queue_limits)):
        if queues is None:
            continue
        if not isinstance(queues, Mapping):
            raise TypeError(f"{name} is {queues!r}")
        for queue, figures in queues.items():
            _check_count(f"a queue of {name}", -1 if queue is None else queue, MAX_QUEUE)
            first, second = figures
            _check_count(name, first)
            _check_count(name, second)


_COUNTS = ("tx_bytes", "tx_limit_bytes", "rate_bytes_s", "rx_bytes", "drops", "sent_bytes", "received_bytes")


def _check_count(name: str, value: object, most: int = MAX_COUNT) -> None:
    if value is None:
        return
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, and not a whole number")
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}")


def overlay(first: NicReading, second: NicReading) -> NicReading:
    """`first`, with the gaps filled from `second`."""
    gaps = {
        name: value
        for name in NicReading.__dataclass_fields__
        if getattr(first, name) is None and (value := getattr(second, name)) is not None
    }
    return replace(first, **gaps) if gaps else first


BUSY_INTERVAL_NS = 1_000_000
ACTIVE_INTERVAL_NS = 10_000_000
IDLE_INTERVAL_NS = 50_000_000
BUSY_FOR_NS = 100_000_000
SLOW_INTERVAL_NS = 50_000_000
IDLE_SLOW_INTERVAL_NS = 500_000_000
MIN_ACTIVE_BYTES_S = 1_000_000
"""An interface that sends less than this is idle: it takes a second to fill a queue that drains in 50 ms."""
ADDRESS_REFRESH_NS = 1_000_000_000
FAST_MONITORS = ("qdisc",)
SLOW_MONITORS = ("ethtool", "sys")
OPTIONAL_FAST_MONITORS = ("ebpf",)
"""Read as often as the fast ones, and before them, if they are named."""

_log = logging.getLogger("ringfold.agent")
Nics = dict[tuple[str, int], NicReading]


class NicWatch:
    """Reads the interfaces of the addresses in use. `more` are monitors from other packages.

    Raises ConfigError for an unknown name; a monitor that does not work is not used.
    """

    def __init__(self, more: Iterable[str] = (), busy_interval_ns: int = BUSY_INTERVAL_NS) -> None:
        self._busy_interval_ns = busy_interval_ns
        named = list(more)
        fast = [*(name for name in OPTIONAL_FAST_MONITORS if name in named), *FAST_MONITORS]
        others = [name for name in named if name not in (*fast, *SLOW_MONITORS)]
        self._slow = open_monitors([*SLOW_MONITORS, *others])
        self._fast = open_monitors(fast)
        self._counts: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._last_refresh_ns: int | None = None
        self._slow_readings: dict[str, NicReading] = {}
        self._last_slow_ns: int | None = None
        self._last_busy_ns = 0
        self._last_sent_ns = 0
        self._sent: dict[str, tuple[int, int]] = {}

    def add_address(self, address: str) -> None:
        """A path starts at this address."""
        self._counts[address] = self._counts.get(address, 0) + 1
        self._last_refresh_ns = None

    def remove_address(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    @property
    def is_idle(self) -> bool:
        """Whether no address is in use."""
        return not self._counts

    def states(self) -> dict[str, str]:
        """By name, why a monitor is not used; empty: it is used."""
        return {**self._fast.states, **self._slow.states}

    def read(self, now_ns: int) -> Nics:
        """Read the interfaces: what is known of each, by its name and the address that flows use."""
        self._refresh_addresses(now_ns)
        used = [(name, address) for address in self._counts if (name := self._interface(address))]
        names = sorted({name for name, _ in used})
        slow_ns = IDLE_SLOW_INTERVAL_NS if self._is_idle(now_ns) else SLOW_INTERVAL_NS
        is_due = self._last_slow_ns is None or now_ns - self._last_slow_ns >= slow_ns
        if is_due or not self._slow_readings.keys() >= set(names):
            self._slow_readings, self._last_slow_ns = {name: self._slow.read(name) for name in names}, now_ns
        queues = {name: self._fast.read(name) for name in names}
        if any([self._is_sending(now_ns, name, queue.sent_bytes) for name, queue in queues.items()]):
            self._last_sent_ns = now_ns
        readings = {name: overlay(queue, self._slow_readings[name]) for name, queue in queues.items()}
        if any(reading.tx_bytes or reading.is_paused for reading in readings.values()):
            self._last_busy_ns = now_ns
        return {(name, address_number(address)): readings[name] for name, address in used}

    def next_ns(self, now_ns: int) -> int:
        """When to read next."""
        if now_ns - self._last_busy_ns <= BUSY_FOR_NS:
            return now_ns + self._busy_interval_ns
        pause_ns = IDLE_INTERVAL_NS if self._is_idle(now_ns) else ACTIVE_INTERVAL_NS
        return now_ns + max(pause_ns, self._busy_interval_ns)

    def _is_idle(self, now_ns: int) -> bool:
        return now_ns - max(self._last_busy_ns, self._last_sent_ns) > BUSY_FOR_NS

    def _is_sending(self, now_ns: int, name: str, sent: int | None) -> bool:
        """Whether an interface with a queue is active: it sent MIN_ACTIVE_BYTES_S or more since the last check."""
        if sent is None:
            return False
        at_ns, before = self._sent.get(name, (0, 0))
        if sent >= before and now_ns - at_ns < ACTIVE_INTERVAL_NS:
            return False  # too short a time to measure a rate
        self._sent[name] = (now_ns, sent)
        return (sent - before) * 1_000_000_000 >= MIN_ACTIVE_BYTES_S * (now_ns - at_ns)

    def close(self) -> None:
        self._fast.close()
        self._slow.close()

    def _interface(self, address: str) -> str:
        """The interface of an address; a link-local address names it. Empty if the address is not of this host."""
        plain, _, scope = address.partition("%")
        return scope if scope in self._names.values() else self._names.get(plain, "")

    def _refresh_addresses(self, now_ns: int) -> None:
        """Read which interface has which address: every ADDRESS_REFRESH_NS, and at once for a new address."""
        if self._last_refresh_ns is None or now_ns - self._last_refresh_ns >= ADDRESS_REFRESH_NS:
            self._last_refresh_ns = now_ns
            try:
                self._names = interfaces()
            except OSError as error:
                _log.warning("the addresses of this host cannot be read: %s", error)


def pressures(nics: Nics) -> dict[int, float]:
    """By address, the pressure of its interface, where that is known."""
    known = ((address, reading.pressure()) for (_, address), reading in nics.items())
    return {address: pressure for address, pressure in known if pressure is not None}
