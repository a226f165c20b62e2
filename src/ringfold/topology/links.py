"""What is known about the links between peers: bandwidth, and delay and loss.

A link's *bandwidth* is how many bytes a second one peer can send to another while the other sends back, as both do in a
ring. Each direction has its own. There are two sources, and they differ in what they prove:

* a *measurement* filled the link for a while. It is the truth of that moment, and replaces what was known;
* a *collective* ran at the rate of the ring's slowest link. A link in it can do at least that: it is a lower bound. So
  it raises an entry, or confirms one that it comes close to, and never lowers any.

A lower bound alone does not describe a link: its entry has no delay, and the pair is still to be measured. An entry
ages. It is fresh for as long as the caller says; then its pair is measured again.

*Delay and loss* come from probing. A probe goes there and back, so both are properties of the pair: half the RTT, and
the share of exchanges that were not completed. Both directions of a link get the same. The newest round replaces what
was known.

Both stores keep entries in the order of their last update, so the oldest is dropped first when a store is full.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ringfold.errors import UsageError
from ringfold.topology.ring import Edge

Ns = int
Source = Literal["measured", "collective"]

CONFIRMS = 0.9
"""A collective confirms an entry from this share of it upwards: the rest is the cost of the op itself."""
MAX_ENTRIES = 65_536
"""All directed links of 256 peers."""


@dataclass(frozen=True, slots=True)
class LinkBandwidth:
    """What is known about one directed link. `delay_us` is half the RTT; None: it was never measured."""

    bytes_per_s: float
    delay_us: int | None
    at_ns: Ns
    source: Source


class BandwidthStore:
    """A bounded matrix of directed links. Peer ids are never reused, so an entry never refers to another peer."""

    def __init__(self, most: int = MAX_ENTRIES) -> None:
        if most < 1:
            raise UsageError(f"a bandwidth store has at least one entry, not {most}")
        self._most = most
        self._entries: dict[Edge, LinkBandwidth] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def measured(self, edge: Edge, bytes_per_s: float, round_trip_us: int, now: Ns) -> None:
        """Add a measurement: it replaces what was known about this direction."""
        _check(edge, bytes_per_s)
        if round_trip_us < 0:
            raise UsageError(f"link {_name(edge)}: an RTT of {round_trip_us} us")
        self._put(edge, LinkBandwidth(bytes_per_s, round_trip_us // 2, now, "measured"))

    def observed(self, edge: Edge, bytes_per_s: float, now: Ns) -> None:
        """Add the rate of a collective: at least that is possible.

        Use ops that were long enough to fill the link; a small one measures how fast a socket buffer fills.
        """
        _check(edge, bytes_per_s)
        known = self._entries.get(edge)
        if known is None:
            self._put(edge, LinkBandwidth(bytes_per_s, None, now, "collective"))
        elif bytes_per_s > known.bytes_per_s:
            self._put(edge, replace(known, bytes_per_s=bytes_per_s, at_ns=now, source="collective"))
        elif bytes_per_s >= CONFIRMS * known.bytes_per_s:
            self._put(edge, replace(known, at_ns=now))

    def restore(self, edge: Edge, entry: LinkBandwidth) -> None:
        """Restore an entry of `entries`, from the oldest to the newest."""
        _check(edge, entry.bytes_per_s)
        self._put(edge, entry)

    def get(self, source: int, target: int) -> LinkBandwidth | None:
        return self._entries.get((source, target))

    @property
    def newest_ns(self) -> Ns | None:
        """When the last entry was updated; None if there is none."""
        return next(reversed(self._entries.values())).at_ns if self._entries else None

    def entries(self) -> Iterator[tuple[Edge, LinkBandwidth]]:
        """All entries, the oldest update first."""
        return iter(self._entries.items())

    def known(self, members: Iterable[int]) -> dict[Edge, LinkBandwidth]:
        """The entries of links between these members, of any age, in the order of the edges."""
        inside = sorted(set(members))
        edges = ((source, target) for source in inside for target in inside if source != target)
        return {edge: entry for edge in edges if (entry := self._entries.get(edge)) is not None}

    def missing(self, members: Iterable[int], now: Ns, stale_ns: Ns) -> list[tuple[int, int]]:
        """The pairs (lower id first, sorted) that must be measured: a direction is unknown, a lower bound, or stale.

        A measurement covers both directions, so a pair occurs once. An entry from the future counts as stale: its time
        is of another clock.
        """
        inside = sorted(set(members))
        return [
            (a, b)
            for place, a in enumerate(inside)
            for b in inside[place + 1 :]
            if not (self._is_fresh((a, b), now, stale_ns) and self._is_fresh((b, a), now, stale_ns))
        ]

    def forget_peer(self, peer: int) -> None:
        """Remove all entries of links of a peer that has left for good."""
        self._entries = {edge: entry for edge, entry in self._entries.items() if peer not in edge}

    def _is_fresh(self, edge: Edge, now: Ns, stale_ns: Ns) -> bool:
        entry = self._entries.get(edge)
        return entry is not None and entry.delay_us is not None and 0 <= now - entry.at_ns < stale_ns

    def _put(self, edge: Edge, entry: LinkBandwidth) -> None:
        self._entries.pop(edge, None)
        if len(self._entries) >= self._most:
            del self._entries[next(iter(self._entries))]
        self._entries[edge] = entry


def _check(edge: Edge, bytes_per_s: float) -> None:
    if edge[0] == edge[1]:
        raise UsageError(f"peer {edge[0]} has no link to itself")
    if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise UsageError(f"link {_name(edge)}: {bytes_per_s} bytes a second is not a rate")


def _name(edge: Edge) -> str:
    return f"{edge[0]}->{edge[1]}"


MAX_PAIRS = 32_768


@dataclass(frozen=True, slots=True)
class PairDelay:
    """Delay and loss of one pair of peers."""

    delay_us: float
    loss: float
    at_ns: int


class DelayStore:
    """Delay and loss by pair, bounded."""

    def __init__(self, most: int = MAX_PAIRS) -> None:
        self._most = most
        self._pairs: dict[Edge, PairDelay] = {}

    def probed(self, edge: Edge, delay_us: float, loss: float, now: int) -> None:
        pair = _pair(edge)
        self._pairs.pop(pair, None)
        if len(self._pairs) >= self._most:
            del self._pairs[next(iter(self._pairs))]
        self._pairs[pair] = PairDelay(delay_us, loss, now)

    def get(self, edge: Edge) -> PairDelay | None:
        return self._pairs.get(_pair(edge))

    def pairs(self) -> dict[Edge, PairDelay]:
        """Every pair, lower id first, the oldest update first."""
        return dict(self._pairs)

    def forget_peer(self, peer: int) -> None:
        self._pairs = {pair: delay for pair, delay in self._pairs.items() if peer not in pair}


def _pair(edge: Edge) -> Edge:
    return (min(edge), max(edge))
