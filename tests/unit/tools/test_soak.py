"""How a soak judges its samples and its end. The soak itself is in `tests/e2e/test_soak.py`."""

from collections import Counter

import numpy as np
import pytest

from ringfold.tools.soak import epochs, iterations
from ringfold.tools.soak.checks import MIB, ResourceSample, growth
from ringfold.tools.soak.epochs import EpochBegun, StepCommitted
from ringfold.tools.soak.faults import FaultSchedule, SoakFault
from ringfold.tools.soak.iterations import IterationEntry, judge
from ringfold.tools.soak.peers import PeerSoakOutcome, Tally, checks, lanes_kind

LOG: list[EpochBegun | StepCommitted] = [EpochBegun(0, 1, 1, (1, 2)), StepCommitted(0, ((1, 2),), 0)]


MIXED = Counter({"memory and TCP, several channels": 9})
"""Lanes as a soak wants to have seen them."""


def samples(
    count: int, grow_bytes: int = 0, grow_descriptors: float = 0, grow_threads: float = 0
) -> list[ResourceSample]:
    return [
        ResourceSample(
            100 * MIB + index * grow_bytes, 20 + int(index * grow_descriptors), 5 + int(index * grow_threads)
        )
        for index in range(count)
    ]


def test_a_process_that_stays_as_it_is_is_flat() -> None:
    assert [each.is_flat for each in growth("x", samples(60))] == [True, True, True]


def test_memory_that_grows_all_the_time_is_found() -> None:
    memory, descriptors, threads = growth("x", samples(60, grow_bytes=MIB // 2))
    assert not memory.is_flat
    assert descriptors.is_flat
    assert threads.is_flat


def test_descriptors_that_leak_are_found() -> None:
    memory, descriptors, threads = growth("x", samples(60, grow_descriptors=0.5))
    assert memory.is_flat
    assert not descriptors.is_flat
    assert threads.is_flat


def test_threads_that_do_not_end_are_found() -> None:
    assert [each.is_flat for each in growth("x", samples(60, grow_threads=0.2))] == [True, True, False]


def test_what_a_process_takes_at_its_start_is_no_growth() -> None:
    begin = [ResourceSample(10 * MIB, 3, 1)] * 5
    assert all(each.is_flat for each in growth("x", begin + samples(60)))


def test_peaks_are_no_growth() -> None:
    rising = samples(60)
    rising[-3:] = [ResourceSample(900 * MIB, 500, 50)] * 3
    assert all(each.is_flat for each in growth("x", rising))


def test_a_few_samples_say_nothing() -> None:
    assert growth("x", samples(5)) == []


@pytest.mark.parametrize(
    ("digests", "left", "broken"),
    [
        ({"a": (9, 1), "b": (9, 1)}, [], []),
        ({"a": (9, 1), "b": (9, 2)}, [], ["all end with the same bits"]),
        ({"a": (9, 1), "b": (8, 1)}, [], ["all end with the same bits"]),
        ({"a": (9, 1)}, ["/dev/shm/ringfold-1"], ["nothing is left behind"]),
    ],
)
def test_a_soak_is_judged_by_how_it_ended(
    digests: dict[str, tuple[int, int]], left: list[str], broken: list[str]
) -> None:
    outcome = PeerSoakOutcome(
        Tally(lanes=MIXED), 1.0, 7, digests=digests, left_behind=left, history=epochs.judge({"a": LOG})
    )
    assert [check.promise for check in checks(outcome) if not check.kept] == broken


@pytest.mark.parametrize(
    ("kinds", "is_mixed"),
    [([(2, 2), (6, 0)], True), ([(4, 2)], True), ([(2, 2), (4, 4)], False), ([(2, 0)], False), ([], False)],
)
def test_a_soak_without_lanes_of_both_kinds_has_not_shown_much(kinds: list[tuple[int, int]], is_mixed: bool) -> None:
    seen = Counter(lanes_kind(*each) for each in kinds)
    outcome = PeerSoakOutcome(Tally(lanes=seen), 1.0, 7, digests={"a": (9, 1)}, history=epochs.judge({"a": LOG}))
    broken = [check.promise for check in checks(outcome) if not check.kept]
    assert broken == ([] if is_mixed else ["lanes are in shared memory and TCP"])


# FaultSchedule


def test_a_fault_that_is_not_possible_is_drawn_again_and_not_counted() -> None:
    faults = FaultSchedule(
        [SoakFault("never", 100.0, lambda now: False), SoakFault("ever", 0.01, lambda now: True)],
        np.random.default_rng(1),
    )
    assert {faults.inject(0) for _ in range(20)} == {"ever"}
    assert faults.counts == {"ever": 20}


def test_where_nothing_is_possible_nothing_is_done() -> None:
    assert FaultSchedule([SoakFault("never", 1.0, lambda now: False)], np.random.default_rng(1)).inject(0) is None


def test_what_ends_a_fault_is_done_when_it_is_due_and_once() -> None:
    done: list[str] = []
    faults = FaultSchedule([], np.random.default_rng(1))
    faults.later(20, lambda: done.append("late"))
    faults.later(10, lambda: done.append("early"))
    assert faults.run_due(15)
    assert done == ["early"]
    assert not faults.run_due(25)
    assert done == ["early", "late"]


# What the logs of ranks have in common


def entry(iteration: int, life: str = "a", fence: int = 1, missed: int = 0, **more: object) -> IterationEntry:
    members = more.get("members", (0, 1))
    assert isinstance(members, tuple)
    return IterationEntry(iteration, life, fence, members, missed, bool(more.get("is_winner", False)))


def test_an_incarnation_that_skips_what_it_missed_and_a_successor_that_repeats_the_last_are_in_order() -> None:
    log = [entry(0), entry(1), entry(4, missed=2), entry(4, "b", 5), entry(5, "b", 5)]
    found = judge({0: log})
    assert not found.going_back
    assert (found.entries, found.lives, found.last, found.missed) == (5, 2, 5, 2)


@pytest.mark.parametrize(
    "log",
    [
        [entry(1), entry(1)],
        [entry(2), entry(1)],
        [entry(1), entry(3)],
        [entry(5), entry(4, "b", 2)],
    ],
    ids=["twice", "back", "a gap", "a successor before its predecessor"],
)
def test_a_log_that_does_not_grow_strictly_is_found(log: list[IterationEntry]) -> None:
    assert len(judge({0: log}).going_back) == 1


def test_incarnations_are_in_order_by_their_fence_though_one_wrote_late() -> None:
    """It was frozen with a number that it had been handed, while its successor went on."""
    assert not judge({0: [entry(4), entry(5, "b", 2), entry(5)]}).going_back


def test_two_winners_of_one_iteration_are_found_and_one_that_did_not_report_is_counted() -> None:
    logs = {0: [entry(0, is_winner=True), entry(1)], 1: [entry(0, "b", is_winner=True), entry(1, "b")]}
    found = judge(logs)
    assert found.two_winners == ["iteration 0: a, b"]
    assert found.orphaned == 1


@pytest.mark.parametrize(
    "logs",
    [{0: [entry(3)], 1: [entry(3, "b", members=(1,))]}, {2: [entry(3)]}],
    ids=["other members", "not one of them"],
)
def test_logs_of_two_histories_are_found(logs: dict[int, list[IterationEntry]]) -> None:
    assert judge(logs).two_histories


@pytest.mark.parametrize(
    ("log", "agreed", "keys", "broken"),
    [
        ([entry(0), entry(1)], 1, [], []),
        ([entry(1), entry(1)], 1, [], ["sqlite: iterations grow strictly in every rank's log"]),
        ([], -1, [], ["sqlite: iterations grow strictly in every rank's log"]),
        ([entry(0), entry(1)], 0, [], ["sqlite: there is one history"]),
        ([entry(0)], 0, ["iteration/ranks/0/a/alive"], ["sqlite: nothing is left in the store but the record"]),
    ],
)
def test_a_soak_of_iterations_is_judged_by_logs_and_stores(
    log: list[IterationEntry], agreed: int, keys: list[str], broken: list[str]
) -> None:
    outcome = iterations.IterationSoakOutcome(
        7, logs={"sqlite": {0: log}}, agreed={"sqlite": agreed}, keys={"sqlite": keys}
    )
    assert [check.promise for check in iterations.checks(outcome) if not check.kept] == broken


# What the logs of peers have in common


def begun(epoch: int, ring: tuple[int, ...] = (1, 2), fence: int = 1) -> EpochBegun:
    return EpochBegun(0, epoch, fence, ring)


def made(step: int, *ops: tuple[int, int], longest_ns: int = 0) -> StepCommitted:
    return StepCommitted(step, ops, longest_ns)


def breaches(found: epochs.EpochHistory) -> list[int]:
    return [len(found.going_back), len(found.two_histories), len(found.ops_apart)]


def test_peers_that_were_in_other_epochs_of_one_history_agree() -> None:
    """The one joins late, the other is gone before the end; one of them skips the steps that it missed."""
    logs = {
        "a": [begun(1, (1,)), made(0, (1, 1), longest_ns=5), begun(3), made(1, (1, 1), (3, 2), longest_ns=9)],
        "b": [begun(3), begun(4, fence=2), made(2, (4, 2), (4, 2))],
    }
    found = epochs.judge(logs)
    assert breaches(found) == [0, 0, 0]
    assert (found.epochs, found.fences, found.steps, found.committed) == (3, 2, 3, 5)
    assert found.longest_ns == {"a": 9, "b": 0}


@pytest.mark.parametrize(
    "log",
    [
        [begun(2), begun(1)],
        [begun(2), begun(2)],
        [begun(1), made(4), made(3)],
        [begun(1), made(4), made(4)],
    ],
    ids=["an older epoch", "an epoch twice", "an older step", "a step twice"],
)
def test_a_peer_that_goes_back_is_found(log: list[EpochBegun | StepCommitted]) -> None:
    assert breaches(epochs.judge({"a": log})) == [1, 0, 0]


@pytest.mark.parametrize("other", [begun(5, (2, 1)), begun(5, (1, 2, 3)), begun(5, fence=2)])
def test_an_epoch_number_that_two_leaders_used_is_found(other: EpochBegun) -> None:
    assert breaches(epochs.judge({"a": [begun(5)], "b": [other]})) == [0, 1, 0]


def test_a_deposed_leader_that_goes_on_deciding_is_found() -> None:
    """The epoch number is unused, but another leader has taken over already."""
    assert breaches(epochs.judge({"a": [begun(5, fence=2)], "b": [begun(6, fence=1)]})) == [0, 1, 0]


@pytest.mark.parametrize(
    "op", [(9, 2), (5, 3)], ids=["in an epoch that it was not in", "by more than the epoch has members"]
)
def test_an_op_that_does_not_fit_its_epoch_is_found(op: tuple[int, int]) -> None:
    assert breaches(epochs.judge({"a": [begun(5), made(1, op)]})) == [0, 0, 1]


def test_an_op_that_was_committed_in_two_epochs_is_found() -> None:
    both = [begun(5), begun(6)]
    assert breaches(epochs.judge({"a": [*both, made(1, (5, 2))], "b": [*both, made(1, (6, 2))]})) == [0, 0, 1]


@pytest.mark.parametrize(
    ("logs", "broken"),
    [
        ({"a": [begun(2), begun(1), made(0, (1, 2))]}, ["epochs and steps grow strictly in every peer's log"]),
        ({"a": LOG, "b": [begun(1, (9,))]}, ["there is one history of epochs"]),
        ({"a": [*LOG, made(1, (5, 2))]}, ["peers agree on what was committed"]),
        ({"a": []}, ["there is one history of epochs", "peers agree on what was committed"]),
    ],
    ids=["back", "two rings", "an op out of its epoch", "nothing written"],
)
def test_a_soak_is_judged_by_the_history_of_epochs(
    logs: dict[str, list[EpochBegun | StepCommitted]], broken: list[str]
) -> None:
    outcome = PeerSoakOutcome(Tally(lanes=MIXED), 1.0, 7, digests={"a": (9, 1)}, history=epochs.judge(logs))
    assert [check.promise for check in checks(outcome) if not check.kept] == broken


def test_a_life_of_a_master_that_grows_is_found_among_others() -> None:
    lives = {"master-a.1": samples(60), "master-b.1": samples(60, grow_descriptors=0.5), "master-a.2": samples(3)}
    outcome = PeerSoakOutcome(
        Tally(lanes=MIXED), 1.0, 7, digests={"a": (9, 1)}, master_samples=lives, history=epochs.judge({"a": LOG})
    )
    [broken] = [check for check in checks(outcome) if not check.kept]
    assert broken.promise == "no life of a master grows"
    assert broken.fact.startswith("master-b.1: descriptors")
