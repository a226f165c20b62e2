"""A master that is killed, frozen, stopped, or cannot write: real processes continue, and none loses a step."""

import asyncio
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ports import free_port, free_ports
from probe_nodes import SHORT, Rounds
from programs import ClusterProcess, MasterProcess, ProgramCluster
from store_servers import Etcd
from training_program import end_training, start_training, step_with, train

import ringfold as rf
from ringfold.master.server import MasterServer, MasterThread
from ringfold.master.settings import MasterSettings
from ringfold.runtime import master_client
from ringfold.wire.probing import RoundId

LARGE = 1_000_000
LEASE_S = 3.0


def start_on(
    cluster: ProgramCluster, port: int, store: Path | str, *, inside: Sequence[str] = (), **settings: object
) -> MasterProcess:
    url = store if isinstance(store, str) else f"sqlite://{store}"
    where = f"127.0.0.1:{port}"
    return cluster.start_master(listen=where, inside=inside, store=url, lease_s=LEASE_S, **settings)


def check_no_step_is_lost(peers: list[ClusterProcess]) -> None:
    """After a stop all end, and each has made every step once."""
    end_training(peers)
    for peer in peers:
        numbers = [fact["number"] for fact in peer.reports("step")]
        assert numbers == list(range(len(numbers))), "no step is lost, and none is made twice"


def test_peers_go_on_without_a_master_and_with_the_one_that_is_started_again(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    """Evidence travels on the ring. Rounds of probing go on, too, above those of the first master."""
    port = free_port()
    first = start_on(cluster, port, tmp_path / "journal.db", evidence="ring", **SHORT)
    peers = start_training(cluster, 2, floats=10_000, clock=True, join={"probe": True})
    last = Rounds(first).whole("p0", "p1")["round"]
    for peer in peers:
        peer.expect("step", lambda fact: fact["clock_ns"])
    killed = first.kill()
    first.wait()
    for peer in peers:
        step_with(peer, 2, after=killed + 0.2)
    second = start_on(cluster, port, tmp_path / "journal.db", evidence="ring", **SHORT)
    first_again = RoundId(*Rounds(second).whole("p0", "p1")["round"])
    assert first_again.fence == 2
    assert first_again.sequence > RoundId(*last).sequence
    epoch = second.expect_events("epoch_installed")[-1]["epoch"]
    for peer in peers:
        peer.expect("step", lambda fact: fact["epoch"] >= epoch)
    check_no_step_is_lost(peers)
    for peer in peers:
        shown = [fact["clock_ns"] for fact in peer.reports("step")]
        assert shown == sorted(shown), "the clock is kept, and never goes back"


def test_a_frozen_leader_is_replaced_wakes_up_stands_by_and_leads_again(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    """Evidence travels through the master, so that every op needs one. A wide-awake leader is killed in the end."""
    one, two = free_ports(2)
    leader = start_on(cluster, one, tmp_path / "journal.db", evidence="master")
    leader.expect_log("leading with fence 1")
    standby = start_on(cluster, two, tmp_path / "journal.db", evidence="master")
    standby.expect_log("stands by")
    peers = start_training(cluster, 2, floats=LARGE, address=f"{leader.address},{standby.address}")
    frozen = leader.freeze()
    standby.expect_log("leading with fence 2")
    for peer in peers:
        step_with(peer, 2, after=frozen)
    woken = leader.thaw()
    leader.expect_log("does not lead any more")
    leader.expect_log("stands by")
    for peer in peers:
        step_with(peer, 2, after=woken)
    with master_client.connect([leader.address, standby.address], b"") as connection:
        assert connection.status().leader == standby.address
    killed = standby.kill()
    leader.expect_log("leading with fence 3")
    for peer in peers:
        step_with(peer, 2, after=killed)
    check_no_step_is_lost(peers)
    assert not any(peer.reports("evicted") for peer in peers)


def test_a_standby_names_the_leader(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    with (
        MasterThread(journal=store, lease_s=LEASE_S) as leader,
        rf.join(leader.address, timeout_s=30),
        MasterThread(journal=store, lease_s=LEASE_S) as standby,
        pytest.raises(rf.MasterUnreachable, match=f"stands by .*{leader.address}"),
    ):
        ask_until_it_knows(standby.address, leader.address)


def ask_until_it_knows(standby: str, leader: str) -> None:
    """A standby refuses from its first moment, and knows the leader's name a moment later."""
    deadline = time.monotonic() + 10
    while True:
        try:
            master_client.connect([standby], b"").close()
        except rf.MasterUnreachable as error:
            if leader in str(error) or time.monotonic() > deadline:
                raise


def test_a_full_disk_stops_the_master_and_it_leads_again_when_there_is_room(
    cluster: ProgramCluster, tmp_path: Path
) -> None:
    """No file of the process may grow any more: to SQLite that is a full disk."""
    # Its output goes through pipes: the limit is for the journal, not for the files that the cluster keeps.
    piped = ["bash", "-c", 'exec "$@" > >(cat) 2> >(cat >&2)', "bash"]
    master = start_on(cluster, free_port(), tmp_path / "journal.db", inside=piped)
    master.expect_log("leading with fence 1")
    cluster.start_program(train, 1)[0].expect("joined")
    before = resource.prlimit(master.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    late = cluster.start_program(train, 1)[0]
    master.expect_log("does not lead any more")
    master.expect_log("this master does not lead: the journal cannot be used")
    assert not late.reports("joined")
    resource.prlimit(master.pid, resource.RLIMIT_FSIZE, before)
    master.expect_log("leading with fence 2")
    late.expect("joined")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if missing := Etcd.missing():
        pytest.skip(missing)
    server = Etcd(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_a_lost_store_stops_the_master_and_it_leads_again_when_the_store_is_back(
    cluster: ProgramCluster, etcd: Etcd
) -> None:
    """Ops with evidence on the ring go on meanwhile."""
    master = start_on(cluster, free_port(), etcd.url, evidence="ring")
    peers = start_training(cluster, 2, floats=10_000)
    etcd.kill()
    master.expect_log("does not lead any more")
    lost = time.monotonic()
    for peer in peers:
        step_with(peer, 2, after=lost)
    etcd.start()
    master.expect_log("leading with fence 2")
    epoch = master.expect_events("epoch_installed")[-1]["epoch"]
    for peer in peers:
        peer.expect("step", lambda fact: fact["epoch"] > epoch)
    check_no_step_is_lost(peers)


def test_a_standby_sends_a_newcomer_on_to_the_leader(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    one, two = (MasterThread(journal=store, lease_s=LEASE_S) for _ in range(2))
    with one, two, rf.join([two.address, one.address], timeout_s=30) as run:
        assert run.group_size == 1


def test_a_standby_sends_a_node_that_only_probes_on_to_the_leader(cluster: ProgramCluster, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    with (
        MasterThread(journal=store) as leader,
        rf.join(leader.address, timeout_s=30),
        MasterThread(journal=store) as standby,
    ):
        both = ("--master", standby.address, "--master", leader.address)
        node = cluster.start_command("node", "probe", *both, "--name", "n")
        node.expect_output(f"of the master at {leader.address}")


def test_a_master_that_is_stopped_hands_over_at_once(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    port = free_port()
    with (
        MasterThread(journal=store, lease_s=30.0) as first,
        rf.join([first.address, f"127.0.0.1:{port}"], timeout_s=30) as run,
        MasterThread(listen=[f"127.0.0.1:{port}"], journal=store, lease_s=30.0),
    ):
        first.stop()
        run.update_topology(timeout_s=20)
        assert run.epoch == 2


def test_a_stopped_master_that_is_alone_ends_the_run_and_the_next_run_inherits_no_peer(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    first = MasterThread(journal=store, alone=True)
    with first, rf.join(first.address, timeout_s=30) as run:
        first.stop()
        with pytest.raises(rf.MasterUnreachable, match="was stopped, and the run with it"):
            run.update_topology(timeout_s=20)
    with MasterThread(journal=store, alone=True) as second, rf.join(second.address, timeout_s=5) as run:
        assert (run.epoch, run.peer_id, run.members) == (1, 1, (1,))


def test_a_journal_of_a_master_alone_that_is_in_use_is_an_error(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/journal.db"
    with MasterThread(journal=store, alone=True) as first, rf.join(first.address, timeout_s=30):
        second = MasterServer(MasterSettings(), ["127.0.0.1:0"], journal=store, alone=True, lease_s=0.1)
        with pytest.raises(rf.ConfigError, match=f"in use by the master at {first.address}"):
            asyncio.run(second.serve())
