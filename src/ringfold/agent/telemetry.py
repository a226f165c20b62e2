"""Telemetry in and out: what switches report about queues, and what the agent reports to switches. Pure.

In: the newest packet of each queue is kept until it is too old. Which flows a packet is about:

- A packet names a source, a destination and a path number. It is about path p of a flow if p is that number, the flow's
  source lies in the packet's source prefix, and its destination in the destination prefix. An exact pair has prefixes
  of 128 bits. A port that many pairs use is sent as `any -> host` or `host -> any`, or with a network.
- The addresses of the flow are those of *this path* (local, remote). If the paths of a flow have the same addresses
  (the classic SOUT and SUP between one pair), only the path number tells them apart.
- Of one (source, destination, path) the newest packet counts: by time of measurement, then by time of receipt.
- If several fresh packets apply, the flow passes all of these queues, and the highest congestion counts. A longer
  prefix does not override a shorter one.
- A packet that is not renewed within `stale_after_ms` is dropped. The congestion is unknown then, not zero.

Out: `Reporter` makes datagrams (`wire/telemetry.py`) about flows and about this host's NICs; the daemon sends each of
them to every collector. UDP loses some, so:

- The queue of a NIC is reported when it changed by more than `change_bytes`, and on a timer: every `interval_ms` while
  it holds bytes, every `quiet_ms` while it is empty.
- The transmit queues of a NIC, where the kernel has figures of them, are reported every `repeat_ms`.
- A flow is reported when it is added, with its paths and their interfaces, and when it is removed. All flows are
  repeated within `repeat_ms`, a few at a time. A collector may forget a flow that was not repeated for several times
  that long.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from ringfold.agent.monitors import NicReading
from ringfold.errors import ConfigError
from ringfold.wire.telemetry import (
    EXACT,
    Body,
    Congestion,
    FlowAdded,
    FlowPath,
    FlowRemoved,
    Gate,
    NicQueues,
    Packet,
    Refusal,
    TxQueue,
    encode,
    masked,
)

_Bits = tuple[int, int]
_Key = tuple[int, int, int]

MAX_PREFIX_LENGTHS = 32
"""How many different pairs of prefix lengths are kept: each costs every lookup one more step."""
MAX_REPORTED_QUEUES = 256
"""Transmit queues of one NIC."""
MAX_PLAUSIBLE_AGE_NS = 5_000_000_000
"""Up to this age the sender's time counts. Beyond it the clocks do not agree, and only the time of receipt counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """After how long a queue is unknown, and how many queues are kept."""

    stale_after_ms: int = 1_000
    max_entries: int = 65_536

    def __post_init__(self) -> None:
        if self.stale_after_ms < 1 or self.max_entries < 1:
            raise ConfigError("stale_after_ms and max_entries must be at least 1")


@dataclass(frozen=True, slots=True)
class QueueReading:
    """What is known about a path of a flow: its congestion, the depth of the queue, and how old that is."""

    congestion: int
    depth_bytes: int
    age_ns: int


@dataclass(slots=True)
class _QueueEntry:
    congestion: int
    depth_bytes: int
    measured_unix_ns: int
    received_ns: int
    late_ns: int
    """How old it was when it was received, if the clocks agree."""


class QueueTable:
    """The newest report of every queue. `reading` looks up a path of a flow."""

    def __init__(self, settings: TelemetrySettings | None = None) -> None:
        self._settings = settings or TelemetrySettings()
        self._stale_ns = self._settings.stale_after_ms * 1_000_000
        self._by_bits: dict[_Bits, dict[_Key, _QueueEntry]] = {}
        self._count = 0
        self._last_expiry_ns: int | None = None
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    def add_packet(self, now_ns: int, unix_ns: int, packet: Packet) -> Congestion | None:
        """Add an accepted packet; `now_ns` is the monotonic clock, `unix_ns` the wall clock.

        Returns what is new, or None for a packet of another kind, or one that is older than the entry.
        """
        body = packet.body
        if not isinstance(body, Congestion):
            self.counts["other"] += 1
            return None
        return body if self.add_observation(now_ns, unix_ns, body, packet.unix_ns) else None

    def add_observation(self, now_ns: int, unix_ns: int, body: Congestion, measured_unix_ns: int) -> bool:
        """The same for an observation of a feed (`adapters.py`). Returns whether it is new."""
        bits = (body.source_bits, body.destination_bits)
        table = self._by_bits.get(bits, {})
        key = (body.source, body.destination, body.path)
        late_ns = unix_ns - measured_unix_ns
        late_ns = late_ns if 0 <= late_ns <= MAX_PLAUSIBLE_AGE_NS else 0
        measured_unix_ns = min(measured_unix_ns, unix_ns)  # a time in the future counts as now
        entry = table.get(key)
        if entry is None:
            if self._is_full(bits):
                self._expire(now_ns)
            if self._is_full(bits):
                self.counts["full"] += 1
                return False
            table = self._by_bits.setdefault(bits, {})
            table[key] = _QueueEntry(body.congestion, body.depth_bytes, measured_unix_ns, now_ns, late_ns)
            self._count += 1
        elif measured_unix_ns < entry.measured_unix_ns and now_ns - entry.received_ns <= self._stale_ns:
            self.counts["older"] += 1
            return False
        else:
            entry.congestion, entry.depth_bytes = body.congestion, body.depth_bytes
            entry.measured_unix_ns, entry.received_ns, entry.late_ns = measured_unix_ns, now_ns, late_ns
        self.counts["congestion"] += 1
        return True

    def reading(self, now_ns: int, source: int, destination: int, path: int) -> QueueReading | None:
        """What is known of a path between two addresses (`wire.telemetry.address_number`); None: unknown."""
        best: _QueueEntry | None = None
        for (source_bits, destination_bits), table in self._by_bits.items():
            entry = table.get(
                (
                    source if source_bits == EXACT else masked(source, source_bits),
                    destination if destination_bits == EXACT else masked(destination, destination_bits),
                    path,
                )
            )
            if entry is None or now_ns - entry.received_ns > self._stale_ns:
                continue
            if best is None or (entry.congestion, entry.received_ns) > (best.congestion, best.received_ns):
                best = entry
        if best is None:
            return None
        return QueueReading(best.congestion, best.depth_bytes, now_ns - best.received_ns + best.late_ns)

    def late_ns(self, body: Congestion) -> int:
        """How old the newest report of exactly this queue was when it was received; 0 if there is none."""
        entry = self._by_bits.get((body.source_bits, body.destination_bits), {}).get(
            (body.source, body.destination, body.path)
        )
        return 0 if entry is None else entry.late_ns

    def _is_full(self, bits: _Bits) -> bool:
        """Whether no entry with these prefix lengths can be added."""
        return self._count >= self._settings.max_entries or (
            bits not in self._by_bits and len(self._by_bits) >= MAX_PREFIX_LENGTHS
        )

    def _expire(self, now_ns: int) -> None:
        """Drop stale entries. Rate-limited: it visits all entries, and a sender may keep the table full."""
        if self._last_expiry_ns is not None and now_ns - self._last_expiry_ns < self._stale_ns // 4:
            return
        self._last_expiry_ns = now_ns
        for bits, table in list(self._by_bits.items()):
            for key in [key for key, entry in table.items() if now_ns - entry.received_ns > self._stale_ns]:
                del table[key]
                self._count -= 1
            if not table:
                del self._by_bits[bits]


class TelemetryIngest:
    """Gate and table together: takes the datagrams of the daemon."""

    def __init__(self, gate: Gate | None = None, table: QueueTable | None = None) -> None:
        self.gate = gate or Gate()
        self.table = QueueTable() if table is None else table  # an empty table is false

    def datagram(self, now_ns: int, unix_ns: int, content: bytes, address: str) -> Congestion | Refusal | None:
        """A new report about a queue; a refusal, already counted; or None: accepted, but not new for the policy."""
        packet = self.gate.accept(unix_ns, content, address)
        if isinstance(packet, Refusal):
            return packet
        return self.table.add_packet(now_ns, unix_ns, packet)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """How often the agent reports. `key` signs the packets; `key_id` names it."""

    interval_ms: float = 1.0
    quiet_ms: float = 100.0
    repeat_ms: float = 1_000.0
    change_bytes: int = 1_500
    key_id: int | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if min(self.interval_ms, self.quiet_ms, self.repeat_ms) <= 0 or self.change_bytes < 0:
            raise ConfigError("the intervals of reports must be positive, and change_bytes not negative")
        if (self.key is None) != (self.key_id is None):
            raise ConfigError("reports are signed with a key and its id: set both or none")


@dataclass(slots=True)
class _SentReport:
    tx_bytes: int | None
    rx_bytes: int | None
    at_ns: int


class Reporter:
    """Makes the agent's reports. The sequence starts with the wall clock, so that it also grows over restarts.

    `sender` must be its own among all that sign with the same key (a random number): receivers have one replay window
    for each key and sender.
    """

    def __init__(self, unix_ns: int, sender: int, settings: ReportSettings | None = None) -> None:
        self._settings = settings or ReportSettings()
        self._sequence, self._sender = unix_ns, sender
        self._flows: dict[tuple[int, int], FlowAdded] = {}
        """The first one is repeated next, and moves to the end."""
        self._paths: dict[tuple[int, int], tuple[FlowPath, ...]] = {}
        self._queues_ns: dict[tuple[str, int], int] = {}
        """When the transmit queues of a NIC were reported last."""
        self._repeated_ns: int | None = None
        self._sent: dict[tuple[str, int], _SentReport] = {}

    def flow_added(self, unix_ns: int, flow: FlowAdded, paths: Iterable[FlowPath] = ()) -> list[bytes]:
        """The packets that report a new flow, and its paths."""
        self._flows[flow.slot, flow.generation] = flow
        self._paths[flow.slot, flow.generation] = tuple(paths)
        return self._flow_packets(unix_ns, flow)

    def _flow_packets(self, unix_ns: int, flow: FlowAdded) -> list[bytes]:
        bodies: list[Body] = [flow, *self._paths.get((flow.slot, flow.generation), ())]
        return [self._packet(unix_ns, body) for body in bodies]

    def flow_removed(self, unix_ns: int, flow: FlowAdded) -> list[bytes]:
        """The packets that report the end of a flow: two, because it is not repeated later."""
        self._flows.pop((flow.slot, flow.generation), None)
        self._paths.pop((flow.slot, flow.generation), None)
        gone = FlowRemoved(flow.source, flow.destination, flow.slot, flow.generation, flow.paths)
        return [self._packet(unix_ns, gone), self._packet(unix_ns, gone)]

    def step(self, now_ns: int, unix_ns: int, nics: Mapping[tuple[str, int], NicReading]) -> list[bytes]:
        """The packets that are due now: about NICs, by (name, address), and repeated flows."""
        for nic in self._sent.keys() - nics.keys():
            del self._sent[nic]
            self._queues_ns.pop(nic, None)
        found = [
            self._packet(unix_ns, NicQueues(*nic, reading.tx_bytes, reading.rx_bytes))
            for nic, reading in sorted(nics.items(), key=lambda each: each[0])
            if self._is_due(now_ns, nic, reading)
        ]
        found += [self._packet(unix_ns, queue) for queue in self._due_queues(now_ns, nics)]
        return found + [packet for flow in self._repeats(now_ns) for packet in self._flow_packets(unix_ns, flow)]

    def _due_queues(self, now_ns: int, nics: Mapping[tuple[str, int], NicReading]) -> list[TxQueue]:
        """The transmit queues to report now: those of each NIC that the kernel has figures of."""
        found: list[TxQueue] = []
        for nic, reading in sorted(nics.items(), key=lambda each: each[0]):
            counts, limits = reading.queue_counts or {}, reading.queue_limits or {}
            last_ns = self._queues_ns.get(nic)
            if not counts and not limits:
                continue
            if last_ns is not None and now_ns - last_ns < self._settings.repeat_ms * 1e6:
                continue
            self._queues_ns[nic] = now_ns
            for queue in sorted({*counts, *limits})[:MAX_REPORTED_QUEUES]:
                figures = (*counts.get(queue, (None, None)), *limits.get(queue, (None, None)))
                found.append(TxQueue(*nic, reading.interface_index or 0, queue, *figures))
        return found

    def _is_due(self, now_ns: int, nic: tuple[str, int], reading: NicReading) -> bool:
        if reading.tx_bytes is None and reading.rx_bytes is None:
            return False
        last, settings = self._sent.get(nic), self._settings
        is_quiet = not reading.tx_bytes and not reading.rx_bytes
        is_due = (
            last is None
            or _is_changed(last.tx_bytes, reading.tx_bytes, settings.change_bytes)
            or _is_changed(last.rx_bytes, reading.rx_bytes, settings.change_bytes)
            or now_ns - last.at_ns >= (settings.quiet_ms if is_quiet else settings.interval_ms) * 1e6
        )
        if is_due:
            self._sent[nic] = _SentReport(reading.tx_bytes, reading.rx_bytes, now_ns)
        return is_due

    def _repeats(self, now_ns: int) -> list[FlowAdded]:
        """The flows to repeat now, so that all are repeated within `repeat_ms`."""
        if self._repeated_ns is None or not self._flows:
            self._repeated_ns = now_ns
            return []
        elapsed_ms = (now_ns - self._repeated_ns) / 1e6
        count = min(len(self._flows), int(len(self._flows) * elapsed_ms / self._settings.repeat_ms))
        if count:
            self._repeated_ns = now_ns
        found = list(islice(self._flows.items(), count))
        for place, flow in found:
            del self._flows[place]
            self._flows[place] = flow
        return [flow for _, flow in found]

    def forwarded(self, measured_unix_ns: int, report: Congestion) -> bytes:
        """The packet that passes a switch's report on to the agent of another host."""
        return self._packet(measured_unix_ns, report)

    def _packet(self, unix_ns: int, body: Body) -> bytes:
        self._sequence += 1
        settings = self._settings
        return encode(Packet(body, self._sequence, unix_ns, self._sender, settings.key_id), settings.key)


def _is_changed(old: int | None, new: int | None, by: int) -> bool:
    if old is None or new is None:
        return old is not new
    # Becoming empty, or no longer empty, is a change of any size.
    return abs(new - old) > by or (old == 0) != (new == 0)
