"""The probe graph: which node probes which.

A *prober* sends probes, a *listener* only responds to them. The graph should connect every node with every other, and
do it twice, over different paths (loops): only what is measured twice can be checked. It should load all nodes equally,
and have few edges.

So all probers are placed on a circle, in an order drawn from the seed, and each probes the nodes at a drawn set of
distances (a circulant graph). Distance 1 is always in the set: that circle alone connects all probers, and it stays
connected whichever node fails. As all use the same distances, each is probed as often as it probes. A distance and its
complement (d and p - d) would probe the same pairs from both ends, which closes loops of two and no others: complements
come last. Listeners are distributed along the circle, each to several probers in a row.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from ringfold.errors import UsageError
from ringfold.wire.probing import Neighbour, NodeId

Edge = tuple[NodeId, NodeId]

_MASK = (1 << 64) - 1


def draw(nodes: Sequence[NodeId], listeners: Collection[NodeId], neighbours: int, seed: int) -> list[Edge]:
    """The directed edges (prober, other), sorted. Equal sets, numbers and seeds give equal edges.

    Every prober has `neighbours` out-edges, or one to each other node if there are fewer. It has more only if there are
    so many listeners that one of them would otherwise not be probed at all. The numbers of in-edges of all listeners
    differ by at most one, and so do those of all probers. No node probes itself, or another one twice. Without a
    prober, there are no edges.
    """
    if neighbours < 1:
        raise UsageError(f"a node probes at least one neighbour, not {neighbours}")
    if len(set(nodes)) != len(nodes):
        raise UsageError("a node occurs twice")
    random = _SplitMix64(seed)
    listening = set(listeners)
    circle = random.shuffled(sorted(node for node in nodes if node not in listening))
    drawn_listeners = random.shuffled(sorted(node for node in nodes if node in listening))
    if not circle or len(nodes) < 2:
        return []
    degree = min(neighbours, len(nodes) - 1)
    out: dict[NodeId, set[NodeId]] = {node: set() for node in circle}
    _add_listeners(circle, drawn_listeners, degree, out)
    _add_chords(circle, degree, out, random)
    _fill_with_listeners(circle, drawn_listeners, degree, out)
    return sorted((src, dst) for src, others in out.items() for dst in others)


def _add_listeners(circle: list[NodeId], listeners: list[NodeId], degree: int, out: dict[NodeId, set[NodeId]]) -> None:
    """Give each listener as many probers as a node has on average, as far as the circle leaves out-edges."""
    if not listeners:
        return
    size = len(circle)
    spare = size * (degree - 1) if size > 1 else degree
    fair = round(size * degree / (size + len(listeners)))
    each = max(1, min(max(fair, 2), spare // len(listeners), size))
    place = 0
    for listener in listeners:
        for _ in range(each):
            out[circle[place % size]].add(listener)
            place += 1


def _add_chords(circle: list[NodeId], degree: int, out: dict[NodeId, set[NodeId]], random: "_SplitMix64") -> None:
    """Add other probers: distance 1 for all, then drawn distances for those with fewer out-edges than `degree`."""
    size = len(circle)
    if size < 2:
        return
    half = size // 2
    one_way = random.shuffled(range(2, (size + 1) // 2))
    both_ways = [half] if size % 2 == 0 and half > 1 else []
    complements = random.shuffled(range(half + 1, size))
    distances = iter([1, *one_way, *both_ways, *complements])
    first = True
    for distance in distances:
        incomplete = [place for place, node in enumerate(circle) if first or len(out[node]) < degree]
        first = False
        if not incomplete:
            return
        for place in incomplete:
            out[circle[place]].add(circle[(place + distance) % size])


def _fill_with_listeners(
    circle: list[NodeId], listeners: list[NodeId], degree: int, out: dict[NodeId, set[NodeId]]
) -> None:
    """A node with too few out-edges probes all probers already: add listeners, the least probed first."""
    probed = dict.fromkeys(listeners, 0)
    for others in out.values():
        for node in others & probed.keys():
            probed[node] += 1
    for node in circle:
        lacking = degree - len(out[node])
        if lacking <= 0:
            continue
        choice = sorted((other for other in listeners if other not in out[node]), key=lambda other: probed[other])
        for other in choice[:lacking]:
            out[node].add(other)
            probed[other] += 1


def listed_edges(
    names: Mapping[NodeId, str], listeners: Collection[NodeId], lists: Mapping[str, Sequence[str]]
) -> list[Edge]:
    """The directed edges of given neighbour lists (by name) between these nodes, sorted.

    A name that no node has is skipped: the node may come later. Of several nodes with one name, all are meant. A node
    without a list probes nobody, and so does one that only listens. No node probes itself.
    """
    by_name: dict[str, list[NodeId]] = {}
    for node, name in names.items():
        by_name.setdefault(name, []).append(node)
    edges = {
        (src, dst)
        for src, name in names.items()
        if src not in listeners
        for other in lists.get(name, ())
        for dst in by_name.get(other, ())
        if dst != src
    }
    return sorted(edges)


class _SplitMix64:
    """Pseudo-random numbers, the same on every machine and in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, limit: int) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * limit) >> 64

    def shuffled(self, things: Sequence[int]) -> list[int]:
        """A permutation; all are equally likely."""
        order = list(things)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def neighbours(
    facts: Mapping[NodeId, Neighbour], edges: Iterable[tuple[NodeId, NodeId]]
) -> dict[NodeId, tuple[list[Neighbour], list[Neighbour]]]:
    """For each node its out-neighbours and its in-neighbours."""
    found: dict[NodeId, tuple[list[Neighbour], list[Neighbour]]] = {node: ([], []) for node in facts}
    for src, dst in edges:
        found[src][0].append(facts[dst])
        found[dst][1].append(facts[src])
    return found
