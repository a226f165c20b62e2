"""The journals in a store: read them, take them over, write them, and detect another master's write.

The journal of a run is one key. A master that takes over writes it with a higher fence. Every later write is a
compare-and-set against the writer's own last one, so it fails as soon as another master has taken over, however late
that is detected. A journal that is too large for one value is split into parts. The parts are written first, under keys
that are never used again; the journal's key then holds their number. Parts of a failed write are not referenced, and
are deleted with the next write.

A write without a response may have succeeded: the key is read to find out.

Link figures have a key of their own, which nothing depends on.

The names of all runs are under one more key, with a fence (`RunDirectory`). A name is written before its journal, and
removed before it. A master that takes over reads the names, then every journal, and then writes the names back under a
higher fence, against exactly what it read. From then on the master before it can neither add a run nor forget one; and
in each run it can do nothing after that run's journal has the higher fence, which is the first thing that the new
master writes there. So a run that the old master was about to add is either in the list that was read, or is never
started.
"""

from contextlib import suppress
from functools import partial

import msgspec

from ringfold.config import DEFAULT_RUN
from ringfold.errors import StoreError, StoreUnknown
from ringfold.master.journal import NO_JOURNAL, Journal, decode, encode
from ringfold.runtime.clock import random_bytes
from ringfold.runtime.threads import Lock
from ringfold.store.base import MAX_VALUE_BYTES, Entry, Lost, Store, version_of
from ringfold.wire.decoding import decode as decode_bytes

KEY = "master/journal"
"""The journal of the default run, under the same key in every version."""
LINKS_KEY = "master/links"
RUN_KEY = "master/run/"
PART_BYTES = MAX_VALUE_BYTES // 2
MAX_PARTS = 65_536


class Deposed(Exception):
    """Another master has taken the journal over."""


class _Head(msgspec.Struct, frozen=True):
    """The value of the key: the journal itself, or the number of its parts."""

    fence: int
    serial: int
    whole: bytes = b""
    parts: int = 0
    writer: str = ""
    """Random. Two masters that read the same journal choose the same fence: this tells their writes apart."""

    def part(self, key: str, number: int) -> str:
        return f"{key}.part/{self.fence}/{self.writer}/{self.serial}/{number}"


_head_decoder = msgspec.msgpack.Decoder(_Head)


class JournalStore:
    """A run's journal in a store. Its methods block: call them off the event loop, one at a time."""

    def __init__(self, store: Store, where: str, run: str = DEFAULT_RUN) -> None:
        self._store, self._where = store, where
        self._key = KEY if run == DEFAULT_RUN else f"{RUN_KEY}{run}/journal"
        self._links_key = LINKS_KEY if run == DEFAULT_RUN else f"{RUN_KEY}{run}/links"
        self._entry: Entry | None = None
        self._head: _Head | None = None
        self._serial, self._writer = 0, random_bytes(8).hex()

    def read(self) -> Journal | None:
        """The present journal; None if there is none yet. The next write replaces exactly this one."""
        self._entry = self._store.get(self._key)
        self._head = None
        if self._entry is None:
            return None
        error = partial(StoreError, self._where)
        head = self._head = decode_bytes(_head_decoder.decode, self._entry.value, error, NO_JOURNAL)
        if not 0 <= head.parts <= MAX_PARTS:
            raise StoreError(self._where, f"{NO_JOURNAL}it has {head.parts} parts")
        if not head.parts:
            return decode(head.whole, self._where)
        entries = [self._store.get(head.part(self._key, number)) for number in range(head.parts)]
        if any(entry is None for entry in entries):
            raise StoreError(self._where, "a part of the journal is missing")
        return decode(b"".join(entry.value for entry in entries if entry is not None), self._where)

    def write(self, journal: Journal) -> None:
        """Replace the journal by this one. Raises Deposed if it is no longer the one that was read or written here."""
        self._serial += 1
        raw, before = encode(journal), self._head
        head = _Head(journal.fence, self._serial, raw, 0, self._writer)
        if len(raw) > PART_BYTES:
            parts = [raw[start : start + PART_BYTES] for start in range(0, len(raw), PART_BYTES)]
            head = _Head(journal.fence, self._serial, b"", len(parts), self._writer)
            for number, part in enumerate(parts):
                self._store.set(head.part(self._key, number), part)
        self._entry = self._replace(msgspec.msgpack.encode(head))
        self._head = head
        self._delete_parts(before)

    def forget(self) -> None:
        """Remove the journal. Raises Deposed if it is no longer the one that was read or written here."""
        before, entry = self._head, self._entry
        if entry is not None and not self._store.delete(self._key, entry) and self._store.get(self._key) is not None:
            raise Deposed(self._where)
        self._head = self._entry = None
        self._delete_parts(before)
        with suppress(StoreError):
            self._store.delete(self._links_key)

    def _delete_parts(self, head: _Head | None) -> None:
        with suppress(StoreError):
            for number in range(0 if head is None else head.parts):
                assert head is not None
                self._store.delete(head.part(self._key, number))

    def read_links(self) -> bytes:
        """What any master's `write_links` wrote last; empty if there is nothing, or if it cannot be read."""
        with suppress(StoreError):
            entry = self._store.get(self._links_key)
            return b"" if entry is None else entry.value
        return b""

    def write_links(self, raw: bytes) -> None:
        """Write link figures. They are not fenced: figures that a deposed leader measured are true, too."""
        self._store.set(self._links_key, raw)

    def _replace(self, value: bytes) -> Entry:
        try:
            done = self._store.compare_and_set(self._key, self._entry, value)
        except StoreUnknown:
            # No other master writes this value: it names its writer.
            present = self._store.get(self._key)
            if present is not None and present.value == value:
                return present
            if version_of(present) != version_of(self._entry):
                raise Deposed(self._where) from None
            raise
        if isinstance(done, Lost):
            raise Deposed(self._where)
        return done.entry


DIRECTORY_KEY = "master/runs"


class _Names(msgspec.Struct, frozen=True):
    fence: int
    names: list[str]
    serial: int = 0
    writer: str = ""
    """Random. It tells two masters' writes of the same names apart."""


_names_decoder = msgspec.msgpack.Decoder(_Names)


class RunDirectory:
    """The list of runs in a store. Its methods block; several threads may call them."""

    def __init__(self, store: Store, where: str) -> None:
        self._store, self._where = store, where
        self._lock = Lock()
        self._entry: Entry | None = None
        self._known = _Names(0, [])
        self._writer = random_bytes(8).hex()

    def read(self) -> tuple[int, list[str]]:
        """The present fence and names. A store of an older version has the default run only."""
        self._entry = self._store.get(DIRECTORY_KEY)
        self._known = _Names(0, [])
        if self._entry is not None:
            error = partial(StoreError, self._where)
            self._known = decode_bytes(_names_decoder.decode, self._entry.value, error, "it holds no list of runs: ")
        return self._known.fence, sorted({DEFAULT_RUN, *self._known.names})

    def take_over(self, fence: int) -> None:
        """Write the list back under this fence. Raises Deposed if it has changed since it was read."""
        with self._lock:
            self._write(fence, self._known.names)

    def add(self, name: str) -> None:
        """The run is in the list when this returns."""
        with self._lock:
            if name != DEFAULT_RUN and name not in self._known.names:
                self._write(self._known.fence, sorted([*self._known.names, name]))

    def remove(self, name: str) -> None:
        with self._lock:
            if name in self._known.names:
                self._write(self._known.fence, [each for each in self._known.names if each != name])

    def _write(self, fence: int, names: list[str]) -> None:
        new = _Names(fence, names, self._known.serial + 1, self._writer)
        value = msgspec.msgpack.encode(new)
        try:
            done = self._store.compare_and_set(DIRECTORY_KEY, self._entry, value)
        except StoreUnknown:
            present = self._store.get(DIRECTORY_KEY)
            if present is None or present.value != value:
                if version_of(present) != version_of(self._entry):
                    raise Deposed(self._where) from None
                raise
            self._entry, self._known = present, new
            return
        if isinstance(done, Lost):
            raise Deposed(self._where)
        self._entry, self._known = done.entry, new
