"""The agent's decisions about its clients, and a client's about its agent."""

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.agent.client import MAX_RECONNECT_DELAY_S, FlowRegistrations, reconnect_delay_s
from ringfold.agent.effects import (
    CloseConnection,
    Effect,
    OpenSlot,
    PublishAdvice,
    SendMessage,
    WatchPair,
    WithdrawAdvice,
)
from ringfold.agent.events import ConnectionClosed, ConnectionOpened, Event, MalformedMessageReceived, MessageReceived
from ringfold.agent.machine import MAX_REFUSALS, AgentIdentity, AgentMachine, quantise
from ringfold.agent.policy import Decision
from ringfold.agent.registry import Quota, Registry, invalid_flow
from ringfold.agent.steering import Steering, parse_policy
from ringfold.cli.agent import _flow_row
from ringfold.errors import ConfigError
from ringfold.limits import MAX_PATHS
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    MAX_ANSWER_BYTES,
    PAGE_FLOWS,
    AgentHello,
    AgentRefused,
    AgentStatus,
    AgentWelcome,
    AskAgent,
    Deregister,
    Deregistered,
    Flow,
    FlowList,
    FromAgent,
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
    agent_frame,
)

PATHS = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))
AGENT_UID = 500
E = TypeVar("E")


def flow(connection: int, destination: int = 2) -> Flow:
    return Flow(connection, "10.0.0.1", f"10.0.0.{destination}", PATHS)


class Host:
    """An agent, and the effects of what was said to it."""

    def __init__(self, policy: str = "auto", slots: int = 8, quota: Quota | None = None) -> None:
        me = AgentIdentity(pid=1, uid=AGENT_UID, generation=3, hints="/x/hints", started_ns=0)
        self.machine = AgentMachine(me, Registry([0] * slots, quota), Steering(parse_policy(policy)))

    def open(self, client: int, uid: int = 1000) -> "Host":
        self.machine.step(0, ConnectionOpened(client, uid, 40 + client))
        self.say(client, AgentHello(AGENT_PROTOCOL, f"job {client}"))
        return self

    def say(self, client: int, message: ToAgent) -> list[Effect]:
        return self.machine.step(1_000_000, MessageReceived(client, message))

    def answer(self, client: int, message: ToAgent, kind: type[E]) -> E:
        answers = [each.message for each in self.say(client, message) if isinstance(each, SendMessage)]
        assert len(answers) == 1
        assert isinstance(answers[0], kind), answers[0]
        return answers[0]


def test_hello_is_answered_with_the_agents_life() -> None:
    host = Host()
    host.machine.step(0, ConnectionOpened(1, 1000, 41))
    assert host.answer(1, AgentHello(AGENT_PROTOCOL, "job"), AgentWelcome).generation == 3


@pytest.mark.parametrize("first", [AskAgent(1), Register(1, flow(1)), AgentHello(99, "job")])
def test_who_does_not_begin_with_a_right_hello_is_dropped(first: ToAgent) -> None:
    host = Host()
    host.machine.step(0, ConnectionOpened(1, 1000, 41))
    effects = host.say(1, first)
    assert isinstance(effects[-1], CloseConnection)
    assert host.say(1, AgentHello(AGENT_PROTOCOL, "job")) == []


def test_the_slot_is_opened_before_the_flow_is_told_of_it() -> None:
    effects = Host("static:0.25").open(1).say(1, Register(7, flow(1)))
    assert [type(effect) for effect in effects] == [OpenSlot, PublishAdvice, WatchPair, SendMessage]
    assert effects[-1] == SendMessage(1, Registered(7, 1, 0, 1))
    assert effects[1] == PublishAdvice(0, [49151, 16384], 0, is_fixed=True)


def test_the_end_of_a_client_withdraws_its_hints() -> None:
    host = Host().open(1)
    host.say(1, Register(1, flow(1)))
    assert WithdrawAdvice(0) in host.machine.step(2, ConnectionClosed(1))
    assert not host.machine.has_flows


def test_a_flow_that_others_still_have_keeps_its_hints() -> None:
    host = Host().open(1).open(2)
    for client in (1, 2):
        host.say(client, Register(1, flow(1)))
    assert WithdrawAdvice(0) not in host.say(1, Deregister(2, 1))
    assert WithdrawAdvice(0) in host.say(2, Deregister(2, 1))


def test_a_refused_request_names_its_number_and_keeps_the_connection() -> None:
    host = Host(quota=Quota(flows=1)).open(1)
    host.say(1, Register(1, flow(1)))
    refusal = host.answer(1, Register(2, flow(2)), AgentRefused)
    assert (refusal.request, refusal.kind) == (2, "quota")
    assert host.answer(1, Deregister(3, 1), Deregistered).connection == 1


def test_a_renewal_is_answered_with_the_place_and_changes_nothing() -> None:
    host = Host().open(1).open(2)
    registered = host.answer(1, Register(7, flow(1)), Registered)
    renewed = host.answer(1, Renew(8, 1), Registered)
    assert (renewed.slot, renewed.generation) == (registered.slot, registered.generation)
    assert host.machine.counts["renewed"] == 1
    assert host.answer(2, Renew(1, 1), AgentRefused).kind == "unknown"  # the flow of another client
    host.machine.check()


def test_a_client_that_never_stops_registering_is_dropped_in_the_end() -> None:
    host = Host(quota=Quota(flows=1)).open(1).open(2, uid=2000)
    dropped = [
        number
        for number in range(MAX_REFUSALS + 10)
        if any(isinstance(e, CloseConnection) for e in host.say(1, Register(1, flow(number))))
    ]
    assert len(dropped) == 1
    assert host.answer(2, Register(1, flow(1)), Registered).slot >= 0
    assert host.answer(2, AskAgent(1), AgentStatus).refused["quota"] > MAX_REFUSALS


def test_garbage_drops_who_sent_it_and_frees_what_he_had() -> None:
    host = Host().open(1)
    host.say(1, Register(1, flow(1)))
    effects = host.machine.step(2, MalformedMessageReceived(1, "not msgpack"))
    assert WithdrawAdvice(0) in effects
    assert isinstance(effects[-1], CloseConnection)
    assert host.machine.step(2, MalformedMessageReceived(1, "again")) == []


def test_users_see_their_own_flows_and_the_agents_user_sees_all() -> None:
    host = Host().open(1, uid=1000).open(2, uid=2000).open(3, uid=AGENT_UID).open(4, uid=0)
    host.say(1, Register(1, flow(1)))
    host.say(2, Register(1, flow(1)))
    seen = [len(host.answer(client, ListFlows(1), FlowList).flows) for client in (1, 2, 3, 4)]
    assert seen == [1, 1, 2, 2]


def test_a_long_list_comes_in_pages() -> None:
    host = Host().open(1)
    for number in range(2_500):
        host.say(1, Register(number, flow(number)))
    numbers: list[int] = []
    more = True
    while more:
        page = host.answer(1, ListFlows(1, numbers[-1] if numbers else 0), FlowList)
        numbers += [listed.number for listed in page.flows]
        more = page.more
    assert numbers == list(range(1, 2_501))


def test_the_longest_page_of_the_longest_flows_fits_an_answer() -> None:
    """Else a user whose names are long could keep root from looking at the agent."""
    name, address = "\U00010348" * 255, "fe80:1111:1111:1111:1111:1111:1111:1111%interface-name0"
    flow = Flow(2**63 - 1, address, address, ((address, address),) * MAX_PATHS, name, name)
    assert invalid_flow(flow) == ""
    why = Decision(0, (1.0,) * 16, (True,) * 16, (255.0,) * 16, (1e19,) * 16, 2.0).why
    each = ListedFlow(2**63, 2**31, 2**31, name[:100], flow, 4_095, 2**20, (1 / 3,) * 16, (True,) * 16, why)
    assert len(agent_frame(FlowList(1, [each] * PAGE_FLOWS, True))) < MAX_ANSWER_BYTES


def test_only_root_and_the_agents_user_fix_shares() -> None:
    host = Host().open(1).open(2, uid=0)
    host.say(1, Register(1, flow(1)))
    wish = SetShares(1, "10.0.0.1", "10.0.0.2", (0.0, 1.0))
    assert host.answer(1, wish, AgentRefused).kind == "forbidden"
    assert PublishAdvice(0, [0, 65535], 0, is_fixed=True) in host.say(2, wish)
    assert host.answer(2, wish, SharesSet).slots == 1


def test_shares_handed_back_leave_no_advice_behind() -> None:
    host = Host().open(1, uid=0)
    host.say(1, Register(1, flow(1)))
    host.say(1, SetShares(1, "10.0.0.1", "10.0.0.2", (0.0, 1.0)))
    assert WithdrawAdvice(0) in host.say(1, SetShares(1, "10.0.0.1", "10.0.0.2"))


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.4), (-0.5, 1.5), (0.2, 0.3, 0.5)])
def test_shares_that_make_no_sense_are_refused(shares: tuple[float, ...]) -> None:
    host = Host().open(1, uid=0)
    host.say(1, Register(1, flow(1)))
    assert host.answer(1, SetShares(1, "10.0.0.1", "10.0.0.2", shares), AgentRefused).kind == "invalid"


def test_measurements_of_a_flow_that_is_not_there_are_counted_and_harmless() -> None:
    host = Host().open(1)
    assert host.say(1, Measured(9, (1, 2))) == []
    host.say(1, Register(1, flow(1)))
    assert host.say(1, Measured(1, (1, 2, 3))) == []
    assert host.say(1, Measured(1, (1, 2), (5, 6), (1,))) == []
    assert host.say(1, Measured(1, (1, 2), (5, 6))) == []
    assert host.answer(1, AskAgent(1), AgentStatus).refused == {"invalid": 3, "unknown": 1}


def test_a_listed_flow_shows_what_its_sender_measured_last() -> None:
    host = Host().open(1)
    for number in (1, 2):
        host.say(1, Register(number, flow(number)))
    host.say(1, Measured(1, (20_000_000, 0), (9_000, 700), (600, 500)))
    measured, silent = host.answer(1, ListFlows(1), FlowList).flows
    assert (measured.bytes_per_s, measured.srtt_us, measured.min_rtt_us) == ((20_000_000, 0), (9_000, 700), (600, 500))
    assert (silent.bytes_per_s, silent.srtt_us) == ((), ())
    assert _flow_row(measured)[-1] == "RTT 9.0 : 0.7 ms, minimum 0.6 : 0.5"
    assert _flow_row(silent)[-1] == ""


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16).filter(lambda shares: sum(shares) > 1e-6))
def test_quantised_shares_sum_to_the_whole_and_zero_stays_zero(shares: list[float]) -> None:
    total = sum(shares)
    exact = [share / total for share in shares]
    whole = quantise(exact)
    assert sum(whole) == 65_535
    assert all(abs(number - share * 65_535) <= 2 for number, share in zip(whole, exact, strict=True))
    assert all(number == 0 for number, share in zip(whole, exact, strict=True) if share == 0)


@pytest.mark.parametrize(
    ("text", "shares"), [("auto", None), ("static:0.8", (0.2, 0.8)), ("static:0.5,0.25,0.25", (0.5, 0.25, 0.25))]
)
def test_a_policy_is_written_as(text: str, shares: tuple[float, ...] | None) -> None:
    assert parse_policy(text) == (pytest.approx(shares) if shares else None)


@pytest.mark.parametrize("text", ["", "fast", "static", "static:", "static:2", "static:0.5,0.4", "static:x"])
def test_another_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_policy(text)


# The client's side


def test_an_agent_is_looked_for_ever_more_seldom_and_never_less_than_every_half_minute() -> None:
    at_s, looks = 0.0, []
    while at_s < 600:
        at_s += reconnect_delay_s(at_s)
        looks.append(at_s)
    assert sum(at_s <= 2 for at_s in looks) >= 10
    assert sum(at_s <= 240 for at_s in looks) <= 75
    assert looks[-1] - looks[-2] == MAX_RECONNECT_DELAY_S


def test_a_client_asks_for_everything_again_when_the_agent_comes_back() -> None:
    client = FlowRegistrations("job")
    assert client.add(flow(1)) == []
    assert [type(message) for message in client.connected()] == [AgentHello, Register]
    assert client.receive(Registered(1, 1, 5, 9)) == [1]
    assert client.flows[1].place == (5, 9)
    assert client.disconnected() == [1]
    assert client.flows[1].place is None
    again = client.connected()[1]
    assert isinstance(again, Register)
    client.receive(Registered(again.request, 1, 6, 2))
    assert client.flows[1].place == (6, 2)


def test_an_answer_for_a_flow_that_has_ended_gives_no_place() -> None:
    client = FlowRegistrations("job")
    client.connected()
    request = client.add(flow(1))[0]
    assert isinstance(request, Register)
    assert isinstance(client.remove(1)[0], Deregister)
    assert client.receive(Registered(request.request, 1, 5, 9)) == []


def test_an_answer_of_an_earlier_connection_gives_no_place() -> None:
    client = FlowRegistrations("job")
    client.connected()
    request = client.add(flow(1))[0]
    assert isinstance(request, Register)
    client.disconnected()
    client.connected()
    assert client.receive(Registered(request.request, 1, 5, 9)) == []


def test_a_flow_that_no_agent_would_take_is_never_asked_for() -> None:
    """One that is too long for a frame would cost the connection, and with it all other flows."""
    enrolment = FlowRegistrations("job")
    enrolment.add(Flow(1, "10.0.0.1", "10.0.0.2", PATHS))
    enrolment.add(Flow(2, "10.0.0.1", "10.0.0.2", PATHS, "x" * 100_000))
    asked = [each.flow.connection for each in enrolment.connected() if isinstance(each, Register)]
    assert (asked, enrolment.remove(2)) == ([1], [])


def test_a_refused_flow_knows_why() -> None:
    client = FlowRegistrations("job")
    client.connected()
    request = client.add(flow(1))[0]
    assert isinstance(request, Register)
    client.receive(AgentRefused(request.request, "full", "all slots are taken"))
    assert (client.flows[1].place, client.flows[1].refused) == (None, "all slots are taken")


def test_a_flow_that_there_was_no_room_for_is_asked_for_again_and_a_bad_one_is_not() -> None:
    client = FlowRegistrations("job")
    client.connected()
    requests = [*client.add(flow(1)), *client.add(flow(2))]
    kinds: tuple[RefusalKind, ...] = ("full", "invalid")
    for request, kind in zip(requests, kinds, strict=True):
        assert isinstance(request, Register)
        client.receive(AgentRefused(request.request, kind, "no"))
    assert client.has_retries
    (again,) = client.retry()
    assert isinstance(again, Register)
    assert again.flow.connection == 1
    assert client.retry() == []
    client.receive(Registered(again.request, 1, 5, 9))
    assert (client.flows[1].place, client.has_retries) == ((5, 9), False)


# Both sides together


class World:
    """An agent that may be restarted, and clients whose connections may break with anything under way on them."""

    def __init__(self, clients: int) -> None:
        self.clients = [FlowRegistrations(f"job {number}") for number in range(clients)]
        self.links: list[int | None] = [None] * clients
        self.wires: dict[int, tuple[list[ToAgent], list[FromAgent]]] = {}
        self.generations, self.lives, self.last_link = [0] * 4, 0, 0
        self.owners: dict[tuple[int, int], object] = {}
        self.restart()

    def restart(self) -> None:
        for client in range(len(self.clients)):
            self.cut(client)
        self.lives += 1
        self.registry = Registry(self.generations, Quota(flows=6, slots=3))
        me = AgentIdentity(pid=1, uid=AGENT_UID, generation=self.lives, hints="", started_ns=0)
        self.machine = AgentMachine(me, self.registry, Steering())

    def do(self, event: Event) -> None:
        for effect in self.machine.step(0, event):
            match effect:
                case SendMessage(link, message) if link in self.wires:
                    self.wires[link][1].append(message)
                case OpenSlot(slot, generation):
                    self.generations[slot] = generation
                    assert self.owners.setdefault((slot, generation), effect) is effect
                case _:
                    pass
        self.registry.check()

    def connect(self, client: int) -> None:
        if self.links[client] is None:
            self.last_link += 1
            self.links[client] = self.last_link
            self.wires[self.last_link] = (self.clients[client].connected(), [])
            self.do(ConnectionOpened(self.last_link, 1000, client))

    def cut(self, client: int) -> None:
        if (link := self.links[client]) is not None:
            self.links[client] = None
            del self.wires[link]
            self.clients[client].disconnected()
            self.do(ConnectionClosed(link))

    def send(self, client: int, messages: list[ToAgent]) -> None:
        if (link := self.links[client]) is not None:
            self.wires[link][0].extend(messages)

    def carry(self, client: int, most: int = 1) -> None:
        """A few messages each way."""
        if (link := self.links[client]) is None:
            return
        up, down = self.wires[link]
        for _ in range(min(most, len(up))):
            self.do(MessageReceived(link, up.pop(0)))
        for _ in range(min(most, len(down))):
            self.clients[client].receive(down.pop(0))


STEPS = ["connect", "cut", "want", "want", "drop", "carry", "carry", "carry", "restart"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.integers(0, 4)), max_size=80))
def test_clients_and_agent_agree_in_the_end_whatever_broke(script: list[tuple[str, int, int]]) -> None:
    """Each flow ends with the place that the registry has for it, or with a refusal; and no place had two owners."""
    world = World(3)
    for last, (step, client, number) in enumerate(script):
        match step:
            case "connect":
                world.connect(client)
            case "cut":
                world.cut(client)
            case "want":
                world.send(client, world.clients[client].add(flow(last, destination=number)))
            case "drop":
                first = next(iter(world.clients[client].flows), -1)
                world.send(client, world.clients[client].remove(first))
            case "carry":
                world.carry(client)
            case _:
                world.restart()
    for client in range(3):
        world.connect(client)
    for client in range(3):
        world.carry(client, most=1_000)
    kept = {(entry.client, entry.flow.connection): entry.pair.place for entry in world.registry.entries()}
    for client, enrolment in enumerate(world.clients):
        link = world.links[client]
        assert link is not None
        for connection, wish in enrolment.flows.items():
            assert wish.place == kept.pop((link, connection), None)
            assert (wish.place is None) == (wish.refused != "")
    assert not kept
