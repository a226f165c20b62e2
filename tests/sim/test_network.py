"""The simulated network behaves like TCP, and applies faults."""

from collections.abc import Callable

import pytest

from ringfold.testing.network import REFUSED, RESET, TIMED_OUT, End, Network, SimulatedHost, Weather
from ringfold.testing.scheduler import MS, Scheduler, SimulationFailure

PORT = 7


class Recorder:
    """A process that keeps what it receives, and sends what a test gives it as the window allows."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.host: SimulatedHost = network.add_host(name, self)
        self.host.listening.add(PORT)
        self.ends: list[End] = []
        self.log: list[tuple[int, str, str]] = []
        self.got: dict[int, bytes] = {}
        self.pending: dict[int, bytes] = {}
        self.largest_flight = 0

    def accepted(self, end: End) -> None:
        self.ends.append(end)
        self._note("accepted", end)

    def opened(self, end: End) -> None:
        self.ends.append(end)
        self._note("opened", end)

    def received(self, end: End, chunk: bytes) -> None:
        self.got[end.id] = self.got.get(end.id, b"") + chunk
        self._note("received", end, str(len(chunk)))

    def writable(self, end: End) -> None:
        self.send(end, b"")

    def lost(self, end: End, reason: str) -> None:
        self._note("lost", end, reason)

    def woken(self) -> None:
        self.log.append((self.network.scheduler.now, "woken", ""))

    def send(self, end: End, chunk: bytes) -> None:
        rest = self.pending.get(end.id, b"") + chunk
        room = end.room
        self.network.send(end, rest[:room])
        self.pending[end.id] = rest[room:]
        end.starved = len(rest) > room
        self.largest_flight = max(self.largest_flight, end.outbound.in_flight)

    def reasons(self) -> list[str]:
        return [detail for _, what, detail in self.log if what == "lost"]

    def _note(self, what: str, end: End, detail: str = "") -> None:
        self.log.append((self.network.scheduler.now, what, detail))


def pair(seed: int = 1, weather: Weather | None = None) -> tuple[Network, Recorder, Recorder]:
    network = Network(Scheduler(seed), weather)
    one, two = Recorder(network, "one"), Recorder(network, "two")
    network.dial(one.host, "two", PORT, 1_000 * MS)
    return network, one, two


def settle(network: Network, for_ms: int = 10_000) -> None:
    network.scheduler.run_until(lambda: False, network.scheduler.now + for_ms * MS)


def connected(seed: int = 1, weather: Weather | None = None) -> tuple[Network, Recorder, Recorder]:
    network, one, two = pair(seed, weather)
    settle(network)
    assert one.ends
    assert two.ends
    return network, one, two


MESSAGE = bytes(range(256)) * 40


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_in_order_and_unchanged(seed: int) -> None:
    network, one, two = connected(seed, Weather(window_bytes=(64, 900), split_chance=0.9))
    one.send(one.ends[0], MESSAGE)
    two.send(two.ends[0], MESSAGE[::-1])
    settle(network)
    assert two.got[two.ends[0].id] == MESSAGE
    assert one.got[one.ends[0].id] == MESSAGE[::-1]


def test_a_write_may_arrive_in_pieces() -> None:
    network, one, two = connected(3, Weather(split_chance=1.0))
    one.send(one.ends[0], MESSAGE[:1000])
    settle(network)
    assert sum(what == "received" for _, what, _ in two.log) > 1


def test_a_full_window_holds_the_sender_back() -> None:
    network, one, two = connected(2, Weather(window_bytes=(100, 100)))
    network.freeze(two.host)
    one.send(one.ends[0], MESSAGE)
    settle(network)
    assert one.ends[0].room == 0
    assert not two.got
    network.wake(two.host)
    settle(network)
    assert two.got[two.ends[0].id] == MESSAGE
    assert one.largest_flight == 100


def test_connections_overtake_each_other() -> None:
    """Two lanes between the same hosts: the earlier bytes of one may arrive after the later bytes of the other."""
    overtaken = 0
    for seed in range(30):
        network, one, two = connected(seed, Weather(jitter_us=(5_000, 5_000)))
        network.dial(one.host, "two", PORT, 1_000 * MS)
        settle(network)
        first, second = one.ends
        one.send(first, b"first")
        one.send(second, b"second")
        settle(network)
        order = [detail for _, what, detail in two.log if what == "received"]
        overtaken += order[0] == "6"
    assert 0 < overtaken < 30


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> tuple[str, list[tuple[int, str, str]]]:
        network, one, two = connected(seed, Weather(split_chance=0.9))
        one.send(one.ends[0], MESSAGE)
        settle(network)
        return network.scheduler.trace.digest, one.log + two.log

    assert history(5) == history(5)
    assert history(5)[0] != history(6)[0]


def test_a_blocked_direction_holds_bytes_until_it_heals() -> None:
    network, one, two = connected()
    network.block("one", "two")
    one.send(one.ends[0], b"late")
    two.send(two.ends[0], b"in time")
    settle(network)
    assert not two.got
    assert one.got[one.ends[0].id] == b"in time"
    network.unblock("one", "two")
    settle(network)
    assert two.got[two.ends[0].id] == b"late"


def test_a_close_behind_a_partition_is_seen_after_it() -> None:
    network, one, two = connected()
    network.block("one", "two")
    network.close(one.ends[0])
    settle(network)
    assert two.reasons() == []
    network.unblock("one", "two")
    settle(network)
    assert len(two.reasons()) == 1


def test_a_killed_process_is_seen_by_the_other_side() -> None:
    network, one, two = connected()
    network.kill(two.host)
    settle(network)
    assert one.reasons() == [RESET]
    network.dial(one.host, "two", PORT, 100 * MS)
    settle(network)
    assert one.reasons() == [RESET, REFUSED]


def test_a_host_without_power_sends_nothing() -> None:
    network, one, two = connected()
    network.power_off(two.host)
    one.send(one.ends[0], b"hello?")
    settle(network)
    assert one.reasons() == []
    network.dial(one.host, "two", PORT, 100 * MS)
    settle(network)
    assert one.reasons() == [TIMED_OUT]


@pytest.mark.parametrize(("source", "target"), [("one", "two"), ("two", "one")])
def test_a_dial_through_a_partition_times_out(source: str, target: str) -> None:
    network, one, _ = connected()
    network.block(source, target)
    network.dial(one.host, "two", PORT, 100 * MS)
    settle(network)
    assert one.reasons() == [TIMED_OUT]
    network.unblock(source, target)
    settle(network)
    assert one.reasons() == [TIMED_OUT]


def test_dials_of_an_edge_can_be_refused_one_way() -> None:
    network, one, two = connected()
    network.link("one", "two").dials_refused = True
    network.dial(one.host, "two", PORT, 100 * MS)
    network.dial(two.host, "one", PORT, 100 * MS)
    settle(network)
    assert one.reasons() == [REFUSED]
    assert two.reasons() == []
    assert len(one.ends) == len(two.ends) == 2


def test_a_frozen_process_receives_everything_when_it_wakes() -> None:
    network, one, two = connected()
    network.freeze(two.host)
    received: Callable[[], int] = lambda: len(two.log)  # noqa: E731
    before = received()
    one.send(one.ends[0], b"hello")
    network.close(one.ends[0])
    settle(network)
    assert received() == before
    network.wake(two.host)
    settle(network)
    assert [what for _, what, _ in two.log[before:]] == ["woken", "received", "lost"]


def test_a_partition_can_reset_the_connections_that_cross_it() -> None:
    network, one, two = connected()
    network.block("one", "two")
    network.block("two", "one")
    network.reset_between("one", "two")
    settle(network)
    assert one.reasons() == two.reasons() == [TIMED_OUT]


def test_actions_run_in_the_order_of_their_times() -> None:
    scheduler = Scheduler(1)
    ran: list[str] = []
    scheduler.at(20, ran.append, "later")
    scheduler.at(10, ran.append, "sooner")
    scheduler.at(15, ran.append, "never").cancel()
    assert scheduler.run_until(lambda: len(ran) == 2, 100)
    assert ran == ["sooner", "later"]
    assert scheduler.now == 20


def test_actions_of_one_instant_run_in_a_drawn_order() -> None:
    def order(seed: int) -> list[int]:
        scheduler = Scheduler(seed)
        ran: list[int] = []
        for number in range(6):
            scheduler.at(10, ran.append, number)
        scheduler.run_until(lambda: len(ran) == 6, 100)
        return ran

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 1


def test_time_stops_at_the_limit() -> None:
    scheduler = Scheduler(1)
    scheduler.at(200, lambda: None)
    assert not scheduler.run_until(lambda: False, 100)
    assert scheduler.now == 100


def test_a_failure_shows_how_to_replay_it() -> None:
    text = str(SimulationFailure(123, "two verdicts", ["one line"]))
    assert "make sim SEED=123" in text
    assert "python -m ringfold.testing --seed 123 --trace" in text
    assert "two verdicts" in text
    assert "one line" in text
