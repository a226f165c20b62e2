"""From marks to figures: what `ringfold bench rounds` makes of the instants that its nodes saw."""

import pytest

from ringfold.tools.bench import rounds
from ringfold.tools.bench.rounds import Case, growth_of, parts_of, plan, plan_regions, shares_of, turns_of
from ringfold.tools.bench.rounds_worker import Mark, Marks

MS = 1_000_000


def marks(*rounds_ns: tuple[int, int, int], count: int = 1, closed_ns: int = 0) -> Marks:
    """Of each round: when its end was sent, when that was received, and when the next start was received."""
    marked = Marks()
    for number, (sent, ended, started) in enumerate(rounds_ns, 1):
        marked.ends[number] = Mark(sent, ended, ended, count)
        marked.starts[number + 1] = Mark(sent + 1, started, started, count, closed_ns)
    return marked


def test_a_turn_lasts_until_the_last_node_has_heard_the_start() -> None:
    quick, slow = marks((100, 110, 150)), marks((100, 120, 170))
    assert turns_of("master", 2, [quick, slow]) == [70]


def test_a_round_that_somebody_missed_does_not_count() -> None:
    both, one = marks((100, 110, 150), (1_000, 1_010, 1_030)), marks((100, 110, 140))
    assert turns_of("master", 2, [both, one]) == [50]


def test_time_that_the_master_did_not_live_is_no_turn() -> None:
    """Its clock is behind by 300 ms from the second round on; that is in the stamps of all later messages."""
    lost = 300 * MS
    marked = marks((100, 110, 150), (1_000, 1_010 + lost, 1_060 + lost), (2_000, 2_020 + lost, 2_040 + lost))
    first, second, third = turns_of("master", 1, [marked])
    assert first == 50
    assert second <= 60
    assert third <= 40


def test_a_slow_round_is_not_taken_for_lost_time() -> None:
    marked = marks((100, 110 + 300 * MS, 150 + 300 * MS), (10**9, 10**9 + 10, 10**9 + 50))
    assert turns_of("master", 1, [marked])[0] == 50 + 300 * MS


def test_time_rounds_are_measured_from_the_last_window() -> None:
    early, late = marks((0, 0, 500), closed_ns=450), marks((0, 0, 520), closed_ns=470)
    assert turns_of("time", 2, [early, late]) == [50]


@pytest.mark.parametrize(("power", "exponent"), [(1, 1.0), (2, 2.0), (0, 0.0)])
def test_growth_tells_linear_from_worse(power: int, exponent: float) -> None:
    rows: list[dict[str, float | int | str | bool | None]] = [
        {
            "kind": "master",
            "mode": "recorded",
            "window_ms": rounds.RECORDED_MS,
            "nodes": nodes,
            "p50_ms": float(nodes**power),
        }
        for nodes in (2, 8, 32, 128)
    ]
    found = growth_of(rows)
    assert found is not None
    assert found["exponent"] == pytest.approx(exponent)


def test_real_processes_end_at_eight_and_recorded_nodes_are_measured_at_all_counts() -> None:
    cases = plan([2, 8, 32], ["master"], 10, 0, {})
    assert {case.nodes for case in cases if not case.is_recorded} == {2, 8}
    assert {case.nodes for case in cases if case.is_recorded} == {2, 8, 32}


def test_gloo_without_torch_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.importlib.util, "find_spec", lambda name: None)
    skipped: dict[str, str] = {}
    assert plan([2, 8], ["gloo"], 10, 0, skipped) == []
    assert "torch" in skipped["gloo"]


def test_gloo_is_measured_with_up_to_32_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.importlib.util, "find_spec", lambda name: object())
    skipped: dict[str, str] = {}
    assert [case.nodes for case in plan([8, 16, 32, 128], ["gloo"], 10, 0, skipped)] == [8, 16, 32]
    assert list(skipped) == ["gloo beyond 32 nodes"]


def test_regions_are_measured_beside_the_same_nodes_without_relays() -> None:
    cases = plan_regions([8, 128], 16, 60)
    assert [(case.nodes, case.regions, case.mode) for case in cases] == [
        (8, 0, "recorded"),
        (8, 8, "regions"),
        (128, 0, "recorded"),
        (128, 16, "regions"),
    ]
    assert len({(case.window_ms, case.rounds) for case in cases}) == 1


def test_long_windows_are_measured_with_and_without_steps() -> None:
    long = [case for case in plan([2, 8, 128], ["master"], 10, 5, {}) if case.window_ms == rounds.LONG_MS]
    assert Case("master", 8, False, rounds.LONG_MS, 5, steps=True) in long
    assert Case("master", 128, True, rounds.LONG_MS, 5, steps=True) in long


def test_one_node_falls_silent_in_rows_with_long_windows() -> None:
    cases = plan([2, 8, 128], ["master"], 10, 5, {})
    silent = {(case.nodes, case.silent, case.window_ms) for case in cases if case.silent != rounds.NOBODY}
    assert silent == {(nodes, how, rounds.LONG_MS) for nodes in (8, 128) for how in (rounds.FROZEN, rounds.STUCK)}


def test_the_parts_of_a_turn_add_up_to_it() -> None:
    quick, slow = marks((100 * MS, 101 * MS, 120 * MS)), marks((100 * MS, 103 * MS, 118 * MS))
    for marked, sent_ms in ((quick, 106), (slow, 109)):
        marked.reports[1] = Mark(sent_ms * MS, sent_ms * MS, sent_ms * MS)
        marked.starts[2].sent_ns = 115 * MS
    row = parts_of(2, [quick, slow])
    assert (row["end_ms"], row["held_ms"], row["master_ms"], row["start_ms"]) == (3, 6, 6, 5)
    assert sum(row[f"{part}_ms"] for part in ("end", "held", "master", "start")) == 20  # type: ignore[misc]


def test_time_that_the_master_did_not_run_is_no_part_of_a_turn() -> None:
    lost = 300
    late = marks((100 * MS, (101 + lost) * MS, (120 + lost) * MS))
    late.starts[2].sent_ns = 115 * MS
    late.reports[1] = Mark(0, (106 + lost) * MS, (106 + lost) * MS)
    row = parts_of(1, [late])
    assert row["held_ms"] == 5
    assert abs(sum(row[f"{part}_ms"] for part in ("end", "held", "master", "start")) - 20) <= 1  # type: ignore[misc]


def test_a_round_that_not_all_nodes_reported_has_no_parts() -> None:
    assert parts_of(2, [marks((100, 110, 150))]) == {}


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (4, 3), (16, 8)])
def test_recorded_nodes_are_in_a_process_for_each_core_but_the_masters(cores: int, workers: int) -> None:
    shares = shares_of(Case("master", 128, True, 250, 60), cores)
    assert (len(shares), sum(shares), max(shares) - min(shares) <= 1) == (workers, 128, True)


def test_a_recorded_node_that_falls_silent_has_a_process_of_its_own() -> None:
    assert shares_of(Case("master", 128, True, 4_000, 4, silent="stuck"), 4) == [43, 42, 42, 1]
    assert shares_of(Case("master", 8, False, 4_000, 4, silent="stuck"), 4) == [1] * 8
