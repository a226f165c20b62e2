"""A fluid model of queues in parallel, steered by the policy: the loop that the policy closes, without packets.

Each path drains at its capacity less its cross traffic; what the flow sends into it beyond that waits in its queue, up
to the queue's size. The flow is one transfer that is split: when a path's queue holds the flow's `window` (a part of
its size) the whole flow waits for it, as a transfer waits for its slowest part. Telemetry shows the queues as they were
`delay_ms` ago, with noise; `shown_age` says how much of that delay the policy is told. A new report comes every
`period_ms`. Rates are what the paths would give the flow, with noise. One step is one millisecond.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringfold.agent.policy import Decision, FlowInput, PathInput, Policy

MS = 1_000_000


@dataclass
class Fluid:
    """Capacities in bytes a millisecond; `demand` is how much of their sum the flow sends."""

    capacities: Sequence[float]
    demand: float = 1.0
    queue_ms: float = 50.0
    window: float = 0.7
    delay_ms: int = 1
    period_ms: int = 1
    shown_age: float = 1.0
    noise: float = 8.0
    rate_noise: float = 0.1
    rates_known: bool = True
    rate_bias: Sequence[float] = ()
    cross: Callable[[int, int], float] = lambda path, ms: 0.0
    seed: int = 1
    policy: Policy = field(default_factory=Policy)

    def run(self, ms: int) -> list[Decision]:
        """The decisions of every millisecond."""
        rng, count = random.Random(self.seed), len(self.capacities)
        sizes = [capacity * self.queue_ms for capacity in self.capacities]
        queues, seen, decisions = [0.0] * count, [], []
        shares = tuple(1 / count for _ in range(count))
        wanted = sum(self.capacities) * self.demand
        bias = self.rate_bias or [1.0] * count
        for now in range(ms):
            free = [capacity - self.cross(path, now) for path, capacity in enumerate(self.capacities)]
            room = [free[path] + max(0.0, self.window * sizes[path] - queues[path]) for path in range(count)]
            total = min([wanted, *(room[path] / shares[path] for path in range(count) if shares[path] > 0)])
            for path in range(count):
                queues[path] = min(sizes[path], max(0.0, queues[path] + shares[path] * total - free[path]))
            seen.append([255 * queue / size for queue, size in zip(queues, sizes, strict=True)])
            since = now % self.period_ms
            if since == 0:
                shown = [level + rng.gauss(0, self.noise) for level in seen[max(0, now - self.delay_ms)]]
            paths = tuple(
                PathInput(
                    congestion=min(255.0, max(0.0, shown[path])),
                    age_ns=int((self.delay_ms * self.shown_age + since) * MS),
                    rate=max(1.0, free[path] * bias[path] * 1000 * (1 + rng.gauss(0, self.rate_noise)))
                    if self.rates_known
                    else None,
                )
                for path in range(count)
            )
            decision = self.policy.step(now * MS, [FlowInput(0, paths)])[0]
            shares = decision.shares
            decisions.append(decision)
        return decisions
