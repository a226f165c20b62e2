"""From the arrivals of one measurement to a rate: when to stop, and the result.

The other side sends as fast as it can; the receiver counts. A *point* of the count is an instant, and the number of
bytes that had arrived by then. The slope of the count is the rate, but not everywhere:

* TCP starts slowly and doubles with every RTT, and may be slow for longer while its acknowledgements queue;
* a shaper (a token bucket) passes a *burst* at line speed before it limits the rate;
* on a busy machine the sender may be off the CPU for tens or hundreds of milliseconds, and then nothing arrives. (If it
  is the receiver, points are far apart; its kernel continues to receive, so the next point is right.)

All except the burst only make a link slower. So only a recent *segment* of points is used, and a straight line is
fitted to it (least squares). The segment is *settled* if four conditions hold:

* it is straight: no point is off the line by more than STRAY of the bytes of the segment. A pause or a burst bends it;
* its parts agree: the slopes of its WINDOWS consecutive windows differ by at most AGREE. A slow start fails this,
  because its windows grow;
* it is long enough, in time and in points: bytes arrive in *chunks* of up to 64 KiB, so that at 10 Mbit/s there is a
  point every 52 ms at most, however often the count is read;
* it is as fast as the link has been. TCP that has lost many packets recovers for hundreds of milliseconds, steadily; an
  interval of INTERVAL_NS that was faster by more than SLOWER shows that this is not the link's rate. BURST bytes of an
  interval do not count: a shaper may have saved up so many while the sender paused. Intervals begin after the first
  burst, which may be larger: it is sent at line speed, but TCP needs HEAD_ROUND_TRIPS to send a megabyte of it.

The fastest settled segment is taken. Slow links with large chunks need a long one, fast ones stop early.

A segment that is straight and agrees only within ROUGH times as much is *rough*: a machine is busy, and may have slowed
the link down by as much. One that is ROUGH_LENGTHS as long ends the measurement, because nothing better is to be
expected, but it is not settled. The result at the deadline is not settled either: the line through the second half, or
the fastest interval if that is more; half of it, if there is too little for a segment. So a result that is not settled
is rather too low than too high.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.errors import UsageError
from ringfold.units import MS as MS

Ns = int

DEADLINE_NS = 1_400 * MS
MIN_SEGMENT_NS = 250 * MS
"""A shorter segment proves nothing: it may depend on the scheduler."""
STEADY_ROUND_TRIPS = 2
"""Nor does one that is shorter than this: within one RTT a slow start may look steady."""
WINDOWS = 3
MIN_POINTS = 9
WINDOW_POINTS = 3
"""A point between two windows belongs to both."""
AGREE = 0.025
STRAY = 0.01
ROUGH = 2
ROUGH_LENGTHS = 2
INTERVAL_NS = 200 * MS
INTERVAL_POINTS = 6
BURST = 64 * 1024
"""The largest packet of a kernel (GSO), and so the smallest bucket that a shaper can have."""
HEAD_NS = 50 * MS
HEAD_ROUND_TRIPS = 7
SLOWER = 0.04

Point = tuple[Ns, int]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate, whether it is reliable (`settled`), and how it was determined."""

    bytes_per_s: float
    settled: bool
    reason: str


class RateEstimate:
    """Takes samples, about one in 25 ms, until the estimate is good enough.

    Results depend on the samples alone. With fewer samples it settles later, or not at all.
    """

    def __init__(self, deadline_ns: Ns = DEADLINE_NS, round_trip_ns: Ns = 0) -> None:
        if deadline_ns <= 0 or round_trip_ns < 0:
            raise UsageError(f"a deadline of {deadline_ns} ns or an RTT of {round_trip_ns} ns is not possible")
        self._deadline_ns = deadline_ns
        self._min_segment_ns = max(MIN_SEGMENT_NS, STEADY_ROUND_TRIPS * round_trip_ns)
        self._head_ns = HEAD_NS + HEAD_ROUND_TRIPS * round_trip_ns
        self._now_ns = 0
        self._points: list[Point] = [(0, 0)]
        self._next_interval = 0
        self._best_interval_rate = 0.0

    def sample(self, elapsed_ns: Ns, received: int, counted_ns: Ns | None = None) -> Estimate | None:
        """Add a point: `received` bytes by `counted_ns` (default: now), since the measurement began.

        Returns the estimate at the end of the measurement; None: continue."""
        at = elapsed_ns if counted_ns is None else counted_ns
        last_ns, last = self._points[-1]
        if elapsed_ns < self._now_ns or at > elapsed_ns or at < last_ns or received < last:
            text = f"{received} B by {at} ns at {elapsed_ns} ns, after {last} B by {last_ns} ns"
            raise UsageError(f"samples go back: {text}")
        self._now_ns = elapsed_ns
        if received > last:
            if at == last_ns:
                self._points.pop()
            self._points.append((at, received))
            settled = self._settled()
            if settled is not None:
                return settled
        return None if elapsed_ns < self._deadline_ns else self.best()

    def best(self) -> Estimate:
        """The best estimate now, settled or not: for a measurement that had to end."""
        settled = self._settled()
        if settled is not None:
            return settled
        points = self._points
        if len(points) < 2:
            return Estimate(0.0, False, "nothing arrived")
        middle = (points[0][0] + points[-1][0]) // 2
        half = [point for point in points if point[0] >= middle]
        if len(half) < WINDOW_POINTS:
            half = points
        slope = _line(half)[0] if half[-1][0] - half[0][0] >= MIN_SEGMENT_NS else _line(half)[0] / 2
        slope = max(slope, self._fastest())
        return Estimate(slope, False, f"no steady rate in {self._now_ns // MS} ms; the best of it is taken")

    def _fastest(self) -> float:
        """The rate of the fastest interval, less a burst; 0.0 while there is none that is long enough."""
        while (interval := self._interval(self._next_interval)) is not None:
            self._next_interval += 1
            if interval[0][0] >= self._head_ns:
                length_s = (interval[-1][0] - interval[0][0]) / 1e9
                self._best_interval_rate = max(self._best_interval_rate, _line(interval)[0] - BURST / length_s)
        return self._best_interval_rate

    def _interval(self, begin: int) -> list[Point] | None:
        """The interval that begins at this point: as short as possible, so that no fast one is missed."""
        for end in range(begin + INTERVAL_POINTS, len(self._points) + 1):
            if self._points[end - 1][0] - self._points[begin][0] >= INTERVAL_NS:
                return self._points[begin:end]
        return None

    def _settled(self) -> Estimate | None:
        """The fastest of the settled segments that end here, or else of the rough ones; each begins at a point."""
        end = self._points[-1][0]
        best = Estimate(0.0, False, "")
        for place, (at, _) in enumerate(self._points):
            if end - at < self._min_segment_ns or len(self._points) - place < MIN_POINTS:
                break
            slope, bend = _straight(self._points[place:])
            is_settled = bend <= 1
            is_rough = bend <= ROUGH and end - at >= ROUGH_LENGTHS * self._min_segment_ns
            if (is_settled or is_rough) and (is_settled, slope) > (best.settled, best.bytes_per_s):
                best = Estimate(slope, is_settled, f"{'' if is_settled else 'nearly '}steady for {(end - at) // MS} ms")
        is_slow = self._fastest() > best.bytes_per_s * (1 + SLOWER)
        return None if is_slow or best.bytes_per_s == 0 else best


def _straight(segment: Sequence[Point]) -> tuple[float, float]:
    """The slope in bytes a second, and how bent the segment is: 1 is the limit."""
    slope, stray = _line(segment)
    begin, length = segment[0][0], segment[-1][0] - segment[0][0]
    bounds = [begin + length * number // WINDOWS for number in range(WINDOWS + 1)]
    slopes = []
    for low, high in itertools.pairwise(bounds):
        window = [point for point in segment if low <= point[0] <= high]
        if len(window) < WINDOW_POINTS:
            return slope, math.inf
        slopes.append(_line(window)[0])
    strays = stray / (STRAY * (segment[-1][1] - segment[0][1]))
    return slope, max(strays, (max(slopes) - min(slopes)) / (AGREE * slope))


def _line(points: Sequence[Point]) -> tuple[float, float]:
    """Least squares: the slope in bytes a second, and the largest distance of a point from the line, in bytes."""
    begin, base = points[0]
    times = [(at - begin) / 1e9 for at, _ in points]
    totals = [float(total - base) for _, total in points]
    mean_time, mean_total = sum(times) / len(times), sum(totals) / len(totals)
    spread = sum((time - mean_time) ** 2 for time in times)
    if spread == 0:
        return 0.0, 0.0
    products = ((time - mean_time) * (total - mean_total) for time, total in zip(times, totals, strict=True))
    slope = sum(products) / spread
    stray = max(abs(total - mean_total - slope * (time - mean_time)) for time, total in zip(times, totals, strict=True))
    return slope, stray
