"""What the core asks of a store, and what it gets for an answer. Pure.

A step of the protocol is a generator: it yields an operation, and is sent an `Answer`, which carries the observer's
monotonic clock. A store that did not answer is an outcome like any other: `StoreUnreachable` (nothing was done) and
`StoreUnknown` (done, or not, or still to be) are sent as values. Everything else that a store raises is thrown into the
generator, and ends it; whoever drives it does that.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from ringfold.errors import RingfoldError, StoreUnknown, StoreUnreachable
from ringfold.store.base import Entry, Lost, Won
from ringfold.units import S

Ns = int
NS = S
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Get:
    """Answered with the entry, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class ListKeys:
    """Answered with all entries below the prefix."""

    prefix: str


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Answered with Won or Lost. What is not `lasting` is worth nothing to anybody but those who are alive now."""

    key: str
    expected: Entry | None
    value: bytes
    lasting: bool = True


@dataclass(frozen=True, slots=True)
class Delete:
    """Answered with None. Without `expected`, whatever is there is removed."""

    key: str
    expected: Entry | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """Show that one is alive: hold the key for `ttl_s` by a lease, or, where there are none, write it anew.

    Answered with None.
    """

    key: str
    value: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Answered with the entry as soon as its version is not `seen`, or else after `timeout_s`."""

    key: str
    seen: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Answered with None, after so long."""

    seconds: float


Operation = Get | ListKeys | CompareAndSet | Delete | Beat | WaitFor | Pause
Outcome = Entry | dict[str, Entry] | Won | Lost | RingfoldError | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an operation, and what the observer's clock shows now."""

    now_ns: Ns
    outcome: Outcome


Steps = Generator[Operation, Answer, Value]


def sent(course: Steps[Value], answer: Answer) -> Operation:
    """Hand an answer to a generator that waits for it, in the way that it expects; returns what it asks for next."""
    error = answer.outcome
    if isinstance(error, RingfoldError) and not isinstance(error, StoreUnknown | StoreUnreachable):
        return course.throw(error)
    return course.send(answer)
