"""What a program sees of a node: callbacks in a thread of their own, and waiting for windows."""

import threading

import pytest

from ringfold.errors import DeadlineExceeded, MasterUnreachable, UsageError
from ringfold.probe.nodes.callbacks import MAX_PENDING, ProbeEvents, ProbeWindow
from ringfold.wire.probing import NodeClock, RoundId, RoundSummary

WAIT_S = 20.0


def window(number: int) -> ProbeWindow:
    return ProbeWindow(number, 0, 1, 0, [], [])


def clock(t0_ns: int = 1) -> NodeClock:
    return NodeClock(1, t0_ns, 0, 0.0, 0.0, 0, 0, 0.0)


def summary(sequence: int) -> RoundSummary:
    return RoundSummary(RoundId(1, sequence), "master", "", 0, 1, 1, [], [])


class Seen:
    """What callbacks were called with, and a wait for it."""

    def __init__(self) -> None:
        self.items: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, item: object) -> None:
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()

    def wait(self, count: int) -> list[object]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.items) >= count, WAIT_S), self.items
            return list(self.items)


def nothing() -> None:
    return None


def test_each_callback_gets_its_own_kind_of_event_in_order() -> None:
    events, windows, clocks = ProbeEvents(nothing), Seen(), Seen()
    events.on_window(windows)
    events.on_clock(clocks)
    for number in (1, 2, 3):
        events.publish(window(number))
        events.publish(clock(number))
    assert [each.number for each in windows.wait(3)] == [1, 2, 3]  # type: ignore[attr-defined]
    assert [each.t0_ns for each in clocks.wait(3)] == [1, 2, 3]  # type: ignore[attr-defined]
    events.close()


def test_a_round_is_fetched_after_a_clock_and_reported_once() -> None:
    rounds = [summary(1), summary(1), summary(2)]
    events, seen, clocks = ProbeEvents(lambda: rounds.pop(0)), Seen(), Seen()
    events.on_round(seen)
    events.on_clock(clocks)
    for number in (1, 2, 3):
        events.publish(clock(number))
    assert [each.round.sequence for each in seen.wait(2)] == [1, 2]  # type: ignore[attr-defined]
    assert len(clocks.wait(3)) == 3
    assert not rounds
    events.close()


def test_a_master_that_is_away_costs_one_round_only(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[RoundSummary | None] = [None, summary(7)]

    def fetch() -> RoundSummary | None:
        if (answer := answers.pop(0)) is None:
            raise MasterUnreachable("127.0.0.1:1", "nobody listens")
        return answer

    events, seen = ProbeEvents(fetch), Seen()
    events.on_round(seen)
    events.publish(clock(1))
    events.publish(clock(2))
    assert [each.round.sequence for each in seen.wait(1)] == [7]  # type: ignore[attr-defined]
    assert "nobody listens" in caplog.text
    events.close()


def test_a_callback_that_fails_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    events, seen = ProbeEvents(nothing), Seen()
    events.on_window(lambda _: 1 // 0)
    events.on_window(seen)
    events.publish(window(1))
    events.publish(window(2))
    assert len(seen.wait(2)) == 2
    assert "ZeroDivisionError" in caplog.text
    events.close()


def test_a_slow_callback_misses_the_oldest_events_and_stops_nobody() -> None:
    events, entered, release, seen = ProbeEvents(nothing), threading.Event(), threading.Event(), Seen()

    def slow(one: ProbeWindow) -> None:
        entered.set()
        release.wait(WAIT_S)
        seen(one.number)

    events.on_window(slow)
    events.publish(window(0))
    assert entered.wait(WAIT_S)
    for number in range(1, MAX_PENDING + 11):
        events.publish(window(number))  # returns at once
    release.set()
    assert seen.wait(MAX_PENDING + 1) == [0, *range(11, MAX_PENDING + 11)]
    assert events.dropped == 10
    events.close()


def test_windows_are_those_that_end_after_the_call() -> None:
    events = ProbeEvents(nothing)
    events.publish(window(1))
    windows = events.windows(WAIT_S)
    events.publish(window(2))
    events.publish(window(3))
    assert [next(windows).number, next(windows).number] == [2, 3]


def test_an_iterator_that_fell_behind_continues_with_the_oldest_that_is_kept() -> None:
    events = ProbeEvents(nothing)
    windows = events.windows(WAIT_S)
    for number in range(MAX_PENDING + 5):
        events.publish(window(number))
    assert next(windows).number == 5


def test_a_wait_for_a_window_has_a_deadline_and_ends_with_the_prober() -> None:
    events = ProbeEvents(nothing)
    with pytest.raises(DeadlineExceeded, match=r"no window ended within 0\.01 s"):
        next(events.windows(0.01))
    windows = events.windows(WAIT_S)
    threading.Timer(0.01, events.close).start()
    with pytest.raises(UsageError, match="closed"):
        next(windows)


def test_callbacks_are_inherited_by_the_node_that_replaces_this_one() -> None:
    old, new, seen = ProbeEvents(nothing), ProbeEvents(lambda: summary(1)), Seen()
    old.on_window(seen)
    old.on_clock(seen)
    old.on_round(seen)
    old.close()
    new.inherit(old)
    new.publish(window(1))
    new.publish(clock())
    assert len(seen.wait(3)) == 3
    new.close()
