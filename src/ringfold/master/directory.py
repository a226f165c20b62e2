"""The names of all runs of a store, under one key with a fence.

A run has a journal of its own (`keeper.py`). Which runs there are stands here: a name is written before its journal is,
and is taken out before its journal goes. A master that takes over reads the names, then every journal, and then writes
the names back under a higher fence, against exactly what it read. From then on the master before it can neither add a
run nor forget one; and in each run it can do nothing as soon as that run's journal has the higher fence, which is the
first thing that the new one writes there.

So a run that the old master was about to add is either in the list that was read, or is never begun.
"""

from functools import partial

import msgspec

from ringfold.config import DEFAULT_RUN
from ringfold.errors import StoreError, StoreUnknown
from ringfold.master.keeper import Deposed
from ringfold.runtime.clock import random_bytes
from ringfold.runtime.threads import Lock
from ringfold.store.base import Entry, Lost, Store, version_of
from ringfold.wire.decoding import decode

DIRECTORY_KEY = "master/runs"


class _Names(msgspec.Struct, frozen=True):
    fence: int
    names: list[str]
    serial: int = 0
    writer: str = ""
    """Which tells the same names apart, written by two masters."""


_decoder = msgspec.msgpack.Decoder(_Names)


class Directory:
    """One master's hold on the list of runs. Its methods block; several threads may call them."""

    def __init__(self, store: Store, where: str) -> None:
        self._store, self._where = store, where
        self._lock = Lock()
        self._entry: Entry | None = None
        self._known = _Names(0, [])
        self._writer = random_bytes(8).hex()

    def read(self) -> tuple[int, list[str]]:
        """The fence and the names as they are; those of an older version's store are the default run's."""
        self._entry = self._store.get(DIRECTORY_KEY)
        self._known = _Names(0, [])
        if self._entry is not None:
            error = partial(StoreError, self._where)
            self._known = decode(_decoder.decode, self._entry.value, error, "it holds no list of runs: ")
        return self._known.fence, sorted({DEFAULT_RUN, *self._known.names})

    def take_over(self, fence: int) -> None:
        """Write the list back under this fence. Raises Deposed if it is not the one that was read any more."""
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
