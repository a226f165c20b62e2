"""The global iteration under simulated faults; and the simulation itself, which must find what is wrong on purpose."""

import pytest
from planted import find
from planted.classic_iteration import naive
from planted.iterations import BUGS

from ringfold.iteration.record import Rules
from ringfold.testing.__main__ import main
from ringfold.testing.iterating import IterationSchedule, Simulated, Trouble
from ringfold.testing.iterating_schedules import draw, every_crash, run_schedule
from ringfold.testing.scheduler import SimulationFailure

SEEDS = 300
MAX_SEEDS = 1_000
FOUND_BY = {"any_incarnation": 83, "by_the_clock": 536, "erased_arrivals": 9}
"""The first seed that finds a planted bug, where many seeds do not."""


def test_drawn_stories_keep_every_promise() -> None:
    for seed in range(SEEDS):
        run_schedule(seed)


@pytest.mark.parametrize("seed", [37, 80, 101642, 101945, 102529, 103022, 140, 301331, 383, 1138, 2622631407])
def test_a_story_that_once_failed_keeps_every_promise(seed: int) -> None:
    run_schedule(seed)


@pytest.mark.parametrize(
    "store",
    [
        {"can_list": True},
        {"can_list": True, "has_leases": True},
        {"can_list": False},
        {"can_list": False, "has_counters": True},
    ],
)
def test_a_crash_at_every_store_operation_does_no_harm(store: dict[str, bool]) -> None:
    """Of two ranks, in their first iterations: one dies before the operation, or after it and without its answer."""
    calm = IterationSchedule(seed=5, rules=Rules(2), quiet_ms=1_200, slow=0.0, **store)  # type: ignore[arg-type]
    schedules = list(every_crash(calm))
    assert len(schedules) > 60
    for schedule in schedules:
        Simulated(schedule).run()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY.get(name, 1), max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--iterations --seed {failure.seed}" in str(failure)
    run_schedule(failure.seed)  # it is the bug that was found: without it the same seed breaks no invariant


def test_the_classic_protocol_has_two_winners_of_one_iteration() -> None:
    found = []
    for seed in range(MAX_SEEDS):
        try:
            Simulated(draw(seed), naive).run()
        except SimulationFailure as failure:
            found.append(failure.text)
            if "two winners" in failure.text:
                return
    raise AssertionError(f"never, but: {sorted(set(found))}")


def test_a_seed_is_the_whole_story() -> None:
    runs = [Simulated(draw(11)) for _ in range(2)]
    assert runs[0].run() == runs[1].run()
    assert runs[0].sched.trace.digest == runs[1].sched.trace.digest


def test_a_minority_that_reaches_the_store_stands_still_with_a_quorum_and_goes_on_without() -> None:
    cut = Trouble(kind="cut", at_ms=1_500, ranks=(0, 1, 2), for_ms=60_000)
    rules: dict[str, Rules] = {"quorum": Rules(5, 1, "majority"), "none": Rules(5)}
    reached = {}
    for name, rule in rules.items():
        sim = Simulated(IterationSchedule(seed=3, rules=rule, troubles=(cut,), quiet_ms=40_000, slow=0.0))
        sim.run()
        reached[name] = max(life.log[-1] for life in sim.lives)
    assert reached["quorum"] < reached["none"] / 2


def test_the_command_sums_schedules_up_and_replays_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--iterations", "--from", "40", "--seeds", "6", "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "40" in shown
    assert "violations" in shown
    assert main(["--iterations", "--seed", "40"]) == 0
    assert "IterationSchedule(seed=40" in capsys.readouterr().out
