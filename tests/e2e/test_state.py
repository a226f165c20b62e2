"""Shared state between real processes: what wins, what travels, and what is left alone."""

import re

import pytest
from programs import ProgramCluster
from state_program import (
    MIB,
    Spec,
    admit,
    check_goes_on,
    digest_of,
    end,
    spec,
    start_holder,
    start_holders,
    sync,
    tell_sync,
)

pytestmark = pytest.mark.waiting

# What kinds of arrays


@pytest.mark.parametrize("library", ["numpy", "unaligned", "torch"])
def test_a_newcomer_gets_every_bit(cluster: ProgramCluster, library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")
        cluster.package = "torch"
    cluster.start_master()
    count = 300_007  # several blocks, and a short one at the end
    item_bytes = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}
    states = [{dtype: spec(dtype, count, seed, library=library) for dtype in item_bytes} for seed in (1, 2)]
    peers = start_holders(cluster, *states)
    here, there = sync(peers)
    assert here["digests"] == there["digests"]
    assert here["digests"].keys() == item_bytes.keys()
    assert there["rx"] == here["tx"] == count * sum(item_bytes.values())
    end(peers)


def test_torch_and_numpy_peers_share_a_state(cluster: ProgramCluster) -> None:
    pytest.importorskip("torch")
    cluster.package = "torch"
    cluster.start_master()
    shape = [10, 20, 30]
    one = {"a": spec("bfloat16", 6_000, 1, library="torch", shape=shape)}
    other = {"a": spec("bfloat16", 6_000, 2, library="numpy", shape=shape)}
    peers = start_holders(cluster, one, other)
    for fact in sync(peers):
        assert fact["digests"]["a"] == digest_of(1, 12_000)
    end(peers)


def test_arrays_without_bytes_and_without_dimensions(cluster: ProgramCluster) -> None:
    cluster.start_master()
    states = [
        {"empty": spec("float32", 0, seed), "scalar": spec("float64", 1, seed, shape=[]), "one": spec("uint8", 1, seed)}
        for seed in (1, 2)
    ]
    peers = start_holders(cluster, *states)
    here, there = sync(peers)
    assert here["digests"] == there["digests"]
    assert there["rx"] == 9
    end(peers)


def test_thousands_of_keys(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, *({"layer": spec("float32", 10, seed, times=5_000)} for seed in (1, 2)))
    here, there = sync(peers)
    assert len(here["digests"]) == 5_000
    assert here["digests"] == there["digests"]
    assert there["rx"] == 5_000 * 40
    end(peers)


def test_what_may_differ_stays_as_it_is(cluster: ProgramCluster) -> None:
    cluster.start_master()
    states = [{"a": spec(count=5_000, seed=n), "own": spec(count=700, seed=n, may_differ=True)} for n in (1, 2)]
    peers = start_holders(cluster, *states)
    for seed, fact in enumerate(sync(peers), 1):
        assert fact["digests"] == {"a": digest_of(1, 5_000), "own": digest_of(seed, 700)}
        assert fact["rx"] in (0, 5_000)
    end(peers)


def test_blake3_states_are_verified_by_blake3(cluster: ProgramCluster) -> None:
    pytest.importorskip("blake3")
    cluster.start_master()
    peers = start_holders(cluster, *({"a": spec(count=3 * MIB + 5, seed=seed)} for seed in (1, 2)), hash="blake3")
    for fact in sync(peers):
        assert fact["digests"]["a"] == digest_of(1, 3 * MIB + 5)
    end(peers)


# Which state wins


def big(seed: int, mib: int = 8) -> dict[str, Spec]:
    return {"a": spec(count=mib * MIB, seed=seed)}


def test_the_most_popular_content_wins(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1), big(2), big(2))
    facts = sync(peers)
    assert {fact["digests"]["a"] for fact in facts} == {digest_of(2, 8 * MIB)}
    assert [fact["rx"] for fact in facts] == [8 * MIB, 0, 0]
    end(peers)


def test_the_longest_member_wins_a_tie(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(5), big(3))
    assert {fact["digests"]["a"] for fact in sync(peers)} == {digest_of(5, 8 * MIB)}
    end(peers)


def test_newcomers_have_no_vote_even_when_they_are_many(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1))
    sync(peers)
    peers += [start_holder(cluster, big(2)) for _ in range(2)]
    admit(peers[:1])
    assert {fact["digests"]["a"] for fact in sync(peers)} == {digest_of(1, 8 * MIB)}
    end(peers)


def test_a_sender_wins_over_receive_only_peers(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1), big(1), big(2))
    tell_sync(peers[:2], strategy="receive-only")
    tell_sync(peers[2:], strategy="send-only")
    assert {peer.expect("synced")["digests"]["a"] for peer in peers} == {digest_of(2, 8 * MIB)}
    end(peers)


def test_enforce_popular_does_not_mix_with_other_strategies(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1), big(2))
    tell_sync(peers[:1], strategy="enforce-popular")
    tell_sync(peers[1:], strategy="send-only")
    for peer in peers:
        failed = peer.expect("failed", error="UsageError")
        assert "send-only on peer" in failed["message"]
        assert not failed["torn"]
    sync(peers)
    end(peers)


def test_two_senders_that_differ_are_both_named(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1), big(2))
    ids = [peer.reports("joined")[0]["peer"] for peer in peers]
    tell_sync(peers, strategy="send-only")
    for peer in peers:
        text = peer.expect("failed", error="StateError")["message"]
        assert re.search(rf"peers {ids[0]} \(.*\) and {ids[1]} \(.*\) both want to send", text)
        assert "'a' has different content" in text
    end(peers)


def test_expect_unchanged_tells_the_receiver(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1), big(2))
    tell_sync(peers, expect_unchanged=True)
    peers[0].expect("synced")
    assert str(8 * MIB) in peers[1].expect("failed", error="HashMismatch")["message"]
    for fact in sync(peers, expect_unchanged=True):
        assert fact["rx"] == 0
    end(peers)


# What travels


def test_only_the_blocks_that_differ_travel(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1, 32), big(1, 32))
    assert [fact["rx"] for fact in sync(peers)] == [0, 0]
    peers[1].send("poke", name="a", at=17 * MIB + 5)
    peers[1].send("poke", name="a", at=30 * MIB)
    facts = sync(peers)
    assert [(fact["tx"], fact["rx"]) for fact in facts] == [(2 * MIB, 0), (0, 2 * MIB)]
    assert facts[0]["digests"] == facts[1]["digests"]
    end(peers)


def test_only_the_keys_that_differ_travel(cluster: ProgramCluster) -> None:
    cluster.start_master()
    states = [{f"k{key}": spec(count=100_000, seed=key) for key in range(20)} for _ in range(2)]
    states[1]["k7"]["seed"] = 99
    peers = start_holders(cluster, *states)
    assert [fact["rx"] for fact in sync(peers)] == [0, 100_000]
    end(peers)


def test_all_holders_serve_a_newcomer(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1, 64), big(1, 64), big(1, 64))
    sync(peers)
    peers.append(start_holder(cluster, big(2, 64)))
    admit(peers[:3])
    served = [0, 0, 0]
    for _ in range(20):
        facts = sync(peers)
        assert facts[3]["rx"] == sum(fact["tx"] for fact in facts[:3]) == 64 * MIB
        served = [before + fact["tx"] for before, fact in zip(served, facts[:3], strict=True)]
        if all(served):
            break
        # A holder that got no core meanwhile leaves all blocks to the others. All of them once more:
        for block in range(64):
            peers[3].send("poke", name="a", at=block * MIB)
    assert all(served)
    end(peers)


def test_newcomers_give_each_other_what_they_have_got(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1, 64))
    sync(peers)
    peers += [start_holder(cluster, big(2, 64)) for _ in range(3)]
    admit(peers[:1])
    given = 0
    for _ in range(20):
        holder, *newcomers = sync(peers)
        assert {fact["digests"]["a"] for fact in newcomers} == {digest_of(1, 64 * MIB)}
        given = sum(fact["tx"] for fact in newcomers)
        assert holder["tx"] + given == 3 * 64 * MIB
        if given >= 32 * MIB:
            break
        # A newcomer that gets its blocks late has little to give. All of them once more, by a byte of its own:
        for number, newcomer in enumerate(peers[1:]):
            for block in range(64):
                newcomer.send("poke", name="a", at=block * MIB + number)
    assert given >= 32 * MIB, "the holder must not send everything to all receivers"
    end(peers)


# The revision


def test_the_revision_goes_along(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1))
    peers[0].send("revision", to=41)
    sync(peers)
    peers[0].send("push")
    peers.append(start_holder(cluster, big(2)))
    admit(peers[:1])
    assert [fact["revision"] for fact in sync(peers)] == [42, 42]
    end(peers)


def test_a_revision_that_jumps_is_refused_and_the_others_go_on(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_holders(cluster, big(1), big(1), big(1))
    sync(peers)
    for peer in peers:
        peer.send("push")
    peers[2].send("push")
    tell_sync(peers)
    for peer in peers[:2]:
        assert peer.expect("synced")["revision"] == 1
    failed = peers[2].expect("failed", error="RevisionViolation", expected=1, got=2)
    assert f"peer {peers[2].reports('joined')[0]['peer']}" in failed["message"]
    check_goes_on(peers)
    assert [fact["revision"] for fact in sync(peers)] == [1, 1, 1]
    end(peers)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": spec(count=9), "b": spec()}, "'b'"),
        ({"a": spec("int8", 9)}, "int8"),
        ({"a": spec(count=8)}, "[8]"),
        ({"a": spec(count=9, shape=[3, 3])}, "[3, 3]"),
        ({"a": spec(count=9, may_differ=True)}, "'a'"),
    ],
    ids=["keys", "dtypes", "sizes", "shapes", "may differ"],
)
def test_a_peer_with_another_structure_gets_an_error_and_the_others_continue(
    cluster: ProgramCluster, other: dict[str, Spec], text: str
) -> None:
    cluster.start_master()
    peers = start_holders(cluster, {"a": spec(count=9, seed=1)}, {"a": spec(count=9, seed=1)}, other)
    tell_sync(peers)
    for peer in peers[:2]:
        peer.expect("synced")
    failed = peers[2].expect("failed", error="StateError")["message"]
    assert f"peer {peers[2].reports('joined')[0]['peer']}" in failed
    assert text in failed
    check_goes_on(peers)
    end(peers)
