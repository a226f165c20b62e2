"""Steps that are numbered by a global iteration: one peer of the group asks for the number, all take the same.

The words. The *counter* is a `GlobalIteration`; its rank is the whole group, whichever of its peers asks. The peer that
asks is the *speaker*: it alone is registered in the store, waits there, and shows life there.

What must hold, and why it does:

1. *All peers of a group get one number for one step.* Each contributes the number that it knows for the step, or none,
   to one small all-reduce, and all take the largest. An op ends on all survivors with the same bits, so whatever is
   decided by its result is decided alike.
2. *There is one speaker.* It says so in every such op. So where nobody says it, there is no speaker in the group (any
   more), and the peer that has been a member for longest becomes it. It registers with an incarnation of its own, by
   which the one before, if it still lives somewhere, is superseded.
3. *A step that was begun keeps its number.* Who is in a step knows its number. When the group has become too small in
   it and is joined by newcomers, all do the op again, and the newcomers are told.
4. *A new speaker does not do again what the group has done.* It says which step was finished last (`next_after`), which
   it knows from the revision of the shared state. What its predecessor was handed and could not tell anybody is handed
   to it again: it is the same iteration.
5. *Who is superseded as a speaker may only be out of the group.* A peer that was frozen learns of its successor and of
   its eviction in any order. So it goes into the op without a number, and the op says whether it was evicted. Only if
   it is asked to speak again, the rank was taken away from the whole group, and that is an error.
6. *Nobody waits behind the store's back.* The speaker waits a second at a time, and then the group does its op without
   a number. So it can admit newcomers while it waits for other ranks; it must, because those whom it waits for may be
   among them (another group of the run cannot begin before all groups have voted for it).
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ringfold.errors import DeadlineExceeded, StoreUnreachable, Superseded, UsageError

TAG = (1 << 64) - 1
"""The tag of the op that shares the number: out of the way of programs that count theirs from 0."""

TURN_S = 1.0
"""How long the speaker waits before the group looks after its own affairs again."""

Facts = npt.NDArray[np.int64]
_UNKNOWN = -1


class NotYet:
    """The speaker still waits for the other ranks."""


class NoSpeaker:
    """Nobody has asked for a number. There is a speaker now, who will: do the op again."""


class Counter(Protocol):
    """As much of a `GlobalIteration` as a training loop needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    def next_after(self, finished: int, *, until: int | None = None, timeout_s: float | None = None) -> int: ...
    def close(self, *, leave: bool = True) -> None: ...


class Counting:
    """One peer's part in numbering the steps of its group."""

    def __init__(self, counter: Counter, until: int | None) -> None:
        self._counter, self._until = counter, until
        self._number: int | None = None  # of the step that is on, as far as it is known here
        self._speaks = False
        self._waited_s = 0.0
        self._superseded: Superseded | None = None
        self.wait_s = counter.timeout_s
        """How long the speaker may wait in the store, for one step."""

    def facts(self, peer: int, finished: int) -> Facts:
        """What this peer contributes. The speaker waits here until the number is agreed, or for a turn."""
        if self._speaks and self._number is None:
            self._ask(finished)
        number = _UNKNOWN if self._number is None else self._number
        rank, world = self._counter.rank, self._counter.world
        return np.array([number, self._speaks, -peer, rank, -rank, world, -world], np.int64)

    def _ask(self, finished: int) -> None:
        turn_s = min(TURN_S, self.wait_s)
        try:
            self._number = self._counter.next_after(finished, until=self._until, timeout_s=turn_s)
        except Superseded as error:
            self._speaks, self._superseded = False, error
        except (DeadlineExceeded, StoreUnreachable):
            self._waited_s += turn_s
            if self._waited_s >= self.wait_s:
                raise

    def judge(self, peer: int, facts: Facts) -> int | NotYet | NoSpeaker:
        """The step's number, by the largest of all facts; or why there is none."""
        number, has_speaker, oldest, most, least, widest, narrowest = (int(fact) for fact in facts)
        if most != -least or widest != -narrowest:
            raise UsageError(
                f"all peers of a group give steps() a counter with the same rank and world; here are ranks {-least} to "
                f"{most} and worlds {-narrowest} to {widest}. A rank of its own takes a group, or a run, of its own"
            )
        if number != _UNKNOWN:
            self._number = number
            return number
        if has_speaker:
            return NotYet()
        if -oldest == peer:
            if self._superseded is not None:
                raise self._superseded
            self._speaks = True
        return NoSpeaker()

    def finish(self) -> None:
        """The step is over."""
        self._number, self._waited_s = None, 0.0

    def end(self, *, leave: bool) -> None:
        """The loop is over here. Unless the group goes on, by another speaker, its rank leaves."""
        self._counter.close(leave=leave and self._speaks)
