"""Steps that are numbered by a global iteration: one peer of the group requests the number, all take the same.

The *counter* is a `GlobalIteration`; its rank is the whole group, whichever of its peers requests a number. The peer
that does is the *speaker*: only the speaker is registered in the store, waits there, and renews its lease.

What must hold, and why it does:

1. *All peers of a group get one number for one step.* Each contributes the number that it knows for the step, or none,
   to one small all-reduce, and all take the largest. An op ends on all survivors with the same bits, so whatever is
   decided by its result is decided alike.
2. *There is one speaker.* It sets a flag in every such op. If no member has set the flag, the group has no speaker (any
   more), and the member with the lowest id, which joined earliest, becomes the speaker. It registers with a new
   incarnation, which supersedes the previous speaker if that one is still alive.
3. *A step that was begun keeps its number.* A peer in a step knows its number. When the group has become too small in
   the step and newcomers join, all repeat the op, and the newcomers receive the number.
4. *A new speaker does not repeat finished steps.* It requests the number after the last finished step (`next_after`),
   which it knows from the revision of the shared state. A number that its predecessor received and could not share is
   handed out again: it is the same iteration.
5. *A superseded speaker may have been evicted.* A peer that was frozen learns of its successor and of its eviction in
   any order. So it enters the op without a number, and the op shows whether it was evicted. Only if it becomes the
   speaker again was the rank taken from the whole group, and that is an error.
6. *The group never blocks in the store.* The speaker waits a second at a time, and then the group does its op without a
   number. So it can admit newcomers while it waits for other ranks. It must, because the peers that it waits for may be
   among them (another group of the run cannot begin before all groups have voted for it).
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ringfold.errors import DeadlineExceeded, StoreUnreachable, Superseded, UsageError

TAG = (1 << 64) - 1
"""The tag of the op that shares the number: programs count their tags from 0."""

TURN_S = 1.0
"""How long the speaker waits in the store before the group does its op."""

Facts = npt.NDArray[np.int64]
_UNKNOWN = -1


class NotYet:
    """The speaker still waits for the other ranks."""


class NoSpeaker:
    """No member has requested a number. There is a speaker now, which will: repeat the op."""


class Counter(Protocol):
    """The part of a `GlobalIteration` that a training loop uses."""

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
        self._counter = counter
        self._until = until
        self._number: int | None = None  # of the present step, if it is known here
        self._speaks = False
        self._waited_s = 0.0
        self._superseded: Superseded | None = None
        self.wait_s = counter.timeout_s
        """How long the speaker may wait in the store, for one step."""

    def facts(self, peer: int, finished: int) -> Facts:
        """What this peer contributes. The speaker waits here for the number, for `TURN_S` at most."""
        if self._speaks and self._number is None:
            self._request(finished)
        number = _UNKNOWN if self._number is None else self._number
        rank, world = self._counter.rank, self._counter.world
        return np.array([number, self._speaks, -peer, rank, -rank, world, -world], np.int64)

    def _request(self, finished: int) -> None:
        turn_s = min(TURN_S, self.wait_s)
        try:
            self._number = self._counter.next_after(finished, until=self._until, timeout_s=turn_s)
        except Superseded as error:
            self._speaks = False
            self._superseded = error
        except (DeadlineExceeded, StoreUnreachable):
            self._waited_s += turn_s
            if self._waited_s >= self.wait_s:
                raise

    def judge(self, peer: int, facts: Facts) -> int | NotYet | NoSpeaker:
        """The step's number, by the maximum of all facts; or why there is none."""
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
        self._number = None
        self._waited_s = 0.0

    def end(self, *, leave: bool) -> None:
        """The loop is over here. Unless the group goes on with another speaker, its rank leaves."""
        self._counter.close(leave=leave and self._speaks)
