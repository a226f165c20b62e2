"""A user's program on a simulated peer: a generator that yields what it calls and is resumed with what that returns.

    def program(me: Self) -> Program:
        gradient = np.ones(1000, np.float32)
        info = yield AllReduce(gradient)          # returns when the real call would
        if (yield ArePending()):
            yield UpdateTopology()

Errors of the real calls are raised at the `yield`. A program that ends without `Leave` leaves by itself.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Kind(IntEnum):
    """What a collective does, as the engine numbers it."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BARRIER = 4


REDUCE_OPS = ("sum", "avg", "prod", "min", "max")
"""In the engine's order."""
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bf16", "float32",
          "float64")  # fmt: skip
"""In the engine's order."""


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """Call an op and wait for its end; resumed with `Reduced`, or with the error that the call raises."""

    array: Array
    op: str = "sum"
    tag: int = 0
    retry: bool = True
    kind: Kind = Kind.ALL_REDUCE
    root: int = 0
    timeout_ms: int = 300_000
    wait: bool = True
    """False: resumed at once with a handle for `Wait`, while the op goes on."""


def AllReduce(array: Array, op: str = "sum", tag: int = 0, *, retry: bool = True, wait: bool = True) -> Collective:
    return Collective(array, op, tag, retry, wait=wait)


def Broadcast(array: Array, root: int = 0, tag: int = 0, *, retry: bool = True) -> Collective:
    return Collective(array, "sum", tag, retry, Kind.BROADCAST, root)


def Barrier(tag: int = 0, *, retry: bool = True) -> Collective:
    return Collective(np.zeros(0, np.uint8), "sum", tag, retry, Kind.BARRIER)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for an op that was called with `wait=False`."""

    handle: int


@dataclass(frozen=True, slots=True)
class UpdateTopology:
    """Admit who has registered, as soon as every accepted peer of the run asks for it; resumed with the world size."""

    min_world: int = 0
    timeout_ms: int = 300_000


@dataclass(frozen=True, slots=True)
class ArePending:
    """Whether somebody waits to be admitted: the same answer on every peer at the same point of the program."""

    timeout_ms: int = 300_000


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the run; the program is resumed when the peer is out."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The user's own work, for so long."""

    ms: float


Request = Collective | Wait | UpdateTopology | ArePending | Leave | Sleep
Program = Generator[Request, Any, None]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a collective that succeeded returns: in which epoch, and how many contributed."""

    epoch: int
    contributors: int
    registrations: int = 0


class Self(Protocol):
    """What a program may know about the peer it runs on."""

    digest: str
    """For the program to set: what it holds in the end, to be compared between peers."""

    @property
    def peer(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def world(self) -> int:
        """How many members the group's newest epoch has."""


ProgramOf = Callable[[Self], Program]


@dataclass(eq=False, slots=True)
class Call:
    """One collective call of one peer, as the checkers see it."""

    peer: int
    group: int
    request: Collective
    given: bytes
    """The buffer as it was passed in."""
    outcome: str = ""
    """Empty while in flight, else "ok" or the name of the error."""
    epoch: int = 0
    index: int = 0
    """Among the calls on its tag that ended in that epoch."""
    contributors: int = 0
    result: bytes = b""

    @property
    def tag(self) -> int:
        return self.request.tag
