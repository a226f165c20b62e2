"""The state of a run: its connections, its peers, its groups. Tables and small verbs; the decisions are elsewhere.

A peer's standing only grows: registered (it waits), admitted (a vote let it in; its first epoch is being made),
accepted (it is a member of its group's newest epoch). A peer that is gone is in no table; it may join again, under a
new id. Peer ids are the count of registrations, so the peers are in order of age wherever they are in order of id.

Time in here is the master's own (see `liveness.py`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master.edges import EdgeMemory
from ringfold.master.events import Close, Conn, Effect, Ns, Send, Tell
from ringfold.master.evidence import Collector
from ringfold.master.life import Life
from ringfold.master.liveness import MS, Pace
from ringfold.master.settings import MasterSettings
from ringfold.master.verdicts import Cause
from ringfold.state.election import ElectedState, FinishedSync
from ringfold.topology.links import BandwidthStore, DelayStore
from ringfold.topology.ring import Edge
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
    Measured,
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
from ringfold.wire.notices import CallRefused, Notice, PeerGone
from ringfold.wire.probing import NodeId

if TYPE_CHECKING:
    from ringfold.master.resuming import ResumeWait

WATCHER_IDLE_NS = 120 * 1_000_000_000
"""Who looked at the status and asks no more keeps no connection for ever: its machine may have lost power."""
MAX_NAMES = 4_096
"""Names of peers that are gone are kept for the sentences that are still to come, and not for ever."""


@dataclass(slots=True)
class Connection:
    """A control connection. It is nobody's until it has proven the token; then a peer's, a node's, or a watcher's."""

    id: Conn
    remote: str
    nonce: bytes
    opened: Ns
    """When it was opened, or a watcher last asked."""
    token: bytes = b""
    """What its claims are proven with."""
    proven: bool = False
    peer: "Peer | None" = None
    node: NodeId = 0
    """Of the peer, or of the process at the other end, if it probes."""
    waits: bool = False
    """For the answer to a command."""

    def is_idle_watcher(self, now: Ns) -> bool:
        is_watcher = self.proven and self.peer is None and not self.node
        return is_watcher and not self.waits and now - self.opened >= WATCHER_IDLE_NS


class Standing(Enum):
    REGISTERED = 1
    ADMITTED = 2
    ACCEPTED = 3


@dataclass(slots=True)
class Ballot:
    """A run-wide call that a peer waits in. It counts only in the epoch in which it was cast."""

    number: int
    kind: VoteKind
    epoch: Epoch
    min_world: int
    progress: dict[Tag, int]
    offer: Offer | None
    """What the peer brings to a sync."""
    asked: Ns
    """When the call was first heard of; the peer casts it again after each epoch change."""
    cast: Ns
    """When it was cast in this epoch."""


@dataclass(slots=True)
class Peer:
    """A process in the run, and what was last heard of it."""

    id: PeerId
    conn: Conn
    remote: str
    group: GroupId
    member: Member
    registered: Ns
    heard: Ns
    echoed: Ns
    standing: Standing = Standing.REGISTERED
    leaving: bool = False
    stopped: bool = False
    """Whether it leaves before its program is done."""
    ballot: Ballot | None = None
    answered: int = -1
    """The highest ballot that was answered; an older vote that was still on its way is void."""
    gave_up: dict[VoteKind, Ns] = field(default_factory=dict)
    """When a call of this kind last ended here because its time was over."""
    calls: int = 0
    """How many of its votes were answered."""
    busy_until: Ns = 0
    """By its own word it works on something else until then."""
    suspected: bool = False
    beat: Heartbeat = field(default_factory=lambda: Heartbeat(0, 0))
    beat_at: Ns = 0
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(self.registered, self.registered)

    def answers(self, ballot: int) -> None:
        """This ballot has been answered: it no longer waits, and cannot be cast again."""
        self.answered = max(self.answered, ballot)
        if self.ballot is not None and self.ballot.number <= self.answered:
            self.calls += 1
            self.ballot = None


@dataclass(slots=True)
class Change:
    """A group on its way from one epoch to the next: sealing the old one, or attaching the new one."""

    since: Ns
    deadline: Ns = 0
    phase: Literal["sealing", "attaching"] = "sealing"
    causes: list[Cause] = field(default_factory=list)
    """Why the epoch ends, until the next one is recorded."""
    seals: dict[PeerId, list[SealedOp]] = field(default_factory=dict)
    admitted: set[PeerId] = field(default_factory=set)
    """To be members of the next record."""
    newcomers: set[PeerId] = field(default_factory=set)
    """Members of the record that no installed epoch has had."""
    answers: dict[PeerId, list[EdgeFailure]] = field(default_factory=dict)
    """Who has answered the record: no failures means attached."""
    failed_proposals: int = 0
    blame: dict[PeerId, int] = field(default_factory=dict)
    """How often each member was an end of an edge that failed during this change."""


@dataclass(slots=True)
class LostLink:
    since: Ns
    reason: str


@dataclass(slots=True)
class Dispute:
    """Members called different things under one tag and sequence (see `disputes.py`)."""

    since: Ns
    calls: dict[PeerId, int] = field(default_factory=dict)
    """The fingerprint of what each member called, by its own word."""
    descriptors: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Sync:
    """A sync that is decided: the blocks are on their way. Epoch changes do not touch it; a death takes a peer out."""

    number: int
    since: Ns
    plan: ElectedState
    ballots: dict[PeerId, int]
    """Who takes part, and waits for its end."""
    holders: set[PeerId]
    """Who has all of the winning state by now."""
    unfinished: set[PeerId]
    """Who does not."""
    voters: SyncVoters
    """All who made an offer."""
    moved: Ns = 0
    """When somebody last got on with it."""
    told: Ns = 0
    """When everybody was last told that it goes on."""
    failures: dict[PeerId, CallFailed] = field(default_factory=dict)
    """Who is out of it, and what it was told."""
    corrupt: set[PeerId] = field(default_factory=set)
    """From whom somebody got a wrong block."""
    diverged: dict[PeerId, Divergence] = field(default_factory=dict)
    """Who should have had the winning state, and had not."""
    lineage: Lineage | None = None
    """The history that the state is part of when the sync has ended."""
    rollback: Rollback | None = None
    savers: set[PeerId] = field(default_factory=set)
    """Whose programs keep checkpoints."""


@dataclass(slots=True)
class Group:
    """Peers that reduce with each other. A group stays known when it is empty, so that no epoch number comes twice."""

    id: GroupId
    edges: EdgeMemory
    epoch: Epoch = 0
    """The newest recorded epoch; 0 before the first."""
    ring: list[PeerId] = field(default_factory=list)
    """The members of that epoch, in ring order."""
    dialers: list[PeerId] = field(default_factory=list)
    evidence: EvidenceBy = "ring"
    change: Change | None = None
    collector: Collector | None = None
    lost_links: dict[Edge, LostLink] = field(default_factory=dict)
    """Links of the installed epoch that broke just now; a death may explain them."""
    disputes: dict[OpRef, Dispute] = field(default_factory=dict)
    """In the installed epoch."""
    incumbents: set[PeerId] = field(default_factory=set)
    """Who had committed an op, or finished a sync, before the newest admission: they decide disputes."""
    installed: Ns = 0
    sync: Sync | None = None
    """The sync in progress."""
    finished: FinishedSync | None = None
    """The last sync that finished: what the next one is measured by."""
    orphaned_sync: int = 0
    """The number of that sync, if all members of the run went without taking its state along."""
    redo: set[PeerId] = field(default_factory=set)
    """Who was in a sync that the last master could not end, and has neither voted anew nor given up."""
    out_of_redo: set[PeerId] = field(default_factory=set)
    """Who was out of it already: it is decided anew without these."""
    lineage: Lineage | None = None
    """The history of the group's state. It outlives `finished`: what was abandoned stays so."""
    resume: "ResumeWait | None" = None
    """Whom the next sync waits for, because nobody is here who has the last state."""
    resume_since: Ns | None = None
    """Since when. It stays while peers load what was asked for and sync again: nobody is waited for twice."""
    finished_sync: int = 0
    """Its number."""
    finished_ballots: dict[PeerId, int] = field(default_factory=dict)
    """Who is told that it is done, and as the answer to which call."""
    finished_failures: dict[PeerId, CallFailed] = field(default_factory=dict)
    """Who was told that it is out of it."""
    finished_diverged: list[Divergence] = field(default_factory=list)
    """Who should have had its state before, and had not."""
    finished_rollback: Rollback | None = None
    """From where it went on, if not from the revision before."""
    diverged: list[Divergence] = field(default_factory=list)
    """The same of all syncs, the last few."""
    divergences: int = 0
    """How many there were."""
    record: Record | None = None
    """The newest one, as it was sent."""
    wish: list[PeerId] = field(default_factory=list)
    """The ring that the next epoch is to have, if its members are still these."""
    moonshot: list[PeerId] = field(default_factory=list)
    """A ring that a long search has found since the last `optimize_topology`."""


@dataclass(slots=True)
class LinkTest:
    """A measurement of one pair, both ways at once. `reports` are from those ends that have measured."""

    pair: Edge
    dialer: PeerId
    deadline: Ns
    reports: dict[PeerId, Measured] = field(default_factory=dict)


@dataclass(slots=True)
class Optimisation:
    """An optimize vote that completed: first links are measured, then rings chosen, then epochs installed."""

    since: Ns
    ballots: dict[PeerId, int]
    groups: list[GroupId]
    rounds: list[list[Edge]]
    """The rounds that have not begun."""
    begun: int = 0
    """How many rounds have."""
    tests: dict[int, LinkTest] = field(default_factory=dict)
    """Those of the present round that are not over, by their number."""
    figures: dict[Edge, tuple[bool, float]] = field(default_factory=dict)
    """The best figure of each direction so far: whether it is settled, and bytes a second."""
    doubtful: dict[Edge, PeerId] = field(default_factory=dict)
    """Pairs that are to be measured again, and who dials."""
    repeats: int = 0
    """How often doubtful pairs have been measured again."""
    failed_once: dict[Edge, str] = field(default_factory=dict)
    """Pairs that are to be tried from the other end, and why the first try failed."""
    failed: dict[Edge, str] = field(default_factory=dict)
    changing: set[GroupId] | None = None
    """Once the rings are chosen: the groups that get another one."""


@dataclass(slots=True)
class Admission:
    """An update vote that completed: its voters are answered when the epochs it caused are installed."""

    since: Ns
    ballots: dict[PeerId, int]
    groups: set[GroupId]
    epochs: dict[GroupId, Epoch] = field(default_factory=dict)
    """The epochs of these groups when it began."""


@dataclass(frozen=True, slots=True)
class Away:
    """A member of the journalled epoch that has not come back yet to this master."""

    group: GroupId
    member: Member


class Run:
    """All tables, and the effects of the step in progress."""

    def __init__(self, settings: MasterSettings, name: str = DEFAULT_RUN, wall_s: Callable[[], int] = int) -> None:
        """`wall_s` is the wall clock, for people."""
        self.settings, self.name, self.wall_s = settings, name, wall_s
        self.life = Life()
        self.is_inhabited = False
        """Whether a group has members, as of the last step."""
        self.left_last = False
        """Whether the last member that went left of its own accord, with its program done."""
        self.revision = 0
        """Of the last finished sync, also when its state binds nobody any more."""
        self.connections: dict[Conn, Connection] = {}
        self.unproven: dict[Conn, Connection] = {}
        self.peers: dict[PeerId, Peer] = {}
        self.names: dict[PeerId, str] = {}
        """Of the peers, and of those that were there lately."""
        self.groups: dict[GroupId, Group] = {}
        self.admission: Admission | None = None
        self.registrations = 0
        self.epochs = 0
        self.syncs = 0
        """How many syncs were ever begun, over all groups."""
        self.optimisation: Optimisation | None = None
        self.evictions = 0
        """How many peers were told that the run goes on without them: only who certainly leads may say so."""
        self.tests = 0
        """How many measurements were ever begun."""
        self.rounds = 0
        """No round of probing has had a higher sequence than this."""
        self.probing: bool | None = None
        """Whether rounds go on, once somebody has come to probe or to steer; until then as the settings say."""
        self.links = BandwidthStore()
        self.delays = DelayStore()
        self.gone_nodes: list[NodeId] = []
        """Nodes whose connection is gone, until the rounds have heard of it."""
        self.unmeasured: dict[PeerId, Ns] = {}
        """The ends of links that could not be measured, and since when that is known."""
        self.away: dict[PeerId, Away] = {}
        """Members that this master knows from the journal only. Until all are back or given up, nothing is decided."""
        self.return_by: Ns = 0
        self.withdrawn: list[tuple[PeerId, VoteWithdrawn]] = []
        """Calls that ran out of time meanwhile: the answer may be on its way, with somebody who is still away."""
        self.out: list[Effect] = []

    # Looking

    def group(self, group: GroupId) -> Group:
        """The group with this number, made on first use."""
        found = self.groups.get(group)
        if found is None:
            memory = EdgeMemory(self.settings.bad_edge_s * 1000 * MS)
            found = self.groups[group] = Group(group, memory)
        return found

    def has_no_part(self, peer: Peer) -> bool:
        """Whether the next sync of its group is one that this peer was out of, before a change of masters."""
        group = self.groups[peer.group]
        return bool(group.redo) and peer.id in group.out_of_redo

    def live(self, group: Group) -> list[Peer]:
        """The members of the newest epoch that are still there, in ring order."""
        return [self.peers[peer] for peer in group.ring if peer in self.peers]

    def accepted(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.standing is Standing.ACCEPTED]

    def registered(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.standing is Standing.REGISTERED]

    def ballot(self, peer: Peer) -> Ballot | None:
        """The peer's vote, if it counts now: cast in its group's epoch, while that epoch is installed."""
        ballot = peer.ballot
        if ballot is None or peer.leaving:
            return None
        group = self.groups[peer.group]
        return ballot if group.change is None and ballot.epoch == group.epoch else None

    def short_of_peers(self) -> set[PeerId]:
        """Who waits in an update while its group has too few peers for one of those in it who do.

        Other groups do not wait for these peers. Their own group goes on together, so nobody in it is content alone.
        """
        return self._short_of(self.size)

    def short_of_members(self) -> set[PeerId]:
        """Who waits in an update for its group to grow, even if enough peers are registered by now.

        They can call nothing else before an update has let those in, so no other call waits for them.
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
        """Who may be admitted now: everybody who is registered, except for a group that waits for still more."""
        waiting = {self.peers[peer].group for peer in short}
        return [peer for peer in self.registered() if peer.group not in waiting]

    def size(self, group: GroupId) -> int:
        """How many peers a group has, those that wait to be admitted among them."""
        return sum(peer.group == group for peer in self.peers.values())

    def announced(self, peer: Peer) -> list[Announced]:
        """The ops of its group's newest epoch that the peer's last heartbeat named. Only a member has any."""
        is_member = peer.standing is Standing.ACCEPTED
        return peer.beat.ops if is_member and peer.beat.epoch == self.groups[peer.group].epoch else []

    def world(self) -> World:
        """The run-wide numbers. Peers that are admitted count, so that all records of one admission agree."""
        sizes: dict[GroupId, int] = {}
        for peer in self.peers.values():
            if peer.standing is not Standing.REGISTERED:
                sizes[peer.group] = sizes.get(peer.group, 0) + 1
        return World(sum(sizes.values()), len(sizes), max(sizes.values(), default=0))

    def settled_registrations(self) -> int:
        """The count up to which everybody was admitted or is gone."""
        return min((peer.id - 1 for peer in self.registered()), default=self.registrations)

    def is_current(self, peer: Peer, epoch: Epoch) -> bool:
        """Whether a peer's message is about its group's newest epoch; False if it crossed with a newer record."""
        if peer.standing is not Standing.ACCEPTED:
            raise RemoteProtocolError(f"it speaks of epoch {epoch} before it was accepted")
        newest = self.groups[peer.group].epoch
        if epoch > newest:
            raise RemoteProtocolError(f"it speaks of epoch {epoch}, but the newest is {newest}")
        return epoch == newest

    # Doing

    def send(self, peer: Peer, message: FromMaster) -> None:
        self.out.append(Send(peer.conn, message))

    def tell(self, notice: Notice) -> None:
        if isinstance(notice, CallRefused):
            notice = structs.replace(notice, text=self.named(notice.text))
        self.out.append(Tell(notice))

    def named(self, text: str) -> str:
        """The sentence with the names of the peers in it. Everything that people read goes through here."""
        return with_names(text, self.names)

    def named_reason(self, reason: Reason) -> Reason:
        return structs.replace(reason, text=self.named(reason.text))

    def remember_name(self, member: Member) -> None:
        self.names[member.peer] = member.name
        if len(self.names) > MAX_NAMES:
            gone = (peer for peer in self.names if peer not in self.peers and peer not in self.away)
            self.names.pop(next(gone, 0), None)

    def answer_calls(self, ballots: dict[PeerId, int]) -> None:
        """A run-wide call is complete: all its voters hear the same answer."""
        pending, world, voters = bool(self.registered()), self.world(), dict(sorted(ballots.items()))
        for voter, ballot in voters.items():
            peer = self.peers[voter]
            self.send(peer, CallDone(ballot, pending, world, self.registrations, voters))
            peer.answers(ballot)

    def fail_call(
        self,
        peer: Peer,
        ballot: int,
        reason: Reason,
        of_sync: SyncVoters | None = None,
    ) -> CallFailed:
        """A call failed at one peer alone. What it was told."""
        answer = CallFailed(ballot, self.named_reason(reason), of_sync=of_sync)
        self.send(peer, answer)
        peer.answers(ballot)
        return answer

    def fail_calls(self, reasons: Mapping[PeerId, Reason], ballots: dict[PeerId, int]) -> None:
        """A call failed at all its voters, each with its reason. Who shares a reason shares the answer."""
        failures: list[Failure] = []
        reasons = {voter: self.named_reason(reason) for voter, reason in reasons.items()}
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
                self.peers[voter].answers(ballot)

    def register(self, now: Ns, connection: Connection, hello: Hello) -> Peer:
        """A new peer under a new id. Accepted peers hear of it by the count of registrations."""
        self.registrations += 1
        member = Member(self.registrations, hello.name, hello.host, hello.addresses, hello.port, hello.paths)
        peer = Peer(member.peer, connection.id, connection.remote, hello.group, member, now, now, now)
        self.peers[peer.id] = peer
        self.remember_name(member)
        connection.peer = peer
        self.group(peer.group)
        return peer

    def drop_connection(self, connection: Connection, last_words: FromMaster | None, reason: str) -> None:
        if last_words is not None:
            self.out.append(Send(connection.id, last_words))
        self.evictions += isinstance(last_words, Evicted)
        self.out.append(Close(connection.id, reason))
        self.forget_connection(connection)

    def forget_connection(self, connection: Connection) -> None:
        del self.connections[connection.id]
        self.unproven.pop(connection.id, None)
        if connection.node:
            self.gone_nodes.append(connection.node)

    def remove(
        self, peer: Peer, how: Literal["left", "lost", "evicted"], reason: str, last_words: FromMaster | None
    ) -> None:
        """Take a peer out of all tables. What this means for its epoch is for `epochs.py` to say."""
        connection = self.connections.get(peer.conn)
        if connection is not None:
            self.drop_connection(connection, last_words, reason)
        del self.peers[peer.id]
        self.away.pop(peer.id, None)
        if peer.standing is not Standing.REGISTERED:
            self.left_last = how == "left" and not peer.stopped
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
        group.redo.discard(peer.id)
        if group.sync is not None:
            group.sync.ballots.pop(peer.id, None)
            group.sync.holders.discard(peer.id)
            group.sync.unfinished.discard(peer.id)
        self.tell(PeerGone(peer.id, peer.member.name, how, reason))
