"""A rate limit for log lines that remote input triggers: it must not fill the disk."""

from collections import Counter
from dataclasses import dataclass, field

PERIOD_NS = 10_000_000_000
MAX_REPEATS = 2
"""Lines with the same text in a period."""
MAX_LINES = 60
"""Lines in a period."""


@dataclass(slots=True)
class LogRateLimiter:
    """Passes the first lines of each text in a period, and counts the others."""

    _period_since_ns: int = -PERIOD_NS
    _logged: Counter[str] = field(default_factory=Counter)
    _suppressed: int = 0

    def take(self, now_ns: int, text: str) -> str | None:
        """A suffix for the line about `text`: how many lines were suppressed before. None: suppress this line, too."""
        if now_ns - self._period_since_ns >= PERIOD_NS:
            self._period_since_ns = now_ns
            self._logged.clear()
        if self._logged[text] >= MAX_REPEATS or self._logged.total() >= MAX_LINES:
            self._suppressed += 1
            return None
        self._logged[text] += 1
        suppressed, self._suppressed = self._suppressed, 0
        return f" ({suppressed} similar lines were not logged)" if suppressed else ""
