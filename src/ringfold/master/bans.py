"""Who was evicted for its call may not come back at once: its program would make the same call again.

A process that is restarted by itself would join, disturb and be evicted in a circle. So its name and host are refused
for a while, and each time for twice as long. A program that was mended is let in after a pause at the most.
"""

from dataclasses import dataclass

from ringfold.master.events import Ns

SECOND = 1_000_000_000
FIRST_PAUSE_S = 5
LONGEST_PAUSE_S = 320
FORGOTTEN_AFTER_S = 3_600
"""Who has done nothing wrong for so long begins with the first pause again."""
MOST_NAMES = 4_096


@dataclass(slots=True)
class _Ban:
    pause_s: int
    until: Ns


class Bans:
    """By name and host."""

    def __init__(self) -> None:
        self._bans: dict[tuple[str, str], _Ban] = {}

    def evicted(self, now: Ns, name: str, host: str) -> int:
        """A peer was evicted for its call; for how many seconds it is refused."""
        self._forget(now)
        before = self._bans.pop((name, host), None)
        pause_s = FIRST_PAUSE_S if before is None else min(2 * before.pause_s, LONGEST_PAUSE_S)
        self._bans[name, host] = _Ban(pause_s, now + pause_s * SECOND)
        return pause_s

    def refusal(self, now: Ns, name: str, host: str) -> str | None:
        """Why a peer may not join now; None if it may."""
        ban = self._bans.get((name, host))
        if ban is None or now >= ban.until:
            return None
        left_s = -((now - ban.until) // SECOND)
        return (
            f"{name} on {host} was evicted a moment ago for a call that the others did not make: "
            f"fix the program, and join in {left_s} s"
        )

    def _forget(self, now: Ns) -> None:
        old = [key for key, ban in self._bans.items() if now - ban.until >= FORGOTTEN_AFTER_S * SECOND]
        for key in old or list(self._bans)[: len(self._bans) - MOST_NAMES]:
            del self._bans[key]
