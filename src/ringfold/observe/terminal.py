"""What `ringfold top` draws of a page (`view.py`): lines of styled text, in as many columns as there are. Pure.

What is abnormal is named; the rest is counted. So the picture of a run has as many lines with 3 peers as with 256.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from ringfold.observe.incidents import Incident, seconds
from ringfold.observe.series import Series
from ringfold.observe.view import GroupRow, LinkRow, Page, PeerRow, WaitRow
from ringfold.wire.base import PeerId

TONES: Mapping[str, tuple[str, str]] = {
    "ok": ("●", "green"),
    "warning": ("▲", "yellow"),
    "bad": ("✖", "bold red"),
    "note": ("◌", "cyan"),
    "idle": ("○", "dim"),
}
"""By tone, the sign and the style: never by colour alone."""
SEVERITIES: Mapping[str, str] = {"bad": "bold red", "warning": "yellow", "info": "", "good": "green", "note": "dim"}
ARROWS: Mapping[str, str] = {"shm": "═", "tcp": "─", "mixed": "≈", "unknown": "┄"}
BARS = "▁▂▃▄▅▆▇█"
MAX_RING_LINES = 3
NAMED_LINKS = 4


class Column(NamedTuple):
    """A column of the table of peers: its name, its width, and what it shows. `key`: what it is sorted by, and which
    key of the keyboard does that; the largest first, unless `ascends`."""

    name: str
    width: int
    cell: Callable[[PeerRow], str]
    key: str = ""
    order: Callable[[PeerRow], float] = lambda row: row.peer
    ascends: bool = False


_RANKS = {"bad": 0, "warning": 1, "note": 2, "ok": 3, "idle": 3}


def _known(value: float, text: str) -> str:
    return text if value >= 0 else ""


COLUMNS: Sequence[Column] = (
    Column("peer", 6, lambda row: f"{TONES[row.tone][0]} {row.peer}", "p", lambda row: row.peer, ascends=True),
    Column("name", 10, lambda row: row.name),
    Column("state", 10, lambda row: row.state),
    Column("step", 7, lambda row: _known(row.step, f"{row.step}"), "s", lambda row: row.step),
    Column("lag", 4, lambda row: _known(row.lag, f"{row.lag}"), "l", lambda row: row.lag),
    Column("step/s", 7, lambda row: _known(row.steps_s, f"{row.steps_s:g}"), "v", lambda row: row.steps_s),
    Column("sent/s", 8, lambda row: size(row.sent_s), "r", lambda row: row.sent_s),
    Column("wait%", 6, lambda row: _known(row.waited, f"{row.waited}"), "w", lambda row: row.waited),
    Column("full%", 6, lambda row: _known(row.blocked, f"{row.blocked}"), "f", lambda row: row.blocked),
    Column("problem, or last op", 40, lambda row: row.problem or row.last_op, "x", lambda row: _RANKS[row.tone], True),
)
SORTED_BY_PROBLEM = len(COLUMNS) - 1


def ordered(rows: Sequence[PeerRow], column: Column) -> list[PeerRow]:
    """The peers in the order of a column; equal ones by their ids."""
    sign = 1 if column.ascends else -1
    return sorted(rows, key=lambda row: (sign * column.order(row), row.peer))


def size(count: float) -> str:
    """Bytes with three digits: 940 B, 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count else "0"
        count /= 1_000
    raise AssertionError


# The sentence on top


def headline(page: Page) -> Text:
    """Is it training, how fast, who is slow, what broke."""
    line = page.headline
    sign, style = TONES[line.tone]
    text = Text(f"{sign} {page.run} [{line.state}]", style=style, end="")
    parts = [f"{line.speed:g} {line.unit}" if line.speed >= 0 else "", f"step {line.step}" if line.step >= 0 else ""]
    parts += [f"{name} {value:g}" for name, value in line.logged.items()]
    parts += [f"{line.peers} peer{'' if line.peers == 1 else 's'}, epoch {line.epoch}" if line.peers else ""]
    text.append("".join(f" · {part}" for part in parts if part), style="bold")
    if line.why:
        text.append(f" · {line.why}", style=style)
    if line.slow:
        text.append(f" · slow: {line.slow}", style="yellow")
    if line.last:
        ago = "now" if line.last_open else f"{seconds(max(0, page.at_ms - line.last_ms))} ago"
        text.append(f" · {ago}: {line.last}", style="magenta")
    return text


# The ring


def ring(group: GroupRow, rows: Mapping[str, PeerRow], width: int) -> list[Text]:
    """The ring of a group, as a closed line if it fits into a few lines; otherwise in numbers, with its worst links."""
    if len(group.ring) < 2:
        alone = f"group {group.group}: {'peer ' + str(group.ring[0]) + ' alone' if group.ring else 'no members'}"
        return [Text(alone, style="dim")]
    links = [_link_between(group, source, target) for source, target in _edges(group.ring)]
    drawn = _drawn(group, links, rows, width)
    return drawn if len(drawn) <= MAX_RING_LINES else _counted(group, links, width)


def _edges(members: Sequence[PeerId]) -> list[tuple[PeerId, PeerId]]:
    return list(zip(members, [*members[1:], members[0]], strict=True))


def _link_between(group: GroupRow, source: PeerId, target: PeerId) -> LinkRow:
    return group.links.get(f"{source}-{target}") or LinkRow(source, target, "unknown", 0)


def _drawn(group: GroupRow, links: Sequence[LinkRow], rows: Mapping[str, PeerRow], width: int) -> list[Text]:
    """Members with the rates between them, folded at the width. The last arrow leads back to the first member."""
    lines = [Text(f"ring {group.group}: " if group.group else "ring: ", style="dim")]
    for link in links:
        row = rows.get(str(link.source))
        _, style = TONES[row.tone if row is not None else "idle"]
        arrow = ARROWS[link.kind]
        member = Text(f"{link.source}", style="bold" if style == "green" else style)
        hop = Text(f" {arrow}{size(link.rate).replace(' ', '')}{arrow}> ", style=TONES[link.tone][1])
        if lines[-1].cell_len + member.cell_len + hop.cell_len > width:
            lines.append(Text("      "))
        lines[-1].append_text(member).append_text(hop)
    lines[-1].append(f"{group.ring[0]}", style="dim")
    return lines


def _counted(group: GroupRow, links: Sequence[LinkRow], width: int) -> list[Text]:
    """Many links: how many of which kind, the range of their rates, and the abnormal or slowest ones."""
    kinds = {kind: sum(link.kind == kind for link in links) for kind in ARROWS}
    rates = sorted(link.rate for link in links)
    text = Text(f"ring {group.group}: " if group.group else "ring: ", style="dim")
    text.append(f"{len(group.ring)} peers", style="bold")
    text.append(f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items() if count)})")
    text.append(
        f", each sends {size(rates[0])}/s to {size(rates[-1])}/s, the middle one {size(rates[len(rates) // 2])}/s"
    )
    worst = sorted(links, key=lambda link: (link.tone == "ok", link.rate))[:NAMED_LINKS]
    named = Text("slowest: ", style="dim")
    for number, link in enumerate(worst):
        is_slow = link.tone != "ok" and link.known
        rate = f"{size(link.known)}/s known" if is_slow else f"{size(link.rate)}/s"
        style = "" if link.tone == "ok" else TONES[link.tone][1]
        named.append(f"{'' if number == 0 else ', '}{link.source}→{link.target} {rate}", style=style)
    for line in (text, named):
        line.truncate(width, overflow="ellipsis")
    return [text, named]


# Who is waited for


def waits(page: Page, width: int, most: int) -> list[Text]:
    """Who is waited for, since when, and until when: with a bar that is full when the peer is evicted."""
    missing = [wait for wait in page.waits if wait.missing and page.at_ms - wait.since_ms >= 1_000]
    lines = [_wait(page.at_ms, wait, width) for wait in sorted(missing, key=lambda wait: wait.since_ms)[:most]]
    if len(missing) > most:
        lines.append(Text(f"and {len(missing) - most} more waits", style="dim"))
    return lines


def _wait(at_ms: int, wait: WaitRow, width: int) -> Text:
    since_ms = at_ms - wait.since_ms
    text = Text("▲ ", style="yellow")
    text.append(
        f"{_peers(wait.waiting)} wait{'s' if len(wait.waiting) == 1 else ''} for {_peers(wait.missing)}", "bold"
    )
    text.append(f" since {seconds(since_ms)}")
    if wait.evict_ms:
        left_ms = max(0, wait.evict_ms - at_ms)
        filled = round(10 * since_ms / max(1, since_ms + left_ms))
        text.append(f", evicted in {seconds(left_ms)} [{'=' * filled}{'-' * (10 - filled)}]", style="bold yellow")
    elif wait.eviction:
        text.append(f" ({wait.eviction})")
    text.append(f": {wait.what}", style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def _peers(peers: Sequence[PeerId]) -> str:
    if len(peers) == 1:
        return f"peer {peers[0]}"
    return f"peers {', '.join(map(str, peers))}" if 0 < len(peers) <= 3 else f"{len(peers)} peers"


# Series and incidents


def sparkline(series: Series | None, width: int) -> str:
    """The newest values of a series, one character for each bucket of its finest tier."""
    if series is None or width <= 0:
        return ""
    values = [mean for _, mean, _, _ in series.buckets(with_last=True)[0]][-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        return BARS[3] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def course(series: Mapping[str, Series], logged: Mapping[str, float], width: int) -> Text:
    """Speed, and the first logged value, over the last minutes."""
    speed = "steps" if "steps" in series else "ops"
    names = [
        name
        for name in (speed, *(f"log.{each}" for each in sorted(logged, key=lambda each: each != "loss")))
        if name in series
    ]
    text = Text()
    for name in names[:2]:
        last, title = series[name].last, f"{name}/s" if name == speed else name.removeprefix("log.")
        label = f"{title} "
        value = f" {last:.3g}   " if last is not None else "   "
        room = width // max(1, len(names[:2])) - len(label) - len(value)
        text.append(label, style="dim").append(sparkline(series[name], room), style="cyan").append(value, style="bold")
    return text


def incidents(page: Page, width: int, most: int) -> list[Text]:
    """The newest incidents, those that are not over first."""
    return [_incident(page.at_ms, each, width) for each in newest_incidents(page)[:most]]


def newest_incidents(page: Page) -> list[Incident]:
    return sorted(page.incidents.values(), key=lambda each: (not each.is_open, -each.begin_ms, -each.number))


def _incident(at_ms: int, incident: Incident, width: int) -> Text:
    style = SEVERITIES.get(incident.severity, "")
    ago = seconds(max(0, at_ms - incident.begin_ms))
    text = Text(f"{ago:>12} ago  ", style="dim")
    text.append(incident.title, style=style)
    text.append(" …" if incident.is_open else f", {incident.cost}" if incident.cost else "")
    if incident.reason:
        text.append(f"  {incident.reason}", style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


# Whole screens


def incident_lines(page: Page) -> list[Text]:
    """All incidents, each with its reason and its details."""
    count = len(page.incidents)
    lines = [Text(f"{count} incident{'' if count == 1 else 's'}, the newest first", style="bold"), Text()]
    for each in newest_incidents(page):
        lines.append(_incident(page.at_ms, each, 1_000))
        lines += [Text(f"{'':18}{detail}", style="dim") for detail in each.details]
    return lines


def peer_lines(page: Page, peer: PeerId) -> list[Text]:
    """All that is known of one peer."""
    row = page.peers.get(str(peer))
    if row is None:
        return [Text(f"peer {peer} is not in the run any more", style="yellow")]
    sign, style = TONES[row.tone]
    lines = [Text(f"{sign} peer {row.peer} ({row.name}) on {row.host}", style=style), Text()]
    if row.problem:
        lines += [Text(row.problem, style=style), Text()]
    facts = [
        ("state", f"{row.state} ({row.raw_state})"),
        ("version", row.version or "not known"),
        ("addresses", row.addresses),
        (
            "step",
            f"{row.step}, {row.lag} behind the first, {row.steps_s:g} per second" if row.step >= 0 else "none yet",
        ),
        ("last op", row.last_op),
        ("ops", f"{row.ops} committed, {row.ops_s:g} per second, {row.aborted} aborted, {row.restarted} retried"),
        ("sends", f"{size(row.sent_s)}/s{f', {row.memory_share} % in shared memory' if row.memory_share > 0 else ''}"),
        ("receives", f"{size(row.received_s)}/s"),
        (
            "its ops wait",
            f"{row.waited} % of the time until something of another peer comes" if row.waited >= 0 else "",
        ),
        ("its link is full", f"{row.blocked} % of the time" if row.blocked >= 0 else ""),
        ("silent", f"for {seconds(row.silent_ms)}" if row.silent_ms else ""),
        ("clock", _clock(row)),
        ("logged", ", ".join(f"{name} {value:g}" for name, value in row.logged.items())),
        ("lost", f"{row.lanes_lost} lanes, {row.events_dropped} events"),
    ]
    lines += [Text(f"{name:>17}  ", style="dim").append(text, style="default") for name, text in facts if text]
    lines += _links_of(page, peer)
    mine = [each for each in newest_incidents(page) if peer in each.peers]
    if mine:
        lines += [Text(), Text("incidents", style="bold"), *(_incident(page.at_ms, each, 1_000) for each in mine[:10])]
    return lines


def _clock(row: PeerRow) -> str:
    if row.clock_us is None or row.clock_error_us is None:
        return ""
    return f"global time is {row.clock_us:+g} us from the host's, at most {row.clock_error_us:g} us off"


def _links_of(page: Page, peer: PeerId) -> list[Text]:
    lines = [Text(), Text("links in the ring, and paths", style="bold")]
    for group in page.groups.values():
        for link in group.links.values():
            if peer in (link.source, link.target):
                known = f", can carry {size(link.known)}/s or more" if link.known else ""
                what = (
                    f"{link.lanes} lane{'' if link.lanes == 1 else 's'}, {link.kind}, sends {size(link.rate)}/s{known}"
                )
                lines.append(
                    Text(f"{link.source:>12} → {link.target:<3}").append(f" {what}", style=TONES[link.tone][1])
                )
    for edge, shares in page.paths.items():
        source, _, target = edge.partition("-")
        if str(peer) in (source, target):
            lines.append(Text(f"{source:>12} → {target:<3} paths: {', '.join(f'{share:.0%}' for share in shares)}"))
    return lines if len(lines) > 2 else []


def master_lines(page: Page) -> list[Text]:
    """Masters, probing rounds, groups and clocks."""
    leads = f"  {page.leader or 'none'} leads, fence {page.fence}, up {seconds(1_000 * page.uptime_s)}"
    lines = [Text("master", style="bold"), Text(leads)]
    lines += [Text(f"  {each.address}: {each.role}{f' ({each.text})' if each.text else ''}") for each in page.masters]
    lines += [Text(), Text("groups", style="bold")]
    for group in page.groups.values():
        avoided = f", avoids {', '.join(group.avoided)}" if group.avoided else ""
        text = f"  group {group.group}: epoch {group.epoch}, {group.phase}, {len(group.ring)} members"
        channels = f"{group.channels} channel{'' if group.channels == 1 else 's'}"
        more = f"{channels}, evidence by {group.evidence}, {group.divergences} divergences{avoided}"
        lines.append(Text(f"{text}, {more}"))
    if page.rounds:
        lines += [Text(), Text("probing rounds: skew, latency, calculation, size, duration, overhead", style="bold")]
    for each in reversed(page.rounds):
        text = f"  {each.round}: {each.nodes} nodes, {each.edges} edges; {each.skew_us:g} us, {each.latency_us:g} us"
        text += f", {each.calculate_us:g} us, {size(each.bytes)}, {each.total_us:g} us, {each.overhead:g} %"
        lines.append(Text(text + (f"; {each.anomaly}" if each.anomaly else ""), style="yellow" if each.anomaly else ""))
    clocks = [row for row in page.peers.values() if row.clock_us is not None]
    if clocks:
        lines += [Text(), Text("clocks", style="bold")]
        lines += [Text(f"  peer {row.peer}: {_clock(row)}") for row in clocks]
    if page.runs:
        lines += [Text(), Text("runs", style="bold")]
        lines += [Text(f"  {each.name}: {each.state}, {each.peers} peers {each.why}") for each in page.runs]
    return lines
