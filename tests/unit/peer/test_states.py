"""The states of a peer's machines: every table is complete, and an illegal transition is loud."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from ringfold.peer.states import (
    CONTROL_TRANSITIONS,
    DIAL_TRANSITIONS,
    MEASURE_TRANSITIONS,
    PEER_TRANSITIONS,
    ControlInput,
    ControlState,
    DialInput,
    DialState,
    MeasureInput,
    MeasureState,
    PeerInput,
    PeerState,
    next_state,
)

Table = Mapping[Any, Mapping[Any, Any]]
TABLES: list[tuple[Table, type[Enum], type[Enum], Enum]] = [
    (PEER_TRANSITIONS, PeerState, PeerInput, PeerState.CONNECTING),
    (CONTROL_TRANSITIONS, ControlState, ControlInput, ControlState.IDLE),
    (DIAL_TRANSITIONS, DialState, DialInput, DialState.PAUSED),
    (MEASURE_TRANSITIONS, MeasureState, MeasureInput, MeasureState.CONNECTING),
]


@pytest.mark.parametrize(("table", "states", "inputs", "first"), TABLES, ids=["peer", "control", "dial", "measure"])
def test_a_table_has_every_state_and_every_input(
    table: Table, states: type[Enum], inputs: type[Enum], first: Enum
) -> None:
    """Every state is in it and can be reached; every input leads somewhere."""
    assert set(table) == set(states)
    reached, last = {first}, set[Enum]()
    while reached != last:
        last = set(reached)
        reached |= {after for state in last for after in table[state].values()}
    assert reached == set(states)
    assert {given for row in table.values() for given in row} == set(inputs)


@pytest.mark.parametrize(("table", "states", "inputs", "first"), TABLES, ids=["peer", "control", "dial", "measure"])
def test_what_is_not_in_the_table_is_an_assertion(
    table: Table, states: type[Enum], inputs: type[Enum], first: Enum
) -> None:
    for state in states:
        for given in inputs:
            if given in table[state]:
                assert next_state(table, state, given) is table[state][given]
            else:
                with pytest.raises(AssertionError, match="illegal transition"):
                    next_state(table, state, given)


def test_an_ended_peer_never_comes_back() -> None:
    assert PEER_TRANSITIONS[PeerState.ENDED] == {}
    assert all(row[PeerInput.ENDED] is PeerState.ENDED for state, row in PEER_TRANSITIONS.items() if row)
