"""A program that many tests share: a loop of all-reduces that peers may join, leave, die in or be frozen in."""

import os
import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from programs import ClusterProcess, Message, ProgramCluster, ProgramContext

Floats = "np.ndarray[tuple[int], np.dtype[np.float32]]"


def gradients(peer: int, step: int, count: int) -> Floats:
    """What a peer contributes: random, so that each order of summation has other bits; seeded, so that all know it."""
    return np.random.default_rng((peer, step)).standard_normal(count, np.float32)


def train(me: ProgramContext) -> None:
    """Reduce until a stop; after an eviction, join again. Options, all optional:

    `world`: how many peers to wait for. `floats`: how many an op has. `group`: as in `join`. `strike`: a signal that
    this process sends itself in the middle of its first op as soon as the test sends "strike". `quantize`: as in an op.
    `clock`: each step reports what the global clock shows, 0 before it is there.
    """
    work_and_rejoin(me, _loop)


def work_and_rejoin(me: ProgramContext, loop: Callable[[ProgramContext, Any], None]) -> None:
    """Join, wait for `world` members, and run the loop; after an eviction, again, and without waiting."""
    from ringfold import Evicted

    world = me.options.get("world", 1)
    while True:
        with me.join() as run:
            while run.group_size < world:
                run.update_topology(min_world=world)
            me.report("joined", peer=run.peer_id, members=run.members, epoch=run.epoch)
            try:
                loop(me, run)
                return
            except Evicted as error:
                me.report("evicted", message=str(error))
                world = 1


def _loop(me: ProgramContext, run: Any) -> None:  # noqa: ANN401 - a communicator; Ringfold is imported by programs only
    """Reports each step: its number, the digest and sum of the result, and how many contributed.

    All members agree on step and stop by an op of their own, so that a newcomer learns the step and all end together.
    """
    count = me.options.get("floats", 100_000)
    step, stop = 0, False
    while not stop:
        while run.are_peers_pending():
            run.update_topology()
        word = me.receive()["what"] if me.has_message() else ""
        agreed = np.array([step, word == "stop"], np.int64)
        run.all_reduce(agreed, op="max", tag=1)
        step, stop = int(agreed[0]), bool(agreed[1])
        result = gradients(run.peer_id, step, count)
        if word == "strike":
            _strike_inside(me, result)
        try:
            info = run.all_reduce(result, quantize=me.options.get("quantize"))
        except Exception:
            me.report("intact", intact=bool((result == gradients(run.peer_id, step, count)).all()))
            raise
        digest, total = zlib.crc32(result.tobytes()), result.sum(dtype=np.float64)
        now = {"clock_ns": run.clock.now().ns if run.clock.is_ready else 0} if me.options.get("clock") else {}
        now |= {"contributors": len(info.contributors), "epoch": info.epoch}
        me.report("step", number=step, digest=digest, total=total, **now)
        step += 1
    me.report("end", step=step)


def _strike_inside(me: ProgramContext, buffer: Floats) -> None:
    """Let a thread send this process its signal once the op has begun to write into its buffer."""
    before = buffer.copy()

    def watch() -> None:
        while (buffer[::1024] == before[::1024]).all():
            pass
        os.kill(os.getpid(), signal.Signals[me.options["strike"]])

    me.report("striking")
    threading.Thread(target=watch, daemon=True).start()


def start_training(cluster: ProgramCluster, world: int, **options: Any) -> list[ClusterProcess]:  # noqa: ANN401 - as `start_program`
    """So many peers in one group, with a few steps behind them."""
    peers = cluster.start_program(train, world, world=world, **options)
    for peer in peers:
        peer.expect("step", lambda fact: fact["number"] >= 3)
    return peers


def end_training(peers: Sequence[ClusterProcess]) -> None:
    """Stop one; all end with it, and all agreed on every step."""
    peers[0].send("stop")
    for peer in peers:
        peer.wait_success()
    check_same_bits(peers)


def check_same_bits(peers: Sequence[ClusterProcess]) -> None:
    """Every step that several peers committed has the same digest and contributors with all of them."""
    steps: dict[int, list[Message]] = {}
    for peer in peers:
        for fact in peer.reports("step"):
            steps.setdefault(fact["number"], []).append(fact)
    assert steps
    for number, facts in steps.items():
        outcomes = {(fact["digest"], fact["contributors"], fact["epoch"]) for fact in facts}
        assert len(outcomes) == 1, f"step {number}: {facts}"


def step_with(peer: ClusterProcess, contributors: int, after: float = 0.0, timeout_s: float = 30.0) -> Message:
    """The next step of a peer, reported at or after a time, that so many contributed to."""
    return peer.expect(
        "step", lambda fact: fact["contributors"] == contributors and fact["at"] >= after, timeout_s=timeout_s
    )
