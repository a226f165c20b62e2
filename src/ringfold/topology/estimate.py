"""From the arrivals of one measurement to a rate: when to stop, and what it is.

The other side sends as fast as it can; the receiver counts. The count's slope is the rate, but not from the start:

* TCP starts slowly and doubles with every round trip;
* a shaper (a token bucket) lets a *burst* through at line speed before it holds the rate;
* bytes arrive in *lumps* of up to 64 KiB. At 10 Mbit/s a lump is 52 ms, so two short looks can differ by half.

So only a recent *stretch* of samples is looked at, and a straight line is laid through it (least squares, which
averages lumps out where a difference of two ends would not). The stretch is *settled* if four things hold:

* it is straight: no sample strays from the line by more than STRAY of the bytes of the stretch. A lump that counts, a
  pause or a burst bends it;
* its parts agree: the slopes of its WINDOWS consecutive windows differ by at most AGREE. A slow start does not pass,
  because its windows grow;
* it is many lumps long. If just one lump arrives between two samples, the samples look like a perfect line of a wrong
  slope. What arrived between two samples, up to LUMP, may be one lump; the stretch must hold FEWEST_LUMPS of them;
* it is as fast as the link has been. TCP that has lost many packets creeps back for hundreds of milliseconds, steadily;
  a look of LOOK_NS that was faster by more than SLOWER shows that this is not the link's pace. Looks begin when a burst
  is over: it goes at line speed, but TCP needs HEAD_ROUND_TRIPS to send a megabyte of it.

The longest settled stretch is taken, for it is the surest. Slow and lumpy links need a long one, fast ones stop early.
At the deadline the best available is given, said to be unsettled: the line through the second half, or the fastest look
if that is more.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.errors import UsageError

Ns = int
MS = 1_000_000

DEADLINE_NS = 700 * MS
SLOW_DEADLINES = 2
"""A link that has not brought FEWEST_LUMPS full lumps by the deadline has so many times as long for them."""
SHORTEST_NS = 250 * MS
"""A shorter stretch proves nothing: somebody's scheduler may have been kind."""
STEADY_ROUND_TRIPS = 2
"""Nor does one that is shorter than this: within one round trip a slow start may look steady."""
WINDOWS = 3
AGREE = 0.05
STRAY = 0.02
LUMP = 64 * 1024
FEWEST_LUMPS = 16
LOOK_NS = 150 * MS
RISING_LOOKS = 2
RISING_DEADLINES = 1.5
"""A link that gets faster until the deadline has so much more time."""
HEAD_NS = 50 * MS
HEAD_ROUND_TRIPS = 7
SLOWER = 0.04
FEWEST_SAMPLES = 3
"""In each window."""

Sample = tuple[Ns, int]


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
        self._samples: list[Sample] = []
        self._next_look = 0
        self._best_look = 0.0

    def sample(self, elapsed_ns: Ns, received: int) -> Estimate | None:
        """So much has arrived in all since the measurement began. The estimate, once it is over; None: go on."""
        if self._samples:
            last_ns, last = self._samples[-1]
            if elapsed_ns < last_ns or received < last:
                raise UsageError(f"samples go back: {elapsed_ns} ns, {received} B after {last_ns} ns, {last} B")
            if elapsed_ns == last_ns:
                self._samples.pop()
        self._samples.append((elapsed_ns, received))
        settled = self._settled()
        if settled is not None:
            return settled
        if elapsed_ns < self._deadline_ns:
            return None
        if 0 < received < FEWEST_LUMPS * LUMP and elapsed_ns < SLOW_DEADLINES * self._deadline_ns:
            return None
        if self._is_rising() and elapsed_ns < RISING_DEADLINES * self._deadline_ns:
            return None
        return self.best()

    def best(self) -> Estimate:
        """What can be said now, settled or not: for a measurement that had to end."""
        settled = self._settled()
        if settled is not None:
            return settled
        arrived = self._arrived()
        if len(arrived) < 2 or arrived[-1][1] == arrived[0][1]:
            return Estimate(0.0, False, "nothing arrived")
        middle = (arrived[0][0] + arrived[-1][0]) // 2
        half = [sample for sample in arrived if sample[0] >= middle]
        if len(half) < FEWEST_SAMPLES:
            half = arrived
        slope = max(_line(half)[0], self._fastest())
        return Estimate(slope, False, f"no steady rate in {self._samples[-1][0] // MS} ms; the best of it is taken")

    def _arrived(self) -> list[Sample]:
        """From the last sample before the first byte on."""
        first = next((place for place, (_, total) in enumerate(self._samples) if total > 0), len(self._samples))
        return self._samples[max(0, first - 1) :]

    def _fastest(self) -> float:
        """The slope of the fastest look; 0.0 while there is none that is long enough to tell."""
        samples = self._samples
        while self._next_look < len(samples):
            look = self._look(self._next_look)
            if look is None:
                break
            self._next_look += 1
            if look[0][0] >= self._head_ns:
                self._best_look = max(self._best_look, _line(look)[0])
        return self._best_look

    def _look(self, begin: int) -> list[Sample] | None:
        """The look that begins at this sample: as short as it may be, so that it misses no good moment."""
        at = self._samples[begin][0]
        for end in range(begin + FEWEST_SAMPLES, len(self._samples) + 1):
            look = self._samples[begin:end]
            if look[-1][0] - at >= LOOK_NS and _is_many_lumps(look):
                return look
        return None

    def _is_rising(self) -> bool:
        """Whether the last looks are the fastest: TCP has not found the pace yet."""
        fastest = self._fastest()
        latest = range(max(0, self._next_look - RISING_LOOKS), self._next_look)
        looks = [look for begin in latest if (look := self._look(begin)) is not None]
        return fastest > 0 and any(_line(look)[0] >= fastest for look in looks)

    def _settled(self) -> Estimate | None:
        arrived = self._arrived()
        # From the longest stretch to the shortest; each begins at a sample.
        for place, (at, _) in enumerate(arrived):
            if (end := arrived[-1][0]) - at < self._shortest_ns:
                return None
            slope = _steady(arrived[place:])
            if slope is not None:
                if self._fastest() > slope * (1 + SLOWER):
                    return None
                return Estimate(slope, True, f"steady for {(end - at) // MS} ms")
        return None


def _steady(stretch: Sequence[Sample]) -> float | None:
    """The slope in bytes a second, if the stretch is settled."""
    grown = stretch[-1][1] - stretch[0][1]
    if grown <= 0 or not _is_many_lumps(stretch):
        return None
    slope, stray = _line(stretch)
    if stray > STRAY * grown:
        return None
    begin, length = stretch[0][0], stretch[-1][0] - stretch[0][0]
    bounds = [begin + length * number // WINDOWS for number in range(WINDOWS + 1)]
    slopes = []
    for low, high in itertools.pairwise(bounds):
        window = [sample for sample in stretch if low <= sample[0] <= high]
        if len(window) < FEWEST_SAMPLES:
            return None
        slopes.append(_line(window)[0])
    return slope if max(slopes) - min(slopes) <= AGREE * slope else None


def _is_many_lumps(stretch: Sequence[Sample]) -> bool:
    most = max(after[1] - before[1] for before, after in itertools.pairwise(stretch))
    return stretch[-1][1] - stretch[0][1] >= FEWEST_LUMPS * min(most, LUMP)


def _line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Least squares: the slope in bytes a second, and the largest distance of a sample from the line, in bytes."""
    begin, base = samples[0]
    times = [(at - begin) / 1e9 for at, _ in samples]
    totals = [float(total - base) for _, total in samples]
    mean_time, mean_total = sum(times) / len(times), sum(totals) / len(totals)
    spread = sum((time - mean_time) ** 2 for time in times)
    if spread == 0:
        return 0.0, 0.0
    products = ((time - mean_time) * (total - mean_total) for time, total in zip(times, totals, strict=True))
    slope = sum(products) / spread
    stray = max(
        abs(total - mean_total - slope * (time - mean_time)) for time, total in zip(times, totals, strict=True)
    )
    return slope, stray
