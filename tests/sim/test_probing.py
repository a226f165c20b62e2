"""Rounds of probing under drawn faults; and planted bugs in them, each of which must be found."""

import pytest
from planted import find
from planted.probing import BUGS

from ringfold.testing.probing import draw_rounds, run_rounds
from ringfold.testing.scheduler import SimulationFailure
from ringfold.wire.probing import RoundKind

MAX_SEEDS = 1_000
FOUND_BY = {"excluded_for_ever": 1_254, "old_graph_number": 2_040}
"""The first seed that finds a planted bug which many seeds do not find."""
SEEDS = 50


@pytest.mark.parametrize("kind", ["master", "time", "gloo", "local"])
def test_rounds_keep_their_promises_under_faults(kind: RoundKind) -> None:
    """The same seeds every time; `make sim` draws fresh ones."""
    seeds = [seed for seed in range(1, 8 * SEEDS) if draw_rounds(seed).settings.kind == kind]
    for seed in seeds[:SEEDS]:
        outcome = run_rounds(seed)
        assert outcome.windows > 0


@pytest.mark.parametrize("seed", [7245, 119, 730, 224, 2622, 9217, 9261, 607664087])
def test_seeds_that_once_found_something(seed: int) -> None:
    run_rounds(seed)


def test_the_same_seed_gives_the_same_run() -> None:
    assert run_rounds(7).digest == run_rounds(7).digest
    assert run_rounds(7).digest != run_rounds(8).digest


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY.get(name, 1), max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--probing --seed {failure.seed}" in str(failure)
    run_rounds(failure.seed)  # it is the bug that was found: without it the same seed keeps every promise


def test_a_planted_bug_is_found_again_by_its_seed() -> None:
    failure = find(BUGS["late_report"], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None
    with pytest.raises(SimulationFailure) as again:
        BUGS["late_report"].run(failure.seed)
    assert (again.value.text, again.value.tail) == (failure.text, failure.tail)
