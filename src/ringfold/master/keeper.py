"""The journal in a store: read it, take it over, write it, and notice when somebody else has.

The journal of a run is one key. A master that takes over writes it with a higher fence; every later write is a
compare-and-set against the writer's own last one, so that it fails as soon as somebody else has taken over, however
late that is found out. A journal that is too large for one value is cut into parts, which are written first, under
names that are never used again; the key then holds their number. Parts of a write that was refused mean nothing, and go
with the next one.

A write without an answer may have been made: the key is read, and says.

What is known about links has a key of its own, which nothing depends on.
"""

from contextlib import suppress
from functools import partial

import msgspec

from ringfold.config import DEFAULT_RUN
from ringfold.errors import StoreError, StoreUnknown
from ringfold.master.journal import NO_JOURNAL, Journal, decode, encode
from ringfold.runtime.clock import random_bytes
from ringfold.store.base import MAX_VALUE_BYTES, Entry, Lost, Store, version_of
from ringfold.wire.decoding import decode as decode_bytes

KEY = "master/journal"
"""Of the default run, as every version had it."""
LINKS_KEY = "master/links"
RUN_KEY = "master/run/"
PART_BYTES = MAX_VALUE_BYTES // 2
MAX_PARTS = 65_536


class Deposed(Exception):
    """Another master has taken the journal over."""


class _Head(msgspec.Struct, frozen=True):
    """The value of the key: the journal itself, or how many parts it has, and under which name."""

    fence: int
    serial: int
    whole: bytes = b""
    parts: int = 0
    writer: str = ""
    """Who else reads the same journal makes the same fence of it, perhaps the same journal: this tells them apart."""

    def part(self, key: str, number: int) -> str:
        return f"{key}.part/{self.fence}/{self.writer}/{self.serial}/{number}"


_decoder = msgspec.msgpack.Decoder(_Head)


class Keeper:
    """One master's hold on a run's journal. Its methods block: call them off the event loop, one at a time."""

    def __init__(self, store: Store, where: str, run: str = DEFAULT_RUN) -> None:
        self._store, self._where = store, where
        self._key = KEY if run == DEFAULT_RUN else f"{RUN_KEY}{run}/journal"
        self._links_key = LINKS_KEY if run == DEFAULT_RUN else f"{RUN_KEY}{run}/links"
        self._entry: Entry | None = None
        self._head: _Head | None = None
        self._serial, self._writer = 0, random_bytes(8).hex()

    def read(self) -> Journal | None:
        """The journal as it is; None if there is none yet. What is written next replaces exactly this."""
        self._entry = self._store.get(self._key)
        self._head = None
        if self._entry is None:
            return None
        error = partial(StoreError, self._where)
        head = self._head = decode_bytes(_decoder.decode, self._entry.value, error, NO_JOURNAL)
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
        """What `write_links` wrote last, whoever did; empty if nothing, or if it cannot be read."""
        with suppress(StoreError):
            entry = self._store.get(self._links_key)
            return b"" if entry is None else entry.value
        return b""

    def write_links(self, raw: bytes) -> None:
        """Keep this, too. It is not fenced: figures of links that a deposed leader measured are true all the same."""
        self._store.set(self._links_key, raw)

    def _replace(self, value: bytes) -> Entry:
        try:
            done = self._store.compare_and_set(self._key, self._entry, value)
        except StoreUnknown:
            # Nobody else writes this value: it says whose it is.
            present = self._store.get(self._key)
            if present is not None and present.value == value:
                return present
            if version_of(present) != version_of(self._entry):
                raise Deposed(self._where) from None
            raise
        if isinstance(done, Lost):
            raise Deposed(self._where)
        return done.entry
