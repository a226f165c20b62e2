"""The advice of the host's transport agent, for links with several paths.

A peer registers one flow with the agent for each neighbour that it sends to over several paths: the next member of the
ring, and the previous one. The agent answers with the place of the flow's hint in shared memory, the engine reads the
hint there before each segment, and what the engine measures on each path (rates and round trips) goes back to the agent
a few times a second.

Nothing waits for the agent: `AgentClient` talks to it in a thread of its own, and everything here is cheap. All of it
happens in steps of the session, under its lock; when a place changes, the client's thread only rings the engine, and
the session's thread looks (`tick`). Without an agent flows have no place, and lanes go by what they measure. A peer
whose links have one path each starts no client at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfold.agent.client import AgentClient
from ringfold.peer.engine import Engine
from ringfold.peer.lanes import paths_between
from ringfold.wire.agent import Place
from ringfold.wire.messages import PeerId, Record

REPORT_EVERY_NS = 250_000_000

FlowPaths = tuple[tuple[str, str], ...]
"""Own and other address of each path."""
_Followed = tuple[Path, Place]


@dataclass(slots=True)
class _Flow:
    connection: int
    paths: FlowPaths
    followed: _Followed | None = None
    """Where the engine reads the advice."""


class PathShares:
    """What the agent and the engine are told of each other."""

    def __init__(
        self,
        engine: Engine,
        directories: Sequence[Path],
        name: str,
        client: Callable[..., AgentClient] = AgentClient,
    ) -> None:
        self._engine, self._directories, self._name = engine, tuple(directories), name
        self._new_client = client
        self._client: AgentClient | None = None
        self._flows: dict[PeerId, _Flow] = {}
        self._report_ns = 0

    def follow(self, wanted: Mapping[PeerId, FlowPaths]) -> None:
        """These are the neighbours, and the paths to each, from now on. The same flow as before keeps its place."""
        for peer in [peer for peer, flow in self._flows.items() if wanted.get(peer) != flow.paths]:
            self._drop(peer)
        for peer, paths in wanted.items():
            if peer in self._flows:
                continue
            if self._client is None:
                self._client = self._new_client(self._directories, self._name, self._ring)
            self._flows[peer] = _Flow(self._client.register(*paths[0], paths), paths)

    def tick(self, now_ns: int) -> None:
        """Tell the engine of places that changed, and the agent of what was measured if it is time for that."""
        client = self._client
        if client is None:
            return
        for peer, flow in self._flows.items():
            place, file = client.place(flow.connection), client.hints
            found = None if place is None or file is None else (file, place)
            if found == flow.followed:
                continue
            flow.followed = found
            if found is None:
                self._engine.forget_hints(peer)
            else:
                self._engine.follow_hints(peer, str(found[0]), *found[1])
        if now_ns >= self._report_ns:
            self._report_ns = now_ns + REPORT_EVERY_NS
            for peer, flow in self._flows.items():
                if flow.followed:
                    self._report(client, peer, flow)

    def next_ns(self) -> int | None:
        """When `tick` has something to do though nobody rings."""
        return self._report_ns if any(flow.followed for flow in self._flows.values()) else None

    def close(self) -> None:
        """Deregister everything; the client's thread has ended when this returns."""
        for peer in list(self._flows):
            self._drop(peer)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ring(self, _connection: int, _place: Place | None) -> None:
        """In the client's thread."""
        self._engine.wake()

    def _report(self, client: AgentClient, peer: PeerId, flow: _Flow) -> None:
        rates = self._engine.path_rates(peer)[: len(flow.paths)]
        smoothed, least = zip(*self._engine.path_rtts(peer)[: len(flow.paths)], strict=True)
        if any(rates) or any(smoothed):
            client.measured(flow.connection, rates, smoothed, least)

    def _drop(self, peer: PeerId) -> None:
        assert self._client is not None
        flow = self._flows.pop(peer)
        self._client.deregister(flow.connection)
        if flow.followed is not None:
            self._engine.forget_hints(peer)


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
