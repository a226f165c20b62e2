"""Traces of the PyTorch profiler on the timeline of a run.

A trace belongs to the process that its metadata names (`prof.add_metadata_json("ringfold_peer", str(run.peer_id))`),
or else has the host and the process number that it names, or whose peer number or name is in the name of the file.

Its times are wall time of the host: `baseTimeNanoseconds` plus microseconds. The record's samples of both clocks say
which CLOCK_MONOTONIC that is, and the alignment does the rest; so drift is corrected along the way. Process numbers of
different hosts may be the same, and those of GPUs are, so all are replaced, and flows get the number of the file.
"""

import gzip
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ringfold.errors import UsageError
from ringfold.observe.align import Alignment, Clock
from ringfold.observe.processes import Process
from ringfold.observe.trace import OVERFLOW, TraceEvent, lanes, place

FIRST_PID = 2_000_000
_PIDS_OF_FILE = 1_000
_WITH_ID = {"s", "t", "f", "b", "n", "e"}


def merged(paths: Sequence[Path], processes: Sequence[Process], alignment: Alignment) -> Iterator[TraceEvent]:
    """The events of PyTorch traces, each as part of the process that it belongs to."""
    for number, path in enumerate(paths):
        read = _read(path)
        index = match(path, read, processes)
        yield from _events(number, read, index, processes[index], alignment)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        read = msgspec.json.decode(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} cannot be read as a trace: {error}") from error
    if not isinstance(read, dict) or "traceEvents" not in read or "baseTimeNanoseconds" not in read:
        raise UsageError(f"{path} is no trace of the PyTorch profiler: it has no traceEvents or no baseTimeNanoseconds")
    return read


def match(path: Path, read: dict[str, Any], processes: Sequence[Process]) -> int:
    """The process that a trace belongs to, by its index. UsageError if that is none, or not certain."""
    peers = {peer: index for index, process in enumerate(processes) for peer in process.peers}
    wanted = read.get("ringfold_peer")
    if wanted is not None:
        if int(wanted) not in peers:
            raise UsageError(f"{path} is of peer {wanted}, of which there is no record")
        return peers[int(wanted)]
    host, numbers = read.get("host_name"), {event.get("pid") for event in read["traceEvents"]}
    found = [
        index
        for index, process in enumerate(processes)
        if process.begun.role == "peer" and process.begun.host == host and process.begun.pid in numbers
    ]
    if len(found) == 1:
        return found[0]
    named = re.search(r"(?:peer|rank)[-_ ]?(\d+)", path.name)
    if named and int(named[1]) in peers:
        return peers[int(named[1])]
    by_name = [
        index
        for index, process in enumerate(processes)
        if process.begun.role == "peer" and re.search(rf"\b{re.escape(process.begun.name)}\b", path.name)
    ]
    if len(by_name) == 1:
        return by_name[0]
    raise UsageError(
        f"{path} cannot be matched to a peer: call prof.add_metadata_json('ringfold_peer', str(run.peer_id)), or put "
        "the peer's number or name into the name of the file, as in peer-3.json"
    )


def _events(
    number: int, read: dict[str, Any], index: int, process: Process, alignment: Alignment
) -> Iterator[TraceEvent]:
    monotonic = _from_wall(process)
    base_ns = int(read["baseTimeNanoseconds"])

    def time_ns(ts: float) -> int:
        return alignment.time(index, monotonic(base_ns + round(ts * 1_000))) - alignment.origin

    numbers = _Numbers(FIRST_PID + number * _PIDS_OF_FILE)
    slices: dict[tuple[int, int], list[tuple[int, int, TraceEvent]]] = {}
    thread_names: dict[tuple[int, int], str] = {}
    for event in read["traceEvents"]:
        if "ts" not in event or "ph" not in event:
            continue
        pid, tid = numbers.of(event.get("pid")), numbers.thread(event.get("pid"), event.get("tid"))
        if event["ph"] == "M":
            name = event.get("args", {}).get("name")
            if event["name"] == "process_name" and name is not None:
                numbers.names[pid] = str(name)
            elif event["name"] == "thread_name" and name is not None:
                thread_names[pid, tid] = str(name)
            continue
        moved = {**event, "pid": pid, "tid": tid}
        start = time_ns(event["ts"])
        if event["ph"] in _WITH_ID and "id" in event:
            moved["id"] = f"torch {number}: {event['id']}"
        if event["ph"] == "X":
            end = time_ns(event["ts"] + event.get("dur", 0.0))
            slices.setdefault((pid, tid), []).append((start, end, moved))
            continue
        if event["ph"] == "i":
            moved["s"] = "p"
        yield {**moved, "ts": start / 1_000}
    lanes_of: dict[tuple[int, int], int] = {}
    for thread, found in slices.items():
        for lane, start, end, moved in lanes(found):
            lanes_of[thread] = max(lane, lanes_of.get(thread, 0))
            tid = thread[1] + lane * OVERFLOW
            yield {**moved, "tid": tid, "ts": start / 1_000, "dur": (end - start) / 1_000}
    yield from _names(numbers, thread_names, lanes_of, process, index)


def _names(
    numbers: "_Numbers",
    thread_names: dict[tuple[int, int], str],
    lanes_of: dict[tuple[int, int], int],
    process: Process,
    index: int,
) -> Iterator[TraceEvent]:
    """Names and places: below the process of the run."""
    for original, pid in numbers.pids.items():
        args = {"name": f"{process.title}, PyTorch: {numbers.names.get(pid, original)}"}
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": args}
        order = place(process, index) + 1 + pid % _PIDS_OF_FILE
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": order}}
    for (pid, original), tid in numbers.threads.items():
        name = thread_names.get((pid, tid), str(original))
        for lane in range(lanes_of.get((pid, tid), 0) + 1):
            args = {"name": f"{name} ({lane + 1})" if lane else name}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid + lane * OVERFLOW, "ts": 0, "args": args}


class _Numbers:
    """New numbers for the processes and threads of one file; theirs may be text."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.pids: dict[object, int] = {}
        self.threads: dict[tuple[int, object], int] = {}
        self.names: dict[int, str] = {}

    def of(self, pid: object) -> int:
        return self.pids.setdefault(pid, self._first + len(self.pids))

    def thread(self, pid: object, tid: object) -> int:
        return self.threads.setdefault((self.of(pid), tid), len(self.threads) + 1)


def _from_wall(process: Process) -> "_FromWall":
    readings = [(sample.wall_ns, at) for at, sample in process.clocks if sample.wall_ns]
    readings = readings or [(wall, at) for at, wall in process.walls]
    if not readings:
        raise UsageError(f"the record of {process.title} has no sample of its wall clock, which its trace has times of")
    return _FromWall(readings)


class _FromWall:
    """Wall time to CLOCK_MONOTONIC, by samples of both. Where the wall clock went back, the later reading counts."""

    def __init__(self, readings: Sequence[tuple[int, int]]) -> None:
        rising: list[tuple[int, int]] = []
        for wall, at in readings:
            while rising and rising[-1][0] >= wall:
                rising.pop()
            rising.append((wall, at))
        self._clock = Clock([wall for wall, _ in rising], [at for _, at in rising], [None] * len(rising))

    def __call__(self, wall: int) -> int:
        return self._clock.map(wall)
