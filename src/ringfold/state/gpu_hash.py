"""rf64 where the state is: the block hashes of a CUDA tensor, computed on its GPU.

Only the hashes cross the bus, 8 bytes per MiB. The numbers are those of `hashing.block_hashes` for the same bytes. What
runs on the GPU is in `gpu_kernels.py`, written in Triton, which comes with PyTorch's CUDA builds and is imported only
when a tensor is hashed.
"""

from typing import TYPE_CHECKING

from ringfold.errors import UsageError

if TYPE_CHECKING:
    import torch


def block_hashes(tensor: "torch.Tensor") -> bytes:
    """The rf64 hashes of all blocks of a contiguous CUDA tensor, 8 bytes each, of any dtype and at any storage offset.

    Waits for the work queued on the device's current stream. Needs 1/64 of the tensor's memory, at most 16 MiB.
    """
    if not tensor.is_cuda:
        raise UsageError(f"this tensor is on {tensor.device}, not on a CUDA device: hash its memory on the host")
    if not tensor.is_contiguous():
        raise UsageError("only a contiguous tensor has bytes to hash: call .contiguous() first")
    if tensor.numel() == 0:
        return b""
    try:
        from ringfold.state import gpu_kernels
    except ImportError as error:
        raise UsageError(f"hashing on a GPU needs Triton, which comes with PyTorch for CUDA ({error})") from error
    import torch

    # Without detach, a tensor that requires grad could not be seen as bytes.
    memory = tensor.detach().reshape(-1).view(torch.uint8)
    with torch.cuda.device(tensor.device):
        hashes: bytes = gpu_kernels.block_hashes(memory).cpu().numpy().tobytes()
    return hashes
