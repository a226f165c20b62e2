"""Fair scheduling: which connection's frames are handled next. Runs share the loop, and so do the connections of a run.

One pass of the master's event loop is one *turn*. In a turn a limited number of a run's frames is handled, over all its
connections, and the rest waits for the next turn. So a run whose peers send without end takes no more than its share,
and a frame of another run waits for no more frames than the shares of the others, however long their queues are.
Unauthenticated connections, which belong to no run, share as if they were one run. Pure.
"""

from collections import deque

from ringfold.master.events import Conn

SHARE = 256
"""Frames of a run in one turn."""
QUANTUM = 32
"""Frames of one connection before the next connection of its run."""


class FrameScheduler:
    """The connections that have frames left, by the name of their run."""

    def __init__(self, share: int = SHARE, quantum: int = QUANTUM) -> None:
        self._share, self._quantum = share, quantum
        self._spent: dict[str, int] = {}
        self._waiting: dict[str, deque[Conn]] = {}

    def begin(self) -> None:
        """The next turn: every run has its full share again."""
        self._spent.clear()

    def budget(self, run: str) -> int:
        """How many frames of a connection of this run may be handled now; 0 if its share is used, or others wait."""
        return 0 if run in self._waiting else self._left(run)

    def spend(self, run: str, frames: int) -> None:
        self._spent[run] = self._spent.get(run, 0) + frames

    def wait(self, run: str, conn: Conn) -> None:
        """A connection has frames left."""
        self._waiting.setdefault(run, deque()).append(conn)

    def next(self) -> tuple[str, Conn, int] | None:
        """The next connection, and how many of its frames may be handled; None if the turn is over.

        A connection that still has frames after that waits again.
        """
        for run, conns in self._waiting.items():
            left = self._left(run)
            if not left:
                continue
            conn = conns.popleft()
            del self._waiting[run]
            if conns:
                self._waiting[run] = conns  # behind the other runs
            return run, conn, left
        return None

    @property
    def waiting(self) -> int:
        """How many connections have frames left."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_over(self) -> bool:
        """Whether no connection waits."""
        return not self._waiting

    def _left(self, run: str) -> int:
        return min(self._quantum, self._share - self._spent.get(run, 0))
