"""What switches said about queues: the newest of each, until it is too old to say anything. Pure.

Which flows a packet is about (the mapping rule):

- A packet names a source, a destination and a path number. It is about path p of a flow if p is that number, the flow's
  source lies in the packet's source prefix, and its destination in the destination prefix. An exact pair is the prefix
  of 128 bits; a port that many pairs go through is sent as `any -> host` or `host -> any`, or with a network.
- The flow's addresses are those of *this path* (local, remote). Flows whose paths have the same addresses (the classic
  SOUT and SUP between one pair) are told apart by the path number alone.
- Of one (source, destination, path) the newest packet counts: by time of measurement, then by arrival.
- If several fresh ones apply, a flow passes all of these queues, and the fullest one is what it feels: the highest
  congestion counts. A more exact one does not override a wider one.
- One that was not renewed for `stale_after_ms` since its arrival is unknown. Not clear: nobody says so.
"""

from collections import Counter
from dataclasses import dataclass

from ringfold.errors import ConfigError
from ringfold.wire.telemetry import EXACT, Congestion, Gate, Packet, Refusal, masked

_Bits = tuple[int, int]
_Key = tuple[int, int, int]

MOST_LENGTHS = 32
"""How many different pairs of prefix lengths are kept at a time."""
PLAUSIBLE_NS = 5_000_000_000
"""A sender's time counts as an age up to this; beyond it the clocks do not agree, and only the arrival counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """When silence becomes not knowing, and how many queues are kept."""

    stale_after_ms: int = 1_000
    most_entries: int = 65_536

    def __post_init__(self) -> None:
        if self.stale_after_ms < 1 or self.most_entries < 1:
            raise ConfigError("stale_after_ms and most_entries are 1 at least")


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known about a path of a flow: how congested, how deep the queue, and how old that is by now."""

    congestion: int
    depth_bytes: int
    age_ns: int


@dataclass(slots=True)
class _Entry:
    congestion: int
    depth_bytes: int
    measured_unix_ns: int
    arrived_ns: int
    late_ns: int
    """How old it was when it arrived, as far as the clocks tell."""


class Telemetry:
    """The newest of every queue. `arrived` takes packets, `reading` answers for a path of a flow."""

    def __init__(self, settings: TelemetrySettings | None = None) -> None:
        self._settings = settings or TelemetrySettings()
        self._stale_ns = self._settings.stale_after_ms * 1_000_000
        self._by_bits: dict[_Bits, dict[_Key, _Entry]] = {}
        self._count = 0
        self._forgot_ns: int | None = None
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    def arrived(self, now_ns: int, unix_ns: int, packet: Packet) -> Congestion | None:
        """Take an accepted packet; `now_ns` is the monotonic clock, `unix_ns` the wall clock.

        Returns what is new now, or None: a packet of another kind, or older than what is here.
        """
        body = packet.body
        if not isinstance(body, Congestion):
            self.counts["other"] += 1
            return None
        return body if self.observed(now_ns, unix_ns, body, packet.unix_ns) else None

    def observed(self, now_ns: int, unix_ns: int, body: Congestion, measured_unix_ns: int) -> bool:
        """The same for what came another way (`adapters.py`). Whether it is news."""
        bits = (body.source_bits, body.destination_bits)
        table = self._by_bits.get(bits, {})
        key = (body.source, body.destination, body.path)
        late_ns = unix_ns - measured_unix_ns
        late_ns = late_ns if 0 <= late_ns <= PLAUSIBLE_NS else 0
        measured_unix_ns = min(measured_unix_ns, unix_ns)  # nothing is newer than now
        entry = table.get(key)
        if entry is None:
            if self._is_full(bits):
                self._forget_stale(now_ns)
            if self._is_full(bits):
                self.counts["full"] += 1
                return False
            table = self._by_bits.setdefault(bits, {})
            table[key] = _Entry(body.congestion, body.depth_bytes, measured_unix_ns, now_ns, late_ns)
            self._count += 1
        elif measured_unix_ns < entry.measured_unix_ns and now_ns - entry.arrived_ns <= self._stale_ns:
            self.counts["older"] += 1
            return False
        else:
            entry.congestion, entry.depth_bytes = body.congestion, body.depth_bytes
            entry.measured_unix_ns, entry.arrived_ns, entry.late_ns = measured_unix_ns, now_ns, late_ns
        self.counts["congestion"] += 1
        return True

    def reading(self, now_ns: int, source: int, destination: int, path: int) -> Reading | None:
        """What is known of a path between two addresses (`wire.telemetry.address_number`); None: unknown."""
        best: _Entry | None = None
        for (source_bits, destination_bits), table in self._by_bits.items():
            entry = table.get(
                (
                    source if source_bits == EXACT else masked(source, source_bits),
                    destination if destination_bits == EXACT else masked(destination, destination_bits),
                    path,
                )
            )
            if entry is None or now_ns - entry.arrived_ns > self._stale_ns:
                continue
            if best is None or (entry.congestion, entry.arrived_ns) > (best.congestion, best.arrived_ns):
                best = entry
        if best is None:
            return None
        return Reading(best.congestion, best.depth_bytes, now_ns - best.arrived_ns + best.late_ns)

    def _is_full(self, bits: _Bits) -> bool:
        """Each pair of prefix lengths costs every reading a look, so there are few."""
        return self._count >= self._settings.most_entries or (
            bits not in self._by_bits and len(self._by_bits) >= MOST_LENGTHS
        )

    def _forget_stale(self, now_ns: int) -> None:
        """At most once in a while: it goes through all of them, and whoever fills the table may go on and on."""
        if self._forgot_ns is not None and now_ns - self._forgot_ns < self._stale_ns // 4:
            return
        self._forgot_ns = now_ns
        for bits, table in list(self._by_bits.items()):
            for key in [key for key, entry in table.items() if now_ns - entry.arrived_ns > self._stale_ns]:
                del table[key]
                self._count -= 1
            if not table:
                del self._by_bits[bits]


class TelemetryDesk:
    """Gate and table together: what a daemon does with a datagram, in one call."""

    def __init__(self, gate: Gate | None = None, table: Telemetry | None = None) -> None:
        self.gate, self.table = gate or Gate(), table or Telemetry()

    def datagram(self, now_ns: int, unix_ns: int, content: bytes, address: str) -> Congestion | Refusal | None:
        """News about a queue, a refusal (counted already), or None: accepted, and nothing new for the policy."""
        packet = self.gate.accept(unix_ns, content, address)
        if isinstance(packet, Refusal):
            return packet
        return self.table.arrived(now_ns, unix_ns, packet)
