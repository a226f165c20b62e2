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

from ringfold.state.shared import SharedState
from ringfold.state.snapshot import Snapshot
from ringfold.wire.messages import Offer, PendingQuestion, SyncStrategy

Array = npt.NDArray[Any]

USUAL_TIMEOUT_MS = 300_000
"""A call with this one has no timeout of its own: it has the peer's (`Setup.op_timeout_ms`)."""
AGREE_TAG = 99
"""The tag of ops in which members agree on how to go on. Other ops are not for peers whose state is torn."""


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
    retry: int = 1
    kind: Kind = Kind.ALL_REDUCE
    root: int = 0
    timeout_ms: int = USUAL_TIMEOUT_MS
    wait: bool = True
    """False: resumed at once with a handle for `Wait`, while the op goes on."""
    quantisation: int = 0
    """How it travels, as the engine numbers it; 0 is as it is."""
    again: bool = False
    """Another attempt of the last call on this tag."""
    contribute: bool = True
    """False: what is in the array plays no part, and it gets the result all the same."""
    place: tuple[int, ...] | None = None
    """Where in the program the call stands: calls of different places must never meet."""


def AllReduce(
    array: Array,
    op: str = "sum",
    tag: int = 0,
    *,
    retry: bool = True,
    wait: bool = True,
    quantisation: int = 0,
    contribute: bool = True,
    place: tuple[int, ...] | None = None,
) -> Collective:
    return Collective(array, op, tag, retry, wait=wait, quantisation=quantisation, contribute=contribute, place=place)


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
    """Admit the registered peers, as soon as every accepted peer of the run calls it; resumed with the world size."""

    min_world: int = 0
    timeout_ms: int = USUAL_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class OptimizeTopology:
    """Measure the links and give every group its best ring, as soon as every accepted peer of the run calls it."""

    timeout_ms: int = USUAL_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class ArePending:
    """Whether peers wait to be admitted: the same answer on every peer at the same point of the program.

    Legal while ops are in flight.
    """

    timeout_ms: int = USUAL_TIMEOUT_MS
    vote: bool = False
    """Wait for all peers of the run, as `meet` does."""
    elsewhere: bool = False
    """In another thread of the program, which has seen the end of no op: the master is asked."""
    question: PendingQuestion | None = None
    """The question for the master; None: the next one, if this peer cannot tell by itself."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the run; the program is resumed when the peer is out."""

    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Join again after an eviction, in the same process; resumed with the new peer."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The user's own work, for so long."""

    ms: float


@dataclass(frozen=True, slots=True)
class BusyFor:
    """What `run.busy` reports: the program works on something else, for so long at the most; 0: no longer."""

    ms: float


class SmallState(SharedState):
    """A shared state in small blocks, so that a few KiB have many of them."""

    _block_bytes = 64


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """Make a state the group's, as `sync_shared_state` does; resumed with `SyncInfo`. Use a `SmallState`."""

    state: SharedState
    strategy: SyncStrategy = "enforce-popular"
    stepped: bool = False
    min_world: int = 0
    rollback: bool = False
    timeout_ms: int = USUAL_TIMEOUT_MS
    meddle: tuple[float, Callable[[], object]] | None = None
    """(ms, action): another thread of the program does this so much later, if the sync is not over by then."""


@dataclass(frozen=True, slots=True, eq=False)
class OfferState:
    """What a session does in a sync: offer, and wait; resumed with `SyncSucceeded`. The snapshot is the caller's."""

    offer: Offer
    snapshot: Snapshot
    min_world: int = 0
    timeout_ms: int = USUAL_TIMEOUT_MS


Request = (
    Collective
    | Wait
    | UpdateTopology
    | OptimizeTopology
    | ArePending
    | Sync
    | OfferState
    | Leave
    | Rejoin
    | Sleep
    | BusyFor
)
Program = Generator[Request, Any, None]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a collective that succeeded returns: in which epoch, and which peers contributed."""

    epoch: int
    contributors: tuple[int, ...]
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

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the group's newest epoch, in ring order."""

    def step_begins(self, state: SharedState) -> None:
        """Tell the checkers that a step loop is at this revision: all members must hold the same bits here."""

    def may_be_evicted(self) -> None:
        """Tell the checkers that this program hangs from here on: the run may go on without it."""

    def restart(self) -> None:
        """When this program has ended, start it again, as another process."""


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
    contributors: tuple[int, ...] = ()
    result: bytes = b""

    @property
    def tag(self) -> int:
        return self.request.tag
