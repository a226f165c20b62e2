"""What the three parts of the soak share: a check, growth of a process, a hang, and what is left behind.

Growth compares the first third of a process's samples with the last third. Memory, descriptors and threads go up and
down with the peers, so one sample against another shows nothing; medians of long stretches do. What a process allocates
at its start is not growth: the first samples are left out.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ringfold.tools.cluster import LocalCluster
from ringfold.units import MIB as MIB
from ringfold.wire.messages import Status

MAX_SHOWN = 3
_WARM_UP = 0.1
_MIN_SAMPLES = 9


class SoakCheck(NamedTuple):
    """A promise, whether it was kept, and what shows it."""

    promise: str
    kept: bool
    fact: str


def shown(breaches: Sequence[str]) -> str:
    """The first few of many."""
    more = f" and {len(breaches) - MAX_SHOWN} more" if len(breaches) > MAX_SHOWN else ""
    return "; ".join(breaches[:MAX_SHOWN]) + more


class Hang(Exception):
    """A peer made no progress. `status` is the run as its leader saw it then, `log` what the peer wrote last."""

    def __init__(self, name: str, text: str, status: Status | None, log: str) -> None:
        super().__init__(name, text, log)
        self.name, self.text, self.status, self.log = name, text, status, log


@dataclass(frozen=True, slots=True)
class ResourceSample:
    """Resources of a process at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int


def sample(pid: int) -> ResourceSample:
    """Resident memory of its own, open descriptors and threads of a process.

    Pipes are not its own: they come and go with neighbours that share memory, and each has a descriptor beside it.
    """
    resident = threads = 0
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmRSS:"):
            resident += int(text.split()[1]) * 1024
        elif text.startswith("RssShmem:"):
            resident -= int(text.split()[1]) * 1024
        elif text.startswith("Threads:"):
            threads = int(text.split()[1])
    return ResourceSample(resident, len(os.listdir(f"/proc/{pid}/fd")), threads)


@dataclass(frozen=True, slots=True)
class Growth:
    """The medians of the first and of the last third, and whether that counts as growth."""

    name: str
    what: str
    first: float
    last: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= self.allowed

    def __str__(self) -> str:
        unit, scale = (" MiB", MIB) if self.what == "memory" else ("", 1)
        first, last = self.first / scale, self.last / scale
        return f"{self.name}: {self.what} {first:.1f}{unit} at first, {last:.1f}{unit} at last"


def growth(name: str, samples: Sequence[ResourceSample]) -> list[Growth]:
    """Memory, descriptors and threads of one process; empty if there are too few samples."""
    warm = samples[int(len(samples) * _WARM_UP) :]
    if len(warm) < _MIN_SAMPLES:
        return []
    third = len(warm) // 3
    early, late = warm[:third], warm[-third:]
    memory = _medians([sample.resident_bytes for sample in early], [sample.resident_bytes for sample in late])
    descriptors = _medians([sample.descriptors for sample in early], [sample.descriptors for sample in late])
    threads = _medians([sample.threads for sample in early], [sample.threads for sample in late])
    return [
        Growth(name, "memory", *memory, max(8 * MIB, memory[0] / 10)),
        Growth(name, "descriptors", *descriptors, max(8, descriptors[0] / 4)),
        # As many as the members with the fewest have: that changes with the members.
        Growth(name, "threads", *threads, max(4, threads[0] / 4)),
    ]


def _medians(early: Sequence[int], late: Sequence[int]) -> tuple[float, float]:
    return median(early), median(late)


def of_sessions(pids: set[int]) -> list[str]:
    """The live processes in the sessions of which these were the leaders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command, _, facts = entry.joinpath("stat").read_text().rpartition(")")
                if int(facts.split()[3]) in pids:
                    found.append(command.replace(" (", ": ", 1))
    return found


def shared_memory() -> set[str]:
    """What lies in /dev/shm under our name."""
    where = Path("/dev/shm")
    return {path.name for path in where.iterdir() if "ringfold" in path.name} if where.is_dir() else set()


def left_by(cluster: LocalCluster, pids: set[int], shared_before: set[str]) -> list[str]:
    """What is still there of a cluster that has been closed: its folder, processes, shared memory."""
    found = [str(cluster.directory)] if cluster.directory.exists() else []
    found += [f"process {process}" for process in of_sessions(pids)]
    return found + [f"/dev/shm/{name}" for name in sorted(shared_memory() - shared_before)]
