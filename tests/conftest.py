"""What every test may count on: no setting of the caller's shell leaks in, and a reason when root is needed."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shared runner may stall for a while; hypothesis would call that a failure of the code.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples every time: a run of the tests says something about the code, not about the day.
settings.register_profile("ringfold", _patient, derandomize=True, database=None)
# `make fuzz` (--hypothesis-profile=fuzz): fresh ones, and many more where a test does not count them itself.
settings.register_profile("fuzz", _patient, max_examples=1_000, database=None, print_blob=True)
settings.load_profile("ringfold")

# Test files import `planted` and `hash_reference` by name.
sys.path.insert(0, str(Path(__file__).parent))

# Nothing here multiplies large matrices, and every process that loads NumPy would start threads for it: a third of what
# loading it costs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that; tests send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine does not let us do."""
    reason = _no_namespaces()
    if reason:
        skip = pytest.mark.skip(reason=reason)
        for item in items:
            if "netns" in item.keywords:
                item.add_marker(skip)


def _no_namespaces() -> str:
    """Why network namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if not any((Path(folder) / "ip").exists() for folder in ("/usr/sbin", "/sbin", "/usr/bin", "/bin")):
        return "needs ip of iproute2 for network namespaces"
    # A container's root often lacks CAP_SYS_ADMIN (bit 21) or CAP_NET_ADMIN (bit 12).
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and not (int(line.split()[1], 16) >> 21) & (int(line.split()[1], 16) >> 12) & 1:
            return "needs CAP_SYS_ADMIN and CAP_NET_ADMIN for network namespaces"
    return ""


@pytest.fixture(autouse=True)
def _clean_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RINGFOLD_ variable in the caller's shell must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("RINGFOLD_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A master that a test starts keeps no journal among the user's own, where the next run would find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that is run inside the test process sets up logging for itself, not for the tests after it."""
    logger = logging.getLogger("ringfold")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
