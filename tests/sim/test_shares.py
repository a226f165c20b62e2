"""Fixed shares of paths: the simulation finds nothing wrong with us, and everything that is planted."""

import pytest
from planted import find
from planted.shares import BUGS

from ringfold.testing.sharing import SEGMENT_BYTES, run_shares, simulate_shares

SEEDS = 40
MAX_SEEDS = 1_000


def test_fixed_shares_hold_whatever_breaks() -> None:
    checked, broken = 0, 0
    for seed in range(SEEDS):
        sim, watches = simulate_shares(seed)
        checked += sum(watch.checked_bytes > 100 * SEGMENT_BYTES for watch in watches)
        broken += sim.injected["broken path"]
    assert checked > SEEDS, "hardly a transfer was long enough to show anything"
    assert broken > SEEDS / 2


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_shares_is_found(name: str) -> None:
    failure = find(BUGS[name], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--shares --seed {failure.seed}" in str(failure)
    run_shares(failure.seed)  # it is the bug that was found: without it the same seed keeps every promise
