"""The hardware and software of this machine, for `doctor` and for the reports of benchmarks."""

import math
import os
import platform
import resource
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

_X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)
_NOTABLE = ("sse4_2", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_fp16", "avx512_bf16", "asimd", "crc32")


class Hardware(Struct, frozen=True):
    """This machine. Sizes in bytes; `cores` are those that this process may use."""

    host: str
    kernel: str
    architecture: str
    cpu: str
    cpu_level: str
    cpu_features: list[str]
    cores: int
    memory_bytes: int
    memory_free_bytes: int
    python: str
    versions: dict[str, str]


def read_hardware() -> Hardware:
    """Read everything from /proc and from Python; a value that cannot be read is empty or zero, never an error."""
    cpu = cpu_facts()
    memory = memory_facts()
    return Hardware(
        host=socket.gethostname(),
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu=cpu.get("model name") or cpu.get("CPU part") or "unknown",
        cpu_level=cpu_level(platform.machine(), _flags(cpu)),
        cpu_features=[feature for feature in _NOTABLE if feature in _flags(cpu)],
        cores=usable_cores(),
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
        python=platform.python_version(),
        versions=versions("ringfold", "numpy", "msgspec", "torch", "mpi4py"),
    )


def read_text(path: str) -> str:
    """The stripped text of a file under /proc or /sys; empty when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cpu_facts() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    pairs = (line.partition(":") for line in read_text("/proc/cpuinfo").split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _flags(cpu: Mapping[str, str]) -> set[str]:
    return set((cpu.get("flags") or cpu.get("Features") or "").split())


def cpu_level(architecture: str, flags: set[str]) -> str:
    """The psABI level of an x86-64 processor, which says what compilers may assume; elsewhere the architecture."""
    if architecture not in ("x86_64", "amd64"):
        return architecture
    # Each level contains the ones below it, so a gap (AVX-512 without AVX2) counts as the lower level.
    reached = "x86-64"
    for level, needed in reversed(_X86_LEVELS):
        if not needed <= flags:
            break
        reached = level
    return reached


def memory_facts() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    facts = {}
    for line in read_text("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        number, *unit = rest.split()
        facts[key] = int(number) * (1024 if unit == ["kB"] else 1)
    return facts


def usable_cores() -> int:
    """Cores that this process may run on; a container's CPU quota, rounded up, lowers the number."""
    return _allowed_cores(math.ceil)


def whole_cores() -> int:
    """The same with the quota rounded down: for threads that compute all the time, and would be throttled."""
    return _allowed_cores(math.floor)


def _allowed_cores(rounded: Callable[[float], int]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return cores if math.isinf(quota) else min(cores, max(1, rounded(quota)))


def _cpu_quota(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
    """CPUs that the cgroups of this process allow: the least of its own and those above it; infinite: no quota."""
    paths = {"cpu": "/", "": "/"}  # by controller: "" is the one hierarchy of cgroup v2
    for line in read_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    quotas = [math.inf]
    for controller, path in (("", paths[""]), ("cpu", paths["cpu"])):
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            folder = "/".join((root, *filter(None, (controller, *parts[:depth]))))
            if controller:
                quota, period = (read_text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
            else:
                quota, _, period = read_text(f"{folder}/cpu.max").partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
    return min(quotas)


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of those packages that are installed."""
    from importlib import metadata  # slow to import, and every peer imports this file

    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def soft_limit(which: int) -> int | None:
    """A soft resource limit of this process; None means unlimited."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
