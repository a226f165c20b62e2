"""One rank of `gloo` rounds, for test_gloo_rounds.py: real collectives, a fake prober. Prints what happens as JSON."""

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ringfold.errors import DeadlineExceeded
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.rounds.calculation import RoundResult
from ringfold.probe.rounds.gloo import GlooRounds, TorchCollectives
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
from ringfold.wire.probing import EdgeFit, EdgeView, Neighbour, NodeClock, NodeId


class MadeUpProber:
    """Sends no probes, and has a clock that is a second ahead for every rank."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.out: list[NodeId] = []
        self.begun_ns = self.now()

    def now(self) -> int:
        return time.monotonic_ns() + self.node * 10**9

    def utc(self) -> int:
        return time.time_ns() - self.now()

    def configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None:
        self.out = [other.node for other in out]

    def resume(self, gap_us: int, pause_us: int) -> None:
        self.begun_ns = self.now()

    def pause(self) -> None:
        pass

    def rotate(self) -> list[EdgeWindow]:
        none = np.empty((0, 8), np.int64), np.empty(0, np.uint8)
        begun, self.begun_ns = self.begun_ns, self.now()
        return [EdgeWindow(self.node, dst, begun, self.begun_ns, *none, 1, 0, 0, 0, 0, "kernel") for dst in self.out]


def fit(window: EdgeWindow) -> EdgeFit:
    return EdgeFit(window.src, window.dst, window.begin_ns, beta_ns=(window.dst - window.src) * 10**9, pairs=100)


def draw(nodes: Sequence[NodeId], listeners: Collection[NodeId], neighbours: int, seed: int) -> list[tuple[int, int]]:
    return [(src, dst) for src in nodes if src not in listeners for dst in nodes if src != dst]


def calculate(fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> RoundResult:
    nodes = sorted({node for fit in fits for node in (fit.src, fit.dst)})
    clocks = [NodeClock(node, 0, -node * 10**9, 0.0, 1.0, -1, 1, 0.0) for node in nodes]
    return RoundResult(nodes[0], clocks, [EdgeView(fit) for fit in fits])


def report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


LONG_WINDOWS = ("long listener", "long unlisted")


def settings_of(mode: str, size: int) -> RoundSettings:
    """Windows are long if they are longer than the timeout; rank 1 is listed as nobody's prober if it is unlisted."""
    if mode not in LONG_WINDOWS:
        return RoundSettings(kind="gloo", window_ms=200, gloo_timeout_ms=1_500 if mode != "whole" else 20_000)
    probing = [f"rank{rank}" for rank in range(size) if rank != 1]
    graph = {name: tuple(f"rank{rank}" for rank in range(size) if name != f"rank{rank}") for name in probing}
    adaptive = Adaptive(window_min_ms=500, window_max_ms=1_000)
    return RoundSettings(
        kind="gloo", window_ms=4_000, gloo_timeout_ms=3_000, adaptive=adaptive,
        graph=graph if mode == "long unlisted" else {},
    )  # fmt: skip


def main(rank: int, size: int, port: int, mode: str) -> None:
    """Three rounds; in the second one, rank 1 may die or freeze."""
    settings = settings_of(mode, size)
    timeout_ms = settings.gloo_timeout_ms if mode in LONG_WINDOWS else 20_000
    window_ms = settings.longest_window_ms if mode in LONG_WINDOWS else 0
    group = TorchCollectives(rank, size, "127.0.0.1", port, interface="lo", timeout_ms=timeout_ms, window_ms=window_ms)
    facts = Neighbour(rank, f"rank{rank}", "127.0.0.1", 1)
    listens = mode in ("listener", "long listener") and rank == 1
    prober, key = MadeUpProber(rank), bytes(16)
    rounds = GlooRounds(group, settings, facts, prober, fit, draw, calculate, lambda _: key, listen_only=listens)
    for number in range(3):
        if number == 1 and rank == 1 and mode in ("die", "freeze"):
            report(rank=rank, is_ready=True)
            os.kill(os.getpid(), signal.SIGKILL if mode == "die" else signal.SIGSTOP)
        began = time.monotonic()
        try:
            taken = rounds.round()
        except DeadlineExceeded as error:
            took_ms = (time.monotonic() - began) * 1_000
            report(rank=rank, error=str(error), missing=list(error.peers), took_ms=took_ms)
            alone = rounds.round()
            report(rank=rank, alone=alone.exports[-1].is_alone, windows=[one.window for one in alone.exports])
            sys.stdin.read()  # rank 0 keeps the store in which the others look which ranks are missing
            os._exit(0)
        summary = taken.summary
        assert summary is not None
        report(
            rank=rank,
            sequence=summary.round.sequence,
            missing=list(summary.missing),
            edges=len(summary.edges),
            clock=taken.clock is not None,
            windows=[one.window for one in taken.exports],
        )
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
