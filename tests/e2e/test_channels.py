"""Ops cut into slices between real processes, with a thread for each channel."""

import os

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext, by_id

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings

SIZES = (1_000, 100_000, 3_000_000)
"""Items: an op inside Done, one that is not cut, and one that is."""


def reduce_all(me: ProgramContext) -> None:
    """Join the others, reduce, wait for a word, and reduce again with those that are left."""
    os.environ["RINGFOLD_THREADS"] = me.options.get("threads", "auto")
    with rf.join(me.options["master"], op_timeout_s=60) as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        lanes = sum(lane.outgoing for lane in run._session.engine.lanes())
        me.report("joined", peer=run.peer_id, lanes=lanes)
        for what in ("first", "second"):
            if what == "second":
                me.receive()
            sums = []
            for size in SIZES:
                values = np.full(size, 1.5, np.float32)
                info = run.all_reduce(values)
                sums.append(bool((values == 1.5 * len(info.contributors)).all()))
            handles = [run.all_reduce_async(np.ones(200_000), tag=tag) for tag in range(8)]
            for handle in handles:
                handle.wait()
            me.report(what, right=all(sums), peers=len(info.contributors))
        me.receive()


@pytest.mark.parametrize("channels", [2, 4])
def test_a_run_with_several_channels_goes_on_when_a_peer_is_killed(cluster: ProgramCluster, channels: int) -> None:
    with MasterThread(MasterSettings(channels=channels)) as master:
        peers = by_id(cluster.start_program(reduce_all, 3, master=master.address))
        for peer in peers.values():
            assert peer.expect("first", right=True, peers=3)
            assert peer.reports("joined")[0]["lanes"] == channels
        left = [peers[1], peers[3]]
        for peer in left:
            peer.send()  # they call, and wait for the third
        peers[2].kill()
        for peer in left:
            peer.expect("second", right=True, peers=2)
        for peer in left:
            peer.send()
            peer.wait_success()


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_setting_of_the_peers_gives_the_threads(cluster: ProgramCluster, threads: str) -> None:
    with MasterThread() as master:
        peers = cluster.start_program(reduce_all, 3, master=master.address, threads=threads)
        for peer in peers:
            peer.expect("first", right=True, peers=3)
            assert peer.reports("joined")[0]["lanes"] == int(threads)
        for peer in peers:
            peer.send()
        for peer in peers:
            peer.expect("second", right=True, peers=3)
            peer.send()
            peer.wait_success()
