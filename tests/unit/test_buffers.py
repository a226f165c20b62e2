"""What callers may pass as arrays, and what the engine sees of them."""

import array
import ctypes
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from ringfold.dataplane.buffers import spans_of, view_of
from ringfold.dataplane.codes import BFLOAT16, DTYPES
from ringfold.errors import UsageError


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bfloat16"])
def test_every_native_dtype_has_its_code(name: str) -> None:
    view, code = view_of(np.zeros(3, name))
    assert code == DTYPES[name]
    assert view.dtype == np.dtype(name)


def test_a_numpy_array_is_not_copied() -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(view_of(numbers)[0], numbers)


def test_platform_names_of_the_same_type_are_the_same() -> None:
    assert view_of(np.zeros(1, np.longlong))[1] == DTYPES["int64"]


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: array.array("f", [1.0, 2.0]), DTYPES["float32"]),
        (lambda: bytearray(b"abcd"), DTYPES["uint8"]),
        (lambda: memoryview(bytearray(8)).cast("i"), DTYPES["int32"]),
        (lambda: (ctypes.c_int16 * 3)(), DTYPES["int16"]),
    ],
)
def test_the_buffer_protocol_is_used_without_a_copy(make: Callable[[], object], code: int) -> None:
    exporter = make()
    view, found = view_of(exporter)
    assert found == code
    view.reshape(-1)[0] = 77
    assert memoryview(exporter).cast("B")[0] == (77 if code != DTYPES["float32"] else 0)  # type: ignore[arg-type]
    assert np.asarray(exporter).reshape(-1)[0] == 77


def test_ml_dtypes_bfloat16_is_seen_as_its_bits() -> None:
    numbers = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    view, code = view_of(numbers)
    assert code == BFLOAT16
    assert view.dtype == np.uint16
    assert view.tolist() == [0x3F80, 0x4000]
    assert np.shares_memory(view, numbers)


def test_integers_may_be_called_bfloat16() -> None:
    assert view_of(np.zeros(2, np.uint16), dtype="bfloat16")[1] == BFLOAT16
    assert view_of(np.zeros(2, np.int16), dtype="bfloat16")[1] == BFLOAT16
    with pytest.raises(UsageError, match="only 16-bit integers"):
        view_of(np.zeros(2, np.float32), dtype="bfloat16")


def test_a_dtype_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match="float8"):
        view_of(np.zeros(2, np.uint8), dtype="float8")


class Exported:
    """Another library's array: DLPack and nothing else."""

    def __init__(self, numbers: "np.ndarray[tuple[int], np.dtype[np.float32]]", device: int = 1) -> None:
        self.numbers, self.device = numbers, device

    def __dlpack__(self, **options: object) -> object:
        return self.numbers.__dlpack__(**options)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def test_dlpack_is_used_without_a_copy() -> None:
    numbers = np.zeros(4, np.float32)
    view, code = view_of(Exported(numbers))
    assert code == DTYPES["float32"]
    assert np.shares_memory(view, numbers)


def test_dlpack_on_another_device_is_refused() -> None:
    with pytest.raises(UsageError, match="CPU"):
        view_of(Exported(np.zeros(4, np.float32), device=2))


class Device:
    def __init__(self, kind: str) -> None:
        self.type = kind

    def __str__(self) -> str:
        return f"{self.type}:0"


class Tensor:
    """A tensor as torch shapes it, on top of NumPy, so that the test needs no torch."""

    int16 = "torch.int16"

    def __init__(self, numbers: np.ndarray, dtype: str, device: str = "cpu") -> None:  # type: ignore[type-arg]
        self.numbers, self.dtype, self.device = numbers, f"torch.{dtype}", Device(device)

    def data_ptr(self) -> int:
        return self.numbers.ctypes.data

    def is_contiguous(self) -> bool:
        return bool(self.numbers.flags.c_contiguous)

    def detach(self) -> "Tensor":
        return self

    def view(self, dtype: str) -> "Tensor":
        return Tensor(self.numbers.view(np.int16), dtype.removeprefix("torch."))

    def numpy(self) -> np.ndarray:  # type: ignore[type-arg]
        assert "bfloat16" not in self.dtype, "NumPy has no bfloat16"
        return self.numbers


def test_a_tensor_is_used_without_a_copy() -> None:
    numbers = np.zeros(4, np.float32)
    view, code = view_of(Tensor(numbers, "float32"))
    assert code == DTYPES["float32"]
    assert np.shares_memory(view, numbers)


def test_a_bfloat16_tensor_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Tensor)  # type: ignore[arg-type]
    numbers = np.array([0x3F80], np.uint16)
    view, code = view_of(Tensor(numbers, "bfloat16"))
    assert code == BFLOAT16
    assert view.tolist() == [0x3F80]
    assert np.shares_memory(view, numbers)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Tensor(np.zeros(2, np.float32), "float32", "cuda"), "cuda:0"),
        (Tensor(np.zeros(4, np.float32)[::2], "float32"), "contiguous"),
        (Tensor(np.zeros(2, bool), "bool"), "bool"),
    ],
)
def test_tensors_that_cannot_be_used_in_place_are_refused(tensor: Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        view_of(tensor)


def test_real_torch_tensors_when_torch_is_there() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(3))
    view, code = view_of(parameter)
    assert code == DTYPES["float32"]
    view[0] = 5
    assert parameter[0].item() == 5
    half = torch.ones(2, dtype=torch.bfloat16)
    view, code = view_of(half)
    assert code == BFLOAT16
    view[0] = 0x4000
    assert half[0].item() == 2


def readonly() -> object:
    numbers = np.zeros(3)
    numbers.flags.writeable = False
    return numbers


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: np.zeros((4, 4))[:, ::2], "ascontiguousarray"),
        (lambda: np.asfortranarray(np.zeros((3, 2))), "not contiguous"),
        (readonly, "read-only"),
        (lambda: b"bytes are constant", "read-only"),
        (lambda: np.zeros(2, bool), "bool"),
        (lambda: np.zeros(2, complex), "complex128"),
        (lambda: np.zeros(2, object), "object"),
        (lambda: np.zeros(2, "U3"), "U3"),
        (lambda: np.zeros(2, np.longdouble), "float128"),
        (lambda: np.zeros(2, "datetime64[s]"), "datetime64"),
        (lambda: np.zeros(2, ">f4"), "big-endian"),
        (lambda: 3.5, "float"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_way_out(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        view_of(make())


def test_a_source_that_is_only_read_may_be_read_only() -> None:
    assert view_of(readonly(), writable=False)[1] == DTYPES["float64"]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_empty_and_zero_dimensional_arrays_work(shape: tuple[int, ...]) -> None:
    assert view_of(np.zeros(shape, np.int8))[1] == DTYPES["int8"]


def test_spans_go_by_item_size_and_keep_the_order_of_equals() -> None:
    small, first, second, large = (
        np.zeros(1, np.uint8),
        np.zeros(2, np.float32),
        np.zeros(3, np.int32),
        np.zeros(4, np.float64),
    )
    spans = spans_of([small, first, second, large])
    assert [array.size for array in spans.arrays] == [4, 2, 3, 1]
    assert spans.codes == [DTYPES["float64"], DTYPES["float32"], DTYPES["int32"], DTYPES["uint8"]]


def test_a_dict_goes_by_its_sorted_keys() -> None:
    one, two = np.zeros(1), np.zeros(2)
    assert [array.size for array in spans_of({"b": two, "a": one}).arrays] == [1, 2]
    assert spans_of({"a": one, "b": two}).layout == spans_of({"b": two, "a": one}).layout


def test_refusals_name_the_array() -> None:
    with pytest.raises(UsageError, match="'bias'"):
        spans_of({"bias": np.zeros(2, bool)})
    with pytest.raises(UsageError, match="array 1"):
        spans_of([np.zeros(2), np.zeros(2, bool)])


@pytest.mark.parametrize("nothing", [[], (), {}])
def test_no_arrays_at_all_are_refused(nothing: object) -> None:
    with pytest.raises(UsageError, match="barrier"):
        spans_of(nothing)


def test_keys_that_cannot_be_sorted_alike_are_refused() -> None:
    with pytest.raises(UsageError, match="strings"):
        spans_of({1: np.zeros(1), "a": np.zeros(1)})
