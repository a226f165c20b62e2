"""The events of all runs of a master: the last ones in memory, for live views, and all of them in files on request.

Each run has a log of its own. It has the master's notices and the events that peers report in their heartbeats, as
lines of `wire/events.py`, numbered in the order in which they arrived here. What a peer sends is checked: a line that
is no event is dropped, and one that says another peer's number gets the right one.

With `events_dir` the master also samples the status of its runs. Files are written by a thread (`runtime/recorder.py`),
and so are flight records: nothing here waits for a disk.
"""

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.master.effects import RecordEvents
from ringfold.runtime import network, recorder, threads
from ringfold.runtime.clock import monotonic_ns, raw_ns, unix_ns
from ringfold.runtime.recorder import LastLines, Recorder
from ringfold.units import S
from ringfold.wire.decoding import checked
from ringfold.wire.events import ClockSampled, Stamp, StatusSampled, decode_event, encode_event
from ringfold.wire.messages import PeerId
from ringfold.wire.notices import Notice, PeerGone, RunForgotten
from ringfold.wire.status import Events, Status

MAX_EVENTS = 4_096
MAX_EVENT_BYTES = 8 << 20
"""So many events of a run are in memory."""
FLIGHT_EVERY_NS = 1 * S
"""A flight record of a run at most so often: many peers may be lost at once."""
SAMPLE_EVERY_NS = 1 * S
LINKS_EVERY_NS = 15 * S

_log = logging.getLogger("ringfold.record")


class EventLog:
    """The last events of a run, numbered from 0 on."""

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._lines = LastLines(max_events, max_bytes)

    def add(self, line: bytes) -> None:
        self._lines.add(line)

    def since(self, after: int, fence: int = 0) -> Events:
        """Those from number `after` on. A number that was never reached is one of another master: then all of them."""
        first, following = self._lines.first, self._lines.count
        begin = first if after > following else max(first, after)
        return Events(fence, begin, following, self._lines.since(begin))

    def last(self, count: int) -> list[bytes]:
        return self._lines.since(self._lines.count - count)


@dataclass(slots=True)
class _RunRecord:
    recorder: Recorder
    log: EventLog = field(default_factory=EventLog)
    links_ns: int = 0
    flight_ns: int | None = None


class MasterRecords:
    """The records of all runs. `directory` is `events_dir`, `flights` that of flight records; None: there are none."""

    def __init__(self, directory: Path | None, flights: Path | None, capacity_bytes: int) -> None:
        self._directory, self._flights, self._capacity_bytes = directory, flights, capacity_bytes
        self._name = ""
        self._runs: dict[str, _RunRecord] = {}
        self._sampled_ns = 0
        self._is_closed = False

    def begin(self, name: str) -> None:
        """The master has its addresses: `name` is its name. ConfigError if no record can be written."""
        self._name = name
        self._of(DEFAULT_RUN)

    def _of(self, run: str) -> _RunRecord:
        """What belongs to no run is in the record of the default one."""
        run = run or DEFAULT_RUN
        if run not in self._runs:
            self._runs[run] = _RunRecord(self._new_recorder(run))
        return self._runs[run]

    def _new_recorder(self, run: str) -> Recorder:
        """Without a directory of its own, a run that begins later is in memory only: the others go on."""
        about = recorder.begun("master", run, self._name, network.host_name(), metadata.version("ringfold"))
        if self._directory is None or self._is_closed:
            return Recorder(about)
        if run == DEFAULT_RUN:
            return Recorder(about, self._directory, capacity_bytes=self._capacity_bytes)
        try:
            return Recorder(about, self._directory / run, capacity_bytes=self._capacity_bytes)
        except ConfigError as error:
            _log.warning("%s", error)
            return Recorder(about)

    def notice(self, run: str, notice: Notice) -> None:
        """Record a notice of the master."""
        record = self._of(run)
        line = record.recorder.emit(notice)
        if notice.level != "debug":
            record.log.add(line)
        if isinstance(notice, PeerGone) and notice.how != "left" and self._flights is not None:
            self._dump(record, self._flights, f"peer {notice.peer} ({notice.name}) {notice.how}: {notice.reason}")
        if isinstance(notice, RunForgotten):
            self._forget(run)

    def _forget(self, run: str) -> None:
        if run in self._runs and run != DEFAULT_RUN:
            self._runs.pop(run).recorder.close(wait_s=0.0)

    def _dump(self, record: _RunRecord, flights: Path, reason: str) -> None:
        now_ns = monotonic_ns()
        if record.flight_ns is not None and now_ns - record.flight_ns < FLIGHT_EVERY_NS:
            return
        record.flight_ns = now_ns
        own, lines = set(record.recorder.recent()), record.log.last(recorder.MAX_RECENT)
        of_peers = [line for line in lines if line not in own]

        def write() -> None:
            record.recorder.dump(flights, reason, of_peers)

        threads.start("ringfold-flight", write)

    def from_peer(self, run: str, events: RecordEvents) -> None:
        """Record what a peer reports. A lying peer gets nothing in but events, and only of itself."""
        record = self._of(run)
        for line in events.lines:
            with suppress(RemoteProtocolError):
                record.log.add(checked(_line_of, events.peer, line))

    def events(self, run: str, after: int, fence: int) -> Events:
        return self._of(run).log.since(after, fence)

    def is_due(self, now_ns: int) -> bool:
        """Whether the status of the runs is to be sampled now."""
        return self._directory is not None and now_ns - self._sampled_ns >= SAMPLE_EVERY_NS

    def sample(self, now_ns: int, statuses: Iterable[tuple[str, Status]]) -> None:
        """Record the status of the runs, from time to time with links, and the clocks."""
        self._sampled_ns = now_ns
        statuses = list(statuses)
        for ended in self._runs.keys() - {run for run, _ in statuses}:
            self._forget(ended)
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
        self._is_closed = True
        for record in self._runs.values():
            record.recorder.close()
        self._runs.clear()


def _line_of(peer: PeerId, line: bytes) -> bytes:
    """The line of a peer's event; RemoteProtocolError if a live view may not show it."""
    event = decode_event(line)
    if event is None or event.notice.level == "debug" or not str(event.notice):
        raise RemoteProtocolError("no event for a live view")
    return encode_event(structs.replace(event.stamp, peer=peer), event.notice)
