"""Flows of links with several paths: which are registered with the agent, what the engine gets and reports."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ringfold.agent.client import AgentClient
from ringfold.peer.engine import Engine
from ringfold.peer.path_shares import REPORT_EVERY_NS, FlowPaths, PathShares, flows_of, hosts_of
from ringfold.wire.agent import Place
from ringfold.wire.messages import Member, Record, World

TWO: FlowPaths = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))
OTHER: FlowPaths = (("10.0.0.1", "10.0.0.3"), ("10.1.0.1", "10.1.0.3"))


class FakeEngine:
    def __init__(self) -> None:
        self.followed: dict[int, tuple[str, int, int]] = {}
        self.rates = [0] * 8
        self.trips = [(0, 0)] * 8
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    def follow_hints(self, peer: int, file: str, slot: int, generation: int) -> None:
        self.followed[peer] = (file, slot, generation)

    def forget_hints(self, peer: int) -> None:
        del self.followed[peer]

    def path_rates(self, _peer: int) -> list[int]:
        return self.rates

    def path_rtts(self, _peer: int) -> list[tuple[int, int]]:
        return self.trips


class FakeClient:
    """An agent's client whose places are set by the test."""

    def __init__(self, _directories: Sequence[Path], name: str, on_place: Callable[[int, Place | None], None]) -> None:
        self.name, self.on_place = name, on_place
        self.flows: dict[int, FlowPaths] = {}
        self.hosts: dict[int, tuple[str, str]] = {}
        self.places: dict[int, Place] = {}
        self.reports: list[tuple[object, ...]] = []
        self.hints: Path | None = Path("/run/agent/hints")
        self.last, self.closed = 0, False

    def register(
        self, source: str, destination: str, paths: FlowPaths, *, source_host: str, destination_host: str
    ) -> int:
        assert (source, destination) == paths[0]
        self.last += 1
        self.hosts[self.last] = (source_host, destination_host)
        self.flows[self.last] = paths
        return self.last

    def deregister(self, connection: int) -> None:
        del self.flows[connection]

    def place(self, connection: int) -> Place | None:
        return self.places.get(connection)

    def measured(self, connection: int, *measured: Sequence[int]) -> None:
        self.reports.append((connection, *measured))

    def close(self) -> None:
        self.closed = True


def advised() -> tuple[PathShares, FakeEngine, list[FakeClient]]:
    engine, clients = FakeEngine(), []

    def client(*arguments: Any) -> AgentClient:  # noqa: ANN401 - as AgentClient takes them
        clients.append(FakeClient(*arguments))
        return cast(AgentClient, clients[-1])

    return PathShares(cast(Engine, engine), [Path("/run/agent")], "trainer", client), engine, clients


def record(*members: Member) -> Record:
    return Record(
        group=0,
        epoch=1,
        fence=1,
        previous=0,
        reason="",
        members=list(members),
        dialers=[member.peer for member in members],
        newcomers=[],
        secret=b"",
        evidence="ring",
        small_bytes=0,
        segment_bytes=0,
        lanes=1,
        registrations=0,
        pending=False,
        verdicts=[],
        world=World(len(members), 1, len(members)),
    )


def member(peer: int, *addresses: str) -> Member:
    return Member(peer, "", "", list(addresses), 1, len(addresses))


def test_flows_go_to_the_next_member_and_to_the_previous_one_over_all_paths() -> None:
    ring = record(member(1, "a1", "b1"), member(2, "a2", "b2"), member(3, "a3"))
    assert flows_of(ring, 1) == {2: (("a1", "a2"), ("b1", "b2")), 3: (("a1", "a3"), ("b1", "a3"))}
    assert flows_of(ring, 2) == {3: (("a2", "a3"), ("b2", "a3")), 1: (("a2", "a1"), ("b2", "b1"))}


def test_in_a_ring_of_two_there_is_one_flow() -> None:
    ring = record(member(1, "a1", "b1"), member(2, "a2", "b2"))
    assert flows_of(ring, 1) == {2: (("a1", "a2"), ("b1", "b2"))}


def test_a_neighbour_that_is_reached_by_one_path_has_no_flow_beside_one_that_has() -> None:
    ring = record(member(1, "a1"), member(2, "a2"), member(3, "a3", "b3"))
    assert flows_of(ring, 1) == {3: (("a1", "a3"), ("a1", "b3"))}


def test_links_with_one_path_have_no_flow_and_need_no_client() -> None:
    assert flows_of(record(member(1, "a1"), member(2, "a2")), 1) == {}
    assert flows_of(record(member(1, "a1", "b1")), 1) == {}
    advice, _, clients = advised()
    advice.follow({})
    advice.tick(0)
    assert (clients, advice.next_deadline_ns()) == ([], None)


def test_the_engine_follows_a_place_until_it_is_gone() -> None:
    advice, engine, clients = advised()
    advice.follow({2: TWO})
    client = clients[0]
    advice.tick(0)
    assert engine.followed == {}
    client.places[1] = (7, 3)
    client.on_place(1, (7, 3))
    assert engine.woken == 1
    advice.tick(0)
    assert engine.followed == {2: ("/run/agent/hints", 7, 3)}
    client.places.clear()
    advice.tick(0)
    assert engine.followed == {}


def test_another_ring_drops_what_it_has_no_use_for_and_keeps_the_rest() -> None:
    advice, engine, clients = advised()
    advice.follow({2: TWO})
    clients[0].places[1] = (7, 3)
    advice.tick(0)
    advice.follow({2: TWO})
    assert clients[0].flows == {1: TWO}
    advice.follow({3: OTHER})
    assert (clients[0].flows, engine.followed) == ({2: OTHER}, {})
    assert len(clients) == 1


def test_rates_go_back_a_few_times_a_second_while_there_is_a_place() -> None:
    advice, engine, clients = advised()
    advice.follow({2: TWO})
    engine.rates = [25_000_000, 6_000_000, *[0] * 6]
    advice.tick(0)
    assert clients[0].reports == []
    clients[0].places[1] = (7, 3)
    for now_ns in (REPORT_EVERY_NS, REPORT_EVERY_NS + 1, 2 * REPORT_EVERY_NS):
        advice.tick(now_ns)
    assert clients[0].reports == [(1, [25_000_000, 6_000_000], (0, 0), (0, 0))] * 2
    assert advice.next_deadline_ns() == 3 * REPORT_EVERY_NS


def test_round_trips_go_back_also_where_no_rate_is_known() -> None:
    advice, engine, clients = advised()
    advice.follow({2: TWO})
    engine.trips = [(900, 300), (0, 0), *[(0, 0)] * 6]
    clients[0].places[1] = (7, 3)
    advice.tick(REPORT_EVERY_NS)
    assert clients[0].reports == [(1, [0, 0], (900, 0), (300, 0))]


def test_nothing_is_reported_when_nothing_was_measured() -> None:
    advice, _, clients = advised()
    advice.follow({2: TWO})
    clients[0].places[1] = (7, 3)
    advice.tick(REPORT_EVERY_NS)
    assert clients[0].reports == []


def test_closing_deregisters_and_ends_the_client() -> None:
    advice, engine, clients = advised()
    advice.follow({2: TWO})
    clients[0].places[1] = (7, 3)
    advice.tick(0)
    advice.close()
    assert (clients[0].flows, clients[0].closed, engine.followed) == ({}, True, {})
    advice.close()


def test_flows_are_registered_with_the_names_of_both_hosts() -> None:
    ring = record(member(1, "a1", "b1"), member(2, "a2", "b2"))
    one, two = (each.host for each in ring.members)
    assert hosts_of(ring, 1) == {2: (one, two)}
    advice, _, clients = advised()
    advice.follow(flows_of(ring, 1), hosts_of(ring, 1))
    assert list(clients[0].hosts.values()) == [(one, two)]
