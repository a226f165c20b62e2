"""Ops and steps of a peer: durations, where the time went, who was last, and the pauses between commits. Pure."""

from collections import deque
from dataclasses import dataclass, field

from ringfold.observe.summary.thinning import LogHistogram, ThinnedSeries
from ringfold.units import US
from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.events import OpEnded, StepEnded

MAX_JUDGED_EPOCHS = 4_000
MAX_LOGGED_NAMES = 24
MAX_SLOW_STEPS = 48
_PENDING_STEPS = 64
"""Events of ops may be recorded after the event of their step: so many steps later all are there."""


@dataclass(slots=True)
class OpClassTally:
    """Ops of one kind whose sizes are between the same powers of two."""

    low_bytes: int
    high_bytes: int
    durations: LogHistogram = field(default_factory=LogHistogram)
    """Of the committed ones, in microseconds."""
    waited_ns: int = 0
    moved_ns: int = 0
    commit_ns: int = 0
    blocked_ns: int = 0


@dataclass(slots=True)
class WorkTally:
    """What one peer id did."""

    steps: int = 0
    ops: int = 0
    step_ns: int = 0
    in_steps_ns: int = 0
    """Of the steps, with an op in flight."""
    waited_ns: int = 0
    moved_ns: int = 0
    commit_ns: int = 0
    sync_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class Gap:
    """The time between the last commit in one epoch and the first in a later one: the longest of all survivors."""

    longest_ns: int = 0
    last_commit_ns: int = 0
    """When the last survivor had committed in the later epoch, in Unix time."""
    peers: int = 0


@dataclass(slots=True)
class SlowStepTally:
    at_ns: int
    took_ns: int
    peer: PeerId
    own_ns: int


class OpTally:
    """Of all records together."""

    def __init__(self) -> None:
        self.classes: dict[tuple[str, int], OpClassTally] = {}
        self.work: dict[PeerId, WorkTally] = {}
        self.gaps: dict[tuple[GroupId, Epoch, Epoch], Gap] = {}
        self.last: dict[tuple[GroupId, Epoch], dict[PeerId, dict[PeerId, int]]] = {}
        """Who was last, by epoch, reporting peer and named peer."""
        self.step_times = LogHistogram()
        """In microseconds."""
        self.step_series = ThinnedSeries()
        """The time from step to step, in seconds."""
        self.logged: dict[str, ThinnedSeries] = {}
        self.logged_left_out: set[str] = set()
        self.not_finite: dict[str, int] = {}
        """How often a value was NaN or infinite."""
        self.slow_steps: dict[int, SlowStepTally] = {}
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.repeated_steps = self.retried_ops = 0
        self.ops_left_out = self.steps_left_out = 0

    def class_of(self, op: OpEnded) -> OpClassTally:
        key = (op.op, op.bytes.bit_length())
        found = self.classes.get(key)
        if found is None:
            found = self.classes[key] = OpClassTally(op.bytes, op.bytes)
        found.low_bytes, found.high_bytes = min(found.low_bytes, op.bytes), max(found.high_bytes, op.bytes)
        return found

    def note_last(self, group: GroupId, epoch: Epoch, reporter: PeerId, named: PeerId) -> None:
        reports = self.last.get((group, epoch))
        if reports is None:
            if len(self.last) >= MAX_JUDGED_EPOCHS:
                return
            reports = self.last[group, epoch] = {}
        mine = reports.setdefault(reporter, {})
        mine[named] = mine.get(named, 0) + 1

    def note_gap(self, group: GroupId, old: Epoch, new: Epoch, gap_ns: int, commit_ns: int) -> None:
        gap = self.gaps.setdefault((group, old, new), Gap())
        gap.longest_ns = max(gap.longest_ns, gap_ns)
        gap.last_commit_ns = max(gap.last_commit_ns, commit_ns)
        gap.peers += 1

    def log(self, at_ns: int, logged: dict[str, float | None]) -> None:
        """Values of the program; those that are not finite are only counted."""
        for name, value in logged.items():
            if value is None:
                self.not_finite[name] = self.not_finite.get(name, 0) + 1
                continue
            series = self.logged.get(name)
            if series is None:
                if len(self.logged) >= MAX_LOGGED_NAMES:
                    if len(self.logged_left_out) < 1_000:
                        self.logged_left_out.add(name)
                    continue
                series = self.logged[name] = ThinnedSeries()
            series.add(at_ns, value)

    def note_step(self, step: int, slow: SlowStepTally) -> None:
        """Keep the slowest steps; of one step, the peer that was longest without an op in flight."""
        known = self.slow_steps.get(step)
        if known is not None:
            if slow.own_ns > known.own_ns:
                known.peer, known.own_ns = slow.peer, slow.own_ns
            known.took_ns, known.at_ns = max(known.took_ns, slow.took_ns), max(known.at_ns, slow.at_ns)
            return
        if len(self.slow_steps) >= 2 * MAX_SLOW_STEPS:
            kept = sorted(self.slow_steps.items(), key=lambda item: -item[1].took_ns)[:MAX_SLOW_STEPS]
            self.slow_steps = dict(kept)
        self.slow_steps[step] = slow


class PeerOps:
    """The ops and steps of one record, in the order of the record. Times are CLOCK_MONOTONIC of its host."""

    def __init__(self, tally: OpTally) -> None:
        self._tally = tally
        self._peer: PeerId = 0
        self._group: GroupId = 0
        self._committed: tuple[Epoch, int] | None = None
        """The epoch and the end of the last committed op of this peer id."""
        self._covered_until = 0
        """No later op covers anything before: ops are recorded in the order of their ends."""
        self._step = -1
        self._repeated = 0
        self._pending: deque[tuple[StepEnded, int, int]] = deque()
        """Steps with their ends, in the host's and in Unix time (0: it is not known)."""
        self._covered: dict[int, int] = {}
        """Time with an op in flight, by step."""

    def belongs_to(self, peer: PeerId, group: GroupId | None) -> None:
        """The peer id and the group of the events that follow."""
        if group is not None:
            self._group = group
        if peer != self._peer:
            self._peer, self._committed, self._step = peer, None, -1

    def op(self, at: int, unix_ns: int | None, op: OpEnded) -> None:
        tally = self._tally
        work = tally.work.setdefault(self._peer, WorkTally())
        work.ops += 1
        work.sent_bytes += op.sent_bytes
        work.received_bytes += op.received_bytes
        tally.retried_ops += op.attempts > 1
        if op.outcome != "committed":
            return
        started = op.started_ns or op.called_ns
        in_first = min(max(op.in_first_ns or op.local_ns or at, started), at)
        local = min(max(op.local_ns or at, in_first), at)
        waited, moved, commit = in_first - started, local - in_first, at - local
        found = tally.class_of(op)
        found.durations.add((at - started + US // 2) // US)
        found.waited_ns, found.moved_ns = found.waited_ns + waited, found.moved_ns + moved
        found.commit_ns, found.blocked_ns = found.commit_ns + commit, found.blocked_ns + op.blocked_ns
        self._cover(work, op, (started, in_first, local, at))
        if op.last_peer:
            tally.note_last(self._group, op.epoch, self._peer, op.last_peer)
        before = self._committed
        if before is not None and unix_ns is not None and op.epoch > before[0]:
            tally.note_gap(self._group, before[0], op.epoch, at - before[1], unix_ns)
        self._committed = (op.epoch, at)

    def _cover(self, work: WorkTally, op: OpEnded, times: tuple[int, int, int, int]) -> None:
        """Add what no earlier op covers: of ops that overlap, each stretch of time counts once. An op that was
        started again covers the time from its call on, as a wait."""
        started, in_first, local, at = times
        begun = max(min(op.called_ns, started), self._covered_until) if op.attempts > 1 else max(
            started, self._covered_until
        )  # fmt: skip
        self._covered_until = max(self._covered_until, at)
        if at <= begun:
            return
        work.waited_ns += max(0, in_first - begun)
        work.moved_ns += max(0, local - max(in_first, begun))
        work.commit_ns += max(0, at - max(local, begun))
        if op.step >= 0:
            work.in_steps_ns += at - begun
            self._covered[op.step] = self._covered.get(op.step, 0) + at - begun

    def step(self, at: int, unix_ns: int | None, ended: StepEnded) -> None:
        tally, work = self._tally, self._tally.work.setdefault(self._peer, WorkTally())
        took = max(0, at - ended.began_ns)
        work.steps += 1
        work.step_ns += took
        work.sync_ns += ended.sync_ns
        work.cpu_ns += ended.cpu_ns
        work.queued_ns += ended.queued_ns
        tally.first_step = ended.step if tally.first_step is None else min(tally.first_step, ended.step)
        tally.last_step = ended.step if tally.last_step is None else max(tally.last_step, ended.step)
        if self._step >= 0 and ended.step <= self._step:
            self._repeated += self._step - ended.step + 1
            tally.repeated_steps = max(tally.repeated_steps, self._repeated)
        self._step = ended.step
        each = took + ended.sync_ns
        tally.step_times.add((each + US // 2) // US)
        if unix_ns is not None:
            tally.step_series.add(unix_ns, each / 1e9)
            tally.log(unix_ns, ended.logged)
        self._pending.append((ended, at, unix_ns or 0))
        if len(self._pending) > _PENDING_STEPS:
            self._finish_step()

    def _finish_step(self) -> None:
        ended, at, unix_ns = self._pending.popleft()
        took, covered = max(0, at - ended.began_ns), self._covered.pop(ended.step, 0)
        self._tally.note_step(
            ended.step, SlowStepTally(unix_ns, took + ended.sync_ns, self._peer, max(0, took - covered))
        )
        if len(self._covered) > 4 * _PENDING_STEPS:
            # Ops of steps that have no event: they were not recorded, or the program left the loop.
            for step in sorted(self._covered)[: 2 * _PENDING_STEPS]:
                del self._covered[step]

    def end(self) -> None:
        """The record ends."""
        while self._pending:
            self._finish_step()
