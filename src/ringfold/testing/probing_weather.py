"""What simulated nodes cannot choose: how their clocks run, how messages travel, and when something bad happens."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ringfold.probe.rounds.events import FromRoundMaster


@dataclass(slots=True)
class Clock:
    """C(t) = offset + (1 + drift) t, with jumps."""

    offset_ns: int
    drift: float
    jumps: list[int] = field(default_factory=list)
    """When it jumped, in true time."""

    def read(self, now_ns: int) -> int:
        return now_ns + self.offset_ns + int(now_ns * self.drift)

    def when(self, now_ns: int, clock_ns: int) -> int:
        """The true time at which it will show `clock_ns`, if it does not jump."""
        return now_ns + int((clock_ns - self.read(now_ns)) / (1 + self.drift)) + 1

    def jump(self, now_ns: int, by_ns: int) -> None:
        self.offset_ns += by_ns
        self.jumps.append(now_ns)


@dataclass(slots=True)
class Messages:
    """How messages travel at the moment."""

    latency_us: tuple[int, int] = (50, 2_000)
    repeats: float = 0.0
    overtakes: float = 0.0
    slow: float = 0.0
    slow_ms: int = 3_000


@dataclass(slots=True)
class Trap:
    """Something that happens just after the master has said a message of this type to somebody."""

    after: type[FromRoundMaster]
    action: Callable[[], None]
