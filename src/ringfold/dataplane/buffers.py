"""A caller's arrays as the engine takes them: views on the same memory, with a dtype code each. Nothing is copied.

`all_reduce` accepts one array, or a list, tuple or dict of arrays; an array is anything with the buffer protocol
(NumPy, `array.array`, `bytearray`, `memoryview`) or DLPack (torch and others). torch is never imported here: whoever
holds a tensor has it loaded already.

All peers must lay out the same op in the same way. So a dict goes by its sorted keys, and spans go by item size, the
largest first: then a cut at a multiple of eight bytes never splits an element, whatever is fused.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ringfold.dataplane.codes import BFLOAT16, DTYPES
from ringfold.errors import UsageError

Array = npt.NDArray[Any]

CODES: dict[np.dtype[Any], int] = {np.dtype(name): code for name, code in DTYPES.items() if name != "bfloat16"}
"""The dtypes that NumPy knows by itself; a big-endian one is a different key and is not found."""
_DLPACK_CPU = 1


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of another library, handed over without a copy."""

    def __dlpack__(self, *, stream: None = None) -> Any: ...  # noqa: ANN401  # a capsule has no name on Python 3.11
    def __dlpack_device__(self) -> tuple[int, int]: ...


ArrayLike = object
"""Whatever exports its memory. No static type covers both protocols on Python 3.11: it is checked when it is used."""
Buffers = object
"""One array, or a list, tuple or dict of them."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The op's memory in the order of the engine. `arrays` keeps the exporters alive."""

    arrays: list[Array]
    codes: list[int]

    @property
    def layout(self) -> list[tuple[int, int]]:
        """What a separate target must have in common with its source: dtype and count, span by span."""
        return [(code, array.size) for array, code in zip(self.arrays, self.codes, strict=True)]


def spans_of(buffers: Buffers, dtype: str | None = None, *, writable: bool = True) -> Spans:
    """The spans of `buffers`. `dtype="bfloat16"` says that 16-bit integers hold the bits of bfloat16 numbers."""
    views = [view_of(array, name, dtype, writable=writable) for name, array in _named(buffers)]
    if len(views) > 1:
        views.sort(key=lambda view: -view[0].itemsize)  # stable: equal sizes keep the caller's order
    return Spans([array for array, _ in views], [code for _, code in views])


def view_of(
    array: ArrayLike, name: str = "the array", dtype: str | None = None, *, writable: bool = True
) -> tuple[Array, int]:
    """One array as NumPy sees it, on the same memory, and its dtype code. Refuses what cannot be used in place."""
    view = _numpy_view(array, name)
    code = _code_of(view, name, dtype)
    if code == BFLOAT16 and view.dtype != np.uint16:
        view = view.view(np.uint16)
    if not view.flags.c_contiguous:
        raise UsageError(f"{name} is not contiguous; pass numpy.ascontiguousarray(x), or x.contiguous() of a tensor")
    if not view.flags.writeable:
        if writable:
            raise UsageError(f"{name} is read-only, and the result must be written into it; pass a copy, or out=")
        view = np.asarray(_ReadOnly(view))
    return view, code


class _ReadOnly:
    """Read-only memory under an interface that does not say so: the engine takes sources and targets alike, and only
    reads sources. Keeps the array alive that it stands for.
    """

    def __init__(self, view: Array) -> None:
        self.view = view
        interface = dict(view.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _named(buffers: Buffers) -> list[tuple[str, ArrayLike]]:
    if isinstance(buffers, Mapping):
        if not all(isinstance(key, str) for key in buffers):
            raise UsageError("a dict of arrays needs keys that are strings, because all peers must sort them alike")
        named = [(f"the array {key!r}", buffers[key]) for key in sorted(buffers)]
    elif isinstance(buffers, list | tuple):
        named = [(f"array {index}", array) for index, array in enumerate(buffers)]
    else:
        return [("the array", buffers)]
    if not named:
        raise UsageError("there are no arrays to work on; for an empty op call barrier()")
    return named


def _numpy_view(array: ArrayLike, name: str) -> Array:
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        return _tensor_view(cast(_Tensor, array), name)
    try:
        memory = memoryview(array)  # type: ignore[arg-type]  # whether it exports one is the question
    except TypeError:
        pass
    else:
        return _memory_view(memory, name)
    if isinstance(array, SupportsDLPack):
        if array.__dlpack_device__()[0] != _DLPACK_CPU:
            raise UsageError(f"{name} is not in CPU memory; copy it to the CPU first")
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"{name} cannot be used without a copy: {error}") from error
    kind = type(array).__name__
    raise UsageError(f"{name} is a {kind}, which has neither the buffer protocol nor DLPack; pass an array")


def _memory_view(memory: memoryview, name: str) -> Array:
    if not memory.c_contiguous:
        raise UsageError(f"{name} is not contiguous; pass a contiguous copy")
    try:
        return np.asarray(memory)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name} has items of format {memory.format!r}, which is not a dtype: {error}") from error


def _tensor_view(tensor: "_Tensor", name: str) -> Array:
    """A torch tensor on the CPU. bfloat16, which NumPy lacks, goes as 16-bit integers under its own name."""
    if tensor.device.type != "cpu":
        raise UsageError(f"{name} is on {tensor.device}; copy it to the CPU first")
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous; pass x.contiguous()")
    tensor = tensor.detach()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in DTYPES:
        raise UsageError(f"{name} has the dtype {kind}; supported are {', '.join(DTYPES)}")
    try:
        if kind == "bfloat16":
            bits: Array = tensor.view(sys.modules["torch"].int16).numpy()
            return bits.view(_BFLOAT16_BITS)
        array: Array = tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} cannot be used without a copy: {error}") from error
    return array


class _Tensor(Protocol):
    """As much of a torch tensor as is used here."""

    device: Any
    dtype: Any

    def is_contiguous(self) -> bool: ...
    def detach(self) -> "_Tensor": ...
    def view(self, dtype: object) -> "_Tensor": ...
    def numpy(self) -> Array: ...


_BFLOAT16_BITS = np.dtype([("bfloat16", "<u2")])
"""Marks the bits of bfloat16 numbers on their way from a tensor to `_code_of`; no caller sees it."""


def _code_of(view: Array, name: str, dtype: str | None) -> int:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; supported are {', '.join(DTYPES)}")
    if view.dtype == _BFLOAT16_BITS or view.dtype.name == "bfloat16":
        found = BFLOAT16
    elif view.dtype in CODES:
        found = CODES[view.dtype]
    elif view.dtype.newbyteorder("=") in CODES:
        raise UsageError(f"{name} is big-endian ({view.dtype.str}); pass x.astype({view.dtype.name!r})")
    else:
        raise UsageError(f"{name} has the dtype {view.dtype}; supported are {', '.join(DTYPES)}")
    if dtype is None or DTYPES[dtype] == found:
        return found
    if dtype == "bfloat16" and view.dtype in (np.dtype(np.uint16), np.dtype(np.int16)):
        return BFLOAT16
    raise UsageError(f"{name} holds {view.dtype}, not {dtype}; only 16-bit integers may be called bfloat16")
