"""What members have to do with each other beside the ring: visits, and what each is for. Pure.

`visits.py` makes and receives the connections; their purpose says who goes on with them: `syncing.py` for shared state,
`measuring.py` for a link's rate. This is where the two ways part.
"""

from collections.abc import Callable, Sequence

from ringfold.peer.effects import Effect
from ringfold.peer.measure.measuring import Measuring
from ringfold.peer.settings import PeerTimings
from ringfold.peer.sync.syncing import Syncing
from ringfold.peer.visits import Arrived, Failed, Visits
from ringfold.wire.messages import Message


class Errands:
    """All visits of a peer, and the sync and the measurement that they serve."""

    def __init__(self, timings: PeerTimings, token: bytes, say: Callable[[Message], list[Effect]]) -> None:
        self.visits = Visits(timings, token)
        self.syncing = Syncing(self.visits, say)
        self.measuring = Measuring(self.visits, say)

    def visited(self, now_ns: int, effects: list[Effect], outcomes: Sequence[Arrived | Failed]) -> list[Effect]:
        """How visits went, told to those whom they concern."""
        for outcome in outcomes:
            is_for_state = outcome.errand[0] == "state"
            if isinstance(outcome, Arrived):
                part = self.syncing if is_for_state else self.measuring
                effects += part.arrived(now_ns, outcome)
            else:
                effects += self.syncing.failed(now_ns, outcome) if is_for_state else self.measuring.failed(outcome)
        return effects

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """What somebody says on an open visit."""
        is_for_state = self.visits.open[conn].errand[0] == "state"
        part = self.syncing if is_for_state else self.measuring
        return part.message(now_ns, conn, body)

    def tick(self, now_ns: int) -> list[Effect]:
        visited = self.visited(now_ns, *self.visits.tick(now_ns))
        return visited + self.syncing.tick(now_ns) + self.measuring.tick(now_ns)

    def next_deadline_ns(self) -> int | None:
        parts = (self.visits, self.syncing, self.measuring)
        return min((time for part in parts if (time := part.next_deadline_ns()) is not None), default=None)

    def end(self, reason: str) -> list[Effect]:
        """Everything is over."""
        return self.syncing.end(reason) + self.measuring.end(reason) + self.visits.end(reason)
