"""Several runs on one master: which connection belongs to which, and that runs are isolated."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_master import NONCE, TOKEN

from ringfold.config import DEFAULT_RUN
from ringfold.errors import StoreError
from ringfold.master.effects import CloseConnection, Effect, ReportBrokenRun, SendHeartbeat, SendMessage, WriteJournal
from ringfold.master.events import (
    ConnectionClosed,
    ConnectionOpened,
    Event,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
    StopRequested,
    Tick,
)
from ringfold.master.journal import Journal, decode, encode
from ringfold.master.journal_store import Deposed, RunDirectory
from ringfold.master.machine import Master
from ringfold.master.run import Connection
from ringfold.master.runs import Runs
from ringfold.master.settings import MasterSettings
from ringfold.store.client import StoreClient
from ringfold.store.in_memory import MemoryDriver, MemoryServer
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import Heartbeat
from ringfold.wire.proof import derive, prove, run_token
from ringfold.wire.status import RunInfo

MS = 1_000_000


class Fragile(Master):
    """Breaks where a peer has this name."""

    def _hello(self, now: int, connection: Connection, hello: m.Hello) -> None:
        if hello.name == "breaker":
            raise ZeroDivisionError("planted")
        super()._hello(now, connection, hello)


class MasterHarness:
    """The runs of one master. A connection's nonce is made of its number."""

    def __init__(self, token: bytes = TOKEN, *, fence: int = 1, keeps_journal: bool = False, **changed: object) -> None:
        self.now, self.token = 0, token
        settings = MasterSettings(return_ms=1_000, **changed)  # type: ignore[arg-type]
        self.runs = Runs(settings, token, b"secret", fence, keeps_journal=keeps_journal, machine=Fragile)
        self.effects: list[tuple[str, Effect]] = []
        self.journals: dict[str, Journal] = {}

    def step(self, event: Event) -> list[tuple[str, Effect]]:
        new = [(run, effect) for run, effects in self.runs.step(self.now, event) for effect in effects]
        for run, effect in new:
            if isinstance(effect, WriteJournal):
                self.journals[run] = effect.journal
        self.effects += new
        return new

    def receive(self, conn: int, message: m.ToMaster) -> list[m.FromMaster]:
        """What the connection itself is answered."""
        effects = self.step(MessageReceived(conn, message))
        return [each.message for _, each in effects if isinstance(each, SendMessage) and each.conn == conn]

    def open(self, conn: int) -> None:
        self.step(ConnectionOpened(conn, f"host:{conn}", nonce(conn)))

    def proof(self, conn: int, purpose: str, run: str = "") -> bytes:
        return prove(run_token(self.token, run or DEFAULT_RUN), purpose, nonce(conn), NONCE)

    def hello(self, conn: int, run: str = "", name: str = "", proof: bytes | None = None) -> m.Hello:
        proof = self.proof(conn, "hello", run) if proof is None else proof
        return m.Hello(VERSION, 0, "host", name or f"p{conn}", ["10.0.0.1"], 9, NONCE, proof, run=run)

    def join(self, conn: int, run: str = "", name: str = "", proof: bytes | None = None) -> list[m.FromMaster]:
        self.open(conn)
        return self.receive(conn, self.hello(conn, run, name, proof))

    def status(self, conn: int, run: str = "") -> m.FromMaster:
        self.open(conn)
        return self.receive(conn, m.StatusRequest(VERSION, NONCE, self.proof(conn, "status", run), run))[0]

    def forget(self, conn: int, name: str) -> m.FromMaster:
        self.open(conn)
        return self.receive(conn, m.ForgetRun(VERSION, name, NONCE, self.proof(conn, "forget")))[0]

    def listed(self, conn: int = 90) -> list[RunInfo]:
        self.open(conn)
        [answer] = self.receive(conn, m.RunsRequest(VERSION, NONCE, self.proof(conn, "runs")))
        assert isinstance(answer, m.RunList)
        return answer.runs

    def wait(self, ms: int) -> list[tuple[str, Effect]]:
        effects: list[tuple[str, Effect]] = []
        for _ in range(ms // 50):
            self.now += 50 * MS
            effects += self.step(Tick())
        return effects

    def leave(self, conn: int) -> None:
        self.receive(conn, m.Leave())


def nonce(conn: int) -> bytes:
    return bytes([conn]) * 32


def refusal(replies: list[m.FromMaster]) -> str:
    [refused] = replies
    assert isinstance(refused, m.Refused)
    return refused.reason


def welcome(replies: list[m.FromMaster]) -> m.Welcome:
    assert isinstance(replies[0], m.Welcome)
    return replies[0]


# Which run


def test_runs_count_their_peers_and_epochs_each_for_itself() -> None:
    harness = MasterHarness()
    joined = [welcome(harness.join(conn, run)).peer for conn, run in ((1, ""), (2, "a"), (3, "b"), (4, "a"))]
    assert joined == [1, 1, 1, 2]
    assert [harness.runs.owner(conn) for conn in range(1, 5)] == ["default", "a", "b", "a"]


def test_no_name_and_the_default_name_are_one_run() -> None:
    harness = MasterHarness()
    assert [welcome(harness.join(1)).peer, welcome(harness.join(2, "default")).peer] == [1, 2]


def test_runs_have_secrets_of_their_own() -> None:
    harness = MasterHarness(keeps_journal=True)
    secrets = {welcome(harness.join(conn, run)).secret for conn, run in ((1, ""), (2, "a"), (3, "b"))}
    assert len(secrets) == 3


def test_a_proof_for_one_run_proves_nothing_in_another() -> None:
    harness = MasterHarness()
    assert "wrong token" in refusal(harness.join(1, "a", proof=harness.proof(1, "hello", "b")))
    assert "wrong token" in refusal(harness.join(2, "a", proof=harness.proof(2, "hello")))
    assert harness.runs.names == ["default"], "a client that proves nothing starts no run"


def test_a_member_of_one_run_cannot_resume_in_another() -> None:
    harness = MasterHarness(keeps_journal=True)
    secret = welcome(harness.join(1, "a")).secret
    harness.join(2, "b")
    harness.open(3)
    member = prove(secret, "member", nonce(3), NONCE)
    where = (0, "h", "n", ["10.0.0.1"], 9)
    resume = m.Resume(VERSION, 1, 0, 1, *where, NONCE, harness.proof(3, "resume", "b"), member, run="b")
    [evicted] = harness.receive(3, resume)
    assert isinstance(evicted, m.Evicted)
    assert "knows nothing of the run" in evicted.reason


def test_without_a_token_nothing_is_derived() -> None:
    assert run_token(b"", "a") == b""
    assert run_token(TOKEN, DEFAULT_RUN) == TOKEN
    assert len({run_token(TOKEN, "a"), run_token(TOKEN, "b"), TOKEN}) == 3
    assert welcome(MasterHarness(b"").join(1, "a")).peer == 1


def test_a_name_that_no_run_can_have_is_refused() -> None:
    assert "is not a valid name of a run: use up to 64 letters" in refusal(MasterHarness().join(1, "a/b"))


def test_there_are_so_many_runs_and_no_more() -> None:
    harness = MasterHarness(max_runs=2)
    harness.join(1, "a")
    assert "max_runs allows no more: free a name with `ringfold runs forget`" in refusal(harness.join(2, "b"))
    assert welcome(harness.join(3, "a")).peer == 2


def test_a_death_in_one_run_is_sent_in_that_run_only() -> None:
    harness = MasterHarness()
    for conn, run in ((1, "a"), (2, "b"), (3, "a")):
        harness.join(conn, run)
    effects = harness.step(ConnectionClosed(1, "reset"))
    assert {run for run, _ in effects} == {"a"}
    assert not [each for _, each in effects if isinstance(each, SendMessage) and each.conn == 2]


def test_every_run_has_heartbeats() -> None:
    harness = MasterHarness()
    for conn, run in ((1, ""), (2, "a")):
        harness.join(conn, run)
    heartbeats = [(run, each.conn) for run, each in harness.wait(300) if isinstance(each, SendHeartbeat)]
    assert heartbeats == [("a", 2), ("default", 1)]


# Unauthenticated clients


def test_a_client_that_is_not_authenticated_in_time_is_closed() -> None:
    harness = MasterHarness(handshake_ms=200)
    harness.open(1)
    assert any(
        effect == CloseConnection(1, "it was not authenticated within 200 ms") for _, effect in harness.wait(300)
    )


def test_the_oldest_of_too_many_unauthenticated_clients_is_closed() -> None:
    harness = MasterHarness(max_unproven=2)
    for conn in (1, 2, 3):
        harness.open(conn)
    assert [each.conn for _, each in harness.effects if isinstance(each, CloseConnection)] == [1]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (HeartbeatReceived(1, Heartbeat(1, 0)), "a heartbeat from a client that has not joined"),
        (MessageReceived(1, m.Leave()), "Leave where Hello, NodeHello or a request is expected"),
        (MalformedReceived(1, "nonsense"), "nonsense"),
    ],
)
def test_an_unauthenticated_client_that_breaks_the_protocol_is_refused(event: Event, why: str) -> None:
    harness = MasterHarness()
    harness.open(1)
    effects = harness.step(event)
    assert ("", SendMessage(1, m.Refused(why))) in effects
    assert ("", CloseConnection(1, why)) in effects
    assert harness.step(MessageReceived(1, harness.hello(1))) == [], "it is forgotten"


# Looking


def test_the_status_is_that_of_the_named_run_and_names_the_others() -> None:
    harness = MasterHarness()
    for conn, run in ((1, ""), (2, "a"), (3, "a")):
        harness.join(conn, run)
    status = harness.status(10, "a")
    assert isinstance(status, m.Status)
    assert (status.run, status.registrations, status.other_runs) == ("a", 2, ["default"])
    status = harness.status(11)
    assert isinstance(status, m.Status)
    assert (status.run, status.registrations, status.other_runs) == ("default", 1, ["a"])


def test_the_status_of_no_name_is_that_of_the_only_run() -> None:
    harness = MasterHarness()
    assert isinstance(empty := harness.status(10), m.Status)
    assert (empty.run, empty.other_runs) == ("default", [])
    harness.join(1, "a")
    only = harness.status(11)
    assert isinstance(only, m.Status)
    assert (only.run, only.registrations) == ("a", 1)


def test_the_status_of_an_unknown_run_names_the_known_ones() -> None:
    harness = MasterHarness()
    harness.join(1, "a")
    harness.join(2, "b")
    assert "there is no run c here; there are: a, b" in str(harness.status(10, "c"))


def test_runs_are_listed_with_their_states() -> None:
    harness = MasterHarness()
    assert harness.listed() == [RunInfo("default", "new")]
    for conn, run in ((1, "a"), (2, "b"), (3, "c")):
        harness.join(conn, run)
        harness.receive(conn, m.Attached(1))
    harness.leave(2)
    harness.step(ConnectionClosed(3, "reset"))
    assert [(run.name, run.state, run.peers) for run in harness.listed(91)] == [
        ("a", "running", 1),
        ("b", "finished", 0),
        ("c", "abandoned", 0),
    ]


def test_the_list_needs_the_masters_token() -> None:
    harness = MasterHarness()
    harness.open(1)
    request = m.RunsRequest(VERSION, NONCE, harness.proof(1, "runs", "a"))
    assert "wrong token" in refusal(harness.receive(1, request))


# Forgetting


def test_a_run_with_peers_is_not_forgotten() -> None:
    harness = MasterHarness()
    harness.join(1, "a")
    assert "run a has 1 peers: stop them first" in str(harness.forget(10, "a"))
    assert "there is no run b here" in str(harness.forget(11, "b"))


def test_a_run_that_is_forgotten_can_begin_again_with_other_secrets() -> None:
    harness = MasterHarness(keeps_journal=True)
    first = welcome(harness.join(1, "a"))
    harness.receive(1, m.Attached(1))
    harness.leave(1)
    assert "run a finished at revision 0" in refusal(harness.join(2, "a"))
    assert harness.forget(10, "a") == m.RunList([])
    assert harness.journals["a"].is_forgotten, "the answer waits until that is written"
    again = welcome(harness.join(3, "a"))
    assert again.peer == first.peer == 1
    assert again.secret != first.secret


def test_the_default_run_can_be_forgotten_too() -> None:
    harness = MasterHarness(keeps_journal=True)
    harness.join(1)
    harness.receive(1, m.Attached(1))
    harness.step(ConnectionClosed(1, "reset"))
    assert isinstance(harness.forget(10, "default"), m.RunList)
    assert welcome(harness.join(2)).peer == 1
    assert not harness.journals["default"].is_forgotten


def test_a_run_that_no_peer_joined_is_forgotten() -> None:
    harness = MasterHarness(keeps_journal=True)
    harness.open(1)
    where, proof = (0, "h", "n", ["10.0.0.1"], 9), harness.proof(1, "resume", "x")
    resume = m.Resume(VERSION, 1, 0, 1, *where, NONCE, proof, b"", run="x")
    assert isinstance(harness.receive(1, resume)[0], m.Evicted)
    harness.wait(50)
    assert harness.runs.names == ["default"]


# A run that breaks


def test_a_run_that_breaks_takes_no_other_along() -> None:
    harness = MasterHarness()
    for conn, run in ((1, "a"), (2, "b")):
        harness.join(conn, run)
    harness.join(3, "a", "breaker")
    broken = [(run, effect) for run, effect in harness.effects if isinstance(effect, ReportBrokenRun)]
    assert [run for run, _ in broken] == ["a"]
    assert {each.conn for run, each in harness.effects if isinstance(each, CloseConnection)} == {1, 3}
    assert [run for run, each in harness.wait(300) if isinstance(each, SendHeartbeat)] == ["b"]
    assert "run a broke in the master: ZeroDivisionError: planted" in refusal(harness.join(4, "a"))
    assert [(info.name, info.state) for info in harness.listed()] == [("a", "broken"), ("b", "running")]
    assert isinstance(harness.forget(10, "a"), m.RunList)
    assert welcome(harness.join(5, "a")).peer == 1


def test_with_a_journal_it_restarts_from_it_after_a_pause_that_doubles() -> None:
    harness = MasterHarness(keeps_journal=True)
    harness.join(1, "a")
    harness.receive(1, m.Attached(1))
    secret = harness.journals["a"].secret
    for number, pause_ms in ((1, 1_000), (2, 2_000), (3, 4_000)):
        harness.join(50 + number, "a", "breaker")
        last = harness.effects[-1][1]
        harness.wait(pause_ms - 50)
        [again] = harness.join(60 + number, "a")
        assert again == m.Refused("run a broke in the master: ZeroDivisionError: planted; it restarts soon", True)
        written = [each.journal for run, each in harness.wait(100) if isinstance(each, WriteJournal)]
        assert written[0].fence == 1 + number, "its members come back under a higher fence"
        assert isinstance(last, CloseConnection)
    harness.open(7)
    member = prove(derive(secret, "member", 1), "member", nonce(7), NONCE)
    where = (0, "h", "p1", ["10.0.0.1"], 9)
    resume = m.Resume(VERSION, 1, 1, 1, *where, NONCE, harness.proof(7, "resume", "a"), member, run="a")
    assert isinstance(harness.receive(7, resume)[0], m.Resumed)


def test_the_default_run_begins_again_without_a_journal_too() -> None:
    harness = MasterHarness()
    harness.join(1)
    harness.join(2, "", "breaker")
    harness.wait(1_100)
    assert welcome(harness.join(3)).peer == 1


def test_a_journal_that_no_machine_can_be_made_of_breaks_its_run_only() -> None:
    """Its fence is as high as this master's: a store that was put back, or a bug."""
    harness = MasterHarness(fence=2, keeps_journal=True)
    [(run, effects)] = harness.runs.restore(0, "a", Journal(7, b"secret"))
    assert run == "a"
    assert isinstance(effects[0], ReportBrokenRun)
    assert welcome(harness.join(1)).peer == 1
    assert [(info.name, info.state) for info in harness.listed()] == [("a", "broken"), ("default", "running")]
    harness.wait(1_100)
    assert sum(isinstance(effect, ReportBrokenRun) for _, effect in harness.effects) == 1, (
        "it is tried again, later and later"
    )


TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(("", "default", "a", "b", "..", "x" * 65)))
CLAIMS = st.one_of(
    st.builds(m.StatusRequest, st.integers(1, 3), st.binary(max_size=40), st.binary(max_size=40), TEXTS),
    st.builds(m.RunsRequest, st.integers(1, 3), st.just(NONCE), st.binary(max_size=40)),
    st.builds(m.ForgetRun, st.just(VERSION), TEXTS, st.just(NONCE), st.binary(max_size=40)),
    st.just(m.Leave()),
    st.builds(m.Attached, st.integers(0, 3)),
)


@given(st.lists(st.tuples(st.integers(1, 5), st.one_of(CLAIMS, TEXTS, st.none())), max_size=40))
def test_whatever_unauthenticated_clients_send_members_stay(
    script: list[tuple[int, object]],
) -> None:
    """A text joins a run, or looks at it and forgets it, with a right proof; nothing closes the connection."""
    harness = MasterHarness()
    harness.join(10, "a")
    for conn, word in script:
        harness.open(conn)
        match word:
            case None:
                harness.step(ConnectionClosed(conn, ""))
            case str():
                harness.receive(conn, harness.hello(conn, word))
                harness.step(MessageReceived(conn, m.ForgetRun(VERSION, word, NONCE, harness.proof(conn, "forget"))))
            case _:
                harness.step(MessageReceived(conn, word))  # type: ignore[arg-type]
        harness.wait(50)
    assert not any(isinstance(effect, ReportBrokenRun) for _, effect in harness.effects)
    assert harness.runs.owner(10) == "a"


# After a change of masters


def test_a_later_master_continues_all_runs() -> None:
    harness = MasterHarness(keeps_journal=True)
    for conn, run in ((1, ""), (2, "a"), (3, "b")):
        harness.join(conn, run)
        harness.receive(conn, m.Attached(1))
    harness.leave(3)
    later = MasterHarness(fence=2, keeps_journal=True)
    for run, journal in harness.journals.items():
        later.runs.restore(0, run, decode(encode(journal), "here"))
    assert {run: journal.fence for run, journal in later.runs.first_journals().items()} == {
        "default": 2,
        "a": 2,
        "b": 2,
    }
    assert [(info.name, info.state, info.away) for info in later.listed()] == [
        ("a", "running", 1),
        ("b", "finished", 0),
        ("default", "running", 1),
    ]
    assert "run b finished" in refusal(later.join(4, "b"))


def test_a_master_that_is_stopped_ends_all_runs_and_their_ends_are_kept() -> None:
    harness = MasterHarness(keeps_journal=True)
    for conn, run in ((1, "a"), (2, "b")):
        harness.join(conn, run)
        harness.receive(conn, m.Attached(1))
    harness.leave(2)
    harness.step(StopRequested("it was stopped"))
    assert all(journal.is_closed for journal in harness.journals.values())
    later = MasterHarness(fence=2, keeps_journal=True)
    for run, journal in harness.journals.items():
        later.runs.restore(0, run, decode(encode(journal), "here"))
    assert "run b finished" in refusal(later.join(3, "b"))
    assert welcome(later.join(4, "a")).peer == 1, "nothing of a run that was ended binds the next one"


# The list of runs in a store


@pytest.fixture
def client() -> Callable[[], StoreClient]:
    server = MemoryServer()
    return lambda: StoreClient(MemoryDriver(server, sleep=lambda seconds: None), prefix="here")


def test_a_store_of_an_older_version_has_the_default_run(client: Callable[[], StoreClient]) -> None:
    assert RunDirectory(client(), "here").read() == (0, ["default"])


def test_names_are_kept_and_forgotten(client: Callable[[], StoreClient]) -> None:
    one = RunDirectory(client(), "here")
    one.read()
    one.take_over(1)
    for name in ("b", "a", "b", "default"):
        one.add(name)
    assert RunDirectory(client(), "here").read() == (1, ["a", "b", "default"])
    one.remove("a")
    assert RunDirectory(client(), "here").read() == (1, ["b", "default"])


def test_a_deposed_master_adds_and_forgets_nothing(client: Callable[[], StoreClient]) -> None:
    old, new = RunDirectory(client(), "here"), RunDirectory(client(), "here")
    old.read()
    old.take_over(1)
    old.add("a")
    assert new.read() == (1, ["a", "default"])
    new.take_over(2)
    for change in (lambda: old.add("b"), lambda: old.remove("a")):
        with pytest.raises(Deposed):
            change()
    assert RunDirectory(client(), "here").read() == (2, ["a", "default"])


def test_a_run_that_is_added_during_a_takeover_makes_it_fail(client: Callable[[], StoreClient]) -> None:
    old, new = RunDirectory(client(), "here"), RunDirectory(client(), "here")
    old.read()
    old.take_over(1)
    new.read()
    old.add("a")
    with pytest.raises(Deposed):
        new.take_over(2)
    assert new.read() == (1, ["a", "default"])


def test_a_list_that_is_none_is_an_error_of_the_store(client: Callable[[], StoreClient]) -> None:
    store = client()
    store.set("master/runs", b"nonsense")
    with pytest.raises(StoreError, match="it holds no list of runs"):
        RunDirectory(store, "here").read()
