"""Several peers on each host, and lanes between all members: nothing breaks a promise, and planted bugs are found."""

import pytest
from planted import find
from planted.hosts import BUGS

from ringfold.testing.scenario import draw_hosts, run_hosts

SEEDS = 20
MAX_SEEDS = 100


def test_seeds_with_several_hosts_keep_every_promise() -> None:
    outcomes = [run_hosts(seed) for seed in range(1, SEEDS + 1)]
    assert sum(outcome.committed for outcome in outcomes) > 10 * SEEDS
    drawn = [draw_hosts(seed).setup for seed in range(1, SEEDS + 1)]
    assert {setup.hosts for setup in drawn} == {1, 2, 3}
    assert {setup.settings.direct_lanes for setup in drawn} == {True, False}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_direct_lanes_is_found(name: str) -> None:
    failure = find(BUGS[name], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--hosts --seed {failure.seed}" in str(failure)
    run_hosts(failure.seed)  # it is the bug that was found: without it the same seed breaks no invariant
