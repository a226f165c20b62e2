"""One peer of a benchmark about runs: `workers_run.py WHAT LINE NAME MASTER NUMBER...`.

`WHAT` is recovery, failover, join, memory, quantize or topology. Each peer is a small training loop that reports
instants of the machine-wide monotonic clock on its line. This file is run by path, without its package, to keep a
peer's start short.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.spawn import Line, LineClosed, Message

STEP_S = 0.001


def main(arguments: list[str]) -> None:
    what, address, name, where, *numbers = arguments
    line = Line.dial(address, name)
    loops: dict[str, Callable[..., None]] = {"recovery": recovery, "join": join, "memory": memory}
    loops["failover"] = failover
    loops |= {"quantize": quantize, "topology": topology}
    try:
        loops[what](line, where, *map(int, numbers))
    except LineClosed:
        os._exit(0)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def recovery(line: Line, where: str, size: int, founders: int) -> None:
    """Reduce for ever, let newcomers in, and report the instant of every commit whose number of peers is a new one."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    buffer = np.empty(size // 4, np.float32)
    contributors = 0
    while True:
        buffer.fill(1)
        info = run.all_reduce(buffer, op="sum")
        at = monotonic_ns()
        world = len(info.contributors)
        if not (buffer[0] == buffer[buffer.size // 2] == buffer[-1] == world):
            raise AssertionError(f"{world} contributed ones, but the sum is {buffer[0]} to {buffer[-1]}")
        if world != contributors:
            contributors = world
            line.send({"contributors": contributors, "at_ns": at})
        if run.are_peers_pending():
            run.update_topology()


def failover(line: Line, where: str, size: int, founders: int) -> None:
    """Reduce for ever; report the first commit of every epoch, and on demand the longest time between two commits."""
    run = rf.join(where.split(","))
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    buffer = np.empty(size // 4, np.float32)
    epoch, longest, before = 0, 0, monotonic_ns()
    while True:
        buffer.fill(1)
        info = run.all_reduce(buffer, op="sum")
        at = monotonic_ns()
        world = len(info.contributors)
        if not (buffer[0] == buffer[-1] == world):
            raise AssertionError(f"{world} contributed ones, but the sum is {buffer[0]} to {buffer[-1]}")
        longest, before = max(longest, at - before), at
        if info.epoch != epoch:
            epoch = info.epoch
            line.send({"epoch": epoch, "contributors": world, "at_ns": at})
        order = line.receive(0.0)
        if order is not None and "begin" in order:
            longest, before = 0, monotonic_ns()
        elif order is not None:
            line.send({"longest_ns": longest})


def join(line: Line, where: str, founders: int) -> None:
    """Join when told to, then take steps of about a millisecond; vote in the step in which all hear of a new round.

    The number of the round travels through an all-reduce, so that all members vote after the same op.
    """
    line.send({"armed": True})
    heard = voted_for = _order(line)["round"]
    run = rf.join(where)
    joined = monotonic_ns()
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    line.send({"joined_ns": joined, "group_size": run.group_size})
    ballot = np.zeros(1, np.int64)
    while True:
        if (order := line.receive(STEP_S)) is not None:
            heard = order["round"]
        ballot[0] = heard
        run.all_reduce(ballot, op="max")
        if ballot[0] > voted_for:
            voted_for = int(ballot[0])
            voted = monotonic_ns()
            run.update_topology()
            line.send({"voted_ns": voted, "returned_ns": monotonic_ns(), "group_size": run.group_size})


def memory(line: Line, where: str, size: int, founders: int) -> None:
    """Report how much an in-place all-reduce raises this process's peak of resident memory, first and second time."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    # Warmed up with a small buffer: an engine may keep an op's memory, which would then not count below.
    run.all_reduce(np.ones(1 << 14, np.float32), op="sum")
    buffer = np.ones(size // 4, np.float32)
    extra = [_extra_peak(run, buffer) for _ in range(2)]
    verified = bool((buffer == founders**2).all())
    line.send({"extra_bytes": extra, "verified": verified})
    _order(line)


def quantize(line: Line, where: str, size: int, founders: int) -> None:
    """Reduce a buffer as often as told to, quantised as told to; report the time, the bytes and the result of each."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    inputs = [np.random.default_rng(rank).uniform(-1, 1, size // 4).astype(np.float32) for rank in range(founders)]
    total = sum(inputs[1:], start=inputs[0])
    mine = inputs[run.rank].copy()
    del inputs
    buffer = np.empty_like(mine)
    line.send({"group_size": run.group_size})
    while True:
        scheme = _order(line)["scheme"]
        buffer[:] = mine
        run.barrier()
        before = monotonic_ns()
        info = run.all_reduce(buffer, op="sum", quantize=scheme)
        took = monotonic_ns() - before
        # A partial sum of k numbers has a step of 2k / top at most, and is off by half of it; the total comes last.
        top = {None: 1e7, "8": 255.0, "4": 15.0}[scheme and scheme[-1]]
        most = (sum(range(1, founders)) + founders) / top + 1e-5
        near = bool(np.abs(buffer - total).max() <= most)
        digest = hashlib.blake2b(buffer.data, digest_size=16).hexdigest()
        line.send({"took_ns": took, "sent_bytes": info.tx_bytes, "near": near, "digest": digest})


def topology(line: Line, where: str, founders: int) -> None:
    """Call `optimize_topology` when told to, and once more when everything is known; report how long each took."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    line.send({"group_size": run.group_size})
    _order(line)
    took = []
    for _ in range(2):
        run.barrier()
        before = monotonic_ns()
        run.optimize_topology()
        took.append(monotonic_ns() - before)
    run.barrier()
    line.send({"took_ns": took[0], "again_ns": took[1]})
    _order(line)


def _extra_peak(run: "rf.Communicator", buffer: npt.NDArray[np.float32]) -> int:
    # Writing 5 resets the peak to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmHWM")
    run.all_reduce(buffer, op="sum")
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{key}:"):
            return int(text.split()[1]) * 1024
    raise LookupError(key)


def _order(line: Line) -> Message:
    order = line.receive()
    assert order is not None
    return order


if __name__ == "__main__":
    main(sys.argv[1:])
