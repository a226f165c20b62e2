"""The global clock: it never goes back or jumps, and its bounds contain the truth."""

import pickle
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.clock.global_clock import ClockModel, ClockSettings, GlobalClock, Instant
from ringfold.errors import ClockNotReady, ConfigError
from ringfold.wire.probing import NodeClock

SECOND = 1_000_000_000
UNIX = 1_700_000_000 * SECOND
WINDOW = 4 * SECOND


def mapping(
    t0: int, shift: int = 0, rate: float = 0.0, low: int = -500, high: int = 500, growth: float = 1e-7
) -> NodeClock:
    """Global time is UNIX + the node's clock, and this mapping is off by `shift` at t0."""
    return NodeClock(1, t0, UNIX + t0 + shift, rate, 20.0, low, high, growth)


def model(*clocks: NodeClock, **more: float) -> ClockModel:
    """A clock that adopted each mapping two seconds after its t0, at the end of the window."""
    made = ClockModel(ClockSettings(**more))  # type: ignore[arg-type]
    for clock in clocks:
        assert made.adopt(clock, clock.t0_ns + 2 * SECOND)
    return made


# Before and at the first round


def test_before_the_first_round_the_error_explains_how_to_get_one() -> None:
    clock = GlobalClock(ClockModel(), lambda: 5)
    assert not clock.is_ready
    assert "not ready" in repr(clock)
    for question in (clock.now, lambda: clock.to_global(3), lambda: clock.uncertainty_ns):
        with pytest.raises(ClockNotReady, match="probe=True"):
            question()
    error = pickle.loads(pickle.dumps(ClockNotReady("why")))
    assert (error.text, str(error)) == ("why", "why")


def test_the_first_mapping_holds_at_once() -> None:
    clock = GlobalClock(model(mapping(WINDOW, 70)), lambda: WINDOW + SECOND)
    assert clock.is_ready
    assert clock.now() == Instant(UNIX + WINDOW + SECOND + 70, *(UNIX + WINDOW + SECOND + 70 + x for x in (-600, 600)))
    assert clock.uncertainty_ns == 600
    assert repr(clock) == "<GlobalClock: +-600 ns>"
    assert clock.newest == mapping(WINDOW, 70)


# now()


def test_a_correction_is_slewed_and_ends_at_the_new_mapping() -> None:
    clock = model(mapping(0), mapping(WINDOW, 2_000), lead_ns=0)
    begin = WINDOW + 2 * SECOND
    assert clock.read(begin).ns == UNIX + begin
    assert clock.read(begin + 2_000_000).ns == UNIX + begin + 2_000_000 + 1_000
    for later in (4_000_000, 4_000_001, SECOND):
        assert clock.read(begin + later).ns == UNIX + begin + later + 2_000


def test_the_bound_of_a_reading_contains_both_the_old_and_the_new() -> None:
    clock = model(mapping(0), mapping(WINDOW, 9_000, low=-100, high=100, growth=0.0), lead_ns=0)
    begin = WINDOW + 2 * SECOND
    now = clock.read(begin)
    assert now == Instant(UNIX + begin, UNIX + begin, UNIX + begin + 9_100)
    assert clock.read(begin + 18_000_000).error_ns == 100


def test_a_mapping_takes_over_a_little_later_for_all_threads_alike() -> None:
    clock = model(mapping(0))
    at = WINDOW + 2 * SECOND
    before = [clock.read(at + x) for x in range(0, 1_000_000, 50_000)]
    clock.adopt(mapping(WINDOW, 50_000), at)
    assert [clock.read(at + x) for x in range(0, 1_000_000, 50_000)] == before
    assert clock.read(at + 1_000_000 + 1_000_000).ns == UNIX + at + 2_000_000 + 500


def test_a_mapping_that_is_not_newer_is_refused() -> None:
    clock = model(mapping(0), mapping(WINDOW, 10))
    assert not clock.adopt(mapping(WINDOW, 99), 3 * WINDOW)
    assert not clock.adopt(mapping(SECOND, 99), 3 * WINDOW)
    assert clock.newest == mapping(WINDOW, 10)


def test_a_mapping_of_a_window_that_is_not_over_is_refused_and_blocks_nothing() -> None:
    clock = model(mapping(0))
    assert not clock.adopt(mapping(1_000 * WINDOW), 2 * WINDOW)
    assert not clock.adopt(mapping(WINDOW, rate=float("nan")), 2 * WINDOW)
    assert clock.adopt(mapping(WINDOW), 2 * WINDOW)


steps = st.lists(
    st.tuples(
        st.integers(1, 10 * SECOND),  # until the next round's instant
        st.integers(0, 3 * SECOND),  # until it is adopted
        st.integers(-(10**6), 10**6) | st.integers(-(10**10), 10**10),  # by how much the mapping is off
        st.floats(-3e-5, 3e-5),  # its rate
    ),
    min_size=1,
    max_size=6,
)


@given(steps, st.lists(st.integers(0, 5 * SECOND) | st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 10**6))
def test_now_never_goes_back_and_never_jumps(
    rounds: list[tuple[int, int, int, float]], waits: list[int], lead: int
) -> None:
    """Whatever mappings come, time passes at the node's rate, give or take drift and slew, between any two readings."""
    clock = ClockModel(ClockSettings(lead_ns=lead))
    t0 = at = 10**15
    readings: list[tuple[int, int]] = []
    pending = list(waits)
    for until, delay, shift, rate in rounds:
        t0 += until
        target = max(at, t0 + delay)
        while clock.newest and pending and at + pending[0] <= target:
            at += pending.pop(0)
            readings.append((at, clock.read(at).ns))
        at = max(at, target)
        clock.adopt(mapping(t0, shift, rate), at)
        around = sorted({at, at + 1, at + lead, at + lead + 1})
        readings += [(c, clock.read(c).ns) for c in around]
        at = around[-1]
    for wait in pending:
        at += wait
        readings.append((at, clock.read(at).ns))
    for (c, g), (later_c, later_g) in pairwise(readings):
        passed = later_c - c
        assert later_g >= g
        assert abs((later_g - g) - passed) <= passed * (5e-4 + 3e-5) + 1
        if passed >= 2:
            assert later_g > g


@given(st.integers(0, 10**6), st.integers(2, 8))
@settings(max_examples=60)
def test_bounds_contain_the_truth_also_while_slewing(seed: int, count: int) -> None:
    """The node drifts against global time; every mapping is off by less than its bound, and so is every answer."""
    random = Random(seed)
    drift, offset = Fraction(random.randint(-30_000, 30_000), 10**9), random.randint(-(10**17), 10**17)

    def true_global(c: int) -> Fraction:
        return UNIX + (c - offset) * (1 + drift)

    clock = ClockModel()
    at = offset
    for number in range(count):
        t0 = offset + number * WINDOW
        wrong, wrong_rate = random.randint(-20_000, 20_000), random.uniform(-3e-7, 3e-7)
        low, high = -wrong - random.randint(0, 3_000) - 1, -wrong + random.randint(0, 3_000) + 1
        rate = float(drift) + wrong_rate
        clock.adopt(
            NodeClock(1, t0, round(true_global(t0)) + wrong, rate, 1.0, low, high, abs(wrong_rate) + 1e-12),
            t0 + 2 * SECOND,
        )
        at = t0 + 2 * SECOND
        for _ in range(8):
            at += random.choice([1, 1_000, 300_000, 20_000_000, 400_000_000])
            now = clock.read(at)
            assert now.earliest <= true_global(at) <= now.latest
            assert now.earliest <= now.ns <= now.latest
    for _ in range(40):
        c = random.randint(offset - 3 * WINDOW, at + 3 * WINDOW)
        then = clock.to_global(c)
        assert then.earliest <= true_global(c) <= then.latest
        assert then.earliest <= then.ns <= then.latest


# to_global()


def test_at_the_instant_of_a_round_its_mapping_answers_unslewed() -> None:
    clock = model(mapping(0), mapping(WINDOW, 2_000), mapping(2 * WINDOW, -3_000))
    for number, shift in enumerate([0, 2_000, -3_000]):
        assert clock.to_global(number * WINDOW) == Instant(
            UNIX + number * WINDOW + shift,
            UNIX + number * WINDOW + shift - 500,
            UNIX + number * WINDOW + shift + 500,
        )


def test_between_two_rounds_their_mappings_are_blended() -> None:
    clock = model(mapping(0, 0, growth=0.0), mapping(WINDOW, 2_000, low=-100, high=100, growth=0.0))
    quarter = clock.to_global(WINDOW // 4)
    assert quarter.ns == UNIX + WINDOW // 4 + 500
    assert quarter.latest - quarter.ns == 400


def test_blending_uses_the_rates_of_both() -> None:
    """A rate that is off by 1 ppm is off by 2 us after two seconds, and half of that in the blend."""
    clock = model(mapping(0, rate=1e-6), mapping(WINDOW))
    assert clock.to_global(WINDOW // 2).ns == UNIX + WINDOW // 2 + 1_000


def test_outside_the_rounds_the_nearest_one_is_extended_and_the_bound_grows() -> None:
    clock = model(mapping(0), mapping(WINDOW))
    assert clock.to_global(-10 * SECOND).error_ns == 500 + 1_000
    assert clock.to_global(WINDOW + 100 * SECOND).error_ns == 500 + 10_000


def test_the_bound_of_now_grows_when_rounds_stop() -> None:
    clock = model(mapping(0), mapping(WINDOW))
    assert [clock.read(WINDOW + wait * SECOND).error_ns for wait in (5, 50, 500)] == [1_000, 5_500, 50_500]


@given(steps, st.lists(st.integers(0, 70 * SECOND), min_size=2, max_size=40))
def test_the_past_never_runs_backwards_unless_mappings_are_absurd(
    rounds: list[tuple[int, int, int, float]], places: list[int]
) -> None:
    """Corrections below a tenth of the time between two rounds keep the order of events."""
    clock, t0 = ClockModel(), 0
    for until, _, shift, rate in rounds:
        t0 += until
        limit = until // 20
        clock.adopt(mapping(t0, max(-limit, min(limit, shift)) if t0 > until else 0, rate), t0)
        if abs(shift) > limit:
            break
    times = [clock.to_global(place).ns for place in sorted(places)]
    assert times == sorted(times)


def test_history_is_bounded_and_what_fell_out_is_extended_backwards() -> None:
    clock = model(*(mapping(number * WINDOW, number) for number in range(5)), rounds=3)
    assert clock.to_global(2 * WINDOW).error_ns == 500
    assert clock.to_global(0).error_ns > 500
    assert clock.to_global(0).ns == UNIX + 2


def test_huge_clocks_lose_no_nanosecond() -> None:
    base = 4 * 10**17 + 1
    clock = ClockModel()
    clock.adopt(NodeClock(1, base, UNIX + 3, 2.5e-5, 1.0, -1, 1, 0.0), base)
    assert clock.to_global(base + 40_000).ns == UNIX + 3 + 40_000 + 1
    assert clock.read(base + 1).ns == UNIX + 4


@pytest.mark.parametrize("wrong", [{"max_slew": 0.0}, {"max_slew": 0.5}, {"rounds": 1}, {"lead_ns": -1}])
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ClockSettings(**wrong)  # type: ignore[arg-type]
