"""How much a log says of what strangers do wrong. They decide how often, and must not fill the disk."""

from collections import Counter
from dataclasses import dataclass, field

PERIOD_NS = 10_000_000_000
MAX_REPEATS = 2
"""Lines with the same text in a period."""
MAX_LINES = 60
"""Lines in a period."""


@dataclass(slots=True)
class LogRateLimiter:
    """Lets the first lines of each text through, and counts the others, a period at a time."""

    _begun_ns: int = -PERIOD_NS
    _logged: Counter[str] = field(default_factory=Counter)
    _withheld: int = 0

    def take(self, now_ns: int, text: str) -> str | None:
        """What to add to the line about `text`: how many were withheld before it. None: it is withheld itself."""
        if now_ns - self._begun_ns >= PERIOD_NS:
            self._begun_ns = now_ns
            self._logged.clear()
        if self._logged[text] >= MAX_REPEATS or self._logged.total() >= MAX_LINES:
            self._withheld += 1
            return None
        self._logged[text] += 1
        withheld, self._withheld = self._withheld, 0
        return f" ({withheld} similar lines were not logged)" if withheld else ""
