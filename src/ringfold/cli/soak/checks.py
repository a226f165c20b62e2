"""What a soak must show, judged from its outcome. Pure."""

from typing import NamedTuple

from ringfold.cli.soak.director import MASTER, Outcome
from ringfold.cli.soak.growth import growth


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
            f"{tally.step} steps through {tally.kills} kills, {tally.freezes} freezes ({tally.evictions} evictions) "
            f"and {tally.joins} joins; the longest silence was {tally.longest_silence_s:.1f} s",
        )
    ]
    ends = set(outcome.digests.values())
    last = ", ".join(f"step {step}, digest {digest:08x}" for step, digest in sorted(ends))
    found.append(Check("all end with the same bits", len(ends) == 1, f"{len(outcome.digests)} peers: {last}"))
    for name, samples in outcome.samples.items():
        who = "the master" if name == MASTER else name
        for each in growth(who, samples):
            found.append(Check(f"{who} does not grow in {each.what}", each.is_flat, str(each)))
    left = "; ".join(outcome.left_behind) or "no process, no file, no shared memory"
    found.append(Check("nothing is left behind", not outcome.left_behind, left))
    return found
