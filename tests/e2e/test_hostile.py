"""A live run of a master and three peers under hostile traffic: it goes on, and every op has the right result.

Unauthenticated clients connect to every port, and a proxy flips bits of lanes that have proven themselves. The run may
lose a link and an epoch for a flipped bit, and nothing for such a client. `make fuzz` runs this for longer, with fresh
randomness (HOSTILE_SECONDS, HOSTILE_SEED).
"""

import os
import random
import time
from pathlib import Path

import numpy as np
from hostile_traffic import BitFlipper, UnauthenticatedClients, paced_flips
from programs import WAIT_S, ClusterProcess, ProgramCluster, ProgramContext, until

TOKEN = "the token of this run"
WORLD = 3
FLOATS = 20_000
SECONDS = float(os.environ.get("HOSTILE_SECONDS", "8"))
SEED = int(os.environ.get("HOSTILE_SEED", "11"))
FLIP_EVERY_S = 2.0
MEMORY_BYTES = 64 * 1024 * 1024


def numbers(peer: int, step: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Whole numbers: their sum is exact in any order."""
    return np.random.default_rng((peer, step)).integers(-1_000, 1_000, FLOATS).astype(np.float32)


def guarded_loop(me: ProgramContext) -> None:
    """Reduce until a stop, behind a proxy, and check every result. After an eviction, join again."""
    from ringfold import Evicted
    from ringfold.peer import joining

    real = joining.Identity

    def behind_proxy(**facts: object) -> object:
        me.report("port", port=facts["port"])
        # Bits are flipped on a wire, so there must be one: no lane in shared memory.
        return real(**{**facts, "port": me.receive()["what"], "here": ""})  # type: ignore[arg-type]

    joining.Identity = behind_proxy  # type: ignore[assignment, misc]
    world, step = WORLD, 0
    while True:
        with me.join() as run:
            while run.group_size < world:
                run.update_topology(min_world=world)
            try:
                stop = False
                while not stop:
                    while run.are_peers_pending():
                        run.update_topology()
                    agreed = np.array([step, me.has_message() and me.receive()["what"] == "stop"], np.int64)
                    run.all_reduce(agreed, op="max", tag=1)
                    step, stop = int(agreed[0]), bool(agreed[1])
                    result = numbers(run.peer_id, step)
                    info = run.all_reduce(result)
                    # The contributors are known if no peer came or left since: else the count would differ.
                    members = run.members
                    known = len(info.contributors) == len(members) and info.epoch == run.epoch
                    right = bool((result == sum(numbers(member, step) for member in members)).all()) if known else None
                    me.report("step", number=step, epoch=info.epoch, contributors=len(info.contributors), right=right)
                    step += 1
                me.report("end", step=step)
                return
            except Evicted as error:
                me.report("evicted", message=str(error))
                world = 1


def test_a_run_goes_on_under_hostile_traffic(cluster: ProgramCluster, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    master = cluster.start_master(arguments=["--token-file", str(token_file)])
    flippers = [BitFlipper(random.Random(SEED + number)) for number in range(WORLD)]
    clients: UnauthenticatedClients | None = None
    try:
        join = {"token": TOKEN, "probe": True}
        peers = [cluster.start_one(guarded_loop, join=join) for _ in range(WORLD)]
        ports = []
        for peer, flipper in zip(peers, flippers, strict=True):
            flipper.target = peer.expect("port")["port"]
            ports.append(flipper.target)
            peer.send(flipper.port)
        before = _together(peers)
        held = [(child, child.descriptors(), child.resident_bytes()) for child in (master, *peers)]
        everywhere = [int(master.address.rpartition(":")[2]), *ports, *(flipper.port for flipper in flippers)]
        clients = UnauthenticatedClients(everywhere, ports, SEED)

        def alive() -> None:
            for child in (master, *peers):
                assert child.descriptors() < 400, f"{child.name} holds {child.descriptors()} descriptors"

        flipped = paced_flips(flippers, SECONDS, FLIP_EVERY_S, alive)
        during = _together(peers)
        clients.close()
        assert during > before
        assert clients.came > 10 * SECONDS, f"only {clients.came} clients came"
        assert flipped, "no bit was flipped"
        for child, descriptors, resident in held:
            until(lambda: child.descriptors() <= descriptors + 4, f"{child.name} has closed what clients opened")  # noqa: B023
            grown = child.resident_bytes() - resident
            assert grown < MEMORY_BYTES, f"{child.name} has grown by {grown} bytes"
        peers[0].send("stop")
        for peer in peers:
            peer.wait_success()
        _check(peers, flipped)
    finally:
        if clients is not None:
            clients.close()
        for flipper in flippers:
            flipper.close()


def _together(peers: list[ClusterProcess]) -> int:
    """Wait for a step from now on that all three contribute to; its number."""
    now = time.monotonic()
    facts = [
        peer.expect("step", lambda fact: fact["at"] >= now and fact["contributors"] == WORLD, timeout_s=2 * WAIT_S)
        for peer in peers
    ]
    return max(fact["number"] for fact in facts)


def _check(peers: list[ClusterProcess], flipped: int) -> None:
    facts = [fact for peer in peers for fact in peer.reports("step")]
    assert facts
    wrong = [fact for fact in facts if fact["right"] is False]
    assert not wrong, f"{len(wrong)} wrong results, the first: {wrong[0]}"
    assert sum(fact["right"] is True for fact in facts) > len(facts) // 2, "too few results could be checked"
    gone = [fact for peer in peers for fact in peer.reports("evicted")]
    assert not gone, f"a peer without a fault was evicted: {gone}"
    epochs = {fact["epoch"] for fact in facts}
    assert max(epochs) - min(epochs) <= 2 * flipped + 2, f"{len(epochs)} epochs for {flipped} flipped bits"
