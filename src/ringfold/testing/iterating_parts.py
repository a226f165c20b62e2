"""The parts of a simulated global iteration: a story, what may happen in it, and the lives of its ranks."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ringfold.iteration.model import Begun, Timing
from ringfold.iteration.operations import Answer, Operation, Steps, sent
from ringfold.iteration.record import Rules
from ringfold.store.client import StoreClient
from ringfold.store.memory import Fault, MemoryDriver

PREFIX = "run"
TIMING = Timing(heartbeat_s=1.0, inactive_after_s=6.0)
SETTLED = 3
"""So many iterations everybody must be handed once the faults have stopped."""

Kind = Literal["crash", "pause", "cut", "twin", "leave", "jump", "outage", "wipe", "restore"]
Moment = Literal["crash", "crash after"]


class Agreeing(Protocol):
    """A protocol for the global iteration, as the simulation drives it."""

    def next(self, now_ns: int, timeout_s: float) -> Steps[Begun]: ...

    def pulse(self) -> Steps[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that happens to ranks, or to the store, at an instant."""

    kind: Kind
    at_ms: int
    ranks: tuple[int, ...] = ()
    for_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One schedule: everything that is not drawn on the way."""

    seed: int
    rules: Rules
    can_list: bool = True
    has_leases: bool = False
    troubles: tuple[Trouble, ...] = ()
    crash_at: tuple[int, int, Moment] | None = None
    """A rank, the number of one of its store operations, and when in it the life ends."""
    losses: float = 0.0
    """The share of operations to which something happens, until the faults stop."""
    quiet_ms: int = 0
    """When the faults stop."""
    stay_dead: tuple[int, ...] = ()
    slow: float = 0.05
    """The share of trainings that take longer than it takes to be given up."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a schedule came to."""

    iterations: int
    lives: int
    operations: int
    virtual_ms: float
    troubles: tuple[str, ...]


Course = Generator[Operation, Answer, None]


@dataclass(eq=False, slots=True)
class Fiber:
    """One of the two sequences of steps of a life."""

    course: Course
    has_begun: bool = False
    is_running: bool = False

    def send(self, answer: Answer) -> Operation:
        """Hand over what became of the last operation; returns the next."""
        self.is_running = True
        try:
            if not self.has_begun:
                self.has_begun = True
                return next(self.course)
            return sent(self.course, answer)
        finally:
            self.is_running = False

    def close(self) -> None:
        if not self.is_running:
            self.course.close()


@dataclass(eq=False, slots=True)
class Life:
    """One process of one rank."""

    rank: int
    incarnation: str
    born_ns: int
    agreeing: Agreeing | None = None
    client: StoreClient | None = None
    driver: MemoryDriver | None = None
    history: int = -1
    jump_ns: int = 0
    log: list[int] = field(default_factory=list)
    finished: int = -1
    is_up: bool = True
    is_paused: bool = False
    is_cut: bool = False
    is_leaving: bool = False
    is_troubled: bool = False
    """Whether anything ever happened to it for which the others may give it up."""
    fault: Fault | None = None
    fibers: list[Fiber] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.incarnation}"
