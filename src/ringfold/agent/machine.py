"""The agent's decisions about its clients: who may do what, which slot a flow gets, what is answered. Pure.

`step(event) -> effects`. The registry knows flows and slots, the steering knows congestion and rates and gives advice;
this machine ties them to connections. Its shell (`daemon.py`) has the sockets and the hints.

Rules:
- A client says AgentHello first. Whoever sends something else, or garbage, is dropped; that harms nobody but himself.
- A refused request is answered and counted, and the connection stays: a client over its quota may still deregister.
- A client that goes on asking after MOST_REFUSED refusals in a row does not listen, and is dropped.
- Users see their own flows. The agent's user and root see all, and only they fix shares.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from ringfold.agent.adapters import Observation
from ringfold.agent.registry import Change, Client, Entry, Pair, Refusal, Registry
from ringfold.agent.steering import Advice, Steering
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
    FromAgent,
    ListedFlow,
    ListFlows,
    Measured,
    RefusalKind,
    Register,
    Registered,
    SetShares,
    SharesSet,
    ToAgent,
    UserUse,
)
from ringfold.wire.telemetry import Refusal as BadFeed

MOST_REFUSED = 10_000
_ALL = 65_535


@dataclass(frozen=True, slots=True)
class ClientOpened:
    """Somebody connected; the kernel says who."""

    client: Client
    uid: int
    pid: int


@dataclass(frozen=True, slots=True)
class ClientSaid:
    client: Client
    message: ToAgent


@dataclass(frozen=True, slots=True)
class ClientMalformed:
    """What a client sent is not of this protocol."""

    client: Client
    text: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    client: Client


@dataclass(frozen=True, slots=True)
class Datagram:
    """Something came to the port for telemetry; `unix_ns` is the wall clock."""

    unix_ns: int
    content: bytes
    address: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What another feed than packets said about a queue; or why it was not understood."""

    unix_ns: int
    what: Observation | BadFeed


@dataclass(frozen=True, slots=True)
class Queues:
    """How full the own interfaces' queues are, 0 to 255, by the number of each local address."""

    pressures: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Decide:
    """It is time to look at congestion and rates again; or only at what is urgent."""

    only_urgent: bool = False


Event = ClientOpened | ClientSaid | ClientMalformed | ClientGone | Datagram | Observed | Queues | Decide


@dataclass(frozen=True, slots=True)
class Answer:
    client: Client
    message: FromAgent


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a connection, after what was answered. Its flows are gone already."""

    client: Client
    why: str


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """The slot has a new owner, and no advice yet."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Publish:
    """New advice: shares of 65535, and a bit for each path under backpressure."""

    slot: int
    shares: list[int]
    backpressure: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """No advice in this slot any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class PairCame:
    """The first flow of a pair: its interfaces are to be watched, and the switches told."""

    pair: Pair


@dataclass(frozen=True, slots=True)
class PairWent:
    """Its last flow has ended."""

    pair: Pair


Effect = Answer | Drop | OpenSlot | Publish | Withdraw | PairCame | PairWent


@dataclass(eq=False, slots=True)
class _Caller:
    """A connection: whether it may look at everything, has said hello, and how often it was refused in a row."""

    is_privileged: bool
    has_said_hello: bool = False
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Self:
    """What the agent knows of itself and its shell told it."""

    pid: int
    uid: int
    generation: int
    hints: str
    started_ns: int


class AgentMachine:
    """One host's agent without its sockets."""

    def __init__(self, me: Self, registry: Registry, steering: Steering) -> None:
        self._me, self._registry, self._steering = me, registry, steering
        self._callers: dict[Client, _Caller] = {}
        self._advice: dict[int, Advice] = {}
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.telemetry: list[str] = []
        """Where the shell takes telemetry, for the status."""
        self.monitors: Callable[[], dict[str, str]] = dict
        """How the shell's NIC monitors stand, for the status."""

    @property
    def has_flows(self) -> bool:
        return self._registry.flows > 0

    @property
    def is_urgent(self) -> bool:
        """Whether to Decide at once."""
        return self._steering.is_urgent

    def wake_ns(self) -> int | None:
        """When it is time to Decide; None: not before something happens."""
        return self._steering.wake_ns()

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Apply one event; return what the shell must now do, in order."""
        match event:
            case ClientSaid(client, message):
                return self._said(now_ns, client, message) if client in self._callers else []
            case ClientOpened(client, uid, pid):
                return self._opened(client, uid, pid)
            case ClientMalformed(client, text):
                return self._drop(client, "invalid", text)
            case ClientGone(client):
                return self._gone(client)
            case Datagram(unix_ns, content, address):
                self._steering.datagram(now_ns, unix_ns, content, address)
                return []
            case Observed(unix_ns, what):
                self._steering.observed(now_ns, unix_ns, what)
                return []
            case Queues(pressures):
                self._steering.local(now_ns, pressures)
                return []
            case Decide(only_urgent):
                return self._decide(now_ns, only_urgent=only_urgent)
            case _:
                assert_never(event)

    def check(self) -> None:
        """The invariants of the tables that clients share. It looks at everything: for tests, and after a fault."""
        self._registry.check()
        slots = {pair.slot for pair in self._registry.pairs}
        assert self._advice.keys() <= slots, "advice for a slot that nobody has"

    # Connections

    def _opened(self, client: Client, uid: int, pid: int) -> list[Effect]:
        self.counts["connections"] += 1
        if (refusal := self._registry.open(client, uid, pid)) is not None:
            self.refused[refusal.kind] += 1
            return [Answer(client, AgentRefused(0, refusal.kind, refusal.text)), Drop(client, refusal.text)]
        self._callers[client] = _Caller(uid in (0, self._me.uid))
        return []

    def _gone(self, client: Client) -> list[Effect]:
        self._callers.pop(client, None)
        effects: list[Effect] = []
        for change in self._registry.close(client):
            effects += self._removed(change)
        return effects

    def _drop(self, client: Client, kind: RefusalKind, text: str) -> list[Effect]:
        if client not in self._callers:
            return []
        self.refused[kind] += 1
        effects = self._gone(client)
        return [Answer(client, AgentRefused(0, kind, text)), *effects, Drop(client, text)]

    # Requests

    def _said(self, now_ns: int, client: Client, message: ToAgent) -> list[Effect]:
        caller = self._callers[client]
        if not caller.has_said_hello:
            return self._hello(client, caller, message)
        match message:
            case Register():
                return self._register(client, caller, message)
            case Deregister():
                return self._deregister(client, caller, message)
            case Measured():
                return self._measured(now_ns, client, message)
            case ListFlows():
                return [Answer(client, self._list(client, caller, message))]
            case AskAgent(request):
                return [Answer(client, self._status(now_ns, request))]
            case SetShares():
                return self._set(now_ns, client, caller, message)
            case AgentHello():
                return self._drop(client, "invalid", "a second hello")
            case _:
                assert_never(message)

    def _hello(self, client: Client, caller: _Caller, message: ToAgent) -> list[Effect]:
        if not isinstance(message, AgentHello):
            return self._drop(client, "invalid", "the first message is not a hello")
        if message.version != AGENT_PROTOCOL:
            text = f"this agent speaks version {AGENT_PROTOCOL}, not {message.version}: install the same Ringfold"
            return self._drop(client, "version", text)
        caller.has_said_hello = True
        tenant = self._registry.tenant(client)
        assert tenant is not None
        tenant.name = "".join(letter for letter in message.name[:100] if letter.isprintable())
        return [Answer(client, AgentWelcome(AGENT_PROTOCOL, self._me.generation))]

    def _register(self, client: Client, caller: _Caller, message: Register) -> list[Effect]:
        change = self._registry.register(client, message.flow)
        if isinstance(change, Refusal):
            return self._refuse(client, caller, message.request, change)
        caller.refused = 0
        self.counts["registered"] += 1
        pair = change.entry.pair
        registered = Registered(message.request, message.flow.connection, pair.slot, pair.generation)
        effects: list[Effect] = []
        if change.pair_changed:
            # Before the answer: who reads at once finds its own generation.
            effects.append(OpenSlot(pair.slot, pair.generation))
            if (advice := self._steering.added(pair)) is not None:
                effects.append(self._publish(advice))
            effects.append(PairCame(pair))
        effects.append(Answer(client, registered))
        return effects

    def _deregister(self, client: Client, caller: _Caller, message: Deregister) -> list[Effect]:
        change = self._registry.deregister(client, message.connection)
        if isinstance(change, Refusal):
            return self._refuse(client, caller, message.request, change)
        caller.refused = 0
        return [Answer(client, Deregistered(message.request, message.connection)), *self._removed(change)]

    def _removed(self, change: Change) -> list[Effect]:
        self.counts["removed"] += 1
        if not change.pair_changed:
            return []
        pair = change.entry.pair
        self._steering.removed(pair)
        self._advice.pop(pair.slot, None)
        return [Withdraw(pair.slot), PairWent(pair)]

    def _refuse(self, client: Client, caller: _Caller, request: int, refusal: Refusal) -> list[Effect]:
        caller.refused += 1
        if caller.refused > MOST_REFUSED:
            return self._drop(client, refusal.kind, f"refused {MOST_REFUSED} times in a row: {refusal.text}")
        self.refused[refusal.kind] += 1
        return [Answer(client, AgentRefused(request, refusal.kind, refusal.text))]

    def _measured(self, now_ns: int, client: Client, message: Measured) -> list[Effect]:
        tenant = self._registry.tenant(client)
        entry = tenant.flows.get(message.connection) if tenant is not None else None
        if entry is None or not _is_whole(message, len(entry.pair.paths)):
            self.refused["unknown" if entry is None else "invalid"] += 1
            return []
        self.counts["measured"] += 1
        self._steering.measured(now_ns, entry.pair, entry.number, message)
        return []

    # Advice

    def _set(self, now_ns: int, client: Client, caller: _Caller, message: SetShares) -> list[Effect]:
        if not caller.is_privileged:
            text = "only root and the agent's user fix shares"
            return self._refuse(client, caller, message.request, Refusal("forbidden", text))
        pairs = self._registry.between(message.source, message.destination)
        if not pairs:
            text = f"there is no flow from {message.source[:64]} to {message.destination[:64]}"
            return self._refuse(client, caller, message.request, Refusal("unknown", text))
        for pair in pairs:
            if message.shares and (why := share_fault(message.shares, len(pair.paths))):
                return self._refuse(client, caller, message.request, Refusal("invalid", why))
        effects: list[Effect] = []
        for pair in pairs:
            advice = self._steering.fix(pair, message.shares)
            effects.append(self._publish(advice) if advice is not None else self._silence(pair))
        return [*effects, *self._decide(now_ns), Answer(client, SharesSet(message.request, len(pairs)))]

    def _decide(self, now_ns: int, *, only_urgent: bool = False) -> list[Effect]:
        new = self._steering.decide_urgent(now_ns)
        if not only_urgent:
            new += self._steering.decide(now_ns)
        return [self._publish(advice) if advice.shares else self._silence(advice.pair) for advice in new]

    def _publish(self, advice: Advice) -> Publish:
        self._advice[advice.pair.slot] = advice
        self.counts["published"] += 1
        mask = sum(1 << path for path, held in enumerate(advice.backpressure) if held)
        return Publish(advice.pair.slot, quantise(advice.shares), mask)

    def _silence(self, pair: Pair) -> Withdraw:
        self._advice.pop(pair.slot, None)
        return Withdraw(pair.slot)

    # Looking

    def _list(self, client: Client, caller: _Caller, message: ListFlows) -> FlowList:
        tenant = self._registry.tenant(client)
        assert tenant is not None
        seen = (
            (entry, owner)
            for entry in self._registry.entries(message.after)
            if (owner := self._registry.tenant(entry.client)) is not None
            if caller.is_privileged or owner.uid == tenant.uid
        )
        listed = [self._listed(entry, owner.pid, owner.uid, owner.name) for entry, owner in islice(seen, PAGE_FLOWS)]
        return FlowList(message.request, listed, more=next(seen, None) is not None)

    def _listed(self, entry: Entry, pid: int, uid: int, name: str) -> ListedFlow:
        pair, advice = entry.pair, self._advice.get(entry.pair.slot)
        plain = ListedFlow(entry.number, pid, uid, name, entry.flow, pair.slot, pair.generation)
        if (said := self._steering.last_report(pair.slot, entry.number)) is not None:
            plain = replace(plain, bytes_per_s=said.bytes_per_s, srtt_us=said.srtt_us, min_rtt_us=said.min_rtt_us)
        if advice is None:
            return plain
        shares, held = tuple(advice.shares), tuple(advice.backpressure)
        return replace(plain, shares=shares, backpressure=held, why=advice.why)

    def _status(self, now_ns: int, request: int) -> AgentStatus:
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
        )


def _is_whole(report: Measured, paths: int) -> bool:
    """Whether it has a rate for each path, and round trips for each or for none."""
    return len(report.bytes_per_s) == paths and {len(report.srtt_us), len(report.min_rtt_us)} in ({0}, {paths})


def share_fault(shares: tuple[float, ...], paths: int) -> str:
    """What is wrong with shares that somebody wants for so many paths; empty if nothing is."""
    if len(shares) != paths:
        return f"the flow has {paths} paths, and {len(shares)} shares were given"
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        return "shares lie between 0 and 1, and sum to 1"
    return ""


def quantise(shares: Sequence[float]) -> list[int]:
    """Shares of 1 as shares of 65535 that sum to it exactly: the largest remainders are rounded up, 0 stays 0."""
    scaled = [share * _ALL for share in shares]
    whole = [int(each) for each in scaled]
    order = sorted(range(len(whole)), key=lambda path: (whole[path] - scaled[path], path))
    for path in order[: max(0, _ALL - sum(whole))]:
        whole[path] += 1
    # What floating point left over or took too much goes to the largest.
    whole[max(range(len(whole)), key=lambda path: (whole[path], -path))] += _ALL - sum(whole)
    return whole
