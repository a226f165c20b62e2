"""A simulation from a seed of its test's own, the same in every run."""

import zlib

import pytest

from ringfold.testing import Simulation


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(zlib.crc32(request.node.name.encode()))
