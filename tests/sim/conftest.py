"""A simulation from a seed that each test has of its own: the same in every run of the suite."""

import zlib

import pytest

from ringfold.testing import Simulation


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(zlib.crc32(request.node.name.encode()))
