"""What the tests with real processes share: a cluster that is gone when the test is."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test files and the processes they start import `programs` by its name.
sys.path.insert(0, str(Path(__file__).parent))

from netns import Network
from programs import ProgramCluster


@pytest.fixture
def cluster() -> Iterator[ProgramCluster]:
    """A run without a master yet; whatever is started in it is killed at the end."""
    with ProgramCluster() as running:
        yield running


@pytest.fixture
def network(cluster: ProgramCluster) -> Iterator[Network]:
    made = None
    try:
        try:
            made = Network()
            made.add_host(1)
        except OSError as error:
            pytest.skip(f"network namespaces do not work here: {error}")
        yield made
    finally:
        cluster.close()  # processes before the namespaces that they run in
        if made is not None:
            made.close()
