"""Bugs on purpose in how a run goes on after all its peers were killed; the schedules of resumes must find them all."""

from collections.abc import Mapping
from functools import partial

from msgspec import structs

from planted import Bug
from planted.runs import with_syncs
from ringfold.master.run import Group, RunningSync
from ringfold.master.syncs import Syncs
from ringfold.state.election import ElectionResult, FinishedSync
from ringfold.testing.resuming import run_resume
from ringfold.testing.simulation import Setup
from ringfold.wire.messages import Branch, Lineage, Offer, PeerId


class _MixesLineages(Syncs):
    """Any lineage that a peer brings counts as an ancestor, up to any revision."""

    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        if present is not None:
            listed = {each.lineage for offer in offers.values() for each in offer.checkpoints}
            brought = {offer.lineage.id for offer in offers.values() if offer.lineage is not None}
            newest = 0 if last is None else last.revision
            everything = [Branch(lineage, newest) for lineage in sorted(listed | brought)]
            present = structs.replace(present, ancestors=everything)
        return super()._elect(offers, last, present)


class _KeepsTheLineage(Syncs):
    """A rollback goes on in the lineage that it leaves."""

    def _lineage(self, group: Group, sync: RunningSync, brought: Lineage | None) -> Lineage:
        return group.lineage or super()._lineage(group, sync, brought)


class _TakesWhatIsLoaded(Syncs):
    """What peers could load is not looked at."""

    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        here = {peer: structs.replace(offer, checkpoints=[]) for peer, offer in offers.items()}
        return super()._elect(here, last, present)


class _HasNoAncestors(Syncs):
    """A new lineage forgets what it branched from."""

    def _lineage(self, group: Group, sync: RunningSync, brought: Lineage | None) -> Lineage:
        return super()._lineage(group, sync, None)


def _bug(text: str, setup: Setup) -> Bug:
    return Bug(text, partial(run_resume, base=setup))


BUGS: dict[str, Bug] = {
    "mixes_lineages": _bug("an abandoned branch's higher revision wins", Setup(master=with_syncs(_MixesLineages))),
    "one_lineage": _bug("a rollback begins no new lineage", Setup(master=with_syncs(_KeepsTheLineage))),
    "only_loaded": _bug("a newer checkpoint on a disk is ignored", Setup(master=with_syncs(_TakesWhatIsLoaded))),
    "no_ancestors": _bug("what a lineage branched from is forgotten", Setup(master=with_syncs(_HasNoAncestors))),
}
