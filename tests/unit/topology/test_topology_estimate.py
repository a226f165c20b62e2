"""A rate from arrivals: right although the start is wrong, and honest when it does not know."""

import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold.errors import UsageError
from ringfold.topology.estimate import MS, Estimate, RateEstimate

KIB = 1024
MBIT = 1e6 / 8


@dataclass(frozen=True)
class Link:
    """A sender in slow start before a token bucket, and a receiver that gets lumps; in steps of a millisecond."""

    rate: float
    burst: int = 1500
    line: float = 6.25e9
    lump: int = 1
    round_trip_ms: int = 1
    noise: float = 0.0
    seed: int = 0

    def arrivals(self, length_ms: int) -> list[float]:
        """What has arrived after each millisecond."""
        random = Random(self.seed)
        tokens, total, window, factor = float(self.burst), 0.0, 14_480.0, 1.0
        totals = [0.0]
        for ms in range(length_ms):
            if ms % 20 == 0:
                factor = 1 + self.noise * random.uniform(-1, 1)
            tokens = min(self.burst, tokens) + self.rate * factor / 1e3
            sent = min(self.line / 1e3, window / self.round_trip_ms, tokens)
            tokens, total = tokens - sent, total + sent
            window = min(1e12, window * 2 ** (1 / self.round_trip_ms))
            totals.append(total)
        offset = random.uniform(0, self.lump)
        return [max(0.0, math.floor((total + offset) / self.lump) * self.lump) for total in totals]


def measure(link: Link, estimate: RateEstimate | None = None, every_ms: int = 25) -> tuple[Estimate, int]:
    """The estimate, and after how many milliseconds it came."""
    estimate = estimate or RateEstimate(round_trip_ns=link.round_trip_ms * MS)
    random = Random(link.seed)
    totals = link.arrivals(2_000)
    estimate.sample(0, 0)
    ms = 0
    while True:
        ms += every_ms + random.choice((0, 0, 0, 1, 4))
        counted = next((at for at in range(ms, 0, -1) if totals[at] > totals[at - 1]), 0)
        found = estimate.sample(ms * MS, int(totals[ms]), counted * MS)
        if found:
            return found, ms


def replay(series: list[tuple[float, int]]) -> tuple[Estimate, float]:
    """Points one after the other, in milliseconds and bytes; the estimate, and after which point it came."""
    estimate = RateEstimate()
    for ms, total in series:
        found = estimate.sample(int(ms * MS), total)
        if found:
            return found, ms
    return estimate.best(), ms


LINKS = st.builds(
    Link,
    rate=st.floats(math.log10(10 * MBIT), math.log10(50_000 * MBIT)).map(lambda power: 10**power),
    burst=st.sampled_from([1500, 32 * KIB, 256 * KIB, 1024 * KIB]),
    line=st.sampled_from([1.25e8, 1.25e9, 6.25e9]),
    lump=st.sampled_from([1, 1448, 64 * KIB]),
    round_trip_ms=st.sampled_from([1, 5, 20]),
    noise=st.sampled_from([0.0, 0.05, 0.1]),
    seed=st.integers(0, 1_000_000),
)


@given(LINKS)
@settings(max_examples=400, deadline=None)
def test_the_rate_is_within_a_tenth_of_the_truth(link: Link) -> None:
    truth = min(link.rate, link.line)
    found, ms = measure(link)
    assert abs(found.bytes_per_s / truth - 1) <= 0.1, (found, ms)
    assert ms < 1_430


@pytest.mark.parametrize("burst", [256 * KIB, 1024 * KIB])
def test_a_shapers_burst_is_forgotten(burst: int) -> None:
    found, ms = measure(Link(200 * MBIT, burst=burst, lump=64 * KIB))
    assert found.settled
    assert found.bytes_per_s == pytest.approx(200 * MBIT, rel=0.05)
    assert ms <= 500


def test_a_fast_link_settles_early() -> None:
    found, ms = measure(Link(50_000 * MBIT, lump=64 * KIB))
    assert found.settled
    assert ms <= 300


def test_a_slow_link_with_large_lumps_has_more_time_and_is_right() -> None:
    found, ms = measure(Link(10 * MBIT, lump=64 * KIB))
    assert found.settled
    assert 400 < ms < 700
    assert found.bytes_per_s == pytest.approx(10 * MBIT, rel=0.02)


def test_a_lump_counts_from_when_it_came() -> None:
    """Lumps of 64 KiB every 28 ms, seen every 25 ms: by the times of the samples, intervals are 25 ms long."""
    rate = 64 * KIB / 0.028
    for seed in range(40):
        found, _ = measure(Link(rate, lump=64 * KIB, seed=seed))
        assert found.bytes_per_s == pytest.approx(rate, rel=0.03)


def test_a_link_that_still_gets_faster_is_not_settled() -> None:
    """Slow start over a long way: a second is ten round trips, and the end is not in sight."""
    found, ms = measure(Link(6.25e9, round_trip_ms=100))
    assert not found.settled
    assert ms >= 700
    assert "steady" in found.reason


def test_a_link_that_gets_faster_little_by_little_is_not_settled() -> None:
    """From 100 to 200 MB/s in 800 ms: nearly straight at any moment, but every window is faster than the last."""
    estimate = RateEstimate()
    for ms in range(0, 800, 25):
        assert estimate.sample(ms * MS, int(1e5 * ms * (1 + 0.5 * ms / 800))) is None


def test_a_few_pulses_are_no_steady_rate() -> None:
    """1 MB every 50 ms: eight of them may be eight by chance."""
    estimate = RateEstimate()
    for ms in range(0, 400, 25):
        assert estimate.sample(ms * MS, ms // 50 * 1_000_000) is None


def test_the_deadline_can_be_chosen() -> None:
    found, ms = measure(Link(125 * MBIT * 8, round_trip_ms=80), RateEstimate(deadline_ns=1_500 * MS))
    assert found.settled
    assert 800 < ms < 1_500
    assert found.bytes_per_s == pytest.approx(1000 * MBIT, rel=0.1)


def test_silence_is_never_a_steady_rate() -> None:
    estimate = RateEstimate()
    found = [estimate.sample(ms * MS, 0) for ms in range(0, 1_401, 25)]
    assert found[:-1] == [None] * 56
    assert found[-1] == Estimate(0.0, False, "nothing arrived")


def test_a_late_first_byte_does_not_count_as_slowness() -> None:
    estimate = RateEstimate()
    found = None
    for ms in range(0, 801, 25):
        found = estimate.sample(ms * MS, max(0, ms - 300) * 25_000)
        if found:
            break
    assert found is not None
    assert found.settled
    assert found.bytes_per_s == pytest.approx(25e6, rel=0.01)


def test_an_estimate_is_available_before_the_end() -> None:
    estimate = RateEstimate()
    assert estimate.best().bytes_per_s == 0
    for ms in range(0, 101, 25):
        assert estimate.sample(ms * MS, ms * 1_000) is None
    assert not estimate.best().settled
    assert estimate.best().bytes_per_s == pytest.approx(0.5e6), "it may have been a burst"
    for ms in range(125, 226, 25):
        assert estimate.sample(ms * MS, ms * 1_000) is None
    assert estimate.best().bytes_per_s == pytest.approx(0.5e6)


def test_a_line_that_is_only_nearly_straight_ends_it_and_is_not_settled() -> None:
    """Every third point is 8 ms late: half a second shows that it will go on like this."""
    found, ms = replay([(25 * number + 8 * (number % 3 == 0), 25 * number * 10_000) for number in range(1, 60)])
    assert not found.settled
    assert "nearly" in found.reason
    assert found.bytes_per_s == pytest.approx(10e6, rel=0.03)
    assert 500 <= ms < 900


def test_samples_that_go_back_are_refused() -> None:
    estimate = RateEstimate()
    estimate.sample(10, 100)
    with pytest.raises(UsageError, match="go back"):
        estimate.sample(9, 100)
    with pytest.raises(UsageError, match="go back"):
        estimate.sample(11, 99)
    with pytest.raises(UsageError, match="go back"):
        estimate.sample(20, 200, 9)
    with pytest.raises(UsageError, match="go back"):
        estimate.sample(20, 200, 21)


def test_a_deadline_lies_ahead() -> None:
    with pytest.raises(UsageError, match="0 ns"):
        RateEstimate(deadline_ns=0)


def test_a_pace_below_an_earlier_one_is_not_believed() -> None:
    """TCP that lost many packets continues at half the rate, evenly; the link's rate is known by then."""
    estimate = RateEstimate()
    found = None
    for ms in range(0, 1_500, 25):
        total = 10_000 * min(ms, 300) + 5_000 * max(0, ms - 300)
        found = estimate.sample(ms * MS, total)
        if found:
            break
    assert found is not None
    assert found.bytes_per_s == pytest.approx(1e7, rel=0.03)


def test_a_link_that_rises_for_long_is_waited_for() -> None:
    """Steps of 15 % every 150 ms, the last one after 900 ms."""
    estimate, total = RateEstimate(), 0.0
    for ms in range(25, 2_000, 25):
        total += 25_000 * 20 * 1.15 ** min((ms - 25) // 150, 5)
        found = estimate.sample(ms * MS, int(total))
        if found:
            break
    assert found is not None
    assert found.settled
    assert ms > 800
    assert found.bytes_per_s == pytest.approx(20e6 * 1.15**5, rel=0.05)


# A busy machine


def test_a_receiver_that_slept_is_no_reason_to_doubt() -> None:
    """Its kernel went on receiving for it: the next point is where it should be."""
    points = [(ms, ms * 10_000) for ms in [*range(25, 151, 25), *range(260, 600, 25)]]
    found, ms = replay(points)
    assert found.settled
    assert found.bytes_per_s == pytest.approx(10e6, rel=0.01)
    assert ms < 500


@pytest.mark.parametrize("pause_ms", [60, 200, 500])
def test_a_sender_that_slept_costs_time_and_not_the_figure(pause_ms: int) -> None:
    """Nothing comes for a while, then the bucket's burst, then the old rate."""
    before = [(ms, ms * 10_000) for ms in range(25, 201, 25)]
    after = [(ms + pause_ms, ms * 10_000 + 64 * KIB) for ms in range(225, 800, 25)]
    found, ms = replay(before + after)
    assert found.settled
    assert found.bytes_per_s == pytest.approx(10e6, rel=0.06)
    assert ms <= pause_ms + 500


def test_of_settled_stretches_the_fastest_is_the_truest() -> None:
    """The sender loses a few milliseconds now and then, too few to bend the line; in the end it does not."""
    points, late = [], 0.0
    for number in range(1, 60):
        late += 4 if number in (3, 5, 7, 9) else 0
        points.append((27 * number + late, 27 * number * 10_000))
    found, _ = replay(points)
    assert found.settled
    assert found.bytes_per_s == pytest.approx(10e6, rel=0.04)


def test_a_burst_that_was_saved_up_while_tcp_crept_is_not_the_pace() -> None:
    """Seen on a shaped link of 10 Mbit/s (9.56 of payload), whose acknowledgements queued: up to 17 at times."""
    crept = [(7.3, 1448), (41.6, 31856), (90.2, 34752), (116.8, 56467), (167.8, 86875), (222.4, 101355)]
    caught_up = [(286.1, 204153), (331.5, 234561), (386.0, 299716), (447.0, 430026)]
    steady = [(498.4 + 54.54 * number, 495181 + 65155 * number) for number in range(17)]
    found, ms = replay([*crept, *caught_up, *steady])
    assert found.settled
    assert found.bytes_per_s == pytest.approx(9.56 * MBIT, rel=0.01)
    assert ms < 1_000
