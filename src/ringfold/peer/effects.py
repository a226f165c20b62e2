"""The outputs of a peer's machine. An `EngineEffect` is a command of the engine; the shell carries out the rest."""

from dataclasses import dataclass

from ringfold.errors import RingfoldError
from ringfold.state.blocks import BlockRef
from ringfold.wire.messages import Divergence, Epoch, Lineage, Message, PeerId, Reason, Record, Verdict, World
from ringfold.wire.notices import Notice

# Commands of the engine


@dataclass(frozen=True, slots=True)
class SendMessage:
    conn: int
    message: Message


@dataclass(frozen=True, slots=True)
class ResumeReading:
    """Deliver the next message of a connection that is still in its handshake."""

    conn: int


@dataclass(frozen=True, slots=True)
class MakeControl:
    """The connection is the control connection now: heartbeats are sent, and silence is reported."""

    conn: int
    heartbeat_ms: int
    dead_after_ms: int


@dataclass(frozen=True, slots=True)
class Promote:
    """The connection is a lane now, to or from a neighbour.

    A `shared` link has, or will have, several lanes, which stand in for each other. A lane that connects after `epoch`
    was installed joins it late. A `direct` lane leads to a member that is no neighbour in the ring.
    """

    conn: int
    outgoing: bool
    peer: PeerId
    lane: int
    shared: bool = False
    path: int = 0
    paths: int = 1
    epoch: Epoch = 0
    channel: int = 0
    direct: bool = False


@dataclass(frozen=True, slots=True)
class MakeBulk:
    """The connection is an open bulk session now: it carries messages, blocks and filler."""

    conn: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Send filler as fast as possible, or stop; `Sampled` reports the arriving filler every `sample_ns` (0: never)."""

    conn: int
    on: bool
    sample_ns: int


@dataclass(frozen=True, slots=True)
class CloseConn:
    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetRegistrations:
    count: int


@dataclass(frozen=True, slots=True)
class SealEngine:
    """Seal the epoch; the response is `EngineSealed`."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Settle:
    """Decide every op of the sealed epoch. An op without a verdict is aborted for `default_reason`."""

    epoch: Epoch
    verdicts: tuple[Verdict, ...]
    default_reason: Reason


@dataclass(frozen=True, slots=True)
class RefuseCalls:
    """These calls ended without success for all members, including those that have not made them yet."""

    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class RestartCalls:
    """Peers were admitted: from here on calls are counted from 0 again."""


@dataclass(frozen=True, slots=True)
class Install:
    """Run this epoch; the response is `EngineInstalled`."""

    epoch: Epoch
    rank: int
    members: tuple[PeerId, ...]
    evidence_by_master: bool
    small_bytes: int
    segment_bytes: int
    peers_here: int
    """How many members run on this host. If they are more than its cores, a waiting engine yields the CPU to them."""
    channels: int = 1
    multipath: bool = False
    """Some link of the ring has several lanes: ops are cut finely, so that slow and fast lanes end together."""
    direct: bool = False
    """Done goes straight to every member, where direct lanes lead to all that are no neighbours."""
    hosts: int = 1
    """Above 1: ops are reduced inside each of so many hosts first."""


@dataclass(frozen=True, slots=True)
class FailAll:
    """The session is over: every op fails, now and later."""

    reason: Reason


# What is done to the arrays of the sync in progress. They are the caller's, and the shell's to read and write.


@dataclass(frozen=True, slots=True)
class ExpectBlocks:
    """The next blocks on this connection are these. `BlocksReceived` follows when the last one has arrived."""

    conn: int
    batch: int
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """A batch has arrived: verify what the engine has not, and write it where it belongs, without the blocks at the
    places `bad`. `BlocksWritten` follows.
    """

    conn: int
    batch: int
    bad: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Read these blocks and send them. If one of them has another hash by now, none is sent: `BlocksChanged`."""

    conn: int
    blocks: tuple[BlockRef, ...]


# Carried out by the shell itself


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection, from the address `source` if given; the response is `Dialled` or `DialFailed`, at once.

    `here` is the name of a peer of this host: it is tried first, for a lane in shared memory, with less of it for a
    lane that `carries_little`.
    """

    key: int
    host: str
    port: int
    timeout_ms: int
    source: str = ""
    here: str = ""
    carries_little: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """The peer is a member of an installed epoch for the first time. `record` is the one that admitted it."""

    record: Record


@dataclass(frozen=True, slots=True)
class CallSucceeded:
    """A run-wide call has succeeded. `pending` and `groups` are the same on all peers that go on from here: those that
    were in the call, and those that it admitted.
    """

    pending: bool
    groups: int
    world: World
    call: int = 0
    """The number of the run-wide call (`CallDone.call`)."""


@dataclass(frozen=True, slots=True)
class SyncSucceeded:
    """A sync has succeeded: the revision of all members that took part, and the bytes of blocks that this peer moved.

    `diverged` are the members that should have had the state before, and had not. `lineage` is the history that the
    state is part of now. `participants` are all peers that took part."""

    revision: int
    tx_bytes: int
    rx_bytes: int
    diverged: tuple[Divergence, ...] = ()
    lineage: Lineage | None = None
    participants: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncInterrupted:
    """The master was lost during a sync, which did not end. It is called again with a new snapshot of the state; the
    program does not notice. Members that it had found to be `diverged` may not be found a second time."""

    diverged: tuple[Divergence, ...] = ()


CallOutcome = CallSucceeded | SyncSucceeded | SyncInterrupted | Reason


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call is over: done, or failed for a reason."""

    ballot: int
    outcome: CallOutcome


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over. Without an error this peer has left by itself."""

    error: RingfoldError | None


@dataclass(frozen=True, slots=True)
class Notify:
    """A notice for the log."""

    notice: Notice


EngineEffect = (
    SendMessage
    | ResumeReading
    | MakeControl
    | Promote
    | MakeBulk
    | Fill
    | CloseConn
    | SetRegistrations
    | SealEngine
    | Settle
    | RefuseCalls
    | RestartCalls
    | Install
    | FailAll
)
ShellEffect = Dial | Joined | CallFinished | Ended | Notify
BlockEffect = ExpectBlocks | WriteBlocks | SendBlocks
Effect = EngineEffect | BlockEffect | ShellEffect
