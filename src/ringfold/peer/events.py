"""Everything that can happen to a peer: what the engine reports, and what the program calls.

Randomness comes in from outside: a `nonce` is fresh random bytes that the shell puts into the event.
"""

from dataclasses import dataclass

from ringfold.probe.rounds.events import ToRoundMaster
from ringfold.state.manifest import StateManifest
from ringfold.wire.messages import Epoch, Offer, PeerId, SealedOp, Sequence, Tag, VoteKind


@dataclass(frozen=True, slots=True)
class Dialled:
    """The answer to `Dial`: the connection that will be reported opened or closed."""

    key: int
    conn: int


@dataclass(frozen=True, slots=True)
class DialFailed:
    """The answer to `Dial` when no connection could even be tried."""

    key: int
    reason: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A dialled connection is established."""

    conn: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """Somebody connected to the data port."""

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
    """A lane broke; all lanes of its link are closed. `still_there` are the link's connections at the engine by now:
    a neighbour may have brought new ones since the report was written."""

    peer: PeerId
    outgoing: bool
    reason: str
    still_there: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A neighbour called something else under the same (tag, sequence) of an epoch."""

    peer: PeerId
    epoch: Epoch
    tag: Tag
    sequence: Sequence
    mine: bytes
    theirs: bytes


@dataclass(frozen=True, slots=True)
class OpTimedOut:
    """An op came to no end in time. `epoch` is the one that it ran in; by now another one may have begun.

    `final`: the program asked for this timeout."""

    epoch: Epoch
    tag: Tag
    sequence: Sequence
    waited_ms: int
    descriptor: bytes = b""
    final: bool = True


@dataclass(frozen=True, slots=True)
class OpCancelled:
    """The program gave an op up before its local part was done."""

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
    """The answer to `WriteBlocks`: the batch is verified and in its arrays, without the blocks at the places `bad`."""

    conn: int
    batch: int
    bad: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """The answer to `SendBlocks` when the blocks at these places are not what they were: nothing was sent."""

    conn: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A look at the filler, so long after the first of it came: by `counted_ns`, `received` bytes more had come.

    That was the last moment at which nothing that had come was left to read."""

    conn: int
    elapsed_ns: int
    counted_ns: int
    received: int


@dataclass(frozen=True, slots=True)
class EngineSealed:
    """The answer to `SealEngine`: where the ops of the epoch stand."""

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

    `progress` counts its ops per tag in the installed epoch. `called_ns`: when the program called, which may be a while
    before this event is taken; None: now. The time that an error speaks of begins there, as the deadline does.
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
    """Whether the program asked for this deadline: then it raises there, and evicts nobody."""


@dataclass(frozen=True, slots=True)
class CallBusy:
    """The program works on something else than its calls, until then at the most; 0: no longer."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class CallGivenUp:
    """The program no longer waits in the call (Ctrl-C)."""

    ballot: int


@dataclass(frozen=True, slots=True)
class CallLeave:
    """The program wants to leave the run; `stopped` if it has not come to its end."""

    stopped: bool = False


@dataclass(frozen=True, slots=True)
class ProbeSays:
    """The node that this peer is has a word for the master."""

    message: ToRoundMaster


Event = (
    Dialled
    | DialFailed
    | Opened
    | Accepted
    | MessageReceived
    | Closed
    | LinkLost
    | Mismatch
    | OpTimedOut
    | OpCancelled
    | Silent
    | BlocksReceived
    | BlocksWritten
    | BlocksChanged
    | Sampled
    | EngineSealed
    | Tick
    | CallJoin
    | CallVote
    | CallBusy
    | CallGivenUp
    | CallLeave
    | ProbeSays
)
