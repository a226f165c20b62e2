"""Many all-reduces, with a bound on how many are in flight, called again until every one of them has succeeded.

The argument that survivors never wait for each other in vain: an op is committed on all survivors or aborted on all of
them, so all agree on which ops are still to do. Each keeps the first few of those in flight, in the batch's order, and
waits for the very first. That one is in flight on everybody, or will be as soon as its abort was noticed there; so it
ends, and everybody moves on. A peer that had not called an op yet when it was aborted just calls it, and meets those
who call it again.

Ops are called again after an abort only. Whatever else goes wrong (nobody left to reduce with, a deadline, an
eviction) ends the batch: first everything in flight is waited for, then the error is raised with the list of those
that had succeeded.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ringfold.errors import CollectiveAborted, RingfoldError
from ringfold.peer.outcome import ReduceInfo


class Flying(Protocol):
    """An op in flight: a handle of the communicator's."""

    def wait(self) -> ReduceInfo: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each op, by its place in the batch; None: it did not succeed. `error` says why not."""

    infos: list[ReduceInfo | None]
    error: RingfoldError | None


def reduce_all(count: int, begin: Callable[[int], Flying], max_in_flight: int) -> Outcome:
    """Begin the ops 0 to count - 1, at most `max_in_flight` at once, and again after each abort, until all succeeded.

    `begin` is given an op's place in the batch. Nothing is in flight any more when this returns.
    """
    infos: list[ReduceInfo | None] = [None] * count
    flying: deque[tuple[int, Flying]] = deque()
    begun = 0
    try:
        while begun < count or flying:
            while begun < count and len(flying) < max_in_flight:
                flying.append((begun, begin(begun)))
                begun += 1
            place, first = flying[0]
            try:
                infos[place] = first.wait()
                flying.popleft()
            except CollectiveAborted:
                flying[0] = (place, begin(place))
    except RingfoldError as error:
        for place, op in flying:
            try:
                infos[place] = op.wait()
            except RingfoldError:
                infos[place] = None
        return Outcome(infos, error)
    return Outcome(infos, None)
