"""The table of all metrics, and the text in which Prometheus reads them.

Everything is generated from `METRICS`: what endpoints expose, and the reference page. `master_metrics.py`,
`peer_metrics.py` and `agent_metrics.py` take the values from what their processes count anyway.

The text is joined by hand. A metric of 64 peers is a list comprehension over 64 lines; through objects for every series
the same page costs forty times as much. Values are counted where things happen, once, and natively where that is often.

Labels are closed sets, except for the numbers and names of what is there now: runs, peers, paths. A counter of a closed
set is exposed as 0 from the start, because a server computes an increase from two samples. Series of a peer end with
the peer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ringfold.wire.agent import RefusalKind
from ringfold.wire.notices import EPOCH_CAUSES, EVICTION_CAUSES
from ringfold.wire.status import DURATION_BOUNDS_US, RunState

Kind = Literal["counter", "gauge", "histogram"]
Place = Literal["master", "peers", "peer", "agent"]
PLACES: Mapping[Place, str] = {
    "master": "`/metrics` of the master (`ringfold master --metrics`)",
    "peers": "`/metrics/peers` of the master: what the peers report to it",
    "peer": "`/metrics` of a peer (setting `metrics_port`)",
    "agent": "`/metrics` of the transport agent (`ringfold agent --metrics`)",
}
PREFIX = "ringfold_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SHORT_SECONDS = (1e-6, 1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0)
OP_SECONDS = tuple(bound / 1e6 for bound in DURATION_BOUNDS_US)
SIZES = (256.0, 1_024.0, 4_096.0, 16_384.0, 65_536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0)

RUN_STATES: tuple[RunState, ...] = get_args(RunState)
PEER_STATES = ("registered", "accepted", "suspected")
LANES = ("tcp", "shm")
OUTCOMES = ("committed", "aborted")
SEGMENTS = ("reissued", "duplicate", "drained")
RETRIED_REPORTS = ("report", "tcp_segment")
QUEUES = ("frames", "effects")
ROUND_PHASES = ("stop", "fit", "gather", "calculate", "restart", "total")
ROUND_OUTCOMES = ("complete", "incomplete", "anomaly")
REQUESTS = ("report",)
SLOT_STATES = ("used", "free")
AGENT_REQUESTS = ("connect", "register", "renew", "remove", "measure")
AGENT_REFUSALS: tuple[RefusalKind, ...] = get_args(RefusalKind)
TELEMETRY_OUTCOMES = ("used", "older", "full", "other")
TELEMETRY_REFUSALS = ("clock", "feed", "flags", "key", "kind", "length", "magic", "path", "prefix", "replayed",
                      "sender", "signature", "unsigned", "version", "other")  # fmt: skip
DEPARTURES = ("left", "lost", "evicted")

_RUN = {"run": "the name of the run"}
_PEER = {
    "run": "the name of the run",
    "peer": "the id of the peer, which only grows: a peer that joins again has another",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, its name without the prefix. A label has a closed set of values, or a text that says what it is."""

    name: str
    kind: Kind
    help: str
    where: tuple[Place, ...]
    labels: Mapping[str, tuple[str, ...] | str] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


_ALL: tuple[Place, ...] = ("master", "peer", "agent")
_OF_PEERS: tuple[Place, ...] = ("peers", "peer")

_METRICS = (
    # Every process
    Metric(name="build_info", kind="gauge", where=_ALL, labels={"version": "Ringfold's version", "python": "Python's",
           "role": ("master", "peer", "agent")}, help="1, with the versions of the process as labels."),
    # The master and its runs
    Metric(name="master_is_leader", kind="gauge", where=("master",),
           help="1 while this master leads; 0 while it stands by."),
    Metric(name="runs", kind="gauge", where=("master",), labels={"state": RUN_STATES}, help="Runs by state."),
    Metric(name="connections_refused_total", kind="counter", where=("master",),
           help="Connections that were closed because their client was refused, over all runs."),
    Metric(name="queue_depth", kind="gauge", where=("master",), labels={"queue": QUEUES},
           help="What waits in the master: connections whose frames wait for their turn, and effects (messages, "
                "closes) that wait for a write of the journal."),
    Metric(name="send_queue_bytes", kind="gauge", where=("master",),
           help="Bytes that the master has written, and that its clients have not read."),
    Metric(name="run_uptime_seconds", kind="gauge", where=("master",), labels=_RUN,
           help="For how long this master has served the run."),
    Metric(name="failovers_total", kind="counter", where=("master",), labels=_RUN,
           help="How often the run got another master, or its master restarted."),
    Metric(name="peers", kind="gauge", where=("master",), labels={**_RUN, "state": PEER_STATES},
           help="Peers by state: registered (not admitted yet), accepted, or suspected (silent for too long)."),
    Metric(name="registrations_total", kind="counter", where=("master",), labels=_RUN,
           help="Peers that have ever registered in the run."),
    Metric(name="epochs_total", kind="counter", where=("master",), labels=_RUN,
           help="Epochs that the run has had, over all groups and masters."),
    Metric(name="epoch_changes_total", kind="counter", where=("master",), labels={**_RUN, "reason": EPOCH_CAUSES},
           help="Epochs that this master has ended, by the first reason that applies."),
    Metric(name="departures_total", kind="counter", where=("master",), labels={**_RUN, "how": DEPARTURES},
           help="Peers that are gone: they left, their connection was lost, or they were evicted."),
    Metric(name="evictions_total", kind="counter", where=("master",), labels={**_RUN, "reason": EVICTION_CAUSES},
           help="Evicted peers by reason."),
    Metric(name="recovery_duration_seconds", kind="histogram", where=("master",), labels=_RUN, bounds=SECONDS,
           help="From the loss or eviction of a peer, as the master saw it, until the epoch without it was installed "
                "at all members."),
    Metric(name="sync_duration_seconds", kind="histogram", where=("master",), labels=_RUN, bounds=SECONDS,
           help="Duration of the syncs of the shared state."),
    Metric(name="divergences_total", kind="counter", where=("master",), labels=_RUN,
           help="Members whose state differed from that of the others, and was repaired."),
    Metric(name="rollbacks_total", kind="counter", where=("master",), labels=_RUN,
           help="How often the newest state was lost with all peers that had it, and the run continued from an older "
                "one."),
    Metric(name="calls_refused_total", kind="counter", where=("master",), labels=_RUN,
           help="Calls of programs that could not be right: conflicting calls, mismatched ops, deadlines."),
    Metric(name="rings_optimized_total", kind="counter", where=("master",), labels=_RUN,
           help="Rings that `optimize_topology` has chosen and that differ from the one before."),
    Metric(name="waiting_seconds", kind="gauge", where=("master",), labels=_RUN,
           help="For how long the oldest thing that peers wait for has been waited for; 0 if nothing is."),
    Metric(name="avoided_links", kind="gauge", where=("master",), labels=_RUN,
           help="Links that rings avoid because they failed."),
    Metric(name="known_links", kind="gauge", where=("master",), labels=_RUN, help="Links with a measured rate."),
    Metric(name="slowest_link_bytes_per_second", kind="gauge", where=("master",), labels=_RUN,
           help="The measured rate of the slowest link of all rings. Absent while none is known."),
    # Probing rounds
    Metric(name="rounds_total", kind="counter", where=("master",), labels={**_RUN, "outcome": ROUND_OUTCOMES},
           help="Probing rounds: all nodes reported, some did not, or the round ended early by an anomaly."),
    Metric(name="round_window_skew_seconds", kind="histogram", where=("master",), labels=_RUN, bounds=SHORT_SECONDS,
           help="How far apart in global time the nodes ended their windows of a round."),
    Metric(name="control_latency_seconds", kind="histogram", where=("master",), labels=_RUN, bounds=SHORT_SECONDS,
           help="One-way latency between the master and each node that reported in a round."),
    Metric(name="round_request_size_bytes", kind="histogram", where=("master",), labels={**_RUN, "request": REQUESTS},
           bounds=SIZES, help="Size of the requests of a round: all reports of the nodes together."),
    Metric(name="round_duration_seconds", kind="histogram", where=("master",),
           labels={**_RUN, "phase": ROUND_PHASES}, bounds=SHORT_SECONDS,
           help="Duration of the phases of a round, from its end until the next one has started everywhere."),
    Metric(name="retries_total", kind="counter", where=("master",), labels={**_RUN, "what": RETRIED_REPORTS},
           help="Reports of rounds that were sent again, and TCP segments of the connections to nodes."),
    Metric(name="probe_overhead_ratio", kind="gauge", where=("master",), labels=_RUN,
           help="The part of the time of the newest round in which no probe is sent: its duration after the window, "
                "over that plus the window."),
    Metric(name="probe_nodes", kind="gauge", where=("master",), labels=_RUN, help="Nodes in the newest round."),
    Metric(name="probe_uncertainty_seconds", kind="gauge", where=("master",), labels=_RUN,
           help="The largest standard error of a node's clock in the newest round."),
    # Peers, at the master or at themselves
    Metric(name="peer_info", kind="gauge", where=_OF_PEERS, labels={**_PEER, "name": "the peer's name",
           "host": "its host", "group": "its group"}, help="1, with what is known of the peer as labels."),
    Metric(name="ops_total", kind="counter", where=_OF_PEERS, labels={**_PEER, "outcome": OUTCOMES},
           help="Ops of the peer that have ended. An op that was aborted and started again counts when it ends."),
    Metric(name="op_retries_total", kind="counter", where=_OF_PEERS, labels=_PEER,
           help="How often ops were started again after an abort."),
    Metric(name="op_bytes_total", kind="counter", where=_OF_PEERS, labels=_PEER,
           help="Bytes of the program's arrays in committed ops."),
    Metric(name="op_duration_seconds", kind="histogram", where=_OF_PEERS, labels=_PEER, bounds=OP_SECONDS,
           help="Duration of committed ops, from the call to the commit."),
    Metric(name="op_wait_seconds_total", kind="counter", where=_OF_PEERS, labels=_PEER,
           help="The part of the duration of ops in which nothing of another peer had come yet."),
    Metric(name="op_blocked_seconds_total", kind="counter", where=_OF_PEERS, labels=_PEER,
           help="For how long the transport took no payload for the next peer."),
    Metric(name="link_sent_bytes_total", kind="counter", where=_OF_PEERS, labels={**_PEER, "lane": LANES},
           help="Bytes that the peer has sent over its lanes: TCP, or shared memory."),
    Metric(name="link_received_bytes_total", kind="counter", where=_OF_PEERS, labels=_PEER,
           help="Bytes that the peer has received over its lanes."),
    Metric(name="lanes_lost_total", kind="counter", where=_OF_PEERS, labels=_PEER, help="Lanes that broke."),
    Metric(name="step", kind="gauge", where=_OF_PEERS, labels=_PEER,
           help="The step that the peer is in, or has finished last. Absent before the first."),
    Metric(name="steps_total", kind="counter", where=_OF_PEERS, labels=_PEER, help="Steps that the peer has finished."),
    Metric(name="logged_value", kind="gauge", where=_OF_PEERS, labels={**_PEER, "name": "what the program calls it"},
           help="The newest value that the program passed to `step.log`, of at most 16 names. NaN: it was not finite."),
    Metric(name="clock_offset_seconds", kind="gauge", where=_OF_PEERS, labels=_PEER,
           help="The run's global clock minus the wall clock of the peer's host. Absent without probing."),
    Metric(name="clock_uncertainty_seconds", kind="gauge", where=_OF_PEERS, labels=_PEER,
           help="By how much `clock_offset_seconds` may be off."),
    Metric(name="events_dropped_total", kind="counter", where=_OF_PEERS, labels=_PEER,
           help="Events that the peer could not record."),
    # Peers, as only they themselves see them
    Metric(name="peer_is_member", kind="gauge", where=("peer",),
           help="1 while this process is a member of its group; 0 while it joins again, or has left."),
    Metric(name="group_size", kind="gauge", where=("peer",), labels=_PEER, help="Members of the peer's group."),
    Metric(name="epoch", kind="gauge", where=("peer",), labels=_PEER, help="The newest epoch of the peer's group."),
    Metric(name="ops_in_flight", kind="gauge", where=("peer",), labels=_PEER,
           help="Ops of the peer that have begun and not ended."),
    Metric(name="step_duration_seconds", kind="histogram", where=("peer",), labels=_PEER, bounds=OP_SECONDS,
           help="Duration of finished steps, from when the program got the step."),
    Metric(name="segments_total", kind="counter", where=("peer",), labels={**_PEER, "what": SEGMENTS},
           help="Segments that were not as usual: sent again over another lane, received twice, or of an op that had "
                "ended."),
    Metric(name="path_share_ratio", kind="gauge", where=("peer",), labels={**_PEER, "path": "the number of the path"},
           help="The part of the payload for the next peer that each path has carried in this epoch. Absent with one "
                "path."),
    Metric(name="path_throughput_bytes_per_second", kind="gauge", where=("peer",),
           labels={**_PEER, "path": "the number of the path"},
           help="What was acknowledged on each path to the next peer while it was busy; 0: nothing in the last "
                "second."),
    # Peers, as only the master sees them
    Metric(name="lag_steps", kind="gauge", where=("peers",), labels=_PEER,
           help="By how many steps the peer is behind the first one, by what both reported last."),
    Metric(name="peer_silence_seconds", kind="gauge", where=("peers",), labels=_PEER,
           help="Since when the master has received nothing from the peer."),
    Metric(name="progress_age_seconds", kind="gauge", where=("peers",), labels=_PEER,
           help="Since when nothing has changed in what the peer's program reports."),
    Metric(name="waited_for_seconds", kind="gauge", where=("peers",), labels=_PEER,
           help="For how long other peers have been waiting for this one; 0 if none is."),
    Metric(name="link_throughput_bytes_per_second", kind="gauge", where=("peers",), labels=_PEER,
           help="The measured rate of the link to the next peer in the ring; a lower bound, unless `optimize_topology` "
                "has measured it."),
    Metric(name="link_delay_seconds", kind="gauge", where=("peers",), labels=_PEER,
           help="The one-way delay to the next peer in the ring."),
    Metric(name="link_loss_ratio", kind="gauge", where=("peers",), labels=_PEER,
           help="The part of probe exchanges with the next peer in the ring that had no response."),
    Metric(name="lanes", kind="gauge", where=("peers",), labels={**_PEER, "lane": LANES},
           help="Lanes to the next peer in the ring."),
    # The transport agent
    Metric(name="agent_uptime_seconds", kind="gauge", where=("agent",), help="For how long the agent has run."),
    Metric(name="agent_clients", kind="gauge", where=("agent",), help="Processes that are connected to the agent."),
    Metric(name="agent_flows", kind="gauge", where=("agent",), help="Registered flows."),
    Metric(name="agent_slots", kind="gauge", where=("agent",), labels={"state": SLOT_STATES},
           help="Slots of the table of hints."),
    Metric(name="agent_requests_total", kind="counter", where=("agent",), labels={"request": AGENT_REQUESTS},
           help="What clients did: they connected, registered, renewed or removed flows, reported measurements."),
    Metric(name="agent_requests_refused_total", kind="counter", where=("agent",), labels={"reason": AGENT_REFUSALS},
           help="Requests of clients that were refused."),
    Metric(name="agent_hints_published_total", kind="counter", where=("agent",),
           help="Hints that were written for transports to read."),
    Metric(name="agent_telemetry_total", kind="counter", where=("agent",), labels={"outcome": TELEMETRY_OUTCOMES},
           help="Reports of queues that were accepted: used, older than a known one, more queues than fit, or of "
                "another kind."),
    Metric(name="agent_telemetry_refused_total", kind="counter", where=("agent",),
           labels={"reason": TELEMETRY_REFUSALS}, help="Telemetry that was not accepted."),
    Metric(name="agent_monitor_up", kind="gauge", where=("agent",), labels={"monitor": "the monitor's name"},
           help="1 for a monitor of network interfaces that is used; 0 if it cannot be."),
)  # fmt: skip
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _METRICS}

Number = int | float
Sample = tuple[str, Number | None]
"""The labels as text, and the value; None: there is none, and no line."""


class Exposition:
    """Metrics of one endpoint as text, in the order in which they are added."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lines: list[str] = []

    def add(self, name: str, samples: Iterable[Sample]) -> None:
        """All samples of a counter or a gauge. Nothing is written without one."""
        metric = self._metric(name)
        full = metric.full_name
        lines = [f"{full}{{{labels}}} {value}" for labels, value in samples if value is not None]
        if lines:
            self._lines += _head(metric)
            self._lines += lines

    def add_one(self, name: str, value: Number) -> None:
        """The only sample of a metric without labels."""
        metric = self._metric(name)
        self._lines += [*_head(metric), f"{metric.full_name} {value}"]

    def add_histograms(self, name: str, samples: Iterable[tuple[str, Sequence[int], float]]) -> None:
        """Of each series the labels, the counts of the buckets (not added up; the last has no bound), and the sum."""
        metric = self._metric(name)
        full, bounds = metric.full_name, [*map(_number, metric.bounds), "+Inf"]
        lines: list[str] = []
        for labels, counts, total in samples:
            count, before = 0, f'{full}_bucket{{{labels}{"," if labels else ""}le="'
            for bound, more in zip(bounds, counts, strict=True):
                count += more
                lines.append(f'{before}{bound}"}} {count}')
            lines += [f"{full}_sum{{{labels}}} {total}", f"{full}_count{{{labels}}} {count}"]
        if lines:
            self._lines += _head(metric)
            self._lines += lines

    def content(self) -> bytes:
        return "\n".join([*self._lines, ""]).encode()

    def _metric(self, name: str) -> Metric:
        metric = METRICS[name]
        assert self._place in metric.where, f"{name} is not exposed at {self._place}"
        return metric


class Histogram:
    """Counts of observations by bucket. One thread observes, others may read."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @classmethod
    def of(cls, name: str) -> "Histogram":
        return cls(METRICS[name].bounds)

    def observe(self, value: float) -> None:
        self.total += value
        for index, bound in enumerate(self._bounds):
            if value <= bound:
                self.counts[index] += 1
                return
        self.counts[-1] += 1


def labels(**values: object) -> str:
    """The text of labels, with their values escaped."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _head(metric: Metric) -> list[str]:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {metric.full_name} {text}", f"# TYPE {metric.full_name} {metric.kind}"]


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)


def add_build_info(page: Exposition, role: Literal["master", "peer", "agent"]) -> None:
    """The versions of this process."""
    import platform
    from importlib import metadata

    version = metadata.version("ringfold")
    page.add("build_info", [(labels(version=version, python=platform.python_version(), role=role), 1)])
