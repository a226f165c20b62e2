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

Ns = int
NS = 1_000_000_000
Value = TypeVar("Value")

_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 1.0


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


@dataclass(slots=True)
class Call:
    """What was called, since when, until when it may take, and how long to give the store when it does not answer."""

    operation: str
    began_ns: Ns
    until_ns: Ns
    now_ns: Ns
    pause_s: float = _FIRST_PAUSE_S

    @classmethod
    def of(cls, operation: str, now_ns: Ns, timeout_s: float) -> "Call":
        return cls(operation, now_ns, now_ns + round(timeout_s * NS), now_ns)

    @property
    def is_over(self) -> bool:
        return self.now_ns >= self.until_ns

    @property
    def left_s(self) -> float:
        return max(0.0, (self.until_ns - self.now_ns) / NS)

    @property
    def waited_ms(self) -> int:
        return (self.now_ns - self.began_ns) // 1_000_000

    def ask(self, operation: Operation) -> Steps[Outcome]:
        """The outcome of an operation. It is repeated as long as nothing was done, until the deadline."""
        while True:
            answer = yield operation
            self.now_ns = answer.now_ns
            if not isinstance(answer.outcome, StoreUnreachable):
                self.pause_s = _FIRST_PAUSE_S
                return answer.outcome
            yield from self.wait_for_store(answer)

    def get(self, key: str) -> Steps[Entry | None]:
        outcome = yield from self.ask(Get(key))
        assert outcome is None or isinstance(outcome, Entry), "a read was answered with something else"
        return outcome

    def wait_for_store(self, answer: Answer) -> Steps[None]:
        """Give a store that did not answer some time; raises what it said when there is none left."""
        self.now_ns, error = answer.now_ns, answer.outcome
        assert isinstance(error, StoreUnknown | StoreUnreachable), "the store did answer"
        if self.is_over:
            # Whatever is written here is looked at again before anything is built on it: nothing is left open.
            raise StoreUnreachable(error.store, error.text)
        paused = yield Pause(min(self.pause_s, self.left_s))
        self.now_ns, self.pause_s = paused.now_ns, min(2 * self.pause_s, _LAST_PAUSE_S)
