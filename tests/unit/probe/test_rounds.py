"""The round machines, one behaviour at a time. The simulation (tests/sim/test_probing.py) mixes them with faults."""

from collections.abc import Collection, Mapping, Sequence

import pytest
from msgspec import structs

from ringfold.errors import ConfigError
from ringfold.probe.rounds.calculation import RoundResult
from ringfold.probe.rounds.effects import (
    AdoptClock,
    ConfigureProber,
    ExportWindow,
    LogNote,
    MasterEffect,
    NodeEffect,
    PauseProbing,
    PublishSummary,
    ResumeProbing,
    RotateWindow,
    SendProbeResponse,
    SendToMaster,
    SendToNode,
)
from ringfold.probe.rounds.events import (
    MS,
    AlarmReceived,
    CommandReceived,
    FromRoundMaster,
    MasterConnected,
    MasterDisconnected,
    MasterEvent,
    MasterMessageReceived,
    NodeConnected,
    NodeDisconnected,
    ReportReceived,
    ResidualObserved,
    Tick,
    WindowFitted,
)
from ringfold.probe.rounds.master import RoundMaster
from ringfold.probe.rounds.node import RoundNode, next_boundary
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire.probing import (
    Cadence,
    EdgeFit,
    EdgeView,
    Neighbour,
    NodeClock,
    NodeId,
    ProbeAnswer,
    ProbeGraph,
    ProbeHalt,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundKind,
    RoundReport,
    RoundStart,
    RoundSummary,
)

# Stand-ins for the graph's drawing and calculation


def ring(
    nodes: Sequence[NodeId], listeners: Collection[NodeId], neighbours: int, seed: int
) -> list[tuple[NodeId, NodeId]]:
    """Everybody who probes probes everybody else."""
    return [(src, dst) for src in nodes if src not in listeners for dst in nodes if src != dst]


def plain(fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> RoundResult:
    """All clocks agree, and are UTC. The history counts the calculations."""
    count = history + 1 if isinstance(history, int) else 1
    nodes = sorted({node for fit in fits for node in (fit.src, fit.dst)})
    clocks = [NodeClock(node, 0, 0, 0.0, 1.0, -1, 1, 0.0) for node in nodes]
    return RoundResult(nodes[0], clocks, [EdgeView(fit) for fit in fits], history=count, took_ns=2 * MS)


def fact(node: NodeId) -> Neighbour:
    return Neighbour(node, f"node{node}", "127.0.0.1", 50_000 + node)


class Room:
    """A RoundMaster with a clock that the test moves, and what it said."""

    def __init__(self, kind: RoundKind = "master", nodes: int = 3, **named: object) -> None:
        self.master = RoundMaster(
            RoundSettings(kind=kind, combine_after_ms=0, **named),  # type: ignore[arg-type]
            fence=1,
            key=lambda number: number.to_bytes(16, "big"),
            draw=ring,
            calculate=plain,
        )
        self.now = 1_000 * MS
        self.windows: dict[NodeId, int] = {}
        for node in range(1, nodes + 1):
            self.come(node)

    def step(self, event: MasterEvent) -> list[MasterEffect]:
        """One step; and one more if a round is to be combined."""
        effects = self.master.step(self.now, event)
        due = self.master.next_deadline_ns()
        return effects + self.master.step(self.now, Tick()) if due is not None and due <= self.now else effects

    def come(self, node: NodeId, *, listen_only: bool = False, last: RoundId = RoundId()) -> list[MasterEffect]:  # noqa: B008
        return self.step(NodeConnected(node, fact(node), listen_only, last))

    def wait(self, ms: float) -> list[MasterEffect]:
        """Let time pass, with a Tick at every deadline on the way."""
        effects: list[MasterEffect] = []
        until = self.now + int(ms * MS)
        while (due := self.master.next_deadline_ns()) is not None and due <= until:
            self.now = max(self.now, due)
            effects += self.step(Tick())
        self.now = until
        return effects

    def begin(self) -> RoundId:
        self.wait(self.master.settings.settle_ms)
        assert self.master.round is not None
        return self.master.round

    def to_end(self) -> RoundId:
        """Begin a round, and let its window end."""
        id = self.begin()
        self.wait(self.master.settings.window_ms)
        return id

    def report(self, node: NodeId, **changes: object) -> list[MasterEffect]:
        return self.step(ReportReceived(node, self.make(node, **changes), 300))

    def make(self, node: NodeId, **changes: object) -> RoundReport:
        window = self.windows[node] = self.windows.get(node, 0) + 1
        assert self.master.round is not None
        others = [other for other in self.master._members if other != node]
        edges = [EdgeFit(node, other, estimator="made up") for other in sorted(others)]
        report = RoundReport(self.master.round, window, 0, 10, 0, edges, sent_ns=self.now)
        return structs.replace(report, **changes)


def sent(effects: Sequence[MasterEffect], kind: type[FromRoundMaster]) -> dict[NodeId, FromRoundMaster]:
    return {e.node: e.message for e in effects if isinstance(e, SendToNode) and isinstance(e.message, kind)}


def published(effects: Sequence[MasterEffect]) -> list[RoundSummary]:
    return [effect.summary for effect in effects if isinstance(effect, PublishSummary)]


def answers(effects: Sequence[MasterEffect]) -> dict[int, ProbeAnswer]:
    return {effect.requester: effect.response for effect in effects if isinstance(effect, SendProbeResponse)}


# The master: rounds


def test_nodes_that_come_together_get_one_graph() -> None:
    room = Room(nodes=3)
    effects = room.wait(room.master.settings.settle_ms)
    graphs = sent(effects, ProbeGraph)
    assert sorted(graphs) == [1, 2, 3]
    assert len({graph.key for graph in graphs.values() if isinstance(graph, ProbeGraph)}) == 1
    assert sorted(sent(effects, RoundStart)) == [1, 2, 3]


def test_one_node_alone_begins_no_round() -> None:
    room = Room(nodes=1)
    assert room.wait(10_000) == []


def test_a_round_ends_when_all_have_reported() -> None:
    room = Room()
    id = room.to_end()
    assert room.master.waiting_for() == [1, 2, 3]
    assert not published(room.report(1) + room.report(2))
    effects = room.report(3)
    starts = sent(effects, RoundStart)
    assert {start.round for start in starts.values() if isinstance(start, RoundStart)} == {RoundId(1, id.sequence + 1)}
    (summary,) = published(effects)
    assert (summary.round, summary.missing) == (id, {})
    assert {fit.fit.src for fit in summary.edges} == {1, 2, 3}
    clocks = sent(effects, RoundClock)
    assert {node: isinstance(said, RoundClock) and said.round for node, said in clocks.items()} == dict.fromkeys(
        (1, 2, 3), id
    )


def test_a_node_that_came_again_gets_no_clock_of_its_former_life() -> None:
    room = Room()
    room.to_end()
    room.report(1)
    room.step(NodeDisconnected(2))
    room.come(2)
    assert sorted(sent(room.report(3), RoundClock)) == [1, 3]


def test_the_next_window_starts_before_anybody_else_is_told() -> None:
    room = Room()
    room.to_end()
    effects = [effect for node in (1, 2) for effect in room.report(node)]
    effects += room.master.step(room.now, ReportReceived(3, room.make(3), 300))
    assert sorted(sent(effects, RoundStart)) == [1, 2, 3]
    assert not published(effects)
    assert published(room.step(Tick()))


def test_a_missing_report_is_named_and_not_waited_for_beyond_the_deadline() -> None:
    room = Room()
    room.to_end()
    room.report(1)
    room.report(3)
    assert not published(room.wait(room.master.settings.report_timeout_ms - 1))
    (summary,) = published(room.wait(1))
    assert summary.missing == {"2": "no report within 1000 ms"}
    assert {fit.fit.src for fit in summary.edges} == {1, 3}


def test_a_participant_whose_connection_is_lost_is_not_waited_for() -> None:
    room = Room()
    room.to_end()
    room.report(1)
    room.report(3)
    (summary,) = published(room.step(NodeDisconnected(2, "reset")))
    assert summary.missing == {"2": "its connection was lost: reset"}


def test_a_participant_that_comes_back_in_time_still_counts() -> None:
    room = Room()
    id = room.to_end()
    room.report(1)
    room.step(NodeDisconnected(2, "reset"))
    room.come(2, last=id)
    room.report(2)
    (summary,) = published(room.report(3))
    assert summary.missing == {}


def test_listeners_get_graph_and_clock_and_are_never_waited_for() -> None:
    room = Room(nodes=2)
    room.come(9, listen_only=True)
    begun = room.wait(room.master.settings.settle_ms)
    graph = sent(begun, ProbeGraph)[9]
    assert isinstance(graph, ProbeGraph)
    assert (graph.out, [other.node for other in graph.into]) == ([], [1, 2])
    ended = room.wait(4_000)
    assert sorted(sent(ended, RoundEnd)) == [1, 2]
    room.report(1)
    effects = room.report(2)
    assert published(effects)[0].missing == {}
    assert 9 in sent(effects, RoundStart)
    assert 9 in sent(effects, RoundClock)


def test_a_late_report_is_not_counted_for_the_next_round() -> None:
    room = Room()
    old = room.to_end()
    room.report(1)
    room.report(3)
    room.wait(1_000)
    room.wait(4_002)
    effects = room.report(2, round=old)
    assert any(isinstance(effect, LogNote) and "1 round(s) late" in effect.text for effect in effects)
    assert 2 in room.master.waiting_for()


def test_a_window_that_says_nothing_about_this_graph_is_named() -> None:
    room = Room()
    room.to_end()
    room.report(1, edges=[])
    room.report(2, edges=[EdgeFit(2, 99)])
    (summary,) = published(room.report(3))
    assert summary.missing == {"1": "it had no window", "2": "its window has no edge of this graph"}


def test_a_repeated_report_counts_once() -> None:
    room = Room()
    room.to_end()
    report = room.make(1)
    room.step(ReportReceived(1, report, 300))
    room.step(ReportReceived(1, report, 300))
    room.report(2)
    (summary,) = published(room.report(3))
    assert summary.metrics.report_bytes == 900


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"alpha": float("nan")}, "a value is not finite"),
        ({"sent": -1}, "a count is out of range"),
        ({"delay_p99_ns": 1 << 62}, "a delay is out of range"),
        ({"delay_min_ns": -(1 << 62)}, "a delay is out of range"),
        ({"why": "\n"}, "its text is not printable"),
        ({"why": "x" * 501}, "its text is longer than 500 characters"),
    ],
)
def test_an_edge_with_impossible_values_is_refused_and_the_rest_of_its_report_counts(
    wrong: dict[str, object], why: str
) -> None:
    """Also in what the summary says of the node's window, and where the edge leads out of the graph."""
    room = Room(nodes=3)
    room.to_end()
    edges = [EdgeFit(1, 2, **wrong), EdgeFit(1, 3, sent=7), EdgeFit(1, 99, **wrong)]  # type: ignore[arg-type]
    (summary,) = published(room.report(1, edges=edges) + room.report(2) + room.report(3))
    assert [(view.fit.src, view.fit.dst, view.fit.refused) for view in summary.edges[:2]] == [(1, 2, why), (1, 3, "")]
    assert [window.sent for window in summary.windows if window.node == 1] == [7]
    assert summary.missing == {}


def test_a_report_of_other_nodes_edges_is_refused() -> None:
    room = Room()
    room.to_end()
    effects = room.report(1, edges=[EdgeFit(2, 3)])
    assert [e.text for e in effects if isinstance(e, LogNote)] == [
        "a report of node 1 is ignored: it reports edge 2 -> 3, which is not its own"
    ]
    assert 1 in room.master.waiting_for()


def test_a_newcomer_joins_at_the_boundary_with_a_fresh_key() -> None:
    room = Room(nodes=2)
    first = room.begin()
    assert not sent(room.come(3), ProbeGraph)
    room.wait(4_000)
    room.report(1, edges=[EdgeFit(1, 2)])
    effects = room.report(2, edges=[EdgeFit(2, 1)])
    graphs = sent(effects, ProbeGraph)
    assert sorted(graphs) == [1, 2, 3]
    assert {graph.number for graph in graphs.values() if isinstance(graph, ProbeGraph)} == {first.sequence + 1}


def test_the_graph_stays_while_the_members_do() -> None:
    room = Room()
    room.to_end()
    effects = [effect for node in (1, 2, 3) for effect in room.report(node)]
    assert not sent(effects, ProbeGraph)


def test_a_late_master_looks_once_more_before_it_judges() -> None:
    room = Room()
    room.to_end()
    room.report(1)
    room.now += 10_000 * MS
    assert not published(room.step(Tick()))
    room.report(2)
    (summary,) = published(room.report(3))
    assert summary.missing == {}


def test_without_any_report_there_is_still_a_summary() -> None:
    room = Room()
    room.to_end()
    (summary,) = published(room.wait(1_000))
    assert sorted(summary.missing) == ["1", "2", "3"]
    assert summary.nodes == []


def test_when_every_participant_leaves_the_round_is_given_up() -> None:
    room = Room(nodes=2)
    room.begin()
    room.step(NodeDisconnected(1, "x"))
    assert room.master.round is not None
    room.step(NodeDisconnected(2, "x"))
    assert room.master.round is None
    assert room.wait(60_000) == []


# The master: ids


def test_a_new_master_goes_on_above_what_its_nodes_have_seen() -> None:
    room = Room(nodes=0)
    room.come(1, last=RoundId(0, 40))
    room.come(2, last=RoundId(0, 41))
    assert room.begin() == RoundId(1, 42)


def test_a_journal_remembers_the_sequence_when_nobody_else_does() -> None:
    master = RoundMaster(RoundSettings(settle_ms=0), 3, lambda _: bytes(16), ring, plain, sequence=70)
    for node in (1, 2):
        master.step(0, NodeConnected(node, fact(node), False, RoundId()))
    assert master.round == RoundId(3, 71)


def test_a_master_with_a_lower_fence_jumps_over_the_higher_one() -> None:
    room = Room(nodes=1)
    room.come(2, last=RoundId(7, 5))
    assert room.begin() == RoundId(7, 6)


def test_a_report_from_the_future_makes_the_next_round_higher() -> None:
    room = Room()
    room.to_end()
    room.report(1, round=RoundId(1, 90))
    room.wait(1_000)
    assert room.master.round == RoundId(1, 91)


def test_absurd_ids_are_ignored() -> None:
    room = Room(nodes=1)
    effects = room.come(2, last=RoundId(1, 1 << 60))
    assert any(isinstance(effect, LogNote) and "ignored" in effect.text for effect in effects)
    assert room.begin() == RoundId(1, 1)


# The master: commands and anomalies


def test_stop_halts_everybody_at_once() -> None:
    room = Room()
    id = room.begin()
    effects = room.step(CommandReceived(5, "stop"))
    assert sent(effects, ProbeHalt) == {node: ProbeHalt(id, "stopped by command") for node in (1, 2, 3)}
    assert answers(effects)[5].done
    assert not answers(effects)[5].is_on
    assert room.wait(60_000) == []


def test_start_begins_above_the_halt() -> None:
    room = Room(is_on=False)
    assert room.wait(60_000) == []
    effects = room.step(CommandReceived(5, "start", "night"))
    starts = sent(effects, RoundStart)
    assert {start.label for start in starts.values() if isinstance(start, RoundStart)} == {"night"}
    halted = room.step(CommandReceived(5, "stop"))
    again = room.step(CommandReceived(5, "start"))
    (halt, start) = sent(halted, ProbeHalt)[1], sent(again, RoundStart)[1]
    assert isinstance(halt, ProbeHalt)
    assert isinstance(start, RoundStart)
    assert start.round > halt.round


def test_a_round_by_command_ends_the_window_now_and_answers_with_its_summary() -> None:
    room = Room()
    id = room.begin()
    room.wait(1_000)
    ended = sent(room.step(CommandReceived(5, "round", "before")), RoundEnd)
    assert {end.label for end in ended.values() if isinstance(end, RoundEnd)} == {"before"}
    effects = [effect for node in (1, 2, 3) for effect in room.report(node)]
    answer = answers(effects)[5]
    assert answer.done
    assert answer.summary is not None
    assert (answer.summary.round, answer.summary.label) == (id, "before")
    assert published(room.wait(5_002))[0].label == ""


def test_a_round_by_command_never_makes_a_window_too_short() -> None:
    room = Room()
    room.begin()
    assert not sent(room.step(CommandReceived(5, "round", "now")), RoundEnd)
    assert not sent(room.wait(499), RoundEnd)
    assert sent(room.wait(1), RoundEnd)


def test_a_round_by_command_when_probing_is_off_runs_exactly_one() -> None:
    room = Room(is_on=False)
    begun = room.step(CommandReceived(5, "round", "one"))
    assert sent(begun, RoundStart)
    assert sent(room.wait(4_000), RoundEnd)
    effects = [effect for node in (1, 2, 3) for effect in room.report(node)]
    assert answers(effects)[5].done
    assert not sent(effects, RoundStart)
    assert sorted(sent(effects, ProbeHalt)) == [1, 2, 3]
    assert room.wait(60_000) == []


def test_two_labels_get_two_rounds() -> None:
    room = Room()
    room.begin()
    room.wait(1_000)
    room.step(CommandReceived(5, "round", "a"))
    room.step(CommandReceived(6, "round", "b"))
    first = [effect for node in (1, 2, 3) for effect in room.report(node)]
    room.wait(502)
    second = [effect for node in (1, 2, 3) for effect in room.report(node)]
    assert {asker: answer.summary.label for asker, answer in answers(first).items() if answer.summary} == {5: "a"}
    assert {asker: answer.summary.label for asker, answer in answers(second).items() if answer.summary} == {6: "b"}


def test_a_round_by_command_is_refused_when_there_is_nobody_to_probe() -> None:
    room = Room(nodes=1)
    answer = answers(room.step(CommandReceived(5, "round", "x")))[5]
    assert not answer.done
    assert "nobody to probe" in answer.text


def test_stop_answers_those_who_wait_for_a_round() -> None:
    room = Room()
    room.begin()
    room.step(CommandReceived(5, "round", "x"))
    effects = room.step(CommandReceived(6, "stop"))
    assert (answers(effects)[5].done, answers(effects)[6].done) == (False, True)


def test_an_asker_is_answered_by_its_deadline_even_if_nobody_reports() -> None:
    room = Room()
    room.begin()
    room.step(CommandReceived(5, "round", "x"))
    assert answers(room.wait(2_000))[5].done


def test_an_alarm_ends_the_round_early_once() -> None:
    room = Room()
    id = room.begin()
    alarm = RoundAlarm(id, 1, 2, 500_000, 0)
    assert not sent(room.step(AlarmReceived(1, alarm)), RoundEnd)
    assert sent(room.wait(500), RoundEnd)
    effects = [effect for node in (1, 2, 3) for effect in room.report(node)]
    assert "edge 1 -> 2 strays by 500000 ns" in published(effects)[0].anomaly
    assert room.master.round is not None
    room.step(AlarmReceived(1, structs.replace(alarm, round=room.master.round)))
    assert not sent(room.wait(3_999), RoundEnd)  # it rests: alarms without end would make windows too short for ever


@pytest.mark.parametrize(("src", "residual_ns"), [(2, 900_000), (1, 100_000)])
def test_an_alarm_about_another_nodes_edge_or_below_the_threshold_ends_nothing(src: NodeId, residual_ns: int) -> None:
    room = Room()
    id = room.begin()
    room.wait(1_000)
    room.step(AlarmReceived(1, RoundAlarm(id, src, 3, residual_ns, 0)))
    assert not room.master.is_gathering


def test_an_alarm_of_an_older_round_is_ignored() -> None:
    room = Room()
    id = room.begin()
    room.step(AlarmReceived(1, RoundAlarm(RoundId(1, id.sequence - 1), 1, 2, 500_000, 0)))
    assert not sent(room.wait(3_999), RoundEnd)


# The master: metrics


def test_the_control_latency_leaves_out_what_the_node_held() -> None:
    room = Room(nodes=2)
    room.to_end()
    end_ns = room.now
    room.now += 30 * MS
    room.report(1, end_sent_ns=end_ns, held_ns=20 * MS, fit_ns=3 * MS)
    (summary,) = published(room.report(2, end_sent_ns=end_ns, held_ns=24 * MS))
    metrics = summary.metrics
    assert metrics.control_latency_ns == [5 * MS, 3 * MS]
    assert (metrics.stop_ns, metrics.fit_ns, metrics.gather_ns) == (5 * MS, 3 * MS, 22 * MS)
    assert metrics.calculate_ns == 2 * MS


def test_the_restart_is_measured_by_the_next_report() -> None:
    room = Room(nodes=2)
    id = room.begin()
    begun_ns = room.now
    room.wait(4_000)
    end_ns, offset = room.now, 77_000 * MS  # the node's clock is 77 s ahead
    room.now += 10 * MS
    heard = end_ns + 1 * MS + offset
    stamps = {"end_sent_ns": end_ns, "held_ns": 8 * MS, "sent_ns": heard + 8 * MS}
    room.report(1, **stamps, resumed_ns=begun_ns + 4 * MS + offset)
    (summary,) = published(room.report(2, **stamps, resumed_ns=begun_ns + 2 * MS + offset))
    assert summary.round == id
    assert summary.metrics.restart_ns == 4 * MS
    assert summary.metrics.resume_spread_ns == 2 * MS
    assert summary.metrics.total_ns == 1 * MS + 0 + 9 * MS + 4 * MS


# The master: other kinds


def test_time_rounds_combine_the_newest_of_each_edge_whatever_the_ids() -> None:
    room = Room("time")
    id = room.begin()
    room.wait(3_000)
    room.report(1, window=7)
    room.report(2, window=12)
    room.report(3, window=3, edges=[EdgeFit(3, 1, pairs=1), EdgeFit(3, 2, pairs=1)])
    room.report(3, window=4, edges=[EdgeFit(3, 1, pairs=2), EdgeFit(3, 2, pairs=2)])
    effects = room.wait(1_000)
    assert not sent(effects, RoundEnd)
    (summary,) = published(effects)
    assert (summary.round, summary.missing) == (id, {})
    assert {view.fit.pairs for view in summary.edges if view.fit.src == 3} == {2}


def test_time_rounds_wait_for_the_window_less_one_second() -> None:
    room = Room("time")
    room.to_end()
    assert not published(room.wait(2_999))
    (summary,) = published(room.wait(1))
    assert sorted(summary.missing) == ["1", "2", "3"]


def test_time_rounds_use_an_old_report_for_two_windows_and_name_its_node() -> None:
    room = Room("time")
    id = room.begin()
    room.wait(3_000)
    for node in (1, 2, 3):
        room.report(node)
    (summary,) = published(room.wait(1_000))
    room.report(1)
    room.report(2)
    (summary,) = published(room.wait(6_999)) or published(room.wait(1))
    assert summary.missing == {"3": "no window of the last two"}  # it named the first round, begun 11 s before
    assert summary.round.sequence == id.sequence + 1


def test_time_rounds_keep_their_pace() -> None:
    room = Room("time")
    room.begin()
    begun = room.now
    room.wait(7_000)  # the first gathering takes all of its three seconds
    room.wait(1_000)
    assert room.now - begun == 8_000 * MS
    assert room.master.waiting_for() == [1, 2, 3]


def test_a_node_that_came_again_brings_nothing_from_before() -> None:
    room = Room("time")
    room.begin()
    room.report(1, window=900)
    room.step(NodeDisconnected(1, "restarted"))
    room.come(1)
    room.report(1, window=1)
    assert room.master._newest_windows.reports[1].report.window == 1


def test_local_rounds_need_no_reports_and_last_until_the_members_change() -> None:
    room = Room("local")
    begun = room.wait(100)
    start = sent(begun, RoundStart)[1]
    assert isinstance(start, RoundStart)
    assert start.deadline_ms == 0
    assert room.wait(100_000) == []
    room.come(4)
    assert sorted(sent(room.wait(100), ProbeGraph)) == [1, 2, 3, 4]


def test_gloo_rounds_end_when_all_ranks_have_reported() -> None:
    room = Room("gloo", nodes=2)
    room.begin()
    room.report(1)
    effects = room.report(2)
    assert published(effects)[0].missing == {}
    assert not sent(effects, RoundEnd)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "mast"},
        {"window_ms": 0},
        {"kind": "time", "window_ms": 900},
        {"settle_ms": -1},
        {"neighbours": 0},
        {"gap_us": 20_000},
        {"gap_us": 10},
        {"pause_us": 100},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RoundSettings(**wrong)  # type: ignore[arg-type]


# The node


class Seat:
    """A RoundNode with a clock that the test moves."""

    def __init__(self, kind: RoundKind = "master", *, connected: bool = True, graph: bool = True) -> None:
        self.node = RoundNode()
        self.now = 50_000 * MS
        if connected:
            self.step(MasterConnected(1))
        if graph:
            self.hear(ProbeGraph(1, kind, b"k" * 16, [fact(2)], [fact(2)]))

    def step(self, event: object) -> list[NodeEffect]:
        return self.node.step(self.now, event)  # type: ignore[arg-type]

    def hear(self, message: FromRoundMaster) -> list[NodeEffect]:
        return self.step(MasterMessageReceived(message))

    def start(self, sequence: int, *, deadline_ms: int = 6_000, pause_us: int = 3_000) -> list[NodeEffect]:
        cadence = Cadence(pause_us=pause_us)
        return self.hear(RoundStart(RoundId(1, sequence), "", cadence, deadline_ms, 0))

    def end(self, sequence: int) -> list[NodeEffect]:
        return self.hear(RoundEnd(RoundId(1, sequence), 123))

    def fitted(self, window: int) -> list[NodeEffect]:
        return self.step(WindowFitted(window, [EdgeFit(1, 2)], 0, 10, 0, 5))

    def wait(self, ms: float) -> list[NodeEffect]:
        effects: list[NodeEffect] = []
        until = self.now + int(ms * MS)
        while (due := self.node.next_deadline_ns()) is not None and due <= until:
            self.now = max(self.now, due)
            effects += self.step(Tick())
        self.now = until
        return effects


def said(effects: Sequence[NodeEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendToMaster)]


def without_notes(effects: Sequence[NodeEffect]) -> list[NodeEffect]:
    return [effect for effect in effects if not isinstance(effect, LogNote)]


def test_a_start_opens_a_window_and_an_end_closes_it() -> None:
    seat = Seat()
    assert seat.start(1) == [ResumeProbing(Cadence(), 1)]
    assert seat.end(1) == [PauseProbing(), RotateWindow(1)]
    seat.now += 3 * MS
    report, export = seat.fitted(1)
    assert isinstance(report, SendToMaster)
    assert isinstance(report.message, RoundReport)
    assert (report.message.round, report.message.window, report.message.held_ns) == (RoundId(1, 1), 1, 3 * MS)
    assert (report.message.end_sent_ns, report.message.resumed_ns) == (123, 50_000 * MS)
    assert isinstance(export, ExportWindow)
    assert seat.start(2) == [ResumeProbing(Cadence(), 2)]


def test_a_clock_is_adopted_once_and_never_an_older_one() -> None:
    seat = Seat()
    clock = NodeClock(1, 0, 0, 0.0, 1.0, -1, 1, 0.0)
    assert seat.hear(RoundClock(RoundId(1, 4), clock)) == [AdoptClock(clock)]
    assert seat.hear(RoundClock(RoundId(1, 4), clock)) == []
    assert seat.hear(RoundClock(RoundId(1, 3), clock)) == []


@pytest.mark.parametrize("repeated", ["start", "end", "halt"])
def test_what_is_repeated_or_older_is_ignored(repeated: str) -> None:
    seat = Seat()
    seat.start(5)
    seat.end(5)
    seat.hear(ProbeHalt(RoundId(1, 5), ""))
    message: dict[str, FromRoundMaster] = {
        "start": RoundStart(RoundId(1, 5), "", Cadence(), 6_000, 0),
        "end": RoundEnd(RoundId(1, 4), 0),
        "halt": ProbeHalt(RoundId(0, 900), ""),
    }
    assert seat.hear(message[repeated]) == []
    assert seat.node.last == RoundId(1, 5)


def test_a_start_that_comes_after_its_halt_is_ignored() -> None:
    seat = Seat()
    seat.hear(ProbeHalt(RoundId(1, 3), ""))
    assert seat.start(3) == []
    assert seat.start(4) == [ResumeProbing(Cadence(), 1)]


def test_an_end_without_its_start_is_answered_at_once() -> None:
    seat = Seat()
    (report,) = said(seat.end(4))
    assert isinstance(report, RoundReport)
    assert (report.round, report.edges) == (RoundId(1, 4), [])


def test_a_halt_closes_the_window_and_nothing_goes_on_alone() -> None:
    seat = Seat()
    seat.start(1)
    assert without_notes(seat.hear(ProbeHalt(RoundId(1, 1), "stop"))) == [PauseProbing(), RotateWindow(1)]
    assert seat.wait(1_000_000) == []


def test_without_an_end_by_the_deadline_it_goes_on_alone() -> None:
    seat = Seat()
    seat.start(1)
    assert without_notes(seat.wait(5_999)) == []
    assert without_notes(seat.wait(1)) == [RotateWindow(1)]
    assert seat.node.is_alone
    assert without_notes(seat.wait(4_000)) == [RotateWindow(2)]
    (export,) = seat.fitted(2)
    assert isinstance(export, ExportWindow)
    assert export.is_alone


def test_without_a_start_after_the_end_it_goes_on_alone() -> None:
    seat = Seat()
    seat.start(1)
    seat.end(1)
    assert without_notes(seat.wait(2_000)) == [ResumeProbing(Cadence(), 2)]
    assert seat.node.is_alone


def test_a_node_alone_comes_back_with_the_next_higher_start() -> None:
    seat = Seat()
    seat.start(1)
    seat.wait(6_000)
    assert seat.start(1) == []
    assert seat.start(2) == [RotateWindow(2), ResumeProbing(Cadence(), 3)]
    assert not seat.node.is_alone
    (export,) = seat.fitted(2)
    assert isinstance(export, ExportWindow)
    assert (export.round, export.is_alone) == (RoundId(1, 1), True)


def test_a_report_that_the_connection_swallowed_is_said_again() -> None:
    seat = Seat()
    seat.start(1)
    seat.end(1)
    seat.step(MasterDisconnected("reset"))
    assert said(seat.fitted(1)) == []
    (report,) = said(seat.step(MasterConnected(1)))
    assert isinstance(report, RoundReport)
    assert (report.round, report.retries) == (RoundId(1, 1), 1)


def test_a_node_with_a_new_number_says_nothing_of_its_old_edges() -> None:
    """Another master may have given the old number, and those of its neighbours, to others."""
    seat = Seat()
    seat.start(1)
    seat.end(1)
    seat.fitted(1)
    seat.start(2)
    seat.end(2)
    seat.step(MasterDisconnected("the master is gone"))
    assert said(seat.step(MasterConnected(7))) == []
    assert said(seat.fitted(2)) == []


def test_fits_that_come_after_the_next_start_are_reported_for_their_own_round() -> None:
    seat = Seat()
    seat.start(1)
    seat.end(1)
    seat.start(2)
    (report,) = said(seat.fitted(1))
    assert isinstance(report, RoundReport)
    assert report.round == RoundId(1, 1)


def test_a_new_graph_never_shares_a_window_with_the_old_one() -> None:
    seat = Seat()
    seat.start(1)
    effects = seat.hear(ProbeGraph(2, "master", b"n" * 16, [fact(3)], []))
    assert effects == [
        PauseProbing(),
        RotateWindow(1),
        ConfigureProber(b"n" * 16, [fact(3)], []),
        ResumeProbing(Cadence(), 2),
    ]
    assert seat.hear(ProbeGraph(1, "master", b"o" * 16, [fact(2)], [])) == []


def test_a_new_master_may_use_a_graphs_number_again() -> None:
    """The last one said its graph and died before it said the start: nobody has seen that round."""
    seat = Seat()
    seat.step(MasterDisconnected("the master died"))
    seat.step(MasterConnected(1))
    assert seat.hear(ProbeGraph(1, "master", b"n" * 16, [fact(3)], [])) == [ConfigureProber(b"n" * 16, [fact(3)], [])]


def test_a_listener_opens_no_window_and_has_no_deadline() -> None:
    seat = Seat(graph=False)
    seat.hear(ProbeGraph(1, "master", b"k" * 16, [], [fact(2)]))
    clock = NodeClock(1, 0, 0, 0.0, 1.0, -1, 1, 0.0)
    assert seat.hear(RoundStart(RoundId(1, 1), "", Cadence(), 6_000, 0)) == []
    assert seat.hear(RoundClock(RoundId(1, 1), clock)) == [AdoptClock(clock)]
    assert seat.wait(100_000) == []


def test_a_clock_that_goes_back_takes_the_deadline_with_it() -> None:
    seat = Seat()
    seat.start(1)
    seat.now -= 3_600_000 * MS
    seat.step(Tick())
    seat.wait(6_000)
    assert seat.node.is_alone


def test_the_master_says_what_is_worth_an_alarm() -> None:
    seat = Seat()
    seat.hear(RoundStart(RoundId(1, 1), "", Cadence(), 6_000, 0, anomaly_ns=5_000_000))
    assert said(seat.step(ResidualObserved(1, 2, 4_000_000))) == []
    assert len(said(seat.step(ResidualObserved(1, 2, -6_000_000)))) == 1


def test_an_alarm_is_said_once_a_round() -> None:
    seat = Seat()
    seat.start(1)
    assert said(seat.step(ResidualObserved(1, 2, 99_000))) == []
    (alarm,) = said(seat.step(ResidualObserved(1, 2, -200_000)))
    assert alarm == RoundAlarm(RoundId(1, 1), 1, 2, -200_000, seat.now)
    assert said(seat.step(ResidualObserved(1, 2, 200_000))) == []


def test_windows_by_the_clock_follow_each_other_and_are_reported() -> None:
    seat = Seat("time")
    seat.start(1)
    rotated = seat.wait(12_000)
    assert [effect for effect in rotated if isinstance(effect, RotateWindow)] == [
        RotateWindow(1),
        RotateWindow(2),
        RotateWindow(3),
    ]
    assert not [effect for effect in rotated if isinstance(effect, PauseProbing | ResumeProbing)]
    assert len(said(seat.fitted(1))) == 1


def test_a_start_in_the_middle_of_a_window_by_the_clock_leaves_it_open() -> None:
    seat = Seat("time")
    seat.start(1)
    assert seat.start(2) == []
    assert seat.node.last == RoundId(1, 2)
    assert seat.start(3, pause_us=6_000) == [RotateWindow(1), ResumeProbing(Cadence(pause_us=6_000), 2)]


def test_local_windows_are_exported_and_not_reported() -> None:
    seat = Seat("local")
    seat.start(1, deadline_ms=0)
    assert [effect for effect in seat.wait(4_000) if isinstance(effect, RotateWindow)] == [RotateWindow(1)]
    (export,) = seat.fitted(1)
    assert isinstance(export, ExportWindow)


def test_a_gloo_window_ends_by_the_clock_and_then_waits() -> None:
    seat = Seat("gloo")
    seat.start(1, deadline_ms=35_000)
    assert seat.wait(4_000) == [PauseProbing(), RotateWindow(1)]
    assert len(said(seat.fitted(1))) == 1
    assert without_notes(seat.wait(31_000)) == [ResumeProbing(Cadence(), 2)]
    assert seat.node.is_alone


def test_a_broken_group_is_no_reason_to_wait() -> None:
    seat = Seat("gloo")
    seat.start(1, deadline_ms=35_000)
    seat.wait(4_000)
    assert without_notes(seat.step(MasterDisconnected("broken"))) == [ResumeProbing(Cadence(), 2)]
    assert seat.node.is_alone


def test_a_start_that_overtakes_its_graph_counts_when_the_graph_is_there() -> None:
    seat = Seat(graph=False)
    assert seat.start(1) == []
    configure, resume = seat.hear(ProbeGraph(1, "master", b"k" * 16, [fact(2)], [fact(2)]))
    assert isinstance(configure, ConfigureProber)
    assert resume == ResumeProbing(Cadence(), 1)
    seat.wait(6_000)
    assert seat.node.is_alone


@pytest.mark.parametrize("utc_ns", [0, 1_700_000_000 * 10**9 + 17, -(10**15) - 3])
@pytest.mark.parametrize("now_ns", [0, 1, 3_999_999_999, 10**17 + 7])
def test_boundaries_are_multiples_in_utc_and_not_too_near(now_ns: int, utc_ns: int) -> None:
    window = 4_000 * MS
    due = next_boundary(now_ns, utc_ns, window)
    assert (due + utc_ns) % window == 0
    assert window // 2 <= due - now_ns <= window * 3 // 2


# What a summary has of each node


def test_a_summary_has_the_window_of_each_node() -> None:
    room = Room(nodes=2)
    id = room.to_end()
    edges = [EdgeFit(1, 2, sent=100, lost=3)]
    sequences = {"first_sequence": 501, "last_sequence": 600, "next_sequence": 601}
    room.report(1, edges=edges, begin_ns=7, end_ns=11, fit_ns=5, **sequences)
    (summary,) = published(room.report(2))
    first, second = summary.windows
    assert (first.node, first.round, first.window) == (1, id, 1)
    assert (first.first_sequence, first.last_sequence, first.next_sequence) == (501, 600, 601)
    assert (first.begin_ns, first.end_ns, first.fit_ns) == (7, 11, 5)
    assert (first.sent, first.received, first.lost) == (100, 97, 3)
    assert second.node == 2


def test_a_missing_node_has_no_window_and_a_late_one_names_its_round() -> None:
    room = Room()
    id = room.to_end()
    room.report(1)
    room.report(2)
    (summary,) = published(room.wait(1_000))
    assert [each.node for each in summary.windows] == [1, 2]
    room.report(3, round=id)
    while not room.master.is_gathering:
        room.wait(1)
    room.report(1)
    room.report(2)
    (later,) = published(room.wait(25))
    assert [(each.node, each.round == id) for each in later.windows] == [(1, False), (2, False), (3, True)]


def test_retransmits_are_counted_since_the_last_report_and_apart_from_reports_sent_again() -> None:
    room = Room(nodes=2)
    totals = []
    for so_far in (4, 4, 9):
        while not room.master.is_gathering:
            room.wait(1)
        room.step(ReportReceived(1, room.make(1, retries=1), 300, so_far))
        (summary,) = published(room.step(ReportReceived(2, room.make(2), 300, 0)))
        totals.append((summary.metrics.tcp_retransmits, summary.metrics.retries))
    assert totals == [(4, 1), (0, 1), (5, 1)]


def test_a_report_with_impossible_sequences_is_refused() -> None:
    room = Room()
    room.to_end()
    room.report(1, last_sequence=-1)
    assert 1 in room.master.waiting_for()
