"""Programs at fault: calls that differ or can never meet. Both sides learn of it, and the run stays usable."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, Me, Peer

MEET_S = 2.0
"""Calls that can never meet are reported within a second; the other second is for a loaded machine."""

Call = Callable[[Any, Any], object]


def _differing() -> dict[str, tuple[Any, Call, Any, Call]]:
    """Name -> what most peers pass and call, and what the odd one does."""
    few, many = np.ones(100, np.float32), np.ones(60_000, np.float32)

    def reduce(run: Any, array: Any) -> object:  # noqa: ANN401 - a communicator, and whatever is reduced
        return run.all_reduce(array)

    return {
        "count": (few, reduce, np.ones(101, np.float32), reduce),
        "count of a large op": (many, reduce, np.ones(60_001, np.float32), reduce),
        "small against large": (few, reduce, many, reduce),
        "dtype": (few, reduce, np.ones(100, np.int32), reduce),
        "dtype of a large op": (many, reduce, np.ones(60_000, np.int32), reduce),
        "op": (few, reduce, few, lambda run, array: run.all_reduce(array, op="max")),
        "op of a large op": (many, reduce, many, lambda run, array: run.all_reduce(array, op="prod")),
        "quantisation": (many, reduce, many, lambda run, array: run.all_reduce(array, quantize="minmax8")),
        "quantisation of a small op": (few, reduce, few, lambda run, array: run.all_reduce(array, quantize="minmax8")),
        "layout": ([few, many], reduce, [few[:50].copy(), np.ones(60_050, np.float32)], reduce),
        "collective": (few, reduce, few, lambda run, array: run.broadcast(array)),
        "retry": (few, reduce, few, lambda run, array: run.all_reduce(array, retry=False)),
    }


@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_calls_that_differ_are_usage_errors_that_print_both_sides(cluster: Cluster, evidence: str) -> None:
    cluster.start_master(evidence=evidence)
    peers = cluster.start(differ, 3)
    for name in _differing():
        wrong = [peer.expect("wrong", case=name) for peer in peers]
        [odd] = [fact["peer"] for fact in wrong if fact["odd"]]
        for fact in wrong:
            assert fact["error"] == "UsageError", fact
            assert len(fact["peers"]) == 2, fact
            assert odd in fact["peers"], fact
            sides = {peer: fact["words"].partition(f"peer {peer} (p")[2] for peer in fact["peers"]}
            assert all(re.match(r"\d(, you)?\) called ", side) for side in sides.values()), fact
            assert [side[1:6] == ", you" for side in sides.values()] == [peer == fact["peer"] for peer in sides], fact
            assert fact["intact"], fact
    for peer in peers:
        peer.finish()


def differ(me: Me) -> None:
    with me.join(op_timeout_s=20.0) as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        for name, (array, call, odd_array, odd_call) in _differing().items():
            odd = run.rank == 1
            if odd:
                array, call = odd_array, odd_call
            before = [np.copy(part) for part in array] if isinstance(array, list) else np.copy(array)
            with me.failing("wrong", case=name, peer=run.peer_id, odd=odd) as facts:
                try:
                    call(run, array)
                finally:
                    pairs = zip(array, before, strict=True) if isinstance(array, list) else [(array, before)]
                    facts["intact"] = all(bool((now == then).all()) for now, then in pairs)
            check = np.full(40_000, 1.0)
            assert run.all_reduce(check).contributors == 3
            assert (check == 3).all()


@pytest.mark.parametrize("count", [100, 60_000], ids=["small", "large"])
@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_a_vote_and_an_op_never_meet(cluster: Cluster, evidence: str, count: int) -> None:
    cluster.start_master(evidence=evidence)
    _check_never_meeting(cluster.start(vote_against_an_op, 2, floats=count), ["update_topology", "op tag 0 sequence 3"])


def vote_against_an_op(me: Me) -> None:
    with me.join(op_timeout_s=20.0) as run:
        while run.group_size < 2:
            run.update_topology(min_world=2)
        for _ in range(3):
            run.all_reduce(np.ones(me.options["floats"]))
        buffer = np.arange(float(me.options["floats"]))
        me.say("begin", peer=run.peer_id)
        with me.failing("clash") as facts:
            try:
                if run.rank == 0:
                    run.update_topology()
                else:
                    run.all_reduce(buffer)
            finally:
                facts["intact"] = bool((buffer == np.arange(float(me.options["floats"]))).all())
        _go_on_together(me, run)


def test_two_different_votes_never_meet(cluster: Cluster) -> None:
    cluster.start_master()
    first = cluster.start_one(vote_differently, join={"group": 0}, vote="update")
    first.expect("joined")
    second = cluster.start_one(vote_differently, join={"group": 1}, vote="pending")
    _check_never_meeting([first, second], ["update_topology", "are_peers_pending"])


def vote_differently(me: Me) -> None:
    with me.join(op_timeout_s=20.0) as run:
        me.say("joined")
        while run.world_size < 2:
            if run.are_peers_pending():
                run.update_topology()
        me.say("begin", peer=run.peer_id)
        with me.failing("clash", intact=True):
            if me.options["vote"] == "update":
                run.update_topology()
            else:
                run.are_peers_pending()
        _go_on_together(me, run)


def _go_on_together(me: Me, run: Any) -> None:  # noqa: ANN401 - a communicator
    me.hear()
    run.update_topology()
    size = run.group_size  # before the op: who ends first leaves
    if size > 1:
        assert run.all_reduce(np.ones(60_000)).contributors == size
    me.say("went on")


def _check_never_meeting(peers: list[Peer], calls: list[str]) -> None:
    """Both get the error in time, and it names both peers and both calls."""
    begun = [peer.expect("begin") for peer in peers]
    ids = sorted(fact["peer"] for fact in begun)
    for peer in peers:
        clash = peer.expect("clash")
        assert clash["error"] == "UsageError"
        assert clash["peers"] == ids
        assert all(f"peer {peer_id}" in clash["words"] for peer_id in ids)
        assert all(call in clash["words"] for call in calls), clash["words"]
        assert clash["at"] - max(fact["at"] for fact in begun) < MEET_S
        assert clash["intact"]
    for peer in peers:
        peer.tell()
    for peer in peers:
        peer.expect("went on")
        peer.finish()


def test_ops_with_different_tags_are_left_to_the_deadline(cluster: Cluster) -> None:
    """They might meet yet: another thread may be on its way to the other tag."""
    cluster.start_master()
    peers = cluster.start(wait_under_own_tag, 2)
    for peer in peers:
        late = peer.expect("late")
        assert late["error"] == "DeadlineExceeded"
        assert late["took_s"] >= 1.0
        peer.finish()


def wait_under_own_tag(me: Me) -> None:
    with me.join(op_timeout_s=1.0) as run:
        while run.group_size < 2:
            run.update_topology(min_world=2, timeout_s=30)
        with me.failing("late"):
            run.all_reduce(np.ones(10), tag=run.rank)
        assert run.all_reduce(np.ones(10), tag=7, timeout_s=20).contributors == 2
