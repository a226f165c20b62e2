"""Copies in host memory, for arrays that the engine cannot work on in place: with other strides, or on a device.

A copy is *filled* from the caller's array before the op, and copied back after its commit. Copies of CUDA tensors are
in pinned memory and run in two streams of their own for each device, so that neither the program's kernels nor the
copies of other ops wait for them:

    program's stream:  kernels that write x ──●·······································●── kernels that read x
    down:                                     └─ x to the host ─●                    │
    engine:                                                     └─ ring ─●           │
    up:                                                                  └─ host to x ┘

So it is as with NCCL: the copy follows what the program's stream had been given when the op was called, and what this
stream is given after `wait` follows the result. The program's thread waits for the ring, never for the copy back.
Pinned memory comes from torch's own pool, which gives a block to another copy only when the streams are through with
it; the tensors' memory is kept in the same way.

torch is never imported here: a program that has a tensor has loaded it already.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Tensor(Protocol):
    """As much of a torch tensor as is used here and by its neighbours."""

    device: Any
    dtype: Any
    layout: Any
    shape: Sequence[int]

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def is_inference(self) -> bool: ...
    def detach(self) -> "Tensor": ...
    def contiguous(self) -> "Tensor": ...
    def cpu(self) -> "Tensor": ...
    def copy_(self, source: "Tensor", non_blocking: bool = False) -> "Tensor": ...
    def record_stream(self, stream: object) -> None: ...
    def view(self, dtype: object) -> "Tensor": ...
    def numpy(self) -> Array: ...


class Event(Protocol):
    """As much of a CUDA event of torch."""

    device: Any

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


def host_view(tensor: Tensor) -> Array:
    """The memory of a tensor on the host. bfloat16, which NumPy lacks, goes as 16-bit integers."""
    if str(tensor.dtype) == "torch.bfloat16":
        bits: Array = tensor.view(sys.modules["torch"].int16).numpy()
        return bits.view(np.uint16)
    return tensor.numpy()


class Staged(Protocol):
    """The copy of one array of the caller. `array`, in C order, is what the engine works on."""

    array: Array

    def is_filled(self) -> bool:
        """Whether the caller's elements are all there. Never blocks."""

    def wait_filled(self) -> None: ...

    def copy_back(self) -> Event | None:
        """The op has committed: give the caller's array its result, at once or by a stream that tells its end."""


class StridedCopy:
    """Of an array in host memory that is not in C order."""

    def __init__(self, view: Array, *, read: bool) -> None:
        self._view = view
        self.array = np.array(view, order="C") if read else np.empty(view.shape, view.dtype)

    def is_filled(self) -> bool:
        return True

    def wait_filled(self) -> None:
        pass

    def copy_back(self) -> Event | None:
        np.copyto(self._view, self.array)
        return None


class DeviceCopy(StridedCopy):
    """Of a tensor on any device but CUDA. Its copies wait for the device."""

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        torch = sys.modules["torch"]
        self._tensor = tensor
        self._host = tensor.contiguous().cpu() if read else torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        self.array = host_view(self._host)

    def copy_back(self) -> Event | None:
        with _writing(self._tensor):
            self._tensor.copy_(self._host)
        return None


class CudaCopy:
    """Of a CUDA tensor, in pinned memory."""

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        torch = sys.modules["torch"]
        self._streams = _streams_of(tensor.device)
        self._tensor = tensor
        self._host = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, pin_memory=True)
        self.array = host_view(self._host)
        self._called = torch.cuda.current_stream(tensor.device).record_event()
        self._filled = self._copy_down(tensor) if read else None

    def _copy_down(self, tensor: Tensor) -> Event:
        down = self._streams.down
        down.wait_event(self._called)
        with sys.modules["torch"].cuda.stream(down):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(down)
        return cast(Event, down.record_event())

    def is_filled(self) -> bool:
        return self._filled is None or self._filled.query()

    def wait_filled(self) -> None:
        if self._filled is not None:
            self._filled.synchronize()

    def copy_back(self) -> Event | None:
        tensor, up = self._tensor, self._streams.up
        up.wait_event(self._called)
        with _writing(tensor), sys.modules["torch"].cuda.stream(up):
            tensor.copy_(self._host, non_blocking=True)
        tensor.record_stream(up)
        return cast(Event, up.record_event())


def join(events: Sequence[Event]) -> None:
    """Whatever this thread's streams are given from now on follows these events."""
    for event in events:
        sys.modules["torch"].cuda.current_stream(event.device).wait_event(event)


class _Streams(NamedTuple):
    """For the copies of one device: to the host, and back. A device copies in both directions at the same time."""

    down: Any
    up: Any


_streams: dict[object, _Streams] = {}


def _streams_of(device: object) -> _Streams:
    found = _streams.get(device)
    if found is None:
        stream = sys.modules["torch"].cuda.Stream
        found = _streams.setdefault(device, _Streams(stream(device), stream(device)))
    return found


def _writing(tensor: Tensor) -> Any:  # noqa: ANN401  # a context manager of torch
    """The only mode in which a tensor that was made in inference mode may be written."""
    return sys.modules["torch"].inference_mode(tensor.is_inference())


def staged_tensor(tensor: Tensor, *, read: bool) -> Staged:
    """A copy of a tensor on a device. Unless it is to be `read`, it is not filled."""
    # Only CUDA has all of this; torch for ROCm says cuda, too.
    return CudaCopy(tensor, read=read) if tensor.device.type == "cuda" else DeviceCopy(tensor, read=read)
