"""State machines: an `enum.Enum` of states, and one table of the legal transitions.

    class Phase(Enum):
        IDLE = "idle"
        SEALING = "sealing"

    PHASES = Transitions({Phase.IDLE: {Phase.SEALING}, Phase.SEALING: {Phase.IDLE}})
    self.phase = PHASES.move(self.phase, Phase.SEALING)

An illegal transition is a bug in the machine, not a fault of a remote: it raises AssertionError, which the simulation
reports with its seed.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)


class Transitions(Generic[State]):
    """The legal transitions of one machine: for each state, the states that may follow it."""

    def __init__(self, table: Mapping[State, Collection[State]]) -> None:
        self._table = {state: frozenset(following) for state, following in table.items()}
        states = {*self._table, *(state for following in self._table.values() for state in following)}
        missing = [state for state in states if state not in self._table]
        assert not missing, f"no row for {missing}"

    def move(self, old: State, new: State) -> State:
        """The new state, if it may follow the old one. A state does not follow itself unless the table says so."""
        if new not in self._table[old]:
            raise AssertionError(f"illegal transition: {old} -> {new}")
        return new

    def following(self, state: State) -> frozenset[State]:
        """The states that may follow this one; empty if it is final."""
        return self._table[state]
