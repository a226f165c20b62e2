"""The words of the room, the interface that everybody uses, and the smaller one that a backend fills in.

*Version.* Every write of a key gives it a version: a positive number that no other write of that key ever had or will
have, also after the key was deleted and made again, and that grows. 0 stands for "absent". So a version says which
write one has seen, and a compare-and-set against it cannot be fooled by a value that went away and came back.

*Generation.* The first client of a namespace writes a random id into it, once. That id, with the highest revision
(a number that grows with every write, to any key) that a client has seen, is what the client holds against every
answer: another id or none means that the store was emptied, a lower revision means that it came back from an old
snapshot. Both are refused, and a write is refused *by the store*, in the same atomic step that would have made it.

*Lease.* A key that goes away unless its holder renews it. To everybody else it looks like any other key. A store with
leases of its own ends them by its own clock. For the others each client ends them for itself: see `leases.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ringfold.errors import StoreUnreachable

ABSENT = 0
"""The version of a key that is not there."""

KEY_LIMIT = 512
VALUE_LIMIT = 1 << 20
"""Longest key, in bytes of UTF-8, and largest value: what every backend takes without being configured for it."""

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What a key holds. `ttl_ms` is the time to live of a lease, where the store tells; 0 for other keys."""

    value: bytes
    version: int
    ttl_ms: int = 0


def version_of(entry: Entry | None) -> int:
    return ABSENT if entry is None else entry.version


@dataclass(frozen=True, slots=True)
class Won:
    """The compare-and-set was made; `entry` is what the key holds because of it."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was changed, because the key holds `present` (None: nothing) and not what was expected."""

    present: Entry | None


@dataclass(frozen=True, slots=True)
class Generation:
    """Which store this is, and how far it had come. Compare the id; the revision only ever grows."""

    id: str
    revision: int


class Lease(Protocol):
    """A key that is held. It is lost by not being renewed for `ttl_s`; `fence` is higher than any earlier holder's."""

    @property
    def key(self) -> str: ...

    @property
    def ttl_s(self) -> float: ...

    @property
    def fence(self) -> int: ...

    def left_s(self) -> float:
        """For how long the lease is certainly still held, as far as is known here; 0 when it may be lost."""

    def renew(self, timeout_s: float | None = None) -> None:
        """Hold it for another `ttl_s`. Raises LeaseLost for good, or StoreUnreachable while there is time to retry."""

    def release(self, timeout_s: float | None = None) -> None:
        """Give the key up, if it is still held. A lease that cannot be given up now ends by itself."""


class Store(Protocol):
    """A key-value store with compare-and-set. Every method may be called from any thread, and has a deadline.

    `timeout_s` is how long a call may take altogether; None takes the store's own. A read is repeated until then. A
    write is repeated as long as it certainly was not made (StoreUnreachable); once its fate is open it raises
    StoreUnknown at once.

    What is not `lasting` means nothing after all processes that have seen it are gone: a sign of life, an arrival. It
    survives whoever is killed, but a store that lives on one machine with all its clients may lose it with the machine.
    A lasting write makes those before it last.
    """

    @property
    def can_list(self) -> bool:
        """Whether `list` works."""

    @property
    def has_leases(self) -> bool:
        """Whether the store itself ends leases. Otherwise each observer does, after watching for the whole time."""

    @property
    def generation(self) -> Generation:
        """Which store this is, with the highest revision seen here. Keep it, and hand it to `open_store` as `known`."""

    def get(self, key: str, timeout_s: float | None = None) -> Entry | None: ...

    def set(self, key: str, value: bytes, timeout_s: float | None = None, *, lasting: bool = True) -> Entry:
        """Write whatever was there before."""

    def compare_and_set(
        self, key: str, expected: Entry | None, value: bytes, timeout_s: float | None = None, *, lasting: bool = True
    ) -> Won | Lost:
        """Write only if the key still holds the write that `expected` is (None: if it is absent)."""

    def add(self, key: str, delta: int = 1, timeout_s: float | None = None) -> int:
        """Add to a counter, which is a decimal number as text, and return the sum. An absent key counts as 0."""

    def delete(self, key: str, expected: Entry | None = None, timeout_s: float | None = None) -> bool:
        """Remove the key; with `expected`, only if it still holds that write. Returns whether something was removed."""

    def list(self, prefix: str = "", timeout_s: float | None = None) -> dict[str, Entry]:
        """All keys that begin with `prefix`, in order, as they were at one instant. See `can_list`."""

    def wait(self, key: str, seen: int, timeout_s: float | None = None) -> Entry | None:
        """What the key holds, as soon as its version is not `seen` (0: absent), or else at the deadline.

        A version that is still `seen` means that time is up. Of several changes in a row the last may be all one sees.
        """

    def lease(self, key: str, value: bytes, ttl_s: float, timeout_s: float | None = None) -> Lease | None:
        """Take the key if it is absent, and hold it; None if it is there.

        `value` names the holder: no two holders may use the same one.
        """

    def close(self) -> None:
        """Let go of connections and files. Leases are not released: they end by themselves."""


class Deadline:
    """An instant on the monotonic clock until which a call may take."""

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
    """No condition on what a key holds."""


ANY = AnyVersion()
Condition = Entry | AnyVersion | None
"""What a write demands of the key: to hold exactly this write, anything, or (None) to be absent."""


@dataclass(frozen=True, slots=True)
class Write:
    """One atomic change. A `value` of None deletes; `ttl_ms` puts the key under a lease; for `lasting` see `Store`."""

    key: str
    value: bytes | None
    condition: Condition = ANY
    ttl_ms: int = 0
    lasting: bool = True


@dataclass(frozen=True, slots=True)
class Read:
    """The answer to reading one key. `stamp` is what the store said of itself in the same atomic step; None: gone."""

    entry: Entry | None
    stamp: Generation | None


@dataclass(frozen=True, slots=True)
class Scanned:
    entries: dict[str, Entry]
    stamp: Generation | None


@dataclass(frozen=True, slots=True)
class Written:
    """Whether the change was made. `entry` is what the key holds now, `was_there` whether it held something before."""

    is_made: bool
    entry: Entry | None
    stamp: Generation | None
    was_there: bool = False


@dataclass(frozen=True, slots=True)
class Added:
    """The sum; None when the key holds something that is no number."""

    total: int | None
    stamp: Generation | None


class Bell(Protocol):
    """Rings, more or less reliably, when a key changes."""

    def wait(self, read: Read, timeout_s: float) -> None:
        """Return when the key has changed since `read`, at the latest after `timeout_s`, and sooner as one likes.

        It may return for no reason. It must not sleep through a change for longer than the backend's slow poll. Raises
        StoreUnreachable when it will never ring again.
        """

    def close(self) -> None: ...


class Driver(Protocol):
    """What a backend does; `client.py` makes a `Store` of it.

    Keys come complete, with the namespace. `guard` is what the client knows of the store: a change to a store that does
    not fit it must not be made (where the store can check it), and the answer's stamp tells. Raises StoreUnreachable
    if nothing was changed, StoreUnknown if perhaps something was.
    """

    @property
    def name(self) -> str: ...

    @property
    def can_list(self) -> bool: ...

    @property
    def has_leases(self) -> bool: ...

    def found(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        """The stamp of the store. With a nonce, a store that has no generation gets this one."""

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read: ...

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written: ...

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added: ...

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned: ...

    def keep(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        """Renew the store's own lease on a key. Only called where `has_leases`."""

    def listen(self, key: str, deadline: Deadline) -> Bell:
        """A bell that hears every change from now on."""

    def close(self) -> None: ...


# Counters: decimal numbers as text, the same in every backend

_DIGITS = 15
"""Fewer than 2**53, so that a Lua number holds every counter exactly."""


def total_of(present: Entry | None, delta: int) -> int | None:
    """The sum that a counter comes to; None when the key holds no number that we wrote."""
    text = b"0" if present is None else present.value
    digits = text.removeprefix(b"-")
    return int(text) + delta if digits.isdigit() and len(digits) <= _DIGITS else None


def add_by_writing(driver: Driver, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
    """Add where the store cannot: read, and write on condition that nobody else did, until that succeeds."""
    while True:
        read = driver.read(key, guard, deadline)
        total = total_of(read.entry, delta)
        if total is None or read.stamp is None or read.stamp.id != guard.id:
            return Added(total, read.stamp)
        written = driver.write(Write(key, str(total).encode(), read.entry), guard, deadline)
        if written.is_made:
            return Added(total, written.stamp)
        if deadline.is_over():
            raise StoreUnreachable(driver.name, f"others changed {key!r} for {deadline.timeout_s:g} s")
