"""Every kernel against NumPy, on every level that this CPU has."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfold import _native

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", ml_dtypes.bfloat16, "f4", "f8"]
NUMPY_OPS = [np.add, np.add, np.multiply, np.minimum, np.maximum]
BFLOAT16 = 9

Array = npt.NDArray[np.generic]


@pytest.fixture(params=["generic", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run on one level of kernels; the machine's own is put back afterwards."""
    before = _native.cpu_level()
    if not _native.set_cpu_level(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    _native.set_cpu_level(before)


def values(code: int, count: int, seed: int) -> Array:
    rng = np.random.default_rng((code, count, seed))
    if code < 8:
        info = np.iinfo(DTYPES[code])
        return rng.integers(info.min, info.max, count, DTYPES[code], endpoint=True)
    return (rng.standard_normal(count) * 100).astype(DTYPES[code])


def raw(array: Array) -> Array:
    """bfloat16 arrays are handed over as their bits."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


@pytest.mark.parametrize("code", range(12))
@pytest.mark.parametrize("op", range(5))
def test_reduce_equals_numpy(level: str, code: int, op: int) -> None:
    for count in (0, 1, 7, 64, 1003):
        a, b = values(code, count, 1), values(code, count, 2)
        target = np.zeros_like(a)
        _native.reduce(code, op, raw(target), raw(a), raw(b))
        with np.errstate(over="ignore"):
            expected = NUMPY_OPS[op](a, b)
        np.testing.assert_array_equal(raw(target), raw(expected), err_msg=f"{DTYPES[code]} {op} {count}")


@pytest.mark.parametrize("code", range(12))
def test_divide_equals_numpy(level: str, code: int) -> None:
    for divisor in (1, 2, 3, 7, 64):
        a = values(code, 515, divisor)
        target = a.copy()
        _native.divide(code, raw(target), divisor)
        if code >= 8:
            expected = (a.astype(np.float32 if code < 11 else np.float64) / divisor).astype(DTYPES[code])
        else:  # towards zero, as C does
            expected = (np.sign(a.astype(object)) * (abs(a.astype(object)) // divisor)).astype(DTYPES[code])
        np.testing.assert_array_equal(raw(target), raw(expected), err_msg=f"{DTYPES[code]} / {divisor}")


@pytest.mark.parametrize("op", [3, 4])
@pytest.mark.parametrize("code", [8, BFLOAT16, 10, 11])
def test_nan_wins_min_and_max(level: str, code: int, op: int) -> None:
    a = np.array([1, np.nan, np.nan, -np.inf], DTYPES[code])
    b = np.array([np.nan, 1, np.nan, np.inf], DTYPES[code])
    target = np.zeros_like(a)
    _native.reduce(code, op, raw(target), raw(a), raw(b))
    assert np.isnan(target[:3].astype(np.float32)).all()
    assert np.isinf(target[3].astype(np.float32))


def crc_by_definition(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=3000), st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_crc_follows_its_definition_and_chains(first: bytes, second: bytes) -> None:
    assert _native.crc32c(first) == crc_by_definition(first)
    assert _native.crc32c(second, _native.crc32c(first)) == _native.crc32c(first + second)


def test_bad_codes_are_refused() -> None:
    a = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="unknown dtype"):
        _native.reduce(12, 0, a, a, a)
    with pytest.raises(ValueError, match="sizes differ"):
        _native.reduce(10, 0, a, a, a[:2])
    with pytest.raises(ValueError, match="division by zero"):
        _native.divide(10, a, 0)
