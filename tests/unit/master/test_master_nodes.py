"""Processes that only probe, and their heartbeats: silent ones are suspected, and then disconnected."""

from collections.abc import Iterable

from ringfold.master.effects import CloseConnection, Effect, Notify, SendHeartbeat, SendMessage, WriteJournal
from ringfold.master.events import ConnectionOpened, HeartbeatReceived, MessageReceived, Tick
from ringfold.master.machine import Master
from ringfold.master.probing import RESERVED_ROUNDS
from ringfold.master.settings import MasterSettings
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
from ringfold.units import MS
from ringfold.wire.frames import Announced, Heartbeat
from ringfold.wire.messages import PROTOCOL_VERSION
from ringfold.wire.notices import ConnectionDropped, EdgeFitted, ProbeNote, RoundDone, fit_text
from ringfold.wire.probing import EdgeFit, NodeHello, NodeWelcome, RoundEnd, RoundId, RoundReport, RoundStart
from ringfold.wire.proof import prove

NONCE = b"n" * 32


class Nodes:
    """A master and nodes that only probe, with a clock that the test moves."""

    def __init__(
        self,
        *conns: int,
        heartbeats: bool = True,
        settings: MasterSettings | None = None,
        keeps_journal: bool = False,
    ) -> None:
        self.master = Master(settings or MasterSettings(), b"token", b"secret", keeps_journal=keeps_journal)
        self.now = 1_000 * MS
        self.keeps_journal, self.reserved = keeps_journal, 0
        """Up to which round the journal allows to start one."""
        self.ids: dict[int, int] = {}
        self.closed: dict[int, str] = {}
        self.notes: list[str] = []
        self.rounds: list[RoundDone] = []
        self.numbers: dict[int, int] = {}
        self.started: RoundId | None = None
        for conn in conns:
            self.connect(conn, heartbeats=heartbeats)

    def connect(self, conn: int, *, heartbeats: bool) -> NodeWelcome:
        self.step(self.master.step(self.now, ConnectionOpened(conn, "host", bytes([conn]) * 32)))
        proof = prove(b"token", "node", bytes([conn]) * 32, NONCE)
        hello = NodeHello(
            PROTOCOL_VERSION, "host", f"n{conn}", ["10.0.0.1"], conn, False, RoundId(), NONCE, proof,
            heartbeats=heartbeats,
        )  # fmt: skip
        effects = self.step(self.master.step(self.now, MessageReceived(conn, hello, 100)))
        (welcome,) = [e.message for e in effects if isinstance(e, SendMessage) and isinstance(e.message, NodeWelcome)]
        self.ids[conn] = welcome.node
        return welcome

    def step(self, effects: Iterable[Effect]) -> list[Effect]:
        effects = list(effects)
        for effect in effects:
            match effect:
                case CloseConnection(conn, reason):
                    self.closed[conn] = reason
                case Notify(RoundDone() as done):
                    self.rounds.append(done)
                case Notify(ProbeNote(text) | ConnectionDropped(_, text)):
                    self.notes.append(text)
                case Notify(EdgeFitted() as fitted):
                    assert fitted.level == "info"
                    self.notes.append(str(fitted))
                case SendHeartbeat(conn, number):
                    self.numbers[conn] = number
                case WriteJournal(journal):
                    self.reserved = journal.rounds
                case SendMessage(_, RoundStart(round)):
                    self.started = round
                    assert not self.keeps_journal or round.sequence <= self.reserved, "it was not written before"
                case _:
                    pass
        return effects

    def beat(self, conn: int, echo: int | None = None, **named: object) -> None:
        number = self.numbers.get(conn, 0) if echo is None else echo
        beat = Heartbeat(self.now, number, **named)  # type: ignore[arg-type]
        self.step(self.master.step(self.now, HeartbeatReceived(conn, beat)))

    def wait(self, ms: int, *alive: int, reporting: tuple[int, ...] = ()) -> None:
        """Let time pass; these nodes send heartbeats, and those report the ends of rounds at once."""
        for _ in range(ms // 50):
            self.now += 50 * MS
            effects = self.step(self.master.step(self.now, Tick()))
            for conn in alive:
                self.beat(conn)
            ends = [e for e in effects if isinstance(e, SendMessage) and isinstance(e.message, RoundEnd)]
            for effect in ends:
                if effect.conn in reporting and isinstance(effect.message, RoundEnd):
                    self.report(effect.conn, effect.message)

    def report(self, conn: int, end: RoundEnd) -> None:
        me = self.ids[conn]
        edges = [EdgeFit(me, other, refused="made up") for other in self.ids.values() if other != me]
        report = RoundReport(end.round, 1, 0, 1, 0, edges, 0, end.sent_ns)
        self.step(self.master.step(self.now, MessageReceived(conn, report, 100)))


def test_a_node_gets_the_liveness_of_the_run() -> None:
    nodes = Nodes()
    welcome = nodes.connect(1, heartbeats=True)
    alive = nodes.master.settings.liveness
    assert (welcome.heartbeat_ms, welcome.evict_after_ms) == (alive.heartbeat_ms, alive.evict_after_ms)


def test_a_node_of_an_older_version_gets_no_heartbeats_and_is_not_judged_by_them() -> None:
    nodes = Nodes(1, 2, heartbeats=False)
    assert nodes.connect(3, heartbeats=False).heartbeat_ms == 0
    nodes.wait(20_000)
    assert (nodes.numbers, nodes.closed) == ({}, {})


def test_a_silent_node_is_disconnected_and_may_connect_again() -> None:
    nodes = Nodes(1, 2, 3)
    nodes.wait(5_100, 1, 2)
    assert list(nodes.closed) == [3]
    assert "silent for 5000 ms" in nodes.closed[3]
    nodes.connect(4, heartbeats=True)
    nodes.wait(5_100, 1, 2, 4)
    assert list(nodes.closed) == [3]


def test_a_node_that_does_not_receive_is_disconnected_too() -> None:
    nodes = Nodes(1, 2)
    for _ in range(103):
        nodes.wait(50, 1)
        nodes.beat(2, echo=1)
    assert "it has not received a heartbeat of the master" in nodes.closed[2]


def test_a_round_does_not_wait_for_a_node_whose_heartbeats_are_missing() -> None:
    nodes = Nodes(1, 2, 3)
    nodes.wait(200, 1, 2, 3)
    first = nodes.started
    nodes.wait(4_050, 1, 2, reporting=(1, 2))
    assert nodes.started is not None
    assert nodes.started != first, "the next round has begun in the step of the last report"
    nodes.wait(100, 1, 2)
    (done,) = nodes.rounds
    assert done.summary.missing[str(nodes.ids[3])].startswith("it has been silent for 1")


def test_a_round_that_a_report_starts_is_written_before_it_starts() -> None:
    """Also when the reserved rounds are used up: then a report writes the journal."""
    rounds = RoundSettings(window_ms=50, adaptive=Adaptive(is_on=False))
    nodes = Nodes(1, 2, settings=MasterSettings(rounds=rounds), keeps_journal=True)
    while nodes.started is None or nodes.started.sequence < 2 * RESERVED_ROUNDS:
        nodes.wait(50, 1, 2, reporting=(1, 2))
    assert nodes.reserved >= 2 * RESERVED_ROUNDS


def test_a_report_of_a_client_that_does_not_probe_closes_its_connection() -> None:
    nodes = Nodes(1, 2)
    nodes.step(nodes.master.step(nodes.now, ConnectionOpened(3, "host", b"3" * 32)))
    nodes.step(nodes.master.step(nodes.now, MessageReceived(3, RoundReport(RoundId(), 1, 0, 1, 0, [], 0), 100)))
    assert nodes.closed == {3: "RoundReport from a client that does not probe"}


def test_a_node_that_was_dropped_for_its_silence_is_named_with_it() -> None:
    nodes = Nodes(1, 2, 3)
    nodes.wait(1_000, 1, 2, 3)
    nodes.wait(3_050, 1, 2, 3, reporting=(1, 2, 3))
    nodes.wait(7_900, 1, 2, reporting=(1, 2))
    reasons = [why for done in nodes.rounds for why in done.summary.missing.values()]
    assert any(why.startswith("its connection was lost: silent for") for why in reasons), reasons


def test_the_line_of_every_edge_is_logged_on_request() -> None:
    for is_on in (False, True):
        nodes = Nodes(1, 2, settings=MasterSettings(log_fits=is_on))
        nodes.wait(4_400, 1, 2, reporting=(1, 2))
        logged = [text for text in nodes.notes if text.startswith("round 1.1: edge")]
        assert len(logged) == (2 if is_on else 0)


def test_the_text_of_a_line_has_alpha_and_beta() -> None:
    fit = EdgeFit(3, 7, t0_ns=5, alpha=1.25e-5, beta_ns=-42, sigma_ns=9.0, pairs=900, estimator="hull")
    assert fit_text(fit) == "edge 3 -> 7: alpha +1.250000e-05, beta -42 ns at t0 5, +-9 ns, 900 pairs, by hull"


def test_invalid_heartbeats_close_the_connection() -> None:
    nodes = Nodes(1, 2, 3)
    nodes.connect(4, heartbeats=False)
    nodes.wait(500, 1, 2, 3)
    nodes.beat(1, echo=1 << 40)
    nodes.beat(2, ops=[Announced(0, 0, 0, 0, False)])
    nodes.beat(3, epoch=1)
    nodes.beat(4)
    assert "it echoes heartbeat" in nodes.closed[1]
    assert "with ops" in nodes.closed[2]
    assert "with ops" in nodes.closed[3]
    assert "announced none" in nodes.closed[4]
