"""A simulation of one host with transport agents: agents are killed and restarted, clients come, go and crash.

The agent is the production machine with its registry and its codecs; the clients are the production
`FlowRegistrations`, or any other implementation of `SimClient` (the tests drive the C header's). Bytes are cut and
delayed as on a stream socket. The table of hints keeps what the native writer keeps across lives of the agent: the
generations of its slots.

Promises, checked at every step: a client never reads the hint of another pair, and the agent's tables are consistent.
At the end, when the faults have stopped: every flow of a living client has the place that the agent knows, the table
agrees, and the agent has no other flow.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ringfold.agent.client import RETRY_INTERVAL_S, FlowRegistrations, reconnect_delay_s
from ringfold.agent.effects import CloseConnection, OpenSlot, PublishAdvice, SendMessage, WithdrawAdvice
from ringfold.agent.events import ConnectionClosed, ConnectionOpened, Event, MalformedMessageReceived, MessageReceived
from ringfold.agent.machine import AgentIdentity, AgentMachine
from ringfold.agent.registry import PairKey, Quota, Registry, pair_key
from ringfold.agent.steering import Steering
from ringfold.errors import RemoteProtocolError
from ringfold.testing.scheduler import MS, Scheduler, SimulationFailure, Trace
from ringfold.wire.agent import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Flow,
    Place,
    ToAgent,
    agent_frame,
    decode_from_agent,
)
from ringfold.wire.agent_fixed import ClientCodec
from ringfold.wire.frames import FrameReader

SLOTS = 4
PAIRS = 4
"""No more pairs than slots: in the end every flow finds room."""
FAULTS_MS = 4_000
SETTLE_MS = 120_000
STALE_MS = 1_000
OPTION = "--agents"


class SimClient(Protocol):
    """A client without its socket: flows and bytes in, bytes and places out."""

    def add(self, flow: Flow, now_ns: int) -> int: ...

    def remove(self, number: int, now_ns: int) -> None: ...

    def connected(self, now_ns: int) -> None: ...

    def disconnected(self) -> None: ...

    def receive(self, chunk: bytes, now_ns: int) -> bool:
        """Whether these are responses; if not, the connection is closed."""
        ...

    def tick(self, now_ns: int) -> bool:
        """Do what is due; whether the connection is still good."""
        ...

    def outgoing(self) -> bytes: ...

    def place(self, number: int) -> Place | None: ...


class MsgpackClient:
    """The client of Ringfold's own processes."""

    def __init__(self, registrations: FlowRegistrations | None = None) -> None:
        self._registrations = registrations or FlowRegistrations("simulated")
        self._last = 0
        self._queued = b""
        self._frames = FrameReader(MAX_ANSWER_BYTES)
        self._retry_ns = 0

    def add(self, flow: Flow, now_ns: int) -> int:
        self._last += 1
        numbered = Flow(self._last, flow.source, flow.destination, flow.paths)
        self._send(self._registrations.add(numbered))
        return self._last

    def remove(self, number: int, now_ns: int) -> None:
        self._send(self._registrations.remove(number))

    def connected(self, now_ns: int) -> None:
        self._queued, self._frames = b"", FrameReader(MAX_ANSWER_BYTES)
        self._send(self._registrations.connected())

    def disconnected(self) -> None:
        self._registrations.disconnected()

    def receive(self, chunk: bytes, now_ns: int) -> bool:
        try:
            for kind, body in self._frames.feed(chunk):
                self._registrations.receive(decode_from_agent(kind, body))
        except RemoteProtocolError:
            return False
        return True

    def tick(self, now_ns: int) -> bool:
        if now_ns >= self._retry_ns + int(RETRY_INTERVAL_S * 1e9):
            self._retry_ns = now_ns
            self._send(self._registrations.retry())
        return True

    def outgoing(self) -> bytes:
        queued, self._queued = self._queued, b""
        return queued

    def place(self, number: int) -> Place | None:
        return self._registrations.flows[number].place

    def _send(self, messages: list[ToAgent]) -> None:
        self._queued += b"".join(map(agent_frame, messages))


@dataclass(slots=True)
class Table:
    """The table of hints, as far as it outlives an agent."""

    generations: list[int] = field(default_factory=lambda: [0] * SLOTS)
    advised: dict[int, PairKey] = field(default_factory=dict)
    """By slot, the pair that valid advice is for."""
    heartbeat_ns: int | None = None

    def read(self, now_ns: int, place: Place) -> PairKey | None:
        """The pair whose hint a reader with this place uses; None: local policy."""
        is_fresh = self.heartbeat_ns is not None and now_ns - self.heartbeat_ns <= STALE_MS * MS
        slot, generation = place
        return self.advised.get(slot) if is_fresh and self.generations[slot] == generation else None


class AgentLife:
    """One life of the agent, from its start until it is killed."""

    def __init__(self, table: Table, now_ns: int) -> None:
        self.table = table
        table.advised.clear()
        table.heartbeat_ns = now_ns
        self.registry = Registry(self.initial_generations(), Quota())
        me = AgentIdentity(pid=1, uid=0, generation=1, hints="", started_ns=now_ns)
        self.machine = AgentMachine(me, self.registry, Steering((0.5, 0.5)))
        self.connections: dict[int, _Connection] = {}

    def initial_generations(self) -> list[int]:
        return list(self.table.generations)

    def step(self, now_ns: int, event: Event) -> None:
        for effect in self.machine.step(now_ns, event):
            match effect:
                case SendMessage(client, message):
                    if client in self.connections:
                        connection = self.connections[client]
                        connection.to_client(connection.codec.encode(message))
                case CloseConnection(client, _):
                    if (closed := self.connections.pop(client, None)) is not None:
                        closed.end_to_client()
                case OpenSlot(slot, generation):
                    self.table.generations[slot] = generation
                    self.table.advised.pop(slot, None)
                case PublishAdvice(slot, _, _):
                    [pair] = [each for each in self.registry.pairs if each.slot == slot]
                    self.table.advised[slot] = pair.key
                case WithdrawAdvice(slot):
                    self.table.advised.pop(slot, None)
                case _:
                    pass
        self.machine.check()


@dataclass(eq=False, slots=True)
class _Connection:
    """A stream between a client and one life of the agent. Each direction keeps its order."""

    number: int
    host: "Host"
    life: AgentLife
    node: "_Node"
    codec: ClientCodec = field(default_factory=ClientCodec)
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_REQUEST_BYTES))
    is_open: bool = True
    """At the client."""
    arrives_ns: list[int] = field(default_factory=lambda: [0, 0])

    def _later(self, direction: int, action: Callable[..., None], *arguments: object) -> None:
        scheduler = self.host.scheduler
        delay_ns = int(scheduler.rng.expovariate(1 / (2 * MS)))
        self.arrives_ns[direction] = max(self.arrives_ns[direction] + 1, scheduler.now + delay_ns)
        scheduler.at(self.arrives_ns[direction], action, *arguments)

    def to_agent(self, raw: bytes) -> None:
        for piece in self.host.cut(raw):
            self._later(0, self._at_agent, piece)

    def end_to_agent(self) -> None:
        self._later(0, self._end_at_agent)

    def to_client(self, raw: bytes) -> None:
        for piece in self.host.cut(raw):
            self._later(1, self._at_client, piece)

    def end_to_client(self, unnoticed_ns: int = 0) -> None:
        """The client notices the end so much later: it reads hints all the time, and its socket now and then."""
        self.arrives_ns[1] = max(self.arrives_ns[1], self.host.scheduler.now) + unnoticed_ns
        self._later(1, self._end_at_client)

    def _at_agent(self, piece: bytes) -> None:
        if self.host.life is not self.life or self.number not in self.life.connections:
            return
        now_ns = self.host.scheduler.now
        try:
            for kind, body in self.frames.feed(piece):
                self.life.step(now_ns, MessageReceived(self.number, self.codec.decode(kind, body)))
        except RemoteProtocolError as error:
            self.life.step(now_ns, MalformedMessageReceived(self.number, str(error)))

    def _end_at_agent(self) -> None:
        if self.host.life is self.life and self.life.connections.pop(self.number, None) is not None:
            self.life.step(self.host.scheduler.now, ConnectionClosed(self.number))

    def _at_client(self, piece: bytes) -> None:
        if self.is_open:
            self.host.trace(f"client {self.node.number}", f"receives {len(piece)} bytes")
            if self.node.client.receive(piece, self.host.scheduler.now):
                self.node.flush()
            else:
                self.end_to_agent()
                self._end_at_client()

    def _end_at_client(self) -> None:
        if self.is_open:
            self.is_open = False
            self.node.lost()


@dataclass(eq=False, slots=True)
class _Node:
    """A process with a client."""

    number: int
    host: "Host"
    client: SimClient
    flows: dict[int, Flow] = field(default_factory=dict)
    connection: _Connection | None = None
    away_since_ns: int = 0
    is_alive: bool = True

    def start(self) -> None:
        self.away_since_ns = self.host.scheduler.now
        self.connect()
        self.tick()

    def connect(self) -> None:
        if not self.is_alive or self.connection is not None:
            return
        self.connection = self.host.connect(self)
        if self.connection is None:
            away_s = (self.host.scheduler.now - self.away_since_ns) / 1e9
            self.host.scheduler.after(int(reconnect_delay_s(away_s) * 1e9), self.connect)
            return
        self.client.connected(self.host.scheduler.now)
        self.flush()

    def lost(self) -> None:
        self.host.trace(f"client {self.number}", "its connection has ended")
        self.connection, self.away_since_ns = None, self.host.scheduler.now
        self.client.disconnected()
        self.host.scheduler.after(int(reconnect_delay_s(0) * 1e9), self.connect)

    def tick(self) -> None:
        if not self.is_alive:
            return
        if not self.client.tick(self.host.scheduler.now) and self.connection is not None:
            self.connection.end_to_agent()
            self.connection._end_at_client()
        self.flush()
        self.host.scheduler.after(200 * MS, self.tick)

    def flush(self) -> None:
        raw = self.client.outgoing()
        if raw and self.connection is not None:
            self.connection.to_agent(raw)

    def crash(self) -> None:
        self.is_alive = False
        if self.connection is not None:
            self.connection.is_open = False
            self.connection.end_to_agent()


@dataclass(slots=True)
class AgentOutcome:
    """What happened in one simulated host."""

    virtual_ms: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


class Host:
    """The host of one seed. `make_client` and `make_life` are replaced by tests: other clients, planted bugs."""

    def __init__(
        self,
        seed: int,
        make_client: Callable[[int], SimClient] = lambda number: MsgpackClient(),
        make_life: Callable[[Table, int], AgentLife] = AgentLife,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self.scheduler = Scheduler(seed, Trace(echo=echo))
        self.table = Table()
        self.life: AgentLife | None = None
        self.nodes: list[_Node] = []
        self.outcome = AgentOutcome()
        self._make_client, self._make_life = make_client, make_life
        self._last_connection = 0
        self._is_over = False

    def trace(self, who: str, what: str) -> None:
        self.scheduler.trace.note(self.scheduler.now, who, what)

    def cut(self, raw: bytes) -> list[bytes]:
        """The pieces in which a stream delivers these bytes."""
        rng = self.scheduler.rng
        if not raw or rng.random() < 0.5:
            return [raw]
        at = rng.randrange(len(raw) + 1)
        return [raw[:at], raw[at:]]

    def connect(self, node: _Node) -> _Connection | None:
        if self.life is None:
            return None
        self._last_connection += 1
        connection = _Connection(self._last_connection, self, self.life, node)
        self.life.connections[connection.number] = connection
        self.life.step(self.scheduler.now, ConnectionOpened(connection.number, 1_000, 40 + node.number))
        return connection

    # Faults

    def start_agent(self) -> None:
        if self.life is None:
            self.trace("agent", "starts")
            self.life = self._make_life(self.table, self.scheduler.now)
            self.outcome.counts["agents"] += 1

    def kill_agent(self) -> None:
        if self.life is None or self._is_over:
            return
        self.trace("agent", "is killed")
        self.outcome.faults["agent killed"] += 1
        connections, self.life = list(self.life.connections.values()), None
        for connection in connections:
            connection.end_to_client(self.scheduler.rng.choice((0, 0, 800)) * MS)
        self.scheduler.after(self.scheduler.rng.choice((1, 50, 500)) * MS, self.start_agent)

    def start_client(self) -> None:
        number = len(self.nodes)
        node = _Node(number, self, self._make_client(number))
        self.nodes.append(node)
        self.outcome.counts["clients"] += 1
        node.start()

    def crash_client(self) -> None:
        alive = [node for node in self.nodes if node.is_alive]
        if alive and not self._is_over:
            node = self.scheduler.rng.choice(alive)
            self.trace(f"client {node.number}", "crashes")
            self.outcome.faults["client crashed"] += 1
            node.crash()
            self.start_client()

    def change_flows(self) -> None:
        """A client adds or removes a flow; then another one follows."""
        rng = self.scheduler.rng
        if self._is_over:
            return
        node = rng.choice([each for each in self.nodes if each.is_alive])
        if node.flows and rng.random() < 0.5:
            number = rng.choice(sorted(node.flows))
            self.trace(f"client {node.number}", f"removes flow {number}")
            node.client.remove(number, self.scheduler.now)
            del node.flows[number]
        else:
            flow = _flow(rng.randrange(PAIRS))
            number = node.client.add(flow, self.scheduler.now)
            self.trace(f"client {node.number}", f"adds flow {number} to {flow.destination}")
            node.flows[number] = flow
            self.outcome.counts["flows"] += 1
        node.flush()
        self.scheduler.after(int(rng.expovariate(1 / (30 * MS))), self.change_flows)

    # Checks

    def check_reads(self) -> None:
        """What every client would read now is for its own flows."""
        for node in self.nodes:
            for number, flow in node.flows.items() if node.is_alive else ():
                place = node.client.place(number)
                found = None if place is None else self.table.read(self.scheduler.now, place)
                if found is not None:
                    self.outcome.counts["hints read"] += 1
                    assert found == pair_key(flow), (
                        f"client {node.number} reads the hint of {found[1]} for its flow to {flow.destination}"
                    )

    def is_settled(self) -> bool:
        """Whether every flow of a living client is where the agent has it, and the agent has no other."""
        assert self.life is not None
        known = {pair.key: pair.place for pair in self.life.registry.pairs}
        wanted = [(node, *each) for node in self.nodes if node.is_alive for each in node.flows.items()]
        return self.life.registry.flows == len(wanted) and all(
            node.client.place(number) == known.get(pair_key(flow)) for node, number, flow in wanted
        )

    # The run

    def run(self) -> AgentOutcome:
        scheduler, rng = self.scheduler, self.scheduler.rng
        if rng.random() < 0.7:
            self.start_agent()
        else:
            scheduler.after(rng.randrange(1_000) * MS, self.start_agent)
        for _ in range(rng.choice((1, 2, 3))):
            self.start_client()
        scheduler.after(0, self.change_flows)
        for _ in range(rng.choice((0, 1, 2, 4))):
            scheduler.at(rng.randrange(FAULTS_MS) * MS, self.kill_agent)
        for _ in range(rng.choice((0, 1, 2))):
            scheduler.at(rng.randrange(FAULTS_MS) * MS, self.crash_client)
        self._run_until(lambda: scheduler.now >= FAULTS_MS * MS, FAULTS_MS)
        self._is_over = True
        self.start_agent()
        assert self._run_until(self.is_settled, FAULTS_MS + SETTLE_MS), "flows and agent do not agree in the end"
        self.outcome.virtual_ms = scheduler.now / MS
        return self.outcome

    def _run_until(self, holds: Callable[[], bool], limit_ms: int) -> bool:
        def checked() -> bool:
            if self.life is not None:
                self.table.heartbeat_ns = self.scheduler.now
            self.check_reads()
            return holds()

        return self.scheduler.run_until(checked, limit_ms * MS)


def _flow(pair: int) -> Flow:
    paths = (("10.0.0.1", f"10.0.0.{pair + 2}"), ("10.1.0.1", f"10.1.0.{pair + 2}"))
    return Flow(0, "10.0.0.1", f"10.0.0.{pair + 2}", paths)


def run_agents(
    seed: int,
    echo: Callable[[str], None] | None = None,
    make_client: Callable[[int], SimClient] = lambda number: MsgpackClient(),
    make_life: Callable[[Table, int], AgentLife] = AgentLife,
) -> AgentOutcome:
    """Run one seed; raises SimulationFailure if a promise is broken."""
    host = Host(seed, make_client, make_life, echo)
    try:
        return host.run()
    except AssertionError as error:
        raise SimulationFailure(seed, str(error), host.scheduler.trace.tail(), OPTION) from error
