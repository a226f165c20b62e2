"""`gloo` rounds over a real process group: whole ones, and what a dead or frozen rank does to the others."""

import importlib.util
import json
import signal
from pathlib import Path

import pytest
from fork_server import Forked
from ports import free_port

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo rounds need PyTorch (ringfold[torch]), which is not here"
)
RANK = Path(__file__).parent / "gloo_rank.py"
DEADLINE_S = 120


def run_ranks(size: int, mode: str) -> list[list[dict[str, object]]]:
    """What each rank reported. A rank that dies or freezes is ended here."""
    port = str(free_port())
    ranks = [Forked(RANK.read_text(), str(rank), str(size), port, mode, package="torch") for rank in range(size)]
    reported = []
    try:
        # Rank 0 last: the others look into its store.
        order = [rank for rank in reversed(range(size)) if mode != "freeze" or rank != 1]
        outputs = {rank: ranks[rank].communicate(timeout=DEADLINE_S) for rank in order}
        if mode == "freeze":
            ranks[1].send_signal(signal.SIGKILL)
            outputs[1] = ranks[1].communicate(timeout=DEADLINE_S)
        for rank in range(size):
            expected = -signal.SIGKILL if rank == 1 and mode in ("die", "freeze") else 0
            assert ranks[rank].returncode == expected
            reported.append([json.loads(line) for line in outputs[rank][0].splitlines()])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return reported


@needs_torch
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_make_whole_rounds_without_a_master(size: int) -> None:
    for rank, lines in enumerate(run_ranks(size, "whole")):
        assert [line["sequence"] for line in lines] == [1, 2, 3], rank
        assert all(line["missing"] == [] and line["edges"] == size * (size - 1) for line in lines)
        assert all(line["clock"] for line in lines)
        assert [line["windows"] for line in lines] == [[1], [2], [3]]


@needs_torch
def test_a_rank_that_only_listens_is_in_the_group_and_not_in_the_way() -> None:
    reported = run_ranks(2, "listener")
    assert [line["edges"] for line in reported[0]] == [1, 1, 1]
    assert [line["missing"] for line in reported[1]] == [[], [], []]


@needs_torch
@pytest.mark.parametrize("mode", ["long listener", "long unlisted"])
def test_a_rank_without_a_window_waits_for_those_whose_window_is_longer_than_the_timeout(mode: str) -> None:
    for lines in run_ranks(3, mode):
        assert [(line.get("sequence"), line.get("missing")) for line in lines] == [(1, []), (2, []), (3, [])]
        assert all(line["edges"] == 4 for line in lines)


@needs_torch
@pytest.mark.parametrize("mode", ["die", "freeze"])
def test_a_lost_rank_is_named_by_the_deadline_and_the_others_go_on_alone(mode: str) -> None:
    reported = run_ranks(4, mode)
    for rank in (0, 2, 3):
        error, alone = reported[rank][-2:]
        assert error["missing"] == [1], error
        assert "rank 1 is missing" in str(error["error"])
        assert float(str(error["took_ms"])) < 6_000  # the window, the timeout of 1.5 s, and the look at the store
        assert alone["alone"] is True
