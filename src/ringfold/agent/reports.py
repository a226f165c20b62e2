"""What the agent tells the switches: flows that came and went, and how full the host's NICs are. Pure.

`Reporter` makes datagrams (`wire/telemetry.py`); the daemon sends each of them to every collector. UDP loses some, so:

- A NIC's queue is reported when it changed by more than `change_bytes`, and on a timer besides: every `interval_ms`
  while something waits in it, every `quiet_ms` while nothing does.
- A flow is reported when it comes and when it goes. All flows are repeated within `repeat_ms`, a few at a time; a
  collector that has not heard of a flow for several times that long may forget it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from ringfold.agent.monitors import NicReading
from ringfold.errors import ConfigError
from ringfold.wire.telemetry import Body, FlowAdded, FlowRemoved, NicQueues, Packet, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """How often the agent reports. `key` signs the packets, under `key_id`."""

    interval_ms: float = 1.0
    quiet_ms: float = 100.0
    repeat_ms: float = 1_000.0
    change_bytes: int = 1_500
    sender: int = 0
    key_id: int | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if min(self.interval_ms, self.quiet_ms, self.repeat_ms) <= 0 or self.change_bytes < 0:
            raise ConfigError("the intervals of reports are positive, and change_bytes is not negative")
        if (self.key is None) != (self.key_id is None):
            raise ConfigError("reports are signed with a key and its id: give both or none")


@dataclass(slots=True)
class _Sent:
    tx_bytes: int | None
    rx_bytes: int | None
    at_ns: int


class Reporter:
    """Makes the agent's reports. `unix_ns` is the wall clock: the sequence begins with it, so it also grows over
    restarts of the agent."""

    def __init__(self, unix_ns: int, settings: ReportSettings | None = None) -> None:
        self._settings = settings or ReportSettings()
        self._sequence = unix_ns
        self._flows: dict[tuple[int, int], FlowAdded] = {}
        """The first one has its turn next, and goes to the end then."""
        self._repeated_ns: int | None = None
        self._sent: dict[tuple[str, int], _Sent] = {}

    def flow_added(self, unix_ns: int, flow: FlowAdded) -> list[bytes]:
        """There is a new flow."""
        self._flows[flow.slot, flow.generation] = flow
        return [self._packet(unix_ns, flow)]

    def flow_removed(self, unix_ns: int, flow: FlowAdded) -> list[bytes]:
        """That flow has ended. It is said twice: nothing repeats it later."""
        self._flows.pop((flow.slot, flow.generation), None)
        gone = FlowRemoved(flow.source, flow.destination, flow.slot, flow.generation, flow.paths)
        return [self._packet(unix_ns, gone), self._packet(unix_ns, gone)]

    def step(self, now_ns: int, unix_ns: int, nics: Mapping[tuple[str, int], NicReading]) -> list[bytes]:
        """What has to be said now about the NICs, by (name, address), and the flows whose turn it is again."""
        for nic in self._sent.keys() - nics.keys():
            del self._sent[nic]
        found = [
            self._packet(unix_ns, NicQueues(*nic, reading.tx_bytes, reading.rx_bytes))
            for nic, reading in sorted(nics.items(), key=lambda each: each[0])
            if self._is_due(now_ns, nic, reading)
        ]
        return found + [self._packet(unix_ns, flow) for flow in self._repeats(now_ns)]

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
            self._sent[nic] = _Sent(reading.tx_bytes, reading.rx_bytes, now_ns)
        return is_due

    def _repeats(self, now_ns: int) -> list[FlowAdded]:
        """As many flows as keep the round within `repeat_ms`."""
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

    def _packet(self, unix_ns: int, body: Body) -> bytes:
        self._sequence += 1
        settings = self._settings
        return encode(Packet(body, self._sequence, unix_ns, settings.sender, settings.key_id), settings.key)


def _is_changed(old: int | None, new: int | None, by: int) -> bool:
    if old is None or new is None:
        return old is not new
    # Empty or not is a change whatever the amount.
    return abs(new - old) > by or (old == 0) != (new == 0)
