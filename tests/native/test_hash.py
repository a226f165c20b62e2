"""rf64 of the native core against the NumPy reference, on every level that this CPU has."""

from collections.abc import Iterator

import hash_reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold import _native

MIB = 1 << 20


@pytest.fixture(params=["generic", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on one level of kernels; the machine's own is put back afterwards."""
    before = _native.cpu_level()
    if not _native.set_cpu_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    _native.set_cpu_level(before)


def noise(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 255, 256, 257, 512, 16_383, 16_384, 16_385, 16_641, 40_000, MIB])
def test_a_block_hashes_as_the_reference(level: str, count: int) -> None:
    block = noise(count)
    assert _native.hash_block(block) == hash_reference.block_hash(block)


@given(block=st.binary(max_size=600))
def test_short_blocks_hash_as_the_reference(block: bytes) -> None:
    assert _native.hash_block(block) == hash_reference.block_hash(block)


def test_the_start_of_a_block_needs_no_alignment(level: str) -> None:
    array = np.frombuffer(noise(20_000), np.uint8)
    for start in range(1, 66):
        block = array[start : start + 17_001]
        assert _native.hash_block(block) == _native.hash_block(block.copy()), start


@pytest.mark.parametrize("count", [0, 1, MIB, MIB + 1, 3 * MIB - 5])
def test_the_blocks_of_an_array_are_hashed_one_by_one(count: int) -> None:
    array = noise(count)
    assert _native.hash_blocks(array, 1) == hash_reference.block_hashes(array)


def test_threads_change_nothing() -> None:
    array = np.arange((21 * MIB + 40) // 4, dtype=np.uint32)
    alone = _native.hash_blocks(array, 1)
    assert len(alone) == 8 * 22
    for threads in (0, 2, 5, 100):
        assert _native.hash_blocks(array, threads) == alone, threads


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 2047, 2048, 5000])
def test_a_root_is_that_of_the_reference(count: int) -> None:
    hashes = noise(8 * count)
    total = max(0, count * MIB - 3)
    assert _native.hash_root(hashes, total) == hash_reference.root_hash(hashes, total)


def test_read_only_memory_is_hashed() -> None:
    array = np.arange(100, dtype=np.float64)
    array.flags.writeable = False
    assert _native.hash_block(array) == _native.hash_block(array.tobytes())


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        _native.hash_block(np.zeros((8, 8))[:, ::2])


def test_what_has_no_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        _native.hash_block("text")
