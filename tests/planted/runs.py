"""Planted bugs of collectives, epochs and syncs.

Those of the master and the peer are subclasses here; those of the engine are switches of the native core.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from planted import Bug
from ringfold.master.calls import Calls
from ringfold.master.disputes import Disputes, Ruling, judge
from ringfold.master.effects import Effect as MasterEffect
from ringfold.master.effects import SendMessage
from ringfold.master.epochs import Epochs
from ringfold.master.events import Event as MasterEvent
from ringfold.master.events import Ns
from ringfold.master.liveness import StallCompensatedClock
from ringfold.master.machine import Master
from ringfold.master.pending import PendingQuestions
from ringfold.master.run import Ballot, Dispute, Group, Peer
from ringfold.master.states import EpochPhase
from ringfold.master.syncs import Syncs
from ringfold.master.topology import FOUND_BY_SEARCH as FOUND
from ringfold.master.verdicts import Cause
from ringfold.peer.effects import CloseConn, Effect, RefuseCalls, Settle
from ringfold.peer.events import BlocksReceived, BlocksWritten, Event
from ringfold.peer.machine import PeerMachine
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.peer.sync.syncing import Syncing
from ringfold.state.election import ElectionResult, FinishedSync
from ringfold.state.fetch import Fetch
from ringfold.state.manifest import StateManifest
from ringfold.testing.blocking import SimRun
from ringfold.testing.peers import SimPeer
from ringfold.testing.scenario import draw, run_seed
from ringfold.testing.simulation import Setup
from ringfold.testing.workloads import Training
from ringfold.wire.messages import (
    Hello,
    Lineage,
    Offer,
    PeerId,
    PendingQuestion,
    Record,
    SealedOp,
    SyncPlan,
    Verdict,
    Vote,
)


def is_stateful(seed: int) -> bool:
    return not isinstance(draw(seed).work, Training)


def is_stateless(seed: int) -> bool:
    return isinstance(draw(seed).work, Training)


def _bug(text: str, setup: Setup, *, needs_state: bool = False) -> Bug:
    """Whether programs with shared state are needed to find it; else those without find it sooner."""
    return Bug(text, partial(run_seed, base=setup), is_stateful if needs_state else is_stateless)


# Verdicts


class IgnoresASurvivor(Master):
    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        return super()._verdicts({peer: seals[peer] for peer in sorted(seals)[1:]} or seals, causes)


class CommitsUnfinished(Master):
    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        right = super()._verdicts(seals, causes)
        done = {sealed.op for ops in seals.values() for sealed in ops if sealed.state == "done"}
        return [structs.replace(verdict, commit=True) if verdict.op in done else verdict for verdict in right]


class ForgetsPayloads(Master):
    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        right = super()._verdicts(seals, causes)
        return [structs.replace(one, payloads=None) for one in right]


# Epochs and votes


class _Hasty(Epochs):
    def missing(self, group: Group) -> list[PeerId]:
        waiting = super().missing(group)
        change = group.change
        hasty = change is not None and group.phase is EpochPhase.SEALING and len(waiting) == 1 and len(change.seals) > 0
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
    """A vote of an old epoch counts again whenever a peer votes."""

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


class _Impatient(StallCompensatedClock):
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
    """Answers `are_peers_pending` from what this peer has received so far, instead of from the last op."""

    def pending_here(self) -> bool | None:
        answer = super().pending_here()
        record = self.machine.record
        return answer if answer is None or record is None else self.received_registrations > record.registrations


# Shared state


class _StrangersVote(Syncs):
    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        return super()._elect(offers, last and replace(last, participants=frozenset(offers)), present)


class _TornVotes(Syncs):
    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        whole = {peer: structs.replace(offer, torn=False) for peer, offer in offers.items()}
        return super()._elect(whole, last, present)


class _AnyRevision(Syncs):
    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        stepped = {peer: structs.replace(offer, stepped=True) for peer, offer in offers.items()}
        return super()._elect(stepped, last, present)


class _GoesBack(Syncs):
    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        return super()._elect(offers, None, None)


class _DoneTooEarly(Syncs):
    def settle(self, now: Ns) -> bool:
        for group in self._run.groups.values():
            if group.sync is not None and len(group.sync.unfinished) == 1:
                group.sync.unfinished.clear()
        return super().settle(now)


def with_syncs(syncs: type[Syncs]) -> type[Master]:
    class Wrong(Master):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            self._syncs.__class__ = syncs

    return Wrong


class _TakesAnything(Syncing):
    def received(self, now_ns: int, event: BlocksReceived) -> list[Effect]:
        return super().received(now_ns, replace(event, bad=()))


class _ForgetsItsDebtors(Syncing):
    def _lose(self, now_ns: int, sync: object, peer: PeerId, reason: str) -> list[Effect]:
        return []


class _Lazy(Fetch):
    def _list_known(self, key: object, hashes: bytes) -> list[int]:
        same = super()._list_known(key, hashes)  # type: ignore[arg-type]
        for block in sorted(self._pool.free)[:1]:
            self._pool._free.discard(block)
            self._missing -= 1
        return same


class _KeepsAnOldBlock(Syncing):
    def begin(self, now_ns: int, me: PeerId, plan: SyncPlan, manifest: StateManifest) -> list[Effect]:
        effects = super().begin(now_ns, me, plan, manifest)
        if self._sync is not None and self._sync.fetch is not None:
            self._sync.fetch.__class__ = _Lazy
        return effects


class _NeverTorn(Syncing):
    def written(self, now_ns: int, event: BlocksWritten) -> list[Effect]:
        effects = super().written(now_ns, event)
        self.written_to = None
        return effects


class _WritesOn(Syncing):
    def end(self, reason: str) -> list[Effect]:
        return [effect for effect in super().end(reason) if not isinstance(effect, CloseConn)]


def _with_syncing(syncing: type[Syncing]) -> type[SimPeer]:
    class Machine(PeerMachine):
        def __init__(self, identity: Identity, timings: PeerTimings) -> None:
            super().__init__(identity, timings)
            self._syncing.__class__ = syncing

    class Wrong(SimPeer):
        machine_type = Machine

    return Wrong


class _Gossip(SimRun):
    def are_peers_pending(self) -> bool:
        right = super().are_peers_pending()
        received, record = self._peer.received_registrations, self._session.machine.record
        return right if self.group_size < 2 or record is None else received > record.registrations


class StepsByHearsay(SimPeer):
    run_type = _Gossip


def _native(name: str) -> Setup:
    return Setup(planted=name)


def _of_state(text: str, *, master: type[Syncs] | None = None, peer: type[Syncing] | None = None) -> Bug:
    if master is not None:
        return _bug(text, Setup(master=with_syncs(master)), needs_state=True)
    assert peer is not None
    return _bug(text, Setup(peer=_with_syncing(peer)), needs_state=True)


class _AgainstTheMost(Disputes):
    def _judge(self, group: Group, dispute: Dispute) -> Ruling | None:
        right = super()._judge(group, dispute)
        if right is None:
            return None
        wrong = next(call for call in dispute.calls.values() if call != right.right)
        return Ruling(wrong, sorted(peer for peer, call in dispute.calls.items() if call != wrong), "planted")


class _NewcomersDecide(Disputes):
    def _judge(self, group: Group, dispute: Dispute) -> Ruling | None:
        return judge(dispute.calls, dispute.calls, ())


class _RingForSome(Master):
    def step(self, now: Ns, event: MasterEvent) -> list[MasterEffect]:
        effects = super().step(now, event)
        found = [place for place, each in enumerate(effects) if _is_found_ring(each)]
        for place in found[-1:]:
            sent = effects[place]
            assert isinstance(sent, SendMessage)
            assert isinstance(sent.message, Record)
            members, dialers = sent.message.members[::-1], sent.message.dialers[::-1]
            wrong = structs.replace(sent.message, members=members, dialers=[*dialers[1:], *dialers[:1]])
            effects[place] = structs.replace(sent, message=wrong)
        return effects


def _is_found_ring(effect: MasterEffect) -> bool:
    return isinstance(effect, SendMessage) and isinstance(effect.message, Record) and FOUND in effect.message.reason


class _ForgetsAnswers(PendingQuestions):
    def answer(self, question: PendingQuestion, last_call: int, is_pending: bool) -> bool:
        return is_pending


class _AnswersAnew(Master):
    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - whatever a master is given
        super().__init__(*given, **named)
        self._run.questions = _ForgetsAnswers()


def _with_disputes(disputes: type[Disputes]) -> type[Master]:
    class Wrong(Master):
        def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - whatever a master is given
            super().__init__(*given, **named)
            self._disputes.__class__ = disputes

    return Wrong


class _ForgetsRefusals(PeerMachine):
    def step(self, now_ns: int, event: Event) -> list[Effect]:
        return [effect for effect in super().step(now_ns, event) if not isinstance(effect, RefuseCalls)]


class ForgetsRefusals(SimPeer):
    machine_type = _ForgetsRefusals


BUGS: dict[str, Bug] = {
    "against_the_most": _bug("a dispute evicts the most", Setup(master=_with_disputes(_AgainstTheMost))),
    "newcomers_decide": _bug("newcomers decide a dispute", Setup(master=_with_disputes(_NewcomersDecide))),
    "forgotten_refusals": _bug("a call that was refused is made late", Setup(peer=ForgetsRefusals)),
    "commit_missing_done": _bug("the engine commits with one Done missing", _native("commit_missing_done")),
    "no_restore": _bug("the engine does not restore buffers on a late abort", _native("no_restore")),
    "accept_old_epoch": _bug("the engine accepts a frame of an old epoch", _native("accept_old_epoch")),
    "apply_duplicate": _bug("the engine applies a duplicate segment twice", _native("apply_duplicate")),
    "done_after_seal": _bug("the engine goes on with Done and evidence after the seal", _native("done_after_seal")),
    "forget_lane": _bug("what was on a lost lane is not sent again", _native("forget_lane")),
    "tell_nobody": _bug("a lane leaves a segment to others and does not make them look", _native("tell_nobody")),
    "apply_finished": _bug("the engine applies a frame of a finished sequence", _native("apply_finished")),
    "divide_by_size": _bug("an average is over the ring, not over those that contributed", _native("divide_by_size")),
    "early_unlimited": _bug("early segments are counted for each op, and not together", _native("early_unlimited")),
    "ignored_survivor": _bug("a verdict that ignores a survivor", Setup(master=IgnoresASurvivor)),
    "commit_unfinished": _bug("a verdict that commits what one survivor has not done", Setup(master=CommitsUnfinished)),
    "forgotten_payloads": _bug("a record without a small op's payloads", Setup(master=ForgetsPayloads)),
    "record_before_seal": _bug("a record before the last seal is in", Setup(master=RecordsBeforeTheLastSeal)),
    "old_votes": _bug("a vote of an old epoch counts", Setup(master=CountsOldVotes)),
    "admitted_unasked": _bug("a newcomer is admitted without a vote", Setup(master=AdmitsWithoutAVote)),
    "impatient_clock": _bug("a master judges right after its own pause", Setup(master=JudgesAfterItsOwnPause)),
    "deaf_peer": _bug("a peer that ignores verdicts", Setup(peer=IgnoresVerdicts)),
    "hearsay": _bug("are_peers_pending answers by what this peer has received", Setup(peer=AnswersFromHearsay)),
    "forgotten_answers": _bug("each peer gets the newest answer about who is pending", Setup(master=_AnswersAnew)),
    "ring_for_some": _bug("a ring that was found is not the same for all", Setup(master=_RingForSome)),
    "strangers_vote": _of_state("a newcomer's state may win a sync", master=_StrangersVote),
    "torn_votes": _of_state("a torn state may win a sync", master=_TornVotes),
    "any_revision": _of_state("a revision that jumped may win a sync", master=_AnyRevision),
    "goes_back": _of_state("an election that forgets what was finished", master=_GoesBack),
    "done_too_early": _of_state("a sync ends before the last one has it all", master=_DoneTooEarly),
    "takes_anything": _of_state("a receiver takes a corrupt block", peer=_TakesAnything),
    "forgotten_blocks": _of_state("a lost holder's blocks are forgotten", peer=_ForgetsItsDebtors),
    "old_block": _of_state("a receiver keeps an old block", peer=_KeepsAnOldBlock),
    "never_torn": _of_state("a state that is half-written is not marked as torn", peer=_NeverTorn),
    "steps_by_hearsay": _bug(
        "a step loop goes by what this peer has received", Setup(peer=StepsByHearsay), needs_state=True
    ),
    "writes_on": _of_state("a receiver goes on after its sync has ended", peer=_WritesOn),
}
