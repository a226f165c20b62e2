"""Programs at fault: calls that differ or can never meet. The run continues, and the peer at fault gets the reason."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext, until

from ringfold.runtime import master_client

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
def test_a_newcomer_that_calls_something_else_is_evicted_and_the_others_go_on(
    cluster: ProgramCluster, evidence: str
) -> None:
    cluster.start_master(evidence=evidence)
    veterans = cluster.start_program(call_together, 2)
    for veteran in veterans:
        veteran.expect("ready")
    for name in _differing():
        odd = cluster.start_one(call_something_else, case=name)
        wrong = odd.expect("wrong")
        assert wrong["error"] == "CallMismatch", wrong
        assert ", you) called " in wrong["message"], wrong
        assert wrong["message"].count(") as call 1") == 2, wrong
        assert "2 of 2 members that were here before the last newcomers called it" in wrong["message"]
        assert wrong["intact"], wrong
        odd.wait_success()
        for veteran in veterans:
            assert veteran.expect("called", case=name)["contributors"] == 2
    for veteran in veterans:
        veteran.wait_success()


def _gather(run: Any, size: int) -> None:  # noqa: ANN401 - a communicator
    while run.group_size < size:
        run.update_topology(min_world=size)


def call_together(me: ProgramContext) -> None:
    with me.join(op_timeout_s=20.0) as run:
        _gather(run, 2)
        run.all_reduce(np.ones(10))
        me.report("ready")
        for name, (array, call, _, _) in _differing().items():
            _gather(run, 3)
            given = [np.copy(part) for part in array] if isinstance(array, list) else np.copy(array)
            info: Any = call(run, given)
            pairs = zip(given, array, strict=True) if isinstance(given, list) else [(given, array)]
            assert all((now == 2 * then).all() for now, then in pairs)
            me.report("called", case=name, contributors=len(info.contributors))


def call_something_else(me: ProgramContext) -> None:
    _, _, array, call = _differing()[me.options["case"]]
    before = [np.copy(part) for part in array] if isinstance(array, list) else np.copy(array)
    with me.join(op_timeout_s=20.0) as run, me.failing("wrong") as facts:
        try:
            call(run, array)
        finally:
            pairs = zip(array, before, strict=True) if isinstance(array, list) else [(array, before)]
            facts["intact"] = all(bool((now == then).all()) for now, then in pairs)


def test_wrong_newcomers_do_not_outvote_members_of_long_standing(cluster: ProgramCluster) -> None:
    """And until one of these has called, no call fails: the status names both sides."""
    master = cluster.start_master()
    veterans = cluster.start_program(train_with_newcomers, 2)
    for veteran in veterans:
        veteran.expect("trained")
    wrong = cluster.start_program(train_wrongly, 3)
    for veteran in veterans:
        veteran.expect("admitted", size=5)
    for peer in wrong:
        peer.expect("calls")
    veterans[0].send()
    until(lambda: _is_disputed(master.address), "the status names the dispute")
    veterans[1].send()
    for peer in wrong:
        assert peer.expect("wrong")["error"] == "CallMismatch"
        peer.wait_success()
    for veteran in veterans:
        veteran.expect("went on", contributors=2)
        veteran.wait_success()


def _is_disputed(master: str) -> bool:
    with master_client.connect([master], b"") as connection:
        return any("different calls" in each.what for each in connection.status().waiting)


def train_with_newcomers(me: ProgramContext) -> None:
    with me.join(op_timeout_s=20.0) as run:
        _gather(run, 2)
        run.all_reduce(np.ones(10))
        me.report("trained")
        _gather(run, 5)
        me.report("admitted", size=run.group_size)
        me.receive()
        me.report("went on", contributors=len(run.all_reduce(np.ones(60_000)).contributors))


def train_wrongly(me: ProgramContext) -> None:
    with me.join(op_timeout_s=20.0) as run, me.failing("wrong"):
        me.report("calls")
        run.all_reduce(np.ones(60_001))


def test_a_peer_that_skips_a_step_is_named_at_its_first_op(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(skip_a_step, 3)
    reported = [peer.expect("ended") for peer in peers]
    [wrong] = [fact for fact in reported if fact["skipped"]]
    assert wrong["error"] == "CallMismatch", wrong
    assert ", you) is at step 4" in wrong["message"]
    assert "are at step 3" in wrong["message"]
    assert all(fact["total"] == sum(range(3)) * 3 + sum(range(3, 8)) * 2 for fact in reported if not fact["skipped"]), (
        reported
    )
    for peer in peers:
        peer.wait_success()


def skip_a_step(me: ProgramContext) -> None:
    from ringfold import CallMismatch

    total, skipped, error, text = 0.0, False, "", ""
    with me.join(op_timeout_s=20.0) as run:
        _gather(run, 3)
        skips = run.rank == 1
        try:
            for step in run.steps(until=8, min_world=2):
                if skips and step.number == 3:
                    skipped = True
                    continue
                gradient = np.full(1_000, float(step.number))
                step.all_reduce(gradient)
                total += float(gradient[0])
        except CallMismatch as failure:
            error, text = type(failure).__name__, str(failure)
        me.report("ended", total=total, skipped=skipped, error=error, message=text)


@pytest.mark.parametrize("count", [100, 60_000], ids=["small", "large"])
@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_a_vote_and_an_op_never_meet(cluster: ProgramCluster, evidence: str, count: int) -> None:
    """Two are in the op, one is in a vote: that one is wrong, and the op of the others is done without it."""
    cluster.start_master(evidence=evidence)
    peers = cluster.start_program(vote_against_an_op, 3, floats=count)
    wrong, *right = sorted(peers, key=lambda peer: int(peer.expect("begin")["rank"]))
    _check_evicted(wrong, ["waits in update_topology", "in op tag 0 sequence 3", "(2 of 3 "])
    for peer in right:
        peer.expect("done", contributors=2)
        peer.wait_success()


def vote_against_an_op(me: ProgramContext) -> None:
    with me.join(op_timeout_s=20.0) as run:
        _gather(run, 3)
        for _ in range(3):
            run.all_reduce(np.ones(me.options["floats"]))
        buffer = np.arange(float(me.options["floats"]))
        me.report("begin", rank=run.rank)
        if run.rank == 0:
            with me.failing("clash"):
                run.update_topology()
            return
        info = run.all_reduce(buffer)
        assert (buffer == 2 * np.arange(float(me.options["floats"]))).all()
        me.report("done", contributors=len(info.contributors))


def test_two_different_votes_never_meet(cluster: ProgramCluster) -> None:
    """In two groups that are equally large: the one with the longest member is right."""
    cluster.start_master()
    first = cluster.start_one(vote_differently, join={"group": 0}, vote="update")
    first.expect("joined")
    second = cluster.start_one(vote_differently, join={"group": 1}, vote="pending")
    sides = ["waits in update_topology", "waits in meet", "peer 1 (p0) joined first"]
    _check_evicted(second, sides)
    first.expect("done")
    first.wait_success()


def vote_differently(me: ProgramContext) -> None:
    with me.join(op_timeout_s=20.0) as run:
        me.report("joined")
        while run.world_size < 2:
            if run.are_peers_pending():
                run.update_topology()
        me.report("begin")
        if me.options["vote"] == "update":
            run.update_topology()
            me.report("done")
            return
        with me.failing("clash"):
            run.meet()


def _check_evicted(peer: ClusterProcess, text: list[str]) -> None:
    """It gets the error in time, which names both sides, and what to do."""
    clash = peer.expect("clash")
    assert clash["error"] == "CallMismatch"
    for each in [*text, "can never meet", ", you)", "fix the program, then join again"]:
        assert each in clash["message"], clash["message"]
    assert clash["at"] - peer.reports("begin")[0]["at"] < MEET_S
    peer.wait_success()


def test_ops_with_different_tags_are_left_to_the_deadline(cluster: ProgramCluster) -> None:
    """They might meet yet: another thread may be about to call the other tag."""
    cluster.start_master()
    peers = cluster.start_program(wait_under_own_tag, 2)
    for peer in peers:
        late = peer.expect("late")
        assert late["error"] == "DeadlineExceeded"
        assert late["took_s"] >= 1.0
        peer.wait_success()


def wait_under_own_tag(me: ProgramContext) -> None:
    with me.join(op_timeout_s=1.0) as run:
        while run.group_size < 2:
            run.update_topology(min_world=2, timeout_s=30)
        with me.failing("late"):
            run.all_reduce(np.ones(10), tag=run.rank)
        assert len(run.all_reduce(np.ones(10), tag=7, timeout_s=20).contributors) == 2
