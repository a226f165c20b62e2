"""Recording the events of this process: the last ones in memory, all of them in files on request.

`Recorder` keeps the last events as lines, for a flight record and for live views. With a directory it also writes them
to files, from a thread of its own, so that a slow disk delays nothing but the record. What does not fit into its queue
is dropped and counted. When a write fails, the record ends with one warning, and the process goes on without it.

A record is a sequence of parts, `ROLE-NAME-PID.NNNN.jsonl`; the oldest ones are deleted when all of them together would
exceed the capacity. Lines are written whole: a process that is killed leaves at most one incomplete line, at the end.
"""

import logging
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ringfold.errors import ConfigError
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.process import boot_id
from ringfold.wire.events import RECORD_FORMAT, FlightDumped, RecordBegun, Role, StacksDumped, Stamp, encode_event
from ringfold.wire.notices import Notice

CAPACITY_BYTES = 1 << 30
PARTS = 8
MAX_RECENT = 512
"""So many events are in memory."""
MAX_LIVE = 64
"""So many events wait to be taken for live views."""
MAX_QUEUED = 65_536
FLUSH_S = 0.25
MAX_FLIGHTS = 32
"""The newest flight records of a directory are kept."""
CLOSE_S = 2.0
_LIVE_LEVELS = frozenset({"info", "warning", "error"})

_log = logging.getLogger("ringfold.record")


def begun(role: Role, run: str, name: str, host: str, version: str) -> RecordBegun:
    """The first line of this process's record."""
    return RecordBegun(RECORD_FORMAT, role, run, name, host, boot_id(), os.getpid(), version)


def file_name(begun: RecordBegun) -> str:
    """The name of a record's files, without the number of the part: what is no letter, digit, dot or minus is `_`."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", f"{begun.role}-{begun.name}-{begun.pid}")


class RecordFile:
    """The files of one record. ConfigError if the first cannot be made."""

    def __init__(self, directory: Path, begun: RecordBegun, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._directory, self._part_bytes = directory, max(4_096, capacity_bytes // PARTS)
        self._begun = msgspec.structs.replace(begun, capacity_bytes=capacity_bytes)
        self._name, self._parts, self._bytes = file_name(begun), deque[Path](), 0
        self._fd = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # A process that joins again continues its record.
            self._parts.extend(sorted(directory.glob(f"{self._name}.*.jsonl")))
            self._next = int(self._parts[-1].name.split(".")[-2]) + 1 if self._parts else 0
            self._begin_part()
        except OSError as error:
            raise ConfigError(f"events_dir: no record can be written in {directory}: {error.strerror}") from None

    @property
    def path(self) -> Path:
        """The present part."""
        return self._parts[-1]

    def _begin_part(self) -> None:
        path = self._directory / f"{self._name}.{self._next:04}.jsonl"
        line = encode_event(Stamp(monotonic_ns(), unix_ns()), msgspec.structs.replace(self._begun, part=self._next))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.close()
        self._fd, self._bytes = fd, 0
        self._parts.append(path)
        self._next += 1
        self._write(line + b"\n")
        while len(self._parts) > PARTS:
            self._parts.popleft().unlink(missing_ok=True)

    def write(self, lines: Sequence[bytes]) -> None:
        """Append the lines. OSError if the disk does not take them."""
        if not lines:
            return
        if self._bytes >= self._part_bytes:
            self._begin_part()
        self._write(b"\n".join(lines) + b"\n")

    def _write(self, body: bytes) -> None:
        self._bytes += len(body)
        while body:
            body = body[os.write(self._fd, body) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Recorder:
    """The events of one process. `emit` is cheap and never blocks; safe from any thread."""

    def __init__(
        self,
        begun: RecordBegun,
        directory: Path | None = None,
        *,
        collect: Callable[[], Iterable[bytes]] = tuple,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        """With a directory it writes a record there; then `collect` is called again and again, by the thread that
        writes, for more lines. ConfigError if the record cannot be begun."""
        self.begun, self.peer = begun, 0
        self.dropped = 0
        """Events that are in no file, because too many came at once or the disk failed."""
        self._collect = collect
        self._recent: deque[bytes] = deque(maxlen=MAX_RECENT)
        self._live: deque[bytes] = deque(maxlen=MAX_LIVE)
        self._emitted = self._live_count = 0
        self._queue: deque[bytes] = deque()
        self._wanted = threads.Event()
        self._is_closing = False
        self._file = None if directory is None else RecordFile(directory, begun, capacity_bytes)
        self._thread = None if self._file is None else threads.start("ringfold-record", self._write)

    @property
    def is_recording(self) -> bool:
        """Whether there is a record in files."""
        return self._file is not None and not self._is_closing

    @property
    def is_closed(self) -> bool:
        return self._is_closing

    @property
    def path(self) -> Path | None:
        """The file that is written now."""
        return None if self._file is None else self._file.path

    def emit(self, notice: Notice, at_ns: int | None = None, *, is_stamped: bool = True) -> bytes:
        """Record an event of now, or of `at_ns`, and return its line. Unless it `is_stamped`, wall time is left out."""
        wall_ns = unix_ns() if is_stamped else 0
        line = encode_event(Stamp(monotonic_ns() if at_ns is None else at_ns, wall_ns, self.peer), notice)
        self._recent.append(line)
        self._emitted += 1
        if notice.level in _LIVE_LEVELS:
            self._live.append(line)
            self._live_count += 1
        if self.is_recording:
            self._enqueue(line)
        return line

    def _enqueue(self, line: bytes) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self.dropped += 1
            return
        self._queue.append(line)

    def add_line(self, line: bytes) -> None:
        """Record the line of another process's event."""
        if self.is_recording:
            self._enqueue(line)

    def recent(self) -> list[bytes]:
        """The last events, oldest first."""
        return list(self._recent)

    def live(self) -> tuple[int, list[bytes]]:
        """The last events that a live view shows, and the number of the first of them."""
        lines = list(self._live)
        return self._live_count - len(lines), lines

    @property
    def live_count(self) -> int:
        return self._live_count

    def dump(self, directory: Path, reason: str, more: Sequence[bytes] = (), *, stacks: bool = False) -> Path | None:
        """Write a flight record: the last events, `more` lines, and the stacks of all threads. None if it cannot be
        written, which is logged."""
        now = Stamp(monotonic_ns(), unix_ns(), self.peer)
        lines = [encode_event(now, self.begun), *self.recent(), *more]
        if stacks:
            lines.append(encode_event(now, StacksDumped(_stacks())))
        lost = max(0, self._emitted - MAX_RECENT)
        lines.append(encode_event(now, FlightDumped(reason, lost)))
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = f"flight-{file_name(self.begun)}"
            number = sum(1 for _ in directory.glob(f"{name}-*.jsonl"))
            path = directory / f"{name}-{number}.jsonl"
            path.write_bytes(b"\n".join(lines) + b"\n")
            _keep_newest(directory)
        except OSError as error:
            _log.warning("no flight record can be written in %s: %s", directory, error.strerror)
            return None
        _log.info("flight record (%s): %s", reason, path)
        return path

    def close(self) -> None:
        """Write what is queued and end the thread. Safe to call twice."""
        self._is_closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def forked(self) -> None:
        """In a forked child: the thread is not there, and the files belong to the parent."""
        self._file, self._thread = None, None

    def _write(self) -> None:
        file = self._file
        assert file is not None
        try:
            while not self._is_closing:
                self._wanted.wait(FLUSH_S)
                self._flush(file)
            self._flush(file)
        except OSError as error:
            _log.warning("the record %s ends here: %s", file.path, error.strerror)
            self._is_closing = True
        except Exception:
            _log.exception("the record %s ends here", file.path)
            self._is_closing = True
        finally:
            with suppress(OSError):
                file.close()

    def _flush(self, file: RecordFile) -> None:
        lines = [self._queue.popleft() for _ in range(len(self._queue))]
        file.write([*lines, *self._collect()])


def _keep_newest(directory: Path) -> None:
    flights = sorted(directory.glob("flight-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    for path in flights[:-MAX_FLIGHTS]:
        path.unlink(missing_ok=True)


def _stacks() -> dict[str, str]:
    """What each thread of this process is doing, by its name."""
    names, found = threads.names(), {}
    frames = sys._current_frames()
    while frames:  # this function's own frame is in it: what is left would keep all that the frames refer to
        ident, frame = frames.popitem()
        found[names.get(ident, str(ident))] = "".join(traceback.format_stack(frame))
        del frame
    return found
