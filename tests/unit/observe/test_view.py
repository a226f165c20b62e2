"""What a page shows of a run: rates, series, incidents, and that nothing of it grows for ever."""

import msgspec
import pytest

from ringfold.observe.incidents import MAX_INCIDENTS, Incidents
from ringfold.observe.series import LIVE_TIERS, Series, Tier
from ringfold.observe.view import RunView, merge_patch
from ringfold.tools.made_up_run import (
    DIVERGED_S,
    EVICTED_S,
    FAILOVER_S,
    JOINED_S,
    KILLED_S,
    STALLED_S,
    STEPS_PER_S,
    MadeUpRun,
)
from ringfold.wire import notices
from ringfold.wire.events import Event, EventKind, LeaderChanged, OpEnded, Stamp
from ringfold.wire.status import GroupStatus, OpTotals, PeerStatus, Progress, Status, Waiting, World

# The sentence on top


def test_a_calm_run_trains_and_nobody_is_slow() -> None:
    run = MadeUpRun(is_calm=True)
    line = run.view(30).page().headline
    assert (line.state, line.tone, line.slow, line.last) == ("training", "ok", "", "")
    assert line.speed == pytest.approx(STEPS_PER_S, rel=0.1)
    assert line.step == run.steps(30)
    assert line.logged["loss"] == pytest.approx(run.loss(run.steps(30)), rel=0.01)


def test_a_slow_link_is_named() -> None:
    line = MadeUpRun().view(30).page().headline
    assert line.slow == "link 5 → 6 is full 41 % of the time"
    assert line.slow_peer == 5


def test_a_stalled_peer_is_waited_for_and_its_row_is_the_problem() -> None:
    page = MadeUpRun().view(STALLED_S + 4).page()
    assert page.headline.state == "waiting"
    assert "peer 6" in page.headline.slow
    [wait] = page.waits
    assert wait.missing == [6]
    assert wait.evict_ms - wait.since_ms == pytest.approx(1_000 * (EVICTED_S - STALLED_S), abs=200)
    assert page.peers["6"].tone == "warning"


def test_the_peer_that_begins_its_ops_last_is_slow() -> None:
    """Its ops are the shortest, because all end together."""
    view = RunView("r")
    for second in range(10):
        peers = [_peer(number, ops=second, busy_s=(0.1 if number == 2 else 0.6) * second) for number in (1, 2, 3)]
        view.look(1_000 * second, _status(peers))
    line = view.page().headline
    assert line.slow == "peer 2 begins its ops last: the others wait 50 % of the time"


def test_a_master_that_does_not_answer_is_told_at_once() -> None:
    run = MadeUpRun(is_calm=True)
    view = run.view(20)
    view.lose(run.begin_ms + 21_000, "127.0.0.1:48148: connection refused")
    page = view.page()
    assert (page.headline.state, page.headline.tone) == ("no master", "bad")
    assert page.headline.last_open
    view.look(run.begin_ms + 24_000, run.status(24))
    [incident] = view.incidents.all[1:]
    assert incident.kind == "failover"
    assert incident.end_ms - incident.begin_ms == 3_000


def test_a_run_whose_steps_stop_is_idle() -> None:
    run = MadeUpRun(is_calm=True)
    view = run.view(20)
    for second in range(21, 41):
        view.look(run.begin_ms + 1_000 * second, run.status(20))
    assert view.page().headline.state == "idle"


# Incidents


def test_the_story_of_a_run_is_told_with_reasons_and_costs() -> None:
    incidents = MadeUpRun().view(DIVERGED_S + 10).incidents.all
    told = [(each.kind, each.severity, round(each.pause_ms)) for each in incidents]
    assert told == [
        ("joined", "info", 120),
        ("lost", "bad", 25),
        ("joined", "info", 50),
        ("stall", "bad", 8_031),
        ("failover", "warning", -1),
        ("divergence", "bad", -1),
    ]
    lost, joined, stalled = incidents[1:4]
    assert lost.cost == "the others continue in epoch 8 after 25 ms"
    assert lost.reason == "its control connection closed"
    assert "1 op is rolled back and run again" in lost.details
    assert joined.title == "peer 9 (trainer-9) joined"
    assert any("received in 2.4 s" in each for each in joined.details)
    assert stalled.title == "peer 6 (trainer-6) evicted: stalled the others"
    assert "stall_timeout_s" in stalled.reason
    assert all(not each.is_open for each in incidents)
    begins = [each.begin_ms for each in incidents[1:5]]
    expected = [KILLED_S, JOINED_S, STALLED_S, FAILOVER_S]
    assert [round((begin - incidents[0].begin_ms) / 1_000) for begin in begins] == pytest.approx(expected, abs=1)


def test_an_eviction_is_open_until_the_survivors_commit_an_op() -> None:
    incidents = Incidents()
    _feed(incidents, 1.0, notices.PeerGone(2, "b", "lost", "it died"))
    _feed(incidents, 1.0, notices.EpochSealing(0, 4, "peer 2 was lost"))
    _feed(incidents, 1.01, notices.EpochRecorded(0, 5, [1, 3], 0, 0))
    _feed(incidents, 1.02, notices.EpochInstalled(0, 5, 20))
    [lost] = incidents.all
    assert lost.is_open
    assert lost.pause_ms == 20
    incidents.look(1_500, _status([_peer(1, ops=7), _peer(3, ops=7)]))
    assert lost.is_open, "no op yet"
    incidents.look(2_000, _status([_peer(1, ops=8), _peer(3, ops=7)]))
    assert not lost.is_open


def test_the_first_commit_is_exact_where_ops_are_recorded() -> None:
    incidents = Incidents()
    _feed(incidents, 1.0, notices.PeerGone(2, "b", "lost", "it died"))
    _feed(incidents, 1.0, notices.EpochSealing(0, 4, "peer 2 was lost"))
    _feed(incidents, 1.01, notices.EpochRecorded(0, 5, [1, 3], 0, 0))
    _feed(incidents, 1.02, notices.EpochInstalled(0, 5, 20))
    _feed(incidents, 1.01, OpEnded("all_reduce", 0, 6, 4, "committed", 8, 0, 0))
    assert incidents.all[0].is_open, "an op of the epoch before proves nothing"
    _feed(incidents, 1.05, OpEnded("all_reduce", 0, 7, 5, "committed", 8, 0, 0))
    [lost] = incidents.all
    assert lost.end_ms == 1_050
    assert "next commit after 50 ms" in lost.details


def test_a_suspicion_ends_as_an_answer_or_as_an_eviction() -> None:
    incidents = Incidents()
    _feed(incidents, 2.0, notices.PeerSuspected(2, 1_000, "b"))
    _feed(incidents, 2.0, notices.PeerSuspected(3, 1_000, "c"))
    incidents.look(2_500, _status([_peer(2), _peer(3, suspected=True)]))
    answered, silent = incidents.all
    assert (answered.kind, answered.is_open, silent.is_open) == ("suspected", False, True)
    _feed(incidents, 6.0, notices.PeerGone(3, "c", "evicted", "silent for 5.0 s"))
    assert (silent.kind, silent.severity, silent.title) == ("evicted", "bad", "peer 3 (p3) evicted")
    assert silent.begin_ms == 1_000


def test_what_master_and_peer_report_both_is_one_incident() -> None:
    run = MadeUpRun()
    view = run.view(DIVERGED_S + 1)
    before = len(view.incidents.all)
    [diverged] = [event for event in run.events(DIVERGED_S - 1, DIVERGED_S + 1) if event.notice.level == "warning"]
    view.event(Event(Stamp(diverged.stamp.at, diverged.stamp.wall, 2), diverged.notice), diverged.stamp.wall / 1e6)
    assert len(view.incidents.all) == before


def test_the_first_leader_is_no_failover() -> None:
    incidents = Incidents()
    _feed(incidents, 1.0, LeaderChanged("a:1", True, 1))
    assert incidents.all == []
    _feed(incidents, 9.0, LeaderChanged("b:1", True, 2, "the lease ran out"))
    [failover] = incidents.all
    assert failover.title == "failover: b:1 leads (fence 2)"
    incidents.look(9_500, _status([], fence=2))
    assert len(incidents.all) == 1


# Bounds


def test_series_are_thinned_by_age_and_keep_their_extremes() -> None:
    series = Series([Tier(1_000, 5), Tier(10_000, 4)])
    for second in range(100):
        series.add(1_000 * second, 50.0 if second == 72 else 1.0)
    fine, coarse = series.buckets()
    assert [bucket[0] for bucket in fine] == [94_000, 95_000, 96_000, 97_000, 98_000]
    assert [bucket[0] for bucket in coarse] == [50_000, 60_000, 70_000, 80_000]
    assert [bucket[3] for bucket in coarse] == [1, 1, 50, 1]
    assert len(series) == 9


def test_a_value_that_is_not_a_number_is_left_out() -> None:
    series = Series([Tier(1_000, 5)])
    for second, value in enumerate((1.0, float("nan"), float("inf"), 3.0, 3.0)):
        series.add(1_000 * second, value)
    assert msgspec.json.decode(msgspec.json.encode(series.buckets())) == [[[0, 1, 1, 1], [3_000, 3, 3, 3]]]


def test_a_month_of_churn_grows_nothing() -> None:
    """Every 20 minutes a peer comes and another one dies; a view of a month is as large as one of a week."""
    view, sizes = RunView("r"), []
    hour_ms = 3_600_000
    for tick in range(3 * 24 * 30):
        at_ms = tick * hour_ms // 3
        members = [_peer(peer, ops=tick) for peer in range(tick, tick + 4)]
        joined = notices.PeerRegistered(tick + 3, f"p{tick + 3}", 0, "x")
        gone = notices.PeerGone(tick - 1, f"p{tick - 1}", "lost", "it died")
        epoch = [
            notices.EpochSealing(0, tick, "a peer was lost"),
            notices.EpochRecorded(0, tick + 1, [peer.peer for peer in members], 0, 1),
            notices.EpochInstalled(0, tick + 1, 9),
        ]
        events = [Event(Stamp(1, at_ms * 1_000_000), notice) for notice in (joined, gone, *epoch)]
        view.look(at_ms, _status(members), events)
        view.new_buckets()
        if tick % (3 * 24 * 7) == 3 * 24 * 7 - 1:
            sizes.append(len(msgspec.json.encode([view.snapshot(), view.all_series()])))
    assert len(view.incidents.all) == MAX_INCIDENTS
    assert sizes[-1] < 1.1 * sizes[1]
    assert all(len(series) <= sum(tier.buckets for tier in LIVE_TIERS) for series in view.series.values())


def test_an_update_turns_one_snapshot_into_the_next() -> None:
    run = MadeUpRun()
    before = run.view(KILLED_S - 1).snapshot()
    after = run.view(EVICTED_S + 1).snapshot()
    patch = merge_patch(before, after)
    assert _patched(before, patch) == after
    calm = MadeUpRun(64, is_calm=True)
    one, two = calm.view(30).snapshot(), calm.view(30.5).snapshot()
    assert len(msgspec.json.encode(merge_patch(one, two))) < 0.35 * len(msgspec.json.encode(two))


def _patched(value: object, patch: object) -> object:
    """JSON Merge Patch, as the page applies it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(value) if isinstance(value, dict) else {}
    for key, inner in patch.items():
        if inner is None:
            result.pop(key, None)
        else:
            result[key] = _patched(result.get(key), inner)
    return result


def _feed(incidents: Incidents, at_s: float, notice: EventKind) -> None:
    incidents.event(Event(Stamp(int(1e9 * at_s)), notice), 1_000 * at_s)


def _peer(number: int, *, ops: int = 0, busy_s: float = 0.0, suspected: bool = False) -> PeerStatus:
    return PeerStatus(
        peer=number,
        name=f"p{number}",
        host="h",
        group=0,
        phase="PEER_ACCEPTED",
        addresses=["127.0.0.1"],
        port=1,
        silent_ms=0,
        suspected=suspected,
        committed_ops=ops,
        totals=OpTotals(committed=ops, busy_ns=int(1e9 * busy_s)),
        progress=Progress("0.1.0", step=ops, steps=ops),
    )


def _status(peers: list[PeerStatus], *, fence: int = 1, waiting: list[Waiting] | None = None) -> Status:
    ring = [peer.peer for peer in peers]
    groups = [GroupStatus(0, 1, "idle", ring, "ring")] if ring else []
    world = World(len(peers), len(groups), len(peers))
    return Status(fence, 0, 0, 0, world, peers=peers, groups=groups, waiting=waiting or [])
