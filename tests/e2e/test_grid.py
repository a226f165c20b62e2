"""The example of a grid: it fills up in any order, loses peers, and all shards stay at the same step."""

import importlib.util
import random
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import ClusterProcess, Message, ProgramCluster, ProgramContext

pytestmark = pytest.mark.waiting

GRID = Path(__file__).resolve().parents[2] / "examples" / "grid.py"
STEPS = 250


def load() -> ModuleType:
    made = importlib.util.spec_from_file_location("grid", GRID)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def take_part(me: ProgramContext) -> None:
    """The example's own `main`, with a report of each step."""
    grid: Any = load()
    take_step, shard = grid.take_step, me.options["shard"]

    def step_and_report(run: Any, of: int, state: Any, weights: Any) -> None:  # noqa: ANN401 - as the example's
        take_step(run, of, state, weights)
        me.report(
            "step",
            number=state.revision,
            size=run.group_size,
            world=run.world_size,
            groups=run.groups,
            largest=run.largest_group,
            digest=zlib.crc32(weights.data),
        )

    grid.take_step = step_and_report
    grid.main(me.address, shard, me.options["steps"], me.options["fewest"])


def start(cluster: ProgramCluster, shard: int, fewest: int) -> ClusterProcess:
    return cluster.start_one(take_part, shard=shard, steps=STEPS, fewest=fewest)


def step_in(peer: ClusterProcess, **facts: int) -> Message:
    return peer.expect("step", **facts)


@pytest.mark.parametrize("order", range(3))
def test_a_grid_fills_up_in_any_order_and_survives_a_death(cluster: ProgramCluster, order: int) -> None:
    cluster.start_master()
    shards = [0, 0, 0, 1, 1, 1]
    random.Random(order).shuffle(shards)
    peers = [(shard, start(cluster, shard, 4)) for shard in shards]
    for _, peer in peers:
        step_in(peer, world=6, groups=2, largest=3, size=3)
    shard, victim = peers.pop(order)
    victim.kill()
    mates = [peer for each, peer in peers if each == shard]
    for peer in mates:
        step_in(peer, size=2)
    others = [peer for each, peer in peers if each != shard]
    for peer in others:
        # The shard that lost no peer continues with one peer more than the other.
        step_in(peer, world=5, groups=2, largest=3, size=3)
    peers.append((shard, start(cluster, shard, 4)))
    for _, peer in peers:
        step_in(peer, world=6, size=3)
    for _, peer in peers:
        peer.wait_success(60)
    # The victim, too: in the first steps, before the grid was full, it may have been the only one of its shard.
    check_lock_step([victim, *(peer for _, peer in peers)], shards=2)


def test_nothing_happens_while_a_shard_is_missing(cluster: ProgramCluster) -> None:
    """Three peers of one shard wait, and none waits for ever: the first peer of the other shard starts the grid."""
    master = cluster.start_master()
    peers = [start(cluster, 0, 2) for _ in range(3)]
    master.expect_events("peer_registered", 3)
    missing = start(cluster, 1, 2)
    for peer in peers:
        assert step_in(peer)["groups"] == 2
    step_in(missing, size=1)
    for peer in [*peers, missing]:
        peer.wait_success(60)


def test_a_shard_that_dies_out_stops_the_grid_and_names_what_is_lost(cluster: ProgramCluster) -> None:
    cluster.start_master(resume_wait_s=0)
    peers = [start(cluster, 0, 3) for _ in range(2)]
    last = start(cluster, 1, 3)
    # At the first step the lost state would be that of any newcomer.
    last.expect("step", lambda fact: fact["number"] >= 3)
    last.kill()
    heir = start(cluster, 1, 3)
    heir.expect_log("StateLost")
    assert heir.wait() != 0
    for peer in peers:
        assert peer.is_running


def check_lock_step(peers: list[ClusterProcess], shards: int) -> None:
    """The members of a group have the same bits at each step, and none begins a step that another has not reached."""
    steps: dict[int, list[Message]] = {}
    for peer in peers:
        for fact in peer.reports("step"):
            steps.setdefault(fact["number"], []).append(fact)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for number, facts in steps.items():
        assert len({fact["digest"] for fact in facts}) == shards
        before = [fact["at"] for fact in steps.get(number - 1, [])]
        assert not before or max(before) <= min(fact["at"] for fact in facts), f"step {number} began too early"
