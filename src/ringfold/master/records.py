"""The events of all runs of a master: the last ones in memory, for live views, and all of them in files on request.

Each run has a log of its own. It has the master's notices and the events that peers report in their heartbeats, as
lines of `wire/events.py`, numbered in the order in which they arrived here. What a peer sends is checked: a line that
is no event is dropped, and one that says another peer's number gets the right one.

With `events_dir` the master also samples the status of its runs. Files are written by a thread (`runtime/recorder.py`),
and so are flight records: nothing here waits for a disk.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from itertools import islice
from pathlib import Path

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.master.effects import RecordEvents
from ringfold.runtime import network, recorder, threads
from ringfold.runtime.clock import monotonic_ns, raw_ns, unix_ns
from ringfold.runtime.recorder import Recorder
from ringfold.units import S
from ringfold.wire.events import ClockSampled, Stamp, StatusSampled, decode_event, encode_event
from ringfold.wire.notices import Notice, PeerGone
from ringfold.wire.status import Events, Status

MAX_EVENTS = 4_096
"""So many events of a run are in memory."""
SAMPLE_EVERY_NS = 1 * S
LINKS_EVERY_NS = 15 * S


class EventLog:
    """The last events of a run, numbered from 0 on."""

    def __init__(self, capacity: int = MAX_EVENTS) -> None:
        self._lines: deque[bytes] = deque(maxlen=capacity)
        self._next = 0

    def add(self, line: bytes) -> None:
        self._lines.append(line)
        self._next += 1

    def since(self, after: int, fence: int = 0) -> Events:
        """Those from number `after` on. A number that was never reached is one of another master: then all of them."""
        first = self._next - len(self._lines)
        begin = first if after > self._next else max(first, after)
        return Events(fence, begin, self._next, list(islice(self._lines, begin - first, None)))

    def last(self, count: int) -> list[bytes]:
        return list(islice(self._lines, max(0, len(self._lines) - count), None))


@dataclass(slots=True)
class _RunRecord:
    recorder: Recorder
    log: EventLog = field(default_factory=EventLog)
    links_ns: int = 0
    clock_ns: int = 0


class MasterRecords:
    """The records of all runs. `directory` is `events_dir`, `flights` that of flight records; None: there are none."""

    def __init__(self, directory: Path | None, flights: Path | None, capacity_bytes: int) -> None:
        self._directory, self._flights, self._capacity_bytes = directory, flights, capacity_bytes
        self._name = ""
        self._runs: dict[str, _RunRecord] = {}
        self._sampled_ns = 0

    def begin(self, name: str) -> None:
        """The master has its addresses: `name` is its name. ConfigError if no record can be written."""
        self._name = name
        self._of(DEFAULT_RUN)

    def _of(self, run: str) -> _RunRecord:
        """What belongs to no run is in the record of the default one."""
        run = run or DEFAULT_RUN
        if run not in self._runs:
            about = recorder.begun("master", run, self._name, network.host_name(), metadata.version("ringfold"))
            where = self._directory if self._directory is None or run == DEFAULT_RUN else self._directory / run
            self._runs[run] = _RunRecord(Recorder(about, where, capacity_bytes=self._capacity_bytes))
        return self._runs[run]

    def notice(self, run: str, notice: Notice) -> None:
        """Record a notice of the master."""
        record = self._of(run)
        line = record.recorder.emit(notice)
        if notice.level != "debug":
            record.log.add(line)
        if isinstance(notice, PeerGone) and notice.how != "left" and self._flights is not None:
            reason = f"peer {notice.peer} ({notice.name}) {notice.how}: {notice.reason}"
            self._dump(record, self._flights, reason)

    def _dump(self, record: _RunRecord, flights: Path, reason: str) -> None:
        lines = record.log.last(recorder.MAX_RECENT)

        def write() -> None:
            record.recorder.dump(flights, reason, lines)

        threads.start("ringfold-flight", write)

    def from_peer(self, run: str, events: RecordEvents) -> None:
        """Record what a peer reports."""
        record = self._of(run)
        for line in events.lines:
            event = decode_event(line)
            if event is None:
                continue
            checked = encode_event(structs.replace(event.stamp, peer=events.peer), event.notice)
            record.log.add(checked)

    def events(self, run: str, after: int, fence: int) -> Events:
        return self._of(run).log.since(after, fence)

    def is_due(self, now_ns: int) -> bool:
        """Whether the status of the runs is to be sampled now."""
        return self._directory is not None and now_ns - self._sampled_ns >= SAMPLE_EVERY_NS

    def sample(self, now_ns: int, statuses: Iterable[tuple[str, Status]]) -> None:
        """Record the status of the runs, from time to time with links, and the clocks."""
        self._sampled_ns = now_ns
        for run, status in statuses:
            record = self._of(run)
            has_links = now_ns - record.links_ns >= LINKS_EVERY_NS
            if has_links:
                record.links_ns = now_ns
                before_ns, raw, wall = monotonic_ns(), raw_ns(), unix_ns()
                clocks = encode_event(Stamp((before_ns + monotonic_ns()) // 2, wall), ClockSampled(raw, wall))
                record.recorder.add_line(clocks)
            shown = status if has_links else structs.replace(status, links=[])
            record.recorder.add_line(encode_event(Stamp(now_ns, unix_ns()), StatusSampled(shown)))

    def close(self) -> None:
        for record in self._runs.values():
            record.recorder.close()
        self._runs.clear()
