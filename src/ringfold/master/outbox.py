"""Effects on their way out of a master: what must be written first is written first. Pure.

Effects leave in the order in which they were put in, over all steps. A `Persist` holds up everything behind it until
its journal is written. While one write is under way more may queue up, and the next write takes the newest journal for
all of them: a journal is whole, so that it makes up for those before it.

Evidence waits for nothing. It is a fact about an epoch whose record was written and sent long before, true whoever says
it, and ops must not feel the disk. Neither do heartbeats wait, or a slow disk would look like a dead master to the
peers, and like deaf peers to the master. Only a peer's first word, which makes it listen for them, goes ahead of them.
"""

from collections import deque
from collections.abc import Iterable

from ringfold.master.events import Conn, Effect, Persist, Send, SendBeat, SendEvidence
from ringfold.master.journal import Journal
from ringfold.wire.messages import Resumed, Welcome


class Outbox:
    """The effects that wait. `put` and `written` return those that may be carried out now."""

    def __init__(self) -> None:
        self._waiting: deque[Effect] = deque()
        self._covered = 0
        """How many of the journals that wait the write under way makes up for."""

    def put(self, effects: Iterable[Effect]) -> list[Effect]:
        """More effects, from the next step."""
        facts: list[Effect] = []
        for effect in effects:
            (facts if self._waits_for_nothing(effect) else self._waiting).append(effect)
        return facts + self._release() if not self._covered else facts

    def _waits_for_nothing(self, effect: Effect) -> bool:
        if isinstance(effect, SendBeat):
            return not any(isinstance(each, Send) and _is_greeting(each, effect.conn) for each in self._waiting)
        return isinstance(effect, SendEvidence)

    def begin(self) -> Journal | None:
        """The journal to be written now; None if there is none, or a write is under way."""
        if self._covered or not self._waiting:
            return None
        journals = [effect.journal for effect in self._waiting if isinstance(effect, Persist)]
        self._covered = len(journals)
        return journals[-1]

    def covered(self) -> list[Effect]:
        """What the write under way will set free, as far as it waits already."""
        left = self._covered
        found: list[Effect] = []
        for effect in self._waiting:
            if isinstance(effect, Persist):
                if not left:
                    break
                left -= 1
            else:
                found.append(effect)
        return found

    def waiting(self) -> list[Effect]:
        """Everything that was not carried out yet."""
        return list(self._waiting)

    def written(self) -> list[Effect]:
        """The write is made."""
        assert self._covered, "nothing was being written"
        return self._release()

    def _release(self) -> list[Effect]:
        free: list[Effect] = []
        while self._waiting:
            if isinstance(self._waiting[0], Persist):
                if not self._covered:
                    break
                self._covered -= 1
                self._waiting.popleft()
            else:
                free.append(self._waiting.popleft())
        return free


def _is_greeting(send: Send, conn: Conn) -> bool:
    return send.conn == conn and isinstance(send.message, Welcome | Resumed)
