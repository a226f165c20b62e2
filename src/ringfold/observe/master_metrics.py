"""The metrics of a master: what it counts as things happen, and what its runs are at the instant of a request.

`MasterCounts` takes every notice of the master in the master's own loop, which costs it a dictionary look-up and an
addition; notices are rare, none is of an op. The page is made in the thread of the endpoint. It requests the facts from
the loop, which renders the status without its thousands of links, and pauses between metrics, so that the master's loop
gets the GIL at once when it needs it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from ringfold.config import DEFAULT_RUN, split_address
from ringfold.master.server import MasterFacts
from ringfold.observe import metrics
from ringfold.observe.metrics import Exposition, Histogram, labels
from ringfold.observe.peer_metrics import add_peers
from ringfold.runtime.http_server import Page, Pages, PageUnavailable
from ringfold.wire.messages import GroupId
from ringfold.wire.notices import (
    EPOCH_CAUSES,
    EVICTION_CAUSES,
    CallRefused,
    ConnectionDropped,
    EpochCause,
    EpochInstalled,
    EpochSealing,
    Notice,
    PeerDiverged,
    PeerGone,
    RingChosen,
    RoundDone,
    RunForgotten,
    StateRolledBack,
    SyncEnded,
)
from ringfold.wire.probing import RoundSummary
from ringfold.wire.status import PeerStatus, Status

FACTS_TIMEOUT_S = 2.0
"""A master whose loop does not respond for so long is not scraped: the response is an error, and `up` becomes 0."""
_NS = 1e-9
_PLAIN = ("divergences", "rollbacks", "calls_refused", "rings_optimized")


@dataclass(slots=True)
class _Round:
    """What is known of the newest round of a run."""

    overhead: float = 0.0
    nodes: int = 0
    uncertainty_s: float = 0.0


def _zeros(names: tuple[str, ...]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


@dataclass(slots=True)
class RunCounts:
    """What has happened in one run since this master began."""

    plain: dict[str, int] = field(default_factory=lambda: _zeros(_PLAIN))
    epoch_changes: dict[str, int] = field(default_factory=lambda: _zeros(EPOCH_CAUSES))
    departures: dict[str, int] = field(default_factory=lambda: _zeros(metrics.DEPARTURES))
    evictions: dict[str, int] = field(default_factory=lambda: _zeros(EVICTION_CAUSES))
    rounds: dict[str, int] = field(default_factory=lambda: _zeros(metrics.ROUND_OUTCOMES))
    retries: dict[str, int] = field(default_factory=lambda: _zeros(metrics.RETRIED_REPORTS))
    recovery: Histogram = field(default_factory=lambda: Histogram.of("recovery_duration_seconds"))
    sync: Histogram = field(default_factory=lambda: Histogram.of("sync_duration_seconds"))
    skew: Histogram = field(default_factory=lambda: Histogram.of("round_window_skew_seconds"))
    latency: Histogram = field(default_factory=lambda: Histogram.of("control_latency_seconds"))
    sizes: Histogram = field(default_factory=lambda: Histogram.of("round_request_size_bytes"))
    phases: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram.of("round_duration_seconds") for name in metrics.ROUND_PHASES}
    )
    newest_round: _Round | None = None
    sealed_for: dict[GroupId, EpochCause] = field(default_factory=dict)
    """Of each group in an epoch change, its cause that explains most."""

    def observe(self, notice: Notice) -> None:
        match notice:
            case EpochSealing(group=group, cause=cause) if cause is not None:
                self.epoch_changes[cause] += 1
                self.sealed_for[group] = min(self.sealed_for.get(group, cause), cause, key=EPOCH_CAUSES.index)
            case EpochInstalled(group=group, took_ms=took_ms):
                if self.sealed_for.pop(group, None) == "lost":
                    self.recovery.observe(took_ms / 1_000)
            case PeerGone(how=how, cause=cause):
                self.departures[how] += 1
                if cause is not None:
                    self.evictions[cause] += 1
            case SyncEnded(took_ms=took_ms):
                self.sync.observe(took_ms / 1_000)
            case PeerDiverged():
                self.plain["divergences"] += 1
            case StateRolledBack():
                self.plain["rollbacks"] += 1
            case CallRefused():
                self.plain["calls_refused"] += 1
            case RingChosen(kept=False):
                self.plain["rings_optimized"] += 1
            case RoundDone(summary=summary):
                self._observe_round(summary)
            case _:
                pass

    def _observe_round(self, summary: RoundSummary) -> None:
        cost = summary.metrics
        self.rounds["anomaly" if summary.anomaly else "incomplete" if summary.missing else "complete"] += 1
        self.retries["report"] += cost.retries
        self.retries["tcp_segment"] += cost.tcp_retransmits
        self.skew.observe(cost.stop_spread_ns * _NS)
        self.sizes.observe(cost.report_bytes)
        for latency_ns in cost.control_latency_ns:
            self.latency.observe(latency_ns * _NS)
        for phase, histogram in self.phases.items():
            histogram.observe(getattr(cost, f"{phase}_ns") * _NS)
        window_ns = max(0, summary.end_ns - summary.begin_ns)
        overhead = cost.total_ns / (cost.total_ns + window_ns) if cost.total_ns else 0.0
        worst_ns = max((node.sigma_ns for node in summary.nodes), default=0.0)
        self.newest_round = _Round(overhead, len(summary.nodes), worst_ns * _NS)


class MasterCounts:
    """What has happened in all runs of a master. `observe` is called in the master's loop."""

    def __init__(self) -> None:
        self._runs: dict[str, RunCounts] = {}
        self.refused = 0

    def observe(self, run: str, notice: Notice) -> None:
        match notice:
            case ConnectionDropped():
                self.refused += 1
            case RunForgotten():
                self._runs.pop(run, None)
            case _ if run:
                self.of(run).observe(notice)
            case _:
                pass

    def of(self, run: str) -> RunCounts:
        counts = self._runs.get(run)
        if counts is None:
            counts = self._runs[run] = RunCounts()
        return counts


def master_pages(facts: Callable[[float], MasterFacts], counts: MasterCounts) -> Pages:
    """The pages of a master's endpoint. `facts` gets a timeout in seconds and may raise TimeoutError."""

    def seen_now() -> MasterFacts:
        try:
            return facts(FACTS_TIMEOUT_S)
        except TimeoutError:
            raise PageUnavailable(f"the master did not respond within {FACTS_TIMEOUT_S:g} s") from None

    def page(make: Callable[[Exposition, MasterFacts], None], place: metrics.Place) -> Callable[[], Page]:
        def made() -> Page:
            seen = seen_now()
            exposition = Exposition(place)
            make(exposition, seen)
            return Page(exposition.content())

        return made

    def targets() -> Page:
        return Page(msgspec.json.encode(targets_of(seen_now().statuses)), "application/json")

    return {
        "/metrics": page(lambda out, seen: add_master(out, seen, counts), "master"),
        "/metrics/peers": page(lambda out, seen: add_peers(out, seen.statuses), "peers"),
        "/sd": targets,
    }


class Target(Struct, frozen=True):
    """A group of targets of Prometheus's HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


def targets_of(statuses: list[Status]) -> list[Target]:
    """The peers that serve metrics, with labels that stay the same when a peer joins again."""
    found = []
    for status in statuses:
        for peer in status.peers:
            if not peer.progress.metrics:
                continue
            host, port = split_address(peer.progress.metrics)
            if host in ("0.0.0.0", "::") and peer.addresses:
                host = peer.addresses[0]
            target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            found.append(Target([target], {"ringfold_run": status.run, "ringfold_peer_name": peer.name}))
    return found


def add_master(out: Exposition, facts: MasterFacts, counts: MasterCounts) -> None:
    """All metrics of `/metrics` at a master."""
    metrics.add_build_info(out, "master")
    out.add_one("master_is_leader", int(facts.leads))
    states = [info.state for info in facts.infos]
    out.add("runs", [(labels(state=state), states.count(state)) for state in metrics.RUN_STATES])
    out.add_one("connections_refused_total", counts.refused)
    waiting = {"frames": facts.frames_waiting, "effects": facts.effects_waiting}
    out.add("queue_depth", [(labels(queue=queue), waiting[queue]) for queue in metrics.QUEUES])
    out.add_one("send_queue_bytes", facts.bytes_waiting)
    _add_state(out, facts.statuses)
    # A run that no peer has joined yet counts already: an increase is computed from two samples.
    names = [status.run for status in facts.statuses] or ([DEFAULT_RUN] if facts.leads else [])
    _add_counts(out, {labels(run=name): counts.of(name) for name in names})


def _add_state(out: Exposition, statuses: list[Status]) -> None:
    """What the runs are now."""
    runs = [(labels(run=status.run), status) for status in statuses]
    out.add("run_uptime_seconds", [(run, status.uptime_ms / 1_000) for run, status in runs])
    out.add("failovers_total", [(run, max(0, status.fence - 1)) for run, status in runs])
    out.add(
        "peers",
        [
            (f'{run},state="{state}"', sum(_state(peer) == state for peer in status.peers))
            for run, status in runs
            for state in metrics.PEER_STATES
        ],
    )
    out.add("registrations_total", [(run, status.registrations) for run, status in runs])
    out.add("epochs_total", [(run, status.epochs) for run, status in runs])
    longest = [(run, max((wait.since_ms for wait in status.waiting), default=0) / 1_000) for run, status in runs]
    out.add("waiting_seconds", longest)
    out.add("avoided_links", [(run, sum(len(group.bad_edges) for group in status.groups)) for run, status in runs])
    out.add("known_links", [(run, status.known_links) for run, status in runs])
    rates = [(run, [link.bytes_per_s for link in status.links if link.by != "probed"]) for run, status in runs]
    out.add("slowest_link_bytes_per_second", [(run, min(known, default=None)) for run, known in rates])


def _state(peer: PeerStatus) -> str:
    if peer.suspected:
        return "suspected"
    return "registered" if peer.phase == "PEER_REGISTERED" else "accepted"


def _add_counts(out: Exposition, runs: dict[str, RunCounts]) -> None:
    """What has happened in the runs."""

    def by(name: str, label: str, table: Callable[[RunCounts], dict[str, int]]) -> None:
        out.add(
            name,
            [
                (f'{run},{label}="{value}"', count)
                for run, counts in runs.items()
                for value, count in table(counts).items()
            ],
        )

    def histogram(name: str, of: Callable[[RunCounts], Histogram]) -> None:
        seen = [(run, of(counts)) for run, counts in runs.items()]
        out.add_histograms(name, [(run, list(each.counts), each.total) for run, each in seen])

    by("epoch_changes_total", "reason", lambda counts: counts.epoch_changes)
    by("departures_total", "how", lambda counts: counts.departures)
    by("evictions_total", "reason", lambda counts: counts.evictions)
    histogram("recovery_duration_seconds", lambda counts: counts.recovery)
    histogram("sync_duration_seconds", lambda counts: counts.sync)
    for name in _PLAIN:
        out.add(f"{name}_total", [(run, counts.plain[name]) for run, counts in runs.items()])
    by("rounds_total", "outcome", lambda counts: counts.rounds)
    histogram("round_window_skew_seconds", lambda counts: counts.skew)
    histogram("control_latency_seconds", lambda counts: counts.latency)
    sizes = [(f'{run},request="report"', list(one.sizes.counts), one.sizes.total) for run, one in runs.items()]
    out.add_histograms("round_request_size_bytes", sizes)
    phases = [
        (f'{run},phase="{phase}"', list(one.counts), one.total)
        for run, counts in runs.items()
        for phase, one in counts.phases.items()
    ]
    out.add_histograms("round_duration_seconds", phases)
    by("retries_total", "what", lambda counts: counts.retries)
    rounds = [(run, counts.newest_round) for run, counts in runs.items()]
    out.add("probe_overhead_ratio", [(run, None if one is None else one.overhead) for run, one in rounds])
    out.add("probe_nodes", [(run, None if one is None else one.nodes) for run, one in rounds])
    out.add("probe_uncertainty_seconds", [(run, None if one is None else one.uncertainty_s) for run, one in rounds])
