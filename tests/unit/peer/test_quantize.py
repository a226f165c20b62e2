"""What may be quantised is decided in Python, in words, before anything is sent; a descriptor names it."""

import pytest

from ringfold.errors import UsageError
from ringfold.peer.codes import DTYPES, QUANTISATIONS
from ringfold.peer.ops import quantisation_code
from ringfold.wire import descriptor

FLOATS = [DTYPES[name] for name in ("float16", "bfloat16", "float32")]


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
@pytest.mark.parametrize(("name", "number"), QUANTISATIONS.items())
def test_what_fits_has_its_number(op: str, name: str, number: int) -> None:
    assert quantisation_code(name, op, FLOATS) == number


def test_an_op_that_is_not_quantised_is_not_checked() -> None:
    assert quantisation_code(None, "prod", DTYPES.values()) == 0


@pytest.mark.parametrize("name", ["", "none", "int8", "MINMAX8"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="there are minmax8, minmax4, zeroscale8, zeroscale4, and None"):
        quantisation_code(name, "sum", FLOATS)


def test_a_product_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"op='prod': every factor's error would grow"):
        quantisation_code("minmax8", "prod", FLOATS)


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"float16", "bfloat16", "float32"}))
def test_a_dtype_that_is_meant_exactly_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(UsageError, match=rf"is for float16, bfloat16, float32, but there is an array of {dtype}:"):
        quantisation_code("minmax4", "sum", [*FLOATS, DTYPES[dtype]])


def test_a_descriptor_names_its_quantisation() -> None:
    names = {
        descriptor.describe(descriptor.Descriptor(0, 10, quantisation=number).pack())
        for number in (0, *QUANTISATIONS.values(), 9)
    }
    assert len(names) == 6
    for name in QUANTISATIONS:
        assert sum(f"quantize={name}," in text for text in names) == 1
    assert sum("quantize=quantisation 9," in text for text in names) == 1


def test_both_tables_of_names_agree() -> None:
    assert {name: descriptor.QUANTISATIONS.index(name) for name in QUANTISATIONS} == QUANTISATIONS
