"""What the tests with real processes share: a cluster that is gone when the test is."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test files and the processes they start import `programs` by its name.
sys.path.insert(0, str(Path(__file__).parent))

from programs import ProgramCluster

from ringfold.tools.shaped import Shape, ShapedNetwork, ShapingFailed


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "how often a peer is killed or stopped in shared memory (test_shared_memory_faults.py)"
    parser.addoption("--faults", type=int, default=12, help=text)
    parser.addoption("--faults-seed", type=int, default=1, help="what decides which faults, and when")


@pytest.fixture
def cluster() -> Iterator[ProgramCluster]:
    """A run without a master yet; whatever is started in it is killed at the end."""
    with ProgramCluster() as running:
        yield running


@pytest.fixture
def network(cluster: ProgramCluster) -> Iterator[ShapedNetwork]:
    """Hosts on a bridge; host 0 is there, others are added."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(ShapedNetwork([Shape()]))
        except ShapingFailed as error:
            pytest.skip(f"network namespaces do not work here: {error}")
        stack.callback(cluster.close)  # processes before the namespaces that they run in
        yield made
