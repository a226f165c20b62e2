"""The agent's policy: what shares follow from rates and congestion, and that the loop it closes is calm."""

import statistics

import pytest
from fluid import MS, Fluid
from hypothesis import given
from hypothesis import strategies as st

from ringfold.agent.policy import Decision, FlowInput, PathInput, Policy, PolicySettings
from ringfold.errors import ConfigError

FLOOR = PolicySettings().floor


def settle(policy: Policy, *paths: PathInput, start_ms: int = 0, ms: int = 2_000, flow: int = 0) -> Decision:
    """The decision after these inputs have held for a while."""
    decisions = [
        policy.step((start_ms + now) * MS, [FlowInput(flow, paths)])[0] for now in range(0, ms + 1, max(1, ms // 200))
    ]
    return decisions[-1]


def once(*paths: PathInput) -> Decision:
    return Policy().step(0, [FlowInput(0, paths)])[0]


# The fixed point


def test_equal_congestion_gives_shares_in_proportion_to_rates_at_once() -> None:
    assert once(PathInput(0, rate=200e6), PathInput(0, rate=50e6)).shares == pytest.approx((0.8, 0.2))
    assert once(PathInput(90, rate=3), PathInput(90, rate=2), PathInput(90, rate=5)).shares == pytest.approx(
        (0.3, 0.2, 0.5)
    )


def test_without_rates_paths_are_taken_as_equal() -> None:
    assert once(PathInput(0), PathInput(0), PathInput(0), PathInput(0)).shares == pytest.approx((0.25,) * 4)


def test_the_more_congested_path_gets_less_than_its_rate_is_worth() -> None:
    decision = once(PathInput(100, rate=1), PathInput(20, rate=1))
    assert decision.shares[0] < 0.4
    assert "pressure 100 : 20" in decision.why


def test_bytes_in_a_queue_are_pressure_by_the_time_that_they_take_to_drain() -> None:
    """10 ms at the path's rate are a fifth of a full queue, whatever part of its buffer that is."""
    deep = PathInput(3, rate=10e6, depth_bytes=100_000)
    decision = once(deep, PathInput(3, rate=10e6))
    assert decision.pressures == pytest.approx((40.0, 3.0))
    assert decision.shares[0] < decision.shares[1]
    assert once(PathInput(90, rate=10e6, depth_bytes=100_000), PathInput(3, rate=10e6)).pressures[0] == 90


def test_no_number_of_bytes_is_backpressure_and_without_a_rate_they_say_nothing() -> None:
    decision = once(PathInput(3, rate=1e6, depth_bytes=1 << 40), PathInput(3, rate=1e6))
    assert (decision.pressures[0], decision.backpressure) == (200.0, (False, False))
    assert once(PathInput(3, depth_bytes=1 << 40), PathInput(3)).pressures == (3, 3)


def test_old_news_moves_shares_less_than_fresh_news() -> None:
    fresh = once(PathInput(200, age_ns=0), PathInput(0, age_ns=0))
    old = once(PathInput(200, age_ns=100 * MS), PathInput(0, age_ns=100 * MS))
    assert fresh.shares[0] < old.shares[0] < 0.5


def test_shares_stay_where_they_are_while_a_report_ages() -> None:
    """Reports every 100 ms that say the same: the age goes up and down, the gain must not."""
    policy = Policy()
    shares = [
        policy.step(now * MS, [FlowInput(0, (PathInput(200, now % 100 * MS), PathInput(0, now % 100 * MS)))])[0].shares[
            0
        ]
        for now in range(1_000)
    ]
    assert max(shares[500:]) - min(shares[500:]) < 0.01


def test_a_quiet_path_keeps_the_floor() -> None:
    decision = once(PathInput(0, rate=1e9), PathInput(200, rate=1.0))
    assert decision.shares == pytest.approx((1 - FLOOR, FLOOR))


def test_a_path_that_is_not_measured_any_more_keeps_its_rate() -> None:
    policy = Policy()
    settle(policy, PathInput(0, rate=30.0), PathInput(0, rate=10.0))
    assert settle(policy, PathInput(0), PathInput(0), start_ms=2_001).shares == pytest.approx((0.75, 0.25))


def test_local_congestion_counts_like_the_networks() -> None:
    assert once(PathInput(0, local=150), PathInput(0)).shares == once(PathInput(150), PathInput(0)).shares


# Unknown


def test_unknown_beside_clear_is_not_repelled() -> None:
    assert once(PathInput(0), PathInput(None)).shares == pytest.approx((0.5, 0.5))


def test_unknown_takes_over_from_congested_but_less_than_clear_would() -> None:
    with_unknown = once(PathInput(230), PathInput(None)).shares[1]
    assert 0.5 < with_unknown < once(PathInput(230), PathInput(0)).shares[1]


# Backpressure


def test_backpressure_zeroes_a_path_at_once_and_below_the_floor() -> None:
    policy = Policy()
    settle(policy, PathInput(0), PathInput(0))
    decision = policy.step(2_001 * MS, [FlowInput(0, (PathInput(240), PathInput(0)))])[0]
    assert decision.shares == (0.0, 1.0)
    assert decision.backpressure == (True, False)
    assert "path 0 held by backpressure" in decision.why


def test_one_below_the_threshold_holds_nothing() -> None:
    assert once(PathInput(239), PathInput(0)).backpressure == (False, False)


def test_a_full_local_queue_holds_nothing() -> None:
    decision = once(PathInput(0, local=255), PathInput(0))
    assert decision.backpressure == (False, False)
    assert 0 < decision.shares[0] < 0.3


def test_a_held_path_stays_held_between_the_thresholds() -> None:
    policy = Policy()
    policy.step(0, [FlowInput(0, (PathInput(255), PathInput(0)))])
    assert settle(policy, PathInput(161), PathInput(0), start_ms=1, ms=10_000).shares == (0.0, 1.0)


def test_a_held_path_comes_back_slowly_after_it_was_clear_for_the_hold_time() -> None:
    policy = Policy()
    shares = []
    for now in range(200):
        path = PathInput(255 if now == 0 else 0)
        shares.append(policy.step(now * MS, [FlowInput(0, (path, PathInput(0)))])[0].shares[0])
    assert shares[20] == 0.0
    assert shares[22] == pytest.approx(FLOOR, abs=0.03)
    assert shares[22] < shares[40] < shares[60] < shares[150]
    assert shares[-1] == pytest.approx(0.5, abs=0.02)


def test_a_path_that_is_held_again_waits_longer_and_returns_with_less() -> None:
    def held_for(policy: Policy, start_ms: int) -> int:
        policy.step(start_ms * MS, [FlowInput(0, (PathInput(255), PathInput(0)))])
        for now in range(1, 1_000):
            decision = policy.step((start_ms + now) * MS, [FlowInput(0, (PathInput(0), PathInput(0)))])[0]
            if not decision.backpressure[0]:
                return now
        raise AssertionError("never let go")

    policy = Policy()
    first = held_for(policy, 0)
    second = held_for(policy, 100)
    assert second >= 2 * first - 2
    assert settle(policy, PathInput(0), PathInput(0), start_ms=200, ms=300).shares[0] < 0.45


def test_a_held_path_that_nobody_speaks_of_any_more_is_let_go_after_a_while() -> None:
    policy = Policy()
    policy.step(0, [FlowInput(0, (PathInput(255), PathInput(0)))])
    assert settle(policy, PathInput(None), PathInput(0), start_ms=1, ms=900).backpressure[0]
    assert not settle(policy, PathInput(None), PathInput(0), start_ms=901, ms=200).backpressure[0]


def test_with_every_path_held_all_are_flagged_and_shares_follow_rates() -> None:
    decision = once(PathInput(255, rate=30.0), PathInput(241, rate=10.0))
    assert decision.backpressure == (True, True)
    assert decision.shares == pytest.approx((0.75, 0.25))
    assert "every path" in decision.why


# Several flows


def test_flows_on_a_congested_path_are_given_the_same_part_of_it() -> None:
    """One flow got 9 tenths of the shared path. Congested, both count the mean; clear, each counts its own."""

    def shares(congestion: int) -> list[float]:
        policy = Policy()
        flows = [
            FlowInput(flow, (PathInput(congestion, rate=rate, shared="port"), PathInput(congestion, rate=10.0)))
            for flow, rate in enumerate((18.0, 2.0))
        ]
        return [decision.shares[0] for decision in policy.step(0, flows)]

    assert shares(200) == pytest.approx([0.5, 0.5])
    first, second = shares(0)
    assert first > 0.6 > 0.2 > second


def test_a_flow_with_a_slow_far_end_is_not_evened_out_with_others_of_its_nic() -> None:
    slow = FlowInput(0, (PathInput(200, rate=2.0, shared="eth0"), PathInput(200, rate=10.0)))
    fast = FlowInput(1, (PathInput(0, rate=18.0, shared="eth0"), PathInput(0, rate=10.0)))
    assert Policy().step(0, [slow, fast])[0].shares[0] == pytest.approx(2 / 12)


def test_a_flow_that_was_forgotten_counts_no_more() -> None:
    policy = Policy()
    mine = FlowInput(0, (PathInput(200, rate=18.0, shared="port"), PathInput(200, rate=10.0)))
    policy.step(0, [mine, FlowInput(1, (PathInput(200, rate=2.0, shared="port"), PathInput(200, rate=10.0)))])
    policy.forget(1)
    assert policy.step(MS, [mine])[0].shares[0] == pytest.approx(18 / 28)


def test_a_flow_that_is_not_named_keeps_its_state() -> None:
    policy = Policy()
    policy.step(0, [FlowInput(0, (PathInput(255), PathInput(0)))])
    policy.step(MS, [FlowInput(1, (PathInput(0), PathInput(0)))])
    assert policy.step(2 * MS, [FlowInput(0, (PathInput(200), PathInput(0)))])[0].backpressure[0]


def test_fixed_shares_are_kept_whatever_happens() -> None:
    decision = Policy().step(0, [FlowInput(0, (PathInput(255), PathInput(0)), fixed=(0.7, 0.3))])[0]
    assert (decision.shares, decision.backpressure) == ((0.7, 0.3), (False, False))
    assert decision.why == "fixed: 70.0 : 30.0 %"


def test_fixed_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not the shares of 2 paths"):
        Policy().step(0, [FlowInput(0, (PathInput(), PathInput()), fixed=(0.7, 0.7))])


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="release_at < hold_at"):
        PolicySettings(release_at=250)


# Properties

pressures = st.none() | st.floats(0, 255)
paths = st.builds(
    PathInput,
    congestion=pressures,
    age_ns=st.integers(0, 10**9),
    local=pressures,
    rate=st.none() | st.floats(0, 1e12),
    shared=st.sampled_from((None, "a", "b")),
)
stories = st.integers(2, 6).flatmap(
    lambda count: st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 2), st.lists(paths, min_size=count, max_size=count)),
        min_size=1,
        max_size=15,
    )
)


@given(stories)
def test_shares_sum_to_one_and_stay_in_bounds(story: list[tuple[int, int, list[PathInput]]]) -> None:
    """Whatever comes in: held paths have nothing (unless all are), the others the floor at least."""
    policy, now = Policy(), 0
    for wait_ms, flow, inputs in story:
        now += wait_ms * MS
        decision = policy.step(now, [FlowInput(flow, tuple(inputs))])[0]
        assert sum(decision.shares) == pytest.approx(1)
        assert decision.why
        is_all = all(decision.backpressure)
        for share, held in zip(decision.shares, decision.backpressure, strict=True):
            assert share == 0 if held and not is_all else FLOOR - 1e-9 <= share <= 1


@given(st.lists(paths, min_size=2, max_size=5), st.floats(0, 255), st.floats(0, 255), st.integers(0, 4))
def test_more_congestion_never_gives_a_path_more(inputs: list[PathInput], one: float, other: float, at: int) -> None:
    at %= len(inputs)
    age_ns, rate = inputs[at].age_ns, inputs[at].rate
    low, high = (
        once(*inputs[:at], PathInput(level, age_ns, rate=rate), *inputs[at + 1 :]) for level in sorted((one, other))
    )
    if not all(high.backpressure):
        assert high.shares[at] <= low.shares[at] + 1e-9


# The closed loop


def spread(decisions: list[Decision]) -> float:
    """The largest standard deviation of any path's share."""
    return max(statistics.pstdev(shares) for shares in zip(*(each.shares for each in decisions), strict=True))


@pytest.mark.parametrize(
    "world",
    [
        Fluid((25, 6.25), demand=0.8, delay_ms=1),
        Fluid((25, 6.25), demand=1.2, delay_ms=10, rate_bias=(1, 1.6)),
        Fluid((25, 6.25), demand=1.2, delay_ms=100, rate_bias=(1, 1.6)),
        Fluid((12.5, 12.5), demand=1.2, delay_ms=100, queue_ms=5, cross=lambda path, ms: 5.0 * (path == 0)),
        Fluid((20, 10, 5), demand=1.2, delay_ms=1, period_ms=100, rate_bias=(1, 1.6, 1)),
        Fluid((25, 6.25), demand=1.2, delay_ms=30, shown_age=0, queue_ms=5, rate_bias=(1, 1.6)),
    ],
    ids=["calm", "10 ms", "100 ms", "cross traffic", "rare reports", "hidden delay"],
)
def test_shares_are_steady_whatever_the_age_of_telemetry(world: Fluid) -> None:
    decisions = world.run(2_000)[1_000:]
    assert spread(decisions) < 0.03
    assert not any(any(decision.backpressure) for decision in decisions)


def test_congestion_corrects_rates_that_are_wrong() -> None:
    """The second path is measured 60 % too fast; its queue tells the truth."""
    wrong = Fluid((25, 6.25), demand=0.95, rate_bias=(1, 1.6)).run(1_500)[-1]
    assert 0.2 <= wrong.shares[1] < 0.24
    assert 25 / (25 + 1.6 * 6.25) < 0.72


def test_shares_follow_when_cross_traffic_comes() -> None:
    world = Fluid((20, 20), demand=0.7, cross=lambda path, ms: 15.0 if path == 0 and ms >= 500 else 0.0)
    shares = [decision.shares[0] for decision in world.run(1_200)]
    assert statistics.mean(shares[400:500]) == pytest.approx(0.5, abs=0.02)
    assert statistics.mean(shares[1_100:]) == pytest.approx(0.2, abs=0.03)


def test_the_swing_of_a_loop_that_is_steered_too_hard_lowers_the_gain() -> None:
    """Without the age being declared the full gain is too much for a delay of 100 ms: it must come down by itself."""
    world = Fluid((12.5, 12.5), demand=1.2, delay_ms=100, shown_age=0, queue_ms=50, rates_known=False)
    decisions = world.run(3_000)
    assert decisions[-1].gain < decisions[0].gain / 2


def test_a_policy_that_was_asked_hours_ago_goes_on() -> None:
    """An agent that was stopped, or a flow whose shares were fixed meanwhile."""
    policy, hours_ns = Policy(), 400 * 3_600 * 10**9
    flow = FlowInput(1, (PathInput(congestion=255, rate=1e6), PathInput(congestion=10, rate=1e6)))
    policy.step(0, [flow])
    (decision,) = policy.step(hours_ns, [flow])
    assert decision.shares == (0.0, 1.0)
