"""An agent that extrapolates congestion: the experiment of ADR 26, not a part of the product.

    python benchmarks/prediction/policy.py ...       as `ringfold agent ...`, with the policy below
    PREDICT=0 python benchmarks/prediction/policy.py ...    the default policy, by the same program

Each path has a trend (Holt's linear method): a level and a slope, from the reports of its queue. A report that is `age`
old is replaced by what the trend expects now. The error of such predictions is measured all the time, by comparing what
would have been predicted one age ago with what is reported, and so is the error of the last report taken as it is. The
prediction counts only as far as its error is the smaller one. Only a report holds a path, never a prediction.
"""

import math
import os
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

from ringfold.agent import daemon
from ringfold.agent.policy import Decision, FlowInput, PathInput, Policy, PolicySettings

ERROR_MS = 200.0
"""Time constant of the measured errors."""
MAX_PREDICTED = 239.0


@dataclass(slots=True)
class Trend:
    """The trend of one queue, and how wrong it and the last report were."""

    level: float | None = None
    at_ns: int = 0
    slope_per_ms: float = 0.0
    error: float = 8.0
    unpredicted_error: float = 8.0
    past: deque[tuple[int, float, float]] = field(default_factory=deque)

    def update(self, measured_ns: int, value: float, trend_ms: float, age_ms: float) -> None:
        """Add a report; an older or equal one changes nothing."""
        if self.level is None:
            self.level, self.at_ns = value, measured_ns
        step_ms = (measured_ns - self.at_ns) / 1e6
        if step_ms <= 0:
            return
        self._compare(measured_ns, value, step_ms, age_ms)
        blend = 1 - math.exp(-step_ms / trend_ms)
        expected = self.level + self.slope_per_ms * step_ms
        level = expected + max(blend, 0.3) * (value - expected)
        self.slope_per_ms += blend * ((level - self.level) / step_ms - self.slope_per_ms)
        self.level, self.at_ns = level, measured_ns
        self.past.append((measured_ns, level, self.slope_per_ms))

    def _compare(self, measured_ns: int, value: float, step_ms: float, age_ms: float) -> None:
        while len(self.past) > 1 and self.past[1][0] <= measured_ns - age_ms * 1e6:
            self.past.popleft()
        if self.past and self.past[0][0] <= measured_ns - age_ms * 1e6:
            at_ns, level, slope = self.past[0]
            blend = 1 - math.exp(-step_ms / ERROR_MS)
            predicted = min(255.0, max(0.0, level + slope * (measured_ns - at_ns) / 1e6))
            self.error += blend * (abs(predicted - value) - self.error)
            self.unpredicted_error += blend * (abs(level - value) - self.unpredicted_error)

    def predicted(self, age_ms: float) -> tuple[float, float]:
        """The congestion that is expected now, and the confidence in it, from 0 to 1."""
        if self.level is None:
            return 0.0, 0.0
        confidence = max(0.0, 1 - self.error / max(self.unpredicted_error, 1e-9))
        return min(MAX_PREDICTED, max(0.0, self.level + confidence * self.slope_per_ms * age_ms)), confidence


class PredictingPolicy(Policy):
    """The default policy on predicted congestion, which counts as fresh as far as the prediction is trusted."""

    def __init__(self, settings: PolicySettings | None = None, trend_ms: float = 20.0) -> None:
        super().__init__(settings)
        self._trends: dict[tuple[Hashable, int], Trend] = {}
        self._trend_ms = trend_ms

    def step(self, now_ns: int, inputs: Iterable[FlowInput]) -> list[Decision]:
        return super().step(now_ns, [self._predict(now_ns, one) for one in inputs])

    def forget(self, flow: Hashable) -> None:
        super().forget(flow)
        for key in [key for key in self._trends if key[0] == flow]:
            del self._trends[key]

    def _predict(self, now_ns: int, one: FlowInput) -> FlowInput:
        paths = [self._predict_path(now_ns, (one.flow, number), path) for number, path in enumerate(one.paths)]
        return replace(one, paths=tuple(paths))

    def _predict_path(self, now_ns: int, key: tuple[Hashable, int], path: PathInput) -> PathInput:
        if path.congestion is None:
            return path
        trend, age_ms = self._trends.setdefault(key, Trend()), path.age_ns / 1e6
        trend.update(now_ns - path.age_ns, path.congestion, max(self._trend_ms, age_ms), max(1.0, age_ms))
        value, confidence = trend.predicted(age_ms)
        if confidence <= 0 or path.congestion > MAX_PREDICTED:
            return path
        return replace(path, congestion=value, age_ns=int(path.age_ns * (1 - confidence)))


if __name__ == "__main__":
    import sys

    from ringfold.cli import main

    if os.environ.get("PREDICT", "1") == "1":
        daemon.Policy = PredictingPolicy  # type: ignore[misc]
    sys.argv[1:1] = ["agent"]
    main()
