"""Those who asked for a round with a label, and wait for its summary."""

from dataclasses import dataclass, field

from ringfold.probe.rounds.events import MS
from ringfold.wire.probing import RoundId

MOST_ASKS = 64


@dataclass(slots=True)
class Ask:
    """Somebody who waits. `round` is set when it is clear which round that is."""

    asker: int
    label: str
    deadline_ns: int
    waits_ms: int
    round: RoundId | None = None


@dataclass(slots=True)
class Asks:
    """All of them, the oldest first. Each leaves by `take` or `expire`, so each is answered once."""

    waiting: list[Ask] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether nobody else may wait: each label takes a round of its own."""
        return len(self.waiting) >= MOST_ASKS

    @property
    def has_free(self) -> bool:
        """Whether somebody waits for a round that has not ended yet."""
        return any(ask.round is None for ask in self.waiting)

    def add(self, now_ns: int, asker: int, label: str, round_ms: int, grace_ms: int) -> None:
        """Every other label that waits takes a round of its own, of at most `round_ms`, and one may be under way."""
        ahead = len({ask.label for ask in self.waiting} - {label})
        waits_ms = (ahead + 2) * round_ms + grace_ms
        self.waiting.append(Ask(asker, label, now_ns + waits_ms * MS, waits_ms))

    def bind(self, round: RoundId) -> str:
        """This round is what the oldest, and all with the same label, wait for. Returns the label."""
        free = [ask for ask in self.waiting if ask.round is None]
        if not free or any(ask.round == round for ask in self.waiting):
            return ""
        for ask in free:
            if ask.label == free[0].label:
                ask.round = round
        return free[0].label

    def take(self, round: RoundId | None = None) -> list[Ask]:
        """Those who wait for this round, or all."""
        taken = [ask for ask in self.waiting if round is None or ask.round == round]
        self.waiting = [ask for ask in self.waiting if ask not in taken]
        return taken

    def expire(self, now_ns: int) -> list[Ask]:
        """Those who have waited long enough."""
        over = [ask for ask in self.waiting if now_ns >= ask.deadline_ns]
        self.waiting = [ask for ask in self.waiting if now_ns < ask.deadline_ns]
        return over
