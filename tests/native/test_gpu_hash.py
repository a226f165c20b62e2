"""rf64 in Triton against the NumPy reference: on a GPU where there is one, and a little of it in the interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import hash_reference
import numpy as np
import pytest

from ringfold.errors import UsageError
from ringfold.state import gpu_hash

if TYPE_CHECKING:
    import torch

MIB = 1 << 20


def torch_with_cuda() -> ModuleType:
    """PyTorch on a machine where the kernels can run; skips the test elsewhere."""
    torch: ModuleType = pytest.importorskip("torch", reason="needs PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton", reason="needs Triton")
    return torch


def content(tensor: "torch.Tensor") -> bytes:
    import torch

    array: np.ndarray[Any, Any] = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return array.tobytes()


@pytest.mark.parametrize("count", [1, 8, 255, 257, 16_384, 16_390, MIB, MIB + 1, 3 * MIB + 12])
def test_any_length_at_any_start(count: int) -> None:
    torch = torch_with_cuda()
    for offset in (0, 1, 2, 4, 8):
        noise = torch.from_numpy(np.random.default_rng(count).integers(0, 256, count + offset, dtype=np.uint8)).cuda()
        tensor = noise[offset:]
        assert gpu_hash.block_hashes(tensor) == hash_reference.block_hashes(content(tensor)), offset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8", "bool", "complex64"])
def test_any_dtype(dtype: str) -> None:
    torch = torch_with_cuda()
    tensor = torch.arange(300_001, device="cuda").to(getattr(torch, dtype))
    assert gpu_hash.block_hashes(tensor) == hash_reference.block_hashes(content(tensor))


def test_a_parameter_that_requires_grad() -> None:
    torch = torch_with_cuda()
    tensor = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    assert gpu_hash.block_hashes(tensor) == hash_reference.block_hashes(content(tensor))


def test_an_array_of_several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_with_cuda()
    from ringfold.state import gpu_hash_kernels

    monkeypatch.setattr(gpu_hash_kernels, "SLICE_BLOCKS", 2)
    tensor = torch.arange(5 * MIB // 4 + 9, dtype=torch.int32, device="cuda")
    assert gpu_hash.block_hashes(tensor) == hash_reference.block_hashes(content(tensor))


def test_an_empty_tensor_has_no_blocks() -> None:
    torch = torch_with_cuda()
    assert gpu_hash.block_hashes(torch.empty(0, device="cuda")) == b""


def test_gaps_are_refused() -> None:
    torch = torch_with_cuda()
    with pytest.raises(UsageError, match="contiguous"):
        gpu_hash.block_hashes(torch.ones(8, 8, device="cuda")[:, ::2])


def test_a_tensor_on_the_host_is_refused() -> None:
    tensor: Any = SimpleNamespace(is_cuda=False, device="cpu")
    with pytest.raises(UsageError, match="on cpu, not on a CUDA device"):
        gpu_hash.block_hashes(tensor)


INTERPRETED = """
import numpy as np, torch
from ringfold.state import gpu_hash_kernels
import hash_reference

for count, offset in ((1, 0), (257, 1), (2 * 16_384 + 6, 4)):
    noise = np.random.default_rng(count).integers(0, 256, count + offset, dtype=np.uint8)
    got = gpu_hash_kernels.block_hashes(torch.from_numpy(noise)[offset:]).numpy().tobytes()
    assert got == hash_reference.block_hashes(noise[offset:].tobytes()), (count, offset)
print("identical")
"""


def test_the_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported whether it compiles or interprets."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "identical\n", done.stderr
