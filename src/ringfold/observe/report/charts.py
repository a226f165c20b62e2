"""The charts of a report: each in a wide version and one for phones, with a sentence that says what it shows. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from ringfold.observe.report.svg import Scale, Svg, log_ticks, number, ticks, time_label, time_ticks
from ringfold.observe.summary.incidents import PLANNED
from ringfold.observe.summary.results import (
    ClockFigures,
    Incident,
    LinkFigures,
    Membership,
    OpClass,
    PeerWork,
    Series,
    SeriesPoint,
    Summary,
)
from ringfold.observe.summary.wording import duration_text, number_text, percent, rate_text, size_text, times

WIDE, NARROW = 960, 360
MAX_ROWS = 64
"""Peers of a timeline; the others are members from begin to end, and are counted."""
MAX_NUMBERED = 40
"""Incidents with a number in the charts."""
MANY_MARKS = 12
"""More lines of incidents are pale: they would hide what is behind them."""
MAX_MAP = 48
"""Peers of a heat map."""
_ROW, _TOP = 22, 26
_LEFT = {WIDE: 124.0, NARROW: 78.0}
"""Of charts of time: incidents have the same places in all of them."""
_BUCKETS = {WIDE: 320, NARROW: 140}
_HOVERS = 120


@dataclass(frozen=True, slots=True)
class Mark:
    """An incident in a chart of time."""

    number: int
    """In the list of incidents; 0: without one."""
    at_s: float
    kind: str
    text: str


def marks_of(summary: Summary) -> list[Mark]:
    """The incidents that charts show, numbered as in the list."""
    found = [
        (number, incident)
        for number, incident in enumerate(summary.incidents, 1)
        if incident.kind not in ("begun", "ended", "note")
        and (incident.kind != "joined" or incident.at_s >= (summary.first_step_s or 0.0))
    ]
    numbered = len(found) <= MAX_NUMBERED
    return [Mark(number if numbered else 0, incident.at_s, tone(incident), incident.text) for number, incident in found]


def tone(incident: Incident) -> str:
    """The class of an incident: `good`, `calm`, `warn` or `bad`."""
    if incident.kind == "joined":
        return "good"
    if incident.kind in PLANNED:
        return "calm"
    return "warn" if incident.kind in ("failover", "evicted") else "bad"


def both(draw: Callable[[int], str]) -> str:
    """The chart for wide screens and paper, and the one for phones; one of them is shown."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


# Time


@dataclass(frozen=True, slots=True)
class _TimePlot:
    """The frame of a chart whose x axis is the run's time."""

    svg: Svg
    x: Scale
    top: float
    bottom: float

    def axis(self, seconds: float, width: int) -> None:
        for tick in time_ticks(seconds, 10 if width == WIDE else 4):
            at = self.x(tick)
            self.svg.line(at, self.bottom, at, self.bottom + 4, "axis")
            anchor = "end" if at > width - 30 else "start" if tick == 0 and at < 20 else "middle"
            self.svg.text(at, self.bottom + 17, time_label(tick), "tick", anchor)

    def marks(self, marks: Sequence[Mark]) -> None:
        """A line for each incident, and its number above, where there is room."""
        occupied, many = -1e9, " many" if len(marks) > MANY_MARKS else ""
        for mark in marks:
            at = self.x(mark.at_s)
            self.svg.line(at, self.top, at, self.bottom, f"mark {mark.kind}{many}", mark.text)
            if mark.number and at - occupied >= 17:
                occupied = at
                self.svg.circle(at, self.top - 10, 8, f"badge {mark.kind}", mark.text)
                self.svg.text(at, self.top - 6.5, str(mark.number), "badge-text", "middle", mark.text)


def _time_plot(summary: Summary, width: int, height: float, left: float, sentence: str) -> _TimePlot:
    svg = Svg(width, height + 24, sentence)
    right = width - (12 if width == WIDE else 8)
    return _TimePlot(svg, Scale(0.0, max(summary.seconds, 1e-6), left, right), _TOP, height)


def timeline(summary: Summary, width: int) -> str:
    """Who was a member when: a row for each process, and one for the masters."""
    rows, hidden = _rows(summary)
    left = _LEFT[width]
    masters = [lead for lead in summary.leads if lead.ended_s > 0]
    height = _TOP + (len(rows) + bool(masters)) * _ROW + 6
    plot = _time_plot(summary, width, height, left, _timeline_sentence(summary, len(rows) + hidden))
    svg, y = plot.svg, float(_TOP + 3)
    if masters:
        svg.text(left - 8, y + 13, "master", "label soft", "end")
        for place, lead in enumerate(masters):
            x1, x2 = plot.x(lead.began_s), plot.x(lead.ended_s)
            why = f" ({lead.reason})" if lead.reason else ""
            tip = f"{lead.master} led, fence {lead.fence}, until {duration_text(lead.ended_s)}{why}"
            svg.rect(x1, y, x2 - x1 - 1, _ROW - 6, f"lead lead{place % 2}", tip, 3)
            _inside(svg, x1, x2, y, lead.master, "on-lead")
        y += _ROW
    for label, members in rows:
        svg.text(left - 8, y + 13, _fit(label, left - 12), "label", "end", label)
        for member in members:
            _member(plot, member, y, is_named=len(members) > 1)
        y += _ROW
    plot.marks(marks_of(summary))
    plot.axis(summary.seconds, width)
    return svg.done()


def _timeline_sentence(summary: Summary, rows: int) -> str:
    kinds = sum(incident.kind not in ("begun", "ended", "note") for incident in summary.incidents)
    return (
        f"Timeline of {times(rows, 'process', 'processes')} over {duration_text(summary.seconds)} "
        f"with {times(kinds, 'incident')}; the list below has the same in words."
    )


def _rows(summary: Summary) -> tuple[list[tuple[str, list[Membership]]], int]:
    """A row for each process: those with the most to see first to be kept, then by their first member. And how many
    more there are."""
    processes: dict[str, list[Membership]] = {}
    for member in summary.memberships:
        processes.setdefault(member.record or f"peer {member.peer}", []).append(member)
    rows = [(_label(members), members) for members in processes.values()]
    if len(rows) <= MAX_ROWS:
        return rows, 0
    founded_s = min((member.joined_s for member in summary.memberships if member.joined_s is not None), default=0.0)
    calm = {
        id(members)
        for _, members in rows
        if len(members) == 1
        and members[0].end in ("left", "stayed")
        and (members[0].joined_s or 0.0) < founded_s + 1e-3
    }
    kept = sorted(rows, key=lambda row: id(row[1]) in calm)[:MAX_ROWS]
    keep = {id(members) for _, members in kept}
    return [row for row in rows if id(row[1]) in keep], len(rows) - MAX_ROWS


def hidden_rows(summary: Summary) -> int:
    """How many processes the timeline leaves out."""
    return _rows(summary)[1]


def _label(members: Sequence[Membership]) -> str:
    peers = ", ".join(str(member.peer) for member in members[:3]) + (", ..." if len(members) > 3 else "")
    name = members[0].name
    return f"{name} ({peers})" if name else f"peer {peers}"


_ENDS = {
    "left": ("end-left", "left"),
    "lost": ("end-lost", "was lost"),
    "evicted": ("end-evicted", "was evicted"),
    "missing": ("end-lost", "is no longer in the ring"),
    "stayed": ("", "was a member to the end of the records"),
}


def _member(plot: _TimePlot, member: Membership, y: float, *, is_named: bool) -> None:
    svg, x = plot.svg, plot.x
    joined = member.joined_s if member.joined_s is not None else member.ended_s
    registered = member.registered_s if member.registered_s is not None else joined
    kind, how = _ENDS[member.end]
    reason = f": {member.reason}" if member.reason and member.end != "left" else ""
    ended = duration_text(member.ended_s)
    tip = f"peer {member.peer} ({member.name}): joined at {duration_text(joined)}, {how} at {ended}{reason}"
    if x(joined) - x(registered) > 1:
        waited = x(joined) - x(registered)
        svg.rect(x(registered), y + 5, waited, _ROW - 16, "waiting", f"peer {member.peer}: registered", 2)
    x1, x2 = x(joined), x(member.ended_s)
    if member.joined_s is not None:
        svg.rect(x1, y, max(1.5, x2 - x1), _ROW - 6, "member", tip, 3)
        if is_named and x2 - x1 > 60:
            _inside(svg, x1, x2, y, f"peer {member.peer}", "on-member")
    if kind in ("end-lost", "end-evicted"):
        middle = y + (_ROW - 6) / 2
        if kind == "end-lost":
            svg.path([(x2 - 5, middle - 5), (x2 + 5, middle + 5)], "end-lost")
            svg.path([(x2 - 5, middle + 5), (x2 + 5, middle - 5)], "end-lost")
        else:
            corners = [(x2, middle - 6), (x2 + 6, middle), (x2, middle + 6), (x2 - 6, middle)]
            svg.path(corners, "end-evicted", closed=True)


def _inside(svg: Svg, x1: float, x2: float, y: float, text: str, kind: str) -> None:
    """A text in a bar, if it fits."""
    if x2 - x1 > 7 * len(text) + 12:
        svg.text(x1 + 6, y + 12, text, kind)


def _fit(text: str, pixels: float) -> str:
    """As much of a text as fits."""
    most = int(pixels / 6.7)
    return text if len(text) <= most else f"{text[: most - 1]}…"


# Series


def coarser(points: Sequence[SeriesPoint], most: int) -> list[SeriesPoint]:
    """At most so many points: those of a stretch of time become one, with the mean of their means, the least and the
    greatest. Points on both sides of a long pause stay apart."""
    if len(points) <= most:
        return list(points)
    first, span = points[0].at_s, (points[-1].at_s - points[0].at_s) or 1.0
    found = []
    for _, some in groupby(points, lambda point: min(most - 1, int((point.at_s - first) / span * most))):
        near = list(some)
        found.append(
            SeriesPoint(
                sum(point.at_s for point in near) / len(near),
                sum(point.mean for point in near) / len(near),
                min(point.low for point in near),
                max(point.high for point in near),
            )
        )
    return found


def series_chart(summary: Summary, series: Series, width: int, unit: str = "", *, from_zero: bool = False) -> str:
    """A series with the range of its values as a band, over the run's time; pauses are shaded."""
    points = coarser(series.points, _BUCKETS[width])
    y, is_log = _value_scale(points, from_zero)
    height = 210.0 if width == WIDE else 170.0
    left = _LEFT[width] if width == WIDE else 46.0
    first, last = points[0].mean, points[-1].mean
    low, high = min(point.low for point in points), max(point.high for point in points)
    sentence = (
        f"{series.name} over {duration_text(summary.seconds)}: {number_text(first)} at the begin, {number_text(last)} "
        f"at the end, between {number_text(low)} and {number_text(high)}."
    )
    plot = _time_plot(summary, width, height, left, sentence)
    svg, x = plot.svg, plot.x
    up = Scale(*y, plot.bottom, plot.top + 4, is_log)
    for tick in log_ticks(*y, 5) if is_log else ticks(*y, 5):
        svg.line(left, up(tick), x.last, up(tick), "grid")
        svg.text(left - 7, up(tick) + 4, number_text(tick), "tick", "end")
    for incident in summary.incidents:
        if incident.paused_s and incident.paused_from_s is not None:
            x1, x2 = x(incident.paused_from_s), x(incident.paused_from_s + incident.paused_s)
            if x2 - x1 > 1:
                tip = f"pause of {duration_text(incident.paused_s)}"
                svg.rect(x1, plot.top, x2 - x1, plot.bottom - plot.top, "pause", tip)
    for part in _without_gaps(points, summary.seconds):
        band = [(x(point.at_s), up(point.high)) for point in part]
        band += [(x(point.at_s), up(point.low)) for point in reversed(part)]
        svg.path(band, "band", closed=True)
        svg.path([(x(point.at_s), up(point.mean)) for point in part], "curve")
        if len(part) == 1:
            svg.circle(x(part[0].at_s), up(part[0].mean), 2.5, "dot")
    plot.marks(marks_of(summary))
    plot.axis(summary.seconds, width)
    if width == WIDE:
        _hovers(plot, coarser(points, _HOVERS), unit)
    return svg.done()


def _value_scale(points: Sequence[SeriesPoint], from_zero: bool) -> tuple[tuple[float, float], bool]:
    """The range of the y axis, and whether it is logarithmic. Single peaks may leave it."""
    means = sorted(point.mean for point in points)
    low, high = min(point.low for point in points), max(point.high for point in points)
    if from_zero:
        return (0.0, max(means[-1] * 1.08, 1e-9)), False
    if low > 0 and high / low > 200:
        return (low, high), True
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low - room if low < 0 or low - room > 0 else 0.0, high + room), False


def _without_gaps(points: Sequence[SeriesPoint], seconds: float) -> list[list[SeriesPoint]]:
    """Parts between which there was nothing for much longer than usual."""
    usual = seconds / max(1, len(points))
    parts: list[list[SeriesPoint]] = [[points[0]]]
    for point in points[1:]:
        if point.at_s - parts[-1][-1].at_s > max(12 * usual, seconds * 0.03):
            parts.append([])
        parts[-1].append(point)
    return parts


def _hovers(plot: _TimePlot, points: Sequence[SeriesPoint], unit: str) -> None:
    """Columns whose tooltips have the values."""
    for place, point in enumerate(points):
        x = plot.x(point.at_s)
        before = (plot.x(points[place - 1].at_s) + x) / 2 if place else plot.x.first
        after = (plot.x(points[place + 1].at_s) + x) / 2 if place + 1 < len(points) else plot.x.last
        text = f"{duration_text(max(0.0, point.at_s))}: {number_text(point.mean)}{unit}"
        if point.high > point.low:
            text += f" ({number_text(point.low)} to {number_text(point.high)})"
        plot.svg.rect(before, plot.top, after - before, plot.bottom - plot.top, "hover", text)


# Peers


WORK_PARTS = (
    ("own", "own work"),
    ("waited", "waiting for the last to begin"),
    ("moved", "the op itself"),
    ("sync", "admissions and syncs"),
)


def work_chart(work: Sequence[PeerWork], width: int) -> str:
    """Where each peer's time went, as a bar of parts."""
    left, right = _LEFT[width], 64.0 if width == WIDE else 8.0
    totals = [sum(_parts_of(peer)) for peer in work]
    most = max(totals, default=0.0) or 1.0
    x = Scale(0.0, most, left, width - right)
    most_own = max(work, key=lambda peer: _parts_of(peer)[0] / (sum(_parts_of(peer)) or 1.0))
    share = percent(_parts_of(most_own)[0] / (sum(_parts_of(most_own)) or 1.0))
    sentence = (
        f"Where the time of {times(len(work), 'peer')} went: peer {most_own.peer} had the largest part of own work, "
        f"{share}."
    )
    svg = Svg(width, 10 + len(work) * 26, sentence)
    for row, (peer, total) in enumerate(zip(work, totals, strict=True)):
        y, at = 6.0 + row * 26, 0.0
        label = f"{peer.name} ({peer.peer})" if peer.name else f"peer {peer.peer}"
        svg.text(left - 8, y + 14, _fit(label, left - 12), "label", "end", label)
        for (kind, name), seconds in zip(WORK_PARTS, _parts_of(peer), strict=True):
            if seconds > 0:
                tip = f"{label}: {name}, {duration_text(seconds)} ({percent(seconds / total)})"
                svg.rect(x(at), y, x(at + seconds) - x(at) - 0.5, 20, f"work-{kind}", tip)
                _share(svg, x(at), x(at + seconds), y, percent(seconds / total), kind)
            at += seconds
        if width == WIDE:
            svg.text(x(at) + 6, y + 14, duration_text(total), "tick")
    return svg.done()


def _share(svg: Svg, x1: float, x2: float, y: float, text: str, kind: str) -> None:
    if x2 - x1 > 40:
        svg.text((x1 + x2) / 2, y + 14, text, f"on-{kind}", "middle")


def _parts_of(work: PeerWork) -> tuple[float, float, float, float]:
    return work.own_s, work.waited_s, work.moved_s, work.sync_s


# Ops


def ops_chart(ops: Sequence[OpClass], width: int) -> str:
    """Median, p99 and the longest of each class of ops, by size; time is logarithmic."""
    left = 190.0 if width == WIDE else 118.0
    low = min(op.median_us for op in ops) / 1.6
    high = max(op.greatest_us for op in ops) * 1.3
    x = Scale(max(low, 0.1), max(high, 1.0), left, width - 20, is_log=True)
    slowest = max(ops, key=lambda op: op.p99_us / max(op.median_us, 1e-9))
    sentence = (
        f"Durations of {times(len(ops), 'class', 'classes')} of ops; the widest range has {op_label(slowest)}: "
        f"median {duration_text(slowest.median_us / 1e6)}, p99 {duration_text(slowest.p99_us / 1e6)}."
    )
    bottom = 8.0 + len(ops) * 24
    svg = Svg(width, bottom + 24, sentence)
    for tick in log_ticks(x.low, x.high, 9 if width == WIDE else 4):
        svg.line(x(tick), 4, x(tick), bottom, "grid")
        svg.text(x(tick), bottom + 16, duration_text(tick / 1e6), "tick", "middle")
    for row, op in enumerate(ops):
        y = 20.0 + row * 24
        svg.text(left - 8, y + 4, _fit(op_label(op), left - 10), "label", "end", op_label(op))
        median, p99, longest = (duration_text(us / 1e6) for us in (op.median_us, op.p99_us, op.greatest_us))
        tip = f"{op_label(op)}: median {median}, p99 {p99}, longest {longest}"
        svg.line(x(op.median_us), y, x(op.greatest_us), y, "whisker", tip)
        svg.line(x(op.median_us), y, x(op.p99_us), y, "range", tip)
        svg.line(x(op.greatest_us), y - 4, x(op.greatest_us), y + 4, "whisker", tip)
        svg.circle(x(op.median_us), y, 5, "dot", tip)
    return svg.done()


def op_label(op: OpClass) -> str:
    """The kind of an op and its size."""
    low, high = size_text(op.low_bytes), size_text(op.high_bytes)
    if not op.high_bytes:
        return op.op
    return f"{op.op}, {low}" if low == high else f"{op.op}, {low} to {high}"


# Links


def link_map(links: Sequence[LinkFigures], width: int) -> str:
    """The rates of all measured links: rows send, columns receive. The slower a link, the stronger its colour."""
    peers = sorted({peer for link in links for peer in (link.source, link.target)})
    slowest = min(links, key=lambda link: link.bytes_per_s)
    sentence = (
        f"Rates of {times(len(links), 'link')} between {times(len(peers), 'peer')}: the slowest goes from peer "
        f"{slowest.source} to peer {slowest.target}, {rate_text(slowest.bytes_per_s)}."
    )
    left = 34.0
    cell = min(44.0, (width - left - 8) / len(peers))
    size = left + cell * len(peers)
    svg = Svg(size + 8, size + 8, sentence)
    rates = sorted(link.bytes_per_s for link in links)
    places = {peer: place for place, peer in enumerate(peers)}
    every = ceil(16 / cell)
    for peer, place in places.items():
        if place % every == 0:
            svg.text(left - 6, left + (place + 0.5) * cell + 4, str(peer), "tick", "end")
            svg.text(left + (place + 0.5) * cell, left - 8, str(peer), "tick", "middle")
    for link in links:
        x, y = left + places[link.target] * cell, left + places[link.source] * cell
        delay = f", delay {duration_text(link.delay_us / 1e6)}" if link.delay_us is not None else ""
        tip = f"peer {link.source} to peer {link.target}: {rate_text(link.bytes_per_s)}{delay} ({link.by})"
        svg.rect(x + 1, y + 1, cell - 2, cell - 2, f"heat heat{_heat(link.bytes_per_s, rates)}", tip, 2)
        if cell > 30:
            text = rate_text(link.bytes_per_s).split()[0]
            svg.text(x + cell / 2, y + cell / 2 + 4, text, f"heat-text{_heat(link.bytes_per_s, rates)}", "middle", tip)
    return svg.done()


def _heat(rate: float, rates: Sequence[float]) -> int:
    """0: as fast as the median or faster, to 4: less than a quarter of it."""
    median = rates[len(rates) // 2]
    share = rate / median if median else 1.0
    return sum(share < limit for limit in (0.9, 0.7, 0.45, 0.25))


# Clocks

MAX_CLOCK_LINES = 8


def clock_chart(summary: Summary, clocks: Sequence[ClockFigures], width: int) -> str:
    """How each host's wall clock has moved against the run's global clock since its first sample."""
    shown = clocks[:MAX_CLOCK_LINES]
    moved = [
        [(point.at_s, point.mean - clock.first_offset_us) for point in coarser(clock.offsets.points, _BUCKETS[width])]
        for clock in shown
    ]
    values = [value for line in moved for _, value in line]
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or 1.0
    height = 190.0 if width == WIDE else 160.0
    left = _LEFT[width] if width == WIDE else 56.0
    most = max(shown, key=lambda clock: abs(clock.last_offset_us - clock.first_offset_us))
    sentence = (
        f"The wall clocks of {times(len(shown), 'host')} against the global clock; that of {most.host} moved most, by "
        f"{duration_text((most.last_offset_us - most.first_offset_us) / 1e6)}."
    )
    plot = _time_plot(summary, width, height, left, sentence)
    svg, up = plot.svg, Scale(low - room, high + room, height, _TOP)
    for tick in ticks(low - room, high + room, 5):
        svg.line(left, up(tick), plot.x.last, up(tick), "grid")
        svg.text(left - 7, up(tick) + 4, duration_text(tick / 1e6) if tick else "0", "tick", "end")
    ends: list[float] = []
    for place, (clock, line) in enumerate(zip(shown, moved, strict=True)):
        svg.path([(plot.x(at_s), up(value)) for at_s, value in line], f"curve line{place}")
        y = up(line[-1][1]) - 6
        if all(abs(y - other) > 13 for other in ends):
            ends.append(y)
            svg.text(plot.x.last - 2, y, clock.host, f"tick text{place}", "end")
    plot.axis(summary.seconds, width)
    return svg.done()


def share_bar(share: float) -> str:
    """A bar in a cell of a table."""
    return f'<span class="bar" aria-hidden="true"><b style="width:{number(min(1.0, share) * 100)}%"></b></span>'
