"""Leases: the holder's side, and the observer's where a store has no leases of its own. Pure.

Where the store knows no leases, a leased key carries its time to live, and renewing it writes it again, which gives it
a new version. An observer notes when, on its own monotonic clock, it first saw a version. A version that it has watched
for the whole time to live is expired, and the observer deletes the key, on condition of that version: a renewal that
came in between wins, and a holder whose key is gone finds out at its next renewal. No clock is ever sent anywhere.

*The holder is first to know.* It counts from before it sent the write, an observer from after it read it. So with
clocks that run at the same rate the holder gives up before anybody else takes over.

*Who was away does not judge.* A gap between two looks counts at most half the time to live. An observer that slept, or
a store that stood still, therefore leaves a live holder half of its time to renew; and it takes three looks to see an
end.
"""

from dataclasses import dataclass

from ringfold.store.base import Entry


@dataclass(slots=True)
class _Watched:
    version: int
    looked_ns: int
    watched_ns: int


class LeaseWatch:
    """What one observer knows about the leases that it has looked at."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def look(self, now_ns: int, key: str, entry: Entry | None) -> bool:
        """Note what a key holds now; returns whether its lease has ended."""
        if entry is None or not entry.ttl_ms:
            self._watched.pop(key, None)
            return False
        ttl_ns = entry.ttl_ms * 1_000_000
        watched = self._watched.get(key)
        if watched is None or watched.version != entry.version:
            self._watched[key] = _Watched(entry.version, now_ns, 0)
            return False
        watched.watched_ns += min(now_ns - watched.looked_ns, ttl_ns // 2)
        watched.looked_ns = now_ns
        return watched.watched_ns >= ttl_ns

    def forget(self, key: str) -> None:
        self._watched.pop(key, None)


def pace_s(entry: Entry | None) -> float:
    """How often to look at a key so that the end of its lease is seen in time."""
    return entry.ttl_ms / 4_000 if entry is not None and entry.ttl_ms else float("inf")
