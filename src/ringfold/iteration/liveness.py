"""What a rank sees of the others: which have arrived, which are dead, and which left keys behind. Pure.

*Liveness.* Every incarnation has a key that shows that it is alive. Where the store has leases, the key expires when it
is not renewed. An observer that has not seen the key for `absent_ns` considers the incarnation dead. (One observation
is not enough: a holder that lost its lease takes a new one.) Where the store has none, every heartbeat writes the key
again, which changes its version. An observer that has seen *one* version for `inactive_after_ns` considers the
incarnation dead. A key that was never there counts as one that never changes.

Clocks are never compared: all times are the observer's own. Of a gap between two observations at most a quarter of the
limit counts. So an observer that was frozen, or whose clock stepped, leaves the others time to show that they are
alive.

*Reading.* One request shows everything, however many ranks there are: a list where the store can list; elsewhere the
roster in the record says which keys to read, and they are read together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ringfold.errors import UsageError
from ringfold.iteration.operations import NS, GetMany, ListKeys, Ns, ProgramCall, Steps
from ringfold.iteration.record import Keys, RankIdentity, Record
from ringfold.limits import MAX_TIMEOUT_S
from ringfold.store.base import Entry, version_of

_GAP = 4
_NOTHING = -2
"""Lower than any iteration, also than NONE_YET."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTiming:
    """How often a rank sends heartbeats, and when the others consider it inactive."""

    heartbeat_s: float = 5.0
    inactive_after_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= self.inactive_after_s <= MAX_TIMEOUT_S:
            raise UsageError(
                f"inactive_after_s must be twice heartbeat_s at least; got {self.inactive_after_s:g} and "
                f"{self.heartbeat_s:g}"
            )

    @property
    def observe_interval_s(self) -> float:
        """How often a waiting rank observes the others."""
        return min(1.0, self.heartbeat_s / 2)


@dataclass(frozen=True, slots=True)
class RankObservation:
    """The ranks that have arrived at the record's iteration, and those that are dead."""

    arrived: frozenset[int]
    dead: frozenset[int]
    orphans: tuple[tuple[str, Entry], ...] = ()
    """Keys of incarnations that are not registered any more."""


@dataclass(slots=True)
class _Watched:
    version: int
    looked_ns: Ns
    first_ns: Ns
    watched_ns: Ns = 0


class LivenessMonitor:
    """What one observer has seen of the keys that show that others are alive."""

    def __init__(self, *, has_leases: bool, inactive_after_ns: Ns, absent_ns: Ns) -> None:
        self._has_leases = has_leases
        self._inactive_after_ns = inactive_after_ns
        self._absent_ns = absent_ns
        self._watched: dict[str, _Watched] = {}

    def observe(self, now_ns: Ns, incarnation: str, version: int) -> bool:
        """Note the version of an incarnation's key (0: there is none); returns whether it is dead."""
        if self._has_leases and version:
            version = 1  # a renewal may change it or not: only its presence counts
        watched = self._watched.get(incarnation)
        if watched is None or watched.version != version:
            self._watched[incarnation] = _Watched(version, now_ns, now_ns)
            return False
        limit_ns = self._limit_ns(version)
        watched.watched_ns += min(max(0, now_ns - watched.looked_ns), limit_ns // _GAP)
        watched.looked_ns = now_ns
        return self.is_dead(incarnation)

    def is_dead(self, incarnation: str) -> bool:
        """The result of the last observation; an incarnation that was never observed is not known to be dead."""
        watched = self._watched.get(incarnation)
        if watched is None or (self._has_leases and watched.version):
            return False
        return watched.watched_ns >= self._limit_ns(watched.version)

    def age_ns(self, now_ns: Ns, incarnation: str) -> Ns | None:
        """For how long at least an incarnation has not changed its key; None where only a lease would show it."""
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


def finished_iteration(arrival: Entry | None) -> int:
    """The iteration in an arrival; an invalid one has none."""
    try:
        return _NOTHING if arrival is None else int(arrival.value)
    except ValueError:
        return _NOTHING


class RankObserver:
    """How one incarnation observes the others."""

    def __init__(self, me: RankIdentity, keys: Keys, timing: LivenessTiming) -> None:
        self._me = me
        self._keys = keys
        self.liveness = LivenessMonitor(
            has_leases=me.has_leases,
            inactive_after_ns=round(timing.inactive_after_s * NS),
            absent_ns=round(timing.heartbeat_s * NS),
        )

    def observe(self, call: ProgramCall, record: Record) -> Steps[RankObservation]:
        """Observe all ranks."""
        request: ListKeys | GetMany
        if self._me.can_list:
            request = ListKeys(self._keys.ranks)
        else:
            present = [(rank, each.incarnation) for rank, each in record.roster.items() if not each.gone]
            request = GetMany(
                tuple(key for one in present for key in (self._keys.arrived(*one), self._keys.alive(*one)))
            )
        outcome = yield from call.execute(request)
        assert isinstance(outcome, dict), "the outcome of a list is not a dict"
        return self._evaluate(call.now_ns, record, outcome)

    def _evaluate(self, now_ns: Ns, record: Record, found: dict[str, Entry]) -> RankObservation:
        arrived, dead = set(), set()
        for rank, registration in record.roster.items():
            one = registration.incarnation
            alive = found.get(self._keys.alive(rank, one))
            arrival = found.get(self._keys.arrived(rank, one))
            if self._has_died(now_ns, one, alive, arrival) and one != self._me.incarnation:
                dead.add(rank)
            if self.is_arrival(record, arrival):
                arrived.add(rank)
        return RankObservation(frozenset(arrived), frozenset(dead), self._orphans(now_ns, record, found))

    def _orphans(self, now_ns: Ns, record: Record, found: dict[str, Entry]) -> tuple[tuple[str, Entry], ...]:
        """Keys of incarnations that are not registered. One that is still alive may be about to register."""
        registered = {registration.incarnation for registration in record.roster.values()}
        orphans = []
        for key, entry in found.items():
            one = self._keys.incarnation(key)
            if not one or one in registered:
                continue
            if key.endswith("/arrived") or self.liveness.observe(now_ns, one, entry.version):
                orphans.append((key, entry))
        self.liveness.keep_only({*registered, *(self._keys.incarnation(key) for key in found)})
        return tuple(orphans)

    def is_arrival(self, record: Record, arrival: Entry | None) -> bool:
        """Whether an arrival is for the record's iteration."""
        return finished_iteration(arrival) >= record.iteration

    def _has_died(self, now_ns: Ns, incarnation: str, alive: Entry | None, arrival: Entry | None) -> bool:
        """A lease exists or not; without leases every write of an incarnation shows that it is alive."""
        version = version_of(alive) if self._me.has_leases else max(version_of(alive), version_of(arrival))
        return self.liveness.observe(now_ns, incarnation, version)
