"""optimize_topology between real processes: links are measured, rings change, ops continue, also if peers die."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext, by_id, until

import ringfold as rf
from ringfold.config import DEFAULT_RUN
from ringfold.master.connection_states import ConnectionState
from ringfold.master.events import MoonshotFinished
from ringfold.master.machine import Master
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings
from ringfold.runtime import master_client
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, missing
from ringfold.topology.ring import edges_of
from ringfold.topology.solve import Solution
from ringfold.wire.status import Status


def look(address: str) -> Status:
    with master_client.connect([address], b"") as connection:
        return connection.status()


def optimize(me: ProgramContext) -> None:
    """Join with others, optimise on request, and reduce before and after."""
    with me.join() as run:
        while run.group_size < me.options["peers"]:
            run.update_topology(min_world=me.options["peers"])
        me.report("joined", peer=run.peer_id, pid=Path("/proc/self").resolve().name)
        run.all_reduce(np.ones(100_000, np.float32))
        me.receive()
        run.optimize_topology(timeout_s=30)
        values = np.ones(100_000, np.float32)
        info = run.all_reduce(values)
        right = bool((values == len(info.contributors)).all())
        me.report("reduced", contributors=len(info.contributors), right=right, members=run.members, epoch=run.epoch)
        me.receive()


def test_all_links_are_measured_and_ops_go_on(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = cluster.start_program(optimize, 3, peers=3)
    by_id(peers)
    for peer in peers:
        peer.send()
    facts = [peer.expect("reduced", contributors=3, right=True) for peer in peers]
    assert len({(tuple(fact["members"]), fact["epoch"]) for fact in facts}) == 1
    [measured] = master.expect_events("links_measured")
    assert (measured["pairs"], measured["failed"]) == (3, [])
    assert measured["rounds"] >= 3
    links = look(master.address).links
    assert {(link.source, link.target) for link in links} == set(itertools.permutations((1, 2, 3), 2))
    assert all(link.bytes_per_s > 1e6 and link.delay_us is not None for link in links)
    for peer in peers:
        peer.send()
        peer.wait_success()


def test_a_peer_killed_during_the_measurement_costs_only_its_own_links(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = by_id(cluster.start_program(optimize, 4, peers=4))
    for peer in peers.values():
        peer.send()
    until(lambda: any(peer.state == "OPTIMIZE_TOPOLOGY" for peer in look(master.address).peers), "links are measured")
    peers[3].kill()
    left = [peers[number] for number in (1, 2, 4)]
    facts = [peer.expect("reduced", contributors=3, right=True) for peer in left]
    assert {tuple(sorted(fact["members"])) for fact in facts} == {(1, 2, 4)}
    known = {(link.source, link.target) for link in look(master.address).links}
    assert known == set(itertools.permutations((1, 2, 4), 2))
    for peer in left:
        peer.send()
        peer.wait_success()


def test_a_ring_that_a_search_found_is_adopted_by_an_update_and_status_shows_every_state() -> None:
    """Three peers, each a thread of this process, over real sockets; the master's process shows what they do."""
    seen: set[tuple[str, str]] = set()
    ops: set[str] = set()
    with MasterThread(MasterSettings(measure_ms=1_500)) as master, ThreadPoolExecutor(3) as pool:

        def watch(name: str) -> bool:
            status = look(master.address)
            seen.update((peer.phase, peer.state) for peer in status.peers)
            ops.update(op.state for peer in status.peers for op in peer.op_states)
            return any(name in (peer.phase, peer.state, *(op.state for op in peer.op_states)) for peer in status.peers)

        def together(call: Callable[[rf.Communicator], object], shown: str, late: int = 0) -> None:
            """All peers make the call, the first one `late`, once this is shown."""
            early = [pool.submit(call, run) for run in runs if run is not runs[late]]
            until(lambda: watch(shown), shown)
            for future in [*early, pool.submit(call, runs[late])]:
                future.result(60)

        runs = [rf.join(master.address, op_timeout_s=60)]
        joining = [pool.submit(rf.join, master.address, op_timeout_s=60) for _ in range(2)]
        until(lambda: watch("PEER_REGISTERED"), "newcomers wait")
        until(lambda: len(look(master.address).peers) == 3, "all have registered")
        runs[0].update_topology()
        runs += [future.result(60) for future in joining]
        together(lambda run: run.optimize_topology(), "VOTE_OPTIMIZE_TOPOLOGY")
        before = runs[0].members
        found = before[::-1]
        master._thread.call(lambda: find_ring(master, found))
        until(lambda: bool(machine_of(master)._run.groups[0].moonshot), "the master knows the ring")
        together(lambda run: run.update_topology(), "VOTE_ACCEPT_NEW_PEERS")
        rotated = found[found.index(runs[0].members[0]) :] + found[: found.index(runs[0].members[0])]
        assert {run.members for run in runs} == {rotated}
        assert len({run.epoch for run in runs}) == 1
        together(lambda run: run.all_reduce(np.ones(3_000_000)), "VOTE_INITIATE_COLLECTIVE_COMMS")
        watch("IDLE")
        for run in runs:
            run.leave()
    accepted = {state for phase, state in seen if phase == "PEER_ACCEPTED"}
    assert ("PEER_REGISTERED", "IDLE") in seen
    wanted = {"IDLE", "VOTE_OPTIMIZE_TOPOLOGY", "VOTE_ACCEPT_NEW_PEERS", "COLLECTIVE_COMMUNICATIONS_RUNNING"}
    assert wanted <= accepted <= set(ConnectionState)
    assert "VOTE_INITIATE_COLLECTIVE_COMMS" in ops


def machine_of(master: MasterThread) -> Master:
    assert master._server._runs is not None
    machine = master._server._runs.machine_of(DEFAULT_RUN)
    assert machine is not None
    return machine


def find_ring(master: MasterThread, ring: tuple[int, ...]) -> None:
    """The moonshot search has found this ring: its links are the fastest."""
    machine = machine_of(master)
    now = monotonic_ns()
    for edge in itertools.permutations(ring, 2):
        rate = 2e9 if edge in edges_of(ring) else 1e9
        machine._run.links.measured(edge, rate, 100, now)
    found = Solution(ring, 2e9, 0.0, 0.0, 2e9, exact=False, kept=False, reason="found")
    master._server.step(MoonshotFinished(0, found))


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_shaped_links_are_estimated_and_the_slow_one_is_avoided(cluster: ProgramCluster) -> None:
    """One pair of four hosts is slow; in the ring that is chosen the two are no neighbours."""
    slow = {(0, 1): 10.0, (1, 0): 10.0}
    pairs = {pair: slow.get(pair, 60.0) for pair in itertools.permutations(range(4), 2)}
    with ShapedNetwork([Shape()] * 4, pairs) as network:
        address = f"{network.address(HUB)}:48148"
        inside = network.inside(HUB, [])
        master = cluster.start_master(listen=address, arguments=["--insecure"], inside=inside, evict_after_ms=3_000)
        peers = [cluster.start_one(optimize, inside=network.inside(host, []), peers=4) for host in range(4)]
        hosts = {number: peers.index(peer) for number, peer in by_id(peers).items()}
        for peer in peers:
            peer.send()
        [ring] = {tuple(peer.expect("reduced", contributors=4, right=True)["members"]) for peer in peers}
        used = {(hosts[a], hosts[b]) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}
        assert not used & slow.keys()
        with network.within(HUB):
            links = look(master.address).links
        errors = {
            (link.source, link.target): link.bytes_per_s / (pairs[hosts[link.source], hosts[link.target]] * 125_000) - 1
            for link in links
        }
        assert len(errors) == 12
        assert max(abs(error) for error in errors.values()) <= 0.1, errors
        for peer in peers:
            peer.send()
            peer.wait_success()
