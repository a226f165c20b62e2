"""Which nodes a round waits for, and for how long: silent, late and excluded nodes; the deadline."""

import pytest
from test_rounds import Room, published, sent

from ringfold.errors import ConfigError
from ringfold.probe.rounds.effects import LogNote, SendToMaster
from ringfold.probe.rounds.events import (
    MS,
    MasterConnected,
    MasterMessageReceived,
    NodeDisconnected,
    NodeRecovered,
    NodeSuspected,
)
from ringfold.probe.rounds.liveness import NodeTable
from ringfold.probe.rounds.node import RoundNode
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire.probing import EdgeFit, ProbeGraph, RoundEnd, RoundId, RoundReport, RoundSummary

FLOOR_MS = RoundSettings().report_floor_ms


def run_round(room: Room, *nodes: int, took_ms: int = 5) -> RoundSummary:
    """One round in which these nodes report `took_ms` after its window; returns its summary."""
    while not room.master.is_gathering:
        room.wait(1)
    effects = room.wait(took_ms)
    for node in nodes:
        effects += room.report(node)
    while not published(effects):
        effects += room.wait(1)
    (summary,) = published(effects)
    return summary


def gather_ms(room: Room, *nodes: int) -> float:
    """How long a round rests in which only these nodes report, at once."""
    while not room.master.is_gathering:
        room.wait(1)
    began, id = room.now, room.master.round
    for node in nodes:
        room.report(node)
    while room.master.round == id:
        room.wait(1)
    return (room.now - began) / MS


# The deadline


def test_without_any_report_so_far_the_deadline_is_the_timeout() -> None:
    table = NodeTable(3)
    table.add(1)
    assert table.wait_ms([1], 25, 1_000) == 1_000


def test_the_deadline_follows_what_reports_usually_take() -> None:
    table = NodeTable(3)
    for node in (1, 2, 3):
        table.add(node)
        for _ in range(50):
            table.took(node, 60 * MS)
    assert 60 <= table.wait_ms([1, 2, 3], 25, 1_000) < 65
    for _ in range(50):
        table.took(3, 90 * MS)
    assert 90 <= table.wait_ms([1, 2, 3], 25, 1_000) < 95


def test_one_slow_node_does_not_make_the_others_wait() -> None:
    table = NodeTable(3)
    for node in range(1, 9):
        table.add(node)
        for _ in range(50):
            table.took(node, 900 * MS if node == 8 else 10 * MS)
    assert table.wait_ms(range(1, 9), 25, 1_000) <= 35


def test_the_deadline_is_never_below_its_floor_nor_above_its_timeout() -> None:
    table = NodeTable(3)
    table.add(1)
    for _ in range(50):
        table.took(1, 1 * MS)
    assert table.wait_ms([1], 25, 1_000) == 25
    for _ in range(50):
        table.took(1, 5_000 * MS)
    assert table.wait_ms([1], 25, 1_000) == 1_000


def test_jitter_makes_the_deadline_longer() -> None:
    steady, jittery = NodeTable(3), NodeTable(3)
    for table, spread in ((steady, 0), (jittery, 20)):
        table.add(1)
        for number in range(50):
            table.took(1, (50 + (spread if number % 2 else -spread)) * MS)
    assert jittery.wait_ms([1], 25, 1_000) > steady.wait_ms([1], 25, 1_000) + 40


def test_a_few_slow_reports_do_not_make_the_deadline_longer() -> None:
    """Neither the first ones, of a process that has just started, nor those of a moment in which a machine was busy."""
    table = NodeTable(3)
    for node in (1, 2, 3):
        table.add(node)
        for took_ms in (300, 40, 40, 40, 500, 40, 40, 40):
            table.took(node, took_ms * MS)
    assert 40 <= table.wait_ms([1, 2, 3], 25, 1_000) <= 60


def test_the_deadline_follows_nodes_that_have_become_slower() -> None:
    table = NodeTable(3)
    for node in (1, 2, 3):
        table.add(node)
        for took_ms in (*[10] * 50, *[100] * 5):
            table.took(node, took_ms * MS)
    assert table.wait_ms([1, 2, 3], 25, 1_000) >= 100


def test_after_one_report_the_deadline_is_generous() -> None:
    table = NodeTable(3)
    table.add(1)
    table.took(1, 40 * MS)
    assert table.wait_ms([1], 25, 1_000) == 120


def test_the_last_node_is_awaited_half_as_long_again_as_the_others_took() -> None:
    """However much reports differ from round to round: here they took 40 to 200 ms, and 140 ms in this round."""
    room = Room()
    for took_ms in (40, 80, 120, 160, 200):
        run_round(room, 1, 2, 3, took_ms=took_ms)
    while not room.master.is_gathering:
        room.wait(1)
    room.wait(140)
    room.report(1)
    assert room.master.wait_ms == 280, "two of three are missing"
    room.report(2)
    assert room.master.wait_ms == 210


def test_the_last_node_is_awaited_as_long_as_it_usually_takes_itself() -> None:
    room = Room()
    for _ in range(2):
        while not room.master.is_gathering:
            room.wait(1)
        for node in (1, 2):
            room.wait(30)
            room.report(node)
        room.wait(40)
        room.report(3)
    while not room.master.is_gathering:
        room.wait(1)
    room.report(1)
    room.report(2)
    assert room.master.wait_ms == 150, "half as long again as 100 ms"


def test_a_last_node_that_has_never_reported_is_awaited_until_the_deadline() -> None:
    room = Room()
    while not room.master.is_gathering:
        room.wait(1)
    room.report(1)
    room.report(2)
    assert room.master.wait_ms == RoundSettings().report_timeout_ms


def test_a_master_looks_at_the_floor_and_then_less_and_less_often() -> None:
    """What arrives after a look moves the deadline to no earlier instant than the next look."""
    room = Room()
    for _ in range(5):
        run_round(room, 1, 2, 3, took_ms=200)
    while not room.master.is_gathering:
        room.wait(1)
    began, looks = room.now, []
    while room.master.is_gathering and (due := room.master.next_deadline_ns()) is not None:
        looks.append((due - began) // MS)
        room.wait((due - room.now) / MS)
    assert looks[:3] == [FLOOR_MS, FLOOR_MS * 3 // 2, FLOOR_MS * 9 // 4]
    assert len(looks) < 10


def test_a_floor_above_the_timeout_is_refused() -> None:
    with pytest.raises(ConfigError, match="report_floor_ms <= report_timeout_ms"):
        RoundSettings(report_floor_ms=2_000)


# Late and silent nodes


def test_a_stuck_node_costs_the_others_the_usual_time_and_then_nothing() -> None:
    """At first the deadline; out of the graph it costs nothing."""
    room = Room()
    run_round(room, 1, 2, 3)
    waits = [gather_ms(room, 1, 2) for _ in range(6)]
    assert waits == [FLOOR_MS] * 3 + [0] * 3


def test_a_suspected_node_is_not_awaited() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    room.step(NodeSuspected(3, 1_000))
    assert gather_ms(room, 1, 2) == 0
    room.step(NodeRecovered(3))
    assert gather_ms(room, 1, 2) == FLOOR_MS


def test_a_node_that_falls_silent_while_its_report_is_awaited_ends_the_round() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    room.wait(4_000)
    room.report(1)
    room.report(2)
    (summary,) = published(room.step(NodeSuspected(3, 1_003)))
    assert summary.missing == {"3": "it has been silent for 1003 ms"}


def test_the_report_of_a_suspected_node_counts_if_it_arrives_in_time() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    room.step(NodeSuspected(3, 1_000))
    assert run_round(room, 3, 1, 2).missing == {}


def test_if_all_nodes_are_suspected_the_round_waits_for_its_deadline() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    for node in (1, 2, 3):
        room.step(NodeSuspected(node, 1_000))
    assert gather_ms(room) == RoundSettings().report_timeout_ms, "nobody is on time: nobody waits in vain"


def test_a_late_report_counts_for_the_next_round_and_is_named_there() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    late_for = run_round(room, 1, 2)
    assert late_for.missing == {"3": f"no report within {FLOOR_MS} ms"}
    effects = room.report(3, round=late_for.round)
    assert any(isinstance(effect, LogNote) and "1 round(s) late" in effect.text for effect in effects)
    summary = run_round(room, 1, 2)
    assert (summary.missing, summary.late) == ({}, {"3": late_for.round.sequence})
    assert {view.fit.src for view in summary.edges} == {1, 2, 3}
    assert run_round(room, 1, 2).missing.keys() == {"3"}, "it counts once"


def test_the_report_of_the_present_round_replaces_the_late_one() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    old = run_round(room, 1, 2).round
    room.report(3, round=old, edges=[EdgeFit(3, 1, estimator="late")])
    summary = run_round(room, 1, 2, 3)
    assert summary.late == {}
    assert all(view.fit.estimator == "made up" for view in summary.edges)


def test_a_report_that_is_two_rounds_late_does_not_count() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    old = run_round(room, 1, 2).round
    run_round(room, 1, 2)
    room.report(3, round=old)
    summary = run_round(room, 1, 2)
    assert summary.late == {}
    assert summary.missing.keys() == {"3"}


def test_a_late_report_says_nothing_about_a_node_that_came_again() -> None:
    """Its clock may be another one."""
    room = Room()
    run_round(room, 1, 2, 3)
    old = run_round(room, 1, 2).round
    room.step(NodeDisconnected(2))
    room.come(2)
    room.report(3, round=old)
    summary = run_round(room, 1)
    assert {(view.fit.src, view.fit.dst) for view in summary.edges} == {(1, 2), (1, 3), (3, 1)}


def test_a_node_that_is_always_late_stays_in_the_graph() -> None:
    room = Room()
    run_round(room, 1, 2, 3)
    for _ in range(5):
        late_for = run_round(room, 1, 2)
        room.report(3, round=late_for.round)
    assert (late_for.excluded, late_for.missing) == ({}, {})


# Out of the graph


def excluded(room: Room) -> RoundSummary:
    """Node 3 misses so many rounds that it is out of the graph."""
    run_round(room, 1, 2, 3)
    for _ in range(room.master.settings.max_missed):
        summary = run_round(room, 1, 2)
    return summary


def test_a_node_that_misses_several_rounds_is_out_of_the_graph() -> None:
    room = Room()
    assert excluded(room).excluded == {"3": "it has missed 3 rounds in a row"}
    summary = run_round(room, 1, 2)
    assert (summary.missing, {view.fit.dst for view in summary.edges}) == ({}, {1, 2})
    assert "3 out of the graph" in room.master._status_text()


def test_a_node_that_is_out_of_the_graph_is_asked_and_comes_back_with_its_report() -> None:
    room = Room()
    excluded(room)
    effects = room.wait(1)
    while not room.master.is_gathering:
        effects += room.wait(1)
    ended = sent(effects, RoundEnd)
    assert sorted(ended) == [1, 2, 3]
    room.report(1)
    room.report(3, edges=[])
    begun = room.report(2)
    graph = sent(begun, ProbeGraph)[3]
    assert isinstance(graph, ProbeGraph)
    assert [other.node for other in graph.out] == [1, 2]
    assert run_round(room, 1, 2, 3).missing == {}


def test_of_two_nodes_none_is_taken_out_of_the_graph_and_none_is_awaited_for_ever() -> None:
    room = Room(nodes=2)
    run_round(room, 1, 2)
    waits = [gather_ms(room, 1) for _ in range(5)]
    assert waits == [FLOOR_MS] * 3 + [0] * 2
    assert run_round(room, 2, 1).missing == {}


def test_if_nobody_reports_nobody_is_taken_out_of_the_graph() -> None:
    room = Room()
    for _ in range(5):
        summary = run_round(room)
    assert (summary.excluded, len(summary.missing)) == ({}, 3)


def test_a_node_without_edges_answers_the_end_of_a_round() -> None:
    node = RoundNode()
    node.step(0, MasterConnected(7))
    node.step(1, MasterMessageReceived(ProbeGraph(1, "master", b"k" * 16, [], [])))
    effects = node.step(2, MasterMessageReceived(RoundEnd(RoundId(1, 4), 99)))
    (report,) = [effect.message for effect in effects if isinstance(effect, SendToMaster)]
    assert isinstance(report, RoundReport)
    assert (report.round, report.edges, report.end_sent_ns) == (RoundId(1, 4), [], 99)
