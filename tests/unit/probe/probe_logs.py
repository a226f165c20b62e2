"""Made-up logs of probing that look like real ones: virtual clocks, five packets an exchange, losses, a busy edge.

A node's clock is `offset + (1 + drift) * real`, so its line to any other node is known exactly, and a fit that knows
the truth (`true_fit`) stands in for an estimator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ringfold.probe.exchanges import BACKWARD_KEPT, FORWARD_KEPT, EdgeWindow
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.probe.logs.lines import WindowFields
from ringfold.wire.probing import (
    EdgeFit,
    EdgeView,
    NodeClock,
    NodeId,
    RoundId,
    RoundMetrics,
    RoundSummary,
)

UNIX_NS = 1_790_000_000 * 10**9
WINDOW_NS = 4 * 10**9


@dataclass(frozen=True)
class VirtualClock:
    """A node's clock, in integers: exact both ways up to a nanosecond."""

    offset_ns: int
    drift_ppb: int

    def at(self, real_ns: int) -> int:
        return real_ns + self.offset_ns + real_ns * self.drift_ppb // 10**9


@dataclass(frozen=True)
class MadeUpRun:
    """Nodes 1..n, each probing the next one and others at random; everything follows from the seed."""

    nodes: int = 4
    windows: int = 3
    degree: int = 2
    pairs: int = 60
    seed: int = 1

    @property
    def clocks(self) -> dict[NodeId, VirtualClock]:
        rng = np.random.default_rng(self.seed)
        draw = {node: (int(rng.integers(0, 10**15)), int(rng.normal(0, 15_000))) for node in range(1, self.nodes + 1)}
        return {node: VirtualClock(*facts) for node, facts in draw.items()}

    @property
    def edges(self) -> list[tuple[NodeId, NodeId]]:
        rng = np.random.default_rng([self.seed, self.nodes])
        steps = range(2, self.nodes)
        chords = {n: rng.permutation(steps)[: self.degree - 1] if steps else [] for n in range(1, self.nodes + 1)}
        return [(n, (n - 1 + int(step)) % self.nodes + 1) for n, drawn in chords.items() for step in [1, *drawn]]

    def edge_window(self, src: NodeId, dst: NodeId, number: int) -> EdgeWindow:
        """One window of one edge: some exchanges are lost, some lack a direction, some met a queue."""
        rng = np.random.default_rng([self.seed, src, dst, number])
        clocks = self.clocks
        begin, end = number * WINDOW_NS, (number + 1) * WINDOW_NS
        floor = 2_000 + 3_000 * ((src * 7 + dst * 3) % 11)
        busy = 40_000 if (src, dst) == self.edges[-1] else 2_000
        rows = []
        kept = []
        for sent in np.linspace(begin + 10**6, end - 10**7, self.pairs).astype(np.int64):
            if rng.random() < (0.05 if busy > floor else 0.003):
                continue
            t1 = int(sent + rng.integers(0, 50_000))
            t2, r1 = t1 + 800_000 + int(rng.integers(0, 20_000)), t1 + 900_000 + int(rng.integers(0, 20_000))
            r2 = r1 + 800_000 + int(rng.integers(0, 20_000))
            d = [floor + int(rng.exponential(busy)) for _ in range(4)]
            a, b = clocks[src].at, clocks[dst].at
            row = [a(t1), b(t1 + d[0]), a(t2), b(t2 + d[1]), b(r1), a(r1 + d[2]), b(r2), a(r2 + d[3])]
            keep = FORWARD_KEPT * (abs(d[1] - d[0]) < 20_000) + BACKWARD_KEPT * (abs(d[3] - d[2]) < 20_000)
            if rng.random() < 0.05:
                row[6] = row[7] = 0
                keep &= FORWARD_KEPT
            rows.append(row)
            kept.append(keep)
        whole = 2 * len(kept) - sum(row[6] == 0 for row in rows)
        return EdgeWindow(
            src=src,
            dst=dst,
            begin_ns=clocks[src].at(begin),
            end_ns=clocks[src].at(end),
            exchanges=np.array(rows, np.int64).reshape(-1, 8),
            kept=np.array(kept, np.uint8),
            sent=self.pairs,
            lost=self.pairs - len(rows),
            duplicates=0,
            filtered=whole - sum(int(keep).bit_count() for keep in kept),
            threshold_ns=20_000,
            stamps="kernel",
        )

    def true_fit(self, window: EdgeWindow, estimator: str = "truth") -> EdgeFit:
        """The line that the clocks really have, at the middle of the window. The estimator's name is only passed on."""
        source, target = self.clocks[window.src], self.clocks[window.dst]
        if len(window.exchanges) < 10:
            return EdgeFit(window.src, window.dst, sent=window.sent, lost=window.lost, refused="too few pairs")
        t0 = (window.begin_ns + window.end_ns) // 2
        real = (t0 - source.offset_ns) * 10**9 // (10**9 + source.drift_ppb)
        skew = (target.drift_ppb - source.drift_ppb) / (10**9 + source.drift_ppb)
        t1_tx, t1_rx, _, _, r1_tx, r1_rx, _, _ = window.exchanges.T
        delays = ((r1_rx - t1_tx) - (r1_tx - t1_rx)) // 2
        return EdgeFit(
            window.src,
            window.dst,
            t0_ns=t0,
            half_ns=(window.end_ns - window.begin_ns) // 2,
            alpha=skew,
            beta_ns=target.at(real) - t0,
            sigma_ns=12.5,
            delay_min_ns=int(delays.min()),
            delay_p50_ns=int(np.quantile(delays, 0.5)),
            delay_p99_ns=int(np.quantile(delays, 0.99)),
            sent=window.sent,
            pairs=int(np.count_nonzero(window.kept)),
            lost=window.lost,
            filtered=window.filtered,
            estimator=estimator,
        )

    def stretch(self, node: NodeId, number: int) -> WindowFields:
        clock = self.clocks[node]
        begin, end = clock.at(number * WINDOW_NS), clock.at((number + 1) * WINDOW_NS)
        utc = UNIX_NS + (number + 1) * WINDOW_NS - end
        place = RoundId(1, number + 1)
        return WindowFields(
            round_id=place, label="warm up", node=node, window=number, begin_ns=begin, end_ns=end, utc_ns=utc
        )

    def windows_of(self, node: NodeId, number: int) -> list[EdgeWindow]:
        return [self.edge_window(src, dst, number) for src, dst in self.edges if src == node]

    def summary(self, number: int) -> RoundSummary:
        """What a master would publish, with clocks that are right up to a made-up wander."""
        middle = number * WINDOW_NS + WINDOW_NS // 2
        rng = np.random.default_rng([self.seed, number])
        nodes = [
            NodeClock(
                node=node,
                t0_ns=clock.at(middle) + int(rng.normal(0, 120)),
                global_ns=UNIX_NS + middle,
                rate=10**9 / (10**9 + clock.drift_ppb) - 1,
                sigma_ns=0.0 if node == 1 else float(rng.uniform(8, 20)),
                low_ns=0 if node == 1 else -int(rng.integers(900, 4_000)),
                high_ns=0 if node == 1 else int(rng.integers(900, 4_000)),
                growth=1e-8,
            )
            for node, clock in self.clocks.items()
        ]
        fits = [self.true_fit(self.edge_window(src, dst, number)) for src, dst in self.edges]
        views = [
            EdgeView(fit=fit, alpha=fit.alpha, beta_ns=fit.beta_ns, in_tree=fit.dst == fit.src + 1) for fit in fits
        ]
        views[-1] = EdgeView(fit=fits[-1], dropped="an outlier by 3 MAD")
        return RoundSummary(
            round=RoundId(1, number + 1),
            kind="master",
            label="warm up",
            begin_ns=UNIX_NS + number * WINDOW_NS,
            end_ns=UNIX_NS + (number + 1) * WINDOW_NS,
            reference=1,
            nodes=nodes,
            edges=views,
            metrics=RoundMetrics(control_latency_ns=[80_000] * self.nodes, total_ns=4_000_000),
        )

    def write(
        self, directory: Path, *, points: bool = True, rounds: bool = True, nodes: Sequence[NodeId] | None = None
    ) -> None:
        """Write all logs of the run."""
        settings = ExportSettings(directory=directory, points=points)
        for node in nodes if nodes is not None else sorted(self.clocks):
            with ProbeLog(settings, node=node, name=f"host-{node}") as log:
                for number in range(self.windows):
                    windows = self.windows_of(node, number)
                    log.window(self.stretch(node, number), windows, [self.true_fit(each) for each in windows])
        if rounds:
            with ProbeLog(settings) as log:
                for number in range(self.windows):
                    log.round(self.summary(number), {node: f"host-{node}" for node in self.clocks})


def emptied(window: EdgeWindow) -> EdgeWindow:
    """The same window, in which nothing came back."""
    none = np.zeros((0, 8), np.int64)
    return replace(window, exchanges=none, kept=np.zeros(0, np.uint8), lost=window.sent)
