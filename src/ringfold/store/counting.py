"""Counters: decimal numbers as text, the same in every backend."""

from ringfold.errors import StoreUnreachable
from ringfold.store.base import Added, Deadline, Driver, Entry, Generation, Write

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
