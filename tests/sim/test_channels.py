"""Ops that are cut into slices, one for each channel: nothing breaks a promise, and planted bugs are found."""

import pytest
from planted import find
from planted.channels import BUGS

from ringfold.testing.scenario import draw_channels, run_channels

SEEDS = 40
MAX_SEEDS = 100


def test_seeds_with_several_channels_keep_every_promise() -> None:
    outcomes = [run_channels(seed) for seed in range(1, SEEDS + 1)]
    assert sum(outcome.committed for outcome in outcomes) > 10 * SEEDS
    assert {draw_channels(seed).setup.settings.channels for seed in range(1, SEEDS + 1)} == {2, 3, 4}


def test_a_link_that_was_not_finished_begins_again_in_the_next_epoch() -> None:
    """Seals came in the middle of attachments: each end kept other lanes of the link, and closed those of the other."""
    run_channels(2752158231)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_channels_is_found(name: str) -> None:
    failure = find(BUGS[name], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--channels --seed {failure.seed}" in str(failure)
    run_channels(failure.seed)  # it is the bug that was found: without it the same seed breaks no invariant
