"""What a rank sees of the others: which have arrived, which are dead, and which left keys behind. Pure.

*Liveness.* Every incarnation has a key that shows that it is alive. Where the store has leases, the key expires when it
is not renewed. An observer that has not seen the key for `absent_ns` considers the incarnation dead. (One observation
is not enough: a holder that lost its lease takes a new one.) Where the store has none, every heartbeat writes the key
again, which changes its version. An observer that has seen *one* version for `inactive_after_ns` considers the
incarnation dead. A key that was never there counts as one that never changes.

Clocks are never compared: all times are the observer's own. Of a gap between two observations at most a quarter of the
limit counts. So an observer that was frozen, or whose clock stepped, leaves the others time to show that they are
alive.

*Reading.* Where the store can list, one list shows everything, however many ranks there are. Where it cannot, the
roster in the record says which keys to read. Then the first missing member is enough to continue waiting, so all ranks
together read little more than each key once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ringfold.errors import UsageError
from ringfold.iteration.operations import NS, Call, ListKeys, Ns, Steps
from ringfold.iteration.record import Keys, Record, Self
from ringfold.store.base import Entry, version_of

_GAP = 4
_NOTHING = -2
"""Lower than any iteration, NONE_YET included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often a rank shows its life, and when the others give it up."""

    heartbeat_s: float = 5.0
    inactive_after_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= self.inactive_after_s:
            raise UsageError(
                f"inactive_after_s must be twice heartbeat_s at least; got {self.inactive_after_s:g} and "
                f"{self.heartbeat_s:g}"
            )

    @property
    def look_s(self) -> float:
        """How often a rank that waits looks for the dead."""
        return min(1.0, self.heartbeat_s / 2)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look showed: who has arrived at the record's iteration, and who is dead. Both by rank."""

    arrived: frozenset[int]
    dead: frozenset[int]
    strays: tuple[tuple[str, Entry], ...] = ()


@dataclass(slots=True)
class _Watched:
    version: int
    looked_ns: Ns
    first_ns: Ns
    watched_ns: Ns = 0


class Watch:
    """What one observer has seen of the others' signs of life."""

    def __init__(self, *, has_leases: bool, inactive_after_ns: Ns, absent_ns: Ns) -> None:
        self._has_leases = has_leases
        self._inactive_after_ns, self._absent_ns = inactive_after_ns, absent_ns
        self._watched: dict[str, _Watched] = {}

    def look(self, now_ns: Ns, incarnation: str, version: int) -> bool:
        """Note the version of an incarnation's sign of life (0: there is none); returns whether it is dead."""
        if self._has_leases and version:
            version = 1  # a renewal may change it or not: what counts is that it is there
        watched = self._watched.get(incarnation)
        if watched is None or watched.version != version:
            self._watched[incarnation] = _Watched(version, now_ns, now_ns)
            return False
        limit_ns = self._limit_ns(version)
        watched.watched_ns += min(max(0, now_ns - watched.looked_ns), limit_ns // _GAP)
        watched.looked_ns = now_ns
        return self.is_dead(incarnation)

    def is_dead(self, incarnation: str) -> bool:
        """What the last look said; somebody who was never looked at is not known to be dead."""
        watched = self._watched.get(incarnation)
        if watched is None or (self._has_leases and watched.version):
            return False
        return watched.watched_ns >= self._limit_ns(watched.version)

    def age_ns(self, now_ns: Ns, incarnation: str) -> Ns | None:
        """For how long at least nothing new was seen of somebody; None where only a lease would tell."""
        watched = self._watched.get(incarnation)
        if watched is None or (self._has_leases and watched.version):
            return None
        return now_ns - watched.first_ns

    def keep_only(self, incarnations: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(incarnations)
        self._watched = {one: watched for one, watched in self._watched.items() if one in kept}

    def _limit_ns(self, version: int) -> Ns:
        return self._absent_ns if self._has_leases and not version else self._inactive_after_ns


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
