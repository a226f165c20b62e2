"""From the arrivals of one measurement to a rate: when to stop, and what it is.

The other side sends as fast as it can; the receiver counts. A *point* of the count is a moment at which everything that
had come was counted, and how much that was. The count's slope is the rate, but not everywhere:

* TCP starts slowly and doubles with every round trip, and may creep for longer while its acknowledgements queue;
* a shaper (a token bucket) lets a *burst* through at line speed before it holds the rate;
* on a busy machine the sender may be off the CPU for tens or hundreds of milliseconds, and then nothing comes. (If it
  is the receiver, points are far apart; its kernel goes on receiving, so the next point is where it should be.)

All but the burst only ever slow a link down. So only a recent *stretch* of points is looked at, and a straight line is
laid through it (least squares). The stretch is *settled* if four things hold:

* it is straight: no point strays from the line by more than STRAY of the bytes of the stretch. A pause or a burst bends
  it;
* its parts agree: the slopes of its WINDOWS consecutive windows differ by at most AGREE. A slow start does not pass,
  because its windows grow;
* it is long enough, in time and in points: bytes come in *lumps* of up to 64 KiB, so that at 10 Mbit/s there is a point
  every 52 ms at most, however often one looks;
* it is as fast as the link has been. TCP that has lost many packets creeps back for hundreds of milliseconds, steadily;
  a look of LOOK_NS that was faster by more than SLOWER shows that this is not the link's pace. BURST of a look does not
  count: so much a shaper may have saved up while the sender paused. Looks begin when the first burst, which may be
  larger, is over: it goes at line speed, but TCP needs HEAD_ROUND_TRIPS to send a megabyte of it.

The fastest settled stretch is taken. Slow and lumpy links need a long one, fast ones stop early.

A stretch that is straight and agrees only within ROUGH times as much is *rough*: somebody is busy, and may have slowed
the link down by as much. One that is ROUGH_LENGTHS as long ends the measurement, for nothing better is to be expected,
but it is not settled. Nor is what is given at the deadline: the line through the second half, or the fastest look if
that is more; half of it, if there is too little for a stretch. So what is not settled is rather too low than too high.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.errors import UsageError
from ringfold.units import MS as MS

Ns = int

DEADLINE_NS = 1_400 * MS
SHORTEST_NS = 250 * MS
"""A shorter stretch proves nothing: somebody's scheduler may have been kind."""
STEADY_ROUND_TRIPS = 2
"""Nor does one that is shorter than this: within one round trip a slow start may look steady."""
WINDOWS = 3
FEWEST_POINTS = 9
WINDOW_POINTS = 3
"""Of two windows that meet in a point, both have it."""
AGREE = 0.025
STRAY = 0.01
ROUGH = 2
ROUGH_LENGTHS = 2
LOOK_NS = 200 * MS
LOOK_POINTS = 6
BURST = 64 * 1024
"""The largest packet that a kernel hands over at once, and so the smallest bucket that a shaper can have."""
HEAD_NS = 50 * MS
HEAD_ROUND_TRIPS = 7
SLOWER = 0.04

Point = tuple[Ns, int]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate; `settled` if it can be relied on, and why it is what it is."""

    bytes_per_s: float
    settled: bool
    reason: str


class RateEstimate:
    """Fed with samples, about one in 25 ms; says when it knows enough.

    Answers depend on the samples alone. With fewer samples it settles later, or not at all.
    """

    def __init__(self, deadline_ns: Ns = DEADLINE_NS, round_trip_ns: Ns = 0) -> None:
        if deadline_ns <= 0 or round_trip_ns < 0:
            raise UsageError(f"no measurement ends after {deadline_ns} ns, with a round trip of {round_trip_ns} ns")
        self._deadline_ns = deadline_ns
        self._shortest_ns = max(SHORTEST_NS, STEADY_ROUND_TRIPS * round_trip_ns)
        self._head_ns = HEAD_NS + HEAD_ROUND_TRIPS * round_trip_ns
        self._now_ns = 0
        self._points: list[Point] = [(0, 0)]
        self._next_look = 0
        self._best_look = 0.0

    def sample(self, elapsed_ns: Ns, received: int, counted_ns: Ns | None = None) -> Estimate | None:
        """So much had come by `counted_ns` (by now, if that is not given), all since the measurement began.

        The estimate, once it is over; None: go on."""
        at = elapsed_ns if counted_ns is None else counted_ns
        last_ns, last = self._points[-1]
        if elapsed_ns < self._now_ns or at > elapsed_ns or at < last_ns or received < last:
            told = f"{received} B by {at} ns at {elapsed_ns} ns, after {last} B by {last_ns} ns"
            raise UsageError(f"samples go back: {told}")
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
        """What can be said now, settled or not: for a measurement that had to end."""
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
        slope = _line(half)[0] if half[-1][0] - half[0][0] >= SHORTEST_NS else _line(half)[0] / 2
        slope = max(slope, self._fastest())
        return Estimate(slope, False, f"no steady rate in {self._now_ns // MS} ms; the best of it is taken")

    def _fastest(self) -> float:
        """The rate of the fastest look, less a burst; 0.0 while there is none that is long enough to tell."""
        while (look := self._look(self._next_look)) is not None:
            self._next_look += 1
            if look[0][0] >= self._head_ns:
                length_s = (look[-1][0] - look[0][0]) / 1e9
                self._best_look = max(self._best_look, _line(look)[0] - BURST / length_s)
        return self._best_look

    def _look(self, begin: int) -> list[Point] | None:
        """The look that begins at this point: as short as it may be, so that it misses no good moment."""
        for end in range(begin + LOOK_POINTS, len(self._points) + 1):
            if self._points[end - 1][0] - self._points[begin][0] >= LOOK_NS:
                return self._points[begin:end]
        return None

    def _settled(self) -> Estimate | None:
        """The fastest of the settled stretches that end here, or else of the rough ones; each begins at a point."""
        end = self._points[-1][0]
        best = Estimate(0.0, False, "")
        for place, (at, _) in enumerate(self._points):
            if end - at < self._shortest_ns or len(self._points) - place < FEWEST_POINTS:
                break
            slope, bend = _straight(self._points[place:])
            is_settled = bend <= 1
            is_rough = bend <= ROUGH and end - at >= ROUGH_LENGTHS * self._shortest_ns
            if (is_settled or is_rough) and (is_settled, slope) > (best.settled, best.bytes_per_s):
                best = Estimate(slope, is_settled, f"{'' if is_settled else 'nearly '}steady for {(end - at) // MS} ms")
        is_slow = self._fastest() > best.bytes_per_s * (1 + SLOWER)
        return None if is_slow or best.bytes_per_s == 0 else best


def _straight(stretch: Sequence[Point]) -> tuple[float, float]:
    """The slope in bytes a second, and how bent the stretch is: 1 is as much as may be."""
    slope, stray = _line(stretch)
    begin, length = stretch[0][0], stretch[-1][0] - stretch[0][0]
    bounds = [begin + length * number // WINDOWS for number in range(WINDOWS + 1)]
    slopes = []
    for low, high in itertools.pairwise(bounds):
        window = [point for point in stretch if low <= point[0] <= high]
        if len(window) < WINDOW_POINTS:
            return slope, math.inf
        slopes.append(_line(window)[0])
    strays = stray / (STRAY * (stretch[-1][1] - stretch[0][1]))
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
