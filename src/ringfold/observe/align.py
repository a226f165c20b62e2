"""One timeline for the records of all processes, with an uncertainty. Pure.

The times of a record are CLOCK_MONOTONIC of its host. Records of one boot share it, unless they contradict each other;
such a set of records is a *clock domain*, and the domain is what has a mapping. It is made in two stages.

1. *What the clocks say.* Where the run had a global clock, each `ClockSampled` ties a time to global time, with a
   bound on the error. Between samples the mapping is a straight line; before the first one and after the last one it
   follows CLOCK_MONOTONIC_RAW, whose rate against global time is fitted, and the bound grows. A domain without a global
   clock starts from the wall clock of its host, and nobody knows how wrong that is.
2. *What the events say.* An op commits at no member before the parts of all are done (`orders.py`). Each such order
   bounds the difference of two mappings; in both directions, as every op does, it is what NTP gets from a request
   and its response. First the drift is removed: for each part of a few seconds, a line is laid between the bounds that
   the ops put on a mapping from both sides (the convex hulls of both). Relative to these *detrended* mappings, the
   orders around some instants (*knots*), and the bounds of the clocks, are a system of difference constraints, which
   shortest paths solve. The largest and the smallest solution say how far each mapping is bound, and their mean is one,
   too. The mappings are corrected at the knots, with straight lines between, as little as the orders require where the
   clocks have bounds; to the middle where they have none.

A knot's system has the orders up to both neighbouring knots, so what lies between two knots holds with either
correction, and with any mixture of them: straight lines between knots keep every order. That needs a system with a
solution, so a correction that is almost constant between the neighbours: drift times distance has to be less than the
time that the shortest op leaves to the clocks. In shared memory that is a few microseconds, and a drift of 60 ppm takes
as long in a tenth of a second. This is why the drift is removed first, and why knots whose orders contradict each other
get more knots beside them, down to the bins of a grid. Corrections are always relative to the detrended mappings: those
of an earlier pass would be bends, which contradict the orders around the next one's knots.

The uncertainty is how far a mapping could be moved. There an order counts less, the further it is from the knot: by the
error that the rate may still have, times the distance.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from ringfold.observe.orders import Count, Order, count, epochs, likely, part_of, ring_sizes, tightest
from ringfold.observe.processes import Op, OpKey, Process, by_key
from ringfold.wire.events import ClockSampled

By = Literal["global clock", "wall clock", "events"]
"""Where a mapping comes from."""

_SECOND = 1_000_000_000
MAX_RATE_ERROR = 1e-6
"""How much the rate of CLOCK_MONOTONIC_RAW may change while there is no sample."""
SAME_CLOCK_NS = 1_000_000
"""Records of one boot whose clocks differ by more do not share them: one runs in a time namespace."""
PASSES = 8
MARGIN_NS = 50
"""An order is kept by at least so much, so that rounding breaks none."""
MAX_DRIFT = 5e-4
"""Between two hosts. The kernel adjusts its rate by no more."""
_MIN_KNOT_NS, _MAX_KNOT_NS = _SECOND, 60 * _SECOND
_MAX_KNOTS = 1_000
_OPS_OF_A_KNOT = 12
_BINS = 16
"""Of the grid, between two knots at first."""
_LINE_NS, _LINE_OPS = 8 * _SECOND, 96
"""The part of a record that gets one line is shorter in time, or has fewer ops."""
_MIN_SMOOTH_NS, _MAX_SMOOTH_NS, _SMOOTH = 4 * _SECOND, 60 * _SECOND, 2e5


@dataclass(slots=True)
class Clock:
    """The mapping of a domain to the time of all: straight lines between knots. `errors` are bounds; None: unknown."""

    knots: list[int]
    values: list[int]
    errors: list[int | None]
    slope: float = 1.0
    """Outside of the knots."""

    def map(self, at: int) -> int:
        """The time of all."""
        knots, values = self.knots, self.values
        after = bisect_right(knots, at)
        if 0 < after < len(knots):
            at0, value0 = knots[after - 1], values[after - 1]
            return value0 + (at - at0) * (values[after] - value0) // (knots[after] - at0)
        edge = 0 if after == 0 else -1
        away = at - knots[edge]
        return values[edge] + away + int(away * (self.slope - 1.0))

    def error_ns(self, at: int) -> int | None:
        """How far off `map` may be; None if that is not known."""
        after = bisect_right(self.knots, at)
        if 0 < after < len(self.knots):
            around = self.errors[after - 1 : after + 1]
            return None if None in around else max(error for error in around if error is not None)
        edge = 0 if after == 0 else -1
        error = self.errors[edge]
        return None if error is None else error + int(abs(at - self.knots[edge]) * MAX_RATE_ERROR)

    def inverse(self, value: int) -> int:
        """The domain's time at a time of all."""
        after = bisect_right(self.values, value)
        if 0 < after < len(self.values):
            at0, value0 = self.knots[after - 1], self.values[after - 1]
            return at0 + (value - value0) * (self.knots[after] - at0) // (self.values[after] - value0)
        edge = 0 if after == 0 else -1
        return self.knots[edge] + int((value - self.values[edge]) / self.slope)


@dataclass(slots=True)
class Domain:
    """Processes whose times are those of one clock, by their indexes. `by` says what its mapping comes from."""

    processes: list[int]
    by: By
    base: Clock
    clock: Clock


@dataclass(slots=True)
class Alignment:
    """The mappings of all processes. `origin` is the time of all at which the timeline begins: 0 on it."""

    domains: list[Domain]
    of: list[int]
    """The domain of each process."""
    origin: int = 0
    broken_ns: int = 0
    """By how much orders contradict each other: 0, unless clocks jump within a few seconds, or stamps are wrong."""
    raw: list[int] = field(default_factory=list)
    """What is added to the times of each process where they are not aligned: its wall clock at the beginning."""

    def time(self, process: int, at: int) -> int:
        """The time of all, in nanoseconds that read like Unix time where any clock does."""
        return self.domains[self.of[process]].clock.map(at)

    def unaligned(self, process: int, at: int) -> int:
        """The same by the wall clock of the host as it was when the record began: what one has without alignment."""
        return at + self.raw[process]

    def error_ns(self, process: int, at: int) -> int | None:
        """The uncertainty of `time`; None if it is unknown."""
        return self.domains[self.of[process]].clock.error_ns(at)

    def by(self, process: int) -> By:
        return self.domains[self.of[process]].by


def align(processes: Sequence[Process], *, use_events: bool = True) -> Alignment:
    """Find the mappings. `use_events=False` leaves them as the clocks say, for comparison."""
    groups = _domains(processes)
    ops = by_key(processes)
    of = [0] * len(processes)
    for number, group in enumerate(groups):
        for index in group:
            of[index] = number
    domains = _bases(processes, groups, of, ops)
    result = Alignment(domains, of, raw=[_raw_offset(processes, index) for index in range(len(processes))])
    if use_events and len(groups) > 1:
        _settle(result, processes, ops)
    firsts = [(index, bounds[0]) for index, process in enumerate(processes) if (bounds := process.bounds)]
    result.origin = min((result.time(index, at) for index, at in firsts), default=0)
    return result


def compare(processes: Sequence[Process], alignment: Alignment) -> tuple[list[Count], list[Count]]:
    """The impossible orders before and after the alignment."""
    ops = by_key(processes)
    return count(processes, ops, alignment.unaligned), count(processes, ops, alignment.time)


# Stage 1: what the clocks say


def _domains(processes: Sequence[Process]) -> list[list[int]]:
    """Processes of the same boot, apart where their clocks contradict each other."""
    found: list[list[int]] = []
    for index, process in enumerate(processes):
        for group in found:
            if _share_clock(processes[group[0]], process):
                group.append(index)
                break
        else:
            found.append([index])
    return found


def _share_clock(one: Process, other: Process) -> bool:
    if one.begun.boot_id != other.begun.boot_id:
        return False
    mine, theirs = _global_offsets(one), _global_offsets(other)
    if mine and theirs:
        # Both clocks are the run's: they may differ by their errors, and by what they drifted between the samples.
        pairs = [(_nearest(theirs, at), at, offset, error) for at, offset, error in mine]
        over = [
            abs(offset - near[1]) - error - near[2] - int(abs(at - near[0]) * 1e-4) for near, at, offset, error in pairs
        ]
        if median(over) > SAME_CLOCK_NS // 100:
            return False
    wall, walls = _wall_offset(one), _wall_offset(other)
    return wall is None or walls is None or abs(wall - walls) < SAME_CLOCK_NS


def _global_offsets(process: Process) -> list[tuple[int, int, int]]:
    return [(at, s.global_ns - at, s.error_ns or 0) for at, s in process.clocks if s.global_ns is not None]


def _nearest(samples: list[tuple[int, int, int]], at: int) -> tuple[int, int, int]:
    after = bisect_left(samples, (at,))
    return min(samples[max(0, after - 1) : after + 1], key=lambda sample: abs(sample[0] - at))


def _wall_offset(process: Process) -> int | None:
    """Wall time minus the record's, when the record began, as the median of a few readings: one may be interrupted."""
    readings = [(at, sample.wall_ns) for at, sample in process.clocks if sample.wall_ns] or process.walls
    offsets = [wall - at for at, wall in readings[:5]]
    return int(median(offsets)) if offsets else None


def _raw_offset(processes: Sequence[Process], index: int) -> int:
    offset = _wall_offset(processes[index])
    if offset is None:
        offset = next((each for process in processes if (each := _wall_offset(process)) is not None), 0)
    return offset


def _bases(
    processes: Sequence[Process], groups: list[list[int]], of: list[int], ops: Mapping[OpKey, list[tuple[int, Op]]]
) -> list[Domain]:
    """The mapping of each domain by clocks. One without any begins where its ops fit those of the others."""
    domains: list[Domain | None] = []
    for group in groups:
        samples = sorted((each for index in group for each in processes[index].clocks), key=lambda each: each[0])
        walls = sorted(each for index in group for each in processes[index].walls)
        clock: Clock | None
        if any(sample.global_ns is not None for _, sample in samples):
            by: By = "global clock"
            clock = _by_global(samples)
        else:
            by = "wall clock"
            clock = _by_wall([(at, sample.wall_ns) for at, sample in samples if sample.wall_ns], walls)
        domains.append(None if clock is None else Domain(group, by, clock, clock))
    known = {number for number, domain in enumerate(domains) if domain is not None}
    result = []
    for number, domain in enumerate(domains):
        if domain is None:
            clock = _by_ops(number, of, ops, known, domains, processes)
            domain = Domain(groups[number], "events", clock, clock)
        result.append(domain)
    return result


def _by_global(samples: list[tuple[int, ClockSampled]]) -> Clock:
    """Knots at the best sample of each second. Those without global time follow the raw clock."""
    best: dict[int, tuple[int, ClockSampled]] = {}
    for at, sample in samples:
        if sample.global_ns is None:
            continue
        old = best.get(at // _SECOND)
        if old is None or (sample.error_ns or 0) < (old[1].error_ns or 0):
            best[at // _SECOND] = (at, sample)
    ready = [best[second] for second in sorted(best)]
    rate, rate_error = _raw_rate(ready)
    first, last = ready[0], ready[-1]
    smooth = _smoothed(ready, rate)
    outside = {at // _SECOND: (at, s) for at, s in samples if s.global_ns is None and not first[0] <= at <= last[0]}
    knots: dict[int, tuple[int, int]] = {}
    for (at, sample), value in zip(ready, smooth, strict=True):
        knots[at] = (value, sample.error_ns or 0)
    for at, sample in outside.values():
        base = first if at < first[0] else last
        away = sample.raw_ns - base[1].raw_ns
        grown = int(abs(away) * (rate_error + MAX_RATE_ERROR))
        knots[at] = (knots[base[0]][0] + away + int(away * rate), (base[1].error_ns or 0) + grown)
    ats = sorted(knots)
    return Clock(ats, [knots[at][0] for at in ats], [knots[at][1] for at in ats], 1.0 + rate)


def _smoothed(ready: list[tuple[int, ClockSampled]], rate: float) -> list[int]:
    """Global times of samples with the noise of single readings averaged out, within their bounds.

    Global time against the raw clock is almost straight: only crystals change it, slowly. So the average is over more
    seconds, the larger the error is.
    """
    (_, first), found = ready[0], []
    lines = [sample.raw_ns + int((sample.raw_ns - first.raw_ns) * rate) for _, sample in ready]
    aways = [(sample.global_ns or 0) - line for (_, sample), line in zip(ready, lines, strict=True)]
    begin = end = 0
    for number, (at, sample) in enumerate(ready):
        error = sample.error_ns or 0
        half = min(_MAX_SMOOTH_NS, max(_MIN_SMOOTH_NS, int(error * _SMOOTH)))
        # Of the same length on both sides, so that a slow bend does not shift the ends.
        half = min(half, at - ready[0][0], ready[-1][0] - at)
        while ready[begin][0] < at - half:
            begin += 1
        while begin and ready[begin - 1][0] >= at - half:
            begin -= 1
        end = max(end, number + 1)
        while end < len(ready) and ready[end][0] <= at + half:
            end += 1
        while ready[end - 1][0] > at + half:
            end -= 1
        mean = sum(aways[begin:end]) // (end - begin)
        found.append(lines[number] + min(max(mean, aways[number] - error), aways[number] + error))
    return found


def _raw_rate(ready: list[tuple[int, ClockSampled]]) -> tuple[float, float]:
    """How much faster global time runs than the raw clock, and by how much that may be wrong."""
    (_, first), (_, last) = ready[0], ready[-1]
    span = last.raw_ns - first.raw_ns
    if span <= 0 or first.global_ns is None or last.global_ns is None:
        return 0.0, 1e-4
    rate = (last.global_ns - first.global_ns - span) / span
    error = ((first.error_ns or 0) + (last.error_ns or 0)) / span
    # With seconds between two readings of microseconds, crystals of the same kind are the better guess.
    return (rate, error) if error < 1e-4 else (0.0, 1e-4)


def _by_wall(samples: list[tuple[int, int]], walls: list[tuple[int, int]]) -> Clock | None:
    """The wall clock, where it did not step; then the host's own clock, from where it began."""
    if not samples:
        if not walls:
            return None
        offset = int(median(wall - at for at, wall in walls))
        return Clock([walls[0][0]], [walls[0][0] + offset], [None])
    offsets = [wall - at for at, wall in samples]
    begin = int(median(offsets[:5]))
    knots: dict[int, int] = {}
    steps = any(abs(b - a) > SAME_CLOCK_NS for a, b in pairwise(offsets))
    for number, (at, _) in enumerate(samples):
        near = sorted(offsets[max(0, number - 2) : number + 3])
        knots[at] = at + (begin if steps else near[len(near) // 2])
    ats = sorted(knots)
    return Clock(ats, [knots[at] for at in ats], [None] * len(ats))


def _by_ops(
    number: int,
    of: list[int],
    ops: Mapping[OpKey, list[tuple[int, Op]]],
    known: set[int],
    domains: list[Domain | None],
    processes: Sequence[Process],
) -> Clock:
    """Ends of an op are near each other: the median difference is where a domain without any clock begins."""
    differences = []
    for members in ops.values():
        mine = [op.at for index, op in members if of[index] == number]
        others = [(index, op.at) for index, op in members if of[index] in known]
        if mine and others:
            index, at = others[0]
            domain = domains[of[index]]
            assert domain is not None
            differences.append(domain.base.map(at) - mine[0])
    starts = [
        bounds[0] for index, process in enumerate(processes) if of[index] == number and (bounds := process.bounds)
    ]
    begin = min(starts, default=0)
    offset = int(median(differences)) if differences else 0
    return Clock([begin], [begin + offset], [None])


# Stage 2: what the events say. First of all, drift

_Crossing = Sequence[Sequence[tuple[int, Op]]]
"""The ops with members in several domains."""


@dataclass(slots=True)
class _Detrended:
    """A domain's mapping without its drift against the root, and by how much its rate may still be wrong."""

    clock: Clock
    rate_error: float


def _detrended(domains: list[Domain], of: list[int], crossing: _Crossing, root: int) -> list[_Detrended]:
    """Relative to these mappings, corrections are almost constant for seconds.

    Each follows the root's, or if it shares no ops with the root, that of a domain that follows the root.
    """
    found = [_Detrended(domain.base, MAX_DRIFT) for domain in domains]
    found[root].rate_error = 0.0
    sides = [_sides(members, of) for members in crossing]
    waiting, leaders = set(range(len(domains))) - {root}, [root]
    for leader in leaders:
        if not waiting:
            break
        bounds: dict[int, list[_OpBounds]] = {}
        clock = found[leader].clock
        for op in sides:
            if leader in op:
                end, part = (at and clock.map(at) for at in op[leader])
                for number in waiting & op.keys():
                    bounds.setdefault(number, []).append(_op_bounds(domains[number].base, *op[number], end, part))
        for number in sorted(bounds):
            if len(bounds[number]) >= _OPS_OF_A_KNOT:
                lines = _lines(sorted(bounds[number], key=lambda each: each.end))
                along, rate_error = _along(domains[number].base, lines)
                found[number] = _Detrended(along, min(rate_error + found[leader].rate_error, MAX_DRIFT))
                waiting.discard(number)
                leaders.append(number)
    return found


def _sides(members: Sequence[tuple[int, Op]], of: list[int]) -> dict[int, tuple[int, int]]:
    """The domains of an op: the earliest end in it, and the latest part, or 0."""
    sides: dict[int, tuple[int, int]] = {}
    for index, op in members:
        end, part = sides.get(of[index], (op.at, 0))
        sides[of[index]] = min(end, op.at), max(part, part_of(op.ended))
    return sides


class _OpBounds(NamedTuple):
    """What an op says about the correction of a domain: at least `low` at its `end`, at most `high` at its `part`."""

    end: int
    low: int | None
    part: int
    high: int | None


def _op_bounds(base: Clock, end: int, part: int, leader_end: int, leader_part: int) -> _OpBounds:
    low = leader_part - base.map(end) if leader_part else None
    return _OpBounds(end, low, part, leader_end - base.map(part) if part else None)


class _Line(NamedTuple):
    """`value` at `at`, and a slope that may be wrong by `rate_error`. It fits the ops from `begin` to `end`."""

    begin: int
    end: int
    at: int
    value: float
    slope: float
    rate_error: float

    def map(self, at: int) -> int:
        return int(self.value + self.slope * (at - self.at))


def _lines(bounds: list[_OpBounds]) -> list[_Line]:
    """Lines within the bounds, each for a part of the ops that is short enough to have one."""
    found: list[_Line] = []
    todo = [bounds]
    while todo:
        part = todo.pop()
        half = len(part) // 2
        band = None
        if part[-1].end - part[0].end <= _LINE_NS or len(part) <= _LINE_OPS:
            band = _Band(part)
        if band is None or (not band.has_line and half >= _OPS_OF_A_KNOT):
            todo += [part[half:], part[:half]]
        else:
            found.append(band.line())
    return found


class _Band:
    """The plane between the lower and the upper bounds of some ops, and the lines in it."""

    def __init__(self, bounds: list[_OpBounds]) -> None:
        self._begin, self._end = bounds[0].end, bounds[-1].end
        self._at = bounds[len(bounds) // 2].end
        self._lows = _hull([(each.end - self._at, each.low) for each in bounds if each.low is not None])
        highs = sorted((each.part - self._at, -each.high) for each in bounds if each.high is not None)
        self._highs = _hull(highs)
        # How much too narrow the band is for lines of a slope is a convex function of it; where it begins to rise:
        self._best = _first(self._rises, -MAX_DRIFT, MAX_DRIFT) if self._lows and self._highs else 0.0

    @property
    def has_line(self) -> bool:
        return not (self._lows and self._highs) or self._excess(self._best) <= 0

    def line(self) -> _Line:
        """The least steep one of those that have half of the possible distance to both sides, or more."""
        if not self._lows or not self._highs:
            value = self._low(0.0) if self._lows else self._high(0.0) if self._highs else 0.0
            return _Line(self._begin, self._end, self._at, value, 0.0, MAX_DRIFT)
        least = self._excess(self._best)
        flattest, steepest = self._slopes(least / 2 if least < 0 else least)
        slope = min(max(0.0, flattest), steepest)
        flattest, steepest = self._slopes(max(0.0, least))
        value = (self._low(slope) + self._high(slope)) / 2
        return _Line(self._begin, self._end, self._at, value, slope, max(steepest - slope, slope - flattest))

    def _low(self, slope: float) -> float:
        """The lowest value of a line of this slope that is above all lower bounds."""
        return max(y - slope * t for t, y in self._lows)

    def _high(self, slope: float) -> float:
        return -max(y + slope * t for t, y in self._highs)

    def _excess(self, slope: float) -> float:
        return self._low(slope) - self._high(slope)

    def _rises(self, slope: float) -> bool:
        _, low_t = max((y - slope * t, t) for t, y in self._lows)
        _, high_t = max((y + slope * t, t) for t, y in self._highs)
        return high_t > low_t

    def _slopes(self, limit: float) -> tuple[float, float]:
        """The smallest and the largest slope with which the excess is not above a limit."""

        def is_over(slope: float) -> bool:
            return self._excess(slope) > limit

        return _first(is_over, self._best, -MAX_DRIFT), _first(is_over, self._best, MAX_DRIFT)


def _first(condition: Callable[[float], bool], begin: float, end: float) -> float:
    """The last number from `begin` to `end` before a condition begins to hold."""
    for _ in range(40):
        middle = (begin + end) / 2
        begin, end = (begin, middle) if condition(middle) else (middle, end)
    return begin


def _hull(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The upper convex hull of sorted points."""
    hull: list[tuple[int, int]] = []
    for t, y in points:
        while len(hull) > 1:
            (t0, y0), (t1, y1) = hull[-2:]
            if (y1 - y0) * (t - t0) > (y - y0) * (t1 - t0):
                break
            hull.pop()
        hull.append((t, y))
    return hull


def _along(base: Clock, lines: list[_Line]) -> tuple[Clock, float]:
    """The mapping with lines added, and its rate error. Each line holds in its middle, and a chord between middles."""
    nodes = {(middle := (line.begin + line.end) // 2): line.map(middle) for line in lines}
    rate_error = max(line.rate_error for line in lines)
    for (at0, value0), (at1, value1), *both in zip(nodes.items(), [*nodes.items()][1:], lines, lines[1:], strict=False):
        slope = (value1 - value0) / (at1 - at0)
        rate_error = max(rate_error, *(abs(line.slope - slope) + line.rate_error for line in both))
    first, last = lines[0], lines[-1]
    begin, end = min(first.begin, base.knots[0]), max(last.end, base.knots[-1])
    nodes |= {begin: first.map(begin), end: last.map(end)}
    ats = sorted(nodes)
    added = Clock(ats, [nodes[at] for at in ats], [None] * len(ats))
    knots = sorted({*base.knots, *ats})
    values = [base.map(at) + _between(added, at) for at in knots]
    return Clock(knots, values, [None] * len(knots), base.slope), rate_error


# Stage 2: then all orders


def _settle(alignment: Alignment, processes: Sequence[Process], ops: Mapping[OpKey, list[tuple[int, Op]]]) -> None:
    """Correct the clocks until no order is impossible. If that fails, the pass that leaves fewest counts."""
    of, domains = alignment.of, alignment.domains
    crossing = [members for members in ops.values() if len({of[index] for index, _ in members}) > 1]
    between = [order for order in epochs(processes) if of[order.first] != of[order.then]]
    named = Counter(of[index] for members in crossing for index, _ in members)
    named.update(of[index] for order in between for index in (order.first, order.then))
    if not named:
        return
    root = min(named, key=lambda number: (-named[number], number))
    fewest, best = -1, [domain.clock for domain in domains]
    grid = _Grid(alignment, _detrended(domains, of, crossing, root), root, crossing, between)
    grid.add(between)
    sizes = ring_sizes(processes)
    for _ in range(PASSES):
        is_new = grid.add(tightest(crossing, alignment.time, sizes))
        is_new |= grid.replace_likely(likely(crossing, alignment.time, sizes))
        if not is_new:
            break
        broken = grid.correct()
        impossible = sum(each.impossible for each in count(processes, ops, alignment.time))
        if fewest < 0 or impossible < fewest:
            fewest, best, alignment.broken_ns = impossible, [domain.clock for domain in domains], broken
        if impossible == 0:
            break
    for domain, clock in zip(domains, best, strict=True):
        domain.clock = clock


_FAR, _MAX_SCALE = 1 << 62, float(1 << 20)
Bound = dict[tuple[int, int], int]
"""(j, i): how much the correction of i may be above that of j."""


class _Solution(NamedTuple):
    """The corrections at one knot, by domain: (its time, correction, error)."""

    corrections: dict[int, tuple[int, int, int | None]]
    broken_ns: int
    """By how much orders contradict each other."""
    is_complete: bool
    """All orders hold, also the likely ones."""


class _Grid:
    """The tightest orders so far, in bins of time, and the corrections that follow from them.

    What orders have to spare is relative to the detrended mappings, whatever the passes before have corrected. So later
    passes only add orders.
    """

    def __init__(
        self,
        alignment: Alignment,
        detrended: list[_Detrended],
        root: int,
        crossing: _Crossing,
        between: list[Order],
    ) -> None:
        self._domains, self._of = alignment.domains, alignment.of
        self._detrended, self._root = detrended, root
        for domain, each in zip(self._domains, detrended, strict=True):
            domain.clock = each.clock
        ends = [alignment.time(index, op.at) for members in crossing for index, op in members]
        ends += [alignment.time(order.then, order.after) for order in between]
        self._begin, span = min(ends), max(ends) - min(ends)
        distance = span * _OPS_OF_A_KNOT // max(1, len(crossing))
        distance = min(_MAX_KNOT_NS, max(_MIN_KNOT_NS, distance))
        bins = min(_MAX_KNOTS, span // distance + 1) * _BINS
        self._width = span // bins + 1
        self._bounds: list[Bound] = [{} for _ in range(bins)]
        self._likely: list[Bound] = [{} for _ in range(bins)]

    def add(self, orders: Iterable[Order]) -> bool:
        """Whether any of these orders binds more than those so far."""
        return self._add(self._bounds, orders)

    def replace_likely(self, orders: Iterable[Order]) -> bool:
        """Whether these orders, which need not hold, are others than before."""
        before, self._likely = self._likely, [{} for _ in self._bounds]
        self._add(self._likely, orders)
        return self._likely != before

    def _add(self, bounds: list[Bound], orders: Iterable[Order]) -> bool:
        of, is_new, last = self._of, False, len(bounds) - 1
        maps = [each.clock.map for each in self._detrended]
        for order in orders:
            first, then = of[order.first], of[order.then]
            if first == then:
                continue
            at = maps[then](order.after)
            # The correction of `first` may exceed that of `then` by no more than the order has to spare.
            spare = at - maps[first](order.before) - MARGIN_NS
            bound = bounds[min(max((at - self._begin) // self._width, 0), last)]
            if spare < bound.get((then, first), spare + 1):
                bound[then, first] = spare
                is_new = True
        return is_new

    def correct(self) -> int:
        """Correct the mappings of all domains. By how much orders contradict each other."""
        knots = list(range(0, len(self._bounds) + 1, _BINS))
        solved: dict[tuple[int, int, int], _Solution] = {}
        while True:
            windows = list(zip([knots[0], *knots], knots, [*knots[1:], knots[-1]], strict=False))
            for window in windows:
                if window not in solved:
                    solved[window] = self._solve(*window)
            incomplete = [window for window in windows if not solved[window].is_complete]
            more = {(low + at) // 2 for low, at, _ in incomplete} | {(at + high) // 2 for _, at, high in incomplete}
            if more <= set(knots) or len(knots) > 2 * _MAX_KNOTS:
                break
            knots = sorted({*knots, *more})
        for number, domain in enumerate(self._domains):
            found = [solved[window].corrections for window in windows]
            _apply(domain, self._detrended[number].clock, [each[number] for each in found if number in each])
        return max(solved[window].broken_ns for window in windows)

    def _solve(self, low: int, at: int, high: int) -> _Solution:
        """The corrections at the beginning of a bin, from the orders in those around it."""
        certain, wanted, loose = Bound(), Bound(), Bound()
        for number in range(low, high):
            away = max(at - number, number + 1 - at) * self._width
            for pair, spare in self._bounds[number].items():
                certain[pair] = min(spare, certain.get(pair, _FAR))
                looser = spare + int(away * sum(self._detrended[each].rate_error for each in pair))
                loose[pair] = min(looser, loose.get(pair, _FAR))
            for pair, spare in self._likely[number].items():
                wanted[pair] = min(spare, wanted.get(pair, _FAR))
        time = self._begin + at * self._width
        parts = []
        for nodes in _connected(certain):
            own, better, outer = (
                {pair: spare for pair, spare in bound.items() if nodes.issuperset(pair)}
                for bound in (certain, wanted, loose)
            )
            parts.append(self._solve_connected(nodes, time, own, own | _tighter_bound(own, better), outer))
        return _Solution(
            {number: each for part in parts for number, each in part.corrections.items()},
            max((part.broken_ns for part in parts), default=0),
            all(part.is_complete for part in parts),
        )

    def _solve_connected(self, nodes: set[int], at: int, certain: Bound, wanted: Bound, loose: Bound) -> _Solution:
        """The same for domains that orders connect. `wanted` counts if it has a solution, `loose` for the errors."""
        times = {number: self._detrended[number].clock.inverse(at) for number in nodes}
        boxes: dict[int, tuple[int, int]] = {}
        for number in sorted(nodes):
            base = self._domains[number].base
            error = base.error_ns(times[number])
            if error is not None:
                boxes[number] = (base.map(times[number]) - at, error)
        anchor = self._root if self._root in nodes else min(nodes)
        system = _System(certain, boxes, nodes, anchor)
        scale, slack = system.feasible()
        is_complete = slack == 0
        if is_complete and wanted != certain:
            other = _System(wanted, boxes, nodes, anchor)
            other_scale, other_slack = other.feasible()
            is_complete = other_slack == 0
            if is_complete:
                system, scale = other, other_scale
        low, high = system.range(scale, slack)
        outer_low, outer_high = _System(loose, boxes, nodes, anchor).range(max(1.0, scale), slack)
        has_reference = bool(boxes) or (slack == 0 and self._root in nodes)
        corrections: dict[int, tuple[int, int, int | None]] = {}
        for number in sorted(low.keys() & high.keys()):
            shift = (low[number] + high[number]) // 2
            error = max(outer_high.get(number, shift) - shift, shift - outer_low.get(number, shift), 0)
            corrections[number] = (times[number], shift, error + slack if has_reference else None)
        return _Solution(corrections, slack, is_complete)


def _tighter_bound(one: Bound, other: Bound) -> Bound:
    return {pair: min(spare, one.get(pair, spare)) for pair, spare in other.items()}


def _connected(bound: Bound) -> list[set[int]]:
    """The domains that orders connect."""
    found: list[set[int]] = []
    for pair in bound:
        joined, apart = set(pair), []
        for each in found:
            if each & joined:
                joined |= each
            else:
                apart.append(each)
        found = [*apart, joined]
    return found


@dataclass(slots=True)
class _System:
    """The difference constraints of one knot: `bound`, and by domain a box (middle, half its width) from its clock.

    Boxes are relative to global time. Without any, corrections are relative to the domain `anchor`, which has none.
    """

    bound: Bound
    boxes: Mapping[int, tuple[int, int]]
    nodes: set[int]
    anchor: int

    def feasible(self) -> tuple[float, int]:
        """The smallest part of the clocks' bounds that the orders need, or else the slack that they need beyond.

        A part above 1: a clock was further off than its bound, which orders never are.
        """
        if not self.boxes:
            return 0.0, self._slack(0.0)
        if self.is_possible(0.0, 0):
            return 0.0, 0
        scale = 1.0
        while scale < _MAX_SCALE and not self.is_possible(scale, 0):
            scale *= 2.0
        if scale >= _MAX_SCALE:
            return 1.0, self._slack(1.0)
        low, high = (0.0 if scale <= 1.0 else scale / 2.0), scale
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (low, middle) if self.is_possible(middle, 0) else (middle, high)
        return high, 0

    def _slack(self, scale: float) -> int:
        """The smallest slack with which there is a solution, to a few hundred nanoseconds or a thousandth."""
        if self.is_possible(scale, 0):
            return 0
        low, high = 0, 1_000
        while not self.is_possible(scale, high) and high < _FAR:
            low, high = high, high * 2
        for _ in range(12):
            half = (low + high) // 2
            low, high = (low, half) if self.is_possible(scale, half) else (half, high)
        return high

    def is_possible(self, scale: float, slack: int) -> bool:
        return self.paths(scale, slack, 1) is not None

    def range(self, scale: float, slack: int) -> tuple[dict[int, int], dict[int, int]]:
        """The smallest and the largest corrections. Each of the two is a solution, and so is their mean."""
        high, low = self.paths(scale, slack, 1) or {}, self.paths(scale, slack, -1) or {}
        return {node: -value for node, value in low.items()}, high

    def paths(self, scale: float, slack: int, direction: int) -> dict[int, int] | None:
        """Shortest paths: the largest corrections (1), or minus the smallest (-1). None: there is no solution."""
        edges: list[tuple[int, int, int]] = []
        for (source, target), spare in self.bound.items():
            edges.append((source, target, spare + slack) if direction > 0 else (target, source, spare + slack))
        for number, (middle, error) in self.boxes.items():
            reach = int(error * scale) + slack
            edges += [(_GLOBAL, number, reach + middle * direction), (number, _GLOBAL, reach - middle * direction)]
        distance = {_GLOBAL if self.boxes else self.anchor: 0}
        for _ in range(len(self.nodes) + 2):
            changed = False
            for source, target, weight in edges:
                if source in distance:
                    reach = distance[source] + weight
                    if target not in distance or reach < distance[target]:
                        distance[target] = reach
                        changed = True
            if not changed:
                distance.pop(_GLOBAL, None)
                return distance
        return None


_GLOBAL = -1


def _apply(domain: Domain, detrended: Clock, solved: list[tuple[int, int, int | None]]) -> None:
    """Correct the mapping of a domain at the knots, with straight lines between them. Earlier knots are replaced."""
    if not solved:
        domain.clock = domain.base
        return
    base, ats = domain.base, [at for at, _, _ in solved]
    correction = Clock(ats, [shift for _, shift, _ in solved], [None] * len(ats))
    known = Clock(ats, correction.values, [error for _, _, error in solved])
    first, last = (detrended.map(at) + _between(correction, at) - base.map(at) for at in (ats[0], ats[-1]))
    knots = sorted({*detrended.knots, *ats})
    values, errors = [], []
    for at in knots:
        if ats[0] <= at <= ats[-1]:
            value = detrended.map(at) + _between(correction, at)
        else:
            value = base.map(at) + (first if at < ats[0] else last)
        values.append(value)
        errors.append(_tighter(base.error_ns(at), known.error_ns(at), abs(value - base.map(at))))
    domain.clock = Clock(knots, values, errors, base.slope)
    if domain.by == "wall clock":
        domain.by = "events"


def _between(correction: Clock, at: int) -> int:
    """The correction at a time: that of the nearest knot outside of all."""
    if at <= correction.knots[0]:
        return correction.values[0]
    if at >= correction.knots[-1]:
        return correction.values[-1]
    return correction.map(at)


def _tighter(clocks: int | None, events: int | None, moved: int) -> int | None:
    """The uncertainty after a correction: what the clocks allow around it, or less, if the events leave less."""
    if clocks is None:
        return events
    return clocks + moved if events is None else min(clocks + moved, events)
