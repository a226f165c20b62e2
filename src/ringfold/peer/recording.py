"""What a peer records about itself: its events, its ops and its steps, and what its heartbeats say of its program.

One `Recording` outlives the sessions of a communicator. It always keeps the last events in memory, for a flight record;
with `events_dir` it writes all of them to files (`runtime/recorder.py`). The engine keeps the last ops by itself
(`OpLog` in native/include/ringfold/op_log.hpp); they are read in batches, by the thread that writes.

The program's report travels in the next heartbeat, at most once in `REPORT_NS`: no message is sent for it. A report
may be replaced before a heartbeat has taken it, or be lost with a master. So each has the rare events of the last
`LIVE_NS`, and to a new master all that are still there; they are numbered, and the master skips those that it has.
"""

import logging
import math
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsFloat, cast

from msgspec.structs import replace

from ringfold.clock.global_clock import GlobalClock
from ringfold.errors import ClockNotReady, ConfigError, UsageError
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns, process_cpu_ns, raw_ns, unix_ns
from ringfold.runtime.process import RunQueueClock
from ringfold.runtime.recorder import CAPACITY_BYTES, FLUSH_S, Recorder
from ringfold.units import MS, S
from ringfold.wire.events import (
    OP_NAMES,
    OP_OUTCOMES,
    ClockSampled,
    OpEnded,
    OpsLeftOut,
    RecordBegun,
    Stamp,
    StepEnded,
    ValuesLogged,
    encode_event,
)
from ringfold.wire.frames import MAX_REPORT_BYTES, encode_progress
from ringfold.wire.messages import PeerId
from ringfold.wire.notices import Notice
from ringfold.wire.status import DURATION_BOUNDS_US, Progress

REPORT_NS = 250 * MS
LIVE_NS = 10 * S
CLOCK_EVERY_NS = 2 * S
MAX_OPS_PER_S = 500
"""More ops, or steps, are not recorded in a second: then only those whose number is a multiple of a power of two."""
SLOW_NS = 100 * MS
"""Ops that take longer are always recorded."""
MAX_LOGGED = 64
MAX_NAME = 64
_LAST_OPS = 512
_NO_STEP = 2**64 - 1
_ENTRY = struct.Struct("<7Q10q4I3B5x")
"""`OpEntry` of the engine."""


_log = logging.getLogger("ringfold.record")


class OpSource(Protocol):
    """The part of an engine that knows the ops that have ended, and sends heartbeats."""

    def ended_ops(self, since: int) -> tuple[int, bytes]: ...
    def set_report(self, report: bytes) -> None: ...
    def wake(self) -> None: ...


class OpEntry(NamedTuple):
    """One ended op, as the engine packs it."""

    tag: int
    step: int
    bytes: int
    sent_bytes: int
    received_bytes: int
    last_peer: PeerId
    arriving_from: PeerId
    called: int
    started: int
    out_first: int
    out_last: int
    in_first: int
    in_last: int
    local: int
    ended: int
    blocked: int
    arriving: int
    sequence: int
    epoch: int
    call: int
    attempts: int
    kind: int
    outcome: int
    small: int

    def event(self) -> OpEnded:
        return OpEnded(
            op=OP_NAMES[self.kind],
            tag=self.tag,
            sequence=self.sequence,
            epoch=self.epoch,
            outcome=OP_OUTCOMES[self.outcome],
            bytes=self.bytes,
            called_ns=self.called,
            started_ns=self.started,
            step=-1 if self.step == _NO_STEP else self.step,
            attempts=self.attempts,
            out_first_ns=self.out_first,
            out_last_ns=self.out_last,
            in_first_ns=self.in_first,
            in_last_ns=self.in_last,
            local_ns=self.local,
            blocked_ns=self.blocked,
            arriving_ns=self.arriving,
            arriving_from=self.arriving_from,
            last_peer=self.last_peer,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
        )


def unpack_ops(packed: bytes) -> Iterator[OpEntry]:
    """The ops that `ended_ops` returned."""
    return map(OpEntry._make, _ENTRY.iter_unpack(packed))


class Thinning:
    """Decides what is recorded when there is too much: every n-th, n being a power of two that follows the rate."""

    def __init__(self, most_per_s: int = MAX_OPS_PER_S) -> None:
        self.every = 1
        self._most = most_per_s

    def note(self, count: int, seconds: float) -> None:
        """So many have ended in this time, or in the `FLUSH_S` before, if it is shorter: a burst is no rate."""
        wanted = 1
        while count > self._most * max(seconds, FLUSH_S) * wanted:
            wanted *= 2
        self.every = wanted

    def keeps(self, number: int) -> bool:
        return number % self.every == 0


class Recording:
    """The record of one communicator. All calls are cheap; safe from any thread."""

    def __init__(
        self, begun: RecordBegun, directory: Path | None, flights: Path | None, *, capacity_bytes: int = CAPACITY_BYTES
    ) -> None:
        """`flights` is the directory of flight records. ConfigError if the record cannot be begun."""
        self._begun, self._directory, self._flights = begun, directory, flights
        self._capacity_bytes = capacity_bytes
        self._clock: GlobalClock | None = None
        self._engine: OpSource | None = None
        self._lock = threads.Lock()
        """Around what two threads read and write: ops that are collected, and the report."""
        self._next_op = 0
        self._lost_ops = self._left_out_ops = self._left_out_steps = 0
        self._ops, self._step_thinning = Thinning(), Thinning()
        self._collected_ns, self._clock_ns = monotonic_ns(), 0
        self._steps_since = 0
        self._progress = Progress(version=begun.version)
        self._reported_ns, self._is_due = 0, False
        self._first_live = 0
        """The first event of this session: a peer that joins again has another number."""
        self._control_conn: int | None = None
        self._all_until_ns = 0
        self._step: _Step | None = None
        self.step_durations = [0] * (len(DURATION_BOUNDS_US) + 1)
        """How many steps took how long, by the classes of op durations, and the sum of all."""
        self.step_ns = 0
        self._recorder = self._new_recorder(directory)

    def _new_recorder(self, directory: Path | None) -> Recorder:
        return Recorder(self._begun, directory, collect=self._collect, capacity_bytes=self._capacity_bytes)

    def attach(self, engine: OpSource, clock: GlobalClock) -> None:
        """A session begins, with an engine and a clock of its own."""
        if self._recorder.is_closed:
            try:
                self._recorder = self._new_recorder(self._directory)
            except ConfigError as error:  # it could be begun before: now the program goes on without it
                _log.warning("%s", error)
                self._recorder = self._new_recorder(None)
        for line in self._op_lines(monotonic_ns()):
            self._recorder.add_line(line)
        self._recorder.peer = 0
        with self._lock:
            self._engine, self._clock, self._next_op = engine, clock, 0
            self._reported_ns, self._is_due, self._control_conn = 0, False, None
            self._first_live = self._recorder.live_count

    def follow(self, control_conn: int | None) -> None:
        """The connection to the master; a new one leads to a master that knows nothing yet."""
        if control_conn == self._control_conn:
            return
        self._control_conn = control_conn
        if control_conn is not None:
            self._all_until_ns = monotonic_ns() + LIVE_NS
            self.report(at_once=True)

    def joined(self, peer: PeerId) -> None:
        self._recorder.peer = peer
        self.report(at_once=True)

    @property
    def path(self) -> Path | None:
        """The file that is written now; None without a record in files."""
        return self._recorder.path

    def emit(self, notice: Notice) -> None:
        before = self._recorder.live_count
        self._recorder.emit(notice)
        if self._recorder.live_count > before:
            self.report(at_once=True)

    def close(self) -> None:
        self._recorder.close()
        with self._lock:
            self._engine = None

    def forked(self) -> None:
        self._recorder.forked()
        self._engine, self._lock, self._flights = None, threads.Lock(), None

    # Steps, and what the program logs

    def begin_step(self, number: int, epoch: int, size: int, sync_ns: int) -> None:
        is_kept = self._step_thinning.keeps(number)
        measures = is_kept and self._recorder.is_recording
        self._step = _Step(number, epoch, size, sync_ns, is_kept=is_kept, measures=measures)
        self._set(step=number, in_step=True)

    def wait_begins(self) -> None:
        """The program waits for an op of the step: what it computed before, it computed without waiting."""
        if self._step is not None:
            self._step.wait_begins()

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._steps_since += 1
        took_ns = monotonic_ns() - step.began_ns
        self.step_ns += took_ns
        self.step_durations[bisect_left(DURATION_BOUNDS_US, took_ns / 1_000)] += 1
        if step.is_kept:
            self._recorder.emit(step.event(), is_stamped=False)
        else:
            self._left_out_steps += 1
        self._set(steps=self._progress.steps + 1, in_step=False)

    def abandon_step(self) -> None:
        """The program has left its loop, perhaps inside a step."""
        if self._step is not None:
            self._step = None
            self._set(in_step=False)

    def log(self, values: Mapping[str, float]) -> None:
        """Values of the program, for people: a loss, a rate, a count."""
        logged = _checked(values)
        if self._step is None:
            self._recorder.emit(ValuesLogged(logged))
        else:
            self._step.logged = _newest(self._step.logged, logged)
        self._set(logged=_newest(self._progress.logged, logged))

    # The report in heartbeats

    def _set(self, **changed: object) -> None:
        self._progress = replace(self._progress, **changed)
        self.report()

    def report(self, *, at_once: bool = False) -> None:
        """Let the next heartbeat carry the program's report; if one has just done so, a later one, by `tick`."""
        now_ns = monotonic_ns()
        if not at_once and now_ns - self._reported_ns < REPORT_NS:
            engine = self._engine
            if not self._is_due and engine is not None:
                self._is_due = True
                engine.wake()
            return
        with self._lock:
            if self._engine is None:
                return
            self._reported_ns, self._is_due = now_ns, False
            self._engine.set_report(self._encoded_report(now_ns))

    def _encoded_report(self, now_ns: int) -> bytes:
        # While there is no master, none of the events has arrived.
        wants_all = self._control_conn is None or now_ns < self._all_until_ns
        first, lines = self._recorder.live(self._first_live, 0 if wants_all else now_ns - LIVE_NS)
        offset_ns, error_ns = self._clock_offset()
        progress = replace(
            self._progress,
            clock_offset_ns=offset_ns,
            clock_error_ns=error_ns,
            events_dropped=self._recorder.dropped + self._lost_ops,
        )
        if lines:
            room = min(MAX_REPORT_BYTES // 2, MAX_REPORT_BYTES - len(encode_progress(progress)) - 64)
            kept = _within(lines, room)
            progress = replace(progress, events=kept, first_event=first - self._first_live + len(lines) - len(kept))
        return encode_progress(progress)

    def due_ns(self) -> int | None:
        """When `tick` is to be called; None: there is no need."""
        return self._reported_ns + REPORT_NS if self._is_due else None

    def tick(self) -> None:
        """Called by the session's thread."""
        if self._is_due and monotonic_ns() - self._reported_ns >= REPORT_NS:
            self.report(at_once=True)

    @property
    def progress(self) -> Progress:
        """What the program reports, as of now, without events."""
        offset_ns, error_ns = self._clock_offset()
        dropped = self._recorder.dropped + self._lost_ops
        return replace(self._progress, clock_offset_ns=offset_ns, clock_error_ns=error_ns, events_dropped=dropped)

    def serves_metrics(self, address: str) -> None:
        """The program's report has this address from now on."""
        self._progress = replace(self._progress, metrics=address)
        self.report(at_once=True)

    def _clock_offset(self) -> tuple[int, int] | tuple[None, None]:
        if self._clock is None:
            return None, None
        try:
            now = self._clock.now()
        except ClockNotReady:
            return None, None
        return now.ns - unix_ns(), now.error_ns

    # Collecting

    def _collect(self) -> Iterable[bytes]:
        """Called by the thread that writes: the ops that have ended, and from time to time the clocks."""
        now_ns = monotonic_ns()
        lines = self._op_lines(now_ns)
        if now_ns - self._clock_ns >= CLOCK_EVERY_NS:
            self._clock_ns = now_ns
            lines.append(self._clocks())
            if self._left_out_ops or self._left_out_steps:
                every = max(self._ops.every, self._step_thinning.every)
                left_out = OpsLeftOut(self._left_out_ops, self._left_out_steps, every)
                self._left_out_ops = self._left_out_steps = 0
                lines.append(encode_event(Stamp(now_ns, unix_ns(), self._recorder.peer), left_out))
        return lines

    def _op_lines(self, now_ns: int) -> list[bytes]:
        peer = self._recorder.peer
        return [encode_event(Stamp(entry.ended, 0, peer), entry.event()) for entry in self._ended(now_ns)]

    def _ended(self, now_ns: int) -> list[OpEntry]:
        with self._lock:
            if self._engine is None:
                return []
            wanted = self._next_op
            self._next_op, packed = self._engine.ended_ops(wanted)
        entries = list(unpack_ops(packed))
        lost = self._next_op - wanted - len(entries)
        self._lost_ops += lost
        seconds = (now_ns - self._collected_ns) / S
        self._collected_ns = now_ns
        self._ops.note(len(entries) + lost, seconds)
        self._step_thinning.note(self._steps_since, seconds)
        self._steps_since = 0
        kept = [each for each in entries if self._is_kept(each)]
        self._left_out_ops += len(entries) - len(kept) + lost
        return kept

    def _is_kept(self, entry: OpEntry) -> bool:
        is_special = entry.outcome != 0 or entry.attempts > 1 or entry.ended - entry.called > SLOW_NS
        return is_special or self._ops.keeps(entry.sequence)

    def _clocks(self) -> bytes:
        """All clocks at the same instant: of several readings the one that took the shortest time."""
        found: list[tuple[int, int, ClockSampled]] = []
        for _ in range(5):
            before_ns = monotonic_ns()
            raw, wall = raw_ns(), unix_ns()
            after_ns = monotonic_ns()
            found.append((after_ns - before_ns, (before_ns + after_ns) // 2, ClockSampled(raw, wall)))
        _, at_ns, sample = min(found, key=lambda each: each[0])
        if self._clock is not None:
            try:
                instant = self._clock.to_global(sample.raw_ns)
                sample = ClockSampled(sample.raw_ns, sample.wall_ns, instant.ns, instant.error_ns)
            except ClockNotReady:
                pass
        return encode_event(Stamp(at_ns, sample.wall_ns, self._recorder.peer), sample)

    # Flight records

    def dump(self, reason: str, *, stacks: bool = False) -> None:
        """Write a flight record: the last events and ops."""
        if self._flights is None:
            return
        lines: list[bytes] = []
        with self._lock:
            if self._engine is not None:
                _, packed = self._engine.ended_ops(0)
                peer = self._recorder.peer
                last = list(unpack_ops(packed))[-_LAST_OPS:]
                lines = [encode_event(Stamp(entry.ended, 0, peer), entry.event()) for entry in last]
        lines.append(self._clocks())
        self._recorder.dump(self._flights, reason, lines, stacks=stacks)


class _Step:
    """A step that the program is in."""

    def __init__(self, number: int, epoch: int, size: int, sync_ns: int, *, is_kept: bool, measures: bool) -> None:
        self.number, self.what, self.is_kept = number, (epoch, size, sync_ns), is_kept
        self.logged: dict[str, float | None] = {}
        self.waited_ns = self._cpu_ns = self._queued_ns = 0
        self._queue = RunQueueClock() if measures else None
        self._began_cpu_ns = process_cpu_ns() if measures else 0
        self.began_ns = monotonic_ns()

    def wait_begins(self) -> None:
        if self.waited_ns == 0:
            self.waited_ns = monotonic_ns()
            self._measure()

    def _measure(self) -> None:
        if self._queue is not None:
            self._cpu_ns = process_cpu_ns() - self._began_cpu_ns
            self._queued_ns = self._queue.elapsed_ns()
            self._queue = None

    def event(self) -> StepEnded:
        self._measure()
        epoch, size, sync_ns = self.what
        return StepEnded(
            self.number,
            epoch,
            size,
            self.began_ns,
            self.waited_ns,
            self._cpu_ns,
            self._queued_ns,
            sync_ns,
            self.logged,
        )


def _checked(values: Mapping[str, float]) -> dict[str, float | None]:
    """What may be logged: a few names, and numbers; None for those that are not finite. Anything else raises."""
    if len(values) > MAX_LOGGED:
        raise UsageError(f"log: {len(values)} values at once, and at most {MAX_LOGGED} are shown")
    out: dict[str, float | None] = {}
    for name, value in values.items():
        if len(name) > MAX_NAME:
            raise UsageError(f"log: a name of {len(name)} characters (limit {MAX_NAME}): {name[:20]!r}...")
        if not name.isprintable():
            raise UsageError(f"log: a name must be printable, unlike {name!r}")
        out[name] = _number(name, value)
    return out


def _newest(before: Mapping[str, float | None], new: dict[str, float | None]) -> dict[str, float | None]:
    """Both, or the `MAX_LOGGED` names that were logged last."""
    both = {name: value for name, value in before.items() if name not in new} | new
    return dict(list(both.items())[-MAX_LOGGED:])


def _number(name: str, value: object) -> float | None:
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise UsageError(f"log: {name} must be a number, not {type(value).__name__}")
    try:
        number = float(cast(SupportsFloat, value))
    except OverflowError:
        return None
    except (TypeError, ValueError, RuntimeError):  # such as an array with more than one element
        raise UsageError(f"log: {name} must be a number, and this {type(value).__name__} is none") from None
    return number if math.isfinite(number) else None


def _within(lines: list[bytes], most: int) -> list[bytes]:
    """The newest lines that fit."""
    total, kept = 0, 0
    for line in reversed(lines):
        total += len(line) + 8
        if total > most:
            break
        kept += 1
    return lines[len(lines) - kept :]
