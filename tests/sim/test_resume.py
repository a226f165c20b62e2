"""Runs in which all peers are killed: the run continues from its own history, and planted bugs are found."""

from collections import Counter

import pytest
from planted import find
from planted.resume import BUGS

from ringfold.testing.resuming import run_resume

SEEDS = 30
FOUND_BY = {"mixes_lineages": 100, "one_lineage": 100, "no_ancestors": 23}
"""The first seeds that find planted bugs. `PYTHONPATH=tests python -m planted resume --from 1` finds them."""
MAX_SEEDS = 60
"""From that seed on: what else changes in the simulation may make another one the first."""


def test_stories_of_resumes_keep_every_promise_and_tell_all_kinds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(1, SEEDS + 1):
        counts.update(run_resume(seed).syncs)
    assert counts["resumes"] > SEEDS
    assert counts["rollbacks"] > counts["resumes"], "some agreed to begin again"
    assert counts["lost"]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_resumes_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY.get(name, 1), max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--resume --seed {failure.seed}" in str(failure)
    run_resume(failure.seed)  # it is the bug that was found: without it the same seed breaks no invariant
