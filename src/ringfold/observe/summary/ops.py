"""Ops and steps of a peer: durations, where the time went, who was last, and the pauses between commits. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ringfold.observe.summary.thinning import LogHistogram, ThinnedSeries
from ringfold.units import US
from ringfold.wire.base import Epoch, GroupId, PeerId
from ringfold.wire.events import OpEnded, StepEnded

MAX_PENDING_OPS = 20_000
"""So many ops may begin until all members' records of one were read."""
MIN_LATE_NS = 100 * US
"""A peer that begins later than the others by less, or by less than a tenth of the op, does not keep them waiting."""
MAX_LOGGED_NAMES = 24
MAX_SLOW_STEPS = 48
_PENDING_STEPS = 64
"""Events of ops may be recorded after the event of their step: so many steps later all are there."""


@dataclass(slots=True)
class OpClassTally:
    """Ops of one kind whose sizes are between the same powers of two. Of the committed ones, in microseconds."""

    low_bytes: int
    high_bytes: int
    durations: LogHistogram = field(default_factory=LogHistogram)
    least: LogHistogram = field(default_factory=LogHistogram)
    """Of each op, the duration at the peer that began last: no wait for others is in it."""
    compared_ns: int = 0
    """The durations of ops that were recorded by several members."""
    waited_ns: int = 0
    """Of them, what was longer than at the peer that began last."""
    blocked_ns: int = 0
    total_ns: int = 0


@dataclass(slots=True)
class WorkTally:
    """What one peer id did."""

    steps: int = 0
    ops: int = 0
    step_ns: int = 0
    in_ops_ns: int = 0
    """Of the steps, with an op in flight."""
    sync_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    judged: int = 0
    """Ops that others recorded as well."""
    compared_ns: int = 0
    waited_ns: int = 0
    """As in `OpClassTally`."""
    last: int = 0
    """How often it began so much later than all others that it mattered."""
    kept_ns: int = 0
    """By how much it was later than the one before it, over all ops."""


class OpReport(NamedTuple):
    """An op at one member."""

    peer: PeerId
    duration_ns: int


class OpKey(NamedTuple):
    group: GroupId
    epoch: Epoch
    tag: int
    sequence: int


@dataclass(slots=True)
class PendingOp:
    """An op whose other members may still come."""

    of: OpClassTally
    reports: list[OpReport] = field(default_factory=list)


@dataclass(slots=True)
class Gap:
    """The time between the last commit in one epoch and the first in a later one: the longest of all survivors.

    The last op of the old epoch may have been committed by the verdict of the change itself, so what the members waited
    for it is kept, too. Ends are Unix times.
    """

    longest_ns: int = 0
    last_commit_ns: int = 0
    """When the last survivor had committed in the later epoch."""
    before_ns: int = 0
    before_end_ns: int = 0


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
        self._pending: dict[OpKey, PendingOp] = {}
        """In the order of their first reports."""
        self.ring_sizes: dict[tuple[GroupId, Epoch], int] = {}
        self.step_times = LogHistogram()
        """In microseconds."""
        self.step_series = ThinnedSeries()
        """The time from step to step, in seconds."""
        self.logged: dict[str, ThinnedSeries] = {}
        self.logged_left_out: set[str] = set()
        self.not_finite: dict[str, int] = {}
        """How often a value was NaN or infinite."""
        self.slow_steps: dict[int, SlowStepTally] = {}
        self.first_end_ns: int | None = None
        """When the first step ended, in Unix time."""
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

    def report(self, key: OpKey, of: OpClassTally, report: OpReport) -> None:
        """Add one member's end of an op. Records are read side by side, so those of the others are near."""
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = PendingOp(of)
            if len(self._pending) > MAX_PENDING_OPS:
                oldest = next(iter(self._pending))
                self._compare(self._pending.pop(oldest))
        pending.reports.append(report)
        if len(pending.reports) == self.ring_sizes.get(key[:2], 0):
            self._compare(self._pending.pop(key))

    def _compare(self, op: PendingOp) -> None:
        """All members of an op end it at nearly the same time. So it was shortest at the one that began last, and what
        it took longer elsewhere was waiting. No clocks are compared."""
        if len(op.reports) < 2:
            return
        reports = sorted(op.reports, key=lambda report: report.duration_ns)
        least_ns, late_ns = reports[0].duration_ns, reports[1].duration_ns - reports[0].duration_ns
        op.of.least.add((least_ns + US // 2) // US)
        for report in reports:
            work, waited_ns = self.work[report.peer], report.duration_ns - least_ns
            work.judged += 1
            for tally in (work, op.of):
                tally.compared_ns += report.duration_ns
                tally.waited_ns += waited_ns
        late = self.work[reports[0].peer]
        late.kept_ns += late_ns
        late.last += late_ns > max(MIN_LATE_NS, least_ns // 10)

    def end(self) -> None:
        """All records were read."""
        for op in self._pending.values():
            self._compare(op)
        self._pending = {}

    def note_gap(self, group: GroupId, old: "Commit", new: Epoch, at: int, unix_ns: int) -> None:
        """A peer's first commit in another epoch, at this time of its host, which is `unix_ns`."""
        gap = self.gaps.setdefault((group, old.epoch, new), Gap())
        gap.longest_ns = max(gap.longest_ns, at - old.at)
        gap.last_commit_ns = max(gap.last_commit_ns, unix_ns)
        if old.after_ns > gap.before_ns:
            gap.before_ns, gap.before_end_ns = old.after_ns, unix_ns - (at - old.at)

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


class Commit(NamedTuple):
    """A peer's newest committed op: its epoch, its end, and for how long nothing was committed before."""

    epoch: Epoch
    at: int
    after_ns: int


class PeerOps:
    """The ops and steps of one record, in the order of the record. Times are CLOCK_MONOTONIC of its host."""

    def __init__(self, tally: OpTally) -> None:
        self._tally = tally
        self._peer: PeerId = 0
        self._group: GroupId = 0
        self._since = 0
        """When it got this peer id."""
        self._committed: Commit | None = None
        """Of this peer id."""
        self._covered_until = 0
        """No later op covers anything before: ops are recorded in the order of their ends."""
        self._step = -1
        self._repeated = 0
        self._pending: deque[tuple[StepEnded, int, int]] = deque()
        """Steps with their ends, in the host's and in Unix time (0: it is not known)."""
        self._covered: dict[int, int] = {}
        """Time with an op in flight, by step."""

    def belongs_to(self, peer: PeerId, group: GroupId | None, at: int) -> None:
        """The peer id and the group of the events that follow."""
        if group is not None:
            self._group = group
        if peer != self._peer:
            self._peer, self._committed, self._step, self._since = peer, None, -1, at

    def op(self, at: int, unix_ns: int | None, op: OpEnded) -> None:
        tally = self._tally
        work = tally.work.setdefault(self._peer, WorkTally())
        work.ops += 1
        work.sent_bytes += op.sent_bytes
        work.received_bytes += op.received_bytes
        tally.retried_ops += op.attempts > 1
        if op.outcome != "committed":
            return
        duration_ns = max(0, at - (op.started_ns or op.called_ns))
        found = tally.class_of(op)
        found.durations.add((duration_ns + US // 2) // US)
        found.total_ns += duration_ns
        found.blocked_ns += op.blocked_ns
        self._cover(work, op, at)
        if op.attempts == 1:
            key = OpKey(self._group, op.epoch, op.tag, op.sequence)
            tally.report(key, found, OpReport(self._peer, duration_ns))
        before = self._committed
        if before is not None and unix_ns is not None and op.epoch > before.epoch:
            tally.note_gap(self._group, before, op.epoch, at, unix_ns)
        self._committed = Commit(op.epoch, at, 0 if before is None else at - before.at)

    def _cover(self, work: WorkTally, op: OpEnded, at: int) -> None:
        """Add what no earlier op covers: where ops overlap, each stretch of time counts once."""
        begun = max(op.called_ns or op.started_ns, self._covered_until)
        self._covered_until = max(self._covered_until, at)
        if at > begun and op.step >= 0:
            work.in_ops_ns += at - begun
            self._covered[op.step] = self._covered.get(op.step, 0) + at - begun

    def step(self, at: int, unix_ns: int | None, ended: StepEnded) -> None:
        tally, work = self._tally, self._tally.work.setdefault(self._peer, WorkTally())
        took = max(0, at - ended.began_ns)
        work.steps += 1
        tally.first_step = ended.step if tally.first_step is None else min(tally.first_step, ended.step)
        tally.last_step = ended.step if tally.last_step is None else max(tally.last_step, ended.step)
        if unix_ns is not None:
            tally.first_end_ns = min(tally.first_end_ns or unix_ns, unix_ns)
            tally.log(unix_ns, ended.logged)
        if ended.began_ns < self._since:
            # It was evicted in this step and has joined again: the time says nothing about the step.
            self._covered.pop(ended.step, None)
            self._step = ended.step
            return
        work.step_ns += took
        work.sync_ns += ended.sync_ns
        work.cpu_ns += ended.cpu_ns
        work.queued_ns += ended.queued_ns
        if self._step >= 0 and ended.step <= self._step:
            self._repeated += self._step - ended.step + 1
            tally.repeated_steps = max(tally.repeated_steps, self._repeated)
        self._step = ended.step
        each = took + ended.sync_ns
        tally.step_times.add((each + US // 2) // US)
        if unix_ns is not None:
            tally.step_series.add(unix_ns, each / 1e9)
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
