"""The store's client and leases on a store in memory, where every call can be made to fail."""

import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold import errors
from ringfold.errors import (
    ConfigError,
    LeaseLost,
    MissingPackage,
    StoreError,
    StoreReset,
    StoreUnknown,
    StoreUnreachable,
    StoreWentBack,
)
from ringfold.runtime.clock import monotonic_ns
from ringfold.store import Entry, Lost, StoreClient, Won, open_store
from ringfold.store.client import LeaseMonitor
from ringfold.store.in_memory import Crashed, Fault, MemoryDriver, MemoryServer, StoreCall
from ringfold.store.sqlite import SqliteDriver, file_system

MS = 1_000_000


class World:
    """A server, a clock that only moves when a test advances it, and clients with faults."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.server = MemoryServer()
        self.drivers: list[MemoryDriver] = []

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1_000 * MS)

    def client(
        self, fault: Callable[[StoreCall], Fault | None] = lambda call: None, timeout_s: float = 1
    ) -> StoreClient:
        driver = MemoryDriver(self.server, fault=fault, sleep=self.sleep)
        self.drivers.append(driver)
        nonce = f"nonce {len(self.drivers)}"
        return StoreClient(driver, now_ns=lambda: self.now_ns, pause=self.sleep, timeout_s=timeout_s, nonce=nonce)


def fails_at(number: int, fault: Fault) -> Callable[[StoreCall], Fault | None]:
    return lambda call: fault if call.number == number else None


# What is repeated, and what is not


def test_a_read_is_repeated_until_its_deadline() -> None:
    world = World()
    world.client().set("key", b"one")
    store = world.client(lambda call: "unreachable" if 2 <= call.number <= 5 else None)
    found = store.get("key")
    assert found is not None
    assert found.value == b"one"


def test_a_read_ends_at_its_deadline() -> None:
    world = World()
    store = world.client(lambda call: "unreachable" if call.number > 1 else None)
    with pytest.raises(StoreUnreachable):
        store.get("key", 3)
    assert 2_000 * MS < world.now_ns <= 3_000 * MS


def test_a_write_that_did_not_arrive_is_repeated() -> None:
    world = World()
    store = world.client(fails_at(2, "unreachable"))
    assert isinstance(store.compare_and_set("key", None, b"one"), Won)


@pytest.mark.parametrize("fault", ["lost reply", "late"])
def test_a_write_without_an_answer_is_not_repeated(fault: Fault) -> None:
    """Repeating it could undo what others wrote in between."""
    world = World()
    store = world.client(fails_at(2, fault))
    with pytest.raises(StoreUnknown):
        store.set("key", b"one")
    assert (world.server.read("ringfold/key").entry is not None) == (fault == "lost reply")
    assert world.drivers[0].deliver_late() == (fault == "late")
    assert world.server.read("ringfold/key").entry is not None


def test_a_late_write_loses_to_what_came_in_between() -> None:
    world = World()
    store, other = world.client(fails_at(2, "late")), world.client()
    with pytest.raises(StoreUnknown):
        store.compare_and_set("key", None, b"late")
    entry = other.set("key", b"in between")
    world.drivers[0].deliver_late()
    assert other.get("key") == entry


def increments(store: StoreClient, name: str, count: int) -> int:
    """Count a shared record up, with a nonce in each record; returns how many were certainly made."""
    for number in range(count):
        nonce = f"{name}.{number}"
        while True:
            try:
                entry = store.get("record")
                value, seen = (0, "") if entry is None else read_record(entry)
                if seen == nonce:
                    break
                outcome = store.compare_and_set("record", entry, f"{value + 1} {nonce}".encode())
            except (StoreUnknown, StoreUnreachable):
                continue
            if isinstance(outcome, Won):
                break
    return count


def read_record(entry: Entry) -> tuple[int, str]:
    value, nonce = entry.value.decode().split()
    return int(value), nonce


@pytest.mark.parametrize("fault", ["unreachable", "lost reply", "crash", "crash after"])
@pytest.mark.parametrize("number", range(1, 10))
def test_a_fault_at_any_call_loses_no_increment_and_makes_none_twice(number: int, fault: Fault) -> None:
    world = World()
    made, is_dead = 0, False
    try:
        made = increments(world.client(fails_at(number, fault)), "one", 4)
    except Crashed:
        is_dead = True
    done = 0 if (entry := world.server.read("ringfold/record").entry) is None else read_record(entry)[0]
    assert is_dead == fault.startswith("crash")
    assert done <= 4 if is_dead else done == made == 4
    increments(world.client(), "two", 3)
    entry = world.client().get("record")
    assert entry is not None
    assert read_record(entry)[0] == done + 3


# Generations


def test_a_client_founds_an_empty_store_once() -> None:
    world = World()
    assert world.client().generation.id == world.client().generation.id == "nonce 1"


def test_a_wiped_store_is_refused_until_it_is_the_old_one_again() -> None:
    world = World()
    store = world.client()
    entry = store.set("key", b"one")
    kept = world.server.snapshot()
    world.server.wipe()
    with pytest.raises(StoreReset, match="emptied"):
        store.get("key")
    world.server.restore(kept)
    assert store.get("key") == entry


def test_a_store_that_went_back_and_moved_on_is_refused_while_it_is_behind() -> None:
    world = World()
    store, old = world.client(), world.server.snapshot()
    for _ in range(5):
        store.set("key", b"one")
    world.server.restore(old)
    world.client().set("key", b"other")
    with pytest.raises(StoreWentBack, match="revision"):
        store.get("key")


def test_a_response_is_compared_with_what_was_known_at_the_request() -> None:
    """Another thread may learn of a newer revision while this answer is on its way."""
    world = World()
    first = world.client()
    first.set("key", b"one")

    class Slow(MemoryDriver):
        def read(self, *arguments: object) -> object:  # type: ignore[override]
            read = super().read(*arguments)  # type: ignore[arg-type]
            if not self.is_inside:
                self.is_inside = True
                store.set("other", b"meanwhile")
            return read

        is_inside = False

    store = StoreClient(Slow(world.server, sleep=world.sleep), now_ns=lambda: world.now_ns, pause=world.sleep)
    assert store.get("key") is not None


# Leases where the store has none


def test_an_unrenewed_lease_ends_after_its_time_and_not_before() -> None:
    world = World()
    holder, other = world.client(), world.client()
    assert holder.lease("leader", b"me", 1) is not None
    seen_ns = world.now_ns
    entry = other.get("leader")
    while entry is not None:
        entry = other.wait("leader", entry.version, 5)
    assert 1_000 * MS <= world.now_ns - seen_ns <= 1_500 * MS
    assert other.lease("leader", b"you", 1) is not None


def test_a_renewed_lease_goes_on() -> None:
    world = World()
    lease, other = world.client().lease("leader", b"me", 1), world.client()
    assert lease is not None
    for _ in range(20):
        world.sleep(0.3)
        lease.renew()
        assert other.get("leader") is not None
    assert world.now_ns > 5_000 * MS


def test_an_observer_that_was_away_does_not_judge() -> None:
    """One look before a long sleep and one after it: the holder, which slept as well, may still renew."""
    world = World()
    holder, other = world.client(), world.client()
    assert holder.lease("leader", b"me", 1) is not None
    other.get("leader")
    world.sleep(60)
    assert other.get("leader") is not None
    world.sleep(60)
    assert other.get("leader") is None


def test_a_renewal_whose_answer_was_lost_is_recognised() -> None:
    world = World()
    store = world.client(lambda call: "lost reply" if call.kind == "write" and call.number > 3 else None)
    lease = store.lease("leader", b"me", 1)
    assert lease is not None
    world.sleep(0.5)
    lease.renew()
    assert lease.left_s() == 1


def test_a_renewal_that_met_another_holder_is_a_lost_lease() -> None:
    world = World()
    store, other = world.client(), world.client()
    lease = store.lease("leader", b"me", 1)
    assert lease is not None
    other.delete("leader")
    successor = other.lease("leader", b"you", 1)
    assert successor is not None
    assert successor.fence > lease.fence
    with pytest.raises(LeaseLost):
        lease.renew()
    assert lease.left_s() == 0


@given(st.lists(st.tuples(st.sampled_from(["renew", "look"]), st.integers(0, 900)), max_size=60))
def test_no_client_ends_a_lease_that_its_holder_still_relies_on(steps: list[tuple[str, int]]) -> None:
    """Whatever the order and the gaps of renewals and looks, on clocks that run alike."""
    watch, version, sent_ms, now_ms = LeaseMonitor(), 1, 0, 0
    for what, gap_ms in steps:
        now_ms += gap_ms
        if what == "renew" and now_ms - sent_ms < 1_000:
            version, sent_ms = version + 1, now_ms
        if what == "look" and watch.observe(now_ms * MS, "key", Entry(b"", version, 1_000)):
            assert now_ms - sent_ms >= 1_000
            return


def test_a_key_without_a_lease_never_ends() -> None:
    watch = LeaseMonitor()
    assert not any(watch.observe(hour * 3_600_000 * MS, "key", Entry(b"", 1)) for hour in range(50))


# Opening


def test_a_network_disk_is_recognised_by_its_mount() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0\ntmpfs /home/me/my\\040tmp tmpfs rw 0 0\n"
    assert file_system(mounts, Path("/var/lib")) == "ext4"
    assert file_system(mounts, Path("/home/me")) == "nfs4"
    assert file_system(mounts, Path("/home/me/my tmp/x")) == "tmpfs"


def test_a_file_on_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.store.sqlite.file_system", lambda mounts, folder: "nfs4")
    with pytest.raises(ConfigError, match="network disk"):
        open_store(f"sqlite://{tmp_path}/store.db")


def test_a_network_disk_can_be_insisted_on_and_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ringfold.store.sqlite.file_system", lambda mounts, folder: "nfs4")
    SqliteDriver(tmp_path / "store.db", allow_network=True).close()
    assert "network disk" in caplog.text


@pytest.mark.parametrize(("url", "package"), [("redis://there", "redis"), ("tcp://there:1", "torch")])
def test_a_missing_package_is_named_with_how_to_install_it(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(f"ringfold.store.{url.partition(':')[0]}.import_module", refuse)
    with pytest.raises(MissingPackage, match=rf"pip install 'ringfold\[{package}\]'") as caught:
        open_store(url)
    assert caught.value.package == package


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///no/such/folder/x.db",
        "sqlite:/tmp/x\0y",
        "etcd://:99",
        "etcd://host:port",
        "etcd://host:99999",
        "etcd://[::1:2379",
        "sqlite:///tmp/x?timeout_s=soon",
        "sqlite:///tmp/x?timeout_s=inf",
        "sqlite:///tmp/x?timeout_s=nan",
    ],
)
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_name_that_no_host_can_have_is_unreachable() -> None:
    with pytest.raises(StoreUnreachable):
        open_store("etcd://a..b:2379", timeout_s=0.1)


def test_the_errors_of_stores_survive_pickling() -> None:
    kinds = (errors.StoreError, StoreUnreachable, StoreUnknown, StoreWentBack, StoreReset, LeaseLost)
    for error in (*(kind("sqlite:///x", "why") for kind in kinds), MissingPackage("a", "b", "c")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


def test_lost_shows_what_is_there() -> None:
    world = World()
    store = world.client()
    entry = store.set("key", b"one")
    assert store.compare_and_set("key", None, b"two") == Lost(entry)


def test_a_path_that_cannot_even_be_looked_at_is_an_error_of_the_store(tmp_path: Path) -> None:
    """A caller that waits for a store to come back catches StoreError, and nothing else."""
    (tmp_path / "folder").mkdir()
    with open_store(f"sqlite://{tmp_path}/folder/store.db") as store:
        (tmp_path / "folder").rename(tmp_path / "elsewhere")
        (tmp_path / "folder").write_text("no folder any more")
        with pytest.raises(StoreError, match="Not a directory"):
            store.get("key")


# sqlite: what is flushed, and which waiters are woken


def test_only_what_is_to_last_is_flushed_and_a_connection_that_did_not_does_again(tmp_path: Path) -> None:
    """2 is FULL: the log is flushed at the end of each transaction. 1 is NORMAL: it is not."""
    driver = SqliteDriver(tmp_path / "store.db")
    with StoreClient(driver, prefix="run", timeout_s=5, now_ns=monotonic_ns) as store:
        found = []
        for lasting in (True, False, True):
            entry = store.set("key", b"value", lasting=lasting)
            assert isinstance(store.compare_and_set("key", entry, b"other", lasting=lasting), Won)
            db = driver._writer._db
            assert db is not None
            found.append(db.execute("PRAGMA synchronous").fetchone()[0])
    assert found == [2, 1, 2]


def test_a_lease_is_flushed_when_it_is_taken_and_not_when_it_is_renewed(tmp_path: Path) -> None:
    """A holder that is frozen inside a flush has the lock, and no other process could take the lease from it."""
    driver = SqliteDriver(tmp_path / "store.db")
    with StoreClient(driver, prefix="run", timeout_s=5, now_ns=monotonic_ns) as store:
        lease = store.lease("key", b"me", 300)
        assert lease is not None
        db = driver._writer._db
        assert db is not None
        taken = db.execute("PRAGMA synchronous").fetchone()[0]
        lease.renew()
        assert (taken, db.execute("PRAGMA synchronous").fetchone()[0]) == (2, 1)


def test_what_is_not_durable_is_visible_to_all_at_once(tmp_path: Path) -> None:
    with open_store(f"sqlite://{tmp_path}/store.db") as one, open_store(f"sqlite://{tmp_path}/store.db") as other:
        entry = one.set("key", b"value", lasting=False)
        assert other.get("key") == entry


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux")
def test_a_waiter_for_a_key_is_not_woken_for_another(tmp_path: Path) -> None:
    watches = SqliteDriver(tmp_path / "store.db")._watches
    taken = watches.take("record")
    assert taken is not None
    watches.notify("arrived")
    assert not taken.watch.wait(0)
    watches.notify("record")
    assert taken.watch.wait(0)
    watches.put_back(taken)
    watches.close()


def test_a_watch_is_kept_for_the_next_wait_and_what_it_was_read_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that begins where the last one ended makes one request: the read after the notification."""
    monkeypatch.setattr("ringfold.store.sqlite._SLOW_POLL_S", 10.0)  # which is a request, too
    with open_store(f"sqlite://{tmp_path}/store.db") as store, open_store(f"sqlite://{tmp_path}/store.db") as other:
        entry = other.set("a", b"0")
        timer = threading.Timer(0.05, lambda: other.set("a", b"1"))
        timer.start()
        seen = store.wait("a", entry.version, 10)
        assert seen is not None
        assert seen.value == b"1"
        timer.join()
        for number in range(2, 5):
            before = store.operations
            timer = threading.Timer(0.05, lambda number=number: other.set("a", b"%d" % number))
            timer.start()
            seen = store.wait("a", seen.version, 10)
            timer.join()
            assert seen is not None
            assert seen.value == b"%d" % number
            assert store.operations - before <= 2
        assert len(store._watches) == 1
    assert not store._watches


def test_a_wait_after_a_change_that_was_learned_otherwise_reads_first(tmp_path: Path) -> None:
    with open_store(f"sqlite://{tmp_path}/store.db") as store:
        first = store.set("a", b"1")
        assert store.wait("a", first.version, 0.01) == first
        second = store.set("a", b"2")
        assert store.wait("a", first.version, 10) == second
        assert store.wait("a", second.version, 0.01) == second
