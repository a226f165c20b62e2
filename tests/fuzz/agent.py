"""The agent's machine behind its connections, under any request, datagram and feed. Its tables are always checked."""

from random import Random
from typing import Any

from ringfold.agent.adapters import Observation
from ringfold.agent.effects import CloseConnection, PublishAdvice, SendMessage
from ringfold.agent.events import (
    ConnectionClosed,
    ConnectionOpened,
    DatagramReceived,
    Event,
    MalformedMessageReceived,
    MessageReceived,
    NicQueuesRead,
    QueueObserved,
    Tick,
)
from ringfold.agent.machine import AgentIdentity, AgentMachine
from ringfold.agent.registry import Quota, Registry
from ringfold.agent.steering import Steering, parse_policy
from ringfold.agent.telemetry import TelemetryIngest
from ringfold.errors import RemoteProtocolError
from ringfold.wire import telemetry
from ringfold.wire.agent import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    AgentHello,
    Flow,
    Measured,
    Register,
    ToAgent,
    agent_frame,
)
from ringfold.wire.agent_fixed import ClientCodec, fixed_request
from ringfold.wire.frames import FrameReader
from ringfold.wire.telemetry import Gate, GateSettings
from tests.fuzz.values import Values, damaged

MS = 1_000_000
PATHS = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))
Step = list[Any]


class AgentRun:
    """An agent of eight slots, and its clients."""

    def __init__(self, policy: str) -> None:
        me = AgentIdentity(pid=1, uid=500, generation=3, hints="hints", started_ns=0)
        ingest = TelemetryIngest(Gate(GateSettings(allow=("any",))))
        self.machine = AgentMachine(me, Registry([0] * 8, Quota()), Steering(parse_policy(policy), ingest))
        self.now, self.last = 0, 0
        self.clients: dict[int, tuple[FrameReader, ClientCodec]] = {}

    def step(self, event: Event) -> None:
        for effect in self.machine.step(self.now, event):
            match effect:
                case SendMessage(client, message):
                    codec = self.clients[client][1] if client in self.clients else ClientCodec()
                    assert len(codec.encode(message)) <= MAX_ANSWER_BYTES
                case CloseConnection(client, why):
                    assert why
                    self.clients.pop(client, None)
                case PublishAdvice(slot, shares, backpressure, _):
                    assert 0 <= slot < 8
                    assert 0 <= sum(shares) <= 65_535
                    assert all(0 <= share <= 65_535 for share in shares)
                    assert 0 <= backpressure < 1 << 16
        self.machine.check()
        wake = self.machine.wake_ns()
        assert wake is None or isinstance(wake, int)

    def apply(self, step: Step) -> None:
        match step:
            case ["open", uid]:
                self.last += 1
                self.clients[self.last] = FrameReader(MAX_REQUEST_BYTES), ClientCodec()
                self.step(ConnectionOpened(self.last, uid, 7))
            case ["bytes", client, text] if client in self.clients:
                self._feed(client, bytes.fromhex(text))
            case ["gone", client] if client in self.clients:
                del self.clients[client]
                self.step(ConnectionClosed(client))
            case ["datagram", text]:
                self.step(DatagramReceived(10**18 + self.now, bytes.fromhex(text), "10.0.0.9"))
            case ["observed", congestion, path]:
                body = telemetry.Congestion(0, 0, path, congestion, 9, 0, 0)
                self.step(QueueObserved(10**18 + self.now, Observation(body)))
            case ["queues", pressure]:
                number = telemetry.address_number("10.0.0.1")
                self.step(NicQueuesRead({number: float(pressure)}))
            case ["decide", ms]:
                self.now += ms * MS
                self.step(Tick(only_urgent=ms == 0))

    def _feed(self, client: int, raw: bytes) -> None:
        reader, codec = self.clients[client]
        try:
            for kind, body in reader.feed(raw):
                self.step(MessageReceived(client, codec.decode(kind, body)))
                if client not in self.clients:
                    return
        except RemoteProtocolError as error:
            self.step(MalformedMessageReceived(client, str(error)))

    def propose(self, rng: Random) -> Step:
        clients = list(self.clients)
        if not clients or rng.random() < 0.05:
            return ["open", rng.choice((0, 500, 500, 1_000))]
        client = rng.choice(clients)
        flow = Flow(rng.choice((1, 2, 3)), "10.0.0.1", "10.0.0.2", PATHS)
        hints: dict[str, list[Any]] = {
            "connection": [1, 2, 3],
            "version": [1],
            "flow": [flow],
            "source": ["10.0.0.1"],
            "destination": ["10.0.0.2"],
            "after": [0, 1],
        }
        values = Values(rng, hints)
        encode = fixed_request if client % 2 else agent_frame  # the layout of a client; now and then the other one
        if rng.random() < 0.02:
            encode = agent_frame if client % 2 else fixed_request
        match rng.choices(range(8), (4, 8, 12, 4, 4, 2, 6, 2))[0]:
            case 0:
                return ["bytes", client, encode(AgentHello(1, "a client")).hex()]
            case 1:
                return ["bytes", client, encode(Register(1, flow)).hex()]
            case 2:
                try:
                    raw = encode(values.of(ToAgent, absurd=rng.choice((0.0, 0.1, 0.4))))
                except Exception:
                    raw = encode(Measured(1, (rng.choice((0, 1, 2**63)), 5)))
                return ["bytes", client, (damaged(rng, raw) if rng.random() < 0.1 else raw).hex()]
            case 3:
                body = telemetry.Congestion(0, 0, rng.randrange(4), rng.choice((0, 199, 200, 255)), 9, 0, 0)
                raw = telemetry.encode(telemetry.Packet(body, rng.getrandbits(64), 10**18 + self.now, 0))
                return ["datagram", (damaged(rng, raw) if rng.random() < 0.3 else raw).hex()]
            case 4:
                return ["observed", rng.choice((0, 100, 255)), rng.randrange(16)]
            case 5:
                return ["queues", rng.choice((0, 1, 200, 255))]
            case 6:
                return ["decide", rng.choice((0, 1, 50, 1_000, 20_000))]
            case _:
                return ["gone", client]


def replayed(script: list[Step]) -> None:
    run = AgentRun(script[0][1])
    for step in script[1:]:
        run.apply(step)


def drawn(rng: Random) -> tuple[list[Step], BaseException | None]:
    policy = rng.choice(("auto", "static:0.25"))
    run, script = AgentRun(policy), [["policy", policy]]
    prologue: list[Step] = [["open", 500], ["bytes", 1, fixed_request(AgentHello(1, "first")).hex()]]
    prologue += [["open", 500], ["bytes", 2, agent_frame(AgentHello(1, "second")).hex()]]
    try:
        for number in range(rng.choice((20, 60))):
            step = prologue[number] if number < len(prologue) else run.propose(rng)
            script.append(step)
            run.apply(step)
    except Exception as error:
        return script, error
    return script, None
