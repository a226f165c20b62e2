"""The rare events of all records on one timeline, and what they say about members and epochs. Pure."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ringfold.observe.summary.results import Lead, Membership, PeerEnd
from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.events import EpochRuns, EventKind, LeaderChanged, PeerEvicted, PeerJoined
from ringfold.wire.notices import (
    EpochInstalled,
    EpochRecorded,
    EpochSealing,
    PeerGone,
    PeerRegistered,
    PeersStalled,
    RunBegun,
)

MAX_PER_RECORD = 2_000
"""Rare events of one kind and one record."""


class RareEvent(NamedTuple):
    at_ns: int
    """In Unix time."""
    record: str
    role: str
    peer: PeerId
    notice: EventKind


class EpochKey(NamedTuple):
    incarnation: int
    """Of the run: a new one may count its epochs from the beginning."""
    group: GroupId
    epoch: Epoch


@dataclass(slots=True)
class EpochTally:
    """One epoch, as the master and the members recorded it. Times are Unix times; 0: not recorded."""

    key: EpochKey
    ring: list[PeerId] = field(default_factory=list)
    fence: int = 0
    sealing_ns: int = 0
    """When the change to this epoch began: the first seal of the one before, or the first cause."""
    recorded_ns: int = 0
    installed_ns: int = 0
    first_runs_ns: int = 0
    last_runs_ns: int = 0
    reason: str = ""
    aborted: int = 0
    causes: list[PeerGone] = field(default_factory=list)

    @property
    def began_ns(self) -> int:
        """When the change to it began."""
        return self.sealing_ns or self.recorded_ns or self.first_runs_ns

    @property
    def runs_ns(self) -> int:
        """When it ran at all members."""
        return self.installed_ns or self.last_runs_ns or self.recorded_ns


@dataclass(slots=True)
class MemberTally:
    """One peer id. Times are Unix times; 0: not recorded."""

    peer: PeerId
    name: str = ""
    host: str = ""
    group: GroupId = 0
    record: str = ""
    was: PeerId = 0
    """The id that the same process had before; 0: none."""
    registered_ns: int = 0
    joined_ns: int = 0
    ended_ns: int = 0
    end: PeerEnd = "stayed"
    reason: str = ""

    @property
    def label(self) -> str:
        return f"peer {self.peer} ({self.name})" if self.name else f"peer {self.peer}"


class History:
    """Members, epochs and leads, from events in the order of time."""

    def __init__(self, hosts: dict[str, tuple[str, str]]) -> None:
        """`hosts` has, by the name of a peer's record, the peer's name and its host."""
        self.members: dict[PeerId, MemberTally] = {}
        self.epochs: dict[EpochKey, EpochTally] = {}
        self.leads: list[Lead] = []
        self.incarnation = 1
        self.changes: list[EpochTally] = []
        """In the order in which they began to run."""
        self._hosts = hosts
        self._peer_of: dict[str, PeerId] = {}
        """The newest peer id of a record's process."""
        self._sealing: dict[GroupId, tuple[int, str]] = {}
        """Since when a group's epoch is sealed, and why."""
        self._gone: dict[GroupId, list[PeerGone]] = {}
        """Members that are gone since the last epoch was recorded."""
        self._gone_ns: dict[GroupId, int] = {}
        self._leaders: list[tuple[RareEvent, LeaderChanged]] = []

    def member(self, peer: PeerId) -> MemberTally:
        return self.members.setdefault(peer, MemberTally(peer))

    def take(self, event: RareEvent) -> None:
        at_ns, notice = event.at_ns, event.notice
        match notice:
            case PeerRegistered():
                member = self.member(notice.peer)
                member.name, member.group = notice.name, notice.group
                member.registered_ns = member.registered_ns or at_ns
            case PeerJoined():
                self._joined(event, notice)
            case PeerGone():
                self._lose(at_ns, notice)
            case PeerEvicted():
                member = self.member(event.peer)
                if event.peer and member.end in ("stayed", "missing"):
                    member.end, member.reason, member.ended_ns = "evicted", notice.reason, at_ns
            case EpochSealing():
                self._sealing.setdefault(notice.group, (at_ns, notice.reason))
            case EpochRecorded():
                self._recorded(at_ns, notice)
            case EpochInstalled():
                epoch = self._epoch(notice.group, notice.epoch)
                epoch.installed_ns = at_ns
            case EpochRuns():
                self._runs(at_ns, notice)
            case LeaderChanged():
                self._leaders.append((event, notice))
            case RunBegun():
                self.incarnation = max(self.incarnation + 1, notice.incarnation)
            case _:
                pass

    def _joined(self, event: RareEvent, notice: PeerJoined) -> None:
        member = self.member(notice.peer)
        member.group, member.joined_ns = notice.group, event.at_ns
        if event.role == "peer":
            member.record = event.record
            name, member.host = self._hosts.get(event.record, ("", ""))
            member.name = member.name or name
            member.was = self._peer_of.get(event.record, 0)
            self._peer_of[event.record] = notice.peer

    def _lose(self, at_ns: int, notice: PeerGone) -> None:
        member = self.member(notice.peer)
        member.name = member.name or notice.name
        member.end, member.reason, member.ended_ns = notice.how, notice.reason, at_ns
        self._gone.setdefault(member.group, []).append(notice)
        self._gone_ns.setdefault(member.group, at_ns)

    def _epoch(self, group: GroupId, epoch: Epoch) -> EpochTally:
        key = EpochKey(self.incarnation, group, epoch)
        found = self.epochs.get(key)
        if found is None:
            found = self.epochs[key] = EpochTally(key)
            self.changes.append(found)
        return found

    def _recorded(self, at_ns: int, notice: EpochRecorded) -> None:
        epoch = self._epoch(notice.group, notice.epoch)
        epoch.recorded_ns, epoch.ring = at_ns, notice.ring
        epoch.aborted += notice.aborted
        sealing_ns, reason = self._sealing.pop(notice.group, (0, ""))
        gone_ns = self._gone_ns.pop(notice.group, 0)
        # Peers that were gone long before belong to another change: of an epoch that nobody was left to seal.
        epoch.sealing_ns = min((ns for ns in (sealing_ns, gone_ns) if ns), default=0)
        epoch.reason = epoch.reason or reason
        epoch.causes += self._gone.pop(notice.group, [])
        for peer in notice.ring:
            member = self.member(peer)
            member.group = notice.group
            member.joined_ns = member.joined_ns or at_ns

    def _runs(self, at_ns: int, notice: EpochRuns) -> None:
        epoch = self._epoch(notice.group, notice.epoch)
        epoch.fence, epoch.ring = max(epoch.fence, notice.fence), notice.ring or epoch.ring
        epoch.first_runs_ns = min(epoch.first_runs_ns or at_ns, at_ns)
        epoch.last_runs_ns = max(epoch.last_runs_ns, at_ns)
        for peer in notice.ring:
            member = self.member(peer)
            member.group = notice.group
            member.joined_ns = min(member.joined_ns or at_ns, at_ns)

    def close(self, end_ns: int, began_ns: int, record_ends: dict[str, int]) -> None:
        """All events are here: ends that no record has are taken from the rings, and from the ends of records."""
        by_group: dict[tuple[int, GroupId], list[EpochTally]] = {}
        for epoch in self.changes:
            by_group.setdefault(epoch.key[:2], []).append(epoch)
        for epochs in by_group.values():
            epochs.sort(key=lambda epoch: epoch.key.epoch)
            for before, after in pairwise(epochs):
                for peer in set(before.ring) - set(after.ring):
                    member = self.member(peer)
                    if member.end == "stayed":
                        member.end, member.ended_ns = "missing", after.runs_ns
        for member in self.members.values():
            member.ended_ns = member.ended_ns or end_ns
        for place, (event, lead) in enumerate(self._leaders):
            if lead.leads:
                until_ns = min(
                    [end_ns, record_ends.get(event.record, end_ns)]
                    + [later.at_ns for later, _ in self._leaders[place + 1 : place + 2]]
                )
                times = ((event.at_ns - began_ns) / 1e9, (until_ns - began_ns) / 1e9)
                self.leads.append(Lead(lead.leader, lead.fence, *times, lead.reason))

    def memberships(self, began_ns: int) -> list[Membership]:
        def seconds(ns: int) -> float | None:
            return (ns - began_ns) / 1e9 if ns else None

        return [
            Membership(
                member.peer,
                member.name,
                member.host,
                member.group,
                seconds(member.registered_ns),
                seconds(member.joined_ns),
                (member.ended_ns - began_ns) / 1e9,
                member.end,
                member.reason,
                member.record,
            )
            for _, member in sorted(self.members.items())
        ]


def stalled_in(events: list[RareEvent]) -> dict[PeerId, PeersStalled]:
    """Of each peer that was evicted for a stall, what the master said about it."""
    return {
        peer: event.notice for event in events if isinstance(event.notice, PeersStalled) for peer in event.notice.peers
    }
