"""The one mechanism that changes a group: seal, record, attach. `states.py` has the diagram and the transitions.

Whatever the cause (a join, a leave, a death, a bad edge, a fault of the program), a group goes through these phases:

* *sealing*: the members were sent `Seal` for the newest epoch. Causes accumulate until the record is made. A member
  that dies meanwhile does not survive the epoch; a member that leaves survives it until the record.
* *record*: when all live members have sealed, everything is decided at one instant: the members, the ring, which peer
  dials which edge, and the verdicts (`verdicts.py`). Members that leave are sent `Left`.
* *attaching*: the record is sent. It is the newest epoch from this instant: if something fails now, *that* epoch is
  sealed next, and peers that have not installed it seal it without ops.

Events do not drive a change; `advance` does. An event only changes a fact (a seal has arrived, a peer is gone), and
`advance` looks at the facts and moves on while it can. So no event can forget to trigger a transition.

Nothing waits for ever: a member that does not seal or attach before its deadline is evicted, an edge that fails from
both ends is avoided, and a member is evicted if no ring without bad edges exists, or if proposals fail too often.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ringfold.errors import RemoteProtocolError
from ringfold.limits import MAX_LANES_OF_A_PATH, MAX_PATHS
from ringfold.master.channels import channels_for
from ringfold.master.events import Ns
from ringfold.master.run import AwayMember, BrokenLink, EpochChange, Group, LaneCount, Peer, Run
from ringfold.master.states import EpochPhase, Membership
from ringfold.master.verdicts import Cause, Collector, broken_edge, joining, kind_of, lost, summary
from ringfold.topology.ring import Edge, by_hosts, edges_of, ring_order, with_newcomers
from ringfold.units import MS
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.frames import DESCRIPTOR_BYTES
from ringfold.wire.messages import (
    Attached,
    AttachFailed,
    Evicted,
    Installed,
    Leave,
    Left,
    LinkLost,
    PeerId,
    Record,
    Registrations,
    Seal,
    Sealed,
    SealedOp,
    Verdict,
)
from ringfold.wire.notices import (
    EdgeBad,
    EpochCause,
    EpochInstalled,
    EpochRecorded,
    EpochSealing,
    EvictionCause,
    PeerGone,
)
from ringfold.wire.proof import derive

Decide = Callable[[Mapping[PeerId, Sequence[SealedOp]], Sequence[Cause]], list[Verdict]]

_U32, _U64 = 1 << 32, 1 << 64


class Epochs:
    """The epoch changes of all groups of a run."""

    def __init__(self, run: Run, run_secret: bytes, fence: int, decide: Decide) -> None:
        self._run = run
        self._settings = run.settings
        self._secret = run_secret
        self._fence = fence
        self._decide = decide

    # Causes

    def begin(self, now: Ns, group: Group, *causes: Cause) -> EpochChange:
        """End the group's newest epoch. If it is being sealed already, add these causes."""
        change = group.change
        if change is None:
            change = group.change = EpochChange(since_ns=now)
        change.causes += [
            Cause(self._run.add_names_to_reason(cause.reason), cause.op, kind=cause.kind) for cause in causes
        ]
        if group.phase is not EpochPhase.SEALING:
            self._seal(now, group, change)
        return change

    def admit(self, now: Ns, group: Group, newcomers: Iterable[Peer]) -> None:
        """Admit registered peers with the next epoch of their group."""
        ids = {peer.id for peer in newcomers}
        self.begin(now, group, joining(ids)).admitted |= ids
        for peer in ids:
            self._run.peers[peer].enter(Membership.ADMITTED)

    def lose(self, now: Ns, peer: Peer, reason: str) -> None:
        """The peer is gone without a `Leave`."""
        self._run.remove(peer, "lost", reason, None)
        self._without(now, peer, f"was lost: {reason}")

    def evict(self, now: Ns, peer: Peer, cause: EvictionCause, reason: str, text: str = "") -> None:
        """Evict the peer. `text` is the reason for its own program, if that is longer."""
        self._run.remove(peer, "evicted", reason, Evicted(text or reason, on_request=cause == "request"), cause)
        self._without(now, peer, f"was evicted: {reason}")

    def evict_for_call(self, now: Ns, peer: Peer, reason: str, text: str) -> None:
        """Evict a peer whose program is at fault; `text` is the reason for its own program."""
        self._run.remove(peer, "evicted", reason, Evicted(text, for_call=True), "call")
        self._without(now, peer, f"was evicted: {reason}")

    def leave(self, now: Ns, peer: Peer, message: Leave) -> None:
        """The peer requests to leave. If there are other members it seals first: its seal counts in the verdicts."""
        peer.stopped = message.stopped
        group = self._run.groups[peer.group]
        is_alone = self._run.live(group) == [peer] and not self._run.away
        if not peer.is_member or is_alone:
            if peer.is_member:
                _release_state(group, [peer])
            self._run.remove(peer, "left", "it sent Leave", Left())
            self._without(now, peer, "left", "left")
        elif peer.membership is not Membership.LEAVING:
            peer.enter(Membership.LEAVING)
            self.begin(now, group, lost(peer.id, "leaves", "left"))

    def _without(self, now: Ns, peer: Peer, how: str, kind: EpochCause = "lost") -> None:
        group = self._run.groups[peer.group]
        if peer.id in group.ring:
            self.begin(now, group, lost(peer.id, how, kind))

    def give_up(self, now: Ns, peer: PeerId, away: AwayMember, how: str) -> None:
        """A member did not return to this master."""
        del self._run.away[peer]
        self._run.left_last = False
        self._run.notify(PeerGone(peer, away.member.name, "evicted", how, "away"))
        self.begin(now, self._run.groups[away.group], lost(peer, how))

    def all_returned(self, now: Ns, group: Group, newcomers: set[PeerId]) -> None:
        """All members have returned to this master, or are given up: from here on the seal is as any other."""
        change = group.change
        assert change is not None
        change.deadline_ns = now + self._settings.seal_ms * MS
        change.newcomers = newcomers

    def link_lost(self, now: Ns, peer: Peer, message: LinkLost) -> None:
        """A lane broke. In an installed epoch, wait a moment: the death of a peer may explain it better."""
        if not self._run.is_current(peer, message.epoch):
            return
        group = self._run.groups[peer.group]
        edge = (message.source, message.target)
        if peer.id not in edge or not _is_link(group, edge):
            raise RemoteProtocolError(f"it lost a link {edge[0]} -> {edge[1]} that it does not have")
        dead = self._run.peers.get(edge[0] if edge[1] == peer.id else edge[1])
        if message.died and dead is not None and dead.member.host == peer.member.host:
            self.lose(now, dead, f"its process has died, as peer {peer.id} on its host saw")
            return
        if group.change is None:
            group.lost_links.setdefault(edge, BrokenLink(now, message.reason))
        elif group.phase is EpochPhase.ATTACHING:
            self._count_loss(now, group, *edge, message.reason)
            self._proposal_failed(now, group, group.change, edge)
            self.begin(now, group, broken_edge(*edge, message.reason))

    def _count_loss(self, now: Ns, group: Group, source: PeerId, target: PeerId, reason: str) -> None:
        if (source, target) not in edges_of(group.ring):
            group.only_ring = True
        elif group.edges.lost(now, source, target):
            self._run.notify(EdgeBad(group.id, source, target, f"lost again and again: {reason}"))

    # Sealing

    def _seal(self, now: Ns, group: Group, change: EpochChange) -> None:
        group.enter(EpochPhase.SEALING)
        change.deadline_ns = now + self._settings.seal_ms * MS
        change.seals.clear()
        group.collector = None
        group.lost_links.clear()
        group.disputes.clear()
        members = self._run.live(group)
        if not members:
            return
        reason = summary(change.causes)
        self._run.notify(EpochSealing(group.id, group.epoch, reason, kind_of(change.causes)))
        seal = Seal(group.epoch, reason)
        for member in members:
            self._run.send(member, seal)

    def sealed(self, now: Ns, peer: Peer, message: Sealed) -> None:
        if not self._run.is_current(peer, message.epoch):
            return
        group = self._run.groups[peer.group]
        change = group.change
        if change is None or group.phase is not EpochPhase.SEALING or peer.id in change.seals:
            raise RemoteProtocolError(f"it sealed epoch {message.epoch}, which was not requested")
        seen = set()
        for sealed in message.ops:
            op = sealed.op
            if op in seen or not (0 <= op.tag < _U64 and 0 <= op.sequence < _U32):
                raise RemoteProtocolError(f"its seal names tag {op.tag} sequence {op.sequence} twice or out of range")
            if not 0 <= sealed.registrations <= self._run.registrations:
                raise RemoteProtocolError(f"its seal counts {sealed.registrations} registrations")
            if sealed.payloads is not None and len(sealed.payloads) != len(group.ring):
                raise RemoteProtocolError(
                    f"its seal has {len(sealed.payloads)} payloads for a ring of {len(group.ring)}"
                )
            if len(sealed.descriptor) != DESCRIPTOR_BYTES:
                raise RemoteProtocolError(f"its seal has a descriptor of {len(sealed.descriptor)} bytes")
            seen.add(op)
        change.seals[peer.id] = message.ops

    # Advancing

    def advance(self, now: Ns) -> bool:
        """Move every group to its next phase, if the facts allow it. False if nothing moved."""
        moved = False
        for _, group in sorted(self._run.groups.items()):
            if group.change is not None and not self.missing(group):
                self._next_phase(now, group, group.change)
                moved = True
        return moved

    def _next_phase(self, now: Ns, group: Group, change: EpochChange) -> None:
        if group.phase is EpochPhase.SEALING:
            self._record(now, group, change)
        elif any(change.answers.values()):
            self._propose_again(now, group, change)
        else:
            self._install(now, group, change)

    def missing(self, group: Group) -> list[PeerId]:
        """The peers that the group's change waits for."""
        change = group.change
        if change is None:
            return []
        answered: Mapping[PeerId, object] = change.answers
        if group.phase is EpochPhase.SEALING:
            answered = change.seals
        waiting = [peer.id for peer in self._run.live(group) if peer.id not in answered]
        return sorted({*waiting, *self._run.away})

    # Recording

    def _record(self, now: Ns, group: Group, change: EpochChange) -> None:
        """Decide the next epoch, at one instant, from the seals of all survivors."""
        ring = self._plan_ring(now, group, change)
        verdicts = self._decide(change.seals, change.causes)
        reason = summary(change.causes)
        leavers = [peer for peer in self._run.live(group) if peer.membership is Membership.LEAVING]
        for leaver in leavers:
            self._run.remove(leaver, "left", "it sent Leave", Left())
        group.ring, group.wanted_ring, group.lanes = ring, [], {}
        if not ring:
            group.enter(EpochPhase.IDLE)
            group.record = None
            _release_state(group, leavers)
            return
        if change.admitted:
            group.only_ring = False
        hosts = self._hosts(group)
        ring = group.ring
        direct = not group.only_ring and self._settings.is_direct([self._run.peers[peer].member for peer in ring])
        for newcomer in change.admitted:
            self._run.peers[newcomer].enter(Membership.MEMBER)
        change.newcomers |= change.admitted
        previous, group.epoch = group.epoch, group.epoch + 1
        self._run.epochs += 1
        group.dialers = [group.edges.dialer(*edge) for edge in edges_of(ring)]
        group.evidence = self._settings.evidence_for(len(ring), direct=direct)
        members = self._run.live(group)
        if group.evidence == "master":
            group.collector = Collector(group.epoch, ring, [member.conn for member in members])
        record = Record(
            group=group.id,
            epoch=group.epoch,
            fence=self._fence,
            previous=previous,
            reason=reason,
            members=[member.member for member in members],
            dialers=group.dialers,
            newcomers=sorted(change.newcomers),
            secret=derive(self._secret, "epoch", group.id, group.epoch),
            evidence=group.evidence,
            small_bytes=self._settings.small_bytes_for(len(ring)),
            segment_bytes=self._settings.segment_bytes_for([member.member for member in members], hosts),
            lanes=self._settings.lanes,
            registrations=self._run.settled_registrations(),
            pending=bool(self._run.registered()),
            verdicts=verdicts,
            world=self._run.world(),
            call=self._run.calls,
            channels=self._channels(group, bool(change.admitted)),
            direct=direct,
            hosts=hosts,
        )
        group.record = record
        self._begin_attaching(now, group, change, record)

    def _begin_attaching(self, now: Ns, group: Group, change: EpochChange, record: Record) -> None:
        for member in self._run.live(group):
            self._run.send(member, record)
            if member.id in change.admitted and record.pending:
                self._run.send(member, Registrations(self._run.registrations))
        commits = sum(verdict.commit for verdict in record.verdicts)
        self._run.notify(EpochRecorded(group.id, group.epoch, group.ring, commits, len(record.verdicts) - commits))
        group.enter(EpochPhase.ATTACHING)
        change.deadline_ns = now + self._settings.attach_ms * MS
        change.causes, change.answers = [], {}
        change.seals.clear()
        change.admitted.clear()

    def _channels(self, group: Group, admits: bool) -> int:
        """How many channels carry the ops of the next epoch. Where nobody comes, lanes stay as they are if they can."""
        if self._settings.channels is not None:
            return self._settings.channels
        possible = channels_for(self._run.live(group), [peer for peer in self._run.peers.values() if peer.is_member])
        possible = min(possible, MAX_LANES_OF_A_PATH // self._settings.lanes)
        before = 0 if group.record is None else group.record.channels
        return before if 0 < before <= possible and not admits else possible

    def _hosts(self, group: Group) -> int:
        """How many hosts ops are reduced on first (1: in one ring over all). The ring then begins where a host does."""
        members = [self._run.peers[peer].member for peer in group.ring]
        if group.only_ring or not self._settings.is_hierarchical(members):
            return 1
        group.ring, hosts = by_hosts(group.ring, {member.peer: member.host for member in members})
        return hosts

    def _plan_ring(self, now: Ns, group: Group, change: EpochChange) -> list[PeerId]:
        """The ring of the next epoch. Evicts members until there is one that uses no bad edge."""
        while True:
            staying = [peer.id for peer in self._run.live(group) if peer.membership is not Membership.LEAVING]
            hosts = {peer.id: peer.member.host for peer in self._run.peers.values()}
            candidates = with_newcomers(staying, sorted(change.admitted), hosts)
            if sorted(group.wanted_ring) == sorted(candidates):
                candidates = list(group.wanted_ring)
            bad = group.edges.bad()
            ring = ring_order(candidates, bad)
            if ring is not None:
                return ring
            worst = group.edges.worst(candidates, change.blame)
            shown = ", ".join(f"{a} - {b}" for a, b in group.edges.bad_pairs() if {a, b} <= set(candidates))
            self.evict(now, self._run.peers[worst], "links", f"no ring without the bad edges {shown} exists")

    # Attaching

    def attached(self, now: Ns, peer: Peer, message: Attached) -> None:
        if not 0 <= message.in_memory <= message.lanes <= MAX_LANES_OF_A_PATH * MAX_PATHS:
            raise RemoteProtocolError(f"it has {message.lanes} lanes, {message.in_memory} of them in memory")
        if self._take_response(peer, AttachFailed(message.epoch, [])):
            self._run.groups[peer.group].lanes[peer.id] = LaneCount(message.lanes, message.in_memory)

    def attach_failed(self, now: Ns, peer: Peer, message: AttachFailed) -> None:
        if not message.edges:
            raise RemoteProtocolError("it could not attach, but names no edge")
        self._take_response(peer, message)

    def _take_response(self, peer: Peer, message: AttachFailed) -> bool:
        """Note how an attachment ended at this peer. False if it is not about the change in progress."""
        if not self._run.is_current(peer, message.epoch):
            return False
        group = self._run.groups[peer.group]
        for failure in message.edges:
            edge = (failure.source, failure.target)
            if peer.id not in edge or not _is_link(group, edge):
                raise RemoteProtocolError(f"it could not connect {edge[0]} -> {edge[1]}, which it does not have")
        if group.change is None or group.phase is not EpochPhase.ATTACHING:
            return False
        group.change.answers[peer.id] = message.edges
        return True

    def _install(self, now: Ns, group: Group, change: EpochChange) -> None:
        group.enter(EpochPhase.IDLE)
        group.installed_ns = now
        installed = Installed(group.epoch, self._run.world())
        for member in self._run.live(group):
            self._run.send(member, installed)
        self._run.notify(EpochInstalled(group.id, group.epoch, (now - change.since_ns) // MS))

    def _propose_again(self, now: Ns, group: Group, change: EpochChange) -> None:
        """Some edges could not be connected: dial them from the other end next, or avoid them."""
        dialers = dict(zip(edges_of(group.ring), group.dialers, strict=True))
        reasons: dict[Edge, str] = {}
        for peer, failures in sorted(change.answers.items()):
            for failure in failures:
                edge = (failure.source, failure.target)
                # Both ends report it; the dialer knows more than the end that no connection reached.
                if edge not in reasons or dialers.get(edge) == peer:
                    reasons[edge] = failure.reason
        for edge, reason in sorted(reasons.items()):
            if edge not in dialers:
                group.only_ring = True
            elif group.edges.dial_failed(now, *edge, dialers[edge]):
                self._run.notify(EdgeBad(group.id, *edge, f"neither end could connect it: {reason}"))
        self._proposal_failed(now, group, change, *(edge for edge in sorted(reasons) if edge in dialers))
        texts = {
            edge: f"dialled by peer {dialers[edge]}: {reason}" if edge in dialers else reason
            for edge, reason in sorted(reasons.items())
        }
        self.begin(now, group, *(broken_edge(*edge, reason) for edge, reason in texts.items()))

    def _proposal_failed(self, now: Ns, group: Group, change: EpochChange, *edges: Edge) -> None:
        for edge in edges:
            for end in edge:
                change.blame[end] = change.blame.get(end, 0) + 1
        change.failed_proposals += 1
        if change.failed_proposals < self._settings.max_proposals:
            return
        members = [peer.id for peer in self._run.live(group)]
        worst = group.edges.worst(members, change.blame)
        change.failed_proposals = 0
        reason = f"{self._settings.max_proposals} proposals in a row failed, most of them at its edges"
        self.evict(now, self._run.peers[worst], "links", reason)

    # Time

    def tick(self, now: Ns) -> None:
        """Check deadlines of changes, lost links that no death explained, and edges over which nothing moves."""
        for _, group in sorted(self._run.groups.items()):
            group.edges.expire(now)
            if group.change is None:
                self._judge_lost_links(now, group)
                self._judge_stalls(now, group)
            elif now >= group.change.deadline_ns:
                self._evict_missing(now, group, group.change)

    def _evict_missing(self, now: Ns, group: Group, change: EpochChange) -> None:
        sealing = group.phase is EpochPhase.SEALING
        limit = f"seal_ms {self._settings.seal_ms}" if sealing else f"attach_ms {self._settings.attach_ms}"
        reason = f"it did not {'seal' if sealing else 'attach'} epoch {group.epoch} in time ({limit})"
        for peer in self.missing(group):
            self.evict(now, self._run.peers[peer], "epoch", reason)

    def _judge_lost_links(self, now: Ns, group: Group) -> None:
        grace = self._settings.link_grace_ms * MS
        if not any(now - link.since_ns >= grace for link in group.lost_links.values()):
            return
        links = sorted(group.lost_links.items())
        for (source, target), link in links:
            # A ring of two has both edges between the same ends: one broken cable is one loss.
            if (target, source) not in group.lost_links or source < target:
                self._count_loss(now, group, source, target, link.reason)
        self.begin(now, group, *(broken_edge(*edge, link.reason) for edge, link in links))

    def _judge_stalls(self, now: Ns, group: Group) -> None:
        """An edge is bad if its sender cannot write and its receiver gets nothing, while both are alive.

        A lane is used in both directions: the edge is also bad if the receiver's frames do not reach the sender, which
        is in an op and may have nothing to send before they arrive.
        """
        limit = self._settings.edge_stall_ms
        for source, target in edges_of(group.ring):
            sender, receiver = self._run.peers[source], self._run.peers[target]
            if sender.suspected or receiver.suspected:
                continue
            if sender.heartbeat.epoch != group.epoch or receiver.heartbeat.epoch != group.epoch:
                continue
            stalled = min(sender.heartbeat.out_stalled_ms, receiver.heartbeat.in_starved_ms)
            if sender.heartbeat.ops:
                stalled = max(stalled, receiver.heartbeat.back_stalled_ms)
            if stalled >= limit:
                reason = f"nothing moved for {stalled} ms although {list_peers((source, target))} are alive"
                group.edges.mark_bad(now, source, target)
                self._run.notify(EdgeBad(group.id, source, target, reason))
                self.begin(now, group, broken_edge(source, target, reason))
                return


def _is_link(group: Group, edge: Edge) -> bool:
    """Whether the newest record has this link: an edge of the ring, or between members that are no neighbours."""
    if edge in edges_of(group.ring):
        return True
    record = group.record
    has_more = record is not None and (record.direct or record.hosts > 1)
    return has_more and edge[0] < edge[1] and set(edge) <= set(group.ring)


def _release_state(group: Group, leavers: Iterable[Peer]) -> None:
    """If the last members leave by themselves and have the state, the state is not lost: the run's history has ended.

    If none of them has it, the state stays lost: a survivor that learns this leaves, too, and the next start must still
    need a checkpoint, or a rollback.
    """
    if group.finished is not None and any(peer.id in group.finished.participants for peer in leavers):
        group.finished = None
