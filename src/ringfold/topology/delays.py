"""What probing says about the links between peers: how long a packet takes, and how many are lost.

A probe goes there and back, so that its figures are of the pair: half a round trip, and the share of exchanges that did
not come back whole. Both directions of a link are given the same. The newest round replaces what was known.
"""

from dataclasses import dataclass

from ringfold.topology.ring import Edge

MOST_PAIRS = 32_768


@dataclass(frozen=True, slots=True)
class Delay:
    """Of one pair of peers."""

    delay_us: float
    loss: float
    at_ns: int


class DelayStore:
    """By pair, bounded; the oldest news goes first."""

    def __init__(self, most: int = MOST_PAIRS) -> None:
        self._most = most
        self._pairs: dict[Edge, Delay] = {}

    def probed(self, edge: Edge, delay_us: float, loss: float, now: int) -> None:
        pair = _pair(edge)
        self._pairs.pop(pair, None)
        if len(self._pairs) >= self._most:
            del self._pairs[next(iter(self._pairs))]
        self._pairs[pair] = Delay(delay_us, loss, now)

    def get(self, edge: Edge) -> Delay | None:
        return self._pairs.get(_pair(edge))

    def pairs(self) -> dict[Edge, Delay]:
        """Every pair, lower id first, the oldest news first."""
        return dict(self._pairs)

    def forget_peer(self, peer: int) -> None:
        self._pairs = {pair: delay for pair, delay in self._pairs.items() if peer not in pair}


def _pair(edge: Edge) -> Edge:
    return (min(edge), max(edge))
