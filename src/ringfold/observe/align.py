"""One timeline for the records of all processes, with an uncertainty. Pure.

The times of a record are CLOCK_MONOTONIC of its host. Records of one boot share it, unless they contradict each other;
such a set of records is a *clock domain*, and the domain is what has a mapping. It is made in two stages.

1. *What the clocks say.* Where the run had a global clock, each `ClockSampled` ties a time to global time, with a
   bound on the error. Between samples the mapping is a straight line; before the first one and after the last one it
   follows CLOCK_MONOTONIC_RAW, whose rate against global time is fitted, and the bound grows. A domain without a global
   clock starts from the wall clock of its host, and nobody knows how wrong that is.
2. *What the events say.* An op commits at no member before the parts of all are done (`orders.py`). Each such order
   bounds the difference of two mappings; in both directions, as every op does, it is what NTP gets from a request
   and its response. For instants a few seconds apart (*knots*) the orders around them, and the bounds of the clocks,
   are a system of difference constraints, which shortest paths solve. The largest and the smallest solution say how
   far each mapping is bound, and their mean is one, too. The mappings are corrected at the knots, with straight lines
   between, as little as the orders require where the clocks have bounds; to the middle where they have none.

A knot's system has the orders up to both neighbouring knots, so what lies between two knots holds with either
correction, and with any mixture of them. Drift within a knot is the slope of the mapping after a first pass; a few
passes follow.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

from ringfold.observe.orders import Count, count, epochs, ring_sizes, tightest
from ringfold.observe.processes import Op, OpKey, Process, by_key
from ringfold.wire.events import ClockSampled

By = Literal["global clock", "wall clock", "events"]
"""Where a mapping comes from."""

_SECOND = 1_000_000_000
MAX_RATE_ERROR = 1e-6
"""How much the rate of CLOCK_MONOTONIC_RAW may change while there is no sample."""
SAME_CLOCK_NS = 1_000_000
"""Records of one boot whose clocks differ by more do not share them: one runs in a time namespace."""
PASSES = 16
SETTLED_NS = 2_000
"""A pass that moves nothing by more is the last one."""
MARGIN_NS = 50
"""An order is kept by at least so much, so that rounding breaks none."""
_MIN_KNOT_NS, _MAX_KNOT_NS = _SECOND, 60 * _SECOND
_OPS_OF_A_KNOT = 12
_LINE_KNOTS = 5
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


# Stage 2: what the events say


def _settle(alignment: Alignment, processes: Sequence[Process], ops: Mapping[OpKey, list[tuple[int, Op]]]) -> None:
    """Correct the clocks until nothing moves. Passes may swing: the one that leaves fewest impossible orders counts."""
    fewest, best, broken_ns = -1, [domain.clock for domain in alignment.domains], 0
    for number in range(PASSES):
        broken, moved = _correct(alignment, processes, ops, is_last=number == PASSES - 1)
        impossible = sum(each.impossible for each in count(processes, ops, alignment.time))
        if fewest < 0 or impossible <= fewest:
            fewest, best, broken_ns = impossible, [domain.clock for domain in alignment.domains], broken
        if impossible == 0 or (not broken and moved <= SETTLED_NS):
            break
    alignment.broken_ns = broken_ns
    for domain, clock in zip(alignment.domains, best, strict=True):
        domain.clock = clock


Bound = dict[tuple[int, int], int]
"""(j, i): how much the correction of i may be above that of j."""


def _correct(
    alignment: Alignment, processes: Sequence[Process], ops: Mapping[OpKey, list[tuple[int, Op]]], *, is_last: bool
) -> tuple[int, int]:
    """One pass over all knots. By how much orders contradict each other, and the largest correction."""
    of, time = alignment.of, alignment.time
    crossing = [members for members in ops.values() if len({of[index] for index, _ in members}) > 1]
    orders = [order for order in tightest(crossing, time, ring_sizes(processes)) if of[order.first] != of[order.then]]
    orders += [order for order in epochs(processes) if of[order.first] != of[order.then]]
    if not orders:
        return 0, 0
    stamped = sorted((time(order.then, order.after), order) for order in orders)
    begin, end = stamped[0][0], stamped[-1][0]
    per_op = (end - begin) / max(1, len(crossing))
    width = int(min(_MAX_KNOT_NS, max(_MIN_KNOT_NS, per_op * _OPS_OF_A_KNOT)))
    count_of = max(2, -(-(end - begin) // width) + 1)
    bounds: list[Bound] = [{} for _ in range(count_of)]
    for at, order in stamped:
        pair = (of[order.first], of[order.then])
        # The correction of `first` may exceed that of `then` by no more than the order has to spare.
        spare = time(order.then, order.after) - time(order.first, order.before) - MARGIN_NS
        knot = min((at - begin) // width, count_of - 2)
        for each in (knot, knot + 1):
            key = (pair[1], pair[0])
            if spare < bounds[each].get(key, spare + 1):
                bounds[each][key] = spare
    broken = moved = 0
    named = Counter(number for bound in bounds for pair in bound for number in pair)
    root = min(named, key=lambda number: (-named[number], number))
    found: list[dict[int, tuple[int, int, int | None]]] = []
    for knot, bound in enumerate(bounds):
        solved, slack = _solve(alignment.domains, begin + knot * width, bound, root)
        broken = max(broken, slack)
        found.append(solved)
        moved = max([moved, *(abs(shift) for _, shift, _ in solved.values())])
    smooth = broken > 0 and not is_last
    for number, domain in enumerate(alignment.domains):
        _apply(domain, [solved[number] for solved in found if number in solved], smooth=smooth)
    return broken, moved


def _solve(
    domains: list[Domain], at: int, bound: Bound, root: int
) -> tuple[dict[int, tuple[int, int, int | None]], int]:
    """The corrections at one knot: domain -> (its time, correction, error), and how much the orders contradict."""
    boxes: dict[int, tuple[int, int, int]] = {}
    times = {number: domain.clock.inverse(at) for number, domain in enumerate(domains)}
    for number, domain in enumerate(domains):
        error = domain.base.error_ns(times[number])
        if error is not None:
            boxes[number] = (domain.base.map(times[number]) - at, error, times[number])
    nodes = {number for pair in bound for number in pair}
    if not nodes or not (boxes or root in nodes):
        return {}, 0
    system = _System(bound, {number: box[:2] for number, box in boxes.items() if number in nodes}, nodes, root)
    scale, slack = system.feasible()
    low, high = system.range(scale, slack)
    full_low, full_high = (low, high) if slack or not boxes else system.range(1.0, 0)
    result: dict[int, tuple[int, int, int | None]] = {}
    for number in sorted(nodes):
        if number not in low or number not in high:
            continue
        shift = (low[number] + high[number]) // 2
        error = max(full_high.get(number, shift) - shift, shift - full_low.get(number, shift), 0)
        has_reference = bool(boxes) or slack == 0
        result[number] = (times[number], shift, error + slack if has_reference else None)
    return result, slack


@dataclass(slots=True)
class _System:
    """The difference constraints of one knot: `bound`, and by domain a box (middle, half its width) from its clock.

    Boxes are relative to global time. Without any, corrections are relative to the domain `root`, which has none.
    """

    bound: Bound
    boxes: Mapping[int, tuple[int, int]]
    nodes: set[int]
    root: int

    def feasible(self) -> tuple[float, int]:
        """The smallest part of the clocks' bounds that the orders need, or else the slack that they need beyond."""
        if self.boxes and self.is_possible(0.0, 0):
            return 0.0, 0
        if self.is_possible(1.0, 0):
            low, high = 0.0, 1.0
            for _ in range(10 if self.boxes else 0):
                middle = (low + high) / 2
                low, high = (low, middle) if self.is_possible(middle, 0) else (middle, high)
            return high, 0
        slack = 1_000
        while not self.is_possible(1.0, slack) and slack < 1 << 62:
            slack *= 2
        low_slack, high_slack = slack // 2, slack
        for _ in range(12):
            half = (low_slack + high_slack) // 2
            low_slack, high_slack = (low_slack, half) if self.is_possible(1.0, half) else (half, high_slack)
        return 1.0, high_slack

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
        distance = {_GLOBAL if self.boxes else self.root: 0}
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


def _apply(domain: Domain, solved: list[tuple[int, int, int | None]], *, smooth: bool) -> None:
    """Correct the mapping of a domain at the knots, with straight lines between them. Earlier knots are replaced."""
    if not solved:
        return
    base, old = domain.base, domain.clock
    ats = [at for at, _, _ in sorted(solved)]
    # Relative to what the clocks say, so that a pass does not leave bends where the last one had its knots.
    shifts = [old.map(at) + shift - base.map(at) for at, shift, _ in sorted(solved)]
    if smooth:
        shifts = _local_lines(ats, shifts)
    correction = Clock(ats, shifts, [None] * len(ats))
    known = Clock(ats, shifts, [error for _, _, error in sorted(solved)])
    knots = sorted({*base.knots, *ats})
    values, errors = [], []
    for at in knots:
        shift = _between(correction, at)
        values.append(base.map(at) + shift)
        errors.append(_tighter(base.error_ns(at), known.error_ns(at), abs(shift)))
    domain.clock = Clock(knots, values, errors, base.slope)
    if domain.by == "wall clock":
        domain.by = "events"


def _local_lines(ats: list[int], shifts: list[int]) -> list[int]:
    """Each value by the line through those around it.

    Where clocks drift between two knots, the orders contradict each other, and what each knot finds is near the truth
    only. A line through several knots has the drift, and with it the next pass finds orders that agree.
    """
    found = []
    for number, at in enumerate(ats):
        near = range(max(0, number - _LINE_KNOTS), min(len(ats), number + _LINE_KNOTS + 1))
        xs, ys = [ats[k] - at for k in near], [shifts[k] - shifts[number] for k in near]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
        found.append(shifts[number] + int(mean_y - slope * mean_x))
    return found


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
