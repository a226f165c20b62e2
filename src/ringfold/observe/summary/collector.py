"""Reads all events of a run once, and keeps tallies: memory does not grow with the number of ops, steps or samples."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from ringfold.observe.records import Record
from ringfold.observe.summary.ops import OpTally, PeerOps
from ringfold.observe.summary.rare_events import MAX_PER_RECORD, RareEvent
from ringfold.observe.summary.rounds import ClockTally, RoundTally
from ringfold.observe.summary.run_time import HostTime, RunTime, TimeSource
from ringfold.observe.summary.status_samples import StatusTally
from ringfold.wire.events import (
    CheckpointSaved,
    ClockSampled,
    EpochRuns,
    Event,
    LeaderChanged,
    OpEnded,
    OpsLeftOut,
    PeerEvicted,
    PeerJoined,
    StateSynced,
    StatusSampled,
    StepEnded,
    ValuesLogged,
)
from ringfold.wire.notices import (
    CallRefused,
    ConnectionAbandoned,
    ConnectionDropped,
    EdgeBad,
    EpochInstalled,
    EpochRecorded,
    EpochSealing,
    LaneLost,
    MasterLost,
    PeerDiverged,
    PeerGone,
    PeerRegistered,
    PeersStalled,
    PeerSuspected,
    ProbingBroke,
    ResumeDelayed,
    RoundDone,
    RunBegun,
    RunEnded,
    StateRolledBack,
)

RARE = (
    CallRefused, EdgeBad, EpochInstalled, EpochRecorded, EpochRuns, EpochSealing, LeaderChanged, MasterLost,
    PeerDiverged, PeerEvicted, PeerGone, PeerJoined, PeerRegistered, PeersStalled, ProbingBroke, ResumeDelayed,
    RunBegun, RunEnded, StateRolledBack, StateSynced,
)  # fmt: skip


@dataclass(slots=True)
class RecordTally:
    """What is known of one record after it was read. Times are Unix times; None: they could not be mapped."""

    record: Record
    source: TimeSource
    events: int = 0
    first_ns: int | None = None
    last_ns: int | None = None
    left_out_rare: int = 0
    has_clock: bool = False
    peers: list[int] = field(default_factory=list)


class Collector:
    """The tallies of all records."""

    def __init__(self, time: RunTime) -> None:
        self.records: list[RecordTally] = []
        self.ops = OpTally()
        self.status = StatusTally()
        self.rounds = RoundTally()
        self.clocks: list[ClockTally] = []
        self.checkpoints: set[int] = set()
        self.lanes_lost = self.suspicions = self.refused_connections = 0
        self.first_ns: int | None = None
        """Of all events that have a place in time."""
        self.last_ns: int | None = None
        self._time = time
        self._rare: list[RareEvent] = []

    def read(self, records: Iterable[Record]) -> None:
        """Take all events, side by side in the order of time: one op's ends at all members are near each other."""
        readers = [_Reader(self, record, self._time) for record in records]
        for _, reader, event, unix_ns in heapq.merge(*(reader.events() for reader in readers), key=itemgetter(0)):
            reader.take(event, unix_ns)
        for reader in readers:
            reader.end()
            self.records.append(reader.tally)
        self.ops.end()
        self.status.end()

    def rare_events(self) -> list[RareEvent]:
        """In the order of time. What a master recorded for a peer that has a record of its own is there once."""
        own = {event.peer for event in self._rare if event.role == "peer" and event.peer}
        kept = [event for event in self._rare if event.role != "master" or not event.peer or event.peer not in own]
        return sorted(kept, key=lambda event: event.at_ns)

    def add_rare(self, event: RareEvent) -> None:
        self._rare.append(event)

    def note_time(self, unix_ns: int) -> None:
        self.first_ns = unix_ns if self.first_ns is None else min(self.first_ns, unix_ns)
        self.last_ns = unix_ns if self.last_ns is None else max(self.last_ns, unix_ns)


class _Reader:
    """Takes the events of one record."""

    def __init__(self, collector: Collector, record: Record, time: RunTime) -> None:
        begun = record.begun
        self.tally = RecordTally(record, time.source(begun.boot_id))
        self._collector, self._record = collector, record
        self._host: HostTime | None = time.host(begun.boot_id)
        self._ops = PeerOps(collector.ops)
        self._peer = 0
        self._clock = ClockTally(record.name, begun.host)
        self._rare: dict[type, int] = {}

    def events(self) -> "Iterator[tuple[int, _Reader, Event, int | None]]":
        """With times that do not decrease, to merge by, and the Unix time of each event where it is known."""
        newest = 0
        for event in self._record.events():
            unix_ns = self._unix_ns(event)
            newest = max(newest, unix_ns or 0)
            yield newest, self, event, unix_ns

    def _unix_ns(self, event: Event) -> int | None:
        if self._is_of_peer(event):
            # An event of a peer in the master's record has the times of the peer.
            return event.stamp.wall or None
        return None if self._host is None else self._host.unix_ns(event.stamp.at)

    def _is_of_peer(self, event: Event) -> bool:
        return self._record.begun.role == "master" and event.stamp.peer != 0

    def take(self, event: Event, unix_ns: int | None) -> None:
        stamp, notice, tally = event.stamp, event.notice, self.tally
        tally.events += 1
        if not self._is_of_peer(event):
            if unix_ns is not None:
                tally.first_ns = unix_ns if tally.first_ns is None else min(tally.first_ns, unix_ns)
                tally.last_ns = max(unix_ns, tally.last_ns or unix_ns)
            if stamp.peer and stamp.peer != self._peer:
                self._be_peer(stamp.peer, None, stamp.at)
        match notice:
            case OpEnded():
                self._ops.op(stamp.at, unix_ns, notice)
            case StepEnded():
                self._ops.step(stamp.at, unix_ns, notice)
                if unix_ns is not None:
                    self._collector.note_time(unix_ns)
            case StatusSampled():
                self._collector.status.take(unix_ns, notice.status)
            case ClockSampled():
                tally.has_clock = True
                if unix_ns is not None:
                    self._clock.add(notice, unix_ns)
            case _:
                self._count(event, unix_ns)

    def _be_peer(self, peer: int, group: int | None, at: int) -> None:
        self._peer = peer
        self._ops.belongs_to(peer, group, at)
        if peer and peer not in self.tally.peers:
            self.tally.peers.append(peer)

    def _count(self, event: Event, unix_ns: int | None) -> None:
        collector, notice = self._collector, event.notice
        match notice:
            case PeerJoined():
                self._be_peer(notice.peer, notice.group, event.stamp.at)
            case EpochRuns():
                self._ops.belongs_to(self._peer, notice.group, event.stamp.at)
                collector.ops.ring_sizes[notice.group, notice.epoch] = len(notice.ring)
            case OpsLeftOut():
                collector.ops.ops_left_out += notice.ops
                collector.ops.steps_left_out += notice.steps
            case CheckpointSaved():
                collector.checkpoints.add(notice.revision)
            case LaneLost():
                collector.lanes_lost += 1
            case PeerSuspected():
                collector.suspicions += 1
            case ConnectionDropped() | ConnectionAbandoned():
                collector.refused_connections += 1
            case RoundDone():
                collector.rounds.add(notice.summary)
            case ValuesLogged():
                if unix_ns is not None:
                    collector.ops.log(unix_ns, notice.logged)
            case _:
                pass
        if unix_ns is not None and isinstance(notice, RARE):
            peer = event.stamp.peer or self._peer
            self._keep(RareEvent(unix_ns, self._record.name, self._record.begun.role, peer, notice))

    def _keep(self, event: RareEvent) -> None:
        kind = type(event.notice)
        seen = self._rare.get(kind, 0)
        if seen >= MAX_PER_RECORD:
            self.tally.left_out_rare += 1
            return
        self._rare[kind] = seen + 1
        self._collector.add_rare(event)

    def end(self) -> None:
        self._ops.end()
        if self._clock.samples:
            self._collector.clocks.append(self._clock)
