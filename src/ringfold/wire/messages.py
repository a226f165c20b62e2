"""Every message of the control connection and of a lane's handshake.

A connection to a master, or to a peer's data port, begins with the acceptor's `Challenge`. The other side answers with
what it is: `Hello` (a peer joins), `Resume` (a peer comes back, after a master was lost), `NodeHello` (a process only
probes), `StatusRequest` (somebody looks), `EvictRequest` (somebody wants a peer out), `ProbeCommand` (somebody steers
the probing), `RunsRequest` and `ForgetRun` (about the runs of the master), `LaneHello` (a neighbour brings a lane) or
`VisitHello` (a member wants shared state, or measures the link). All of them prove a secret over the challenge's nonce
and never send it.

Peer ids are given by the master and only grow, so a lower id is a longer member. An epoch number belongs to a group.
"""

from typing import Literal

from msgspec import Struct, field

from ringfold.wire.answers import CallDone as CallDone
from ringfold.wire.answers import CallFailed as CallFailed
from ringfold.wire.answers import Failure as Failure
from ringfold.wire.answers import Reason as Reason
from ringfold.wire.answers import SyncVoters as SyncVoters
from ringfold.wire.base import PROTOCOL_VERSION as PROTOCOL_VERSION
from ringfold.wire.base import Epoch as Epoch
from ringfold.wire.base import EvidenceBy as EvidenceBy
from ringfold.wire.base import GroupId as GroupId
from ringfold.wire.base import HashKind as HashKind
from ringfold.wire.base import Liveness as Liveness
from ringfold.wire.base import Message as Message
from ringfold.wire.base import OpState as OpState
from ringfold.wire.base import PeerId as PeerId
from ringfold.wire.base import Purpose as Purpose
from ringfold.wire.base import ReasonKind as ReasonKind
from ringfold.wire.base import Sequence as Sequence
from ringfold.wire.base import SyncStrategy as SyncStrategy
from ringfold.wire.base import Tag as Tag
from ringfold.wire.base import VoteKind as VoteKind
from ringfold.wire.base import is_before as is_before
from ringfold.wire.lineage import Branch as Branch
from ringfold.wire.lineage import Lineage as Lineage
from ringfold.wire.lineage import Rollback as Rollback
from ringfold.wire.probing import (
    NodeHello,
    NodeWelcome,
    ProbeAnswer,
    ProbeCommand,
    ProbeGraph,
    ProbeHalt,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundReport,
    RoundStart,
)
from ringfold.wire.progress import Busy as Busy
from ringfold.wire.progress import CallGoesOn as CallGoesOn
from ringfold.wire.progress import EvictRequest as EvictRequest
from ringfold.wire.progress import EvictResponse as EvictResponse
from ringfold.wire.returning import Resume as Resume
from ringfold.wire.returning import Resumed as Resumed
from ringfold.wire.returning import Returned as Returned
from ringfold.wire.runs import ForgetRun as ForgetRun
from ringfold.wire.runs import RunList as RunList
from ringfold.wire.runs import RunsRequest as RunsRequest
from ringfold.wire.status import Divergence as Divergence
from ringfold.wire.status import Status as Status
from ringfold.wire.status import StatusRequest as StatusRequest
from ringfold.wire.status import World as World

# What both kinds of connection begin with


class Challenge(Message, frozen=True, tag="challenge"):
    """The first message of every acceptor: prove your secret over this nonce, in one of these protocol versions."""

    nonce: bytes
    oldest: int
    newest: int


class Refused(Message, frozen=True, tag="refused"):
    """The acceptor's last words before it closes: why the other side is not let in.

    With `again` it is not the other side's fault: a master that does not lead says so, and the next one may be asked.
    With a `proof` of the run's token it is final, whatever other masters there are: the run has ended.
    """

    reason: str
    again: bool = False
    proof: bytes = b""


class Hello(Message, frozen=True, tag="hello"):
    """A peer asks to join a group of a run, and says where its data port can be reached (one address per path).

    `run` is the name of the run, empty for the default one; `proof` is about that run's token.

    With `probes` the same port number takes UDP probes, and the peer is a node of the probe graph. The first `paths` of
    its addresses are paths of their own, to be used at the same time; any others are places to try instead.
    """

    version: int
    group: GroupId
    host: str
    name: str
    addresses: list[str]
    port: int
    nonce: bytes
    proof: bytes
    probes: bool = False
    paths: int = 1
    run: str = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """The peer is registered. The master proves the token too, and gives the run's settings.

    `secret` is this member's own: with it the peer proves to a later master who it is. It is empty where there will be
    none, because this one keeps no journal.
    """

    peer: PeerId
    fence: int
    proof: bytes
    liveness: Liveness
    secret: bytes = b""


class AdmissionWaits(Message, frozen=True, tag="admission_waits"):
    """To a peer that waits to be admitted, about every second: what for (a sentence), and for whom.

    While those are `moving` (their ops go on, or they take no longer than they ever took) the peer's patience does not
    run out: a step may be long.
    """

    text: str
    peers: list[PeerId] = field(default_factory=list)
    moving: bool = False


class LaneHello(Message, frozen=True, tag="lane_hello"):
    """A neighbour brings a lane of `epoch`: from `source` to `target` in ring direction, dialled by either of them."""

    version: int
    epoch: Epoch
    source: PeerId
    target: PeerId
    lane: int
    nonce: bytes
    proof: bytes


class VisitHello(Message, frozen=True, tag="visit_hello"):
    """A member visits another one: for the blocks of sync `number`, or for measurement `number`."""

    version: int
    purpose: Purpose
    number: int
    source: PeerId
    target: PeerId
    nonce: bytes
    proof: bytes


class VisitWelcome(Message, frozen=True, tag="visit_welcome"):
    """The visitor is let in. After this message the connection carries bulk frames: messages, blocks and filler."""

    proof: bytes


class LaneWelcome(Message, frozen=True, tag="lane_welcome"):
    """The lane is taken. After this message the connection carries lane frames only."""

    proof: bytes


# Ops, as control messages speak of them


class OpRef(Struct, frozen=True, order=True):
    """One op inside an epoch."""

    tag: Tag
    sequence: Sequence


class SealedOp(Struct, frozen=True):
    """The state of one op in a peer's seal. `payloads` (by rank) is the whole result of a committed small op; None is
    that of a peer that contributed nothing.
    """

    op: OpRef
    state: OpState
    registrations: int
    payloads: list[bytes | None] | None = None
    descriptor: bytes = b""


class Verdict(Struct, frozen=True):
    """What the new epoch decides about an op that was in doubt. An op without a verdict is aborted with `lost`.

    A call that ends without success, and is not tried again, ends so for all members: also for one that is late.
    """

    op: OpRef
    commit: bool
    registrations: int = 0
    payloads: list[bytes | None] | None = None
    reason: Reason | None = None
    descriptor: bytes = b""


# Shared state


class KeyOffer(Struct, frozen=True, array_like=True, gc=False):
    """One array of a manifest. `root` is the hash over its blocks' hashes; it plays no part where it `may_differ`."""

    name: str
    dtype: str
    shape: list[int]
    root: bytes
    may_differ: bool = False


class Offer(Struct, frozen=True):
    """What a peer brings to a sync: its revision and its manifest, keys sorted by name.

    A `torn` state is partly written and never votes. `stepped`: every revision since the last sync was counted by the
    peer's step loop, so that the revision may have gone up by more than one. `rollback`: this peer agrees that the run
    goes on from an older revision than the last one.

    `lineage` is the history that the state belongs to, as far as the peer knows one. `is_loaded`: it is a checkpoint,
    and unchanged. `checkpoints` are those that the peer could load instead. `is_saved`: its program keeps checkpoints.
    """

    revision: int
    strategy: SyncStrategy
    hash: HashKind
    keys: list[KeyOffer]
    torn: bool = False
    stepped: bool = False
    rollback: bool = False
    lineage: Lineage | None = None
    is_loaded: bool = False
    checkpoints: list[Branch] = field(default_factory=list)
    is_saved: bool = False


# Peer -> master


class Vote(Message, frozen=True, tag="vote"):
    """The peer waits in a call of the run, or of its group, in this epoch.

    `progress` counts its committed ops per tag in the epoch. A "sync" comes with what the peer has to offer.
    """

    ballot: int
    kind: VoteKind
    epoch: Epoch
    min_world: int = 0
    progress: list[tuple[Tag, int]] = field(default_factory=list)
    offer: Offer | None = None


class VoteWithdrawn(Message, frozen=True, tag="vote_withdrawn"):
    """The peer's call ran out of time (`waited_ms`); the master answers `CallFailed` that names the missing.

    Unless it is `final` (the caller asked for this timeout, or gave the call up), the master rather evicts those who
    keep it waiting, and answers `CallGoesOn`."""

    ballot: int
    waited_ms: int
    final: bool = True


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
    """A neighbour called something else under the same (tag, sequence). Both descriptors."""

    epoch: Epoch
    op: OpRef
    other: PeerId
    mine: bytes
    theirs: bytes


class OpTimeout(Message, frozen=True, tag="op_timeout"):
    """An op made no end within its deadline here.

    Unless it is `final` (the caller asked for this timeout), the master rather evicts those who are absent from it."""

    epoch: Epoch
    op: OpRef
    waited_ms: int
    descriptor: bytes = b""
    final: bool = True


class OpCancelled(Message, frozen=True, tag="op_cancelled"):
    """The caller gave the op up (Ctrl-C) before its local part was done; it will never be done here."""

    epoch: Epoch
    op: OpRef


class SyncReport(Message, frozen=True, tag="sync_report"):
    """How a sync goes here.

    `complete`: every key is here and verified. `changed`: this peer's own state changed while it was sent. `stuck`:
    nobody is left from whom the rest could be had. Two end nothing: `corrupt` (a block of one of `blame` was wrong, and
    is fetched from others), and `progress` (blocks have come, now and then said). `received_bytes` are those of blocks.
    """

    sync: int
    outcome: Literal["complete", "changed", "stuck", "corrupt", "progress"]
    text: str = ""
    blame: list[PeerId] = field(default_factory=list)
    received_bytes: int = 0


class Measured(Message, frozen=True, tag="measured"):
    """What came from `other` in a measurement: bytes a second, and the round trip. `failed` says why there is none.

    A figure that is not `settled` is the best that could be said: the arrivals were never steady."""

    test: int
    other: PeerId
    bytes_per_s: float = 0.0
    round_trip_us: int = 0
    settled: bool = True
    failed: str = ""


class Leave(Message, frozen=True, tag="leave"):
    """The peer wants to leave; it answers the seal that follows, and goes when it is told `Left`.

    One that was `stopped` (a signal, an exception, a loop that did not reach its end) has not finished the run.
    """

    stopped: bool = False


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
    paths: int = 1


class Record(Message, frozen=True, tag="record"):
    """A new epoch of the group: members in ring order, verdicts about the old one, and how to run ops in it.

    `dialers[i]` is the peer that dials the lanes of edge i, from members[i] to members[i + 1]. `registrations` is the
    count up to which everybody was admitted or is gone; `pending` says that more have registered by now. `lanes` are
    those of each path.
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


class SyncPlan(Message, frozen=True, tag="sync_plan"):
    """A sync is decided: this revision wins, `holders` have it, and this peer fetches the keys (by index) of `fetch`.

    `receivers` fetch too; what one of them has got, the others may have from it. Each fetched key comes with its root.
    `voters` are all who made an offer. `diverged` are those who should have had it before; nothing is received yet.
    """

    ballot: int
    sync: int
    revision: int
    secret: bytes
    holders: list[Member]
    receivers: list[Member]
    fetch: list[tuple[int, bytes]] = field(default_factory=list)
    voters: dict[PeerId, int] = field(default_factory=dict)
    diverged: list[Divergence] = field(default_factory=list)


class SyncGoesOn(Message, frozen=True, tag="sync_goes_on"):
    """Somebody makes progress in the sync of this ballot: whoever waits for its end may wait as long again."""

    ballot: int


class ResumeWaits(Message, frozen=True, tag="resume_waits"):
    """The sync of this ballot waits for the participants of the last one, by name: they may have newer checkpoints.

    It is decided without them when `left_ms` have passed.
    """

    ballot: int
    revision: int
    names: list[str]
    left_ms: int


class SyncDone(Message, frozen=True, tag="sync_done"):
    """Everybody who takes part in the sync has the winning state now. `diverged` are those who should have had it.

    `lineage` is the history that the state is part of from now on. `rollback` says from where the run goes on, if not
    from its last revision.
    """

    ballot: int
    sync: int
    revision: int
    diverged: list[Divergence] = field(default_factory=list)
    lineage: Lineage | None = None
    rollback: Rollback | None = None


class Measure(Message, frozen=True, tag="measure"):
    """Measure the link to `other`, both ways at once; the one that `dials` visits the other. Answer `Measured`."""

    test: int
    other: Member
    dials: bool
    secret: bytes
    most_ms: int


class Evicted(Message, frozen=True, tag="evicted"):
    """The run goes on without this peer; it may join again.

    With `for_call` its program is at fault, which called something else than the others: it may join after a pause.
    With `on_request` somebody wanted it out: it does not come back by itself.
    `proof` shows in a handshake, where nothing else does, that the one who says so knows the token.
    """

    reason: str
    proof: bytes = b""
    for_call: bool = False
    on_request: bool = False


class Left(Message, frozen=True, tag="left"):
    """The peer is out of the run, as it asked; it may close."""


ToMaster = (
    Hello
    | Resume
    | Returned
    | StatusRequest
    | EvictRequest
    | Busy
    | Vote
    | VoteWithdrawn
    | Sealed
    | Attached
    | AttachFailed
    | LinkLost
    | OpMismatch
    | OpTimeout
    | OpCancelled
    | SyncReport
    | Measured
    | Leave
    | NodeHello
    | ProbeCommand
    | RunsRequest
    | ForgetRun
    | RoundReport
    | RoundAlarm
)
FromMaster = (
    Challenge
    | Refused
    | Welcome
    | AdmissionWaits
    | Resumed
    | Registrations
    | Seal
    | Record
    | Installed
    | CallDone
    | CallFailed
    | CallGoesOn
    | SyncPlan
    | SyncGoesOn
    | ResumeWaits
    | SyncDone
    | Measure
    | Evicted
    | Left
    | Status
    | EvictResponse
    | RunList
    | NodeWelcome
    | ProbeAnswer
    | ProbeGraph
    | ProbeHalt
    | RoundClock
    | RoundEnd
    | RoundStart
)
Handshake = Challenge | Refused | LaneHello | LaneWelcome | VisitHello | VisitWelcome
