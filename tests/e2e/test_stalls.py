"""Peers that live and do not work: those who wait for them lose nothing, and they may come back."""

import numpy as np
from cluster import Cluster, Me, Peer

STEPS = 12
HANGS_AT = 6


def test_a_hung_loader_is_evicted_and_the_others_finish(cluster: Cluster) -> None:
    master = cluster.start_master(stall_timeout_s=1)
    peers = cluster.start(train_with_a_loader, 4, hangs="p3")
    hung = peers[3]
    hung.expect("hangs", step=HANGS_AT)
    _check_finished(peers[:3], without_the_hung=3)
    hung.tell("wake")
    evicted = hung.expect("evicted")
    assert "did not come (stall_timeout_s 1.0 s)" in evicted["words"]
    assert "run.busy(up_to_s=...)" in evicted["words"]
    assert evicted["words"].endswith("join again and sync state before the first op")
    hung.expect("joined again")
    hung.finish()
    [stalled] = master.events("peers_stalled")
    assert len(stalled["waiting"]) == 3


def _check_finished(peers: list[Peer], without_the_hung: int) -> None:
    """Everybody has made all steps, the late ones without the peer that hung, with the sums of exactly the members."""
    for peer in peers:
        finished = peer.expect("finished")
        assert finished["contributors"] == [4] * HANGS_AT + [without_the_hung] * (STEPS - HANGS_AT)
        assert finished["sums"] == finished["contributors"]
        peer.finish()


def train_with_a_loader(me: Me) -> None:
    from ringfold import Evicted

    with me.join(op_timeout_s=me.options.get("op_timeout_s", 60)) as run:
        while run.group_size < 4:
            run.update_topology(min_world=4, timeout_s=60)
        contributors, sums = [], []
        try:
            for step in range(STEPS):
                if step == HANGS_AT and me.options["hangs"] == me._join["name"]:
                    me.say("hangs", step=step)
                    me.hear("wake")
                gradient = np.ones(10_000, np.float32)
                contributors.append(run.all_reduce(gradient).contributors)
                sums.append(int(gradient[0]))
        except Evicted as error:
            me.say("evicted", words=str(error))
        else:
            me.say("finished", contributors=contributors, sums=sums)
            return
    with me.join():
        me.say("joined again")
