"""The run-wide calls of this peer: its votes, what the answers decide, and what the next master needs. Pure.

A vote counts in one epoch only. When the epoch changes while the program still waits, the vote is cast again as soon as
the new epoch is installed everywhere; the program does not notice. The master knows a ballot that it has answered, so a
vote that crosses its answer on the wire does no harm. A vote for a sync is used up by the master's plan: from then on
the call waits for the end of the sync, whatever happens to epochs.

The next step of a program depends on facts that must be the same on every member. `are_peers_pending` compares the
registrations that an op carried with those that were settled when the epoch of the op was made. Both numbers come from
records and from the answers to calls, never from what this peer happened to receive by now. A thread that has seen no
op since the last run-wide call, or a peer that is alone or in one of several groups, asks the master a numbered
question, which has the same answer for all peers.

If the master is lost, this peer sends the next one what that one cannot know: answers that other peers may not have
received, those to its questions, and the voters of the last sync.
"""

from collections import deque
from dataclasses import dataclass

from ringfold.peer.effects import CallSucceeded
from ringfold.peer.events import CallVote
from ringfold.peer.settings import MS
from ringfold.wire.messages import (
    Answer,
    CallDone,
    CallFailed,
    Epoch,
    PeerId,
    PendingAnswers,
    PendingQuestion,
    Reason,
    Record,
    Returned,
    SyncDone,
    SyncPlan,
    SyncVoters,
    Vote,
    VoteKind,
    VoteWithdrawn,
)


@dataclass(slots=True)
class _PendingCall:
    """A call that the program waits in. After its deadline it waits for the master's answer to the withdrawal."""

    call: CallVote
    called_in: Epoch
    since_ns: int
    deadline_ns: int
    cast_in: Epoch | None = None
    is_planned: bool = False
    answer_deadline_ns: int | None = None


class PendingCalls:
    """The calls that wait for the master, by ballot."""

    def __init__(self, answer_ms: int) -> None:
        self._answer_ns = answer_ms * MS
        self._waiting: dict[int, _PendingCall] = {}

    def __contains__(self, ballot: int) -> bool:
        return ballot in self._waiting

    def add(self, now_ns: int, call: CallVote, engine_epoch: Epoch, steady_epoch: Epoch | None) -> list[Vote]:
        """The program calls. The vote is cast at once if the epoch is steady."""
        assert call.ballot not in self._waiting
        since_ns = now_ns if call.called_ns is None else call.called_ns
        self._waiting[call.ballot] = _PendingCall(call, engine_epoch, since_ns, call.deadline_ns)
        return [] if steady_epoch is None else self.cast(steady_epoch)

    def cast(self, epoch: Epoch) -> list[Vote]:
        """The votes to send, now that `epoch` is installed everywhere."""
        votes = []
        for ballot, pending in sorted(self._waiting.items()):
            if pending.cast_in == epoch or pending.is_planned or pending.answer_deadline_ns is not None:
                continue
            pending.cast_in = epoch
            call = pending.call
            # Ops cannot be in flight during a call, so in an epoch that is younger than the call there were none.
            progress = list(call.progress) if pending.called_in == epoch else []
            votes.append(Vote(ballot, call.kind, epoch, call.min_world, progress, call.offer, call.question))
        return votes

    def mark_planned(self, ballot: int) -> CallVote | None:
        """The master has planned the sync of this ballot. None if the program does not wait in it any more."""
        pending = self._waiting.get(ballot)
        if pending is None:
            return None
        pending.is_planned = True
        return pending.call

    def is_waiting_in(self, kind: VoteKind) -> bool:
        """Whether the program waits in such a call, and its deadline has not passed."""
        calls = self._waiting.values()
        return any(pending.call.kind == kind and pending.answer_deadline_ns is None for pending in calls)

    def extend(self, now_ns: int, ballot: int) -> None:
        """The peers that the call waits for make progress: its timeout starts again."""
        pending = self._waiting.get(ballot)
        if pending is not None:
            timeout_ns = pending.call.deadline_ns - pending.since_ns
            pending.deadline_ns = max(pending.deadline_ns, now_ns + timeout_ns)

    def resume(self, now_ns: int, ballot: int) -> None:
        """The peers that an overdue call waited for are evicted, or busy: its timeout starts again."""
        pending = self._waiting.get(ballot)
        if pending is not None and pending.answer_deadline_ns is not None:
            pending.answer_deadline_ns = None
            self.extend(now_ns, ballot)

    def interrupt_syncs(self) -> list[int]:
        """Forget the calls whose sync was planned by a master that is gone; return their ballots.

        An overdue call stays: the new master receives its withdrawal, and answers that.
        """
        waiting = sorted(self._waiting.items())
        planned = [ballot for ballot, call in waiting if call.is_planned and call.answer_deadline_ns is None]
        for ballot in planned:
            del self._waiting[ballot]
        return planned

    def withdraw_overdue(self, now_ns: int) -> list[VoteWithdrawn]:
        """The withdrawals of overdue calls, for another master: the one that received them is gone.

        A call with a default timeout starts it again: the new master does not know which peers kept it waiting.
        """
        withdrawn = []
        for ballot, pending in sorted(self._waiting.items()):
            if pending.answer_deadline_ns is not None and not pending.call.final:
                self.resume(now_ns, ballot)
            elif pending.answer_deadline_ns is not None:
                pending.answer_deadline_ns = now_ns + self._answer_ns
                withdrawn.append(VoteWithdrawn(ballot, (now_ns - pending.since_ns) // MS))
        return withdrawn

    @property
    def ballot(self) -> int:
        """The call that the program waits in; 0 if in none."""
        return max(self._waiting, default=0)

    def finish(self, ballot: int) -> CallVote | None:
        """Forget the call; None if the program did not wait in it any more."""
        pending = self._waiting.pop(ballot, None)
        return None if pending is None else pending.call

    def give_up(self, now_ns: int, ballot: int) -> VoteWithdrawn | None:
        pending = self._waiting.pop(ballot, None)
        return None if pending is None else VoteWithdrawn(ballot, (now_ns - pending.since_ns) // MS)

    def tick(self, now_ns: int) -> tuple[list[VoteWithdrawn], list[tuple[int, Reason]]]:
        """The votes to withdraw, and the calls that fail because the master does not answer the withdrawal."""
        withdrawn: list[VoteWithdrawn] = []
        failed: list[tuple[int, Reason]] = []
        for ballot, pending in sorted(self._waiting.items()):
            waited_ms = (now_ns - pending.since_ns) // MS
            if pending.answer_deadline_ns is None:
                if now_ns >= pending.deadline_ns:
                    pending.answer_deadline_ns = now_ns + self._answer_ns
                    withdrawn.append(VoteWithdrawn(ballot, waited_ms, pending.call.final))
            elif now_ns >= pending.answer_deadline_ns:
                text = f"the call waited {waited_ms} ms, and the master did not report for which peers"
                if pending.is_planned:
                    text += ", of those that send or receive the state"
                failed.append((ballot, Reason("deadline", text, [], waited_ms)))
        for ballot, _ in failed:
            del self._waiting[ballot]
        return withdrawn, failed

    def next_deadline_ns(self) -> int | None:
        times = [
            pending.deadline_ns if pending.answer_deadline_ns is None else pending.answer_deadline_ns
            for pending in self._waiting.values()
        ]
        return min(times, default=None)


# Facts that are the same on every member

REMEMBERED_EPOCHS = 1_024


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """What `are_peers_pending` needs to know about an epoch, the same on all its members; and the members."""

    registrations: int
    groups: int
    members: tuple[PeerId, ...] = ()


class RunFacts:
    """The facts of the last epochs, and the admission that has yet to be reported to the program."""

    def __init__(self) -> None:
        self.by_epoch: dict[Epoch, EpochFacts] = {}
        self.registrations = 0
        """The number of registrations by the master's last message: it goes into the next op, and decides nothing
        here."""
        self.answers = PendingAnswers(0)
        """The answers to the questions that this peer has asked since the last run-wide call."""
        self._admission: Record | None = None  # the last record with newcomers, until an update or the join reports it

    def recorded(self, record: Record) -> None:
        self.by_epoch[record.epoch] = EpochFacts(record.registrations, record.world.groups, _members(record))
        if record.newcomers:
            self._admission = record
        if len(self.by_epoch) > REMEMBERED_EPOCHS:
            del self.by_epoch[min(self.by_epoch)]

    def joined(self, record: Record) -> Record:
        """The record that this peer joined with; `record` is the newest one.

        The epoch may have changed since; the members that voted go by the record with the newcomers, too.
        """
        admission, self._admission = self._admission, None
        first = admission or record
        self.answers = PendingAnswers(first.call)
        return first

    def answered(self, question: PendingQuestion, done: CallDone) -> CallSucceeded:
        """The master has answered a question."""
        if question.call == self.answers.call:
            self.answers = self.answers.with_answer(question.number, done.pending)
        return CallSucceeded(done.pending, done.world.groups, done.world, question.call)

    def call_failed(self) -> None:
        self._admission = None

    def call_done(self, done: CallDone, record: Record) -> CallSucceeded:
        """A call is complete. Its result must be the same on every peer that was in it.

        A newcomer has only the record to go by, so the record's `pending` is the result of the call that admitted it.
        A newcomer does not receive the number of groups at the end of the call either, and a group may have ended since
        its record. So all peers of an admission count at least as many groups as the record: one vote too many does no
        harm.
        """
        admission, self._admission = self._admission, None
        pending = done.pending
        groups = done.world.groups
        groups_now = done.world.groups
        if admission is not None:
            pending = admission.pending
            groups = max(groups, admission.world.groups)
            groups_now = max(groups_now, record.world.groups)
        settled = record.registrations
        if admission is None and not done.pending:
            # The peers that registered since the record have left again.
            settled = max(settled, done.registrations)
        self.by_epoch[record.epoch] = EpochFacts(settled, groups_now, _members(record))
        if done.call > self.answers.call:
            self.answers = PendingAnswers(done.call)
        return CallSucceeded(pending, groups, done.world, done.call)


def _members(record: Record) -> tuple[PeerId, ...]:
    return tuple(member.peer for member in record.members)


# What the next master cannot know

REMEMBERED_ANSWERS = 4
"""Answers that this peer shares with others. One is enough, except for programs that are at fault."""


class AnswerLog:
    """The master's last answers to calls, for the next master."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=REMEMBERED_ANSWERS)
        self._last_sync: SyncVoters | None = None
        self.repeats_sync = False
        """Whether the last sync was interrupted, and the program is about to call it again."""

    def note(self, message: object) -> None:
        """A message of the master."""
        if isinstance(message, CallDone | CallFailed | SyncPlan | SyncDone):
            self.repeats_sync = False
        match message:
            case CallDone() | CallFailed() if message.voters:
                self._answers.append(message)
            case CallFailed(of_sync=SyncVoters() as voters):
                self._last_sync = voters
            case SyncPlan():
                self._last_sync = SyncVoters(message.sync, message.voters)
            case SyncDone():
                self._last_sync = None

    def report(self, ballot: int, is_installed: bool, pending: PendingAnswers) -> Returned:
        """What this peer sends to another master."""
        return Returned(list(self._answers), ballot, is_installed, self._last_sync, self.repeats_sync, pending)
