"""How often the agent looks at interfaces: often while something waits there, seldom while nothing is sent."""

import asyncio

import pytest

from ringfold.agent import monitors
from ringfold.agent.events import Event, NicQueuesRead
from ringfold.agent.host_monitor import HostMonitor
from ringfold.agent.monitors import (
    ACTIVE_INTERVAL_NS,
    BUSY_FOR_NS,
    BUSY_INTERVAL_NS,
    IDLE_INTERVAL_NS,
    NicMonitors,
    NicReading,
    NicWatch,
)
from ringfold.agent.registry import Pair
from ringfold.wire.telemetry import address_number

SECOND = 1_000_000_000


class Nic:
    """An interface as a test wants it; it counts how often it was read."""

    def __init__(self) -> None:
        self.reading = NicReading(tx_bytes=0, sent_bytes=0)
        self.reads = 0

    def read(self, nic: str) -> NicReading:
        self.reads += 1
        return self.reading

    def close(self) -> None:
        pass


@pytest.fixture
def nic(monkeypatch: pytest.MonkeyPatch) -> Nic:
    made = Nic()
    monkeypatch.setattr(monitors, "open_monitors", lambda names: NicMonitors({"made": made}))
    monkeypatch.setattr(monitors, "interfaces", lambda: {"10.0.0.1": "eth0"})
    return made


def look_until(watch: NicWatch, now_ns: int, end_ns: int) -> int:
    """Look whenever it is time; the time of the first look after the end."""
    while now_ns < end_ns:
        watch.read(now_ns)
        now_ns = watch.next_ns(now_ns)
    return now_ns


def test_an_interface_that_sends_nothing_is_looked_at_seldom(nic: Nic) -> None:
    watch = NicWatch()
    watch.add_address("10.0.0.1")
    now_ns = look_until(watch, SECOND, 2 * SECOND)
    nic.reads = 0
    look_until(watch, now_ns, now_ns + SECOND)
    assert nic.reads <= 1.2 * SECOND / IDLE_INTERVAL_NS
    assert watch.next_ns(now_ns) == now_ns + IDLE_INTERVAL_NS


def test_an_interface_that_sends_is_looked_at_more_often(nic: Nic) -> None:
    watch = NicWatch()
    watch.add_address("10.0.0.1")
    now_ns = look_until(watch, SECOND, 2 * SECOND)
    nic.reading = NicReading(tx_bytes=0, sent_bytes=10_000_000)
    watch.read(now_ns)
    assert watch.next_ns(now_ns) == now_ns + ACTIVE_INTERVAL_NS


def test_an_interface_in_which_something_waits_is_looked_at_all_the_time(nic: Nic) -> None:
    watch = NicWatch()
    watch.add_address("10.0.0.1")
    now_ns = look_until(watch, SECOND, 2 * SECOND)
    nic.reading = NicReading(tx_bytes=1_500, sent_bytes=0)
    watch.read(now_ns)
    assert watch.next_ns(now_ns) == now_ns + BUSY_INTERVAL_NS
    nic.reading = NicReading(tx_bytes=0, sent_bytes=0)
    now_ns = look_until(watch, now_ns, now_ns + BUSY_FOR_NS + ACTIVE_INTERVAL_NS)
    watch.read(now_ns)
    assert watch.next_ns(now_ns) == now_ns + IDLE_INTERVAL_NS


def test_a_link_local_address_says_its_interface(nic: Nic) -> None:
    watch = NicWatch()
    watch.add_address("fe80::1%eth0")
    assert [name for name, _ in watch.read(SECOND)] == ["eth0"]


def test_an_address_of_no_interface_is_not_watched(nic: Nic) -> None:
    watch = NicWatch()
    watch.add_address("fe80::1%eth7")
    watch.add_address("10.9.9.9")
    assert watch.read(SECOND) == {}


def test_the_pressure_of_an_interface_that_is_gone_is_taken_back(nic: Nic, monkeypatch: pytest.MonkeyPatch) -> None:
    nic.reading = NicReading(tx_bytes=10, tx_limit_bytes=10)
    monkeypatch.setattr(monitors, "ADDRESS_REFRESH_NS", 0)
    told: list[Event] = []

    def tell(event: Event) -> None:
        told.append(event)
        monkeypatch.setattr(monitors, "interfaces", dict)

    async def story() -> None:
        around = HostMonitor(tell, watch=NicWatch())
        around.watch_pair(Pair(("10.0.0.1", "10.0.0.2", (("10.0.0.1", "10.0.0.2"),) * 2), 0, 1))
        around.start()
        async with asyncio.timeout(20):
            while len(told) < 2:  # noqa: ASYNC110 - it looks in its own time
                await asyncio.sleep(0.001)
        await around.stop()

    asyncio.run(story())
    assert told == [NicQueuesRead({address_number("10.0.0.1"): 255.0}), NicQueuesRead({})]


def test_pressures_are_taken_back_if_the_interfaces_can_be_read_no_more(
    nic: Nic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nic.reading = NicReading(tx_bytes=1 << 20)
    delivered: list[Event] = []

    async def run() -> None:
        watch, done = NicWatch(), asyncio.Event()

        def deliver(event: Event) -> None:
            delivered.append(event)
            monkeypatch.setattr(watch, "read", lambda now_ns: 1 // 0)  # fails from now on
            if len(delivered) == 2:
                done.set()

        monitor = HostMonitor(deliver, watch=watch)
        monitor.start()
        monitor.watch_pair(Pair(("10.0.0.1", "10.0.0.2", (("10.0.0.1", "10.0.0.2"),)), 0, 1))
        await asyncio.wait_for(done.wait(), 20)
        await monitor.stop()

    asyncio.run(run())
    assert delivered == [NicQueuesRead({address_number("10.0.0.1"): 255.0}), NicQueuesRead({})]
    assert "interfaces ended" in caplog.text
