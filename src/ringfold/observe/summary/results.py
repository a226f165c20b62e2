"""What a summary consists of. Times are in seconds since the run's begin, unless their names say otherwise. Pure."""

from typing import Literal

from msgspec import Struct, field

from ringfold.wire.base import Epoch, GroupId, PeerId

PeerEnd = Literal["left", "lost", "evicted", "missing", "stayed"]
"""`missing`: no longer in the ring, and no record says why. `stayed`: it was a member when the records ended."""
IncidentKind = Literal[
    "begun",
    "joined",
    "left",
    "lost",
    "evicted",
    "failover",
    "rollback",
    "divergence",
    "ring",
    "refused",
    "note",
    "ended",
]
"""`ring`: a new order, or a link that is avoided. `refused`: a call of the program that could not be done."""


class SeriesPoint(Struct, frozen=True, array_like=True):
    """The values of one stretch of time: their mean, and the least and the greatest of them."""

    at_s: float
    mean: float
    low: float
    high: float


class Series(Struct, frozen=True):
    """Values over time. `values` is how many there were before they were thinned, and `not_finite` how many more were
    NaN or infinite."""

    name: str
    values: int
    points: list[SeriesPoint]
    not_finite: int = 0


class Membership(Struct, frozen=True):
    """One peer id: from its registration to its end. `record` is the name of its process's record, if there is one."""

    peer: PeerId
    name: str
    host: str
    group: GroupId
    registered_s: float | None
    joined_s: float | None
    ended_s: float
    end: PeerEnd
    reason: str = ""
    record: str = ""


class Lead(Struct, frozen=True):
    """A master that led, for how long, and why it began to."""

    master: str
    fence: int
    began_s: float
    ended_s: float
    reason: str = ""


class Incident(Struct, frozen=True):
    """Something that happened to the run, in words, and what it cost.

    `paused_s` is the longest time between two committed ops of one survivor across it, beyond the usual;
    `next_commit_s` is from the incident until each survivor had committed an op again. Both are None without records of
    ops.
    """

    at_s: float
    kind: IncidentKind
    text: str
    group: GroupId = 0
    epoch: Epoch = 0
    """That began with it; 0: none."""
    peers: list[PeerId] = []
    aborted_ops: int = 0
    lost_steps: int = 0
    fetched_bytes: int = 0
    paused_s: float | None = None
    next_commit_s: float | None = None
    paused_from_s: float | None = None
    """When the last op before it was committed."""


class Costs(Struct, frozen=True):
    """What all incidents cost together. A pause that several incidents share counts once."""

    paused_s: float | None = None
    """None: without records of ops it is not known."""
    longest_pause_s: float | None = None
    planned_s: float | None = None
    """The part of `paused_s` that was for joins, leaves and new rings."""
    aborted_ops: int = 0
    lost_steps: int = 0
    repeated_steps: int = 0
    fetched_bytes: int = 0


class OpClass(Struct, frozen=True):
    """Ops of one kind and of similar size. Durations are from the start in the epoch to the end, in microseconds."""

    op: str
    low_bytes: int
    high_bytes: int
    ops: int
    """Committed ones, at all peers together."""
    median_us: float
    p99_us: float
    greatest_us: float
    least_median_us: float
    """The median at the peer that began last: without waiting for others. 0: no op was recorded by several members."""
    waited_share: float | None
    """Of the durations, what was longer than at the peer that began last."""
    blocked_share: float
    """While the transport took no payload for the next peer."""


class PeerWork(Struct, frozen=True):
    """How a peer spent the time of its steps, and how often the others waited for it.

    `own_s` is the time of steps without an op in flight. An op is shortest at the peer that begins last: what it takes
    longer at another is `waited_s`. In `last` of `judged` ops this peer began so late that it mattered, and `kept_s` is
    by how much it was later than the one before it: what the run would gain if it were as fast as that one.
    """

    peer: PeerId
    name: str
    host: str
    steps: int
    ops: int
    own_s: float
    waited_s: float
    moved_s: float
    sync_s: float
    cpu_s: float
    queued_s: float
    last: int
    judged: int
    kept_s: float
    missing_s: float = 0.0
    """For how long `status` named it as the one that others wait for: waits of a second and more."""


class Traffic(Struct, frozen=True):
    """What a peer's engine has sent and received. `memory_bytes` of the sent ones went through shared memory; None: it
    is not known, because only the master's record has it."""

    peer: PeerId
    name: str
    sent_bytes: int
    received_bytes: int
    memory_bytes: int | None = None


class LinkFigures(Struct, frozen=True):
    """A directed link by the samples of the master: its rate when the records ended, and the least and greatest."""

    source: PeerId
    target: PeerId
    bytes_per_s: float
    low_bytes_per_s: float
    high_bytes_per_s: float
    delay_us: float | None
    loss: float | None
    by: str
    samples: int
    transport: str = ""
    """As the last ring had it; empty if it was not a link of a ring."""


class ClockFigures(Struct, frozen=True):
    """A process's wall clock against the run's global clock: global minus wall, at most `bound_us` off."""

    process: str
    host: str
    samples: int
    first_offset_us: float
    last_offset_us: float
    drift_ppm: float | None
    median_bound_us: float
    greatest_bound_us: float
    offsets: Series


class RoundFigures(Struct, frozen=True):
    """The probing rounds: counts, then medians and the worst."""

    rounds: int
    with_missing: int
    anomalies: int
    median_nodes: int
    duration_ms: tuple[float, float] = (0.0, 0.0)
    stop_spread_us: tuple[float, float] = (0.0, 0.0)
    control_latency_us: tuple[float, float] = (0.0, 0.0)
    report_bytes: tuple[float, float] = (0.0, 0.0)
    uncertainty_us: tuple[float, float] = (0.0, 0.0)
    retries: int = 0


class SlowStep(Struct, frozen=True):
    """A step that took long, and the peer that was longest without an op in flight in it."""

    step: int
    at_s: float
    took_s: float
    peer: PeerId
    own_s: float
    """Of it, without an op in flight."""
    incident: str = ""
    """What happened meanwhile."""


class RecordFigures(Struct, frozen=True):
    """One process's record. `notes` say what of it could not be read or used."""

    name: str
    role: str
    host: str
    pid: int
    version: str
    began_s: float | None
    ended_s: float | None
    events: int
    skipped: int
    time_source: str
    notes: list[str] = field(default_factory=list)


class Summary(Struct, frozen=True):
    """A run, as its records tell it."""

    run: str
    began_unix_ns: int
    seconds: float
    ended: str
    """How: `finished`, `abandoned`, or empty if no record says."""
    sentences: list[str]
    """What happened, in words."""
    first_step_s: float | None
    """When the first step ended."""
    steps: int
    first_step: int | None
    last_step: int | None
    step_median_s: float
    step_p99_s: float
    most_peers: int
    fewest_peers: int
    epochs: int
    checkpoints: int
    lanes_lost: int
    suspicions: int
    refused_connections: int
    ops_left_out: int
    steps_left_out: int
    costs: Costs
    memberships: list[Membership]
    leads: list[Lead]
    incidents: list[Incident]
    incidents_left_out: int
    rates: Series
    """Steps per second."""
    logged: list[Series]
    logged_left_out: int
    slow_steps: list[SlowStep]
    work: list[PeerWork]
    ops: list[OpClass]
    traffic: list[Traffic]
    links: list[LinkFigures]
    clocks: list[ClockFigures]
    rounds: RoundFigures | None
    records: list[RecordFigures]
    notes: list[str]
