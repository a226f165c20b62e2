"""rf64 where the state is: the block hashes of a CUDA tensor, computed on its GPU.

Only the hashes cross the bus, 8 bytes per MiB. They are equal to those of `hashing.block_hashes` for the same bytes.
The kernels are in `gpu_hash_kernels.py`. They are written in Triton, which comes with PyTorch's CUDA builds, and are
imported only when a tensor is hashed.
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
        from ringfold.state import gpu_hash_kernels
    except ImportError as error:
        raise UsageError(f"hashing on a GPU needs Triton, which comes with PyTorch for CUDA ({error})") from error
    import torch

    # Without detach, a tensor that requires grad could not be seen as bytes.
    memory = tensor.detach().reshape(-1).view(torch.uint8)
    with torch.cuda.device(tensor.device):
        hashes: bytes = gpu_hash_kernels.block_hashes(memory).cpu().numpy().tobytes()
    return hashes
