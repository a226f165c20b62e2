"""What a soak must show, judged from its outcome. Pure."""

from typing import NamedTuple

from ringfold.tools.soak.director import Outcome
from ringfold.tools.soak.growth import growth
from ringfold.tools.soak.history import shown


class Check(NamedTuple):
    """A promise, whether it was kept, and how one can tell."""

    promise: str
    kept: bool
    fact: str


def checks(outcome: Outcome) -> list[Check]:
    """Divergence and hangs end a soak at once, so what is left to judge is how it ended."""
    tally = outcome.tally
    found = [
        Check(
            "nothing hangs, and no member of a sync diverges",
            True,
            f"{tally.step} steps with evidence by {tally.evidence}; peers: {tally.kills} kills, {tally.freezes} "
            f"freezes ({tally.evictions} evictions), {tally.joins} joins; masters killed {tally.masters_killed} times, "
            f"frozen {tally.masters_frozen} times, both killed {tally.both_masters_killed} times; the longest silence "
            f"was {tally.longest_silence_s:.1f} s, the longest time without a committed op "
            f"{tally.longest_without_commit_s:.1f} s",
        ),
        *_history(outcome),
    ]
    ends = set(outcome.digests.values())
    last = ", ".join(f"step {step}, digest {digest:08x}" for step, digest in sorted(ends))
    found.append(Check("all end with the same bits", len(ends) == 1, f"{len(outcome.digests)} peers: {last}"))
    for name, samples in outcome.samples.items():
        for each in growth(name, samples):
            found.append(Check(f"{name} does not grow in {each.what}", each.is_flat, str(each)))
    found += _masters(outcome)
    left = "; ".join(outcome.left_behind) or "no process, no file, no shared memory"
    found.append(Check("nothing is left behind", not outcome.left_behind, left))
    return found


def _history(outcome: Outcome) -> list[Check]:
    history = outcome.history
    leaders = f"{history.epochs} epochs of {history.fences} leaderships"
    return [
        Check(
            "epochs and steps grow strictly in every peer's log",
            not history.going_back,
            shown(history.going_back) or f"{len(history.longest_ns)} logs",
        ),
        Check(
            "there is one history of epochs",
            not history.two_histories and history.epochs > 0,
            shown(history.two_histories) or leaders,
        ),
        Check(
            "peers agree on what was committed",
            not history.ops_apart and history.committed > 0,
            shown(history.ops_apart) or f"{history.committed} ops of {history.steps} steps",
        ),
    ]


def _masters(outcome: Outcome) -> list[Check]:
    """No single life grows, either: one that leads, is deposed and leads again could keep what it had."""
    grown = [each for name, samples in outcome.master_samples.items() for each in growth(name, samples)]
    if not grown:
        return []
    wrong = [str(each) for each in grown if not each.is_flat]
    worst = max(grown, key=lambda each: (each.last - each.first) / each.allowed)
    return [Check("no life of a master grows", not wrong, shown(wrong) or f"{len(grown) // 2} lives; {worst}")]
