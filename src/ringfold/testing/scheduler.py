"""Simulated time: a heap of actions, one seeded source of randomness, and a trace of what happened.

Nothing in a simulation reads a real clock or draws a number anywhere else, so a seed is the whole schedule: running it
twice gives the same trace, byte for byte. The trace is hashed as it grows, and its last lines are kept for the report
of a failure.
"""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from random import Random

from ringfold.units import MS as MS

"""One millisecond in nanoseconds, the unit of every time in here."""


MAX_ACTIONS = 2_000_000
"""A drawn run has some thousands; one with hundreds of ops in flight on many lanes has some hundred thousand."""


class SimulationFailure(AssertionError):
    """A promise was broken in a simulated run. The text says which, how to replay it, and what happened just before."""

    def __init__(self, seed: int, text: str, tail: list[str] | None = None, option: str = "") -> None:
        super().__init__(seed, text, tail, option)
        self.seed, self.text, self.tail, self.option = seed, text, tail or [], option

    def __str__(self) -> str:
        command = f"python -m ringfold.testing {self.option} --seed {self.seed} --trace".replace("  ", " ")
        make = "" if self.option else f"make sim SEED={self.seed}    or: "
        lines = [f"seed {self.seed}: {self.text}", f"replay with: {make}{command}"]
        if self.tail:
            lines += [f"the last {len(self.tail)} events:", *self.tail]
        return "\n".join(lines)


class Trace:
    """What happened, as lines; a digest of all of them and the last few in full."""

    def __init__(self, keep: int = 200, echo: Callable[[str], None] | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._last: deque[tuple[int, str, str]] = deque(maxlen=keep)
        self._echo = echo
        self.events = 0

    def note(self, now: int, who: str, what: str) -> None:
        """Add one line."""
        self.events += 1
        self._hash.update(f"{now} {who} {what}".encode())
        self._last.append((now, who, what))
        if self._echo is not None:
            self._echo(_line(now, who, what))

    def bytes_moved(self, now: int, chunk: bytes) -> None:
        """Bytes arrived somewhere: they count for the digest, and would only drown the lines."""
        self._hash.update(now.to_bytes(8, "little"))
        self._hash.update(chunk)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def tail(self, count: int = 40) -> list[str]:
        """The last lines, oldest first."""
        return [_line(*entry) for entry in list(self._last)[-count:]]


def _line(now: int, who: str, what: str) -> str:
    return f"{now / MS:12.3f} ms  {who:<10} {what}"


class Timer:
    """A scheduled action that can still be called off."""

    __slots__ = ("action", "arguments", "cancelled")

    def __init__(self, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.action, self.arguments, self.cancelled = action, arguments, False

    def cancel(self) -> None:
        self.cancelled = True


class Scheduler:
    """Runs actions in the order of their times. Two at the same instant run in a drawn order, never by accident."""

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.trace = trace or Trace()
        self.now = 0
        self.ran = 0
        self._heap: list[tuple[int, float, int, Timer]] = []
        self._count = 0

    def at(self, time_ns: int, action: Callable[..., object], *arguments: object) -> Timer:
        """Run `action` at `time_ns`, or now if that is past."""
        timer = Timer(action, arguments)
        self._count += 1
        heapq.heappush(self._heap, (max(time_ns, self.now), self.rng.random(), self._count, timer))
        return timer

    def after(self, delay_ns: int, action: Callable[..., object], *arguments: object) -> Timer:
        return self.at(self.now + delay_ns, action, *arguments)

    def step(self) -> bool:
        """Run the next action; False when nothing is scheduled any more."""
        while self._heap:
            time_ns, _, _, timer = heapq.heappop(self._heap)
            if timer.cancelled:
                continue
            self.now = time_ns
            self.ran += 1
            timer.action(*timer.arguments)
            return True
        return False

    def run_until(self, condition: Callable[[], bool], limit_ns: int) -> bool:
        """Run until `condition` holds (True), or until virtual time would pass `limit_ns` (False).

        A run in which far more happens than in any honest one goes round in circles: it fails.
        """
        heap = self._heap
        while not condition():
            if self.ran > MAX_ACTIONS:
                raise AssertionError(f"{MAX_ACTIONS} actions by {self.now / MS:.0f} ms: it goes round in circles")
            while heap and heap[0][3].cancelled:
                heapq.heappop(heap)
            if not heap or heap[0][0] > limit_ns:
                self.now = max(self.now, limit_ns)
                return condition()
            self.step()
        return True
