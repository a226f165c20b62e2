"""A master with relays: their heartbeats, the nodes behind them, and what `probe show` knows of them."""

from collections.abc import Iterable

from ringfold.master.effects import CloseConnection, Effect, Notify, SendHeartbeat, SendMessage
from ringfold.master.events import ConnectionClosed, ConnectionOpened, HeartbeatReceived, MessageReceived, Tick
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.units import MS
from ringfold.wire.frames import Heartbeat
from ringfold.wire.messages import PROTOCOL_VERSION, Message, Refused
from ringfold.wire.notices import ConnectionDropped, ProbeNote
from ringfold.wire.probing import NodeHello, NodeWelcome, ProbeAnswer, ProbeCommand, RoundId, RoundStart
from ringfold.wire.proof import prove, proven
from ringfold.wire.regions import (
    NodeEntry,
    RelayAnswers,
    RelayGraph,
    RelayHello,
    RelayNodes,
    RelayReports,
    RelayRound,
    RelayWelcome,
)

NONCE = b"n" * 32


class Root:
    """A master, and what it sends, with a clock that the test moves."""

    def __init__(self) -> None:
        self.master, self.now = Master(MasterSettings(), b"token", b"secret"), 1_000 * MS
        self.sent: list[tuple[int, Message]] = []
        self.closed: set[int] = set()
        self.notes: list[str] = []
        self.numbers: dict[int, int] = {}

    def collect(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(conn, message):
                    self.sent.append((conn, message))
                case CloseConnection(conn, _):
                    self.closed.add(conn)
                case Notify(ProbeNote(text) | ConnectionDropped(_, text)):
                    self.notes.append(text)
                case SendHeartbeat(conn, number):
                    self.numbers[conn] = number
                case _:
                    pass

    def open(self, conn: int) -> bytes:
        nonce = bytes([conn]) * 32
        self.collect(self.master.step(self.now, ConnectionOpened(conn, "host", nonce)))
        return nonce

    def receive(self, conn: int, message: Message, size: int = 100) -> list[Message]:
        """What the master sends on that connection in response."""
        before = len(self.sent)
        self.collect(self.master.step(self.now, MessageReceived(conn, message, size)))  # type: ignore[arg-type]
        return [each for to, each in self.sent[before:] if to == conn]

    def relay(self, conn: int, token: bytes = b"token") -> list[Message]:
        proof = prove(token, "relay", self.open(conn), NONCE)
        return self.receive(conn, RelayHello(PROTOCOL_VERSION, f"r{conn}", "east", NONCE, proof))

    def node(self, conn: int, name: str, port: int, number: int = 0) -> NodeWelcome:
        proof = prove(b"token", "node", self.open(conn), NONCE)
        hello = NodeHello(PROTOCOL_VERSION, "host", name, ["10.0.0.1"], port, False, RoundId(), NONCE, proof, number)
        [welcome] = [each for each in self.receive(conn, hello) if isinstance(each, NodeWelcome)]
        return welcome

    def join(self, conn: int, *links: int) -> dict[int, int]:
        """Nodes behind a relay; their ids by link."""
        [answers] = [
            each
            for each in self.receive(conn, RelayNodes(joined=[entry(link) for link in links]))
            if isinstance(each, RelayAnswers)
        ]
        return answers.accepted

    def pass_time(self, ms: int, *alive: int) -> None:
        """Tick; these connections send heartbeats meanwhile."""
        until = self.now + ms * MS
        number = 0
        while self.now < until:
            self.now += 50 * MS
            number += 1
            self.collect(self.master.step(self.now, Tick()))
            for conn in alive:
                heartbeat = Heartbeat(number, self.numbers.get(conn, 0))
                self.collect(self.master.step(self.now, HeartbeatReceived(conn, heartbeat)))


def entry(link: int, number: int = 0) -> NodeEntry:
    return NodeEntry(link, "host", f"n{link}", ["10.0.0.1"], 4_000 + link, False, RoundId(), number)


def test_a_relay_is_welcomed_and_the_master_proves_the_token() -> None:
    root = Root()
    [welcome] = root.relay(1)
    assert isinstance(welcome, RelayWelcome)
    assert proven(b"token", welcome.proof, "welcome", NONCE, bytes([1]) * 32)


def test_a_relay_without_the_token_is_refused() -> None:
    root = Root()
    [refusal] = root.relay(1, token=b"guess")
    assert isinstance(refusal, Refused)
    assert root.closed == {1}


def test_nodes_behind_a_relay_and_one_of_its_own_are_in_one_round() -> None:
    root = Root()
    root.relay(1)
    ids = root.join(1, 1, 2)
    alone = root.node(2, "alone", 9_000)
    assert len({*ids.values(), alone.node}) == 3
    root.pass_time(300, 1)
    mine = [message for conn, message in root.sent if conn == 1]
    [graph] = [message for message in mine if isinstance(message, RelayGraph)]
    assert {row.node for row in graph.graphs} == set(ids.values())
    assert {row.node for row in graph.neighbours} == {*ids.values(), alone.node}
    assert sum(isinstance(message, RelayRound) for message in mine) == 1
    assert sum(isinstance(message, RoundStart) for conn, message in root.sent if conn == 2) == 1


def test_a_silent_relay_is_dropped_with_its_nodes_which_keep_their_ids_elsewhere() -> None:
    root = Root()
    root.relay(1)
    root.relay(3)
    ids = root.join(1, 1, 2)
    root.pass_time(2_000, 3)
    taken = root.node(4, "n1", 4_001, number=ids[1])
    assert taken.node == ids[1], "its relay is suspected"
    other = root.node(5, "another", 4_002, number=ids[2])
    assert other.node != ids[2], "not its name"
    root.pass_time(5_000, 3)
    assert root.closed == {1}
    [answers] = [
        each for each in root.receive(3, RelayNodes(joined=[entry(2, ids[2])])) if isinstance(each, RelayAnswers)
    ]
    assert answers.accepted == {2: ids[2]}


def test_a_lost_relay_takes_its_nodes_with_it() -> None:
    root = Root()
    root.relay(1)
    ids = root.join(1, 1, 2)
    root.collect(root.master.step(root.now, ConnectionClosed(1, "reset")))
    assert any("2 nodes with it" in note for note in root.notes)
    assert root.node(2, "n1", 4_001, number=ids[1]).node == ids[1]


def test_a_client_that_is_no_relay_may_not_report_for_others() -> None:
    root = Root()
    root.node(1, "n1", 4_001)
    root.receive(1, RelayReports(RoundId(1, 1), 0, []))
    assert root.closed == {1}


def test_the_answer_to_a_command_names_the_relays() -> None:
    root = Root()
    root.relay(1)
    root.join(1, 1, 2)
    proof = prove(b"token", "probe", root.open(9), NONCE)
    [answer] = root.receive(9, ProbeCommand(PROTOCOL_VERSION, "show", "", NONCE, proof))
    assert isinstance(answer, ProbeAnswer)
    [relay] = answer.relays
    assert (relay.name, relay.region, relay.nodes, relay.refused) == ("r1", "east", 2, 0)


def test_a_relay_is_no_idle_client() -> None:
    root = Root()
    root.relay(1)
    root.pass_time(120_000, 1)
    assert root.closed == set()


def test_a_relay_that_registers_two_nodes_under_one_id_is_dropped_alone() -> None:
    root = Root()
    root.relay(1)
    root.relay(2)
    root.join(2, 1)
    answers = root.receive(1, RelayNodes(joined=[entry(1, 1_000_050), entry(2, 1_000_050)]))
    assert [type(answer) for answer in answers] == [Refused]
    assert root.closed == {1}
    root.collect(root.master.step(root.now, ConnectionClosed(1, "closed")))
    assert len(root.join(2, 2)) == 1, "the run continues"
    root.pass_time(300, 2)
    assert any(isinstance(message, RelayRound) for conn, message in root.sent if conn == 2)


def test_nodes_in_one_message_get_different_ids_whatever_they_had() -> None:
    """The first gets the next free id, which the second one asks for."""
    root = Root()
    root.relay(1)
    [answers] = [
        each
        for each in root.receive(1, RelayNodes(joined=[entry(1), entry(2, 1_000_001)]))
        if isinstance(each, RelayAnswers)
    ]
    assert len(set(answers.accepted.values())) == 2
    root.collect(root.master.step(root.now, ConnectionClosed(1, "closed")))
    root.relay(2)
    assert len(root.join(2, 1, 2)) == 2, "the run continues"
