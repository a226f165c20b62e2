"""The settings of a master: frozen, with the unit in the name, checked in the constructor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from ringfold.config import Resolved, Value, flight_directory
from ringfold.errors import ConfigError
from ringfold.limits import MAX_CHANNELS, MAX_LANES_OF_A_PATH
from ringfold.probe.nodes.nodes_file import read_graph
from ringfold.probe.rounds.settings import DENSITIES, Adaptive, RoundSettings
from ringfold.wire.messages import EvidenceBy, Liveness, Member
from ringfold.wire.probing import RoundKind

RING_EVIDENCE_MEMBERS = 8
"""With "auto", evidence travels on the ring up to this many members: n-1 hops are then faster than the master."""
MAX_DIRECT_MEMBERS = 16
"""Up to so many members all are connected with each other: n(n-1)/2 lanes."""
MEMORY_SEGMENT_BYTES = 262_144
RETURN_MARGIN_MS = 5_000
"""How long a peer may take at least to return, after it has left a silent master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings:
    """How a master handles a run."""

    evidence: Literal["auto", "ring", "master"] = "auto"
    small_bytes: int = 16_384
    segment_bytes: int = 1_048_576
    lanes: int = 1
    channels: int | None = None
    """How many slices an op is cut into, each with lanes and a thread of its own; None: by what the members offer."""
    direct_lanes: bool = True
    """Whether members that are no neighbours connect, too, to send each other Done."""
    hierarchical: bool = True
    """Whether ops are reduced inside each host first, where hosts have the same number of members."""
    liveness: Liveness = field(default_factory=Liveness)
    seal_ms: int = 30_000
    attach_ms: int = 10_000
    handshake_ms: int = 5_000
    link_grace_ms: int = 30
    edge_stall_ms: int = 2_000
    bad_edge_s: int = 60
    meet_ms: int = 500
    stale_s: int = 600
    measure_ms: int = 4_000
    """How long one measurement may take, including the dial and the handshake."""
    rounds: RoundSettings = field(default_factory=RoundSettings)
    export: Path | None = None
    """The directory for the results of probing rounds, `run.jsonl`."""
    log_fits: bool = False
    """Whether the line of every edge is logged in every round."""
    return_ms: int = 10_000
    """How long a new master waits for the members in the journal to return."""
    stall_timeout_ms: int | Literal["auto", "off"] = "auto"
    """How long a minority may keep all others waiting, before it is evicted (see `stalls.py`)."""
    min_stall_ms: int = 60_000
    """The minimum with "auto"."""
    op_timeout_ms: int = 300_000
    """The default of the peers: a stall timeout is never longer."""
    resume_wait_ms: int = 60_000
    """How long a sync waits for the participants of the last one, if no member has its state."""
    events_dir: Path | None = None
    """The directory in which the events of the runs are recorded."""
    events_bytes: int = 1 << 30
    """How large the record of one run may be."""
    flight_dir: Path | None = None
    """The directory of flight records."""
    max_proposals: int = 8
    max_unproven: int = 256
    max_runs: int = 256

    def __post_init__(self) -> None:
        if self.evidence not in ("auto", "ring", "master"):
            raise ConfigError(f"evidence must be auto, ring or master, not {self.evidence!r}")
        alive = self.liveness
        if not 0 < alive.heartbeat_ms < alive.suspect_after_ms < alive.evict_after_ms:
            raise ConfigError("need 0 < heartbeat_ms < suspect_after_ms < evict_after_ms")
        positive = (
            "segment_bytes",
            "lanes",
            "seal_ms",
            "attach_ms",
            "handshake_ms",
            "edge_stall_ms",
            "bad_edge_s",
        )
        more = ("max_proposals", "max_unproven", "max_runs", "measure_ms", "return_ms", "op_timeout_ms")
        for name in (*positive, *more):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.channels is not None and (
            not 0 < self.channels <= MAX_CHANNELS or self.lanes * self.channels > MAX_LANES_OF_A_PATH
        ):
            raise ConfigError(
                f"{self.channels} channels with {self.lanes} lanes each: at most {MAX_CHANNELS} channels, and "
                f"{MAX_LANES_OF_A_PATH} lanes together, are possible"
            )
        for name in ("small_bytes", "link_grace_ms", "meet_ms", "stale_s", "resume_wait_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}")

        if isinstance(self.stall_timeout_ms, int) and self.stall_timeout_ms < 1:
            raise ConfigError(f"stall_timeout_ms must be at least 1, not {self.stall_timeout_ms}")

    def evidence_for(self, members: int, *, direct: bool = False) -> EvidenceBy:
        """How evidence travels in an epoch with this many members, which may be connected directly."""
        if self.evidence != "auto":
            return self.evidence
        return "ring" if members <= (MAX_DIRECT_MEMBERS if direct else RING_EVIDENCE_MEMBERS) else "master"

    def is_direct(self, members: Sequence[Member]) -> bool:
        """Whether these members are to be connected directly. Up to three are neighbours anyway."""
        few = 3 < len(members) <= MAX_DIRECT_MEMBERS
        return self.direct_lanes and few and self.evidence != "master" and self._has_single_lanes(members)

    def is_hierarchical(self, members: Sequence[Member]) -> bool:
        """Whether ops of these members may be reduced host by host."""
        return self.hierarchical and self._has_single_lanes(members)

    def _has_single_lanes(self, members: Sequence[Member]) -> bool:
        """Where lanes stand in for each other, a path that fails ends no epoch: a direct lane would."""
        return self.lanes == 1 and all(member.paths == 1 for member in members)

    def segment_bytes_for(self, members: Sequence[Member], hosts: int = 1) -> int:
        """The largest segment in an epoch with these members: where they share memory, it must fit into their pipes."""
        share = all(member.here and (hosts > 1 or member.host == members[0].host) for member in members)
        return min(self.segment_bytes, MEMORY_SEGMENT_BYTES) if share else self.segment_bytes

    def small_bytes_for(self, members: int) -> int:
        """Up to which size an op travels inside Done, in an epoch with this many members.

        A payload then goes over every edge but one, instead of twice 1/n of it: in a small ring the saved stages are
        worth more than the bytes.
        """
        return max(self.small_bytes, 4 * self.small_bytes // max(1, members - 1))


def master_settings(resolved: Resolved) -> MasterSettings:
    """The master's settings, from the resolved ones."""
    export = resolved.value("probe_export")
    evict_after_ms = resolved.integer("evict_after_ms")
    assert export is None or isinstance(export, Path)
    events_dir = resolved.value("events_dir")
    assert events_dir is None or isinstance(events_dir, Path)
    return MasterSettings(
        evidence=cast(Literal["auto", "ring", "master"], resolved.text("evidence")),
        small_bytes=resolved.integer("small_bytes"),
        segment_bytes=resolved.integer("segment_bytes"),
        lanes=resolved.integer("lanes"),
        direct_lanes=resolved.switch("direct_lanes"),
        hierarchical=resolved.switch("hierarchical"),
        stale_s=resolved.integer("stale_s"),
        resume_wait_ms=int(resolved.number("resume_wait_s") * 1_000),
        max_runs=resolved.integer("max_runs"),
        export=export,
        events_dir=events_dir,
        events_bytes=resolved.integer("events_mb") << 20,
        flight_dir=flight_directory(resolved),
        log_fits=resolved.switch("probe_log_fits"),
        liveness=Liveness(
            heartbeat_ms=resolved.integer("heartbeat_ms"),
            suspect_after_ms=resolved.integer("suspect_after_ms"),
            evict_after_ms=evict_after_ms,
        ),
        stall_timeout_ms=_ms_or_word(resolved.value("stall_timeout_s")),
        op_timeout_ms=max(1, int(resolved.number("op_timeout_s") * 1_000)),
        # Peers leave a silent master after `evict_after_ms`: a new leader must not give them up before that.
        return_ms=evict_after_ms + min(evict_after_ms, RETURN_MARGIN_MS),
        rounds=_round_settings(resolved),
    )


def _round_settings(resolved: Resolved) -> RoundSettings:
    preset = DENSITIES[resolved.text("probe_density")]
    gap_us = resolved.integer("probe_gap_us") if resolved.is_set("probe_gap_us") else preset.gap_us
    pause_us = resolved.integer("probe_pause_us") if resolved.is_set("probe_pause_us") else preset.pause_us
    graph = resolved.value("probe_graph")
    assert graph is None or isinstance(graph, Path)
    return RoundSettings(
        kind=cast(RoundKind, resolved.text("probe_kind")),
        neighbours=resolved.integer("probe_neighbours"),
        seed=resolved.integer("probe_seed"),
        graph={} if graph is None else read_graph(graph),
        combine_windows=resolved.switch("probe_combine"),
        gap_us=gap_us,
        pause_us=pause_us,
        window_ms=resolved.integer("probe_window_ms"),
        report_floor_ms=resolved.integer("probe_report_floor_ms"),
        report_timeout_ms=resolved.integer("probe_report_timeout_ms"),
        max_missed=resolved.integer("probe_max_missed"),
        anomaly_ns=int(resolved.number("probe_anomaly_us") * 1_000),
        adaptive=Adaptive(
            is_on=resolved.switch("probe_adapt"),
            stable_ns=resolved.integer("probe_stable_ns"),
            unstable_ns=resolved.integer("probe_unstable_ns"),
            # The density that was chosen is also the one to return to.
            pause_min_us=min(pause_us, Adaptive().pause_min_us),
            gap_max_us=resolved.integer("probe_gap_max_us"),
        ),
    )


def _ms_or_word(value: Value) -> int | Literal["auto", "off"]:
    if isinstance(value, int | float):
        return int(value * 1_000)
    return "off" if value == "off" else "auto"
