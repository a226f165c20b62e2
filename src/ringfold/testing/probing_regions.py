"""Regions under faults: relays between the nodes and the master of `probing_world.py`, drawn from a seed.

A relay is a process with the production machine. Its connection to the master keeps the order of messages, as TCP does;
they may be late. Faults of relays are crashes and restarts, freezes, lost connections to the master, and late batches;
nodes and the master have all their faults, too. Every promise of rounds must hold, and at the end a whole round must
come. A node that is in the graph under two ids, one of them behind a frozen relay, is counted once.

    python -m ringfold.testing --regions --seeds 1000
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, get_args

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
from ringfold.probe.regions.relay import RelayMachine
from ringfold.probe.regions.root import RelayTable
from ringfold.probe.rounds.events import (
    MS,
    AlarmReceived,
    MasterConnected,
    MasterEvent,
    MasterMessageReceived,
    NodeConnected,
    ReportReceived,
)
from ringfold.testing.checks import Violation
from ringfold.testing.probing import ProbingSetup, RoundOutcome, RoundScenario, RoundSimulation, draw_rounds
from ringfold.testing.probing_world import EVICT_MS, SUSPECT_MS, Conn, ProbingMaster, ProbingWorld, SimNode
from ringfold.testing.scheduler import Timer
from ringfold.wire.probing import RoundKind
from ringfold.wire.regions import FromRoot, NodeEntry, RelayHello, RelayWelcome, ToRoot

HEARTBEAT_MS = 100
MAX_DIAL_MS = 200

RelayFaultKind = Literal["relay_crash", "relay_freeze", "relay_cut", "relay_late"]


@dataclass(slots=True)
class RelayConn:
    """One connection of a relay to a master."""

    relay: "SimRelay"
    master: ProbingMaster
    id: int
    is_up: bool = True
    is_suspected: bool = False
    to_master_ns: int = 0
    to_relay_ns: int = 0

    def to_relay(self, message: FromRoot) -> None:
        self.to_relay_ns = self._travel(self.to_relay_ns, self.relay.from_root, message)

    def to_master(self, message: ToRoot | RelayHello) -> None:
        self.to_master_ns = self._travel(self.to_master_ns, self.master.from_relay, message)

    def _travel(self, after_ns: int, deliver: Callable[..., None], message: object) -> int:
        world = self.relay.world
        at = max(world.now + self.relay.way_ns(), after_ns + 1)
        world.scheduler.at(at, self._arrive, deliver, message)
        return at

    def _arrive(self, deliver: Callable[..., None], message: object) -> None:
        if self.is_up:
            deliver(self, message)


class SimRelay:
    """A relay's process: the production machine, with its links, its connection to the master and its timer."""

    def __init__(self, world: ProbingWorld, name: str, machine_type: type[RelayMachine]) -> None:
        self.world, self.name = world, name
        self._machine_type = machine_type
        self.machine = machine_type()
        self.is_alive = self.is_frozen = False
        self.dialled: list[Conn] = []
        self.late_ms = 0
        self._links: dict[int, Conn] = {}
        self._root: RelayConn | None = None
        self._last_id = 0
        self._freezes = 0
        self._process = 0
        self._queue: list[RelayEvent] = []
        self._timer: Timer | None = None

    def way_ns(self) -> int:
        return self.world.way_ns() + self.world.rng.randint(0, self.late_ms * MS)

    # Life

    def start(self) -> None:
        if not self.is_alive:
            self.is_alive, self.is_frozen = True, False
            self._process += 1
            self.machine, self._links, self._queue = self._machine_type(), {}, []
            self.world.note(self.name, "starts")
            self._dial_soon()

    def stop(self) -> None:
        """The process is gone, and all its connections."""
        if not self.is_alive:
            return
        self.world.note(self.name, "is gone")
        self.is_alive = self.is_frozen = False
        self.cut()
        self._root = None
        for conn in self.dialled:
            self.world.cut(conn)
        self.dialled = []

    def cut(self) -> None:
        """The connection to the master is lost; both ends notice, each in its time."""
        conn, world = self._root, self.world
        if conn is not None and conn.is_up:
            conn.is_up = False
            world.scheduler.after(world.rng.randint(0, 20 * MS), conn.master.from_relay, conn, None)
            world.scheduler.after(world.rng.randint(0, 20 * MS), self._root_lost, conn)

    def freeze(self, for_ns: int) -> None:
        if not self.is_alive or self.is_frozen:
            return
        world = self.world
        world.note(self.name, f"is frozen for {for_ns / MS:.0f} ms")
        self.is_frozen, self._freezes = True, self._freezes + 1
        world.scheduler.after(SUSPECT_MS * MS, self._suspected, self._freezes, self._root)
        world.scheduler.after(EVICT_MS * MS, self._dropped, self._freezes, self._root)
        world.scheduler.after(for_ns, self.wake)

    def wake(self) -> None:
        if not self.is_frozen:
            return
        self.is_frozen = False
        if self._root is not None and self._root.is_up:
            self._root.is_suspected = False
            self._root.master.judge_relay(self._root)
        queue, self._queue = self._queue, []
        for event in [Tick(), *queue] if self.world.rng.random() < 0.5 else [*queue, Tick()]:
            self.event(event)

    def _suspected(self, freeze: int, conn: RelayConn | None) -> None:
        if self.is_frozen and self._freezes == freeze and conn is not None and conn.is_up:
            conn.is_suspected = True
            conn.master.judge_relay(conn)

    def _dropped(self, freeze: int, conn: RelayConn | None) -> None:
        """Master and nodes have received no heartbeat for too long. The relay notices when it wakes."""
        if not self.is_frozen or self._freezes != freeze:
            return
        if conn is not None and conn.is_up:
            conn.is_up = False
            conn.master.from_relay(conn, None)
            self._root_lost(conn)
        for link in [each for each in self.dialled if each.is_up]:
            self.world.cut(link)

    # The connection to the master

    def _dial_soon(self) -> None:
        self.world.scheduler.after(self.world.rng.randint(1, MAX_DIAL_MS) * MS, self._dial, self._process)

    def _dial(self, process: int) -> None:
        if not self.is_alive or process != self._process or self._root is not None:
            return
        master = self.world.master
        if master is None or self.is_frozen:
            self._dial_soon()
            return
        self.world.processes += 1
        conn = self._root = RelayConn(self, master, self.world.processes)
        conn.to_master(RelayHello(1, self.name, self.name, b"", b""))

    def accepted(self, conn: RelayConn) -> None:
        welcome = RelayWelcome(b"", HEARTBEAT_MS, SUSPECT_MS, EVICT_MS)
        at = max(self.world.now + self.way_ns(), conn.to_relay_ns + 1)
        conn.to_relay_ns = at
        self.world.scheduler.at(at, self._welcomed, conn, welcome)

    def _welcomed(self, conn: RelayConn, welcome: RelayWelcome) -> None:
        if conn is self._root and conn.is_up:
            self.event(RootConnected(welcome))

    def from_root(self, conn: RelayConn, message: FromRoot) -> None:
        if conn is self._root:
            self.event(RootMessageReceived(message))

    def _root_lost(self, conn: RelayConn) -> None:
        if conn is self._root:
            self._root = None
            self.event(RootDisconnected("reset"))
            self._dial_soon()

    # Links to nodes

    def arrive(self, conn: Conn, event: MasterEvent) -> None:
        """A node's message, as the world sends it to a master."""
        if not conn.is_up:
            return
        match event:
            case NodeConnected(_, facts, listen_only, last):
                self._last_id += 1
                conn.id = self._last_id
                address = [facts.address]
                entry = NodeEntry(conn.id, "", facts.name, address, facts.port, listen_only, last, facts.node)
                self._links[conn.id] = conn
                self.event(NodeRequested(entry))
            case ReportReceived(_, report):
                self.event(LinkMessageReceived(conn.id, report))
            case AlarmReceived(_, alarm):
                self.event(LinkMessageReceived(conn.id, alarm))
            case _:
                pass

    def lost(self, conn: Conn) -> None:
        if self._links.get(conn.id) is conn:  # one that was lost on its way here has no number of this relay's
            del self._links[conn.id]
            self.event(LinkClosed(conn.id, "reset"))

    # The machine

    def event(self, event: RelayEvent) -> None:
        if not self.is_alive:
            return
        if self.is_frozen:
            self._queue.append(event)
            return
        if isinstance(event, Tick):
            self._receive_heartbeats()
        try:
            effects = self.machine.step(self.world.now, event)
        except RemoteProtocolError as error:
            raise Violation(f"{self.name} refuses a message of the root: {error}") from error
        self._run_effects(effects)
        self._set_timer()

    def _receive_heartbeats(self) -> None:
        """Heartbeats that have arrived meanwhile: of every node that runs, and of the master."""
        root = self._root
        if root is not None and root.is_up and root.master.is_alive and not root.master.is_frozen:
            self._run_effects(self.machine.step(self.world.now, RootHeartbeatReceived()))
        for link, conn in list(self._links.items()):
            if conn.is_up and conn.node.conn is conn and conn.node.sends_heartbeats:
                self._run_effects(self.machine.step(self.world.now, LinkHeartbeatReceived(link)))

    def _run_effects(self, effects: list[RelayEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToRoot(message):
                    if self._root is not None and self._root.is_up:
                        self._root.to_master(message)
                case SendToLinks(links, message):
                    for link in links:
                        if link in self._links:
                            self.world.to_node(self._links[link], MasterMessageReceived(message))
                case WelcomeNode(link, node):
                    if link in self._links:
                        self.world.to_node(self._links[link], MasterConnected(node))
                case RefuseNode(link) | CloseLink(link):
                    conn = self._links.pop(link, None)
                    if conn is not None:
                        self.world.cut(conn)
                case CloseRoot():
                    self.cut()
                case SendHeartbeats() | _:
                    pass

    def _set_timer(self) -> None:
        due = self.machine.next_deadline_ns()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self.world.scheduler.at(due, self._tick, self._process)

    def _tick(self, process: int) -> None:
        if process == self._process and not self.is_frozen:
            self.event(Tick())


@dataclass(frozen=True, slots=True)
class RelayFault:
    """Something that goes wrong with a relay. `who` is a place in the list of relays."""

    kind: RelayFaultKind
    at_ms: float
    for_ms: float
    who: int


@dataclass(frozen=True, slots=True)
class RegionScenario:
    """Rounds with relays. Node number n tries the relays `homes[n]` before the master."""

    rounds: RoundScenario
    relays: int
    homes: tuple[tuple[int, ...], ...]
    faults: tuple[RelayFault, ...]
    head_start_ms: int = 0
    """How long the nodes start after the relays, at least."""


@dataclass(frozen=True, slots=True)
class RegionSetup:
    """Which machines run; a planted bug brings its own."""

    rounds: ProbingSetup = field(default_factory=ProbingSetup)
    relay: type[RelayMachine] = RelayMachine
    table: type[RelayTable] = RelayTable


def draw_regions(seed: int) -> RegionScenario:
    """The scenario of a seed."""
    rng = Random(f"regions {seed}")
    rounds = draw_rounds(rng.randrange(1 << 30))
    kinds: tuple[RoundKind, ...] = ("master", "master", "master", "time", "local")
    kind = rng.choice(kinds)
    probers = max(rounds.probers, rng.choice((2, 4, 6, 9)))  # the faults name nodes by their place
    rounds = replace(rounds, settings=replace(rounds.settings, kind=kind), probers=probers)
    relays = rng.choice((1, 2, 2, 3))
    homes = tuple(
        tuple(rng.sample(range(relays), rng.randint(0 if place % 3 == 2 else 1, relays)))
        for place in range(rounds.probers + rounds.listeners)
    )
    faults = tuple(
        RelayFault(
            rng.choice(get_args(RelayFaultKind)),
            rng.uniform(0, rounds.faults_ms),
            rng.choice((50, 500, 3_000)) * rng.uniform(0.5, 1),
            rng.randrange(relays),
        )
        for _ in range(rng.randint(1, 4))
    )
    over_ms = max(rounds.faults_ms, *(fault.at_ms + fault.for_ms for fault in faults)) + 100
    return RegionScenario(replace(rounds, faults_ms=over_ms), relays, homes, faults)


class RegionSimulation(RoundSimulation):
    """One drawn run with relays."""

    mode = "--regions"

    def __init__(
        self, seed: int, scenario: RegionScenario, setup: RegionSetup, echo: Callable[[str], None] | None = None
    ) -> None:
        self._regions, self._setup = scenario, setup
        self.head_start_ns = scenario.head_start_ms * MS
        super().__init__(seed, scenario.rounds, setup.rounds, echo)
        for fault in scenario.faults:
            self.scheduler.at(int(fault.at_ms * MS), self._inject_relay, fault)

    def _prepare(self) -> None:
        world = self.world
        world.table_type = self._setup.table
        world.relays = [SimRelay(world, f"relay{number}", self._setup.relay) for number in range(self._regions.relays)]
        for relay in world.relays:
            self.scheduler.after(self.rng.randint(0, 300 * MS), relay.start)

    def _add(self, **named: object) -> SimNode:
        node = super()._add(**named)  # type: ignore[arg-type]
        homes = self._regions.homes
        place = len(self.world.nodes) - 1
        node.relays = [self.world.relays[each] for each in homes[place % len(homes)]]
        return node

    def _inject_relay(self, fault: RelayFault) -> None:
        if self._is_healed:
            return
        self.injected[fault.kind] += 1
        relay, for_ns = self.world.relays[fault.who], int(fault.for_ms * MS)
        match fault.kind:
            case "relay_crash":
                relay.stop()
                self.scheduler.after(for_ns, relay.start)
            case "relay_freeze":
                relay.freeze(for_ns)
            case "relay_cut":
                relay.cut()
            case "relay_late":
                relay.late_ms = self.rng.choice((20, 200, 1_000))
                self.scheduler.after(for_ns, setattr, relay, "late_ms", 0)

    def _heal(self) -> None:
        for relay in self.world.relays:
            relay.late_ms = 0
            relay.wake()
            relay.start()
        super()._heal()


def run_regions(
    seed: int, setup: RegionSetup | None = None, *, echo: Callable[[str], None] | None = None
) -> RoundOutcome:
    """Run one seed to its end; a broken promise raises SimulationFailure."""
    return RegionSimulation(seed, draw_regions(seed), setup or RegionSetup(), echo).run()
