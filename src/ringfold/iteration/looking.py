"""What a rank sees of the others: who has arrived, who is dead, and what superseded incarnations left behind. Pure.

Where the store can list, one list shows it all, however many ranks there are. Where it cannot, the roster in the record
says which keys to ask for; then the first member that is missing is enough to go on waiting, so that all ranks together
ask for little more than each key once.
"""

from ringfold.iteration.asking import Call
from ringfold.iteration.liveness import Watch
from ringfold.iteration.model import Keys, Look, Self, Timing
from ringfold.iteration.operations import NS, ListKeys, Ns, Steps
from ringfold.iteration.record import Record
from ringfold.store.base import Entry, version_of

_NOTHING = -2
"""Lower than any iteration, NONE_YET included."""


def finished_by(arrival: Entry | None) -> int:
    """The iteration that an arrival speaks of. What is no number speaks of none."""
    try:
        return _NOTHING if arrival is None else int(arrival.value)
    except ValueError:
        return _NOTHING


class Lookout:
    """One incarnation's view of the others."""

    def __init__(self, me: Self, keys: Keys, timing: Timing) -> None:
        self._me, self._keys = me, keys
        self.watch = Watch(
            has_leases=me.has_leases,
            inactive_after_ns=round(timing.inactive_after_s * NS),
            absent_ns=round(timing.heartbeat_s * NS),
        )

    def look(self, call: Call, record: Record) -> Steps[Look]:
        """Enough to decide about this record."""
        if self._me.can_list:
            return (yield from self.look_at_all(call, record))
        arrived, dead, me = set(), set(), self._me.rank
        if self.counts(record, (yield from self._arrival(call, record, me))):
            arrived.add(me)
        # From one's own rank on, so that not all ask for the same one first.
        for rank in sorted(set(record.present) - {me}, key=lambda rank: (rank < me, rank)):
            arrival = yield from self._arrival(call, record, rank)
            if self.counts(record, arrival):
                arrived.add(rank)
            elif (yield from self._is_dead(call, record, rank, arrival)):
                dead.add(rank)
            else:
                return Look(frozenset(arrived), frozenset(dead))
        for rank in sorted(record.roster.keys() - record.members.keys() - {me}):
            if self.counts(record, (yield from self._arrival(call, record, rank))):
                arrived.add(rank)
        return Look(frozenset(arrived), frozenset(dead))

    def look_at_all(self, call: Call, record: Record) -> Steps[Look]:
        """All there is to see."""
        if self._me.can_list:
            outcome = yield from call.ask(ListKeys(self._keys.ranks))
            assert isinstance(outcome, dict), "a list was answered with something else"
            return self._judge(call.now_ns, record, outcome)
        found: dict[str, Entry] = {}
        for rank, seat in record.roster.items():
            for key in (self._keys.arrived(rank, seat.incarnation), self._keys.alive(rank, seat.incarnation)):
                entry = yield from call.get(key)
                if entry is not None:
                    found[key] = entry
        return self._judge(call.now_ns, record, found)

    def _judge(self, now_ns: Ns, record: Record, found: dict[str, Entry]) -> Look:
        arrived, dead = set(), set()
        for rank, seat in record.roster.items():
            one = seat.incarnation
            alive, arrival = found.get(self._keys.alive(rank, one)), found.get(self._keys.arrived(rank, one))
            if self._has_died(now_ns, one, alive, arrival) and one != self._me.incarnation:
                dead.add(rank)
            if self.counts(record, arrival):
                arrived.add(rank)
        return Look(frozenset(arrived), frozenset(dead), self._strays(now_ns, record, found))

    def _strays(self, now_ns: Ns, record: Record, found: dict[str, Entry]) -> tuple[tuple[str, Entry], ...]:
        """Keys of incarnations without a seat. One that still shows life may be about to register."""
        seated = {seat.incarnation for seat in record.roster.values()}
        strays = []
        for key, entry in found.items():
            one = self._keys.incarnation(key)
            if not one or one in seated:
                continue
            if key.endswith("/arrived") or self.watch.look(now_ns, one, entry.version):
                strays.append((key, entry))
        self.watch.keep_only({*seated, *(self._keys.incarnation(key) for key in found)})
        return tuple(strays)

    def counts(self, record: Record, arrival: Entry | None) -> bool:
        """Whether an arrival is one at the record's iteration."""
        return finished_by(arrival) >= record.iteration

    def _has_died(self, now_ns: Ns, incarnation: str, alive: Entry | None, arrival: Entry | None) -> bool:
        """A lease is there or not; without leases whatever an incarnation writes shows its life."""
        version = version_of(alive) if self._me.has_leases else max(version_of(alive), version_of(arrival))
        return self.watch.look(now_ns, incarnation, version)

    def _arrival(self, call: Call, record: Record, rank: int) -> Steps[Entry | None]:
        return (yield from call.get(self._keys.arrived(rank, record.roster[rank].incarnation)))

    def _is_dead(self, call: Call, record: Record, rank: int, arrival: Entry | None) -> Steps[bool]:
        incarnation = record.roster[rank].incarnation
        alive = yield from call.get(self._keys.alive(rank, incarnation))
        return self._has_died(call.now_ns, incarnation, alive, arrival)
