"""The events of a run in the order of time: of all files of a run directory, or of a master while it goes on.

Times are those of the hosts' wall clocks, good enough to read a story; `trace` aligns them. Events without wall time
(ops and steps) get it from the last event of their record that has one.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ringfold.errors import ConfigError, UsageError
from ringfold.observe.records import Record, is_part, read_directory
from ringfold.runtime import threads
from ringfold.units import S
from ringfold.wire.events import Event, EventKind, RecordBegun, Role, Stamp, decode_event, kind_of
from ringfold.wire.messages import PeerId
from ringfold.wire.notices import Level

DISORDER_NS = 2 * S
"""Ops are recorded in batches: a line may be so much older than the one before it."""
POLL_S = 0.25
_LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Seen:
    """One event, where and when."""

    wall_ns: int
    role: Role
    source: str
    """The name of the process that recorded it."""
    event: Event

    @property
    def peer(self) -> PeerId:
        """0: a process that is no peer, or that has not joined yet."""
        return self.event.stamp.peer

    @property
    def notice(self) -> EventKind:
        return self.event.notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which events are of interest; what is empty or None does not restrict them."""

    sources: Collection[str] = ()
    """Numbers or names of peers, or `master`: what they recorded, and what others recorded about them."""
    kinds: Collection[str] = ()
    level: Level = "info"
    """The lowest level; with `kinds` those of any level are shown."""
    since_ns: int | None = None
    until_ns: int | None = None

    def keeps(self, seen: Seen) -> bool:
        if self.kinds:
            if kind_of(seen.notice) not in self.kinds:
                return False
        elif _LEVELS.index(seen.notice.level) < _LEVELS.index(self.level):
            return False
        if self.sources and not (_recorder(seen) | _subjects(seen.notice)) & set(self.sources):
            return False
        after = self.since_ns is None or seen.wall_ns >= self.since_ns
        return after and (self.until_ns is None or seen.wall_ns <= self.until_ns)


def _recorder(seen: Seen) -> set[str]:
    return {seen.source, str(seen.peer) if seen.peer else seen.role}


def _subjects(notice: EventKind) -> set[str]:
    """Numbers and names of the peers that a notice is about."""
    peers = [getattr(notice, "peer", None), *getattr(notice, "peers", ())]
    return {str(peer) for peer in peers if peer} | {getattr(notice, "name", ""), *getattr(notice, "names", ())} - {""}


def check_kinds(kinds: Iterable[str], known: Collection[str]) -> None:
    """ConfigError for a kind of event that does not exist."""
    for kind in kinds:
        if kind not in known:
            raise ConfigError(f"there is no kind of event {kind!r}; there are: {', '.join(sorted(known))}")


def instant(text: str, now_ns: int) -> int:
    """Unix time in nanoseconds of `10m` (that long ago), `90s`, `2h`, `1d`, or a date and time as in ISO 8601."""
    from datetime import datetime

    number, unit = text[:-1], text[-1:]
    try:
        if unit in _UNITS and number.isascii() and number.replace(".", "", 1).isdigit():
            return now_ns - int(float(number) * _UNITS[unit] * S)
        return int(datetime.fromisoformat(text).timestamp() * S)
    except (ValueError, OverflowError):
        raise ConfigError(f"{text!r} is no time: write 90s, 10m, 2h, 1d, or 2026-11-18T14:02:11") from None


def of_file(path: Path) -> Iterator[Seen]:
    """The events of one file: a part of a record, or a flight record."""
    with path.open("rb") as file:
        first = decode_event(file.readline())
    if first is None or not isinstance(first.notice, RecordBegun):
        raise UsageError(f"{path} is no record of events, and no flight record")
    yield from _of_record(Record(path.stem, first.notice, [path]))


def merged(directory: Path) -> Iterator[Seen]:
    """All events of a run directory, in the order of time."""
    return heapq.merge(*(_in_order(_of_record(record)) for record in read_directory(directory)), key=_when)


def _when(seen: Seen) -> int:
    return seen.wall_ns


def _of_record(record: Record) -> Iterator[Seen]:
    clock = _WallClock(record.began)
    for event in record.events():
        yield Seen(clock.of(event), record.begun.role, record.begun.name, event)


def _in_order(events: Iterator[Seen]) -> Iterator[Seen]:
    """The same, with lines that are late by less than `DISORDER_NS` in their places."""
    waiting: list[tuple[int, int, Seen]] = []
    newest = 0
    for number, seen in enumerate(events):
        heapq.heappush(waiting, (seen.wall_ns, number, seen))
        newest = max(newest, seen.wall_ns)
        while waiting[0][0] < newest - DISORDER_NS:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


class _WallClock:
    """Wall times of one record's events."""

    def __init__(self, began: Stamp) -> None:
        self._offset_ns = began.wall - began.at if began.wall else 0

    def of(self, event: Event) -> int:
        stamp = event.stamp
        if stamp.wall:
            self._offset_ns = stamp.wall - stamp.at
        return stamp.at + self._offset_ns


def follow_directory(directory: Path, every_s: float = POLL_S) -> Iterator[Seen]:
    """What is in the files of a run directory already, in the order of time, then what is appended to them, until the
    caller stops."""
    if not directory.is_dir():
        raise UsageError(f"there is no run directory {directory}")
    tails: dict[str, _Tail] = {}
    _look_for_files(directory, tails)
    # Each file is read to its end of then, and on from there: nothing is missed in between.
    yield from heapq.merge(*(_in_order(tail.read()) for tail in tails.values()), key=_when)
    while True:
        threads.pause(every_s)
        _look_for_files(directory, tails)
        yield from sorted((seen for tail in tails.values() for seen in tail.read()), key=_when)


def _look_for_files(directory: Path, tails: "dict[str, _Tail]") -> None:
    """Follow new files, and forget those that were deleted."""
    names = {path.name for path in directory.iterdir() if is_part(path.name)}
    for name in tails.keys() - names:
        del tails[name]
    for name in sorted(names - tails.keys()):
        tails[name] = _Tail(directory / name)


class _Tail:
    """A file that is appended to."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._clock = path, 0, _WallClock(Stamp(0))
        self._role: Role = "peer"
        self._source = path.name.split("-", 1)[-1].rsplit("-", 1)[0]

    def read(self) -> Iterator[Seen]:
        """The events of the lines that are whole by now, and were not read before."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return  # its part of the record was deleted
        with file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                event = decode_event(line)
                if event is None:
                    continue
                wall_ns = self._clock.of(event)
                if isinstance(event.notice, RecordBegun):
                    self._role, self._source = event.notice.role, event.notice.name
                else:
                    yield Seen(wall_ns, self._role, self._source, event)
