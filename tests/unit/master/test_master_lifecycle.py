"""How runs end: finished or abandoned, and which peers may join after that."""

import pytest
from msgspec import structs
from test_master import NONCE, TOKEN, MasterHarness, hello

from ringfold.config import check_run_name
from ringfold.errors import ConfigError
from ringfold.master.effects import WriteJournal
from ringfold.master.events import ConnectionClosed
from ringfold.master.journal import Journal, decode, encode
from ringfold.master.lifecycle import Life
from ringfold.master.machine import Master
from ringfold.master.settings import MasterSettings
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION
from ringfold.wire.notices import RunBegun, RunEnded
from ringfold.wire.proof import prove, proven

ROOT = b"r" * 8


def offer(revision: int, root: bytes = ROOT, *, torn: bool = False, rollback: bool = False) -> m.Offer:
    key = m.KeyOffer("a", "<f4", [4], root)
    return m.Offer(revision, "enforce-popular", "rf64", [key], torn, False, rollback)


class Named(MasterHarness):
    """The same with a run of this name, and a journal."""

    def __init__(self, name: str = "nightly-7", journal: Journal | None = None, fence: int = 1) -> None:
        super().__init__()
        self.master = Master(
            MasterSettings(return_ms=500),
            TOKEN,
            b"secret",
            fence,
            journal=journal,
            keeps_journal=True,
            name=name,
            wall_s=lambda: 86_400,
        )

    def sync(self, conn: int, given: m.Offer, ballot: int = 1) -> list[m.FromMaster]:
        epoch = self.record(conn).epoch
        return self.receive(conn, m.Vote(ballot, "sync", epoch, offer=given))

    def alone(self, conn: int, revision: int | None = None) -> None:
        """A peer joins an empty run, and finishes a sync."""
        self.join(conn)
        self.receive(conn, m.Attached(self.record(conn).epoch))
        if revision is not None:
            assert any(isinstance(reply, m.SyncDone) for reply in self.sync(conn, offer(revision)))

    def last_journal(self) -> Journal:
        return [effect.journal for effect in self.effects if isinstance(effect, WriteJournal)][-1]

    def killed(self, conn: int) -> None:
        self.conns.remove(conn)
        self.step(ConnectionClosed(conn, "reset"))

    def ends(self) -> list[tuple[str, int]]:
        return [(notice.how, notice.revision) for notice in self.notices(RunEnded) if isinstance(notice, RunEnded)]


def why(replies: list[m.FromMaster]) -> str:
    return " ".join(each.reason.text for each in replies if isinstance(each, m.CallFailed))


def test_the_last_peer_that_leaves_finishes_the_run() -> None:
    harness = Named()
    harness.alone(1, 5)
    harness.receive(1, m.Leave())
    assert harness.ends() == [("finished", 5)]
    assert harness.last_journal().life.end == "finished", "it is written before it is reported"


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_peer_that_is_killed_or_stopped_does_not_finish_the_run(how: str) -> None:
    harness = Named()
    harness.alone(1, 5)
    if how == "killed":
        harness.killed(1)
    else:
        harness.receive(1, m.Leave(stopped=True))
    assert harness.ends() == [("abandoned", 5)]


def test_a_finished_named_run_refuses_newcomers_at_once_with_advice() -> None:
    harness = Named()
    harness.alone(1, 5000)
    harness.receive(1, m.Leave())
    [refused] = harness.join(2)
    assert isinstance(refused, m.Refused)
    assert refused.reason == (
        "run nightly-7 finished at revision 5000 (1970-01-02 00:00 UTC): choose another name, or free this one with "
        "`ringfold runs forget nightly-7`"
    )
    assert proven(TOKEN, refused.proof, "refused", bytes([2]) * 32, NONCE, refused.reason.encode())


def test_a_peer_that_waits_for_admission_when_the_run_finishes_is_notified() -> None:
    harness = Named()
    harness.alone(1, 5)
    harness.join(2)
    harness.receive(1, m.Leave())
    [evicted] = harness.sent(2, m.Evicted)
    assert isinstance(evicted, m.Evicted)
    assert "finished at revision 5" in evicted.reason
    assert not harness.sent(2, m.Record)


def test_a_later_master_knows_that_the_run_is_finished() -> None:
    harness = Named()
    harness.alone(1, 5)
    harness.receive(1, m.Leave())
    later = Named(journal=decode(encode(harness.last_journal()), "here"), fence=2)
    assert "finished at revision 5" in str(later.join(2))


def test_the_default_run_begins_again_after_it_finished() -> None:
    harness = Named("default")
    harness.alone(1, 5)
    harness.receive(1, m.Leave())
    harness.alone(2, 0)
    assert harness.notices(RunBegun) == [RunBegun("default", 2)]
    assert harness.record(2).epoch == 2, "epochs go on"


def test_the_default_run_starts_again_when_all_were_killed_and_no_peer_has_a_checkpoint() -> None:
    harness = Named("default")
    harness.alone(1, 5)
    harness.killed(1)
    harness.alone(2, 0)
    [begun] = harness.notices(RunBegun)
    assert begun == RunBegun("default", 2, 5)
    assert begun.level == "warning"
    assert "abandoned at revision 5" in str(begun)


def test_the_lost_state_of_the_default_run_still_counts_for_a_peer_with_an_older_one() -> None:
    harness = Named("default")
    harness.alone(1, 5)
    harness.killed(1)
    harness.alone(2)
    assert "revision 5 of the shared state is lost" in why(harness.sync(2, offer(4)))
    assert any(isinstance(reply, m.SyncDone) for reply in harness.sync(2, offer(5), 2)), "exactly that one goes on"
    assert not harness.notices(RunBegun)


def test_a_state_that_is_lost_while_a_member_is_there_starts_no_new_incarnation() -> None:
    """A newcomer that has no state yet does not turn the death of all others into a fresh start."""
    harness = Named("default")
    harness.alone(1, 5)
    harness.join(2)
    harness.receive(1, m.Vote(2, "update", 1))
    harness.seal_and_attach(1, [1], [1, 2])
    harness.killed(1)
    harness.receive(2, m.Sealed(2, []))
    harness.receive(2, m.Attached(3))
    assert "revision 5 of the shared state is lost" in why(harness.sync(2, offer(0)))


def test_a_run_with_a_name_stays_lost_until_it_is_forgotten() -> None:
    harness = Named()
    harness.alone(1, 5)
    harness.killed(1)
    harness.alone(2)
    text = why(harness.sync(2, offer(0)))
    assert "revision 5 of the shared state is lost" in text
    assert "`ringfold runs forget nightly-7`" in text
    harness.receive(2, m.Leave())
    assert harness.ends() == [("abandoned", 5)] * 2, (
        "a peer that finds the state lost and leaves does not finish the run"
    )


def test_a_later_master_knows_that_the_state_is_lost() -> None:
    """No member returns: the default run is free, and a named run keeps its state."""
    for name, lost in (("default", False), ("nightly-7", True)):
        harness = Named(name)
        harness.alone(1, 5)
        later = Named(name, decode(encode(harness.last_journal()), "here"), fence=2)
        later.wait(1_000)
        later.alone(2)
        assert ("is lost" in why(later.sync(2, offer(0)))) == lost


def test_a_run_whose_state_was_recovered_can_finish() -> None:
    harness = Named()
    harness.alone(1, 5)
    harness.killed(1)
    harness.alone(2, 5)
    harness.receive(2, m.Leave())
    assert harness.ends() == [("abandoned", 5), ("finished", 5)]


def test_a_journal_of_the_version_before_does_not_bind_the_default_run_for_ever() -> None:
    """It has a state, no members, and no word about how they went."""
    harness = Named("default")
    harness.alone(1, 5)
    harness.killed(1)
    old = structs.replace(harness.last_journal(), life=Life())
    old = structs.replace(old, groups=[structs.replace(group, orphaned_sync=0) for group in old.groups])
    later = Named("default", decode(encode(old), "here"), fence=2)
    later.alone(2, 0)
    assert later.notices(RunBegun) == [RunBegun("default", 2, 5)]


def test_a_sync_that_fails_anyway_does_not_begin_the_run_again() -> None:
    """No peer has a whole state: the lost state still counts."""
    harness = Named("default")
    harness.alone(1, 5)
    harness.killed(1)
    harness.alone(2)
    assert "revision 5 of the shared state is lost" in why(harness.sync(2, offer(0, torn=True)))
    assert not harness.notices(RunBegun)
    assert any(isinstance(reply, m.SyncDone) for reply in harness.sync(2, offer(5), 2))


@pytest.mark.parametrize("name", ["a" * 65, "a b", "..", "-a", "ü", "a/b", "a\n"])
def test_an_invalid_run_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ConfigError, match="use up to 64 letters, digits, dots, underscores and hyphens"):
        check_run_name(name)


def test_no_name_is_the_default_run() -> None:
    assert check_run_name("") == check_run_name("default") == "default"
    assert check_run_name("nightly-7.b_2") == "nightly-7.b_2"


def test_a_claim_of_the_status_is_not_refused_by_a_finished_run() -> None:
    harness = Named()
    harness.alone(1, 5)
    harness.receive(1, m.Leave())
    harness.open(9)
    proof = prove(TOKEN, "status", bytes([9]) * 32, NONCE)
    assert isinstance(harness.receive(9, m.StatusRequest(PROTOCOL_VERSION, NONCE, proof))[0], m.Status)
    assert hello(1).group == 0
