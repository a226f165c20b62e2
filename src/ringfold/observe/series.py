"""Series of one number over time, thinned by age: the memory of a day is that of a minute, times a few. Pure.

A series has tiers. Each holds buckets of one width, up to a number of them; a bucket is when it began, and the mean,
the minimum and the maximum of the values that fell into it. A page keeps the same tiers, so that an update is the list
of buckets that are complete since the one before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Bucket = tuple[int, float, float, float]
"""When it began (Unix time in ms), mean, minimum, maximum."""


class Tier(NamedTuple):
    width_ms: int
    buckets: int


LIVE_TIERS = (Tier(1_000, 300), Tier(5_000, 360), Tier(30_000, 480), Tier(300_000, 432), Tier(3_600_000, 336))
"""The last 5 minutes, 30 minutes, 4 hours, 36 hours and 14 days: at most 1,908 buckets in all."""


@dataclass(slots=True)
class _Filling:
    """A tier, and the sum of its newest bucket, which is not complete."""

    tier: Tier
    done: deque[Bucket]
    begin_ms: int = -1
    count: int = 0
    total: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def add(self, at_ms: int, value: float) -> Bucket | None:
        """Count a value; return the bucket that this completes. Values of a bucket before are counted in this one."""
        begin_ms = at_ms - at_ms % self.tier.width_ms
        complete = self.bucket() if self.count and begin_ms > self.begin_ms else None
        if complete is not None:
            self.done.append(complete)
        if complete is not None or not self.count:
            self.begin_ms, self.count, self.total, self.low, self.high = begin_ms, 0, 0.0, value, value
        self.count += 1
        self.total += value
        self.low, self.high = min(self.low, value), max(self.high, value)
        return complete

    def bucket(self) -> Bucket:
        return self.begin_ms, _short(self.total / self.count), _short(self.low), _short(self.high)


@dataclass(slots=True)
class Series:
    """One number over time."""

    tiers: Sequence[Tier] = LIVE_TIERS
    last: float | None = None
    _filling: list[_Filling] = field(init=False)
    _new: list[list[Bucket]] = field(init=False)

    def __post_init__(self) -> None:
        self._filling = [_Filling(tier, deque(maxlen=tier.buckets)) for tier in self.tiers]
        self._new = [[] for _ in self.tiers]

    def add(self, at_ms: int, value: float) -> None:
        if value != value or abs(value) == float("inf"):  # neither is JSON
            return
        self.last = value
        for filling, new in zip(self._filling, self._new, strict=True):
            complete = filling.add(at_ms, value)
            if complete is not None:
                new.append(complete)
                del new[: -filling.tier.buckets]

    def take_new(self) -> list[list[Bucket]]:
        """By tier, the buckets that are complete since the call before. Empty if there are none in any tier."""
        if not any(self._new):
            return []
        new, self._new = self._new, [[] for _ in self.tiers]
        return new

    def buckets(self, *, with_last: bool = False) -> list[list[Bucket]]:
        """By tier, all complete buckets; `with_last`: the one that is not complete, too."""
        return [[*each.done, *([each.bucket()] if with_last and each.count else [])] for each in self._filling]

    def __len__(self) -> int:
        """How many buckets are kept."""
        return sum(len(filling.done) for filling in self._filling)


def _short(value: float) -> float:
    """With five significant digits: a page has no more pixels."""
    return float(f"{value:.5g}")
