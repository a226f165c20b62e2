"""Prediction against the default policy in a fluid model: the table of ADR 26.

    python benchmarks/prediction/model.py

A flow is split over two paths; the first one has cross traffic. Telemetry shows the queues as they were `delay` ago,
with noise, and a new report comes every `period`. What is compared is how much of the flow is sent, relative to what
the paths have left, and how much the share varies. One step is one millisecond.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policy import PredictingPolicy

from ringfold.agent.policy import FlowInput, PathInput, Policy

MS = 1_000_000
RUN_MS = 3_000
WARM_UP_MS = 500
QUEUE_MS = 50.0
WINDOW = 0.7
"""A sender fills this part of a queue at most."""
DEMAND = 0.9
CAPACITY = 250.0
"""Bytes a millisecond, of the first path."""
SEEDS = (1, 2)
DELAYS = ((1, 1), (10, 5), (30, 10), (100, 50))
"""How late reports are, and how far apart, in milliseconds."""


def _walk(seed: int) -> Callable[[int], float]:
    rng, values = random.Random(seed), [0.0]
    for _ in range(RUN_MS):
        values.append(min(0.6 * CAPACITY, max(0.0, values[-1] + rng.gauss(0, 6))))
    return lambda ms: values[ms]


CROSS: dict[str, Callable[[int], float]] = {
    "none": lambda ms: 0.0,
    "steps of 500 ms": lambda ms: 0.5 * CAPACITY if ms // 500 % 2 else 0.0,
    "a sine of 1 s": lambda ms: 0.3 * CAPACITY * (1 + math.sin(2 * math.pi * ms / 1_000)),
    "a sine of 200 ms": lambda ms: 0.3 * CAPACITY * (1 + math.sin(2 * math.pi * ms / 200)),
    "ramps of 1 s": lambda ms: 0.7 * CAPACITY * (ms % 1_000) / 1_000,
    "a random walk": _walk(5),
}


@dataclass(frozen=True, slots=True)
class Result:
    """The part of the possible bytes that was sent, and the standard deviation of the first share."""

    sent: float
    deviation: float


def run(policy: Policy, cross: Callable[[int], float], delay_ms: int, period_ms: int, seed: int) -> Result:
    rng, capacities = random.Random(seed), (CAPACITY, CAPACITY)
    sizes, queues, rates = [each * QUEUE_MS for each in capacities], [0.0, 0.0], list(capacities)
    seen: list[list[float]] = []
    shown: Sequence[float] = (0.0, 0.0)
    shares: Sequence[float] = (0.5, 0.5)
    sent = possible = 0.0
    first = []
    for now in range(RUN_MS):
        free = [CAPACITY - cross(now), CAPACITY]
        room = [free[path] + max(0.0, WINDOW * sizes[path] - queues[path]) for path in range(2)]
        wanted = sum(capacities) * DEMAND
        total = min([wanted, *(room[path] / shares[path] for path in range(2) if shares[path] > 0)])
        for path in range(2):
            rates[path] += (free[path] - rates[path]) / 100
            queues[path] = min(sizes[path], max(0.0, queues[path] + shares[path] * total - free[path]))
        seen.append([255 * queue / size for queue, size in zip(queues, sizes, strict=True)])
        if now % period_ms == 0:
            shown = [min(255.0, max(0.0, level + rng.gauss(0, 8))) for level in seen[max(0, now - delay_ms)]]
        age_ns = (delay_ms + now % period_ms) * MS
        measured = [max(1.0, rate * 1_000 * (1 + rng.gauss(0, 0.1))) for rate in rates]
        paths = tuple(PathInput(shown[path], age_ns, rate=measured[path]) for path in range(2))
        shares = policy.step(now * MS, [FlowInput(0, paths)])[0].shares
        if now >= WARM_UP_MS:
            sent, possible = sent + total, possible + min(wanted, sum(free))
            first.append(shares[0])
    return Result(sent / possible, statistics.pstdev(first))


def main() -> None:
    print("cross traffic | late, every | sent: default, prediction | deviation: default, prediction")
    for name, cross in CROSS.items():
        for delay_ms, period_ms in DELAYS:
            both = [
                [run(make(), cross, delay_ms, period_ms, seed) for seed in SEEDS] for make in (Policy, PredictingPolicy)
            ]
            sent = [f"{statistics.mean(each.sent for each in results):.3f}" for results in both]
            deviation = [f"{100 * statistics.mean(each.deviation for each in results):.1f} %" for results in both]
            late = f"{delay_ms}, {period_ms} ms"
            print(f"{name} | {late} | {', '.join(sent)} | {', '.join(deviation)}", flush=True)


if __name__ == "__main__":
    main()
