"""Quantisation against a reference in NumPy, and the guarantees of the header, as properties."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold import _native

SCHEMES = {"minmax8": 1, "minmax4": 2, "zeroscale8": 3, "zeroscale4": 4}
CODES = {np.dtype(np.float16): 8, np.dtype(ml_dtypes.bfloat16): 9, np.dtype(np.float32): 10}
BLOCK = 512
SMALLEST_STEP = np.float32(2.0**-126)
HEAD = 8

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=["generic", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.cpu_level()
    if not _native.set_cpu_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    _native.set_cpu_level(before)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def raw(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values


def quantised(scheme: str, values: npt.NDArray[np.generic]) -> Bytes:
    number, code = SCHEMES[scheme], CODES[values.dtype]
    encoded = np.empty(_native.quantized_bytes(number, code, values.size), np.uint8)
    _native.quantize(number, code, encoded, raw(values))
    return encoded


def there_and_back(scheme: str, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    back = np.zeros_like(values)
    _native.dequantize(SCHEMES[scheme], CODES[values.dtype], raw(back), quantised(scheme, values))
    return back


def top_of(scheme: str) -> int:
    return 15 if scheme.endswith("4") else 255


def packed(scheme: str, codes: npt.NDArray[np.int64]) -> Bytes:
    if top_of(scheme) == 255:
        return codes.astype(np.uint8)
    low = (codes.size + 1) // 2
    halves = np.zeros((2, low), np.uint8)
    halves[0], halves[1, : codes.size - low] = codes[:low], codes[low:]
    return halves[0] | halves[1] << 4


def reference_block(scheme: str, values: Floats) -> bytes:
    """A block of finite values that are not all equal, as the header of the kernels describes it."""
    top, zero = np.float32(top_of(scheme)), scheme.startswith("zero")
    low, high = values.min() + np.float32(0), values.max() + np.float32(0)
    if zero:
        low, high = min(low, np.float32(0)), max(high, np.float32(0))
    step = max((high - low) / top, SMALLEST_STEP)
    per_unit = np.float32(1) / step
    if zero:
        base = np.rint(-low * per_unit)
        codes = np.rint(values * per_unit) + base
        head = step.tobytes() + np.int32(base).tobytes()
    else:
        codes = np.rint((values - low) * per_unit)
        head = step.tobytes() + low.tobytes()
    return head + packed(scheme, np.clip(codes, 0, top).astype(np.int64)).tobytes()


@pytest.mark.parametrize("count", [3, 4, 100, 511, 512, 513, 1300])
@pytest.mark.parametrize("spread", [1e-42, 1e-37, 1e-3, 1.0, 1e30])
def test_the_encoding_is_that_of_the_reference(level: str, scheme: str, count: int, spread: float) -> None:
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) * spread).astype(np.float32)
    expected = b"".join(
        reference_block(scheme, block) if block.size > 2 else block.tobytes()
        for block in np.split(values, range(BLOCK, count, BLOCK))
    )
    assert quantised(scheme, values).tobytes() == expected


def reference_values(scheme: str, block: bytes, count: int) -> Floats:
    """A block that is not special, decoded with one rounding after each operation."""
    step, codes = np.frombuffer(block[:4], np.float32)[0], np.frombuffer(block[HEAD:], np.uint8)
    if top_of(scheme) == 15:
        codes = np.concatenate([codes & 15, codes >> 4])
    wide = codes[:count].astype(np.float32)
    if scheme.startswith("zero"):
        return (wide - np.frombuffer(block[4:HEAD], np.int32)[0].astype(np.float32)) * step
    return wide * step + np.frombuffer(block[4:HEAD], np.float32)[0]


@pytest.mark.parametrize("count", [9, 100, 511, 512])
@pytest.mark.parametrize("spread", [1e-42, 1e-37, 1e-3, 1.0, 1e30])
def test_the_decoding_is_that_of_the_reference(level: str, scheme: str, count: int, spread: float) -> None:
    rng = np.random.default_rng(count)
    values = ((rng.standard_normal(count) + 0.3) * spread).astype(np.float32)
    expected = reference_values(scheme, quantised(scheme, values).tobytes(), count)
    np.testing.assert_array_equal(there_and_back(scheme, values).view(np.uint32), expected.view(np.uint32))


def step_of(scheme: str, block: Floats) -> float:
    low, high = float(block.min()), float(block.max())
    if scheme.startswith("zero"):
        low, high = min(low, 0.0), max(high, 0.0)
    return max((high - low) / top_of(scheme), 2.0**-126)


@given(
    st.sampled_from(list(SCHEMES)),
    st.integers(1, 1100),
    st.floats(-30, 30),
    st.floats(-1, 1),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200)
def test_a_value_comes_back_within_half_a_step(
    scheme: str, count: int, magnitude: float, offset: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = ((rng.standard_normal(count) + offset * 100) * 10.0**magnitude).astype(np.float32)
    back = there_and_back(scheme, values)
    for at in range(0, count, BLOCK):
        block, got = values[at : at + BLOCK], back[at : at + BLOCK]
        # Half a step; and f32 rounds the step, the code's argument and the result.
        most = step_of(scheme, block) * (0.5 + 1e-4) + np.spacing(np.abs(block).max())
        assert np.abs(block.astype(np.float64) - got).max() <= most


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 3.1415927, -2.5e-3, 1e-7, 6e-8])
def test_equal_values_come_back_exactly(level: str, scheme: str, dtype: type, value: float) -> None:
    for count in (1, 2, 3, 100, 1025):
        values = np.full(count, value, dtype)
        np.testing.assert_array_equal(raw(there_and_back(scheme, values)), raw(values))


@pytest.mark.parametrize("value", [1e-45, -1e-45, 1e-40, -1e-38, 3.4028235e38, -3.4028235e38])
def test_equal_values_at_the_ends_of_f32_come_back_exactly(level: str, scheme: str, value: float) -> None:
    values = np.full(1025, value, np.float32)
    np.testing.assert_array_equal(there_and_back(scheme, values), values)


@pytest.mark.parametrize("name", ["zeroscale8", "zeroscale4"])
def test_zeroscale_brings_zeros_back_exactly(level: str, name: str) -> None:
    rng = np.random.default_rng(1)
    for offset in (-3, 0, 0.1, 20):
        values = (rng.standard_normal(4000) + offset).astype(np.float32)
        values[::3] = 0
        assert not there_and_back(name, values)[::3].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_what_is_not_finite_arrives_as_what_it_was(level: str, scheme: str, dtype: type) -> None:
    rng = np.random.default_rng(7)
    values = rng.standard_normal(1500).astype(dtype)
    values[[3, 700, 701]], values[[9, 800]], values[[100, 1499]] = np.nan, np.inf, -np.inf
    back, wide = there_and_back(scheme, values).astype(np.float32), values.astype(np.float32)
    finite = np.isfinite(wide)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(wide))
    np.testing.assert_array_equal(back[np.isinf(wide)], wide[np.isinf(wide)])
    assert np.isfinite(back[finite]).all()
    assert np.abs(back[finite] - wide[finite]).max() < 8 / (top_of(scheme) - 3) / 2 + 0.01


def test_a_block_of_nothing_finite(level: str, scheme: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf] * 200, np.float32)
    np.testing.assert_array_equal(there_and_back(scheme, values), values)


def test_huge_values_stay_finite_and_near(level: str, scheme: str) -> None:
    largest = float(np.finfo(np.float32).max)
    values = np.linspace(-largest, largest, 1024).astype(np.float32)
    back = there_and_back(scheme, values)
    assert np.isfinite(back).all()
    # Each block has half of the range, and zeroscale's special blocks are min-max blocks.
    assert np.abs(back.astype(np.float64) - values).max() <= largest / (top_of(scheme) - 3) * 0.51


@given(st.sampled_from(list(SCHEMES)), st.binary(min_size=0, max_size=4 * 1100))
@settings(max_examples=200)
def test_any_bits_keep_their_kind(scheme: str, data: bytes) -> None:
    """Finite stays finite, an infinity keeps its sign, and a NaN is a NaN, whatever stands beside it."""
    values = np.frombuffer(data[: len(data) // 4 * 4], np.float32).copy()
    back = there_and_back(scheme, values)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(values))
    np.testing.assert_array_equal(np.isposinf(back), np.isposinf(values))
    np.testing.assert_array_equal(np.isneginf(back), np.isneginf(values))


def test_a_value_comes_back_from_its_code_unchanged(level: str, scheme: str) -> None:
    """Quantising what was dequantised moves nothing by more than rounding: errors do not pile up by themselves."""
    values = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    once = there_and_back(scheme, values)
    twice = there_and_back(scheme, once)
    np.testing.assert_allclose(twice, once, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "ratio"), [("minmax8", 3.9), ("zeroscale8", 3.9), ("minmax4", 7.7), ("zeroscale4", 7.7)]
)
def test_the_bytes_that_are_saved(scheme: str, ratio: float) -> None:
    assert 4_000_000 / _native.quantized_bytes(SCHEMES[scheme], 10, 1_000_000) > ratio


def test_bad_arguments_are_refused() -> None:
    values, encoded = np.zeros(100, np.float32), np.zeros(10, np.uint8)
    with pytest.raises(ValueError, match="sizes do not agree"):
        _native.quantize(1, 10, encoded, values)
    with pytest.raises(ValueError, match="sizes do not agree"):
        _native.dequantize(1, 10, values, encoded)
    for scheme, dtype in ((0, 10), (5, 10), (1, 11), (1, 5)):
        with pytest.raises(ValueError, match="unknown scheme"):
            _native.quantized_bytes(scheme, dtype, 4)
