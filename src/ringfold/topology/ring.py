"""A ring that avoids bad edges.

A *ring* is a directed cyclic order of the members: each one sends to the next, and the last to the first. With one
member there is no edge; with two there are two (there and back).

The present ring is kept where possible, because every changed edge costs a connection. So the preferred order is
returned unchanged if it has no bad edge. Otherwise members are moved, one at a time, as long as each move leaves fewer
bad edges. When no move does, a depth-first search tries the members in the order of the preferred ring. The search
remembers dead ends (the set of used members, and the last one), so it visits at most n * 2^n states: it is exact for up
to EXACT_MEMBERS, and bounded by STEP_BUDGET beyond.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

Edge = tuple[int, int]

EXACT_MEMBERS = 10
"""Up to here, None is a proof that no ring exists."""
STEP_BUDGET = 100_000
"""How many steps the search takes for a larger ring before it gives up."""


def ring_order(preferred: Sequence[int], bad_edges: Set[Edge]) -> list[int] | None:
    """A ring over `preferred` without bad edges, close to the given order and with the same first member.

    None if none exists, or, with more than EXACT_MEMBERS, if none was found within the budget.
    """
    ring = list(preferred)
    if not _bad_count(ring, bad_edges):
        return ring
    repaired = _move_members(ring, bad_edges)
    if not _bad_count(repaired, bad_edges):
        start = repaired.index(ring[0])
        return repaired[start:] + repaired[:start]
    return _search(ring, bad_edges)


def with_newcomers(ring: Sequence[int], newcomers: Iterable[int], hosts: Mapping[int, str]) -> list[int]:
    """The ring with these members, each after the last one of its host: most links then stay inside of hosts."""
    joined = list(ring)
    for newcomer in newcomers:
        local = [at for at, member in enumerate(joined) if hosts[member] == hosts[newcomer]]
        joined.insert(local[-1] + 1 if local else len(joined), newcomer)
    return joined


def by_hosts(ring: Sequence[int], hosts: Mapping[int, str]) -> tuple[list[int], int]:
    """The ring, begun where a host begins, and the number of hosts, if all have as many members, side by side.

    1 instead, and the ring as it is, if that is not so, or if it means nothing: one host, or one member on each.
    """
    starts = [at for at, member in enumerate(ring) if hosts[member] != hosts[ring[at - 1]]]
    count = len({hosts[member] for member in ring})
    if count < 2 or len(starts) != count or len(ring) == count or len(ring) % count:
        return list(ring), 1
    begun = [*ring[starts[0] :], *ring[: starts[0]]]
    size = len(ring) // count
    even = all(len({hosts[member] for member in begun[at : at + size]}) == 1 for at in range(0, len(ring), size))
    return (begun, count) if even else (list(ring), 1)


def edges_of(ring: Sequence[int]) -> list[Edge]:
    """The directed edges of a ring, edge i from member i to the next one. A ring of one has none."""
    if len(ring) < 2:
        return []
    return [(source, ring[(i + 1) % len(ring)]) for i, source in enumerate(ring)]


def _bad_count(ring: Sequence[int], bad_edges: Set[Edge]) -> int:
    return sum(edge in bad_edges for edge in edges_of(ring))


def _move_members(ring: list[int], bad_edges: Set[Edge]) -> list[int]:
    """Take the first move of one member that leaves fewer bad edges, until there is none."""
    count = _bad_count(ring, bad_edges)
    while count:
        better = _first_better_move(ring, bad_edges, count)
        if better is None:
            break
        ring = better
        count = _bad_count(ring, bad_edges)
    return ring


def _first_better_move(ring: list[int], bad_edges: Set[Edge], count: int) -> list[int] | None:
    ends = {end for edge in edges_of(ring) if edge in bad_edges for end in edge}
    for member in (each for each in reversed(ring) if each in ends):
        rest = [other for other in ring if other != member]
        for place in range(1, len(ring)):
            moved = [*rest[:place], member, *rest[place:]]
            if _bad_count(moved, bad_edges) < count:
                return moved
    return None


def _search(ring: list[int], bad_edges: Set[Edge]) -> list[int] | None:
    """Depth-first: extend a path from the first member by the next one in the preferred ring."""
    size = len(ring)
    budget = STEP_BUDGET if size > EXACT_MEMBERS else size * size << size
    all_members = (1 << size) - 1
    dead: set[tuple[int, int]] = set()
    path, used = [0], 1
    choices = [iter(range(1, size))]
    while path and budget:
        budget -= 1
        here = path[-1]
        if used == all_members and (ring[here], ring[0]) not in bad_edges:
            return [ring[place] for place in path]
        step = next(choices[-1], None)
        if step is None:
            dead.add((used, here))
            used &= ~(1 << here)
            path.pop()
            choices.pop()
            continue
        there = (here + step) % size
        grown = used | 1 << there
        if grown == used or (ring[here], ring[there]) in bad_edges or (grown, there) in dead:
            continue
        path.append(there)
        choices.append(iter(range(1, size)))
        used = grown
    return None
