"""The master against nodes that lie, are broken, or leave at the wrong moment: nothing they do ends it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ringfold.master.effects import CloseConnection, Effect, Notify, SendMessage
from ringfold.master.events import ConnectionClosed, ConnectionOpened, Event, MessageReceived, Tick
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.probe.logs.lines import decode, encode, round_line
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire.frames import decode_to_master, message_frame
from ringfold.wire.frames import encode as encode_message
from ringfold.wire.messages import PROTOCOL_VERSION, FromMaster, Hello, ToMaster
from ringfold.wire.notices import RoundDone
from ringfold.wire.probing import (
    EdgeFit,
    NodeHello,
    NodeWelcome,
    ProbeAnswer,
    ProbeCommand,
    ProbeGraph,
    RoundEnd,
    RoundId,
    RoundReport,
    RoundSummary,
)
from ringfold.wire.proof import prove

MS = 1_000_000
NONCE = b"n" * 32
UNIX = 1_700_000_000 * 1_000 * MS


class Stage:
    """A master with nodes that only probe. What it says and writes down is encoded, as its server would."""

    def __init__(self, nodes: int = 3, **rounds: object) -> None:
        self.now = 1_000 * MS
        self.master = Master(MasterSettings(rounds=RoundSettings(combine_after_ms=0, **rounds)), b"token", b"secret")  # type: ignore[arg-type]
        self.effects: list[Effect] = []
        self.nodes: dict[int, int] = {}
        for conn in range(1, nodes + 1):
            self.come(conn)

    def step(self, event: Event) -> list[Effect]:
        effects = [*self.master.step(self.now, event), *self.master.step(self.now, Tick())]
        for effect in effects:
            if isinstance(effect, SendMessage):
                message_frame(effect.message)
            if isinstance(effect, Notify) and isinstance(effect.notice, RoundDone):
                decode(encode(round_line(effect.notice.summary)))
        self.effects += effects
        return effects

    def say(self, conn: int, message: ToMaster) -> list[FromMaster]:
        body = encode_message(message)
        effects = self.step(MessageReceived(conn, decode_to_master(body), len(body)))
        return [effect.message for effect in effects if isinstance(effect, SendMessage) and effect.conn == conn]

    def come(self, conn: int, **changed: object) -> None:
        self.step(ConnectionOpened(conn, "host", bytes([conn]) * 32))
        proof = prove(b"token", "node", bytes([conn]) * 32, NONCE)
        node = (PROTOCOL_VERSION, "host", f"n{conn}", ["127.0.0.1"], 50_000 + conn, False, RoundId(), NONCE, proof)
        for said in self.say(conn, structs.replace(NodeHello(*node), **changed)):
            if isinstance(said, NodeWelcome):
                self.nodes[conn] = said.node

    def leave(self, conn: int) -> None:
        self.step(ConnectionClosed(conn, "killed"))
        del self.nodes[conn]

    def ask(self, conn: int, action: str, label: str = "") -> list[ProbeAnswer]:
        proof = prove(b"token", "probe", bytes([conn]) * 32, NONCE)
        said = self.say(conn, ProbeCommand(PROTOCOL_VERSION, action, label, NONCE, proof))  # type: ignore[arg-type]
        return [answer for answer in said if isinstance(answer, ProbeAnswer)]

    def end_window(self) -> RoundEnd:
        """Let time pass until the window of a round is over."""
        for _ in range(400):
            self.now += 50 * MS
            ends = [
                e.message for e in self.step(Tick()) if isinstance(e, SendMessage) and isinstance(e.message, RoundEnd)
            ]
            if ends:
                return ends[0]
        raise AssertionError("no round ended")

    def honest(self, conn: int, end: RoundEnd) -> RoundReport:
        me = self.nodes[conn]
        edges = [self.fit(me, other) for other in self.nodes.values() if other != me]
        return RoundReport(end.round, 1, self.now - 4_000 * MS, self.now, UNIX, edges, self.now, end.sent_ns)

    def fit(self, src: int, dst: int, **changed: object) -> EdgeFit:
        bound = {"low": (-500,) * 3, "high": (500,) * 3}
        line = {"t0_ns": self.now, "half_ns": 2_000 * MS, "sigma_ns": 10.0, "sigma_alpha": 1e-9}
        return EdgeFit(src, dst, **(bound | line | {"sent": 900, "pairs": 900} | changed))  # type: ignore[arg-type]

    def lie(self, liars: int = 1, edge: "dict[str, object] | None" = None, **report: object) -> RoundSummary:
        """A round in which the first nodes say something else; its summary."""
        end = self.end_window()
        for conn in list(self.nodes):
            told = self.honest(conn, end)
            if conn <= liars:
                edges = [structs.replace(fit, **(edge or {})) for fit in told.edges]
                told = structs.replace(told, edges=edges, **report)
            self.say(conn, told)
        for _ in range(30):
            self.now += 50 * MS
            self.step(Tick())
        return self.summaries[-1]

    @property
    def summaries(self) -> list[RoundSummary]:
        told = (effect.notice for effect in self.effects if isinstance(effect, Notify))
        return [notice.summary for notice in told if isinstance(notice, RoundDone)]


BIG = [1 << 60, (1 << 61) - 1, 1 << 61, (1 << 63) - 1, (1 << 64) - 1]
times = st.sampled_from([0, 1, *BIG, *(-each for each in BIG[:3]), -(1 << 63)])
floats = st.sampled_from([0.0, -1.0, 1e-320, 1e-3, 1e9, 1e18, 1e200, 1e308, float("inf"), float("nan")])
three = st.tuples(times, times, times)
EDGE_LIES = {
    "t0_ns": times,
    "half_ns": times,
    "beta_ns": times,
    "alpha": floats,
    "sigma_ns": floats,
    "sigma_alpha": floats,
    "residual_ns": floats,
    "low": three,
    "high": three,
    "delay_p50_ns": times,
    "sent": times,
    "lost": times,
    "refused": st.sampled_from(["", "no", "\n" * 9, "long" * 999]),
}
REPORT_LIES = dict.fromkeys(("begin_ns", "end_ns", "utc_ns", "sent_ns", "end_sent_ns", "held_ns"), times)
REPORT_LIES |= dict.fromkeys(("fit_ns", "resumed_ns", "retries", "first_sequence", "next_sequence", "window"), times)


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.fixed_dictionaries({}, optional=EDGE_LIES),
    st.fixed_dictionaries({}, optional=REPORT_LIES),
)
def test_whatever_nodes_report_the_master_goes_on(
    liars: int, edge: dict[str, object], report: dict[str, object]
) -> None:
    stage = Stage(nodes=4)
    first = stage.lie(liars, edge, **report)
    assert stage.lie(liars, edge, **report).round > first.round
    assert stage.lie(0).nodes


@pytest.mark.parametrize("edge", [{"beta_ns": (1 << 61) - 1}, {"sigma_ns": 1e308}, {"residual_ns": float("nan")}])
def test_an_edge_that_cannot_be_is_left_out_and_the_others_count(edge: dict[str, object]) -> None:
    summary = Stage(nodes=4).lie(1, edge)
    assert len(summary.nodes) == 4
    assert {view.fit.src for view in summary.edges if view.dropped} == {1_000_001}


def test_a_report_with_an_absurd_time_counts_as_missing() -> None:
    stage = Stage(nodes=2)
    summary = stage.lie(1, utc_ns=(1 << 64) - 1)
    assert summary.missing == {"1000001": "no report within 1000 ms"}
    assert [node.node for node in summary.nodes] == [1_000_001, 1_000_002]


def test_offsets_that_add_up_to_more_than_a_clock_can_show_cost_a_round_and_no_more() -> None:
    stage = Stage(nodes=9)
    end = stage.end_window()
    first, *others = stage.nodes.values()
    for conn, me in stage.nodes.items():
        if me == first:
            continue
        chain = others[others.index(me) + 1 :][:1]
        edges = [stage.fit(me, other, t0_ns=0, beta_ns=(1 << 61) - (1 << 20)) for other in (chain or [first])]
        stage.say(conn, structs.replace(stage.honest(conn, end), edges=edges))
    stage.say(1, structs.replace(stage.honest(1, end), edges=[]))
    assert "failed" in stage.summaries[-1].anomaly
    assert len(stage.lie(0).nodes) == 9


def test_a_report_of_another_nodes_edge_is_ignored_and_drops_nobody() -> None:
    stage = Stage()
    stage.lie(1, {"src": 1_000_002})
    assert not [effect for effect in stage.effects if isinstance(effect, CloseConnection)]


# Coming and going


def test_one_of_two_nodes_may_leave_while_its_report_is_awaited() -> None:
    stage = Stage(nodes=2)
    end = stage.end_window()
    stage.say(1, stage.honest(1, end))
    stage.leave(2)
    (summary,) = stage.summaries
    assert (summary.missing, summary.names["1000002"]) == (
        {"1000002": "its connection was lost"},
        "n2",
    )
    stage.come(3)
    assert len(stage.lie(0).nodes) == 2


@pytest.mark.parametrize("kind", ["master", "local"])
def test_names_of_nodes_that_left_are_forgotten(kind: str) -> None:
    stage = Stage(nodes=2, kind=kind)
    for conn in range(3, 40):
        for _ in range(4):
            stage.now += 50 * MS
            stage.step(Tick())
        for left in list(stage.nodes):
            stage.leave(left)
        stage.come(conn)
        stage.come(conn + 100)
    assert len(stage.master._probing._names) <= 4


@pytest.mark.parametrize("address", ["node-1.example.org", "", "10.0.0.1:80", "300.1.1.1"])
def test_a_node_at_no_ip_address_is_refused_and_nobody_hears_of_it(address: str) -> None:
    stage = Stage(nodes=2)
    stage.come(3, addresses=[address])
    assert any(isinstance(effect, CloseConnection) and effect.conn == 3 for effect in stage.effects)
    stage.end_window()
    graphs = [e.message for e in stage.effects if isinstance(e, SendMessage) and isinstance(e.message, ProbeGraph)]
    assert {each.name for graph in graphs for each in graph.out} == {"n1", "n2"}


def test_a_peer_at_no_ip_address_is_no_node_and_stays_a_peer() -> None:
    stage = Stage(nodes=1)
    stage.step(ConnectionOpened(2, "host", b"2" * 32))
    proof = prove(b"token", "hello", b"2" * 32, NONCE)
    stage.say(2, Hello(PROTOCOL_VERSION, 0, "host", "p", ["a-name"], 9, NONCE, proof, probes=True))
    assert not [effect for effect in stage.effects if isinstance(effect, CloseConnection)]
    assert not stage.master._run.connections[2].node


def test_a_flood_of_asks_for_rounds_is_bounded() -> None:
    stage = Stage(nodes=2)
    stage.step(ConnectionOpened(9, "host", bytes([9]) * 32))
    answers = [answer for number in range(200) for answer in stage.ask(9, "round", f"label {number}")]
    assert len(answers) == 200 - 64
    assert not any(answer.done for answer in answers)


def test_a_node_keeps_the_number_that_it_had_with_another_master() -> None:
    stage = Stage(0)
    stage.come(1, number=1_000_007)
    stage.come(2)
    stage.come(3, number=1_000_007)  # somebody has it
    stage.come(4, number=5)  # may be a peer's
    numbers = [stage.nodes[conn] for conn in (1, 2, 3, 4)]
    assert numbers[0] == 1_000_007
    assert len(set(numbers)) == 4
    assert min(numbers) >= 1_000_007


def test_who_waits_for_a_long_round_is_no_idle_watcher() -> None:
    stage = Stage(2, window_ms=300_000)
    stage.step(ConnectionOpened(9, "host", bytes([9]) * 32))
    assert stage.ask(9, "stop")
    assert not stage.ask(9, "round")  # a whole window, because none is open
    for _ in range(150 * 20):
        stage.now += 50 * MS
        assert not [effect for effect in stage.step(Tick()) if isinstance(effect, CloseConnection) and effect.conn == 9]
