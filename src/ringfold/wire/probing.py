"""Messages between nodes and the master about probing: graphs, rounds, fits, summaries.

A *node* is a peer with probing on, or a process that only probes (`NodeHello`). Its clock is its own
CLOCK_MONOTONIC_RAW in integer nanoseconds; every time in here is by the sender's clock, unless it says otherwise. An
*edge* is directed, from the node that probes to the node that responds; its line is

    C_dst - C_src = beta + alpha * (C_src - t0)

A round's id is (fence, sequence) and only grows: a node that has seen a higher one ignores a lower one.
"""

from typing import Literal

from msgspec import Struct, field

from ringfold.wire.base import Message

NodeId = int
RoundKind = Literal["master", "time", "gloo", "local"]
ProbeAction = Literal["start", "stop", "round", "show"]

KEY_BYTES = 16
MIN_GAP_US, MAX_GAP_US = 50, 10_000
MIN_PAUSE_US, MAX_PAUSE_US = 150, 10_000_000
"""The limits of a node's probing cadence."""


class RoundId(Struct, frozen=True, order=True, array_like=True):
    """The id of a round: `fence` counts masters, `sequence` counts rounds, also over a change of masters."""

    fence: int = 0
    sequence: int = 0

    def __str__(self) -> str:
        return f"{self.fence}.{self.sequence}"


class Neighbour(Struct, frozen=True):
    """The other end of an edge, and the UDP address at which it responds."""

    node: NodeId
    name: str
    address: str
    port: int


class Cadence(Struct, frozen=True):
    """How densely a node probes, and for how long."""

    gap_us: int = 800
    pause_us: int = 3_000
    window_ms: int = 4_000


class EdgeFit(Struct, frozen=True, omit_defaults=True, gc=False):
    """One edge over one window, as its prober measured it. `refused` is why there is no line; then only the counts are
    set.

    `t0_ns` is the middle of the points in the source's clock, and they lie within `half_ns` of it. `sigma_ns` is the
    standard error of the line at t0, `sigma_alpha` that of the slope. `low` and `high` bound the truth with certainty
    if no stamp is wrong: how far it may lie from the fitted line at t0 - half, at t0 and at t0 + half; in between,
    straight lines join them. Delays are half RTTs without the processing time of the other end.
    """

    src: NodeId
    dst: NodeId
    t0_ns: int = 0
    half_ns: int = 0
    alpha: float = 0.0
    beta_ns: int = 0
    sigma_ns: float = 0.0
    sigma_alpha: float = 0.0
    low: tuple[int, int, int] = (0, 0, 0)
    high: tuple[int, int, int] = (0, 0, 0)
    residual_ns: float = 0.0
    """The typical distance of a point of the floor from the line plus delay."""
    delay_min_ns: int = 0
    delay_p50_ns: int = 0
    delay_p99_ns: int = 0
    sent: int = 0
    pairs: int = 0
    """Complete exchanges that passed the filter."""
    lost: int = 0
    duplicates: int = 0
    filtered: int = 0
    estimator: str = ""
    why: str = ""
    refused: str = ""


class NodeClock(Struct, frozen=True):
    """How a node's clock becomes global time: G(c) = global_ns + (c - t0_ns) * (1 + rate).

    Global time reads like Unix time in nanoseconds. `low_ns` <= truth - G <= `high_ns` at t0, by the certified bounds
    of the edges on the path to the `reference`; `sigma_ns` is the standard error. Away from t0 both grow by `growth` a
    nanosecond.
    """

    node: NodeId
    t0_ns: int
    global_ns: int
    rate: float
    sigma_ns: float
    low_ns: int
    high_ns: int
    growth: float


class EdgeView(Struct, frozen=True, omit_defaults=True):
    """An edge after the calculation: what was reported, and the consensus of the whole graph."""

    fit: EdgeFit
    alpha: float = 0.0
    beta_ns: int = 0
    residual_ns: float = 0.0
    """Reported minus consensus, at t0."""
    dropped: str = ""
    """Why it was not used for the result; empty if it was."""
    in_tree: bool = False
    windows: int = 0
    """Of how many windows its line in the calculation was combined."""


class LoopResidual(Struct, frozen=True):
    """A loop of the graph (one edge outside the spanning tree closes it), and by how much it does not close."""

    nodes: list[NodeId]
    residual_ns: float


class Advice(Struct, frozen=True):
    """The cadence of the next window, and why."""

    pause_us: int
    window_ms: int
    why: str
    gap_us: int = 0
    """The spacing inside a pair; 0: as before."""


class RoundMetrics(Struct, frozen=True, omit_defaults=True):
    """What a round cost. Times in nanoseconds; spreads are over the nodes, in global time."""

    control_latency_ns: list[int] = field(default_factory=list)
    """One-way latency, per node that reported."""
    stop_spread_ns: int = 0
    resume_spread_ns: int = 0
    stop_ns: int = 0
    fit_ns: int = 0
    gather_ns: int = 0
    calculate_ns: int = 0
    restart_ns: int = 0
    total_ns: int = 0
    """From sending ROUND_END until the last ROUND_START has arrived, as far as the master can tell."""
    sequence_skew: int = 0
    report_bytes: int = 0
    retries: int = 0
    """Reports that were sent again, because their connection was lost."""
    tcp_retransmits: int = 0
    """Segments that the master's kernel sent again on the connections to the nodes, since each node's last report."""


class NodeWindow(Struct, frozen=True, omit_defaults=True):
    """A node's window in a round, as the node reported it.

    `begin_ns` and `end_ns` are of the node's clock. A window's probes have the sequences from `first_sequence` to
    `last_sequence`, and the node's next window begins with `next_sequence`; all are 0 if the node did not report them.
    `sent`, `received` and `lost` count pairs of packets over all edges of the node: a pair is lost if no complete
    response to it was received in time.
    """

    node: NodeId
    round: RoundId
    """The round before, if the report was late."""
    window: int
    begin_ns: int
    end_ns: int
    first_sequence: int = 0
    last_sequence: int = 0
    next_sequence: int = 0
    fit_ns: int = 0
    sent: int = 0
    received: int = 0
    lost: int = 0


class RoundSummary(Struct, frozen=True, omit_defaults=True):
    """A round's result. `missing` are participants without a report, with the reason."""

    round: RoundId
    kind: RoundKind
    label: str
    begin_ns: int
    end_ns: int
    """Of the window, in global time."""
    reference: NodeId
    nodes: list[NodeClock]
    edges: list[EdgeView]
    loops: list[LoopResidual] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Node id as text -> why."""
    anomaly: str = ""
    advice: Advice | None = None
    metrics: RoundMetrics = RoundMetrics()
    names: dict[str, str] = field(default_factory=dict)
    """Node id as text -> its name."""
    late: dict[str, int] = field(default_factory=dict)
    """Participants without a report of this round whose late report of the round before counts here: node id as text
    -> the sequence of that round."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Connected nodes that are out of the graph, as text -> why."""
    windows: list[NodeWindow] = field(default_factory=list)
    """Of the nodes whose reports count, by their ids."""
    participants: list[NodeId] = field(default_factory=list)
    """The nodes that probed in this round, whether or not they reported."""
    listeners: list[NodeId] = field(default_factory=list)
    """The nodes that only responded."""


class RelayInfo(Struct, frozen=True):
    """A relay as the root sees it."""

    name: str
    region: str
    nodes: int
    batches: int = 0
    """Messages with reports."""
    reports: int = 0
    bytes: int = 0
    """Of the messages with reports."""
    refused: int = 0
    """Reports and alarms for nodes that are not behind this relay."""
    is_suspected: bool = False


# Messages


class NodeHello(Message, frozen=True, tag="node_hello"):
    """A process that only probes requests to be a node. `last` is the newest round it has seen from any master,
    `number` the node id that it had with the last master (0: none), which it keeps if it is free."""

    version: int
    host: str
    name: str
    addresses: list[str]
    port: int
    """UDP."""
    listen_only: bool
    last: RoundId
    nonce: bytes
    proof: bytes
    number: NodeId = 0
    run: str = ""
    heartbeats: bool = False
    """Whether it sends heartbeats, and expects those of the master."""


class NodeWelcome(Message, frozen=True, tag="node_welcome"):
    """The node is accepted. The master proves the token too.

    The node sends a heartbeat every `heartbeat_ms` (0: none), and either side closes a connection on which it has
    received nothing for `evict_after_ms`.
    """

    node: NodeId
    proof: bytes
    heartbeat_ms: int = 0
    evict_after_ms: int = 0


class ProbeGraph(Message, frozen=True, tag="probe_graph"):
    """The nodes that this node probes (`out`), and those that may probe it (`into`), with the key of the packets' tags.

    A higher `number` replaces a lower one.
    """

    number: int
    kind: RoundKind
    key: bytes
    out: list[Neighbour]
    into: list[Neighbour]


class RoundEnd(Message, frozen=True, tag="round_end"):
    """The window of this round is over: rotate, fit, report. If nothing follows in `deadline_ms`, continue without a
    master."""

    round: RoundId
    sent_ns: int
    label: str = ""
    """The round's label, which may have been chosen after its start."""
    deadline_ms: int = 2_000


class RoundReport(Message, frozen=True, tag="round_report"):
    """A node's window. `round` is the one that ended it, or the last one seen where windows go by the node's clock.

    `end_sent_ns` echoes the RoundEnd (0 without one); `held_ns` is the time between receiving it and sending this.
    """

    round: RoundId
    window: int
    """Counts this node's windows; only grows."""
    begin_ns: int
    end_ns: int
    utc_ns: int
    """CLOCK_REALTIME minus the node's clock, at the end of the window."""
    edges: list[EdgeFit]
    sent_ns: int
    end_sent_ns: int = 0
    held_ns: int = 0
    fit_ns: int = 0
    resumed_ns: int = 0
    """When this window started."""
    retries: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    next_sequence: int = 0
    """Of its probes, and of the first probe of the next window; 0 if not known."""


class RoundStart(Message, frozen=True, tag="round_start"):
    """The next window starts. If nothing follows within `deadline_ms`, the node continues without a master."""

    round: RoundId
    label: str
    cadence: Cadence
    deadline_ms: int
    sent_ns: int
    anomaly_ns: int = 100_000
    """An edge that deviates by more than this within the window causes a RoundAlarm."""


class RoundClock(Message, frozen=True, tag="round_clock"):
    """A node's part of the result of `round`. It arrives while the next window is open."""

    round: RoundId
    clock: NodeClock


class RoundAlarm(Message, frozen=True, tag="round_alarm"):
    """An edge of this node deviates from its line by more than the threshold, within a window."""

    round: RoundId
    src: NodeId
    dst: NodeId
    residual_ns: int
    sent_ns: int


class ProbeHalt(Message, frozen=True, tag="probe_halt"):
    """Stop sending probes at once, until the next RoundStart of a higher round. Responding to probes continues."""

    round: RoundId
    reason: str


class ProbeCommand(Message, frozen=True, tag="probe_command"):
    """A command controls probing, or shows it. It proves the token as a StatusRequest does."""

    version: int
    action: ProbeAction
    label: str
    nonce: bytes
    proof: bytes
    run: str = ""


class ProbeAnswer(Message, frozen=True, tag="probe_answer"):
    """The result of a command: `done` false and a reason, or the newest round."""

    done: bool
    text: str
    is_on: bool
    summary: RoundSummary | None = None
    relays: list[RelayInfo] = field(default_factory=list)
