"""Transition tables: legal moves, illegal ones, and tables that forget a state."""

from enum import Enum

import pytest

from ringfold.states import Transitions


class Light(Enum):
    RED = 1
    GREEN = 2
    OFF = 3


LIGHTS = Transitions({Light.RED: {Light.GREEN, Light.OFF}, Light.GREEN: {Light.RED, Light.OFF}, Light.OFF: set()})


def test_a_legal_transition_returns_the_new_state() -> None:
    assert LIGHTS.move(Light.RED, Light.GREEN) is Light.GREEN


@pytest.mark.parametrize(("old", "new"), [(Light.OFF, Light.RED), (Light.RED, Light.RED)])
def test_an_illegal_transition_is_an_assertion_error(old: Light, new: Light) -> None:
    with pytest.raises(AssertionError, match="illegal transition"):
        LIGHTS.move(old, new)


def test_a_final_state_has_no_following_ones() -> None:
    assert LIGHTS.following(Light.OFF) == frozenset()


def test_a_table_has_a_row_for_every_state() -> None:
    with pytest.raises(AssertionError, match="no row"):
        Transitions({Light.RED: {Light.GREEN}})
