"""The processes of a run directory: what each of them recorded, sorted into what traces and diagnoses need.

Pure: it is given records that somebody has read. Times stay those of the records, CLOCK_MONOTONIC of their hosts.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.events import (
    ClockSampled,
    EpochRuns,
    Event,
    OpEnded,
    OpsLeftOut,
    PeerJoined,
    RecordBegun,
    StatusSampled,
    StepEnded,
)

OpKey = tuple[GroupId, Epoch, int, int]
"""What names an op on all members: group, epoch, tag, sequence."""


@dataclass(slots=True)
class Op:
    """An op at one peer. `at` is its end."""

    at: int
    peer: PeerId
    group: GroupId
    ended: OpEnded

    @property
    def key(self) -> OpKey:
        return (self.group, self.ended.epoch, self.ended.tag, self.ended.sequence)


@dataclass(slots=True)
class StepRun:
    """A step at one peer. `at` is its end."""

    at: int
    peer: PeerId
    ended: StepEnded


@dataclass(slots=True)
class Process:
    """One process of the run, and its record in parts. Everything is in the order in which it was recorded."""

    name: str
    """That of its record."""
    begun: RecordBegun
    peers: list[PeerId] = field(default_factory=list)
    """The ids that it had: another one after each time that it joined again."""
    ops: list[Op] = field(default_factory=list)
    steps: list[StepRun] = field(default_factory=list)
    clocks: list[tuple[int, ClockSampled]] = field(default_factory=list)
    walls: list[tuple[int, int]] = field(default_factory=list)
    """(CLOCK_MONOTONIC, wall) of the other events that have both."""
    epochs: list[tuple[int, PeerId, EpochRuns]] = field(default_factory=list)
    statuses: list[tuple[int, StatusSampled]] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)
    ops_left_out: int = 0
    steps_left_out: int = 0
    """Ops and steps that the process itself did not record: there were too many."""
    ops_unread: int = 0
    """Ops that are in the record and were not wanted."""

    @property
    def title(self) -> str:
        """Who this is, for people."""
        who: str = self.begun.role
        if self.peers:
            who = f"{who} {' then '.join(map(str, self.peers))}"
        return f"{who} ({self.begun.name}, {self.begun.host})"

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The first and the last time that is recorded."""
        times = [at for at, _ in self.clocks] + [at for at, _ in self.walls]
        for op in (self.ops[:1], self.ops[-1:]):
            times += [each.ended.called_ns or each.at for each in op] + [each.at for each in op]
        for step in (self.steps[:1], self.steps[-1:]):
            times += [each.ended.began_ns for each in step] + [each.at for each in step]
        return (min(times), max(times)) if times else None

    def peer_at(self, at: int) -> PeerId:
        """The id that it had at that time, by its epochs."""
        latest = 0
        for since, peer, _ in self.epochs:
            if since <= at or not latest:
                latest = peer
        return latest or (self.peers[0] if self.peers else 0)


def gather(
    name: str,
    begun: RecordBegun,
    events: Iterable[Event],
    *,
    max_ops: int | None = None,
    steps: tuple[int, int] | None = None,
) -> Process:
    """Sort the events of one record. Of a long one, only the last `max_ops` ops are kept, and those of some steps."""
    process = Process(name, begun)
    ops: deque[Op] = deque(maxlen=max_ops)
    count = 0
    peer = group = 0
    for event in events:
        stamp, notice = event.stamp, event.notice
        if stamp.wall and not isinstance(notice, ClockSampled):
            process.walls.append((stamp.at, stamp.wall))
        match notice:
            case OpEnded():
                count += 1
                if _is_in(notice.step, steps):
                    ops.append(Op(stamp.at, stamp.peer or peer, group, notice))
            case StepEnded():
                if _is_in(notice.step, steps):
                    process.steps.append(StepRun(stamp.at, stamp.peer or peer, notice))
            case ClockSampled():
                process.clocks.append((stamp.at, notice))
            case PeerJoined():
                peer, group = notice.peer, notice.group
                if peer not in process.peers:
                    process.peers.append(peer)
                process.others.append(event)
            case EpochRuns():
                group = notice.group
                process.epochs.append((stamp.at, stamp.peer or peer, notice))
            case StatusSampled():
                process.statuses.append((stamp.at, notice))
            case OpsLeftOut():
                process.ops_left_out += notice.ops
                process.steps_left_out += notice.steps
            case _:
                process.others.append(event)
    process.ops = list(ops)
    process.ops_unread = count - len(ops)
    return process


def _is_in(step: int, steps: tuple[int, int] | None) -> bool:
    return steps is None or steps[0] <= step <= steps[1]


def by_key(processes: Iterable[Process]) -> dict[OpKey, list[tuple[int, Op]]]:
    """The committed ops by what names them: (index of the process, op) of each member that recorded it."""
    found: dict[OpKey, list[tuple[int, Op]]] = {}
    for index, process in enumerate(processes):
        for op in process.ops:
            if op.ended.outcome == "committed":
                found.setdefault(op.key, []).append((index, op))
    return found
