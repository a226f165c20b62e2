"""A simulation from a fresh seed, which every failure prints."""

import os

import pytest

from ringfold.testing import Simulation


@pytest.fixture
def sim() -> Simulation:
    return Simulation(int.from_bytes(os.urandom(4), "little"))
