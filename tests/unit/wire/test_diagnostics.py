"""Peers in sentences: by number and name, and which one is the reader."""

import pickle

import pytest

from ringfold.errors import Evicted
from ringfold.peer.outcome import error_of
from ringfold.wire.diagnostics import with_names, with_you
from ringfold.wire.messages import Reason

NAMES = {1: "gpu-1", 2: "gpu-2", 3: "rack (7)", 4: "x" * 60}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("peer 1 waits", "peer 1 (gpu-1) waits"),
        ("waited for peers 1, 2 and 9", "waited for peers 1 (gpu-1), 2 (gpu-2) and 9"),
        ("peers 1, 2 and 14 more", "peers 1 (gpu-1), 2 (gpu-2) and 14 more"),
        ("peer 1 (gpu-1) left", "peer 1 (gpu-1) left"),
        ("peer 3: no", "peer 3 (rack [7]): no"),
        ("peer 4 left", f"peer 4 ({'x' * 37}...) left"),
        ("needs 2 peers, 1 is there", "needs 2 peers, 1 is there"),
        ("peer 12 left", "peer 12 left"),
    ],
)
def test_a_sentence_gets_the_names_of_its_peers_once(text: str, named: str) -> None:
    assert with_names(text, NAMES) == named
    assert with_names(named, NAMES) == named


@pytest.mark.parametrize(
    "text",
    [f"peer {'9' * 10_000} left", f"peers 1, {'9' * 10_000} and 2 wait", f"peers {'1, ' * 50_000} 1 (", "peer \u0663"],
)
def test_what_another_machine_wrote_does_no_harm(text: str) -> None:
    assert with_you(with_names(text, {}), 2) in (text, text.replace("2 wait", "2 (you) wait"))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("peer 2 (gpu-2) waits, peer 1 does not", "peer 2 (gpu-2, you) waits, peer 1 does not"),
        ("peers 1 (gpu-1), 2 (gpu-2) and 3 wait", "peers 1 (gpu-1), 2 (gpu-2, you) and 3 wait"),
        ("peers 1 and 2 wait", "peers 1 and 2 (you) wait"),
        ("peers 1 and 2 more", "peers 1 and 2 more"),
        ("peer 22 waits", "peer 22 waits"),
    ],
)
def test_a_reader_finds_itself_in_a_sentence(text: str, read: str) -> None:
    assert with_you(text, 2) == read


def test_an_error_marks_the_own_peer() -> None:
    text = "peer 1 (a) waits in update_topology, peer 2 (b) waits in sync_shared_state: these calls can never meet"
    error = error_of(Reason("usage", text, [1, 2]), "update_topology", 3, me=1)
    assert str(error) == f"update_topology: {text}".replace("(a)", "(a, you)")


def test_a_deadline_error_names_the_place_and_the_setting() -> None:
    reason = Reason("deadline", "op tag 0 sequence 0 waited 3.0 s for peer 1 (a)", [1], 3_000)
    assert str(error_of(reason, "all_reduce", 3, me=2)) == (
        "all_reduce: op tag 0 sequence 0 waited 3.0 s for peer 1 (a); `ringfold status` shows what they do, and "
        "op_timeout_s (or timeout_s=) says how long to wait"
    )


def test_an_eviction_names_the_evicted_peer() -> None:
    error = pickle.loads(pickle.dumps(Evicted("silent for 5000 ms", "peer 3 (gpu-7, you)")))
    assert str(error).startswith("peer 3 (gpu-7, you) was evicted from the run: silent for 5000 ms; join again")
