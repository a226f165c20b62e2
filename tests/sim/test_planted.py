"""The simulation is itself tested: every planted bug is found, and the code without one is not accused."""

import pytest
from planted import find
from planted.runs import BUGS

from ringfold.testing.scenario import run_seed
from ringfold.testing.scheduler import SimulationFailure

MAX_SEEDS = 1_000
FOUND_BY = {
    "against_the_most": 49,
    "newcomers_decide": 550,
    "accept_old_epoch": 124,
    "forget_lane": 29,
    "tell_nobody": 386,
    "apply_finished": 495,
    "early_unlimited": 55,
    "old_votes": 63,
    "impatient_clock": 259,
    "hearsay": 85,
    "forgotten_answers": 205,
    "torn_votes": 107,
    "any_revision": 18,
    "forgotten_blocks": 32,
    "never_torn": 500,
    "steps_by_hearsay": 930,
    "ignored_survivor": 72,
    "commit_missing_done": 23,
    "deaf_peer": 35,
    "record_before_seal": 35,
    "ring_for_some": 21,
    "takes_anything": 46,
    "writes_on": 6,
}
"""Seeds that find planted bugs which many seeds do not find, or only after a long run: the search begins there. What
changes in the simulation may move them. `PYTHONPATH=tests python -m planted runs --from 1` finds the first ones."""


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY.get(name, 1), max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--seed {failure.seed}" in str(failure)
    run_seed(failure.seed)  # it is the bug that was found: without it the same seed keeps every promise


def test_a_planted_bug_is_found_again_by_its_seed() -> None:
    failure = find(BUGS["no_restore"], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None
    with pytest.raises(SimulationFailure) as again:
        BUGS["no_restore"].run(failure.seed)
    assert (again.value.text, again.value.tail) == (failure.text, failure.tail)
