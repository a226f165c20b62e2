"""Agents and clients in the simulation: no client reads another's hint, and in the end all agree."""

import pytest
from planted import find
from planted.agents import BUGS, CClient, c_library, mixed_clients

from ringfold.testing.__main__ import main
from ringfold.testing.agents import run_agents

SEEDS = 60
MAX_SEEDS = 300


def test_flows_of_python_and_c_clients_outlive_agents() -> None:
    for seed in range(1, SEEDS + 1):
        run_agents(seed, make_client=mixed_clients)


def test_a_host_of_c_clients_only() -> None:
    library = c_library()
    if library is None:
        pytest.skip("there is no C compiler")
    reads = sum(
        run_agents(seed, make_client=lambda number: CClient(library)).counts["hints read"] for seed in range(1, SEEDS)
    )
    assert reads > SEEDS


def test_a_seed_is_the_whole_schedule() -> None:
    lines: list[list[str]] = [[], []]
    for each in lines:
        run_agents(5, echo=each.append, make_client=mixed_clients)
    assert lines[0] == lines[1]
    assert len(lines[0]) > 100


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = find(BUGS[name], first=1, max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--agents --seed {failure.seed}" in str(failure)
    run_agents(failure.seed, make_client=mixed_clients)


def test_the_command_runs_seeds_and_replays_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--agents", "--seeds", "10", "--from", "1", "--jobs", "1"]) == 0
    assert "agent killed" in capsys.readouterr().out
    assert main(["--agents", "--seed", "3"]) == 0
    assert "no violation" in capsys.readouterr().out
