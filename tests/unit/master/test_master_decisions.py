"""The small decisions of the master, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.master.disputes import Caller, Working, find_conflicting_calls, find_conflicting_ops
from ringfold.master.edges import LOSS_WINDOW_NS, EdgeHistory
from ringfold.master.liveness import StallCompensatedClock, StepProgress, evict_reason, silent_ms
from ringfold.master.ops import absent_from
from ringfold.master.settings import MasterSettings
from ringfold.master.verdicts import Collector, Mismatch
from ringfold.units import MS
from ringfold.wire.descriptor import Descriptor, describe, fingerprint
from ringfold.wire.frames import Announced, Done
from ringfold.wire.messages import Liveness, OpRef

SECOND = 1000 * MS


# Time


def test_the_clock_does_not_run_while_the_master_did_not() -> None:
    clock = StallCompensatedClock(0)
    assert clock.read(50 * MS, tick=True) == 50 * MS
    assert clock.read(20 * SECOND, tick=True) == 50 * MS
    assert clock.read(20 * SECOND + 50 * MS, tick=True) == 100 * MS
    assert clock.peek(20 * SECOND + 60 * MS) == 110 * MS


def test_the_first_event_after_a_gap_removes_the_gap_even_if_it_is_no_tick() -> None:
    """Otherwise what is read from the sockets first would seem to be from the future."""
    clock = StallCompensatedClock(0)
    clock.read(50 * MS, tick=True)
    assert clock.read(20 * SECOND, tick=False) == 50 * MS


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans())))
def test_the_clock_never_runs_backwards_nor_faster_than_time(steps: list[tuple[int, bool]]) -> None:
    clock, now, before = StallCompensatedClock(0), 0, 0
    for gap_ms, tick in steps:
        now += gap_ms * MS
        read = clock.read(now, tick=tick)
        assert before <= read <= before + gap_ms * MS
        before = read


def test_silence_is_counted_in_the_direction_that_is_silent_longer() -> None:
    assert silent_ms(6 * SECOND, received_ns=6 * SECOND, echo_ns=SECOND) == 5000
    one_way = evict_reason(6 * SECOND, 6 * SECOND, SECOND, Liveness())
    assert one_way is not None
    assert "not received a heartbeat" in one_way
    assert evict_reason(6 * SECOND, SECOND, SECOND, Liveness()) == "silent for 5000 ms (evict_after_ms 5000)"
    assert evict_reason(5 * SECOND, SECOND, SECOND, Liveness()) is None


# Edges


def test_the_other_end_dials_after_a_failure_and_then_the_edge_is_bad() -> None:
    edges = EdgeHistory(60 * SECOND)
    assert edges.dialer(1, 2) == 1
    assert not edges.dial_failed(0, 1, 2, 1)
    assert edges.dialer(1, 2) == 2
    assert edges.dialer(2, 1) == 2, "the other direction is another edge"
    assert edges.dial_failed(0, 1, 2, 2)
    assert edges.bad() == {(1, 2), (2, 1)}


def test_the_same_dialer_failing_twice_does_not_make_an_edge_bad() -> None:
    edges = EdgeHistory(60 * SECOND)
    assert not edges.dial_failed(0, 1, 2, 1)
    assert not edges.dial_failed(0, 1, 2, 1)
    assert not edges.bad()


def test_an_edge_is_bad_when_lost_three_times_in_ten_seconds() -> None:
    edges = EdgeHistory(60 * SECOND)
    assert not edges.lost(0, 1, 2)
    assert not edges.lost(SECOND, 2, 1)
    assert not edges.lost(LOSS_WINDOW_NS, 1, 2), "the first one is forgotten by now"
    assert edges.lost(LOSS_WINDOW_NS, 1, 2)


def test_bad_edges_are_forgotten_with_time_and_with_their_ends() -> None:
    edges = EdgeHistory(60 * SECOND)
    edges.dial_failed(0, 1, 2, 1)
    edges.dial_failed(0, 1, 2, 2)
    edges.mark_bad(SECOND, 3, 4)
    edges.expire(60 * SECOND)
    assert edges.bad_pairs() == [(3, 4)]
    assert edges.dialer(1, 2) == 1
    edges.forget_peer(3)
    assert not edges.bad()


def test_the_worst_member_has_most_bad_edges_and_ties_go_to_the_newest() -> None:
    edges = EdgeHistory(60 * SECOND)
    edges.mark_bad(0, 1, 2)
    edges.mark_bad(0, 2, 3)
    edges.mark_bad(0, 4, 9)
    assert edges.worst([1, 2, 3, 4]) == 2
    assert edges.worst([1, 3, 4]) == 4
    assert edges.worst([1, 3, 4], {3: 2, 4: 1}) == 3


# Evidence


def done(rank: int, sequence: int = 0, descriptor: bytes = b"d" * 32, registrations: int = 1) -> Done:
    return Done(2, 0, sequence, rank, descriptor, registrations, b"%d" % rank)


def test_evidence_is_sent_with_the_last_done_and_payloads_are_by_rank() -> None:
    collector = Collector(2, [5, 3, 4], [50, 30, 40])
    assert collector.add(4, done(2, registrations=7)) is None
    assert collector.add(5, done(0)) is None
    sent = collector.add(3, done(1))
    assert sent is not None
    assert sent.conns == (50, 30, 40)
    assert sent.evidence.payloads == [b"0", b"1", b"2"]
    assert (sent.evidence.registrations, sent.evidence.fingerprint) == (7, fingerprint(b"d" * 32))
    assert collector.add(4, done(2, sequence=1)) is None


def test_a_peer_that_contributes_nothing_is_done_too() -> None:
    collector = Collector(2, [5, 3], [50, 30])
    nothing = structs.replace(done(0), payload=None)
    assert collector.add(5, nothing) is None
    assert collector.callers(0, 0) == (b"d" * 32, [5])
    with pytest.raises(RemoteProtocolError, match="Done twice"):
        collector.add(5, nothing)
    sent = collector.add(3, done(1))
    assert sent is not None
    assert sent.evidence.payloads == [None, b"1"]


def test_a_done_for_another_rank_or_twice_is_refused() -> None:
    collector = Collector(2, [5, 3], [50, 30])
    with pytest.raises(RemoteProtocolError, match="rank 1, but its rank is 0"):
        collector.add(5, done(1))
    collector.add(5, done(0))
    with pytest.raises(RemoteProtocolError, match="twice"):
        collector.add(5, done(0))
    collector.add(3, done(1))
    with pytest.raises(RemoteProtocolError, match="finished before"):
        collector.add(5, done(0))


def test_sequences_wrap_around_and_no_peer_is_refused_for_it() -> None:
    collector, last = Collector(2, [5, 3], [50, 30]), (1 << 32) - 1
    for sequence in (last - 1, last, 0, 1):
        assert collector.add(5, done(0, sequence=sequence)) is None
        assert collector.add(3, done(1, sequence=sequence)) is not None
    with pytest.raises(RemoteProtocolError, match="finished before"):
        collector.add(5, done(0, sequence=last))


def test_different_descriptors_are_a_mismatch_that_names_the_first() -> None:
    collector = Collector(2, [5, 3], [50, 30])
    collector.add(3, done(1))
    with pytest.raises(Mismatch) as caught:
        collector.add(5, done(0, descriptor=b"e" * 32))
    assert (caught.value.first, caught.value.first_descriptor) == (3, b"d" * 32)


# Conflicting calls


def test_different_calls_conflict_when_they_have_lasted() -> None:
    callers = [Caller(1, 0, "update", 0, {}), Caller(2, 1, "pending", 100, {}), Caller(3, 0, "update", 590, {})]
    assert find_conflicting_calls(599, callers, 500) is None
    conflict = find_conflicting_calls(600, callers, 500)
    assert conflict is not None
    assert conflict.group is None, "they are of two groups"
    assert conflict.calls[1] == conflict.calls[3] != conflict.calls[2]
    assert conflict.sides == "peers 1 and 3 wait in update_topology, but peer 2 waits in meet"
    assert find_conflicting_calls(9000, [callers[0], callers[2]], 500) is None


def test_a_sync_conflicts_with_another_call_of_its_group_only() -> None:
    sync, update = Caller(1, 0, "sync", 0, {}), Caller(2, 0, "update", 0, {})
    conflict = find_conflicting_calls(600, [sync, update], 500)
    assert conflict is not None
    assert (conflict.group, sorted(conflict.calls)) == (0, [1, 2])
    assert find_conflicting_calls(600, [sync, Caller(2, 1, "update", 0, {})], 500) is None


def test_a_call_conflicts_with_an_op_that_needs_the_caller() -> None:
    caller = Caller(1, 0, "update", 0, {0: 3})
    needs, later = (
        Working(2, 0, OpRef(0, 3), since_ns=100, seen_ns=600),
        Working(3, 0, OpRef(0, 3), since_ns=500, seen_ns=600),
    )
    (conflict,) = find_conflicting_ops([caller], [needs, later], 500)
    assert conflict.group == 0
    assert conflict.sides == "peers 2 and 3 wait in op tag 0 sequence 3, but peer 1 waits in update_topology"
    assert conflict.calls[2] == conflict.calls[3] != conflict.calls[1]
    finished = Working(2, 0, OpRef(0, 2), since_ns=100, seen_ns=600)
    elsewhere = Working(2, 1, OpRef(0, 3), since_ns=100, seen_ns=600)
    fresh = Working(2, 0, OpRef(0, 3), since_ns=101, seen_ns=600)
    assert not find_conflicting_ops([caller], [finished, elsewhere, fresh], 500)
    own = Working(1, 0, OpRef(0, 3), since_ns=100, seen_ns=600)
    assert not find_conflicting_ops([caller], [own], 500)


def test_a_caller_that_has_finished_the_last_sequence_before_the_wrap_has_made_that_call() -> None:
    caller = Caller(1, 0, "update", 0, {0: 0})
    assert not find_conflicting_ops([caller], [Working(2, 0, OpRef(0, (1 << 32) - 1), since_ns=100, seen_ns=900)], 500)
    assert find_conflicting_ops([caller], [Working(2, 0, OpRef(0, 0), since_ns=100, seen_ns=900)], 500)


def test_absent_peers_announce_something_else() -> None:
    op = Announced(0, 3, 10, 0, False)
    assert absent_from(OpRef(0, 3), {2: [op], 3: [], 4: [Announced(1, 3, 10, 0, False)]}) == [3, 4]
    assert absent_from(OpRef(0, 3), {2: [op], 5: [op]}) == [2, 5]


# Descriptors


def test_the_fingerprint_is_crc_32c() -> None:
    assert fingerprint(b"123456789") == 0xE3069283
    assert fingerprint(bytes(32)) == 0x8A9136AA
    assert fingerprint(b"0" * 32 + b"123456789") == fingerprint(bytes(b"0" * 32) + b"123456789") != 0xE3069283


def test_a_descriptor_reads_well() -> None:
    op = Descriptor(0, 10, 1, retry=1, arrays=1, elements=1000, nbytes=4000)
    assert len(op.pack()) == 48
    assert Descriptor.unpack(op.pack()) == op
    assert describe(op.pack()) == "all_reduce(op=avg, 1000 x f32, 4000 bytes in 1 array, retry=True) as call 1"
    named = op._replace(step=7, call=2, retry=2)
    assert describe(named.pack()).endswith("retry=True, by the caller) as call 3 of step 7")
    assert describe(Descriptor(1, 0, root=2, arrays=1, elements=4, nbytes=4).pack()).startswith("broadcast(4 x u8")
    assert describe(Descriptor(4).pack()) == "barrier(retry=False) as call 1"
    assert describe(b"short") == "an op with a descriptor of 5 bytes"


FIELDS = [
    *[st.integers(0, 255)] * 5,
    st.integers(0, 2**16 - 1),
    *[st.integers(0, 2**32 - 1)] * 2,
    *[st.integers(0, 2**64 - 1)] * 3,
    st.integers(0, 2**32 - 1),
]


@given(st.tuples(*FIELDS), st.integers(0, 11), st.data())
def test_descriptors_that_differ_read_differently(fields: tuple[int, ...], place: int, data: st.DataObject) -> None:
    changed = list(fields)
    changed[place] = data.draw(FIELDS[place])
    one, two = Descriptor(*fields).pack(), Descriptor(*changed).pack()
    assert (describe(one) == describe(two)) == (one == two)


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"evidence": "perhaps"},
        {"lanes": 0},
        {"meet_ms": -1},
        {"liveness": Liveness(1000, 500, 5000)},
        {"max_unproven": 0},
    ],
)
def test_settings_are_checked_where_they_are_made(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MasterSettings(**wrong)  # type: ignore[arg-type]


def test_evidence_travels_on_the_ring_up_to_eight_members() -> None:
    assert MasterSettings().evidence_for(8) == "ring"
    assert MasterSettings().evidence_for(9) == "master"
    assert MasterSettings(evidence="master").evidence_for(2) == "master"


def test_a_member_is_in_time_while_no_step_takes_twice_as_long_as_the_longest() -> None:
    progress = StepProgress(0, 0)
    assert not progress.is_in_time(1_000 * MS, heartbeat_ms=250)
    progress.on_heartbeat(3_000 * MS, committed=True, in_op=False, in_call=False)
    progress.on_heartbeat(4_000 * MS, committed=True, in_op=False, in_call=False)
    assert progress.is_in_time(9_999 * MS, heartbeat_ms=250)
    assert not progress.is_in_time(10_000 * MS, heartbeat_ms=250)


def test_an_op_in_flight_is_progress_and_time_in_a_call_belongs_to_no_step() -> None:
    progress = StepProgress(0, 0)
    progress.on_heartbeat(8_000 * MS, committed=False, in_op=False, in_call=True)
    progress.on_heartbeat(9_000 * MS, committed=True, in_op=False, in_call=False)
    assert progress.longest_step_ns == 1_000 * MS
    progress.on_heartbeat(20_000 * MS, committed=False, in_op=True, in_call=False)
    assert progress.is_in_time(21_999 * MS, heartbeat_ms=250)
    assert not progress.is_in_time(22_000 * MS, heartbeat_ms=250)
