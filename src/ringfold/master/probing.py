"""The nodes of the probe graph, between their connections and the round machine (`probe/rounds/master.py`).

A node is a connection with a node id: that of a peer that probes (the peer's own id), or of a process that only probes
(an id from FIRST_STANDALONE on, so that the two never collide). The node ends with its connection. A node that does not
follow the protocol is disconnected, and a peer behind it is evicted, as for any other message.

A process that only probes has heartbeats, as peers have: one that is silent for `suspect_after_ms` is suspected, and
its connection is closed after `evict_after_ms`. It may connect again. A process of an older version sends no
heartbeats, and is never suspected.
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
from ringfold.probe.rounds.master import RoundMaster
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

FIRST_STANDALONE, LAST_STANDALONE = 1_000_001, 2_000_000_000
MAX_NODES = 4_096
MAX_LABEL_CHARS = 200
RESERVED_ROUNDS = 255
"""So many sequences are journalled ahead: only every 256th round waits for the disk. A later master starts above all
reserved ones."""


@dataclass(slots=True)
class NodeHeartbeats:
    """The heartbeats of a process that only probes."""

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
        self._add(now, connection, NodeConnected(facts.node, facts, False, RoundId()))

    def add_node(self, now: Ns, connection: Connection, hello: NodeHello, proof: bytes) -> None:
        """Accept a process that only probes; `proof` goes into its `NodeWelcome`."""
        if not 1 <= hello.port <= 65_535 or not hello.addresses:
            raise RemoteProtocolError(f"it cannot be probed at {hello.addresses} port {hello.port}")
        checked(check_names, hello)
        if min(hello.last.fence, hello.last.sequence) < 0:
            raise RemoteProtocolError(f"there is no round {hello.last}")
        if fault := _unreachable_reason(hello.addresses[0]) or self._full_reason():
            raise RemoteProtocolError(fault)
        node = self._node_id(hello.number)
        facts = Neighbour(node, hello.name, hello.addresses[0], hello.port)
        # It must receive its id before its graph.
        alive = self._run.settings.liveness
        timings = (alive.heartbeat_ms, alive.evict_after_ms) if hello.heartbeats else (0, 0)
        self._run.out.append(SendMessage(connection.id, NodeWelcome(node, proof, *timings)))
        if hello.heartbeats:
            self._heartbeats[node] = NodeHeartbeats(now, now)
        self._add(now, connection, NodeConnected(node, facts, hello.listen_only, hello.last))

    def _node_id(self, wanted: NodeId) -> NodeId:
        """The id that the node had before, if it is free: its log continues, also under another master."""
        node = (
            wanted
            if FIRST_STANDALONE <= wanted <= LAST_STANDALONE and wanted not in self._conns
            else self._next_standalone
        )
        self._next_standalone = max(self._next_standalone, node + 1)
        return node

    def _full_reason(self) -> str:
        return f"there are {MAX_NODES} nodes already" if len(self._conns) >= MAX_NODES else ""

    def _add(self, now: Ns, connection: Connection, event: NodeConnected) -> None:
        connection.node = event.node
        self._conns[event.node], self._names[event.node] = connection.id, event.facts.name
        self._step(now, event)

    def settle(self, now: Ns) -> None:
        """Remove nodes whose connections are gone."""
        gone, self._run.gone_nodes = self._run.gone_nodes, []
        for node in gone:
            self._heartbeats.pop(node, None)
            reason = self._evicted.pop(node, "")
            if self._conns.pop(node, None) is not None:
                self._step(now, NodeDisconnected(node, reason))
        if gone and (not self._rounds.owes_summary or self._rounds.settings.kind == "local"):
            self._forget_names()

    # Liveness

    def received(self, now: Ns, node: NodeId) -> None:
        """A process that only probes has sent bytes."""
        if (known := self._heartbeats.get(node)) is not None:
            known.last_received_ns = now

    def heartbeat(self, now: Ns, node: NodeId, heartbeat: Heartbeat) -> None:
        """A process that only probes has sent a heartbeat."""
        known = self._heartbeats.get(node)
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

    def suspect_peer(self, now: Ns, node: NodeId, silence_ms: int, *, is_suspected: bool) -> None:
        """A peer that probes is suspected, or is not any more."""
        if node in self._conns:
            self._step(now, NodeSuspected(node, silence_ms) if is_suspected else NodeRecovered(node))

    def _check_silence(self, now: Ns) -> None:
        liveness = self._run.settings.liveness
        for node, known in list(self._heartbeats.items()):
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
                    if conn is not None:
                        self._run.out.append(SendMessage(conn, message))
                case SendProbeResponse(requester, answer):
                    if requester in self._run.connections:
                        self._run.connections[requester].waits = False
                        named = answer.summary and self._named(answer.summary)
                        self._run.out.append(SendMessage(requester, structs.replace(answer, summary=named)))
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
        if self._rounds.sequence > self._run.rounds:
            self._run.rounds = self._rounds.sequence + RESERVED_ROUNDS
        self._run.probing = self._rounds.is_on

    def _forget_names(self) -> None:
        """Nodes that left during a round are named in its summary. After it, or without one, their names are
        dropped."""
        self._names = {node: name for node, name in self._names.items() if node in self._conns}

    def _named(self, summary: RoundSummary) -> RoundSummary:
        seen = [*(node.node for node in summary.nodes), *map(int, (*summary.missing, *summary.excluded))]
        names = {str(node): self._names[node] for node in seen if node in self._names}
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
