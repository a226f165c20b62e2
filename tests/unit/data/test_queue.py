"""The queue of a pass: whatever happens, every position is consumed exactly once."""

from random import Random

import pytest

from ringfold.data.queue import Queue, count, joined


def test_a_step_takes_what_came_back_first() -> None:
    queue = Queue(100, cursor=20, redo=((3, 5), (9, 12)))
    shares = queue.cut(3, 4, max_ranges=9)
    assert shares == [((3, 5), (9, 11)), ((11, 12), (20, 23)), ((23, 27),)]
    assert queue.settle(shares, {0, 2}) == Queue(100, cursor=27, redo=((11, 12), (20, 23)))
    assert queue.settle(shares, {0, 1, 2}) == Queue(100, cursor=27)


def test_a_step_to_which_none_contributes_changes_nothing() -> None:
    for queue in (Queue(100), Queue(100, cursor=20, redo=((3, 5), (9, 12))), Queue(21, 4, cursor=20, redo=((3, 5),))):
        assert queue.settle(queue.cut(3, 4, max_ranges=9), set()) == queue


def test_the_last_shares_of_a_pass_are_even_and_not_padded() -> None:
    queue = Queue(25, cursor=20)
    assert queue.cut(3, 4, max_ranges=9) == [((20, 22),), ((22, 24),), ((24, 25),)]
    assert Queue(25, cursor=24).cut(3, 4, max_ranges=9) == [((24, 25),), (), ()]


def test_the_next_pass_begins_when_all_are_consumed() -> None:
    queue = Queue(10, 2, cursor=8)
    shares = queue.cut(2, 1, max_ranges=9)
    assert queue.settle(shares, {0, 1}) == Queue(10, 3)
    assert queue.settle(shares, {1}) == Queue(10, 2, cursor=10, redo=((8, 9),))
    assert queue.settle(shares, {0}) == Queue(10, 2, cursor=9)


def test_a_full_list_of_ranges_is_consumed_before_anything_new() -> None:
    redo = tuple((10 * place, 10 * place + 6) for place in range(8))
    queue = Queue(1_000, cursor=100, redo=redo)
    shares = queue.cut(3, 4, max_ranges=9)
    assert shares == [((0, 4),), ((10, 14),), ((20, 24),)]
    assert queue.settle(shares, set()) == queue
    assert queue.settle(shares, {1}) == Queue(1_000, 0, 100, (redo[0], (14, 16), *redo[2:]))


@pytest.mark.parametrize("seed", range(60))
def test_every_position_is_consumed_once_per_pass(seed: int) -> None:
    draw = Random(seed)
    size, max_members = draw.choice((1, 5, 50, 400)), draw.randint(1, 6)
    queue, used = Queue(size), [0] * size
    for _ in range(100_000):
        if queue.passes_done == 3:
            break
        members, each = draw.randint(1, max_members), draw.choice((1, 2, 5, 20))
        shares = queue.cut(members, each, 2 * max_members + 1)
        assert len(shares) == members
        assert any(shares)
        assert all(count(share) <= each for share in shares)
        consumed = {place for place in range(members) if draw.random() < 0.4}
        for place in consumed:
            for first, last in shares[place]:
                for position in range(first, last):
                    used[position] += 1
        before = queue
        queue = queue.settle(shares, consumed)
        assert len(queue.redo) <= 2 * max_members + 1
        assert list(queue.redo) == joined(queue.redo)
        if queue.passes_done == before.passes_done:
            assert before.left - queue.left == sum(count(shares[place]) for place in consumed)
    assert used == [3] * size
