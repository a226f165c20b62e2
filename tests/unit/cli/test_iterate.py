"""`ringfold iterate`: what it refuses, and what it shows."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import ringfold as rf
from ringfold.cli import build
from ringfold.cli.iterate import render
from ringfold.errors import UsageError
from ringfold.iteration.record import Rules
from ringfold.iteration.shell import Observer, RankView, View
from ringfold.store import open_store


def shown(view: View | None) -> str:
    console = Console(width=120, file=StringIO())
    console.print(render("sqlite:///x.db", view))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/store.db"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--watch", "--json"],
        ["--json", "--rank", "0", "--world", "1", "--", "true"],
        ["--rank", "0", "--", "true"],
        ["--world", "2", "--", "true"],
        ["--rank", "2", "--world", "2", "--", "true"],
        ["--rank", "0", "--world", "2", "--min-ranks", "3", "--", "true"],
        ["--rank", "0", "--world", "1", "--", "/no/such/program"],
    ],
)
def test_a_call_that_makes_no_sense_is_refused(store: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(build(["iterate"]), ["iterate", "--store", store, *arguments])
    assert isinstance(result.exception, UsageError), result.output


def test_status_of_an_empty_store_shows_that_no_rank_registered(store: str) -> None:
    result = CliRunner().invoke(build(["iterate"]), ["iterate", "--store", store, "--json"])
    assert json.loads(result.output) is None
    assert "no rank has registered yet" in shown(None)


def test_an_observer_sees_the_ranks_and_changes_nothing(store: str) -> None:
    with (
        rf.GlobalIteration(store, 0, 3, timeout_s=20) as zero,
        rf.GlobalIteration(store, 1, 3, timeout_s=20) as one,
        rf.GlobalIteration(store, 2, 3, timeout_s=20) as two,
        open_store(store) as opened,
    ):
        one.arrive()
        zero.next()
        one.next()
        zero.arrive()
        two.arrive()
        before = opened.get("iteration/record")
        seen = Observer(opened).look()
        assert seen is not None
        assert [rank.state for rank in seen.ranks] == ["READY", "TRAINING", "JOINING"]
        assert (seen.iteration, seen.waiting_for) == (0, [1])
        assert opened.get("iteration/record") == before
        one.close()
        left = Observer(opened).look()
        assert left is not None
        assert [rank.state for rank in left.ranks] == ["READY", "LEFT", "JOINING"]
        assert left.waiting_for == []


def test_the_table_names_the_ranks_that_are_waited_for() -> None:
    ranks = [RankView(0, "READY", "aaaaaaaabbbb", 1, 7, 1.5), RankView(3, "INACTIVE", "cccccccc", 2, -1, None)]
    text = shown(View(7, 20, 0, Rules(4, 2, "majority"), ranks, [3], "rank 3 of 2 members have not arrived"))
    assert "iteration 7, won by rank 0" in text
    assert "2 of 4 ranks, at least 2, majority" in text
    assert "1.5 s" in text
    assert "INACTIVE" in text
    assert "rank 3 of 2 members" in text
