"""Does a process grow? The first third of its samples against the last third. Pure.

Memory and descriptors go up and down with the number of peers, so one sample against another says nothing; medians of
long stretches do. What a process takes at its start is not growth: the first samples are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIB = 1 << 20
_WARM_UP = 0.1
_FEWEST = 9


@dataclass(frozen=True, slots=True)
class Sample:
    """What the kernel says about a process at one moment."""

    resident_bytes: int
    descriptors: int


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


def growth(name: str, samples: Sequence[Sample]) -> list[Growth]:
    """Memory and descriptors of one process; empty if there are too few samples to say anything."""
    warm = samples[int(len(samples) * _WARM_UP) :]
    if len(warm) < _FEWEST:
        return []
    third = len(warm) // 3
    early, late = warm[:third], warm[-third:]
    memory = _medians([sample.resident_bytes for sample in early], [sample.resident_bytes for sample in late])
    descriptors = _medians([sample.descriptors for sample in early], [sample.descriptors for sample in late])
    return [
        Growth(name, "memory", *memory, max(8 * MIB, memory[0] / 10)),
        Growth(name, "descriptors", *descriptors, max(8, descriptors[0] / 4)),
    ]


def _medians(early: Sequence[int], late: Sequence[int]) -> tuple[float, float]:
    return median(early), median(late)
