"""A peer that is evicted joins again by itself, inside of `steps`, and the others lose nothing by it."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.peer.session import Session

pytestmark = pytest.mark.waiting

COUNT = 50_000


def train(me: ProgramContext) -> None:
    """Steps until a stop. Peer `frozen` stops itself at the given step.

    `at`: "op" before the first op of a step, "later" before the second, "between" after the last.
    """
    import os
    import signal

    import ringfold as rf

    weights = np.zeros(COUNT)
    state = rf.SharedState(weights=weights)
    at, frozen_in = me.options.get("at", "op"), me.options.get("frozen_in", 5)
    is_frozen = False

    def freeze(where: str) -> None:
        nonlocal is_frozen
        if me.options.get("freezes") and where == at and step.number == frozen_in and not is_frozen:
            is_frozen = True
            os.kill(os.getpid(), signal.SIGSTOP)

    with me.join() as run:
        while run.group_size < me.options["world"]:
            run.update_topology(min_world=me.options["world"])
        me.report("joined", peer=run.peer_id)
        try:
            check_every = 1 if at == "between" else 1_000
            for step in run.steps(state, check_every=check_every, rejoin=me.options.get("rejoin", True)):
                gradients = np.full(COUNT, 1.0 + step.number)
                freeze("op")
                before = step.number
                info = step.all_reduce(gradients, op="avg")
                assert (gradients == 1.0 + step.number).all(), "an average over those that computed it for this step"
                freeze("later")
                stop = np.full(
                    COUNT, me.has_message(), np.int64
                )  # so large that no peer has it before all have sent it
                step.all_reduce(stop, op="max")
                weights += gradients - step.number
                me.report("step", number=step.number, before=before, peer=run.peer_id, world=len(info.contributors))
                freeze("between")
                if stop[0]:
                    break
        except rf.Evicted as error:
            me.report("evicted", message=str(error))
            return
        me.report("end", revision=state.revision, number=step.number, weights=[weights.min(), weights.max()])


def start(cluster: ProgramCluster, **options: object) -> tuple[list[ClusterProcess], ClusterProcess]:
    """Two peers, and one that freezes; all three train."""
    peers = cluster.start_program(train, 2, world=3, **options)
    return peers, cluster.start_one(train, world=3, freezes=True, **options)


@pytest.mark.parametrize("at", ["op", "between"])
def test_a_frozen_peer_comes_back_by_itself_and_goes_on_with_the_others(cluster: ProgramCluster, at: str) -> None:
    cluster.start_master()
    peers, sleeper = start(cluster, at=at)
    sleeper.wait_frozen()
    for peer in peers:
        peer.expect("step", world=2)
    sleeper.thaw()
    for peer in [*peers, sleeper]:
        peer.expect("step", world=3, timeout_s=40)
        while peer.expect("step", world=3)["number"] < 12:
            pass
    assert "evicted" not in {message.get("what") for message in sleeper.messages}
    back = next(fact for fact in sleeper.reports("step") if fact["peer"] == 4)
    if at == "op":
        assert back["number"] > back["before"], "the step that it was in becomes the group's"
    peers[0].send()
    ends = [peer.expect("end") for peer in [*peers, sleeper]]
    for end in ends:
        # Every step adds exactly one: to the weights of the peer that came back as well.
        assert end["weights"] == [end["number"] + 1] * 2
    for peer in [*peers, sleeper]:
        peer.wait_success()


@pytest.mark.parametrize(("at", "rejoin"), [("later", True), ("op", False)])
def test_where_it_cannot_follow_the_eviction_is_raised(cluster: ProgramCluster, at: str, rejoin: bool) -> None:
    cluster.start_master()
    peers, sleeper = start(cluster, at=at, rejoin=rejoin)
    sleeper.wait_frozen()
    for peer in peers:
        peer.expect("step", world=2)
    sleeper.thaw()
    assert "join again" in sleeper.expect("evicted")["message"]
    sleeper.wait_success()
    peers[0].send()
    for peer in peers:
        peer.expect("end")
        peer.wait_success()


@pytest.fixture
def outside() -> Iterator[rf.Communicator]:
    """A peer in this process that may join again."""
    with MasterThread() as master, rf.join(master.address, timeout_s=30) as run:
        run.leave()
        yield run


def during_rejoin(run: rf.Communicator, before: Callable[[], None], joining: Callable[[], None]) -> None:
    """Do something while this peer joins again: before there is a session, and while that joins."""
    again = run._join_again
    assert again is not None

    def join_again() -> tuple[Session, Callable[[], None]]:
        before()
        session, join_run = again()

        def join() -> None:
            joining()
            join_run()

        return session, join

    run._join_again = join_again


def test_the_attributes_of_a_peer_that_joins_again_are_the_last_known_ones(outside: rf.Communicator) -> None:
    def facts() -> tuple[object, ...]:
        return outside.peer_id, outside.epoch, outside.group_size, outside.members, outside.world_size

    last, seen = facts(), list[object]()
    during_rejoin(outside, lambda: seen.append(facts()), lambda: seen.append(facts()))
    outside.rejoin()
    assert seen == [last, last]
    assert outside.epoch > 0


def test_leave_while_a_peer_joins_again_is_not_lost(outside: rf.Communicator) -> None:
    during_rejoin(outside, outside.leave, lambda: None)
    with pytest.raises(rf.UsageError, match=r"leave\(\) was called"):
        outside.rejoin()
    assert outside._session.is_over
