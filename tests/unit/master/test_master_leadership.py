"""Which master leads: the lease, and what remains of it when it could not be released."""

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec import structs

from ringfold.errors import ConfigError, MasterUnreachable, StoreError
from ringfold.master import leadership
from ringfold.master.journal import Journal, closed_journal, forgotten_journal
from ringfold.master.journal_store import KEY, PART_BYTES, Deposed, JournalStore
from ringfold.master.leadership import LEASE_KEY, Candidate, Leadership
from ringfold.master.server import MasterServer
from ringfold.master.settings import MasterSettings
from ringfold.runtime import master_client
from ringfold.runtime.clock import monotonic_ns
from ringfold.store import StoreClient, open_store

LONG_S = 300.0


def lead(store: StoreClient, name: str = "here", **named: bool) -> Leadership:
    async def within() -> Leadership:
        async with asyncio.timeout(20):
            return await Candidate(store, "journal", name, LONG_S, **named).lead()

    return asyncio.run(within())


@pytest.fixture
def store(tmp_path: Path) -> StoreClient:
    return open_store(f"sqlite://{tmp_path}/journal.db")


def test_a_lease_of_this_process_that_was_not_released_blocks_no_master(store: StoreClient) -> None:
    with store:
        lead(store)
        assert lead(store).is_exclusive()


def test_the_next_leader_has_a_higher_fence(store: StoreClient) -> None:
    with store:
        first = lead(store)
        assert (first.fence, first.journals) == (1, {})
        first.write("default", Journal(first.fence, b"secret"))
        first.write("nightly-7", Journal(first.fence, b"other"))
        second = lead(store)
        assert second.fence == 2
        assert second.journals == {"default": Journal(1, b"secret"), "nightly-7": Journal(1, b"other")}


def test_the_fence_is_higher_than_that_of_any_run(store: StoreClient) -> None:
    """A run that broke and began again has a higher one than the others; a closed journal keeps nothing else."""
    with store:
        first = lead(store)
        first.write("default", closed_journal(5, "here"))
        first.write("nightly-7", Journal(9, b"secret"))
        assert lead(store).fence == 10


def test_a_deposed_leader_writes_to_no_run(store: StoreClient) -> None:
    """The first write of the new one is to each run's journal; and none can be added or forgotten before that."""
    with store:
        first = lead(store)
        for name in ("default", "a", "b"):
            first.write(name, Journal(first.fence, b"secret"))
        second = lead(store)
        for journal in (Journal(first.fence, b"new"), forgotten_journal(first.fence)):
            with pytest.raises(Deposed):
                first.write("c", journal) if not journal.is_forgotten else first.directory.remove("b")
        for name, journal in second.journals.items():
            second.write(name, structs.replace(journal, fence=second.fence))
            with pytest.raises(Deposed):
                first.write(name, Journal(first.fence, b"late"))
        with pytest.raises(Deposed):
            first.write("a", forgotten_journal(first.fence))
        assert {name: journal.fence for name, journal in lead(store).journals.items()} == dict.fromkeys(
            ("default", "a", "b"), second.fence
        )


def test_a_forgotten_run_leaves_nothing_in_the_store(store: StoreClient) -> None:
    with store:
        first = lead(store)
        before = set(store.list())
        first.write("a", Journal(first.fence, b"s" * 2 * PART_BYTES))
        first.stores["a"].write_links(b"figures")
        first.write("a", forgotten_journal(first.fence))
        assert set(store.list()) == before
        first.write("a", Journal(first.fence, b"again"))
        assert lead(store).journals == {"a": Journal(first.fence, b"again")}


def test_a_master_that_is_to_be_alone_does_not_stand_by(store: StoreClient) -> None:
    async def wait_shortly() -> None:
        await Candidate(store, "journal", "here", 0.05, alone=True).lead()

    with store:
        lead(store, name="there")
        with pytest.raises(ConfigError, match="in use by the master at there"):
            asyncio.run(wait_shortly())


def test_a_master_alone_waits_until_a_full_disk_is_not_full_any_more(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease that it could not release is its own: no other master uses its journal."""
    write, refused = store._write, iter(range(20))

    def often_full(*arguments: object) -> object:
        if next(refused, None) is not None:
            raise StoreError("journal", "the disk is full")
        return write(*arguments)  # type: ignore[arg-type]

    async def wait() -> Leadership:
        async with asyncio.timeout(20):
            return await Candidate(store, "journal", "here", 0.05, alone=True).lead()

    with store:
        lead(store)
        monkeypatch.setattr(leadership, "RETRY_S", 0.01)
        monkeypatch.setattr(store, "_write", often_full)
        assert asyncio.run(wait()).is_exclusive()


def test_a_master_that_cannot_read_the_journal_releases_the_lease(store: StoreClient) -> None:
    with store:
        store.set(KEY, b"of another version")
        lease = store.lease(LEASE_KEY, b"here", LONG_S)
        assert lease is not None
        with pytest.raises(StoreError, match="no journal"):
            asyncio.run(Candidate(store, "journal", "here", LONG_S)._take_over(lease))
        assert store.get(LEASE_KEY) is None


@pytest.mark.parametrize(
    ("what", "broken"), [(JournalStore, "write"), (JournalStore, "read"), (Candidate, "_take_lease")]
)
def test_an_unexpected_exception_ends_the_master_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: type, broken: str
) -> None:
    """Otherwise it would keep running without deciding or logging anything."""

    def breaks(*arguments: object) -> object:
        raise RuntimeError("out of luck")

    async def serve() -> None:
        async with asyncio.timeout(20):
            await MasterServer(MasterSettings(), ["127.0.0.1:0"], journal=f"sqlite://{tmp_path}/journal.db").serve()

    monkeypatch.setattr(what, broken, breaks)
    with pytest.raises(RuntimeError, match="out of luck"):
        asyncio.run(serve())


def test_unauthenticated_clients_do_not_get_the_stores_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a master that does not lead gets the reason, before it is authenticated."""
    with open_store(f"sqlite://{tmp_path}/journal.db") as store:
        store.set(KEY, b"of another version")
    monkeypatch.setattr("ringfold.master.server.open_store", lambda _: open_store(f"sqlite://{tmp_path}/journal.db"))

    async def query() -> bytes:
        server, ready = MasterServer(MasterSettings(), ["127.0.0.1:0"], journal="redis://me:hush@host"), asyncio.Event()
        serving = asyncio.create_task(server.serve(ready.set))
        try:
            async with asyncio.timeout(20):
                await ready.wait()
                response = b""
                while b"no journal" not in response:
                    host, port = server.addresses[0].split(":")
                    reader, writer = await asyncio.open_connection(host, int(port))
                    response = await reader.read()
                    writer.close()
                return response
        finally:
            server.stop()
            await serving

    assert b"hush" not in asyncio.run(query())


def test_a_master_that_cannot_even_begin_to_lead_pauses_before_it_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease can be had, and its journal cannot be written: without a pause it would do nothing else all day."""
    slept: list[float] = []
    wait = asyncio.sleep

    def refuse(*_: object) -> None:
        raise StoreError("journal", "no room")

    async def serve() -> None:
        server = MasterServer(MasterSettings(), ["127.0.0.1:0"], journal=f"sqlite://{tmp_path}/journal.db")

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if seconds == 77.0:
                server.stop()
            await wait(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        async with asyncio.timeout(5):
            await server.serve()

    monkeypatch.setattr(JournalStore, "write", refuse)
    monkeypatch.setattr("ringfold.master.server.RETRY_S", 77.0)
    asyncio.run(serve())
    assert 77.0 in slept


def test_a_leader_that_was_suspended_until_its_peers_left_leads_again_with_a_higher_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its lease is: with the same fence it would evict all of them when they return."""
    ahead_s, begin = 0, MasterServer._begin

    async def serve() -> tuple[int, int]:
        nonlocal ahead_s
        led: asyncio.Queue[int] = asyncio.Queue()

        def noted(server: MasterServer, leadership: Leadership) -> object:
            led.put_nowait(leadership.fence)
            return begin(server, leadership)

        monkeypatch.setattr(MasterServer, "_begin", noted)
        where = f"sqlite://{tmp_path}/journal.db"
        server = MasterServer(MasterSettings(), ["127.0.0.1:0"], journal=where, lease_s=LONG_S)
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(10):
                first = await led.get()
                ahead_s = 6
                return first, await led.get()
        finally:
            server.stop()
            await serving

    monkeypatch.setattr("ringfold.master.server.monotonic_ns", lambda: monotonic_ns() + ahead_s * 1_000_000_000)
    assert asyncio.run(serve()) == (1, 2)


def test_a_write_that_hangs_from_an_earlier_lead_keeps_the_next_one_waiting_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers again, and this master leads again; one thread still waits for an answer that is late."""
    late, hangs = threading.Event(), threading.Event()
    write = Leadership.write

    def hang_once(self: Leadership, run: str, journal: Journal) -> None:
        if not hangs.is_set():
            hangs.set()
            late.wait(20)
        write(self, run, journal)

    def look(address: str) -> int:
        while True:
            try:
                with master_client.connect([address], b"") as connection:
                    return connection.status().fence
            except MasterUnreachable:
                threading.Event().wait(0.02)

    async def serve() -> int:
        server, ready = (
            MasterServer(MasterSettings(), ["127.0.0.1:0"], journal=f"sqlite://{tmp_path}/journal.db"),
            asyncio.Event(),
        )
        serving = asyncio.create_task(server.serve(ready.set))
        try:
            async with asyncio.timeout(20):
                await ready.wait()
                await asyncio.to_thread(hangs.wait, 20)
                server.step_down("the store was away")
                return await asyncio.to_thread(look, server.addresses[0])
        finally:
            late.set()
            server.stop()
            await serving

    monkeypatch.setattr(Leadership, "write", hang_once)
    monkeypatch.setattr("ringfold.master.server.RETRY_S", 0.01)
    assert asyncio.run(serve()) == 2
