"""One array of a shared state as bytes: what it is, where it is, and how to read and write a part of it.

*Host* memory is what the CPU can address. An array there is used in place: `ArrayMemory.host` is a flat view of its
bytes, and nothing is copied. An array on a *device* (a torch tensor on a GPU) is read and written through host memory,
a part at a time, so that a state of any size needs only a few blocks of host memory.

A name is bound to an array once, but the array may change between two syncs (a tensor is resized, or moved to a GPU
with `module.to`). So an `ArrayMemory` is made for each sync, and not kept.

The dtype goes by name, so that two peers agree on it whatever library their arrays come from: "float32", "bfloat16".
What has no such name goes by NumPy's own string: a big-endian float32 is ">f4", which is another dtype than "float32".

torch is not imported unless there is a tensor: a program that holds one has loaded torch already.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.state import hashing
from ringfold.state.blocks import BLOCK_BYTES
from ringfold.state.hashing import Bytes
from ringfold.wire.messages import HashKind

_STAGE_BYTES = 16 * BLOCK_BYTES
"""How much of a device's memory is copied and hashed at once if the CPU has to hash it."""
_DLPACK_CPU = 1


@dataclass(frozen=True, slots=True)
class ArrayMemory:
    """The bytes of one array, and what they mean. Exactly one of `host` and `device` is set; both are flat bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    host: Bytes | None
    device: "_Tensor | None" = None

    def read(self, first: int, last: int) -> Bytes:
        """The bytes from `first` up to `last` in host memory: the array itself if it is there, else a copy."""
        if self.host is not None:
            return self.host[first:last]
        assert self.device is not None
        return self.device[first:last].cpu().numpy()

    def write(self, first: int, content: Bytes) -> None:
        """Write `content` at `first`. If it is part of the array itself, it is there already, and nothing is done."""
        last = first + content.size
        if self.host is not None:
            if not np.may_share_memory(self.host[first:last], content):
                self.host[first:last] = content
            return
        assert self.device is not None
        source = content if content.flags.writeable else content.copy()  # torch warns about read-only memory
        self.device[first:last].copy_(_torch().from_numpy(source))

    def receive_buffer(self, first: int, last: int) -> Bytes:
        """Host memory to receive these bytes in: the array itself if it is there. Call `write` when it is full."""
        if self.host is not None:
            return self.host[first:last]
        return np.empty(last - first, np.uint8)

    def block_hashes(self, kind: HashKind, threads: int = 0, block_bytes: int = BLOCK_BYTES) -> bytes:
        """The hashes of all blocks. A GPU hashes its own memory if it can."""
        if self.host is not None:
            return hashing.block_hashes(self.host, kind, threads, block_bytes)
        assert self.device is not None
        assert block_bytes == BLOCK_BYTES
        if kind == "rf64" and self.device.is_cuda:
            try:
                gpu_hash = import_module("ringfold.state.gpu_hash")
                return cast(bytes, gpu_hash.block_hashes(self.device))
            except (ImportError, UsageError):
                pass  # no Triton here: slower through the CPU, but the same hashes
        starts = range(0, self.nbytes, _STAGE_BYTES)
        parts = (self.read(start, min(start + _STAGE_BYTES, self.nbytes)) for start in starts)
        return b"".join(hashing.block_hashes(part, kind, threads) for part in parts)


def memory_of(array: object, name: str) -> ArrayMemory:
    """The memory of the array called `name`, without a copy. Raises `UsageError` if it cannot be used in place."""
    if isinstance(array, np.ndarray):
        return _of_numpy(array, name)
    if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous"):
        return _of_tensor(cast(_Tensor, array), name)
    try:
        exported = memoryview(array)  # type: ignore[arg-type]  # whether it exports one is the question
    except TypeError:
        return _of_dlpack(array, name)
    return _of_numpy(_numpy_of(exported, name), name)


@runtime_checkable
class _SupportsDLPack(Protocol):
    """An array of another library, handed over without a copy."""

    def __dlpack__(self, *, stream: None = None) -> Any: ...  # noqa: ANN401  # a capsule has no name on Python 3.11
    def __dlpack_device__(self) -> tuple[int, int]: ...


class _Tensor(Protocol):
    """The part of a torch tensor that is used here."""

    device: Any
    dtype: Any
    layout: Any
    shape: Sequence[int]
    is_cuda: bool

    def __getitem__(self, part: slice) -> "_Tensor": ...
    def is_contiguous(self) -> bool: ...
    def detach(self) -> "_Tensor": ...
    def reshape(self, size: int) -> "_Tensor": ...
    def view(self, dtype: object) -> "_Tensor": ...
    def cpu(self) -> "_Tensor": ...
    def copy_(self, source: object) -> "_Tensor": ...
    def numpy(self) -> npt.NDArray[Any]: ...


def _of_numpy(array: npt.NDArray[Any], name: str) -> ArrayMemory:
    dtype = _NAMES.get(array.dtype) or _name_of(array.dtype, name)
    if not array.flags.c_contiguous:
        raise UsageError(f"{name!r} is not contiguous; share numpy.ascontiguousarray(x) and work on that")
    if not array.flags.writeable:
        raise UsageError(f"{name!r} is read-only, and a sync must be able to write it; share a writable copy")
    try:
        flat: Bytes = array.reshape(-1).view(np.ndarray).view(np.uint8)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name!r} ({dtype}) cannot be seen as bytes: {error}") from error
    return ArrayMemory(dtype, array.shape, array.nbytes, flat)


_NAMES: dict[np.dtype[Any], str] = {}
"""A cache: NumPy computes a dtype's name at each call, and a state may have 100,000 arrays."""


def _name_of(dtype: np.dtype[Any], name: str) -> str:
    """The name of a dtype that is the same on all peers."""
    if dtype.hasobject:
        raise UsageError(f"{name!r} holds Python objects ({dtype}), which are not the same bytes on two peers")
    if dtype.itemsize == 0:
        raise UsageError(f"{name!r} has a dtype without a size ({dtype})")
    if dtype.fields is not None:
        found = str(dtype)
    elif dtype.kind in "biufcV" and dtype.isnative:
        found = dtype.name  # also what ml_dtypes adds: "bfloat16", "float8_e4m3fn"
    else:
        found = dtype.str
    _NAMES[dtype] = found
    return found


def _numpy_of(exported: memoryview, name: str) -> npt.NDArray[Any]:
    if not exported.c_contiguous:
        raise UsageError(f"{name!r} is not contiguous; share a contiguous array")
    try:
        return np.asarray(exported)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name!r} has items of format {exported.format!r}, which is no dtype: {error}") from error


def _of_tensor(tensor: _Tensor, name: str) -> ArrayMemory:
    """A torch tensor, on the CPU or on a device. Only its values are shared, not its autograd history."""
    where = str(tensor.device)
    if str(tensor.layout) != "torch.strided" or where.startswith("meta"):
        raise UsageError(f"{name!r} is a tensor without plain memory ({tensor.layout} on {where})")
    if not tensor.is_contiguous():
        raise UsageError(f"{name!r} is not contiguous; share x.contiguous() and work on that")
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(int(length) for length in tensor.shape)
    try:
        flat = tensor.detach().reshape(-1).view(_torch().uint8)
        if where == "cpu":
            host: Bytes = flat.numpy()
            return ArrayMemory(dtype, shape, host.nbytes, host)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name!r} ({dtype} on {where}) cannot be seen as bytes: {error}") from error
    return ArrayMemory(dtype, shape, int(flat.shape[0]), None, flat)


def _of_dlpack(array: object, name: str) -> ArrayMemory:
    if not isinstance(array, _SupportsDLPack):
        kind = type(array).__name__
        raise UsageError(f"{name!r} is a {kind}, which has neither the buffer protocol nor DLPack; share an array")
    try:
        if array.__dlpack_device__()[0] == _DLPACK_CPU:
            return _of_numpy(np.from_dlpack(array), name)
        return _of_tensor(cast(_Tensor, _torch().from_dlpack(array)), name)
    except ImportError as error:
        raise UsageError(f"{name!r} lies on a device, which needs PyTorch here: {error}") from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{name!r} cannot be used without a copy: {error}") from error


def _torch() -> Any:  # noqa: ANN401  # torch is not a dependency, so its types are not there
    return sys.modules.get("torch") or import_module("torch")
