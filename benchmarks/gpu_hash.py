"""rf64 on a GPU: is it bit-identical, and how fast? Prints one JSON object; exits with 1 if a hash is wrong.

    python3 benchmarks/gpu_hash.py

Needs an NVIDIA GPU, PyTorch, Triton and NumPy. Neither Ringfold nor its native core has to be installed: the few files
that are needed are taken from src/ beside this one, and the hashes are compared with the NumPy reference.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import triton

SOURCE = Path(__file__).resolve().parents[1] / "src" / "ringfold"
MIB = 1 << 20
SIZES = [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]


def sources() -> tuple[ModuleType, ModuleType]:
    """`ringfold.state.gpu_hash` and the reference, without running what the packages around them would import."""
    for name in ("ringfold", "ringfold.state", "ringfold.testing"):
        package = ModuleType(name)
        package.__path__ = [str(SOURCE.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return import_module("ringfold.state.gpu_hash"), import_module("ringfold.testing.hash_reference")


def odd_tensors(random: np.random.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Small tensors whose length, start or type could go wrong."""
    lengths = [*range(1, 18), 63, 64, 255, 256, 257, 511, 4096, 16383, 16384, 16385, 2 * 16384 + 100, 5 * 16384 + 8]
    lengths += [MIB - 1, MIB, MIB + 1, MIB + 16384, 3 * MIB + 12345, 65 * MIB + 3]
    base = torch.from_numpy(random.integers(0, 256, 66 * MIB, dtype=np.uint8)).cuda()
    for length in lengths:
        for offset in (0, 1, 2, 3, 4, 8, 16) if length < 4 * MIB else (0, 6):
            yield f"{length} bytes at {offset}", base[offset : offset + length]
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int8", "complex64"):
        tensor = base[: 3 * MIB].view(getattr(torch, name))
        yield name, tensor.reshape(3, -1)
        yield f"{name} from the second on", tensor[1:]
    yield "a bool", torch.tensor(True, device="cuda")
    yield "zeros", torch.zeros(2 * MIB + 1, dtype=torch.uint8, device="cuda")


def wrong(gpu_hash: ModuleType, reference: ModuleType) -> tuple[int, list[str]]:
    """How many tensors were hashed, and which of them wrongly."""
    checked, faults = 0, []
    for name, tensor in odd_tensors(np.random.default_rng(20)):
        content = tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        checked += 1
        if gpu_hash.block_hashes(tensor) != reference.block_hashes(content):
            faults.append(name)
    return checked, faults


def wrong_in_large(gpu_hash: ModuleType, reference: ModuleType) -> list[str]:
    """Blocks of a tensor of 2.5 GiB, which takes several slices; some of them are compared."""
    total = 2560 * MIB - 7
    tensor = torch.randint(0, 256, (total,), dtype=torch.uint8, device="cuda")
    hashes = gpu_hash.block_hashes(tensor)
    faults = []
    for block in (0, 1, 777, 1023, 1024, 2047, 2048, 2558, 2559):
        content = tensor[block * MIB : (block + 1) * MIB].cpu().numpy().tobytes()
        if hashes[8 * block : 8 * block + 8] != reference.block_hashes(content):
            faults.append(f"block {block} of {total} bytes")
    return faults


def gb_per_s(bytes_per_call: int, work: Callable[[], object], calls: int = 20) -> float:
    """The median of several calls, each timed on the GPU by events around it."""
    for _ in range(3):
        work()
    took_ms = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        took_ms.append(start.elapsed_time(end))
    return round(bytes_per_call / statistics.median(took_ms) / 1e6, 1)


def median_us(work: Callable[[], object], calls: int = 50) -> float:
    """The median time that a caller waits."""
    took_ns = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        work()
        took_ns.append(time.perf_counter_ns() - start)
    return round(statistics.median(took_ns) / 1e3, 1)


def figures(gpu_hash: ModuleType) -> Iterator[dict[str, object]]:
    kernels = import_module("ringfold.state.gpu_hash_kernels")
    buffer = torch.randint(0, 256, (max(SIZES) + 16,), dtype=torch.uint8, device="cuda")
    for size in SIZES:
        tensor = buffer[:size]
        yield {
            "bytes": size,
            "kernels_gb_per_s": gb_per_s(size, lambda tensor=tensor: kernels.block_hashes(tensor)),
            "call_us": median_us(lambda tensor=tensor: gpu_hash.block_hashes(tensor)),
        }
    for offset in (8, 4, 2, 1):
        tensor = buffer[offset : offset + max(SIZES)]
        rate = gb_per_s(max(SIZES), lambda tensor=tensor: kernels.block_hashes(tensor))
        yield {"bytes": max(SIZES), "offset": offset, "kernels_gb_per_s": rate}


def main() -> int:
    gpu_hash, reference = sources()
    checked, faults = wrong(gpu_hash, reference)
    faults += wrong_in_large(gpu_hash, reference)
    size = 1024 * MIB
    one, other = torch.zeros(2, size, dtype=torch.uint8, device="cuda")
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tensors_checked": checked + 1,
        "wrong": faults,
        "copy_gb_per_s_read_and_written": gb_per_s(2 * size, lambda: other.copy_(one)),
        "figures": list(figures(gpu_hash)),
    }
    print(json.dumps(report, indent=2))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
