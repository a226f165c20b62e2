"""The votes of this peer: cast in an epoch, cast again in the next one, withdrawn at their deadline. Pure.

A vote counts in one epoch only. When the epoch changes while the program still waits, the vote is cast again as soon as
the new one is installed everywhere; the program does not notice. The master knows a ballot that it has answered, so a
vote that crosses its answer on the wire does no harm. A vote for a sync is used up by the master's plan: from then on
the call waits for the sync's end, whatever happens to epochs.
"""

from dataclasses import dataclass

from ringfold.peer.events import CallVote
from ringfold.peer.settings import MS
from ringfold.wire.messages import Epoch, Reason, Vote, VoteKind, VoteWithdrawn


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
