"""The diagnosis of slow steps: known causes are named, and healthy runs are nobody's fault."""

import pytest
from msgspec.structs import replace

from ringfold.observe.processes import gather
from ringfold.observe.why import Diagnosis, diagnose
from ringfold.testing.recorded import Scene, play
from ringfold.wire.events import Event, OpEnded, StepEnded

SEEDS = range(20)


def diagnosed(scene: Scene, steps: tuple[int, int] | None = None) -> Diagnosis:
    return diagnose([gather(each.name, each.begun, each.events) for each in play(scene)], steps)


def blamed(diagnosis: Diagnosis) -> list[tuple[str, str, int, int]]:
    return sorted((each.cause, each.kind, each.peer, each.target) for each in diagnosis.findings)


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_blamed_in_healthy_runs(seed: int) -> None:
    """Also where everybody loses the core now and then."""
    for peers, hiccups in ((2, 0.0), (4, 0.0), (4, 0.3), (8, 0.1)):
        diagnosis = diagnosed(Scene(seed=seed, peers=peers, hiccups=hiccups))
        assert not diagnosis.findings, diagnosis.verdict
        assert diagnosis.verdict.startswith("nobody is blamed")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_loader_a_slow_model_and_a_busy_host_are_named(seed: int) -> None:
    peers = 2 + seed % 4
    one = 1 + seed % peers
    assert blamed(diagnosed(Scene(seed=seed, peers=peers, slow_loader={one: 25.0}))) == [("compute", "loader", one, 0)]
    assert blamed(diagnosed(Scene(seed=seed, peers=peers, slow_model={one: 25.0}))) == [("compute", "model", one, 0)]
    assert blamed(diagnosed(Scene(seed=seed, peers=peers, busy_host={one: 0.5}))) == [("host", "busy core", one, 0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link_is_named(seed: int) -> None:
    """Also where clocks are wrong, and where everybody loses the core now and then."""
    peers = 2 + seed % 4
    one = 1 + seed % peers
    link = (one, 1 + one % peers)
    for hiccups in (0.0, 0.2):
        scene = Scene(seed=seed, peers=peers, slow_link={link: 100.0}, hiccups=hiccups, offsets_ms={1: 50.0})
        assert blamed(diagnosed(scene)) == [("link", "slow link", *link)]


@pytest.mark.parametrize("seed", SEEDS)
def test_three_causes_at_once_are_all_named(seed: int) -> None:
    scene = Scene(seed=seed, peers=6, slow_loader={1: 60.0}, busy_host={3: 0.6}, slow_link={(5, 6): 300.0})
    assert blamed(diagnosed(scene)) == [
        ("compute", "loader", 1, 0),
        ("host", "busy core", 3, 0),
        ("link", "slow link", 5, 6),
    ]


def test_all_links_from_a_peer_are_one_finding() -> None:
    """Each of its links is slow: the peer's uplink is, and not three links by chance."""
    played = play(Scene(peers=4))
    for process in played[1:]:
        process.events[:] = [
            Event(event.stamp, replace(event.notice, arriving_ns=300_000_000, arriving_from=2))
            if isinstance(event.notice, OpEnded) and event.stamp.peer != 2
            else event
            for event in process.events
        ]
    diagnosis = diagnose([gather(each.name, each.begun, each.events) for each in played])
    assert blamed(diagnosis) == [("link", "slow link", 2, 0)]
    assert diagnosis.findings[0].name.startswith("the links from peer 2")


def test_work_between_ops_is_found_without_figures_of_the_first_part() -> None:
    """What a step does after its first wait has no CPU figures: it is compute, and more is not said."""
    played = play(Scene(slow_loader={2: 60.0}))
    for process in played[1:]:
        process.events[:] = [
            Event(event.stamp, replace(event.notice, waited_ns=event.notice.began_ns + 1, cpu_ns=0, queued_ns=0))
            if isinstance(event.notice, StepEnded)
            else event
            for event in process.events
        ]
    diagnosis = diagnose([gather(each.name, each.begun, each.events) for each in played])
    assert blamed(diagnosis) == [("compute", "between ops", 2, 0)]


def test_a_single_slow_step_is_shown_and_nobody_is_blamed() -> None:
    """One step of 200 is slow because a peer lost its core once."""
    diagnosis = diagnosed(Scene(steps=60, hiccups=0.02, seed=5))
    assert not diagnosis.findings
    assert 0 < diagnosis.slow_steps < 20
    assert diagnosis.slowest[0].cause == "host"
    assert "without a core" in diagnosis.slowest[0].evidence


def test_a_part_of_the_run_can_be_asked_for() -> None:
    assert diagnosed(Scene(slow_loader={2: 25.0}), (10, 19)).steps == 10


def test_without_steps_it_is_inconclusive() -> None:
    diagnosis = diagnosed(Scene(steps=2))
    assert diagnosis.verdict.startswith("inconclusive")
    assert diagnosis.steps == 0
