"""A run as a trace for Perfetto: the ops of all peers with their phases, steps, syncs, epochs and incidents.

The format is Chrome's JSON, gzipped. Times are microseconds since the beginning of the run on the timeline of
`align.py`; the times of the record and the uncertainty of the mapping are in the arguments. A process of the trace is a
process of the run (its number is that of the peer), and each tag has a thread, because ops of a tag do not overlap; so
slices of a thread nest, which viewers need. Slices that overlap anyway go to a thread of their own.

Flows show who was waited for: from the start of an op at a peer that came late, and from the part of the peer whose
Done completed the evidence, to the ends of the op at those that waited. Counters are rates.
"""

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ringfold.errors import UsageError
from ringfold.observe.align import Alignment
from ringfold.observe.processes import Op, Process, StepRun, by_key
from ringfold.wire import events, notices
from ringfold.wire.events import Event

TraceEvent = dict[str, Any]

MAX_EVENTS = 1_000_000
"""About 250 MB of JSON; viewers in a browser end between 500 MB and 1 GB."""
STEPS, EPOCHS, SYNCS, INCIDENTS, TAGS = 1, 2, 3, 4, 10
"""Threads of a process."""
NAMES = {STEPS: "steps", EPOCHS: "epochs", SYNCS: "syncs, checkpoints", INCIDENTS: "incidents"}
OVERFLOW = 100_000
"""Added to a thread's number for slices that overlap others of it."""
FLOW_NS, FLOW_PART = 200_000, 0.2
"""A wait has a flow if it is so long, and so large a part of its op."""
_EVENTS_OF_OP = 7
_BINS = 500
_MIN_BIN_NS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What part of a run a trace shows: steps first..last, or seconds of the timeline. None: no limit."""

    steps: tuple[int, int] | None = None
    seconds: tuple[float, float] | None = None


@dataclass(slots=True)
class Trace:
    """The events of a trace, sorted, and what was left out of it."""

    events: list[TraceEvent] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def build(
    processes: Sequence[Process],
    alignment: Alignment,
    window: Window | None = None,
    more: Iterable[TraceEvent] = (),
    max_events: int = MAX_EVENTS,
) -> Trace:
    """The trace of a run. `more` are events of other traces, on the same timeline; they are sorted in."""
    return _Builder(processes, alignment, max_events).build(window or Window(), more)


def write(trace: Trace, path: Path, about: Mapping[str, object]) -> int:
    """Write a trace; its size before compression. `about` is kept in `otherData`."""
    encoder, size = msgspec.json.Encoder(), 0
    with gzip.open(path, "wb", compresslevel=4) as file:
        for piece in _pieces(trace, encoder, about):
            size += file.write(piece)
    return size


def _pieces(trace: Trace, encoder: msgspec.json.Encoder, about: Mapping[str, object]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ms","otherData":' + encoder.encode(dict(about)) + b',"traceEvents":[\n'
    for start in range(0, len(trace.events), 1_000):
        yield (b",\n" if start else b"") + b",\n".join(map(encoder.encode, trace.events[start : start + 1_000]))
    yield b"\n]}\n"


def pids(processes: Sequence[Process]) -> list[int]:
    """The number of each process in a trace: its first peer id, where that is free; masters and others come after."""
    found: list[int] = []
    for index, process in enumerate(processes):
        wanted = process.peers[0] if process.peers else 0
        found.append(wanted if wanted and wanted not in found else 1_000_000 + index)
    return found


def place(process: Process, index: int) -> int:
    """Where a process is in a trace: the master first, then the peers by number, with room between them."""
    if process.begun.role == "master":
        return -1_000 + index
    return 1_000 * (process.peers[0] if process.peers else 1_000_000 + index)


class _Builder:
    def __init__(self, processes: Sequence[Process], alignment: Alignment, max_events: int) -> None:
        self._processes, self._alignment, self._max = processes, alignment, max_events
        self._pids = pids(processes)
        self._threads: dict[tuple[int, int], str] = {}
        self._slices: dict[tuple[int, int], list[tuple[int, int, TraceEvent]]] = {}
        self._plain: list[tuple[int, TraceEvent]] = []
        self._flows = 0
        self._trace = Trace()
        self._first, self._last = 0, 1 << 62

    def build(self, window: Window, more: Iterable[TraceEvent]) -> Trace:
        self._choose(window)
        for index, process in enumerate(self._processes):
            self._add_epochs(index, process)
            for step in process.steps:
                self._add_step(index, step)
            for op in process.ops:
                self._add_op(index, op)
            for event in process.others:
                self._add_other(index, event)
            self._add_rates(index, process)
            self._add_counts(index, process)
        for members in by_key(self._processes).values():
            self._add_flows(members)
        for index, process in enumerate(self._processes):
            if process.ops_left_out or process.steps_left_out:
                self._trace.left_out.append(
                    f"{process.title} did not record {process.ops_left_out} ops and {process.steps_left_out} steps"
                )
            self._name(index, process)
        self._finish(more)
        return self._trace

    # The window

    def _time(self, index: int, at: int) -> int:
        """Nanoseconds since the beginning of the timeline."""
        return self._alignment.time(index, at) - self._alignment.origin

    def _choose(self, window: Window) -> None:
        if window.seconds is not None:
            self._first, self._last = (int(second * 1e9) for second in window.seconds)
        elif window.steps is not None:
            self._first, self._last = self._span_of(*window.steps)
        ends = sorted(
            self._time(index, op.at)
            for index, process in enumerate(self._processes)
            for op in process.ops
            if self._first <= self._time(index, op.at) <= self._last
        )
        fitting = self._max // _EVENTS_OF_OP
        if len(ends) > fitting:
            self._first = ends[-fitting] + 1
            self._trace.left_out.append(
                f"{len(ends) - fitting} of {len(ends)} ops, those before {self._first / 1e9:.3f} s, so that a browser "
                "can show the rest: choose others with --steps or --seconds"
            )

    def _span_of(self, first: int, last: int) -> tuple[int, int]:
        spans = [
            (self._time(index, step.ended.began_ns - step.ended.sync_ns), self._time(index, step.at))
            for index, process in enumerate(self._processes)
            for step in process.steps
            if first <= step.ended.step <= last
        ]
        if not spans:
            known = [step.ended.step for process in self._processes for step in process.steps]
            there = f"steps {min(known)} to {max(known)}" if known else "no steps"
            raise UsageError(f"no record has a step from {first} to {last}: there are {there}")
        return min(start for start, _ in spans), max(end for _, end in spans)

    def _is_inside(self, start: int, end: int) -> bool:
        return end >= self._first and start <= self._last

    # Adding

    def _slice(self, index: int, thread: int, start: int, end: int, name: str, args: dict[str, Any]) -> None:
        self._slices.setdefault((index, thread), []).append((start, max(start, end), {"name": name, "args": args}))

    def _instant(self, index: int, thread: int, at: int, name: str, args: dict[str, Any]) -> None:
        self._threads.setdefault((index, thread), NAMES[thread])
        self._add(index, thread, at, {"ph": "i", "s": "p", "name": name, "args": args})

    def _add(self, index: int, thread: int, at: int, event: TraceEvent) -> None:
        self._plain.append((at, {**event, "pid": self._pids[index], "tid": thread, "ts": at / 1_000}))

    def _clock_args(self, index: int, *, began: int, ended: int) -> dict[str, Any]:
        error = self._alignment.error_ns(index, ended)
        uncertainty = "unknown" if error is None else round(error / 1_000, 3)
        return {"raw_begin_ns": began, "raw_end_ns": ended, "uncertainty_us": uncertainty}

    def _add_step(self, index: int, step: StepRun) -> None:
        ended = step.ended
        start, end = self._time(index, ended.began_ns), self._time(index, step.at)
        if not self._is_inside(start, end):
            return
        if ended.sync_ns:
            synced = self._time(index, ended.began_ns - ended.sync_ns)
            self._slice(index, STEPS, synced, start, "before the step: admissions, sync", {"step": ended.step})
        args = {
            "step": ended.step,
            "epoch": ended.epoch,
            "peers": ended.size,
            "cpu_ms": ended.cpu_ns / 1e6,
            "queued_ms": ended.queued_ns / 1e6,
            **self._clock_args(index, began=ended.began_ns, ended=step.at),
            **{f"logged {name}": value for name, value in ended.logged.items()},
        }
        self._slice(index, STEPS, start, end, f"step {ended.step}", args)

    def _add_op(self, index: int, op: Op) -> None:
        ended = op.ended
        called = ended.called_ns or ended.started_ns or op.at
        start, end = self._time(index, called), self._time(index, op.at)
        if not self._is_inside(start, end):
            return
        thread = TAGS + ended.tag
        outcome = "" if ended.outcome == "committed" else f" ({ended.outcome})"
        args: dict[str, Any] = {name: value for name, value in msgspec.to_builtins(ended).items() if name != "event"}
        args |= self._clock_args(index, began=called, ended=op.at)
        self._threads[index, thread] = f"ops, tag {ended.tag}"
        self._slice(index, thread, start, end, f"{ended.op}{outcome}", args)
        for name, begun, until in phases(op):
            self._slice(index, thread, self._time(index, begun), self._time(index, until), name, {})

    def _add_epochs(self, index: int, process: Process) -> None:
        bounds = process.bounds
        for number, (at, peer, epoch) in enumerate(process.epochs):
            after = process.epochs[number + 1][0] if number + 1 < len(process.epochs) else bounds[1] if bounds else at
            start, end = self._time(index, at), self._time(index, max(at, after))
            if self._is_inside(start, end):
                args = {"epoch": epoch.epoch, "group": epoch.group, "ring": epoch.ring, "peer": peer}
                args |= self._clock_args(index, began=at, ended=max(at, after))
                self._slice(index, EPOCHS, start, end, f"epoch {epoch.epoch}", args)

    def _add_other(self, index: int, event: Event) -> None:
        at, notice = self._time(index, event.stamp.at), event.notice
        if not self._is_inside(at, at):
            return
        args = {"text": str(notice), **self._clock_args(index, began=event.stamp.at, ended=event.stamp.at)}
        kind = notice.__struct_config__.tag
        match notice:
            case notices.SyncEnded():
                self._async(index, event.stamp.at, notice.took_ms, f"sync of revision {notice.revision}", args)
            case notices.EpochInstalled():
                self._async(index, event.stamp.at, notice.took_ms, f"change to epoch {notice.epoch}", args)
            case events.StateSynced() | events.CheckpointSaved():
                took = self._time(index, event.stamp.at - notice.took_ms * 1_000_000)
                name = "sync" if isinstance(notice, events.StateSynced) else "checkpoint"
                self._slice(index, SYNCS, took, at, f"{name} of revision {notice.revision}", args)
            case _ if notice.level != "debug":
                self._instant(index, INCIDENTS, at, str(kind), args)

    def _async(self, index: int, at: int, took_ms: int, name: str, args: dict[str, Any]) -> None:
        """What the master saw to its end, at `at` of its record. Those of several groups overlap."""
        self._flows += 1
        event = {"cat": "master", "id": f"master {self._flows}", "name": name}
        self._threads.setdefault((index, INCIDENTS), NAMES[INCIDENTS])
        self._add(index, INCIDENTS, self._time(index, at - took_ms * 1_000_000), {**event, "ph": "b", "args": args})
        self._add(index, INCIDENTS, self._time(index, at), {**event, "ph": "e"})

    def _add_flows(self, members: Sequence[tuple[int, Op]]) -> None:
        if len(members) < 2:
            return
        starts = sorted((self._time(i, op.ended.started_ns or op.ended.called_ns), i) for i, op in members)
        ends = {index: self._time(index, op.at) for index, op in members}
        of_peer = {op.peer: (index, op) for index, op in members}
        (before, _), (late, latest) = starts[-2:]
        for index, op in members:
            end, began = ends[index], self._time(index, op.ended.called_ns or op.at)
            enough = max(FLOW_NS, int((end - began) * FLOW_PART))
            if not self._is_inside(began, end):
                continue
            thread = TAGS + op.ended.tag
            if index != latest and late - before >= enough:
                self._flow("called late", (latest, thread, late), (index, thread, end))
            if op.ended.last_peer in of_peer and op.ended.local_ns:
                other, done = of_peer[op.ended.last_peer]
                waited = end - self._time(index, op.ended.local_ns)
                if other != index and done.ended.local_ns and waited >= enough:
                    self._flow("Done", (other, thread, self._time(other, done.ended.local_ns)), (index, thread, end))

    def _flow(self, name: str, source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
        """From an instant in a slice to one in another: (process, thread, time). The end is in the slice that ends."""
        if source[2] >= target[2] or not self._is_inside(source[2], target[2]):
            return
        self._flows += 1
        event = {"cat": "waits", "name": name, "id": self._flows}
        self._add(*source, {**event, "ph": "s"})
        self._add(target[0], target[1], target[2] - 1, {**event, "ph": "f", "bp": "e"})

    # Counters

    def _add_rates(self, index: int, process: Process) -> None:
        """Bytes and steps a second, in bins."""
        ops = [(self._time(index, op.at), op.ended.sent_bytes, op.ended.received_bytes) for op in process.ops]
        ops = [op for op in ops if self._is_inside(op[0], op[0])]
        if not ops:
            return
        begin, end = min(op[0] for op in ops), max(op[0] for op in ops)
        width = max(_MIN_BIN_NS, (end - begin) // _BINS)
        bins: dict[int, list[int]] = {}
        for at, sent, received in ops:
            row = bins.setdefault((at - begin) // width, [0, 0, 0])
            row[0] += sent
            row[1] += received
        for step in process.steps:
            at = self._time(index, step.at)
            if begin <= at <= end:
                bins.setdefault((at - begin) // width, [0, 0, 0])[2] += 1
        for number in range((end - begin) // width + 2):
            sent, received, steps = bins.get(number, (0, 0, 0))
            megabytes = {"sent": sent / width * 1e3, "received": received / width * 1e3}
            self._count(index, begin + number * width, "MB/s", megabytes)
            self._count(index, begin + number * width, "steps/s", {"steps": steps / width * 1e9})

    def _add_counts(self, index: int, process: Process) -> None:
        for at, sample in process.statuses:
            time, status = self._time(index, at), sample.status
            if self._is_inside(time, time):
                self._count(index, time, "peers", {"peers": status.world.peers})
                waiting = {peer for each in status.waiting for peer in each.waiting}
                self._count(index, time, "waiting peers", {"waiting": len(waiting)})

    def _count(self, index: int, at: int, name: str, values: dict[str, float]) -> None:
        self._add(index, 0, at, {"ph": "C", "name": name, "args": values})

    # Finishing

    def _name(self, index: int, process: Process) -> None:
        """Names and places of the process and of its threads. Ops come first, because they are looked at most."""
        pid = self._pids[index]
        args: dict[str, dict[str, object]] = {"process_name": {"name": process.title}}
        args["process_labels"] = {"labels": f"aligned by {self._alignment.by(index)}, {process.begun.host}"}
        for name, values in {**args, "process_sort_index": {"sort_index": place(process, index)}}.items():
            self._trace.events.append({"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": 0, "args": values})

    def _finish(self, more: Iterable[TraceEvent]) -> None:
        for (index, thread), slices in self._slices.items():
            self._threads.setdefault((index, thread), NAMES.get(thread, ""))
            for lane, start, end, event in lanes(slices):
                number = thread + OVERFLOW * lane
                if lane:
                    self._threads[index, number] = f"{self._threads[index, thread]} ({lane + 1})"
                self._add(index, number, start, {**event, "ph": "X", "dur": (end - start) / 1_000})
        for (index, thread), name in sorted(self._threads.items()):
            for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": thread})):
                self._trace.events.append(
                    {"ph": "M", "name": key, "pid": self._pids[index], "tid": thread, "ts": 0, "args": value}
                )
        # At the same instant, the longer slice comes first: it contains the other one.
        timed = [(event["ts"], -event.get("dur", 0.0), event) for _, event in self._plain]
        for event in more:
            if event["ph"] == "M":
                self._trace.events.append(event)
            elif self._is_inside(int(event["ts"] * 1_000), int((event["ts"] + event.get("dur", 0.0)) * 1_000)):
                timed.append((event["ts"], -event.get("dur", 0.0), event))
        timed = _with_whole_flows(timed)
        timed.sort(key=lambda each: each[:2])
        # A slice may have begun before the window, even before the run by what is uncertain.
        shift = min([0.0, *(ts for ts, _, _ in timed[:1])])
        for _, _, event in timed:
            event["ts"] = round(event["ts"] - shift, 3)
            self._trace.events.append(event)


def _with_whole_flows(timed: list[tuple[float, float, TraceEvent]]) -> list[tuple[float, float, TraceEvent]]:
    """Without flows one of whose ends is not in the window."""
    begun = {event["id"] for _, _, event in timed if event["ph"] == "s"}
    whole = {event["id"] for _, _, event in timed if event["ph"] == "f"} & begun
    return [each for each in timed if each[2]["ph"] not in ("s", "t", "f") or each[2]["id"] in whole]


def phases(op: Op) -> list[tuple[str, int, int]]:
    """The phases of an op, one after the other: name, begin and end in the times of its record."""
    ended = op.ended
    called = ended.called_ns or ended.started_ns or op.at
    found, now = [], called
    last = min(max(ended.in_last_ns, ended.out_last_ns), ended.local_ns) if ended.local_ns else 0
    for name, until in (
        ("waits for its start", ended.started_ns),
        ("waits for a neighbour", ended.in_first_ns),
        ("transfer", last),
        ("own part", ended.local_ns),
        ("evidence", op.at if ended.local_ns else 0),
    ):
        until = min(until, op.at)
        if until > now:
            found.append((name, now, until))
            now = until
    return found


def lanes(slices: list[tuple[int, int, TraceEvent]]) -> Iterator[tuple[int, int, int, TraceEvent]]:
    """(lane, start, end, slice): slices of one lane are apart, or one contains the other."""
    open_ends: list[list[int]] = []
    for start, end, event in sorted(slices, key=lambda each: (each[0], -each[1])):
        lane = 0
        while lane < len(open_ends):
            ends = open_ends[lane]
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
            lane += 1
        else:
            open_ends.append([])
        open_ends[lane].append(end)
        yield lane, start, end, event
