"""Stores that are killed, restarted, paused, emptied and put back to an old state under their clients."""

import json
import os
import signal
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_servers import SERVERS, Etcd, EtcdCluster, Server, python, those, until

from ringfold.errors import LeaseLost, StoreError, StoreReset, StoreUnknown, StoreUnreachable, StoreWentBack
from ringfold.store import Entry, StoreClient, Won, open_store

pytestmark = pytest.mark.waiting


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server of its own for one test."""
    kind = SERVERS[request.param]
    if reason := kind.missing():
        pytest.skip(reason)
    running = kind(tmp_path)
    running.start()
    yield running
    running.stop()


def each_that(can: str) -> pytest.MarkDecorator:
    """Parametrise over the kinds of server that can be treated like this."""
    return pytest.mark.parametrize("server", those(can), indirect=True)


every_kind = pytest.mark.parametrize("server", sorted(SERVERS), indirect=True)


def opened(server: Server, timeout_s: float = 20) -> StoreClient:
    return open_store(server.url, prefix="faults", timeout_s=timeout_s)


# Away for a while


@each_that("can_restart")
def test_a_restarted_server_has_what_was_acknowledged_and_the_same_generation(server: Server) -> None:
    with opened(server) as store:
        before, entry = store.generation, store.set("key", b"one")
        server.restart()
        assert store.get("key") == entry
        assert store.generation.id == before.id
        assert isinstance(store.compare_and_set("key", entry, b"two"), Won)


@each_that("can_restart")
def test_a_read_outlasts_a_restart(server: Server) -> None:
    with opened(server) as store:
        entry = store.set("key", b"one")
        server.kill()
        starting = threading.Timer(0.3, server.start)
        starting.start()
        assert store.get("key", 60) == entry
        starting.join()


@each_that("can_restart")
def test_a_wait_outlasts_a_restart(server: Server) -> None:
    with opened(server) as store, opened(server) as other:
        entry = store.set("key", b"one")
        result: list[Entry | None] = []
        waiter = threading.Thread(target=lambda: result.append(other.wait("key", entry.version, 60)), daemon=True)
        waiter.start()
        server.restart()
        after = store.set("key", b"two")
        waiter.join(60)
        assert result == [after]


@each_that("can_pause")
def test_a_killed_server_is_unreachable_and_named(server: Server) -> None:
    with opened(server) as store:
        server.kill()
        with pytest.raises(StoreUnreachable, match=server.url):
            store.get("key", 0.5)
        with pytest.raises(StoreUnreachable):
            store.set("key", b"one", 0.5)
        with pytest.raises(StoreUnreachable):
            open_store(server.url, timeout_s=0.5)


@each_that("can_pause")
def test_a_paused_server_costs_a_read_its_deadline_and_no_more(server: Server) -> None:
    with opened(server) as store:
        entry = store.set("key", b"one")
        server.pause()
        began = time.monotonic()
        with pytest.raises(StoreUnreachable):
            store.get("key", 0.5)
        with pytest.raises(StoreUnreachable):
            store.wait("key", entry.version, 0.5)
        assert time.monotonic() - began < 5
        server.resume()
        assert store.get("key") == entry


@each_that("can_pause")
def test_a_write_to_a_paused_server_is_open_until_one_reads(server: Server) -> None:
    """Its outcome is unknown; afterwards the key holds the one or the other, and the client goes on."""
    with opened(server) as store:
        entry = store.set("key", b"one")
        server.pause()
        with pytest.raises((StoreUnknown, StoreUnreachable)):
            store.compare_and_set("key", entry, b"two", 0.5)
        server.resume()
        present = store.get("key")
        assert present is not None
        assert present.value in (b"one", b"two")
        store.set("key", b"three")
        final = store.get("key")
        assert final is not None
        assert final.value == b"three"


@each_that("can_pause")
def test_nothing_is_written_after_unreachable_was_raised(server: Server) -> None:
    """StoreUnreachable promises that nothing was done, and that nothing will be when the server wakes up."""
    with opened(server) as store:
        entry = store.set("key", b"one")
        server.kill()
        with pytest.raises(StoreUnreachable):
            store.compare_and_set("key", entry, b"two", 0.5)
        if server.can_restart:
            server.start()
            assert store.get("key") == entry


@each_that("can_pause")
def test_a_holder_knows_by_its_own_clock_that_its_lease_may_be_lost(server: Server) -> None:
    with opened(server) as store:
        lease = store.lease("leader", b"me", 1.0)
        assert lease is not None
        server.pause()
        with pytest.raises(StoreUnreachable):
            lease.renew()
        assert lease.left_s() == 0
        with pytest.raises(LeaseLost):
            lease.renew()
        server.resume()


# Not the store that it was


@every_kind
def test_an_emptied_store_is_refused(server: Server) -> None:
    with opened(server) as store:
        entry = store.set("key", b"one")
        server.wipe()
        with pytest.raises(StoreReset):
            store.get("key")
        with pytest.raises(StoreReset):
            store.wait("key", entry.version, 5)
        with pytest.raises(StoreReset):
            store.lease("leader", b"me", 5)


@every_kind
def test_nothing_is_written_into_an_emptied_store(server: Server) -> None:
    with opened(server) as store:
        store.set("key", b"one")
        server.wipe()
        with pytest.raises(StoreReset):
            store.set("key", b"two")
        with pytest.raises(StoreReset):
            store.add("n")
        with opened(server) as fresh:
            assert fresh.get("key") is None
            assert fresh.get("n") is None


@every_kind
def test_a_store_that_was_created_again_is_refused_by_clients_of_the_old_one(server: Server) -> None:
    with opened(server) as store:
        known = store.generation
        server.wipe()
        with opened(server) as fresh:
            assert fresh.generation.id != known.id
            fresh.set("key", b"new")
            with pytest.raises(StoreReset):
                store.get("key")
            with pytest.raises(StoreReset):
                open_store(server.url, prefix="faults", known=known)


@every_kind
def test_a_client_that_knows_a_store_does_not_create_an_empty_one(server: Server) -> None:
    with opened(server) as store:
        known = store.generation
    server.wipe()
    for _ in range(2):
        with pytest.raises(StoreReset):
            open_store(server.url, prefix="faults", known=known)


@each_that("can_go_back")
def test_a_store_from_an_old_snapshot_is_refused(server: Server) -> None:
    with opened(server) as store:
        store.set("key", b"old")
        server.snapshot()
        entry = store.set("key", b"new")
        server.go_back()
        with pytest.raises(StoreWentBack):
            store.get("key")
        with pytest.raises(StoreWentBack):
            store.compare_and_set("key", entry, b"newer")
        with pytest.raises(StoreWentBack):
            open_store(server.url, prefix="faults", known=store.generation)


@each_that("can_go_back")
def test_nothing_is_written_into_a_store_that_went_back(server: Server) -> None:
    with opened(server) as store:
        old = store.set("key", b"old")
        server.snapshot()
        store.set("key", b"new")
        server.go_back()
        with pytest.raises(StoreWentBack):
            store.set("key", b"newer")
        with opened(server) as fresh:
            assert fresh.get("key") == old


@each_that("can_go_back")
def test_a_store_that_is_as_far_as_it_was_is_accepted_again(server: Server) -> None:
    """A snapshot of the last state is no step back."""
    with opened(server) as store:
        entry = store.set("key", b"one")
        server.snapshot()
        server.go_back()
        assert store.get("key") == entry


# Signing in, and several members


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_redis_is_signed_in_to_and_a_wrong_password_is_no_outage(server: Server) -> None:
    import redis

    control = redis.Redis(port=server.port)
    control.execute_command("CONFIG", "SET", "requirepass", "hunter2")
    control.close()
    with open_store(f"redis://:hunter2@127.0.0.1:{server.port}") as store:
        store.set("key", b"one")
        assert "hunter2" not in store.name
    with pytest.raises(StoreError) as caught:
        open_store(f"redis://:wrong@127.0.0.1:{server.port}")
    assert not isinstance(caught.value, StoreUnreachable)
    assert "wrong@" not in str(caught.value)


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_a_redis_without_memory_refuses_writes_for_a_while(server: Server) -> None:
    import redis

    with open_store(server.url, prefix="faults", timeout_s=0.2) as store, redis.Redis(port=server.port) as control:
        store.set("key", b"one")
        control.execute_command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnreachable, match="memory"):
            store.set("key", b"two")
        control.execute_command("CONFIG", "SET", "maxmemory", "0")
        assert store.set("key", b"three").value == b"three"
        control.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnreachable, match="read only"):
            store.set("key", b"four")
        control.execute_command("REPLICAOF", "NO", "ONE")
        assert store.set("key", b"five").value == b"five"


@pytest.mark.parametrize("server", ["etcd"], indirect=True)
def test_etcd_is_signed_in_to_and_a_wrong_password_is_no_outage(server: Server) -> None:
    def post(path: str, **what: object) -> None:
        address = f"http://127.0.0.1:{server.port}/v3/auth/{path}"
        urllib.request.urlopen(urllib.request.Request(address, json.dumps(what).encode()), timeout=10).close()

    post("user/add", name="root", password="hunter2")
    post("user/grant", user="root", role="root")
    post("enable")
    with open_store(f"etcd://root:hunter2@127.0.0.1:{server.port}") as store:
        entry = store.set("key", b"one")
        assert store.wait("key", 0, 5) == entry
        assert store.wait("key", entry.version, 0.1) == entry
        assert "hunter2" not in store.name
    with pytest.raises(StoreError) as caught:
        open_store(f"etcd://root:wrong@127.0.0.1:{server.port}")
    assert not isinstance(caught.value, StoreUnreachable)
    assert "wrong@" not in str(caught.value)


def test_a_cluster_goes_on_without_its_leader_and_loses_nothing(tmp_path: Path) -> None:
    """Count up through the death of the leader; every outcome that was open is settled by its nonce."""
    if reason := Etcd.missing():
        pytest.skip(reason)
    cluster = EtcdCluster(tmp_path)
    try:
        with open_store(cluster.url, timeout_s=10) as store:
            for number in range(1, 41):
                if number == 10:
                    cluster.leader().kill()
                count_up(store, number)
            assert store.list().keys() == {"count"}
    finally:
        cluster.stop()


def count_up(store: StoreClient, number: int) -> None:
    """Bring the record from `number` - 1 to `number`, whatever happens to the calls."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            entry = store.get("count")
            value = 0 if entry is None else int(entry.value)
            if value == number:
                return
            assert value == number - 1, "an increment was lost or made twice"
            store.compare_and_set("count", entry, str(number).encode())
        except (StoreUnknown, StoreUnreachable):
            continue
    raise AssertionError("the cluster did not come back")


# A sqlite file, and processes that die with it


COUNT_UP = """
import sys
from ringfold.store import open_store
store = open_store(sys.argv[1], prefix="kills", timeout_s=30)
number = int(sys.argv[2])
while True:
    number += 1
    store.set("a", str(number).encode())
    store.set("b", str(number).encode())
    print(number, flush=True)
"""


@pytest.mark.parametrize("server", ["sqlite"], indirect=True)
def test_a_sqlite_file_survives_processes_that_are_killed_while_they_write(server: Server) -> None:
    """What was acknowledged is there, in order, after every kill, and the file is sound."""
    number = 0
    for _ in range(4):
        writer = python(COUNT_UP, server.url, str(number))
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline() for _ in range(8)]
        writer.kill()
        acknowledged += writer.communicate()[0].splitlines()
        reported = max(int(line) for line in acknowledged if line.strip())
        with open_store(server.url, prefix="kills") as store:
            first, second = store.get("a"), store.get("b")
            assert first is not None
            assert second is not None
            assert reported <= int(second.value) <= int(first.value) <= int(second.value) + 1
            number = int(first.value)
    file = sqlite3.connect(server.url.removeprefix("sqlite://"))
    assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    file.close()


LOCK = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("server", ["sqlite"], indirect=True)
def test_a_process_that_stops_with_the_lock_holds_up_writers_only_until_their_deadline(server: Server) -> None:
    with opened(server) as store:
        entry = store.set("key", b"one")
        holder = python(LOCK, server.url.removeprefix("sqlite://"))
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            holder.send_signal(signal.SIGSTOP)
            assert store.get("key") == entry, "a reader does not wait"
            with pytest.raises(StoreUnreachable, match="lock"):
                store.set("key", b"two", 0.3)
        finally:
            holder.kill()
            holder.communicate()
        store.set("key", b"two")


@pytest.mark.parametrize("server", ["sqlite"], indirect=True)
def test_a_forked_child_uses_the_store_beside_its_parent(server: Server) -> None:
    with opened(server) as store:
        store.add("n")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(20):
                    store.add("n")
                code = 0
            finally:
                os._exit(code)
        for _ in range(20):
            store.add("n")
        assert os.waitpid(child, 0)[1] == 0
        assert store.add("n") == 42


@pytest.mark.parametrize("server", ["sqlite"], indirect=True)
def test_a_file_of_another_program_is_refused_and_left_alone(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.commit()
    other.close()
    with pytest.raises(StoreError, match="another program"):
        open_store(f"sqlite://{path}")
    text = tmp_path / "text"
    text.write_text("not a database, but long enough to look at " * 40)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite://{text}")


@pytest.mark.parametrize("server", ["sqlite"], indirect=True)
def test_a_file_that_was_swapped_is_noticed_by_clients_that_have_it_open(server: Server) -> None:
    """An open file goes on working after it was replaced; a client that trusts it is alone."""
    with opened(server) as store:
        store.set("key", b"one")
        path = Path(server.url.removeprefix("sqlite://"))
        with open_store(f"sqlite://{path}.other", prefix="faults") as other:
            other.set("key", b"other")
        os.replace(f"{path}.other", path)
        with pytest.raises(StoreWentBack):
            store.get("key")
        with pytest.raises(StoreWentBack):
            store.set("key", b"two")


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_the_wait_of_a_lost_watch_goes_on(server: Server) -> None:
    """The server closes the waiter's connection; it listens again."""
    with opened(server) as store, opened(server) as other:
        result: list[Entry | None] = []
        waiter = threading.Thread(target=lambda: result.append(other.wait("key", 0, 60)), daemon=True)
        waiter.start()
        import redis

        control = redis.Redis(port=server.port)
        until(lambda: control.execute_command("PUBSUB", "CHANNELS"), "the waiter to listen")
        control.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        entry = store.set("key", b"one")
        waiter.join(60)
        control.close()
        assert result == [entry]
