"""The filter of edges: its stated error holds on simulated clocks and links, and its rules are what they say."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import find
from planted.filters import BUGS
from probe_world import SECOND, World, ring, world

from ringfold.errors import ConfigError
from ringfold.probe.courses import FilterScenario, follow_course, rms
from ringfold.probe.graph.clocks import GraphResult, GraphSettings, calculate
from ringfold.probe.graph.edges import usable
from ringfold.probe.graph.filter import COVERAGE, MAX_ABSENT_ROUNDS, EdgeFilters, FilterSettings, combine
from ringfold.probe.models import MODELS, Course
from ringfold.testing.filtering import run_filter
from ringfold.wire.probing import EdgeFit

AT, WINDOW = 100 * SECOND, 4 * SECOND
COURSES = {
    "steady": Course(windows=16),
    "wandering": Course(windows=16, wander=3e-9),
    "lossy": Course(windows=16, wander=1e-9, loss=0.3),
    "step": Course(windows=16, wander=1e-9, step_at=6, step_ns=-40_000),
    "longer": Course(windows=16, wander=1e-9, delay_at=6, forward_ns=300_000, backward_ns=300_000),
    "asymmetric": Course(windows=16, wander=1e-9, delay_at=6, forward_ns=8_000),
}


@pytest.mark.parametrize("course", COURSES)
def test_the_stated_error_covers_the_truth_at_the_stated_rate(course: str) -> None:
    """On every delay model, over many windows of several edges; the truth as far as it can be measured."""
    for name in MODELS:
        if not MODELS[name].stamps_are_right:
            continue
        outcome = follow_course(5, FilterScenario(name, COURSES[course]), FilterSettings(), edges=8)
        assert outcome.combined_ns.size > 80
        assert outcome.coverage >= COVERAGE, str(outcome)
        assert outcome.outside == 0, str(outcome)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_the_promises_hold_on_any_course(seed: int) -> None:
    """Corridors, the stated error, and no loss by combining: drifting clocks, asymmetric and lossy links, steps."""
    outcome = run_filter(seed)
    assert np.isfinite(outcome.combined_ns).all()
    assert (outcome.sigma_ns > 0).all()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    assert find(BUGS[name], 0, 60) is not None, BUGS[name].text


def test_the_next_window_is_predicted_better_than_by_one_window_alone() -> None:
    for name in ("noisy", "mixed", "asymmetric-noisy", "sparse-noisy"):
        outcome = follow_course(1, FilterScenario(name, COURSES["wandering"]), FilterSettings(), edges=6)
        assert rms(outcome.predicted_ns) < 0.8 * rms(outcome.predicted_alone_ns), str(outcome)


# One edge at a time


def line(truth: World, number: int, **off: Any) -> EdgeFit:  # noqa: ANN401 - as World.fit
    return truth.fit((0, 1), AT + number * WINDOW, **off)


def combined(fits: list[EdgeFit], filters: EdgeFilters | None = None) -> tuple[Any, EdgeFilters]:
    """The last result of combining one fit after another."""
    filters = filters or EdgeFilters()
    result = None
    for fit in fits:
        reported, why = usable([fit], {0: 0, 1: 1}, 1e-3)
        assert why == [""]
        result = combine(reported, [(fit.src, fit.dst)], filters)
        filters = result.filters
    return result, filters


def test_the_first_window_is_taken_as_it_is() -> None:
    fit = line(world(2), 0)
    result, _ = combined([fit])
    edges = result.edges
    assert (edges.beta[0], edges.alpha[0], edges.sigma[0]) == (fit.beta_ns, fit.alpha, fit.sigma_ns)
    assert (tuple(edges.low[0]), tuple(edges.high[0])) == (fit.low, fit.high)
    assert result.windows.tolist() == [1]


def test_equal_windows_make_the_line_more_certain_but_not_beyond_what_repeats() -> None:
    truth = world(2)
    sigmas = [combined([line(truth, number) for number in range(count)])[0].edges.sigma[0] for count in (2, 4, 16)]
    assert all(before > after for before, after in pairwise(sigmas))
    assert sigmas[-1] >= FilterSettings().systematic * 20.0


@pytest.mark.parametrize("step_ns", [10_000, -10_000, 10**15])
def test_after_a_step_only_the_new_window_counts(step_ns: int) -> None:
    truth = world(2)
    fits = [line(truth, number) for number in range(6)]
    moved = World({0: truth.clocks[0], 1: type(truth.clocks[1])(truth.clocks[1].offset + step_ns, truth.clocks[1].ppb)})
    new = line(moved, 6)
    result, _ = combined([*fits, new])
    assert result.windows.tolist() == [1]
    assert result.edges.beta[0] == new.beta_ns


def test_a_clock_that_went_back_starts_again() -> None:
    truth = world(2)
    result, _ = combined([line(truth, 5), line(truth, 6), line(truth, 2)])
    assert result.windows.tolist() == [1]


def test_a_window_that_comes_again_changes_nothing() -> None:
    """Where windows end by the nodes' own clocks, a round may have the window of the last round once more."""
    truth = world(2)
    fits = [line(truth, number, error=10.0 * number) for number in range(4)]
    once, filters = combined(fits)
    again, after = combined(fits[-1:], filters)
    assert again.windows.tolist() == once.windows.tolist() == [4]
    for name in ("beta", "alpha", "sigma", "sigma_alpha", "low", "high"):
        assert np.array_equal(getattr(again.edges, name), getattr(once.edges, name)), name
    for name in ("t0", "state", "covariance", "probability", "windows"):
        assert np.allclose(getattr(after, name), getattr(filters, name), rtol=1e-12, atol=1e-9), name
    following = line(truth, 4)
    assert combined([following], after)[0].edges.sigma[0] == pytest.approx(
        combined([following], filters)[0].edges.sigma[0]
    )


@pytest.mark.parametrize("numbers", [(5, 6, 2), (5, 6, 200), (5, 5)])
def test_an_edge_that_starts_again_or_repeats_is_not_believed_more_than_those_that_hold(numbers: list[int]) -> None:
    truth = world(2)
    result, _ = combined([line(truth, number) for number in numbers])
    held, _ = combined([line(truth, number) for number in range(2)])
    assert result.windows.tolist() == [1]
    assert result.edges.sigma[0] >= held.edges.sigma[0]
    assert result.edges.sigma_alpha[0] >= held.edges.sigma_alpha[0]


def test_a_proof_is_never_overruled() -> None:
    """The former windows say one thing within their error, the corridor of the newest excludes it."""
    truth = world(2)
    wide = ((-900, 900), (-600, 600), (-900, 900))
    before = [line(truth, number, error=150.0, sigma=60.0, corridor=wide) for number in range(6)]
    narrow = ((-60, 60), (-30, 30), (-60, 60))
    result, _ = combined([*before, line(truth, 6, sigma=60.0, corridor=narrow)])
    edges = result.edges
    assert (edges.low[0] <= 0).all()
    assert (edges.high[0] >= 0).all()


def test_an_edge_that_is_absent_for_a_round_continues_and_one_that_is_gone_is_forgotten() -> None:
    truth, filters = world(3), EdgeFilters()
    both = [(0, 1), (1, 2)]
    for number in range(3):
        fits = [truth.fit(edge, AT + number * WINDOW) for edge in both]
        filters = combine(usable(fits, {0: 0, 1: 1, 2: 2}, 1e-3)[0], both, filters).filters
    rounds = MAX_ABSENT_ROUNDS + 1
    for number in range(3, 3 + rounds):
        fits = [truth.fit((0, 1), AT + number * WINDOW)]
        result = combine(usable(fits, {0: 0, 1: 1, 2: 2}, 1e-3)[0], [(0, 1)], filters)
        filters = result.filters
        assert ((1, 2) in filters.names) == (number < 2 + rounds)
    back = [truth.fit((0, 1), AT + 9 * WINDOW * rounds), truth.fit((1, 2), AT + 9 * WINDOW * rounds)]
    result = combine(usable(back, {0: 0, 1: 1, 2: 2}, 1e-3)[0], both, filters)
    assert result.windows.tolist() == [1, 1], "too old to be continued"


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"wanders": ()}, {"caution": 0.0}, {"gate": 0.0}, {"forget": 1.5}, {"systematic": -1.0}):
        with pytest.raises(ConfigError):
            FilterSettings(**wrong)


# In the calculation


def follow_rounds(settings: GraphSettings, count: int, noise: float) -> tuple[World, GraphResult]:
    truth, edges, rng = world(8, 3), ring(8, 3), np.random.default_rng(4)
    result = None
    for number in range(count):
        at = AT + number * WINDOW
        history = result.history if result else None
        result = calculate(truth.fits(edges, at, rng, noise), truth.utc(at), history, settings)
    assert result is not None
    return truth, result


def test_clocks_of_combined_windows_are_closer_to_the_truth_until_the_next_round() -> None:
    ahead = AT + 11 * WINDOW + 6 * SECOND
    errors = {}
    for combines in (False, True):
        truth, result = follow_rounds(GraphSettings(combine_windows=combines), 12, 100.0)
        errors[combines] = truth.error(result.nodes, ahead)
    assert errors[True] < 0.6 * errors[False]


def test_a_view_shows_the_report_and_how_many_windows_its_line_has() -> None:
    _, result = follow_rounds(GraphSettings(), 8, 50.0)
    assert {view.windows for view in result.edges} == {8}
    for view in result.edges:
        consensus = view.fit.beta_ns - view.residual_ns
        assert abs(consensus - view.beta_ns) <= 1.0, "the residual is that of the reported line"
    _, alone = follow_rounds(GraphSettings(combine_windows=False), 8, 50.0)
    assert {view.windows for view in alone.edges} == {1}
