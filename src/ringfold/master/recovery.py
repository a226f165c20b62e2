"""After a change of masters: the members return, and nothing is decided until it is known what was sent to them.

A new master knows the run from the journal (`journal.py`). Its members are *away* until they have resumed and sent what
they know; a member that has not by `return_ms` is given up. Meanwhile every group seals its newest epoch:

    Resume --> Resumed, Record N (to a member that has only N - 1), Seal N     for each member, as it connects
    all have returned --> results are forwarded, then the seals are evaluated: Record N + 1, under the new fence

*Record N again.* The old master may have died while it sent Record N. Some members have it, and may have settled the
ops of N - 1 by its verdicts; so the others must get exactly these. It was journalled before it was first sent.

*Results of calls.* The old master may have sent the result of a call to some of its voters. Results are not journalled;
but each member that acted on a result still has it, with all its voters, and sends it when it returns. This master
forwards it to the voters that lack it. If no returning member has it, no member acted on it, and the votes, cast again,
decide again. That a sync has finished is journalled before any member is notified, so there the journal decides. In the
same way members bring along how questions about pending peers were answered (`pending.py`).

No returning member listens to the old master any more, because a peer that resumes has closed its old connection first.
So when all have returned, no result of the old master, however late it wakes up, can add to what is known here.
"""

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.run import Connection, Group, Peer, Run
from ringfold.master.states import Membership
from ringfold.master.syncs import sync_done
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
EMPTY_STATE = digest_of(Offer(0, "enforce-popular", "rf64", []))
"""The digest of a state without arrays."""


class Recovery:
    """The members that a new master waits for, and what the returned ones have sent."""

    def __init__(self, run: Run, epochs: Epochs, fence: int) -> None:
        self._run = run
        self._epochs = epochs
        self._fence = fence
        self._returned: dict[PeerId, Returned] = {}
        self._installed: set[PeerId] = set()
        """Members that had their group's newest epoch before they returned, and received that it was installed."""
        self._known_epoch: dict[PeerId, int] = {}
        self._is_waiting = bool(run.away)

    def refusal(self, resume: Resume, is_member: bool) -> Evicted | None:
        """Why a peer cannot continue with this master; None if it can.

        Like every eviction this waits for a write. If the peer knows another leader, the write fails, and nothing is
        sent. If it succeeds there is no other leader: the peer is wrong, or the store was restored from a backup.
        """
        if not is_member:
            return Evicted("this master knows nothing of the run that the peer was in")
        if resume.fence > self._fence:
            known = f"a master with fence {resume.fence}"
            return Evicted(f"it knows {known}, and this one has {self._fence}, and wrote its journal last")
        away = self._run.away.get(resume.peer)
        if resume.fence == self._fence:
            return Evicted("its connection was lost, and the run has continued without it")
        if away is None or resume.peer in self._run.peers:
            return Evicted("the run has continued without it")
        group = self._run.groups[away.group]
        if resume.epoch > group.epoch:
            return Evicted(f"it knows epoch {resume.epoch}, and this master's journal ends with epoch {group.epoch}")
        return None

    def resume(self, now: Ns, connection: Connection, resume: Resume) -> Peer:
        """A member has reconnected, on this connection."""
        away = self._run.away[resume.peer]
        member = Member(resume.peer, resume.name, resume.host, resume.addresses, resume.port, resume.paths, resume.here)
        peer = Peer(resume.peer, connection.id, connection.remote, away.group, member, now, now, now)
        peer.cores, peer.threads, peer.key = resume.cores, resume.threads, connection.nonce + resume.nonce
        peer.membership = Membership.RESUMING
        self._run.peers[peer.id] = peer
        connection.peer = peer
        self._known_epoch[peer.id] = resume.epoch
        return peer

    def send_newest_epoch(self, peer: Peer) -> None:
        """Send a member the record that it missed, if it did, and the seal."""
        run, group = self._run, self._run.groups[peer.group]
        assert group.record is not None
        run.send(peer, Registrations(run.registrations))
        if self._known_epoch[peer.id] < group.epoch:
            run.send(peer, group.record)
        run.send(peer, Seal(group.epoch, "the master changed"))

    def returned(self, peer: Peer, message: Returned) -> None:
        """A member has sent what it knows: it has returned."""
        if self._run.away.pop(peer.id, None) is None:
            raise RemoteProtocolError("it sent Returned, and was not away")
        if len(message.answers) > MAX_ANSWERS:
            raise RemoteProtocolError(f"it sent {len(message.answers)} results")
        last = message.last_sync
        if last is not None and last.sync > self._run.syncs:  # the number is journalled before it is sent
            raise RemoteProtocolError(f"it was in sync {last.sync}, and there were {self._run.syncs}")
        if message.pending is not None:
            self._run.questions.learn(message.pending)
            self._run.calls = max(self._run.calls, message.pending.call)
        peer.enter(Membership.MEMBER)
        self._returned[peer.id] = message
        if message.installed and self._known_epoch[peer.id] == self._run.groups[peer.group].epoch:
            self._installed.add(peer.id)
        self._run.notify(PeerReturned(peer.id, peer.member.name))

    def tick(self, now: Ns) -> None:
        """Give up the members that have not returned in time."""
        if self._run.away and now >= self._run.return_deadline_ns:
            how = f"did not return within {format_seconds(self._run.settings.return_ms)} after the master changed"
            for peer, away in sorted(self._run.away.items()):
                known = self._run.peers.get(peer)
                if known is not None:
                    self._epochs.evict(now, known, "away", how)
                else:
                    self._epochs.give_up(now, peer, away, how)

    def settle(self, now: Ns) -> None:
        """When all have returned: forward the results that some have, and let the groups continue."""
        if not self._is_waiting or self._run.away:
            return
        self._is_waiting = False
        for peer, sent in sorted(self._returned.items()):
            if peer in self._run.peers and sent.ballot:
                self._forward_result(now, self._run.peers[peer], sent)
        self._continue_admission()
        if not self._returned and self._run.name == DEFAULT_RUN:
            self._give_up_states()
        for _, group in sorted(self._run.groups.items()):
            self._prepare_retry(group)
            if group.change is not None:
                self._epochs.all_returned(now, group, self._newcomers(group))
        self._returned.clear()

    def _give_up_states(self) -> None:
        """No member returned. The last finished sync still counts: the run continues from a checkpoint of it. If it
        cannot by itself (no arrays, several groups, a journal without lineage) newcomers start again. Its numbers
        continue, so that none is used twice. A named run keeps its state."""
        with_state = [group for group in self._run.groups.values() if group.finished is not None]
        for group in with_state:
            assert group.finished is not None
            if len(with_state) > 1 or group.lineage is None or group.finished.roots == EMPTY_STATE:
                group.finished = None

    def _forward_result(self, now: Ns, peer: Peer, sent: Returned) -> None:
        """Send a peer the result that it waits for, if a member knows it, or that its sync finished without it."""
        group, ballot = self._run.groups[peer.group], sent.ballot
        last = group.finished
        if last is not None and group.finished_ballots.get(peer.id) == ballot:
            self._run.send(peer, sync_done(group, ballot, last.revision))
            peer.mark_answered(ballot)
            return
        failure = group.finished_failures.get(peer.id)
        is_of_this = failure is not None and failure.ballot == ballot
        known = failure if is_of_this else self._known_result(peer.id, ballot)
        if known is not None:
            self._run.send(peer, structs.replace(known, ballot=ballot))
            peer.mark_answered(ballot)
        elif (
            (voters := sent.last_sync) is not None
            and voters.sync <= group.finished_sync
            and (sent.redoes or voters.ballots.get(peer.id) == ballot)
        ):
            # The others have the result, and have gone on: the old master had evicted this peer from the sync, and
            # was lost before a record said so.
            self._epochs.evict(now, peer, "away", "its sync finished without it before the master changed")

    def _known_result(self, peer: PeerId, ballot: int) -> CallDone | CallFailed | None:
        for answer in (answer for sent in self._returned.values() for answer in sent.answers):
            if answer.voters.get(peer) == ballot:
                return answer
            for failure in answer.rest if isinstance(answer, CallFailed) else ():
                if failure.voters.get(peer) == ballot:
                    return _as_seen_by(answer, failure)
        return None

    def _continue_admission(self) -> None:
        """The voters of an admission whose newcomers are members already wait only for the next epochs."""
        admission = self._run.admission
        if admission is None:
            return
        admission.ballots = {
            peer: ballot
            for peer, ballot in admission.ballots.items()
            if peer in self._run.peers
            and self._returned[peer].ballot == ballot
            and self._run.peers[peer].last_answered < ballot
        }
        if not admission.ballots:
            self._run.admission = None

    def _prepare_retry(self, group: Group) -> None:
        """A sync that was in progress is decided again among the peers that are still in it."""
        there = {peer.id: self._returned[peer.id] for peer in self._run.live(group)}
        syncs = [sent.last_sync for sent in there.values() if sent.last_sync is not None]
        newest = max(syncs, key=lambda voters: voters.sync, default=None)
        if newest is None or newest.sync <= group.finished_sync:
            return
        for peer, sent in there.items():
            # A peer that it does not name was out of it when it was decided again before.
            is_in = newest.ballots.get(peer) == sent.ballot or sent.redoes
            (group.retrying if peer in newest.ballots and is_in else group.excluded_from_retry).add(peer)

    def _newcomers(self, group: Group) -> set[PeerId]:
        """The newcomers of the newest epoch, if no member has received yet that it was installed."""
        if group.record is None or self._installed & set(group.ring):
            return set()
        return set(group.record.newcomers) & {peer.id for peer in self._run.live(group)}


def _as_seen_by(answer: CallDone | CallFailed, failure: Failure) -> CallFailed:
    """The same failed call for these voters. They may be the only ones that can send it to a later master, too."""
    assert isinstance(answer, CallFailed)
    others = [each for each in answer.rest if each is not failure]
    return CallFailed(
        answer.ballot, failure.reason, failure.voters, rest=[Failure(answer.reason, answer.voters), *others]
    )
