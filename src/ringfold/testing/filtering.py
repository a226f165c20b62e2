"""The filter of edges on simulated windows: drifting clocks and asymmetric, lossy links, drawn from a seed.

A seed is a delay model, a wander of the clocks, a loss, and perhaps a clock that steps or a link whose delay changes.
Several edges follow that course, and the production estimator and filter fit and combine their windows. The promises:

* the certified corridor of a combined line contains the truth in every window, whatever happens;
* the line is within the stated error of what can be measured: the truth, and half the asymmetry of the link's shortest
  delays, which nothing can see. In few windows of one seed the rate varies, so a seed fails below MIN_COVERAGE; over
  many seeds the stated rate must hold (tests/unit/probe/test_filter.py);
* combining never costs much: the error is at most WORSE times that of the windows alone, and WORSE_NS.
"""

from random import Random

from ringfold.probe.courses import FilterOutcome, FilterScenario, follow_course, rms
from ringfold.probe.graph.filter import FilterSettings
from ringfold.probe.models import MODELS, Course
from ringfold.testing.checks import Violation
from ringfold.testing.scheduler import SimulationFailure

EDGES = 6
MIN_COVERAGE = 0.75
WORSE, WORSE_NS = 1.5, 10.0


def draw_filter(seed: int) -> FilterScenario:
    """The scenario of a seed."""
    rng = Random(f"filter {seed}")
    windows = rng.randint(12, 20)
    fault, at, sign = rng.choice(("none", "step", "delay", "asymmetry")), rng.randint(3, 8), rng.choice((-1, 1))
    changes: dict[str, int] = {}
    if fault == "step":
        changes = {"step_at": at, "step_ns": sign * round(10 ** rng.uniform(2, 9))}
    elif fault == "delay":
        longer = round(10 ** rng.uniform(2, 7))
        changes = {"delay_at": at, "forward_ns": longer, "backward_ns": longer}
    elif fault == "asymmetry":
        changes = {"delay_at": at, rng.choice(("forward_ns", "backward_ns")): round(10 ** rng.uniform(2, 6))}
    wander = rng.choice((0.0, 10 ** rng.uniform(-10, -7.5)))
    course = Course(windows=windows, wander=wander, loss=rng.choice((0.0, rng.uniform(0.01, 0.4))), **changes)
    # A model with early timestamps proves nothing, so its corridors are not certified.
    names = [name for name, model in MODELS.items() if model.stamps_are_right]
    return FilterScenario(rng.choice(names), course)


def run_filter(seed: int, settings: FilterSettings | None = None) -> FilterOutcome:
    """Follow the course of a seed with the filter; a broken promise raises SimulationFailure."""
    outcome = follow_course(seed, draw_filter(seed), settings or FilterSettings(), EDGES)
    limit_ns = WORSE * rms(outcome.alone_ns) + WORSE_NS
    try:
        if outcome.outside:
            raise Violation(f"{outcome.outside} certified corridors do not contain the truth: {outcome}")
        if outcome.coverage < MIN_COVERAGE:
            raise Violation(
                f"the stated error covers the truth in {outcome.coverage:.0%} of the windows only: {outcome}"
            )
        if rms(outcome.combined_ns) > limit_ns:
            raise Violation(f"combining makes the error {rms(outcome.combined_ns):.0f} ns, over {limit_ns:.0f} ns")
    except Violation as broken:
        raise SimulationFailure(seed, str(broken), [str(outcome.scenario)]) from broken
    return outcome
