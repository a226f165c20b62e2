"""`pccl.cuda`: whether tensors on a CUDA device can be passed."""

import importlib.util


def is_available() -> bool:
    """Whether this process can reduce and share tensors on a CUDA device: PyTorch is installed, and sees one.

    PCCL answers whether it was built for CUDA, which says nothing about the machine.
    """
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
