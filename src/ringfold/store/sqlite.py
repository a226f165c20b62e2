"""sqlite: a file that all processes of one machine share. Nothing to install, nothing to run.

One row of `meta` holds the generation and the revision; every statement that reads or writes a key reads or writes this
row in the same transaction. A version is the revision at which the key was written.

*Durable.* Write-ahead log, synchronous FULL: a write that was answered has been flushed to the disk, whatever is killed
then. What is not lasting goes into the log unflushed (synchronous NORMAL), and the next lasting write flushes it, too:
only the machine's own end can lose it, and with it all who had seen it. *Many writers.* A write begins with BEGIN
IMMEDIATE, so it never fails half-way for want of the lock; who does not get the lock tries again until its deadline.

*Waking.* A bell is a file beside the database, made by the first who waits for a key, and watched with inotify; whoever
writes the key touches it, if it is there. Keys share a few hundred bells, so who waits for one key is hardly ever woken
for another: with one bell for all, n ranks that arrive one by one would wake each other n * n times. Somebody killed
between the write and the touch is covered by a slow poll.

*The file may be swapped.* An open database goes on as if nothing were, although everybody else uses the new file. So
every call compares the inode behind the path with the one that is open, and opens the new one if it differs; its
generation and revision tell whether that is acceptable. (A file that was put there without removing the old one's
write-ahead log is not touched at all.) Only founding makes a file; nobody makes a lost one anew.

*Not on a network disk*: its locks and shared memory are not what the write-ahead log needs. That is refused.
"""

import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ringfold.errors import ConfigError, StoreError, StoreUnknown, StoreUnreachable
from ringfold.runtime import local, threads
from ringfold.store.base import (
    Added,
    AnyVersion,
    Deadline,
    Entry,
    Generation,
    Read,
    Scanned,
    Write,
    Written,
    total_of,
    version_of,
)

Value = TypeVar("Value")
_log = logging.getLogger(__name__)

_APPLICATION = 0x52464F4C  # "RFOL", in the file's header
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (
    one INTEGER PRIMARY KEY CHECK (one = 1), generation TEXT NOT NULL, revision INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, ttl_ms INTEGER NOT NULL
) WITHOUT ROWID;
"""
_READ = "SELECT generation, revision, value, version, ttl_ms FROM meta LEFT JOIN entries ON key = ? WHERE one = 1"
_SCAN = (
    "SELECT generation, revision, key, value, version, ttl_ms FROM meta "
    "LEFT JOIN entries ON key >= ? AND key < ? WHERE one = 1"
)
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.ntfs-3g", "fuse.overlayfs", "fuse.fuse-overlayfs", "fuse.lxcfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "orangefs"}
)
_LOCK_PAUSE_S = 0.0005
_LAST_LOCK_PAUSE_S = 0.01
_SLOW_POLL_S = 0.05
_POLL_S = 0.005
_BELLS_KEPT = 8


class SqliteDriver:
    """A database file, through one connection that reads and one that writes."""

    can_list = True
    has_leases = False

    def __init__(self, path: str | Path, *, allow_network: bool = False) -> None:
        self._path = Path(path).absolute()
        self.name = f"sqlite://{self._path}"
        if not self._path.parent.is_dir():
            raise ConfigError(f"{self.name}: the folder {self._path.parent} does not exist")
        self._check_disk(allow_network)
        self._bells = _Bells(self._path)
        self._reader, self._writer = _Connection(self._path, self.name), _Connection(self._path, self.name)

    def _check_disk(self, allow_network: bool) -> None:
        with suppress(OSError):
            kind = file_system(Path("/proc/self/mounts").read_text(), self._path.parent.resolve())
            if kind not in _NETWORK and (not kind.startswith("fuse") or kind in _LOCAL_FUSE):
                return
            if not allow_network:
                raise ConfigError(
                    f"{self.name} lies on a network disk ({kind}), where sqlite loses data. Put it on a local disk "
                    "(allow_network=True if this one is), or use etcd between machines"
                )
            _log.warning("%s lies on a network disk (%s), where sqlite may lose data", self.name, kind)

    def found(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        def enter(db: sqlite3.Connection) -> None:
            if nonce is not None:
                db.execute("INSERT OR IGNORE INTO meta VALUES (1, ?, 1)", (nonce,))

        if nonce is not None:
            self._writer.create(deadline)
            self._writer.change(enter, deadline)
        return self._reader.look(_stamp, deadline)

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        row = self._reader.look(lambda db: db.execute(_READ, (key,)).fetchone(), deadline)
        return Read(None, None) if row is None else Read(_entry(row[2:]), Generation(*row[:2]))

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        # No text sorts behind the last code point, and a prefix is never empty.
        bounds = (prefix, prefix + "\U0010ffff")
        rows = self._reader.look(lambda db: db.execute(_SCAN, bounds).fetchall(), deadline)
        if not rows:
            return Scanned({}, None)
        return Scanned({row[2]: Entry(*row[3:]) for row in rows if row[2] is not None}, Generation(*rows[0][:2]))

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        written = self._writer.change(lambda db: _write(db, write, guard), deadline, lasting=write.lasting)
        if written is None:
            return Written(False, None, None)
        if written.is_made:
            self._bells.ring(write.key)
        return written

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        def change(db: sqlite3.Connection) -> Added:
            row = db.execute(_READ, (key,)).fetchone()
            total = None if row is None else total_of(_entry(row[2:]), delta)
            if row is None or total is None:
                return Added(total, None if row is None else Generation(*row[:2]))
            return Added(total, _write(db, Write(key, str(total).encode()), guard).stamp)

        added = self._writer.change(change, deadline)
        self._bells.ring(key)
        return Added(0, None) if added is None else added

    def keep(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        raise AssertionError("a store without leases was asked to keep one")

    def listen(self, key: str, deadline: Deadline) -> "SqliteBell":
        return SqliteBell(self._bells, key)

    def close(self) -> None:
        self._bells.close()
        self._reader.close()
        self._writer.close()


def _stamp(db: sqlite3.Connection) -> Generation | None:
    row = db.execute("SELECT generation, revision FROM meta WHERE one = 1").fetchone()
    return None if row is None else Generation(*row)


def _entry(row: tuple[bytes | None, int, int]) -> Entry | None:
    value, version, ttl_ms = row
    return None if value is None else Entry(value, version, ttl_ms)


def _write(db: sqlite3.Connection, write: Write, guard: Generation) -> Written:
    row = db.execute(_READ, (write.key,)).fetchone()
    if row is None:
        return Written(False, None, None)
    present, stamp = _entry(row[2:]), Generation(*row[:2])
    is_met = isinstance(write.condition, AnyVersion) or version_of(present) == version_of(write.condition)
    if stamp.id != guard.id or stamp.revision < guard.revision or not is_met:
        return Written(False, present, stamp)
    if write.value is None and present is None:
        return Written(True, None, stamp)
    stamp = Generation(stamp.id, stamp.revision + 1)
    db.execute("UPDATE meta SET revision = ? WHERE one = 1", (stamp.revision,))
    if write.value is None:
        db.execute("DELETE FROM entries WHERE key = ?", (write.key,))
        return Written(True, None, stamp, was_there=True)
    entry = Entry(write.value, stamp.revision, write.ttl_ms)
    row = (write.key, entry.value, entry.version, entry.ttl_ms)
    db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
    return Written(True, entry, stamp, was_there=present is not None)


class _Connection:
    """One connection to the file that is at the path now, used by one thread at a time."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._lock = threads.Lock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._log: tuple[int, int] | None = None
        self._flushes = True
        self._log_path = Path(f"{path}-wal")
        self._pid = os.getpid()
        self._inherited: list[sqlite3.Connection] = []

    def create(self, deadline: Deadline) -> None:
        """Make the file and its tables, unless they are there."""
        with self._mine(deadline):
            self._patiently(lambda: self._make(), deadline)

    def look(self, body: Callable[[sqlite3.Connection], Value], deadline: Deadline) -> Value | None:
        """The result of one statement; None if there is no database."""
        with self._mine(deadline):
            return self._patiently(lambda: None if (db := self._opened()) is None else body(db), deadline)

    def change(
        self, body: Callable[[sqlite3.Connection], Value], deadline: Deadline, *, lasting: bool = True
    ) -> Value | None:
        """The result of a write transaction, which is on the disk if it is lasting; None if there is no database."""
        with self._mine(deadline):
            db = self._patiently(lambda: self._begun(lasting), deadline)
            if db is None:
                return None
            try:
                result = body(db)
            except BaseException as error:
                self._drop()  # which rolls back
                if isinstance(error, sqlite3.Error):
                    raise StoreError(self._name, f"{error} ({error.sqlite_errorname})") from error
                raise
            try:
                db.execute("COMMIT")
            except sqlite3.Error as error:
                self._drop()
                raise StoreUnknown(self._name, f"the write could not be finished: {error}") from error
            return result

    def close(self) -> None:
        with self._lock:
            self._drop()

    @contextmanager
    def _mine(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.001, deadline.left_s())):
            raise StoreUnreachable(self._name, f"other threads used it for {deadline.timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _patiently(self, step: Callable[[], Value], deadline: Deadline) -> Value:
        """Do something for which another process may hold the lock."""
        pause_s = _LOCK_PAUSE_S
        while True:
            try:
                return step()
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    self._drop()
                    raise StoreError(self._name, f"{error} ({error.sqlite_errorname})") from error
                if deadline.left_s() <= pause_s:
                    text = f"another process held its lock for {deadline.timeout_s:g} s"
                    raise StoreUnreachable(self._name, text) from error
            except OSError as error:  # not even the path can be looked at: its folder, or its disk, is gone
                raise StoreError(self._name, error.strerror or str(error)) from error
            threads.Event().wait(pause_s)
            pause_s = min(pause_s * 1.5, _LAST_LOCK_PAUSE_S)

    def _begun(self, lasting: bool) -> sqlite3.Connection | None:
        db = self._opened()
        if db is not None:
            if lasting != self._flushes:  # not within a transaction
                db.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
                self._flushes = lasting
            db.execute("BEGIN IMMEDIATE")
        return db

    def _opened(self) -> sqlite3.Connection | None:
        """A connection to the file that is there now; None if there is none, or one that must not be touched."""
        if self._pid != os.getpid():
            self._leave_to_parent()
        there = _inode(self._path)
        if there is None:
            self._drop()
            return None
        if self._db is not None and there != self._file:
            # Opening the new file with the old one's log would mix the two. The log's inode is not given to another
            # file as long as our old connection has it open.
            if self._log is not None and _inode(self._log_path) == self._log:
                return None
            self._drop()
        if self._db is None:
            db = self._connect("rw")
            if not self._is_ours(db):
                db.close()
                return None
            self._db, self._file, self._log, self._flushes = db, there, _inode(self._log_path), True
        return self._db

    def _make(self) -> None:
        if self._opened() is not None:
            return
        db = self._connect("rwc")
        try:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] and not self._is_ours(db):
                raise StoreError(self._name, "the file is a database of another program")
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; COMMIT;")
        finally:
            db.close()

    def _is_ours(self, db: sqlite3.Connection) -> bool:
        return bool(db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION)

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self._path.as_uri()}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
        except BaseException:
            db.close()
            raise
        return db

    def _drop(self) -> None:
        db, self._db, self._file = self._db, None, None
        if db is not None:
            db.close()

    def _leave_to_parent(self) -> None:
        """A forked child must neither use nor close what its parent has open: sqlite would tidy up under the parent."""
        if self._db is not None:
            self._inherited.append(self._db)
        self._db, self._file, self._pid = None, None, os.getpid()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino


class _Bells:
    """The bells of a database. Those that nobody waits for now are kept: the kernel takes 20 ms to take one down."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threads.Lock()
        self._idle: list[_Hung] = []
        self._pid = os.getpid()

    def ring(self, key: str) -> None:
        """Wake those who wait for a key. Where that fails, their slow poll finds the change."""
        with suppress(OSError):
            os.utime(self._file_of(key))

    def take(self, key: str) -> "_Hung | None":
        """A bell that hears of every write of a key from now on; None where there are none."""
        path = self._file_of(key)
        with self._lock:
            if self._pid != os.getpid():  # after a fork they are the parent's, and so is what they hear
                self._pid, self._idle = os.getpid(), []
            for hung in [hung for hung in self._idle if hung.path == path]:
                self._idle.remove(hung)
                if hung.file == _inode(Path(path)):
                    hung.bell.wait(0)
                    return hung
                hung.bell.close()
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            return _Hung(local.FileWatch(path), path, _inode(Path(path)))
        except OSError:
            return None

    def put_back(self, hung: "_Hung") -> None:
        with self._lock:
            self._idle.append(hung)
            if len(self._idle) > _BELLS_KEPT:
                self._idle.pop(0).bell.close()

    def close(self) -> None:
        with self._lock:
            while self._idle and self._pid == os.getpid():
                self._idle.pop().bell.close()

    def _file_of(self, key: str) -> str:
        return f"{self._path}-bell-{zlib.crc32(key.encode()) & 0xFF:02x}"


class _Hung(NamedTuple):
    """A bell, and the file that it hangs at."""

    bell: local.FileWatch
    path: str
    file: tuple[int, int] | None


class SqliteBell:
    """Rings when a key was written, and seldom for another one; without inotify it polls."""

    def __init__(self, bells: _Bells, key: str) -> None:
        self._bells, self._hung = bells, bells.take(key)

    def wait(self, read: Read, timeout_s: float) -> None:
        if self._hung is None:
            threads.Event().wait(min(timeout_s, _POLL_S))
        else:
            self._hung.bell.wait(min(timeout_s, _SLOW_POLL_S))

    def close(self) -> None:
        if self._hung is not None:
            self._bells.put_back(self._hung)


def file_system(mounts: str, folder: Path) -> str:
    """The kind of file system that a folder lies on, by the text of /proc/self/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind
