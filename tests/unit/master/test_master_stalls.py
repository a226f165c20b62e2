"""Members that keep others waiting, and when they are evicted: the rule by itself, and in the master."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_master import NONCE, TOKEN, MasterHarness

from ringfold.master.events import HeartbeatReceived, Tick
from ringfold.master.settings import MasterSettings
from ringfold.master.stalls import (
    AbsentMember,
    CallCounts,
    RecentDurations,
    Stall,
    StallDecision,
    WaitKey,
    judge,
    silent_member,
    stall_timeout,
)
from ringfold.units import MS
from ringfold.wire import messages as m
from ringfold.wire.base import PROTOCOL_VERSION as VERSION
from ringfold.wire.descriptor import Descriptor
from ringfold.wire.frames import Announced, Heartbeat
from ringfold.wire.messages import OpRef
from ringfold.wire.notices import PeerGone, PeersStalled
from ringfold.wire.proof import prove

KEY = WaitKey("op", 0, OpRef(0, 17))
S = 1_000 * MS
CALLED = Descriptor(0, retry=1).pack()


def stall(absent: list[AbsentMember], since: dict[int, int] | None = None, **changed: object) -> Stall:
    waiting = {1: 0, 2: 0, 4: 0} if since is None else since
    return Stall(KEY, "op", waiting, absent, {0: len(waiting) + len(absent)}, **changed)  # type: ignore[arg-type]


# The rule


def test_a_minority_is_evicted_a_timeout_after_the_last_of_the_others_has_called() -> None:
    assert judge(0, stall([AbsentMember(3)], {1: 0, 2: 7 * S, 4: 3 * S}), 60 * S) == StallDecision(67 * S)


def test_the_timeout_starts_at_the_last_progress_of_the_absent() -> None:
    assert judge(0, stall([AbsentMember(3, last_progress_ns=9 * S)]), 60 * S) == StallDecision(69 * S)


def test_the_timeout_starts_at_the_end_of_busy() -> None:
    late = stall([AbsentMember(3, busy_until_ns=90 * S)])
    assert judge(80 * S, late, 60 * S) == StallDecision(None, "busy for another 10.0 s")
    assert judge(91 * S, late, 60 * S) == StallDecision(150 * S)


@pytest.mark.parametrize(
    ("late", "timeout", "why"),
    [
        (stall([AbsentMember(3)]), None, "off"),
        (stall([AbsentMember(3, is_idle=False)]), 60 * S, "peer 3 may be in a call, too"),
        (stall([AbsentMember(3, calls=2)]), 60 * S, "first calls"),
        (stall([AbsentMember(2), AbsentMember(3)], {1: 0, 4: 0}), 60 * S, "no minority"),
        (stall([AbsentMember(2)], {1: 0}), 60 * S, "no minority"),
        (stall([AbsentMember(3)], excuse="it waits for more peers"), 60 * S, "it waits for more peers"),
    ],
)
def test_no_member_is_evicted_if_it_may_not_be_at_fault(late: Stall, timeout: int | None, why: str) -> None:
    assert judge(1_000 * S, late, timeout) == StallDecision(None, why)


def test_a_whole_group_that_is_slow_is_no_minority_in_a_call_of_the_run() -> None:
    late = Stall(
        WaitKey("call", -1), "update_topology", {1: 0, 2: 0, 3: 0, 4: 0}, [AbsentMember(5, group=1)], {0: 4, 1: 1}
    )
    assert judge(0, late, 60 * S).why == "no minority"


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 200), st.integers(0, 200))
def test_only_strict_minorities_are_ever_evicted(waiting: int, absent: int, now_s: int, busy_s: int) -> None:
    late = [AbsentMember(10 + each, busy_until_ns=busy_s * S) for each in range(absent)]
    judged = judge(now_s * S, stall(late, {each: each * S for each in range(waiting)}), 60 * S)
    if judged.evict_at_ns is not None:
        assert absent < waiting
        assert judged.evict_at_ns >= max(busy_s, waiting - 1) * S + 60 * S


def test_the_timeout_is_a_multiple_of_what_is_usual_within_its_bounds() -> None:
    settings = MasterSettings()
    assert stall_timeout(settings, 0) == 60 * S
    assert stall_timeout(settings, 20 * S) == 100 * S
    assert stall_timeout(settings, 100 * S) == 300 * S
    assert stall_timeout(MasterSettings(stall_timeout_ms=5_000), 100 * S) == 5 * S
    assert stall_timeout(MasterSettings(stall_timeout_ms=900_000), 0) == 300 * S
    assert stall_timeout(MasterSettings(stall_timeout_ms="off"), 0) is None


def test_one_slow_call_is_not_usual_and_two_are() -> None:
    usual = RecentDurations()
    for took in (1, 2, 90, 1):
        usual.add(took * S)
    assert usual.usual_ns == 2 * S
    usual.add(80 * S)
    assert usual.usual_ns == 80 * S
    for _ in range(16):
        usual.add(S)
    assert usual.usual_ns == S


def test_calls_are_counted_over_epochs_and_from_the_admission_of_a_member_on() -> None:
    counts = CallCounts()
    counts.begin_epoch(1, [1, 2])
    counts.observe(0, 5)
    assert counts.made(1, OpRef(0, 6)) == 6
    counts.begin_epoch(2, [1, 2, 3])
    assert counts.made(1, OpRef(0, 0)) == 5
    assert counts.made(3, OpRef(0, 0)) == 0
    assert counts.made(3, OpRef(0, 4)) == 4
    assert counts.made(1, OpRef(7, 1)) == 1, "another tag"


def test_a_member_that_receives_and_sends_nothing_is_found() -> None:
    ring = [1, 2, 3, 4]
    starving = {1: 70_000, 2: 65_000, 4: 61_000}
    assert silent_member(ring, {**starving, 3: 100}, {}, 60_000) == 3
    assert silent_member(ring, {**starving, 3: 40_000}, {}, 60_000) is None, "it starves as well"
    assert silent_member(ring, {**starving, 3: 100}, {2: 500}, 60_000) is None, "a link may be at fault"
    assert silent_member(ring, {1: 70_000, 2: 65_000, 3: 0, 4: 0}, {}, 60_000) is None, "two do not starve"
    assert silent_member([1, 2], {1: 70_000, 2: 0}, {}, 60_000) is None


# In the master


class SlowHarness(MasterHarness):
    """A master and peers of which each is in an op, or in its own code."""

    def __init__(self, size: int, **changed: object) -> None:
        super().__init__(**changed)
        self.ring(size)
        self.epoch = 2
        self.began: dict[int, tuple[OpRef, int]] = {}
        self.reports: dict[int, dict[str, int]] = {}

    def call(self, *peers: int, sequence: int = 9) -> None:
        self.began |= dict.fromkeys(peers, (OpRef(0, sequence), self.now))

    def commit(self, *peers: int) -> None:
        for peer in peers:
            self.began.pop(peer, None)

    def run_for(self, ms: int) -> None:
        end = self.now + ms * MS
        while self.now < end:
            self.now += 50 * MS
            if self.now % (250 * MS) == 0:
                self.send_heartbeats()
            self.step(Tick())

    def send_heartbeats(self) -> None:
        for conn in list(self.conns):
            self.heartbeats[conn] = self.heartbeats.get(conn, 0) + 1
            ops = []
            if conn in self.began:
                op, since = self.began[conn]
                age_ms = (self.now - since) // MS
                ops = [Announced(op.tag, op.sequence, age_ms, 0, False)] if age_ms >= 100 else []
            heartbeat = Heartbeat(self.heartbeats[conn], self.last_heartbeat, self.epoch, ops=ops)
            self.step(HeartbeatReceived(conn, replace(heartbeat, **self.reports.get(conn, {}))))

    @property
    def evicted(self) -> list[int]:
        return [each.peer for each in self.notices(PeerGone) if isinstance(each, PeerGone) and each.how == "evicted"]

    def timeout(self, peer: int, *, sequence: int = 9, waited_ms: int = 1_000, final: bool = False) -> None:
        self.receive(peer, m.OpTimeout(self.epoch, OpRef(0, sequence), waited_ms, CALLED, final))

    def eviction(self) -> tuple[str, int | None]:
        [waiting] = self.master.waiting(self.now)
        return waiting.eviction, waiting.evict_in_ms


def test_a_member_that_all_others_wait_for_is_evicted_with_advice() -> None:
    harness = SlowHarness(4)
    harness.run_for(1_000)
    harness.call(1, 2, 4)
    harness.run_for(59_000)
    assert harness.evicted == []
    harness.run_for(2_000)
    assert harness.evicted == [3]
    [evicted] = harness.sent(3, m.Evicted)
    assert isinstance(evicted, m.Evicted)
    assert evicted.reason.startswith("peers 1 (p1), 2 (p2) and 4 (p4) waited 60.")
    assert "run.busy(up_to_s=...)" in evicted.reason
    assert "stall_timeout_s" in evicted.reason
    [stalled] = harness.notices(PeersStalled)
    assert isinstance(stalled, PeersStalled)
    assert (stalled.peers, stalled.waiting, stalled.what) == ([3], [1, 2, 4], "op tag 0 sequence 9")


def test_a_step_that_is_slow_for_most_evicts_no_member() -> None:
    harness = SlowHarness(4)
    harness.run_for(1_000)
    harness.call(1, 2)
    harness.run_for(250_000)
    assert harness.evicted == []
    harness.call(4)
    harness.run_for(59_000)
    assert harness.evicted == [], "the clock starts when the last of the others has come"
    harness.run_for(2_000)
    assert harness.evicted == [3]


def test_the_first_three_calls_of_a_tag_do_not_count() -> None:
    for sequence, evicted in ((2, []), (3, [3])):
        harness = SlowHarness(4)
        harness.run_for(1_000)
        harness.call(1, 2, 4, sequence=sequence)
        harness.run_for(62_000)
        assert harness.evicted == evicted


@pytest.mark.parametrize("told_by", ["votes", "seals", ""])
def test_the_calls_of_an_epoch_that_began_and_ended_between_two_ticks_count(told_by: str) -> None:
    harness = SlowHarness(4)
    harness.join(5)
    for peer in (1, 2, 3, 4):
        harness.receive(peer, m.Vote(2, "update", 2, progress=[(0, 7)] if told_by == "votes" else []))
    ops = [m.SealedOp(OpRef(0, 7), "committed", 5, [b"x"] * 4, CALLED)] if told_by == "seals" else []
    for peer in (1, 2, 3, 4):
        harness.receive(peer, m.Sealed(2, ops))
    for peer in (1, 2, 3, 4, 5):
        harness.receive(peer, m.Attached(3))
    harness.epoch = 3
    harness.run_for(1_000)
    harness.call(1, 2, 4, 5, sequence=1)
    harness.run_for(62_000)
    assert harness.evicted == ([3] if told_by else [])


def test_a_call_that_usually_takes_long_may() -> None:
    harness = SlowHarness(4)
    for sequence in (5, 6):
        harness.call(1, 2, 4, sequence=sequence)
        harness.run_for(20_000)
        harness.commit(1, 2, 4)
        harness.run_for(500)
    harness.call(1, 2, 4)
    harness.run_for(90_000)
    assert harness.evicted == []
    harness.run_for(15_000)
    assert harness.evicted == [3]


def test_it_can_be_off() -> None:
    harness = SlowHarness(4, stall_timeout_ms="off")
    harness.call(1, 2, 4)
    harness.run_for(290_000)
    assert harness.evicted == []
    assert harness.eviction() == ("off", None)


def test_a_busy_member_is_not_evicted_until_its_time_is_over() -> None:
    harness = SlowHarness(4)
    harness.receive(3, m.Busy(100_000))
    harness.call(1, 2, 4)
    harness.run_for(90_000)
    assert harness.eviction() == ("busy for another 10.0 s", None)
    harness.run_for(69_000)
    assert harness.evicted == []
    harness.run_for(2_000)
    assert harness.evicted == [3]


def test_busy_ends_when_announced_and_the_timeout_starts_then() -> None:
    harness = SlowHarness(4)
    harness.receive(3, m.Busy(100_000))
    harness.call(1, 2, 4)
    harness.run_for(80_000)
    harness.receive(3, m.Busy(0))
    harness.run_for(59_000)
    assert harness.evicted == []
    harness.run_for(2_000)
    assert harness.evicted == [3]


@pytest.mark.parametrize("ms", [-1, 10**12])
def test_a_busy_that_makes_no_sense_is_refused(ms: int) -> None:
    harness = SlowHarness(2)
    harness.receive(2, m.Busy(ms))
    assert harness.evicted == [2]


def test_status_shows_when_which_member_is_evicted() -> None:
    harness = SlowHarness(4)
    harness.run_for(1_000)
    harness.call(1, 2, 4)
    harness.run_for(20_000)
    text, in_ms = harness.eviction()
    assert in_ms is not None
    assert 40_000 <= in_ms <= 40_500
    assert text == f"in {in_ms / 1000:.1f} s"


def test_a_vote_that_one_member_has_not_cast_counts_after_the_first_three() -> None:
    harness = SlowHarness(4)
    for peer in (1, 2, 4):
        harness.receive(peer, m.Vote(2, "pending", 2))
    harness.run_for(62_000)
    assert harness.eviction() == ("first calls", None)
    harness.receive(3, m.Vote(2, "pending", 2))
    for ballot in range(3, 5):
        for peer in (1, 2, 3, 4):
            harness.receive(peer, m.Vote(ballot, "pending", 2))
    harness.run_for(500)
    for peer in (1, 2, 4):
        harness.receive(peer, m.Vote(9, "pending", 2))
    harness.run_for(62_000)
    assert harness.evicted == [3]


def test_an_update_that_waits_for_more_peers_evicts_no_member() -> None:
    harness = SlowHarness(4)
    for ballot in range(2, 6):
        for peer in (1, 2, 3, 4):
            harness.receive(peer, m.Vote(ballot, "update", 2))
        harness.run_for(500)
    for peer in (1, 2, 4):
        harness.receive(peer, m.Vote(9, "update", 2, min_world=5))
    harness.run_for(200_000)
    assert harness.evicted == []
    assert harness.eviction() == ("it waits for more peers", None)


def test_a_member_in_an_op_that_sends_nothing_is_as_good_as_absent() -> None:
    harness = SlowHarness(4)
    harness.call(1, 2, 3, 4)
    harness.reports = {peer: {"in_starved_ms": 61_000} for peer in (1, 2, 4)}
    harness.reports[3] = {"in_starved_ms": 10}
    harness.run_for(61_000)
    assert harness.evicted == [3]
    [evicted] = harness.sent(3, m.Evicted)
    assert isinstance(evicted, m.Evicted)
    assert "is in it and sends nothing" in evicted.reason


def test_a_member_that_has_just_started_the_op_of_starving_others_is_not_silent() -> None:
    """Their heartbeats are a little old: they were sent before it called."""
    harness = SlowHarness(4)
    harness.receive(3, m.Busy(100_000))
    harness.call(1, 2, 4)
    harness.run_for(70_000)
    harness.reports = {peer: {"in_starved_ms": 70_000} for peer in (1, 2, 4)}
    harness.call(3)
    harness.run_for(1_000)
    assert harness.evicted == []


# At op_timeout_s


def test_at_the_op_timeout_the_absent_are_evicted_also_if_they_are_many() -> None:
    harness = SlowHarness(4)
    harness.run_for(500)
    harness.call(1)
    harness.run_for(1_000)
    harness.timeout(1)
    harness.run_for(1_000)
    assert harness.evicted == [2, 3, 4]
    assert "op_timeout_s 1.0 s" in str(harness.sent(2, m.Evicted)[0])


def test_a_timeout_of_the_callers_own_raises_and_evicts_no_member() -> None:
    harness = SlowHarness(3)
    harness.run_for(500)
    harness.call(1, 2)
    harness.run_for(1_000)
    harness.timeout(1, final=True)
    harness.run_for(1_000)
    assert harness.evicted == []
    assert "waited 1.0 s for peer 3" in str(harness.sent(2, m.Seal)[-1])


def test_members_that_called_a_moment_ago_are_not_evicted_at_a_short_op_timeout() -> None:
    """Heartbeats name ops with a delay: what is not known yet is waited for."""
    harness = SlowHarness(4)
    harness.run_for(1_000)
    harness.call(1, 2, 4)
    harness.run_for(50)
    harness.timeout(1, waited_ms=50)
    harness.run_for(2_000)
    assert harness.evicted == [3]


def test_no_member_is_evicted_at_the_op_timeout_where_all_wait_in_a_call() -> None:
    harness = SlowHarness(2)
    harness.run_for(500)
    harness.began = {1: (OpRef(1, 0), harness.now), 2: (OpRef(2, 0), harness.now)}
    harness.run_for(2_000)
    harness.receive(1, m.OpTimeout(2, OpRef(1, 0), 2_000, CALLED, final=False))
    harness.run_for(1_000)
    assert harness.evicted == []
    assert "op tag 1 sequence 0 waited 2.0 s for peer 2" in str(harness.sent(2, m.Seal)[-1])


def test_an_op_whose_time_is_over_waits_for_a_busy_member_and_a_stall_timeout_more() -> None:
    harness = SlowHarness(2, stall_timeout_ms=5_000)
    harness.receive(2, m.Busy(20_000))
    harness.call(1)
    harness.run_for(10_000)
    harness.timeout(1, waited_ms=10_000)
    harness.run_for(14_000)
    assert harness.evicted == []
    assert len(harness.sent(1, m.Seal)) == 1, "the op goes on"
    harness.run_for(2_000)
    assert harness.evicted == [2]


def test_an_overdue_op_succeeds_when_the_busy_member_calls() -> None:
    harness = SlowHarness(2, stall_timeout_ms=5_000)
    harness.receive(2, m.Busy(20_000))
    harness.call(1)
    harness.run_for(10_000)
    harness.timeout(1, waited_ms=10_000)
    harness.run_for(5_000)
    harness.receive(2, m.Busy(0))
    harness.run_for(1_000)
    harness.commit(1)
    harness.run_for(60_000)
    assert harness.evicted == []
    assert len(harness.sent(1, m.Seal)) == 1


def test_an_op_whose_time_is_over_and_that_runs_on_without_end_raises() -> None:
    """The member that was busy has called, and still the op does not end: no member is at fault."""
    harness = SlowHarness(2, stall_timeout_ms=5_000, op_timeout_ms=30_000)
    harness.receive(2, m.Busy(20_000))
    harness.call(1)
    harness.run_for(10_000)
    harness.timeout(1, waited_ms=10_000)
    harness.run_for(5_000)
    harness.call(2)
    harness.run_for(26_000)
    assert harness.evicted == []
    assert "op tag 0 sequence 9 waited 10.0 s" in str(harness.sent(1, m.Seal)[-1])


def test_an_overdue_vote_continues_without_the_absent_members() -> None:
    harness = SlowHarness(3)
    harness.run_for(500)
    for peer in (1, 2):
        harness.receive(peer, m.Vote(9, "update", 2))
    harness.run_for(2_000)
    answers = harness.receive(1, m.VoteWithdrawn(9, 2_000, final=False))
    assert m.CallExtended(9) in answers
    assert harness.evicted == [3]
    assert harness.receive(2, m.VoteWithdrawn(9, 2_000, final=False)) == [m.CallExtended(9)], "while the epoch changes"
    for peer in (1, 2):
        harness.receive(peer, m.Sealed(2, []))
    for peer in (1, 2):
        harness.receive(peer, m.Attached(3))
    for peer in (1, 2):
        harness.receive(peer, m.Vote(9, "update", 3))
    assert len(harness.sent(1, m.CallDone)) == 2


def test_an_op_whose_time_is_over_does_not_wait_for_ever_for_a_member_that_works_on_other_tags() -> None:
    harness = SlowHarness(2, op_timeout_ms=10_000)
    harness.call(1)
    harness.run_for(10_000)
    harness.timeout(1, waited_ms=10_000)
    for committed in range(1, 12):
        harness.reports[2] = {"committed": committed}
        harness.run_for(1_000)
    assert harness.evicted == []
    assert "op tag 0 sequence 9 waited 10.0 s for peer 2" in str(harness.sent(1, m.Seal)[-1])


def test_a_vote_whose_time_is_over_waits_once_more_for_a_member_that_works() -> None:
    harness = SlowHarness(2)
    harness.receive(1, m.Vote(9, "pending", 2))
    for committed, answer in ((1, m.CallExtended), (2, m.CallFailed)):
        harness.run_for(5_000)
        harness.reports[2] = {"committed": committed}
        harness.run_for(500)
        assert [type(each) for each in harness.receive(1, m.VoteWithdrawn(9, 5_000, final=False))] == [answer]
    assert harness.evicted == []


def test_an_overdue_vote_waits_for_a_busy_member_as_long_as_announced() -> None:
    harness = SlowHarness(2)
    harness.receive(2, m.Busy(100_000))
    harness.receive(1, m.Vote(9, "pending", 2))
    for _ in range(3):
        harness.run_for(20_000)
        assert harness.receive(1, m.VoteWithdrawn(9, 20_000, final=False)) == [m.CallExtended(9)]
    harness.run_for(110_000)
    assert m.CallExtended(9) in harness.receive(1, m.VoteWithdrawn(9, 20_000, final=False))
    assert harness.evicted == [2]


def test_a_vote_with_a_timeout_of_its_own_fails() -> None:
    harness = SlowHarness(3)
    harness.run_for(500)
    harness.receive(1, m.Vote(9, "update", 2))
    harness.run_for(2_000)
    [answer] = harness.receive(1, m.VoteWithdrawn(9, 2_000))
    assert isinstance(answer, m.CallFailed)
    assert harness.evicted == []


# On request


def request_eviction(harness: MasterHarness, peer: str, reason: str = "", token: bytes = TOKEN) -> m.FromMaster:
    harness.open(9)
    proof = prove(token, "evict", bytes([9]) * 32, NONCE)
    return harness.receive(9, m.EvictRequest(VERSION, peer, reason, "ada on gpu-1", NONCE, proof))[0]


@pytest.mark.parametrize("wanted", ["2", "p2"])
def test_a_peer_is_evicted_on_request_with_requester_and_reason(wanted: str) -> None:
    harness = SlowHarness(3)
    answer = request_eviction(harness, wanted, "its disk is broken")
    assert answer == m.EvictResponse(True, "peer 2 (p2) is evicted; it may join again", 2, "p2")
    assert harness.sent(2, m.Evicted) == [m.Evicted("ada on gpu-1 requested it: its disk is broken", on_request=True)]


@pytest.mark.parametrize(
    ("size", "wanted", "why"),
    [
        (3, "7", "there is no peer '7' in this run, only peers 1 (p1), 2 (p2) and 3 (p3)"),
        (1, "1", "peer 1 (p1) is the last member of group 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(size: int, wanted: str, why: str) -> None:
    harness = SlowHarness(size)
    answer = request_eviction(harness, wanted)
    assert isinstance(answer, m.EvictResponse)
    assert not answer.done
    assert why in answer.text
    assert harness.evicted == []


def test_a_request_without_the_token_evicts_no_peer() -> None:
    harness = SlowHarness(3)
    assert isinstance(request_eviction(harness, "2", token=b"wrong"), m.Refused)
    assert harness.evicted == []


def test_a_request_to_a_run_without_peers_is_refused_with_that_reason() -> None:
    answer = request_eviction(MasterHarness(), "p1")
    assert isinstance(answer, m.EvictResponse)
    assert answer.text == "there is no peer 'p1' in this run, which has no peers now; `ringfold runs` lists all runs"
