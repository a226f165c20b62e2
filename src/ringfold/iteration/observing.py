"""Looking at a global iteration from outside, without a part in it."""

from msgspec import Struct

from ringfold.iteration.carrying import Carrier
from ringfold.iteration.machine import Machine
from ringfold.iteration.model import Look, Self, Timing
from ringfold.iteration.operations import Ns
from ringfold.iteration.record import Hold, Record, Rules, decide
from ringfold.runtime import clock
from ringfold.store.base import Store


class RankView(Struct, frozen=True):
    """One rank. `state` is TRAINING or READY for members, JOINING for who gets in next, INACTIVE, or LEFT.

    `silent_s` is for how long the observer has seen nothing new of it, at least; None where a lease shows its life.
    """

    rank: int
    state: str
    incarnation: str
    fence: int
    last: int
    silent_s: float | None


class View(Struct, frozen=True):
    """A global iteration as it stands. `iteration` is -1 before the first; `waiting_for` are ranks."""

    iteration: int
    version: int
    winner: int | None
    rules: Rules
    ranks: list[RankView]
    waiting_for: list[int]
    reason: str


def view(now_ns: Ns, machine: Machine, look: Look) -> View | None:
    """What a look showed, for people; None when there is nothing yet. Pure."""
    record = machine.record
    if record is None:
        return None
    decision = decide(record, look.arrived, look.dead)
    missing = list(decision.missing) if isinstance(decision, Hold) else []
    return View(
        record.iteration,
        record.version,
        record.winner,
        record.rules,
        [_rank(now_ns, machine, record, look, rank) for rank in record.roster],
        missing,
        decision.reason if isinstance(decision, Hold) else "all have arrived",
    )


def _rank(now_ns: Ns, machine: Machine, record: Record, look: Look, rank: int) -> RankView:
    seat = record.roster[rank]
    if seat.gone:
        state = "LEFT"
    elif rank in look.dead:
        state = "INACTIVE"
    elif rank not in record.members:
        state = "JOINING"
    else:
        state = "READY" if rank in look.arrived else "TRAINING"
    age_ns = machine.lookout.watch.age_ns(now_ns, seat.incarnation)
    return RankView(rank, state, seat.incarnation, seat.fence, seat.last, None if age_ns is None else age_ns / 1e9)


class Observer:
    """Watches a global iteration in a store. The longer it watches, the more it knows of who is silent."""

    def __init__(
        self, store: Store, *, name: str = "iteration", heartbeat_s: float = 5.0, inactive_after_s: float = 30.0
    ) -> None:
        me = Self(
            rank=0, incarnation="", can_list=store.can_list, has_leases=store.has_leases, name=name, store="the store"
        )
        timing = Timing(heartbeat_s=heartbeat_s, inactive_after_s=inactive_after_s)
        self._machine = Machine(me, Rules(1), timing)
        self._carrier = Carrier(store)

    def look(self, timeout_s: float = 5.0) -> View | None:
        """How it stands now; None when no rank has registered yet."""
        look = self._carrier.carry_out(self._machine.observe(clock.monotonic_ns(), timeout_s))
        return view(clock.monotonic_ns(), self._machine, look)
