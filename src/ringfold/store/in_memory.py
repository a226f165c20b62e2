"""A store in memory, for tests and simulations: one server, many clients, and a fault at any call. Pure.

`MemoryServer` is the store: its entries, its revision and its generation. It can be emptied (`wipe`), copied
(`snapshot`) and restored (`restore`), like a real one that lost its disk or was restored from a backup.

`MemoryDriver` is one client's connection. Before each call its `fault` hook decides what happens to it:

    None           the call is made
    "unreachable"  it does not arrive; nothing is changed
    "lost reply"   it arrives and is executed, and the reply is lost
    "late"         it is lost for now, and arrives when `deliver_late` is called: a write with an unknown outcome
    "crash"        it does not arrive, and the client dies: `Crashed` is raised, which no `except Exception` catches
    "crash after"  it arrives and is executed, and the client dies before it gets the reply

A read that loses its reply has changed nothing: it is unreachable. The watch does not notify: it calls `sleep`, which
advances (virtual) time, at most until then, and may return earlier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from ringfold.errors import StoreUnknown, StoreUnreachable
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
    total_of,
)

Reply = TypeVar("Reply")
Kind = Literal["found", "read", "write", "add", "increment", "scan"]
Fault = Literal["unreachable", "lost reply", "late", "crash", "crash after"]


class Crashed(BaseException):
    """The client's process died inside a call."""


@dataclass(frozen=True, slots=True)
class StoreCall:
    """The argument of a fault hook: the number of the call at this driver, its kind, and the key."""

    number: int
    kind: Kind
    key: str


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """A copy of a server's entries and generation."""

    entries: dict[str, Entry]
    generation: Generation | None
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class MemoryServer:
    """The store that drivers connect to. Every method is one atomic step."""

    entries: dict[str, Entry] = field(default_factory=dict)
    generation: Generation | None = None
    counters: dict[str, int] = field(default_factory=dict)

    def ensure_generation(self, nonce: str | None) -> Generation | None:
        if self.generation is None and nonce is not None:
            self.generation = Generation(nonce, 1)
        return self.generation

    def read(self, key: str) -> Read:
        return Read(self.entries.get(key), self.generation)

    def read_many(self, keys: Sequence[str]) -> Scanned:
        return Scanned({key: self.entries[key] for key in keys if key in self.entries}, self.generation)

    def write(self, write: Write, guard: Generation) -> Written:
        present = self.entries.get(write.key)
        if self.generation is None or not _fits(self.generation, guard) or not is_met(present, write.condition):
            return Written(False, present, self.generation)
        if write.value is None:
            self.counters.pop(write.key, None)
        if write.value is None and present is None:
            return Written(True, None, self.generation)
        self.generation = Generation(self.generation.id, self.generation.revision + 1)
        if write.value is None:
            del self.entries[write.key]
            return Written(True, None, self.generation, existed=True)
        entry = Entry(write.value, self.generation.revision, write.ttl_ms)
        self.entries[write.key] = entry
        return Written(True, entry, self.generation, existed=present is not None)

    def add(self, key: str, delta: int, guard: Generation) -> Added:
        total = total_of(self.entries.get(key), delta)
        if total is None:
            return Added(None, self.generation)
        written = self.write(Write(key, str(total).encode()), guard)
        return Added(total, written.generation)

    def increment(self, key: str, by: int, guard: Generation) -> Added:
        if self.generation is not None and _fits(self.generation, guard):
            self.counters[key] = self.counters.get(key, 0) + by
        return Added(self.counters.get(key, 0), self.generation)

    def scan(self, prefix: str) -> Scanned:
        found = {key: entry for key, entry in sorted(self.entries.items()) if key.startswith(prefix)}
        return Scanned(found, self.generation)

    def snapshot(self) -> StoreSnapshot:
        return StoreSnapshot(dict(self.entries), self.generation, dict(self.counters))

    def restore(self, snapshot: StoreSnapshot) -> None:
        self.entries, self.generation = dict(snapshot.entries), snapshot.generation
        self.counters = dict(snapshot.counters)

    def wipe(self) -> None:
        self.entries, self.generation, self.counters = {}, None, {}


def _fits(generation: Generation, guard: Generation) -> bool:
    return generation.id == guard.id and generation.revision >= guard.revision


class MemoryDriver:
    """One client's connection to a MemoryServer."""

    can_list = True
    has_leases = False
    counts_writes = True
    has_counters = True

    def __init__(
        self,
        server: MemoryServer,
        *,
        sleep: Callable[[float], None],
        fault: Callable[[StoreCall], Fault | None] = lambda call: None,
        name: str = "memory:",
    ) -> None:
        self.name = name
        self._server = server
        self._fault = fault
        self._sleep = sleep
        self._calls = 0
        self._late: list[Callable[[], object]] = []

    def ensure_generation(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        return self._arrive("found", "", lambda: self._server.ensure_generation(nonce), is_write=False)

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        return self._arrive("read", key, lambda: self._server.read(key), is_write=False)

    def read_many(self, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
        return self._arrive("read", keys[0], lambda: self._server.read_many(keys), is_write=False)

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        return self._arrive("write", write.key, lambda: self._server.write(write, guard), is_write=True)

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        return self._arrive("add", key, lambda: self._server.add(key, delta, guard), is_write=True)

    def increment(self, key: str, by: int, guard: Generation, deadline: Deadline) -> Added:
        return self._arrive("increment", key, lambda: self._server.increment(key, by, guard), is_write=by != 0)

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        return self._arrive("scan", prefix, lambda: self._server.scan(prefix), is_write=False)

    def renew(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        raise AssertionError("this store has no leases")

    def watch(self, key: str, deadline: Deadline) -> "InMemoryKeyWatch":
        return InMemoryKeyWatch(self._sleep)

    def close(self) -> None:
        self._late.clear()

    def deliver_late(self) -> int:
        """Deliver all late calls; returns how many."""
        late, self._late = self._late, []
        for call in late:
            call()
        return len(late)

    def _arrive(self, kind: Kind, key: str, call: Callable[[], Reply], *, is_write: bool) -> Reply:
        """Make a call, with the effects of its fault."""
        self._calls += 1
        fault = self._fault(StoreCall(self._calls, kind, key))
        if fault == "crash":
            raise Crashed(kind, key)
        if fault == "unreachable" or (fault in ("late", "lost reply") and not is_write):
            raise StoreUnreachable(self.name, f"the {kind} did not arrive")
        if fault == "late":
            self._late.append(call)
            raise StoreUnknown(self.name, f"the {kind} was sent, and there was no reply")
        reply = call()
        if fault == "crash after":
            raise Crashed(kind, key)
        if fault == "lost reply":
            raise StoreUnknown(self.name, f"the {kind} was sent, and there was no reply")
        assert fault is None, f"{fault!r} is not a fault"
        return reply


class InMemoryKeyWatch:
    """Sleeps instead of waiting."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep

    def wait(self, read: Read, timeout_s: float) -> None:
        self._sleep(timeout_s)

    def close(self) -> None:
        pass


if TYPE_CHECKING:
    from ringfold.store.base import Driver

    _: type[Driver] = MemoryDriver
