"""The run as people see it: what `ringfold status` asks for and shows."""

from typing import Literal

from msgspec import Struct, field

from ringfold.config import DEFAULT_RUN
from ringfold.wire.base import Epoch, EvidenceBy, GroupId, Message, PeerId


class World(Struct, frozen=True):
    """The run-wide numbers behind a communicator's attributes."""

    peers: int = 0
    groups: int = 0
    largest_group: int = 0


class StatusRequest(Message, frozen=True, tag="status_request"):
    """Somebody wants to look at a run. Proves that run's token like a peer.

    Without a name it is the default run, or the only one there is, and the token is the master's own.
    """

    version: int
    nonce: bytes
    proof: bytes
    run: str = ""


class PeerStatus(Struct, frozen=True):
    """One peer, as `ringfold status` shows it. `phase` is one of the classic names."""

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


class GroupStatus(Struct, frozen=True):
    """One group: its epoch, its ring, and where an epoch change stands.

    `diverged` are the last few members whose state was not that of the others, `divergences` counts all."""

    group: GroupId
    epoch: Epoch
    phase: str
    ring: list[PeerId]
    evidence: EvidenceBy
    bad_edges: list[tuple[PeerId, PeerId]] = []
    diverged: list[Divergence] = []
    divergences: int = 0


class LinkStatus(Struct, frozen=True):
    """What is known of one directed link. `by` says from where its rate is: a collective's is a lower bound, and a link
    that was only probed has none (0)."""

    source: PeerId
    target: PeerId
    bytes_per_s: float
    delay_us: float | None
    age_ms: int
    by: Literal["measured", "collective", "probed"]
    loss: float | None = None
    """The share of probe exchanges that did not come back; None without probing."""


class Waiting(Struct, frozen=True):
    """What is waited for, by whom, for whom, and since when.

    `evict_in_ms`: when those who are missing will be evicted; `eviction` says the same in words, or why they are not.
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
    """The newest news first, and not more than a few thousand: `known_links` counts all."""
    known_links: int = 0
    leader: str = ""
    """The master that leads, and answers here."""
    run: str = DEFAULT_RUN
    other_runs: list[str] = field(default_factory=list)
    """That this master serves, too."""
