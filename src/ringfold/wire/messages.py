"""Every message of a control connection, of a lane's handshake, and of a bulk session.

A connection begins with the acceptor's `Challenge`. The acceptor is a master, or a peer on its data port. The other
side then sends one of these, each with a proof of a secret over the challenge's nonce (the secret itself is never
sent):

* to a master: `Hello` (a peer joins), `Resume` (a member reconnects after a change of masters), `GuardianHello` (a peer
  opens a connection for its guardian), `NodeHello` (a process that only probes), `RelayHello` (a relay of such
  processes), `StatusRequest`, `EvictRequest`, `ProbeCommand`, `RunsRequest` or `ForgetRun` (a command);
* to a peer: `LaneHello` (a neighbour opens a lane) or `BulkHello` (a member opens a bulk session, to fetch shared state
  or to measure the link).

The sections: handshakes, calls, ops, epochs, shared state, link measurements, leaving, and recovery after a change of
masters. The unions at the end say which message goes in which direction. Messages about probing are in `probing.py`,
those of commands in `status.py`.

The master assigns peer ids, and they only grow: lower ids joined earlier. An epoch number belongs to a group.
"""

import re
from typing import Literal

from msgspec import Struct, field

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
from ringfold.wire.regions import (
    RelayAlarm,
    RelayAnswers,
    RelayClocks,
    RelayGraph,
    RelayHello,
    RelayNodes,
    RelayReports,
    RelayRound,
    RelayWelcome,
)
from ringfold.wire.status import Divergence as Divergence
from ringfold.wire.status import Events as Events
from ringfold.wire.status import EventsRequest as EventsRequest
from ringfold.wire.status import EvictRequest as EvictRequest
from ringfold.wire.status import EvictResponse as EvictResponse
from ringfold.wire.status import ForgetRun as ForgetRun
from ringfold.wire.status import RunList as RunList
from ringfold.wire.status import RunsRequest as RunsRequest
from ringfold.wire.status import Status as Status
from ringfold.wire.status import StatusRequest as StatusRequest
from ringfold.wire.status import World as World

MAX_ANCESTORS = 64
"""How many lineages back a history is known. A checkpoint of an older one cannot be resumed from."""
MAX_CHECKPOINTS = 64
"""How many checkpoints a peer lists in an offer: the newest ones."""
MAX_BUSY_MS = 7 * 86_400_000
"""A week."""

# Handshakes


class Challenge(Message, frozen=True, tag="challenge"):
    """The first message of every acceptor: prove your secret over this nonce, in one of these protocol versions."""

    nonce: bytes
    oldest: int
    newest: int


class Refused(Message, frozen=True, tag="refused"):
    """The acceptor's last message before it closes the connection: why it does not accept the other side.

    With `again` the other side is not at fault: a master that does not lead sends it, and the client tries the next
    master. With a `proof` of the run's token it is final, whatever other masters there are: the run has ended.
    """

    reason: str
    again: bool = False
    proof: bytes = b""


class Hello(Message, frozen=True, tag="hello"):
    """A peer requests to join a group of a run. `addresses` and `port` are where its data port can be reached.

    `run` is the name of the run, empty for the default one; `proof` is made with that run's token.

    With `probes` the same port number takes UDP probes, and the peer is a node of the probe graph; with `listen_only`
    it responds to probes and sends none. The first `paths` addresses are separate paths, used at the same time; the
    others are alternatives.

    `cores` is how many it may use, `threads` how many threads its ops may have; 0: its share of the host's cores.
    `here` is the name by which peers of its host reach it, to share memory with it; empty: it has none.
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
    listen_only: bool = False
    cores: int = 1
    threads: int = 0
    here: str = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """The peer is registered. The master proves the token too, and sends the run's settings.

    `secret` belongs to this member: the peer proves its identity with it to a later master. It is empty if this master
    has no journal, because then there is no later one.
    """

    peer: PeerId
    fence: int
    proof: bytes
    liveness: Liveness
    secret: bytes = b""


class Resume(Message, frozen=True, tag="resume"):
    """A member reconnects to the run. `fence` and `epoch` are the newest that it knows, 0 if it knows none.

    The rest is as in `Hello`. `proof` is made with the token, `member_proof` with the secret from `Welcome`.
    """

    version: int
    peer: PeerId
    fence: int
    epoch: Epoch
    group: GroupId
    host: str
    name: str
    addresses: list[str]
    port: int
    nonce: bytes
    proof: bytes
    member_proof: bytes
    probes: bool = False
    paths: int = 1
    run: str = ""
    listen_only: bool = False
    cores: int = 1
    threads: int = 0
    here: str = ""


class Resumed(Message, frozen=True, tag="resumed"):
    """The master knows the peer. It proves the token and the member's secret, both bound to its fence."""

    fence: int
    proof: bytes
    liveness: Liveness


class GuardianHello(Message, frozen=True, tag="guardian_hello"):
    """A peer opens a second connection, for its guardian.

    `proof` is made with the token, `peer_proof` with both nonces of the peer's control connection, in the order in
    which they were sent: so it belongs to that connection, and to no later one of the same peer.
    """

    version: int
    peer: PeerId
    nonce: bytes
    proof: bytes
    peer_proof: bytes
    run: str = ""


class GuardianWelcome(Message, frozen=True, tag="guardian_welcome"):
    """The master listens to the guardian. It proves the token, too."""

    proof: bytes


class PeerDied(Message, frozen=True, tag="peer_died"):
    """From a guardian, its only message: the kernel has marked the peer's process as dead, and frees its memory."""


class AdmissionWaits(Message, frozen=True, tag="admission_waits"):
    """To a peer that waits to be admitted, about every second: what it waits for, and for which peers.

    While those are `moving` (their ops make progress, or they take no longer than they ever took) the peer's join
    timeout does not run out: a step may take long.
    """

    text: str
    peers: list[PeerId] = field(default_factory=list)
    moving: bool = False


class LaneHello(Message, frozen=True, tag="lane_hello"):
    """A member opens a lane of `epoch`, from `source` to `target` in ring direction. Either of them may dial.

    A direct lane, between members that are no neighbours, has a number from 1,048,576 on, and the lower id is its
    source.
    """

    version: int
    epoch: Epoch
    source: PeerId
    target: PeerId
    lane: int
    nonce: bytes
    proof: bytes


class LaneWelcome(Message, frozen=True, tag="lane_welcome"):
    """The lane is accepted. After this message the connection carries lane frames only."""

    proof: bytes


class BulkHello(Message, frozen=True, tag="visit_hello"):
    """A member opens a bulk session with another one: for the blocks of sync `number`, or for measurement `number`."""

    version: int
    purpose: Purpose
    number: int
    source: PeerId
    target: PeerId
    nonce: bytes
    proof: bytes


class BulkWelcome(Message, frozen=True, tag="visit_welcome"):
    """The bulk session is accepted. After this message the connection carries bulk frames: messages, blocks, filler."""

    proof: bytes


# Calls


class Branch(Struct, frozen=True, array_like=True, order=True):
    """One revision of one lineage: where another lineage branches off, or where a checkpoint belongs."""

    lineage: str
    revision: int


class Reason(Struct, frozen=True):
    """Why something was aborted or refused: which error to raise, which peers it names, and a sentence for people."""

    kind: ReasonKind
    text: str
    peers: list[PeerId] = []
    waited_ms: int = 0
    numbers: list[int] = []
    """The error's other attributes: mostly revisions."""
    checkpoint: Branch | None = None
    """If the state is lost: the checkpoint to continue from. The peer that has it loads it, and all sync again."""


class KeyOffer(Struct, frozen=True, array_like=True, gc=False):
    """One array of a manifest. `root` is the hash over its blocks' hashes; it is not compared if it `may_differ`."""

    name: str
    dtype: str
    shape: list[int]
    root: bytes
    may_differ: bool = False


class Lineage(Struct, frozen=True):
    """The history of a state. `run` and `id` are random; `ancestors` are the lineages before it, newest first, each
    with the revision at which this history left it.

    A *lineage* is a sequence of revisions, each made from the one before. A rollback ends a lineage and starts another
    one, which branches off at a revision of the old one: what comes after that revision in the old lineage is
    abandoned. `state/ancestry.py` decides what this means for checkpoints.
    """

    run: str
    id: str
    ancestors: list[Branch] = field(default_factory=list)


class Offer(Struct, frozen=True):
    """What a peer offers in a sync: its revision and its manifest, keys sorted by name.

    A `torn` state is partly written and never votes. `stepped`: the peer's step loop counted every revision since the
    last sync, so the revision may have grown by more than one. `rollback`: this peer agrees that the run continues from
    an older revision than the last one.

    `lineage` is the history that the state belongs to, if the peer knows it. `is_loaded`: the state is an unchanged
    checkpoint. `checkpoints` are those that the peer could load instead. `is_saved`: its program writes checkpoints.
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


class PendingQuestion(Struct, frozen=True):
    """Whether peers are pending, at a point of the program that all peers pass: the question with this number (from 1
    on) since the run-wide call with this number."""

    call: int
    number: int


class PendingAnswers(Struct, frozen=True):
    """The answers to all questions since a run-wide call: False up to number `asked`, or, from `true_from` on (if that
    is not 0), True. A peer that has registered and left again does not make it False again."""

    call: int
    asked: int = 0
    true_from: int = 0

    def answer(self, number: int) -> bool | None:
        """The answer to a question; None if it has none yet."""
        if self.true_from and number >= self.true_from:
            return True
        return False if number <= self.asked else None

    def with_answer(self, number: int, pending: bool) -> "PendingAnswers":
        """The same after this question was answered."""
        true_from = self.true_from or (number if pending else 0)
        return PendingAnswers(self.call, max(self.asked, number), true_from)

    def with_others(self, other: "PendingAnswers") -> "PendingAnswers":
        """The same with what another peer knows about the same call."""
        true_from = min(filter(None, (self.true_from, other.true_from)), default=0)
        return PendingAnswers(self.call, max(self.asked, other.asked), true_from)


class Vote(Message, frozen=True, tag="vote"):
    """The peer waits in a call of the run, or of its group, in this epoch.

    `progress` counts its committed ops per tag in the epoch. A "sync" vote carries the peer's offer. A "pending" vote
    with a `question` waits for no other peer: the master answers it at once.
    """

    ballot: int
    kind: VoteKind
    epoch: Epoch
    min_world: int = 0
    progress: list[tuple[Tag, int]] = field(default_factory=list)
    offer: Offer | None = None
    question: PendingQuestion | None = None


class VoteWithdrawn(Message, frozen=True, tag="vote_withdrawn"):
    """The peer's call timed out after `waited_ms`; the master responds with `CallFailed` and the missing peers.

    If it is not `final`, the master instead evicts the peers that the call waits for, and responds with `CallExtended`.
    It is `final` if the program chose this timeout, or cancelled the call.
    """

    ballot: int
    waited_ms: int
    final: bool = True


class Busy(Message, frozen=True, tag="busy"):
    """For this long from now the peer does other work than its calls (`run.busy`); 0: no longer.

    Until then it is not evicted for keeping others waiting.
    """

    ms: int


class CallExtended(Message, frozen=True, tag="call_goes_on"):
    """The peers that this ballot's call waited for are evicted, or busy: the call's timeout starts again."""

    ballot: int


class SyncVoters(Struct, frozen=True):
    """The peers that were in a sync when it was decided, with their ballots. A peer that is out of the sync has another
    ballot, or none."""

    sync: int
    ballots: dict[PeerId, int]


class Failure(Struct, frozen=True):
    """Why a call failed for these voters."""

    reason: Reason
    voters: dict[PeerId, int]


class CallDone(Message, frozen=True, tag="call_done"):
    """The run-wide call is complete; `pending` is the result of a "pending" vote. `registrations` is their count by
    then.

    A result that several peers share names its `voters`, each with its ballot. If the master dies while it sends the
    result, some voters have it and some do not. Those that have it send it to the next master (`Returned`), which sends
    it to the voters that lack it. A result for one peer alone (its call timed out) names no voters.

    `call` counts the updates and optimisations of the run: it is the same for all peers that continue from here.
    """

    ballot: int
    pending: bool
    world: World
    registrations: int = 0
    voters: dict[PeerId, int] = field(default_factory=dict)
    call: int = 0


class CallFailed(Message, frozen=True, tag="call_failed"):
    """The run-wide call cannot complete. `voters` are as in `CallDone`."""

    ballot: int
    reason: Reason
    voters: dict[PeerId, int] = field(default_factory=dict)
    of_sync: SyncVoters | None = None
    """If the peer is out of a sync that others continue: that sync."""
    rest: list[Failure] = field(default_factory=list)
    """The same call failed for these voters, for other reasons."""


Answer = CallDone | CallFailed


class Registrations(Message, frozen=True, tag="registrations"):
    """How many peers have ever registered in the run; every Done repeats the last count received."""

    count: int


# Ops


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

    A call that fails and is not retried fails for all members, also for one that makes the call later.
    """

    op: OpRef
    commit: bool
    registrations: int = 0
    payloads: list[bytes | None] | None = None
    reason: Reason | None = None
    descriptor: bytes = b""


class OpMismatch(Message, frozen=True, tag="op_mismatch"):
    """A neighbour called something else under the same (tag, sequence). Both descriptors."""

    epoch: Epoch
    op: OpRef
    other: PeerId
    mine: bytes
    theirs: bytes


class OpTimeout(Message, frozen=True, tag="op_timeout"):
    """An op did not finish within its deadline here.

    If it is not `final` (the program chose this timeout), the master instead evicts the peers that are absent from it.
    """

    epoch: Epoch
    op: OpRef
    waited_ms: int
    descriptor: bytes = b""
    final: bool = True


class OpCancelled(Message, frozen=True, tag="op_cancelled"):
    """The program cancelled the op (Ctrl-C) before its local part was done; it will never be done here."""

    epoch: Epoch
    op: OpRef


# Epochs


class Seal(Message, frozen=True, tag="seal"):
    """Seal this epoch and respond with `Sealed`. `reason` is why the epoch ends."""

    epoch: Epoch
    reason: str


class Sealed(Message, frozen=True, tag="sealed"):
    """The peer sends no more Done and accepts no more evidence in `epoch`; these are the states of its ops."""

    epoch: Epoch
    ops: list[SealedOp]


_LOCAL_NAME = re.compile(r"(ringfold-[0-9a-f]{32})?")


def is_local_name(name: str) -> bool:
    """Whether this is a name as the engine makes it, or none. No other socket of a host is ever dialled."""
    return _LOCAL_NAME.fullmatch(name) is not None


class Member(Struct, frozen=True):
    """A member of an epoch: how its neighbours name and reach it, those of its own host by `here`."""

    peer: PeerId
    name: str
    host: str
    addresses: list[str]
    port: int
    paths: int = 1
    here: str = ""


class Record(Message, frozen=True, tag="record"):
    """A new epoch of the group: members in ring order, verdicts about the old one, and how to run ops in it.

    `dialers[i]` is the peer that dials the lanes of edge i, from members[i] to members[i + 1]. Up to `registrations`
    every registered peer was admitted or is gone; `pending`: more have registered by now. `lanes` is the number of
    lanes per path and channel, `channels` how many slices an op is cut into. `call` is the number of the run-wide call
    that admits the newcomers (`CallDone`).

    With `direct`, members that are no neighbours connect, too, once the epoch is installed, and send each other Done
    where all of them have. With `hosts` above 1, the members of each host stand side by side in the ring, the same
    number on each, beginning with members[0], and ops are reduced inside each host first.
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
    call: int = 0
    channels: int = 1
    direct: bool = False
    hosts: int = 1


class Attached(Message, frozen=True, tag="attached"):
    """All lanes of the peer in `epoch` are connected and marked.

    `lanes` is how many of them lead to the next member, and `in_memory` how many of these go through shared memory.
    Both are for `ringfold status`; a peer without neighbours has none.
    """

    epoch: Epoch
    lanes: int = 0
    in_memory: int = 0


class EdgeFailure(Struct, frozen=True):
    """A lane from `source` to `target` (ring direction) could not be connected."""

    source: PeerId
    target: PeerId
    reason: str


class AttachFailed(Message, frozen=True, tag="attach_failed"):
    """Some lanes of `epoch` could not be connected: all failing edges at once."""

    epoch: Epoch
    edges: list[EdgeFailure]


class Installed(Message, frozen=True, tag="installed"):
    """Every member of `epoch` is attached."""

    epoch: Epoch
    world: World


class LinkLost(Message, frozen=True, tag="link_lost"):
    """A lane of the installed epoch broke although the neighbour may be alive.

    With `died` it is not: its kernel has marked it, while it still frees its memory and keeps its connections open.
    """

    epoch: Epoch
    source: PeerId
    target: PeerId
    reason: str
    died: bool = False


# Shared state


class Rollback(Struct, frozen=True):
    """A run continues from `revision`, which peer `source` had, because no peer has `lost` any more.

    `is_agreed`: all members had agreed. Otherwise the revision is a checkpoint of the run's own history.
    """

    revision: int
    lost: int
    source: int
    is_agreed: bool = False


class SyncPlan(Message, frozen=True, tag="sync_plan"):
    """A sync is decided: this revision wins, `holders` have it, and this peer fetches the keys (by index) of `fetch`.

    `receivers` fetch too, and each may fetch from the others what those have received. Each fetched key comes with its
    root. `voters` are all that made an offer. `diverged` are the members that should have had this state already;
    nothing is received yet.
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


class SyncExtended(Message, frozen=True, tag="sync_goes_on"):
    """Some peer makes progress in the sync of this ballot: the timeout of those that wait for its end starts again."""

    ballot: int


class ResumeWaits(Message, frozen=True, tag="resume_waits"):
    """The sync of this ballot waits for the participants of the last one, by name: they may have newer checkpoints.

    It is decided without them when `left_ms` have passed.
    """

    ballot: int
    revision: int
    names: list[str]
    left_ms: int


class SyncReport(Message, frozen=True, tag="sync_report"):
    """The state of a sync at this peer.

    `complete`: every key is here and verified. `changed`: this peer's own state changed while it was sent. `stuck`: no
    peer is left from which the rest could be fetched. Two outcomes do not end the sync: `corrupt` (a block from one of
    `blame` was wrong, and is fetched from others), and `progress` (blocks have arrived, sent now and then).
    `received_bytes` counts bytes of blocks.
    """

    sync: int
    outcome: Literal["complete", "changed", "stuck", "corrupt", "progress"]
    text: str = ""
    blame: list[PeerId] = field(default_factory=list)
    received_bytes: int = 0


class SyncDone(Message, frozen=True, tag="sync_done"):
    """Every participant of the sync has the winning state now. `diverged` are those that should have had it before.

    `lineage` is the history that the state is part of from now on. `rollback` is where the run continues from, if not
    from its last revision. `participants` are all peers that this message is sent to.
    """

    ballot: int
    sync: int
    revision: int
    diverged: list[Divergence] = field(default_factory=list)
    lineage: Lineage | None = None
    rollback: Rollback | None = None
    participants: list[PeerId] = field(default_factory=list)


class HashesWanted(Message, frozen=True, tag="hashes_wanted"):
    """In a bulk session: send the block hashes of these keys."""

    keys: list[int]


class Hashes(Message, frozen=True, tag="hashes"):
    """Per key the concatenated hashes of its blocks; hashed together they must give the key's root."""

    lists: list[tuple[int, bytes]]


class BlocksWanted(Message, frozen=True, tag="blocks_wanted"):
    """Send these blocks, as (key, block), in this order. Each arrives in a block frame."""

    blocks: list[tuple[int, int]]


class Have(Message, frozen=True, tag="have"):
    """A receiver has these blocks now, as (key, first, count), and can send them to others."""

    ranges: list[tuple[int, int, int]]


# Link measurements


class Measure(Message, frozen=True, tag="measure"):
    """Measure the link to `other`, both directions at once; the peer that `dials` connects. The response is
    `LinkMeasured`."""

    test: int
    other: Member
    dials: bool
    secret: bytes
    most_ms: int


class Rate(Message, frozen=True, tag="rate"):
    """In a bulk session: the receiver of filler has measured enough of it."""

    bytes_per_s: float


class LinkMeasured(Message, frozen=True, tag="measured"):
    """What arrived from `other` in a measurement: bytes per second, and the RTT. `failed` is why there is no figure.

    A figure that is not `settled` is the best available: the arrival rate was never steady.
    """

    test: int
    other: PeerId
    bytes_per_s: float = 0.0
    round_trip_us: int = 0
    settled: bool = True
    failed: str = ""


# Leaving


class Leave(Message, frozen=True, tag="leave"):
    """The peer wants to leave. It responds to the seal that follows, and closes when it receives `Left`.

    A peer that was `stopped` (a signal, an exception, a loop that did not reach its end) has not finished the run.
    """

    stopped: bool = False


class Left(Message, frozen=True, tag="left"):
    """The peer has left the run, as it requested; it may close."""


class Evicted(Message, frozen=True, tag="evicted"):
    """The run continues without this peer; it may join again.

    With `for_call` its program is at fault, because it called something else than the others: it may join after a
    pause. With `on_request` an operator or a program requested the eviction: the peer does not rejoin by itself.
    `proof` is for handshakes, where nothing else shows that the sender knows the token.
    """

    reason: str
    proof: bytes = b""
    for_call: bool = False
    on_request: bool = False


# Recovery after a change of masters
#
#     peer                                             a master with a higher fence
#       |  <------------------------ Challenge(nonce)    |
#       |  Resume(id, what it knows, proofs) --------->  |     a member of the journalled epoch: it was away
#       |  <------------------- Resumed(fence, proof)    |
#       |  Returned(results, ballot) ----------------->  |     now it has returned
#       |  <----- Record of its newest epoch, if it has only an older one; then Seal of that epoch
#
# A peer that is not a member anywhere yet is registered again (`Welcome`); a peer that the run continued without is
# `Evicted`.


class Returned(Message, frozen=True, tag="returned"):
    """What a returning peer knows, so that nothing is decided twice.

    `answers` are the last results that it shares with others; `ballot` is the call that its program waits in (0: none).
    `installed`: it received `Installed` for its epoch. `last_sync`: the voters of the last sync that
    it took part in, unless that sync ended. `redoes`: an earlier change of masters interrupted that sync, and the call
    that the program waits in, or is about to make, is the same sync again. `pending`: which questions about pending
    peers were answered since the last run-wide call, and how.
    """

    answers: list[Answer] = field(default_factory=list)
    ballot: int = 0
    installed: bool = False
    last_sync: SyncVoters | None = None
    redoes: bool = False
    pending: PendingAnswers | None = None


# Directions


ToMaster = (
    Hello
    | Resume
    | GuardianHello
    | PeerDied
    | Returned
    | StatusRequest
    | EventsRequest
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
    | LinkMeasured
    | Leave
    | NodeHello
    | ProbeCommand
    | RunsRequest
    | ForgetRun
    | RoundReport
    | RoundAlarm
    | RelayHello
    | RelayNodes
    | RelayReports
    | RelayAlarm
)
FromMaster = (
    Challenge
    | Refused
    | Welcome
    | AdmissionWaits
    | Resumed
    | GuardianWelcome
    | Registrations
    | Seal
    | Record
    | Installed
    | CallDone
    | CallFailed
    | CallExtended
    | SyncPlan
    | SyncExtended
    | ResumeWaits
    | SyncDone
    | Measure
    | Evicted
    | Left
    | Status
    | Events
    | EvictResponse
    | RunList
    | NodeWelcome
    | ProbeAnswer
    | ProbeGraph
    | ProbeHalt
    | RoundClock
    | RoundEnd
    | RoundStart
    | RelayWelcome
    | RelayAnswers
    | RelayRound
    | RelayGraph
    | RelayClocks
)
Handshake = Challenge | Refused | LaneHello | LaneWelcome | BulkHello | BulkWelcome
BulkMessage = HashesWanted | Hashes | BlocksWanted | Have | Rate | Refused
