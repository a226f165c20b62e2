"""Alignment of records: known clocks are found again, and no order of events is impossible on the timeline."""

from statistics import median

import pytest
from msgspec.structs import replace

from ringfold.observe.align import Alignment, align, compare
from ringfold.observe.orders import Timeline, count
from ringfold.observe.processes import Process, by_key, gather
from ringfold.testing.recorded import PlayedProcess, Scene, play, with_clock
from ringfold.wire.events import ClockSampled, Event

OFFSETS = {0: 7.0, 1: 50.0, 2: -50.0, 3: 20.0}
DRIFTS = {0: 12.0, 1: 30.0, 2: -30.0, 3: 10.0, 4: -5.0}


def gathered(played: list[PlayedProcess]) -> list[Process]:
    return [gather(each.name, each.begun, each.events) for each in played]


def impossible(processes: list[Process], alignment: Alignment) -> tuple[int, int]:
    before, after = compare(processes, alignment)
    return sum(each.impossible for each in before), sum(each.impossible for each in after)


def spread_ns(processes: list[Process], alignment: Alignment) -> int:
    """How far apart the ends of an op are on the timeline, at the median: they are a hop apart in truth."""
    return int(
        median(
            max(alignment.time(index, op.at) for index, op in members)
            - min(alignment.time(index, op.at) for index, op in members)
            for members in by_key(processes).values()
        )
    )


@pytest.mark.parametrize(
    ("error_us", "delay_us", "bytes_", "compute_ms"),
    [(20.0, 100.0, 4 << 20, 5.0), (None, 100.0, 4 << 20, 5.0), (500.0, 5.0, 1_024, 2.0), (None, 5.0, 1_024, 2.0)],
    ids=["global clock", "events alone", "a poor global clock", "short ops, events alone"],
)
def test_wrong_and_drifting_clocks_are_aligned(
    error_us: float | None, delay_us: float, bytes_: int, compute_ms: float
) -> None:
    """Offsets of 50 ms and drifts of 30 ppm give thousands of impossible orders, and none after alignment."""
    scene = Scene(steps=800, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=error_us)
    scene.delay_us, scene.bytes, scene.compute_ms = delay_us, bytes_, compute_ms
    processes = gathered(play(scene))
    alignment = align(processes)
    before, after = impossible(processes, alignment)
    assert before > 3_000
    assert after == 0
    assert alignment.broken_ns == 0
    assert spread_ns(processes, alignment) < 1_000 * (delay_us + 60)


def test_the_check_counts_all_pairs() -> None:
    """The fast count of an op's pairs is the slow one."""
    processes = gathered(play(Scene(steps=40, peers=5, offsets_ms=OFFSETS, drifts_ppm=DRIFTS)))
    time: Timeline = align(processes).unaligned
    pairs = [
        (time(i, op.at), time(j, other.ended.local_ns))
        for members in by_key(processes).values()
        for i, op in members
        for j, other in members
        if i != j
    ]
    [part] = [each for each in count(processes, by_key(processes), time) if each.rule == "part"]
    wrong = [local - end for end, local in pairs if local > end]
    assert (part.checked, part.impossible, part.worst_ns) == (len(pairs), len(wrong), max(wrong))
    assert part.impossible > 0


def exact_time(process: Process, at: int) -> int:
    sampled_at, sample = process.clocks[0]
    return sample.wall_ns + at - sampled_at


@pytest.mark.parametrize("error_us", [20.0, None])
def test_the_true_difference_of_two_clocks_is_within_the_uncertainty(error_us: float | None) -> None:
    wrong = Scene(steps=600, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=error_us, compute_ms=10)
    right = Scene(steps=600, global_error_us=error_us, compute_ms=10)
    processes, exact = gathered(play(wrong)), gathered(play(right))
    alignment = align(processes)
    for number in range(20, 600, 20):
        errors = [alignment.error_ns(index, processes[index].ops[number].at) for index in (1, 2)]
        assert None not in errors
        found = alignment.time(2, processes[2].ops[number].at) - alignment.time(1, processes[1].ops[number].at)
        true = exact_time(exact[2], exact[2].ops[number].at) - exact_time(exact[1], exact[1].ops[number].at)
        assert abs(found - true) <= sum(error for error in errors if error is not None) + 1_000


def test_processes_of_one_boot_share_a_clock() -> None:
    processes = gathered(play(Scene(steps=20, hosts={1: "a", 2: "a", 3: "b", 4: "b"})))
    alignment = align(processes)
    assert alignment.of[1] == alignment.of[2] != alignment.of[3] == alignment.of[4]


def test_a_time_namespace_is_a_clock_of_its_own() -> None:
    """A container may have the boot of its host and another CLOCK_MONOTONIC."""
    played = play(Scene(steps=300, hosts={1: "a", 2: "a"}, global_error_us=None))
    # The wall clock is the host's, whatever the namespace.
    events = [
        Event(replace(moved.stamp, wall=event.stamp.wall), moved.notice)
        for event, moved in zip(played[2].events, with_clock(played[2].events, 40_000_000_000, 0.0), strict=True)
    ]
    shifted = PlayedProcess(played[2].name, played[2].begun, [with_wall_of_host(event) for event in events])
    processes = gathered([*played[:2], shifted, *played[3:]])
    alignment = align(processes)
    assert alignment.of[1] != alignment.of[2]
    assert impossible(processes, alignment)[1] == 0


def with_wall_of_host(event: Event) -> Event:
    if isinstance(event.notice, ClockSampled):
        return Event(event.stamp, replace(event.notice, wall_ns=event.stamp.wall))
    return event


def test_a_record_without_any_clock_is_placed_by_its_ops() -> None:
    played = play(Scene(steps=300, offsets_ms=OFFSETS, drifts_ppm=DRIFTS))
    bare = PlayedProcess(played[3].name, played[3].begun)
    bare.events = [event for event in played[3].events if not event.stamp.wall]
    processes = gathered([*played[:3], bare, *played[4:]])
    alignment = align(processes)
    assert alignment.by(3) == "events"
    assert impossible(processes, alignment)[1] == 0


def test_without_clocks_and_common_ops_the_uncertainty_is_unknown() -> None:
    played = play(Scene(steps=30, global_error_us=None))
    lonely = [PlayedProcess(each.name, each.begun, [e for e in each.events if is_clock(e)]) for each in played[1:3]]
    processes = gathered(lonely)
    alignment = align(processes)
    assert [alignment.by(index) for index in (0, 1)] == ["wall clock", "wall clock"]
    assert alignment.error_ns(0, processes[0].clocks[0][0]) is None


def is_clock(event: Event) -> bool:
    return isinstance(event.notice, ClockSampled)


def test_a_wall_clock_that_steps_back_does_not_bend_the_timeline() -> None:
    """An NTP client sets the clock back by a second in the middle of a run without a global clock."""
    played = play(Scene(steps=600, global_error_us=None, compute_ms=10))
    middle = played[2].events[len(played[2].events) // 2].stamp.at
    stepped = PlayedProcess(played[2].name, played[2].begun)
    for event in played[2].events:
        if isinstance(event.notice, ClockSampled) and event.stamp.at > middle:
            notice = replace(event.notice, wall_ns=event.notice.wall_ns - 1_000_000_000)
            event = Event(replace(event.stamp, wall=notice.wall_ns), notice)
        stepped.events.append(event)
    processes = gathered([*played[:2], stepped, *played[3:]])
    alignment = align(processes)
    assert impossible(processes, alignment)[1] == 0
    times = [alignment.time(2, op.at) for op in processes[2].ops]
    assert times == sorted(times)
