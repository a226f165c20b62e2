"""Messages between a relay and the root master: the nodes of a region, and their reports in batches.

A *relay* is the one connection of a *region* to the master, which is called the root where there are relays. To its
nodes a relay looks like a master (`probing.py`). On the connection between relay and root, a node that is not accepted
yet is known by its *link number*, the relay's number of the connection to that node. An accepted node has its id.

What is equal for many nodes is sent once; what differs is one message for all nodes of the relay, as arrays without the
names of fields. No figure is left out: the summary of a round is the same with and without relays. A *row* has the
fields of its base class, in their order, so a new field there is a new field here.
"""

from collections.abc import Sequence

from msgspec import Struct, field, structs

from ringfold.errors import RemoteProtocolError
from ringfold.wire.base import Message
from ringfold.wire.probing import (
    EdgeFit,
    Neighbour,
    NodeClock,
    NodeId,
    ProbeGraph,
    ProbeHalt,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundKind,
    RoundReport,
    RoundStart,
)

Link = int

MAX_RELAYS = 256
"""Relays of a run."""
MAX_RELAY_NODES = 512
"""Nodes of a relay, and reports of a batch."""
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""The largest message of a relay: 512 reports with 60 edges each."""

MAX_REPORT_EDGES = 4_096
"""Edges of a report: a run has no more nodes."""
MAX_REPORT_ROW_BYTES, MAX_EDGE_ROW_BYTES = 256, 256
"""A report's row without its edges, and an edge's without its text, in the longest encoding of every number."""


class EdgeRow(EdgeFit, frozen=True, array_like=True, gc=False):
    """An `EdgeFit` as an array."""


class ClockRow(NodeClock, frozen=True, array_like=True):
    """A `NodeClock` as an array."""


class NeighbourRow(Neighbour, frozen=True, array_like=True):
    """A `Neighbour` as an array."""


class ReportRow(RoundReport, frozen=True, array_like=True, tag=False):
    """The `RoundReport` of a node as an array. Round and `end_sent_ns` are those of its batch.

    `sent_ns` and `held_ns` are as if the node had held the report until the relay sent the batch: so the control
    latency is that of the path, without the time that the relay waited for other nodes.
    """

    edges: list[EdgeRow]  # type: ignore[assignment]
    node: NodeId = 0


class NodeEntry(Struct, frozen=True):
    """The `NodeHello` of a node that has proven the token to the relay."""

    link: Link
    host: str
    name: str
    addresses: list[str]
    port: int
    listen_only: bool
    last: RoundId
    number: NodeId = 0


class GraphRow(Struct, frozen=True, array_like=True):
    """The neighbours of one node, as places in the list of a `RelayGraph`."""

    node: NodeId
    out: list[int]
    into: list[int]


# To the root


class RelayHello(Message, frozen=True, tag="relay_hello"):
    """A process requests to be the relay of a region. Its nodes report the newest round that they have seen, so the
    relay does not."""

    version: int
    name: str
    region: str
    nonce: bytes
    proof: bytes
    run: str = ""


class RelayNodes(Message, frozen=True, tag="relay_nodes"):
    """What has changed at the nodes of a relay: new ones, those whose heartbeats are missing or are back, and those
    whose connection is lost, with the reason."""

    joined: list[NodeEntry] = field(default_factory=list)
    left: dict[Link, str] = field(default_factory=dict)
    suspected: dict[NodeId, int] = field(default_factory=dict)
    """Node -> for how many milliseconds it has been silent."""
    recovered: list[NodeId] = field(default_factory=list)


class RelayReports(Message, frozen=True, tag="relay_reports"):
    """Reports of one round; `end_sent_ns` is that of all of them."""

    round: RoundId
    end_sent_ns: int
    reports: list[ReportRow]


class RelayAlarm(Message, frozen=True, tag="relay_alarm"):
    """The alarm of a node. It is never held."""

    node: NodeId
    alarm: RoundAlarm


# From the root


class RelayWelcome(Message, frozen=True, tag="relay_welcome"):
    """The relay is accepted. The master proves the token too. The timings are those of heartbeats, between root and
    relay, and between the relay and its nodes."""

    proof: bytes
    heartbeat_ms: int
    suspect_after_ms: int
    evict_after_ms: int


class RelayAnswers(Message, frozen=True, tag="relay_answers"):
    """Which nodes of a `RelayNodes` are accepted, under which id, and which are refused. A node in `moved` has another
    connection to the root now: its link is to be closed."""

    accepted: dict[Link, NodeId] = field(default_factory=dict)
    refused: dict[Link, str] = field(default_factory=dict)
    moved: list[NodeId] = field(default_factory=list)


class RelayRound(Message, frozen=True, tag="relay_round"):
    """A message for these nodes, or for all accepted nodes of the relay if there are none.

    With a `RoundEnd`, `wait_ms` is how long after it the root waits for reports.
    """

    message: RoundStart | RoundEnd | ProbeHalt
    nodes: list[NodeId] = field(default_factory=list)
    wait_ms: int = 0


class RelayGraph(Message, frozen=True, tag="relay_graph"):
    """The `ProbeGraph` of each node: `neighbours` has every node once that any of them probes, or is probed by."""

    number: int
    kind: RoundKind
    key: bytes
    neighbours: list[NeighbourRow]
    graphs: list[GraphRow]


class RelayClocks(Message, frozen=True, tag="relay_clocks"):
    """The `RoundClock` of each node."""

    round: RoundId
    clocks: list[ClockRow]


ToRoot = RelayNodes | RelayReports | RelayAlarm
FromRoot = RelayAnswers | RelayRound | RelayGraph | RelayClocks


_NO_ROUND = RoundId()


def report_row(node: NodeId, report: RoundReport, waited_ns: int) -> ReportRow:
    """The row of a node's report that a relay has held for `waited_ns`."""
    # Without a RoundEnd no latency is measured, and nothing was held for it.
    waited_ns = waited_ns if report.end_sent_ns else 0
    fields = structs.asdict(report) | {
        "node": node,
        "round": _NO_ROUND,
        "end_sent_ns": 0,
        "edges": [EdgeRow(*structs.astuple(fit)) for fit in report.edges],
        "sent_ns": report.sent_ns + waited_ns,
        "held_ns": report.held_ns + waited_ns,
    }
    return ReportRow(**fields)


def row_bytes(report: RoundReport) -> int:
    """How many bytes the row of a report may have at most."""
    text = sum(len(text.encode()) for fit in report.edges for text in (fit.estimator, fit.why, fit.refused))
    return MAX_REPORT_ROW_BYTES + MAX_EDGE_ROW_BYTES * len(report.edges) + text


def report_of(batch: RelayReports, row: ReportRow) -> RoundReport:
    """The report of a row."""
    fields = structs.asdict(row) | {
        "round": batch.round,
        "end_sent_ns": batch.end_sent_ns,
        "edges": [EdgeFit(*structs.astuple(edge)) for edge in row.edges],
    }
    del fields["node"]
    return RoundReport(**fields)


def graph_of_relay(graphs: Sequence[tuple[NodeId, ProbeGraph]]) -> RelayGraph:
    """The graphs of several nodes, which have number, kind and key in common, as one message."""
    places: dict[Neighbour, int] = {}
    rows = [
        GraphRow(
            node,
            [places.setdefault(other, len(places)) for other in graph.out],
            [places.setdefault(other, len(places)) for other in graph.into],
        )
        for node, graph in graphs
    ]
    first = graphs[0][1]
    neighbours = [NeighbourRow(*structs.astuple(other)) for other in places]
    return RelayGraph(first.number, first.kind, first.key, neighbours, rows)


def graphs_of(message: RelayGraph) -> dict[NodeId, ProbeGraph]:
    """The graph of each node. A place that does not exist raises RemoteProtocolError."""
    facts = [Neighbour(*structs.astuple(row)) for row in message.neighbours]
    places = [place for row in message.graphs for place in (*row.out, *row.into)]
    if places and not 0 <= min(places) <= max(places) < len(facts):
        raise RemoteProtocolError("its graph names a neighbour that is not in the list")
    return {
        row.node: ProbeGraph(
            message.number,
            message.kind,
            message.key,
            [facts[place] for place in row.out],
            [facts[place] for place in row.into],
        )
        for row in message.graphs
    }


def clocks_of_relay(clocks: Sequence[RoundClock]) -> RelayClocks:
    """The clocks of several nodes by one round, as one message."""
    return RelayClocks(clocks[0].round, [ClockRow(*structs.astuple(one.clock)) for one in clocks])


def clocks_of(message: RelayClocks) -> dict[NodeId, RoundClock]:
    return {row.node: RoundClock(message.round, NodeClock(*structs.astuple(row))) for row in message.clocks}
