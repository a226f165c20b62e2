"""The agent's decisions about its clients: what each may do, which slot a flow gets, and the responses. Pure.

`step(now_ns, event) -> effects`, with the events in `events.py` and the effects in `effects.py`. The registry holds
flows and slots, and the steering turns congestion and rates into advice; this machine connects both with the clients.
Its shell (`daemon.py`) has the sockets and the hints.

Rules:
- A client sends AgentHello first. A client that sends something else, or a malformed message, is disconnected.
- A refused request gets a response and is counted. The connection stays: a client over its quota may still deregister.
- A client that is refused more than MAX_REFUSALS times in a row is disconnected.
- Users see their own flows. The agent's user and root see all flows, and only they may fix shares.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from ringfold.agent.effects import (
    CloseConnection,
    Effect,
    ForwardTelemetry,
    OpenSlot,
    PublishAdvice,
    SendMessage,
    UnwatchPair,
    WatchPair,
    WithdrawAdvice,
)
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
from ringfold.agent.registry import Client, Pair, RegisteredFlow, Registry, RegistryChange, RequestRefusal
from ringfold.agent.steering import Advice, Forward, Steering
from ringfold.agent.tuning import AgentTuning
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    PAGE_FLOWS,
    AgentHello,
    AgentRefused,
    AgentStatus,
    AgentWelcome,
    AskAgent,
    Deregister,
    Deregistered,
    FlowList,
    ListedFlow,
    ListFlows,
    Measured,
    RefusalKind,
    Register,
    Registered,
    Renew,
    SetShares,
    SharesSet,
    ToAgent,
    UserUse,
)

MAX_REFUSALS = 10_000
_SHARE_SCALE = 65_535
"""The shares in a slot sum to this."""


@dataclass(eq=False, slots=True)
class _ClientState:
    """What the machine knows of a client. Privileged clients see all flows. `refusals` counts those in a row."""

    is_privileged: bool
    is_greeted: bool = False
    refusals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """The process of the agent and its table, for the status."""

    pid: int
    uid: int
    generation: int
    hints: str
    started_ns: int


class AgentMachine:
    """One host's agent without its sockets."""

    def __init__(
        self, me: AgentIdentity, registry: Registry, steering: Steering, tuning: AgentTuning | None = None
    ) -> None:
        self._me, self._registry, self._steering = me, registry, steering
        self._tuning = tuning or AgentTuning()
        self._clients: dict[Client, _ClientState] = {}
        self._advice: dict[int, Advice] = {}
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.telemetry: list[str] = []
        """The addresses at which the shell receives telemetry, for the status."""
        self.monitors: Callable[[], dict[str, str]] = dict
        """Returns the state of the shell's NIC monitors, for the status."""

    @property
    def has_flows(self) -> bool:
        return self._registry.flows > 0

    @property
    def is_urgent(self) -> bool:
        """Whether a Tick is due at once."""
        return self._steering.is_urgent

    def wake_ns(self) -> int | None:
        """When the next Tick is due; None: not before the next event."""
        return self._steering.wake_ns()

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Apply one event; return what the shell must now do, in order."""
        match event:
            case MessageReceived(client, message):
                return self._receive(now_ns, client, message) if client in self._clients else []
            case ConnectionOpened(client, uid, pid):
                return self._open(client, uid, pid)
            case MalformedMessageReceived(client, text):
                return self._drop(client, "invalid", text)
            case ConnectionClosed(client):
                return self._close(client)
            case DatagramReceived(unix_ns, content, address):
                return self._forward(unix_ns, self._steering.datagram(now_ns, unix_ns, content, address))
            case QueueObserved(unix_ns, observation):
                return self._forward(unix_ns, self._steering.observed(now_ns, unix_ns, observation))
            case NicQueuesRead(pressures):
                self._steering.local(now_ns, pressures)
                return []
            case Tick(only_urgent):
                return self._decide(now_ns, only_urgent=only_urgent)
            case _:
                assert_never(event)

    def _forward(self, unix_ns: int, forwards: Sequence[Forward]) -> list[Effect]:
        return [ForwardTelemetry(each.address, each.report, unix_ns - each.age_ns) for each in forwards]

    def check(self) -> None:
        """Check the invariants of the tables that clients share. Slow: for tests, and after an error."""
        self._registry.check()
        slots = {pair.slot for pair in self._registry.pairs}
        assert self._advice.keys() <= slots, "advice for a free slot"

    # Connections

    def _open(self, client: Client, uid: int, pid: int) -> list[Effect]:
        self.counts["connections"] += 1
        if (refusal := self._registry.open(client, uid, pid)) is not None:
            self.refused[refusal.kind] += 1
            return [
                SendMessage(client, AgentRefused(0, refusal.kind, refusal.text)),
                CloseConnection(client, refusal.text),
            ]
        self._clients[client] = _ClientState(uid in (0, self._me.uid))
        return []

    def _close(self, client: Client) -> list[Effect]:
        self._clients.pop(client, None)
        effects: list[Effect] = []
        for change in self._registry.close(client):
            effects += self._remove(change)
        return effects

    def _drop(self, client: Client, kind: RefusalKind, text: str) -> list[Effect]:
        if client not in self._clients:
            return []
        self.refused[kind] += 1
        effects = self._close(client)
        return [SendMessage(client, AgentRefused(0, kind, text)), *effects, CloseConnection(client, text)]

    # Requests

    def _receive(self, now_ns: int, client: Client, message: ToAgent) -> list[Effect]:
        state = self._clients[client]
        if not state.is_greeted:
            return self._hello(client, state, message)
        match message:
            case Register():
                return self._register(client, state, message)
            case Renew():
                return self._renew(client, state, message)
            case Deregister():
                return self._deregister(client, state, message)
            case Measured():
                return self._measured(now_ns, client, message)
            case ListFlows():
                return [SendMessage(client, self._list(client, state, message))]
            case AskAgent(request):
                return [SendMessage(client, self.status(now_ns, request))]
            case SetShares():
                return self._set_shares(now_ns, client, state, message)
            case AgentHello():
                return self._drop(client, "invalid", "a second hello")
            case _:
                assert_never(message)

    def _hello(self, client: Client, state: _ClientState, message: ToAgent) -> list[Effect]:
        if not isinstance(message, AgentHello):
            return self._drop(client, "invalid", "the first message is not a hello")
        if message.version != AGENT_PROTOCOL:
            text = f"this agent has protocol version {AGENT_PROTOCOL}, not {message.version}: install the same Ringfold"
            return self._drop(client, "version", text)
        state.is_greeted = True
        record = self._registry.record(client)
        assert record is not None
        record.name = "".join(letter for letter in message.name[:100] if letter.isprintable())
        welcome = AgentWelcome(AGENT_PROTOCOL, self._me.generation, self._tuning.requests_per_hint)
        return [SendMessage(client, welcome)]

    def _register(self, client: Client, state: _ClientState, message: Register) -> list[Effect]:
        change = self._registry.register(client, message.flow)
        if isinstance(change, RequestRefusal):
            return self._refuse(client, state, message.request, change)
        state.refusals = 0
        self.counts["registered"] += 1
        pair = change.entry.pair
        registered = Registered(message.request, message.flow.connection, pair.slot, pair.generation)
        effects: list[Effect] = []
        if change.pair_changed:
            # Before the response: a client that reads the slot at once must find its own generation.
            effects.append(OpenSlot(pair.slot, pair.generation))
            if (advice := self._steering.added(pair)) is not None:
                effects.append(self._publish(advice))
            effects.append(WatchPair(pair))
        effects.append(SendMessage(client, registered))
        return effects

    def _renew(self, client: Client, state: _ClientState, message: Renew) -> list[Effect]:
        place = self._registry.place(client, message.connection)
        if isinstance(place, RequestRefusal):
            return self._refuse(client, state, message.request, place)
        state.refusals = 0
        self.counts["renewed"] += 1
        return [SendMessage(client, Registered(message.request, message.connection, *place))]

    def _deregister(self, client: Client, state: _ClientState, message: Deregister) -> list[Effect]:
        change = self._registry.deregister(client, message.connection)
        if isinstance(change, RequestRefusal):
            return self._refuse(client, state, message.request, change)
        state.refusals = 0
        return [SendMessage(client, Deregistered(message.request, message.connection)), *self._remove(change)]

    def _remove(self, change: RegistryChange) -> list[Effect]:
        self.counts["removed"] += 1
        if not change.pair_changed:
            return []
        pair = change.entry.pair
        self._steering.removed(pair)
        self._advice.pop(pair.slot, None)
        return [WithdrawAdvice(pair.slot), UnwatchPair(pair)]

    def _refuse(self, client: Client, state: _ClientState, request: int, refusal: RequestRefusal) -> list[Effect]:
        state.refusals += 1
        if state.refusals > MAX_REFUSALS:
            return self._drop(client, refusal.kind, f"refused {MAX_REFUSALS} times in a row: {refusal.text}")
        self.refused[refusal.kind] += 1
        return [SendMessage(client, AgentRefused(request, refusal.kind, refusal.text))]

    def _measured(self, now_ns: int, client: Client, message: Measured) -> list[Effect]:
        record = self._registry.record(client)
        entry = record.flows.get(message.connection) if record is not None else None
        if entry is None or not _is_complete(message, len(entry.pair.paths)):
            self.refused["unknown" if entry is None else "invalid"] += 1
            return []
        self.counts["measured"] += 1
        self._steering.measured(now_ns, entry.pair, entry.number, message)
        return []

    # Advice

    def _set_shares(self, now_ns: int, client: Client, state: _ClientState, message: SetShares) -> list[Effect]:
        if not state.is_privileged:
            text = "only root and the agent's user fix shares"
            return self._refuse(client, state, message.request, RequestRefusal("forbidden", text))
        pairs = self._registry.between(message.source, message.destination)
        if not pairs:
            text = f"there is no flow from {message.source[:64]} to {message.destination[:64]}"
            return self._refuse(client, state, message.request, RequestRefusal("unknown", text))
        for pair in pairs:
            if message.shares and (why := invalid_shares(message.shares, len(pair.paths))):
                return self._refuse(client, state, message.request, RequestRefusal("invalid", why))
        effects: list[Effect] = []
        for pair in pairs:
            advice = self._steering.fix(pair, message.shares)
            effects.append(self._publish(advice) if advice is not None else self._withdraw(pair))
        return [*effects, *self._decide(now_ns), SendMessage(client, SharesSet(message.request, len(pairs)))]

    def _decide(self, now_ns: int, *, only_urgent: bool = False) -> list[Effect]:
        new = self._steering.decide_urgent(now_ns)
        if not only_urgent:
            new += self._steering.decide(now_ns)
        return [self._publish(advice) if advice.shares else self._withdraw(advice.pair) for advice in new]

    def _publish(self, advice: Advice) -> PublishAdvice:
        self._advice[advice.pair.slot] = advice
        self.counts["published"] += 1
        mask = sum(1 << path for path, held in enumerate(advice.backpressure) if held)
        return PublishAdvice(advice.pair.slot, quantise(advice.shares), mask, advice.is_fixed)

    def _withdraw(self, pair: Pair) -> WithdrawAdvice:
        self._advice.pop(pair.slot, None)
        return WithdrawAdvice(pair.slot)

    # Lists and status

    def _list(self, client: Client, state: _ClientState, message: ListFlows) -> FlowList:
        record = self._registry.record(client)
        assert record is not None
        seen = (
            (entry, owner)
            for entry in self._registry.entries(message.after)
            if (owner := self._registry.record(entry.client)) is not None
            if state.is_privileged or owner.uid == record.uid
        )
        listed = [self._listed(entry, owner.pid, owner.uid, owner.name) for entry, owner in islice(seen, PAGE_FLOWS)]
        return FlowList(message.request, listed, more=next(seen, None) is not None)

    def _listed(self, entry: RegisteredFlow, pid: int, uid: int, name: str) -> ListedFlow:
        pair, advice = entry.pair, self._advice.get(entry.pair.slot)
        plain = ListedFlow(entry.number, pid, uid, name, entry.flow, pair.slot, pair.generation)
        if (report := self._steering.last_report(pair.slot, entry.number)) is not None:
            plain = replace(plain, bytes_per_s=report.bytes_per_s, srtt_us=report.srtt_us, min_rtt_us=report.min_rtt_us)
        if advice is None:
            return plain
        shares, held = tuple(advice.shares), tuple(advice.backpressure)
        return replace(plain, shares=shares, backpressure=held, why=advice.why, is_fixed=advice.is_fixed)

    def status(self, now_ns: int, request: int = 0) -> AgentStatus:
        """What `ringfold agent status` and metrics show."""
        registry, me = self._registry, self._me
        return AgentStatus(
            request=request,
            pid=me.pid,
            uptime_ms=(now_ns - me.started_ns) // 1_000_000,
            generation=me.generation,
            policy=self._steering.name,
            clients=registry.clients,
            flows=registry.flows,
            slots_used=registry.pair_count,
            slots=registry.slots,
            hints=me.hints,
            users=[UserUse(*each) for each in registry.users()],
            counts=dict(sorted((self.counts + self._steering.counts).items())),
            refused=dict(sorted((self.refused + self._steering.refused).items())),
            telemetry=tuple(self.telemetry),
            monitors=self.monitors(),
            tuning=self._tuning.shown(),
        )


def _is_complete(report: Measured, paths: int) -> bool:
    """Whether it has a rate for each path, and RTTs for each path or for none."""
    return len(report.bytes_per_s) == paths and {len(report.srtt_us), len(report.min_rtt_us)} in ({0}, {paths})


def invalid_shares(shares: tuple[float, ...], paths: int) -> str:
    """Why these shares cannot be set for so many paths; empty if they can."""
    if len(shares) != paths:
        return f"the flow has {paths} paths, and {len(shares)} shares were given"
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        return "shares lie between 0 and 1, and sum to 1"
    return ""


def quantise(shares: Sequence[float]) -> list[int]:
    """Shares of 1 as integers that sum to 65535: the largest remainders are rounded up, 0 stays 0."""
    scaled = [share * _SHARE_SCALE for share in shares]
    whole = [int(each) for each in scaled]
    order = sorted(range(len(whole)), key=lambda path: (whole[path] - scaled[path], path))
    for path in order[: max(0, _SHARE_SCALE - sum(whole))]:
        whole[path] += 1
    # The rounding error of floating point goes to the largest.
    whole[max(range(len(whole)), key=lambda path: (whole[path], -path))] += _SHARE_SCALE - sum(whole)
    return whole
