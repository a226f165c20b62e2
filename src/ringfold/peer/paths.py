"""Which lanes a link has, and which way each of them takes. Pure.

A peer that names several addresses as paths says: these are interfaces of mine, each on a network of its own. Path i
leads from address i of one end to address i of the other, so every host lists its addresses in the same order. Where
one end has fewer, its addresses serve several paths in turn. A link has `lanes` lanes per path; lane k is on path
k modulo the number of paths.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ringfold.wire.messages import Member, PeerId, Record

Link = tuple[bool, PeerId]
"""outgoing, neighbour"""
LaneKey = tuple[bool, PeerId, int]
"""outgoing, neighbour, number"""
FlowPaths = tuple[tuple[str, str], ...]
"""Own and other address of each path."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach the other end of a lane: the addresses to try, and where to come from ("": from anywhere)."""

    path: int
    paths: int
    targets: tuple[str, ...]
    port: int
    source: str = ""


def paths_between(one: Member, other: Member) -> int:
    return max(one.paths, other.paths)


def flows_of(record: Record, me: PeerId) -> dict[PeerId, FlowPaths]:
    """The neighbours that `me` sends to in this ring, with the paths to each; nobody where there is only one path.

    Payload goes to the next member, and what is said back (Ready, Dones, small ops) to the previous one: behind a full
    queue that is as late as payload. In a ring of two both are the same neighbour, and one flow.
    """
    ring = record.members
    if len(ring) < 2:
        return {}
    rank = next(rank for rank, member in enumerate(ring) if member.peer == me)
    here, flows = ring[rank], {}
    for there in (ring[(rank + 1) % len(ring)], ring[rank - 1]):
        paths = paths_between(here, there)
        if paths > 1:
            ends = ((here.addresses[path % here.paths], there.addresses[path % there.paths]) for path in range(paths))
            flows[there.peer] = tuple(ends)
    return flows


def needed_lanes(record: Record, me: PeerId) -> Iterator[tuple[LaneKey, bool]]:
    """Each lane that `me` has in the ring of `record`, and whether it dials it."""
    ring = record.members
    if len(ring) < 2:
        return
    rank = next(rank for rank, member in enumerate(ring) if member.peer == me)
    before, after = rank - 1, (rank + 1) % len(ring)
    for number in range(record.lanes * paths_between(ring[rank], ring[after])):
        yield (True, ring[after].peer, number), record.dialers[rank] == me
    for number in range(record.lanes * paths_between(ring[rank], ring[before])):
        yield (False, ring[before].peer, number), record.dialers[before] == me


def way_of(record: Record, me: PeerId, lane: LaneKey) -> Way:
    """The way of a lane from here. On a link with one path, lane i begins at the neighbour's address i."""
    here = next(member for member in record.members if member.peer == me)
    there = next(member for member in record.members if member.peer == lane[1])
    paths = paths_between(here, there)
    if paths == 1:
        first = lane[2] % max(1, len(there.addresses))
        return Way(0, 1, (*there.addresses[first:], *there.addresses[:first]), there.port)
    path = lane[2] % paths
    target, source = there.addresses[path % there.paths], here.addresses[path % here.paths]
    return Way(path, paths, (target,), there.port, source if here.paths > 1 else "")
