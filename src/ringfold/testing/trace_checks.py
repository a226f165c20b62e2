"""A strict check of traces in Chrome's JSON format, for tests: what viewers forgive or silently drop is a fault.

No viewer's own processor is needed for it. It checks what Perfetto's documentation asks of the format: slices of a
thread are apart or contain one another, flows and asynchronous events have both ends in the right order, each end of a
flow is in a slice, events are sorted, and all processes and threads have names.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Events = Sequence[Mapping[str, Any]]

PHASES = {"X", "i", "C", "M", "s", "t", "f", "b", "n", "e"}


def faults(trace: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace, as sentences; empty if nothing is."""
    events: Events = trace["traceEvents"]
    timed = [event for event in events if event["ph"] != "M"]
    return [
        *_fields(events),
        *(f"{event} is before the one before it" for event in _unsorted(timed)),
        *_unnamed(events),
        *_overlapping(timed),
        *_flows(timed),
        *_open(timed),
    ]


def _ns(microseconds: float) -> int:
    return round(microseconds * 1_000)


def _fields(events: Events) -> list[str]:
    found = []
    for event in events:
        if event["ph"] not in PHASES:
            found.append(f"{event} has an unknown phase")
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            found.append(f"{event} has no process or thread that is a number")
        if not isinstance(event.get("ts"), int | float) or event["ts"] < 0:
            found.append(f"{event} has no time, or one before the beginning")
        if event["ph"] == "X" and not event.get("dur", -1) >= 0:
            found.append(f"{event} has no duration")
        if event["ph"] == "C" and not all(isinstance(value, int | float) for value in event["args"].values()):
            found.append(f"{event} counts what is no number")
    return found


def _unsorted(timed: Events) -> list[Mapping[str, Any]]:
    return [after for before, after in pairwise(timed) if after["ts"] < before["ts"]]


def _unnamed(events: Events) -> list[str]:
    names = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    processes = {pid for name, pid, _ in names if name == "process_name"}
    threads = {(pid, tid) for name, pid, tid in names if name == "thread_name"}
    found = [f"process {pid} has no name" for pid in sorted({event["pid"] for event in events} - processes)]
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] not in ("M", "C")}
    return found + [f"thread {tid} of process {pid} has no name" for pid, tid in sorted(used - threads)]


def _overlapping(timed: Events) -> list[str]:
    found = []
    open_ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in timed:
        if event["ph"] != "X":
            continue
        start, end = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
        ends = open_ends[event["pid"], event["tid"]]
        while ends and ends[-1] <= start:
            ends.pop()
        if ends and end > ends[-1]:
            found.append(f"{event} ends {end - ends[-1]} ns after the slice that it begins in")
        ends.append(end)
    return found


def _flows(timed: Events) -> list[str]:
    found = []
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            begin = _ns(event["ts"])
            slices[event["pid"], event["tid"]].append((begin, begin + _ns(event["dur"])))
    ends: dict[object, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: {"s": [], "t": [], "f": []})
    for event in timed:
        if event["ph"] in ("s", "t", "f"):
            ends[event["cat"], event["name"], event["id"]][event["ph"]].append(event)
            at = _ns(event["ts"])
            if not any(begin <= at <= end for begin, end in slices[event["pid"], event["tid"]]):
                found.append(f"{event} is in no slice")
    for flow, of_phase in ends.items():
        if len(of_phase["s"]) != 1 or not of_phase["f"]:
            found.append(f"flow {flow} has {len(of_phase['s'])} beginnings and {len(of_phase['f'])} ends")
        elif any(end["ts"] < of_phase["s"][0]["ts"] for end in of_phase["f"]):
            found.append(f"flow {flow} ends before it begins")
    return found


def _open(timed: Events) -> list[str]:
    """Asynchronous events end as often as they begin, except for what was going on at the end of the record."""
    balance: dict[object, int] = defaultdict(int)
    found = []
    for event in timed:
        if event["ph"] in ("b", "e"):
            key = (event["cat"], event["id"])
            balance[key] += 1 if event["ph"] == "b" else -1
            if balance[key] < 0:
                found.append(f"{event} ends what has not begun")
    return found
