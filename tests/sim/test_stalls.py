"""Programs that hang: the simulation finds nothing wrong with us, and everything that is planted."""

import pytest
from planted import find
from planted.stalls import BUGS

from ringfold.testing.scenario import run_stalls

SEEDS = 12
FOUND_BY = {"impatient_watchdog": 1, "deaf_watchdog": 46}
"""The first seed that finds a planted bug. `PYTHONPATH=tests python -m planted stalls --from 1` finds it."""
MAX_SEEDS = 200
"""From that seed on: what else changes in the simulation may make another one the first."""


def test_seeds_with_programs_that_hang_keep_every_promise() -> None:
    outcomes = [run_stalls(seed) for seed in range(1, SEEDS + 1)]
    assert sum(outcome.faults["evicted for a stall"] for outcome in outcomes) > 0, "no peer was evicted"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_the_watchdog_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY[name], max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--stalls --seed {failure.seed}" in str(failure)
    run_stalls(failure.seed)  # it is the bug that was found: without it the same seed keeps every promise


@pytest.mark.parametrize("seed", [1006, 1123])
def test_a_seed_that_found_something_finds_nothing_any_more(seed: int) -> None:
    """1006: a second caller's time was over while the peers that it waited for were being evicted. 1123: all members of
    a small group were slow, and a minority of the run."""
    run_stalls(seed)
