"""One call of a program, made of many store operations: its deadline, and its patience with the store. Pure."""

from dataclasses import dataclass

from ringfold.errors import StoreUnknown, StoreUnreachable
from ringfold.iteration.operations import NS, Answer, Get, Ns, Operation, Outcome, Pause, Steps
from ringfold.store.base import Entry

_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 1.0


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
