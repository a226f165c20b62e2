"""The result of the demo: what was measured, the checks on it, and how both are shown."""

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ringfold.cli.output import COLOURS, duration, table

TOLERANCE = 0.03
"""How much worse the disturbed run's loss may be. Steps with fewer peers learn from fewer examples."""

SKIPPED = {
    "cut and shaped links": "they need network namespaces, which need root",
}


class PeerLoss(msgspec.Struct):
    """A peer that was taken out, and how long the others made no progress."""

    peer: str
    signal: str
    step: int
    recovery_ms: float
    """From just before the signal to the last survivor's next committed op."""
    ring: int
    inside: bool = False
    """Whether it was inside an all-reduce, so that the survivors had to run the op again without it."""


class MasterLoss(msgspec.Struct):
    """The master was killed inside an all-reduce, and started again at once."""

    step: int
    recovery_ms: float
    """From just before the signal to the last peer's next committed op, the start of the new process included."""
    peers: int
    kept: int
    """How many peers there were, and how many went on."""
    inside: bool = True
    """Whether every peer finished that step only after the signal."""


class Arrival(msgspec.Struct):
    """A peer that came in the middle, and how long it took until it had reduced with the others."""

    peer: str
    how: str
    step: int
    took_ms: float


class DemoCheck(msgspec.Struct, frozen=True):
    """One promise: kept or not, and what was seen."""

    promise: str
    kept: bool
    seen: str


class DemoOutcome(msgspec.Struct):
    """Everything the peers reported, and the held-out loss of an undisturbed training beside it."""

    founders: int
    steps: int
    seed: int
    seconds: float = 0.0
    epochs: int = 0
    aborts: int = 0
    """All-reduces that were aborted, and by all survivors run again."""
    retries: int = 0
    """The same, counted at each survivor."""
    faults: list[PeerLoss] = []
    arrivals: list[Arrival] = []
    master: MasterLoss | None = None
    evictions: list[str] = []
    exit_codes: dict[str, int] = {}
    digests: dict[str, str] = {}
    held_out: dict[str, float] = {}
    undisturbed: float = float("nan")
    events: list[str] = []
    dashboard: str = ""
    """Its address while the run went on; empty without one."""
    views: dict[str, str] = {}
    """What shows the run afterwards: files, and commands."""
    sample: str = ""
    """What the trained model writes."""


def checks(outcome: DemoOutcome) -> list[DemoCheck]:
    """Every promise of the demo. All must be kept."""
    kills = [fault for fault in outcome.faults if fault.signal == "SIGKILL"]
    struck = [f"step {fault.step}, next op after {duration(fault.recovery_ms)}" for fault in kills if fault.inside]
    evicted = [f"next op after {duration(fault.recovery_ms)}" for fault in outcome.faults if fault.signal == "SIGSTOP"]
    came = [_arrival(arrival) for arrival in outcome.arrivals if arrival.how == "joined"]
    again = [_arrival(arrival) for arrival in outcome.arrivals if arrival.how == "rejoined"]
    failed = [f"{name}: exit code {code}" for name, code in outcome.exit_codes.items() if code != 0]
    count, different = len(outcome.digests), sorted(set(outcome.digests.values()))
    lost = outcome.master
    went_on = []
    if lost is not None and lost.inside and lost.kept == lost.peers:
        went_on = [f"step {lost.step}, {lost.kept} peers, next op after {duration(lost.recovery_ms)}"]
    bits = ", ".join(f"{name} {digest[:16]}" for name, digest in outcome.digests.items())
    excesses = [loss / outcome.undisturbed - 1 for loss in outcome.held_out.values()]
    # NaN fails every comparison, so the question is "good enough?", not "too high?".
    is_as_good = bool(excesses) and all(excess <= TOLERANCE for excess in excesses)
    worst, excess = max(outcome.held_out.values(), default=float("nan")), max(excesses, default=float("nan"))
    compared = f"{worst:.4f} against {outcome.undisturbed:.4f} ({excess:+.1%}, at most {TOLERANCE:+.0%})"
    return [
        DemoCheck("a peer killed inside an all-reduce stops no other", bool(struck),
                  _list(struck, f"{len(kills)} missed")),
        DemoCheck("a frozen peer is evicted, the others go on", bool(evicted), _list(evicted, "no peer was frozen")),
        DemoCheck("a new peer joins in the middle", bool(came), _list(came, "no peer joined")),
        DemoCheck("the evicted peer learns it and rejoins", bool(outcome.evictions and again), _list(again, "no")),
        DemoCheck("a master killed inside an all-reduce stops no peer", bool(went_on), _list(went_on, "no")),
        DemoCheck("all survivors finish and leave cleanly", count >= 2 and not failed, _list(failed, f"{count} peers")),
        DemoCheck("all hold the same bits of weights and momentum", count >= 2 and len(different) == 1,
              f"{count} times {different[0][:16]}" if len(different) == 1 else bits),
        DemoCheck("the held-out loss is as good as undisturbed", is_as_good, compared),
    ]  # fmt: skip


def as_json(outcome: DemoOutcome, found: list[DemoCheck]) -> dict[str, object]:
    """All facts and checks, for programs."""
    return {**msgspec.structs.asdict(outcome), "checks": found, "skipped": SKIPPED}


def as_text(outcome: DemoOutcome, found: list[DemoCheck]) -> Group:
    """All facts and checks, for people."""
    sample = Text(f'The model continues "The import statement": {" ".join(outcome.sample.split())}', "italic dim")
    return Group("", _summary(outcome), "", _check_table(found), "", sample)


def _summary(outcome: DemoOutcome) -> Table:
    """What happened, in a few lines."""
    rows = [
        ("steps", f"{outcome.steps} in {duration(outcome.seconds * 1_000)}, in {outcome.epochs} epochs"),
        ("aborts", f"{outcome.aborts} all-reduces, their buffers restored"),
        ("retries", f"{outcome.retries}, counted at each survivor"),
    ]
    for fault in outcome.faults:
        took = duration(fault.recovery_ms)
        rows.append((f"recovery from {fault.signal}", f"{fault.peer}, step {fault.step}, next op after {took}"))
    if outcome.master is not None:
        took = duration(outcome.master.recovery_ms)
        rows.append(("master killed", f"step {outcome.master.step}, started again, next op after {took}"))
    for arrival in outcome.arrivals:
        rows.append((arrival.how, f"{arrival.peer}, {_arrival(arrival)}"))
    rows += [("evictions", _list(outcome.evictions, "none"))]
    rows += [("skipped", f"{what}: {why}") for what, why in SKIPPED.items()]
    return table("What happened", ("what", "how much"), rows)


def _check_table(found: list[DemoCheck]) -> Table:
    """The checks, one line each."""
    rows = [
        (Text("ok" if check.kept else "FAILED", COLOURS["ok" if check.kept else "fail"]), check.promise, check.seen)
        for check in found
    ]
    return table("What was promised", ("", "promise", "seen"), rows)


def _arrival(arrival: Arrival) -> str:
    return f"step {arrival.step}, in the ring after {duration(arrival.took_ms)}"


def _list(found: list[str], otherwise: str) -> str:
    return ", ".join(found) or otherwise
