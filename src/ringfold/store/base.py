"""The terms, the interface for callers (`Store`), and the smaller one that a backend implements (`Driver`).

*Version.* Every write of a key gives it a version: a positive number that grows, and that no other write of that key
ever has, also after the key was deleted and created again. 0 stands for "absent". So a version identifies a write, and
a compare-and-set against it has no ABA problem.

*Generation.* The first client of a namespace writes a random id into it, once. Clients compare every response with that
id, and with the highest revision that they have seen (a number that grows with every write, to any key). Another id or
none means that the store was emptied, a lower revision means that it was restored from an old snapshot. Both are
refused, and a write is refused *by the store*, in the same atomic step that would have made it.

*Lease.* A key that expires unless its holder renews it. For all others it is a key like any other. A store with leases
of its own expires them by its own clock. For the others each client does it: see `client.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringfold.errors import StoreUnreachable
from ringfold.units import S

ABSENT = 0
"""The version of an absent key."""

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1 << 20
"""What every backend accepts in its default configuration. Keys are counted in UTF-8."""

NS = S


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key, and its version. `ttl_ms` is the time to live of a lease, if known; 0 for other keys."""

    value: bytes
    version: int
    ttl_ms: int = 0


def version_of(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version


@dataclass(frozen=True, slots=True)
class Won:
    """The compare-and-set was made; `entry` is the new entry of the key."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was changed: the entry of the key is `present` (None: absent), and not the expected one."""

    present: Entry | None


@dataclass(frozen=True, slots=True)
class Generation:
    """Which store this is, and its revision. The id must be equal; the revision only grows."""

    id: str
    revision: int


class Lease(Protocol):
    """A key that is held. It is lost if it is not renewed for `ttl_s`; `fence` is higher than any earlier holder's."""

    @property
    def key(self) -> str: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def fence(self) -> int: ...

    def left_s(self) -> float:
        """How long the lease is certainly still held; 0 if it may be lost."""

    def renew(self, timeout_s: float | None = None) -> None:
        """Hold it for another `ttl_s`. Raises LeaseLost (final), or StoreUnreachable while there is time to retry."""

    def release(self, timeout_s: float | None = None) -> None:
        """Delete the key, if it is still held. A lease that cannot be released now expires."""


class Store(Protocol):
    """A key-value store with compare-and-set. Every method may be called from any thread, and has a deadline.

    `timeout_s` is how long a call may take in total; None is the store's default. A read is retried until then. A write
    is retried as long as it certainly was not made (StoreUnreachable); if its outcome is unknown it raises StoreUnknown
    at once.

    A write that is not `lasting` matters only to processes that run now: a heartbeat, an arrival. It survives the death
    of any process, but a store that is on one machine with all its clients may lose it with the machine. A lasting
    write also flushes those before it.
    """

    @property
    def can_list(self) -> bool:
        """Whether `list` works."""

    @property
    def has_leases(self) -> bool:
        """Whether the store itself expires leases. Otherwise each client does, after observing one for its TTL."""

    @property
    def counts_writes(self) -> bool:
        """Whether versions count writes: between two entries with versions a < b there were at most b - a writes to the
        namespace, the second one included, whatever their keys."""

    @property
    def has_counters(self) -> bool:
        """Whether `increment` works."""

    @property
    def generation(self) -> Generation:
        """Which store this is, with the highest revision seen here. Pass it to `open_store` as `known` later."""

    def get(self, key: str, timeout_s: float | None = None) -> Entry | None: ...

    def get_many(self, keys: Sequence[str], timeout_s: float | None = None) -> dict[str, Entry]:
        """The entries of those keys that have one. It is not a snapshot: a write in between may be seen or not."""

    def set(self, key: str, value: bytes, timeout_s: float | None = None, *, lasting: bool = True) -> Entry:
        """Write unconditionally."""

    def compare_and_set(
        self, key: str, expected: Entry | None, value: bytes, timeout_s: float | None = None, *, lasting: bool = True
    ) -> Won | Lost:
        """Write only if the entry of the key is still `expected` (None: if it is absent)."""

    def add(self, key: str, delta: int = 1, timeout_s: float | None = None) -> int:
        """Add to a counter, which is a decimal number as text, and return the sum. An absent key counts as 0."""

    def increment(self, key: str, by: int = 1, timeout_s: float | None = None) -> int:
        """Increment an atomic counter, and return its value: in one request, however many clients do it at the same
        time. It begins at 0, and `by` 0 reads it. See `has_counters`.

        A counter is not an entry: it has no version, and `get`, `list` and `wait` do not see it. `delete` removes it.
        """

    def delete(self, key: str, expected: Entry | None = None, timeout_s: float | None = None) -> bool:
        """Remove the key; with `expected`, only if that is still its entry. Returns whether something was removed."""

    def list(self, prefix: str = "", timeout_s: float | None = None) -> dict[str, Entry]:
        """All keys with this `prefix`, in order, as an atomic snapshot. See `can_list`."""

    def wait(self, key: str, seen: int, timeout_s: float | None = None) -> Entry | None:
        """The entry of the key, as soon as its version is not `seen` (0: absent), or else at the deadline.

        A version that is still `seen` means a timeout. Of several changes in a row perhaps only the last is seen.
        """

    def lease(self, key: str, value: bytes, ttl_s: float, timeout_s: float | None = None) -> Lease | None:
        """Create the key if it is absent, and hold it; None if it exists.

        `value` identifies the holder: no two holders may use the same one.
        """

    def close(self) -> None:
        """Close connections and files. Leases are not released: they expire."""


class Deadline:
    """The deadline of a call, on the monotonic clock."""

    def __init__(self, now_ns: Callable[[], int], timeout_s: float) -> None:
        self._now_ns = now_ns
        self.timeout_s = timeout_s
        self.at_ns = now_ns() + round(timeout_s * NS)

    def left_s(self) -> float:
        """Never negative."""
        return max(0.0, (self.at_ns - self._now_ns()) / NS)

    def is_over(self) -> bool:
        return self._now_ns() >= self.at_ns


class AnyVersion:
    """No condition on the entry of a key."""


ANY = AnyVersion()
Condition = Entry | AnyVersion | None
"""The condition of a write: the key has exactly this entry, any, or (None) is absent."""


def is_met(present: Entry | None, condition: Condition) -> bool:
    """Whether the entry of a key meets a write's condition. Version and value: a store that was restored from an old
    snapshot uses the numbers after it again."""
    if isinstance(condition, AnyVersion):
        return True
    if present is None or condition is None:
        return present is condition
    return (present.version, present.value) == (condition.version, condition.value)


@dataclass(frozen=True, slots=True)
class Write:
    """One atomic change. A `value` of None deletes; `ttl_ms` makes the key a lease; for `lasting` see `Store`."""

    key: str
    value: bytes | None
    condition: Condition = ANY
    ttl_ms: int = 0
    lasting: bool = True


@dataclass(frozen=True, slots=True)
class Read:
    """The result of reading one key. `generation` is read in the same atomic step; None: the store was emptied."""

    entry: Entry | None
    generation: Generation | None


@dataclass(frozen=True, slots=True)
class Scanned:
    """The result of listing a prefix."""

    entries: dict[str, Entry]
    generation: Generation | None


@dataclass(frozen=True, slots=True)
class Written:
    """Whether the change was made. `entry` is the entry of the key now, `existed` whether it had one before."""

    was_applied: bool
    entry: Entry | None
    generation: Generation | None
    existed: bool = False


@dataclass(frozen=True, slots=True)
class Added:
    """The sum; None if the value of the key is not a number."""

    total: int | None
    generation: Generation | None


class KeyWatch(Protocol):
    """Notifies, more or less reliably, when a key changes."""

    def wait(self, read: Read, timeout_s: float) -> None:
        """Return when the key has changed since `read`, at the latest after `timeout_s`.

        It may return early without a change. It must not miss a change for longer than the backend's slow poll. Raises
        StoreUnreachable if it is broken for good.
        """

    def close(self) -> None: ...


class Driver(Protocol):
    """What a backend implements; `client.py` makes a `Store` of it.

    Keys are complete, with the namespace. `guard` is the generation that the client knows: a store that does not match
    it must not be changed (if the store can check it); the client compares it with the response. Raises
    StoreUnreachable if nothing was changed, StoreUnknown if perhaps something was.
    """

    @property
    def name(self) -> str: ...

    @property
    def can_list(self) -> bool: ...

    @property
    def has_leases(self) -> bool: ...

    @property
    def counts_writes(self) -> bool:
        """Whether each write of the namespace gets a version of its own, higher than those of all writes before it."""

    @property
    def has_counters(self) -> bool: ...

    def ensure_generation(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        """The generation of the store. With a nonce, a store that has none gets this one."""

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read: ...

    def read_many(self, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
        """Read one key or more: those that have an entry."""

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written: ...

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added: ...

    def increment(self, key: str, by: int, guard: Generation, deadline: Deadline) -> Added:
        """Add to an atomic counter. Only called where `has_counters`."""

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned: ...

    def renew(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        """Renew the store's own lease on a key. Only called where `has_leases`."""

    def watch(self, key: str, deadline: Deadline) -> KeyWatch:
        """A watch that sees every change from now on."""

    def close(self) -> None: ...


def read_each(driver: Driver, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
    """Read keys one by one, where the store can list and reading many is rare."""
    found: dict[str, Entry] = {}
    for key in keys:
        read = driver.read(key, guard, deadline)
        if read.generation is None or read.generation.id != guard.id:
            break
        if read.entry is not None:
            found[key] = read.entry
    return Scanned(found, read.generation)


# Counters: decimal numbers as text, the same in every backend

_MAX_DIGITS = 15
"""Below 2**53, so that a Lua number is exact for every counter."""


def total_of(present: Entry | None, delta: int) -> int | None:
    """The sum of a counter and `delta`; None if the value is not a counter."""
    text = b"0" if present is None else present.value
    digits = text.removeprefix(b"-")
    return int(text) + delta if digits.isdigit() and len(digits) <= _MAX_DIGITS else None


def add_by_writing(driver: Driver, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
    """Add by compare-and-set, where the store has no counters: retry until it succeeds."""
    while True:
        read = driver.read(key, guard, deadline)
        total = total_of(read.entry, delta)
        if total is None or read.generation is None or read.generation.id != guard.id:
            return Added(total, read.generation)
        written = driver.write(Write(key, str(total).encode(), read.entry), guard, deadline)
        if written.was_applied:
            return Added(total, written.generation)
        if deadline.is_over():
            raise StoreUnreachable(driver.name, f"other clients changed {key!r} for {deadline.timeout_s:g} s")
