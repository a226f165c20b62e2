"""Regions under drawn faults; planted bugs in them; and 1,024 nodes in 16 regions."""

import pytest
from planted import find
from planted.regions import BUGS

from ringfold.probe.rounds.settings import RoundSettings
from ringfold.testing.probing import RoundScenario
from ringfold.testing.probing_regions import (
    RegionScenario,
    RegionSetup,
    RegionSimulation,
    RelayFault,
    draw_regions,
    run_regions,
)
from ringfold.wire.probing import RoundKind

MAX_SEEDS = 1_000
FOUND_BY = {"hides_leaving": 811, "late_is_new": 345, "holds_late": 2_086}
"""The first seed that finds a planted bug, where many do not."""
SEEDS = 20


@pytest.mark.parametrize("kind", ["master", "time", "local"])
def test_rounds_with_relays_keep_their_promises_under_faults(kind: RoundKind) -> None:
    """The same seeds every time; `--regions --seeds` draws others."""
    seeds = [seed for seed in range(1, 8 * SEEDS) if draw_regions(seed).rounds.settings.kind == kind]
    for seed in seeds[:SEEDS]:
        assert run_regions(seed).windows > 0


def test_the_same_seed_gives_the_same_run() -> None:
    assert run_regions(7).digest == run_regions(7).digest
    assert run_regions(7).digest != run_regions(8).digest


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    failure = find(BUGS[name], first=FOUND_BY.get(name, 1), max_seeds=MAX_SEEDS)
    assert failure is not None, f"{BUGS[name].text}: not found within {MAX_SEEDS} seeds"
    assert f"--regions --seed {failure.seed}" in str(failure)
    run_regions(failure.seed)  # it is the bug that was found: without it the same seed keeps every promise


NODES, REGIONS = 1_024, 16


def large(faults: tuple[RelayFault, ...], relays: int = REGIONS) -> RegionSimulation:
    settings = RoundSettings(window_ms=1_500, report_timeout_ms=400, grace_ms=500, settle_ms=100)
    rounds = RoundScenario(settings, NODES, 0, (), 9_000)
    homes = tuple((place % REGIONS, (place + 1) % REGIONS) if relays else () for place in range(NODES))
    return RegionSimulation(
        1, RegionScenario(rounds, max(1, relays), homes, faults, head_start_ms=1_000), RegionSetup()
    )


def test_a_thousand_nodes_in_sixteen_regions_survive_their_relays() -> None:
    """Relays crash, freeze, are cut off and are late, in the middle of rounds. In the end a round has all 1,024 nodes,
    and the root has sent and received a few messages per relay, and not per node."""
    faults = (
        RelayFault("relay_crash", 2_500, 3_000, 0),
        RelayFault("relay_crash", 4_020, 500, 5),
        RelayFault("relay_freeze", 3_000, 4_000, 9),
        RelayFault("relay_freeze", 5_600, 300, 10),
        RelayFault("relay_cut", 4_500, 0, 12),
        RelayFault("relay_late", 2_000, 3_000, 15),
    )
    simulation = large(faults)
    outcome = simulation.run()
    assert outcome.whole >= 1
    assert outcome.rounds >= 4
    published = simulation.world.history.published
    assert any(summary.missing for summary in published), "the faults were felt"
    assert len(published[-1].nodes) == NODES


def test_a_round_of_a_thousand_nodes_costs_the_root_a_few_messages_per_relay() -> None:
    simulation = large(())
    simulation.run()
    world = simulation.world
    master = world.master
    assert master is not None
    rounds = len(world.history.published)
    before, counts = rounds, list(master.root_messages)
    done = simulation.scheduler.run_until(
        lambda: len(world.history.published) == before + 2, simulation.scheduler.now + 10**10
    )
    assert done
    received, sent = (now - then for now, then in zip(master.root_messages, counts, strict=True))
    assert received <= 2 * 3 * REGIONS, "a batch or two from each relay, and no report of a node"
    assert sent <= 2 * 4 * REGIONS, "an end, a start and the clocks for each relay"
