"""A member that computes something else than the others, with real processes: it is repaired, and never silently."""

import json

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext, by_id

pytestmark = pytest.mark.waiting

COUNT = 300_000
"""Of 8 bytes: three blocks."""


def train(me: ProgramContext) -> None:
    """Twelve steps, compared every five. The peer with the highest id is off in one number after step `off_in`."""
    import ringfold as rf

    weights = np.zeros(COUNT)
    moments = np.zeros(COUNT)
    state = rf.SharedState(weights=weights, moments=moments, seen=rf.MayDiffer(np.zeros(3)))
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        me.report("joined", peer=run.peer_id)
        try:
            for step in run.steps(
                state, until=12, check_every=5, on_divergence=me.options.get("on_divergence", "repair")
            ):
                gradients = np.full(COUNT, 1.0 + step.number)
                step.all_reduce(gradients, op="avg")
                weights += gradients
                moments += 1
                if run.peer_id == 3 and step.number == me.options["off_in"]:
                    weights[-1] += 0.5
        except rf.StateDiverged as error:
            me.report("raised", **vars(error), message=str(error), sums=[weights.sum(), moments.sum()])
        me.report("end", revision=state.revision, sums=[weights.sum(), moments.sum()])
        me.receive()


def sums(steps: int) -> list[float]:
    return [COUNT * sum(1.0 + number for number in range(steps)), COUNT * float(steps)]


@pytest.mark.parametrize(("off_in", "since", "found_at"), [(6, 5, 10), (11, 10, 12)])
def test_every_peer_and_the_status_name_the_peer_that_diverged(
    cluster: ProgramCluster, off_in: int, since: int, found_at: int
) -> None:
    """In the last steps, too: the loop compares once more at its end."""
    master = cluster.start_master()
    peers = by_id(cluster.start_program(train, 3, off_in=off_in))
    for peer in peers.values():
        fact = peer.expect("end")
        assert (fact["revision"], fact["sums"]) == (12, sums(12))
        line = peer.expect_log("had diverged")
        name = master.expect_events("peer_registered", 3)[2]["name"]
        received = COUNT * 8 % (1 << 20)  # the last block of three
        for text in (
            f"peer 3 ({name}) had diverged from the run at revision {found_at}: 'weights' held other bits",
            f"{received} bytes were received",
            f"agreed with the others at revision {since}",
            "MayDiffer",
        ):
            assert text in line
    assert [event["divergence"]["peer"] for event in master.expect_events("peer_diverged")] == [3]
    shown = cluster.start_command("status", "status", master.address, "--json")
    assert shown.wait() == 0
    group = json.loads(shown.stdout.text())["groups"][0]
    assert (group["divergences"], [each["peer"] for each in group["diverged"]]) == (1, [3])
    for peer in peers.values():
        peer.send()
        peer.wait_success()


def test_on_divergence_raise_is_an_error_where_it_happened_and_the_others_go_on(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = by_id(cluster.start_program(train, 3, off_in=6, on_divergence="raise"))
    fact = peers[3].expect("raised")
    assert (fact["peer"], fact["revision"], fact["since"], fact["keys"]) == (3, 10, 5, ["weights"])
    assert fact["sums"] == sums(10), "it has the run's state when the error is raised"
    peers[3].send()
    peers[3].wait_success()
    for peer in (peers[1], peers[2]):
        assert peer.expect("end")["sums"] == sums(12)
        peer.send()
        peer.wait_success()
