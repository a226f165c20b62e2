"""Incidents: what happened to a run, in words, with its begin, its end, its reason and what it cost. Pure.

The input is the events of the master, those of peers where there are any, and the status from time to time. An incident
is open until the run is as good as before: a peer was lost, the survivors' next epoch was installed, and they committed
an op in it. Several notices of one thing are one incident: a stall, the eviction that follows, the change of the
epoch; the many peers of a start; the report of a divergence by the master and by the peer.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from msgspec import Struct, field

from ringfold.wire import notices
from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.events import Event, EventKind, LeaderChanged, OpEnded
from ringfold.wire.notices import divergence_error
from ringfold.wire.status import Status

Severity = Literal["info", "warning", "bad"]
Kind = Literal[
    "lost",
    "evicted",
    "left",
    "joined",
    "suspected",
    "stall",
    "failover",
    "rollback",
    "divergence",
    "aborted",
    "refused",
    "ring",
    "lanes",
    "run",
    "probing",
    "connection",
]

MAX_INCIDENTS = 300
MAX_DETAILS = 8
_LANES_TOGETHER_MS = 10_000
_NAMED_PEERS = 4

_Value = TypeVar("_Value")


class Incident(Struct, omit_defaults=True):
    """One thing that happened. Times are Unix time in ms; `end_ms` is 0 while it is not over.

    `pause_ms` is for how long the others could not work, where that is known (-1: it is not).
    """

    number: int
    kind: Kind
    severity: Severity
    title: str
    begin_ms: int
    end_ms: int = 0
    reason: str = ""
    cost: str = ""
    pause_ms: float = -1
    group: GroupId = -1
    peers: list[PeerId] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.end_ms == 0

    def add_detail(self, text: str) -> None:
        if text and text not in self.details and len(self.details) < MAX_DETAILS:
            self.details.append(text)


class _Change(Struct):
    """The epoch change of a group that is going on."""

    begin_ms: float
    reason: str
    ring: list[PeerId] = field(default_factory=list)
    aborted: int = 0


class _Healing(Struct):
    """Incidents of a group whose next epoch is installed, and that wait for its first commit."""

    epoch: Epoch
    members: list[PeerId]
    incidents: list[Incident]
    installed_ms: float
    committed: int = -1
    """Ops of these members at the first status after that."""


class Incidents:
    """The incidents of one run, the newest last. At most `MAX_INCIDENTS` are kept; open ones stay."""

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self.counts: dict[Kind, int] = {}
        self.version = 0
        """Grows with every change."""
        self._next = 1
        self._names: dict[PeerId, str] = {}
        self._groups: dict[PeerId, GroupId] = {}
        self._changes: dict[GroupId, _Change] = {}
        self._healing: dict[GroupId, _Healing] = {}
        self._fence = 0
        self._leader = ""
        self._seen: dict[tuple[object, ...], None] = {}

    # Input

    def event(self, event: Event, at_ms: float) -> None:
        """Take in an event of the master, or of a peer. `at_ms` is its time as Unix time."""
        match event.notice:
            case notices.PeerRegistered() as notice:
                self._joining(at_ms, notice)
            case notices.PeerSuspected() | notices.PeerGone() | notices.PeersStalled() as notice:
                self._peer_event(at_ms, notice)
            case notices.EpochSealing() | notices.EpochRecorded() | notices.EpochInstalled() as notice:
                self._epoch_event(at_ms, notice)
            case OpEnded() as notice:
                self._op_ended(at_ms, notice)
            case notices.SyncEnded() | notices.SyncBegun() as notice:
                self._sync_event(at_ms, notice)
            case LeaderChanged() | notices.MasterLost() | notices.MasterAway() | notices.PeerReturned() as notice:
                self._master_event(at_ms, notice)
            case notices.StateRolledBack() | notices.PeerDiverged() | notices.ResumeDelayed() as notice:
                self._state_event(at_ms, notice)
            case _:
                self._other_event(at_ms, event.notice, event.stamp.peer)

    def look(self, at_ms: float, status: Status) -> None:
        """Take in a status: who answers again, which epochs work, whether another master leads."""
        for peer in status.peers:
            self._names[peer.peer], self._groups[peer.peer] = peer.name, peer.group
        self._forget_names(status)
        suspected = {peer.peer for peer in status.peers if peer.suspected}
        for incident in self._open("suspected"):
            if not suspected & set(incident.peers):
                self._close(incident, at_ms, f"it answers again after {seconds(at_ms - incident.begin_ms)}")
        committed = {peer.peer: peer.committed_ops for peer in status.peers}
        for group, healing in list(self._healing.items()):
            ops = sum(committed.get(peer, 0) for peer in healing.members)
            if healing.committed < 0:
                healing.committed = ops
            elif ops > healing.committed:
                self._healed(group, healing.installed_ms)
        if self._fence and status.fence > self._fence:
            self._failover(at_ms, status.leader, status.fence, "")
        elif missing := self._open("failover"):
            self._close(missing[-1], at_ms, f"{seconds(at_ms - missing[-1].begin_ms)} without a master")
        self._fence, self._leader = max(self._fence, status.fence), status.leader or self._leader

    def unreachable(self, at_ms: float, text: str) -> None:
        """No master answers at this time."""
        for incident in self._open("failover"):
            incident.add_detail(text)
            return
        self._begin("failover", "bad", at_ms, "no master answers", text)

    # Output

    def newest(self, until_ms: float = float("inf")) -> Incident | None:
        """The newest incident up to this time that is worth a word in a sentence."""
        found = (each for each in reversed(self.all) if each.severity != "info" and each.begin_ms <= until_ms)
        return next(found, None)

    # Peers

    def _joining(self, at_ms: float, notice: notices.PeerRegistered) -> None:
        self._names[notice.peer], self._groups[notice.peer] = notice.name, notice.group
        for incident in self._open("joined", notice.group):
            if notice.peer not in incident.peers:
                incident.peers.append(notice.peer)
                incident.title, incident.reason = f"{self._listed(incident.peers)} joining", ""
                self._changed()
            return
        title = f"{self._listed([notice.peer])} joining"
        self._begin("joined", "info", at_ms, title, f"from {notice.remote}", notice.group, [notice.peer])

    def _peer_event(
        self, at_ms: float, notice: notices.PeerSuspected | notices.PeerGone | notices.PeersStalled
    ) -> None:
        match notice:
            case notices.PeerSuspected(peer, silent_ms):
                if not self._open_of(peer, "suspected"):
                    title = f"{self._listed([peer])} suspected"
                    group = self._groups.get(peer, -1)
                    self._begin("suspected", "warning", at_ms - silent_ms, title, "it is silent", group, [peer])
            case notices.PeersStalled(group, peers, _, waiting, what, waited_ms):
                count = f"{len(waiting)} peer{'s' if len(waiting) > 1 else ''}"
                reason = f"{count} waited {seconds(waited_ms)} for it in {what} ({notice.limit})"
                title = f"{self._listed(peers)} stalled"
                self._begin("stall", "bad", at_ms - waited_ms, title, reason, group, list(peers))
            case notices.PeerGone():
                self._peer_gone(at_ms, notice)

    def _peer_gone(self, at_ms: float, notice: notices.PeerGone) -> None:
        self._names.setdefault(notice.peer, notice.name)
        group = self._groups.get(notice.peer, -1)
        for joining in self._open("joined", group):
            if notice.peer in joining.peers:
                joining.peers.remove(notice.peer)
                if not joining.peers:
                    self._close(joining, at_ms, "it did not become a member")
        if notice.how == "left":
            for incident in self._open("left", group):
                if incident.reason == notice.reason:
                    incident.peers.append(notice.peer)
                    incident.title = f"{self._listed(incident.peers)} left"
                    self._changed()
                    return
            title = f"{self._listed([notice.peer])} left"
            self._begin("left", "info", at_ms, title, notice.reason, group, [notice.peer])
            return
        known = self._open_of(notice.peer, "stall") or self._open_of(notice.peer, "suspected")
        title = f"{self._listed([notice.peer])} {notice.how}"
        if known is None:
            self._begin(notice.how, "bad", at_ms, title, notice.reason, group, [notice.peer])
            return
        if known.kind == "suspected":
            known.kind, known.reason = notice.how, notice.reason
            known.add_detail(f"{notice.how} {seconds(at_ms - known.begin_ms)} after its last sign of life")
        else:
            title = f"{self._listed(known.peers)} evicted: stalled the others"
        known.severity, known.title, known.group = "bad", title, group if known.group < 0 else known.group
        self._changed()

    # Epochs

    def _epoch_event(
        self, at_ms: float, notice: notices.EpochSealing | notices.EpochRecorded | notices.EpochInstalled
    ) -> None:
        match notice:
            case notices.EpochSealing(group, _, reason):
                self._changes.setdefault(group, _Change(at_ms, reason))
            case notices.EpochRecorded(group, _, ring, _, aborted):
                change = self._changes.setdefault(group, _Change(at_ms, ""))
                change.ring, change.aborted = list(ring), change.aborted + aborted
            case notices.EpochInstalled(group, epoch, took_ms):
                change = self._changes.pop(group, _Change(at_ms - took_ms, ""))
                self._installed(at_ms, group, epoch, took_ms, change)

    def _installed(self, at_ms: float, group: GroupId, epoch: Epoch, took_ms: int, change: _Change) -> None:
        if group in self._healing:  # the epoch before ended before its first commit was seen
            self._healed(group, self._healing[group].installed_ms)
        kinds = ("lost", "evicted", "stall", "left")
        ended = [each for kind in kinds for of in (group, -1) for each in self._open(kind, of)]
        for joining in self._open("joined", group):
            if not change.ring or set(joining.peers) <= set(change.ring):
                joining.title = f"{self._listed(joining.peers)} joined"
                joining.pause_ms = took_ms
                self._close(joining, at_ms, f"epoch {epoch} after {seconds(took_ms)}")
        if change.aborted and not ended:
            title = f"{change.aborted} op{'s' if change.aborted > 1 else ''} rolled back"
            ended = [self._begin("aborted", "warning", change.begin_ms, title, change.reason, group, [])]
        for incident in ended:
            # Of what a peer leaves behind, the others notice the change of the epoch only; of the rest, all of it.
            begin_ms = change.begin_ms if incident.kind == "left" else incident.begin_ms
            incident.pause_ms = round(max(0.0, at_ms - begin_ms), 1)
            incident.cost = f"the others continue in epoch {epoch} after {seconds(incident.pause_ms)}"
            if incident.pause_ms > 2 * took_ms + 500:
                incident.cost += f" ({seconds(took_ms)} of it for the new epoch)"
            if change.aborted:
                number = f"{change.aborted} op{'s are' if change.aborted > 1 else ' is'}"
                incident.add_detail(f"{number} rolled back and run again")
        if not change.ring:
            for incident in ended:
                self._close(incident, at_ms, "")
        elif ended:
            self._healing[group] = _Healing(epoch, change.ring, ended, at_ms)
        self._changed()

    def _op_ended(self, at_ms: float, notice: OpEnded) -> None:
        """The first commit of a survivor in a new epoch: exact, where peers recorded their ops."""
        for group, healing in list(self._healing.items()):
            if (
                notice.outcome == "committed"
                and notice.epoch == healing.epoch
                and at_ms >= healing.installed_ms - 1_000
            ):
                self._healed(group, max(at_ms, healing.installed_ms))

    def _healed(self, group: GroupId, at_ms: float) -> None:
        healing = self._healing.pop(group)
        for incident in healing.incidents:
            if at_ms > healing.installed_ms:
                took = seconds(at_ms - healing.installed_ms + max(0.0, incident.pause_ms))
                if took != seconds(incident.pause_ms):
                    incident.add_detail(f"next commit after {took}")
            self._close(incident, at_ms, incident.cost)

    def _sync_event(self, at_ms: float, notice: notices.SyncBegun | notices.SyncEnded) -> None:
        if isinstance(notice, notices.SyncBegun):
            if notice.receivers:
                self._remember(("sync", notice.group, notice.sync, tuple(notice.receivers)))
            return
        received = next((key for key in self._seen if key[:3] == ("sync", notice.group, notice.sync)), None)
        if received is None:
            return
        del self._seen[received]
        receivers = set(received[3]) if isinstance(received[3], tuple) else set()
        for incident in reversed(self.all):
            if incident.kind == "joined" and receivers & set(incident.peers):
                text = f"the state (revision {notice.revision}) received in {seconds(notice.took_ms)}"
                incident.add_detail(text)
                self._changed()
                return

    # Masters

    def _master_event(
        self,
        at_ms: float,
        notice: LeaderChanged | notices.MasterLost | notices.MasterAway | notices.PeerReturned,
    ) -> None:
        match notice:
            case LeaderChanged(leader, leads, fence, reason):
                if leads and (self._fence and fence > self._fence):
                    self._failover(at_ms, leader, fence, reason)
                elif not leads:
                    self.unreachable(at_ms, str(notice))
                self._fence = max(self._fence, fence)
            case notices.PeerReturned(peer):
                for incident in reversed(self.all):
                    if incident.kind == "failover":
                        if peer not in incident.peers:
                            incident.peers.append(peer)
                        self._changed()
                        return
            case _:
                self.unreachable(at_ms, str(notice))

    def _failover(self, at_ms: float, leader: str, fence: int, reason: str) -> None:
        if not self._remember(("failover", fence)):
            return
        incident = next(iter(self._open("failover")), None)
        incident = incident or self._begin("failover", "warning", at_ms, "", reason)
        name = f"{leader} leads" if leader else "another master leads"
        incident.title, incident.severity = f"failover: {name} (fence {fence})", "warning"
        incident.pause_ms = round(at_ms - incident.begin_ms, 1) if at_ms > incident.begin_ms + 5 else -1
        away = f"{seconds(at_ms - incident.begin_ms)} without a master" if incident.pause_ms >= 0 else ""
        self._close(incident, at_ms, away)

    # The state

    def _state_event(
        self, at_ms: float, notice: notices.StateRolledBack | notices.PeerDiverged | notices.ResumeDelayed
    ) -> None:
        match notice:
            case notices.StateRolledBack(group, rollback):
                if not self._remember(("rollback", group, rollback.lost, rollback.revision)):
                    return
                for waiting in self._open("rollback", group):
                    self._close(waiting, at_ms, "")
                lost = max(0, rollback.lost - rollback.revision)
                title = f"rolled back to revision {rollback.revision}"
                incident = self._begin("rollback", "bad", at_ms, title, str(notice), group, [rollback.source])
                self._close(incident, at_ms, f"{lost} step{'s' if lost != 1 else ''} lost")
            case notices.PeerDiverged(group, divergence):
                if not self._remember(("diverged", group, divergence.peer, divergence.revision)):
                    return
                title = f"peer {divergence.peer} ({divergence.name}) diverged"
                error = str(divergence_error(divergence))
                incident = self._begin("divergence", "bad", at_ms, title, error, group, [divergence.peer])
                self._close(incident, at_ms, f"repaired with {divergence.received_bytes:,} bytes")
            case notices.ResumeDelayed(group, revision):
                title = f"revision {revision} is lost; waiting for its checkpoint"
                if not self._open("rollback", group):
                    self._begin("rollback", "bad", at_ms, title, str(notice), group, [])

    # The rest

    def _other_event(self, at_ms: float, notice: EventKind, peer: PeerId) -> None:
        match notice:
            case notices.CallRefused(peers, text):
                self._at_once("refused", "bad", at_ms, "a call was refused", text, list(peers))
            case notices.EdgeBad(group, source, target, reason):
                title = f"the link {source} → {target} is avoided"
                self._at_once("ring", "warning", at_ms, title, reason, [source, target], group)
            case notices.RingChosen(group, ring, _, kept) if not kept:
                self._at_once("ring", "info", at_ms, "a better ring was chosen", str(notice), list(ring)[:8], group)
            case notices.LaneLost(other, outgoing, _, reason):
                self._lane_lost(at_ms, (peer, other) if outgoing else (other, peer), reason)
            case notices.RunEnded(run, how, revision):
                for incident in [each for each in self.all if each.is_open]:
                    self._close(incident, at_ms, incident.cost)
                self._healing.clear()
                severity: Severity = "info" if how == "finished" else "warning"
                self._at_once("run", severity, at_ms, f"run {run} is {how}", f"at revision {revision}", [])
            case notices.RunBegun(_, incarnation, lost):
                severity = "info" if lost is None else "bad"
                self._at_once("run", severity, at_ms, f"incarnation {incarnation} begins", str(notice), [])
            case notices.ProbingBroke(text):
                self._at_once("probing", "bad", at_ms, "probing broke", text, [])
            case notices.RoundDone(summary) if summary.anomaly:
                self._again("probing", at_ms, "an anomaly in probing", summary.anomaly, [])
            case notices.ConnectionDropped(remote, reason):
                host = remote.rpartition(":")[0] or remote
                self._again("connection", at_ms, f"a client was refused ({host})", reason, [])
            case _:
                return

    def _lane_lost(self, at_ms: float, edge: tuple[PeerId, PeerId], reason: str) -> None:
        self._again("lanes", at_ms, f"lost lanes {edge[0]} → {edge[1]}", reason, list(edge))

    def _again(self, kind: Kind, at_ms: float, title: str, reason: str, peers: list[PeerId]) -> None:
        """An incident that repeats: within a few seconds it is the same one."""
        last = next((each for each in reversed(self.all) if each.kind == kind and each.title == title), None)
        if last is not None and at_ms - last.end_ms < _LANES_TOGETHER_MS:
            last.end_ms = max(last.end_ms, int(at_ms))
            count = int(last.cost.split()[0]) + 1 if last.cost else 2
            last.cost = f"{count} times"
            self._changed()
            return
        self._at_once(kind, "warning", at_ms, title, reason, peers)

    # Parts

    def _begin(
        self,
        kind: Kind,
        severity: Severity,
        at_ms: float,
        title: str,
        reason: str,
        group: GroupId = -1,
        peers: list[PeerId] | None = None,
    ) -> Incident:
        incident = Incident(
            self._next, kind, severity, title, int(at_ms), reason=reason, group=group, peers=list(peers or [])
        )
        self._next += 1
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.all.append(incident)
        if len(self.all) > MAX_INCIDENTS:
            oldest = next((each for each in self.all if not each.is_open), self.all[0])
            self.all.remove(oldest)
        self._changed()
        return incident

    def _at_once(
        self,
        kind: Kind,
        severity: Severity,
        at_ms: float,
        title: str,
        reason: str,
        peers: list[PeerId],
        group: GroupId = -1,
    ) -> None:
        self._close(self._begin(kind, severity, at_ms, title, reason, group, peers), at_ms, "")

    def _close(self, incident: Incident, at_ms: float, cost: str) -> None:
        incident.end_ms = max(incident.begin_ms, int(at_ms), 1)
        incident.cost = cost or incident.cost
        self._changed()

    def _open(self, kind: str, group: GroupId | None = None) -> list[Incident]:
        return [each for each in self.all if each.is_open and each.kind == kind and group in (None, each.group)]

    def _open_of(self, peer: PeerId, kind: Kind) -> Incident | None:
        return next((each for each in self._open(kind) if peer in each.peers), None)

    def _remember(self, key: tuple[object, ...]) -> bool:
        """Whether this was not seen before. Only the last few hundred are remembered."""
        if key in self._seen:
            return False
        self._seen[key] = None
        while len(self._seen) > MAX_INCIDENTS:
            del self._seen[next(iter(self._seen))]
        return True

    def _forget_names(self, status: Status) -> None:
        """The names of peers that are gone and that no incident is about."""
        if len(self._names) < 4 * MAX_INCIDENTS + len(status.peers):
            return
        wanted = {peer.peer for peer in status.peers} | {peer for each in self.all for peer in each.peers}
        self._names = _of(self._names, wanted)
        self._groups = _of(self._groups, wanted)

    def _listed(self, peers: list[PeerId]) -> str:
        named = [f"{peer} ({self._names[peer]})" if peer in self._names else str(peer) for peer in peers[:_NAMED_PEERS]]
        more = f" and {len(peers) - _NAMED_PEERS} more" if len(peers) > _NAMED_PEERS else ""
        return f"peer{'s' if len(peers) > 1 else ''} {', '.join(named)}{more}"

    def _changed(self) -> None:
        self.version += 1


def _of(mapping: Mapping[PeerId, _Value], wanted: Iterable[PeerId]) -> dict[PeerId, _Value]:
    return {peer: mapping[peer] for peer in wanted if peer in mapping}


def seconds(milliseconds: float) -> str:
    """A duration for people: 25 ms, 4.2 s, 3 min 20 s, 2 h 5 min."""
    if milliseconds < 1_000:
        return f"{milliseconds:.0f} ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1_000:.1f} s"
    minutes, rest = divmod(int(milliseconds / 1_000), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
