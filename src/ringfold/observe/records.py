"""The files of a run directory: one record for each process that took part, as a sequence of parts.

A part is a file `ROLE-NAME-PID.NNNN.jsonl` that begins with a `RecordBegun`. A process that was killed leaves a cut
line at the end; it is skipped, and so are lines of a newer version. `Record.skipped` counts both.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ringfold.errors import UsageError
from ringfold.wire.events import RECORD_FORMAT, Event, RecordBegun, Stamp, decode_event

_PART = re.compile(r"(?P<record>.+)\.(?P<part>\d{4,})\.jsonl")


@dataclass(slots=True)
class Record:
    """The record of one process."""

    name: str
    """That of its files, without the number of the part."""
    begun: RecordBegun
    parts: list[Path]
    skipped: int = field(default=0)
    """Lines that are no events, of what was read so far."""
    began: Stamp = field(default=Stamp(0))
    """When the first part that is still there was begun."""

    def events(self) -> Iterator[Event]:
        """All events in the order in which they were recorded, without the first line of each part."""
        for path in self.parts:
            with path.open("rb") as file:
                for line in file:
                    event = decode_event(line)
                    if event is None:
                        self.skipped += 1
                    elif not isinstance(event.notice, RecordBegun):
                        yield event


def is_part(name: str) -> bool:
    """Whether a file of this name is a part of a record."""
    return _PART.fullmatch(name) is not None


def read_directory(directory: Path) -> list[Record]:
    """The records of a run directory, sorted by name. UsageError if there are none, or one is of a newer format."""
    parts: dict[str, list[tuple[int, Path]]] = {}
    if not directory.is_dir():
        raise UsageError(f"there is no run directory {directory}")
    for path in directory.iterdir():
        match = _PART.fullmatch(path.name)
        if match:
            parts.setdefault(match["record"], []).append((int(match["part"]), path))
    found = [_record(name, [path for _, path in sorted(numbered)]) for name, numbered in sorted(parts.items())]
    records = [record for record in found if record is not None]
    if not records and any(directory.glob("flight-*.jsonl")):
        raise UsageError(f"{directory} has flight records, one for each time: name the file")
    if not records:
        raise UsageError(
            f"{directory} has no records of events: set events_dir (RINGFOLD_EVENTS_DIR) at the master and at the peers"
        )
    return records


def _record(name: str, parts: list[Path]) -> Record | None:
    """None for a file that has no first line yet: its process has just begun it, or was killed before."""
    with parts[0].open("rb") as file:
        first = decode_event(file.readline())
    if first is None or not isinstance(first.notice, RecordBegun):
        return None
    if first.notice.format > RECORD_FORMAT:
        raise UsageError(
            f"{parts[0]} has format {first.notice.format}, and this version reads up to {RECORD_FORMAT}: "
            f"it was written by version {first.notice.version}"
        )
    return Record(name, first.notice, parts, began=first.stamp)
