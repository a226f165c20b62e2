"""After a change of masters: the members come back, and nothing is decided until it is known what they were told.

A new master knows the run from the journal (`journal.py`). Its members are *away* until they have resumed and said what
they bring along; whoever has not by `return_ms` is given up. Meanwhile every group is sealing its newest epoch:

    Resume --> Resumed, Record N (to one that has only N - 1), Seal N          for each member, as it comes
    all back --> answers are handed on, then the seals are judged: Record N + 1, under the new fence

*Record N again.* The old master may have died while it sent Record N. Some members have it, and may have settled the
ops of N - 1 by its verdicts; so the others must get exactly these. It was journalled before it was first sent.

*Answers.* The old master may have answered a call to some of its voters. Nothing of that is journalled; but whoever
acted on the answer still has it, with the names of all its voters, and shows it when it comes back. The voters that
lack it get it from here. If nobody who came back has it, nobody acted on it, and the votes that are cast again decide
anew. That a sync has finished is journalled before anybody is told, so there the journal is the witness.

Nobody who came back hears the old master any more, because a peer that resumes has closed its old connection first. So
when all are back no answer of the old master, however late it wakes up, can add to what is known here.
"""

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.run import Connection, Group, Peer, Run, Standing
from ringfold.master.syncs import done_of
from ringfold.state.manifest import digest_of
from ringfold.wire.diagnostics import format_seconds
from ringfold.wire.messages import (
    CallDone,
    CallFailed,
    Evicted,
    Failure,
    Member,
    Offer,
    PeerId,
    Registrations,
    Resume,
    Returned,
    Seal,
)
from ringfold.wire.notices import PeerReturned

MAX_ANSWERS = 16
NOTHING = digest_of(Offer(0, "enforce-popular", "rf64", []))
"""The digest of a state without arrays."""


class Returning:
    """The members that a new master waits for, and what those who are back have brought along."""

    def __init__(self, run: Run, epochs: Epochs, fence: int) -> None:
        self._run = run
        self._epochs = epochs
        self._fence = fence
        self._back: dict[PeerId, Returned] = {}
        self._installed: set[PeerId] = set()
        """Who was in its group's newest epoch before it came back, and heard that all others were."""
        self._knew: dict[PeerId, int] = {}
        self._is_going_on = bool(run.away)

    def refusal(self, resume: Resume, is_member: bool) -> Evicted | None:
        """Why a peer cannot go on with this master; None if it can.

        Like every eviction this waits for a write. If the peer knows another leader, the write fails, and none is told.
        If it does not fail there is no other one: the peer lies, or the store was put back.
        """
        if not is_member:
            return Evicted("this master knows nothing of the run that the peer was in")
        if resume.fence > self._fence:
            known = f"a master with fence {resume.fence}"
            return Evicted(f"it knows {known}, and this one has {self._fence}, and wrote its journal last")
        away = self._run.away.get(resume.peer)
        if resume.fence == self._fence:
            return Evicted("its connection was lost, and the run has gone on without it")
        if away is None or resume.peer in self._run.peers:
            return Evicted("the run has gone on without it")
        group = self._run.groups[away.group]
        if resume.epoch > group.epoch:
            return Evicted(f"it knows epoch {resume.epoch}, and this master's journal ends with epoch {group.epoch}")
        return None

    def resume(self, now: Ns, connection: Connection, resume: Resume) -> Peer:
        """A member is here again, on this connection."""
        away = self._run.away[resume.peer]
        member = Member(resume.peer, resume.name, resume.host, resume.addresses, resume.port, resume.paths)
        peer = Peer(resume.peer, connection.id, connection.remote, away.group, member, now, now, now)
        peer.standing = Standing.ACCEPTED
        self._run.peers[peer.id] = peer
        connection.peer = peer
        self._knew[peer.id] = resume.epoch
        return peer

    def greet(self, peer: Peer) -> None:
        """What a member hears first: the epoch that it missed, if it did, and the seal."""
        run, group = self._run, self._run.groups[peer.group]
        assert group.record is not None
        run.send(peer, Registrations(run.registrations))
        if self._knew[peer.id] < group.epoch:
            run.send(peer, group.record)
        run.send(peer, Seal(group.epoch, "the master changed"))

    def returned(self, peer: Peer, message: Returned) -> None:
        """A member has said what it brings along: it is back."""
        if self._run.away.pop(peer.id, None) is None:
            raise RemoteProtocolError("it says that it is back, and was not away")
        if len(message.answers) > MAX_ANSWERS:
            raise RemoteProtocolError(f"it brings {len(message.answers)} answers along")
        last = message.last_sync
        if last is not None and last.sync > self._run.syncs:  # the number is journalled before anybody hears of it
            raise RemoteProtocolError(f"it was in sync {last.sync}, and there were {self._run.syncs}")
        self._back[peer.id] = message
        if message.installed and self._knew[peer.id] == self._run.groups[peer.group].epoch:
            self._installed.add(peer.id)
        self._run.tell(PeerReturned(peer.id, peer.member.name))

    def tick(self, now: Ns) -> None:
        """Give up whoever has not come back in time."""
        if self._run.away and now >= self._run.return_by:
            how = f"did not come back within {format_seconds(self._run.settings.return_ms)} after the master changed"
            for peer, away in sorted(self._run.away.items()):
                known = self._run.peers.get(peer)
                if known is not None:
                    self._epochs.evict(now, known, how)
                else:
                    self._epochs.give_up(now, peer, away, how)

    def settle(self, now: Ns) -> None:
        """When all are back: hand on what some were told, and let the groups go on."""
        if not self._is_going_on or self._run.away:
            return
        self._is_going_on = False
        for peer, brought in sorted(self._back.items()):
            if peer in self._run.peers and brought.ballot:
                self._answer(self._run.peers[peer], brought)
        self._go_on_admitting()
        if not self._back and self._run.name == DEFAULT_RUN:
            self._begin_anew()
        for _, group in sorted(self._run.groups.items()):
            self._excuse(group)
            if group.change is not None:
                self._epochs.all_back(now, group, self._newcomers(group))
        self._back.clear()

    def _begin_anew(self) -> None:
        """Nobody came back. What the last sync finished still counts: the run goes on from a checkpoint of it. Where it
        cannot by itself (no arrays, several groups, a journal that names no lineage) newcomers begin again. Its
        numbers go on, so that none comes twice. A run with a name of its own stays bound by its state."""
        with_state = [group for group in self._run.groups.values() if group.finished is not None]
        for group in with_state:
            assert group.finished is not None
            if len(with_state) > 1 or group.lineage is None or group.finished.roots == NOTHING:
                group.finished = None

    def _answer(self, peer: Peer, brought: Returned) -> None:
        """Give a peer the answer that it waits for, if somebody knows it."""
        group, ballot = self._run.groups[peer.group], brought.ballot
        last = group.finished
        if last is not None and group.finished_ballots.get(peer.id) == ballot:
            self._run.send(peer, done_of(group, ballot, last.revision))
            peer.answers(ballot)
            return
        failure = group.finished_failures.get(peer.id)
        is_of_this = failure is not None and failure.ballot == ballot
        known = failure if is_of_this else self._known_answer(peer.id, ballot)
        if known is not None:
            self._run.send(peer, structs.replace(known, ballot=ballot))
            peer.answers(ballot)

    def _known_answer(self, peer: PeerId, ballot: int) -> CallDone | CallFailed | None:
        for answer in (answer for brought in self._back.values() for answer in brought.answers):
            if answer.voters.get(peer) == ballot:
                return answer
            for failure in answer.rest if isinstance(answer, CallFailed) else ():
                if failure.voters.get(peer) == ballot:
                    return _turned(answer, failure)
        return None

    def _go_on_admitting(self) -> None:
        """The voters of an admission whose newcomers are in already wait for nothing but the next epochs."""
        admission = self._run.admission
        if admission is None:
            return
        admission.ballots = {
            peer: ballot
            for peer, ballot in admission.ballots.items()
            if peer in self._run.peers and self._back[peer].ballot == ballot and self._run.peers[peer].answered < ballot
        }
        if not admission.ballots:
            self._run.admission = None

    def _excuse(self, group: Group) -> None:
        """A sync that was under way is decided anew among those who are still in it."""
        there = {peer.id: self._back[peer.id] for peer in self._run.live(group)}
        heard = [brought.last_sync for brought in there.values() if brought.last_sync is not None]
        newest = max(heard, key=lambda voters: voters.sync, default=None)
        if newest is None or newest.sync <= group.finished_sync:
            return
        for peer, brought in there.items():
            # Who is not named was out of it when it was decided anew once before.
            is_in = newest.ballots.get(peer) == brought.ballot or brought.redoes
            (group.redo if peer in newest.ballots and is_in else group.out_of_redo).add(peer)

    def _newcomers(self, group: Group) -> set[PeerId]:
        """Who is new to the newest epoch, if nobody has heard yet that it was installed."""
        if group.record is None or self._installed & set(group.ring):
            return set()
        return set(group.record.newcomers) & {peer.id for peer in self._run.live(group)}


def _turned(answer: CallDone | CallFailed, failure: Failure) -> CallFailed:
    """The same failed call as these voters see it. They, too, may be the only ones who can tell a later master."""
    assert isinstance(answer, CallFailed)
    others = [each for each in answer.rest if each is not failure]
    return CallFailed(
        answer.ballot, failure.reason, failure.voters, rest=[Failure(answer.reason, answer.voters), *others]
    )
