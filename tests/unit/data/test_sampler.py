"""The sampler: its state is its arrays, and shares stay with those that have taken them."""

import numpy as np
import pytest

import ringfold as rf
from ringfold.data.sampler import Sampler, consumed_positions

RUN = 7


def settled(sampler: Sampler, participants: tuple[int, ...], contributors: set[int], *, left: tuple[int, ...]) -> None:
    plan = sampler.plan(sampler.table(participants, RUN))
    assert plan is not None
    sampler.settle(plan.settle(contributors), left, RUN, None)


def test_its_arrays_are_all_of_its_state() -> None:
    one, two = Sampler(100, 4), Sampler(100, 4)
    settled(one, (1, 2, 3), {1, 3}, left=(1, 3))
    for name, array in one.shared_arrays().items():
        np.asarray(two.shared_arrays()[name])[...] = array
    assert two.table((1, 3, 5), RUN) == one.table((1, 3, 5), RUN) == (1, 3, 5)
    assert two.plan((1, 3)) == one.plan((1, 3))
    assert consumed_positions(two) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert two.left == 92


def test_shares_that_are_taken_stay_when_newcomers_come_for_the_lost() -> None:
    sampler = Sampler(1_000, 4)
    settled(sampler, (1, 2, 3), {1, 2, 3}, left=(1, 2, 3))
    before, after = (sampler.plan(sampler.table(here, RUN)) for here in ((1, 2, 3), (2, 3, 4)))
    assert before is not None
    assert after is not None
    assert after.members == (1, 2, 3, 4)
    assert [after.share_of(peer) for peer in (2, 3)] == [before.share_of(peer) for peer in (2, 3)]
    assert after.share_of(4) not in before.shares


def test_members_of_another_run_do_not_count() -> None:
    sampler = Sampler(1_000, 4)
    settled(sampler, (1, 2), {1, 2}, left=(1, 2))
    assert sampler.table((2, 5), RUN) == (1, 2, 5)
    assert sampler.table((2, 5), RUN + 1) == (2, 5)
    assert sampler.table((5, 6), RUN) == (5, 6)


def test_the_size_of_a_share_changes_with_the_next_step() -> None:
    sampler = Sampler(1_000, 4)
    sampler.batch_size = 6
    plan = sampler.plan((1,))
    assert plan is not None
    assert plan.shares == [((0, 4),)]
    sampler.settle(plan.settle({1}), (1,), RUN, None)
    assert sampler.plan((1,)) is not None
    assert sampler.plan((1,)).shares == [((4, 10),)]  # type: ignore[union-attr]


def test_the_first_step_may_set_the_size_of_a_share() -> None:
    sampler = Sampler(1_000)
    assert sampler.batch_size is None
    assert sampler.plan((1,)) is None
    plan = sampler.plan((1,), 5)
    assert plan is not None
    sampler.settle(plan.settle({1}), (1,), RUN, 5)
    assert sampler.batch_size == 5
    with pytest.raises(rf.UsageError, match="shares have 5 samples"):
        sampler.plan((1,), 6)


def test_a_run_with_another_data_set_is_refused() -> None:
    here, there = Sampler(100, 4), Sampler(90, 4, seed=3)
    for name, array in here.shared_arrays().items():
        np.asarray(array)[...] = there.shared_arrays()[name]
    with pytest.raises(rf.UsageError, match="size 100, and the run's has 90; seed 0, and the run's has 3"):
        here.check_unchanged()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "at least one sample"),
        ({"size": 5, "batch_size": 0}, "at least one sample"),
        ({"size": 5, "seed": -1}, "seed"),
        ({"size": 5, "max_members": 0}, "max_members"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(rf.UsageError, match=message):
        Sampler(**arguments)  # type: ignore[arg-type]


def test_a_shared_state_has_its_arrays() -> None:
    sampler = Sampler(100, 4)
    state = rf.SharedState(model=np.zeros(3), data=sampler)
    assert list(state) == ["data.members", "data.position", "data.redo", "model"]
    assert state.objects == {"data": sampler}
    with pytest.raises(rf.UsageError, match=r"two arrays named 'data\.redo'"):
        rf.SharedState({"data": sampler, "data.redo": np.zeros(3)})
