"""The run-wide calls of this peer: its votes, what the answers decide, and what the next master needs. Pure.

A vote counts in one epoch only. When the epoch changes while the program still waits, the vote is cast again as soon as
the new epoch is installed everywhere; the program does not notice. The master knows a ballot that it has answered, so a
vote that crosses its answer on the wire does no harm. A vote for a sync is used up by the master's plan: from then on
the call waits for the end of the sync, whatever happens to epochs.

The next step of a program depends on facts that must be the same on every member. `are_peers_pending` compares a count
that an op carried with the count up to which everybody was settled when the epoch of the op was made. A peer that is
alone, or in one of several groups, asks the run instead. Both numbers come from records and from the answers to calls,
never from what this peer happened to receive by now.

If the master is lost, this peer sends the next one what that one cannot know: answers that other peers may not have
received, and the voters of the last sync.
"""

from collections import deque
from dataclasses import dataclass

from ringfold.peer.effects import CallSucceeded
from ringfold.peer.events import CallVote
from ringfold.peer.settings import MS
from ringfold.wire.answers import Answer, SyncVoters
from ringfold.wire.messages import (
    CallDone,
    CallFailed,
    Epoch,
    Reason,
    Record,
    Returned,
    SyncDone,
    SyncPlan,
    Vote,
    VoteKind,
    VoteWithdrawn,
)


@dataclass(slots=True)
class _Call:
    asked: CallVote
    asked_in: Epoch
    since_ns: int
    deadline_ns: int
    cast_in: Epoch | None = None
    is_planned: bool = False
    answer_by_ns: int | None = None


class Calls:
    """The calls that wait for the master, by ballot."""

    def __init__(self, answer_ms: int) -> None:
        self._answer_ns = answer_ms * MS
        self._waiting: dict[int, _Call] = {}

    def __contains__(self, ballot: int) -> bool:
        return ballot in self._waiting

    def ask(self, now_ns: int, call: CallVote, engine_epoch: Epoch, steady_epoch: Epoch | None) -> list[Vote]:
        assert call.ballot not in self._waiting
        self._waiting[call.ballot] = _Call(
            call, engine_epoch, now_ns if call.called_ns is None else call.called_ns, call.deadline_ns
        )
        return [] if steady_epoch is None else self.cast(steady_epoch)

    def cast(self, epoch: Epoch) -> list[Vote]:
        """The votes to send, now that `epoch` is installed everywhere."""
        votes = []
        for ballot, call in sorted(self._waiting.items()):
            if call.cast_in == epoch or call.is_planned or call.answer_by_ns is not None:
                continue
            call.cast_in = epoch
            # Ops cannot be in flight during a call, so in an epoch that is younger than the call there were none.
            progress = list(call.asked.progress) if call.asked_in == epoch else []
            votes.append(Vote(ballot, call.asked.kind, epoch, call.asked.min_world, progress, call.asked.offer))
        return votes

    def planned(self, ballot: int) -> CallVote | None:
        """The master has planned the sync of this ballot. None if the program does not wait in it any more."""
        call = self._waiting.get(ballot)
        if call is None:
            return None
        call.is_planned = True
        return call.asked

    def waits_in(self, kind: VoteKind) -> bool:
        """Whether the program waits in such a call, and its time is not over."""
        return any(call.asked.kind == kind and call.answer_by_ns is None for call in self._waiting.values())

    def goes_on(self, now_ns: int, ballot: int) -> None:
        """What the call waits for makes progress: it may wait as long again."""
        call = self._waiting.get(ballot)
        if call is not None:
            call.deadline_ns = max(call.deadline_ns, now_ns + call.asked.deadline_ns - call.since_ns)

    def resume(self, now_ns: int, ballot: int) -> None:
        """Those whom an overdue call waited for are evicted, or busy: it waits as long again."""
        call = self._waiting.get(ballot)
        if call is not None and call.answer_by_ns is not None:
            call.answer_by_ns = None
            self.goes_on(now_ns, ballot)

    def interrupt(self) -> list[int]:
        """Forget the calls whose sync was planned by a master that is gone; their ballots.

        One whose time is over stays: the new master hears so, and answers that.
        """
        waiting = sorted(self._waiting.items())
        planned = [ballot for ballot, call in waiting if call.is_planned and call.answer_by_ns is None]
        for ballot in planned:
            del self._waiting[ballot]
        return planned

    def overdue(self, now_ns: int) -> list[VoteWithdrawn]:
        """What another master must be told: which calls are out of time. The one that knew is gone, or never did.

        A call that did not ask for its timeout waits as long again: that master knows nothing of who kept it waiting.
        """
        said = []
        for ballot, call in sorted(self._waiting.items()):
            if call.answer_by_ns is not None and not call.asked.final:
                self.resume(now_ns, ballot)
            elif call.answer_by_ns is not None:
                call.answer_by_ns = now_ns + self._answer_ns
                said.append(VoteWithdrawn(ballot, (now_ns - call.since_ns) // MS))
        return said

    @property
    def ballot(self) -> int:
        """The call that the program waits in; 0 if in none."""
        return max(self._waiting, default=0)

    def finish(self, ballot: int) -> bool:
        """Forget the call. Whether the program still waited in it."""
        return self._waiting.pop(ballot, None) is not None

    def give_up(self, now_ns: int, ballot: int) -> VoteWithdrawn | None:
        call = self._waiting.pop(ballot, None)
        return None if call is None else VoteWithdrawn(ballot, (now_ns - call.since_ns) // MS)

    def tick(self, now_ns: int) -> tuple[list[VoteWithdrawn], list[tuple[int, Reason]]]:
        """What to withdraw, and the calls that fail because the master does not even answer that."""
        withdrawn: list[VoteWithdrawn] = []
        failed: list[tuple[int, Reason]] = []
        for ballot, call in sorted(self._waiting.items()):
            waited_ms = (now_ns - call.since_ns) // MS
            if call.answer_by_ns is None:
                if now_ns >= call.deadline_ns:
                    call.answer_by_ns = now_ns + self._answer_ns
                    withdrawn.append(VoteWithdrawn(ballot, waited_ms, call.asked.final))
            elif now_ns >= call.answer_by_ns:
                text = f"the call waited {waited_ms} ms, and the master did not say for whom"
                if call.is_planned:
                    text += ", of those who give or get the state"
                failed.append((ballot, Reason("deadline", text, [], waited_ms)))
        for ballot, _ in failed:
            del self._waiting[ballot]
        return withdrawn, failed

    def next_deadline_ns(self) -> int | None:
        times = [
            call.deadline_ns if call.answer_by_ns is None else call.answer_by_ns for call in self._waiting.values()
        ]
        return min(times, default=None)


REMEMBERED_EPOCHS = 1_024


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """What `are_peers_pending` needs to know of an epoch, the same on all its members."""

    registrations: int
    groups: int


class Facts:
    """The facts of the last epochs, and the admission that has yet to be reported to the program."""

    def __init__(self) -> None:
        self.by_epoch: dict[Epoch, EpochFacts] = {}
        self.heard = 0
        """How many registrations the master has told of: what goes into the next op, and decides nothing here."""
        self._admission: Record | None = None  # the last record with newcomers, until an update or the join reports it

    def recorded(self, record: Record) -> None:
        self.by_epoch[record.epoch] = EpochFacts(record.registrations, record.world.groups)
        if record.newcomers:
            self._admission = record
        if len(self.by_epoch) > REMEMBERED_EPOCHS:
            del self.by_epoch[min(self.by_epoch)]

    def joined(self, record: Record) -> Record:
        """The record that this peer joined with; `record` is the newest one.

        The epoch may have changed since; those who voted go by the record with the newcomers, too.
        """
        admission, self._admission = self._admission, None
        return admission or record

    def call_failed(self) -> None:
        self._admission = None

    def call_done(self, done: CallDone, record: Record) -> CallSucceeded:
        """A call is complete. What it answers must be the same on every peer that was in it.

        A newcomer has only the record to go by, so the record's `pending` is the answer of the call that admitted it.
        Neither does it hear how many groups are left when the call is done: a group may have died out since its record.
        All of an admission count as many as the record did, or more; to ask the run once too often does no harm.
        """
        admission, self._admission = self._admission, None
        pending, groups, groups_now = done.pending, done.world.groups, done.world.groups
        if admission is not None:
            pending, groups = admission.pending, max(groups, admission.world.groups)
            groups_now = max(groups_now, record.world.groups)
        settled = record.registrations
        if admission is None and not done.pending:
            # Who registered since the record is gone again.
            settled = max(settled, done.registrations)
        self.by_epoch[record.epoch] = EpochFacts(settled, groups_now)
        return CallSucceeded(pending, groups, done.world)


REMEMBERED = 4
"""Answers that this peer shares with others. One would do, but for programs that are at fault."""


class Memory:
    """Listens to what the master says about calls."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=REMEMBERED)
        self._last_sync: SyncVoters | None = None
        self.redoes = False
        """Whether the last sync was interrupted, and is being called anew."""

    def hear(self, said: object) -> None:
        """A word of the master."""
        if isinstance(said, CallDone | CallFailed | SyncPlan | SyncDone):
            self.redoes = False
        match said:
            case CallDone() | CallFailed() if said.voters:
                self._answers.append(said)
            case CallFailed(of_sync=SyncVoters() as voters):
                self._last_sync = voters
            case SyncPlan():
                self._last_sync = SyncVoters(said.sync, said.voters)
            case SyncDone():
                self._last_sync = None

    def brought(self, ballot: int, is_installed: bool) -> Returned:
        """What this peer brings along to another master."""
        return Returned(list(self._answers), ballot, is_installed, self._last_sync, self.redoes)
