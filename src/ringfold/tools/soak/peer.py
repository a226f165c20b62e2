"""One peer of the soak: `python -m ringfold.tools.soak.peer ADDRESS NAME MASTERS SEED STATE_BYTES NUMBER LOG`.

It trains nothing, and changes its state by what it reduces, so that a wrong bit anywhere is a wrong bit in the state.
All sizes come from the seed and the step: they are random, and the same on all peers. What must hold is checked here,
where it would be seen first; whatever does not is sent to the parent as an error, which ends the soak:

* The sync before each step compares hashes. A peer that took part in the one before must not receive a byte.
* The first element of each op counts its contributors.

Lanes of all kinds are mixed: its number, and how often it has joined, decide about its transport and its threads. A
ring has as many channels as the member with the fewest threads, so those with one thread are few.

What can be judged only from all peers together it writes to a log, each line at once and in one write, so that a kill
loses nothing that happened before: see `epochs.py`.

SIGUSR1 writes the stacks of all threads to the process's output: the parent sends it to a process that hangs.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import zlib

import msgspec
import numpy as np
import numpy.typing as npt

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import Channel, ChannelClosed
from ringfold.tools.soak.epochs import EpochBegun, StepCommitted
from ringfold.wire.events import EpochRuns

TAGS = 8
STOP_TAG = TAGS
ROUNDS = 2
"""How often all tags are used in a step."""
LARGEST = 1 << 18
"""The most elements of an op."""
REPORT_NS = 100_000_000

Floats = npt.NDArray[np.float32]


class PromiseBroken(AssertionError):
    """Something that Ringfold promises did not hold."""


def main(arguments: list[str]) -> None:
    address, name, where, seed, state_bytes, number, log = arguments
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = Channel.connect(address, name)
    try:
        with open(log, "ab", buffering=0) as file:
            live(channel, name, where, int(number), Workload(int(seed), int(state_bytes)), StepLog(file.fileno()))
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


class StepLog(logging.Handler):
    """The peer's log: the epochs that its session logs, and the steps that it commits."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._ops: list[tuple[int, int]] = []
        self._last_ns: int | None = None
        self._longest_ns = 0
        logger = logging.getLogger("ringfold.peer")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        # A logger that has a handler of its own does not write to the process's output any more.
        warnings = logging.StreamHandler()
        warnings.setLevel(logging.WARNING)
        logger.addHandler(warnings)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args and isinstance(runs := record.args[0], EpochRuns):
            self._write(EpochBegun(runs.group, runs.epoch, runs.fence, tuple(runs.ring)))

    def begin(self) -> None:
        """A membership begins: what was committed of a step that did not end is not logged."""
        self._ops.clear()

    def committed(self, info: rf.ReduceInfo) -> None:
        now_ns = monotonic_ns()
        if self._last_ns is not None:
            self._longest_ns = max(self._longest_ns, now_ns - self._last_ns)
        self._last_ns = now_ns
        self._ops.append((info.epoch, len(info.contributors)))

    def made(self, step: int) -> None:
        """All that was committed since the last time is this step's."""
        self._write(StepCommitted(step, tuple(self._ops), self._longest_ns))
        self._ops.clear()
        self._longest_ns = 0

    def _write(self, entry: EpochBegun | StepCommitted) -> None:
        os.write(self._file, msgspec.json.encode(entry) + b"\n")


class Workload:
    """What a peer keeps, and what it reduces. All memory is allocated once, so that growth is not its own."""

    def __init__(self, seed: int, state_bytes: int) -> None:
        self.seed = seed
        self.model = np.zeros(max(LARGEST, state_bytes // 4 - LARGEST), np.float32)
        self.momentum = np.zeros(LARGEST, np.float32)
        self.seen = np.zeros(16, np.int64)
        self.buffers = [np.zeros(LARGEST, np.float32) for _ in range(TAGS)]
        self.noise = np.random.default_rng(os.getpid()).standard_normal(LARGEST, np.float32)
        self.state = rf.SharedState(model=self.model, momentum=self.momentum, seen=rf.MayDiffer(self.seen))

    def sizes(self, step: int, turn: int) -> list[int]:
        """The elements of each tag's op: from one to many, small ones as likely as large ones."""
        exponents = np.random.default_rng((self.seed, step, turn)).uniform(0, np.log2(LARGEST), TAGS)
        return [int(2**exponent) for exponent in exponents]

    def apply(self, step: int, results: list[Floats]) -> None:
        """Change the state by the results, so that each bit of them has a bearing on it."""
        place = step * LARGEST % (self.model.size - LARGEST + 1)
        for result in results:
            self.momentum[: result.size] *= np.float32(0.5)
            self.momentum[: result.size] += result
            self.model[place : place + result.size] += self.momentum[: result.size]
        self.seen[0] += 1

    def digest(self) -> int:
        return zlib.crc32(self.momentum.data, zlib.crc32(self.model.data))


def lane_settings(number: int) -> dict[str, str]:
    """The transport and the threads of a membership. Every third has TCP, every eighth one thread."""
    threads = 1 if number % 8 == 7 else 2 + number % 2
    return {"RINGFOLD_TRANSPORT": "tcp" if number % 3 == 2 else "auto", "RINGFOLD_THREADS": str(threads)}


def live(channel: Channel, name: str, where: str, number: int, load: Workload, book: StepLog) -> None:
    """Take steps until the parent sends a stop. After an eviction, join again, with the settings of the next number."""
    channel.send({"what": "ready"})
    while True:
        os.environ.update(lane_settings(number))
        number += 1
        try:
            with rf.join(where, name=name, timeout_s=60, op_timeout_s=60) as run:
                train(run, channel, load, book)
            break
        except rf.Evicted as error:
            channel.send({"what": "evicted", "reason": error.reason})
        # What is left of the last membership in cycles goes now, and not when the interpreter looks for them: what
        # remains is a leak.
        gc.collect()
    channel.send({"what": "finished", "step": load.state.revision, "digest": load.digest()})


def train(run: rf.Communicator, channel: Channel, load: Workload, book: StepLog) -> None:
    """One membership: steps until all agree to stop."""
    book.begin()
    stop = np.zeros(1, np.int64)
    last_ns, has_synced, received = 0, False, 0
    for step in run.steps(load.state, min_world=2, wait_s=60, check_every=1, rejoin=False):
        if not step.sync.checked:
            raise PromiseBroken(f"step {step.number} began without a sync")
        if has_synced and step.sync.rx_bytes:
            raise PromiseBroken(
                f"peer {run.peer_id} diverged: it took part in the last sync, and received {step.sync.rx_bytes} bytes "
                f"at step {step.number}"
            )
        received += step.sync.rx_bytes
        now_ns = monotonic_ns()
        if not has_synced or now_ns - last_ns > REPORT_NS:
            lanes = run._session.engine.lanes()
            channel.send({"what": "step", "step": step.number, "peer": run.peer_id, "world": run.group_size,
                       "epoch": run.epoch, "rx_bytes": received, "tx_bytes": step.sync.tx_bytes,
                       "lanes": len(lanes), "in_memory": sum(lane.in_memory for lane in lanes)})  # fmt: skip
            last_ns, received = now_ns, 0
        has_synced = True
        if (order := channel.receive(0)) is not None and order["what"] == "stop":
            stop[0] = 1
        for turn in range(ROUNDS):
            load.apply(step.number, reduce_on_all_tags(run, load, book, step.number, turn))
        book.committed(run.all_reduce(stop, op="max", tag=STOP_TAG))
        book.made(step.number)
        if stop[0]:
            load.state.push_revision()
            return


def reduce_on_all_tags(run: rf.Communicator, load: Workload, book: StepLog, step: int, turn: int) -> list[Floats]:
    """Begin an op on each tag, then wait for all of them, in another order."""
    results = [buffer[:size] for buffer, size in zip(load.buffers, load.sizes(step, turn), strict=True)]
    handles = []
    for tag, result in enumerate(results):
        np.add(load.noise[: result.size], np.float32(tag), out=result)
        result[0] = 1
        handles.append(run.all_reduce_async(result, tag=tag))
    for tag in reversed(range(TAGS)):
        info = handles[tag].wait()
        book.committed(info)
        if results[tag][0] != len(info.contributors):
            raise PromiseBroken(
                f"{len(info.contributors)} peers added a one at step {step}, and the sum is {results[tag][0]}"
            )
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
