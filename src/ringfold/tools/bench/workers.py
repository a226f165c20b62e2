"""The processes that benchmarks start: `workers.py ADDRESS NAME WHAT ARGUMENT...`. `WHAT` is one of `WORKERS`.

A worker connects to the cluster at `ADDRESS`, does what it is sent, and reports instants of the machine-wide monotonic
clock. This file is run by path, without its package, so that a process starts quickly. The workers of six benchmarks
have files of their own (`*_worker.py`).
"""

import gc
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ringfold as rf
from ringfold import _native
from ringfold.peer.engine import FIXED, Engine
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns, process_cpu_ns
from ringfold.runtime.hardware import usable_cores
from ringfold.state.hashing import block_hashes
from ringfold.store import open_store
from ringfold.tools import streams
from ringfold.tools.cluster import Channel, ChannelClosed, Message, die_with_parent

Bytes = npt.NDArray[np.uint8]
STEP_S = 0.001
WAN_OP_S = 120.0
ITERATION_S = 240.0
HINT_WRITER_S = 0.02
"""How long a writer of hints lives."""
HINT_STALE_NS = 60_000_000_000
STREAM_PORT = 5_201
STREAM_CONGESTION = {"tcp": "cubic", "mptcp": "cubic", "host": ""}
"""The congestion control of plain streams by their kind; any other kind is the name of one."""
SHARE_UNIT = 65_535


def main(arguments: list[str]) -> None:
    address, name, what, *rest = arguments
    if what in FORKING_WORKERS:
        rest = [address, name, *rest]
    work(Channel.connect(address, name), {**WORKERS, **FORKING_WORKERS}[what], *rest)


def work(channel: Channel, worker: Callable[..., None], *arguments: object) -> None:
    """Run a worker until its channel is closed, and report its error."""
    try:
        worker(channel, *arguments)
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def next_order(channel: Channel) -> Message:
    order = channel.receive()
    assert order is not None
    return order


# Peers of a run


def recovery(channel: Channel, where: str, size: int, founders: int, resident: int) -> None:
    """Reduce forever, admit newcomers, and report the instant of every commit whose number of peers is a new one.

    `resident` bytes more are in memory meanwhile, as a model is.
    """
    model = np.ones(resident // 8)
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
        assert model.size == resident // 8
        if world != contributors:
            contributors = world
            channel.send({"contributors": contributors, "at_ns": at})
        if run.are_peers_pending():
            run.update_topology()


def failover(channel: Channel, where: str, size: int, founders: int) -> None:
    """Reduce forever; report the first commit of every epoch, and on demand the longest time between two commits."""
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
            channel.send({"epoch": epoch, "contributors": world, "at_ns": at})
        order = channel.receive(0.0)
        if order is not None and "begin" in order:
            longest, before = 0, monotonic_ns()
        elif order is not None:
            channel.send({"longest_ns": longest})


def join(channel: Channel, where: str, founders: int) -> None:
    """Join on request, then take steps of about a millisecond; vote in the step in which all learn of a new round.

    The number of the round travels through an all-reduce, so that all members vote after the same op.
    """
    channel.send({"armed": True})
    newest = voted_for = next_order(channel)["round"]
    run = rf.join(where)
    joined = monotonic_ns()
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    channel.send({"joined_ns": joined, "group_size": run.group_size})
    ballot = np.zeros(1, np.int64)
    while True:
        if (order := channel.receive(STEP_S)) is not None:
            newest = order["round"]
        ballot[0] = newest
        run.all_reduce(ballot, op="max")
        if ballot[0] > voted_for:
            voted_for = int(ballot[0])
            voted = monotonic_ns()
            run.update_topology()
            channel.send({"voted_ns": voted, "returned_ns": monotonic_ns(), "group_size": run.group_size})


def events(channel: Channel, where: str, directory: str, size: int, founders: int) -> None:
    """Ops of `size` bytes, and then steps with `step.log`, in three runs that record their events in different ways.

    The runs take turns, so that all meet the same noise; every rank takes the same turns.
    """
    runs = {mode: _join_recording(where, mode, directory, founders) for mode in EVENT_MODES}
    states = {mode: rf.SharedState(values=np.zeros(4)) for mode in EVENT_MODES}
    buffer = np.zeros(size // 4, np.float32)
    channel.send({"group_size": founders})
    while (order := next_order(channel))["do"] != "end":
        mode, count = order["mode"], order["count"]
        durations = []
        if order["do"] == "ops":
            for _ in range(count):
                before = monotonic_ns()
                runs[mode].all_reduce(buffer, op="sum")
                durations.append(monotonic_ns() - before)
        else:
            until = states[mode].revision + count
            before = 0
            for step in runs[mode].steps(states[mode], until=until, min_world=founders, check_every=1_000):
                before = before or monotonic_ns()
                step.log(loss=1.0 / (step.number + 1), tokens=step.number)
            durations.append(monotonic_ns() - before)
        channel.send({"durations_ns": durations})
    for run in runs.values():
        run.leave()


EVENT_MODES = ("off", "memory", "files")


def _join_recording(where: str, mode: str, directory: str, founders: int) -> "rf.Communicator":
    """With `off` nothing is recorded in Python: no user can have that, it is what the others are compared with."""
    if mode == "files":
        os.environ["RINGFOLD_EVENTS_DIR"] = directory
    run = rf.join(where, run=mode)
    os.environ.pop("RINGFOLD_EVENTS_DIR", None)
    if mode == "off" and run._recording is not None:
        run._recording.close()
        run._recording = run._session.recording = None
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    return run


def memory(channel: Channel, where: str, size: int, founders: int) -> None:
    """Report how much an in-place all-reduce raises this process's peak of resident memory, first and second time."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    # Warmed up with a small buffer: an engine may keep an op's memory, which would then not count below.
    run.all_reduce(np.ones(1 << 14, np.float32), op="sum")
    buffer = np.ones(size // 4, np.float32)
    extra = [_extra_peak(run, buffer) for _ in range(2)]
    verified = bool((buffer == founders**2).all())
    channel.send({"extra_bytes": extra, "verified": verified})
    next_order(channel)


def quantize(channel: Channel, where: str, size: int, founders: int) -> None:
    """Reduce a buffer once per request, with its quantisation; report the time, the bytes and the result of each."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    inputs = [np.random.default_rng(rank).uniform(-1, 1, size // 4).astype(np.float32) for rank in range(founders)]
    total = sum(inputs[1:], start=inputs[0])
    mine = inputs[run.rank].copy()
    del inputs
    buffer = np.empty_like(mine)
    channel.send({"group_size": run.group_size})
    while True:
        scheme = next_order(channel)["scheme"]
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
        channel.send({"took_ns": took, "sent_bytes": info.tx_bytes, "near": near, "digest": digest})


def topology(channel: Channel, where: str, founders: int) -> None:
    """Call `optimize_topology` on request, and once more when everything is known; report how long each took."""
    run = rf.join(where)
    while run.group_size < founders:
        run.update_topology(min_world=founders)
    channel.send({"group_size": run.group_size})
    next_order(channel)
    took = []
    for _ in range(2):
        run.barrier()
        before = monotonic_ns()
        run.optimize_topology()
        took.append(monotonic_ns() - before)
    run.barrier()
    channel.send({"took_ns": took[0], "again_ns": took[1]})
    next_order(channel)


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


# Shared state


def state(channel: Channel, where: str, size: int, holders: int) -> None:
    """Join, then sync once per request. The state is random: zeros would be too easy."""
    content = np.random.default_rng(1).bytes(size)
    memory = np.frombuffer(bytearray(content), np.uint8)
    shared = rf.SharedState(state=memory)
    run = rf.join(where)
    while run.group_size < holders + 1:
        run.update_topology(min_world=holders + 1)
    run.sync_shared_state(shared)
    channel.send({"peer": run.peer_id})
    while True:
        order = channel.receive()
        assert order is not None
        if order["what"] == "hash":
            channel.send(hash_rate(run, memory))
            continue
        spoil(memory, order["spoil"])
        reply = timed_sync(run, shared)
        reply["is_whole"] = memory.tobytes() == content
        channel.send(reply)


def timed_sync(run: rf.Communicator, shared: rf.SharedState) -> Message:
    """One sync that all begin together."""
    run.barrier()
    began = monotonic_ns()
    info = run.sync_shared_state(shared)
    took = monotonic_ns() - began
    return {"took_ns": took, "rx_bytes": info.rx_bytes, "tx_bytes": info.tx_bytes}


def hash_rate(run: rf.Communicator, memory: Bytes) -> Message:
    """Hash what a sync hashes, and as it does: all peers of the machine at once, each on all cores."""
    run.barrier()
    began = monotonic_ns()
    block_hashes(memory, "rf64")
    together = monotonic_ns() - began
    run.barrier()
    alone = 0
    if run.rank == 0:
        began = monotonic_ns()
        block_hashes(memory, "rf64", threads=1)
        alone = monotonic_ns() - began
    run.barrier()
    return {"together_ns": together, "alone_ns": alone, "cores": usable_cores()}


def spoil(memory: Bytes, how: str) -> None:
    """Make this peer lack everything, one block or nothing."""
    match how:
        case "everything":
            np.bitwise_xor(memory, np.uint8(0x5A), out=memory)
        case "one block":
            memory[memory.size // 2] ^= 0xFF


# High-latency paths


def wan_peer(channel: Channel, master: str, mine: str) -> None:
    run = rf.join(master, advertise=[mine])
    while run.group_size < 2:
        run.update_topology(min_world=2)
    channel.send({"lanes": sum(lane.outgoing for lane in run._session.engine.lanes())})
    while (order := channel.receive()) is not None:
        channel.send((large_op if order["do"] == "large" else small_ops)(run, order))


def large_op(run: rf.Communicator, order: Message) -> Message:
    """One op that both sides begin together, as nearly as a barrier allows."""
    expected = np.arange(order["size_bytes"] // 4, dtype=np.float32) % 251
    buffer = expected.copy()
    expected *= 2
    before = run._session.engine.stats()
    run.barrier()
    began = monotonic_ns()
    info = run.all_reduce(buffer, op="sum", timeout_s=WAN_OP_S)
    took = monotonic_ns() - began
    after = run._session.engine.stats()
    right = len(info.contributors) == 2 and bool((buffer == expected).all())
    counts = {key: after[key] - before[key] for key in ("reissued", "lanes_lost", "aborted")}
    return {"took_ns": [took], "right": right, **counts}


def small_ops(run: rf.Communicator, order: Message) -> Message:
    """Ops back to back: each begins here when the one before is known to be done everywhere."""
    buffer = np.zeros(order["size_bytes"] // 4, np.float32)
    took, right = [], True
    for number in range(order["count"]):
        buffer[:] = number
        began = monotonic_ns()
        run.all_reduce(buffer, op="sum", timeout_s=WAN_OP_S)
        took.append(monotonic_ns() - began)
        right = right and bool((buffer == 2 * number).all())
    return {"took_ns": took, "right": right, "aborted": 0}


# Several paths


def multipath_peer(channel: Channel, master: str, addresses: str) -> None:
    run = rf.join(master, advertise=addresses.split(","))
    while run.group_size < 2:
        run.update_topology(min_world=2)
    engine = run._session.engine
    neighbour = next(lane.peer for lane in engine.lanes() if lane.outgoing)
    channel.send({"ready": True})
    buffer = np.zeros(1, np.float32)
    while (order := channel.receive()) is not None:
        if order["do"] == "shares":  # none: pull again
            shares = [int(share * SHARE_UNIT) for share in order["shares"]]
            engine.set_path_shares(neighbour, shares, FIXED if order.get("fixed", True) else 0)
            channel.send({"done": True})
            continue
        if buffer.nbytes != order["size_bytes"]:
            buffer = np.zeros(order["size_bytes"] // 4, np.float32)
        buffer[:] = np.arange(buffer.size, dtype=np.float32) % 251
        before, was = engine.stats(), engine.path_bytes(True)
        run.barrier()
        channel.send({"began_ns": monotonic_ns()})
        began = monotonic_ns()
        with given_times(engine, on=order["do"] == "watch") as given:
            info = run.all_reduce(buffer, op="sum", timeout_s=60 + buffer.nbytes / 1e6)
        took = monotonic_ns() - began
        right = bool((buffer == (np.arange(buffer.size, dtype=np.float32) % 251) * 2).all())
        after, now = engine.stats(), engine.path_bytes(True)
        channel.send(
            {
                "took_ns": took,
                "right": right and len(info.contributors) == 2,
                "epoch": info.epoch,
                "path_bytes": [new - old for new, old in zip(now, was, strict=True)],
                "lanes": len(engine.lanes()),
                "given_ns": given,
                **{key: after[key] - before[key] for key in ("reissued", "lanes_lost", "aborted")},
            }
        )


@contextmanager
def given_times(engine: Engine, *, on: bool) -> Iterator[list[int]]:
    """When path 1 was given payload to send, looked at a few thousand times a second."""
    given: list[int] = []
    if not on:
        yield given
        return
    over = threads.Event()

    def look() -> None:
        last = engine.path_bytes(True)[1]
        while not over.wait(0.0002):
            if (now := engine.path_bytes(True)[1]) != last:
                last = now
                given.append(monotonic_ns())

    thread = threads.start("watching", look)
    try:
        yield given
    finally:
        over.set()
        thread.join()


def plain_streams(channel: Channel, number: str, mine: str, theirs: str, kind: str) -> None:
    is_mptcp, congestion = kind == "mptcp", STREAM_CONGESTION.get(kind, kind)
    if number == "0":
        with streams.listening(mine.split(","), STREAM_PORT, mptcp=is_mptcp) as listeners:
            channel.send({"ready": True})
            made = streams.accepted(listeners, congestion=congestion)
    else:
        channel.send({"ready": True})
        next_order(channel)
        made = streams.connected(mine.split(","), theirs.split(","), STREAM_PORT, mptcp=is_mptcp, congestion=congestion)
    while (order := channel.receive()) is not None:
        if order["do"] == "saturate":
            channel.send({"rates": streams.saturate(made, order["settle_s"], order["seconds"])})
        else:
            channel.send({"took_ns": streams.exchange(made[0], order["size_bytes"])})


# Ranks that agree through a store


def iteration_ranks(channel: Channel, address: str, name: str, store: str, world: int) -> None:
    """Fork the ranks, each with a channel of its own. They share the memory of what is imported here."""
    if store.startswith("tcp:"):
        import_module("torch.distributed")
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    for rank in range(world):
        if os.fork() == 0:
            try:
                die_with_parent(parent)
                work(Channel.connect(address, f"{name}.{rank}"), iteration_rank, store, rank, world)
            finally:
                os._exit(1)
    next_order(channel)


def iteration_rank(channel: Channel, store: str, rank: int, world: int) -> None:
    """Begin with all others, then do what is requested."""
    with (
        open_store(store, timeout_s=ITERATION_S) as client,
        rf.GlobalIteration(client, rank, world, min_ranks=world, timeout_s=ITERATION_S) as iteration,
    ):
        channel.send({"first": iteration.next()})
        while True:
            order = channel.receive()
            assert order is not None
            if order["what"] == "agree":
                before = client.operations
                reply = agree(iteration, order["count"])
                channel.send({**reply, "operations": client.operations - before})
            else:
                channel.send(wait_for_rank_0(iteration, order["s"]))


def agree(iteration: rf.GlobalIteration, count: int) -> Message:
    """So many iterations with nothing to do in them: when each was called for, and when it returned."""
    called, returned, numbers = [], [], []
    for _ in range(count):
        called.append(monotonic_ns())
        numbers.append(iteration.next())
        returned.append(monotonic_ns())
    return {"called": called, "returned": returned, "numbers": numbers}


def wait_for_rank_0(iteration: rf.GlobalIteration, seconds: float) -> Message:
    """One iteration that rank 0 does not finish for a while: the share of one core that waiting takes."""
    if iteration.rank == 0:
        threads.Event().wait(seconds)
        iteration.next()
        return {}
    began, began_cpu = monotonic_ns(), process_cpu_ns()
    iteration.next()
    return {"cpu_share": (process_cpu_ns() - began_cpu) / (monotonic_ns() - began)}


# Hints


def hint_writers(channel: Channel, path: str, slots: int, generation: int) -> None:
    """Fork writers of hints one after the other, and kill each after some milliseconds; report how many.

    Each takes the file over and publishes without pause.
    """
    kills = 0
    while True:
        child = _fork_writer(path, slots, generation)
        if not kills:
            channel.send({"ready": True})
        order = channel.receive(HINT_WRITER_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        if order is not None:
            channel.send({"kills": kills})
            return


def _fork_writer(path: str, slots: int, generation: int) -> int:
    from ringfold import _native_testing  # only development builds have it

    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        writer = _native.HintWriter(path, HINT_STALE_NS, 0o600)
        for slot in range(slots):
            writer.open(slot, generation)
        _native_testing.hammer_hint_writes(writer, slots, 0)
    finally:
        os._exit(1)


# Background load


def busy_core(channel: Channel, core: int) -> None:
    """Keep one core busy until the cluster ends."""
    os.sched_setaffinity(0, {core})
    while True:
        pass


WORKERS: dict[str, Callable[..., None]] = {
    "recovery": lambda channel, where, size, founders, resident: recovery(
        channel, where, int(size), int(founders), int(resident)
    ),
    "failover": lambda channel, where, size, founders: failover(channel, where, int(size), int(founders)),
    "join": lambda channel, where, founders: join(channel, where, int(founders)),
    "memory": lambda channel, where, size, founders: memory(channel, where, int(size), int(founders)),
    "events": lambda channel, where, directory, size, founders: events(
        channel, where, directory, int(size), int(founders)
    ),
    "quantize": lambda channel, where, size, founders: quantize(channel, where, int(size), int(founders)),
    "topology": lambda channel, where, founders: topology(channel, where, int(founders)),
    "state": lambda channel, where, size, holders: state(channel, where, int(size), int(holders)),
    "wan": wan_peer,
    "multipath": multipath_peer,
    "streams": plain_streams,
    "hints": lambda channel, path, slots, generation: hint_writers(channel, path, int(slots), int(generation)),
    "busy": lambda channel, core: busy_core(channel, int(core)),
    "bursts": lambda channel, to, port, size, us: streams.send_bursts(to, int(port), int(size), int(us)),
}


FORKING_WORKERS: dict[str, Callable[..., None]] = {
    "iteration": lambda channel, address, name, store, world: iteration_ranks(
        channel, address, name, store, int(world)
    ),
}
"""Workers that fork others, which need the address of the cluster."""


if __name__ == "__main__":
    main(sys.argv[1:])
