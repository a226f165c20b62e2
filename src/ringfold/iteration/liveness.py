"""Who is dead, as one observer may say. Pure.

Every incarnation has a key that shows its life. Where the store has leases, the key goes away by itself when it is not
renewed; an observer that has not seen it for `absent_ns` says dead. (One look is not enough: a holder that lost its
lease takes a new one.) Where it has none, the key is written again with every heartbeat, which changes its version; an
observer that has watched *one* version for `inactive_after_ns` says dead. An incarnation that never showed itself is
watched like one that shows always the same.

Clocks are never compared: all times are the observer's own. And who was away does not judge: of a gap between two looks
a quarter of the limit counts at most. An observer that was frozen, or whose clock jumped, leaves everybody else the
time to show themselves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ringfold.iteration.operations import Ns

_GAP = 4


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
