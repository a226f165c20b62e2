"""The path shares of the host's agent, for links with several paths.

A peer registers one flow with the agent for each neighbour that it sends to over several paths: the next member of the
ring, and the previous one. The agent responds with the place of the flow's hint in shared memory. The engine reads the
hint there before each segment. The rates and RTTs that the engine measures on each path are reported to the agent a few
times a second.

Nothing waits for the agent: `AgentClient` communicates with it in a thread of its own, and every call here is cheap.
All of them happen in steps of the session, under its lock. When a place changes, the client's thread only wakes the
engine, and the session's thread reads the change (`tick`). Without an agent flows have no place, and lanes pull
segments as fast as they can send. A peer whose links have one path each starts no client at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from ringfold.agent.client import AgentClient
from ringfold.peer.engine import Engine
from ringfold.peer.lanes import paths_between
from ringfold.wire.agent import Place
from ringfold.wire.messages import PeerId, Record

REPORT_EVERY_NS = 250_000_000
MIN_CHANGE = 0.1
"""Of a share: less is no news."""

FlowPaths = tuple[tuple[str, str], ...]
"""Own and other address of each path."""
Hosts = tuple[str, str]
"""The names of the own and of the other host."""
_Followed = tuple[Path, Place]


@dataclass(slots=True)
class _Flow:
    connection: int
    paths: FlowPaths
    followed: _Followed | None = None
    """Where the engine reads the hint."""
    shares: tuple[float, ...] = ()
    """The measured ones that were reported last."""


class PathShares:
    """Connects the agent's hints with the engine, and the engine's measurements with the agent."""

    def __init__(
        self,
        engine: Engine,
        directories: Sequence[Path],
        name: str,
        client: Callable[..., AgentClient] = AgentClient,
        on_shares: Callable[[PeerId, tuple[float, ...]], None] | None = None,
    ) -> None:
        """`on_shares` is called when the paths to a neighbour carry other shares of the bytes than before."""
        self._engine = engine
        self._directories = tuple(directories)
        self._name = name
        self._new_client = client
        self._client: AgentClient | None = None
        self._flows: dict[PeerId, _Flow] = {}
        self._next_report_ns = 0
        self._on_shares = on_shares

    def follow(self, wanted: Mapping[PeerId, FlowPaths], hosts: Mapping[PeerId, Hosts] | None = None) -> None:
        """Set the neighbours, and the paths to each. A flow that stays the same keeps its place.

        `hosts` has the names of both hosts, for each neighbour: `agent status` shows them.
        """
        for peer in [peer for peer, flow in self._flows.items() if wanted.get(peer) != flow.paths]:
            self._drop(peer)
        for peer, paths in wanted.items():
            if peer in self._flows:
                continue
            if self._client is None:
                self._client = self._new_client(self._directories, self._name, self._wake)
            here, there = (hosts or {}).get(peer, ("", ""))
            connection = self._client.register(*paths[0], paths, source_host=here, destination_host=there)
            self._flows[peer] = _Flow(connection, paths)

    def tick(self, now_ns: int) -> None:
        """Pass changed places to the engine, and measurements to the agent when they are due."""
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
        if now_ns >= self._next_report_ns:
            self._next_report_ns = now_ns + REPORT_EVERY_NS
            for peer, flow in self._flows.items():
                if flow.followed:
                    self._report(client, peer, flow)

    def next_deadline_ns(self) -> int | None:
        """When the next report is due."""
        return self._next_report_ns if any(flow.followed for flow in self._flows.values()) else None

    def close(self) -> None:
        """Deregister everything; the client's thread has ended when this returns."""
        for peer in list(self._flows):
            self._drop(peer)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _wake(self, _connection: int, _place: Place | None) -> None:
        """Called in the client's thread."""
        self._engine.wake()

    def _report(self, client: AgentClient, peer: PeerId, flow: _Flow) -> None:
        rates = self._engine.path_rates(peer)[: len(flow.paths)]
        smoothed, least = zip(*self._engine.path_rtts(peer)[: len(flow.paths)], strict=True)
        if any(rates) or any(smoothed):
            client.measured(flow.connection, rates, smoothed, least)
        if (total := sum(rates)) and self._on_shares is not None:
            shares = tuple(rate / total for rate in rates)
            if max(abs(new - old) for new, old in zip_longest(shares, flow.shares, fillvalue=0.0)) > MIN_CHANGE:
                flow.shares = shares
                self._on_shares(peer, shares)

    def _drop(self, peer: PeerId) -> None:
        assert self._client is not None
        flow = self._flows.pop(peer)
        self._client.deregister(flow.connection)
        if flow.followed is not None:
            self._engine.forget_hints(peer)


def flows_of(record: Record, me: PeerId) -> dict[PeerId, FlowPaths]:
    """The neighbours that `me` sends to over several paths in this ring, with the paths to each.

    Payload goes to the next member, and control frames (Ready, Done, small ops) to the previous one: behind a full
    queue they are as late as payload. In a ring of two both are the same neighbour, and one flow.
    """
    ring = record.members
    if len(ring) < 2:
        return {}
    rank = next(rank for rank, member in enumerate(ring) if member.peer == me)
    here = ring[rank]
    flows = {}
    for there in (ring[(rank + 1) % len(ring)], ring[rank - 1]):
        paths = paths_between(here, there)
        if paths > 1:
            ends = ((here.addresses[path % here.paths], there.addresses[path % there.paths]) for path in range(paths))
            flows[there.peer] = tuple(ends)
    return flows


def hosts_of(record: Record, me: PeerId) -> dict[PeerId, Hosts]:
    """The names of this host and of each other member's, as the members gave them when they joined."""
    names = {member.peer: member.host for member in record.members}
    return {peer: (names[me], host) for peer, host in names.items() if peer != me}
