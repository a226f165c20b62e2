"""What every store promises, held against real servers: one suite for all backends."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_servers import SERVERS, Server, those, until

from ringfold.errors import ConfigError, LeaseLost, RingfoldError, StoreUnreachable, UsageError
from ringfold.store import Entry, Lost, StoreClient, Won, open_store, version_of
from ringfold.store.base import KeyWatch, Read
from ringfold.store.in_memory import MemoryDriver, MemoryServer

pytestmark = pytest.mark.waiting

TTL_S = 2.0
Open = Callable[..., StoreClient]


@pytest.fixture(params=sorted(SERVERS), scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of a backend; each test has a namespace of its own."""
    kind = SERVERS[request.param]
    if reason := kind.missing():
        pytest.skip(reason)
    running = kind(tmp_path_factory.mktemp(request.param))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def opened(server: Server, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens clients of this test's namespace, which are closed at its end."""
    clients: list[StoreClient] = []

    def opening(**options: object) -> StoreClient:
        name = request.node.name.partition("[")[0]
        clients.append(open_store(server.url, **{"prefix": name, "timeout_s": 10.0, **options}))  # type: ignore[arg-type]
        return clients[-1]

    yield opening
    for client in clients:
        client.close()


@pytest.fixture
def store(opened: Open) -> StoreClient:
    return opened()


def won(outcome: Won | Lost) -> Entry:
    assert isinstance(outcome, Won), outcome
    return outcome.entry


# Reading and writing


def test_an_absent_key_is_none_at_once(store: StoreClient) -> None:
    began = time.monotonic()
    assert store.get("nothing") is None
    assert time.monotonic() - began < 5


def test_what_is_set_is_read_by_another_client(store: StoreClient, opened: Open) -> None:
    written = store.set("key", b"value")
    assert opened().get("key") == written
    assert written.value == b"value"


def test_get_many_finds_those_that_are_there(store: StoreClient) -> None:
    entries = {f"key/{number}": store.set(f"key/{number}", b"%d" % number) for number in range(9)}
    for gone in ("key/3", "key/4"):
        store.delete(gone, entries.pop(gone))  # on a condition
    store.delete("key/8")
    del entries["key/8"]
    assert store.get_many([f"key/{number}" for number in range(12)]) == entries
    assert store.get_many(["key/3", "none"]) == {}
    assert store.get_many([]) == {}


def test_get_many_does_not_wait_for_keys_that_come_and_go(store: StoreClient, opened: Open) -> None:
    lasting = {key: store.set(key, b"") for key in ("a", "b", "c")}
    is_over = threading.Event()

    def come_and_go(other: StoreClient) -> None:
        while not is_over.is_set():
            other.set("fleeting", b"")
            other.delete("fleeting")

    writer = threading.Thread(target=come_and_go, args=[opened()])
    writer.start()
    try:
        for _ in range(100):
            found = store.get_many(["a", "b", "fleeting", "c"])
            assert {key: found[key] for key in lasting} == lasting
    finally:
        is_over.set()
        writer.join()


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
def test_a_key_that_is_removed_while_many_are_read_is_absent(
    server: Server, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads many keys at once only if all are there, and else waits for them."""
    from torch.distributed import Store as TorchStore

    store, other = opened(), opened()
    entry = store.set("a", b"")
    store.set("b", b"")
    check = TorchStore.check
    checked: list[list[str]] = []

    def check_and_remove(self: TorchStore, keys: list[str]) -> bool:
        are_there: bool = check(self, keys)
        checked.append(keys)
        other.delete("b")
        return are_there

    monkeypatch.setattr(TorchStore, "check", check_and_remove)
    assert store.get_many(["a", "b"], 20) == {"a": entry}
    assert len(checked) > 1


@pytest.mark.parametrize("value", [b"", b"\0", b"\xff\xfe\0\n", bytes(range(256)) * 16, "ü\n".encode()])
def test_a_value_is_any_bytes(store: StoreClient, value: bytes) -> None:
    store.set("bytes", value)
    found = store.get("bytes")
    assert found is not None
    assert found.value == value


def test_a_value_may_have_a_megabyte(store: StoreClient) -> None:
    value = bytes(1 << 20)
    store.set("large", value)
    found = store.get("large")
    assert found is not None
    assert found.value == value


def test_a_larger_value_is_refused(store: StoreClient) -> None:
    with pytest.raises(UsageError, match="at most"):
        store.set("large", bytes((1 << 20) + 1))


@pytest.mark.parametrize("key", ["", "!inner", "nul\0", "x" * 513])
def test_a_bad_key_is_refused(store: StoreClient, key: str) -> None:
    with pytest.raises(UsageError, match="key of the store"):
        store.get(key)


@pytest.mark.parametrize("key", ["a/b:c{d}*?[x]", "with space", "ümlaut", "%41", "x" * 400])
def test_a_key_is_any_text(store: StoreClient, key: str) -> None:
    store.set(key, b"here")
    found = store.get(key)
    assert found is not None
    assert found.value == b"here"


def test_versions_grow_with_every_write_of_a_key(store: StoreClient) -> None:
    versions = [store.set("grows", b"same").version for _ in range(5)]
    assert versions == sorted(set(versions))
    assert versions[0] > 0


def test_a_key_that_is_made_again_has_a_higher_version(store: StoreClient) -> None:
    first = store.set("again", b"same")
    assert store.delete("again")
    assert store.set("again", b"same").version > first.version


def test_namespaces_do_not_see_each_other(opened: Open) -> None:
    mine, other = opened(prefix="mine"), opened(prefix="min")
    mine.set("key", b"mine")
    other.set("e/key", b"other")
    found = mine.get("key")
    assert found is not None
    assert found.value == b"mine"
    assert other.get("key") is None


# Compare-and-set


def test_compare_and_set_makes_an_absent_key(store: StoreClient) -> None:
    entry = won(store.compare_and_set("new", None, b"one"))
    assert store.get("new") == entry


def test_compare_and_set_of_a_present_key_that_should_be_absent_loses_and_shows_it(store: StoreClient) -> None:
    entry = store.set("there", b"one")
    assert store.compare_and_set("there", None, b"two") == Lost(entry)
    assert store.get("there") == entry


def test_compare_and_set_replaces_what_was_read(store: StoreClient) -> None:
    before = store.set("key", b"one")
    after = won(store.compare_and_set("key", before, b"two"))
    assert after.version > before.version
    assert store.get("key") == after


def test_compare_and_set_with_the_version_of_another_value_loses(store: StoreClient) -> None:
    """A store that was restored from an old snapshot uses versions again: a late write must not meet another value."""
    present = store.set("key", b"one")
    other = replace(present, value=b"two")
    assert store.compare_and_set("key", other, b"three") == Lost(present)
    assert not store.delete("key", other)
    assert store.get("key") == present


def test_compare_and_set_with_an_old_version_loses(store: StoreClient) -> None:
    before = store.set("key", b"one")
    present = store.set("key", b"two")
    assert store.compare_and_set("key", before, b"three") == Lost(present)


def test_compare_and_set_is_not_fooled_by_the_same_value(store: StoreClient) -> None:
    """A value that was changed and changed back is another write."""
    before = store.set("key", b"one")
    store.set("key", b"two")
    present = store.set("key", b"one")
    assert store.compare_and_set("key", before, b"three") == Lost(present)


def test_compare_and_set_is_not_fooled_by_a_key_that_was_made_again(store: StoreClient) -> None:
    before = store.set("key", b"one")
    store.delete("key")
    present = store.set("key", b"one")
    assert store.compare_and_set("key", before, b"two") == Lost(present)


def test_compare_and_set_of_a_deleted_key_loses_and_makes_nothing(store: StoreClient) -> None:
    before = store.set("key", b"one")
    store.delete("key")
    assert store.compare_and_set("key", before, b"two") == Lost(None)
    assert store.get("key") is None


def test_of_two_equal_compare_and_sets_one_wins(store: StoreClient, opened: Open) -> None:
    """Both ask for the very same change; a store that answers with the new value must not make both winners."""
    before = store.set("key", b"one")
    outcomes = [store.compare_and_set("key", before, b"two"), opened().compare_and_set("key", before, b"two")]
    assert [type(outcome) for outcome in outcomes] == [Won, Lost]


def test_of_two_equal_makings_one_wins(store: StoreClient, opened: Open) -> None:
    outcomes = [store.compare_and_set("key", None, b"one"), opened().compare_and_set("key", None, b"one")]
    assert [type(outcome) for outcome in outcomes] == [Won, Lost]


INCREMENT = """
import sys
from ringfold.store import Won, open_store
store = open_store(sys.argv[1], prefix=sys.argv[2], timeout_s=60)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    while True:
        entry = store.get("count")
        value = 0 if entry is None else int(entry.value)
        if isinstance(store.compare_and_set("count", entry, str(value + 1).encode()), Won):
            break
    store.add("sum", 3)
print("done", flush=True)
"""


def test_processes_that_increment_lose_nothing(server: Server, store: StoreClient) -> None:
    each, name = 25, "test_processes_that_increment_lose_nothing"
    workers = [server.python(INCREMENT, server.url, name, str(each)) for _ in range(4)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(b"go\n")
            worker.stdin.flush()
        for worker in workers:
            assert worker.communicate(timeout=120)[0] == b"done\n"
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    count, total = store.get("count"), store.get("sum")
    assert count is not None
    assert total is not None
    assert int(count.value) == each * len(workers)
    assert int(total.value) == 3 * each * len(workers)


# Counters, deleting, listing


def test_add_begins_at_nothing_and_returns_the_sum(store: StoreClient) -> None:
    assert [store.add("n"), store.add("n", 5), store.add("n", -9)] == [1, 6, -3]
    found = store.get("n")
    assert found is not None
    assert found.value == b"-3"


def test_add_gives_a_new_version(store: StoreClient) -> None:
    store.add("n")
    before = store.get("n")
    store.add("n", 0)
    after = store.get("n")
    assert before is not None
    assert after is not None
    assert after.version > before.version


def test_adding_to_what_is_no_number_is_refused_and_changes_nothing(store: StoreClient) -> None:
    entry = store.set("text", b"ten")
    with pytest.raises(UsageError, match="not a number"):
        store.add("text")
    assert store.get("text") == entry


@pytest.mark.parametrize("server", those("has_counters"), indirect=True)
def test_increments_of_many_clients_get_a_number_each(server: Server, opened: Open) -> None:
    numbers: list[int] = []

    def count(store: StoreClient) -> None:
        for _ in range(20):
            numbers.append(store.increment("n"))

    counters = [threading.Thread(target=count, args=[opened()]) for _ in range(4)]
    for each in counters:
        each.start()
    for each in counters:
        each.join()
    assert sorted(numbers) == list(range(1, 81))
    assert opened().increment("n", 0) == 80


@pytest.mark.parametrize("server", those("has_counters"), indirect=True)
def test_a_counter_is_no_entry_and_an_entry_no_counter(server: Server, store: StoreClient) -> None:
    entry = store.set("n", b"ten")
    assert store.increment("n", 7) == 7
    assert store.get("n") == entry
    assert store.delete("n") is True
    assert store.increment("n", 0) == 0


def test_a_store_without_counters_reports_it(server: Server, store: StoreClient) -> None:
    assert store.has_counters == server.has_counters
    if not server.has_counters:
        with pytest.raises(UsageError, match="use add"):
            store.increment("n")


def test_delete_returns_whether_there_was_something(store: StoreClient) -> None:
    store.set("key", b"")
    assert store.delete("key") is True
    assert store.delete("key") is False
    assert store.get("key") is None


def test_delete_of_what_was_written_again_does_nothing(store: StoreClient) -> None:
    before = store.set("key", b"one")
    present = store.set("key", b"two")
    assert store.delete("key", before) is False
    assert store.get("key") == present
    assert store.delete("key", present) is True


@pytest.mark.parametrize("server", those("can_list"), indirect=True)
def test_list_shows_the_keys_of_a_prefix_in_order(server: Server, store: StoreClient) -> None:
    entries = {key: store.set(key, key.encode()) for key in ("a/2", "a/1", "a", "b/1", "a/ü")}
    assert list(store.list("a/").items()) == [(key, entries[key]) for key in ("a/1", "a/2", "a/ü")]
    assert store.list("c") == {}
    assert list(store.list()) == ["a", "a/1", "a/2", "a/ü", "b/1"]


def test_a_store_that_cannot_list_reports_it(server: Server, store: StoreClient) -> None:
    assert store.can_list == server.can_list
    if not server.can_list:
        with pytest.raises(UsageError, match="maintain a list"):
            store.list()


# Waiting


class Waiter(threading.Thread):
    """Waits for a change in a thread, and keeps what came of it."""

    def __init__(self, store: StoreClient, key: str, seen: int, timeout_s: float = 30) -> None:
        super().__init__(daemon=True)
        self.store, self.key, self.seen, self.timeout_s = store, key, seen, timeout_s
        self.result: Entry | RingfoldError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.store.wait(self.key, self.seen, self.timeout_s)
        except RingfoldError as error:
            self.result = error

    def outcome(self) -> Entry | RingfoldError | None:
        self.join(60)
        assert not self.is_alive(), "the wait went on far beyond its deadline"
        return self.result


def test_wait_returns_at_once_what_was_not_seen_yet(store: StoreClient) -> None:
    entry = store.set("key", b"one")
    assert store.wait("key", 0, 20) == entry


def test_wait_ends_at_its_deadline_with_what_is_there(store: StoreClient) -> None:
    entry = store.set("key", b"one")
    began = time.monotonic()
    assert store.wait("key", entry.version, 0.3) == entry
    assert store.wait("absent", 0, 0.3) is None
    assert 0.6 <= time.monotonic() - began < 10


def test_wait_wakes_when_a_key_is_made(store: StoreClient, opened: Open) -> None:
    waiter = Waiter(opened(), "key", 0)
    entry = store.set("key", b"one")
    assert waiter.outcome() == entry


def test_wait_wakes_at_a_compare_and_set(store: StoreClient, opened: Open) -> None:
    entry = store.set("key", b"one")
    waiter = Waiter(opened(), "key", entry.version)
    after = won(store.compare_and_set("key", entry, b"two"))
    assert waiter.outcome() == after


def test_wait_wakes_when_a_key_is_deleted(store: StoreClient, opened: Open) -> None:
    entry = store.set("key", b"one")
    waiter = Waiter(opened(), "key", entry.version)
    store.delete("key")
    assert waiter.outcome() is None


def test_wait_wakes_at_an_addition(store: StoreClient, opened: Open) -> None:
    waiter = Waiter(opened(), "n", 0)
    store.add("n", 7)
    outcome = waiter.outcome()
    assert isinstance(outcome, Entry)
    assert outcome.value == b"7"


def test_all_waiters_wake(store: StoreClient, opened: Open) -> None:
    """Several clients, and several threads of one."""
    shared = opened()
    waiters = [Waiter(client, "key", 0) for client in (opened(), opened(), shared, shared, shared)]
    entry = store.set("key", b"one")
    assert [waiter.outcome() for waiter in waiters] == [entry] * 5


def test_a_wait_does_not_hold_up_other_threads_of_its_client(store: StoreClient) -> None:
    waiter = Waiter(store, "key", 0)
    for _ in range(5):
        assert store.get("key") is None
    entry = store.set("key", b"one")
    assert waiter.outcome() == entry


def test_no_change_is_slept_through(store: StoreClient, opened: Open) -> None:
    """A hundred changes in a row, as fast as they come: the waiter sees the last one, and versions only grow."""
    watcher, seen = opened(), [0]

    def follow() -> None:
        while True:
            entry = watcher.wait("key", seen[-1], 20)
            assert entry is not None
            seen.append(entry.version)
            if entry.value == b"99":
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for number in range(100):
        store.set("key", str(number).encode())
    thread.join(60)
    assert not thread.is_alive()
    assert seen == sorted(set(seen))


class Announced:
    """A watch that reports when a client waits for it."""

    def __init__(self, watch: KeyWatch, is_waited_for: threading.Event) -> None:
        self.watch = watch
        self.is_waited_for = is_waited_for

    def wait(self, read: Read, timeout_s: float) -> None:
        self.is_waited_for.set()
        self.watch.wait(read, timeout_s)

    def close(self) -> None:
        self.watch.close()


@pytest.mark.parametrize("what", ["make", "set", "swap", "add", "delete"])
def test_the_watch_wakes_the_waiter(server: Server, opened: Open, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """With a slow poll so slow that a missed notification would be noticed."""
    monkeypatch.setattr(f"ringfold.store.{server.kind}._SLOW_POLL_S", 60.0)
    is_waited_for, store, other = threading.Event(), opened(), opened()
    watch = other._driver.watch
    monkeypatch.setattr(other._driver, "watch", lambda *about: Announced(watch(*about), is_waited_for))
    key = f"key {what}"
    entry = None if what == "make" else store.set(key, b"1")
    waiter = Waiter(other, key, version_of(entry), 40)
    assert is_waited_for.wait(30)
    began = time.monotonic()
    match what:
        case "make" | "set":
            store.set(key, b"2")
        case "swap":
            store.compare_and_set(key, entry, b"2")
        case "add":
            store.add(key)
        case "delete":
            store.delete(key)
    waiter.outcome()
    assert time.monotonic() - began < 15


def test_waiting_often_uses_nothing_up(store: StoreClient) -> None:
    """More waits than a process has file descriptors, or a pool connections, by default of some library."""
    files = Path("/proc/self/fd")
    store.wait("nothing", 0, 0.01)
    before = len(list(files.iterdir()))
    for _ in range(120):
        assert store.wait("nothing", 0, 0.002) is None
    assert len(list(files.iterdir())) <= before + 3


# Leases


def test_a_lease_shows_its_value_and_keeps_others_out(store: StoreClient, opened: Open) -> None:
    lease = store.lease("leader", b"me", TTL_S)
    assert lease is not None
    other = opened()
    found = other.get("leader")
    assert found is not None
    assert found.value == b"me"
    assert other.lease("leader", b"you", TTL_S) is None
    lease.release()


def test_a_released_lease_is_free_at_once_and_the_next_fence_is_higher(store: StoreClient, opened: Open) -> None:
    first = store.lease("leader", b"me", 30)
    assert first is not None
    first.release()
    assert first.left_s() == 0
    second = opened().lease("leader", b"you", 30)
    assert second is not None
    assert second.fence > first.fence
    second.release()


def test_a_renewed_lease_outlives_its_time(store: StoreClient, opened: Open) -> None:
    lease, other = store.lease("leader", b"me", TTL_S), opened()
    assert lease is not None
    began = time.monotonic()
    while time.monotonic() - began < 2 * TTL_S:
        lease.renew()
        assert 0 < lease.left_s() <= TTL_S
        found = other.get("leader")
        assert found is not None
        assert found.value == b"me"
        other.wait("leader", found.version, TTL_S / 10)
    lease.release()


def gone(store: StoreClient, key: str, timeout_s: float) -> bool:
    """Whether a key goes away in time; new versions of it do not count."""
    end, entry = time.monotonic() + timeout_s, store.get(key)
    while entry is not None and time.monotonic() < end:
        entry = store.wait(key, entry.version, end - time.monotonic())
    return entry is None


HOLD = """
import sys
from ringfold.store import open_store
store = open_store(sys.argv[1], prefix=sys.argv[2], timeout_s=30)
lease = store.lease("leader", b"child", float(sys.argv[3]))
print("held" if lease else "busy", flush=True)
while True:
    lease.renew()
    store.wait("nothing", 0, float(sys.argv[3]) / 4)
"""


def test_the_lease_of_a_killed_process_ends_and_wakes_waiters(server: Server, store: StoreClient) -> None:
    name = "test_the_lease_of_a_killed_process_ends_and_wakes_waiters"
    holder = server.python(HOLD, server.url, name, str(TTL_S))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not gone(store, "leader", 1.5 * TTL_S), "the lease ended although its holder renews it"
    finally:
        holder.kill()
        holder.communicate()
    assert gone(store, "leader", 20 * TTL_S), "the lease did not end"
    assert store.lease("leader", b"me", 30) is not None


def test_a_holder_that_is_late_has_lost_its_lease(store: StoreClient) -> None:
    lease = store.lease("leader", b"me", 0.1)
    assert lease is not None
    until(lambda: lease.left_s() == 0, "the lease to be over by the holder's clock")
    with pytest.raises(LeaseLost):
        lease.renew()


def test_a_holder_whose_key_was_taken_away_has_lost_its_lease(store: StoreClient, opened: Open) -> None:
    lease = store.lease("leader", b"me", 30)
    assert lease is not None
    opened().delete("leader")
    with pytest.raises(LeaseLost):
        lease.renew()
    assert lease.left_s() == 0


def test_a_lost_lease_does_not_release_its_successor(store: StoreClient, opened: Open) -> None:
    lease, other = store.lease("leader", b"me", 30), opened()
    assert lease is not None
    other.delete("leader")
    successor = other.lease("leader", b"you", 30)
    assert successor is not None
    lease.release()
    found = store.get("leader")
    assert found is not None
    assert found.value == b"you"
    successor.release()


# Against a model


class Model:
    """The store in memory, on a clock that stands still."""

    def __init__(self) -> None:
        driver = MemoryDriver(MemoryServer(), sleep=lambda seconds: None)
        self.store = StoreClient(driver, now_ns=lambda: 0, pause=lambda seconds: None)


def deed(store: StoreClient, seen: dict[str, Entry | None], what: str, key: str, value: bytes) -> object:
    """Do one thing, with what was last read of the key; returns all of the outcome that does not depend on numbers."""
    match what:
        case "get":
            seen[key] = store.get(key)
            return None if (entry := seen[key]) is None else entry.value
        case "set":
            return store.set(key, value).value
        case "swap":
            outcome = store.compare_and_set(key, seen.get(key), value)
            present = outcome.entry if isinstance(outcome, Won) else outcome.present
            return type(outcome).__name__, None if present is None else present.value
        case "drop":
            return store.delete(key)
        case "drop seen":
            return store.delete(key, seen.get(key) or Entry(b"never", 1 << 40))
        case "wait":
            entry = store.wait(key, 0 if (before := seen.get(key)) is None else before.version, 0)
            return None if entry is None else entry.value
        case _:
            return store.add(f"counter {key}", len(value))


@pytest.mark.parametrize("seed", range(3))
def test_a_random_history_is_that_of_the_store_in_memory(opened: Open, seed: int) -> None:
    """Two clients each, the same 120 calls: the same outcomes, and the same keys in the end."""
    rng, model = random.Random(seed), Model()
    mine = [opened(prefix=f"history {seed}"), opened(prefix=f"history {seed}")]
    seen: list[dict[str, Entry | None]] = [{}, {}]
    theirs: list[dict[str, Entry | None]] = [{}, {}]
    for number in range(120):
        what = rng.choice(["get", "get", "set", "swap", "swap", "drop", "drop seen", "wait", "add"])
        key, who, value = rng.choice("xyz"), rng.randrange(2), b"v" * rng.randrange(3)
        got = deed(mine[who], seen[who], what, key, value)
        assert got == deed(model.store, theirs[who], what, key, value), (seed, number, what, key)
    if mine[0].can_list:
        assert {key: entry.value for key, entry in mine[0].list().items()} == {
            key: entry.value for key, entry in model.store.list().items()
        }


# Generations and opening


def test_all_clients_see_the_same_generation(store: StoreClient, opened: Open) -> None:
    assert opened().generation.id == store.generation.id


def test_the_revision_that_a_client_remembers_grows(store: StoreClient) -> None:
    before = store.generation
    store.set("key", b"one")
    assert store.generation.revision > before.revision


def test_a_known_generation_opens(store: StoreClient, opened: Open) -> None:
    store.set("key", b"one")
    assert opened(known=store.generation).get("key") == store.get("key")


def test_a_deadline_of_zero_is_one_try_and_no_wait(store: StoreClient) -> None:
    began = time.monotonic()
    with contextlib.suppress(StoreUnreachable):
        assert store.get("key", timeout_s=0) is None
    assert time.monotonic() - began < 2


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins with"):
        open_store("mongo://there")


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no option colour"):
        open_store(f"sqlite://{tmp_path}/s.db?colour=red")


def test_a_password_is_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        open_store("mongo://me:hunter2@there")
    assert "hunter2" not in str(caught.value)
