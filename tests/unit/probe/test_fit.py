"""The line of an edge: exact where it can be, honest where it cannot, and refused where there is none."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringfold.errors import UsageError
from ringfold.probe.exchanges import BACKWARD_KEPT, COLUMNS, FORWARD_KEPT, EdgeWindow
from ringfold.probe.fit import BASELINES, ESTIMATORS, fit
from ringfold.probe.models import MODELS, Sample, window
from ringfold.tools.bench import clock_truth as bench

ALL = ESTIMATORS + BASELINES
SOURCE_STAMPS = [COLUMNS.index(name) for name in ("t1_tx", "t2_tx", "r1_rx", "r2_rx")]
OTHER_STAMPS = [COLUMNS.index(name) for name in ("t1_rx", "t2_rx", "r1_tx", "r2_tx")]


def sample(name: str, seed: int = 0, pairs: int = 0, alpha: float = 20e-6, offset_ns: int = 50_000_000) -> Sample:
    return window(MODELS[name], np.random.default_rng(seed), pairs, alpha=alpha, offset_ns=offset_ns)


def silent(pairs: int, slope: Fraction, offset_ns: int, spacing_ns: int = 4_000_000) -> EdgeWindow:
    """Every packet takes exactly 7 us, and the other clock is an exact line: no rounding anywhere.

    With a spacing that the slope's denominator divides, all stamps are whole nanoseconds.
    """
    delay_ns = 7_000
    begin = np.arange(pairs, dtype=np.int64) * spacing_ns
    rows = np.empty((pairs, len(COLUMNS)), np.int64)

    def other(at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        scaled = at * slope.numerator
        assert not np.any(scaled % slope.denominator)
        return at + scaled // slope.denominator + offset_ns

    for first, shift in ((0, 0), (2, 800_000)):
        rows[:, first] = begin + shift
        rows[:, first + 1] = other(begin + shift) + delay_ns
    for first, shift in ((4, 100_000), (6, 900_000)):
        rows[:, first + 1] = begin + shift
        rows[:, first] = other(begin + shift) - delay_ns
    return as_window(rows)


def as_window(rows: npt.NDArray[np.int64]) -> EdgeWindow:
    kept = np.full(len(rows), FORWARD_KEPT | BACKWARD_KEPT, np.uint8)
    return EdgeWindow(1, 2, 0, 0, rows, kept, len(rows), 0, 0, 0, 160_000, "kernel")


def reversed_edge(one: EdgeWindow) -> EdgeWindow:
    """The same packets as the other node would have seen them, had it begun the exchange."""
    rows = one.exchanges
    return replace(one, src=one.dst, dst=one.src, exchanges=rows[:, [4, 5, 6, 7, 0, 1, 2, 3]])


# Exactness


@pytest.mark.parametrize("estimator", ALL)
def test_a_line_without_noise_is_found_exactly(estimator: str) -> None:
    slope, offset = Fraction(1, 50_000), 123_456_789
    found = fit(silent(500, slope, offset), estimator)
    assert not found.refused
    assert found.alpha == pytest.approx(float(slope), abs=2e-10)
    assert abs(found.beta_ns - (offset + slope * found.t0_ns)) <= 1
    assert {found.delay_min_ns, found.delay_p50_ns, found.delay_p99_ns} <= {6_999, 7_000, 7_001}


@pytest.mark.parametrize("offset", [10**17, -(10**17)])
def test_clocks_that_are_years_apart_lose_no_nanosecond(offset: int) -> None:
    near, far = (fit(silent(300, Fraction(1, 50_000), shift)) for shift in (0, offset))
    assert far.beta_ns - near.beta_ns == offset
    assert (far.alpha, far.low, far.high, far.sigma_ns) == (near.alpha, near.low, near.high, near.sigma_ns)


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**17), 10**17), st.integers(0, 10_000), st.sampled_from(ALL))
def test_a_constant_added_to_the_other_clock_is_added_to_beta(constant: int, seed: int, estimator: str) -> None:
    one = sample("mixed", seed, pairs=60).window
    rows = one.exchanges.copy()
    rows[:, OTHER_STAMPS] += constant
    before, after = fit(one, estimator), fit(replace(one, exchanges=rows), estimator)
    assert after == type(after)(**{**_fields(before), "beta_ns": before.beta_ns + constant})


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**15), 10**15), st.integers(0, 10_000))
def test_the_source_clock_may_begin_anywhere(constant: int, seed: int) -> None:
    one = sample("noisy", seed, pairs=60).window
    rows = one.exchanges + constant
    before, after = fit(one), fit(replace(one, exchanges=rows))
    assert after == type(after)(**{**_fields(before), "t0_ns": before.t0_ns + constant})


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 1_000), st.integers(0, 10_000))
def test_time_in_other_units_gives_the_same_line(factor: int, seed: int) -> None:
    one = sample("pareto", seed, pairs=200, offset_ns=0).window
    before = fit(one, "quantile")
    after = fit(replace(one, exchanges=(one.exchanges - one.begin_ns) * factor), "quantile")
    at_begin = before.beta_ns - before.alpha * (before.t0_ns - one.begin_ns)
    assert after.beta_ns - after.alpha * after.t0_ns == pytest.approx(factor * at_begin, abs=4 * factor)
    assert after.alpha == pytest.approx(before.alpha, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-1e-3, 1e-3), st.sampled_from(("hull", "min-rtt")))
def test_the_reversed_edge_has_the_reversed_line(seed: int, alpha: float, estimator: str) -> None:
    one = sample("mixed", seed, pairs=300, alpha=alpha, offset_ns=1_000_000).window
    there, back = fit(one, estimator), fit(reversed_edge(one), estimator)
    assert back.alpha == pytest.approx(-there.alpha / (1 + there.alpha), abs=3e-9)
    # At the instant when the source's clock shows t0, the other one shows t0 + beta.
    shown = there.t0_ns + there.beta_ns
    assert back.beta_ns + back.alpha * (shown - back.t0_ns) == pytest.approx(-there.beta_ns, abs=10)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(-1e-3, 1e-3))
@example(2640, 0.0)  # 7.6e-9 apart, between the ends of a flat stretch
@example(2047, 0.0)  # 1.2e-8 apart
def test_the_quantile_of_the_reversed_edge_is_as_good_a_line(seed: int, alpha: float) -> None:
    """The loss is a chain of straight stretches, and one of them may be flat but for a millionth: of each point's place
    in time both edges know another end of its packet, and a little more or less makes one or the other end of the
    stretch the lowest point. So it is the losses that agree, and nearly always the lines with them."""
    one = sample("mixed", seed, pairs=300, alpha=alpha, offset_ns=1_000_000).window
    there, back = fit(one, "quantile"), fit(reversed_edge(one), "quantile")
    turned = -back.alpha / (1 + back.alpha)
    assert check_loss(one, turned) == pytest.approx(check_loss(one, there.alpha), abs=1)  # of a million and a half
    assert abs(turned - there.alpha) < max(3e-9, there.sigma_alpha)
    shown = there.t0_ns + there.beta_ns
    assert back.beta_ns + back.alpha * (shown - back.t0_ns) == pytest.approx(-there.beta_ns, abs=there.sigma_ns)


def check_loss(one: EdgeWindow, slope: float, level: float = 0.05) -> float:
    """What the quantile estimator makes smallest, over both sides, each at its best height for this slope."""
    rows, total = one.exchanges, 0.0
    for sign, pairs in ((1, ((0, 1), (2, 3))), (-1, ((5, 4), (7, 6)))):
        x = np.concatenate([rows[:, here] for here, _ in pairs])
        y = np.concatenate([rows[:, other] - rows[:, here] for here, other in pairs])
        upright = sign * ((y - y[0]).astype(float) - slope * (x - x[0]).astype(float))
        above = upright - np.sort(upright)[int(level * len(upright))]
        total += float(np.where(above >= 0, level * above, (level - 1) * above).sum())
    return total


def _fields(found: object) -> dict[str, object]:
    return {name: getattr(found, name) for name in type(found).__struct_fields__}  # type: ignore[attr-defined]


# The certified bound


@pytest.mark.parametrize("name", sorted(name for name, model in MODELS.items() if model.stamps_are_right))
def test_the_certified_bound_contains_the_truth(name: str) -> None:
    missed = []
    for seed in range(300):
        one = sample(name, seed, pairs=min(MODELS[name].pairs, 200))
        found = fit(one.window, "hull")
        if bench.is_outside(found, bench.errors(one, found)):
            missed.append(seed)
    assert not missed


def test_a_bound_that_is_too_narrow_would_be_noticed() -> None:
    """The check above can fail: half the bound misses a truth that lies at its edge."""
    one = sample("exponential")
    found = fit(one.window)
    _, error, _ = bench.errors(one, found)
    assert bench.is_outside(found, (0.0, error + 1.1 * found.high[1], 0.0))


@pytest.mark.parametrize("estimator", ALL)
def test_the_bound_is_the_same_whatever_the_line(estimator: str) -> None:
    one = sample("pareto", 3)
    certain, other = fit(one.window, "hull"), fit(one.window, estimator)
    for place, shift in enumerate((-certain.half_ns, 0, certain.half_ns)):
        moved = other.beta_ns - certain.beta_ns + (other.alpha - certain.alpha) * shift
        assert other.low[place] + moved == pytest.approx(certain.low[place], abs=1.01)
        assert other.high[place] + moved == pytest.approx(certain.high[place], abs=1.01)


def test_the_bound_is_about_as_wide_as_a_round_trip() -> None:
    found = fit(sample("exponential").window)
    assert 20_000 < found.high[1] - found.low[1] < 21_000


def test_a_line_outside_the_corridor_is_noted() -> None:
    found = fit(sample("asymmetric").window, "least-squares")
    assert "the line leaves the corridor by" in found.why
    assert found.high[1] < 0


# Wrong stamps


def early(one: EdgeWindow, rows: int, by_ns: int) -> EdgeWindow:
    stamps = one.exchanges.copy()
    stamps[:: len(stamps) // rows, COLUMNS.index("t1_rx")] -= by_ns
    return replace(one, exchanges=stamps)


def test_a_few_stamps_that_cross_are_trimmed_and_flagged() -> None:
    one = sample("noisy")
    found = fit(early(one.window, 10, 100_000))
    assert not found.refused
    assert "the bounds crossed, 10 points trimmed" in found.why
    assert abs(bench.errors(one, found)[1]) < 100


def test_many_stamps_that_cross_are_refused() -> None:
    found = fit(early(sample("noisy").window, 200, 100_000))
    assert found.refused.startswith("the bounds cross")
    assert (found.alpha, found.beta_ns) == (0.0, 0)


def test_a_step_that_nobody_saw_is_refused() -> None:
    one = sample("noisy").window
    rows = one.exchanges.copy()
    rows[500:, OTHER_STAMPS] += 1_000_000
    assert fit(replace(one, exchanges=rows)).refused.startswith("the bounds cross")


def test_a_step_that_was_seen_is_refused_with_its_reason() -> None:
    found = fit(replace(sample("noisy").window, stepped="back by 3 ms"))
    assert found.refused == "a clock stepped: back by 3 ms"
    assert found.pairs == 1_000
    assert found.alpha == 0.0


# Too little


def test_ten_pairs_are_enough_and_nine_are_not() -> None:
    one = sample("sparse").window
    kept = np.zeros(30, np.uint8)
    kept[:10] = FORWARD_KEPT | BACKWARD_KEPT
    assert not fit(replace(one, kept=kept)).refused
    kept[0] = FORWARD_KEPT
    found = fit(replace(one, kept=kept))
    assert found.refused == "only 9 pairs backward, and 10 are needed"
    assert found.pairs == 9


def test_an_empty_window_is_refused() -> None:
    found = fit(as_window(np.empty((0, len(COLUMNS)), np.int64)))
    assert found.refused == "only 0 pairs forward, and 10 are needed"


def test_pairs_all_at_once_are_refused() -> None:
    assert "too short for a slope" in fit(silent(40, Fraction(0), 5, spacing_ns=100_000)).refused


def test_directions_that_do_not_overlap_are_refused() -> None:
    one = sample("noisy").window
    kept = np.where(np.arange(1_000) < 400, FORWARD_KEPT, BACKWARD_KEPT).astype(np.uint8)
    kept[390:410] = 0
    assert "do not overlap" in fit(replace(one, kept=kept)).refused


def test_pairs_of_different_exchanges_are_enough() -> None:
    one = sample("noisy")
    kept = np.where(np.arange(1_000) % 2, FORWARD_KEPT, BACKWARD_KEPT).astype(np.uint8)
    lone = replace(one.window, kept=kept)
    found = fit(lone)
    assert found.pairs == 0
    assert abs(bench.errors(one, found)[1]) < 200
    assert "round trips" in fit(lone, "min-rtt").refused


def test_stamps_of_nonsense_are_refused() -> None:
    one = sample("noisy").window
    rows = one.exchanges.copy()
    rows[7, COLUMNS.index("t1_rx")] = np.iinfo(np.int64).min
    assert "weeks" in fit(replace(one, exchanges=rows)).refused
    rows[7, COLUMNS.index("t1_tx")] = np.iinfo(np.int64).max
    assert "further apart" in fit(replace(one, exchanges=rows)).refused


def test_an_unknown_estimator_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no estimator 'magic'; there are auto, quantile"):
        fit(sample("noisy").window, "magic")


def test_rows_in_another_order_give_the_same_line() -> None:
    one = sample("mixed", 5).window
    order = np.random.default_rng(1).permutation(len(one.kept))
    shuffled = fit(replace(one, exchanges=one.exchanges[order], kept=one.kept[order]), "hull")
    assert shuffled == fit(one, "hull")


def test_counts_are_carried_over() -> None:
    found = fit(replace(sample("noisy").window, sent=1_100, lost=60, duplicates=3, filtered=40))
    assert (found.sent, found.lost, found.duplicates, found.filtered, found.pairs) == (1_100, 60, 3, 40, 1_000)


def test_delays_are_half_round_trips() -> None:
    found = fit(sample("exponential").window)
    assert 10_000 <= found.delay_min_ns < 11_000
    assert 14_000 < found.delay_p50_ns < 15_000
    assert 24_000 < found.delay_p99_ns < 32_000


# What "auto" does


@pytest.mark.parametrize(
    ("name", "estimator", "because"),
    [
        ("exponential", "hull", "the floors are alike and sharp"),
        ("mixed", "quantile", "the floors are alike, with a spread of"),
        ("asymmetric-mixed", "min-rtt", "times as wide as the backward one: the quickest round trips"),
        ("asymmetric", "hull", "the forward floor is"),
    ],
)
def test_the_choice_explains_itself(name: str, estimator: str, because: str) -> None:
    found = fit(sample(name, 4).window)
    assert found.estimator == estimator
    assert because in found.why


def test_the_busy_direction_is_named() -> None:
    assert "the backward floor is" in fit(reversed_edge(sample("asymmetric", 4).window)).why


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_default_is_near_the_best_under_every_model(name: str) -> None:
    rows = bench.compare(bench.simulated(40, names=[name]))
    auto = rows[0]
    assert auto["estimator"] == "auto"
    assert auto["within"], {row["estimator"]: row["rms_ns"] for row in rows}
    # The ends are further from the points' middle; nothing may go wrong there either.
    ends = {str(row["estimator"]): row["ends_rms_ns"] for row in rows}
    assert ends["auto"] <= 1.5 * min(ends.values()) + 50, ends


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_default_knows_how_wrong_it_is(name: str) -> None:
    errors, sigmas, slopes, slope_sigmas = [], [], [], []
    for seed in range(60):
        one = sample(name, 1_000 + seed)
        found = fit(one.window)
        errors.append(bench.errors(one, found)[1])
        sigmas.append(found.sigma_ns)
        slopes.append(found.alpha - one.alpha)
        slope_sigmas.append(found.sigma_alpha)
    rms = [float(np.sqrt(np.mean(np.square(each)))) for each in (errors, sigmas, slopes, slope_sigmas)]
    assert 0.5 < rms[1] / rms[0] < 2
    assert 0.5 < rms[3] / rms[2] < 2


def test_a_bending_clock_shows_in_the_residual() -> None:
    one = sample("loopback").window
    rows = one.exchanges.copy()
    place = (rows[:, [0]] - one.begin_ns) / (one.end_ns - one.begin_ns) - 0.5
    rows[:, OTHER_STAMPS] += (2_000 * place**2).astype(np.int64)
    assert fit(replace(one, exchanges=rows)).residual_ns > 10 * fit(one).residual_ns


def test_the_same_window_gives_the_same_bits() -> None:
    one = sample("mixed-early", 9).window
    assert [fit(one, estimator) for estimator in ALL] == [fit(one, estimator) for estimator in ALL]


def test_delays_do_not_grow_with_the_skew() -> None:
    """The other end holds an exchange for milliseconds; at 300 ppm its clock runs off by a microsecond meanwhile."""
    sent = np.arange(200, dtype=np.int64) * 4_000_000
    hold, delay, skew = 3_800_000, 500, 300e-6
    there, answered = sent + delay, sent + delay + hold

    def other(at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return at + np.round(skew * at).astype(np.int64)

    gap = 800_000
    columns = [sent, other(there), sent + gap, other(there + gap)]
    columns += [other(answered), answered + delay, other(answered + gap), answered + delay + gap]
    rows = np.stack(columns, axis=1) + 1
    window = EdgeWindow(1, 2, 0, 1, rows, np.full(200, 3, np.uint8), 200, 0, 0, 0, 0, "kernel")
    found = fit(window)
    assert abs(found.alpha - skew) < 1e-9
    assert abs(found.delay_p50_ns - delay) <= 2
