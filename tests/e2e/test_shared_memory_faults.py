"""A peer of a host is killed or stopped at a random instant of an op in shared memory, again and again.

Each time the others' next op must commit with the right bits, and nothing of the lost peer's pipes may be left in them.
`make test` does it a few times; `make faults FAULTS=200` as often as is wanted, with a fresh seed.
"""

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext, descriptors_of, until
from training_program import step_with, work_and_rejoin

Floats = npt.NDArray[np.float32]

KINDS = {"small": (25, 200), "middle": (1 << 18, 4), "large": (1 << 22, 1)}
"""The floats of an op (100 bytes, 1 MiB, 16 MiB), and how many such ops are a step."""
FAULTS = ("kill", "kill", "stop, then kill", "stop, then continue")
GONE_WITHIN_S = 1.0
"""After the first op without it, nothing of a lost peer is left within this time."""


# The peers


def contribution(peer: int, step: int, count: int) -> Floats:
    """Whole numbers, other ones for each peer, step and place: a sum is exact in any order of the ring."""
    return np.arange(count, dtype=np.float32) % 997 + np.float32((peer * 31 + step * 7) % 1_000)


def total(peers: Sequence[int], step: int, count: int) -> Floats:
    base = np.arange(count, dtype=np.float32) % 997 * np.float32(len(peers))
    return base + np.float32(sum((peer * 31 + step * 7) % 1_000 for peer in peers))


def reduce_until_stopped(me: ProgramContext) -> None:
    """Reduce, kind after kind; check every element. After an eviction, join again."""
    os.environ["RINGFOLD_THREADS"] = str(me.options["threads"])
    work_and_rejoin(me, _loop)


def _loop(me: ProgramContext, run: Any) -> None:  # noqa: ANN401 - a communicator; Ringfold is imported by programs only
    took_s: dict[str, float] = {}
    step, stop, strike = 0, False, None
    while not stop:
        while run.are_peers_pending():
            run.update_topology()
        message = me.receive() if me.has_message() else {"what": ""}
        if message["what"] == "strike":
            strike = message
        agreed = np.array([step, message["what"] == "stop"], np.int64)
        run.all_reduce(agreed, op="max", tag=1)
        step, stop = int(agreed[0]), bool(agreed[1])
        kind = list(KINDS)[step % len(KINDS)]
        count, ops = KINDS[kind]
        values = [contribution(run.peer_id, step, count) for _ in range(ops)]
        if strike is not None and strike["kind"] == kind and kind in took_s:
            _strike_within(me, step, strike, took_s[kind])
            strike = None
        began = time.monotonic()
        contributors = [run.all_reduce(each).contributors for each in values]
        took_s[kind] = time.monotonic() - began
        right = all((each == total(peers, step, count)).all() for each, peers in zip(values, contributors, strict=True))
        me.report("step", number=step, right=right, contributors=len(contributors[-1]), took_s=took_s[kind])
        step += 1
    me.report("end")


def _strike_within(me: ProgramContext, step: int, strike: dict[str, Any], took_s: float) -> None:
    """Let a thread send this process its signal at some part of the step that begins now."""

    def wait_and_strike() -> None:
        time.sleep(strike["part"] * took_s)
        os.kill(os.getpid(), strike["signal"])

    me.report("striking", step=step)
    threading.Thread(target=wait_and_strike, daemon=True).start()


# What is left of them


def mappings_of(pid: int, name: str, writable: bool = False) -> set[int]:
    """The inodes of the memory under this name that a process has mapped."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = [fields for fields in lines if len(fields) > 5 and fields[5] == f"/memfd:{name}"]
    return {int(fields[4]) for fields in shared if "w" in fields[1] or not writable}


def pipes_of(pid: int) -> set[int]:
    return mappings_of(pid, "ringfold-lane")


def memory_of(pid: int) -> set[int]:
    """The pipes of a process, and the page that shows its death: only its own one is writable."""
    return pipes_of(pid) | mappings_of(pid, "ringfold-life", writable=True)


def left_of(pid: int, theirs: set[int]) -> set[int]:
    return (pipes_of(pid) | mappings_of(pid, "ringfold-life")) & theirs


def check_nothing_left(stays: Sequence[ClusterProcess], theirs: set[int], most: Sequence[int], threads: int) -> None:
    def is_clean() -> bool:
        return all(
            not left_of(peer.pid, theirs)
            and len(pipes_of(peer.pid)) == 2 * threads
            and len(links := descriptors_of(peer.pid)) <= limit
            and not any("ringfold-lane" in link for link in links)
            for peer, limit in zip(stays, most, strict=True)
        )

    try:
        until(is_clean, "nothing of the lost peer is left", GONE_WITHIN_S)
    except AssertionError as error:
        left = [
            f"{peer.name}: {len(left_of(peer.pid, theirs))} of its mappings, {len(pipes_of(peer.pid))} pipes, "
            f"{len(descriptors_of(peer.pid))} descriptors of at most {limit}"
            for peer, limit in zip(stays, most, strict=True)
        ]
        raise AssertionError(f"{error}; {'; '.join(left)}") from None


# The test


class Disturber:
    """Three peers: two that stay, and a victim."""

    def __init__(self, cluster: ProgramCluster, threads: int, rng: random.Random) -> None:
        self.cluster, self.threads, self.rng = cluster, threads, rng
        self.counts: Counter[str] = Counter()
        cluster.start_master(suspect_after_ms=400, evict_after_ms=1_000)
        *self.stays, self.victim = cluster.start_program(reduce_until_stopped, 3, world=3, threads=threads)
        self.all_step(0.0)

    def all_step(self, after: float) -> None:
        for peer in [*self.stays, self.victim]:
            step_with(peer, 3, after=after, timeout_s=60)

    def disturb(self, kind: str) -> None:
        """One fault in a step of this kind, and everything after it until all reduce together again."""
        fault = self.rng.choice(FAULTS)
        theirs = memory_of(self.victim.pid)
        assert len(theirs) == 2 * self.threads + 1, (
            f"its pipes: {pipes_of(self.victim.pid)}, and the page that shows its death: {theirs}"
        )
        most = [len(descriptors_of(peer.pid)) for peer in self.stays]
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        self.victim.send("strike", kind=kind, part=self.rng.uniform(0.0, 1.05), signal=int(number))
        struck = self.victim.expect("striking")
        if fault == "kill":
            self.victim.wait()
        else:
            self.victim.wait_frozen()
        seen = [step_with(peer, 2, after=struck["at"]) for peer in self.stays]
        check_nothing_left(self.stays, theirs, most, self.threads)
        self.counts[f"{kind}: {fault}"] += 1
        self.counts["hit the op in flight"] += any(fact["number"] == struck["step"] for fact in seen)
        if fault == "stop, then continue":
            back = self.victim.thaw()
        else:
            if fault == "stop, then kill":
                self.victim.kill()
            back = time.monotonic()
            self.victim = self.cluster.start_one(reduce_until_stopped, world=1, threads=self.threads)
        self.all_step(back)
        for peer in [*self.stays, self.victim]:
            assert all(fact["right"] for fact in peer.reports("step")), f"wrong bits: {peer.reports('step')[-3:]}"

    def end(self) -> None:
        self.stays[0].send("stop")
        for peer in [*self.stays, self.victim]:
            peer.wait_success()
        assert not any(peer.reports("evicted") for peer in self.stays)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_peer_that_is_killed_or_stopped_at_any_instant_of_an_op_leaves_nothing(
    cluster: ProgramCluster, threads: int, request: pytest.FixtureRequest
) -> None:
    faults, seed = request.config.getoption("faults"), request.config.getoption("faults_seed")
    rng = random.Random(f"{seed}, {threads}")
    disturber = Disturber(cluster, threads, rng)
    for number in range(faults // 2):
        try:
            disturber.disturb(list(KINDS)[number % len(KINDS)])
        except Exception as error:
            error.add_note(f"fault {number} of seed {seed}, {threads} threads; before it: {dict(disturber.counts)}")
            raise
    disturber.end()
    sys.stdout.write(f"seed {seed}, {threads} threads: {dict(sorted(disturber.counts.items()))}\n")
