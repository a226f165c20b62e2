"""The classic protocol for a global iteration over a key-value store, with its bugs, for the simulation to find.

As it is usually written: heartbeats are wall-clock times, every rank works out for itself which ranks are active,
arrivals are a list that is read and written back, "consensus" means to set a key and to read back one's own value, the
winner adds one to the counter, clears the arrivals and signals. When that takes too long, a rank goes on with what it
has.
"""

from ringfold.iteration.machine import BegunIteration
from ringfold.iteration.operations import NS, Delete, Get, Heartbeat, Pause, Steps
from ringfold.store.base import Entry
from ringfold.testing.iterating import Agreeing, RankProcess, Simulated

COUNTER, READY = "global_iteration_counter", "global_iteration_ready"
ARRIVED, CONSENSUS = "global_iteration_barrier:arrived", "global_iteration_barrier:consensus"
_INACTIVE_S = 6.0
_POLL_S = 0.05


class Naive:
    """One rank."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._current = -1
        self._now_ns = 0

    def next(self, now_ns: int, timeout_s: float) -> Steps[BegunIteration]:
        if self._current < 0:
            return self._begun((yield from self._number(COUNTER)), is_winner=False)
        yield from self._put(f"rank_{self._rank}_last_iteration", str(self._current))
        arrived = yield from self._text(ARRIVED)
        yield from self._put(ARRIVED, f"{arrived} {self._rank}")
        end_ns = self._now_ns + round(timeout_s * NS)
        while self._now_ns < end_ns:
            if (ready := (yield from self._number(READY))) > self._current:
                return self._begun(ready, is_winner=False)
            active = yield from self._active()
            arrived = yield from self._text(ARRIVED)
            if {str(rank) for rank in active} <= set(arrived.split()):
                yield from self._put(CONSENSUS, str(self._rank))
                if (yield from self._text(CONSENSUS)) == str(self._rank):
                    number = (yield from self._number(COUNTER)) + 1
                    yield from self._put(COUNTER, str(number))
                    yield Delete(ARRIVED)
                    yield from self._put(READY, str(number))
                    return self._begun(number, is_winner=True)
            yield Pause(_POLL_S)
        return self._begun((yield from self._number(COUNTER)), is_winner=False)

    def send_heartbeats(self) -> Steps[None]:
        while True:
            answer = yield Get(COUNTER)
            self._now_ns = answer.now_ns
            yield from self._put(f"heartbeat_{self._rank}", str(answer.now_ns))
            yield Pause(1.0)

    def _begun(self, number: int, *, is_winner: bool) -> BegunIteration:
        self._current = number
        return BegunIteration(number, tuple(range(self._world)), 0, is_winner)

    def _active(self) -> Steps[list[int]]:
        active = []
        for rank in range(self._world):
            if self._now_ns - (yield from self._number(f"heartbeat_{rank}")) < _INACTIVE_S * NS:
                active.append(rank)
        return active or [0]

    def _number(self, key: str) -> Steps[int]:
        return int((yield from self._text(key)) or "0")

    def _text(self, key: str) -> Steps[str]:
        answer = yield Get(key)
        self._now_ns = answer.now_ns
        return answer.outcome.value.decode() if isinstance(answer.outcome, Entry) else ""

    def _put(self, key: str, text: str) -> Steps[None]:
        """A plain write: a Heartbeat, which is a plain write in a store without leases. Errors are ignored."""
        answer = yield Heartbeat(key, text.encode(), 1e6)
        self._now_ns = answer.now_ns


def naive(sim: Simulated, life: RankProcess) -> Agreeing:
    return Naive(life.rank, sim.schedule.rules.world)
