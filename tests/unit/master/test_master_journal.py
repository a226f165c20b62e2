"""The master's journal: what is written and when, and how a later master continues from it."""

import pytest
from msgspec import structs

from ringfold.errors import StoreError, StoreUnknown
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    Notify,
    SendEvidence,
    SendHeartbeat,
    SendMessage,
    WriteJournal,
)
from ringfold.master.events import ConnectionOpened, Event, MessageReceived, Tick
from ringfold.master.journal import FinishedEntry, Journal, Outbox, decode, encode
from ringfold.master.journal_store import PART_BYTES, Deposed, JournalStore
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.store.client import StoreClient
from ringfold.store.in_memory import Fault, MemoryDriver, MemoryServer, StoreCall
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.frames import Evidence
from ringfold.wire.notices import ProbeNote
from ringfold.wire.proof import derive, prove

MS = 1_000_000
TOKEN, SECRET, NONCE = b"a token", b"run secret", b"n" * 32


class MasterHarness:
    """A master with a journal; connections and peers have the same number, unless a peer returns."""

    def __init__(self, journal: Journal | None = None, fence: int = 1, now: int = 0, links: bytes = b"") -> None:
        settings = MasterSettings(return_ms=1_000)
        self.now = now
        self.master = Master(settings, TOKEN, SECRET, fence, now, journal=journal, keeps_journal=True, links=links)
        self.last: Journal | None = None

    def step(self, event: Event) -> list[Effect]:
        effects = self.master.step(self.now, event)
        for effect in effects:
            if isinstance(effect, WriteJournal):
                self.last = effect.journal
        return effects

    def receive(self, conn: int, message: m.ToMaster) -> list[Effect]:
        return self.step(MessageReceived(conn, message))

    def join(self, conn: int) -> list[Effect]:
        nonce = bytes([conn]) * 32
        self.step(ConnectionOpened(conn, "host", nonce))
        proof = prove(TOKEN, "hello", nonce, NONCE)
        return self.receive(conn, m.Hello(VERSION, 0, "h", f"n{conn}", ["10.0.0.1"], 9, NONCE, proof))

    def resume(self, conn: int, peer: int, fence: int = 1, epoch: int = 2, secret: bytes = SECRET) -> list[Effect]:
        nonce = bytes([conn]) * 32
        self.step(ConnectionOpened(conn, "host", nonce))
        return self.receive(conn, self.resume_of(nonce, peer, fence, epoch, secret))

    def resume_of(self, nonce: bytes, peer: int, fence: int = 1, epoch: int = 2, secret: bytes = SECRET) -> m.Resume:
        member = prove(derive(secret, "member", peer), "member", nonce, NONCE)
        proof = prove(TOKEN, "resume", nonce, NONCE)
        where = (0, "h", f"n{peer}", ["10.0.0.1"], 9)
        return m.Resume(VERSION, peer, fence, epoch, *where, NONCE, proof, member)

    def back(self, conn: int, peer: int, epoch: int = 2, **brought: object) -> list[Effect]:
        effects = self.resume(conn, peer, epoch=epoch)
        return effects + self.receive(conn, m.Returned(**brought))  # type: ignore[arg-type]

    def wait(self, ms: int) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(ms // 50):
            self.now += 50 * MS
            effects += self.step(Tick())
        return effects


def pair() -> MasterHarness:
    """Peers 1 and 2 in epoch 2, installed; the update of peer 1 was ballot 1."""
    harness = MasterHarness()
    harness.join(1)
    harness.receive(1, m.Attached(1))
    harness.join(2)
    harness.receive(1, m.Vote(1, "update", 1))
    harness.receive(1, m.Sealed(1, []))
    for conn in (1, 2):
        harness.receive(conn, m.Attached(2))
    return harness


def taken_over() -> MasterHarness:
    """A second master that has read the journal of the first."""
    journal = pair().last
    assert journal is not None
    return MasterHarness(decode(encode(structs.replace(journal, syncs=4)), "here"), fence=2)


def sent(effects: list[Effect], conn: int | None = None) -> list[m.FromMaster]:
    return [each.message for each in effects if isinstance(each, SendMessage) and conn in (None, each.conn)]


# What is written


def test_a_registration_is_written_before_the_welcome() -> None:
    effects = MasterHarness().join(1)
    assert isinstance(effects[0], WriteJournal)
    assert effects[0].journal.registrations == 1


def test_a_record_is_written_whole_before_it_is_sent() -> None:
    harness = MasterHarness()
    effects = harness.join(1)
    [written] = [each.journal for each in effects if isinstance(each, WriteJournal)]
    assert written.groups[0].record in sent(effects, 1)


def test_an_eviction_is_sent_only_after_a_write() -> None:
    effects = pair().wait(6_000)
    are_evictions = [isinstance(each, SendMessage) and isinstance(each.message, m.Evicted) for each in effects]
    assert any(isinstance(each, WriteJournal) for each in effects[: are_evictions.index(True)])


def test_what_changes_nothing_is_not_written() -> None:
    harness = pair()
    assert not [each for each in harness.receive(1, m.Vote(2, "pending", 2)) if isinstance(each, WriteJournal)]


def test_a_journal_is_the_same_after_a_trip_through_bytes() -> None:
    journal = pair().master.journal()
    assert decode(encode(journal), "here") == journal


def test_bytes_that_are_no_journal_are_refused_with_the_place() -> None:
    with pytest.raises(StoreError, match="here"):
        decode(b"something else", "here")


# The outbox


def test_effects_behind_a_write_wait_for_it_and_keep_their_order() -> None:
    journal = Journal(1, b"")
    notes = [Notify(ProbeNote(str(number))) for number in range(3)]
    box = Outbox()
    assert box.put([notes[0], WriteJournal(journal), notes[1]]) == [notes[0]]
    assert box.begin() is journal
    assert box.put([notes[2]]) == []
    assert box.written() == [notes[1], notes[2]]


def test_evidence_does_not_wait_for_a_write() -> None:
    box, evidence = Outbox(), SendEvidence((1,), Evidence(1, 0, 0, 0, 0, []))
    box.put([WriteJournal(Journal(1, b""))])
    box.begin()
    assert box.put([Notify(ProbeNote("waits")), evidence]) == [evidence]


def test_heartbeats_do_not_wait_for_a_write() -> None:
    """A slow disk must not look like the death of the master, or of all its peers."""
    box = Outbox()
    box.put([WriteJournal(Journal(1, b"")), SendMessage(1, m.Seal(2, "a reason"))])
    box.begin()
    assert box.put([SendHeartbeat(1, 7, 0)]) == [SendHeartbeat(1, 7, 0)]


def test_a_heartbeat_is_sent_after_the_welcome() -> None:
    box = Outbox()
    welcome = SendMessage(1, m.Welcome(1, 1, b"", m.Liveness()))
    box.put([WriteJournal(Journal(1, b"")), welcome])
    box.begin()
    assert box.put([SendHeartbeat(1, 7, 0)]) == []
    assert box.written() == [welcome, SendHeartbeat(1, 7, 0)]


def test_one_write_makes_up_for_all_that_queue_up() -> None:
    box, journals = Outbox(), [Journal(number, b"") for number in range(3)]
    box.put([WriteJournal(journals[0])])
    assert box.begin() is journals[0]
    box.put([WriteJournal(journals[1]), WriteJournal(journals[2])])
    assert box.begin() is None
    assert box.written() == []
    assert box.begin() is journals[2]


# Coming back


def test_members_are_sealed_when_they_return() -> None:
    harness = taken_over()
    effects = harness.back(11, 1)
    assert [type(each).__name__ for each in sent(effects, 11)] == ["Challenge", "Resumed", "Registrations", "Seal"][1:]


def test_a_member_with_an_older_epoch_gets_the_journalled_record_first() -> None:
    harness = taken_over()
    [_, _, again, seal] = sent(harness.back(11, 1, epoch=1), 11)
    assert isinstance(again, m.Record)
    assert (again.epoch, again.fence) == (2, 1)
    assert seal == m.Seal(2, "the master changed")


def test_the_next_record_is_sent_when_all_have_returned_and_sealed() -> None:
    harness = taken_over()
    harness.back(11, 1, installed=True)
    assert not [each for each in sent(harness.receive(11, m.Sealed(2, []))) if isinstance(each, m.Record)]
    harness.back(12, 2)
    [first, second] = [each for each in sent(harness.receive(12, m.Sealed(2, []))) if isinstance(each, m.Record)]
    assert first == second
    assert (first.epoch, first.fence, first.reason, first.newcomers) == (3, 2, "the master changed", [])


def test_a_member_that_does_not_return_in_time_is_given_up() -> None:
    harness = taken_over()
    harness.back(11, 1)
    harness.receive(11, m.Sealed(2, []))
    [record] = [each for each in sent(harness.wait(1_100)) if isinstance(each, m.Record)]
    assert [member.peer for member in record.members] == [1]
    assert "did not return" in record.reason


def test_an_answer_that_one_voter_has_is_handed_on_to_the_other() -> None:
    harness = taken_over()
    answer = m.CallDone(5, True, m.World(2, 1, 2), 2, {1: 5, 2: 9})
    harness.back(11, 1, answers=[answer])
    assert m.CallDone(9, True, m.World(2, 1, 2), 2, {1: 5, 2: 9}) in sent(harness.back(12, 2, ballot=9), 12)


def test_a_result_is_not_forwarded_to_a_peer_in_another_call() -> None:
    harness = taken_over()
    harness.back(11, 1, answers=[m.CallDone(5, True, m.World(2, 1, 2), 2, {1: 5, 2: 9})])
    assert not [each for each in sent(harness.back(12, 2, ballot=10), 12) if isinstance(each, m.CallDone)]


def test_the_voters_of_an_admission_are_answered_by_the_next_master() -> None:
    harness = MasterHarness()
    harness.join(1)
    harness.receive(1, m.Attached(1))
    harness.join(2)
    harness.receive(1, m.Vote(1, "update", 1))
    harness.receive(1, m.Sealed(1, []))
    assert harness.last is not None
    later = MasterHarness(harness.last, fence=2)
    later.back(11, 1, ballot=1)
    later.back(12, 2)
    for conn in (11, 12):
        later.receive(conn, m.Sealed(2, []))
    later.receive(11, m.Attached(3))
    assert [each for each in sent(later.receive(12, m.Attached(3)), 11) if isinstance(each, m.CallDone)]


def with_finished(finished: FinishedEntry) -> MasterHarness:
    """A second master in whose journal this sync has finished in the group of peers 1 and 2."""
    journal = pair().last
    assert journal is not None
    groups = [structs.replace(journal.groups[0], finished=finished)]
    return MasterHarness(structs.replace(journal, groups=groups, syncs=finished.sync), fence=2)


def test_a_participant_without_plan_and_end_gets_the_end_of_a_finished_sync() -> None:
    harness = with_finished(FinishedEntry(4, 7, {1: 5, 2: 9}, b"roots"))
    harness.back(11, 1)
    assert m.SyncDone(9, 4, 7, participants=[1, 2]) in sent(harness.back(12, 2, ballot=9), 12)


def test_the_end_of_a_finished_sync_still_names_the_diverged_peers() -> None:
    found = m.Divergence(1, "p1", 7, 3, ["model"], 1, 4_000)
    harness = with_finished(FinishedEntry(4, 7, {1: 5, 2: 9}, b"roots", diverged=[found]))
    harness.back(11, 1)
    assert m.SyncDone(9, 4, 7, [found], participants=[1, 2]) in sent(harness.back(12, 2, ballot=9), 12)


def test_a_peer_that_was_out_of_a_finished_sync_gets_the_reason() -> None:
    failed = m.CallFailed(9, m.Reason("revision", "it jumped"))
    harness = with_finished(FinishedEntry(4, 7, {1: 5}, b"roots", {2: failed}))
    harness.back(11, 1)
    assert failed in sent(harness.back(12, 2, ballot=9), 12)


@pytest.mark.parametrize("redoes", [False, True])
def test_a_peer_whose_sync_finished_without_it_is_evicted(redoes: bool) -> None:
    """The old master had evicted it, and was lost before it could record an epoch: the others do not sync again."""
    harness = with_finished(FinishedEntry(4, 7, {1: 5}, b"roots"))
    harness.back(11, 1)
    voters = m.SyncVoters(3 if redoes else 4, {1: 5, 2: 8 if redoes else 9})
    replies = sent(harness.back(12, 2, ballot=9, last_sync=voters, redoes=redoes), 12)
    [evicted] = [each for each in replies if isinstance(each, m.Evicted)]
    assert "its sync finished without it" in evicted.reason
    assert not evicted.for_call, "its program made no mistake"


def test_a_sync_in_progress_does_not_wait_for_peers_that_were_out_of_it() -> None:
    harness = taken_over()
    voters = m.SyncVoters(4, {1: 5, 2: 9})
    harness.back(11, 1, ballot=5, last_sync=voters)
    harness.back(12, 2, ballot=0, last_sync=voters)
    for conn in (11, 12):
        harness.receive(conn, m.Sealed(2, []))
    for conn in (11, 12):
        harness.receive(conn, m.Attached(3))
    offer = m.Offer(0, "enforce-popular", "rf64", [])
    assert [
        each
        for each in sent(harness.receive(11, m.Vote(6, "sync", 3, offer=offer)), 11)
        if isinstance(each, m.SyncPlan)
    ]


def test_a_sync_waits_for_all_again_when_the_interrupted_one_was_given_up() -> None:
    harness = taken_over()
    voters = m.SyncVoters(4, {1: 5, 2: 9})
    harness.back(11, 1, ballot=5, last_sync=voters)
    harness.back(12, 2, ballot=0, last_sync=voters)
    for conn in (11, 12):
        harness.receive(conn, m.Sealed(2, []))
    for conn in (11, 12):
        harness.receive(conn, m.Attached(3))
    offer = m.Offer(0, "enforce-popular", "rf64", [])
    harness.receive(11, m.VoteWithdrawn(6, 10))
    assert not sent(harness.receive(11, m.Vote(7, "sync", 3, offer=offer)), 11)
    assert [
        each for each in sent(harness.receive(12, m.Vote(10, "sync", 3, offer=offer))) if isinstance(each, m.SyncPlan)
    ]


def test_without_a_returning_member_a_new_history_starts() -> None:
    harness = with_finished(FinishedEntry(4, 7, {1: 5, 2: 9}, b"roots"))
    harness.wait(1_100)
    assert harness.master.journal().groups[0].finished is None


def test_the_same_master_evicts_a_peer_that_lost_its_connection() -> None:
    harness = pair()
    [last] = [each for each in sent(harness.resume(11, 1, fence=1), 11) if not isinstance(each, m.Challenge)]
    assert isinstance(last, m.Evicted)


@pytest.mark.parametrize("secret", [SECRET, b"guessed"])
def test_a_peer_with_a_higher_fence_is_evicted_if_the_master_can_still_write(secret: bytes) -> None:
    """If the fence exists, the write fails, and the master is deposed. If it does not, the master stays."""
    effects = pair().resume(11, 1, fence=7, secret=secret)
    are_evictions = [isinstance(each, SendMessage) and isinstance(each.message, m.Evicted) for each in effects]
    assert any(isinstance(each, WriteJournal) for each in effects[: are_evictions.index(True)])


def test_a_peer_without_the_members_secret_is_evicted_and_the_member_stays_away() -> None:
    harness = taken_over()
    assert any(isinstance(each, m.Evicted) for each in sent(harness.resume(11, 1, secret=b"guessed"), 11))
    assert any(isinstance(each, m.Resumed) for each in sent(harness.resume(12, 1), 12))


def test_a_registered_peer_is_registered_again() -> None:
    harness = taken_over()
    [welcome] = [each for each in sent(harness.resume(11, 9, epoch=0), 11) if isinstance(each, m.Welcome)]
    assert welcome.peer == 3


def test_a_newcomer_is_not_admitted_while_members_are_away() -> None:
    harness = taken_over()
    assert not [each for each in sent(harness.join(11)) if isinstance(each, m.Record)]


def test_a_peer_that_knows_more_than_the_journal_is_evicted() -> None:
    [last] = [each for each in sent(taken_over().resume(11, 1, epoch=5), 11) if isinstance(each, m.Evicted)]
    assert "journal ends with epoch 2" in last.reason


def test_a_connection_that_breaks_while_it_resumes_may_be_made_again() -> None:
    harness = taken_over()
    harness.resume(11, 1)
    effects = harness.resume(12, 1)
    assert [each for each in effects if isinstance(each, CloseConnection) and each.conn == 11]
    assert any(isinstance(each, m.Resumed) for each in sent(effects, 12))


# The store


def client(server: MemoryServer, fault: Fault | None = None) -> StoreClient:
    """With a fault, every write has it."""

    def decide(call: StoreCall) -> Fault | None:
        return fault if call.kind == "write" else None

    return StoreClient(MemoryDriver(server, sleep=lambda seconds: None, fault=decide), prefix="run")


def test_a_leader_that_was_deposed_cannot_write() -> None:
    server = MemoryServer()
    old, new = JournalStore(client(server), "here"), JournalStore(client(server), "here")
    assert old.read() is None
    old.write(Journal(1, b"s"))
    assert new.read() == Journal(1, b"s")
    new.write(Journal(2, b"s"))
    with pytest.raises(Deposed):
        old.write(Journal(1, b"s", registrations=9))
    assert JournalStore(client(server), "here").read() == Journal(2, b"s")


def test_a_journal_of_any_size_is_kept_and_old_parts_go() -> None:
    server = MemoryServer()
    keeper = JournalStore(client(server), "here")
    keeper.read()
    for size in (3, 2):
        keeper.write(Journal(1, b"x" * size * PART_BYTES))
    assert JournalStore(client(server), "here").read() == Journal(1, b"x" * 2 * PART_BYTES)
    assert len(server.entries) == 1 + 3


def test_the_same_journal_written_by_another_is_not_ones_own() -> None:
    """Two masters that listen alike, and take over at once, make the same journal of what they find."""
    server = MemoryServer()
    keepers = [JournalStore(client(server), "here"), JournalStore(client(server, "late"), "here")]
    for keeper in keepers:
        assert keeper.read() is None
    keepers[0].write(Journal(2, b"s"))
    with pytest.raises(Deposed):
        keepers[1].write(Journal(2, b"s"))


def test_parts_of_a_failed_write_are_not_among_the_winners() -> None:
    server = MemoryServer()
    keepers = [JournalStore(client(server), "here") for _ in range(2)]
    for keeper in keepers:
        assert keeper.read() is None
    won = Journal(2, b"x" * PART_BYTES)
    keepers[0].write(won)
    with pytest.raises(Deposed):
        keepers[1].write(Journal(2, b"y" * PART_BYTES))
    assert JournalStore(client(server), "here").read() == won


def test_a_write_without_an_answer_that_was_made_counts() -> None:
    server = MemoryServer()
    keeper = JournalStore(client(server, "lost reply"), "here")
    keeper.read()
    keeper.write(Journal(1, b"s"))
    assert JournalStore(client(server), "here").read() == Journal(1, b"s")


def test_a_write_that_did_not_arrive_is_no_write() -> None:
    server = MemoryServer()
    keeper = JournalStore(client(server, "late"), "here")
    keeper.read()
    with pytest.raises(StoreUnknown):
        keeper.write(Journal(1, b"s"))
    assert JournalStore(client(server), "here").read() is None


def test_a_call_that_ran_out_of_time_is_answered_ahead_of_the_next_record() -> None:
    """A peer that receives the epoch first would retry an interrupted sync, and wait for the others."""
    harness, voters = taken_over(), m.SyncVoters(4, {1: 5, 2: 9})
    harness.back(11, 1, ballot=5, last_sync=voters)
    harness.receive(11, m.VoteWithdrawn(5, 10))
    harness.receive(11, m.Sealed(2, []))
    kinds = [type(each).__name__ for each in sent(harness.wait(1_100), 11)]
    assert kinds.index("CallFailed") < kinds.index("Record")
