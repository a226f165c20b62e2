"""Several runs on one master: the simulation finds nothing wrong with us, and everything that is planted."""

import pytest
from planted import find
from planted.several import BUGS

from ringfold.errors import ConfigError
from ringfold.testing.masters import lead
from ringfold.testing.several import SeveralMaster, run_several
from ringfold.testing.simulation import Setup, Simulation, quick_settings
from ringfold.testing.stateful import Looping, looping
from ringfold.testing.workloads import Training, training

SEEDS = 12
FOUND_BY = {"one_journal": 1, "forgotten_runs": 2, "unfenced_runs": 3, "confused_runs": 2}
"""The first seed that finds a planted bug. `PYTHONPATH=tests python -m planted several --from 1` finds it."""
MAX_SEEDS = 60


def test_seeds_with_several_runs_keep_every_promise() -> None:
    for seed in range(1, SEEDS + 1):
        run_several(seed)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_several_runs_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY[name], max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--runs --seed {failure.seed}" in str(failure)
    run_several(failure.seed)  # it is the bug that was found: without it the same seed keeps every promise


def test_a_seed_that_found_something_finds_nothing_any_more() -> None:
    """22: a peer that came too late to a finished run did not believe one of several masters, and tried on."""
    run_several(22)


def shared(journal: bool = True) -> Simulation:
    sim = Simulation(7, Setup(settings=quick_settings(return_ms=2_000), journal=journal, shell=SeveralMaster))
    sim.judges_evictions = True
    return sim


def test_both_runs_go_on_with_the_next_master() -> None:
    sim = shared()
    one = sim.cluster(peers=2, program=training(Training(seed=7, steps=40, ops=(1, 1), think_ms=1.0)))
    two = sim.cluster(peers=2, program=training(Training(seed=8, steps=40, ops=(1, 1), think_ms=1.0)), run="two")
    sim.run_until(lambda: all(len(book.history.committed) > 5 for book in sim.books.values()), limit_ms=10_000)
    sim.master.die("is killed")
    lead(sim)
    sim.run_until(sim.is_over, limit_ms=60_000)
    for cluster in (one, two):
        assert all(peer.error is None for peer in cluster.peers)
        assert len({peer.digest for peer in cluster.peers}) == 1


def test_a_finished_run_admits_no_peer_after_a_change_of_masters() -> None:
    sim = shared()
    sim.cluster(peers=2, program=looping(Looping(seed=7, until=4, foreign=0)), run="two")
    sim.run_until(sim.is_over, limit_ms=20_000)
    sim.master.die("is killed")
    lead(sim)
    late = sim.join(looping(Looping(seed=7, until=4)), run="two")
    sim.run_until(sim.is_over, limit_ms=20_000)
    assert isinstance(late.error, ConfigError)
    assert "run two finished at revision 4" in str(late.error)
