"""A peer whose master is gone: it looks for another one, proves its identity, and sends what that one cannot know."""

from collections.abc import Sequence

import numpy as np
from test_peer_machine import (
    CONTROL,
    MASTER_NONCE,
    ME,
    MS,
    NONCE,
    TIMINGS,
    TOKEN,
    Peer,
    end_of,
    only,
    record,
    registered,
    sent,
)
from test_peer_machine import member as made_member

from ringfold.errors import Evicted, MasterUnreachable
from ringfold.peer.effects import (
    CallFinished,
    CloseConn,
    Dial,
    Effect,
    MakeControl,
    Notify,
    SealEngine,
    SyncInterrupted,
)
from ringfold.peer.events import CallBusy, CallLeave, CallVote, Closed, DialFailed, MessageReceived, Opened, Silent
from ringfold.state.shared import SharedState
from ringfold.state.snapshot import Snapshot
from ringfold.wire import frames, messages
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.messages import Challenge, Liveness, Member, Message, Resumed, SyncPlan, Vote, World
from ringfold.wire.notices import PeerDiverged
from ringfold.wire.proof import prove, proven

OWN = b"the member's own secret"


def with_secret(peer: Peer) -> Peer:
    """As if the master that welcomed it kept a journal."""
    assert peer.machine._control.ticket is not None
    peer.machine._control.ticket.secret = OWN
    return peer


def member() -> Peer:
    return with_secret(made_member())


def lost() -> Peer:
    """A member whose master's connection has just closed; it dials again."""
    peer = member()
    peer.step(Closed(CONTROL, "reset"))
    return peer


def proof_of(fence: int, secret: bytes = OWN) -> bytes:
    bound = (MASTER_NONCE, NONCE, fence.to_bytes(8, "little"))
    return prove(TOKEN, "resumed", *bound, prove(secret, "resumed", *bound))


def resume(peer: Peer, fence: int = 2) -> list[Effect]:
    """Bring a peer that looks for a master to one with this fence."""
    conn = peer.last_conn
    peer.step(Opened(conn, NONCE))
    peer.receives(conn, Challenge(MASTER_NONCE, VERSION, VERSION))
    return peer.receives(conn, Resumed(fence, proof_of(fence), Liveness()))


def brought(effects: list[Effect], peer: Peer) -> messages.Returned:
    [first, *_] = sent(effects, peer.last_conn)
    assert isinstance(first, messages.Returned)
    return first


def test_a_member_that_looks_for_its_master_logs_which_setting_ends_that() -> None:
    peer = lost()
    [notify] = only(peer.step(Closed(peer.last_conn, "Connection refused")), Notify)
    assert isinstance(notify, Notify)
    assert str(notify.notice).endswith("Trying for another 60 s (master_patience_s)")


def test_a_lost_connection_is_dialled_again_at_once() -> None:
    effects = member().step(Closed(CONTROL, "reset"))
    assert only(effects, Dial) == [Dial(0, "10.0.0.1", 48148, TIMINGS.reconnect_try_ms)]


def test_a_master_without_a_journal_is_not_waited_for() -> None:
    assert isinstance(end_of(made_member().step(Closed(CONTROL, "reset"))), MasterUnreachable)


def test_a_silent_master_is_left() -> None:
    effects = member().step(Silent(CONTROL, 5_001))
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [CONTROL]
    assert only(effects, Dial)


def test_a_peer_that_finds_no_master_in_time_ends() -> None:
    peer = lost()
    peer.step(DialFailed(0, "refused"))
    for _ in range(10_000):
        effects = peer.later(100)
        if any(type(effect).__name__ == "Ended" for effect in effects):
            break
        peer.step(DialFailed(0, "refused"))
    error = end_of(effects)
    assert isinstance(error, MasterUnreachable)
    assert "refused" in str(error)


def test_resuming_proves_the_token_and_the_members_secret() -> None:
    peer = lost()
    peer.step(Opened(peer.last_conn, NONCE))
    [claim] = sent(peer.receives(peer.last_conn, Challenge(MASTER_NONCE, VERSION, VERSION)), peer.last_conn)
    assert isinstance(claim, messages.Resume)
    assert (claim.peer, claim.fence, claim.epoch) == (ME, 1, 1)
    assert proven(TOKEN, claim.proof, "resume", MASTER_NONCE, NONCE)
    assert proven(OWN, claim.member_proof, "member", MASTER_NONCE, NONCE)


def test_a_master_with_a_higher_fence_is_gone_on_with() -> None:
    peer = lost()
    effects = resume(peer)
    assert only(effects, MakeControl)
    assert brought(effects, peer).installed


def test_a_master_with_the_same_fence_or_a_lower_one_is_left() -> None:
    for fence in (0, 1):
        peer = lost()
        conn = peer.last_conn
        effects = resume(peer, fence)
        assert not only(effects, MakeControl)
        assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [conn]


def test_a_master_that_does_not_know_the_members_secret_is_left() -> None:
    peer = lost()
    conn = peer.last_conn
    peer.step(Opened(conn, NONCE))
    peer.receives(conn, Challenge(MASTER_NONCE, VERSION, VERSION))
    assert not only(peer.receives(conn, Resumed(2, proof_of(2, b"another"), Liveness())), MakeControl)


def test_a_standby_sends_a_peer_on() -> None:
    peer = lost()
    conn = peer.last_conn
    peer.step(Opened(conn, NONCE))
    effects = peer.receives(conn, messages.Refused("standing by", again=True))
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [conn]
    assert only(peer.later(1_000), Dial)


def test_a_master_that_was_started_with_another_token_does_not_end_a_member() -> None:
    """The next start may be better. If none is, the error says what the last master answered."""
    peer = lost()
    conn = peer.last_conn
    peer.step(Opened(conn, NONCE))
    peer.receives(conn, Challenge(MASTER_NONCE, VERSION, VERSION))
    effects = peer.receives(conn, messages.Refused("another token"))
    assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [conn]
    assert only(peer.later(1_000), Dial)
    assert "another token" in str(end_of(peer.later(TIMINGS.reconnect_ms)))


def test_an_eviction_that_comes_instead_of_a_welcome_ends_the_session() -> None:
    peer = lost()
    peer.step(Opened(peer.last_conn, NONCE))
    peer.receives(peer.last_conn, Challenge(MASTER_NONCE, VERSION, VERSION))
    proof = prove(TOKEN, "evicted", MASTER_NONCE, NONCE, b"too late")
    assert isinstance(end_of(peer.receives(peer.last_conn, messages.Evicted("too late", proof))), Evicted)


def test_a_message_without_a_proof_from_a_dead_masters_port_ends_nothing() -> None:
    """An eviction, a foreign version, a refusal: a try that failed. A master that proves the token may still come."""
    lies = [
        [Challenge(MASTER_NONCE, VERSION, VERSION), messages.Evicted("go away")],
        [Challenge(MASTER_NONCE, VERSION, VERSION), messages.Evicted("go away", prove(b"guessed", "evicted", b""))],
        [messages.Evicted("go away", prove(TOKEN, "evicted", MASTER_NONCE, NONCE, b"another reason"))],
        [Challenge(MASTER_NONCE, 90, 99)],
        [Challenge(MASTER_NONCE, VERSION, VERSION), messages.Refused("no")],
        [Challenge(MASTER_NONCE, VERSION, VERSION), messages.Welcome(ME, 9, b"x" * 32, Liveness())],
    ]
    peer = lost()
    for said_by_the_impostor in lies:
        conn = peer.last_conn
        peer.step(Opened(conn, NONCE))
        for message in said_by_the_impostor:
            effects = peer.receives(conn, message)
        assert [effect.conn for effect in effects if isinstance(effect, CloseConn)] == [conn], said_by_the_impostor
        assert only(peer.later(1_000), Dial)
    assert only(resume(peer), MakeControl)
    assert not peer.machine.ended


def test_shared_answers_are_brought_along_and_those_of_one_peer_are_not() -> None:
    peer = member()
    shared = messages.CallDone(1, False, World(2, 1, 2), 3, {4: 7, ME: 1})
    peer.receives(CONTROL, shared)
    peer.receives(CONTROL, messages.CallFailed(2, messages.Reason("deadline", "x")))
    peer.step(Closed(CONTROL, "reset"))
    assert brought(resume(peer), peer).answers == [shared]


def test_a_call_that_waits_is_named_and_cast_again_in_the_next_epoch() -> None:
    peer = member()
    peer.step(CallVote(3, "update", 0, 10**15))
    peer.step(Closed(CONTROL, "reset"))
    assert brought(resume(peer), peer).ballot == 3
    conn = peer.last_conn
    peer.receives(conn, messages.Seal(1, "the master changed"))
    peer.receives(conn, record(2, [ME], fence=2))
    assert Vote(3, "update", 2) in sent(peer.receives(conn, messages.Installed(2, World(1, 1, 1))), conn)


def test_an_epoch_that_was_sealed_before_is_sealed_again() -> None:
    peer = member()
    assert only(peer.receives(CONTROL, messages.Seal(1, "x")), SealEngine)
    peer.step(Closed(CONTROL, "reset"))
    resume(peer)
    assert only(peer.receives(peer.last_conn, messages.Seal(1, "the master changed")), SealEngine)


def test_the_record_of_the_last_master_is_taken_from_the_next_one() -> None:
    peer = member()
    peer.receives(CONTROL, messages.Seal(1, "x"))
    peer.step(Closed(CONTROL, "reset"))
    resume(peer)
    peer.receives(peer.last_conn, record(2, [4, ME], fence=1))
    assert peer.machine.record is not None
    assert peer.machine.record.epoch == 2


def test_a_peer_that_was_only_registered_reports_no_epoch() -> None:
    peer = with_secret(registered())
    peer.step(Closed(CONTROL, "reset"))
    peer.step(Opened(peer.last_conn, NONCE))
    [claim] = sent(peer.receives(peer.last_conn, Challenge(MASTER_NONCE, VERSION, VERSION)), peer.last_conn)
    assert isinstance(claim, messages.Resume)
    assert claim.epoch == 0


def test_a_busy_peer_reports_that_again_with_the_remaining_time() -> None:
    peer = member()
    peer.step(CallBusy(peer.now_ns + 5_000 * MS))
    peer.step(Closed(CONTROL, "reset"))
    peer.now_ns += 2_000 * MS
    returned, busy = sent(resume(peer), peer.last_conn)
    assert isinstance(returned, messages.Returned)
    assert busy == messages.Busy(3_000)


def test_a_leave_is_sent_again() -> None:
    peer = member()
    peer.step(CallLeave())
    peer.step(Closed(CONTROL, "reset"))
    assert messages.Leave() in sent(resume(peer), peer.last_conn)


def test_a_sync_of_a_master_that_is_gone_ends_with_the_next_ones_record() -> None:
    peer = member()
    manifest = Snapshot.take(SharedState({"w": np.zeros(4)}), 1).manifest
    offer = manifest.offer("enforce-popular", stepped=False, rollback=False)
    peer.step(CallVote(4, "sync", 0, 10**15, (), offer, manifest))
    plan: Message = SyncPlan(4, 9, 0, b"s", [Member(4, "n4", "h", ["10.0.0.4"], 1)], [], [], {4: 1, ME: 4})
    peer.step(MessageReceived(CONTROL, frames.encode(plan)))
    peer.step(Closed(CONTROL, "reset"))
    assert brought(resume(peer), peer).last_sync == messages.SyncVoters(9, {4: 1, ME: 4})
    peer.receives(peer.last_conn, messages.Seal(1, "the master changed"))
    effects = peer.receives(peer.last_conn, record(2, [4, ME], fence=2))
    assert CallFinished(4, SyncInterrupted()) in effects


def test_what_an_interrupted_sync_has_found_is_not_lost() -> None:
    """A peer that has begun to receive is torn in the next sync, where its divergence is no longer visible."""
    found = messages.Divergence(4, "n4", 7, 3, ["w"], 1)
    peer = in_a_sync(10**15, diverged=[found])
    peer.step(Closed(CONTROL, "reset"))
    resume(peer)
    peer.receives(peer.last_conn, messages.Seal(1, "the master changed"))
    effects = peer.receives(peer.last_conn, record(2, [4, ME], fence=2))
    assert Notify(PeerDiverged(0, found)) in effects
    assert CallFinished(4, SyncInterrupted((found,))) in effects


def in_a_sync(deadline_ns: int, diverged: Sequence[messages.Divergence] = ()) -> Peer:
    """A member in a sync, ballot 4, that the master has planned."""
    peer = member()
    manifest = Snapshot.take(SharedState({"w": np.zeros(4)}), 1).manifest
    offer = manifest.offer("enforce-popular", stepped=False, rollback=False)
    peer.step(CallVote(4, "sync", 0, deadline_ns, (), offer, manifest))
    plan: Message = SyncPlan(4, 9, 0, b"s", [Member(4, "n4", "h", ["10.0.0.4"], 1)], [], [], {4: 1, ME: 4}, [*diverged])
    peer.step(MessageReceived(CONTROL, frames.encode(plan)))
    return peer


def test_a_call_that_ran_out_of_time_without_a_master_is_withdrawn_at_the_next_one() -> None:
    peer = lost()
    peer.step(CallVote(3, "update", 0, 0))
    peer.later(10)
    [returned, withdrawn] = sent(resume(peer), peer.last_conn)
    assert isinstance(returned, messages.Returned)
    assert isinstance(withdrawn, messages.VoteWithdrawn)
    assert withdrawn.ballot == returned.ballot == 3


def test_a_call_that_did_not_ask_for_its_timeout_starts_its_clock_again_at_the_next_master() -> None:
    peer = member()
    peer.step(CallVote(1, "update", 0, peer.now_ns + 1_000 * MS, final=False))
    peer.step(Closed(CONTROL, "reset"))
    peer.later(1_000)
    assert [type(each) for each in sent(resume(peer), peer.last_conn)] == [messages.Returned]
    assert only(peer.later(999), CallFinished) == []


def test_a_sync_that_ran_out_of_time_is_not_called_again() -> None:
    """Whether it is in the sync that is decided again must be one answer: it reports to the master that it is not."""
    peer = in_a_sync(deadline_ns=0)
    peer.later(10)
    peer.step(Closed(CONTROL, "reset"))
    resume(peer)
    peer.receives(peer.last_conn, messages.Seal(1, "the master changed"))
    assert not only(peer.receives(peer.last_conn, record(2, [4, ME], fence=2)), CallFinished)
    late = messages.Reason("deadline", "too late")
    assert only(peer.receives(peer.last_conn, messages.CallFailed(4, late)), CallFinished) == [CallFinished(4, late)]
