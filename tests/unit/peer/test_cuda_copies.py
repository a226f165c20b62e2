"""Large ops on CUDA tensors in blocks: how they are cut, and what is copied first."""

import pytest

from ringfold.peer.cuda_copies import BLOCKS, MIN_BLOCK, PARTS, fill_order, layout_of

MIB = 1 << 20


@pytest.mark.parametrize("size", [8 * MIB, 16 * MIB, 64 * MIB + 4, 256 * MIB + 64])
def test_a_tensor_is_cut_into_blocks_of_one_length_but_the_last(size: int) -> None:
    layout = layout_of([(size, 4, 0)])
    lengths = [last - first for first, last in zip([0, *layout.ends], layout.ends, strict=False)]
    assert layout.ends[-1] == size
    assert len(layout.ends) <= BLOCKS + 1
    assert len(set(lengths[:-1])) == 1
    assert lengths[0] >= MIN_BLOCK
    assert lengths[-1] <= lengths[0]
    assert [each * 4 for each in layout.lengths[0]] == lengths
    assert layout.pieces == [[(0, number)] for number in range(len(layout.ends))]


def test_arrays_share_blocks_and_no_element_is_cut() -> None:
    arrays = [(3 * MIB, 8, 0), (8 * 5, 8, None), (5 * MIB + 12, 4, 1), (0, 4, 2), (2 * MIB + 6, 2, 3), (999, 1, 4)]
    layout = layout_of(arrays)
    staged = [(size, item) for size, item, tensor in arrays if tensor is not None]
    assert [sum(each) for each in layout.lengths] == [size // item for size, item in staged]
    assert layout.ends[-1] == sum(size for size, _, _ in arrays)
    begin = 0
    for end, pieces in zip(layout.ends, layout.pieces, strict=True):
        held = sum(layout.lengths[tensor][piece] * staged[tensor][1] for tensor, piece in pieces)
        assert held == end - begin or (begin <= 3 * MIB < end and held == end - begin - 40)
        begin = end
    listed = [each for pieces in layout.pieces for each in pieces]
    assert sorted(listed) == [
        (tensor, piece) for tensor, each in enumerate(layout.lengths) for piece in range(len(each))
    ]


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
