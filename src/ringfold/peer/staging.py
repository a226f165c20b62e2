"""Copies in host memory, for arrays that the engine cannot work on in place: with other strides, or on a device.

A copy is *filled* from the caller's array before the op, and copied back after its commit. Those of CUDA tensors are in
`cuda_copies.py`.

torch is never imported here: a program that has a tensor has loaded it already.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

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

    def copy_back(self) -> None:
        """The op has committed: give the caller's array its result."""


class StridedCopy:
    """Of an array in host memory that is not in C order."""

    def __init__(self, view: Array, *, read: bool) -> None:
        self._view = view
        self.array = np.array(view, order="C") if read else np.empty(view.shape, view.dtype)

    def copy_back(self) -> None:
        np.copyto(self._view, self.array)


class DeviceCopy:
    """Of a tensor on any device but CUDA. Its copies wait for the device."""

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        torch = sys.modules["torch"]
        self._tensor = tensor
        self._host = tensor.contiguous().cpu() if read else torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        self.array = host_view(self._host)

    def copy_back(self) -> None:
        with writing(self._tensor):
            self._tensor.copy_(self._host)


def join(events: Sequence[Event]) -> None:
    """Whatever this thread's streams are given from now on follows these events."""
    for event in events:
        sys.modules["torch"].cuda.current_stream(event.device).wait_event(event)


def writing(tensor: Tensor) -> Any:  # noqa: ANN401  # a context manager of torch
    """The only mode in which a tensor that was made in inference mode may be written."""
    return sys.modules["torch"].inference_mode(tensor.is_inference())
