"""The nodes of the probe graph, between their connections and the round machine (`probe/rounds/master.py`).

A node is a connection with a node id: that of a peer that probes (the peer's own id), or of a process that only probes
(an id from FIRST_STANDALONE on, so that the two never collide). The node ends with its connection. A node that does not
follow the protocol is disconnected, and a peer behind it is evicted, as for any other message.

A process that only probes has heartbeats, as peers have: one that is silent for `suspect_after_ms` is suspected, and
its connection is closed after `evict_after_ms`. It may connect again. A process of an older version sends no
heartbeats, and is never suspected.

A node may also be behind a relay, which has one connection for all nodes of a region (`probe/regions/root.py`). To the
round machine it makes no difference. Such a node ends with its own connection to the relay, or with the relay's.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from ringfold.errors import RemoteProtocolError
from ringfold.master.effects import SendHeartbeat, SendMessage
from ringfold.master.events import Conn, Ns
from ringfold.master.liveness import evict_reason, is_suspected, silent_ms
from ringfold.master.requests import check_names
from ringfold.master.run import Connection, Run
from ringfold.probe.regions.root import RelayTable, RootAction, SendToRelay
from ringfold.probe.rounds.effects import LogNote, MasterEffect, PublishSummary, SendProbeResponse, SendToNode
from ringfold.probe.rounds.events import (
    AlarmReceived,
    CommandReceived,
    MasterEvent,
    NodeConnected,
    NodeDisconnected,
    NodeRecovered,
    NodeSuspected,
    ReportReceived,
    Tick,
)
from ringfold.probe.rounds.events import FromRoundMaster as FromRoundMaster
from ringfold.probe.rounds.master import RoundMaster
from ringfold.units import MS
from ringfold.wire.decoding import checked, reason_of
from ringfold.wire.frames import Heartbeat
from ringfold.wire.messages import Hello
from ringfold.wire.notices import ConnectionDropped, EdgeFitted, ProbeNote, ProbingBroke, RoundDone
from ringfold.wire.probing import (
    Neighbour,
    NodeHello,
    NodeId,
    NodeWelcome,
    ProbeAnswer,
    ProbeCommand,
    RoundAlarm,
    RoundId,
    RoundReport,
    RoundSummary,
)
from ringfold.wire.regions import NodeEntry, RelayHello, RelayWelcome, ToRoot

FIRST_STANDALONE, LAST_STANDALONE = 1_000_001, 2_000_000_000
MAX_NODES = 4_096
MAX_LABEL_CHARS = 200
RESERVED_ROUNDS = 255
"""So many sequences are journalled ahead: only every 256th round waits for the disk. A later master starts above all
reserved ones."""
RELAY_WAIT_MS = 25
"""How much longer than usual a round waits for reports if there are relays: a relay holds the reports of its region for
a node that is late, and they must still be in time."""


@dataclass(slots=True)
class NodeHeartbeats:
    """The heartbeats of a process that only probes, or of a relay."""

    last_received_ns: Ns
    last_echo_ns: Ns
    number: int = 0
    echo: int = 0
    suspected: bool = False


class Probing:
    """All nodes of a run and their rounds: the tables from nodes to connections and heartbeats."""

    def __init__(self, run: Run, rounds: RoundMaster) -> None:
        self._run = run
        self._rounds = rounds
        self._conns: dict[NodeId, Conn] = {}
        self._names: dict[NodeId, str] = {}
        self._heartbeats: dict[NodeId, NodeHeartbeats] = {}
        """Of the processes that only probe, and send heartbeats."""
        self._evicted: dict[NodeId, str] = {}
        """Nodes whose connections were closed for their silence, with the reason."""
        self._relays = RelayTable()
        self._relay_heartbeats: dict[Conn, NodeHeartbeats] = {}
        self._relayed: list[tuple[NodeId, FromRoundMaster]] = []
        """Messages for nodes behind relays, until the step is over."""
        self._next_standalone = FIRST_STANDALONE
        self.summary: RoundSummary | None = None
        """The result of the newest round."""
        self.broken = ""
        """Why there are no rounds any more: a step of the round machine raised an unexpected exception."""

    # Nodes

    def add_peer(self, now: Ns, connection: Connection, hello: Hello) -> None:
        """A peer has registered, and probes at the UDP port with its data port's number.

        A peer that cannot be probed still takes part in the run.
        """
        assert connection.peer is not None
        if fault := _unreachable_reason(hello.addresses[0]) or self._full_reason():
            self._run.notify(ProbeNote(f"peer {connection.peer.id} is no node: {fault}"))
            return
        facts = Neighbour(connection.peer.id, hello.name, hello.addresses[0], hello.port)
        self._add(now, connection, NodeConnected(facts.node, facts, hello.listen_only, RoundId()))

    def add_node(self, now: Ns, connection: Connection, hello: NodeHello, proof: bytes) -> None:
        """Accept a process that only probes; `proof` goes into its `NodeWelcome`."""
        node, messages = self._accept(hello)
        self._send_to_relays(messages)
        facts = Neighbour(node, hello.name, hello.addresses[0], hello.port)
        # It must receive its id before its graph.
        alive = self._run.settings.liveness
        timings = (alive.heartbeat_ms, alive.evict_after_ms) if hello.heartbeats else (0, 0)
        self._run.out.append(SendMessage(connection.id, NodeWelcome(node, proof, *timings)))
        if hello.heartbeats:
            self._heartbeats[node] = NodeHeartbeats(now, now)
        self._add(now, connection, NodeConnected(node, facts, hello.listen_only, hello.last))

    def _accept(self, hello: NodeHello | NodeEntry) -> tuple[NodeId, list[SendToRelay]]:
        """The id of a node that may be probed, and messages to relays that this causes.

        It is the id that the node had before, if it is free: its log continues, also under another master.
        """
        if not 1 <= hello.port <= 65_535 or not hello.addresses:
            raise RemoteProtocolError(f"it cannot be probed at {hello.addresses} port {hello.port}")
        checked(check_names, hello)
        if min(hello.last.fence, hello.last.sequence) < 0:
            raise RemoteProtocolError(f"there is no round {hello.last}")
        if fault := _unreachable_reason(hello.addresses[0]) or self._full_reason():
            raise RemoteProtocolError(fault)
        node, moved = hello.number, self._relays.take_over(hello.number, hello.name, hello.addresses[0], hello.port)
        # Of the nodes in one message of a relay, the first are known to the table of relays only.
        is_taken = node in self._conns or self._relays.relay_of(node) is not None
        if moved is None and (is_taken or not FIRST_STANDALONE <= node <= LAST_STANDALONE):
            node = self._next_standalone
        self._next_standalone = max(self._next_standalone, node + 1)
        return node, moved or []

    def _full_reason(self) -> str:
        return f"there are {MAX_NODES} nodes already" if len(self._conns) >= MAX_NODES else ""

    def _add(self, now: Ns, connection: Connection, event: NodeConnected) -> None:
        connection.node = event.node
        self._conns[event.node], self._names[event.node] = connection.id, event.facts.name
        self._step(now, event)

    # Relays

    def add_relay(self, now: Ns, connection: Connection, hello: RelayHello, proof: bytes) -> None:
        """Accept a relay; `proof` goes into its `RelayWelcome`."""
        entry = self._relays.add(connection.id, hello)
        connection.is_relay = True
        self._relay_heartbeats[connection.id] = NodeHeartbeats(now, now)
        self._rounds.relay_wait_ms = RELAY_WAIT_MS
        alive = self._run.settings.liveness
        timings = alive.heartbeat_ms, alive.suspect_after_ms, alive.evict_after_ms
        self._run.out.append(SendMessage(connection.id, RelayWelcome(proof, *timings)))
        self._run.notify(ProbeNote(f"{entry.text} is connected from {connection.remote}"))

    def relayed(self, now: Ns, connection: Connection, message: ToRoot, size: int) -> None:
        """A relay reports for its nodes."""
        if not connection.is_relay:
            raise RemoteProtocolError(f"{type(message).__name__} from a client that is no relay")
        self._run_actions(now, connection.id, self._relays.receive(connection.id, message, size, self._accept))

    def _run_actions(self, now: Ns, conn: Conn, actions: Sequence[RootAction]) -> None:
        for action in actions:
            match action:
                case SendToRelay():
                    self._send_to_relays([action])
                case LogNote(text):
                    self._run.notify(ProbeNote(text))
                case NodeConnected(node, facts):
                    self._conns[node], self._names[node] = conn, facts.name
                    self._step(now, action)
                case NodeDisconnected(node):
                    self._conns.pop(node, None)
                    self._step(now, action)
                case _:
                    self._step(now, action)

    def _send_to_relays(self, messages: Sequence[SendToRelay]) -> None:
        self._run.out += [SendMessage(each.conn, each.message) for each in messages]

    def _settle_relays(self, now: Ns) -> None:
        """Remove relays whose connections are gone, and the nodes behind them."""
        gone, self._run.gone_relays = self._run.gone_relays, []
        for conn in gone:
            text = self._relays.entry(conn).text
            del self._relay_heartbeats[conn]
            lost = self._relays.remove(conn)
            self._run_actions(now, conn, [NodeDisconnected(node, f"{text} is gone") for node in lost])
            self._run.notify(ProbeNote(f"{text} is gone, and {len(lost)} nodes with it: they connect again"))
        if gone and not self._relays:
            self._rounds.relay_wait_ms = 0

    def settle(self, now: Ns) -> None:
        """Remove nodes whose connections are gone."""
        self._settle_relays(now)
        gone, self._run.gone_nodes = self._run.gone_nodes, []
        for node in gone:
            self._heartbeats.pop(node, None)
            reason = self._evicted.pop(node, "")
            if self._conns.pop(node, None) is not None:
                self._step(now, NodeDisconnected(node, reason))
        if gone and (not self._rounds.owes_summary or self._rounds.settings.kind == "local"):
            self._forget_names()

    # Liveness

    def _heartbeats_of(self, connection: Connection) -> NodeHeartbeats | None:
        if connection.is_relay:
            return self._relay_heartbeats.get(connection.id)
        return self._heartbeats.get(connection.node)

    def received(self, now: Ns, connection: Connection) -> None:
        """A process that only probes, or a relay, has sent bytes."""
        if (known := self._heartbeats_of(connection)) is not None:
            known.last_received_ns = now

    def heartbeat(self, now: Ns, connection: Connection, heartbeat: Heartbeat) -> None:
        """A process that only probes, or a relay, has sent a heartbeat."""
        known = self._heartbeats_of(connection)
        if known is None:
            raise RemoteProtocolError("a heartbeat from a node that announced none")
        if heartbeat.epoch or heartbeat.ops:
            raise RemoteProtocolError("a heartbeat with ops from a node that only probes")
        if heartbeat.echo > known.echo:
            known.last_echo_ns = now
        known.last_received_ns, known.number, known.echo = now, heartbeat.number, heartbeat.echo

    def send_heartbeats(self, number: int) -> None:
        for node, known in self._heartbeats.items():
            self._run.out.append(SendHeartbeat(self._conns[node], number, known.number))
        for conn, known in self._relay_heartbeats.items():
            self._run.out.append(SendHeartbeat(conn, number, known.number))

    def suspect_peer(self, now: Ns, node: NodeId, silence_ms: int, *, is_suspected: bool) -> None:
        """A peer that probes is suspected, or is not any more."""
        if node in self._conns:
            self._step(now, NodeSuspected(node, silence_ms) if is_suspected else NodeRecovered(node))

    def _check_silence(self, now: Ns) -> None:
        liveness = self._run.settings.liveness
        suspect_ns = now - liveness.suspect_after_ms * MS
        for node, known in list(self._heartbeats.items()):
            if not known.suspected and min(known.last_received_ns, known.last_echo_ns) > suspect_ns:
                continue  # neither suspected, nor about to be: nearly all of them, at nearly every tick
            connection = self._run.connections.get(self._conns[node])
            if connection is None:
                continue
            reason = evict_reason(now, known.last_received_ns, known.last_echo_ns, liveness)
            if reason is not None:
                self._evicted[node] = reason
                name = f"node {node} ({self._names[node]})" if self._names.get(node) else f"node {node}"
                self._run.notify(ConnectionDropped(f"{name} at {connection.remote}", reason))
                self._run.drop_connection(connection, None, reason)
                continue
            silence = silent_ms(now, known.last_received_ns, known.last_echo_ns)
            was, known.suspected = known.suspected, is_suspected(silence, liveness)
            if was != known.suspected:
                self._step(now, NodeSuspected(node, silence) if known.suspected else NodeRecovered(node))

    def _check_relays(self, now: Ns) -> None:
        liveness = self._run.settings.liveness
        for conn, known in list(self._relay_heartbeats.items()):
            connection = self._run.connections.get(conn)
            if connection is None:
                continue
            reason = evict_reason(now, known.last_received_ns, known.last_echo_ns, liveness)
            if reason is not None:
                self._run.notify(ConnectionDropped(f"{self._relays.entry(conn).text} at {connection.remote}", reason))
                self._run.drop_connection(connection, None, reason)
                continue
            silence = silent_ms(now, known.last_received_ns, known.last_echo_ns)
            was, known.suspected = known.suspected, is_suspected(silence, liveness)
            if was != known.suspected:
                relays = self._relays
                events = relays.suspect(conn, silence) if known.suspected else relays.recover(conn)
                self._run_actions(now, conn, events)

    # Messages

    def report(self, now: Ns, node: NodeId, report: RoundReport | RoundAlarm, size: int, retransmits: int = 0) -> None:
        """A node's window, or its alarm."""
        if node not in self._conns:
            raise RemoteProtocolError(f"{type(report).__name__} from a client that does not probe")
        if isinstance(report, RoundAlarm):
            self._step(now, AlarmReceived(node, report))
            return
        self._step(now, ReportReceived(node, report, size, retransmits))

    def command(self, now: Ns, conn: Conn, command: ProbeCommand) -> None:
        """Handle a probe command."""
        if len(command.label) > MAX_LABEL_CHARS or not command.label.isprintable():
            raise RemoteProtocolError(f"a label must be printable and have at most {MAX_LABEL_CHARS} characters")
        self._run.connections[conn].waits = True
        self._step(now, CommandReceived(conn, command.action, command.label))

    def next_deadline_ns(self) -> Ns | None:
        """When the rounds need a tick."""
        return None if self.broken else self._rounds.next_deadline_ns()

    def tick(self, now: Ns) -> None:
        self._check_silence(now)
        self._check_relays(now)
        if self.broken:
            return
        due = self._rounds.next_deadline_ns()
        if due is not None and due <= now:
            self._step(now, Tick())

    def _step(self, now: Ns, event: MasterEvent) -> None:
        """Step the round machine. The run does not depend on it: if it raises, the rounds end, and the run
        continues."""
        if self.broken:
            if isinstance(event, CommandReceived) and event.requester in self._run.connections:
                self._run.connections[event.requester].waits = False
                self._run.out.append(SendMessage(event.requester, ProbeAnswer(False, self.broken, False)))
            return
        try:
            self._execute(now, self._rounds.step(now, event))
        except Exception as error:
            self.broken = f"probing has ended, and needs a new master: {reason_of(error)}"
            self._run.notify(ProbingBroke(f"{self.broken} (at {type(event).__name__})"))
            if isinstance(event, CommandReceived):
                self._step(now, event)

    def _execute(self, now: Ns, effects: Sequence[MasterEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToNode(node, message):
                    conn = self._conns.get(node)
                    if self._relays.relay_of(node) is not None:
                        self._relayed.append((node, message))
                    elif conn is not None and conn not in self._relay_heartbeats:
                        self._run.out.append(SendMessage(conn, message))
                case SendProbeResponse(requester, answer):
                    if requester in self._run.connections:
                        self._run.connections[requester].waits = False
                        named = answer.summary and self._named(answer.summary)
                        full = structs.replace(answer, summary=named, relays=self._relays.infos())
                        self._run.out.append(SendMessage(requester, full))
                case PublishSummary(summary):
                    self.summary = self._named(summary)
                    self._learn(now, summary)
                    self._run.notify(RoundDone(self.summary))
                    if self._run.settings.log_fits:
                        for view in summary.edges:
                            self._run.notify(EdgeFitted(summary.round, view))
                    self._forget_names()
                case LogNote(text):
                    self._run.notify(ProbeNote(text))
        relayed, self._relayed = self._relayed, []
        self._send_to_relays(self._relays.pack(relayed, self._rounds.wait_ms))
        if self._rounds.sequence > self._run.rounds:
            self._run.rounds = self._rounds.sequence + RESERVED_ROUNDS
        self._run.probing = self._rounds.is_on

    def _forget_names(self) -> None:
        """Nodes that left during a round are named in its summary. After it, or without one, their names are
        dropped."""
        self._names = {node: name for node, name in self._names.items() if node in self._conns}

    def _named(self, summary: RoundSummary) -> RoundSummary:
        clocked = (node.node for node in summary.nodes)
        seen = {*clocked, *map(int, (*summary.missing, *summary.excluded)), *summary.participants, *summary.listeners}
        names = {str(node): self._names[node] for node in sorted(seen) if node in self._names}
        return structs.replace(summary, names=names)

    def _learn(self, now: Ns, summary: RoundSummary) -> None:
        """Use a round's figures of links between peers for the topology."""
        for view in summary.edges:
            fit = view.fit
            if fit.sent and fit.delay_p50_ns > 0 and fit.src in self._run.peers and fit.dst in self._run.peers:
                loss = min(1.0, fit.lost / fit.sent)
                self._run.delays.probed((fit.src, fit.dst), fit.delay_p50_ns / 1_000, loss, now)


def _unreachable_reason(address: str) -> str:
    """Why nodes cannot send packets to this address; empty if they can. They resolve no names."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return f"{address!r} is not an IP address to send probes to"
    return ""
