"""The statuses that a master recorded: totals of peers, waits, links. Pure."""

from dataclasses import dataclass, field

from ringfold.wire.base import PeerId
from ringfold.wire.status import LinkStatus, OpTotals, Status, Waiting

MIN_WAIT_MS = 1_000
"""A status is a sample: shorter waits are seen by chance."""
MAX_LINKS = 70_000
"""Directed links between 256 peers, and a few more."""


@dataclass(slots=True)
class LinkTally:
    newest: LinkStatus
    low: float
    high: float
    samples: int = 0


@dataclass(slots=True)
class Wait:
    """One wait, as long as it was seen."""

    since_ms: int
    at_ns: int
    wait: Waiting


@dataclass(slots=True)
class StatusTally:
    """Of all masters' statuses, in the order of time."""

    samples: int = 0
    first_ns: int = 0
    last_ns: int = 0
    peers: dict[PeerId, tuple[str, str, OpTotals]] = field(default_factory=dict)
    """Name, host and newest totals."""
    links: dict[tuple[PeerId, PeerId], LinkTally] = field(default_factory=dict)
    transports: dict[tuple[PeerId, PeerId], str] = field(default_factory=dict)
    missing_ms: dict[PeerId, int] = field(default_factory=dict)
    """For how long others waited for a peer: waits that were seen."""
    _open: dict[tuple[str, tuple[PeerId, ...]], Wait] = field(default_factory=dict)

    def take(self, unix_ns: int | None, status: Status) -> None:
        self.samples += 1
        if unix_ns is not None:
            self.first_ns = unix_ns if not self.first_ns else min(self.first_ns, unix_ns)
            self.last_ns = max(self.last_ns, unix_ns)
        for peer in status.peers:
            known = self.peers.get(peer.peer)
            # A new master knows no totals until a peer's next heartbeat.
            if known is None or peer.totals.committed >= known[2].committed:
                self.peers[peer.peer] = (peer.name, peer.host, peer.totals)
        for link in status.links:
            self._link(link)
        for group in status.groups:
            for ring_link in group.ring_links:
                if ring_link.transport != "unknown":
                    self.transports[ring_link.source, ring_link.target] = ring_link.transport
        self._waits(unix_ns or 0, status.waiting)

    def _link(self, link: LinkStatus) -> None:
        key = (link.source, link.target)
        known = self.links.get(key)
        if known is None:
            if len(self.links) >= MAX_LINKS:
                return
            known = self.links[key] = LinkTally(link, link.bytes_per_s, link.bytes_per_s)
        known.newest, known.samples = link, known.samples + 1
        if link.bytes_per_s:
            known.low = min(known.low or link.bytes_per_s, link.bytes_per_s)
            known.high = max(known.high, link.bytes_per_s)

    def _waits(self, unix_ns: int, waiting: list[Waiting]) -> None:
        seen = {}
        for wait in waiting:
            key = (wait.what, tuple(wait.missing))
            before = self._open.pop(key, None)
            if before is not None and wait.since_ms < before.since_ms:
                self._close(before)
            seen[key] = Wait(wait.since_ms, unix_ns, wait)
        self.end()
        self._open = seen

    def _close(self, wait: Wait) -> None:
        if wait.since_ms < MIN_WAIT_MS:
            return
        for peer in wait.wait.missing:
            self.missing_ms[peer] = self.missing_ms.get(peer, 0) + wait.since_ms

    def end(self) -> None:
        """No status follows: all waits that were seen are over."""
        for wait in self._open.values():
            self._close(wait)
        self._open = {}
