"""The state of a run: its connections, its peers, its groups. Tables and small methods; the decisions are elsewhere.

A peer that is gone is in no table. It may join again, under a new id: a peer's id is the count of registrations, so
peers in order of id are in order of age.

Times in here are those of the master's own clock (`liveness.py`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master.edges import EdgeHistory
from ringfold.master.effects import CloseConnection, Effect, Notify, SendMessage
from ringfold.master.events import Conn, Ns
from ringfold.master.lifecycle import Life
from ringfold.master.liveness import StepProgress
from ringfold.master.pending import PendingQuestions
from ringfold.master.settings import MasterSettings
from ringfold.master.states import (
    EPOCH_PHASES,
    MEMBERSHIPS,
    OPTIMISATION_STAGES,
    RUN_PHASES,
    EpochPhase,
    Membership,
    OptimisationStage,
    RunPhase,
)
from ringfold.master.verdicts import Cause, Collector
from ringfold.state.election import ElectedState, FinishedSync
from ringfold.topology.links import BandwidthStore, DelayStore
from ringfold.topology.ring import Edge
from ringfold.units import MS
from ringfold.wire.diagnostics import with_names
from ringfold.wire.frames import Announced, Heartbeat
from ringfold.wire.messages import (
    CallDone,
    CallFailed,
    Divergence,
    EdgeFailure,
    Epoch,
    Evicted,
    EvidenceBy,
    Failure,
    FromMaster,
    GroupId,
    Hello,
    Lineage,
    LinkMeasured,
    Member,
    Offer,
    OpRef,
    PeerId,
    Reason,
    Record,
    Rollback,
    SealedOp,
    SyncVoters,
    Tag,
    VoteKind,
    VoteWithdrawn,
    World,
)
from ringfold.wire.notices import CallRefused, EvictionCause, Notice, PeerGone
from ringfold.wire.probing import NodeId
from ringfold.wire.status import Progress

if TYPE_CHECKING:
    from ringfold.master.syncs import CheckpointWait

_IN_AN_EPOCH = (Membership.RESUMING, Membership.MEMBER, Membership.LEAVING)
CLIENT_IDLE_NS = 120 * 1_000_000_000
"""A client that requested the status and sends nothing more is disconnected: its machine may have lost power."""
MAX_NAMES = 4_096
"""Names of peers that are gone are remembered for later messages, up to this many."""


@dataclass(slots=True)
class Connection:
    """A control connection. After it has proven the token it belongs to a peer, its guardian, a probing node, or a
    command."""

    id: Conn
    remote: str
    nonce: bytes
    opened_ns: Ns
    """When it was opened, or last sent a request."""
    token: bytes = b""
    """The token that its requests are proven with."""
    proven: bool = False
    peer: "Peer | None" = None
    guarded: "Peer | None" = None
    """The peer whose guardian it belongs to."""
    node: NodeId = 0
    """The node id of the peer, or of the process, if it probes."""
    is_relay: bool = False
    """Whether it is the connection of a region's nodes."""
    waits: bool = False
    """Whether the response to a command is outstanding."""

    def is_idle_client(self, now: Ns) -> bool:
        is_peer = self.peer is not None or self.guarded is not None
        is_command = self.proven and not is_peer and not self.node and not self.is_relay
        return is_command and not self.waits and now - self.opened_ns >= CLIENT_IDLE_NS


@dataclass(slots=True)
class Ballot:
    """A run-wide call that a peer waits in. It counts only in the epoch in which it was cast."""

    number: int
    kind: VoteKind
    epoch: Epoch
    min_world: int
    progress: dict[Tag, int]
    offer: Offer | None
    """The peer's offer in a sync."""
    called_ns: Ns
    """When the call was first received; the peer casts it again after each epoch change."""
    cast_ns: Ns
    """When it was cast in this epoch."""


@dataclass(slots=True)
class Peer:
    """A process in the run, and what it last reported."""

    id: PeerId
    conn: Conn
    remote: str
    group: GroupId
    member: Member
    registered_ns: Ns
    last_received_ns: Ns
    last_echo_ns: Ns
    cores: int = 1
    threads: int = 0
    """What it offers for its ops, as in `Hello`."""
    key: bytes = b""
    """Both nonces of its control connection: what its guardian's connection is proven with."""
    guardian: Conn | None = None
    """The connection of its guardian."""
    membership: Membership = Membership.REGISTERED
    stopped: bool = False
    """Whether it leaves before its program is done."""
    ballot: Ballot | None = None
    last_answered: int = -1
    """The highest ballot that has its result; an older vote that was still in flight is void."""
    gave_up: dict[VoteKind, Ns] = field(default_factory=dict)
    """When a call of this kind last timed out at this peer."""
    calls: int = 0
    """How many of its votes have their result."""
    busy_until_ns: Ns = 0
    """It has announced other work until then."""
    suspected: bool = False
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(0, 0))
    progress: Progress = field(default_factory=Progress)
    """What its program reported last, without events."""
    progress_ns: Ns = 0
    next_event: int = 0
    """The number of the first event of its that was not recorded here yet."""
    last_heartbeat_ns: Ns = 0
    step_progress: StepProgress = field(init=False)

    def __post_init__(self) -> None:
        self.step_progress = StepProgress(self.registered_ns, self.registered_ns)

    def enter(self, membership: Membership) -> None:
        self.membership = MEMBERSHIPS.move(self.membership, membership)

    @property
    def is_member(self) -> bool:
        """Whether it is in its group's newest epoch."""
        return self.membership in _IN_AN_EPOCH

    def mark_answered(self, ballot: int) -> None:
        """This ballot has its result: it no longer waits, and cannot be cast again."""
        self.last_answered = max(self.last_answered, ballot)
        if self.ballot is not None and self.ballot.number <= self.last_answered:
            self.calls += 1
            self.ballot = None


@dataclass(slots=True)
class EpochChange:
    """An epoch change in progress: sealing the old epoch, or attaching the new one."""

    since_ns: Ns
    deadline_ns: Ns = 0
    causes: list[Cause] = field(default_factory=list)
    """Why the epoch ends, until the next one is recorded."""
    seals: dict[PeerId, list[SealedOp]] = field(default_factory=dict)
    admitted: set[PeerId] = field(default_factory=set)
    """Peers that will be members of the next record."""
    newcomers: set[PeerId] = field(default_factory=set)
    """Members of the record that were in no installed epoch."""
    answers: dict[PeerId, list[EdgeFailure]] = field(default_factory=dict)
    """The responses to the record: no failures means attached."""
    failed_proposals: int = 0
    blame: dict[PeerId, int] = field(default_factory=dict)
    """How many edges of each member failed during this change."""


@dataclass(slots=True)
class BrokenLink:
    since_ns: Ns
    reason: str


@dataclass(slots=True)
class Dispute:
    """Members called different things under one tag and sequence (see `disputes.py`)."""

    since_ns: Ns
    calls: dict[PeerId, int] = field(default_factory=dict)
    """The fingerprint of what each member called, as reported by that member."""
    descriptors: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class RunningSync:
    """A sync that is decided: blocks are in flight. Epoch changes do not affect it; a peer that dies is out of it."""

    number: int
    since_ns: Ns
    plan: ElectedState
    ballots: dict[PeerId, int]
    """The participants, which wait for its end."""
    holders: set[PeerId]
    """The peers that have all of the winning state by now."""
    unfinished: set[PeerId]
    """The peers that do not."""
    voters: SyncVoters
    """All peers that made an offer."""
    last_progress_ns: Ns = 0
    """When some peer last made progress."""
    last_told_ns: Ns = 0
    """When the participants' timeouts were last extended."""
    failures: dict[PeerId, CallFailed] = field(default_factory=dict)
    """The peers that are out of it, and what was sent to them."""
    corrupt: set[PeerId] = field(default_factory=set)
    """The peers that sent a wrong block."""
    diverged: dict[PeerId, Divergence] = field(default_factory=dict)
    """The peers that should have had the winning state already."""
    lineage: Lineage | None = None
    """The lineage of the state after the sync."""
    rollback: Rollback | None = None
    savers: set[PeerId] = field(default_factory=set)
    """The peers whose programs write checkpoints."""


@dataclass(frozen=True, slots=True)
class LaneCount:
    """How many lanes a link has, and how many of them are in shared memory."""

    lanes: int
    in_memory: int


@dataclass(slots=True)
class Group:
    """Peers that reduce with each other. An empty group is kept, so that no epoch number is used twice."""

    id: GroupId
    edges: EdgeHistory
    epoch: Epoch = 0
    """The newest recorded epoch; 0 before the first."""
    ring: list[PeerId] = field(default_factory=list)
    """The members of that epoch, in ring order."""
    dialers: list[PeerId] = field(default_factory=list)
    lanes: dict[PeerId, LaneCount] = field(default_factory=dict)
    """The lanes from each member to the next, as those report that are attached to that epoch."""
    evidence: EvidenceBy = "ring"
    phase: EpochPhase = EpochPhase.IDLE
    change: EpochChange | None = None
    """The epoch change in progress; None in phase IDLE."""
    collector: Collector | None = None
    lost_links: dict[Edge, BrokenLink] = field(default_factory=dict)
    """Links of the installed epoch that broke just now; the death of a peer may explain them."""
    disputes: dict[OpRef, Dispute] = field(default_factory=dict)
    """Disputes in the installed epoch."""
    incumbents: set[PeerId] = field(default_factory=set)
    """Members that had committed an op, or finished a sync, before the newest admission: they decide disputes."""
    installed_ns: Ns = 0
    sync: RunningSync | None = None
    """The sync in progress."""
    finished: FinishedSync | None = None
    """The last sync that finished: the next one is compared with it."""
    orphaned_sync: int = 0
    """The number of that sync, if its state was lost with the last member of the run."""
    retrying: set[PeerId] = field(default_factory=set)
    """Peers of a sync that the last master could not end, and that will vote for it again."""
    excluded_from_retry: set[PeerId] = field(default_factory=set)
    """Peers that were out of that sync already: it is decided again without them."""
    lineage: Lineage | None = None
    """The lineage of the group's state. It outlives `finished`: what was abandoned stays abandoned."""
    resume: "CheckpointWait | None" = None
    """The peers that the next sync waits for, because no member has the last state."""
    resume_since_ns: Ns | None = None
    """Since when. It is kept while peers load the requested checkpoint and sync again, so that the wait is not
    repeated."""
    finished_sync: int = 0
    """The number of the last finished sync."""
    finished_ballots: dict[PeerId, int] = field(default_factory=dict)
    """Its participants, and the ballots that it answers."""
    finished_failures: dict[PeerId, CallFailed] = field(default_factory=dict)
    """The peers that were out of it, and what was sent to them."""
    finished_diverged: list[Divergence] = field(default_factory=list)
    """The peers that should have had its state before."""
    finished_rollback: Rollback | None = None
    """Where it continued from, if not from the revision before."""
    diverged: list[Divergence] = field(default_factory=list)
    """The same for all syncs: the last few."""
    divergences: int = 0
    """The same for all syncs: their count."""
    record: Record | None = None
    """The newest record, as it was sent."""
    wanted_ring: list[PeerId] = field(default_factory=list)
    """The ring for the next epoch, if its members are still these."""
    only_ring: bool = False
    """A lane between members that are no neighbours broke or could not be connected: the ring alone carries ops, until
    somebody is admitted."""
    moonshot: list[PeerId] = field(default_factory=list)
    """A ring that the moonshot search has found since the last call that could have adopted it."""

    def enter(self, phase: EpochPhase) -> None:
        """The next phase of the epoch change; IDLE ends it."""
        self.phase = EPOCH_PHASES.move(self.phase, phase)
        if phase is EpochPhase.IDLE:
            self.change = None


@dataclass(slots=True)
class LinkTest:
    """A measurement of one pair, both directions at once. `reports` are from the ends that have measured."""

    pair: Edge
    dialer: PeerId
    deadline_ns: Ns
    reports: dict[PeerId, LinkMeasured] = field(default_factory=dict)


@dataclass(slots=True)
class Optimisation:
    """An optimize vote that completed: first links are measured, then rings chosen, then epochs installed."""

    since_ns: Ns
    ballots: dict[PeerId, int]
    groups: list[GroupId]
    rounds: list[list[Edge]]
    """The rounds that have not started."""
    begun: int = 0
    """How many rounds have started."""
    tests: dict[int, LinkTest] = field(default_factory=dict)
    """The tests of the present round that are not over, by their number."""
    figures: dict[Edge, tuple[bool, float]] = field(default_factory=dict)
    """The best figure of each direction so far: whether it is settled, and bytes per second."""
    doubtful: dict[Edge, PeerId] = field(default_factory=dict)
    """Pairs to measure again, and which peer dials."""
    repeats: int = 0
    """How often doubtful pairs have been measured again."""
    failed_once: dict[Edge, str] = field(default_factory=dict)
    """Pairs to try from the other end, and why the first try failed."""
    failed: dict[Edge, str] = field(default_factory=dict)
    stage: OptimisationStage = OptimisationStage.MEASURING
    changing: set[GroupId] = field(default_factory=set)
    """In stage INSTALLING: the groups that get another ring."""

    def enter(self, stage: OptimisationStage) -> None:
        self.stage = OPTIMISATION_STAGES.move(self.stage, stage)

    @property
    def is_installing(self) -> bool:
        return self.stage is OptimisationStage.INSTALLING


@dataclass(slots=True)
class Admission:
    """An update vote that completed: its voters get the result when the epochs that it caused are installed."""

    since_ns: Ns
    ballots: dict[PeerId, int]
    groups: set[GroupId]
    epochs: dict[GroupId, Epoch] = field(default_factory=dict)
    """The epochs of these groups at its start."""


@dataclass(frozen=True, slots=True)
class AwayMember:
    """A member of the journalled epoch that has not returned to this master yet."""

    group: GroupId
    member: Member


class Run:
    """All tables, and the effects of the step in progress."""

    def __init__(self, settings: MasterSettings, name: str = DEFAULT_RUN, wall_s: Callable[[], int] = int) -> None:
        """`wall_s` is the wall clock. It is only shown."""
        self.settings, self.name, self.wall_s = settings, name, wall_s
        self.life = Life()
        self.phase = RunPhase.NEW
        self.left_last = False
        """Whether the last member that left the run did so by itself, with its program done."""
        self.revision = 0
        """The revision of the last finished sync, also if its state is given up."""
        self.connections: dict[Conn, Connection] = {}
        self.unproven: dict[Conn, Connection] = {}
        self.peers: dict[PeerId, Peer] = {}
        self.names: dict[PeerId, str] = {}
        """The names of the peers, and of those that are gone since a short while."""
        self.groups: dict[GroupId, Group] = {}
        self.admission: Admission | None = None
        self.registrations = 0
        self.epochs = 0
        self.calls = 0
        """How many updates and optimisations were complete: the number of the last one."""
        self.questions = PendingQuestions()
        self.syncs = 0
        """How many syncs were ever started, over all groups."""
        self.optimisation: Optimisation | None = None
        self.evictions = 0
        """How many peers were sent `Evicted`: only a master that certainly leads may send it."""
        self.tests = 0
        """How many measurements were ever started."""
        self.rounds = 0
        """No probing round has had a higher sequence than this."""
        self.probing: bool | None = None
        """Whether probing rounds run, once a node or a probe command has connected; None before: the settings
        decide."""
        self.links = BandwidthStore()
        self.delays = DelayStore()
        self.gone_nodes: list[NodeId] = []
        """Nodes whose connection is gone, until the round machine has the event."""
        self.gone_relays: list[Conn] = []
        """The same for relays."""
        self.unmeasured: dict[PeerId, Ns] = {}
        """The ends of links that could not be measured, and since when."""
        self.away: dict[PeerId, AwayMember] = {}
        """Members that this master knows from the journal only. It decides nothing until all have returned or are
        given up."""
        self.return_deadline_ns: Ns = 0
        self.withdrawn: list[tuple[PeerId, VoteWithdrawn]] = []
        """Calls that timed out meanwhile: a member that is still away may have their result."""
        self.out: list[Effect] = []

    def enter(self, phase: RunPhase) -> None:
        self.phase = RUN_PHASES.move(self.phase, phase)

    # Queries

    def group(self, group: GroupId) -> Group:
        """The group with this number, created on first use."""
        found = self.groups.get(group)
        if found is None:
            memory = EdgeHistory(self.settings.bad_edge_s * 1000 * MS)
            found = self.groups[group] = Group(group, memory)
        return found

    def is_excluded(self, peer: Peer) -> bool:
        """Whether the next sync of its group retries one that this peer was out of, before a change of masters."""
        group = self.groups[peer.group]
        return bool(group.retrying) and peer.id in group.excluded_from_retry

    def live(self, group: Group) -> list[Peer]:
        """The members of the newest epoch that are not gone, in ring order."""
        return [self.peers[peer] for peer in group.ring if peer in self.peers]

    def accepted(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.is_member]

    def registered(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.membership is Membership.REGISTERED]

    def ballot(self, peer: Peer) -> Ballot | None:
        """The peer's vote, if it counts now: it was cast in its group's epoch, and that epoch is installed."""
        ballot = peer.ballot
        if ballot is None or peer.membership is Membership.LEAVING:
            return None
        group = self.groups[peer.group]
        return ballot if group.change is None and ballot.epoch == group.epoch else None

    def short_of_peers(self) -> set[PeerId]:
        """The peers that wait in an update of a group that has too few peers for one of them.

        Other groups do not wait for these peers. Their own group continues together: none of them continues alone.
        """
        return self._short_of(self.size)

    def short_of_members(self) -> set[PeerId]:
        """The peers that wait in an update for their group to grow, even if enough peers are registered by now.

        They can call nothing else before an update admits those, so no other call waits for them.
        """
        return self._short_of(lambda group: len(self.groups[group].ring))

    def _short_of(self, size: Callable[[GroupId], int]) -> set[PeerId]:
        waiting: dict[GroupId, dict[PeerId, int]] = {}
        for peer in self.accepted():
            ballot = self.ballot(peer)
            if ballot is not None and ballot.kind == "update":
                waiting.setdefault(peer.group, {})[peer.id] = ballot.min_world
        short = [wanted for group, wanted in waiting.items() if max(wanted.values()) > size(group)]
        return {peer for wanted in short for peer in wanted}

    def admissible(self, short: Collection[PeerId]) -> list[Peer]:
        """The peers that may be admitted now: all registered ones, except in a group that waits for still more."""
        waiting = {self.peers[peer].group for peer in short}
        return [peer for peer in self.registered() if peer.group not in waiting]

    def size(self, group: GroupId) -> int:
        """How many peers a group has, including those that wait to be admitted."""
        return sum(peer.group == group for peer in self.peers.values())

    def announced(self, peer: Peer) -> list[Announced]:
        """The ops of its group's newest epoch that the peer's last heartbeat named. Only a member has any."""
        return peer.heartbeat.ops if peer.is_member and peer.heartbeat.epoch == self.groups[peer.group].epoch else []

    def world(self) -> World:
        """The run-wide numbers. Admitted peers count, so that all records of one admission agree."""
        sizes: dict[GroupId, int] = {}
        for peer in self.peers.values():
            if peer.membership is not Membership.REGISTERED:
                sizes[peer.group] = sizes.get(peer.group, 0) + 1
        return World(sum(sizes.values()), len(sizes), max(sizes.values(), default=0))

    def settled_registrations(self) -> int:
        """The count of registrations up to which every peer was admitted or is gone."""
        return min((peer.id - 1 for peer in self.registered()), default=self.registrations)

    def is_current(self, peer: Peer, epoch: Epoch) -> bool:
        """Whether a peer's message is about its group's newest epoch; False if a newer record was in flight."""
        if not peer.is_member:
            raise RemoteProtocolError(f"it names epoch {epoch} before it was accepted")
        newest = self.groups[peer.group].epoch
        if epoch > newest:
            raise RemoteProtocolError(f"it names epoch {epoch}, but the newest is {newest}")
        return epoch == newest

    # Actions

    def send(self, peer: Peer, message: FromMaster) -> None:
        self.out.append(SendMessage(peer.conn, message))

    def notify(self, notice: Notice) -> None:
        if isinstance(notice, CallRefused):
            notice = structs.replace(notice, text=self.add_names(notice.text))
        self.out.append(Notify(notice))

    def add_names(self, text: str) -> str:
        """The text with the names of its peers. Every text for people goes through here."""
        return with_names(text, self.names)

    def add_names_to_reason(self, reason: Reason) -> Reason:
        return structs.replace(reason, text=self.add_names(reason.text))

    def remember_name(self, member: Member) -> None:
        self.names[member.peer] = member.name
        if len(self.names) > MAX_NAMES:
            gone = (peer for peer in self.names if peer not in self.peers and peer not in self.away)
            self.names.pop(next(gone, 0), None)

    def answer_calls(self, ballots: dict[PeerId, int]) -> None:
        """A run-wide call is complete: all its voters get the same result."""
        pending, world, voters = bool(self.registered()), self.world(), dict(sorted(ballots.items()))
        for voter, ballot in voters.items():
            peer = self.peers[voter]
            self.send(peer, CallDone(ballot, pending, world, self.registrations, voters, self.calls))
            peer.mark_answered(ballot)

    def fail_call(
        self,
        peer: Peer,
        ballot: int,
        reason: Reason,
        of_sync: SyncVoters | None = None,
    ) -> CallFailed:
        """A call failed for one peer alone. Returns what was sent to it."""
        answer = CallFailed(ballot, self.add_names_to_reason(reason), of_sync=of_sync)
        self.send(peer, answer)
        peer.mark_answered(ballot)
        return answer

    def fail_calls(self, reasons: Mapping[PeerId, Reason], ballots: dict[PeerId, int]) -> None:
        """A call failed for all its voters, each with its reason. Voters with the same reason share the result."""
        failures: list[Failure] = []
        reasons = {voter: self.add_names_to_reason(reason) for voter, reason in reasons.items()}
        for voter, ballot in sorted(ballots.items()):
            known = next((each for each in failures if each.reason == reasons[voter]), None)
            if known is None:
                failures.append(Failure(reasons[voter], {voter: ballot}))
            else:
                known.voters[voter] = ballot
        for failure in failures:
            rest = [each for each in failures if each is not failure]
            for voter, ballot in failure.voters.items():
                self.send(self.peers[voter], CallFailed(ballot, failure.reason, failure.voters, rest=rest))
                self.peers[voter].mark_answered(ballot)

    def register(self, now: Ns, connection: Connection, hello: Hello) -> Peer:
        """A new peer under a new id. Members learn of it by the count of registrations."""
        self.registrations += 1
        member = Member(
            self.registrations, hello.name, hello.host, hello.addresses, hello.port, hello.paths, hello.here
        )
        peer = Peer(member.peer, connection.id, connection.remote, hello.group, member, now, now, now)
        peer.cores, peer.threads, peer.key = hello.cores, hello.threads, connection.nonce + hello.nonce
        self.peers[peer.id] = peer
        self.remember_name(member)
        connection.peer = peer
        self.group(peer.group)
        return peer

    def drop_connection(self, connection: Connection, farewell: FromMaster | None, reason: str) -> None:
        if farewell is not None:
            self.out.append(SendMessage(connection.id, farewell))
        self.evictions += isinstance(farewell, Evicted)
        self.out.append(CloseConnection(connection.id, reason))
        self.forget_connection(connection)

    def forget_connection(self, connection: Connection) -> None:
        del self.connections[connection.id]
        self.unproven.pop(connection.id, None)
        if connection.node:
            self.gone_nodes.append(connection.node)
        if connection.is_relay:
            self.gone_relays.append(connection.id)
        if connection.guarded is not None:
            connection.guarded.guardian = None

    def drop_guardian(self, peer: Peer) -> None:
        """The peer is gone, or about to return on another connection: its guardian ends when this one is closed."""
        if peer.guardian is not None:
            self.drop_connection(self.connections[peer.guardian], None, f"peer {peer.id} is gone")

    def remove(
        self,
        peer: Peer,
        how: Literal["left", "lost", "evicted"],
        reason: str,
        farewell: FromMaster | None,
        cause: EvictionCause | None = None,
    ) -> None:
        """Take a peer out of all tables. `epochs.py` decides what this means for its epoch."""
        connection = self.connections.get(peer.conn)
        if connection is not None:
            self.drop_connection(connection, farewell, reason)
        self.drop_guardian(peer)
        del self.peers[peer.id]
        self.away.pop(peer.id, None)
        if peer.membership is not Membership.REGISTERED:
            self.left_last = how == "left" and not peer.stopped
        peer.enter(Membership.GONE)
        group = self.groups[peer.group]
        group.edges.forget_peer(peer.id)
        if group.change is not None:
            for table in (group.change.seals, group.change.answers, group.change.blame):
                table.pop(peer.id, None)
            group.change.admitted.discard(peer.id)
            group.change.newcomers.discard(peer.id)
        if self.admission is not None:
            self.admission.ballots.pop(peer.id, None)
        if self.optimisation is not None:
            self.optimisation.ballots.pop(peer.id, None)
        for dispute in group.disputes.values():
            dispute.calls.pop(peer.id, None)
        self.links.forget_peer(peer.id)
        self.delays.forget_peer(peer.id)
        self.unmeasured.pop(peer.id, None)
        group.retrying.discard(peer.id)
        if group.sync is not None:
            group.sync.ballots.pop(peer.id, None)
            group.sync.holders.discard(peer.id)
            group.sync.unfinished.discard(peer.id)
        self.notify(PeerGone(peer.id, peer.member.name, how, reason, cause))
