"""Relays and the root's table of them: batches, how long they wait, and relays that do not tell the truth."""

import msgspec
import pytest

from ringfold.errors import RemoteProtocolError
from ringfold.probe.regions.effects import CloseLink, RefuseNode, RelayEffect, SendToLinks, SendToRoot, WelcomeNode
from ringfold.probe.regions.events import (
    LinkClosed,
    LinkHeartbeatReceived,
    LinkMessageReceived,
    NodeRequested,
    RootConnected,
    RootDisconnected,
    RootHeartbeatReceived,
    RootMessageReceived,
    Tick,
)
from ringfold.probe.regions.relay import LATE_HOLD_MS, MARGIN_MS, MAX_HELD, RelayMachine, RelayState
from ringfold.probe.regions.root import RelayTable, SendToRelay
from ringfold.probe.rounds.effects import LogNote
from ringfold.probe.rounds.events import (
    AlarmReceived,
    NodeConnected,
    NodeDisconnected,
    NodeRecovered,
    NodeSuspected,
    ReportReceived,
)
from ringfold.units import MS
from ringfold.wire.frames import decode_to_master, encode
from ringfold.wire.probing import (
    Cadence,
    EdgeFit,
    Neighbour,
    NodeClock,
    ProbeGraph,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundReport,
    RoundStart,
)
from ringfold.wire.regions import (
    MAX_BATCH_BYTES,
    MAX_RELAY_NODES,
    MAX_RELAYS,
    MAX_REPORT_EDGES,
    NodeEntry,
    RelayAlarm,
    RelayAnswers,
    RelayClocks,
    RelayGraph,
    RelayHello,
    RelayNodes,
    RelayReports,
    RelayRound,
    RelayWelcome,
    clocks_of,
    graphs_of,
    report_of,
    report_row,
    row_bytes,
)

WELCOME = RelayWelcome(b"", 250, 1_000, 5_000)
WAIT_MS = 400
FIT = EdgeFit(
    11, 12, 10**13, 2 * 10**9, 2e-5, 50, 2.5, 1e-9, (-1, -2, -3), (1, 2, 3), 104.5, 10, 20, 30, 1_000, 990, 10,
    estimator="hull", why="the floors are alike",
)  # fmt: skip


def entry(link: int, name: str = "", number: int = 0) -> NodeEntry:
    return NodeEntry(link, "host", name or f"n{link}", ["10.0.0.1"], 4_000 + link, False, RoundId(), number)


def report(sequence: int, *, window: int = 3, end_sent_ns: int = 5_000, held_ns: int = 7) -> RoundReport:
    return RoundReport(RoundId(1, sequence), window, 1, 2, 3, [FIT], 90, end_sent_ns, held_ns, 4, 5, 1, 20, 30, 31)


class Region:
    """A relay with the nodes 11, 12, ... behind the links 1, 2, ..., and a clock that the test moves."""

    def __init__(self, nodes: int = 3) -> None:
        self.relay, self.now, self.links = RelayMachine(), 0, range(1, nodes + 1)
        self.relay.step(0, RootConnected(WELCOME))
        for link in self.links:
            assert self.step(NodeRequested(entry(link))) == [SendToRoot(RelayNodes(joined=[entry(link)]))]
        accepted = {link: 10 + link for link in self.links}
        self.step(RootMessageReceived(RelayAnswers(accepted)))

    def step(self, event: object) -> list[RelayEffect]:
        return self.relay.step(self.now, event)  # type: ignore[arg-type]

    def end(self, sequence: int, wait_ms: int = WAIT_MS) -> list[RelayEffect]:
        end = RoundEnd(RoundId(1, sequence), 5_000)
        return self.step(RootMessageReceived(RelayRound(end, wait_ms=wait_ms)))

    def report(self, link: int, sequence: int, after_ms: float = 1, **fields: int) -> list[RelayReports]:
        self.now += int(after_ms * MS)
        return batches(self.step(LinkMessageReceived(link, report(sequence, **fields))))

    def pass_time(self, ms: int) -> list[RelayEffect]:
        """Tick whenever it is due; all nodes and the root send heartbeats meanwhile."""
        effects: list[RelayEffect] = []
        until = self.now + ms * MS
        while (due := self.relay.next_deadline_ns()) is not None and due <= until:
            self.now = max(self.now, due)
            for link in self.links:
                effects += self.step(LinkHeartbeatReceived(link))
            self.step(RootHeartbeatReceived())
            effects += self.step(Tick())
        self.now = until
        return effects


def batches(effects: list[RelayEffect]) -> list[RelayReports]:
    sent = [effect.message for effect in effects if isinstance(effect, SendToRoot)]
    return [message for message in sent if isinstance(message, RelayReports)]


# The relay


def test_reports_are_one_batch_as_soon_as_all_have_reported() -> None:
    region = Region()
    sent = region.end(7)
    assert [effect.links for effect in sent if isinstance(effect, SendToLinks)] == [(1, 2, 3)]
    assert region.report(1, 7) == []
    assert region.report(2, 7) == []
    [batch] = region.report(3, 7)
    assert (batch.round, [row.node for row in batch.reports]) == (RoundId(1, 7), [11, 12, 13])
    assert region.relay.state is RelayState.READY


def test_the_time_that_a_relay_holds_a_report_is_not_control_latency() -> None:
    region = Region(2)
    region.end(7)
    region.report(1, 7)
    [batch] = region.report(2, 7, after_ms=4)
    first, last = (report_of(batch, row) for row in batch.reports)
    assert last == report(7)
    assert (first.held_ns - last.held_ns, first.sent_ns - last.sent_ns) == (4 * MS, 4 * MS)
    assert first == msgspec.structs.replace(report(7), held_ns=first.held_ns, sent_ns=first.sent_ns)


def test_a_silent_node_delays_one_batch_by_less_than_the_root_waits() -> None:
    region = Region()
    began = region.now
    region.end(7)
    region.report(1, 7)
    region.report(2, 7)
    effects: list[RelayEffect] = []
    while not batches(effects):
        effects = region.pass_time(1)
    [batch] = batches(effects)
    assert len(batch.reports) == 2
    assert region.now - began <= (WAIT_MS - MARGIN_MS + 1) * MS
    region.end(8)
    assert region.report(1, 8) == []
    [next_batch] = region.report(2, 8)
    assert len(next_batch.reports) == 2, "it is not awaited again"
    assert region.report(3, 8) == []
    [late] = batches(region.pass_time(LATE_HOLD_MS))
    assert [row.node for row in late.reports] == [13]
    region.end(9)
    region.report(1, 9)
    assert region.report(2, 9) == [], "it reports again, and is awaited again"
    assert len(region.report(3, 9)[0].reports) == 3


def test_the_wait_follows_what_reports_usually_take() -> None:
    region = Region()
    for sequence in range(1, 30):
        region.end(sequence)
        for link in region.links:
            region.report(link, sequence)
    began = region.now
    region.end(30)
    region.report(1, 30)
    region.report(2, 30)
    while region.relay.state is RelayState.GATHERING:
        region.pass_time(1)
    assert region.now - began <= 20 * MS, "and not what the root allows"


def test_the_next_start_ends_a_batch_that_still_waits() -> None:
    region = Region(2)
    region.end(7)
    region.report(1, 7)
    start = RoundStart(RoundId(1, 8), "", Cadence(), 2_000, 0)
    effects = region.step(RootMessageReceived(RelayRound(start)))
    assert len(batches(effects)) == 1
    assert isinstance(effects[-1], SendToLinks)


def test_a_node_that_leaves_is_not_awaited_and_its_report_is_sent_before() -> None:
    region = Region()
    region.end(7)
    region.report(1, 7)
    effects = region.step(LinkClosed(1, "reset"))
    assert [type(effect.message) for effect in effects if isinstance(effect, SendToRoot)] == [RelayReports, RelayNodes]
    region.report(2, 7)
    effects = region.step(LinkClosed(3))
    assert [len(batch.reports) for batch in batches(effects)] == [1]


def test_windows_that_end_by_the_nodes_clocks_are_sent_together() -> None:
    region = Region()
    region.report(1, 7, end_sent_ns=0)
    region.report(2, 7, end_sent_ns=0)
    [batch] = batches(region.pass_time(LATE_HOLD_MS))
    assert [row.node for row in batch.reports] == [11, 12]
    assert {row.held_ns for row in batch.reports} == {7}, "no latency is measured"


def test_without_a_root_all_nodes_are_disconnected_and_new_ones_refused() -> None:
    region = Region(2)
    region.step(NodeRequested(entry(9)))
    effects = region.step(RootDisconnected("gone"))
    assert [type(effect) for effect in effects] == [CloseLink, CloseLink, RefuseNode]
    [refusal] = region.step(NodeRequested(entry(10)))
    assert isinstance(refusal, RefuseNode)
    assert refusal.again
    assert region.relay.next_deadline_ns() is None


def test_a_silent_node_is_suspected_and_then_dropped_and_a_silent_root_too() -> None:
    region = Region(1)
    sent: list[RelayEffect] = []
    for _ in range(60):
        region.now += 100 * MS
        region.step(RootHeartbeatReceived())
        sent += region.step(Tick())
    messages = [effect.message for effect in sent if isinstance(effect, SendToRoot)]
    assert [
        list(message.suspected) or list(message.left) for message in messages if isinstance(message, RelayNodes)
    ] == [
        [11],
        [1],
    ]
    for _ in range(60):
        region.now += 100 * MS
        region.step(Tick())
    assert region.relay.state is RelayState.AWAY


def test_a_relay_that_was_suspended_judges_nobody() -> None:
    region = Region(2)
    region.now += 60_000 * MS
    effects = region.step(Tick())
    assert not any(isinstance(effect, CloseLink | SendToRoot) for effect in effects)
    assert region.relay.nodes == 2


def test_a_node_that_floods_its_relay_is_disconnected() -> None:
    region = Region(2)
    for sequence in range(1, MAX_HELD + 1):
        region.report(1, sequence, after_ms=0)
    region.now += 1
    effects = region.step(LinkMessageReceived(1, report(99)))
    assert any(isinstance(effect, CloseLink) for effect in effects)
    assert region.relay.counts.refused == 1


def test_a_root_that_gives_one_id_twice_is_refused() -> None:
    region = Region(2)
    region.step(NodeRequested(entry(9)))
    with pytest.raises(RemoteProtocolError, match="one id to two nodes"):
        region.step(RootMessageReceived(RelayAnswers({9: 11})))


def test_graphs_and_clocks_reach_each_node_as_they_were_sent() -> None:
    table, _ = joined(2)
    facts = [Neighbour(node, f"n{node}", "10.0.0.1", 4_000) for node in (1, 2, 3)]
    graphs = {
        1: ProbeGraph(5, "master", b"k", facts[1:], []),
        2: ProbeGraph(5, "master", b"k", [], [facts[0], facts[2]]),
    }
    clocks = {node: RoundClock(RoundId(1, 4), NodeClock(node, 1, 2, 0.5, 1.0, -1, 1, 0.1)) for node in (1, 2)}
    [graph, clock] = [each.message for each in table.pack([*graphs.items(), *clocks.items()], 0)]
    assert isinstance(graph, RelayGraph)
    assert isinstance(clock, RelayClocks)
    assert (graphs_of(graph), clocks_of(clock)) == (graphs, clocks)
    with pytest.raises(RemoteProtocolError, match="not in the list"):
        graphs_of(msgspec.structs.replace(graph, neighbours=graph.neighbours[:1]))


def long_report(sequence: int, window: int, edges: int) -> RoundReport:
    """A report with many edges that have nothing but a long text: as a row they are much longer."""
    fits = [EdgeFit(11, dst, refused="\u20ac" * 40) for dst in range(edges)]
    return msgspec.structs.replace(report(sequence, window=window), edges=fits)


def test_a_batch_that_the_root_would_refuse_is_sent_as_several_messages() -> None:
    region = Region(8)
    table = RelayTable()
    table.add(1, RelayHello(1, "r", "east", b"", b""))
    table.receive(1, RelayNodes(joined=[entry(link) for link in region.links]), 100, lambda one: (10 + one.link, []))
    effects: list[RelayEffect] = []
    for window in range(MAX_HELD):
        for link in region.links:
            effects += region.step(LinkMessageReceived(link, long_report(7, window, MAX_REPORT_EDGES)))
    effects += region.pass_time(LATE_HOLD_MS)
    sent = batches(effects)
    sizes = [len(encode(message)) for message in sent]
    assert sum(sizes) > MAX_BATCH_BYTES >= max(sizes)
    assert len(sent) < MAX_HELD * len(region.links) / 2, "reports still come together"
    taken = [
        action for message, size in zip(sent, sizes, strict=True) for action in table.receive(1, message, size, refuse)
    ]
    assert sum(isinstance(action, ReportReceived) for action in taken) == MAX_HELD * len(region.links)
    assert region.relay.counts.refused == 0


def refuse(entry: NodeEntry) -> tuple[int, list[SendToRelay]]:
    raise RemoteProtocolError("nobody joins here")


def test_a_batch_has_no_more_reports_than_the_root_accepts() -> None:
    region = Region(MAX_RELAY_NODES)
    effects: list[RelayEffect] = []
    for window in (1, 2):
        for link in region.links:
            effects += region.step(LinkMessageReceived(link, report(7, window=window)))
    sent = batches(effects + region.pass_time(LATE_HOLD_MS))
    assert [len(message.reports) for message in sent] == [MAX_RELAY_NODES, MAX_RELAY_NODES]


def test_the_bytes_of_a_row_are_not_underestimated() -> None:
    big = (1 << 63) - 1
    ints = {name: big for name, kind in EdgeFit.__annotations__.items() if kind in (int, "int")}
    fit = EdgeFit(**{**ints, "src": big, "dst": big}, low=(-big,) * 3, high=(big,) * 3, why="\u20ac" * 500)  # type: ignore[arg-type]
    whole = RoundReport(RoundId(big, big), *(big,) * 4, [fit] * 50, *(big - 1,) * 9)
    row = report_row(big, whole, 1)
    assert 0.5 * row_bytes(whole) < len(encode(RelayReports(RoundId(), 0, [row]))) - 100 < row_bytes(whole)


def test_a_report_with_more_edges_than_nodes_closes_the_link_of_its_node_only() -> None:
    region = Region(2)
    effects = region.step(LinkMessageReceived(1, long_report(7, 1, MAX_REPORT_EDGES + 1)))
    assert [effect.link for effect in effects if isinstance(effect, CloseLink)] == [1]
    assert region.relay.nodes == 1
    assert batches(region.pass_time(LATE_HOLD_MS)) == []


# The root


def joined(
    nodes: int, conn: int = 1, table: RelayTable | None = None, first: int = 1
) -> tuple[RelayTable, list[object]]:
    """A table with a relay at this connection, and so many nodes from id `first` on behind it."""
    table = table or RelayTable()
    table.add(conn, RelayHello(2, f"r{conn}", "east", b"", b""))
    numbers = iter(range(first, first + nodes))
    message = RelayNodes(joined=[entry(link) for link in range(1, nodes + 1)])
    return table, list(table.receive(conn, message, 100, lambda _: (next(numbers), [])))


def nobody(_: NodeEntry) -> tuple[int, list[SendToRelay]]:
    raise RemoteProtocolError("no")


def test_nodes_get_their_ids_before_their_round() -> None:
    _, actions = joined(2)
    assert actions[0] == SendToRelay(1, RelayAnswers({1: 1, 2: 2}))
    assert [type(action) for action in actions[1:]] == [NodeConnected, NodeConnected]


def test_a_batch_becomes_the_same_reports_and_its_bytes_are_shared() -> None:
    table, _ = joined(2)
    rows = [report_row(node, report(7), 0) for node in (1, 2)]
    batch = RelayReports(RoundId(1, 7), 5_000, rows)
    decoded = decode_to_master(encode(batch))
    assert decoded == batch
    assert len(encode(batch)) < 0.7 * sum(len(encode(report(7))) for _ in rows)
    actions = table.receive(1, batch, 101, nobody)
    assert actions == [ReportReceived(1, report(7), 51), ReportReceived(2, report(7), 50)]


def test_a_relay_may_not_report_for_nodes_of_others() -> None:
    table, _ = joined(2)
    joined(1, conn=2, table=table, first=9)
    rows = [report_row(node, report(7), 0) for node in (1, 9, 1 << 60, -4)]
    actions = table.receive(1, RelayReports(RoundId(1, 7), 5_000, rows), 400, nobody)
    assert [action.node for action in actions if isinstance(action, ReportReceived)] == [1]
    assert any(isinstance(action, LogNote) and "node 9" in action.text for action in actions)
    alarm = RoundAlarm(RoundId(1, 7), 9, 1, 10**9, 0)
    assert not any(isinstance(action, AlarmReceived) for action in table.receive(1, RelayAlarm(9, alarm), 50, nobody))
    message = RelayNodes(left={7: "x"}, suspected={9: 5_000}, recovered=[9])
    assert table.receive(1, message, 50, nobody) == []
    [mine, other] = table.infos()
    assert (mine.refused, other.refused, other.nodes) == (4, 0, 1)


def test_what_no_relay_sends_is_refused() -> None:
    table, _ = joined(2)
    rows = [report_row(1, report(7), 0)] * (MAX_RELAY_NODES + 1)
    with pytest.raises(RemoteProtocolError, match="a batch of"):
        table.receive(1, RelayReports(RoundId(1, 7), 0, rows), 100, nobody)
    with pytest.raises(RemoteProtocolError, match="limit"):
        table.receive(1, RelayReports(RoundId(1, 7), 0, []), MAX_BATCH_BYTES + 1, nobody)
    with pytest.raises(RemoteProtocolError, match="twice"):
        table.receive(1, RelayNodes(joined=[entry(1)]), 100, nobody)
    with pytest.raises(RemoteProtocolError, match="twice"):
        table.receive(1, RelayNodes(joined=[entry(5), entry(5)]), 100, nobody)
    with pytest.raises(RemoteProtocolError, match="printable"):
        table.add(2, RelayHello(2, "r", "", b"", b""))
    for conn in range(2, MAX_RELAYS + 1):
        table.add(conn, RelayHello(2, "r", "east", b"", b""))
    with pytest.raises(RemoteProtocolError, match="relays already"):
        table.add(MAX_RELAYS + 1, RelayHello(2, "r", "east", b"", b""))


def test_a_node_that_is_refused_gets_the_reason_and_a_full_relay_takes_no_more() -> None:
    table, _ = joined(MAX_RELAY_NODES)
    [answer] = table.receive(1, RelayNodes(joined=[entry(9_999)]), 100, lambda _: (5, []))
    assert isinstance(answer, SendToRelay)
    assert isinstance(answer.message, RelayAnswers)
    assert "already" in answer.message.refused[9_999]


def test_a_lost_relay_takes_its_nodes_with_it_and_no_others() -> None:
    table, _ = joined(2)
    joined(1, conn=2, table=table, first=9)
    assert table.remove(1) == [1, 2]
    assert table.remove(1) == []
    assert table.relay_of(1) is None
    assert table.relay_of(9) is not None
    assert table.pack([(1, RoundEnd(RoundId(1, 1), 0))], 0) == []


def test_a_message_for_all_is_one_message_per_relay_and_for_some_names_them() -> None:
    table, _ = joined(3)
    joined(2, conn=2, table=table, first=9)
    end = RoundEnd(RoundId(1, 7), 0)
    assert table.pack([(node, end) for node in (1, 2, 3, 9, 10)], 60) == [
        SendToRelay(1, RelayRound(end, [], 60)),
        SendToRelay(2, RelayRound(end, [], 60)),
    ]
    assert table.pack([(1, end), (3, end)], 60) == [SendToRelay(1, RelayRound(end, [1, 3], 60))]


def test_an_id_behind_a_suspected_relay_passes_to_the_same_node_only() -> None:
    table, _ = joined(1)
    mine = ("n1", "10.0.0.1", 4_001)
    assert table.take_over(1, *mine) is None, "its relay is alive"
    assert table.suspect(1, 1_500) == [NodeSuspected(1, 1_500)]
    assert table.take_over(1, "n2", "10.0.0.1", 4_001) is None
    assert table.take_over(1, "n1", "10.0.0.1", 4_002) is None
    assert table.take_over(1, *mine) == [SendToRelay(1, RelayAnswers(moved=[1]))]
    assert table.recover(1) == []
    rows = [report_row(1, report(7), 0)]
    assert not any(
        isinstance(action, ReportReceived)
        for action in table.receive(1, RelayReports(RoundId(1, 7), 0, rows), 100, nobody)
    ), "it is counted through its new connection only"


def test_a_relay_that_recovers_brings_back_the_nodes_that_are_not_silent_themselves() -> None:
    table, _ = joined(2)
    table.receive(1, RelayNodes(suspected={2: 1_000}), 50, nobody)
    table.suspect(1, 1_000)
    assert table.recover(1) == [NodeRecovered(1)]
    assert table.receive(1, RelayNodes(left={2: "reset"}), 50, nobody) == [NodeDisconnected(2, "reset")]


def test_a_moved_node_is_disconnected_from_its_old_relay() -> None:
    region = Region(2)
    effects = region.step(RootMessageReceived(RelayAnswers(moved=[11])))
    assert [type(effect) for effect in effects] == [CloseLink]
    assert region.relay.nodes == 1


def test_a_node_that_left_before_it_was_accepted_is_not_welcomed() -> None:
    region = Region(1)
    region.step(NodeRequested(entry(9)))
    region.step(LinkClosed(9))
    effects = region.step(RootMessageReceived(RelayAnswers({9: 50})))
    assert not any(isinstance(effect, WelcomeNode) for effect in effects)
