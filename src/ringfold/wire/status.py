"""What commands request from a master, and what it responds: the status of a run, the list of runs, evictions.

Each request proves a token as a peer does: the run's own, or (for the list of runs) the master's.
"""

from typing import Literal

from msgspec import Struct, field

from ringfold.config import DEFAULT_RUN
from ringfold.wire.base import Epoch, EvidenceBy, GroupId, Message, PeerId

RunState = Literal["new", "running", "finished", "abandoned", "broken"]

# The status of a run


class World(Struct, frozen=True):
    """The run-wide numbers behind a communicator's attributes."""

    peers: int = 0
    groups: int = 0
    largest_group: int = 0


class StatusRequest(Message, frozen=True, tag="status_request"):
    """Request the status of a run; proves that run's token.

    An empty name is the default run, or the only one there is; the token is then the master's own.
    """

    version: int
    nonce: bytes
    proof: bytes
    run: str = ""


class CollectiveStatus(Struct, frozen=True):
    """An op that a peer is in: its state is VOTE_INITIATE_COLLECTIVE_COMMS, PERFORM_COLLECTIVE_COMMS or
    VOTE_COMPLETE_COLLECTIVE_COMMS."""

    tag: int
    sequence: int
    state: str
    age_ms: int


DURATION_BOUNDS_US = (16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
"""Upper bounds of the classes of op durations; the last class, above all of them, has none."""


class OpTotals(Struct, frozen=True, array_like=True):
    """What a peer's engine has counted since the peer joined. The numbers only grow.

    `bytes` are those of the program's arrays in committed ops, `sent_bytes` and `received_bytes` all that went over
    lanes, `memory_bytes` what of the sent ones went through shared memory. `busy_ns` is the duration of all committed
    ops from start to end, `waited_ns` what of it passed before anything of another peer had come, and `blocked_ns`
    while the transport took no payload for the next peer. `durations` counts committed ops by `DURATION_BOUNDS_US`.
    """

    committed: int = 0
    aborted: int = 0
    restarted: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    memory_bytes: int = 0
    busy_ns: int = 0
    waited_ns: int = 0
    blocked_ns: int = 0
    lanes_lost: int = 0
    durations: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_US) + 1))


class Progress(Struct, frozen=True, omit_defaults=True):
    """What a peer's program reports: it travels in heartbeats, at most once in each.

    `step` is the number of the step that the program is in or has finished last (-1: none yet), `steps` counts the
    finished ones. `logged` is what the program passed to `step.log` last (None: a number that is not finite).
    `clock_offset_ns` is the run's global clock minus the host's wall clock, at most `clock_error_ns` off; None without
    a global clock. `events` are lines of `wire/events.py` for live views: those of the last seconds, so that none is
    lost with a report that was replaced before a heartbeat took it. `first_event` is the number of the first of them:
    the master skips those that it has. `events_dropped` is how many this peer could not record.
    """

    version: str = ""
    step: int = -1
    steps: int = 0
    in_step: bool = False
    logged: dict[str, float | None] = {}
    clock_offset_ns: int | None = None
    clock_error_ns: int | None = None
    events: list[bytes] = []
    first_event: int = 0
    events_dropped: int = 0
    metrics: str = ""
    """The address at which this peer serves metrics; empty: it serves none."""


class PeerStatus(Struct, frozen=True):
    """One peer, as `ringfold status` shows it.

    `phase` is PEER_REGISTERED or PEER_ACCEPTED; `state` is what the peer does, in PCCL's names (empty from a master of
    an earlier version, whose `phase` is both). `ops` is `op_states` as text. `progress` has no events here.
    `progress_ms` is how long ago it changed.
    """

    peer: PeerId
    name: str
    host: str
    group: GroupId
    phase: str
    addresses: list[str]
    port: int
    silent_ms: int
    suspected: bool
    committed_ops: int
    ops: list[str] = []
    state: str = ""
    op_states: list[CollectiveStatus] = []
    totals: OpTotals = OpTotals()
    progress: Progress = Progress()
    progress_ms: int = 0


class Divergence(Struct, frozen=True):
    """A member that took part in the sync of revision `since`, and held other content than the winner at `revision`.

    `keys` are the first few of the `key_count` arrays that differed; `received_bytes` repaired them.
    """

    peer: PeerId
    name: str
    revision: int
    since: int
    keys: list[str]
    key_count: int
    received_bytes: int = 0


class RingLink(Struct, frozen=True):
    """The link from a member to the next one in the ring: how many lanes it had when the epoch was attached, and how
    many of them are in shared memory.

    `transport` says the same in a word. `mixed`: some lanes are in shared memory, and some are not. `unknown`: the
    member has not attached yet.
    """

    source: PeerId
    target: PeerId
    transport: Literal["shm", "tcp", "mixed", "unknown"]
    lanes: int = 0
    in_memory: int = 0


class GroupStatus(Struct, frozen=True):
    """One group: its epoch, its ring, and the phase of an epoch change.

    `ring_links` are the links of the ring, in its order; empty with one member. An op is cut into `channels` slices,
    each with lanes of its own. `diverged` are the last few members whose state differed from that of the others,
    `divergences` counts all."""

    group: GroupId
    epoch: Epoch
    phase: str
    ring: list[PeerId]
    evidence: EvidenceBy
    bad_edges: list[tuple[PeerId, PeerId]] = []
    diverged: list[Divergence] = []
    divergences: int = 0
    ring_links: list[RingLink] = []
    channels: int = 1


class LinkStatus(Struct, frozen=True):
    """What is known of one directed link. `by` is the source of its rate: a collective's is a lower bound, and a link
    that was only probed has none (0)."""

    source: PeerId
    target: PeerId
    bytes_per_s: float
    delay_us: float | None
    age_ms: int
    by: Literal["measured", "collective", "probed"]
    loss: float | None = None
    """The fraction of probe exchanges without a response; None without probing."""


class Waiting(Struct, frozen=True):
    """One thing that peers wait for: which peers wait, which are missing, and for how long.

    `evict_in_ms`: when the missing peers will be evicted; `eviction` is the same as text, or why they are not evicted.
    """

    what: str
    waiting: list[PeerId]
    missing: list[PeerId]
    since_ms: int
    eviction: str = ""
    evict_in_ms: int | None = None


class Status(Message, frozen=True, tag="status"):
    """The whole run at one instant."""

    fence: int
    uptime_ms: int
    registrations: int
    epochs: int
    world: World
    peers: list[PeerStatus] = field(default_factory=list)
    groups: list[GroupStatus] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    links: list[LinkStatus] = field(default_factory=list)
    """The most recently updated first, a few thousand at most: `known_links` counts all."""
    known_links: int = 0
    leader: str = ""
    """The master that leads, and responds here."""
    run: str = DEFAULT_RUN
    other_runs: list[str] = field(default_factory=list)
    """The other runs that this master serves."""


# The events of a run


class EventsRequest(Message, frozen=True, tag="events_request"):
    """Request the events of a run from number `after` on; the proof is that of a `StatusRequest`."""

    version: int
    after: int
    nonce: bytes
    proof: bytes
    run: str = ""


class Events(Message, frozen=True, tag="events"):
    """Lines of `wire/events.py`, of the master and of its peers, from number `first` on: a few thousand at most.

    `first` is above the requested number if older ones are forgotten. `next` is what to request next. `fence` is that
    of the master: another master's numbers mean something else.
    """

    fence: int
    first: int
    next: int
    lines: list[bytes] = field(default_factory=list)


# The runs of a master


class RunsRequest(Message, frozen=True, tag="runs_request"):
    """Request the list of runs; proves the master's own token."""

    version: int
    nonce: bytes
    proof: bytes


class ForgetRun(Message, frozen=True, tag="forget_run"):
    """Forget a run that has ended, so that its name is free again. The response is `RunList` or `Refused`."""

    version: int
    name: str
    nonce: bytes
    proof: bytes


class RunInfo(Struct, frozen=True):
    """One run. `since_s` is the wall clock of the master when the state began; 0 if it is not known."""

    name: str
    state: RunState
    peers: int = 0
    away: int = 0
    """Members that a new master still waits for."""
    revision: int = 0
    incarnation: int = 1
    since_s: int = 0
    why: str = ""
    """Why the run is broken."""


class RunList(Message, frozen=True, tag="run_list"):
    """All runs of a master, by name."""

    runs: list[RunInfo] = field(default_factory=list)


# Evictions on request


class EvictRequest(Message, frozen=True, tag="evict_request"):
    """Evict a peer: `peer` is its id or its name. `by` names the requester, for the log and for the peer itself. Proves
    the run's token."""

    version: int
    peer: str
    reason: str
    by: str
    nonce: bytes
    proof: bytes
    run: str = ""
    """An empty name is the default run, or the only one."""


class EvictResponse(Message, frozen=True, tag="evict_response"):
    """The result. `peer` and `name` are those of the evicted peer, if there is one."""

    done: bool
    text: str
    peer: PeerId = 0
    name: str = ""
