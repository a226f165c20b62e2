"""A store in memory, for tests and simulations: one server, many clients, and a fault at any call. Pure.

`MemoryServer` is the store: what it holds, its revision and its generation. It can be emptied (`wipe`), copied
(`snapshot`) and put back (`restore`), like a real one that lost its disk or was restored from a backup.

`MemoryDriver` is one client's connection. Before each call it asks its `fault` hook what happens to it:

    None           the call is made
    "unreachable"  it does not arrive; nothing is changed
    "lost reply"   it arrives and is carried out, and the answer is lost
    "late"         it is lost for now, and arrives when `deliver_late` is called: a write whose fate is open
    "crash"        it does not arrive, and the client dies: `Crashed` is raised, which no `except Exception` catches
    "crash after"  it arrives and is carried out, and the client dies before it learns that

A read that loses its answer has changed nothing: it is unreachable. The bell does not ring: it calls `sleep`, which
lets (virtual) time pass, at most until then, and may come back earlier.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from ringfold.errors import StoreUnknown, StoreUnreachable
from ringfold.store.base import (
    Added,
    AnyVersion,
    Condition,
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

Reply = TypeVar("Reply")
Kind = Literal["found", "read", "write", "add", "scan"]
Fault = Literal["unreachable", "lost reply", "late", "crash", "crash after"]


class Crashed(BaseException):
    """The client's process died inside a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a fault hook is asked about: the number of the call at this driver, what it does, and to which key."""

    number: int
    kind: Kind
    key: str


def holds(present: Entry | None, condition: Condition) -> bool:
    """Whether what a key holds meets a write's condition."""
    if isinstance(condition, AnyVersion):
        return True
    return version_of(present) == version_of(condition)


@dataclass(frozen=True, slots=True)
class Snapshot:
    entries: dict[str, Entry]
    stamp: Generation | None


@dataclass(slots=True)
class MemoryServer:
    """The store that drivers talk to. Every method is one atomic step."""

    entries: dict[str, Entry] = field(default_factory=dict)
    stamp: Generation | None = None

    def found(self, nonce: str | None) -> Generation | None:
        if self.stamp is None and nonce is not None:
            self.stamp = Generation(nonce, 1)
        return self.stamp

    def read(self, key: str) -> Read:
        return Read(self.entries.get(key), self.stamp)

    def write(self, write: Write, guard: Generation) -> Written:
        present = self.entries.get(write.key)
        if self.stamp is None or not _fits(self.stamp, guard) or not holds(present, write.condition):
            return Written(False, present, self.stamp)
        if write.value is None and present is None:
            return Written(True, None, self.stamp)
        self.stamp = Generation(self.stamp.id, self.stamp.revision + 1)
        if write.value is None:
            del self.entries[write.key]
            return Written(True, None, self.stamp, was_there=True)
        entry = Entry(write.value, self.stamp.revision, write.ttl_ms)
        self.entries[write.key] = entry
        return Written(True, entry, self.stamp, was_there=present is not None)

    def add(self, key: str, delta: int, guard: Generation) -> Added:
        total = total_of(self.entries.get(key), delta)
        if total is None:
            return Added(None, self.stamp)
        written = self.write(Write(key, str(total).encode()), guard)
        return Added(total, written.stamp)

    def scan(self, prefix: str) -> Scanned:
        found = {key: entry for key, entry in sorted(self.entries.items()) if key.startswith(prefix)}
        return Scanned(found, self.stamp)

    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self.entries), self.stamp)

    def restore(self, snapshot: Snapshot) -> None:
        self.entries, self.stamp = dict(snapshot.entries), snapshot.stamp

    def wipe(self) -> None:
        self.entries, self.stamp = {}, None


def _fits(stamp: Generation, guard: Generation) -> bool:
    return stamp.id == guard.id and stamp.revision >= guard.revision


class MemoryDriver:
    """One client's connection to a MemoryServer."""

    can_list = True
    has_leases = False

    def __init__(
        self,
        server: MemoryServer,
        *,
        sleep: Callable[[float], None],
        fault: Callable[[Call], Fault | None] = lambda call: None,
        name: str = "memory:",
    ) -> None:
        self.name, self._server, self._fault, self._sleep = name, server, fault, sleep
        self._calls = 0
        self._late: list[Callable[[], object]] = []

    def found(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        return self._arrive("found", "", lambda: self._server.found(nonce), is_write=False)

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        return self._arrive("read", key, lambda: self._server.read(key), is_write=False)

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        return self._arrive("write", write.key, lambda: self._server.write(write, guard), is_write=True)

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        return self._arrive("add", key, lambda: self._server.add(key, delta, guard), is_write=True)

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        return self._arrive("scan", prefix, lambda: self._server.scan(prefix), is_write=False)

    def keep(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        raise AssertionError("a store without leases was asked to keep one")

    def listen(self, key: str, deadline: Deadline) -> "MemoryBell":
        return MemoryBell(self._sleep)

    def close(self) -> None:
        self._late.clear()

    def deliver_late(self) -> int:
        """Let everything arrive that was late; returns how much that was."""
        late, self._late = self._late, []
        for call in late:
            call()
        return len(late)

    def _arrive(self, kind: Kind, key: str, call: Callable[[], Reply], *, is_write: bool) -> Reply:
        """Make a call, or what its fault leaves of it."""
        self._calls += 1
        fault = self._fault(Call(self._calls, kind, key))
        if fault == "crash":
            raise Crashed(kind, key)
        if fault == "unreachable" or (fault in ("late", "lost reply") and not is_write):
            raise StoreUnreachable(self.name, f"the {kind} did not arrive")
        if fault == "late":
            self._late.append(call)
            raise StoreUnknown(self.name, f"the {kind} was sent, and no answer came")
        reply = call()
        if fault == "crash after":
            raise Crashed(kind, key)
        if fault == "lost reply":
            raise StoreUnknown(self.name, f"the {kind} was sent, and no answer came")
        assert fault is None, f"{fault!r} is no fault"
        return reply


class MemoryBell:
    """Lets the time pass that one would wait."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep

    def wait(self, read: Read, timeout_s: float) -> None:
        self._sleep(timeout_s)

    def close(self) -> None:
        pass


if TYPE_CHECKING:
    from ringfold.store.base import Driver

    _: type[Driver] = MemoryDriver
