"""The root's part in regions: which nodes are behind which relay, and what a relay may report. Pure.

To the round machine, a node behind a relay is a node like any other. This table turns the messages of relays into its
events, and its messages to nodes into messages for relays: one for all nodes of a relay wherever that is possible.

A relay has proven the token, and is trusted with nothing else. It may report only for nodes that registered through it:
anything else is ignored, counted and noted. A message that no correct relay sends raises RemoteProtocolError, and its
connection is closed.

A node that loses its relay registers again, through another relay or directly, and keeps its id if that is free. If the
relay is frozen, its connection is still open and the id is not free. So an id behind a *suspected* relay passes to a
node with the same name, address and port: otherwise one node would be in the graph twice until the relay is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringfold.errors import RemoteProtocolError
from ringfold.probe.rounds.effects import LogNote
from ringfold.probe.rounds.events import (
    AlarmReceived,
    FromRoundMaster,
    MasterEvent,
    NodeConnected,
    NodeDisconnected,
    NodeRecovered,
    NodeSuspected,
    ReportReceived,
)
from ringfold.wire.probing import Neighbour, NodeId, ProbeGraph, ProbeHalt, RelayInfo, RoundClock, RoundEnd, RoundStart
from ringfold.wire.regions import (
    MAX_BATCH_BYTES,
    MAX_RELAY_NODES,
    MAX_RELAYS,
    FromRoot,
    Link,
    NodeEntry,
    RelayAlarm,
    RelayAnswers,
    RelayHello,
    RelayNodes,
    RelayReports,
    RelayRound,
    ToRoot,
    clocks_of_relay,
    graph_of_relay,
    report_of,
)

Conn = int

MAX_TEXT_CHARS = 1_024


@dataclass(slots=True)
class _RelayNode:
    link: Link
    facts: Neighbour
    is_silent: bool = False
    """Whether the relay misses its heartbeats."""


@dataclass(slots=True)
class RelayEntry:
    """One relay, and the nodes that registered through it."""

    conn: Conn
    name: str
    region: str
    nodes: dict[NodeId, _RelayNode] = field(default_factory=dict)
    links: dict[Link, NodeId] = field(default_factory=dict)
    is_suspected: bool = False
    batches: int = 0
    reports: int = 0
    bytes: int = 0
    refused: int = 0

    @property
    def text(self) -> str:
        return f"relay {self.name} of region {self.region}"


@dataclass(frozen=True, slots=True)
class SendToRelay:
    """Send a message to a relay."""

    conn: Conn
    message: FromRoot


RootAction = SendToRelay | LogNote | MasterEvent
"""What a message of a relay leads to: messages, notes, and events of the round machine, in this order."""


class RelayTable:
    """All relays of a run."""

    def __init__(self) -> None:
        self._relays: dict[Conn, RelayEntry] = {}
        self._behind: dict[NodeId, RelayEntry] = {}

    def __bool__(self) -> bool:
        return bool(self._relays)

    def infos(self) -> list[RelayInfo]:
        """All relays, by region and name."""
        entries = sorted(self._relays.values(), key=lambda entry: (entry.region, entry.name, entry.conn))
        return [
            RelayInfo(
                entry.name,
                entry.region,
                len(entry.nodes),
                entry.batches,
                entry.reports,
                entry.bytes,
                entry.refused,
                entry.is_suspected,
            )
            for entry in entries
        ]

    def relay_of(self, node: NodeId) -> RelayEntry | None:
        """The relay that a node is behind; None for a node with its own connection."""
        return self._behind.get(node)

    def entry(self, conn: Conn) -> RelayEntry:
        return self._relays[conn]

    # Relays

    def add(self, conn: Conn, hello: RelayHello) -> RelayEntry:
        """Accept a relay. Several may serve one region."""
        for text in (hello.name, hello.region):
            if not text or not text.isprintable() or len(text) > MAX_TEXT_CHARS:
                raise RemoteProtocolError("a relay needs a printable name and region")
        if len(self._relays) >= MAX_RELAYS:
            raise RemoteProtocolError(f"there are {MAX_RELAYS} relays already")
        entry = self._relays[conn] = RelayEntry(conn, hello.name, hello.region)
        return entry

    def remove(self, conn: Conn) -> list[NodeId]:
        """The connection of a relay is lost. Returns the nodes that were behind it."""
        entry = self._relays.pop(conn, None)
        if entry is None:
            return []
        for node in entry.nodes:
            del self._behind[node]
        return sorted(entry.nodes)

    def suspect(self, conn: Conn, silent_ms: int) -> list[MasterEvent]:
        """A relay's heartbeats are missing: nothing will come from its nodes."""
        entry = self._relays[conn]
        entry.is_suspected = True
        return [NodeSuspected(node, silent_ms) for node in sorted(entry.nodes)]

    def recover(self, conn: Conn) -> list[MasterEvent]:
        """A relay's heartbeats are back."""
        entry = self._relays[conn]
        entry.is_suspected = False
        return [NodeRecovered(node) for node, known in sorted(entry.nodes.items()) if not known.is_silent]

    def take_over(self, node: NodeId, name: str, address: str, port: int) -> list[SendToRelay] | None:
        """Whether the node of this name, address and port may have an id that is behind a relay; None if it may not.

        If it may, the id is not behind that relay any more. Send the messages.
        """
        entry = self._behind.get(node)
        if entry is None or not self._is_released(entry, node, name, address, port):
            return None
        self._detach(entry, node)
        return [SendToRelay(entry.conn, RelayAnswers(moved=[node]))]

    def _is_released(self, entry: RelayEntry, node: NodeId, name: str, address: str, port: int) -> bool:
        facts = entry.nodes[node].facts
        return entry.is_suspected and (facts.name, facts.address, facts.port) == (name, address, port)

    def _detach(self, entry: RelayEntry, node: NodeId) -> None:
        del self._behind[node]
        del entry.links[entry.nodes.pop(node).link]

    # Messages of relays

    def receive(
        self, conn: Conn, message: ToRoot, size: int, accept: Callable[[NodeEntry], tuple[NodeId, list[SendToRelay]]]
    ) -> list[RootAction]:
        """What a message leads to. `accept` assigns an id to a node, or raises RemoteProtocolError to refuse it."""
        entry = self._relays[conn]
        if size > MAX_BATCH_BYTES:
            raise RemoteProtocolError(f"a message of {size} bytes (limit {MAX_BATCH_BYTES})")
        match message:
            case RelayNodes():
                return self._nodes_changed(entry, message, accept)
            case RelayReports():
                return self._reports(entry, message, size)
            case RelayAlarm(node, alarm):
                return [AlarmReceived(node, alarm)] if self._is_own(entry, node) else self._refuse(entry, node)

    def _nodes_changed(
        self,
        entry: RelayEntry,
        message: RelayNodes,
        accept: Callable[[NodeEntry], tuple[NodeId, list[SendToRelay]]],
    ) -> list[RootAction]:
        links = [one.link for one in message.joined]
        if len(set(links)) < len(links) or any(link in entry.links or link < 0 for link in links):
            raise RemoteProtocolError("it registers a link twice")
        numbers = [one.number for one in message.joined if one.number]
        if len(set(numbers)) < len(numbers):
            raise RemoteProtocolError("it registers two nodes under one id")
        actions: list[RootAction] = []
        for link, reason in sorted(message.left.items()):
            node = entry.links.get(link)
            if node is not None:  # it may have moved, or was refused
                self._detach(entry, node)
                actions.append(NodeDisconnected(node, reason[:MAX_TEXT_CHARS]))
        actions += self._joined(entry, message.joined, accept)
        for node, silent_ms in sorted(message.suspected.items()):
            if self._is_own(entry, node):
                entry.nodes[node].is_silent = True
                actions.append(NodeSuspected(node, silent_ms))
        for node in message.recovered:
            if self._is_own(entry, node):
                entry.nodes[node].is_silent = False
                actions.append(NodeRecovered(node))
        return actions

    def _joined(
        self,
        entry: RelayEntry,
        joined: Sequence[NodeEntry],
        accept: Callable[[NodeEntry], tuple[NodeId, list[SendToRelay]]],
    ) -> list[RootAction]:
        """A node must receive its id before its graph: the answers come first."""
        accepted: dict[Link, NodeId] = {}
        refused: dict[Link, str] = {}
        moved: list[RootAction] = []
        events: list[RootAction] = []
        for one in joined:
            try:
                if len(entry.nodes) >= MAX_RELAY_NODES:
                    raise RemoteProtocolError(f"there are {MAX_RELAY_NODES} nodes behind this relay already")
                node, messages = accept(one)
            except RemoteProtocolError as error:
                refused[one.link] = str(error)
                continue
            facts = Neighbour(node, one.name, one.addresses[0], one.port)
            entry.nodes[node], entry.links[one.link] = _RelayNode(one.link, facts), node
            self._behind[node] = entry
            accepted[one.link] = node
            moved += messages
            events.append(NodeConnected(node, facts, one.listen_only, one.last))
        if not joined:
            return []
        return [*moved, SendToRelay(entry.conn, RelayAnswers(accepted, refused)), *events]

    def _reports(self, entry: RelayEntry, batch: RelayReports, size: int) -> list[RootAction]:
        if len(batch.reports) > MAX_RELAY_NODES:
            raise RemoteProtocolError(f"a batch of {len(batch.reports)} reports (limit {MAX_RELAY_NODES})")
        entry.batches += 1
        entry.reports += len(batch.reports)
        entry.bytes += size
        actions: list[RootAction] = []
        share, rest = divmod(size, max(1, len(batch.reports)))
        for place, row in enumerate(batch.reports):
            if self._is_own(entry, row.node):
                actions.append(ReportReceived(row.node, report_of(batch, row), share + (place < rest)))
            else:
                actions += self._refuse(entry, row.node)
        return actions

    def _is_own(self, entry: RelayEntry, node: NodeId) -> bool:
        """Whether a relay may report for a node: only if it registered through this relay."""
        return node in entry.nodes

    def _refuse(self, entry: RelayEntry, node: NodeId) -> list[RootAction]:
        """Ignore a report for another relay's node. It may have moved just now, so the relay is not dropped."""
        entry.refused += 1
        if entry.refused & (entry.refused - 1):
            return []  # only every power of two is noted
        return [
            LogNote(f"{entry.text} reports for node {node}, which is not its own: ignored ({entry.refused} so far)")
        ]

    # Messages to nodes

    def pack(self, messages: Sequence[tuple[NodeId, FromRoundMaster]], wait_ms: int) -> list[SendToRelay]:
        """Messages for nodes behind relays, in their order, as few messages for each relay."""
        runs: dict[Conn, list[list[tuple[NodeId, FromRoundMaster]]]] = {}
        for node, message in messages:
            entry = self._behind.get(node)
            if entry is None:
                continue  # its connection is lost, and the round machine is about to learn it
            mine = runs.setdefault(entry.conn, [])
            if mine and _belongs(mine[-1][-1][1], message):
                mine[-1].append((node, message))
            else:
                mine.append([(node, message)])
        return [SendToRelay(conn, self._packed(conn, run, wait_ms)) for conn, all in runs.items() for run in all]

    def _packed(self, conn: Conn, run: Sequence[tuple[NodeId, FromRoundMaster]], wait_ms: int) -> FromRoot:
        message = run[0][1]
        match message:
            case ProbeGraph():
                return graph_of_relay([(node, each) for node, each in run if isinstance(each, ProbeGraph)])
            case RoundClock():
                return clocks_of_relay([each for _, each in run if isinstance(each, RoundClock)])
            case RoundStart() | RoundEnd() | ProbeHalt():
                nodes = [node for node, _ in run]
                is_all = len(nodes) == len(self._relays[conn].nodes)
                wait_ms = wait_ms if isinstance(message, RoundEnd) else 0
                return RelayRound(message, [] if is_all else nodes, wait_ms)


def _belongs(before: FromRoundMaster, message: FromRoundMaster) -> bool:
    """Whether two messages in a row can be one for the relay."""
    match before, message:
        case ProbeGraph(), ProbeGraph():
            return (before.number, before.kind, before.key) == (message.number, message.kind, message.key)
        case RoundClock(), RoundClock():
            return before.round == message.round
        case ((RoundStart() | RoundEnd() | ProbeHalt()), _):
            return before is message or before == message
        case _:
            return False
