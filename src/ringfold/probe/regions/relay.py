"""A regional relay: the nodes of a region, on one connection to the root. A pure state machine.

    AWAY --(the root accepts it)--> READY --(RoundEnd)--> GATHERING --(all reported, or the deadline)--> READY
      ^---------------------------------(the root is lost)-----------------|

TRANSITIONS has all legal changes of state. A relay decides nothing about rounds: the root does, and a relay passes its
messages on. It forwards the requests of its nodes, and the root assigns their ids. Downwards it distributes; upwards it
collects the reports of its nodes, and forwards them together.

**How long reports are held.** The root's deadline follows what reports usually take, so a relay must not hold the
reports of all its nodes for one that is late. A batch is sent when all awaited nodes have reported, and at the latest
after the time that the reports of these nodes usually take, or after the root's wait less the round trip to the root
and a margin, whichever is earlier. A node is awaited unless its heartbeats are missing, or it was not in time for the
last batch: so one silent node delays one batch. The rules are those of the root (`rounds/liveness.py`). Reports after
the deadline, and those of windows that end by the nodes' own clocks (`time`), are held for LATE_HOLD_MS, so that others
can join them. A batch that the root would refuse, by its reports or its bytes, is sent as several messages.

**Without a root there is no relay.** When the connection to the root is lost, all nodes are disconnected: they try the
next address of their list, and connect again when a root is back. So a node's connection always means that a root knows
the node, exactly as without relays.

**Heartbeats** are exchanged with the root and with each node. A node without heartbeats is reported as suspected, and
is disconnected later. A relay that was itself suspended judges nobody by the time in which it did not run.
"""

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from ringfold.errors import RemoteProtocolError
from ringfold.probe.regions.effects import (
    CloseLink,
    CloseRoot,
    RefuseNode,
    RelayEffect,
    SendHeartbeats,
    SendToLinks,
    SendToRoot,
    WelcomeNode,
)
from ringfold.probe.regions.events import (
    LinkClosed,
    LinkHeartbeatReceived,
    LinkMessageReceived,
    NodeRequested,
    RelayEvent,
    RootConnected,
    RootDisconnected,
    RootHeartbeatReceived,
    RootMessageReceived,
    Tick,
)
from ringfold.probe.rounds.events import MS, FromRoundMaster, ToRoundMaster
from ringfold.probe.rounds.liveness import NodeTable
from ringfold.states import Transitions
from ringfold.wire.probing import NodeId, RoundAlarm, RoundEnd, RoundId, RoundReport
from ringfold.wire.regions import (
    MAX_BATCH_BYTES,
    MAX_RELAY_NODES,
    MAX_REPORT_EDGES,
    FromRoot,
    Link,
    NodeEntry,
    RelayAlarm,
    RelayAnswers,
    RelayClocks,
    RelayGraph,
    RelayNodes,
    RelayReports,
    RelayRound,
    RelayWelcome,
    clocks_of,
    graphs_of,
    report_row,
    row_bytes,
)

MAX_MESSAGE_BYTES = MAX_BATCH_BYTES - 1_024
"""The rows of one message; its other fields take less than the rest."""
LATE_HOLD_MS = 5
"""How long a report that no batch waits for is held, so that others can join it."""
MAX_HELD = 4
"""Reports of one node that are held at once; a correct node has one."""
MIN_HOLD_MS = 10
"""A batch waits for late nodes at least this long, if the root does."""
MARGIN_MS = 5
"""A batch is sent this long before the root stops waiting, the round trip not counted."""
LATE_NS = 200 * MS
"""The shell ticks more often. After a longer gap the relay itself was suspended."""


class RelayState(Enum):
    """See the head of this file."""

    AWAY = "away"
    READY = "ready"
    GATHERING = "gathering"


TRANSITIONS = Transitions(
    {
        RelayState.AWAY: {RelayState.READY},
        RelayState.READY: {RelayState.GATHERING, RelayState.AWAY},
        RelayState.GATHERING: {RelayState.READY, RelayState.AWAY},
    }
)


class LinkState(Enum):
    """A node's link: the root has not answered, or has accepted the node. A refused one is closed."""

    REQUESTED = "requested"
    ACCEPTED = "accepted"


LINK_TRANSITIONS = Transitions({LinkState.REQUESTED: {LinkState.ACCEPTED}, LinkState.ACCEPTED: set()})


@dataclass(slots=True)
class _NodeLink:
    """A connection to a node."""

    link: Link
    last_received_ns: int
    state: LinkState = LinkState.REQUESTED
    node: NodeId = 0
    has_heartbeats: bool = True
    is_suspected: bool = False


@dataclass(slots=True)
class _Gather:
    """The batch of a round that a RoundEnd has ended."""

    round: RoundId
    awaited: set[NodeId]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class _HeldReport:
    node: NodeId
    report: RoundReport
    received_ns: int
    size: int
    """Of its row, at most."""


@dataclass(slots=True)
class RelayCounts:
    """Counters of a relay since its start."""

    batches: int = 0
    reports: int = 0
    late: int = 0
    """Reports that came after the batch of their round."""
    refused: int = 0
    """Messages of nodes that were not accepted."""
    suspected: int = 0


class RelayMachine:
    """One relay. `last` is the newest round that it has passed on."""

    def __init__(self, max_nodes: int = MAX_RELAY_NODES) -> None:
        self.state = RelayState.AWAY
        self.last = RoundId()
        self.counts = RelayCounts()
        self._max_nodes = max_nodes
        self._welcome = RelayWelcome(b"", 0, 0, 0)
        self._links: dict[Link, _NodeLink] = {}
        self._nodes: dict[NodeId, _NodeLink] = {}
        """The accepted ones."""
        self._table = NodeTable(max_missed=1)
        """Which accepted nodes are awaited, and how long their reports usually take from here."""
        self._last_end: tuple[RoundId, int] = (RoundId(), 0)
        """The round of the last RoundEnd, and when it was passed on."""
        self._gather: _Gather | None = None
        self._held: dict[NodeId, list[_HeldReport]] = {}
        self._flush_due_ns: int | None = None
        """When held reports are sent that no batch waits for."""
        self._heartbeat = 0
        self._heartbeat_due_ns = 0
        self._root_received_ns = 0
        self._root_rtt_ns = 0
        self._last_step_ns: int | None = None
        self._out: list[RelayEffect] = []

    # For the shell

    @property
    def nodes(self) -> int:
        """How many nodes are accepted."""
        return len(self._nodes)

    @property
    def is_ready(self) -> bool:
        """Whether nodes may connect."""
        return self.state is not RelayState.AWAY

    def set_root_rtt(self, rtt_ns: int) -> None:
        """The round-trip time to the root, as measured by the shell."""
        self._root_rtt_ns = rtt_ns

    def next_deadline_ns(self) -> int | None:
        """When Tick is due; None without a root."""
        if self.state is RelayState.AWAY:
            return None
        times = [self._heartbeat_due_ns, self._flush_due_ns, self._gather.deadline_ns if self._gather else None]
        return min(time for time in times if time is not None)

    def step(self, now_ns: int, event: RelayEvent) -> list[RelayEffect]:
        """Apply one event; return what the shell must now do, in order. A message of the root that no root sends
        raises RemoteProtocolError, and changes nothing: the shell closes that connection."""
        out = self._out = []
        self._leave_out_gap(now_ns)
        match event:
            case RootConnected(welcome):
                self._connect(now_ns, welcome)
            case RootDisconnected(reason):
                self._disconnect(reason)
            case RootMessageReceived(message):
                self._root_received_ns = now_ns
                self._receive(now_ns, message)
            case RootHeartbeatReceived():
                self._root_received_ns = now_ns
            case NodeRequested(entry, has_heartbeats):
                self._request(now_ns, entry, has_heartbeats=has_heartbeats)
            case LinkClosed(link, reason):
                self._close(now_ns, link, reason)
            case LinkMessageReceived(link, message):
                self._from_node(now_ns, link, message)
            case LinkHeartbeatReceived(link):
                self._alive(now_ns, link)
            case Tick():
                self._tick(now_ns)
            case _:
                assert_never(event)
        is_gathering = self._gather is not None
        assert is_gathering == (self.state is RelayState.GATHERING), f"a batch: {is_gathering}, in {self.state}"
        assert len(self._nodes) <= len(self._links) <= self._max_nodes
        return out

    def _move_to(self, state: RelayState) -> None:
        self.state = TRANSITIONS.move(self.state, state)

    def _leave_out_gap(self, now_ns: int) -> None:
        """A relay that was suspended has not read what was sent to it: it shifts what it knows of others."""
        gap_ns = 0 if self._last_step_ns is None else now_ns - self._last_step_ns
        self._last_step_ns = now_ns
        if gap_ns > LATE_NS:
            self._root_received_ns += gap_ns
            for known in self._links.values():
                known.last_received_ns += gap_ns

    # The root

    def _connect(self, now_ns: int, welcome: RelayWelcome) -> None:
        self._move_to(RelayState.READY)
        self._welcome = welcome
        self._root_received_ns = self._heartbeat_due_ns = now_ns
        self._heartbeat = 0

    def _disconnect(self, reason: str) -> None:
        if self.state is RelayState.AWAY:
            return
        self._gather, self._flush_due_ns = None, None
        self._held.clear()
        self._move_to(RelayState.AWAY)
        for link, known in sorted(self._links.items()):
            if known.state is LinkState.ACCEPTED:
                self._out.append(CloseLink(link, f"the relay has lost the root: {reason}"))
            else:
                self._out.append(RefuseNode(link, "the relay has lost the root", again=True))
            self._table.remove(known.node)
        self._links.clear()
        self._nodes.clear()

    def _receive(self, now_ns: int, message: FromRoot) -> None:
        if self.state is RelayState.AWAY:
            return
        match message:
            case RelayAnswers():
                self._answer(now_ns, message)
            case RelayGraph():
                for node, graph in graphs_of(message).items():
                    self._send([node], graph)
            case RelayClocks():
                for node, clock in clocks_of(message).items():
                    self._send([node], clock)
            case RelayRound():
                self._pass_on(now_ns, message)
            case _:
                assert_never(message)

    def _answer(self, now_ns: int, answers: RelayAnswers) -> None:
        taken = [node for node in answers.accepted.values() if node in self._nodes and node not in answers.moved]
        if taken or len(set(answers.accepted.values())) < len(answers.accepted):
            raise RemoteProtocolError(f"it gives one id to two nodes ({taken})")
        for node in answers.moved:
            known = self._nodes.get(node)
            if known is not None:
                self._forget(now_ns, known)
                self._out.append(CloseLink(known.link, "it has another connection to the root"))
        for link, node in sorted(answers.accepted.items()):
            known = self._links.get(link)
            if known is None or known.state is not LinkState.REQUESTED:
                continue  # it has left meanwhile, which the root will learn
            known.state, known.node = LINK_TRANSITIONS.move(known.state, LinkState.ACCEPTED), node
            known.last_received_ns = now_ns
            self._nodes[node] = known
            self._table.add(node)
            timings = (self._welcome.heartbeat_ms, self._welcome.evict_after_ms) if known.has_heartbeats else (0, 0)
            self._out.append(WelcomeNode(link, node, *timings))
        for link, reason in sorted(answers.refused.items()):
            if self._links.pop(link, None) is not None:
                self._out.append(RefuseNode(link, reason, again=False))

    def _pass_on(self, now_ns: int, round: RelayRound) -> None:
        nodes = [node for node in round.nodes if node in self._nodes] if round.nodes else sorted(self._nodes)
        message = round.message
        self.last = max(self.last, message.round)
        self._end_batch(now_ns)  # the root waits for it no longer, whatever the message is
        self._send(nodes, message)
        if isinstance(message, RoundEnd):
            self._begin_batch(now_ns, message, nodes, round.wait_ms)

    def _send(self, nodes: list[NodeId], message: FromRoundMaster) -> None:
        links = tuple(self._nodes[node].link for node in nodes if node in self._nodes)
        if links:
            self._out.append(SendToLinks(links, message))

    # Nodes

    def _request(self, now_ns: int, entry: NodeEntry, *, has_heartbeats: bool) -> None:
        if self.state is RelayState.AWAY:
            self._out.append(RefuseNode(entry.link, "this relay has no connection to the root", again=True))
        elif len(self._links) >= self._max_nodes:
            self._out.append(RefuseNode(entry.link, f"this relay has {self._max_nodes} nodes already", again=True))
        else:
            assert entry.link not in self._links
            self._links[entry.link] = _NodeLink(entry.link, now_ns, has_heartbeats=has_heartbeats)
            self._out.append(SendToRoot(RelayNodes(joined=[entry])))

    def _close(self, now_ns: int, link: Link, reason: str) -> None:
        known = self._links.get(link)
        if known is None:
            return
        self._forget(now_ns, known)
        self._out.append(SendToRoot(RelayNodes(left={link: reason})))

    def _forget(self, now_ns: int, known: _NodeLink) -> None:
        """A node is not awaited any more. What it has reported is sent before its end."""
        del self._links[known.link]
        if known.node:
            del self._nodes[known.node]
            self._table.remove(known.node)
            if known.node in self._held:
                self._flush(now_ns)
            self._stop_awaiting(now_ns, known.node)

    def _alive(self, now_ns: int, link: Link) -> None:
        known = self._links.get(link)
        if known is None:
            return
        known.last_received_ns = now_ns
        if known.is_suspected:
            known.is_suspected = False
            self._table.recover(known.node)
            self._out.append(SendToRoot(RelayNodes(recovered=[known.node])))

    def _from_node(self, now_ns: int, link: Link, message: ToRoundMaster) -> None:
        known = self._links.get(link)
        if known is None:
            return
        if known.state is not LinkState.ACCEPTED:
            self._drop(now_ns, known, f"{type(message).__name__} before it was accepted")
            return
        self._alive(now_ns, link)
        match message:
            case RoundAlarm():
                self._out.append(SendToRoot(RelayAlarm(known.node, message)))
            case RoundReport():
                self._hold(now_ns, known, message)
            case _:
                assert_never(message)

    def _drop(self, now_ns: int, known: _NodeLink, reason: str) -> None:
        """Close the connection to a node that does not follow the protocol."""
        self.counts.refused += 1
        self._forget(now_ns, known)
        self._out.append(CloseLink(known.link, reason))
        self._out.append(SendToRoot(RelayNodes(left={known.link: reason})))

    # Batches

    def _begin_batch(self, now_ns: int, end: RoundEnd, nodes: list[NodeId], wait_ms: int) -> None:
        """Wait for the reports of these nodes."""
        self._last_end = (end.round, now_ns)
        awaited = {node for node in nodes if self._table.is_awaited(node)}
        if awaited:
            self._gather = _Gather(end.round, awaited, now_ns + self._hold_ns(awaited, wait_ms))
            self._move_to(RelayState.GATHERING)

    def _hold_ns(self, awaited: set[NodeId], wait_ms: int) -> int:
        """How long a batch may wait."""
        usual_ns = self._table.wait_ms(sorted(awaited), min(MIN_HOLD_MS, wait_ms), wait_ms) * MS
        return max(0, min(usual_ns, (wait_ms - MARGIN_MS) * MS - self._root_rtt_ns))

    def _hold(self, now_ns: int, known: _NodeLink, report: RoundReport) -> None:
        """Keep a report until its batch is sent."""
        if len(report.edges) > MAX_REPORT_EDGES:
            self._drop(now_ns, known, f"a report of {len(report.edges)} edges (limit {MAX_REPORT_EDGES})")
            return
        mine = self._held.get(known.node, [])
        if any(held.report.round == report.round and held.report.window == report.window for held in mine):
            return  # it was sent again
        if len(mine) >= MAX_HELD:
            self._drop(now_ns, known, f"it has sent {MAX_HELD} reports at once")
            return
        self._table.reported(known.node)
        round, passed_on_ns = self._last_end
        if report.round == round and report.end_sent_ns:
            self._table.took(known.node, now_ns - passed_on_ns)
        self._held.setdefault(known.node, []).append(_HeldReport(known.node, report, now_ns, row_bytes(report)))
        if self._gather is not None and report.round == self._gather.round:
            self._stop_awaiting(now_ns, known.node)
            return
        self.counts.late += bool(report.end_sent_ns)
        if self._flush_due_ns is None:
            self._flush_due_ns = now_ns + LATE_HOLD_MS * MS

    def _stop_awaiting(self, now_ns: int, node: NodeId) -> None:
        if self._gather is None:
            return
        self._gather.awaited.discard(node)
        if not self._gather.awaited:
            self._end_batch(now_ns)

    def _end_batch(self, now_ns: int) -> None:
        """All have reported, or the deadline has passed: send what is there."""
        if self._gather is not None:
            for node in self._gather.awaited:
                self._table.missed(node)
            self._gather = None
            self._move_to(RelayState.READY)
        self._flush(now_ns)

    def _flush(self, now_ns: int) -> None:
        """Send all held reports: one message for each round, or several if the root would refuse it."""
        self._flush_due_ns = None
        held, self._held = self._held, {}
        batches: dict[tuple[RoundId, int], list[_HeldReport]] = {}
        for one in (report for reports in held.values() for report in reports):
            batches.setdefault(self._batch_of(one.report), []).append(one)
        for (round, end_sent_ns), batch in batches.items():
            for part in _parts(batch):
                rows = [report_row(one.node, one.report, now_ns - one.received_ns) for one in part]
                self._out.append(SendToRoot(RelayReports(round, end_sent_ns, rows)))
                self.counts.batches += 1
                self.counts.reports += len(rows)

    def _batch_of(self, report: RoundReport) -> tuple[RoundId, int]:
        """Reports with the same of this are one message."""
        return report.round, report.end_sent_ns

    # Time

    def _tick(self, now_ns: int) -> None:
        if self.state is RelayState.AWAY:
            return
        if self._gather is not None and now_ns >= self._gather.deadline_ns:
            self._end_batch(now_ns)
        if self._flush_due_ns is not None and now_ns >= self._flush_due_ns:
            self._flush(now_ns)
        if now_ns < self._heartbeat_due_ns:
            return
        self._heartbeat += 1
        self._heartbeat_due_ns = now_ns + self._welcome.heartbeat_ms * MS
        self._out.append(SendHeartbeats(self._heartbeat))
        self._check_silence(now_ns)

    def _check_silence(self, now_ns: int) -> None:
        suspect_ns, evict_ns = self._welcome.suspect_after_ms * MS, self._welcome.evict_after_ms * MS
        if now_ns - self._root_received_ns >= evict_ns:
            reason = f"the root was silent for {self._welcome.evict_after_ms} ms"
            self._out.append(CloseRoot(reason))
            self._disconnect(reason)
            return
        suspected: dict[NodeId, int] = {}
        for known in [each for each in self._nodes.values() if each.has_heartbeats]:
            silent_ns = now_ns - known.last_received_ns
            if silent_ns >= evict_ns:
                self._drop(now_ns, known, f"it was silent for {silent_ns // MS} ms")
            elif silent_ns >= suspect_ns and not known.is_suspected:
                known.is_suspected = True
                self._table.suspect(known.node, silent_ns // MS)
                suspected[known.node] = silent_ns // MS
                self._stop_awaiting(now_ns, known.node)
        if suspected:
            self.counts.suspected += len(suspected)
            self._out.append(SendToRoot(RelayNodes(suspected=suspected)))


def _parts(batch: list[_HeldReport]) -> list[list[_HeldReport]]:
    """The reports of a batch, in their order, as few messages that the root accepts."""
    parts: list[list[_HeldReport]] = [[]]
    size = 0
    for one in batch:
        if len(parts[-1]) == MAX_RELAY_NODES or (parts[-1] and size + one.size > MAX_MESSAGE_BYTES):
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += one.size
    return parts
