"""Bugs on purpose: if the simulation does not find these, its silence about the real code means nothing.

Each is a small wrong version of one production rule. Those of the master and the peer are subclasses here; those of the
engine are switches of the native core, which only the simulation can set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ringfold.master.calls import Calls
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.liveness import PatientClock
from ringfold.master.machine import Master
from ringfold.master.run import Ballot, Group, Peer
from ringfold.master.verdicts import Cause
from ringfold.peer.effects import Settle
from ringfold.peer.machine import PeerMachine
from ringfold.testing.peers import SimPeer
from ringfold.testing.scenario import run_seed
from ringfold.testing.scheduler import SimulationFailure
from ringfold.testing.simulation import Setup
from ringfold.wire.messages import Hello, PeerId, Record, SealedOp, Verdict, Vote


@dataclass(frozen=True, slots=True)
class Bug:
    """A planted bug: what is wrong, and the parts that do it wrong."""

    text: str
    setup: Setup


# Verdicts


class IgnoresASurvivor(Master):
    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        return super()._verdicts({peer: seals[peer] for peer in sorted(seals)[1:]} or seals, causes)


class CommitsUnfinished(Master):
    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        right = super()._verdicts(seals, causes)
        done = {sealed.op for ops in seals.values() for sealed in ops if sealed.state == "done"}
        return [Verdict(verdict.op, commit=True) if verdict.op in done else verdict for verdict in right]


class ForgetsPayloads(Master):
    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        right = super()._verdicts(seals, causes)
        return [Verdict(one.op, one.commit, one.registrations, None, one.reason) for one in right]


# Epochs and votes


class _Hasty(Epochs):
    def missing(self, group: Group) -> list[PeerId]:
        waiting = super().missing(group)
        change = group.change
        hasty = change is not None and change.phase == "sealing" and len(waiting) == 1 and len(change.seals) > 0
        return [] if hasty else waiting


class RecordsBeforeTheLastSeal(Master):
    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._epochs.__class__ = _Hasty


class _KeepsVotes(Calls):
    def vote(self, now: Ns, peer: Peer, vote: Vote) -> None:
        super().vote(now, peer, vote)
        kept: dict[PeerId, Ballot] = self.__dict__.setdefault("kept", {})
        for other in self._run.accepted():
            if other.ballot is None and other.id in kept:
                other.ballot = replace(kept[other.id], epoch=self._run.groups[other.group].epoch)
        if peer.ballot is not None:
            kept[peer.id] = peer.ballot


class CountsOldVotes(Master):
    """A vote of an old epoch counts again whenever somebody votes."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._calls.__class__ = _KeepsVotes


class AdmitsWithoutAVote(Master):
    def _hello(self, now: Ns, connection: object, hello: Hello) -> None:
        super()._hello(now, connection, hello)  # type: ignore[arg-type]
        group = self._run.groups[hello.group]
        newcomers = [peer for peer in self._run.registered() if peer.group == hello.group]
        if group.ring and newcomers and group.change is None:
            self._epochs.admit(now, group, newcomers)


class _Impatient(PatientClock):
    def read(self, now_ns: Ns, *, tick: bool) -> Ns:
        return now_ns


class JudgesAfterItsOwnPause(Master):
    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._clock.__class__ = _Impatient


# Peers


class _DeafMachine(PeerMachine):
    def _settle(self, record: Record) -> Settle:
        return replace(super()._settle(record), verdicts=())


class IgnoresVerdicts(SimPeer):
    machine_type = _DeafMachine


class AnswersFromHearsay(SimPeer):
    """Says who is pending by what this peer has heard so far, instead of by the op that last returned."""

    def pending_here(self) -> bool | None:
        answer = super().pending_here()
        record = self.machine.record
        return answer if answer is None or record is None else self.heard_registrations > record.registrations


def _native(name: str) -> Setup:
    return Setup(planted=name)


BUGS: dict[str, Bug] = {
    "commit_missing_done": Bug("the engine commits with one Done missing", _native("commit_missing_done")),
    "no_restore": Bug("the engine does not restore buffers on a late abort", _native("no_restore")),
    "accept_old_epoch": Bug("the engine accepts a frame of an old epoch", _native("accept_old_epoch")),
    "apply_duplicate": Bug("the engine applies a duplicate segment twice", _native("apply_duplicate")),
    "done_after_seal": Bug("the engine goes on with Done and evidence after the seal", _native("done_after_seal")),
    "ignored_survivor": Bug("a verdict that ignores a survivor", Setup(master=IgnoresASurvivor)),
    "commit_unfinished": Bug("a verdict that commits what one survivor has not done", Setup(master=CommitsUnfinished)),
    "forgotten_payloads": Bug("a record without a small op's payloads", Setup(master=ForgetsPayloads)),
    "record_before_seal": Bug("a record before the last seal is in", Setup(master=RecordsBeforeTheLastSeal)),
    "old_votes": Bug("a vote of an old epoch counts", Setup(master=CountsOldVotes)),
    "admitted_unasked": Bug("a newcomer is admitted without a vote", Setup(master=AdmitsWithoutAVote)),
    "impatient_clock": Bug("a master judges right after its own pause", Setup(master=JudgesAfterItsOwnPause)),
    "deaf_peer": Bug("a peer that ignores verdicts", Setup(peer=IgnoresVerdicts)),
    "hearsay": Bug("are_peers_pending answers by hearsay", Setup(peer=AnswersFromHearsay)),
}


def find(name: str, first: int, most: int) -> SimulationFailure | None:
    """The first failure that a planted bug leads to, in up to `most` seeds from `first` on; None if it stays hidden."""
    bug = BUGS[name]
    for seed in range(first, first + most):
        try:
            run_seed(seed, bug.setup)
        except SimulationFailure as failure:
            return failure
    return None
