"""What a page shows of a run: a reducer from statuses, events and times to a snapshot of plain values. Pure.

`RunView.look` takes in what one look at the master brought, and `RunView.page` is the result. Everything in it is
bounded: rates come from the last seconds, series are thinned by age (`series.py`), incidents and rounds are the newest
few, and what belongs to a peer goes with it. `merge_patch` makes a small update of two snapshots: what JSON Merge Patch
(RFC 7386) calls a patch, so that a page applies it in a few lines.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field

from ringfold.observe.incidents import Incident, Incidents, seconds
from ringfold.observe.rates import PeerRates, Slow, slowest
from ringfold.observe.series import LIVE_TIERS, Bucket, Series, Tier
from ringfold.wire import notices
from ringfold.wire.base import GroupId, PeerId
from ringfold.wire.events import Event, PathSharesChanged, StepEnded, ValuesLogged
from ringfold.wire.probing import RoundSummary
from ringfold.wire.status import GroupStatus, LinkStatus, PeerStatus, RunInfo, Status, Waiting

MAX_ROUNDS = 12
MAX_LOGGED = 6
MAX_LINK_ROWS = 70_000
"""All links of 256 peers, and some of those that left."""
HEARTBEAT_S = 0.5
"""Reports of peers differ in age by so much: two heartbeats by default."""
BUSY_MS = 5_000
"""Without a step or an op for so long, a run is idle."""

STATES: Mapping[str, str] = {
    "IDLE": "idle",
    "VOTE_ACCEPT_NEW_PEERS": "admitting",
    "CONNECTING_TO_PEERS": "connecting",
    "VOTE_NO_NEW_PEERS_ESTABLISH_P2P_CONNECTIONS": "changing epoch",
    "VOTE_OPTIMIZE_TOPOLOGY": "optimising",
    "OPTIMIZE_TOPOLOGY": "measuring links",
    "OPTIMIZE_TOPOLOGY_FAILED": "link not measured",
    "VOTE_SYNC_SHARED_STATE": "waiting to sync",
    "DISTRIBUTE_SHARED_STATE": "syncing",
    "COLLECTIVE_COMMUNICATIONS_RUNNING": "reducing",
}
"""What a page calls a peer's state; the names of `ringfold status` are in the details."""

Json = Any
"""None, a number, a string, or a list or dict of these: what `msgspec.to_builtins` makes."""


class Headline(Struct, omit_defaults=True):
    """The sentence on top. `tone` is ok, warning, bad or idle."""

    state: str
    tone: str
    why: str = ""
    speed: float = -1
    unit: str = "steps/s"
    step: int = -1
    logged: dict[str, float] = field(default_factory=dict)
    peers: int = 0
    epoch: int = 0
    slow: str = ""
    slow_peer: PeerId = 0
    last: str = ""
    last_ms: int = 0
    last_open: bool = False


class PeerRow(Struct, omit_defaults=True):
    """One peer. Rates are per second; shares are of the time, in per cent. -1: not known."""

    peer: PeerId
    name: str
    host: str
    group: GroupId
    state: str
    raw_state: str
    tone: str = "ok"
    problem: str = ""
    version: str = ""
    step: int = -1
    lag: int = -1
    steps_s: float = -1
    ops: int = 0
    ops_s: float = 0
    aborted: int = 0
    restarted: int = 0
    sent_s: float = 0
    received_s: float = 0
    memory_share: int = -1
    waited: int = -1
    blocked: int = -1
    lanes_lost: int = 0
    last_op: str = ""
    silent_ms: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    clock_us: float | None = None
    clock_error_us: float | None = None
    addresses: str = ""
    events_dropped: int = 0


class LinkRow(Struct, omit_defaults=True):
    """A link of a ring. `rate` is what its source sends now, `known` what the link is known to carry, in bytes/s."""

    source: PeerId
    target: PeerId
    kind: str
    lanes: int
    in_memory: int = 0
    rate: float = 0
    known: float = 0
    tone: str = "ok"


class GroupRow(Struct, omit_defaults=True):
    group: GroupId
    epoch: int
    phase: str
    evidence: str
    channels: int
    ring: list[PeerId]
    links: dict[str, LinkRow] = field(default_factory=dict)
    avoided: list[str] = field(default_factory=list)
    divergences: int = 0


class WaitRow(Struct, omit_defaults=True):
    """`since_ms` and `evict_ms` are Unix times, so that a page counts by itself."""

    what: str
    waiting: list[PeerId]
    missing: list[PeerId]
    since_ms: int
    eviction: str = ""
    evict_ms: int = 0


class RoundRow(Struct, omit_defaults=True):
    """A probing round: times in us, sizes in bytes, `overhead` in per cent of the window."""

    round: str
    kind: str
    label: str
    nodes: int
    edges: int
    skew_us: float
    latency_us: float
    calculate_us: float
    bytes: int
    total_us: float
    overhead: float
    sigma_us: float
    retries: int = 0
    lost: float = 0
    missing: int = 0
    anomaly: str = ""
    at_ms: int = 0


class MasterRow(Struct, omit_defaults=True):
    """A master of the list: leads, stands by, or cannot be reached, and why."""

    address: str
    role: str
    text: str = ""


class RunRow(Struct, omit_defaults=True):
    name: str
    state: str
    peers: int
    away: int = 0
    revision: int = 0
    incarnation: int = 1
    since_s: int = 0
    why: str = ""


class Page(Struct, omit_defaults=True):
    """All that a page shows of one run, except its series and its links."""

    run: str
    at_ms: int
    headline: Headline
    leader: str = ""
    fence: int = 0
    uptime_s: int = 0
    peers: dict[str, PeerRow] = field(default_factory=dict)
    groups: dict[str, GroupRow] = field(default_factory=dict)
    waits: list[WaitRow] = field(default_factory=list)
    incidents: dict[str, Incident] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    rounds: list[RoundRow] = field(default_factory=list)
    paths: dict[str, list[float]] = field(default_factory=dict)
    masters: list[MasterRow] = field(default_factory=list)
    runs: list[RunRow] = field(default_factory=list)
    links: int = 0
    """Grows when what is known of the links changes."""


class LinkFacts(NamedTuple):
    """What is known of a link, and the version of the links in which that changed."""

    version: int
    rate: float
    delay_us: float | None
    loss: float | None
    by: str
    at_ms: int


class SeriesTitle(NamedTuple):
    title: str
    unit: str


class RunView:
    """The view of one run. Feed it with `look` or `lose`; times are Unix times in ms."""

    def __init__(self, run: str, tiers: Sequence[Tier] = LIVE_TIERS) -> None:
        self.run = run
        self.incidents = Incidents()
        self.series: dict[str, Series] = {}
        self.titles: dict[str, SeriesTitle] = {}
        self.links: dict[tuple[PeerId, PeerId], LinkFacts] = {}
        self.links_version = 0
        self.masters: list[MasterRow] = []
        self.runs: list[RunRow] = []
        self._tiers = tiers
        self._status: Status | None = None
        self._at_ms = 0
        self._lost = ""
        self._rates: dict[PeerId, PeerRates] = {}
        self._worked_ms = 0
        self._progress: tuple[int, int] = (-1, -1)
        self._paths: dict[tuple[PeerId, PeerId], list[float]] = {}
        self._rounds: deque[RoundRow] = deque(maxlen=MAX_ROUNDS)
        self._logged_at: dict[str, int] = {}

    # Input

    def look(self, at_ms: int, status: Status, events: Sequence[Event] = ()) -> None:
        """Take in a status and the events since the one before. An event's time is that of its stamp."""
        self._lost = ""
        for event in events:
            self.event(event, event.stamp.wall / 1e6 or at_ms)
        self._status, self._at_ms = status, at_ms
        self.incidents.look(at_ms, status)
        members = {peer.peer for peer in status.peers}
        self._rates = {peer: rates for peer, rates in self._rates.items() if peer in members}
        for peer in status.peers:
            self._rates.setdefault(peer.peer, PeerRates()).add(at_ms, peer)
        self._paths = {edge: shares for edge, shares in self._paths.items() if edge[0] in members}
        self._take_links(at_ms, status.links)
        self._note_progress(at_ms, status)
        self._add_series(at_ms, status)

    def event(self, event: Event, at_ms: float) -> None:
        """Take in one event at this time."""
        self.incidents.event(event, at_ms)
        match event.notice:
            case notices.RoundDone(summary):
                self.round(summary, int(at_ms))
            case PathSharesChanged(peer, shares):
                self._paths[event.stamp.peer, peer] = [round(share, 3) for share in shares]
                while len(self._paths) > 1_024:
                    del self._paths[next(iter(self._paths))]
            case StepEnded(logged=logged) | ValuesLogged(logged=logged) if logged:
                self._add_logged(int(at_ms), logged)

    def lose(self, at_ms: int, text: str) -> None:
        """No master answers at this time."""
        self._lost, self._at_ms = text, at_ms
        self.incidents.unreachable(at_ms, text)

    def round(self, summary: RoundSummary, at_ms: int) -> None:
        """Take in the result of a probing round."""
        row = round_row(summary, at_ms)
        if not self._rounds or self._rounds[-1].round != row.round:
            self._rounds.append(row)

    def set_runs(self, runs: Sequence[RunInfo]) -> None:
        self.runs = [
            RunRow(run.name, run.state, run.peers, run.away, run.revision, run.incarnation, run.since_s, run.why)
            for run in runs[:256]
        ]

    # Output

    def page(self) -> Page:
        """What a page shows now."""
        status = self._status
        page = Page(self.run, self._at_ms, Headline("no run yet", "idle"), masters=self.masters, runs=self.runs)
        page.incidents = {str(each.number): each for each in self.incidents.all}
        page.counts = {str(kind): count for kind, count in self.incidents.counts.items()}
        page.rounds, page.links = list(self._rounds), self.links_version
        if status is None:
            page.headline = Headline("connecting", "idle", why=self._lost)
            return page
        page.leader, page.fence, page.uptime_s = status.leader, status.fence, status.uptime_ms // 1_000
        slow = slowest(self._at_ms, status, self._rates)
        front = _front(status.peers)
        problems = self._problems(status, slow)
        page.peers = {
            str(peer.peer): self._peer_row(peer, front.get(peer.group, -1), problems.get(peer.peer))
            for peer in status.peers
        }
        page.groups = {str(group.group): self._group_row(group, slow) for group in status.groups}
        page.waits = [_wait(self._at_ms, wait) for wait in status.waiting[:32]]
        page.paths = {f"{source}-{target}": shares for (source, target), shares in self._paths.items() if shares}
        page.headline = self._headline(status, slow)
        return page

    def snapshot(self) -> dict[str, Json]:
        """`page` as plain values."""
        plain = msgspec.to_builtins(self.page())
        assert isinstance(plain, dict)
        return plain

    def all_series(self, *, with_last: bool = False) -> dict[str, Json]:
        """All series: title, unit, and for each tier its width, its limit and its buckets."""
        return {
            name: {
                "title": self.titles[name].title,
                "unit": self.titles[name].unit,
                "tiers": [
                    {"width": tier.width_ms, "limit": tier.buckets, "buckets": buckets}
                    for tier, buckets in zip(series.tiers, series.buckets(with_last=with_last), strict=True)
                ],
            }
            for name, series in self.series.items()
        }

    def new_buckets(self) -> dict[str, list[list[Bucket]]]:
        """By series and tier, the buckets since the call before."""
        found = {name: series.take_new() for name, series in self.series.items()}
        return {name: buckets for name, buckets in found.items() if buckets}

    def links_since(self, version: int) -> dict[str, Json]:
        """What changed of the links since this version, as columns; `gone` are those that are forgotten."""
        rows = [(edge, facts) for edge, facts in self.links.items() if facts.version > version]
        return {
            "version": self.links_version,
            "source": [edge[0] for edge, _ in rows],
            "target": [edge[1] for edge, _ in rows],
            "rate": [_short(facts.rate, 3) for _, facts in rows],
            "delay": [None if facts.delay_us is None else _short(facts.delay_us, 4) for _, facts in rows],
            "loss": [None if facts.loss is None else _short(facts.loss, 3) for _, facts in rows],
            "at": [facts.at_ms for _, facts in rows],
            "by": [facts.by for _, facts in rows],
        }

    # Parts of the page

    def _headline(self, status: Status, slow: Slow | None) -> Headline:
        accepted = [peer for peer in status.peers if peer.phase != "PEER_REGISTERED"]
        state, tone, why = self._run_state(status)
        line = Headline(state, tone, why, peers=len(status.peers))
        line.epoch = max((group.epoch for group in status.groups), default=0)
        steps = [rates.steps_per_s for peer in accepted if (rates := self._rates[peer.peer]).steps_per_s >= 0]
        if steps:
            line.speed, line.step = _short(_median(steps), 3), max(peer.progress.step for peer in accepted)
        elif accepted:
            ops = [self._rates[peer.peer].ops_per_s for peer in accepted]
            line.speed, line.unit = _short(_median(ops), 3), "ops/s"
        line.logged = {name: _short(value, 6) for name, value in _logged(accepted).items()}
        if slow is not None and tone != "idle":
            line.slow, line.slow_peer = slow.text, slow.peer
        newest = self.incidents.newest()
        if newest is not None:
            cost = "" if newest.is_open or not newest.cost else f": {newest.cost}"
            line.last, line.last_ms = f"{newest.title}{cost}", newest.end_ms or newest.begin_ms
            line.last_open = newest.is_open
        return line

    def _run_state(self, status: Status) -> tuple[str, str, str]:
        """State, tone and why."""
        if self._lost:
            return "no master", "bad", self._lost
        if not status.peers:
            return "no peers", "idle", "nobody has joined"
        blocked = [wait for wait in status.waiting if wait.missing and wait.since_ms >= 1_000]
        if blocked:
            longest = max(blocked, key=lambda wait: wait.since_ms)
            return "waiting", "warning", f"{_peers(longest.missing)} in {longest.what}"
        for group in status.groups:
            if group.phase != "idle":
                return "changing epoch", "warning", f"group {group.group} is {group.phase}"
        if any(peer.state == "DISTRIBUTE_SHARED_STATE" for peer in status.peers):
            return "syncing", "ok", ""
        idle_ms = self._at_ms - self._worked_ms
        step_ms = max(self._rates[peer.peer].step_ms for peer in status.peers)
        if self._worked_ms and idle_ms < max(BUSY_MS, 3 * step_ms):
            return "training" if any(peer.progress.steps for peer in status.peers) else "working", "ok", ""
        return "idle", "idle", f"no op for {seconds(idle_ms)}" if self._worked_ms else "no op yet"

    def _problems(self, status: Status, slow: Slow | None) -> dict[PeerId, tuple[str, str]]:
        """Tone and text of what is wrong with peers, the worst of each."""
        found: dict[PeerId, tuple[str, str]] = {}
        if slow is not None:
            found[slow.peer] = ("warning", slow.text)
        for peer in status.peers:
            if peer.phase == "PEER_REGISTERED":
                found[peer.peer] = ("note", "waits to be accepted")
        for wait in status.waiting:
            if wait.since_ms >= 1_000:
                for missing in wait.missing:
                    found[missing] = ("warning", f"waited for: {wait.what}")
        for peer in status.peers:
            if peer.suspected:
                found[peer.peer] = ("bad", f"silent for {seconds(peer.silent_ms)}")
        return found

    def _peer_row(self, peer: PeerStatus, front: int, problem: tuple[str, str] | None) -> PeerRow:
        rates, progress, totals = self._rates[peer.peer], peer.progress, peer.totals
        state = STATES.get(peer.state, peer.state.lower().replace("_", " ") or peer.phase.lower())
        if state == "idle" and progress.in_step:
            state = "computing"
        row = PeerRow(peer.peer, peer.name, peer.host, peer.group, state, peer.state or peer.phase)
        row.tone, row.problem = problem or ("ok", "")
        row.version, row.step = progress.version, progress.step
        row.lag = _lag(front, progress.step, rates.steps_per_s)
        row.steps_s, row.ops_s = _short(rates.steps_per_s, 3), _short(rates.ops_per_s, 3)
        row.ops, row.aborted, row.restarted = peer.committed_ops, totals.aborted, totals.restarted
        row.sent_s, row.received_s = _short(rates.sent_per_s, 2), _short(rates.received_per_s, 2)
        row.memory_share = round(100 * totals.memory_bytes / totals.sent_bytes) if totals.sent_bytes else -1
        row.waited, row.blocked = _percent(rates.waited_share), _percent(rates.blocked_share)
        row.lanes_lost, row.events_dropped = totals.lanes_lost, progress.events_dropped
        row.silent_ms = peer.silent_ms // 100 * 100 if peer.silent_ms >= 500 else 0
        row.logged = {name: _short(value, 4) for name, value in finite(progress.logged).items()}
        if peer.op_states:
            op = max(peer.op_states, key=lambda each: each.age_ms)
            word = {"V": "waits for others", "P": "runs"}.get(op.state[:1], op.state)
            if op.state.startswith("VOTE_COMPLETE"):
                word = "ends"
            row.last_op = f"#{op.sequence} (tag {op.tag}) {word}"
        else:
            row.last_op = f"#{peer.committed_ops} committed" if peer.committed_ops else ""
        if progress.clock_offset_ns is not None and progress.clock_error_ns is not None:
            row.clock_us = _short(progress.clock_offset_ns / 1_000, 4)
            row.clock_error_us = _short(progress.clock_error_ns / 1_000, 3)
        row.addresses = ", ".join(f"{address}:{peer.port}" for address in peer.addresses[:8])
        return row

    def _group_row(self, group: GroupStatus, slow: Slow | None) -> GroupRow:
        row = GroupRow(group.group, group.epoch, group.phase, group.evidence, group.channels, list(group.ring))
        row.divergences = group.divergences
        row.avoided = [f"{source}-{target}" for source, target in group.bad_edges[:64]]
        known: dict[str, list[float]] = {}
        for link in group.ring_links:
            if (facts := self.links.get((link.source, link.target))) and facts.rate:
                known.setdefault(link.transport, []).append(facts.rate)
        middle = {transport: _median(rates) for transport, rates in known.items()}
        for link in group.ring_links:
            rates, facts = self._rates.get(link.source), self.links.get((link.source, link.target))
            shown = LinkRow(link.source, link.target, link.transport, link.lanes, link.in_memory)
            shown.rate = _short(rates.sent_per_s, 2) if rates else 0
            shown.known = _short(facts.rate, 3) if facts else 0
            if slow is not None and slow.link == (link.source, link.target):
                shown.tone = "bad"
            elif shown.known and shown.known < middle[link.transport] / 4:
                shown.tone = "warning"
            row.links[f"{link.source}-{link.target}"] = shown
        return row

    # Taking in

    def _note_progress(self, at_ms: int, status: Status) -> None:
        steps = sum(peer.progress.steps for peer in status.peers)
        ops = sum(peer.committed_ops for peer in status.peers)
        if self._progress != (-1, -1) and (steps > self._progress[0] or ops > self._progress[1]):
            self._worked_ms = at_ms
        self._progress = (steps, ops)

    def _add_series(self, at_ms: int, status: Status) -> None:
        accepted = [peer for peer in status.peers if peer.phase != "PEER_REGISTERED"]
        rates = [self._rates[peer.peer] for peer in accepted]
        if rates and all(each.is_known for each in rates[:1]):
            steps = [each.steps_per_s for each in rates if each.steps_per_s >= 0]
            if steps:
                self._add("steps", "Steps per second", "/s", at_ms, _median(steps))
            elif all(peer.progress.step < 0 for peer in accepted):
                self._add("ops", "Ops per second", "/s", at_ms, _median([each.ops_per_s for each in rates]))
            self._add("sent", "Sent over lanes, all peers", "B/s", at_ms, sum(each.sent_per_s for each in rates))
        for name, value in _logged(accepted).items():
            last = max((peer.progress.step for peer in accepted), default=-1)
            if self._logged_at.get(name) != last:
                self._logged_at[name] = last
                self._add_logged(at_ms, {name: value})

    def _add_logged(self, at_ms: int, logged: Mapping[str, float | None]) -> None:
        for name, value in logged.items():
            if value is None:
                continue
            if f"log.{name}" in self.series or sum(each.startswith("log.") for each in self.series) < MAX_LOGGED:
                self._add(f"log.{name}", name, "", at_ms, value)

    def _add(self, name: str, title: str, unit: str, at_ms: int, value: float) -> None:
        if name not in self.series:
            self.series[name], self.titles[name] = Series(self._tiers), SeriesTitle(title, unit)
        self.series[name].add(at_ms, value)

    def _take_links(self, at_ms: int, links: Sequence[LinkStatus]) -> None:
        """Statuses may come without links; those of peers that left are kept until there are too many."""
        changed = False
        for link in links:
            edge = (link.source, link.target)
            before = self.links.get(edge)
            values = (link.bytes_per_s, link.delay_us, link.loss, link.by)
            if before is None or (before.rate, before.delay_us, before.loss, before.by) != values:
                when = (at_ms - link.age_ms) // 1_000 * 1_000
                self.links.pop(edge, None)
                self.links[edge] = LinkFacts(self.links_version + 1, *values, when)
                changed = True
        if changed:
            self.links_version += 1
        while len(self.links) > MAX_LINK_ROWS:
            del self.links[next(iter(self.links))]


def merge_patch(old: Mapping[str, Json], new: Mapping[str, Json]) -> dict[str, Json]:
    """What turns `old` into `new`: changed values, and None for those that are gone (RFC 7386)."""
    patch: dict[str, Json] = {}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    for key in old:
        if key not in new:
            patch[key] = None
    return patch


def round_row(summary: RoundSummary, at_ms: int) -> RoundRow:
    """A round as a page shows it."""
    metrics, window_ns = summary.metrics, max(1, summary.end_ns - summary.begin_ns)
    sent = sum(window.sent for window in summary.windows) or sum(edge.fit.sent for edge in summary.edges)
    lost = sum(window.lost for window in summary.windows) or sum(edge.fit.lost for edge in summary.edges)
    return RoundRow(
        str(summary.round),
        summary.kind,
        summary.label,
        len(summary.nodes),
        len(summary.edges),
        _short(max(metrics.stop_spread_ns, metrics.resume_spread_ns) / 1_000, 3),
        _short(_median(metrics.control_latency_ns) / 1_000, 3),
        _short(metrics.calculate_ns / 1_000, 3),
        metrics.report_bytes,
        _short(metrics.total_ns / 1_000, 3),
        _short(100 * metrics.total_ns / window_ns, 2),
        _short(max((node.sigma_ns for node in summary.nodes), default=0.0) / 1_000, 3),
        metrics.retries,
        _short(lost / sent, 2) if sent else 0.0,
        len(summary.missing),
        summary.anomaly,
        at_ms,
    )


def _wait(at_ms: int, wait: Waiting) -> WaitRow:
    row = WaitRow(wait.what, list(wait.waiting), list(wait.missing), (at_ms - wait.since_ms) // 100 * 100)
    row.eviction = wait.eviction
    if wait.evict_in_ms is not None:
        row.eviction, row.evict_ms = "", (at_ms + wait.evict_in_ms) // 100 * 100
    return row


def _front(peers: Sequence[PeerStatus]) -> dict[GroupId, int]:
    """By group, the number of the step that the first of its peers is in."""
    front: dict[GroupId, int] = {}
    for peer in peers:
        front[peer.group] = max(front.get(peer.group, -1), peer.progress.step)
    return front


def _lag(front: int, step: int, steps_per_s: float) -> int:
    """How many steps a peer is behind. What it may have done since its last heartbeat does not count."""
    if step < 0:
        return -1
    behind = front - step
    return 0 if behind <= 1 + HEARTBEAT_S * max(0.0, steps_per_s) else behind


def _logged(peers: Sequence[PeerStatus]) -> dict[str, float]:
    """The mean of what peers have logged for the newest step that any has logged something for."""
    newest = max((peer.progress.step for peer in peers if peer.progress.logged), default=-1)
    values: dict[str, list[float]] = {}
    for peer in peers:
        if peer.progress.step == newest:
            for name, value in finite(peer.progress.logged).items():
                if name in values or len(values) < MAX_LOGGED:
                    values.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in values.items()}


def finite(logged: Mapping[str, float | None]) -> dict[str, float]:
    """The first few logged values, without those that are not finite."""
    return {name: value for name, value in list(logged.items())[:MAX_LOGGED] if value is not None}


def _peers(peers: Sequence[PeerId]) -> str:
    return f"peer{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers[:6]))}{' …' if len(peers) > 6 else ''}"


def _median(values: Collection[float]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2]) if ordered else 0.0


def _percent(share: float) -> int:
    return round(100 * min(1.0, share)) if share >= 0 else -1


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}") if value == value and abs(value) != float("inf") else 0.0
