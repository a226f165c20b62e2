"""The checks at the end of the demo: all kept for a good outcome, and each broken by what it looks for."""

from collections.abc import Callable

import pytest
from rich.console import Console

from ringfold.tools.demo.outcome import Arrival, DemoCheck, DemoOutcome, MasterLoss, PeerLoss, as_text, checks


def good() -> DemoOutcome:
    return DemoOutcome(
        founders=3,
        steps=100,
        seed=1,
        aborts=1,
        retries=2,
        faults=[PeerLoss("peer A", "SIGKILL", 20, 8.0, 2, inside=True), PeerLoss("peer B", "SIGSTOP", 50, 1_500.0, 2)],
        arrivals=[Arrival("peer D", "joined", 30, 40.0), Arrival("peer B", "rejoined", 70, 30.0)],
        master=MasterLoss(80, 600.0, 3, 3),
        evictions=["peer B: silent"],
        exit_codes={"peer B": 0, "peer C": 0, "peer D": 0},
        digests={"peer B": "aa", "peer C": "aa", "peer D": "aa"},
        held_out={"peer B": 1.01, "peer C": 1.01, "peer D": 1.01},
        undisturbed=1.0,
        sample="The import statement[red]",
    )


def broken(outcome: DemoOutcome) -> list[DemoCheck]:
    return [check for check in checks(outcome) if not check.kept]


def test_a_good_outcome_keeps_every_promise() -> None:
    assert broken(good()) == []
    assert len(checks(good())) == 8


def _finish_no_peer(outcome: DemoOutcome) -> None:
    outcome.digests, outcome.exit_codes = {}, {}


@pytest.mark.parametrize(
    ("spoil", "promise"),
    [
        (lambda it: setattr(it.faults[0], "inside", False), "killed inside"),
        (lambda it: it.faults.pop(), "frozen"),
        (lambda it: it.arrivals.pop(0), "new peer"),
        (lambda it: it.arrivals.pop(), "rejoins"),
        (lambda it: it.evictions.clear(), "rejoins"),
        (lambda it: setattr(it.master, "kept", 2), "a master killed"),
        (lambda it: setattr(it.master, "inside", False), "a master killed"),
        (lambda it: it.exit_codes.update({"peer C": -11}), "cleanly"),
        (_finish_no_peer, "cleanly"),
        (lambda it: it.digests.update({"peer C": "bb"}), "same bits"),
        (lambda it: it.held_out.update({"peer C": 1.04}), "held-out"),
        (lambda it: it.held_out.update({"peer C": float("nan")}), "held-out"),
        (lambda it: setattr(it, "undisturbed", float("nan")), "held-out"),
        (lambda it: it.held_out.clear(), "held-out"),
    ],
)
def test_a_broken_promise_is_named(spoil: Callable[[DemoOutcome], object], promise: str) -> None:
    outcome = good()
    spoil(outcome)
    assert any(promise in check.promise for check in broken(outcome))


def test_the_table_shows_what_happened_and_reads_no_markup() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(as_text(good(), checks(good())))
    text = captured.get()
    for word in ("aborts", "retries", "recovery from SIGKILL", "evictions", "skipped", "statement[red]"):
        assert word in text
    assert "FAILED" not in text
