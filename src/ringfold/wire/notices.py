"""Notices: what the rooms report to observers, for logs, `status`, metrics and traces. `str()` is the log line."""

from typing import Literal, get_args

from msgspec import Struct, structs

from ringfold.errors import StateDiverged
from ringfold.wire.messages import Divergence, Epoch, GroupId, PeerId, Rollback
from ringfold.wire.probing import EdgeFit, EdgeView, RoundId, RoundSummary

Level = Literal["debug", "info", "warning", "error"]
EvictionCause = Literal["silent", "stalled", "call", "request", "protocol", "links", "epoch", "away", "run_over"]
EVICTION_CAUSES: tuple[EvictionCause, ...] = get_args(EvictionCause)
"""Why a peer is evicted: it was silent; it stalled the others; it called something else; somebody requested it; it
broke the protocol; no ring without its links worked; it did not seal or attach an epoch in time; it did not return to a
new master; its run is over."""
EpochCause = Literal["lost", "left", "joined", "master", "ring", "link", "call"]
EPOCH_CAUSES: tuple[EpochCause, ...] = get_args(EpochCause)
"""Why an epoch ends, the first one that applies: a member was lost or evicted; a member left; peers join; the master
changed; a better ring was found; a link failed; an op failed by its call."""


class Notice(Struct, frozen=True, tag_field="event"):
    """The base class of all notices."""

    @property
    def level(self) -> Level:
        return "info"


class LaneLost(Notice, frozen=True, tag="lane_lost"):
    """A lane broke, and its link continues with its other lanes. No op is aborted; the lane is dialled again."""

    peer: PeerId
    outgoing: bool
    lane: int
    reason: str

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        direction = "to" if self.outgoing else "from"
        return f"lost lane {self.lane} {direction} peer {self.peer}, the others continue: {self.reason}"


class ConnectionDropped(Notice, frozen=True, tag="connection_dropped"):
    """A connection was closed because its client was refused."""

    remote: str
    reason: str

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        return f"dropped {self.remote}: {self.reason}"


class ConnectionAbandoned(Notice, frozen=True, tag="connection_abandoned"):
    """A client closed its connection before it was authenticated. A peer that leaves while it dials does that."""

    remote: str
    reason: str

    def __str__(self) -> str:
        return f"{self.remote} closed its connection before it was authenticated: {self.reason}"


class PeerRegistered(Notice, frozen=True, tag="peer_registered"):
    peer: PeerId
    name: str
    group: GroupId
    remote: str

    def __str__(self) -> str:
        return f"peer {self.peer} ({self.name}, {self.remote}) registered for group {self.group}"


class PeerSuspected(Notice, frozen=True, tag="peer_suspected"):
    peer: PeerId
    silent_ms: int
    name: str = ""

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        return f"peer {self.peer}{name} is suspected: silent for {self.silent_ms} ms"


class PeerGone(Notice, frozen=True, tag="peer_gone"):
    """A peer is no longer in the run: it left, was lost, or was evicted."""

    peer: PeerId
    name: str
    how: Literal["left", "lost", "evicted"]
    reason: str
    cause: EvictionCause | None = None
    """Of an eviction."""

    @property
    def level(self) -> Level:
        return "info" if self.how == "left" else "warning"

    def __str__(self) -> str:
        return f"peer {self.peer} ({self.name}) {self.how}: {self.reason}"


class PeersStalled(Notice, frozen=True, tag="peers_stalled"):
    """Members kept others waiting for too long, and are evicted. `limit` is the setting behind it."""

    group: GroupId
    peers: list[PeerId]
    names: list[str]
    waiting: list[PeerId]
    what: str
    waited_ms: int
    limit: str

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        late = ", ".join(f"peer {peer} ({name})" for peer, name in zip(self.peers, self.names, strict=True))
        waited = f"{len(self.waiting)} waited {self.waited_ms / 1000:.1f} s in {self.what} for {late}"
        return f"group {self.group}: {waited}, and go on without ({self.limit})"


class MasterLost(Notice, frozen=True, tag="master_lost"):
    """A peer has lost its master, and tries to reach it, or another one."""

    address: str
    reason: str

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        return f"the master at {self.address} is gone ({self.reason}); looking for one"


class MasterAway(Notice, frozen=True, tag="master_away"):
    """No master of the list could be reached yet. The peer keeps trying."""

    reasons: dict[str, str]
    """By address."""
    left_ms: int
    """For how long it still tries."""
    setting: str
    """The setting that limits it."""

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        tried = "; ".join(f"the master at {address} cannot be reached: {why}" for address, why in self.reasons.items())
        return f"{tried}. Trying for another {self.left_ms / 1000:.0f} s ({self.setting})"


class AdmissionDelayed(Notice, frozen=True, tag="admission_delayed"):
    """This peer has been waiting for its admission for a while."""

    waited_ms: int
    text: str
    left_ms: int | None
    """For how long it still waits; None while the peers that it waits for make progress."""

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        left = "as long as they make progress"
        if self.left_ms is not None:
            left = f"for another {self.left_ms / 1000:.0f} s (join_timeout_s)"
        return f"not admitted after {self.waited_ms / 1000:.0f} s: {self.text}. Waiting {left}"


class PeerReturned(Notice, frozen=True, tag="peer_returned"):
    """A member has returned after a change of masters."""

    peer: PeerId
    name: str

    def __str__(self) -> str:
        return f"peer {self.peer} ({self.name}) is back"


class RunEnded(Notice, frozen=True, tag="run_ended"):
    """The last member of a run is gone: it left with its program done, or the run was abandoned."""

    run: str
    how: Literal["finished", "abandoned"]
    revision: int

    def __str__(self) -> str:
        return f"run {self.run} is {self.how} at revision {self.revision}: its last member is gone"


class RunBegun(Notice, frozen=True, tag="run_begun"):
    """Peers start a new incarnation of a run that had ended. `lost` is the revision that they continue without."""

    run: str
    incarnation: int
    lost: int | None = None

    @property
    def level(self) -> Level:
        return "info" if self.lost is None else "warning"

    def __str__(self) -> str:
        begun = f"run {self.run} begins again, as incarnation {self.incarnation}"
        if self.lost is None:
            return begun
        return (
            f"{begun}: it was abandoned at revision {self.lost}, and no peer brought a checkpoint. To get an error "
            "instead, give the run a name"
        )


class RunForgotten(Notice, frozen=True, tag="run_forgotten"):
    """A run that had ended was forgotten on request."""

    run: str

    def __str__(self) -> str:
        return f"run {self.run} is forgotten: its name is free"


class EpochSealing(Notice, frozen=True, tag="epoch_sealing"):
    group: GroupId
    epoch: Epoch
    reason: str
    cause: EpochCause | None = None

    def __str__(self) -> str:
        return f"group {self.group}: epoch {self.epoch} is sealed: {self.reason}"


class EpochRecorded(Notice, frozen=True, tag="epoch_recorded"):
    group: GroupId
    epoch: Epoch
    ring: list[PeerId]
    committed: int
    aborted: int

    def __str__(self) -> str:
        return (
            f"group {self.group}: epoch {self.epoch} with ring {self.ring}; "
            f"verdicts: {self.committed} committed, {self.aborted} aborted"
        )


class EpochInstalled(Notice, frozen=True, tag="epoch_installed"):
    """The epoch runs at all members, `took_ms` after the first of the causes for which the one before was sealed."""

    group: GroupId
    epoch: Epoch
    took_ms: int

    def __str__(self) -> str:
        return f"group {self.group}: epoch {self.epoch} installed after {self.took_ms} ms"


class SyncBegun(Notice, frozen=True, tag="sync_begun"):
    group: GroupId
    sync: int
    revision: int
    holders: list[PeerId]
    receivers: list[PeerId]

    @property
    def level(self) -> Level:
        return "info" if self.receivers else "debug"

    def __str__(self) -> str:
        return (
            f"group {self.group}: sync {self.sync} of revision {self.revision}: "
            f"{self.holders} have it, {self.receivers} fetch"
        )


class SyncEnded(Notice, frozen=True, tag="sync_ended"):
    group: GroupId
    sync: int
    revision: int
    took_ms: int

    @property
    def level(self) -> Level:
        return "debug"

    def __str__(self) -> str:
        return f"group {self.group}: sync {self.sync} of revision {self.revision} took {self.took_ms} ms"


class StateRolledBack(Notice, frozen=True, tag="state_rolled_back"):
    """The last revision is lost, and the run continues from an older one. Master and peers log it."""

    group: GroupId
    rollback: Rollback

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        back, steps = self.rollback, max(0, self.rollback.lost - self.rollback.revision)
        if back.is_agreed:
            on = f"revision {back.revision} of peer {back.source}, as all agreed"
        else:
            on = f"revision {back.revision} of peer {back.source}'s checkpoint"
        return (
            f"group {self.group}: revision {back.lost} is lost with all peers that had it: the run goes on from {on}; "
            f"{steps} {'step is' if steps == 1 else 'steps are'} lost"
        )


class ResumeDelayed(Notice, frozen=True, tag="resume_delayed"):
    """No member has the last revision; before the run continues from a checkpoint, it waits for these peers."""

    group: GroupId
    revision: int
    names: list[str]
    left_ms: int

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        return (
            f"group {self.group}: revision {self.revision} is lost with all peers that had it. Before the run goes on "
            f"from a checkpoint it waits for {', '.join(map(repr, self.names))}, which may have a newer one: for "
            f"another {self.left_ms / 1_000:.0f} s (resume_wait_s)"
        )


class PeerDiverged(Notice, frozen=True, tag="peer_diverged"):
    """A member did not have the state that the others had, and has received it. Master and peers log it."""

    group: GroupId
    divergence: Divergence

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        return f"group {self.group}: {divergence_error(self.divergence)}"


def divergence_error(divergence: Divergence) -> StateDiverged:
    """The same as an error."""
    return StateDiverged(*structs.astuple(divergence))


class LinksMeasured(Notice, frozen=True, tag="links_measured"):
    """The measurements of an `optimize_topology` are over. `failed` pairs have no figure.

    `unsettled` pairs have an uncertain one: the arrival rate was never steady, however often it was measured."""

    pairs: int
    rounds: int
    failed: list[tuple[PeerId, PeerId]]
    took_ms: int
    unsettled: list[tuple[PeerId, PeerId]] = []

    @property
    def level(self) -> Level:
        return "warning" if self.failed else "info"

    def __str__(self) -> str:
        without = f"; no figure for {', '.join(f'{a} - {b}' for a, b in self.failed)}" if self.failed else ""
        rough = f"; never steady: {', '.join(f'{a} - {b}' for a, b in self.unsettled)}" if self.unsettled else ""
        return f"pairs measured: {self.pairs}, in rounds: {self.rounds}, after {self.took_ms} ms{without}{rough}"


class RingChosen(Notice, frozen=True, tag="ring_chosen"):
    """The best ring by the measurements, and why. `kept`: it is the present one."""

    group: GroupId
    ring: list[PeerId]
    slowest_bytes_per_s: float
    kept: bool
    reason: str

    def __str__(self) -> str:
        slowest = f"slowest link {self.slowest_bytes_per_s / 125_000:.4g} Mbit/s"
        return f"group {self.group}: ring {self.ring}, {slowest}; {self.reason}"


class EdgeBad(Notice, frozen=True, tag="edge_bad"):
    group: GroupId
    source: PeerId
    target: PeerId
    reason: str

    @property
    def level(self) -> Level:
        return "warning"

    def __str__(self) -> str:
        return f"group {self.group}: the edge {self.source} -> {self.target} is avoided: {self.reason}"


class CallRefused(Notice, frozen=True, tag="call_refused"):
    """Conflicting calls, mismatched ops, deadlines: the program is at fault."""

    peers: list[PeerId]
    text: str

    @property
    def level(self) -> Level:
        return "error"

    def __str__(self) -> str:
        return self.text


class RoundDone(Notice, frozen=True, tag="round_done"):
    """A probing round has its result."""

    summary: RoundSummary

    @property
    def level(self) -> Level:
        return "warning" if self.summary.anomaly or self.summary.missing else "debug"

    def __str__(self) -> str:
        done = self.summary
        label = f" {done.label!r}" if done.label else ""
        worst = max((node.sigma_ns for node in done.nodes), default=0.0)
        missing = "".join(f"; node {node} is missing: {why}" for node, why in done.missing.items())
        anomaly = f"; {done.anomaly}" if done.anomaly else ""
        counts = f"{len(done.nodes)} nodes, {len(done.edges)} edges"
        return f"round {done.round}{label}: {counts}, uncertain by {worst:.0f} ns at most{missing}{anomaly}"


class EdgeFitted(Notice, frozen=True, tag="edge_fitted"):
    """The line of one edge in a round, on request (`--log-fits`)."""

    round: RoundId
    edge: EdgeView

    def __str__(self) -> str:
        return f"round {self.round}: {fit_text(self.edge.fit)}"


def fit_text(fit: EdgeFit) -> str:
    """The line of an edge in one line of text."""
    edge = f"edge {fit.src} -> {fit.dst}"
    if fit.refused:
        return f"{edge} has no line: {fit.refused}"
    line = f"alpha {fit.alpha:+.6e}, beta {fit.beta_ns:+d} ns at t0 {fit.t0_ns}"
    return f"{edge}: {line}, +-{fit.sigma_ns:.0f} ns, {fit.pairs} pairs, by {fit.estimator}"


class ProbeNote(Notice, frozen=True, tag="probe_note"):
    """Something about probing that is worth a log line."""

    text: str

    def __str__(self) -> str:
        return f"probing: {self.text}"


class ProbingBroke(Notice, frozen=True, tag="probing_broke"):
    """The probing rounds ended by an internal error. The run continues without them."""

    text: str

    @property
    def level(self) -> Level:
        return "error"

    def __str__(self) -> str:
        return f"probing broke: {self.text}"
