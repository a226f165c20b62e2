"""What else outlives a master, and what does not: rounds of probing, figures of links, and a run that was ended."""

from msgspec import structs
from test_master_journal import NONCE, TOKEN, MasterHarness, client, pair, sent, taken_over

from ringfold.master.effects import CloseConnection, Effect, SendMessage, WriteJournal, WriteLinks
from ringfold.master.events import ConnectionOpened, MessageReceived, StopRequested
from ringfold.master.journal import Journal, closed_journal, decode, encode
from ringfold.master.journal_store import JournalStore
from ringfold.master.lifecycle import Life
from ringfold.master.probing import RESERVED_ROUNDS
from ringfold.store.in_memory import MemoryServer
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.probing import NodeHello, ProbeCommand, ProbeGraph, RoundId, RoundStart
from ringfold.wire.proof import prove


def node(harness: MasterHarness, conn: int, last: RoundId | None = None) -> None:
    """A process that only probes connects."""
    nonce = bytes([conn]) * 32
    harness.step(ConnectionOpened(conn, "host", nonce))
    proof = prove(TOKEN, "node", nonce, NONCE)
    harness.receive(
        conn, NodeHello(VERSION, "h", f"n{conn}", ["10.0.0.1"], conn, False, last or RoundId(), NONCE, proof)
    )


def starts(effects: list[Effect]) -> list[RoundStart]:
    return [message for message in sent(effects) if isinstance(message, RoundStart)]


def probed(harness: MasterHarness, conns: tuple[int, ...] = (21, 22)) -> list[Effect]:
    """Two nodes connect, and the first round starts; all effects until then."""
    for conn in conns:
        node(harness, conn)
    effects: list[Effect] = []
    while not starts(effects):
        effects += harness.wait(50)
    return effects


def test_a_round_is_written_before_it_starts() -> None:
    harness = MasterHarness()
    effects = probed(harness)
    first = next(place for place, each in enumerate(effects) if isinstance(each, SendMessage) and starts([each]))
    assert [each.journal.rounds for each in effects[:first] if isinstance(each, WriteJournal)] == [1 + RESERVED_ROUNDS]


def test_the_next_master_continues_above_the_rounds_of_the_last_one() -> None:
    harness = MasterHarness()
    probed(harness)
    assert harness.last is not None
    later = MasterHarness(decode(encode(harness.last), "here"), fence=2)
    [start, _] = starts(probed(later))
    assert start.round == RoundId(2, 2 + RESERVED_ROUNDS)


def test_a_graph_has_another_key_with_another_master() -> None:
    """Nodes drop packets of a graph by its key; a new graph must not accept those of the old one."""

    def key(effects: list[Effect]) -> bytes:
        return next(message.key for message in sent(effects) if isinstance(message, ProbeGraph))

    first = MasterHarness()
    before = key(probed(first))
    assert first.last is not None
    assert key(probed(MasterHarness(first.last, fence=2))) != before


def test_probing_that_was_stopped_stays_so_with_the_next_master() -> None:
    harness = MasterHarness()
    probed(harness)
    harness.step(ConnectionOpened(9, "host", b"9" * 32))
    harness.receive(9, ProbeCommand(VERSION, "stop", "", NONCE, prove(TOKEN, "probe", b"9" * 32, NONCE)))
    assert harness.last is not None
    later = MasterHarness(harness.last, fence=2)
    for conn in (21, 22):
        node(later, conn)
    assert not starts(later.wait(2_000))


def test_a_peer_that_probes_is_a_node_again_when_it_returns() -> None:
    harness = taken_over()
    for conn, peer in ((11, 1), (12, 2)):
        nonce = bytes([conn]) * 32
        harness.step(ConnectionOpened(conn, "host", nonce))
        resume = harness.resume_of(nonce, peer)
        harness.step(MessageReceived(conn, structs.replace(resume, probes=True)))
        harness.receive(conn, m.Returned())
    effects: list[Effect] = []
    while not starts(effects):
        effects += harness.wait(50)
    assert {effect.conn for effect in effects if isinstance(effect, SendMessage) and starts([effect])} == {11, 12}


def test_figures_of_links_are_kept_now_and_then_and_known_to_the_next_master() -> None:
    harness = pair()
    run = harness.master._run
    run.links.measured((1, 2), 5e9, 80, harness.now)
    [kept] = [each for each in harness.wait(100) if isinstance(each, WriteLinks)]
    run.links.observed((1, 2), 6e9, harness.now)
    assert not [each for each in harness.wait(1_000) if isinstance(each, WriteLinks)]
    assert harness.last is not None
    later = MasterHarness(harness.last, fence=2, now=7_000_000_000, links=kept.raw)
    entry = later.master._run.links.get(1, 2)
    assert entry is not None
    assert (entry.bytes_per_s, entry.delay_us, entry.source) == (5e9, 40, "measured")
    assert later.now - 200_000_000 <= entry.at_ns <= later.now


def test_figures_that_make_no_sense_are_forgotten() -> None:
    journal = pair().last
    assert journal is not None
    assert not len(MasterHarness(journal, fence=2, links=b"what is this").master._run.links)


def test_a_run_that_is_ended_closes_its_journal_and_then_notifies_its_peers() -> None:
    effects = pair().step(StopRequested("stopped"))
    assert effects[0] == WriteJournal(closed_journal(1, "", Life("abandoned")))
    assert [each for each in effects[1:] if isinstance(each, SendMessage)] == [
        SendMessage(conn, m.Refused("stopped")) for conn in (1, 2)
    ]
    assert [each.conn for each in effects if isinstance(each, CloseConnection)] == [1, 2]


def test_a_closed_journal_has_nothing_but_its_fence() -> None:
    server = MemoryServer()
    keeper = JournalStore(client(server), "here")
    keeper.read()
    keeper.write(closed_journal(7, "another"))
    assert JournalStore(client(server), "here").read() == Journal(7, b"", leader="another", is_closed=True)


def test_link_figures_are_written_by_any_master() -> None:
    server = MemoryServer()
    assert JournalStore(client(server), "here").read_links() == b""
    JournalStore(client(server), "here").write_links(b"figures")
    assert JournalStore(client(server), "here").read_links() == b"figures"
