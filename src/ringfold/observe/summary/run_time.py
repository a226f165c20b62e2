"""One time for the records of all hosts. Events have CLOCK_MONOTONIC of their hosts; samples of the clocks relate it to
the run's global clock, or to the host's wall clock.

The processes of a host share a CLOCK_MONOTONIC (`boot_id`), and so their samples. The global clock is used where any
process of the host had it, and the wall clock otherwise. In between samples the relation is a straight line; before the
first and after the last one the offset stays as it is.
"""

from bisect import bisect_right
from collections.abc import Iterable
from enum import IntEnum

from ringfold.observe.records import Record
from ringfold.wire.events import ClockSampled, Event, decode_event

MAX_SAMPLES = 4_000
"""Of one host; above, every second one is dropped. A host's clock drifts by some tens of microseconds a second."""


class TimeSource(IntEnum):
    """What a host's times were mapped by: the greatest there is."""

    NONE = 0
    FILE_HEADS = 1
    """The wall clock at the first line of each record."""
    WALL = 2
    GLOBAL = 3


class HostTime:
    """The relation of one CLOCK_MONOTONIC to Unix time."""

    def __init__(self) -> None:
        self.source = TimeSource.NONE
        self._samples: list[tuple[int, int]] = []
        """CLOCK_MONOTONIC, and Unix time minus it."""
        self._every = self._skipped = 0
        self._keys: list[int] = []

    def add(self, source: TimeSource, at: int, unix_ns: int) -> None:
        if source < self.source:
            return
        if source > self.source:
            self.source, self._samples, self._every = source, [], 1
        self._skipped += 1
        if self._skipped >= self._every:
            self._skipped = 0
            self._samples.append((at, unix_ns - at))
        if len(self._samples) > MAX_SAMPLES:
            self._samples.sort()
            del self._samples[1::2]
            self._every *= 2

    def freeze(self) -> None:
        """All samples are here."""
        self._samples.sort()
        self._keys = [at for at, _ in self._samples]

    def unix_ns(self, at: int) -> int:
        samples = self._samples
        place = bisect_right(self._keys, at)
        if place == 0:
            return at + samples[0][1]
        if place == len(samples):
            return at + samples[-1][1]
        (first, before), (last, after) = samples[place - 1], samples[place]
        return at + before + (after - before) * (at - first) // (last - first)


class RunTime:
    """Maps the times of a run's records; None for a host about which nothing is known."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Read the samples of all records. The other lines are not decoded."""
        self._hosts: dict[str, HostTime] = {}
        for record in records:
            host = self._hosts.setdefault(record.begun.boot_id, HostTime())
            for path in record.parts:
                with path.open("rb") as file:
                    for line in file:
                        if b'"clock_sampled"' in line or b'"record_begun"' in line:
                            self._take(host, decode_event(line))
        for host in self._hosts.values():
            host.freeze()

    def _take(self, host: HostTime, event: Event | None) -> None:
        if event is None:
            return
        if not isinstance(event.notice, ClockSampled):
            if event.stamp.wall:
                host.add(TimeSource.FILE_HEADS, event.stamp.at, event.stamp.wall)
        elif event.notice.global_ns is not None:
            host.add(TimeSource.GLOBAL, event.stamp.at, event.notice.global_ns)
        else:
            host.add(TimeSource.WALL, event.stamp.at, event.notice.wall_ns)

    def source(self, boot_id: str) -> TimeSource:
        return self._hosts[boot_id].source

    def host(self, boot_id: str) -> HostTime | None:
        """None if nothing is known of this host."""
        host = self._hosts[boot_id]
        return host if host.source is not TimeSource.NONE else None
