"""The weights of a run, from what its members wrote down."""

import numpy as np

from ringfold.tools.soak.member import COUNT, MemberStep, gradient, learn
from ringfold.tools.soak.members import history, missing, replay


def made(*steps: tuple[int, tuple[int, ...]]) -> list[MemberStep]:
    return [MemberStep(step, who) for step, who in steps]


def test_members_agree_and_the_most_are_right() -> None:
    """An evicted member may have committed what the others made again without it."""
    survivor, evicted = made((0, (1, 2, 3)), (1, (1, 2))), made((0, (1, 2, 3)), (1, (1, 2, 3)))
    assert history({0: [evicted, survivor, survivor]}) == {0: (1, 2, 3), 1: (1, 2)}


def test_what_was_made_after_the_checkpoint_is_replaced() -> None:
    before = made((0, (1, 2)), (1, (1, 2)), (2, (1, 2)), (3, (1, 2)))
    after = made((2, (5, 6)), (3, (5, 6)))
    assert history({0: [before], 1: [after]}) == {0: (1, 2), 1: (1, 2), 2: (5, 6), 3: (5, 6)}
    assert history({0: [before], 1: [made((2, (5, 6)))]}) == {0: (1, 2), 1: (1, 2), 2: (5, 6)}
    assert history({0: [before], 1: [[]]}) == history({0: [before]})


def test_a_step_that_no_member_logged_is_missing() -> None:
    assert missing({0: (1,), 2: (1,)}, 4) == [1, 3]
    assert missing({0: (1,), 1: (2,)}, 2) == []


def test_replaying_averages_over_the_contributors() -> None:
    weights = np.zeros(COUNT, np.float32)
    learn(weights, (gradient(1, 0) + gradient(3, 0)) / np.float32(2))
    learn(weights, gradient(3, 1))
    learn(weights, np.zeros(COUNT, np.float32))
    assert replay({0: (1, 3), 1: (3,), 2: ()}, 3).tobytes() == weights.tobytes()
    assert replay({0: (1, 3), 1: (1, 3), 2: ()}, 3).tobytes() != weights.tobytes()
