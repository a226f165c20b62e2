"""Real peers with a sampler are killed, frozen and added: every sample is used exactly once per pass."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext

pytestmark = pytest.mark.waiting

PASSES = 2


def train(me: ProgramContext) -> None:
    """A loop over some samples, which counts how often each was in the result of a step.

    `size`: of the data set. `pause_in`: the step in which the program waits for the test between taking its samples and
    its op. `torch`: use the loader, with a worker. `slow`: steps take their time until the test sends something.
    `loop`: more arguments of `steps`.
    """
    import ringfold as rf

    size, options = me.options.get("size", 600), me.options
    used = np.zeros(size, np.int64)
    state = rf.SharedState(used=used, data=rf.Sampler(size, batch_size=3, seed=5))
    loader: Any = None
    is_fast = False
    if options.get("torch"):
        from ringfold.torch import Loader

        loader = Loader(np.arange(size), num_workers=1)
    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        for step in run.steps(state, passes=PASSES, min_world=2, **options.get("loop", {})):
            share = step.shard()
            samples = share.indices.tolist()
            if loader is not None:
                batch = loader.next(step)
                assert samples == ([] if batch is None else batch.tolist())
            me.report("takes", number=step.number, peer=run.peer_id, number_of_pass=share.pass_number, samples=samples)
            if step.number == options.get("pause_in"):
                me.report("paused")
                me.receive()
            ones = np.zeros(size, np.int64)
            ones[samples] = 1
            info = step.all_reduce(ones)
            used += ones
            me.report("step", number=step.number, contributors=info.contributors, members=len(step.sync.participants))
            is_fast = is_fast or (options.get("slow") is None) or me.has_message()
            time.sleep(0.0 if is_fast else 0.1)
        me.report("end", least=used.min(), most=used.max(), revision=state.revision)


def check_log(peers: Sequence[ClusterProcess]) -> None:
    """By what the programs have reported, each sample was contributed to a committed step once per pass."""
    contributors: dict[int, set[int]] = {}
    for peer in peers:
        for report in peer.reports("step"):
            assert contributors.setdefault(report["number"], set(report["contributors"])) == {*report["contributors"]}
    used: Counter[tuple[int, int]] = Counter()
    for peer in peers:
        for report in peer.reports("takes"):
            if report["peer"] in contributors.get(report["number"], ()):
                used.update((report["number_of_pass"], sample) for sample in report["samples"])
    size = len(used) // PASSES
    assert used == Counter({(number, sample): 1 for number in range(PASSES) for sample in range(size)})


def expect_end(peer: ClusterProcess) -> None:
    end = peer.expect("end", timeout_s=90)
    assert (end["least"], end["most"]) == (PASSES, PASSES)
    peer.wait_success()


@pytest.mark.parametrize("with_torch", [False, True])
def test_every_sample_is_used_once_per_pass_while_peers_come_and_go(cluster: ProgramCluster, with_torch: bool) -> None:
    if with_torch:
        pytest.importorskip("torch")
        cluster.package = "torch"
    cluster.start_master()
    options: dict[str, Any] = {"size": 3_000, "slow": True, "torch": with_torch}
    first, second, third = cluster.start_program(train, 3, **options)
    third.expect("step", number=10)
    third.kill()
    fourth = cluster.start_one(train, **options)
    fourth.expect("step", members=3)
    second.freeze()
    first.expect("step", members=2, timeout_s=40)
    second.thaw()
    fifth = cluster.start_one(train, **options)
    fifth.expect("step")
    first.kill()
    for peer in (second, fourth, fifth):
        peer.send()
    for peer in (second, fourth, fifth):
        expect_end(peer)
    check_log(cluster.peers)


def test_a_checkpoint_from_inside_a_step_loses_nothing(cluster: ProgramCluster, tmp_path: Path) -> None:
    """A peer has taken its samples and waits for others in its op when SIGTERM comes. Another run continues it."""
    cluster.start_master()
    loop = {"checkpoint": str(tmp_path), "every": 1_000}
    saver, victim = cluster.start_program(train, 2, size=120, pause_in=8, loop=loop)
    for peer in (saver, victim):
        peer.expect("paused")
    victim.kill()
    saver.send()
    saver.expect_log("1 of at least 2 peers are there")
    saver.send_signal(signal.SIGTERM)
    saver.wait()
    assert [path.name for path in tmp_path.iterdir() if "8" in path.name], "the step that had begun is saved"
    cluster.start_master()
    later = [cluster.start_one(train, size=120, loop=loop), cluster.start_one(train, size=120)]
    for peer in later:
        expect_end(peer)
        assert min(report["number"] for report in peer.reports("step")) == 8
    for peer in (saver, victim):
        peer.reports("takes")[-1][
            "number"
        ] = -1  # ids begin with 1 in both runs, and step 8 was committed in the second
    check_log(cluster.peers)
