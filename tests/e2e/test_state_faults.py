"""Shared state when something goes wrong in the middle: a peer dies, freezes, lies, or writes while it sends."""

import re
import signal

import pytest
from programs import ClusterProcess, ProgramCluster, ProgramContext
from state_program import (
    MIB,
    Spec,
    admit,
    check_goes_on,
    digest_of,
    end,
    hold,
    spec,
    start_holder,
    start_holders,
    sync,
    tell_sync,
)

SIZE = 128 * MIB


def large(seed: int) -> dict[str, Spec]:
    return {"a": spec(count=SIZE, seed=seed)}


def struck(
    cluster: ProgramCluster, holders: int, victim: int, word: str
) -> tuple[list[ClusterProcess], ClusterProcess]:
    """Holders and a newcomer in a sync, of which `victim` (-1: the newcomer) gets a signal in the middle of it."""
    cluster.start_master()
    peers = start_holders(cluster, *[large(1)] * holders)
    sync(peers)
    newcomer = start_holder(cluster, large(2))
    admit(peers)
    target = [*peers, newcomer][victim]
    tell_sync(peers)
    tell_sync([newcomer], strike={"name": "a", "blocks": 16, "pid": target.pid, "signal": word})
    if target is newcomer:
        return peers, newcomer
    assert newcomer.expect("struck")["blocks"] < SIZE // MIB
    peers.remove(target)
    return [*peers, target], newcomer


def test_a_holder_that_is_killed_costs_only_what_it_still_owed(cluster: ProgramCluster) -> None:
    peers, newcomer = struck(cluster, 2, 0, "SIGKILL")
    survivor, _ = peers
    fact = newcomer.expect("synced")
    assert fact["digests"]["a"] == digest_of(1, SIZE)
    assert SIZE <= fact["rx"] <= SIZE + 8 * MIB
    assert 0 < survivor.expect("synced")["tx"] < SIZE
    check_goes_on([survivor, newcomer])
    end([survivor, newcomer])


def test_a_frozen_holder_is_not_waited_for_longer_than_its_eviction(cluster: ProgramCluster) -> None:
    peers, newcomer = struck(cluster, 2, 1, "SIGSTOP")
    survivor, frozen = peers
    fact = newcomer.expect("synced")
    assert fact["digests"]["a"] == digest_of(1, SIZE)
    assert fact["rx"] <= SIZE + 8 * MIB
    survivor.expect("synced")
    frozen.thaw()
    frozen.expect("failed", error="Evicted")
    check_goes_on([survivor, newcomer])
    end([survivor, newcomer])


def test_a_newcomer_that_is_killed_costs_the_holders_nothing(cluster: ProgramCluster) -> None:
    peers, newcomer = struck(cluster, 2, -1, "SIGKILL")
    assert newcomer.wait() == -signal.SIGKILL
    for peer in peers:
        assert peer.expect("synced")["rx"] == 0
    check_goes_on(peers)
    end(peers)


def test_the_only_holder_that_is_killed_takes_the_state_along(cluster: ProgramCluster) -> None:
    """The newcomer is left with a torn state; a peer that brings exactly the lost revision heals it."""
    _, newcomer = struck(cluster, 1, 0, "SIGKILL")
    # The newcomer may notice before the master does; then the error cannot be as exact.
    failed = newcomer.expect("failed", lambda fact: fact["error"] in ("StateLost", "StateError"))
    assert "revision 0" in failed["message"]
    assert failed["torn"]
    # A torn state does not become whole by itself, and by now all peers know that the holder is gone.
    tell_sync([newcomer])
    newcomer.expect("failed", error="StateLost", revision=0)
    saviour = start_holder(cluster, large(1))
    admit([newcomer])
    for fact in sync([newcomer, saviour]):
        assert fact["digests"]["a"] == digest_of(1, SIZE)
        assert not fact["torn"]
    end([newcomer, saviour])


def lie(me: ProgramContext) -> None:
    """A holder that sends other bytes than it has, and does not look at their hashes itself."""
    from ringfold.peer.effects import SendBlocks
    from ringfold.peer.engine import RawBlock
    from ringfold.peer.sync.transfer import BlockTransfer

    read = BlockTransfer.read

    def forged(self: BlockTransfer, effect: SendBlocks) -> list[RawBlock]:
        blocks: list[RawBlock] = []
        for memory, offset, length, _ in read(self, effect):
            wrong = memory[offset : offset + length].copy()
            wrong[0] ^= 1
            blocks.append((wrong, 0, length, None))
        return blocks

    BlockTransfer.read = forged  # type: ignore[method-assign]
    hold(me)


def with_a_liar(cluster: ProgramCluster, honest: int) -> tuple[list[ClusterProcess], ClusterProcess, ClusterProcess]:
    """Honest holders, one that sends wrong content, and a newcomer that syncs with them."""
    master = cluster.start_master()
    peers = start_holders(cluster, *[large(1)] * honest)
    liar = cluster.start_one(lie, state=large(1))
    master.expect_events("peer_registered", honest + 1)
    if honest:
        admit(peers)
    liar.expect("joined")
    sync([*peers, liar])
    newcomer = start_holder(cluster, large(2))
    admit([*peers, liar])
    tell_sync([*peers, liar, newcomer])
    return peers, liar, newcomer


def test_corrupt_blocks_are_fetched_elsewhere_and_their_sender_is_named(cluster: ProgramCluster) -> None:
    peers, liar, newcomer = with_a_liar(cluster, 1)
    assert newcomer.expect("synced")["digests"]["a"] == digest_of(1, SIZE)
    assert peers[0].expect("synced")["tx"] >= SIZE - 8 * MIB
    liar.expect("synced")
    assert cluster.master is not None
    cluster.master.expect_log(f"got a wrong block from peer {liar.reports('joined')[0]['peer']}")
    check_goes_on([*peers, liar, newcomer])
    end([*peers, liar, newcomer])


def test_if_the_only_source_lies_the_hash_mismatch_names_it(cluster: ProgramCluster) -> None:
    _, liar, newcomer = with_a_liar(cluster, 0)
    failed = newcomer.expect("failed", error="HashMismatch")
    assert failed["peers"] == [liar.reports("joined")[0]["peer"]]
    assert failed["torn"]
    liar.expect("synced")
    newcomer.send("reduce")
    assert "only partly written" in newcomer.expect("failed", error="StateError")["message"]
    end([liar, newcomer])


@pytest.mark.parametrize("kind", ["rf64", "blake3"])
def test_a_holder_whose_state_changes_meanwhile_fails_alone_and_is_named(cluster: ProgramCluster, kind: str) -> None:
    if kind == "blake3":
        pytest.importorskip("blake3")
    cluster.start_master()
    peers = start_holders(cluster, large(1), large(1), hash=kind)
    sync(peers)
    newcomer = start_holder(cluster, large(2), hash=kind)
    admit(peers)
    steady, restless = peers
    tell_sync([steady, newcomer])
    tell_sync([restless], churn="a")
    failed = restless.expect("failed", error="HashMismatch")
    number = restless.reports("joined")[0]["peer"]
    assert re.search(rf"peer {number} \(p\d, you\) changed during the sync: 'a' was written to", failed["message"])
    assert newcomer.expect("synced")["digests"]["a"] == digest_of(1, SIZE)
    steady.expect("synced")
    check_goes_on([*peers, newcomer])
    # It is not the run's any more, so it has no vote, and receives.
    assert {fact["digests"]["a"] for fact in sync([*peers, newcomer])} == {digest_of(1, SIZE)}
    end([*peers, newcomer])


# The last revision must not be lost without a word


def lost_at_revision_3(cluster: ProgramCluster) -> ClusterProcess:
    """A newcomer to peers that had revision 3 and are dead now."""
    cluster.start_master()
    small = {"a": spec(count=MIB, seed=1)}
    peers = start_holders(cluster, small, small)
    for peer in peers:
        peer.send("revision", to=3)
    sync(peers)
    newcomer = start_holder(cluster, {"a": spec(count=MIB, seed=2)})
    admit(peers)
    newcomer.expect("joined")
    for peer in peers:
        peer.kill()
        peer.wait()
    return newcomer


def test_a_lost_state_names_its_revision(cluster: ProgramCluster) -> None:
    newcomer = lost_at_revision_3(cluster)
    tell_sync([newcomer])
    failed = newcomer.expect("failed", error="StateLost", revision=3)
    assert "revision 0 on peer" in failed["message"]
    assert not failed["torn"]
    end([newcomer])


def test_exactly_the_lost_revision_brings_the_run_back(cluster: ProgramCluster) -> None:
    newcomer = lost_at_revision_3(cluster)
    newcomer.send("fill", name="a", seed=1)
    newcomer.send("revision", to=3)
    assert sync([newcomer])[0]["revision"] == 3
    end([newcomer])


def test_the_lost_revision_with_other_content_is_not_taken(cluster: ProgramCluster) -> None:
    newcomer = lost_at_revision_3(cluster)
    newcomer.send("revision", to=3)
    tell_sync([newcomer])
    assert "with other content" in newcomer.expect("failed", error="StateLost")["message"]
    end([newcomer])


def test_an_older_revision_is_taken_with_a_rollback_only(cluster: ProgramCluster) -> None:
    newcomer = lost_at_revision_3(cluster)
    newcomer.send("revision", to=2)
    tell_sync([newcomer])
    newcomer.expect("failed", error="StateLost", revision=3)
    assert sync([newcomer], rollback=True)[0]["revision"] == 2
    newcomer.send("push")
    assert sync([newcomer])[0]["revision"] == 3
    end([newcomer])
