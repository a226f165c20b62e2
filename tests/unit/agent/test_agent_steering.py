"""When the agent looks at a pair, what it knows then, and when it has nothing to say."""

from itertools import count

from ringfold.agent.adapters import Observation
from ringfold.agent.registry import Pair
from ringfold.agent.steering import (
    MAX_DUE_PER_CALL,
    MAX_INTERVAL_NS,
    MAX_URGENT_PER_CALL,
    POLL_INTERVAL_NS,
    Advice,
    Steering,
)
from ringfold.wire.agent import Measured
from ringfold.wire.telemetry import Congestion, Packet, Refusal, address_number, encode, prefix_number

PATHS = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))
SECOND = 1_000_000_000
_sequences = count(1)


def pair(slot: int = 0, paths: tuple[tuple[str, str], ...] = PATHS) -> Pair:
    return Pair((paths[0][0], paths[0][1], paths), slot, 1)


def packet(now_ns: int, path: int, level: int, ends: tuple[str, str] | None = None) -> bytes:
    (source, source_bits), (target, target_bits) = map(prefix_number, ends or PATHS[path])
    body = Congestion(source, target, path, level, 0, source_bits, target_bits)
    return encode(Packet(body, next(_sequences), now_ns))


def say(steering: Steering, now_ns: int, path: int, level: int, ends: tuple[str, str] | None = None) -> None:
    steering.datagram(now_ns, now_ns, packet(now_ns, path, level, ends), "127.0.0.1")


def all_advice(steering: Steering, begin_ns: int, end_ns: int) -> list[Advice]:
    """Everything that is said by the time, if the shell is on time."""
    found = steering.decide_urgent(begin_ns)
    while (wake_ns := steering.wake_ns()) is not None and wake_ns <= end_ns:
        found += steering.decide(max(begin_ns, wake_ns))
    return found


def test_backpressure_is_decided_at_once() -> None:
    steering = Steering()
    steering.added(pair())
    say(steering, SECOND, 0, 255)
    (advice,) = steering.decide_urgent(SECOND)
    assert (advice.shares, advice.backpressure) == ((0.0, 1.0), (True, False))
    assert "backpressure" in advice.why


def forwards(steering: Steering, now_ns: int, path: int, level: int, ends: tuple[str, str]) -> list[str]:
    """Where a report is forwarded to, and that it names one pair."""
    found = steering.datagram(now_ns, now_ns, packet(now_ns, path, level, ends), "127.0.0.1")
    for each in found:
        report = each.report
        assert (report.source, report.path, report.congestion) == (address_number(each.address), path, level)
        assert report.source_bits == report.destination_bits == 128
    return [each.address for each in found]


def test_a_report_about_traffic_to_this_host_is_forwarded_to_its_sender() -> None:
    steering = Steering()
    steering.added(pair())
    assert forwards(steering, SECOND, 1, 200, PATHS[1][::-1]) == ["10.1.0.2"]
    assert not steering.is_urgent
    assert steering.counts["telemetry forwarded"] == 1
    assert steering.counts["telemetry for senders to here"] == 1


def test_the_port_towards_this_host_is_forwarded_to_every_sender_once() -> None:
    steering = Steering()
    steering.added(pair(0))
    steering.added(pair(1))  # the same ends: another flow
    steering.added(pair(2, (("10.0.0.1", "10.0.0.7"), ("10.1.0.1", "10.1.0.7"))))
    assert forwards(steering, SECOND, 0, 255, ("any", "10.0.0.1")) == ["10.0.0.2", "10.0.0.7"]
    assert forwards(steering, SECOND, 0, 255, ("10.0.0.0/29", "10.0.0.0/31")) == []  # a moment later, and nothing new


def test_reports_are_forwarded_at_an_interval_but_backpressure_at_once() -> None:
    steering, back = Steering(), PATHS[1][::-1]
    steering.added(pair())
    assert forwards(steering, SECOND, 1, 100, back)
    assert not forwards(steering, SECOND + 1_000, 1, 120, back)
    assert forwards(steering, SECOND + 2_000, 1, 255, back)
    assert forwards(steering, SECOND + 3_000, 1, 0, back)
    assert steering.counts["telemetry forwards left out"] == 1
    assert forwards(steering, SECOND + 3_000 + POLL_INTERVAL_NS, 1, 10, back)


def test_what_is_about_nobody_here_is_counted_as_not_for_us() -> None:
    steering = Steering()
    steering.added(pair())
    assert not forwards(steering, SECOND, 0, 255, ("10.0.0.9", "10.0.0.8"))
    assert not forwards(steering, SECOND, 2, 255, PATHS[0][::-1])  # a path that the flow does not have
    assert not forwards(steering, SECOND, 0, 255, ("10.0.0.2", "any"))  # the port that the other host sends into
    assert steering.counts["telemetry not for us"] == 3
    say(steering, SECOND, 0, 255)
    assert steering.counts["telemetry for flows from here"] == 1


def test_what_steers_a_flow_from_here_is_forwarded_to_nobody() -> None:
    steering = Steering()
    steering.added(pair(0))
    steering.added(pair(1, tuple((there, here) for here, there in PATHS)))  # both ends on this host
    assert forwards(steering, SECOND, 0, 255, PATHS[0]) == []
    assert forwards(steering, SECOND, 0, 255, ("any", "any")) == []


def test_a_stream_of_news_is_looked_at_once_a_poll() -> None:
    steering = Steering()
    steering.added(pair())
    say(steering, SECOND, 0, 100)
    steering.decide_urgent(SECOND)
    for number in range(1, 10):
        say(steering, SECOND + number * 1_000, 0, 100 + number)
    assert not steering.is_urgent
    wake_ns = steering.wake_ns()
    assert wake_ns is not None
    assert SECOND < wake_ns <= SECOND + 2 * POLL_INTERVAL_NS


def test_a_pair_at_rest_is_looked_at_seldom_and_one_without_news_never() -> None:
    steering = Steering()
    steering.added(pair())
    assert steering.wake_ns() is None
    steering.measured(SECOND, pair(), 1, Measured(1, (25_000_000, 6_000_000)))
    all_advice(steering, SECOND, SECOND + 200_000_000)
    wake_ns = steering.wake_ns()
    assert wake_ns is not None
    assert wake_ns > SECOND + 200_000_000
    assert wake_ns <= SECOND + 200_000_000 + MAX_INTERVAL_NS + POLL_INTERVAL_NS


def test_shares_follow_measured_rates() -> None:
    steering = Steering()
    steering.added(pair())
    steering.measured(SECOND, pair(), 1, Measured(1, (20_000_000, 5_000_000)))
    assert [round(share, 2) for share in all_advice(steering, SECOND, SECOND)[-1].shares] == [0.8, 0.2]


def test_rates_of_all_flows_of_a_pair_count_until_they_are_old() -> None:
    steering = Steering()
    steering.added(pair())
    steering.measured(SECOND, pair(), 1, Measured(1, (20_000_000, 0)))
    steering.measured(8 * SECOND, pair(), 2, Measured(2, (0, 20_000_000)))
    assert [round(share, 2) for share in all_advice(steering, 8 * SECOND, 8 * SECOND)[-1].shares] == [0.5, 0.5]
    steering.measured(14 * SECOND, pair(), 2, Measured(2, (5_000_000, 20_000_000)))
    assert all_advice(steering, 14 * SECOND, 16 * SECOND)[-1].shares[0] < 0.4


def test_round_trips_steer_nothing_but_are_there_to_be_looked_at() -> None:
    """A sender fills the queue of its path itself, and rates say already what it gets there."""
    steering = Steering()
    steering.added(pair())
    report = Measured(1, (10_000_000, 10_000_000), (41_000, 1_000), (1_000, 1_000))
    steering.measured(SECOND, pair(), 1, report)
    assert all_advice(steering, SECOND, SECOND)[-1].shares == (0.5, 0.5)
    assert steering.last_report(0, 1) == report
    assert steering.last_report(0, 2) is None
    assert steering.last_report(1, 1) is None


def test_a_report_of_round_trips_alone_takes_back_no_rates() -> None:
    steering = Steering()
    steering.added(pair())
    steering.measured(SECOND, pair(), 1, Measured(1, (20_000_000, 5_000_000)))
    all_advice(steering, SECOND, SECOND)
    steering.measured(2 * SECOND, pair(), 1, Measured(1, (0, 0), (1_000, 2_000), (500, 500)))
    say(steering, 2 * SECOND, 0, 0)
    say(steering, 2 * SECOND, 1, 255)
    advice = steering.decide_urgent(2 * SECOND)[-1]
    assert "rates 160 : 40 Mbit/s" in advice.why


def test_clear_paths_of_unknown_rates_get_no_advice() -> None:
    steering = Steering()
    steering.added(pair())
    for path in (0, 1):
        say(steering, SECOND, path, 0)
    assert all_advice(steering, SECOND, SECOND + POLL_INTERVAL_NS) == []


def test_advice_is_withdrawn_when_everything_is_stale() -> None:
    steering = Steering()
    steering.added(pair())
    say(steering, SECOND, 0, 200)
    found = all_advice(steering, SECOND, 4 * SECOND)
    assert found[0].shares
    assert not found[-1].shares
    assert steering.wake_ns() is None


def test_a_packet_is_about_the_pairs_whose_path_it_names() -> None:
    steering = Steering()
    other = (("10.0.0.1", "10.0.0.3"), ("10.1.0.1", "10.1.0.3"))
    steering.added(pair(0))
    steering.added(pair(1, other))
    say(steering, SECOND, 1, 255)
    assert [advice.pair.slot for advice in steering.decide_urgent(SECOND)] == [0]


def test_a_packet_with_a_prefix_is_about_every_pair_in_it() -> None:
    steering = Steering()
    steering.added(pair(0))
    steering.added(pair(1, (("10.0.0.1", "10.0.0.3"), ("10.1.0.1", "10.1.0.3"))))
    steering.added(pair(2, (("10.0.0.1", "10.9.0.3"), ("10.1.0.1", "10.9.1.3"))))
    say(steering, SECOND, 1, 255, ("any", "10.1.0.0/24"))
    assert sorted(advice.pair.slot for advice in steering.decide_urgent(SECOND)) == [0, 1]


def test_a_pair_that_comes_later_finds_what_is_known() -> None:
    steering = Steering()
    steering.added(pair(0))
    say(steering, SECOND, 0, 255)
    steering.decide_urgent(SECOND)
    steering.added(pair(5))
    assert 5 in {advice.pair.slot for advice in all_advice(steering, SECOND, SECOND + POLL_INTERVAL_NS)}


def test_a_full_queue_of_the_own_interface_moves_bytes_away() -> None:
    steering = Steering()
    steering.added(pair())
    steering.measured(SECOND, pair(), 1, Measured(1, (10_000_000, 10_000_000)))
    before = all_advice(steering, SECOND, SECOND)[-1].shares
    steering.local(2 * SECOND, {address_number("10.0.0.1"): 230.0})
    after = all_advice(steering, 2 * SECOND, 2 * SECOND + 50 * POLL_INTERVAL_NS)[-1].shares
    assert after[0] < before[0] - 0.1


def test_what_was_fixed_by_hand_stands_against_telemetry() -> None:
    steering = Steering()
    steering.added(pair())
    advice = steering.fix(pair(), (0.3, 0.7))
    assert advice is not None
    assert advice.shares == (0.3, 0.7)
    say(steering, SECOND, 1, 255)
    assert all_advice(steering, SECOND, SECOND + POLL_INTERVAL_NS) == []
    assert steering.fix(pair(), ()) is None
    assert all_advice(steering, SECOND, SECOND + POLL_INTERVAL_NS)[-1].backpressure == (False, True)


def test_a_pair_that_went_is_not_looked_at() -> None:
    steering = Steering()
    steering.added(pair())
    say(steering, SECOND, 0, 255)
    steering.removed(pair())
    assert (steering.decide_urgent(SECOND), steering.wake_ns()) == ([], None)


def test_a_feed_counts_as_much_as_a_packet() -> None:
    steering = Steering()
    steering.added(pair())
    source, target = map(address_number, PATHS[0])
    steering.observed(SECOND, SECOND, Observation(Congestion(source, target, 0, 255)))
    steering.observed(SECOND, SECOND, Refusal("feed", "nonsense"))
    assert steering.decide_urgent(SECOND)[0].backpressure == (True, False)
    assert steering.refused == {"telemetry feed": 1}


def test_an_interface_that_is_gone_presses_nobody() -> None:
    steering, one = Steering(), pair()
    steering.added(one)
    steering.local(SECOND, {address_number("10.0.0.1"): 255.0})
    steering.measured(SECOND, one, 1, Measured(1, (1_000, 1_000)))
    pressed = all_advice(steering, SECOND, 2 * SECOND)[-1].shares[0]
    steering.local(2 * SECOND, {})
    assert pressed < 0.3 < all_advice(steering, 2 * SECOND, 3 * SECOND)[-1].shares[0] == 0.5


def test_a_busy_interface_of_many_pairs_is_urgent_for_none() -> None:
    steering = Steering()
    for slot in range(100):
        steering.added(pair(slot))
    steering.local(SECOND, {address_number("10.0.0.1"): 255.0})
    assert not steering.is_urgent
    assert steering.wake_ns() == SECOND


def test_backpressure_on_many_pairs_is_decided_in_pieces() -> None:
    steering = Steering()
    for slot in range(MAX_URGENT_PER_CALL + 10):
        steering.added(pair(slot))
    say(steering, SECOND, 0, 255, ("any", "10.0.0.0/24"))
    pieces = []
    while steering.is_urgent:
        pieces.append(len(steering.decide_urgent(SECOND)))
    assert pieces == [MAX_URGENT_PER_CALL, 10]


def test_other_news_about_many_pairs_is_not_urgent() -> None:
    steering = Steering()
    for slot in range(MAX_DUE_PER_CALL + 1):
        steering.added(pair(slot))
    say(steering, SECOND, 0, 100, ("any", "10.0.0.2"))
    assert (steering.is_urgent, steering.wake_ns()) == (False, SECOND)
    assert len(all_advice(steering, SECOND, SECOND)) == MAX_DUE_PER_CALL + 1
