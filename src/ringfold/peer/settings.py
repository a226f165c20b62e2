"""The settings of a peer: its timeouts and its identity."""

from dataclasses import dataclass

from ringfold.config import DEFAULT_RUN
from ringfold.errors import ConfigError
from ringfold.units import MS as MS

"""Nanoseconds in a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimings:
    """The timeouts and limits of a peer when it connects to others."""

    handshake_ms: int = 5_000
    """A connection that has proven nothing after this time is closed."""
    connect_ms: int = 2_000
    """How long one lane is dialled, over all addresses of the neighbour."""
    redial_ms: int = 20
    """The pause after all addresses of a lane were tried."""
    attach_ms: int = 4_000
    """Lanes that are missing after this time are reported to the master, which proposes another ring."""
    path_patience_ms: int = 300
    """How long an attachment waits for the other lanes of a link that has one already; they may connect later."""
    path_redial_most_ms: int = 2_000
    """A lane that others stand in for is dialled again after a pause that doubles from `redial_ms` up to this."""
    direct_pause_ms: int = 50
    """How long after an epoch was installed its direct lanes are dialled: epochs that follow each other need none."""
    master_retry_ms: int = 50
    """The first pause between two attempts to reach the master; it doubles up to `master_retry_most_ms`."""
    master_retry_most_ms: int = 1_000
    master_patience: int = 6
    """For how many times `evict_after_ms` the master may be silent. A paused master evicts no peer, and ops do not need
    it, so peers wait longer for it than it waits for a peer."""
    reconnect_ms: int = 60_000
    """For how long a member tries to resume when its master is gone."""
    reconnect_try_ms: int = 1_000
    """The timeout of one attempt to resume: another master may be the leader by now."""
    reconnect_most_ms: int = 100
    """The maximum pause between two rounds over all masters when a member resumes."""
    answer_ms: int = 1_000
    """How long an overdue call waits for the master to report which peers were missing."""
    unproven_most: int = 64
    """The limit of inbound connections that have proven nothing; beyond it the oldest is closed."""

    def __post_init__(self) -> None:
        if not 0 < self.redial_ms < self.connect_ms <= self.attach_ms:
            raise ConfigError("need 0 < redial_ms < connect_ms <= attach_ms")
        if not 0 < self.path_patience_ms < self.attach_ms or self.path_redial_most_ms < self.redial_ms:
            raise ConfigError("need 0 < path_patience_ms < attach_ms, and redial_ms <= path_redial_most_ms")
        if not 0 < self.master_retry_ms <= self.master_retry_most_ms:
            raise ConfigError("need 0 < master_retry_ms <= master_retry_most_ms")
        names = ("handshake_ms", "answer_ms", "unproven_most", "master_patience")
        for name in (*names, "reconnect_ms", "reconnect_try_ms", "reconnect_most_ms"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a peer sends about itself in Hello. `addresses` are IP literals, the first `paths` of them one per path."""

    group: int
    host: str
    name: str
    addresses: tuple[str, ...]
    port: int
    token: bytes = b""
    """The token of the run, which is derived from the master's."""
    run: str = DEFAULT_RUN
    probes: bool = False
    """Whether the same port takes UDP probes."""
    listen_only: bool = False
    """Whether it only responds to them."""
    paths: int = 1
    cores: int = 1
    """How many it may use."""
    threads: int = 0
    """How many threads its ops may have; 0: its share of the host's cores."""
    here: str = ""
    """The name by which peers of its host reach it, to share memory with it; empty: it has none."""
