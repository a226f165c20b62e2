"""The world in which rounds are simulated: clocks, connections, nodes and masters.

A node's clock runs at its own rate from its own offset, and may jump; the machine in it sees no other. The world's
fits are exact: they come from the true clocks, unless something makes a real fit refuse (a jump in the window, a
neighbour that is gone). A connection keeps the order of messages, as TCP does, except where the weather is *messy*:
then messages are also repeated and overtaken, which no machine may rely on not to happen.

A node that is frozen, or has lost power, keeps its connection: its heartbeats are missing, by which the master suspects
it, and drops it in the end. A *stuck* node has heartbeats, and does nothing else.

With `gloo` there are no connections but a group of ranks. With regions, nodes connect to relays
(`probing_regions.py`), or to the master.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ringfold.errors import RemoteProtocolError
from ringfold.probe.graph.draw import listed_edges
from ringfold.probe.regions.root import RelayTable, SendToRelay
from ringfold.probe.rounds.calculation import RoundResult
from ringfold.probe.rounds.effects import (
    ConfigureProber,
    ExportWindow,
    NodeEffect,
    PauseProbing,
    PublishSummary,
    ResumeProbing,
    RotateWindow,
    SendProbeResponse,
    SendToMaster,
    SendToNode,
)
from ringfold.probe.rounds.events import (
    MS,
    AlarmReceived,
    CommandReceived,
    FromRoundMaster,
    MasterConnected,
    MasterDisconnected,
    MasterEvent,
    MasterMessageReceived,
    NodeConnected,
    NodeDisconnected,
    NodeEvent,
    NodeRecovered,
    NodeSuspected,
    ReportReceived,
    Tick,
    ToRoundMaster,
    WindowFitted,
)
from ringfold.probe.rounds.gather import LATE_GRACE_MS, LATE_MS
from ringfold.probe.rounds.master import RoundMaster
from ringfold.probe.rounds.node import NEVER, NodeState, RoundNode
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.testing.checks import Violation
from ringfold.testing.probing_checks import RoundHistory, RoundTruth, WindowTruth
from ringfold.testing.scheduler import Scheduler, Timer
from ringfold.wire.probing import (
    Advice,
    EdgeFit,
    EdgeView,
    Neighbour,
    NodeClock,
    NodeId,
    ProbeGraph,
    RoundAlarm,
    RoundClock,
    RoundId,
    RoundReport,
    RoundStart,
)
from ringfold.wire.regions import NodeEntry, RelayHello, ToRoot

if TYPE_CHECKING:
    from ringfold.testing.probing_regions import RelayConn, SimRelay


@dataclass(slots=True)
class Clock:
    """C(t) = offset + (1 + drift) t, with jumps."""

    offset_ns: int
    drift: float
    jumps: list[int] = field(default_factory=list)
    """When it jumped, in true time."""

    def read(self, now_ns: int) -> int:
        return now_ns + self.offset_ns + int(now_ns * self.drift)

    def when(self, now_ns: int, clock_ns: int) -> int:
        """The true time at which it will show `clock_ns`, if it does not jump."""
        return now_ns + int((clock_ns - self.read(now_ns)) / (1 + self.drift)) + 1

    def jump(self, now_ns: int, by_ns: int) -> None:
        self.offset_ns += by_ns
        self.jumps.append(now_ns)


@dataclass(slots=True)
class Messages:
    """How messages travel at the moment."""

    latency_us: tuple[int, int] = (50, 2_000)
    repeats: float = 0.0
    overtakes: float = 0.0
    slow: float = 0.0
    slow_ms: int = 3_000


@dataclass(slots=True)
class Trap:
    """Something that happens just after the master has sent a message of this type."""

    after: type[FromRoundMaster]
    action: Callable[[], None]


UTC_NS = 1_700_000_000 * 10**9
SLACK_MS = 50
HURRY_SLACK_MS = 2
SECOND_NS = 1_000 * MS
RELAY_WAIT_MS = 25
"""As in `master/probing.py`."""
SUSPECT_MS, EVICT_MS = 250, 1_500
"""After how much silence the master suspects a node, and drops its connection."""


@dataclass(slots=True)
class Conn:
    """One connection of a node to a master, known to the master by the id that it gave the node."""

    node: "SimNode"
    master: "ProbingMaster | SimRelay"
    id: NodeId
    """Its number as a link, if it leads to a relay."""
    is_up: bool = True
    is_suspected: bool = False
    silences: int = 0
    """How often heartbeats stopped, or started again."""
    to_node_ns: int = 0
    to_master_ns: int = 0


@dataclass(slots=True)
class Registration:
    """A node behind a relay, as the master knows it."""

    relay: "RelayConn"
    is_suspected: bool = False


class ProbingWorld:
    """Everything there is. `draw_graph` and `calculate` stand in for the real ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: RoundSettings,
        master_type: type[RoundMaster] = RoundMaster,
        node_type: type[RoundNode] = RoundNode,
    ) -> None:
        self.scheduler, self.settings = scheduler, settings
        self.master_type, self.node_type = master_type, node_type
        self.rng = scheduler.rng
        self.history = RoundHistory(settings)
        self.messages = Messages()
        self.nodes: list[SimNode] = []
        self.master: ProbingMaster | None = None
        self.fence = 0
        self.processes = 0
        self.ids = 0
        self.slow_fits = 0.0
        self.advises = False
        self.by_id: dict[NodeId, SimNode] = {}
        self.group: GlooGroup | None = None
        self.relays: list[SimRelay] = []
        self.table_type: type[RelayTable] = RelayTable
        self.trap: Trap | None = None

    @property
    def now(self) -> int:
        return self.scheduler.now

    def note(self, who: str, what: str) -> None:
        self.scheduler.trace.note(self.now, who, what)

    def fresh_id(self, node: "SimNode") -> NodeId:
        self.ids += 1
        self.by_id[self.ids] = node
        return self.ids

    def start_master(self) -> None:
        self.fence += 1
        self.master = ProbingMaster(self, self.fence)
        self.note("master", f"starts with fence {self.fence}")

    def stop_master(self) -> None:
        """The master's process is gone, and all connections with it."""
        if self.master is None:
            return
        master, self.master = self.master, None
        self.note("master", "is gone")
        master.is_alive = False
        for conn in master.dialled:
            self.cut(conn)
        for relay in self.relays:
            relay.cut()

    def cut(self, conn: Conn) -> None:
        """A connection is lost; both ends notice, each in its time. What was on its way is lost."""
        if not conn.is_up:
            return
        conn.is_up = False
        self.scheduler.after(self.rng.randint(0, 20 * MS), conn.master.lost, conn)
        self.scheduler.after(self.rng.randint(0, 20 * MS), conn.node.lost, conn)

    def fall_silent(self, conn: Conn) -> None:
        """No heartbeat is sent on a connection any more, until `recover`. A relay notices by itself."""
        conn.silences += 1
        if not isinstance(conn.master, ProbingMaster):
            return
        silence = conn.silences
        self.scheduler.after(SUSPECT_MS * MS, self._suspect, conn, silence)
        self.scheduler.after(EVICT_MS * MS, self._evict, conn, silence)

    def _suspect(self, conn: Conn, silence: int) -> None:
        if conn.is_up and conn.silences == silence:
            assert isinstance(conn.master, ProbingMaster)
            conn.is_suspected = True
            conn.master.event(NodeSuspected(conn.id, SUSPECT_MS), conn)

    def _evict(self, conn: Conn, silence: int) -> None:
        """The master closes the connection. A node without power does not notice; a frozen one does when it wakes."""
        if conn.is_up and conn.silences == silence:
            conn.is_up = False
            conn.master.lost(conn)
            self.scheduler.after(self.way_ns(), conn.node.lost, conn)

    def recover(self, conn: Conn) -> None:
        """Heartbeats are sent again."""
        conn.silences += 1
        if conn.is_up and conn.is_suspected and isinstance(conn.master, ProbingMaster):
            conn.is_suspected = False
            conn.master.event(NodeRecovered(conn.id), conn)

    def way_ns(self) -> int:
        way = self.rng.randint(*self.messages.latency_us) * 1_000
        return way + (self.rng.randint(0, self.messages.slow_ms * MS) if self.rng.random() < self.messages.slow else 0)

    def to_node(self, conn: Conn, event: NodeEvent) -> None:
        conn.to_node_ns = self._travel(conn.to_node_ns, conn.node.arrive, conn, event)

    def to_master(self, conn: Conn, event: MasterEvent) -> None:
        conn.to_master_ns = self._travel(conn.to_master_ns, conn.master.arrive, conn, event)

    def _travel(self, after_ns: int, deliver: Callable[..., None], conn: Conn, event: object) -> int:
        at = self.now + self.way_ns()
        greets = isinstance(event, MasterConnected | NodeConnected)
        if greets or self.rng.random() >= self.messages.overtakes:
            at = max(at, after_ns + 1)
        self.scheduler.at(at, deliver, conn, event)
        if not greets and self.rng.random() < self.messages.repeats:
            self.scheduler.at(at + self.rng.randint(0, self.messages.slow_ms * MS), deliver, conn, event)
        return max(at, after_ns)

    # Stand-ins for the graph

    def draw_graph(
        self, nodes: Sequence[NodeId], listeners: Collection[NodeId], neighbours: int, seed: int
    ) -> list[tuple[NodeId, NodeId]]:
        """A ring of those who probe, and a spoke to each listener."""
        probers = [node for node in nodes if node not in listeners]
        edges = {(node, probers[(place + 1) % len(probers)]) for place, node in enumerate(probers)}
        edges |= {(probers[place % len(probers)], node) for place, node in enumerate(sorted(listeners))}
        edges |= {(node, sorted(set(nodes) - {node})[0]) for node in probers}
        return sorted((src, dst) for src, dst in edges if src != dst)

    def calculate(self, fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> RoundResult:
        nodes = sorted({node for fit in fits for node in (fit.src, fit.dst)})
        clocks = [NodeClock(node, 0, utc.get(node, 0), 0.0, 1.0, -1, 1, 0.0) for node in nodes]
        advice, adaptive = None, self.settings.adaptive
        if self.advises and self.rng.random() < 0.2:
            lengths = adaptive.window_min_ms, self.settings.window_ms, adaptive.window_max_ms
            advice = Advice(self.settings.pause_us, self.rng.choice(lengths), "drawn")
        took_ns = self.rng.randint(0, 5 * MS)
        return RoundResult(nodes[0], clocks, [EdgeView(fit) for fit in fits], advice=advice, took_ns=took_ns)


class ProbingMaster:
    """A master's process: the production machine, with its connections and its timer."""

    def __init__(self, world: ProbingWorld, fence: int) -> None:
        self.world, self.fence = world, fence
        settings = replace(world.settings, is_on=False) if world.settings.kind == "gloo" else world.settings
        self.machine = world.master_type(
            settings, fence, lambda number: f"{fence}/{number}".encode(), world.draw_graph, world.calculate
        )
        self.is_alive, self.is_frozen = True, False
        self.dialled: list[Conn] = []
        self.conns: dict[NodeId, Conn | Registration] = {}
        """Those that have identified themselves."""
        self.table = world.table_type()
        self.relay_conns: dict[int, RelayConn] = {}
        self._relayed: list[tuple[NodeId, FromRoundMaster]] = []
        self.root_messages = [0, 0]
        """Messages about nodes: received, and sent."""
        self.listeners: set[NodeId] = set()
        self.probes: dict[NodeId, bool] = {}
        self.asked: dict[int, str] = {}
        self.freezes = 0
        self._queue: list[tuple[MasterEvent, Conn | None]] = []
        self._relay_queue: list[tuple[RelayConn, ToRoot | RelayHello | None]] = []
        self._timer: Timer | None = None
        self._watched: RoundId | None = None
        self._last_begun: RoundId | None = None
        self._reported: set[NodeId] = set()
        """The nodes that have reported the present round."""
        self._heard: set[NodeId] = set()
        """The nodes that have sent a report of the present round, or of the one before it, since it began."""
        self._ended_ns: dict[RoundId, int] = {}
        """When the window of each round ended, by the true time."""
        self._slowest_ns: dict[NodeId, int] = {}
        """The longest that a report of each node took since it connected."""
        self._hurried: RoundId | None = None
        """The round of which only the last nodes are missing."""
        self._missed: dict[NodeId, int] = {}
        """How many rounds in a row each node has sent no report, while another one did."""

    def arrive(self, conn: Conn, event: MasterEvent) -> None:
        if conn.is_up:
            self.event(event, conn)

    def lost(self, conn: Conn) -> None:
        self.event(NodeDisconnected(conn.id, "reset"), conn)

    # Relays

    def from_relay(self, conn: "RelayConn", message: ToRoot | RelayHello | None) -> None:
        """A relay has sent a message; None: its connection is lost."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._relay_queue.append((conn, message))
            return
        if message is None:
            if self.relay_conns.pop(conn.id, None) is not None:
                for node in self.table.remove(conn.id):
                    self.event(NodeDisconnected(node, "its relay is gone"), self._registration(node))
                lost = [each for each in self.conns.values() if isinstance(each, Registration) and each.relay is conn]
                if lost:
                    raise Violation(f"{len(lost)} nodes are connected through {conn.relay.name}, which is gone")
        elif isinstance(message, RelayHello):
            self.relay_conns[conn.id] = conn
            self.table.add(conn.id, message)
            conn.relay.accepted(conn)
        elif conn.id in self.relay_conns:
            self.root_messages[0] += 1
            try:
                actions = self.table.receive(conn.id, message, 300, self._accept)
            except RemoteProtocolError as error:
                raise Violation(f"the root refuses a message of {conn.relay.name}: {error}") from error
            for action in actions:
                match action:
                    case SendToRelay():
                        self._to_relays([action])
                    case NodeConnected() | NodeDisconnected() | ReportReceived() | AlarmReceived():
                        registration = Registration(conn) if isinstance(action, NodeConnected) else None
                        self.event(action, registration or self._registration(action.node))
                    case NodeSuspected() | NodeRecovered():
                        self._set_suspected([action])
                    case _:
                        pass

    def judge_relay(self, conn: "RelayConn") -> None:
        """A relay's heartbeats are missing, or are back. A master that is frozen judges when it wakes."""
        if not self.is_alive or self.is_frozen or conn.id not in self.relay_conns:
            return
        if conn.is_suspected != self.table.entry(conn.id).is_suspected:
            table = self.table
            events = table.suspect(conn.id, SUSPECT_MS) if conn.is_suspected else table.recover(conn.id)
            self._set_suspected(events)

    def _set_suspected(self, events: Sequence[MasterEvent]) -> None:
        for event in events:
            assert isinstance(event, NodeSuspected | NodeRecovered)
            self.conns[event.node].is_suspected = isinstance(event, NodeSuspected)
            self.event(event, self._registration(event.node))

    def _registration(self, node: NodeId) -> "Registration | None":
        known = self.conns.get(node)
        return known if isinstance(known, Registration) else None

    def _accept(self, entry: NodeEntry) -> tuple[NodeId, list[SendToRelay]]:
        """The master's rule for ids, as in `master/probing.py`."""
        node, moved = entry.number, self.table.take_over(entry.number, entry.name, entry.addresses[0], entry.port)
        known = next((each for each in self.world.nodes if each.name == entry.name), None)
        if known is None:
            raise RemoteProtocolError("there is no such node")
        if moved is None and (not node or node in self.conns):
            node = self.world.fresh_id(known)
        return node, moved or []

    def _to_relays(self, messages: Sequence[SendToRelay]) -> None:
        for each in messages:
            self.root_messages[1] += 1
            if each.conn in self.relay_conns:
                self.relay_conns[each.conn].to_relay(each.message)

    # Nodes

    def event(self, event: MasterEvent, conn: Conn | Registration | None = None) -> None:
        if not self.is_alive:
            return
        if self.is_frozen:
            assert not isinstance(conn, Registration)
            self._queue.append((event, conn))
            return
        if isinstance(event, NodeConnected) and conn is not None:
            if self.world.relays and isinstance(conn, Conn):
                event = self._greet(event, conn)
            self.conns[event.node] = conn
            self._missed[event.node] = 0
            self._slowest_ns.pop(event.node, None)
            self.listeners |= {event.node} if event.listen_only else set()
        elif isinstance(event, NodeDisconnected):
            if self.conns.get(event.node) is not conn:
                return
            del self.conns[event.node]
        world, machine = self.world, self.machine
        starts: dict[RoundId, RoundTruth] = {}
        if self.world.relays and isinstance(event, ReportReceived) and isinstance(conn, Conn):
            self.root_messages[0] += 1
            event = ReportReceived(conn.id, event.report, event.bytes)
        if isinstance(event, ReportReceived) and event.node in self.conns:
            self._note_report(event, self.conns[event.node])
        was_gathering = machine.round if machine.is_gathering else None
        machine.relay_wait_ms = RELAY_WAIT_MS if self.relay_conns else 0
        effects = machine.step(world.now, event)
        if was_gathering is not None and machine.round != was_gathering:
            self._note_end(world.history.rounds[was_gathering])
        for effect in effects:
            match effect:
                case SendToNode(node, message):
                    self._sent(node, message, starts)
                case PublishSummary(summary):
                    missing = f", missing {summary.missing}" if summary.missing else ""
                    world.note("master", f"round {summary.round} is complete{missing}")
                    world.history.publish(world.now, self.fence, summary, self.listeners)
                case SendProbeResponse(asker):
                    assert asker in self.asked, f"command {asker} is answered twice"
                    del self.asked[asker]
                case _:
                    pass
        relayed, self._relayed = self._relayed, []
        self._to_relays(self.table.pack(relayed, machine.wait_ms))
        world.history.waits(machine.waiting_for(), self.listeners)
        if world.settings.kind == "master":
            self._check_waiting()
            self._watch_last()
            # A report through a relay that its node has left counts in `_missed`, and not for the machine: they differ.
            for round, truth in () if self.world.relays else starts.items():
                self._check_graph(round, truth)
        self._watch()
        self._set_timer()

    def _greet(self, event: NodeConnected, conn: Conn) -> NodeConnected:
        """Assign the id of a node with its own connection, by the same rule as behind a relay."""
        known, last = event.facts, event.last
        entry = NodeEntry(0, "", known.name, [known.address], known.port, event.listen_only, last, known.node)
        conn.id, messages = self._accept(entry)
        self._to_relays(messages)
        conn.is_suspected = False  # the silence of a node counts from here
        if not conn.node.sends_heartbeats:
            self.world.fall_silent(conn)
        self.world.to_node(conn, MasterConnected(conn.id))
        facts = Neighbour(conn.id, known.name, known.address, known.port)
        return NodeConnected(conn.id, facts, event.listen_only, last)

    def _note_report(self, event: ReportReceived, conn: Conn | Registration) -> None:
        conn.is_suspected = False
        self._missed[event.node] = 0
        truth = self.world.history.rounds.get(self._last_begun) if self._last_begun is not None else None
        if truth is None or event.report.round in (self._last_begun, truth.before):
            self._heard.add(event.node)
        if self.machine.is_gathering and event.report.round == self.machine.round:
            self._reported.add(event.node)
        begun = self.world.history.rounds.get(event.report.round)
        # Of a node that has connected again since, a master knows nothing yet.
        is_known = begun is not None and begun.told.get(event.node) is self.conns.get(event.node)
        if is_known and (ended_ns := self._ended_ns.get(event.report.round)) is not None:
            took_ns = self.world.now - ended_ns
            self._slowest_ns[event.node] = max(took_ns, self._slowest_ns.get(event.node, 0))

    def _note_end(self, truth: RoundTruth) -> None:
        """A round is over: who has missed it?"""
        if self._reported:
            for node in truth.participants - self._heard:
                self._missed[node] = self._missed.get(node, 0) + 1
        self._reported, self._heard = set(), set()

    def _is_silent(self, node: NodeId) -> bool:
        return self.conns[node].is_suspected or self._missed[node] >= self.world.settings.max_missed

    def _check_waiting(self) -> None:
        """Once all nodes that are there have reported, the round is over."""
        round = self.machine.round
        if round is None or not self.machine.is_gathering or not self._reported:
            return
        pending = {node for node in self.world.history.rounds[round].participants if node in self.conns}
        pending -= self._reported
        if pending and all(map(self._is_silent, pending)):
            self.world.history.waits_in_vain(round, pending)

    def _check_graph(self, round: RoundId, truth: RoundTruth) -> None:
        """A node that has missed too many rounds is not in the graph, if there are enough others."""
        limit = self.world.settings.max_missed
        others = [node for node in self.conns if self._missed[node] < limit]
        if len(others) < 2 or not any(node not in self.listeners for node in others):
            return
        names = {node: conn.node.name for node, conn in self.conns.items() if node in others and isinstance(conn, Conn)}
        lists = self.world.settings.graph
        if lists and not listed_edges(names, self.listeners, lists):
            return  # by the given lists, the others have nobody to probe
        for node in sorted(truth.participants):
            if (missed := self._missed[node]) >= limit:
                self.world.history.kept_in_graph(round, node, missed)

    def _sent(self, node: NodeId, message: FromRoundMaster, starts: dict[RoundId, RoundTruth]) -> None:
        world, conn = self.world, self.conns.get(node)
        if (trap := world.trap) is not None and isinstance(message, trap.after):
            world.trap = None
            world.scheduler.after(world.rng.randint(0, world.rng.choice((600_000, 2 * MS))), trap.action)
        if isinstance(message, ProbeGraph):
            self.probes[node] = bool(message.out)
        if isinstance(message, RoundStart):
            if message.round not in starts:
                starts[message.round] = RoundTruth(set(), self.listeners, message.cadence, before=self._last_begun)
                self._last_begun = message.round
            truth = starts[message.round]
            world.history.begun(message.round, truth)
            truth.told[node] = conn
            if self.probes.get(node):
                truth.participants.add(node)
        elif isinstance(message, RoundClock):
            world.history.clock_sent(node, conn, message.round)
        if world.group is not None:
            world.group.broadcast(node, message)
        elif isinstance(conn, Registration):
            self._relayed.append((node, message))
        elif conn is not None:
            self.root_messages[1] += 1
            world.to_node(conn, MasterMessageReceived(message))

    def _watch(self) -> None:
        """A round that is gathered must be over by its deadline, if this process is there to see it."""
        machine, world, round = self.machine, self.world, self.machine.round
        if not machine.is_gathering or round is None or round == self._watched:
            return
        self._watched, freezes = round, self.freezes
        self._ended_ns[round] = world.now
        limit_ms = world.settings.gather_ms(world.history.rounds[round].cadence) + LATE_MS + LATE_GRACE_MS + SLACK_MS

        def look() -> None:
            if self.is_alive and self.freezes == freezes and machine.round == round:
                world.history.gathers_too_long(round, limit_ms)

        world.scheduler.after(limit_ms * MS, look)

    def _watch_last(self) -> None:
        """The last node of a round is awaited half as long again as the others took, or as it ever took itself."""
        machine, world, round = self.machine, self.world, self.machine.round
        pending = machine.waiting_for()
        if round not in self._ended_ns or round == self._hurried or len(pending) != 1 or not self._reported:
            return
        self._hurried, freezes = round, self.freezes
        slowest_ns = self._slowest_ns.get(pending[0])
        if slowest_ns is None or world.relays:
            return
        took_ns = world.now - self._ended_ns[round]
        limit_ns = max(world.settings.report_floor_ms * MS, max(took_ns, slowest_ns) * 3 // 2) + HURRY_SLACK_MS * MS

        def look() -> None:
            if self.is_alive and self.freezes == freezes and machine.round == round and machine.is_gathering:
                world.history.gathers_too_long(round, limit_ns / MS)

        world.scheduler.after(max(0, limit_ns - took_ns), look)

    def _set_timer(self) -> None:
        due = self.machine.next_deadline_ns()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self.world.scheduler.at(due, self.event, Tick())

    def freeze(self, for_ns: int) -> None:
        if self.is_alive and not self.is_frozen:
            self.world.note("master", f"is frozen for {for_ns / MS:.0f} ms")
            self.is_frozen, self.freezes = True, self.freezes + 1
            self.world.scheduler.after(for_ns, self.wake)

    def wake(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            (queue, self._queue), tick = (self._queue, []), (Tick(), None)
            for event, conn in [tick, *queue] if self.world.rng.random() < 0.5 else [*queue, tick]:
                self.event(event, conn)
            relayed, self._relay_queue = self._relay_queue, []
            for relay, message in relayed:
                self.from_relay(relay, message)
            for relay in list(self.relay_conns.values()):
                self.judge_relay(relay)


class SimNode:
    """A node's process: the production machine, a clock, and a prober that knows the truth."""

    def __init__(self, world: ProbingWorld, name: str, clock: Clock, *, listen_only: bool) -> None:
        self.world, self.name, self.clock, self.listen_only = world, name, clock, listen_only
        self.id: NodeId = 0
        self.is_alive, self.is_frozen, self.has_left = False, False, False
        self.conn: Conn | None = None
        self.process = 0
        self.machine = RoundNode()
        self.freezes = 0
        self._queue: list[NodeEvent] = []
        self._timer: Timer | None = None
        self._out: list[NodeId] = []
        self._begun_ns = 0
        self._waits_since: RoundId | None = None
        self._stood_at = NEVER
        self.key = b""
        self.relays: list[SimRelay] = []
        """The relays that it tries before the master."""
        self._tries = 0
        self._is_stuck = False

    # Life

    def start(self, last: RoundId = NEVER) -> None:
        world = self.world
        if self.is_alive or self.has_left:
            return
        world.processes += 1
        self.process, self.is_alive, self.id, self.conn = world.processes, True, 0, None
        self.machine = world.node_type(first_window=world.rng.randint(1, 50), last=last)
        self._queue, self._out, self._waits_since, self.key = [], [], None, b""
        world.note(self.name, f"starts as process {self.process}")
        self._dial_soon()

    def stop(self) -> None:
        """The process is gone."""
        if self.is_alive:
            self.world.note(self.name, "is gone")
            self.is_alive = self.is_frozen = False
            if self._timer is not None:
                self._timer.cancel()
            if self.conn is not None:
                self.world.cut(self.conn)
                self.conn = None
            if self.world.group is not None:
                self.world.group.lost(self)

    def lose_power(self) -> None:
        """The machine is off: no connection is closed."""
        if self.is_alive:
            self.world.note(self.name, "has no power")
            self.is_alive = self.is_frozen = False
            if self._timer is not None:
                self._timer.cancel()
            if self.conn is not None:
                self.world.fall_silent(self.conn)
                self.conn = None
            if self.world.group is not None:
                self.world.group.lost(self)

    def freeze(self, for_ns: int, *, has_heartbeats: bool = False) -> None:
        if self.is_alive and not self.is_frozen:
            self.world.note(self.name, f"is {'stuck' if has_heartbeats else 'frozen'} for {for_ns / MS:.0f} ms")
            self.is_frozen, self.freezes = True, self.freezes + 1
            self._is_stuck = has_heartbeats
            if self.conn is not None and not has_heartbeats:
                self.world.fall_silent(self.conn)
            self.world.scheduler.after(for_ns, self.wake)
            group = self.world.group
            if group is not None and group.ranks[0] is self:
                group.master.freeze(for_ns)

    def wake(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            if self.conn is not None:
                self.world.recover(self.conn)
            queue, self._queue = self._queue, []
            for event in [Tick(), *queue] if self.world.rng.random() < 0.5 else [*queue, Tick()]:
                self.event(event)

    @property
    def sends_heartbeats(self) -> bool:
        return self.is_alive and not (self.is_frozen and not self._is_stuck)

    def jump(self, by_ns: int) -> None:
        self.world.note(self.name, f"has a clock that jumps by {by_ns / MS:.0f} ms")
        self.clock.jump(self.world.now, by_ns)

    # The connection

    def _dial_soon(self) -> None:
        if self.world.settings.kind != "gloo":
            wait_ms = self.world.rng.choice((20, 20, 500))
            self.world.scheduler.after(self.world.rng.randint(1, wait_ms) * MS, self._dial, self.process)

    def _dial(self, process: int) -> None:
        if process != self.process or not self.is_alive or self.conn is not None:
            return
        if self.is_frozen:
            self._dial_soon()
            return
        if self.world.relays:
            self._dial_next()
            return
        master = self.world.master
        if master is None:
            self._dial_soon()
            return
        if not self.id or self.world.rng.random() < 0.3:
            self.id = self.world.fresh_id(self)
        conn = self.conn = Conn(self, master, self.id)
        master.dialled.append(conn)
        self.world.to_master(conn, NodeConnected(self.id, self.facts(), self.listen_only, self.machine.last))
        self.world.to_node(conn, MasterConnected(self.id))

    def _dial_next(self) -> None:
        """Try the next address: those of the relays, then that of the master."""
        targets = [*self.relays, self.world.master]
        target = targets[self._tries % len(targets)]
        self._tries += 1
        if target is None or not target.is_alive:
            self._dial_soon()
            return
        conn = self.conn = Conn(self, target, self.id)
        target.dialled.append(conn)
        self.world.to_master(conn, NodeConnected(self.id, self.facts(), self.listen_only, self.machine.last))

    def facts(self) -> Neighbour:
        return Neighbour(self.id, self.name, "10.0.0.1", 50_000)

    def arrive(self, conn: Conn, event: NodeEvent) -> None:
        if conn.is_up and conn is self.conn:
            self.event(event)

    def lost(self, conn: Conn) -> None:
        if conn is self.conn:
            self.conn = None
            self.event(MasterDisconnected("reset"))
            self._dial_soon()

    # The machine

    def event(self, event: NodeEvent, process: int = 0) -> None:
        if not self.is_alive or (process and process != self.process):
            return
        if self.is_frozen:
            self._queue.append(event)
            return
        world, self._stood_at = self.world, self.machine.last
        if isinstance(event, MasterConnected):
            self.id = event.node
        effects = self.machine.step(self.clock.read(world.now), event)
        world.history.stepped(self.process, self.name, self.machine.last, event, effects)
        if isinstance(event, MasterMessageReceived):
            heard = event.message
            number = heard.number if isinstance(heard, ProbeGraph) else heard.round.sequence
            world.note(self.name, f"receives {type(heard).__name__} {number}")
        for effect in effects:
            self._carry_out(effect)
        self._watch()
        self._set_timer()

    def _carry_out(self, effect: NodeEffect) -> None:
        match effect:
            case ConfigureProber(key, out):
                self.key, self._out = key, [other.node for other in out]
                self.world.history.configured(self.name, [other.name for other in out], self.world.settings.graph)
            case ResumeProbing():
                self._begun_ns = self.world.now
            case RotateWindow(window):
                self._rotate(window)
            case SendToMaster(message):
                self._say(message)
            case ExportWindow():
                exports = self.world.history.exports
                exports[self.process] = exports.get(self.process, 0) + 1
            case PauseProbing() | _:
                pass

    def _say(self, message: ToRoundMaster) -> None:
        if self.world.group is not None:
            if isinstance(message, RoundReport):
                self.world.group.join(self, message)
        elif self.conn is not None and isinstance(message, RoundReport):
            self.world.to_master(self.conn, ReportReceived(self.id, message, 300))
        elif self.conn is not None and isinstance(message, RoundAlarm):
            self.world.to_master(self.conn, AlarmReceived(self.id, message))

    def _rotate(self, window: int) -> None:
        """The prober's answer: exact lines, with a note that says which window they are really of."""
        world, now = self.world, self.world.now
        key = f"{self.process}/{window}"
        # A RoundEnd ends a window of its own round; what else ends one comes after the round that it belongs to.
        round = self.machine.last if world.settings.kind == "master" else self._stood_at
        world.history.windows[key] = WindowTruth(self.process, window, round, now)
        begun, self._begun_ns = self._begun_ns, now
        edges = [self._fit(dst, begun, now, key) for dst in self._out]
        clock_ns = self.clock.read(now)
        slow = world.rng.randint(0, 3_000 * MS) if world.rng.random() < world.slow_fits else 0
        fit_ns = world.rng.randint(100_000, 4 * MS) + slow
        begin_ns = clock_ns - (now - begun)
        event = WindowFitted(window, edges, begin_ns, clock_ns, UTC_NS + now - clock_ns, fit_ns)
        world.scheduler.after(fit_ns, self.event, event, self.process)

    def _fit(self, dst: NodeId, begun: int, now: int, key: str) -> EdgeFit:
        other = self.world.by_id[dst]
        jumped = any(begun <= at <= now for clock in (self.clock, other.clock) for at in clock.jumps)
        if jumped or not other.is_alive or other.key != self.key or now - begun < 50 * MS:
            return EdgeFit(self.id, dst, why=key, refused="made up: a jump, nobody there, or another key")
        middle = (begun + now) // 2
        alpha = (1 + other.clock.drift) / (1 + self.clock.drift) - 1
        beta_ns = other.clock.read(middle) - self.clock.read(middle)
        return EdgeFit(self.id, dst, self.clock.read(middle), (now - begun) // 2, alpha, beta_ns, pairs=100, why=key)

    def _watch(self) -> None:
        """A node that waits for a RoundStart must go on alone by its deadline."""
        waits = self.machine.last if self.machine.state is NodeState.WAITING else None
        known, self._waits_since = self._waits_since, waits
        if waits is None or waits == known:
            return
        world, process, freezes, jumps = self.world, self.process, self.freezes, len(self.clock.jumps)
        settings = world.settings
        limit_ms = settings.gather_ms(settings.cadence) + settings.grace_ms + SLACK_MS

        def look() -> None:
            same = self.process == process and self.freezes == freezes and len(self.clock.jumps) == jumps
            if same and self.is_alive and self._waits_since == waits:
                world.history.waited_too_long(self.name, limit_ms)

        world.scheduler.after(limit_ms * MS, look)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due, self._timer = self.machine.next_deadline_ns(), None
        if due is not None and self.is_alive:
            at = min(self.clock.when(self.world.now, due), self.world.now + SECOND_NS)
            self._timer = self.world.scheduler.at(at, self._tick, self.process)

    def _tick(self, process: int) -> None:
        if not self.is_frozen:
            self.event(Tick(), process)


# A simulated process group, for `gloo` rounds. It has no connections: reports arrive together or not at all. If a rank
# is missing at the timeout, the group is broken for everybody; the simulation makes a new one when all ranks are there.

START_ASKER = -1


class GlooGroup:
    """A process group: gather and broadcast, each with a timeout. Rank 0's machine calculates."""

    def __init__(self, world: ProbingWorld, ranks: Sequence[SimNode]) -> None:
        self.world, self.ranks, self.is_up = world, list(ranks), True
        self._joined: dict[NodeId, RoundReport] = {}
        self._gathers = 0
        self._last_ns = 0
        world.group = self
        world.start_master()
        assert world.master is not None
        self.master = world.master
        for node in self.ranks:
            node.id = world.fresh_id(node)
        for node in self.ranks:
            node.event(MasterConnected(node.id))
            if node.listen_only:
                self.master.listeners.add(node.id)
            self.master.event(NodeConnected(node.id, node.facts(), node.listen_only, node.machine.last))
        # Only now: a graph of some of the ranks would leave the others out of a gather that waits for all.
        self.master.asked[START_ASKER] = "start"
        self.master.event(CommandReceived(START_ASKER, "start"))

    def join(self, node: SimNode, report: RoundReport) -> None:
        """A rank enters the gather."""
        if not self.is_up or node not in self.ranks:
            return
        if not self._joined:
            self._gathers += 1
            self.world.scheduler.after(self.world.settings.gloo_timeout_ms * MS, self._timeout, self._gathers)
        self._joined[node.id] = report
        if len(self._joined) == sum(not rank.listen_only for rank in self.ranks):
            joined, self._joined = self._joined, {}
            self._gathers += 1
            self.world.scheduler.after(self.world.way_ns(), self._gathered, joined)

    def _gathered(self, reports: dict[NodeId, RoundReport]) -> None:
        if self.is_up:
            for node, report in sorted(reports.items()):
                self.master.event(ReportReceived(node, report, 300))

    def broadcast(self, node: NodeId, message: FromRoundMaster) -> None:
        at = max(self.world.now + self.world.way_ns(), self._last_ns + 1)
        self._last_ns = at
        self.world.scheduler.at(at, self._deliver, self.world.by_id[node], node, message)

    def _deliver(self, node: SimNode, id: NodeId, message: FromRoundMaster) -> None:
        if self.is_up and node.id == id:
            node.event(MasterMessageReceived(message))

    def _timeout(self, gather: int) -> None:
        if gather == self._gathers:
            self.end("a collective has timed out")

    def lost(self, node: SimNode) -> None:
        """A rank died; Gloo notices by its connection, or by the timeout of a gather that it should be in."""
        is_first = node is self.ranks[0]
        if is_first:
            self.end(f"rank 0, {node.name}, is gone")
        elif node in self.ranks and self.is_up and (node.listen_only or self.world.rng.random() < 0.5):
            self.world.scheduler.after(self.world.rng.randint(0, 50 * MS), self.end, f"{node.name} is gone")

    def end(self, reason: str) -> None:
        """The group is broken, for everybody."""
        if not self.is_up:
            return
        self.is_up = False
        self.world.note("gloo", reason)
        self.world.stop_master()
        self.world.group = None
        for node in self.ranks:
            node.event(MasterDisconnected(reason))
