"""The probe graph: who probes whom.

A *prober* sends probes, a *listener* only answers them. The graph should let every node be compared with every other
(connected), and do it twice, by different ways (loops): only what is measured twice can be checked. It should load all
nodes alike, and cost no more than it has edges.

So all probers stand in a circle, in an order drawn from the seed, and everybody probes those who stand a drawn set of
distances away. Distance 1 is always in the set: that circle alone connects all probers, and whichever node fails, the
rest of it still hangs together. As all use the same distances, each is probed as often as it probes. A distance and its
complement (d and p - d) would probe the same pairs from both ends, which closes loops of two and no others: complements
come last. Listeners are dealt out along the circle, each to several probers in a row.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from ringfold.errors import UsageError
from ringfold.wire.probing import Neighbour, NodeId

Edge = tuple[NodeId, NodeId]

_MASK = (1 << 64) - 1


def draw(nodes: Sequence[NodeId], listeners: Collection[NodeId], neighbours: int, seed: int) -> list[Edge]:
    """The directed edges (prober, other), sorted. Equal sets, numbers and seeds give equal edges.

    Every prober has `neighbours` out-edges, or one to each other node if there are fewer. It has more only where the
    listeners are so many that one of them would otherwise not be probed at all. All listeners are probed equally often,
    give or take one, and so are all probers. Nobody probes itself, or another one twice. Without a prober, no edges.
    """
    if neighbours < 1:
        raise UsageError(f"a node probes at least one neighbour, not {neighbours}")
    if len(set(nodes)) != len(nodes):
        raise UsageError("a node is named twice")
    chance = _Chance(seed)
    silent = set(listeners)
    circle = chance.shuffled(sorted(node for node in nodes if node not in silent))
    quiet = chance.shuffled(sorted(node for node in nodes if node in silent))
    if not circle or len(nodes) < 2:
        return []
    degree = min(neighbours, len(nodes) - 1)
    out: dict[NodeId, set[NodeId]] = {node: set() for node in circle}
    _deal(circle, quiet, degree, out)
    _chords(circle, degree, out, chance)
    _fill(circle, quiet, degree, out)
    return sorted((src, dst) for src, others in out.items() for dst in others)


def _deal(circle: list[NodeId], quiet: list[NodeId], degree: int, out: dict[NodeId, set[NodeId]]) -> None:
    """Give each listener as many probers as a node has on average, within what the circle leaves over."""
    if not quiet:
        return
    size = len(circle)
    spare = size * (degree - 1) if size > 1 else degree
    fair = round(size * degree / (size + len(quiet)))
    each = max(1, min(max(fair, 2), spare // len(quiet), size))
    place = 0
    for listener in quiet:
        for _ in range(each):
            out[circle[place % size]].add(listener)
            place += 1


def _chords(circle: list[NodeId], degree: int, out: dict[NodeId, set[NodeId]], chance: "_Chance") -> None:
    """Fill up with other probers: distance 1 for all, then drawn distances for those who have room."""
    size = len(circle)
    if size < 2:
        return
    half = size // 2
    one_way = chance.shuffled(range(2, (size + 1) // 2))
    both_ways = [half] if size % 2 == 0 and half > 1 else []
    complements = chance.shuffled(range(half + 1, size))
    distances = iter([1, *one_way, *both_ways, *complements])
    first = True
    for distance in distances:
        hungry = [place for place, node in enumerate(circle) if first or len(out[node]) < degree]
        first = False
        if not hungry:
            return
        for place in hungry:
            out[circle[place]].add(circle[(place + distance) % size])


def _fill(circle: list[NodeId], quiet: list[NodeId], degree: int, out: dict[NodeId, set[NodeId]]) -> None:
    """Who still has room has all probers among its neighbours: the rest are listeners, the least probed first."""
    probed = dict.fromkeys(quiet, 0)
    for others in out.values():
        for node in others & probed.keys():
            probed[node] += 1
    for node in circle:
        lacking = degree - len(out[node])
        if lacking <= 0:
            continue
        choice = sorted((other for other in quiet if other not in out[node]), key=lambda other: probed[other])
        for other in choice[:lacking]:
            out[node].add(other)
            probed[other] += 1


class _Chance:
    """Numbers from a seed, the same on every machine and in every version of Python (SplitMix64)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * limit) >> 64

    def shuffled(self, things: Sequence[int]) -> list[int]:
        """In an order where any is as likely as another."""
        order = list(things)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def neighbours(
    facts: Mapping[NodeId, Neighbour], edges: Iterable[tuple[NodeId, NodeId]]
) -> dict[NodeId, tuple[list[Neighbour], list[Neighbour]]]:
    """For each node whom it probes, and who probes it."""
    found: dict[NodeId, tuple[list[Neighbour], list[Neighbour]]] = {node: ([], []) for node in facts}
    for src, dst in edges:
        found[src][0].append(facts[dst])
        found[dst][1].append(facts[src])
    return found
