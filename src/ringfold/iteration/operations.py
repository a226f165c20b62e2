"""What the protocol requests of a store, the replies, and one call of a program that is made of many requests. Pure.

A step of the protocol is a generator: it yields an operation, and is sent a reply, which carries the observer's
monotonic clock. A store that did not respond is an outcome like any other: `StoreUnreachable` (nothing was done) and
`StoreUnknown` (it was done, was not, or will be) are sent as values. Every other error of a store is thrown into the
generator, and ends it.
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

_FIRST_PAUSE_S = 0.02
_MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Get:
    """The outcome is the entry, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class GetMany:
    """The outcome is the entries of those keys that have one. They need not be of the same instant."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListKeys:
    """The outcome is all entries below the prefix."""

    prefix: str


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """The outcome is Won or Lost. A value that is not `lasting` matters only to the processes that run now."""

    key: str
    expected: Entry | None
    value: bytes
    lasting: bool = True


@dataclass(frozen=True, slots=True)
class Increment:
    """Add to an atomic counter; `by` 0 reads it. The outcome is the sum."""

    key: str
    by: int = 1


@dataclass(frozen=True, slots=True)
class Delete:
    """The outcome is None. Without `expected`, the key is removed unconditionally, and so is its counter."""

    key: str
    expected: Entry | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Show that this incarnation is alive: hold the key for `ttl_s` by a lease, or, without leases, write it again.

    The outcome is None.
    """

    key: str
    value: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The outcome is the entry as soon as its version is not `seen`, or else after `timeout_s`."""

    key: str
    seen: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """The outcome is None, after this time."""

    seconds: float


Operation = Get | GetMany | ListKeys | CompareAndSet | Increment | Delete | Heartbeat | WaitFor | Pause
StoreOutcome = Entry | dict[str, Entry] | Won | Lost | int | RingfoldError | None


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The outcome of an operation, and the observer's clock now."""

    now_ns: Ns
    outcome: StoreOutcome


Steps = Generator[Operation, StoreReply, Value]


def send_reply(steps: Steps[Value], reply: StoreReply) -> Operation:
    """Resume steps with a reply: errors that steps do not handle are thrown. Returns the next operation."""
    error = reply.outcome
    if isinstance(error, RingfoldError) and not isinstance(error, StoreUnknown | StoreUnreachable):
        return steps.throw(error)
    return steps.send(reply)


@dataclass(slots=True)
class ProgramCall:
    """One call of the program: its deadline, and the backoff while the store does not respond."""

    operation: str
    began_ns: Ns
    deadline_ns: Ns
    now_ns: Ns
    pause_s: float = _FIRST_PAUSE_S

    @classmethod
    def of(cls, operation: str, now_ns: Ns, timeout_s: float) -> "ProgramCall":
        return cls(operation, now_ns, now_ns + round(timeout_s * NS), now_ns)

    @property
    def is_over(self) -> bool:
        return self.now_ns >= self.deadline_ns

    @property
    def left_s(self) -> float:
        return max(0.0, (self.deadline_ns - self.now_ns) / NS)

    @property
    def waited_ms(self) -> int:
        return (self.now_ns - self.began_ns) // 1_000_000

    def execute(self, operation: Operation) -> Steps[StoreOutcome]:
        """The outcome of an operation. It is retried as long as nothing was done, until the deadline."""
        while True:
            reply = yield operation
            self.now_ns = reply.now_ns
            if not isinstance(reply.outcome, StoreUnreachable):
                self.pause_s = _FIRST_PAUSE_S
                return reply.outcome
            yield from self.wait_for_store(reply)

    def get(self, key: str) -> Steps[Entry | None]:
        outcome = yield from self.execute(Get(key))
        assert outcome is None or isinstance(outcome, Entry), "the outcome of a read is not an entry"
        return outcome

    def wait_for_store(self, reply: StoreReply) -> Steps[None]:
        """Wait before the next try at a store that did not respond; at the deadline raises StoreUnreachable."""
        self.now_ns = reply.now_ns
        error = reply.outcome
        assert isinstance(error, StoreUnknown | StoreUnreachable), "the store did respond"
        if self.is_over:
            # Every write here is read again before anything depends on it: its outcome need not be known.
            raise StoreUnreachable(error.store, error.text)
        paused = yield Pause(min(self.pause_s, self.left_s))
        self.now_ns = paused.now_ns
        self.pause_s = min(2 * self.pause_s, _MAX_PAUSE_S)
