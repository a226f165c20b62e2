"""Bugs on purpose in relays and in the root's table of them: the simulation of regions must find every one of them."""

from functools import partial

from planted import Bug
from ringfold.probe.regions.relay import RelayMachine
from ringfold.probe.regions.root import Conn, RelayTable
from ringfold.testing.probing_regions import RegionSetup, draw_regions, run_regions
from ringfold.wire.probing import NodeId, RoundId, RoundKind, RoundReport
from ringfold.wire.regions import Link


def _bug(text: str, setup: RegionSetup, kinds: tuple[RoundKind, ...] = ("master",)) -> Bug:
    """Tried are the seeds whose kind of round has to do with it."""
    run = partial(run_regions, setup=setup)
    return Bug(text, run, lambda seed: draw_regions(seed).rounds.settings.kind in kinds)


class KeepsLinks(RelayMachine):
    """Nodes stay connected when the root is lost; the next root does not know them."""

    def _disconnect(self, reason: str) -> None:
        links, nodes = dict(self._links), dict(self._nodes)
        super()._disconnect(reason)
        self._links, self._nodes, self._out = links, nodes, []
        for node in nodes:
            self._table.add(node)


class HidesLeaving(RelayMachine):
    """The root does not learn that a node is gone."""

    def _close(self, now_ns: int, link: Link, reason: str) -> None:
        if (known := self._links.get(link)) is not None:
            self._forget(now_ns, known)


class CallsLateReportsNew(RelayMachine):
    """A late report is sent as one of the present round."""

    def _batch_of(self, report: RoundReport) -> tuple[RoundId, int]:
        round, end_sent_ns = super()._batch_of(report)
        return (self.last, end_sent_ns) if round < self.last else (round, end_sent_ns)


class HoldsLateReports(RelayMachine):
    """A report that no batch waits for is held until another batch is sent."""

    def next_deadline_ns(self) -> int | None:
        self._flush_due_ns = None
        return super().next_deadline_ns()


class KeepsNodesOfLostRelays(RelayTable):
    def remove(self, conn: Conn) -> list[NodeId]:
        super().remove(conn)
        return []


BUGS: dict[str, Bug] = {
    "keeps_links": _bug("a relay without a root keeps its nodes", RegionSetup(relay=KeepsLinks)),
    "hides_leaving": _bug("a relay does not report that a node is gone", RegionSetup(relay=HidesLeaving)),
    "late_is_new": _bug("a relay sends late reports as new ones", RegionSetup(relay=CallsLateReportsNew)),
    "holds_late": _bug("a relay holds late reports for ever", RegionSetup(relay=HoldsLateReports), ("time",)),
    "keeps_lost": _bug("the root keeps the nodes of a lost relay", RegionSetup(table=KeepsNodesOfLostRelays)),
}
