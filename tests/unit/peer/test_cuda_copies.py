"""Large ops on CUDA tensors in blocks: how they are cut, and what is copied first."""

import pytest

from ringfold.peer.cuda_copies import BLOCKS, MIN_BLOCK, PARTS, fill_order, layout_of

MIB = 1 << 20


@pytest.mark.parametrize("size", [8 * MIB, 16 * MIB, 64 * MIB + 4, 256 * MIB + 64])
def test_a_tensor_is_cut_into_blocks_of_one_length_but_the_last(size: int) -> None:
    layout = layout_of(((size, 4, 0),))
    begins = [0, *layout.ends[:-1]]
    lengths = [end - begin for begin, end in zip(begins, layout.ends, strict=True)]
    assert layout.ends[-1] == size
    assert len(layout.ends) <= BLOCKS + 1
    assert len(set(lengths[:-1])) == 1
    assert lengths[0] >= MIN_BLOCK
    assert lengths[-1] <= lengths[0]
    assert layout.pieces == [[(0, begin // 4, end // 4)] for begin, end in zip(begins, layout.ends, strict=True)]


def test_arrays_share_blocks_and_no_element_is_cut() -> None:
    sizes = [(3 * MIB, 8), (8 * 5, 8), (5 * MIB + 12, 4), (0, 4), (2 * MIB + 6, 2), (999, 1)]
    layout = layout_of(
        tuple((size, item, number if number != 1 else None) for number, (size, item) in enumerate(sizes))
    )
    assert layout.ends[-1] == sum(size for size, _ in sizes)
    starts = [sum(size for size, _ in sizes[:number]) for number in range(len(sizes))]
    covered: dict[int, int] = {}
    begin = 0
    for end, pieces in zip(layout.ends, layout.pieces, strict=True):
        for tensor, first, last in pieces:
            assert first == covered.get(tensor, 0) < last
            covered[tensor] = last
            start, item = starts[tensor], sizes[tensor][1]
            assert begin <= start + first * item < start + last * item <= end
        begin = end
    assert covered == {0: 3 * MIB // 8, 2: (5 * MIB + 12) // 4, 4: (2 * MIB + 6) // 2, 5: 999}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 5, 16, 32, 33])
def test_each_block_is_filled_once(count: int, size: int) -> None:
    for rank in range(size):
        assert sorted(fill_order(count, rank, size)) == list(range(count))


def test_a_pair_fills_all_parts_by_turns() -> None:
    assert fill_order(16, 1, 2)[:PARTS] == [0, 4, 8, 12]
    assert fill_order(16, 1, 2)[PARTS : 2 * PARTS] == [1, 5, 9, 13]


def test_a_ring_fills_first_what_it_sends_first_then_what_comes() -> None:
    order = fill_order(32, 1, 4)
    assert [sorted(order[turn * 8 : turn * 8 + 8])[0] // 8 for turn in range(4)] == [1, 0, 3, 2]
    assert order[:PARTS] == [8, 10, 12, 14]
