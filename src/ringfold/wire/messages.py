"""Every message of the control connection and of a lane's handshake.

A connection to a master, or to a peer's data port, begins with the acceptor's `Challenge`. The other side answers with
what it is: `Hello` (a peer joins), `StatusRequest` (somebody looks), or `LaneHello` (a neighbour brings a lane). All
three prove a secret over the challenge's nonce and never send it.

Peer ids are given by the master and only grow, so a lower id is a longer member. An epoch number belongs to a group.
"""

from typing import Literal

from msgspec import Struct, field

PROTOCOL_VERSION = 1

PeerId = int
Epoch = int
Tag = int
Sequence = int
GroupId = int

VoteKind = Literal["update", "pending"]
EvidenceBy = Literal["ring", "master"]
OpState = Literal["unfinished", "done", "committed"]
ReasonKind = Literal["lost", "edge", "usage", "mismatch", "deadline", "evicted", "cancelled"]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """The base of all messages. Unknown fields and types are refused."""


# What both kinds of connection begin with


class Challenge(Message, frozen=True, tag="challenge"):
    """The first message of every acceptor: prove your secret over this nonce, in one of these protocol versions."""

    nonce: bytes
    oldest: int
    newest: int


class Refused(Message, frozen=True, tag="refused"):
    """The acceptor's last words before it closes: why the other side is not let in."""

    reason: str


class Hello(Message, frozen=True, tag="hello"):
    """A peer asks to join a group of the run, and says where its data port can be reached (one address per path)."""

    version: int
    group: GroupId
    host: str
    name: str
    addresses: list[str]
    port: int
    nonce: bytes
    proof: bytes


class Liveness(Struct, frozen=True):
    """The run's heartbeat settings: when silence becomes suspicion, and suspicion eviction."""

    heartbeat_ms: int = 250
    suspect_after_ms: int = 1_000
    evict_after_ms: int = 5_000


class Welcome(Message, frozen=True, tag="welcome"):
    """The peer is registered. The master proves the token too, and gives the run's settings."""

    peer: PeerId
    fence: int
    proof: bytes
    liveness: Liveness


class LaneHello(Message, frozen=True, tag="lane_hello"):
    """A neighbour brings a lane of `epoch`: from `source` to `target` in ring direction, dialled by either of them."""

    version: int
    epoch: Epoch
    source: PeerId
    target: PeerId
    lane: int
    nonce: bytes
    proof: bytes


class LaneWelcome(Message, frozen=True, tag="lane_welcome"):
    """The lane is taken. After this message the connection carries lane frames only."""

    proof: bytes


# Ops, as control messages speak of them


class OpRef(Struct, frozen=True, order=True):
    """One op inside an epoch."""

    tag: Tag
    sequence: Sequence


class Reason(Struct, frozen=True):
    """Why something was aborted or refused: which error to raise, which peers it names, and a sentence for people."""

    kind: ReasonKind
    text: str
    peers: list[PeerId] = []
    waited_ms: int = 0


class SealedOp(Struct, frozen=True):
    """The state of one op in a peer's seal. `payloads` (by rank) is the whole result of a committed small op."""

    op: OpRef
    state: OpState
    registrations: int
    payloads: list[bytes] | None = None


class Verdict(Struct, frozen=True):
    """What the new epoch decides about an op that was in doubt. An op without a verdict is aborted with `lost`."""

    op: OpRef
    commit: bool
    registrations: int = 0
    payloads: list[bytes] | None = None
    reason: Reason | None = None


# Peer -> master


class Vote(Message, frozen=True, tag="vote"):
    """The peer waits in a run-wide call, in this epoch. `progress` counts its committed ops per tag in the epoch."""

    ballot: int
    kind: VoteKind
    epoch: Epoch
    min_world: int = 0
    progress: list[tuple[Tag, int]] = []


class VoteWithdrawn(Message, frozen=True, tag="vote_withdrawn"):
    """The peer's call ran out of time (`waited_ms`); the master answers `CallFailed` that names the missing."""

    ballot: int
    waited_ms: int


class Sealed(Message, frozen=True, tag="sealed"):
    """The peer sends no more Done and accepts no more evidence in `epoch`; this is where its ops stand."""

    epoch: Epoch
    ops: list[SealedOp]


class Attached(Message, frozen=True, tag="attached"):
    """All lanes of the peer in `epoch` are connected and marked."""

    epoch: Epoch


class EdgeFailure(Struct, frozen=True):
    """A lane from `source` to `target` (ring direction) could not be had."""

    source: PeerId
    target: PeerId
    reason: str


class AttachFailed(Message, frozen=True, tag="attach_failed"):
    """Some lanes of `epoch` could not be had: all failing edges at once."""

    epoch: Epoch
    edges: list[EdgeFailure]


class LinkLost(Message, frozen=True, tag="link_lost"):
    """A lane of the installed epoch broke although the neighbour may well be alive."""

    epoch: Epoch
    source: PeerId
    target: PeerId
    reason: str


class OpMismatch(Message, frozen=True, tag="op_mismatch"):
    """A neighbour called something else under the same (tag, sequence). Both descriptors, as 32 bytes each."""

    epoch: Epoch
    op: OpRef
    other: PeerId
    mine: bytes
    theirs: bytes


class OpTimeout(Message, frozen=True, tag="op_timeout"):
    """An op made no end within its deadline here."""

    epoch: Epoch
    op: OpRef
    waited_ms: int


class OpCancelled(Message, frozen=True, tag="op_cancelled"):
    """The caller gave the op up (Ctrl-C) before its local part was done; it will never be done here."""

    epoch: Epoch
    op: OpRef


class Leave(Message, frozen=True, tag="leave"):
    """The peer wants to leave; it answers the seal that follows, and goes when it is told `Left`."""


# Master -> peer


class Registrations(Message, frozen=True, tag="registrations"):
    """How many peers have ever registered in the run; every Done repeats the number last heard."""

    count: int


class Seal(Message, frozen=True, tag="seal"):
    """Seal this epoch and answer `Sealed`. `reason` says why the epoch ends."""

    epoch: Epoch
    reason: str


class Member(Struct, frozen=True):
    """A member of an epoch, as its neighbours need to know it."""

    peer: PeerId
    name: str
    host: str
    addresses: list[str]
    port: int


class World(Struct, frozen=True):
    """The run-wide numbers behind a communicator's attributes."""

    peers: int = 0
    groups: int = 0
    largest_group: int = 0


class Record(Message, frozen=True, tag="record"):
    """A new epoch of the group: members in ring order, verdicts about the old one, and how to run ops in it.

    `dialers[i]` is the peer that dials the lanes of edge i, from members[i] to members[i + 1]. `registrations` is the
    count up to which everybody was admitted or is gone; `pending` says that more have registered by now.
    """

    group: GroupId
    epoch: Epoch
    fence: int
    previous: Epoch
    reason: str
    members: list[Member]
    dialers: list[PeerId]
    newcomers: list[PeerId]
    secret: bytes
    evidence: EvidenceBy
    small_bytes: int
    segment_bytes: int
    lanes: int
    registrations: int
    pending: bool
    verdicts: list[Verdict]
    world: World


class Installed(Message, frozen=True, tag="installed"):
    """Every member of `epoch` is attached."""

    epoch: Epoch
    world: World


class CallDone(Message, frozen=True, tag="call_done"):
    """The run-wide call is complete; `pending` answers a "pending" vote."""

    ballot: int
    pending: bool
    world: World


class CallFailed(Message, frozen=True, tag="call_failed"):
    """The run-wide call cannot complete."""

    ballot: int
    reason: Reason


class Evicted(Message, frozen=True, tag="evicted"):
    """The run goes on without this peer; it may join anew."""

    reason: str


class Left(Message, frozen=True, tag="left"):
    """The peer is out of the run, as it asked; it may close."""


# Status


class StatusRequest(Message, frozen=True, tag="status_request"):
    """Somebody wants to look. Proves the token like a peer."""

    version: int
    nonce: bytes
    proof: bytes


class PeerStatus(Struct, frozen=True):
    """One peer, as `ringfold status` shows it. `phase` is one of the classic names."""

    peer: PeerId
    name: str
    host: str
    group: GroupId
    phase: str
    addresses: list[str]
    port: int
    silent_ms: int
    suspected: bool
    committed_ops: int
    ops: list[str] = []


class GroupStatus(Struct, frozen=True):
    """One group: its epoch, its ring, and where an epoch change stands."""

    group: GroupId
    epoch: Epoch
    phase: str
    ring: list[PeerId]
    evidence: EvidenceBy
    bad_edges: list[tuple[PeerId, PeerId]] = []


class Waiting(Struct, frozen=True):
    """What is waited for, by whom, for whom, and since when."""

    what: str
    waiting: list[PeerId]
    missing: list[PeerId]
    since_ms: int


class Status(Message, frozen=True, tag="status"):
    """The whole run at one instant."""

    fence: int
    uptime_ms: int
    registrations: int
    epochs: int
    world: World
    peers: list[PeerStatus] = field(default_factory=list)
    groups: list[GroupStatus] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


ToMaster = (
    Hello
    | StatusRequest
    | Vote
    | VoteWithdrawn
    | Sealed
    | Attached
    | AttachFailed
    | LinkLost
    | OpMismatch
    | OpTimeout
    | OpCancelled
    | Leave
)
FromMaster = (
    Challenge
    | Refused
    | Welcome
    | Registrations
    | Seal
    | Record
    | Installed
    | CallDone
    | CallFailed
    | Evicted
    | Left
    | Status
)
Handshake = Challenge | Refused | LaneHello | LaneWelcome
