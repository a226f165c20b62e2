"""Telemetry among the agents of several hosts: it reaches the sender that can act on it, once, as it was measured."""

import pytest
from planted import find
from planted.forwarding import BUGS

from ringfold.testing.__main__ import main
from ringfold.testing.forwarding import run_forwarding

SEEDS = 40
MAX_SEEDS = 50


def test_telemetry_reaches_senders() -> None:
    outcomes = [run_forwarding(seed) for seed in range(1, SEEDS + 1)]
    assert sum(outcome.counts["reports forwarded"] for outcome in outcomes) > 20 * SEEDS
    assert sum(outcome.counts["backpressure at the sender"] for outcome in outcomes) > SEEDS


def test_a_seed_is_the_whole_schedule() -> None:
    lines: list[list[str]] = [[], []]
    for each in lines:
        run_forwarding(5, echo=each.append)
    assert lines[0] == lines[1]
    assert len(lines[0]) > 100


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = find(BUGS[name], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--forwarding --seed {failure.seed}" in str(failure)
    run_forwarding(failure.seed)


def test_the_command_runs_seeds_and_replays_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--forwarding", "--seeds", "4", "--from", "1", "--jobs", "1"]) == 0
    assert "datagram lost" in capsys.readouterr().out
    assert main(["--forwarding", "--seed", "3"]) == 0
    assert "no violation" in capsys.readouterr().out
