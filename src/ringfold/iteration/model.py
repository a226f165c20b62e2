"""Who a machine speaks for, its settings, where its keys are, and what it returns. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from ringfold.errors import UsageError
from ringfold.store.base import Entry


class State(StrEnum):
    """Where a rank stands between two iterations."""

    TRAINING = "TRAINING"
    READY = "READY"
    CONSENSUS = "CONSENSUS"
    ADVANCE = "ADVANCE"
    NEW_ITERATION = "NEW_ITERATION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often a rank shows its life, and when the others give it up."""

    heartbeat_s: float = 5.0
    inactive_after_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= self.inactive_after_s:
            raise UsageError(
                f"inactive_after_s must be twice heartbeat_s at least; got {self.inactive_after_s:g} and "
                f"{self.heartbeat_s:g}"
            )

    @property
    def look_s(self) -> float:
        """How often a rank that waits looks for the dead."""
        return min(1.0, self.heartbeat_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Self:
    """Who a machine speaks for, and what the store can do. No two processes ever have the same incarnation."""

    rank: int
    incarnation: str
    can_list: bool = True
    has_leases: bool = False
    name: str = "iteration"
    """Where the keys are: several global iterations may share a store."""
    store: str = "the store"


@dataclass(frozen=True, slots=True)
class Begun:
    """An iteration that was handed out: who is in it, how many passed by without this rank, and whether it won it."""

    iteration: int
    members: tuple[int, ...]
    missed: int
    is_winner: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a restarted rank finds: the last iteration of its predecessor, and the present one."""

    last: int
    iteration: int

    @property
    def has_moved(self) -> bool:
        """Whether the others went on while the rank was away."""
        return self.iteration > self.last


@dataclass(frozen=True, slots=True)
class Look:
    """What one look showed: who has arrived at the record's iteration, and who is dead. Both by rank."""

    arrived: frozenset[int]
    dead: frozenset[int]
    strays: tuple[tuple[str, Entry], ...] = ()


class Keys:
    """Where everything is in the store."""

    def __init__(self, name: str) -> None:
        self.record, self.ranks = f"{name}/record", f"{name}/ranks/"

    def arrived(self, rank: int, incarnation: str) -> str:
        return f"{self.ranks}{rank}/{incarnation}/arrived"

    def alive(self, rank: int, incarnation: str) -> str:
        return f"{self.ranks}{rank}/{incarnation}/alive"

    def incarnation(self, key: str) -> str:
        """Whose key below `ranks` this is; empty when it is none of ours."""
        parts = key.removeprefix(self.ranks).split("/")
        return parts[1] if len(parts) == 3 else ""
