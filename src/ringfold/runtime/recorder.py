"""Recording the events of this process: the last ones in memory, all of them in files on request.

`Recorder` keeps the last events as lines, for a flight record and for live views. With a directory it also writes them
to files, from a thread of its own, so that a slow disk delays nothing but the record. What does not fit into its queue
is dropped and counted. When a write fails, the record ends with one warning, and the process goes on without it.

A record of events is a sequence of parts, `ROLE-NAME-PID.NNNN.jsonl`; the oldest ones are deleted when all of them
together would exceed the capacity. Lines are written whole: a process that is killed leaves at most one incomplete
line, at the end.
"""

import logging
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
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
MAX_RECENT, MAX_RECENT_BYTES = 512, 2 << 20
"""So many events are in memory."""
MAX_LIVE, MAX_LIVE_BYTES = 64, 64 << 10
"""So many events are there for live views."""
MAX_QUEUED, MAX_QUEUED_BYTES = 65_536, 64 << 20
"""So many events wait to be written."""
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


class LastLines:
    """The last lines: so many, and about so many bytes of them, at most. They are numbered from 0 on."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines, self._max_bytes, self._bytes = max_lines, max_bytes, 0
        self._lines: deque[bytes] = deque()
        self.count = 0
        """How many were added so far: the number of the next one."""

    @property
    def first(self) -> int:
        """The number of the oldest line that is still here."""
        return self.count - len(self._lines)

    def add(self, line: bytes) -> None:
        lines = self._lines
        lines.append(line)
        self.count += 1
        self._bytes += len(line)
        while len(lines) > self._max_lines or (self._bytes > self._max_bytes and len(lines) > 1):
            self._bytes -= len(lines.popleft())

    def since(self, number: int) -> list[bytes]:
        """Those from this number on."""
        return list(islice(self._lines, max(0, number - self.first), None))


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
            numbered = sorted(_numbered(directory, f"{self._name}.", digits=4))
            self._parts.extend(path for _, path in numbered)
            self._next = numbered[-1][0] + 1 if numbered else 0
            self._begin_part()
        except OSError as error:
            self.close()
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


def _numbered(directory: Path, head: str, *, digits: int = 1) -> Iterator[tuple[int, Path]]:
    """The files whose names are this head and a number, with their numbers."""
    pattern = re.compile(rf"{re.escape(head)}(\d{{{digits},}})\.jsonl")
    for path in directory.iterdir():
        if match := pattern.fullmatch(path.name):
            yield int(match[1]), path


class Recorder:
    """The events of one process. `emit` is cheap and never waits for a disk; safe from any thread."""

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
        self._lock = threads.Lock()
        """Around what follows."""
        self._recent = LastLines(MAX_RECENT, MAX_RECENT_BYTES)
        self._live = LastLines(MAX_LIVE, MAX_LIVE_BYTES)
        self._live_times: deque[int] = deque(maxlen=MAX_LIVE)
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._wanted = threads.Event()
        self._is_closing = self._has_failed = False
        self._file = None if directory is None else RecordFile(directory, begun, capacity_bytes)
        self._thread = None if self._file is None else threads.start("ringfold-record", self._write)

    @property
    def is_recording(self) -> bool:
        """Whether there is a record in files."""
        return self._file is not None and not self._is_closing and not self._has_failed

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called. A record that the disk has ended is not closed."""
        return self._is_closing

    @property
    def path(self) -> Path | None:
        """The file that is written now."""
        return None if self._file is None else self._file.path

    def emit(self, notice: Notice, at_ns: int | None = None, *, is_stamped: bool = True) -> bytes:
        """Record an event of now, or of `at_ns`, and return its line. Unless it `is_stamped`, wall time is left out."""
        wall_ns = unix_ns() if is_stamped else 0
        now_ns = monotonic_ns()
        line = encode_event(Stamp(now_ns if at_ns is None else at_ns, wall_ns, self.peer), notice)
        with self._lock:
            self._recent.add(line)
            if notice.level in _LIVE_LEVELS:
                self._live.add(line)
                self._live_times.append(now_ns)
            self._enqueue(line)
        return line

    def _enqueue(self, line: bytes) -> None:
        if self._file is None or self._is_closing:
            return
        is_full = len(self._queue) >= MAX_QUEUED or self._queued_bytes + len(line) > MAX_QUEUED_BYTES
        if self._has_failed or is_full:
            self.dropped += 1
            return
        self._queue.append(line)
        self._queued_bytes += len(line)

    def add_line(self, line: bytes) -> None:
        """Write a line to the record, and keep it nowhere else."""
        with self._lock:
            self._enqueue(line)

    def recent(self) -> list[bytes]:
        """The last events, oldest first."""
        with self._lock:
            return self._recent.since(0)

    def live(self, number: int = 0, since_ns: int = 0) -> tuple[int, list[bytes]]:
        """The last events that a live view shows: those from this number and this time on, and the number of the first
        of them."""
        with self._lock:
            lines = self._live.since(number)
            times = list(self._live_times)[-len(lines) :] if lines else []
            count = self._live.count
        while times and times[0] < since_ns:
            del times[0], lines[0]
        return count - len(lines), lines

    @property
    def live_count(self) -> int:
        """How many events a live view shows: the number of the next one."""
        return self._live.count

    def dump(self, directory: Path, reason: str, more: Sequence[bytes] = (), *, stacks: bool = False) -> Path | None:
        """Write a flight record: the last events, `more` lines, and the stacks of all threads. None if it cannot be
        written, which is logged."""
        now = Stamp(monotonic_ns(), unix_ns(), self.peer)
        lines = [encode_event(now, self.begun), *self.recent(), *more]
        if stacks:
            lines.append(encode_event(now, StacksDumped(_stacks())))
        lines.append(encode_event(now, FlightDumped(reason, self._recent.first)))
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = _write_new(directory, f"flight-{file_name(self.begun)}-", b"\n".join(lines) + b"\n")
            _keep_newest(directory)
        except OSError as error:
            _log.warning("no flight record can be written in %s: %s", directory, error.strerror)
            return None
        _log.info("flight record (%s): %s", reason, path)
        return path

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Write what is queued and end the thread. Safe to call twice."""
        self._is_closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(wait_s)

    def forked(self) -> None:
        """In a forked child: the thread is not there, and the files belong to the parent."""
        self._file, self._thread, self._lock = None, None, threads.Lock()

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
            self._fail()
        except Exception:
            _log.exception("the record %s ends here", file.path)
            self._fail()
        finally:
            with suppress(OSError):
                file.close()

    def _flush(self, file: RecordFile) -> None:
        with self._lock:
            lines, self._queue, self._queued_bytes = self._queue, [], 0
        try:
            file.write([*lines, *self._collect()])
        except BaseException:
            self.dropped += len(lines)
            raise

    def _fail(self) -> None:
        with self._lock:
            self._has_failed = True
            self.dropped += len(self._queue)
            self._queue, self._queued_bytes = [], 0


def _write_new(directory: Path, head: str, body: bytes) -> Path:
    """Write a file with the next number. Other threads and processes may do the same."""
    number = max((number for number, _ in _numbered(directory, head)), default=-1) + 1
    while True:
        path = directory / f"{head}{number}.jsonl"
        try:
            with path.open("xb") as file:
                file.write(body)
        except FileExistsError:
            number += 1
        else:
            return path


def _keep_newest(directory: Path) -> None:
    flights = sorted(directory.glob("flight-*.jsonl"), key=_modified_ns)
    for path in flights[:-MAX_FLIGHTS]:
        path.unlink(missing_ok=True)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process has just deleted it
        return 0


def _stacks() -> dict[str, str]:
    """What each thread of this process is doing, by its name."""
    names = threads.names()
    stacks: dict[str, str] = {}
    frames = sys._current_frames()
    while frames:  # this function's own frame is in it: what is left would keep all that the frames refer to
        ident, frame = frames.popitem()
        name = names.get(ident, str(ident))
        unique = f"{name} ({ident})" if name in stacks else name
        stacks[unique] = "".join(traceback.format_stack(frame))
        del frame
    return stacks
