"""Many values in bounded memory: a series over time that keeps its extremes, and a histogram of durations. Pure."""

from dataclasses import dataclass
from math import ceil, log2

MAX_POINTS = 2_000
"""Of a series. Above, neighbouring points are merged in pairs, so that at least half of them are left."""
_FIRST_SHIFT = 20
"""Times within 2^20 ns, a millisecond, are one point to begin with."""
_CLASSES_PER_OCTAVE = 32


@dataclass(slots=True)
class Bucket:
    """The values of one span of time, from `first_ns` to `last_ns`."""

    first_ns: int
    last_ns: int
    count: float
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def merge(self, other: "Bucket") -> None:
        self.first_ns, self.last_ns = min(self.first_ns, other.first_ns), max(self.last_ns, other.last_ns)
        self.count, self.total = self.count + other.count, self.total + other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


class ThinnedSeries:
    """Values over time, added in any order: at most `limit` points, each with the mean, the least and the greatest."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self.added = 0
        """How many values there were."""
        self._limit, self._shift = limit, _FIRST_SHIFT
        self._buckets: dict[int, Bucket] = {}

    def add(self, at_ns: int, value: float, weight: float = 1.0) -> None:
        """A value that stands for `weight` equal ones."""
        self.added += 1
        key = at_ns >> self._shift
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = Bucket(at_ns, at_ns, weight, value * weight, value, value)
            while len(self._buckets) > self._limit:
                self._merge_pairs()
            return
        if at_ns < bucket.first_ns:
            bucket.first_ns = at_ns
        elif at_ns > bucket.last_ns:
            bucket.last_ns = at_ns
        bucket.count += weight
        bucket.total += value * weight
        if value < bucket.low:
            bucket.low = value
        elif value > bucket.high:
            bucket.high = value

    def _merge_pairs(self) -> None:
        self._shift += 1
        merged: dict[int, Bucket] = {}
        for key, bucket in self._buckets.items():
            if (other := merged.get(key >> 1)) is None:
                merged[key >> 1] = bucket
            else:
                other.merge(bucket)
        self._buckets = merged

    def buckets(self) -> list[Bucket]:
        """In the order of time."""
        return [bucket for _, bucket in sorted(self._buckets.items())]


class LogHistogram:
    """Counts of positive values in classes that are 2.2 % wide; a quantile is at most 1.1 % off."""

    __slots__ = ("_classes", "count", "greatest", "total")

    def __init__(self) -> None:
        self.count, self.total, self.greatest = 0, 0, 0
        self._classes: dict[int, int] = {}

    def add(self, value: int) -> None:
        key = int(log2(value) * _CLASSES_PER_OCTAVE) if value > 0 else -1
        self._classes[key] = self._classes.get(key, 0) + 1
        self.count += 1
        self.total += value
        if value > self.greatest:
            self.greatest = value

    def quantile(self, fraction: float) -> float:
        """The least value that at least this fraction of the values does not exceed; 0 without values."""
        rank, seen = max(1, ceil(fraction * self.count)), 0
        for key, count in sorted(self._classes.items()):
            seen += count
            if seen >= rank:
                middle: float = 2.0 ** ((key + 0.5) / _CLASSES_PER_OCTAVE)
                return min(middle, float(self.greatest)) if key >= 0 else 0.0
        return 0.0
