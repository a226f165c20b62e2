"""The filter of edges against the truth: simulated edges over several windows, fitted and combined.

For tests, the simulation (`ringfold.testing.filtering`) and `ringfold bench clock`. Errors are against what can be
measured: the truth, and half the asymmetry of the link's shortest delays, which nothing can see.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfold.probe.fit import fit
from ringfold.probe.graph.edges import usable
from ringfold.probe.graph.filter import STATED, Combined, EdgeFilters, FilterSettings, combine
from ringfold.probe.models import MODELS, Course, CourseWindow, follow
from ringfold.wire.probing import EdgeFit

PAIRS = 250
"""At most: a fit of so many takes a quarter of the time."""
SETTLED = 2
"""Errors count from this window on: before it there is little to combine."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FilterScenario:
    """What a seed decides."""

    model: str
    course: Course


@dataclass(frozen=True, slots=True)
class FilterOutcome:
    """The errors of a seed, a row for each edge: of the windows alone, and combined."""

    seed: int
    scenario: FilterScenario
    alone_ns: Floats
    combined_ns: Floats
    sigma_ns: Floats
    """The stated standard error of each combined line."""
    predicted_alone_ns: Floats
    predicted_ns: Floats
    """The error in the middle of the next window, before that is known: what a clock reads meanwhile."""
    outside: int
    """How many certified corridors do not contain the truth in the middle of their window."""

    @property
    def coverage(self) -> float:
        """The share of windows in which the truth is within the stated error."""
        return float(np.mean(np.abs(self.combined_ns) <= STATED * self.sigma_ns)) if self.combined_ns.size else 1.0

    def __str__(self) -> str:
        return (
            f"{self.scenario.model}: {rms(self.alone_ns):.1f} ns alone, {rms(self.combined_ns):.1f} ns combined, "
            f"within the stated error in {self.coverage:.1%} of {self.combined_ns.size} windows"
        )


def rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(errors)))) if errors.size else 0.0


def follow_course(seed: int, scenario: FilterScenario, settings: FilterSettings, edges: int) -> FilterOutcome:
    """Fit and combine all windows of some edges that follow the same course, each with delays of its own."""
    followed = [_follow_edge(np.random.default_rng((seed, edge)), scenario, settings) for edge in range(edges)]

    def joined(errors: Callable[[_Followed], list[float]]) -> Floats:
        return np.array([error for one in followed for error in errors(one)], np.float64)

    return FilterOutcome(
        seed,
        scenario,
        alone_ns=joined(lambda one: one.alone),
        combined_ns=joined(lambda one: one.combined),
        sigma_ns=joined(lambda one: one.sigmas),
        predicted_alone_ns=joined(lambda one: one.ahead_alone),
        predicted_ns=joined(lambda one: one.ahead),
        outside=sum(one.outside for one in followed),
    )


@dataclass(slots=True)
class _Followed:
    """The errors of one edge, window by window."""

    alone: list[float]
    combined: list[float]
    sigmas: list[float]
    ahead_alone: list[float]
    ahead: list[float]
    outside: int = 0
    before: tuple[EdgeFit, Combined] | None = None
    """The last window that counts, and what was combined."""
    windows: int = 0

    def add(self, made: CourseWindow, found: EdgeFit, one: Combined, *, is_predictable: bool) -> None:
        truth = made.sample.truth(found.t0_ns) + made.asymmetry_ns
        base = made.sample.offset_ns
        beta, low, high = int(one.edges.beta[0]), one.edges.low[0, 1], one.edges.high[0, 1]
        self.outside += not low <= truth - made.asymmetry_ns - (beta - base) <= high
        if self.before is not None and is_predictable:
            fit, former = self.before
            since = found.t0_ns - fit.t0_ns
            line = former.edges
            self.ahead.append(int(line.beta[0]) - base + float(line.alpha[0]) * since - truth)
            self.ahead_alone.append(fit.beta_ns - base + fit.alpha * since - truth)
        if self.windows >= SETTLED:
            self.alone.append(found.beta_ns - base - truth)
            self.combined.append(beta - base - truth)
            self.sigmas.append(float(one.edges.sigma[0]))
            self.before = (found, one)
        self.windows += 1


def _follow_edge(rng: np.random.Generator, scenario: FilterScenario, settings: FilterSettings) -> _Followed:
    model, course = MODELS[scenario.model], scenario.course
    followed, filters = _Followed([], [], [], [], []), EdgeFilters()
    for number, made in enumerate(follow(model, rng, course, min(PAIRS, model.pairs))):
        found = fit(made.sample.window)
        if found.refused:
            followed.before = None
            continue
        reported, _ = usable([found], {found.src: 0, found.dst: 1}, 1e-3)
        one = combine(reported, [(found.src, found.dst)], filters, settings)
        filters = one.filters
        # Nothing predicts a step, or a new delay.
        followed.add(made, found, one, is_predictable=number not in (course.step_at, course.delay_at))
    return followed
