"""The inputs of a peer's machine: reports of the engine, and calls of the program.

The machine draws no random numbers: a `nonce` is fresh random bytes that the shell puts into the event.
"""

from dataclasses import dataclass

from ringfold.state.manifest import StateManifest
from ringfold.wire.messages import Epoch, Offer, PeerId, PendingQuestion, SealedOp, Sequence, Tag, VoteKind


@dataclass(frozen=True, slots=True)
class Dialled:
    """The response to `Dial`: the connection that will be reported opened or closed."""

    key: int
    conn: int


@dataclass(frozen=True, slots=True)
class DialFailed:
    """The response to `Dial` when no connection attempt could be made."""

    key: int
    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A dialled connection is established."""

    conn: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """A connection to the data port was accepted."""

    conn: int
    remote: str
    nonce: bytes


@dataclass(frozen=True, slots=True)
class MessageReceived:
    conn: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is gone: lost, refused, in breach of the protocol, or never established."""

    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A lane broke; all lanes of its link are closed. `live_conns` are the link's connections at the engine by now: a
    neighbour may have opened new ones since the report was written."""

    peer: PeerId
    outgoing: bool
    reason: str
    live_conns: tuple[int, ...] = ()
    died: bool = False
    """Whether the neighbour's process has died: the kernel said so."""
    direct: bool = False
    """Whether it was a link to a member that is no neighbour in the ring."""


@dataclass(frozen=True, slots=True)
class OpMismatched:
    """A neighbour called something else under the same (tag, sequence) of an epoch."""

    peer: PeerId
    epoch: Epoch
    tag: Tag
    sequence: Sequence
    mine: bytes
    theirs: bytes


@dataclass(frozen=True, slots=True)
class OpTimedOut:
    """An op did not end in time. `epoch` is the one that it ran in; by now another one may have begun.

    `final`: the program chose this timeout."""

    epoch: Epoch
    tag: Tag
    sequence: Sequence
    waited_ms: int
    descriptor: bytes = b""
    final: bool = True


@dataclass(frozen=True, slots=True)
class OpCancelled:
    """The program cancelled an op before its local part was done."""

    epoch: Epoch
    tag: Tag
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Silent:
    """The master's heartbeats stopped."""

    conn: int
    silent_ms: int


@dataclass(frozen=True, slots=True)
class BlocksReceived:
    """A batch of blocks is in host memory. `bad` are the places in the batch of those with another rf64 hash."""

    conn: int
    batch: int
    bad: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksWritten:
    """The response to `WriteBlocks`: the batch is verified and written, except the blocks at the indices `bad`."""

    conn: int
    batch: int
    bad: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """The response to `SendBlocks` when the blocks at these indices have changed: nothing was sent."""

    conn: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The filler that has arrived: `received` bytes by `counted_ns`. All times count from its first byte.

    `counted_ns` was the last moment at which nothing that had arrived was left to read."""

    conn: int
    elapsed_ns: int
    counted_ns: int
    received: int


@dataclass(frozen=True, slots=True)
class EngineInstalled:
    """The response to `Install`: the engine runs the epoch. `in_memory` are its lanes in shared memory, by connection.

    Only now is it known what carries a lane: a pipe that both sides have mapped, or a socket where that failed.
    """

    epoch: Epoch
    in_memory: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSealed:
    """The response to `SealEngine`: how far the ops of the epoch are."""

    epoch: Epoch
    ops: tuple[SealedOp, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `PeerMachine.next_deadline_ns` says when one is due."""


@dataclass(frozen=True, slots=True)
class CallJoin:
    """Reach one of `masters` (IP literal and port), and become a member of an epoch before the deadline."""

    masters: tuple[tuple[str, int], ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class CallVote:
    """The program waits in a call of the run, or of its group (a sync, with the state as it is now).

    `progress` counts its ops per tag in the installed epoch. `called_ns`: when the program called, which may be some
    time before this event is applied; None: now. The waiting time in error texts and the timeout begin there.
    """

    ballot: int
    kind: VoteKind
    min_world: int
    deadline_ns: int
    progress: tuple[tuple[Tag, int], ...] = ()
    offer: Offer | None = None
    manifest: StateManifest | None = None
    called_ns: int | None = None
    final: bool = True
    """Whether the program chose this deadline: then the call fails there, and no peer is evicted for it."""
    question: PendingQuestion | None = None
    """The question of a "pending" call that waits for no other peer."""


@dataclass(frozen=True, slots=True)
class CallBusy:
    """The program is busy with something else than its calls, until `until_ns` at most; 0: no longer."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class CallGivenUp:
    """The program no longer waits in the call (Ctrl-C)."""

    ballot: int


@dataclass(frozen=True, slots=True)
class CallLeave:
    """The program leaves the run; `stopped` if it has not finished."""

    stopped: bool = False


Event = (
    Dialled
    | DialFailed
    | Opened
    | Accepted
    | MessageReceived
    | Closed
    | LinkLost
    | OpMismatched
    | OpTimedOut
    | OpCancelled
    | Silent
    | BlocksReceived
    | BlocksWritten
    | BlocksChanged
    | Sampled
    | EngineInstalled
    | EngineSealed
    | Tick
    | CallJoin
    | CallVote
    | CallBusy
    | CallGivenUp
    | CallLeave
)
