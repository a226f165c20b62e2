"""Alignment of records: known clocks are found again, and no order of events is impossible on the timeline."""

import random
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from ringfold.observe.align import Alignment, align, compare
from ringfold.observe.orders import Timeline, count
from ringfold.observe.processes import Process, by_key, gather
from ringfold.testing.recorded import PlayedProcess, Scene, play, with_clock
from ringfold.wire.events import ClockSampled, Event, OpEnded

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


FAST: dict[str, Any] = {"delay_us": 3.0, "bytes": 256, "compute_ms": 0.3}
"""Ops in shared memory: 2,000 a second, and some microseconds between the orders of one."""


@pytest.mark.parametrize("steps", [40, 300, 1_500])
@pytest.mark.parametrize("seed", range(4))
def test_a_fast_run_of_any_length_is_aligned(steps: int, seed: int) -> None:
    """Drift in a second is many times what such an op leaves to the clocks."""
    scene = Scene(steps=steps, seed=seed, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=None, **FAST)
    processes = gathered(play(scene))
    alignment = align(processes)
    before, after = impossible(processes, alignment)
    assert before > 4 * steps
    assert after == 0
    assert alignment.broken_ns == 0


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


@pytest.mark.parametrize(
    "kind",
    [
        {"global_error_us": 20.0, "compute_ms": 10.0},
        {"global_error_us": None, "compute_ms": 10.0},
        {"global_error_us": None, **FAST},
        {"global_error_us": None, "steps": 100, **FAST},
    ],
    ids=["global clock", "events alone", "fast", "fast and short"],
)
def test_the_true_difference_of_two_clocks_is_within_the_uncertainty(kind: dict[str, Any]) -> None:
    about = {"steps": 600} | kind
    wrong, right = Scene(offsets_ms=OFFSETS, drifts_ppm=DRIFTS, **about), Scene(**about)
    processes, exact = gathered(play(wrong)), gathered(play(right))
    alignment = align(processes)
    for number in range(20, about["steps"], 20):
        errors = [alignment.error_ns(index, processes[index].ops[number].at) for index in (1, 2)]
        assert None not in errors
        found = alignment.time(2, processes[2].ops[number].at) - alignment.time(1, processes[1].ops[number].at)
        true = exact_time(exact[2], exact[2].ops[number].at) - exact_time(exact[1], exact[1].ops[number].at)
        # Clocks are played in whole nanoseconds.
        assert abs(found - true) <= sum(error for error in errors if error is not None) + 10


def with_ops(played: PlayedProcess, change: Callable[[OpEnded], OpEnded | None]) -> PlayedProcess:
    """The same process with other ops, or without some of them."""
    changed = PlayedProcess(played.name, played.begun)
    for event in played.events:
        notice = change(event.notice) if isinstance(event.notice, OpEnded) else event.notice
        if notice is not None:
            changed.events.append(Event(event.stamp, notice))
    return changed


def test_members_that_stay_are_aligned_after_the_first_has_left() -> None:
    """Of four peers, two leave in the middle, one of them the one that all others were aligned to."""
    played = play(Scene(steps=900, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=None, **FAST))
    half = [with_ops(each, lambda op: op if op.sequence < 600 else None) for each in played[1:3]]
    processes = gathered([played[0], *half, *played[3:]])
    alignment = align(processes)
    before, after = impossible(processes, alignment)
    assert before > 1_000
    assert after == 0


def test_two_groups_are_aligned_each_in_itself() -> None:
    played = play(Scene(steps=400, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=None, **FAST))
    apart = [with_ops(each, lambda op: replace(op, tag=1)) for each in played[3:]]
    processes = gathered([*played[1:3], *apart])
    alignment = align(processes)
    before, after = impossible(processes, alignment)
    assert before > 400
    assert after == 0
    # Nothing says how the second group is to the first.
    middle = [process.ops[200].at for process in processes]
    known = [alignment.error_ns(index, at) is not None for index, at in enumerate(middle)]
    assert known == [True, True, False, False]


def test_ops_without_parts_are_aligned_by_their_calls() -> None:
    """Small ops travel inside the agreement: their records have a call and an end."""
    played = play(Scene(steps=400, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=None, **FAST))
    nothing = {"out_first_ns": 0, "out_last_ns": 0, "in_first_ns": 0, "in_last_ns": 0, "local_ns": 0}
    processes = gathered([with_ops(each, lambda op: replace(op, **nothing)) for each in played])
    before, after = impossible(processes, align(processes))
    assert before > 1_000
    assert after == 0


def test_a_payload_is_not_before_all_that_were_sent() -> None:
    """With three members, nobody knows whose payload it was; some of them was sent before."""
    played = play(Scene(peers=3, steps=400, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=None, **FAST))

    def delayed(op: OpEnded) -> OpEnded:
        # Parts end a millisecond earlier, as far as is recorded: payloads are all that binds closely.
        return replace(op, local_ns=op.called_ns, last_peer=0)

    processes = gathered([with_ops(each, delayed) for each in played])
    before, after = compare(processes, align(processes))
    assert {each.rule: each.impossible > 0 for each in before}["payload"]
    assert sum(each.impossible for each in after) == 0


def test_orders_outweigh_a_clock_that_is_wrong_beyond_its_bound() -> None:
    """A host's clock runs fast for a while, and its samples of global time, two seconds apart, do not have it."""
    played = play(Scene(steps=900, offsets_ms=OFFSETS, global_error_us=1.0, **(FAST | {"compute_ms": 5.0})))
    first = played[2].events[0].stamp.at

    def ahead_ns(at: int) -> int:
        return min(max(at - first - 1_500_000_000, 0), 1_000_000_000) // 10_000

    played[2].events = [
        moved for event in played[2].events for moved in with_clock([event], ahead_ns(event.stamp.at), 0.0)
    ]
    processes = gathered(played)
    alignment = align(processes)
    before, after = impossible(processes, alignment)
    assert before > 1_000
    assert after == 0


def test_orders_that_contradict_each_other_are_reported() -> None:
    """A clock that jumps by five milliseconds, all the time, has no timeline. It takes no longer to find out."""
    played = play(Scene(steps=200, offsets_ms=OFFSETS, global_error_us=None, **FAST))
    rng = random.Random(1)
    played[2].events = [
        moved for event in played[2].events for moved in with_clock([event], rng.randrange(5_000_000), 0.0)
    ]
    processes = gathered(played)
    alignment = align(processes)
    assert impossible(processes, alignment)[1] > 0
    assert alignment.broken_ns > 100_000


def test_the_number_of_knots_is_bounded() -> None:
    """An hour with an op a second has no more knots than it needs, whatever the drift."""
    about = Scene(steps=3_600, compute_ms=1_000.0, offsets_ms=OFFSETS, drifts_ppm=DRIFTS, global_error_us=None)
    processes = gathered(play(about))
    alignment = align(processes)
    assert impossible(processes, alignment)[1] == 0
    for domain in alignment.domains:
        assert len(domain.clock.knots) < len(domain.base.knots) + 600


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
