"""Bugs on purpose in how a run outlives its master: each must be found by the simulation of masters that are lost."""

from collections.abc import Iterable
from functools import partial

from msgspec import structs

from planted import Bug
from ringfold.master.effects import Effect, WriteJournal
from ringfold.master.journal import Journal, JournalPolicy, Outbox
from ringfold.master.machine import Master
from ringfold.master.recovery import Recovery
from ringfold.master.run import Peer
from ringfold.peer.effects import Effect as PeerEffect
from ringfold.peer.machine import PeerMachine
from ringfold.peer.states import PeerState
from ringfold.testing.masters import SimStore
from ringfold.testing.nodes import SimMaster
from ringfold.testing.peers import SimPeer
from ringfold.testing.scenario import run_failover
from ringfold.testing.simulation import Setup
from ringfold.wire.messages import CallDone, CallFailed, Epoch, PeerId, Returned, Seal, Sealed


class TakesEveryWrite(SimStore):
    """Takes every write, also of a leader that is deposed."""

    def write(self, run: str, expected: int, raw: bytes) -> int | None:
        return super().write(run, self.version(run), raw)


class _Hasty(Outbox):
    def put(self, effects: Iterable[Effect]) -> list[Effect]:
        given = list(effects)
        super().put([effect for effect in given if isinstance(effect, WriteJournal)])
        return [effect for effect in given if not isinstance(effect, WriteJournal)]


class SpeaksBeforeItWrites(SimMaster):
    outbox_type = _Hasty


class _KeepsRecords(Recovery):
    def send_newest_epoch(self, peer: Peer) -> None:
        self._run.send(peer, Seal(self._run.groups[peer.group].epoch, "the master changed"))


class _KeepsAnswers(Recovery):
    def _known_result(self, peer: PeerId, ballot: int) -> CallDone | CallFailed | None:
        return None


class _Impatient(Recovery):
    """Goes on when the first member of the run is back."""

    def returned(self, peer: Peer, message: object) -> None:
        super().returned(peer, message)  # type: ignore[arg-type]
        for late in list(self._run.away):
            if late not in self._run.peers:
                self._epochs.give_up(self._run.return_deadline_ns, late, self._run.away[late], "is not waited for")


class _ForgetsAdmissions(Recovery):
    def _continue_admission(self) -> None:
        self._run.admission = None


class _ForgetsAnswers(Recovery):
    def returned(self, peer: Peer, message: Returned) -> None:
        super().returned(peer, structs.replace(message, pending=None))


def _with_recovery(kind: type[Recovery]) -> Setup:
    class Wrong(Master):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            self._recovery.__class__ = kind

    return Setup(master=Wrong)


class _Forgetful(JournalPolicy):
    def journal(self) -> Journal:
        whole = super().journal()
        return structs.replace(whole, groups=[structs.replace(group, finished=None) for group in whole.groups])


class _ForgetsRevisions(Master):
    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._journal_policy.__class__ = _Forgetful


class _SealsOnce(PeerMachine):
    def _seal(self, epoch: Epoch) -> list[PeerEffect]:
        if self.state is PeerState.SEALED and self.record is not None and epoch == self.record.epoch:
            return self._send_to_master(Sealed(epoch, []))
        return super()._seal(epoch)


class SealsOnce(SimPeer):
    machine_type = _SealsOnce


def _bug(text: str, setup: Setup) -> Bug:
    return Bug(text, partial(run_failover, base=setup))


BUGS: dict[str, Bug] = {
    "no_fence": _bug("a deposed leader's writes are taken", Setup(store=TakesEveryWrite)),
    "speaks_first": _bug("a master sends what it has not written yet", Setup(shell=SpeaksBeforeItWrites)),
    "record_kept_back": _bug("a record is not sent again to a peer that lacks it", _with_recovery(_KeepsRecords)),
    "answers_kept_back": _bug("an answer is not passed on to a peer that lacks it", _with_recovery(_KeepsAnswers)),
    "not_waited_for": _bug("a new master goes on when the first member is back", _with_recovery(_Impatient)),
    "lost_answers": _bug("who was pending is forgotten with the master", _with_recovery(_ForgetsAnswers)),
    "lost_admission": _bug("an admission that was begun is forgotten", _with_recovery(_ForgetsAdmissions)),
    "lost_revision": _bug("the journal forgets what a sync finished", Setup(master=_ForgetsRevisions)),
    "seals_once": _bug("a peer that sealed before seals nothing the next time", Setup(peer=SealsOnce)),
}
