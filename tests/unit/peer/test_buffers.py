"""What callers may pass as arrays, and what the engine sees of them."""

import array
import ctypes
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from ringfold.errors import UsageError
from ringfold.peer.buffers import Spans, in_and_out, operand_of, spans_of
from ringfold.peer.codes import BFLOAT16, DTYPES

Array = npt.NDArray[Any]


def view_of(array: object, dtype: str | None = None, *, writable: bool = True) -> tuple[Array, int]:
    """What the engine gets for one array."""
    spans = Spans.of([operand_of(array, dtype=dtype, writable=writable)])
    return spans.arrays[0], spans.codes[0]


def layout_of(buffers: object, **options: bool) -> list[tuple[int, int]]:
    """What the engine compares between peers: each span's dtype and size."""
    spans = spans_of(buffers, **options)
    return [(code, array.size) for code, array in zip(spans.codes, spans.arrays, strict=True)]


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
    with pytest.raises(UsageError, match="not in host memory; pass torch"):
        view_of(Exported(np.zeros(4, np.float32), device=2))


class Device:
    def __init__(self, kind: str) -> None:
        self.type = kind

    def __str__(self) -> str:
        return f"{self.type}:0"


class Tensor:
    """A tensor as torch shapes it, on top of NumPy, so that the test needs no torch."""

    int16 = "torch.int16"
    layout = "torch.strided"

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


def test_a_tensor_of_a_dtype_that_is_not_reduced_is_refused() -> None:
    with pytest.raises(UsageError, match="bool"):
        view_of(Tensor(np.zeros(2, bool), "bool"))


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
        (readonly, "read-only.*numpy.array"),
        (lambda: np.broadcast_to(np.zeros(3), (2, 3)), "read-only"),
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
        (lambda: Convertible(), "read-only"),
        (lambda: Convertible(ValueError("it is elsewhere")), "it is elsewhere"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_way_out(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        view_of(make())


class Convertible:
    """An array-like of which NumPy can make an array, perhaps a copy."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Array:
        if self.error is not None:
            raise self.error
        return np.arange(3.0)


def test_a_source_that_is_only_read_may_be_read_only() -> None:
    assert view_of(readonly(), writable=False)[1] == DTYPES["float64"]
    assert view_of(Convertible(), writable=False)[0].tolist() == [0, 1, 2]
    assert view_of(np.broadcast_to(np.arange(2.0), (2, 2)), writable=False)[0].tolist() == [[0, 1], [0, 1]]


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
    assert layout_of({"a": one, "b": two}) == layout_of({"b": two, "a": one})


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


# Arrays that are staged


def block(dtype: object = np.float64) -> Array:
    return np.arange(24).astype(dtype).reshape(2, 3, 4)  # type: ignore[call-overload, no-any-return]


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "Fortran order": np.asfortranarray,
    "transposed": lambda numbers: np.ascontiguousarray(numbers.T).T,
    "channels last": lambda numbers: np.ascontiguousarray(numbers.transpose(0, 2, 1)).transpose(0, 2, 1),
    "every second": lambda numbers: np.repeat(numbers, 2, axis=2)[:, :, ::2],
    "a slice": lambda numbers: np.pad(numbers, 1)[1:-1, 1:-1, 1:-1],
    "backwards": lambda numbers: np.flip(np.flip(numbers).copy()),
    "a field": lambda numbers: _field(numbers),
}


def _field(numbers: Array) -> Array:
    records = np.zeros(numbers.shape, [("before", "u1"), ("value", numbers.dtype), ("after", "u1")])
    records["value"] = numbers
    return records["value"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_any_strides_go_in_c_order_and_come_back(layout: str, dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    mine = LAYOUTS[layout](block(kind))
    assert not mine.flags.c_contiguous
    around = np.array(mine if mine.base is None else mine.base)
    spans = spans_of(mine)
    (copy,) = spans.arrays
    assert copy.flags.c_contiguous
    assert copy.tobytes() == block(kind).tobytes()
    copy[...] = block(kind)[::-1].view(copy.dtype)
    assert (mine == block(kind)).all(), "nothing is written before the op has committed"
    spans.copy_back()
    assert (mine == block(kind)[::-1]).all()
    if layout == "a slice":
        outside = np.array(mine.base)
        outside[1:-1, 1:-1, 1:-1] = around[1:-1, 1:-1, 1:-1] = 0
        assert outside.tobytes() == around.tobytes(), "only the slice's own elements are written"


def test_arrays_in_c_order_are_not_staged() -> None:
    assert not spans_of([np.zeros((2, 3)), np.zeros(()), np.zeros((0, 3)).T, np.zeros((3, 1)).T]).staged


def test_a_strided_memoryview_is_staged() -> None:
    numbers = bytearray(b"a-b-c-")
    spans = spans_of(memoryview(numbers)[::2])
    assert spans.arrays[0].tobytes() == b"abc"
    spans.arrays[0][:] = list(b"xyz")
    spans.copy_back()
    assert numbers == b"x-y-z-"


def test_staged_and_other_arrays_are_fused_in_one_order() -> None:
    """A peer with strided arrays has the layout of one that has none, and each result goes to its own array."""
    small, large = np.zeros((2, 3), np.float32), np.zeros((4, 2), np.float64)
    strided = np.zeros((3, 2), np.float32).T
    assert layout_of([small, large]) == layout_of([strided, large])
    spans = spans_of([strided, large])
    spans.arrays[0][...], spans.arrays[1][...] = 8, 4
    spans.copy_back()
    assert (strided == 4).all()
    assert (large == 8).all()


def as_strided(count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    return np.lib.stride_tricks.as_strided(np.zeros(count, np.int8), shape, strides)


@pytest.mark.parametrize(
    ("make", "overlaps"),
    [
        (lambda: as_strided(3, (2, 3), (0, 1)), True),
        (lambda: as_strided(8, (5, 4), (1, 1)), True),  # a sliding window
        (lambda: as_strided(16, (2, 3), (4, 2)), True),
        (lambda: as_strided(16, (2, 3), (3, 2)), False),  # 0 2 4 and 3 5 7
        (lambda: as_strided(16, (2, 3), (3, 6)), False),
        (lambda: np.lib.stride_tricks.as_strided(np.zeros(4, np.int32), (3, 2), (2, 8)), True),  # halves of items
        (lambda: np.zeros((4, 5), np.int8)[::-1, ::-2], False),
    ],
)
def test_an_array_that_overlaps_itself_may_be_read_but_not_written(make: Callable[[], Array], overlaps: bool) -> None:
    assert spans_of(make(), writable=False).arrays[0].shape == make().shape
    if overlaps:
        with pytest.raises(UsageError, match=r"share their memory.*go on with y"):
            spans_of(make())
    else:
        assert spans_of(make()).staged


def test_memory_that_is_written_twice_is_refused() -> None:
    grid = np.zeros((4, 4))
    for twice in ([grid.T, grid.T], [grid, grid[:, 1]], [grid[:, :2], grid[:, 1:]]):
        with pytest.raises(UsageError, match="written twice"):
            spans_of(twice)
        with pytest.raises(UsageError, match="written twice"):
            in_and_out(twice, twice, None)
    assert len(spans_of([grid[:, column] for column in range(4)]).staged) == 4


def test_out_is_the_buffers_or_apart_from_them() -> None:
    grid = np.zeros((4, 4))
    source, target = in_and_out([grid.T], [grid.T], None)
    assert target is None
    assert len(source.staged) == 1
    strided = block().T
    assert in_and_out([grid, strided], [grid.reshape(-1), strided], None)[1] is None
    assert in_and_out([grid, strided], [np.zeros(16), np.zeros(24)], None)[1] is not None
    for out in (grid, grid[::-1].T, grid.T[::-1]):
        with pytest.raises(UsageError, match="out= overlaps the buffers"):
            in_and_out(grid.T, out, None)


def test_a_staged_out_takes_the_elements_in_order() -> None:
    source, target = in_and_out(block(), np.zeros((4, 6)).T, None)
    assert target is not None
    out = np.zeros((4, 6)).T
    _, target = in_and_out(source.arrays, [out], None)
    assert target is not None
    target.arrays[0].reshape(-1)[:] = source.arrays[0].reshape(-1)
    target.copy_back()
    assert out.reshape(-1).tolist() == list(range(24))


# Arrays that are not there


def test_none_is_named_with_two_ways_out() -> None:
    with pytest.raises(UsageError, match=r"array 1 is None.*zeros.*skip_none=True"):
        spans_of([np.zeros(1), None])
    with pytest.raises(UsageError, match="the array 'bias' is None"):
        spans_of({"bias": None})


def test_none_is_omitted_if_requested() -> None:
    one, two = np.zeros(3, np.float32), np.zeros(2)
    spans = spans_of([None, one, None, two], skip_none=True)
    assert [array.size for array in spans.arrays if array.size] == [2, 3]
    assert sum(array.size for array in spans_of([None, None], skip_none=True).arrays) == 0


def test_peers_that_leave_out_different_arrays_have_different_layouts() -> None:
    """Also where those that are left look alike, and where they are sorted."""
    here, wide = np.zeros(3, np.float32), np.zeros(3)
    cases: list[list[object]] = [
        [None, here, here, wide],
        [here, None, here, wide],
        [here, here, None, wide],
        [here, here, wide, None],
        [None, None, here, wide],
        [None, here, None, wide],
    ]
    layouts = [tuple(layout_of(case, skip_none=True)) for case in cases]
    assert len(set(layouts)) == len(cases)


def test_out_leaves_out_the_same_arrays() -> None:
    here, out = np.zeros(3), np.zeros(3)
    source, target = in_and_out([None, here], [None, out], None, skip_none=True)
    assert target is not None
    assert len(source.arrays) == len(target.arrays) == 2
    with pytest.raises(UsageError, match="as many arrays"):
        in_and_out([None, here], [out, None], None, skip_none=True)


# torch


def test_torch_tensors_of_any_strides() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        image = torch.arange(48).to(dtype).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last)
        spans = spans_of(image.requires_grad_())
        assert spans.arrays[0].reshape(-1)[1] == torch.ones(1, dtype=dtype).view(torch.uint8).numpy().view(
            np.uint16 if dtype == torch.bfloat16 else np.float32
        )
        spans.arrays[0][...] = 0
        spans.copy_back()
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert (image == 0).all()


def test_tensors_without_elements_to_reduce_say_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    sparse = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a beta, once in a process
        rows = sparse.to_sparse_csr()
    for tensor in (sparse, rows):
        with pytest.raises(UsageError, match=r"sparse.*to_dense\(\)"):
            spans_of([tensor])
    with pytest.raises(UsageError, match=r"meta device.*materialise"):
        spans_of(torch.zeros(3, device="meta"))
    with pytest.raises(UsageError, match="share their memory"):
        spans_of(torch.zeros(1).expand(3))


def test_a_distributed_tensor_is_reduced_by_its_local_part() -> None:
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")
    tensors = pytest.importorskip("torch.distributed.tensor")
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        sharded = tensors.distribute_tensor(torch.ones(3, 2), mesh, [tensors.Shard(0)])
        with pytest.raises(UsageError, match=r"to_local\(\)"):
            spans_of([sharded])
        spans_of(sharded.to_local()).arrays[0][...] = 5
        assert (sharded.to_local() == 5).all()
    finally:
        distributed.destroy_process_group()


def test_a_cuda_tensor_is_staged_through_host_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numbers in (torch.arange(12, device="cuda").reshape(3, 4), torch.arange(24, device="cuda")[::2].view(3, 4)):
            tensor = numbers.to(dtype).t()
            before = tensor.clone()
            spans = spans_of(tensor)
            spans.arrays[0][...] = 0
            assert torch.equal(tensor, before)
            spans.give_back()
            assert not tensor.any()
    with torch.inference_mode():
        tensor = torch.ones(3, device="cuda")
    spans = spans_of(tensor)
    spans.arrays[0][...] = 5
    spans.give_back()
    assert tensor.tolist() == [5, 5, 5]
    for wrong in ([tensor, tensor], tensor[:1].expand(4)):
        with pytest.raises(UsageError, match=r"written twice|share their memory"):
            spans_of(wrong)


# JAX


def test_jax_arrays_are_sources_only() -> None:
    jax_numpy = pytest.importorskip("jax.numpy")
    for dtype in ("float32", "bfloat16", "int8"):
        numbers = jax_numpy.arange(6).reshape(2, 3).astype(dtype)
        view, code = view_of(numbers, writable=False)
        assert code == DTYPES[dtype]
        assert view.tobytes() == np.asarray(numbers).tobytes()
        with pytest.raises(UsageError, match=r"JAX arrays are immutable.*out=numpy.empty"):
            view_of(numbers)
        out = np.empty(numbers.shape, numbers.dtype)
        assert in_and_out(numbers, out, None)[1] is not None


def test_a_jax_array_without_numbers_is_refused() -> None:
    jax = pytest.importorskip("jax")
    gone = jax.numpy.ones(3)
    gone.delete()
    with pytest.raises(UsageError, match="deleted"):
        view_of(gone, writable=False)

    def traced(numbers: object) -> object:
        with pytest.raises(UsageError, match="traced"):
            view_of(numbers, writable=False)
        return numbers

    jax.jit(traced)(jax.numpy.ones(3))
