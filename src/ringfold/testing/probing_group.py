"""A simulated process group: what `gloo` rounds travel on, without Gloo.

There are no connections but a group of ranks: reports arrive together or not at all, and when a rank is missing at the
timeout the group is broken for everybody. Somebody (the simulation, as a launcher does) makes a new one when all ranks
are there again.
"""

from collections.abc import Sequence

from ringfold.probe.rounds.events import (
    MS,
    Commanded,
    Connected,
    Disconnected,
    FromRoundMaster,
    Heard,
    NodeCame,
    Reported,
)
from ringfold.testing.probing_world import SimNode, World
from ringfold.wire.probing import NodeId, RoundReport

START_ASKER = -1


class GlooGroup:
    """A process group: gather and broadcast, each with a timeout. Rank 0's machine calculates."""

    def __init__(self, world: World, ranks: Sequence[SimNode]) -> None:
        self.world, self.ranks, self.is_up = world, list(ranks), True
        self._joined: dict[NodeId, RoundReport] = {}
        self._gathers = 0
        self._last_ns = 0
        world.group = self
        world.start_master()
        assert world.master is not None
        self.master = world.master
        for node in self.ranks:
            node.id = world.fresh_id(node)
        for node in self.ranks:
            node.event(Connected(node.id))
            if node.listen_only:
                self.master.listeners.add(node.id)
            self.master.event(NodeCame(node.id, node.facts(), node.listen_only, node.machine.last))
        # Only now: a graph of some of the ranks would leave the others out of a gather that waits for all.
        self.master.asked[START_ASKER] = "start"
        self.master.event(Commanded(START_ASKER, "start"))

    def join(self, node: SimNode, report: RoundReport) -> None:
        """A rank enters the gather."""
        if not self.is_up or node not in self.ranks:
            return
        if not self._joined:
            self._gathers += 1
            self.world.scheduler.after(self.world.settings.gloo_timeout_ms * MS, self._timeout, self._gathers)
        self._joined[node.id] = report
        if len(self._joined) == sum(not rank.listen_only for rank in self.ranks):
            joined, self._joined = self._joined, {}
            self._gathers += 1
            self.world.scheduler.after(self.world.way_ns(), self._gathered, joined)

    def _gathered(self, reports: dict[NodeId, RoundReport]) -> None:
        if self.is_up:
            for node, report in sorted(reports.items()):
                self.master.event(Reported(node, report, 300))

    def broadcast(self, node: NodeId, message: FromRoundMaster) -> None:
        at = max(self.world.now + self.world.way_ns(), self._last_ns + 1)
        self._last_ns = at
        self.world.scheduler.at(at, self._deliver, self.world.by_id[node], node, message)

    def _deliver(self, node: SimNode, id: NodeId, message: FromRoundMaster) -> None:
        if self.is_up and node.id == id:
            node.event(Heard(message))

    def _timeout(self, gather: int) -> None:
        if gather == self._gathers:
            self.end("a collective has timed out")

    def lost(self, node: SimNode) -> None:
        """A rank died; Gloo notices by its connection, or by the timeout of a gather that it should be in."""
        is_first = node is self.ranks[0]
        if is_first:
            self.end(f"rank 0, {node.name}, is gone")
        elif node in self.ranks and self.is_up and (node.listen_only or self.world.rng.random() < 0.5):
            self.world.scheduler.after(self.world.rng.randint(0, 50 * MS), self.end, f"{node.name} is gone")

    def end(self, reason: str) -> None:
        """The group is broken, for everybody."""
        if not self.is_up:
            return
        self.is_up = False
        self.world.note("gloo", reason)
        self.world.stop_master()
        self.world.group = None
        for node in self.ranks:
            node.event(Disconnected(reason))
