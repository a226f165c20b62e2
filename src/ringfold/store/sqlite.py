"""sqlite: a file that all processes of one machine share. Nothing to install, nothing to run.

One row of `meta` has the generation and the revision; every statement that reads or writes a key reads or writes this
row in the same transaction. A version is the revision at which the key was written.

*Durability.* Write-ahead log, synchronous FULL: a write that was acknowledged is on the disk. A write that is not
lasting goes into the log unflushed (synchronous NORMAL), and the next lasting write flushes it, too: only a crash of
the machine can lose it, and all processes that had seen it end with the machine. *Many writers.* A write begins with
BEGIN IMMEDIATE, so it never fails half-way for want of the lock; a process that does not get the lock retries until its
deadline.

*Notification.* Waiters watch a file beside the database with inotify. The first waiter of a key creates it; a writer of
the key touches it, if it exists. Keys share a few hundred such files, so waiters are rarely woken for another key: with
one file for all, n ranks that arrive one by one would wake each other n * n times. A slow poll covers a writer that is
killed between the write and the touch.

*The file may be replaced.* An open database does not notice, although all other processes use the new file. So every
call compares the inode of the path with the open one, and opens the new file if it differs; its generation and revision
show whether that is acceptable. (A file that was put there without removing the old one's write-ahead log is never
opened.) Only the first client of a namespace creates a file; a lost file is never created again.

*Not on a network disk*: its locks and shared memory do not satisfy the write-ahead log. That is refused.
"""

import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from ringfold.errors import ConfigError, StoreError, StoreUnknown, StoreUnreachable
from ringfold.runtime import local, threads
from ringfold.store.base import (
    Added,
    Deadline,
    Entry,
    Generation,
    Read,
    Scanned,
    Write,
    Written,
    is_met,
    read_each,
    total_of,
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
_MAX_LOCK_PAUSE_S = 0.01
_SLOW_POLL_S = 0.05
_POLL_S = 0.005
_MAX_IDLE_WATCHES = 8


class SqliteDriver:
    """A database file, with one connection for reads and one for writes."""

    can_list = True
    has_leases = False
    counts_writes = True
    has_counters = False

    def __init__(self, path: str | Path, *, allow_network: bool = False) -> None:
        self._path = Path(path).absolute()
        self.name = f"sqlite://{self._path}"
        if not self._path.parent.is_dir():
            raise ConfigError(f"{self.name}: the folder {self._path.parent} does not exist")
        self._check_disk(allow_network)
        self._watches = _FileWatches(self._path)
        self._reader, self._writer = _Connection(self._path, self.name), _Connection(self._path, self.name)

    def _check_disk(self, allow_network: bool) -> None:
        with suppress(OSError):
            kind = file_system(Path("/proc/self/mounts").read_text(), self._path.parent.resolve())
            if kind not in _NETWORK and (not kind.startswith("fuse") or kind in _LOCAL_FUSE):
                return
            if not allow_network:
                raise ConfigError(
                    f"{self.name} is on a network disk ({kind}), where sqlite loses data. Put it on a local disk "
                    "(allow_network=True if this one is), or use etcd between machines"
                )
            _log.warning("%s is on a network disk (%s), where sqlite may lose data", self.name, kind)

    def ensure_generation(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        def enter(db: sqlite3.Connection) -> None:
            if nonce is not None:
                db.execute("INSERT OR IGNORE INTO meta VALUES (1, ?, 1)", (nonce,))

        if nonce is not None:
            self._writer.create(deadline)
            self._writer.change(enter, deadline)
        return self._reader.look(_generation, deadline)

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        row = self._reader.look(lambda db: db.execute(_READ, (key,)).fetchone(), deadline)
        return Read(None, None) if row is None else Read(_entry(row[2:]), Generation(*row[:2]))

    def read_many(self, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
        return read_each(self, keys, guard, deadline)

    def increment(self, key: str, by: int, guard: Generation, deadline: Deadline) -> Added:
        raise AssertionError("this store has no atomic counters")

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        # No text sorts after the last code point, and a prefix is never empty.
        bounds = (prefix, prefix + "\U0010ffff")
        rows = self._reader.look(lambda db: db.execute(_SCAN, bounds).fetchall(), deadline)
        if not rows:
            return Scanned({}, None)
        return Scanned({row[2]: Entry(*row[3:]) for row in rows if row[2] is not None}, Generation(*rows[0][:2]))

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        written = self._writer.change(lambda db: _write(db, write, guard), deadline, lasting=write.lasting)
        if written is None:
            return Written(False, None, None)
        if written.was_applied:
            self._watches.notify(write.key)
        return written

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        def change(db: sqlite3.Connection) -> Added:
            row = db.execute(_READ, (key,)).fetchone()
            total = None if row is None else total_of(_entry(row[2:]), delta)
            if row is None or total is None:
                return Added(total, None if row is None else Generation(*row[:2]))
            return Added(total, _write(db, Write(key, str(total).encode()), guard).generation)

        added = self._writer.change(change, deadline)
        self._watches.notify(key)
        return Added(0, None) if added is None else added

    def renew(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        raise AssertionError("this store has no leases")

    def watch(self, key: str, deadline: Deadline) -> "SqliteKeyWatch":
        return SqliteKeyWatch(self._watches, key)

    def close(self) -> None:
        self._watches.close()
        self._reader.close()
        self._writer.close()


def _generation(db: sqlite3.Connection) -> Generation | None:
    row = db.execute("SELECT generation, revision FROM meta WHERE one = 1").fetchone()
    return None if row is None else Generation(*row)


def _entry(row: tuple[bytes | None, int, int]) -> Entry | None:
    value, version, ttl_ms = row
    return None if value is None else Entry(value, version, ttl_ms)


def _write(db: sqlite3.Connection, write: Write, guard: Generation) -> Written:
    row = db.execute(_READ, (write.key,)).fetchone()
    if row is None:
        return Written(False, None, None)
    present, generation = _entry(row[2:]), Generation(*row[:2])
    is_older = generation.id != guard.id or generation.revision < guard.revision
    if is_older or not is_met(present, write.condition):
        return Written(False, present, generation)
    if write.value is None and present is None:
        return Written(True, None, generation)
    generation = Generation(generation.id, generation.revision + 1)
    db.execute("UPDATE meta SET revision = ? WHERE one = 1", (generation.revision,))
    if write.value is None:
        db.execute("DELETE FROM entries WHERE key = ?", (write.key,))
        return Written(True, None, generation, existed=True)
    entry = Entry(write.value, generation.revision, write.ttl_ms)
    row = (write.key, entry.value, entry.version, entry.ttl_ms)
    db.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", row)
    return Written(True, entry, generation, existed=present is not None)


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
        """Create the file and its tables, unless they exist."""
        with self._exclusive(deadline):
            self._retry_while_locked(lambda: self._make(), deadline)

    def look(self, body: Callable[[sqlite3.Connection], Value], deadline: Deadline) -> Value | None:
        """The result of one statement; None if there is no database."""
        with self._exclusive(deadline):
            return self._retry_while_locked(lambda: None if (db := self._opened()) is None else body(db), deadline)

    def change(
        self, body: Callable[[sqlite3.Connection], Value], deadline: Deadline, *, lasting: bool = True
    ) -> Value | None:
        """The result of a write transaction, flushed to the disk if it is lasting; None if there is no database."""
        with self._exclusive(deadline):
            db = self._retry_while_locked(lambda: self._begun(lasting), deadline)
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
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.001, deadline.left_s())):
            raise StoreUnreachable(self._name, f"other threads used it for {deadline.timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    def _retry_while_locked(self, step: Callable[[], Value], deadline: Deadline) -> Value:
        """Retry a step while another process holds the lock, until the deadline."""
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
            except OSError as error:  # the path cannot be read: its folder, or its disk, is gone
                raise StoreError(self._name, error.strerror or str(error)) from error
            threads.Event().wait(pause_s)
            pause_s = min(pause_s * 1.5, _MAX_LOCK_PAUSE_S)

    def _begun(self, lasting: bool) -> sqlite3.Connection | None:
        db = self._opened()
        if db is not None:
            if lasting != self._flushes:  # not within a transaction
                db.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
                self._flushes = lasting
            db.execute("BEGIN IMMEDIATE")
        return db

    def _opened(self) -> sqlite3.Connection | None:
        """A connection to the present file; None if there is none, or one that must not be opened."""
        if self._pid != os.getpid():
            self._leave_connection_to_parent()
        there = _inode(self._path)
        if there is None:
            self._drop()
            return None
        if self._db is not None and there != self._file:
            # Opening the new file with the old one's log would mix the two. The log's inode is not reused as long as
            # the old connection has it open.
            if self._log is not None and _inode(self._log_path) == self._log:
                return None
            self._drop()
        if self._db is None:
            db = self._connect("rw")
            if not self._is_ours(db):
                db.close()
                return None
            self._db = db
            self._file = there
            self._log = _inode(self._log_path)
            self._flushes = True
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

    def _leave_connection_to_parent(self) -> None:
        """A forked child must neither use nor close the parent's connection: sqlite would remove its files."""
        if self._db is not None:
            self._inherited.append(self._db)
        self._db, self._file, self._pid = None, None, os.getpid()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_dev, there.st_ino


class _FileWatches:
    """The watched files of a database. Idle watches are reused: the kernel takes 20 ms to remove one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threads.Lock()
        self._idle: list[_IdleWatch] = []
        self._pid = os.getpid()

    def notify(self, key: str) -> None:
        """Wake the waiters of a key. If that fails, their slow poll finds the change."""
        with suppress(OSError):
            os.utime(self._file_of(key))

    def take(self, key: str) -> "_IdleWatch | None":
        """A watch that sees every write of a key from now on; None if inotify is not available."""
        path = self._file_of(key)
        with self._lock:
            if self._pid != os.getpid():  # after a fork they and their events belong to the parent
                self._pid, self._idle = os.getpid(), []
            for idle in [idle for idle in self._idle if idle.path == path]:
                self._idle.remove(idle)
                if idle.file == _inode(Path(path)):
                    idle.watch.wait(0)
                    return idle
                idle.watch.close()
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            return _IdleWatch(local.FileWatch(path), path, _inode(Path(path)))
        except OSError:
            return None

    def put_back(self, idle: "_IdleWatch") -> None:
        with self._lock:
            self._idle.append(idle)
            if len(self._idle) > _MAX_IDLE_WATCHES:
                self._idle.pop(0).watch.close()

    def close(self) -> None:
        with self._lock:
            while self._idle and self._pid == os.getpid():
                self._idle.pop().watch.close()

    def _file_of(self, key: str) -> str:
        return f"{self._path}-bell-{zlib.crc32(key.encode()) & 0xFF:02x}"


class _IdleWatch(NamedTuple):
    """A watch, and the file that it watches."""

    watch: local.FileWatch
    path: str
    file: tuple[int, int] | None


class SqliteKeyWatch:
    """Notifies when a key was written, and rarely for another one; without inotify it polls."""

    def __init__(self, watches: _FileWatches, key: str) -> None:
        self._watches, self._idle_watch = watches, watches.take(key)

    def wait(self, read: Read, timeout_s: float) -> None:
        if self._idle_watch is None:
            threads.Event().wait(min(timeout_s, _POLL_S))
        else:
            self._idle_watch.watch.wait(min(timeout_s, _SLOW_POLL_S))

    def close(self) -> None:
        if self._idle_watch is not None:
            self._watches.put_back(self._idle_watch)


def file_system(mounts: str, folder: Path) -> str:
    """The type of the file system of a folder, by the text of /proc/self/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind
