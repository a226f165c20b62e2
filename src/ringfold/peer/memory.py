"""What a peer remembers for the next master: answers that others may lack, and who was in the last sync. Pure."""

from collections import deque

from ringfold.wire.messages import Answer, CallDone, CallFailed, Returned, SyncDone, SyncPlan, SyncVoters

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
