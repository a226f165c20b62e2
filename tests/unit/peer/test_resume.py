"""A step loop whose run has lost its state: what it lists, what it loads, and that this comes to an end."""

import logging
from pathlib import Path

import numpy as np
import pytest

from ringfold.errors import StateError, StateLost
from ringfold.peer.sync.resume import MAX_REQUESTS, Resuming, check_used
from ringfold.state.ancestry import new_lineage
from ringfold.state.checkpoint import Checkpoints
from ringfold.state.shared import SharedState, set_lineage, set_torn
from ringfold.wire.messages import Branch, Lineage

OLD = Lineage("run", "old")
NEW = new_lineage("run", "new", OLD, 140)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Revisions 150 and 140 of a lineage that was left at 140."""
    found = Checkpoints(tmp_path)
    for revision in (140, 150):
        state = SharedState(w=np.full(10, revision, np.float32), revision=revision)
        set_lineage(state, OLD)
        found.save(state)
    return found


def fresh() -> SharedState:
    return SharedState(w=np.zeros(10, np.float32))


def wanted(branch: Branch) -> StateLost:
    return StateLost(160, "it is lost", (branch.lineage, branch.revision))


def damage(checkpoints: Checkpoints, revision: int) -> None:
    [path] = checkpoints.directory.glob(f"state-{revision:012}-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_checkpoint_that_the_master_requests_is_loaded(checkpoints: Checkpoints) -> None:
    resuming, state = Resuming(checkpoints), fresh()
    assert resuming.listed() == [Branch("old", 150), Branch("old", 140)]
    assert resuming.goes_on(state, wanted(Branch("old", 140)))
    assert state.revision == 140


def test_one_that_another_peer_has_is_left_to_it(checkpoints: Checkpoints) -> None:
    resuming, state = Resuming(checkpoints), fresh()
    assert resuming.goes_on(state, wanted(Branch("new", 145)))
    assert state.revision == 0


def test_one_that_is_damaged_is_listed_no_more(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    damage(checkpoints, 140)
    resuming, state = Resuming(checkpoints), fresh()
    with caplog.at_level(logging.WARNING, "ringfold.steps"):
        assert resuming.goes_on(state, wanted(Branch("old", 140)))
    assert "revision 140 cannot be loaded here" in caplog.text
    assert resuming.listed() == [Branch("old", 150)]


def test_one_that_was_loaded_and_did_not_do_is_listed_no_more(checkpoints: Checkpoints) -> None:
    resuming, state = Resuming(checkpoints), fresh()
    assert resuming.goes_on(state, wanted(Branch("old", 140)))
    assert resuming.goes_on(state, wanted(Branch("old", 140)))
    assert resuming.listed() == [Branch("old", 150)]


def test_one_that_a_sync_has_overwritten_is_loaded_again(checkpoints: Checkpoints) -> None:
    resuming, state = Resuming(checkpoints), fresh()
    resuming.goes_on(state, wanted(Branch("old", 140)))
    set_torn(state, True)
    resuming.goes_on(state, wanted(Branch("old", 140)))
    assert not state.torn
    assert Branch("old", 140) in resuming.listed()


def test_a_master_that_always_requests_the_same_is_not_obeyed_for_ever(checkpoints: Checkpoints) -> None:
    resuming, state = Resuming(checkpoints), fresh()
    answers = [resuming.goes_on(state, wanted(Branch("new", 145))) for _ in range(MAX_REQUESTS)]
    assert answers == [True] * (MAX_REQUESTS - 1) + [False]


def test_a_loop_without_checkpoints_lets_others_load() -> None:
    resuming, state = Resuming(None), fresh()
    assert resuming.listed() == []
    assert resuming.goes_on(state, wanted(Branch("old", 140)))
    assert not resuming.goes_on(state, StateLost(150))


def test_exactly_the_lost_revision_is_tried_once(checkpoints: Checkpoints) -> None:
    """Files of the version before name no lineage, and cannot be requested."""
    resuming, state = Resuming(checkpoints), fresh()
    assert resuming.goes_on(state, StateLost(150))
    assert state.revision == 150
    assert not resuming.goes_on(state, StateLost(150))


def test_a_disk_that_does_not_answer_lists_nothing(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> list[Path]:
        raise StateError("the checkpoints cannot be listed: Input/output error")

    monkeypatch.setattr(checkpoints, "paths", fails)
    assert Resuming(checkpoints).listed() == []
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (OLD, "a branch that the run has abandoned"),
        (Lineage("another", "x"), "run another, and this is run run"),
        (NEW, ""),
        (None, ""),
    ],
)
def test_a_checkpoint_that_the_run_does_not_use_is_named(
    before: Lineage | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = fresh()
    set_lineage(state, new_lineage("run", "third", NEW, 145))
    with caplog.at_level(logging.WARNING, "ringfold.steps"):
        check_used(before, 144 if before is NEW else 150, state)
    assert words in caplog.text
    assert bool(words) == bool(caplog.records)
