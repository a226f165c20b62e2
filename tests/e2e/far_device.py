"""A device of torch's, written in Python: its tensors' numbers are where torch and NumPy cannot see them.

It shows what a GPU would, on machines without one: such a tensor has no host memory, and its numbers come and go only
by torch's own copies. Import it in a process of its own, because a device cannot be unregistered.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("far")


class FarTensor(torch.Tensor):
    """A tensor on the device. `numbers` is its memory there."""

    numbers: np.ndarray[Any, Any]

    @staticmethod
    def __new__(cls: type["FarTensor"], numbers: "np.ndarray[Any, Any]") -> "FarTensor":
        host = torch.from_numpy(numbers)
        made: FarTensor = torch._C._acc.create_empty_tensor(list(host.shape), host.dtype)
        made.__class__ = cls
        return made

    def __init__(self, numbers: "np.ndarray[Any, Any]") -> None:
        self.numbers = numbers


@torch.library.impl("aten::detach", "privateuseone")
def _detach(tensor: FarTensor) -> FarTensor:
    return tensor


@torch.library.impl("aten::_copy_from", "privateuseone")
def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:  # noqa: ANN401 - one of them is far
    if source.device.type == "far":
        return target.copy_(torch.from_numpy(source.numbers))
    target.numbers[...] = source.numpy()
    return target
