"""A master whose peers were all lost: lineages in its journal, which peers it waits for, and how the run continues."""

from pathlib import Path

import pytest
from msgspec import structs
from test_master_journal import SECRET, TOKEN, MasterHarness, sent

from ringfold.master.effects import Effect, Notify
from ringfold.master.events import ConnectionClosed
from ringfold.master.journal import Journal, decode, encode
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.master.syncs import lasting_name, missing_names
from ringfold.wire import messages as m
from ringfold.wire.notices import ResumeDelayed, StateRolledBack

WAIT_MS = 3_000
KEYS = [m.KeyOffer("w", "float32", [4], b"12345678")]
OTHER = [m.KeyOffer("w", "float32", [4], b"87654321")]


class Run(MasterHarness):
    """A master that never evicts: no peer sends heartbeats here. Peers vote in epochs, and their names are chosen."""

    def __init__(self, journal: Journal | None = None, fence: int = 1, wait_ms: int = WAIT_MS) -> None:
        super().__init__()
        liveness = m.Liveness(heartbeat_ms=50, suspect_after_ms=10**8, evict_after_ms=10**9)
        settings = MasterSettings(return_ms=1_000, resume_wait_ms=wait_ms, liveness=liveness)
        self.master = Master(settings, TOKEN, SECRET, fence, 0, journal=journal, keeps_journal=True)

    def vote(self, conn: int, epoch: int, offer: m.Offer, ballot: int = 9) -> list[Effect]:
        return self.receive(conn, m.Vote(ballot, "sync", epoch, offer=offer))

    def attach(self, epoch: int, *conns: int) -> None:
        for conn in conns:
            self.receive(conn, m.Attached(epoch))

    def finish(self, effects: list[Effect], conn: int) -> list[Effect]:
        """All receivers are complete."""
        plans = [each for each in sent(effects, conn) if isinstance(each, m.SyncPlan)]
        return self.receive(conn, m.SyncReport(plans[0].sync, "complete"))


def offer(revision: int, lineage: m.Lineage | None = None, **more: object) -> m.Offer:
    given = {"stepped": True, "is_saved": True, "lineage": lineage, "is_loaded": lineage is not None, **more}
    return m.Offer(revision, "enforce-popular", "rf64", KEYS, **given)  # type: ignore[arg-type]


def synced(revision: int = 12, count: int = 2) -> tuple[Run, m.Lineage]:
    """Peers 1 and 2, named n1 and n2, have finished a sync."""
    run = Run()
    run.join(1)
    run.attach(1, 1)
    if count == 2:
        run.join(2)
        run.receive(1, m.Vote(1, "update", 1))
        run.receive(1, m.Sealed(1, []))
        run.attach(2, 1, 2)
    for conn in range(1, count + 1):
        effects = run.vote(conn, count, offer(revision))
    [done] = [each for each in sent(effects, 1) if isinstance(each, m.SyncDone)]
    assert done.lineage is not None
    return run, done.lineage


def all_lost(revision: int = 12, wait_ms: int = WAIT_MS) -> tuple[Run, m.Lineage]:
    """The same after all peers were killed, and the master too."""
    run, lineage = synced(revision)
    assert run.last is not None
    later = Run(decode(encode(run.last), "here"), fence=2, wait_ms=wait_ms)
    later.wait(1_100)
    return later, lineage


def waits(effects: list[Effect], conn: int) -> list[m.ResumeWaits]:
    return [each for each in sent(effects, conn) if isinstance(each, m.ResumeWaits)]


def plans(effects: list[Effect]) -> list[m.SyncPlan]:
    return [each for each in sent(effects) if isinstance(each, m.SyncPlan)]


# By what a peer is known


def member(name: str, host: str = "gpu-7") -> m.Member:
    return m.Member(1, name, host, [], 9)


@pytest.mark.parametrize(("name", "key"), [("a", "a"), ("gpu-7:4711", "gpu-7"), ("gpu-8:4711", "gpu-8:4711"), ("", "")])
def test_a_name_of_host_and_process_is_known_by_its_host(name: str, key: str) -> None:
    assert lasting_name(member(name)) == key


def test_names_are_counted() -> None:
    assert missing_names(["a", "a", "b"], ["a", "c"]) == ["a", "b"]
    assert missing_names(["a"], ["a", "a"]) == []


# Lineages


def test_a_sync_that_finishes_continues_the_lineage() -> None:
    run, lineage = synced(12)
    assert lineage.ancestors == []
    run.vote(1, 2, offer(13), ballot=10)
    [done] = [each for each in sent(run.vote(2, 2, offer(13), ballot=10), 1) if isinstance(each, m.SyncDone)]
    assert done.lineage == lineage
    assert done.rollback is None


def test_a_rollback_begins_a_lineage_that_branches_from_what_won() -> None:
    run, lineage = all_lost(12)
    run.join(11)
    run.attach(3, 11)
    effects = run.vote(11, 3, offer(10, lineage, rollback=True))
    [done] = [each for each in sent(effects, 11) if isinstance(each, m.SyncDone)]
    assert done.lineage is not None
    assert done.lineage.id != lineage.id
    assert done.lineage.run == lineage.run, "the journal has kept the run"
    assert done.lineage.ancestors == [m.Branch(lineage.id, 10)]
    assert done.rollback == m.Rollback(10, 12, 3)
    assert run.last is not None
    assert run.last.groups[0].lineage == done.lineage


def test_the_last_revision_from_a_disk_begins_a_lineage_too() -> None:
    """A peer may have saved a later one that was never synced: the run does not use it again."""
    run, lineage = all_lost(12)
    run.join(1)
    run.attach(3, 1)
    [done] = [each for each in sent(run.vote(1, 3, offer(12)), 1) if isinstance(each, m.SyncDone)]
    assert done.lineage is not None
    assert done.lineage.ancestors == [m.Branch(lineage.id, 12)]
    assert done.rollback is None


def test_a_fresh_start_that_all_agree_to_has_no_past() -> None:
    run, _ = all_lost(12)
    run.join(11)
    run.attach(3, 11)
    effects = run.vote(11, 3, offer(0, rollback=True))
    [done] = [each for each in sent(effects, 11) if isinstance(each, m.SyncDone)]
    assert done.lineage is not None
    assert done.lineage.ancestors == []
    assert done.rollback == m.Rollback(0, 12, 3, is_agreed=True)


def test_another_master_of_another_run_gives_other_ids() -> None:
    _, one = synced()
    run = Run()
    run.master = Master(run.master.settings, TOKEN, b"another secret", 1, 0)
    run.join(1)
    run.attach(1, 1)
    [done] = [each for each in sent(run.vote(1, 1, offer(0)), 1) if isinstance(each, m.SyncDone)]
    assert done.lineage is not None
    assert {done.lineage.run, done.lineage.id}.isdisjoint({one.run, one.id})


def test_a_finished_sync_outlives_a_master_that_no_member_returns_to() -> None:
    run, lineage = all_lost()
    [group] = run.master.journal().groups
    assert group.finished is not None
    assert (group.finished.revision, group.finished.names, group.lineage) == (12, ["n1", "n2"], lineage)


def test_a_state_without_arrays_is_never_lost_with_its_master() -> None:
    run = Run()
    run.join(1)
    run.attach(1, 1)
    run.vote(1, 1, structs.replace(offer(5), keys=[]))
    assert run.last is not None
    later = Run(run.last, fence=2)
    later.wait(1_100)
    assert later.master.journal().groups[0].finished is None


def test_a_journal_of_the_version_before_is_read_and_names_no_lineage() -> None:
    raw = (Path(__file__).parents[1] / "written_before/journal.msgpack").read_bytes()
    journal = decode(raw, "here")
    [group] = journal.groups
    assert group.finished is not None
    assert (group.finished.revision, group.finished.names, group.lineage) == (7, [], None)
    later = Run(journal, fence=2)
    later.back(11, 1)
    later.back(12, 2)
    assert later.master.journal().groups[0].finished == group.finished


# Waiting


def test_the_first_returning_peer_waits_for_the_others_by_name_and_is_notified() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    effects = run.vote(1, 3, offer(10, lineage))
    assert waits(effects, 1) == [m.ResumeWaits(9, 12, ["n2"], WAIT_MS)]
    assert Notify(ResumeDelayed(0, 12, ["n2"], WAIT_MS)) in effects
    [waiting] = run.master.waiting(run.now)
    assert "'n2' may come: for another 3.0 s (resume_wait_s)" in waiting.what
    assert not plans(run.wait(WAIT_MS - 100))


def test_after_the_wait_the_sync_continues_without_them() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    run.vote(1, 3, offer(10, lineage))
    effects = run.wait(WAIT_MS)
    assert [plan.revision for plan in plans(effects)] == [10]
    assert Notify(StateRolledBack(0, m.Rollback(10, 12, 3))) in effects
    assert run.master.waiting(run.now) == []


def test_when_all_are_there_the_sync_continues_at_once() -> None:
    """They join together, and the checkpoints of all count."""
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    run.vote(1, 3, offer(5, lineage))
    run.join(2)  # the waiting peers would have to vote, and need not
    run.receive(1, m.Sealed(3, []))
    run.attach(4, 1, 2)
    assert not plans(run.vote(1, 4, offer(5, lineage)))
    effects = run.vote(2, 4, structs.replace(offer(10, lineage), keys=OTHER))
    assert [plan.revision for plan in plans(effects)] == [10, 10]
    done = [each for each in sent(run.finish(effects, 1)) if isinstance(each, m.SyncDone)]
    assert [each.rollback for each in done] == [m.Rollback(10, 12, 4)] * 2


def test_a_new_peer_does_not_end_the_wait() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    run.vote(1, 3, offer(10, lineage))
    run.join(7)
    run.receive(1, m.Sealed(3, []))
    run.attach(4, 1, 7)
    run.vote(1, 4, offer(10, lineage))
    effects = run.vote(7, 4, offer(0))
    assert waits(effects, 7)
    assert not plans(effects)


@pytest.mark.parametrize(
    "brought",
    [{"rollback": True}, {"stepped": False}],
    ids=["all agree to a rollback", "a program that calls for its syncs itself"],
)
def test_peers_that_need_not_wait(brought: dict[str, bool]) -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    assert plans(run.vote(1, 3, offer(10, lineage, **brought)))


def test_exactly_the_last_revision_does_not_wait() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    assert plans(run.vote(1, 3, offer(12, lineage)))


def test_the_last_revision_on_a_disk_is_requested_at_once() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    effects = run.vote(1, 3, offer(13, lineage, checkpoints=[m.Branch(lineage.id, each) for each in (13, 12, 10)]))
    [failed] = [each for each in sent(effects, 1) if isinstance(each, m.CallFailed)]
    assert failed.reason.checkpoint == m.Branch(lineage.id, 12)


def test_a_wait_is_not_repeated() -> None:
    """First it waits for peers, then a checkpoint is requested and loaded."""
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    listed = [m.Branch(lineage.id, 13), m.Branch(lineage.id, 10)]
    run.vote(1, 3, offer(13, lineage, checkpoints=listed))
    [failed] = [each for each in sent(run.wait(WAIT_MS), 1) if isinstance(each, m.CallFailed)]
    assert failed.reason.checkpoint == m.Branch(lineage.id, 10)
    assert plans(run.vote(1, 3, offer(10, lineage, checkpoints=listed), ballot=10))


def test_a_participant_that_is_still_there_does_not_wait() -> None:
    run, _ = synced()
    effects = run.vote(1, 2, offer(13), ballot=10) + run.vote(2, 2, offer(13), ballot=10)
    assert plans(effects)


def test_a_lost_state_waits_too_before_it_is_an_error() -> None:
    run, _ = all_lost()
    run.join(1)
    run.attach(3, 1)
    assert waits(run.vote(1, 3, offer(1)), 1)
    [failed] = [each for each in sent(run.wait(WAIT_MS), 1) if isinstance(each, m.CallFailed)]
    assert failed.reason.kind == "state_lost"
    again = run.vote(1, 3, offer(1), ballot=10)
    assert [each for each in sent(again, 1) if isinstance(each, m.CallFailed)], "no peer is waited for twice"


def test_the_default_run_waits_too_before_it_starts_again() -> None:
    run, _ = all_lost()
    run.join(1)
    run.attach(3, 1)
    assert waits(run.vote(1, 3, offer(0)), 1)
    [done] = [each for each in sent(run.wait(WAIT_MS), 1) if isinstance(each, m.SyncDone)]
    assert done.revision == 0


def test_waiting_peers_are_notified_again_and_again() -> None:
    run, lineage = all_lost(wait_ms=60_000)
    run.join(1)
    run.attach(3, 1)
    run.vote(1, 3, offer(10, lineage))
    assert [each.left_ms for each in waits(run.wait(11_000), 1)] == [55_000, 50_000]


def test_a_call_that_times_out_names_the_peers_it_waited_for() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    run.vote(1, 3, offer(10, lineage))
    [failed] = [each for each in sent(run.receive(1, m.VoteWithdrawn(9, 700)), 1) if isinstance(each, m.CallFailed)]
    assert "for 'n2' to return with a checkpoint" in failed.reason.text
    assert not waits(run.wait(6_000), 1)
    assert run.master.waiting(run.now) == []


def test_when_the_waiting_peers_are_gone_the_next_ones_wait_from_the_start() -> None:
    run, lineage = all_lost()
    run.join(1)
    run.attach(3, 1)
    run.vote(1, 3, offer(10, lineage))
    run.wait(WAIT_MS - 200)
    run.receive(1, m.Leave())
    run.receive(1, m.Sealed(3, []))
    run.wait(100)
    run.join(21)
    run.attach(4, 21)
    run.vote(21, 4, offer(10, lineage))
    assert not plans(run.wait(WAIT_MS - 200))


def test_a_run_of_several_groups_does_not_go_back_by_itself() -> None:
    """Its other shards are at another step."""
    run, lineage = synced()
    other = run.master._run.group(1)
    other.finished = run.master._run.groups[0].finished
    for conn in (1, 2):
        run.step(ConnectionClosed(conn, "it was killed"))
    run.join(3)
    run.attach(3, 3)
    run.vote(3, 3, offer(10, lineage))
    [failed] = [each for each in sent(run.wait(WAIT_MS), 3) if isinstance(each, m.CallFailed)]
    assert failed.reason.kind == "state_lost"
    assert "several groups, which must continue from the same revision" in failed.reason.text
    assert plans(run.vote(3, 3, offer(12, lineage), ballot=10)), "exactly the last revision will do"


def test_several_groups_without_returning_members_start_again() -> None:
    run, _ = synced()
    assert run.last is not None
    [group] = run.last.groups
    later = Run(structs.replace(run.last, groups=[group, structs.replace(group, group=1, record=None)]), fence=2)
    later.wait(1_100)
    assert [each.finished for each in later.master.journal().groups] == [None, None]


# Invalid messages


@pytest.mark.parametrize(
    "wrong",
    [
        {"checkpoints": [m.Branch("a", 1)] * 65},
        {"checkpoints": [m.Branch("a", -1)]},
        {"checkpoints": [m.Branch("", 1)]},
        {"lineage": m.Lineage("r", "x" * 65)},
        {"lineage": m.Lineage("r", "a", [m.Branch("a", 1)] * 65)},
    ],
)
def test_an_offer_that_no_honest_peer_makes_ends_its_connection(wrong: dict[str, object]) -> None:
    run, _ = all_lost()
    run.join(1)
    run.attach(3, 1)
    effects = run.vote(1, 3, structs.replace(offer(1), **wrong))
    assert [each for each in sent(effects, 1) if isinstance(each, m.Evicted)]
