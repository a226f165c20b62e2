"""The caller's arrays as the engine takes them: in C order, in host memory, with a dtype code each.

`all_reduce` accepts one array, or a list, tuple or dict of arrays. An array is an object with the buffer protocol
(NumPy, `array.array`, `bytearray`, `memoryview`) or DLPack (torch and others). torch is never imported here: a program
that has a tensor has loaded it already.

An array in host memory and C order is used in place. Every other one (other strides, the memory of a device) is
*staged* (`staging.py`, and `cuda_copies.py` for CUDA): the engine works on a copy in C order, which is copied back when
the op has committed. So elements are matched by their indices, whatever the memory order on each peer, and a failed op
has not written to the caller's array.

All peers must lay out the same op in the same way. So a dict is in the order of its sorted keys, and spans are in the
order of item sizes, the largest first: then a cut at a multiple of eight bytes never splits an element. An array that
is left out because it is None has an empty span at its place: peers that leave out different arrays have different
layouts, even if all sizes are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.peer.codes import BFLOAT16, DTYPES
from ringfold.peer.cuda_copies import MIN_PIPELINED, CudaCopies, Pipeline, layout_of
from ringfold.peer.staging import Array, DeviceCopy, Event, Staged, StridedCopy, Tensor, host_view, join

CODES: dict[np.dtype[Any], int] = {np.dtype(name): code for name, code in DTYPES.items() if name != "bfloat16"}
"""The dtypes that NumPy has itself; a big-endian dtype is a different key and is not found."""
_DLPACK_CPU = 1


class SupportsBuffer(Protocol):
    """An object with the buffer protocol: `array.array`, `bytearray`, `memoryview`, NumPy arrays."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array with the DLPack protocol, which shares its memory without a copy: torch tensors, JAX arrays."""

    def __dlpack__(self, *, stream: None = None) -> Any: ...  # noqa: ANN401  # a capsule has no name on Python 3.11
    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsArray(Protocol):
    """An object that NumPy can read as an array, perhaps by a copy. It can be a source, never a target."""

    def __array__(self) -> npt.NDArray[Any]: ...


ArrayLike = npt.NDArray[Any] | SupportsBuffer | SupportsDLPack | SupportsArray
"""One array of any library that exports its memory."""
Buffers = ArrayLike | Sequence[ArrayLike | None] | Mapping[str, ArrayLike | None]
"""One array, or a list, tuple or dict of them. None is legal only with `skip_none`."""


@dataclass(frozen=True, slots=True)
class Spans:
    """What the engine works on: the memory of the caller's arrays, or of their copies."""

    arrays: list[Array]
    codes: list[int]
    staged: Sequence[Staged] = ()
    cuda: CudaCopies | None = None
    cuda_places: Sequence[int | None] = ()
    """Of each array: which tensor of `cuda` it is a copy of."""

    @classmethod
    def of(cls, operands: "Sequence[Operand]", *, read: bool = True, wait: bool = True) -> "Spans":
        """The memory that the engine works on. Without `read` the content is not copied: the op does not read it.

        Without `wait` CUDA tensors are not copied yet: see `fill`.
        """
        arrays: list[Array | None] = []
        staged: list[Staged] = []
        cuda: list[Tensor] = []
        places: list[int | None] = []
        for operand in operands:
            is_cuda = operand.is_cuda
            places.append(len(cuda) if is_cuda else None)
            if is_cuda:
                cuda.append(cast(Tensor, operand.tensor))
                arrays.append(None)
                continue
            array, copy = operand.in_c_order(read=read)
            arrays.append(array)
            if copy is not None:
                staged.append(copy)
        codes = [operand.code for operand in operands]
        if not cuda:
            return cls(cast(list[Array], arrays), codes, staged)
        copies = CudaCopies(cuda, read=read)
        if wait:
            copies.wait_filled(_go_on)
        ours = [array if place is None else copies.arrays[place] for array, place in zip(arrays, places, strict=True)]
        return cls(cast(list[Array], ours), codes, staged, copies, places)

    def fill(self) -> None:
        """Begin to copy CUDA tensors to the host, unless that has begun."""
        if self.cuda is not None:
            self.cuda.fill()

    def is_filled(self) -> bool:
        """Whether the engine may read the arrays. Never blocks."""
        return self.cuda is None or self.cuda.is_filled()

    def wait_filled(self, check: Callable[[], None]) -> None:
        """The same, and wait for it. What `check` raises ends the wait."""
        if self.cuda is not None:
            self.cuda.wait_filled(check)

    def pipeline(self, target: "Spans | None", rank: int, size: int) -> Pipeline | None:
        """The copies of a large op from here to `target` (None: in place), to go on while the engine works on it.

        `rank` and `size` are those of the ring. None: the op is not worth it.
        """
        down, up = self.cuda, self.cuda if target is None else target.cuda
        cuda = [each for each in (down, up) if each is not None]
        if not cuda or sum(array.nbytes for array in self.arrays) < MIN_PIPELINED:
            return None
        if None in (devices := {each.device for each in cuda}) or len(devices) > 1:
            return None
        places = self.cuda_places if down is not None else cast(Spans, target).cuda_places
        if target is not None and down is not None and up is not None and list(places) != list(target.cuda_places):
            return None
        sizes = [(array.nbytes, array.itemsize) for array in self.arrays]
        layout = layout_of(tuple((*size, place) for size, place in zip(sizes, places, strict=True)))
        return Pipeline(layout, down, up, rank, size)

    def copy_back(self, pipeline: Pipeline | None = None) -> list[Event]:
        """The op has committed: copy staged results back to the caller's arrays. Streams may go on with it."""
        for copy in self.staged:
            copy.copy_back()
        if self.cuda is None:
            return []
        return self.cuda.copy_back() if pipeline is None else pipeline.copy_back()

    def give_back(self, pipeline: Pipeline | None = None) -> None:
        """The same; whatever this thread's streams are given from now on follows the results."""
        try:
            join(self.copy_back(pipeline))
        except Exception as error:
            error.add_note("the op is committed: the other members have its result, and go on")
            raise


def _go_on() -> None:
    """Nothing ends a wait but Ctrl-C."""


def spans_of(
    buffers: Buffers,
    dtype: str | None = None,
    *,
    writable: bool = True,
    skip_none: bool = False,
    read: bool = True,
    wait: bool = True,
) -> Spans:
    """The spans of `buffers`. `dtype="bfloat16"` means that 16-bit integers hold the bits of bfloat16 numbers."""
    operands = _operands(buffers, dtype, writable=writable, skip_none=skip_none)
    if writable:
        check_apart(operands)
    return Spans.of(operands, read=read, wait=wait)


def in_and_out(
    buffers: Buffers,
    out: Buffers | None,
    dtype: str | None,
    *,
    skip_none: bool = False,
    read: bool = True,
    wait: bool = True,
) -> tuple[Spans, Spans | None]:
    """The spans of an op from `buffers` to `out`; the second is None if the op is in place.

    `read` and `wait` are as in `Spans.of`.
    """
    if out is None:
        return spans_of(buffers, dtype, skip_none=skip_none, read=read, wait=wait), None
    source = _operands(buffers, dtype, writable=False, skip_none=skip_none)
    target = _operands(out, dtype, writable=True, skip_none=skip_none)
    if [(operand.code, operand.size) for operand in source] != [(operand.code, operand.size) for operand in target]:
        raise UsageError("out= must have as many arrays as the buffers, each with the same dtype and size")
    if all(one.is_at(other) for one, other in zip(source, target, strict=True)):
        check_apart(target)
        return Spans.of(target, read=read, wait=wait), None
    check_apart(target, source)
    return Spans.of(source, read=read, wait=wait), Spans.of(target, read=False)


@dataclass(frozen=True, slots=True)
class Operand:
    """One array of the caller, checked; nothing is copied yet.

    `view` is a NumPy view of its memory, with any strides. For the memory of a device there is only the tensor.
    """

    code: int
    view: Array | None
    tensor: Tensor | None = None

    @property
    def size(self) -> int:
        return self.view.size if self.view is not None else cast(Tensor, self.tensor).numel()

    @property
    def described(self) -> str:
        """Its dtype and shape, for error texts."""
        if self.view is not None:
            return f"{self.view.dtype} {self.view.shape}"
        tensor = cast(Tensor, self.tensor)
        return f"{tensor.dtype} {tuple(tensor.shape)}"

    @property
    def is_staged(self) -> bool:
        return self.view is None or not self.view.flags.c_contiguous

    @property
    def is_cuda(self) -> bool:
        """Whether it is a tensor on CUDA, which torch for ROCm calls its devices, too."""
        return self.tensor is not None and self.tensor.device.type == "cuda"

    def in_c_order(self, *, read: bool) -> tuple[Array, Staged | None]:
        """The array's own memory; or a copy in C order, filled if `read`. Not for tensors on CUDA."""
        if self.view is not None and self.view.flags.c_contiguous:
            return self.view, None
        copy: Staged
        if self.view is not None:
            copy = StridedCopy(self.view, read=read)
        else:
            copy = DeviceCopy(cast(Tensor, self.tensor), read=read)
        return copy.array, copy

    def is_at(self, other: "Operand") -> bool:
        """Whether both, of one size, are the same elements of the same memory, in the same order."""
        one, two = self.view, other.view
        if one is not None and two is not None:
            in_order = one.flags.c_contiguous and two.flags.c_contiguous
            return _address(one) == _address(two) and (in_order or (one.shape, one.strides) == (two.shape, two.strides))
        here, there = self.tensor, other.tensor
        if here is None or there is None:
            return False
        same_steps = (here.shape, here.stride()) == (there.shape, there.stride())
        return same_steps and _device_address(here) == _device_address(there)


def operand_of(
    array: ArrayLike, name: str = "the array", dtype: str | None = None, *, writable: bool = True
) -> Operand:
    """One array, checked: its dtype is supported, and it can be read, or written if it is `writable`."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; supported are {', '.join(DTYPES)}")
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        tensor = cast(Tensor, array).detach()
        kind = _tensor_kind(tensor, name)
        code = _declared(DTYPES[kind], kind, name, dtype)
        if tensor.device.type != "cpu":
            item_bytes = tensor.element_size()
            strides = [stride * item_bytes for stride in tensor.stride()]
            if writable and _overlaps_itself(tensor.shape, strides, item_bytes):
                raise UsageError(_OVERLAPPING.format(name=name))
            return Operand(code, None, tensor)
        view = _tensor_view(tensor, name)
    else:
        view = _numpy_view(array, name)
        code = _code_of(view, name, dtype)
        if code == BFLOAT16:
            view = view.view(np.uint16)
    if not view.flags.writeable:
        if writable:
            raise UsageError(_READ_ONLY.format(name=name, why=_IMMUTABLE if _is_jax(array) else ""))
        if view.flags.c_contiguous:
            view = np.asarray(_ReadOnly(view))
    elif writable and not view.flags.c_contiguous and _overlaps_itself(view.shape, view.strides, view.itemsize):
        raise UsageError(_OVERLAPPING.format(name=name))
    return Operand(code, view)


_READ_ONLY = (
    "{name} is read-only{why}, and the result must be written into it; pass out=numpy.empty(x.shape, x.dtype) where "
    "the call has it, or a writable copy, y = numpy.array(x), and go on with y"
)
_IMMUTABLE = " (JAX arrays are immutable)"
_OVERLAPPING = (
    "{name} has elements that share their memory (an expanded or broadcast array has), so that results would overwrite "
    "each other; pass a copy, y = x.clone() or numpy.array(x), and go on with y"
)


class _ReadOnly:
    """Read-only memory under an array interface that hides this: the engine takes sources and targets by the same type,
    and only reads sources. It keeps the array alive.
    """

    def __init__(self, view: Array) -> None:
        self.view = view
        interface = dict(view.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _operands(buffers: Buffers, dtype: str | None, *, writable: bool, skip_none: bool) -> list[Operand]:
    """The arrays in the order of the engine, with an empty one for each that is None."""
    operands: list[Operand] = []
    skipped: list[int] = []  # how many arrays are before each None
    for name, array in _named(buffers):
        if array is not None:
            operands.append(operand_of(array, name, dtype, writable=writable))
        elif skip_none:
            skipped.append(len(operands))
        else:
            raise UsageError(
                f"{name} is None (a parameter without a gradient?); give zeros in its place, or have all_reduce leave "
                f"it out with skip_none=True, on all peers alike"
            )
    if len(operands) > 1:
        operands.sort(key=lambda operand: -_ITEM_BYTES[operand.code])  # stable: equal sizes keep the caller's order
    if skipped:
        empty = Operand(operands[0].code if operands else DTYPES["float32"], np.empty(0, np.uint8))
        for place in reversed(skipped):
            operands.insert(place, empty)
    return operands


_ITEM_BYTES = {code: 2 if code == BFLOAT16 else np.dtype(name).itemsize for name, code in DTYPES.items()}


def _named(buffers: Buffers) -> list[tuple[str, ArrayLike | None]]:
    if isinstance(buffers, Mapping):
        if not all(isinstance(key, str) for key in buffers):
            raise UsageError("a dict of arrays needs keys that are strings, because all peers must sort them alike")
        named = [(f"the array {key!r}", buffers[key]) for key in sorted(buffers)]
    elif isinstance(buffers, list | tuple):
        named = [(f"array {index}", array) for index, array in enumerate(buffers)]
    else:
        return [("the array", cast(ArrayLike, buffers))]
    if not named:
        raise UsageError("there are no arrays to work on; for an empty op call barrier()")
    return named


# Overlaps


def check_apart(written: Sequence[Operand], read: Sequence[Operand] = ()) -> None:
    """Refuse memory that is written twice, or both read and written by an op that is not in place.

    The engine checks this itself, but for staged arrays it has only the copies.
    """
    if not any(operand.is_staged for operand in (*written, *read)):
        return
    tensors = [_device_address(operand.tensor) for operand in written if operand.tensor is not None and operand.size]
    if len(set(tensors)) < len(tensors):
        raise UsageError(_WRITTEN_TWICE)
    places = [(*_bounds(operand.view), True, operand.view) for operand in written if operand.view is not None]
    places += [(*_bounds(operand.view), False, operand.view) for operand in read if operand.view is not None]
    begun: list[tuple[int, int, bool, Array]] = []
    for place in sorted(places, key=lambda place: place[:2]):
        begun = [earlier for earlier in begun if earlier[1] > place[0]]
        for earlier in begun:
            if (earlier[2] or place[2]) and np.shares_memory(earlier[3], place[3]):
                raise UsageError(_WRITTEN_TWICE if earlier[2] and place[2] else _OUT_OVERLAPS)
        begun.append(place)


_WRITTEN_TWICE = "the same memory is written twice: pass each array once, and no views that overlap"
_OUT_OVERLAPS = "out= overlaps the buffers: give the buffers themselves, or memory apart from them"


def _bounds(view: Array) -> tuple[int, int]:
    """The first address of an array's memory, and the one after its last."""
    low = high = _address(view)
    if not view.size:
        return low, high
    for length, stride in zip(view.shape, view.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + view.itemsize


def _address(view: Array) -> int:
    return int(view.__array_interface__["data"][0])


def _device_address(tensor: Tensor) -> object:
    """Tensors with equal addresses begin with the same element. On a device without addresses tensors never overlap."""
    address = tensor.data_ptr()
    return (str(tensor.device), address) if address else id(tensor)


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Whether two elements of one array share memory."""
    if 0 in shape:
        return False
    axes = sorted((abs(stride), length) for length, stride in zip(shape, strides, strict=True) if length > 1)
    is_nested, reach, elements = True, item_bytes, 1
    for stride, length in axes:
        is_nested &= stride >= reach  # each step goes beyond the reach of all smaller steps
        reach += stride * (length - 1)
        elements *= length
    if is_nested or elements * item_bytes > reach:
        return not is_nested
    offsets = np.zeros(1, np.int64)
    for stride, length in axes:
        offsets = np.add.outer(offsets, stride * np.arange(length)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < item_bytes).any())


# Arrays of other libraries


def _numpy_view(array: ArrayLike, name: str) -> Array:
    if isinstance(array, np.ndarray):
        return array
    try:
        memory = memoryview(array)  # type: ignore[arg-type]  # whether it exports one is the question
    except (TypeError, BufferError):
        pass
    else:
        return _memory_view(memory, name)
    why = "has neither the buffer protocol nor DLPack; pass an array"
    if isinstance(array, SupportsDLPack):
        try:
            if array.__dlpack_device__()[0] == _DLPACK_CPU:
                return np.from_dlpack(array)
            why = "is not in host memory; pass torch.from_dlpack(x), which shares its memory, or a copy in host memory"
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            why = f"cannot be used without a copy: {error}"
    if hasattr(array, "__array__"):
        try:
            view = np.asarray(array).view()
        except (RuntimeError, TypeError, ValueError) as error:
            why = f"cannot be read as a NumPy array: {error}"
        else:
            view.flags.writeable = False  # it may be a copy: writes to it would be lost
            return view
    raise UsageError(f"{name} is a {type(array).__name__}, which {why}")


def _memory_view(memory: memoryview, name: str) -> Array:
    try:
        return np.asarray(memory)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name} has items of format {memory.format!r}, which is not a dtype: {error}") from error


def _is_jax(array: ArrayLike) -> bool:
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _tensor_kind(tensor: Tensor, name: str) -> str:
    """The name of a tensor's dtype, if it has elements that can be reduced."""
    layout = str(tensor.layout)
    if layout != "torch.strided":
        raise UsageError(
            f"{name} has the layout {layout}, and only dense (strided) tensors can be reduced; make it dense first, "
            f"p.grad = p.grad.to_dense(), and pass that"
        )
    if hasattr(tensor, "to_local"):
        raise UsageError(f"{name} is a DTensor; pass this process's part, x.to_local(), which shares its memory")
    if tensor.device.type == "meta":
        raise UsageError(
            f"{name} is on the meta device, where tensors have no elements; materialise it first, for example with "
            f"module.to_empty(device='cpu'), and give it values"
        )
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in DTYPES:
        raise UsageError(f"{name} has the dtype {kind}; supported are {', '.join(DTYPES)}")
    return kind


def _tensor_view(tensor: Tensor, name: str) -> Array:
    try:
        return host_view(tensor)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} cannot be used without a copy: {error}") from error


def _code_of(view: Array, name: str, dtype: str | None) -> int:
    found = CODES.get(view.dtype)
    if found is None:
        if view.dtype.name == "bfloat16":
            found = BFLOAT16
        elif view.dtype.newbyteorder("=") in CODES:
            raise UsageError(
                f"{name} is big-endian ({view.dtype.str}); pass y = x.astype({view.dtype.name!r}), and go on with y"
            )
        else:
            raise UsageError(f"{name} has the dtype {view.dtype}; supported are {', '.join(DTYPES)}")
    return _declared(found, view.dtype.name, name, dtype) if dtype is not None else found


def _declared(found: int, kind: str, name: str, dtype: str | None) -> int:
    """The code of an array that the caller declares as `dtype`: its own, or bfloat16 for 16-bit integers."""
    if dtype is None or DTYPES[dtype] == found:
        return found
    if dtype == "bfloat16" and kind in ("uint16", "int16"):
        return BFLOAT16
    raise UsageError(f"{name} holds {kind}, not {dtype}; only 16-bit integers may be called bfloat16")


class Source:
    """The array of an op whose result has another size."""

    def __init__(self, array: ArrayLike, dtype: str | None) -> None:
        self.operand = operand_of(array, dtype=dtype, writable=False)
        self.spans = Spans.of([self.operand])
        self.shape = self.spans.arrays[0].shape
        # bfloat16 of a NumPy extension (JAX's is) gives results of its own dtype; other libraries' come as bits.
        kind = getattr(array, "dtype", None)
        self.kind = kind if isinstance(kind, np.dtype) else self.spans.arrays[0].dtype


class ResultBuffer:
    """The target of an op whose size depends on the ring: the caller's `out`, or a new array."""

    def __init__(self, source: Source, out: ArrayLike | None, dtype: str | None) -> None:
        self._source = source
        self._dtype = dtype
        self._out = None if out is None else operand_of(out, "out=", dtype)
        self._array = out if isinstance(out, np.ndarray) else None if self._out is None else self._out.view
        self._spans = Spans([], [])

    def of_shape(self, shape: tuple[int, ...]) -> Spans:
        """The memory that an op with a result of this shape writes to."""
        source, operand = self._source.operand, self._out
        if operand is None:
            self._array = np.empty(shape, self._source.kind)
            operand = operand_of(self._array, dtype=self._dtype)
        elif operand.code != source.code or operand.size != int(np.prod(shape)):
            raise UsageError(f"out= must have the array's dtype and the shape {shape}, not {operand.described}")
        check_apart([operand], [source])
        self._spans = Spans.of([operand], read=False)
        return self._spans

    def written(self) -> Array:
        """The op has committed: its result as a NumPy array. The program may write to it at once."""
        written = self._spans.copy_back()
        join(written)
        for event in written:
            event.synchronize()
        return self._spans.arrays[0] if self._array is None else self._array


def result_alone(
    array: ArrayLike, out: ArrayLike | None, dtype: str | None, *, gathers: bool, contribute: bool = True
) -> Array:
    """The result of an all_gather, or a reduce_scatter, in a group of one."""
    source = Source(array, dtype)
    result = ResultBuffer(source, out, dtype)
    spans = result.of_shape((1, *source.shape) if gathers else (source.operand.size,))
    target = spans.arrays[0].reshape(-1)
    target[:] = source.spans.arrays[0].reshape(-1) if contribute else 0
    return result.written()
