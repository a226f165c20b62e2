"""What a soak does to its processes: a list of faults, of which one is drawn at a time.

A new kind of fault is one more line in a director's list: a name under which it is counted, how often it is drawn in
comparison with the others, and the function that injects it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ringfold.units import S as S


class SoakFault(NamedTuple):
    """Something that may be done to a run at any time."""

    name: str
    weight: float
    inject: Callable[[int], bool]
    """Injects it, at this time (ns); returns whether it was possible."""


class FaultSchedule:
    """Draws faults, counts them, and does later what is to be done later."""

    def __init__(self, faults: Sequence[SoakFault], random: np.random.Generator) -> None:
        self._faults, self._random = list(faults), random
        self._later: list[tuple[int, Callable[[], object]]] = []
        self.counts: Counter[str] = Counter()

    def add(self, faults: Sequence[SoakFault]) -> None:
        """More that may happen from now on."""
        self._faults += faults

    def inject(self, now_ns: int) -> str | None:
        """One fault, drawn by weight among those that are possible; its name, or None if none was."""
        left = list(self._faults)
        while left:
            weights = np.array([fault.weight for fault in left])
            fault = left.pop(int(self._random.choice(len(left), p=weights / weights.sum())))
            if fault.inject(now_ns):
                self.counts[fault.name] += 1
                return fault.name
        return None

    def later(self, at_ns: int, action: Callable[[], object]) -> None:
        """Schedule what ends a fault (SIGCONT, a restart)."""
        self._later.append((at_ns, action))

    def run_due(self, now_ns: int) -> bool:
        """Do what is due; returns whether anything is still to come."""
        due = [entry for entry in self._later if entry[0] <= now_ns]
        for entry in due:
            self._later.remove(entry)
            entry[1]()
        return bool(self._later)

    def seconds(self, least_s: float, most_s: float) -> int:
        """A time between these, in nanoseconds: short ones as likely as long ones."""
        return int(np.exp(self._random.uniform(np.log(least_s), np.log(most_s))) * S)

    def order(self, count: int) -> list[int]:
        """The numbers below `count`, in any order."""
        return [int(number) for number in self._random.permutation(count)]
