"""A simulation of telemetry among the transport agents of several hosts: a switch reports queues to any of them.

Each agent is the production machine with its registry, steering and codecs. Datagrams are lost, doubled, delayed and
reordered; the wall clocks of hosts and switch differ; flows come and go. The depth of a report is its serial number, so
that a forwarded report can be compared with what the switch sent. In about half of the seeds all packets are signed,
with one key; the switch restarts its sequence once, and somebody sends recorded packets again.

Promises, checked at every report: it is forwarded only by the host that the traffic goes to, to every sender that a
flow of this host leads back to and to nobody else, as one exact pair, with the switch's figures and its time of
measurement; at most once in an interval for each sender and path, unless backpressure begins or ends; and never again.
No agent accepts a signed packet twice, or refuses one as replayed that it has not received before. At the end, when the
faults have stopped: backpressure on any path to a host steers the flow of its sender.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ringfold.agent.effects import ForwardTelemetry, PublishAdvice, WithdrawAdvice
from ringfold.agent.events import ConnectionOpened, DatagramReceived, Event, MessageReceived, Tick
from ringfold.agent.machine import AgentIdentity, AgentMachine
from ringfold.agent.registry import Quota, Registry
from ringfold.agent.steering import BACKPRESSURE, FORWARD_INTERVAL_NS, Steering
from ringfold.agent.telemetry import MAX_PLAUSIBLE_AGE_NS, Reporter, ReportSettings, TelemetryIngest
from ringfold.testing.agents import AgentOutcome
from ringfold.testing.scheduler import MS, Scheduler, SimulationFailure, Timer, Trace
from ringfold.wire.agent import AGENT_PROTOCOL, AgentHello, Deregister, Flow, Register, ToAgent
from ringfold.wire.telemetry import (
    EXACT,
    REPLAY_WINDOW,
    SENDER_BYTES,
    Congestion,
    Gate,
    GateSettings,
    Packet,
    address_number,
    address_text,
    decode,
    encode,
    masked,
)

SLOTS = 32
FAULTS_MS = 150
ARRIVE_MS = 50
"""After so long no datagram is on its way any more."""
STALE_MS = 2_000
"""After so long what was reported before counts no more."""
START_NS = 1_000_000_000_000
SWITCH, RECORDER = "10.9.0.1", "10.9.0.2"
SWITCH_SENDER, SWITCH_BEGINS = 7, 1_000
"""The switch's sequence begins at 1,000, and at 1 after its restart."""
KEY_ID, KEY = 1, bytes(range(32))
CLIENT = 1
LEVELS = (0, 50, 120, 200, BACKPRESSURE, 255)
OPTION = "--forwarding"

Ends = tuple[int, int]
"""The local and the remote address of a path."""


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """What the switch sent, by its own clock."""

    body: Congestion
    measured_unix_ns: int


@dataclass(eq=False)
class _Agent:
    """The agent of one host, and what the simulation knows of it."""

    number: int
    machine: AgentMachine
    gate: Gate
    reporter: Reporter
    clock_offset_ns: int
    flows: dict[int, Flow] = field(default_factory=dict)
    newest_ns: dict[tuple[int, int, int, int, int], int] = field(default_factory=dict)
    """By queue, the newest measurement that has arrived."""
    forwarded: dict[tuple[str, int], tuple[int, bool]] = field(default_factory=dict)
    """By sender and path, when a report was forwarded, and whether it was backpressure."""
    advised: dict[int, int] = field(default_factory=dict)
    """By slot, the paths under backpressure, as bits."""
    tick: Timer | None = None
    received: dict[bytes, bool] = field(default_factory=dict)
    """The signed packets that have arrived, and whether they were accepted."""
    highest: dict[tuple[int, bool], int] = field(default_factory=dict)
    """By sender, and whether it has restarted its sequence, the highest one that has arrived."""

    def ends(self, path: int) -> Iterator[Ends]:
        for flow in self.flows.values():
            if path < len(flow.paths):
                local, remote = flow.paths[path]
                yield address_number(local), address_number(remote)


def make_machine(ingest: TelemetryIngest, steering: type[Steering] = Steering) -> AgentMachine:
    me = AgentIdentity(pid=1, uid=0, generation=1, hints="", started_ns=0)
    return AgentMachine(me, Registry([0] * SLOTS, Quota()), steering(ingest=ingest))


class Hosts:
    """The hosts of one seed. `make`, `make_gate` and `make_reporter` are replaced by tests: planted bugs."""

    def __init__(
        self,
        seed: int,
        make: Callable[[TelemetryIngest], AgentMachine] = make_machine,
        echo: Callable[[str], None] | None = None,
        make_gate: Callable[[GateSettings], Gate] = Gate,
        make_reporter: Callable[[int, int, ReportSettings], Reporter] = Reporter,
    ) -> None:
        self.scheduler = Scheduler(seed, Trace(echo=echo))
        self.outcome = AgentOutcome()
        rng = self.scheduler.rng
        self._make, self._make_gate, self._make_reporter = make, make_gate, make_reporter
        self._is_signed = rng.random() < 0.5
        self._paths = rng.choice((1, 2, 2, 3))
        self._agents = [self._start(number) for number in range(rng.choice((2, 3, 4)))]
        self._switch_offset_ns = self._offset()
        self._reports: list[SwitchReport] = []
        self._switch_restarts_at = rng.randrange(100, 200)
        self._recorded: list[tuple[int, bytes, int, bool]] = []
        self._last_flow = 0
        self._is_over = False

    def _offset(self) -> int:
        """How far a wall clock is off. The switch may be ahead: then the time of receipt counts. Signed packets are
        accepted up to half a minute."""
        return self.scheduler.rng.choice((0, 1, 20, 3_000, 20_000 if self._is_signed else 40_000)) * MS

    def _start(self, number: int) -> _Agent:
        key_id, key = (KEY_ID, KEY) if self._is_signed else (None, None)
        gate = self._make_gate(GateSettings(allow=("any",), keys={KEY_ID: KEY} if self._is_signed else {}))
        machine, offset_ns = self._make(TelemetryIngest(gate)), self._offset()
        sender = self.scheduler.rng.getrandbits(8 * SENDER_BYTES)
        settings = ReportSettings(key_id=key_id, key=key)
        reporter = self._make_reporter(self._unix_ns(offset_ns), sender, settings)
        agent = _Agent(number, machine, gate, reporter, offset_ns)
        self._step(agent, ConnectionOpened(CLIENT, 0, 2))
        self._step(agent, MessageReceived(CLIENT, AgentHello(AGENT_PROTOCOL, "simulated")))
        return agent

    def _unix_ns(self, offset_ns: int) -> int:
        return START_NS + self.scheduler.now + offset_ns

    def _trace(self, who: str, what: str) -> None:
        self.scheduler.trace.note(self.scheduler.now, who, what)

    # Flows

    def _address(self, number: int, path: int) -> str:
        return f"10.{path}.0.{number + 1}"

    def _flow(self, source: int, destination: int) -> Flow:
        """From one host to another; of a host to itself, every path leads to the next of its addresses."""
        self._last_flow += 1
        shift = source == destination
        paths = tuple(
            (self._address(source, path), self._address(destination, (path + shift) % self._paths))
            for path in range(self._paths)
        )
        # A flow has two paths or more: one that has a single address uses it twice.
        paths = paths if len(paths) > 1 else (*paths, *paths)
        return Flow(self._last_flow, paths[0][0], paths[0][1], paths)

    def _add_flow(self, source: int, destination: int) -> None:
        agent, flow = self._agents[source], self._flow(source, destination)
        self._trace(f"host {source}", f"adds flow {flow.connection} to host {destination}")
        self._tell(agent, Register(flow.connection, flow))
        agent.flows[flow.connection] = flow

    def _change_flows(self) -> None:
        rng = self.scheduler.rng
        if self._is_over:
            return
        agent = rng.choice(self._agents)
        if len(agent.flows) > 3 or (agent.flows and rng.random() < 0.4):
            number = rng.choice(sorted(agent.flows))
            self._trace(f"host {agent.number}", f"removes flow {number}")
            self._tell(agent, Deregister(number, number))
            del agent.flows[number]
        else:
            self._add_flow(agent.number, rng.randrange(len(self._agents)))
        self.scheduler.after(int(rng.expovariate(1 / (20 * MS))), self._change_flows)

    def _tell(self, agent: _Agent, message: ToAgent) -> None:
        self._step(agent, MessageReceived(CLIENT, message))

    # Telemetry

    def _switch_reports(self) -> None:
        """Report a queue to one of the hosts, and go on."""
        rng = self.scheduler.rng
        if self._is_over:
            return
        source, destination = (rng.randrange(len(self._agents)) for _ in range(2))
        path = rng.randrange(max(2, self._paths))
        here, there = (address_number(self._address(each, path % self._paths)) for each in (source, destination))
        network = masked(here, EXACT - 8)
        ends = rng.choice(
            (
                (here, there, EXACT, EXACT),
                (here, there, EXACT, EXACT),
                (0, there, 0, EXACT),
                (network, there, EXACT - 8, EXACT),
                (network, network, EXACT - 8, EXACT - 8),
                (here, 0, EXACT, 0),
            )
        )
        receiver = rng.choice((destination, destination, destination, source, rng.randrange(len(self._agents))))
        self._report(ends, path, rng.choice(LEVELS), receiver)
        self.scheduler.after(int(rng.expovariate(1 / (0.5 * MS))), self._switch_reports)

    def _report(self, ends: tuple[int, int, int, int], path: int, level: int, receiver: int) -> None:
        source, destination, source_bits, destination_bits = ends
        serial, unix_ns = len(self._reports), self._unix_ns(self._switch_offset_ns)
        body = Congestion(source, destination, path, level, serial, source_bits, destination_bits)
        self._reports.append(SwitchReport(body, unix_ns))
        self._trace("switch", f"report {serial} to host {receiver}: level {level} on path {path}")
        if not self._is_signed:
            content = encode(Packet(body, serial + 1, unix_ns, SWITCH_SENDER))
        else:
            began = SWITCH_BEGINS if serial < self._switch_restarts_at else 1 - self._switch_restarts_at
            content = encode(Packet(body, began + serial, unix_ns, SWITCH_SENDER, KEY_ID), KEY)
        self._send(receiver, content, SWITCH, serial, is_forward=False)

    def _send(self, receiver: int, content: bytes, address: str, serial: int, *, is_forward: bool) -> None:
        """A datagram on its way: lost, doubled, late."""
        rng = self.scheduler.rng
        copies = 1 if self._is_over else rng.choice((0, 1, 1, 1, 1, 1, 1, 1, 1, 2))
        if copies != 1:
            self.outcome.faults["datagram lost" if not copies else "datagram doubled"] += 1
        for _ in range(copies):
            delay_ns = int(rng.expovariate(1 / MS)) if rng.random() < 0.9 else rng.randrange(8 * MS)
            self.scheduler.after(delay_ns, self._receive, receiver, content, address, serial, is_forward)
        if copies:
            self._recorded.append((receiver, content, serial, is_forward))

    def _replay(self) -> None:
        """Somebody sends a packet again that was recorded, and goes on."""
        rng = self.scheduler.rng
        if self._is_over:
            return
        if self._recorded:
            self.outcome.faults["recording sent again"] += 1
            receiver, content, serial, is_forward = rng.choice(self._recorded)
            self._receive(receiver, content, RECORDER, serial, is_forward)
        self.scheduler.after(int(rng.expovariate(1 / MS)), self._replay)

    def _receive(self, receiver: int, content: bytes, address: str, serial: int, is_forward: bool) -> None:
        agent, sent = self._agents[receiver], self._reports[serial]
        unix_ns = self._unix_ns(agent.clock_offset_ns)
        accepted = agent.gate.accepted
        found = self._step(agent, DatagramReceived(unix_ns, content, address))
        is_refused = agent.gate.accepted == accepted
        if self._is_signed:
            self._check_signed(agent, content, is_accepted=not is_refused)
        self.outcome.counts["reports received"] += 1
        assert not (is_forward and found), f"host {receiver} forwards report {serial} again"
        if self._is_signed and is_refused:
            assert not found, f"host {receiver} forwards report {serial}, which it refused"
        elif not is_forward:
            self._check_forwards(agent, sent, unix_ns, found)
        for each in found:
            self.outcome.counts["reports forwarded"] += 1
            target = int(each.address.rpartition(".")[2]) - 1
            self._trace(f"host {receiver}", f"forwards report {serial} to host {target}")
            content = agent.reporter.forwarded(each.measured_unix_ns, each.report)
            self._send(target, content, self._address(receiver, 0), serial, is_forward=True)

    def _step(self, agent: _Agent, event: Event) -> list[ForwardTelemetry]:
        """One event of an agent, and the decisions that are due then."""
        now_ns, machine = self.scheduler.now, agent.machine
        effects = machine.step(now_ns, event)
        while machine.is_urgent:
            effects += machine.step(now_ns, Tick(only_urgent=True))
        for effect in effects:
            if isinstance(effect, PublishAdvice):
                agent.advised[effect.slot] = effect.backpressure
            elif isinstance(effect, WithdrawAdvice):
                agent.advised.pop(effect.slot, None)
        if agent.tick is not None:
            agent.tick.cancel()
        wake_ns = machine.wake_ns()
        agent.tick = None if wake_ns is None else self.scheduler.at(max(now_ns, wake_ns), self._step, agent, Tick())
        return [effect for effect in effects if isinstance(effect, ForwardTelemetry)]

    # Checks

    def _check_signed(self, agent: _Agent, content: bytes, *, is_accepted: bool) -> None:
        """A packet is accepted when it arrives for the first time, and not again.

        It may be refused if it was overtaken by a whole window, or by others around the switch's restart.
        """
        packet, who = decode(content, {KEY_ID: KEY}), f"host {agent.number}"
        assert isinstance(packet, Packet)
        if agent.received.get(content):
            assert not is_accepted, f"{who} accepts packet {packet.sequence} of sender {packet.sender} again"
            return
        is_restarted = packet.sequence < SWITCH_BEGINS
        agent.received[content] = is_accepted
        highest = agent.highest.get((packet.sender, is_restarted), packet.sequence)
        agent.highest[packet.sender, is_restarted] = max(highest, packet.sequence)
        is_restarting = packet.sequence < REPLAY_WINDOW or (not is_restarted and (packet.sender, True) in agent.highest)
        if highest - packet.sequence < REPLAY_WINDOW and not is_restarting:
            assert is_accepted, f"{who} refuses packet {packet.sequence} of sender {packet.sender}, which is new"

    def _check_forwards(self, agent: _Agent, sent: SwitchReport, unix_ns: int, found: list[ForwardTelemetry]) -> None:
        body, who, now_ns = sent.body, f"host {agent.number}", self.scheduler.now
        senders = self._senders(agent, body)
        late_ns = unix_ns - sent.measured_unix_ns
        measured_ns = sent.measured_unix_ns if 0 <= late_ns <= MAX_PLAUSIBLE_AGE_NS else unix_ns
        is_held = body.congestion >= BACKPRESSURE
        reached: set[str] = set()
        for each in found:
            exact = Congestion(
                address_number(each.address), each.report.destination, body.path, body.congestion, body.depth_bytes
            )
            assert each.address not in reached, f"{who} forwards report {body.depth_bytes} twice to {each.address}"
            reached.add(each.address)
            assert each.report == exact, f"{who} forwards {each.report} to {each.address} for {body}"
            assert each.address in senders, f"{who} forwards to {each.address}, which sends nothing that it is about"
            assert each.report.destination == senders[each.address], f"{who} forwards a report about another host"
            assert each.measured_unix_ns == measured_ns, f"{who} changes the time of measurement"
            assert not self._is_too_early(agent, each.address, body.path, is_held=is_held), (
                f"{who} forwards to {each.address} before the interval is over"
            )
        queue = (body.source, body.source_bits, body.destination, body.destination_bits, body.path)
        if sent.measured_unix_ns > agent.newest_ns.get(queue, 0):
            agent.newest_ns[queue] = sent.measured_unix_ns
            for address in senders.keys() - reached:
                assert self._is_too_early(agent, address, body.path, is_held=is_held), (
                    f"{who} does not forward report {body.depth_bytes} to {address}"
                )
        for address in reached:
            agent.forwarded[address, body.path] = now_ns, is_held

    def _is_too_early(self, agent: _Agent, address: str, path: int, *, is_held: bool) -> bool:
        last = agent.forwarded.get((address, path))
        return last is not None and last[1] == is_held and self.scheduler.now - last[0] < FORWARD_INTERVAL_NS

    def _senders(self, agent: _Agent, body: Congestion) -> Mapping[str, int]:
        """Whom a report is for, by the flows of a host: the address of each sender, and the address that it sends to.

        A report about a flow of the host itself is for nobody else.
        """
        ends = list(agent.ends(body.path))
        if not body.destination_bits or any(_is_about(body, local, remote) for local, remote in ends):
            return {}
        own = {address_number(self._address(agent.number, path)) for path in range(self._paths)}
        return {
            address_text(remote): local
            for local, remote in ends
            if remote not in own and _is_about(body, remote, local)
        }

    def _check_backpressure_arrives(self) -> None:
        """One report for every pair of hosts with flows in both directions: its sender avoids the path."""
        for path in range(self._paths):
            for source in self._agents:
                for destination in self._agents:
                    if source is not destination:
                        self._check_one(source, destination, path)

    def _check_one(self, source: _Agent, destination: _Agent, path: int) -> None:
        here, there = (address_number(self._address(each.number, path)) for each in (source, destination))
        if (here, there) not in source.ends(path) or (there, here) not in destination.ends(path):
            return
        self._wait(STALE_MS)
        assert not any(bits >> path & 1 for bits in source.advised.values()), (
            f"host {source.number} holds a path for ever"
        )
        self._report((here, there, EXACT, EXACT), path, 255, destination.number)
        self._wait(ARRIVE_MS)
        self.outcome.counts["backpressure at the sender"] += 1
        assert any(bits >> path & 1 for bits in source.advised.values()), (
            f"backpressure from host {source.number} to host {destination.number} did not reach its sender"
        )

    def _wait(self, milliseconds: int) -> None:
        until_ns = self.scheduler.now + milliseconds * MS
        self.scheduler.at(until_ns, lambda: None)
        self.scheduler.run_until(lambda: self.scheduler.now >= until_ns, until_ns)

    # The run

    def run(self) -> AgentOutcome:
        rng, count = self.scheduler.rng, len(self._agents)
        for source in range(count):
            for destination in range(count):
                if rng.random() < (0.3 if source == destination else 0.7):
                    self._add_flow(source, destination)
        self.scheduler.after(0, self._change_flows)
        self.scheduler.after(0, self._switch_reports)
        if self._is_signed:
            self.scheduler.after(0, self._replay)
        self._wait(FAULTS_MS)
        self._is_over = True
        self._check_backpressure_arrives()
        self.outcome.virtual_ms = self.scheduler.now / MS
        return self.outcome


def _is_about(body: Congestion, source: int, destination: int) -> bool:
    return (
        masked(source, body.source_bits) == body.source
        and masked(destination, body.destination_bits) == body.destination
    )


def run_forwarding(
    seed: int,
    echo: Callable[[str], None] | None = None,
    make: Callable[[TelemetryIngest], AgentMachine] = make_machine,
    make_gate: Callable[[GateSettings], Gate] = Gate,
    make_reporter: Callable[[int, int, ReportSettings], Reporter] = Reporter,
) -> AgentOutcome:
    """Run one seed; raises SimulationFailure if a promise is broken."""
    hosts = Hosts(seed, make, echo, make_gate, make_reporter)
    try:
        return hosts.run()
    except AssertionError as error:
        raise SimulationFailure(seed, str(error), hosts.scheduler.trace.tail(), OPTION) from error
