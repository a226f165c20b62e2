"""Run-wide calls: `update_topology` and `are_peers_pending`, and who is admitted when.

A call completes when every accepted peer of the run waits in it. A vote counts only in the epoch in which it was cast
(`Run.ballot`), so an epoch change voids the votes of its group without a word, and the peers cast them again.

An update that completes admits everybody who is registered. Its votes are then used up: they live on in the `Admission`
and are answered when the epochs that it caused are installed, whatever happens on the way.
"""

from collections.abc import Iterator

from msgspec import Struct

from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.liveness import MS
from ringfold.master.meeting import Caller, Clash, Working, clashing_calls, clashing_ops
from ringfold.master.run import Admission, Ballot, Peer, Run, Standing
from ringfold.master.verdicts import Cause
from ringfold.master.words import CALL, names, seconds
from ringfold.wire.events import CallRefused
from ringfold.wire.messages import CallDone, CallFailed, OpRef, PeerId, Reason, Vote, VoteKind, VoteWithdrawn


class Ready(Struct, frozen=True):
    """The call is complete."""


class Wait(Struct, frozen=True):
    """The call is not complete: why, and whom it waits for."""

    why: str
    missing: list[PeerId]


def completion(run: Run, kind: VoteKind) -> Ready | Wait:
    """Decide whether a run-wide call is complete, or say what it waits for."""
    accepted = run.accepted()
    ballots = {peer.id: ballot for peer in accepted if (ballot := run.ballot(peer)) and ballot.kind == kind}
    missing = [peer.id for peer in accepted if peer.id not in ballots]
    if missing or not accepted:
        return Wait(f"{len(missing)} of {len(accepted)} have not called it: {names(missing)}", missing)
    if kind == "pending":
        return Ready()
    changing = [group.id for group in run.groups.values() if group.change is not None]
    if changing:
        return Wait(f"the epoch of group {changing[0]} is changing", [])
    for peer in accepted:
        size = sum(other.group == peer.group for other in run.peers.values())
        if size < ballots[peer.id].min_world:
            return Wait(f"peer {peer.id} wants {ballots[peer.id].min_world} peers in its group, {size} are there", [])
    return Ready()


class Calls:
    """The votes of all peers, and the admission in progress."""

    def __init__(self, run: Run, epochs: Epochs) -> None:
        self._run = run
        self._epochs = epochs

    def vote(self, now: Ns, peer: Peer, vote: Vote) -> None:
        """A peer waits in a call. A vote that crossed with its answer, or with a newer record, is void."""
        current = self._run.is_current(peer, vote.epoch)
        admission = self._run.admission
        in_admission = admission is not None and admission.ballots.get(peer.id) == vote.ballot
        if not current or in_admission or vote.ballot <= peer.answered:
            return
        before = peer.ballot
        asked = before.asked if before is not None and before.number == vote.ballot else now
        peer.ballot = Ballot(vote.ballot, vote.kind, vote.epoch, vote.min_world, dict(vote.progress), asked, now)

    def withdraw(self, now: Ns, peer: Peer, message: VoteWithdrawn) -> None:
        """A peer's call ran out of time: tell it who was missing, unless the answer is on its way already."""
        if message.ballot <= peer.answered:
            return
        waited = max(0, message.waited_ms)
        admission = self._run.admission
        if admission is not None and admission.ballots.get(peer.id) == message.ballot:
            del admission.ballots[peer.id]
            changing = [self._run.groups[group] for group in sorted(admission.groups)]
            missing = sorted({late for group in changing for late in self._epochs.missing(group)})
            text = f"waited {seconds(waited)} in update_topology for {names(missing)} to attach"
        else:
            kind: VoteKind = peer.ballot.kind if peer.ballot is not None else "update"
            state = completion(self._run, kind)
            missing = self._absent(now, peer, kind, state) if isinstance(state, Wait) else []
            why = f"for {names(missing)}" if missing or isinstance(state, Ready) else f"because {state.why}"
            text = f"waited {seconds(waited)} in {CALL[kind]} {why}"
            peer.gave_up[kind] = now
        self._fail(peer, message.ballot, Reason("deadline", text, missing, waited))
        self._run.tell(CallRefused([peer.id], f"peer {peer.id} {text}"))

    def _absent(self, now: Ns, peer: Peer, kind: VoteKind, state: Wait) -> list[PeerId]:
        """Whom a call waited for in vain. Those who waited with it and gave up a moment earlier are not to blame."""
        since = now if peer.ballot is None else peer.ballot.asked
        missing = [late for late in state.missing if late != peer.id]
        return [late for late in missing if self._run.peers[late].gave_up.get(kind, -1) < since] or missing

    def settle(self, now: Ns) -> bool:
        """Answer a call that is complete, or admit whom the facts allow to be admitted. False if there is nothing."""
        run = self._run
        if run.admission is not None and self._is_installed(run.admission):
            self._finish(run.admission)
            return True
        if run.peers and all(peer.standing is Standing.REGISTERED for peer in run.peers.values()):
            # An empty run takes everybody at once; so does one whose members have all gone.
            self._admit(now, {})
            return True
        for kind in self._kinds():
            if isinstance(completion(run, kind), Ready):
                self._complete(now, kind)
                return True
        return False

    def _kinds(self) -> list[VoteKind]:
        return sorted({peer.ballot.kind for peer in self._run.peers.values() if peer.ballot is not None})

    def _complete(self, now: Ns, kind: VoteKind) -> None:
        voters = {peer.id: peer.ballot.number for peer in self._run.accepted() if peer.ballot is not None}
        if kind == "update" and self._run.registered():
            self._admit(now, voters)
        else:
            self._answer(voters)

    def _admit(self, now: Ns, voters: dict[PeerId, int]) -> None:
        """Let everybody in who is registered, all groups together."""
        run = self._run
        newcomers = run.registered()
        groups = {peer.group for peer in newcomers}
        for group in sorted(groups):
            self._epochs.admit(now, run.groups[group], [peer for peer in newcomers if peer.group == group])
        if voters:
            for voter in voters:
                run.peers[voter].ballot = None
            run.admission = Admission(now, voters, groups)

    def _is_installed(self, admission: Admission) -> bool:
        return all(self._run.groups[group].change is None for group in admission.groups)

    def _finish(self, admission: Admission) -> None:
        self._run.admission = None
        self._answer(admission.ballots)

    def _answer(self, voters: dict[PeerId, int]) -> None:
        pending, world = bool(self._run.registered()), self._run.world()
        for voter, ballot in sorted(voters.items()):
            peer = self._run.peers[voter]
            self._run.send(peer, CallDone(ballot, pending, world))
            peer.answers(ballot)

    def _fail(self, peer: Peer, ballot: int, reason: Reason) -> None:
        self._run.send(peer, CallFailed(ballot, reason))
        peer.answers(ballot)

    # Calls that can never meet

    def tick(self, now: Ns) -> None:
        """Refuse calls that can never meet."""
        callers = list(self._callers())
        if not callers:
            return
        patience = self._run.settings.meet_ms * MS
        for clash in clashing_ops(callers, list(self._working()), patience):
            self._refuse(now, clash)
        # Refusing ends epochs, and with them the votes that were cast in them.
        clash_of_calls = clashing_calls(now, list(self._callers()), patience)
        if clash_of_calls is not None:
            self._refuse(now, clash_of_calls)

    def _refuse(self, now: Ns, clash: Clash) -> None:
        for caller in clash.callers:
            peer = self._run.peers[caller]
            if peer.ballot is not None:
                self._fail(peer, peer.ballot.number, clash.reason)
        if clash.op is not None:
            self._epochs.begin(now, self._run.groups[clash.group], Cause(clash.reason, clash.op))
        self._run.tell(CallRefused(clash.reason.peers, clash.reason.text))

    def _callers(self) -> Iterator[Caller]:
        for peer in self._run.accepted():
            ballot = self._run.ballot(peer)
            if ballot is not None:
                yield Caller(peer.id, peer.group, ballot.kind, ballot.cast, ballot.progress)

    def _working(self) -> Iterator[Working]:
        """The ops that heartbeats name in installed epochs. An op cannot be older than the epoch it runs in."""
        for peer in self._run.accepted():
            group = self._run.groups[peer.group]
            if group.change is not None:
                continue
            for op in self._run.announced(peer):
                since = max(group.installed, peer.beat_at - op.age_ms * MS)
                yield Working(peer.id, peer.group, OpRef(op.tag, op.sequence), since, peer.beat_at)
