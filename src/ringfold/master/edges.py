"""What a group knows about its edges: which could not be dialled, which broke, and which to avoid.

If an edge cannot be connected, its other end dials it in the next proposal; after both ends have failed, the edge is
*bad*. An edge is also bad if it breaks LOSSES times within LOSS_WINDOW_NS, or if no bytes move over it although both
ends are alive. A bad edge is avoided in both directions, for a while, or until one of its ends is gone.
"""

from collections.abc import Collection, Iterable

from ringfold.master.events import Ns
from ringfold.topology.ring import Edge
from ringfold.wire.messages import PeerId

LOSSES = 3
LOSS_WINDOW_NS = 10 * 1_000_000_000


class EdgeHistory:
    """By peer ids, which are never used again: a peer that joins again has a new one."""

    def __init__(self, bad_for_ns: Ns) -> None:
        self._bad_for_ns = bad_for_ns
        self._failed_dialers: dict[Edge, set[PeerId]] = {}
        self._losses: dict[Edge, list[Ns]] = {}
        self._bad: dict[Edge, Ns] = {}

    def dialer(self, source: PeerId, target: PeerId) -> PeerId:
        """Which end dials the lanes of this edge: its source, unless only the source has failed to."""
        return target if self._failed_dialers.get((source, target)) == {source} else source

    def dial_failed(self, now: Ns, source: PeerId, target: PeerId, dialer: PeerId) -> bool:
        """The proposal's dialer could not connect the edge. True if the edge is bad now: both ends have tried."""
        tried = self._failed_dialers.setdefault((source, target), set())
        tried.add(dialer)
        return len(tried) == 2 and self.mark_bad(now, source, target)

    def lost(self, now: Ns, source: PeerId, target: PeerId) -> bool:
        """The edge broke after it was connected. True if it is bad now: it broke too often."""
        pair = _pair(source, target)
        recent = [at for at in self._losses.get(pair, []) if now - at < LOSS_WINDOW_NS]
        self._losses[pair] = [*recent, now]
        return len(recent) + 1 >= LOSSES and self.mark_bad(now, source, target)

    def mark_bad(self, now: Ns, source: PeerId, target: PeerId) -> bool:
        """Avoid the edge from now on. False if it is avoided already."""
        pair = _pair(source, target)
        fresh = pair not in self._bad
        self._bad[pair] = now
        return fresh

    def bad(self) -> set[Edge]:
        """All bad edges, in both directions."""
        return {edge for a, b in self._bad for edge in ((a, b), (b, a))}

    def bad_pairs(self) -> list[Edge]:
        return sorted(self._bad)

    def worst(self, members: Collection[PeerId], blame: dict[PeerId, int] | None = None) -> PeerId:
        """The member to evict: most bad edges to the others, then most `blame`, then the highest id."""
        count = dict.fromkeys(members, 0)
        for a, b in self._bad:
            if a in count and b in count:
                count[a] += 1
                count[b] += 1
        return max(members, key=lambda peer: (count[peer], (blame or {}).get(peer, 0), peer))

    def expire(self, now: Ns) -> None:
        """Forget bad edges that are old enough to be tried again, from either end."""
        for a, b in [pair for pair, since in self._bad.items() if now - since >= self._bad_for_ns]:
            self._forget([(a, b), (b, a)])

    def forget_peer(self, peer: PeerId) -> None:
        known = {*self._failed_dialers, *self._losses, *self._bad}
        self._forget(edge for edge in known if peer in edge)

    def _forget(self, edges: Iterable[Edge]) -> None:
        for edge in edges:
            self._failed_dialers.pop(edge, None)
            self._losses.pop(edge, None)
            self._bad.pop(edge, None)


def _pair(a: PeerId, b: PeerId) -> Edge:
    return (a, b) if a < b else (b, a)
