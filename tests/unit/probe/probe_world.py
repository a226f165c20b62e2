"""Clocks whose truth is known, and what an honest prober would report about them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ringfold.probe.graph.draw import draw
from ringfold.wire.probing import EdgeFit, NodeClock, NodeId

SECOND = 1_000_000_000
UNIX = 1_700_000_000 * SECOND


@dataclass(frozen=True)
class TrueClock:
    """Reads `offset + rate * t` at the true time t (exact fractions)."""

    offset: int
    ppb: int

    def at(self, t: Fraction | int) -> Fraction:
        return self.offset + t * (1 + Fraction(self.ppb, 10**9))

    def when(self, reading: Fraction | int) -> Fraction:
        return (reading - self.offset) / (1 + Fraction(self.ppb, 10**9))


@dataclass(frozen=True)
class World:
    clocks: dict[NodeId, TrueClock]

    def utc(self, at: int) -> dict[NodeId, int]:
        """CLOCK_REALTIME minus the node's clock, where all know the right Unix time."""
        return {node: UNIX + at - round(clock.at(at)) for node, clock in self.clocks.items()}

    def fit(
        self,
        edge: tuple[NodeId, NodeId],
        at: int,
        half: int = 2 * SECOND,
        error: float = 0.0,
        skew_error: float = 0.0,
        sigma: float = 20.0,
        corridor: tuple[tuple[int, int], tuple[int, int], tuple[int, int]] = ((-900, 900), (-600, 600), (-900, 900)),
    ) -> EdgeFit:
        """A report about the window around `at` whose beta is off by `error`. The corridor is around the truth."""
        a, b = self.clocks[edge[0]], self.clocks[edge[1]]
        t0 = round(a.at(at))
        alpha = float(Fraction(b.ppb - a.ppb, 10**9 + a.ppb)) + skew_error
        beta = round(b.at(a.when(t0)) - t0 + Fraction(error))
        lows, highs = [], []
        for (low, high), x in zip(corridor, (-half, 0, half), strict=True):
            truth = b.at(a.when(t0 + x)) - (t0 + x)
            line = beta + Fraction(alpha) * x
            lows.append(round(truth - line) + low - 1)
            highs.append(round(truth - line) + high + 1)
        return EdgeFit(
            src=edge[0],
            dst=edge[1],
            t0_ns=t0,
            half_ns=half,
            alpha=alpha,
            beta_ns=beta,
            sigma_ns=sigma,
            sigma_alpha=sigma * 1.7 / half,
            low=(lows[0], lows[1], lows[2]),
            high=(highs[0], highs[1], highs[2]),
            pairs=1000,
        )

    def fits(
        self,
        edges: Iterable[tuple[NodeId, NodeId]],
        at: int,
        rng: np.random.Generator | None = None,
        noise: float = 0.0,
    ) -> list[EdgeFit]:
        """All edges with normal errors of that size; the edge's own t0 lies up to 5 ms from `at`."""
        if rng is None:
            return [self.fit(edge, at) for edge in edges]
        return [
            self.fit(
                edge,
                at + int(rng.integers(-5_000_000, 5_000_000)),
                error=float(rng.normal(0, noise)),
                skew_error=float(rng.normal(0, noise * 1.7 / (2 * SECOND))),
                sigma=max(noise, 1.0),
            )
            for edge in edges
        ]

    def error(self, clocks: Sequence[NodeClock], at: int | Fraction) -> float:
        """How far a node's global time is at most from the median one, at one true instant."""
        values = sorted(exact(clock, self.clocks[clock.node].at(at)) for clock in clocks)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        return float(max(values[-1] - middle, middle - values[0]))


def world(size: int, seed: int = 0, offset: int = 50_000_000, ppb: int = 30_000, base: int = 0) -> World:
    """Clocks within +-offset and +-drift; `base` is added to node 0's, subtracted from node 1's, and so on."""
    rng = np.random.default_rng(seed)
    return World(
        {
            node: TrueClock(
                int(rng.integers(-offset, offset + 1)) + (base if node % 2 == 0 else -base) // (1 + node // 2),
                int(rng.integers(-ppb, ppb + 1)),
            )
            for node in range(size)
        }
    )


def ring(size: int, neighbours: int, seed: int = 0) -> list[tuple[NodeId, NodeId]]:
    return draw(range(size), (), neighbours, seed)


def exact(clock: NodeClock, reading: Fraction | int) -> Fraction:
    """Global time by a mapping, without any rounding."""
    return clock.global_ns + (reading - clock.t0_ns) * (1 + Fraction(clock.rate))
