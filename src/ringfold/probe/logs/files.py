"""The log of probing as files: `DIR/NODE.jsonl` of a node (NODE is its id), `DIR/run.jsonl` of the whole run.

Writing. A writer appends whole batches of lines, each with one system call, and buffers nothing: a process that is
killed leaves at most one incomplete line, at the end, and the next writer of the file cuts it off. (A power cut may
cost more: nothing here is flushed to the disk.) A file that would grow beyond `file_bytes` becomes `NODE.1.jsonl`, the
one before `NODE.2.jsonl`, and so on; the newest `files` are kept. If a write fails, for example because the disk is
full, the incomplete batch is cut off, and the log ends with one warning; probing continues without it.

Reading skips what is incomplete or corrupt and notes it. Another version of the format is refused.
"""

import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ringfold.errors import ConfigError, UsageError
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.logs.lines import (
    VERSION,
    FitLine,
    HeaderLine,
    Line,
    OtherVersion,
    RoundLine,
    WindowFields,
    WindowLine,
    check_version,
    decode,
    encode,
    round_line,
    window_lines,
)
from ringfold.wire.probing import Cadence, EdgeFit, NodeId, RoundId, RoundSummary

RUN_LOG = "run.jsonl"
MAX_LINE_BYTES = 256 << 20
_MAX_NOTES = 20

_log = logging.getLogger(__name__)


# Writing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """The directory of the log, how much of it is kept, and whether every exchange is in it."""

    directory: Path
    file_bytes: int = 64 << 20
    files: int = 8
    points: bool = False

    def __post_init__(self) -> None:
        if self.file_bytes < 1 << 10:
            raise ConfigError(f"file_bytes must be at least 1024, not {self.file_bytes}")
        if self.files < 1:
            raise ConfigError(f"files must be at least 1, not {self.files}")


def log_path(directory: Path, node: NodeId | None) -> Path:
    """The present file of a node, or of the whole run (`node` None)."""
    return directory / (RUN_LOG if node is None else f"{node}.jsonl")


def check_writable(directory: Path) -> None:
    """Make the directory of a log, and a file in it that is gone at once. ConfigError if that is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"no log can be written into {directory}: {error.strerror or error}") from None


class ProbeLog:
    """Appends lines to a log. After a failure `stopped` is the reason as text, and lines are ignored."""

    def __init__(
        self,
        settings: ExportSettings,
        *,
        node: NodeId | None = None,
        name: str = "",
        host: str = "",
        software: str = "",
        cadence: Cadence | None = None,
    ) -> None:
        """Open the log of a node, or of the whole run (`node` None). ConfigError if it cannot be written at all."""
        self.path = log_path(settings.directory, node)
        self.points = settings.points
        self.stopped = ""
        self._settings = settings
        # The window is that of the first line, which is not known yet.
        self._header = HeaderLine(
            round_id=RoundId(),
            label="",
            begin_ns=0,
            end_ns=0,
            version=VERSION,
            node=node,
            name=name,
            host=host,
            software=software,
            cadence=cadence,
        )
        self._needs_header = True
        self._size = 0
        self._file = -1
        try:
            settings.directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(f"the log {self.path} cannot be written: {error.strerror or error}") from None

    def begin(self, now_ns: int) -> None:
        """Write the header now: so the name of a node is known even if it never writes a line."""
        if not self.stopped and self._needs_header:
            try:
                self._append(encode(msgspec.structs.replace(self._header, begin_ns=now_ns, end_ns=now_ns)))
                self._needs_header = False
            except OSError as error:
                self._stop(error)

    def write(self, lines: Sequence[WindowLine | FitLine | RoundLine]) -> None:
        """Append all lines, or none and set `stopped`. Never raises an error of the disk."""
        if self.stopped or not lines:
            return
        if self._file < 0:
            raise UsageError(f"the log {self.path} is closed")
        batch = b"".join(map(encode, lines))
        try:
            if self._size and self._size + len(batch) > self._settings.file_bytes:
                self._rotate()
            if self._needs_header:
                batch = encode(_header_for(lines[0], self._header)) + batch
            self._append(batch)
            self._needs_header = False
        except OSError as error:
            self._stop(error)

    def window(self, fields: WindowFields, windows: Sequence[EdgeWindow], fits: Sequence[EdgeFit]) -> None:
        """Append a node's window with its fits."""
        if not self.stopped:
            self.write(window_lines(fields, windows, fits, points=self.points))

    def round(self, summary: RoundSummary, names: Mapping[NodeId, str] | None = None) -> None:
        """Append a round's result."""
        self.write([round_line(summary, names)])

    def close(self) -> None:
        """Close the file. Nothing is buffered."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "ProbeLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._needs_header = True
        self._size = _truncate_incomplete_line(self._file)

    def _rotate(self) -> None:
        """Start a new file; the older ones are renamed, and the oldest is removed."""
        self.close()
        for age, path in sorted(_aged(self.path).items(), reverse=True):
            if age + 1 >= self._settings.files:
                path.unlink(missing_ok=True)
            else:
                path.rename(_older(self.path, age + 1))
        self._open()

    def _append(self, batch: bytes) -> None:
        rest = memoryview(batch)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(batch)

    def _stop(self, error: OSError) -> None:
        self.stopped = f"the log {self.path} ends here: {error.strerror or error}. Probing continues"
        if self._file >= 0:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
        self.close()
        _log.warning("%s", self.stopped)


def _header_for(first: Line, header: HeaderLine) -> HeaderLine:
    place = {"round_id": first.round_id, "label": first.label, "begin_ns": first.begin_ns, "end_ns": first.end_ns}
    return msgspec.structs.replace(header, **place)


def _truncate_incomplete_line(file: int) -> int:
    """Truncate the file after the last newline; returns its new size."""
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        return 0
    end = about.st_size
    while end:
        begin = max(0, end - (1 << 16))
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end != about.st_size:
        os.ftruncate(file, end)
    return end


def _older(path: Path, age: int) -> Path:
    return path if age == 0 else path.with_name(f"{path.stem}.{age}{path.suffix}")


def _aged(path: Path) -> dict[int, Path]:
    """The existing files of one log, by age; 0 is the one being written."""
    name = re.compile(re.escape(path.stem) + r"(?:\.(\d{1,9}))?" + re.escape(path.suffix))
    found = ((name.fullmatch(each.name), each) for each in path.parent.iterdir())
    return {int(match[1] or 0): each for match, each in found if match}


# Reading


def logs_in(paths: Sequence[Path]) -> list[Path]:
    """The logs of paths: a file is one log (with its older files), a directory all logs in it."""
    logs: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted({_newest_name(each) for each in path.glob("*.jsonl")}, key=_by_number)
            if not inside:
                raise UsageError(f"there is no log (*.jsonl) in {path}")
            logs += inside
        elif path.exists():
            logs.append(path)
        else:
            raise UsageError(f"there is no log {path}")
    return list(dict.fromkeys(logs))


def _newest_name(path: Path) -> Path:
    match = re.fullmatch(r"(.+)\.\d{1,9}\.jsonl", path.name)
    return path.with_name(f"{match[1]}.jsonl") if match else path


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdecimal() else -1, path.name)


class LogReader:
    """The lines of one log, from its oldest file to its newest; can be iterated repeatedly.

    `notes` has what the last iteration skipped. A file that is not a log, or of another version, is a UsageError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Line]:
        self.notes = []
        aged = _aged(self.path)
        if not aged:
            raise UsageError(f"there is no log {self.path}")
        for _, path in sorted(aged.items(), reverse=True):
            yield from self._file(path)

    def _file(self, path: Path) -> Iterator[Line]:
        has_header = False
        for number, raw in enumerate(_raw_lines(path), 1):
            if not raw.endswith(b"\n"):
                self._note(f"{path}: line {number} is incomplete ({len(raw)} bytes): its writer was killed")
                continue
            try:
                line = decode(raw)
                if isinstance(line, HeaderLine):
                    check_version(line)
                    has_header = True
            except OtherVersion as error:
                raise UsageError(f"{path} cannot be read: {error}") from None
            except UsageError as error:
                if not has_header:
                    raise UsageError(f"{path} is not a log of probing: {error}") from None
                self._note(f"{path}: line {number} is corrupt and was skipped: {error}")
                continue
            if not has_header:
                raise UsageError(f"{path} is not a log of probing, or its header is missing")
            yield line

    def _note(self, text: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)
        elif len(self.notes) == _MAX_NOTES:
            self.notes.append(f"{self.path}: more lines were skipped")


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            while raw := file.readline(MAX_LINE_BYTES):
                yield raw
    except OSError as error:
        raise UsageError(f"the log {path} cannot be read: {error.strerror or error}") from None
