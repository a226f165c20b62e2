"""What a soak of iterations must show, judged from its outcome. Pure."""

from ringfold.tools.soak.checks import Check
from ringfold.tools.soak.growth import growth
from ringfold.tools.soak.history import History, judge, shown
from ringfold.tools.soak.iterating import Outcome


def histories(outcome: Outcome) -> dict[str, History]:
    """What the logs of each store say."""
    return {kind: judge(logs) for kind, logs in outcome.logs.items()}


def checks(outcome: Outcome) -> list[Check]:
    """A hang ends a soak at once, so what is left to judge is what was written."""
    faults = ", ".join(f"{name} {count} times" for name, count in sorted(outcome.faults.items())) or "no faults"
    silence = f"the longest silence of a living rank was {outcome.longest_silence_s:.1f} s"
    found = [Check("nothing hangs", True, f"{faults}; {silence}")]
    for kind, history in histories(outcome).items():
        agreed = outcome.agreed[kind]
        figures = (
            f"{history.last + 1} iterations, {history.entries} entries of {history.lives} processes, "
            f"{history.missed} missed by somebody, {history.orphaned} whose winner told nobody"
        )
        found += [
            Check(
                f"{kind}: iterations grow strictly in every rank's log",
                not history.going_back and history.entries > 0,
                shown(history.going_back) or figures,
            ),
            Check(
                f"{kind}: an iteration has one winner",
                not history.two_winners,
                shown(history.two_winners) or f"{history.last + 1 - history.orphaned} winners that told it",
            ),
            Check(
                f"{kind}: there is one history",
                not history.two_histories and agreed >= history.last,
                shown(history.two_histories) or f"same members everywhere; the record ends at iteration {agreed}",
            ),
            Check(
                f"{kind}: nothing is left in the store but the record",
                not outcome.keys[kind],
                shown(outcome.keys[kind]) or "no key of any of these processes",
            ),
        ]
    for name, samples in outcome.samples.items():
        found += [
            Check(f"{name} does not grow in {each.what}", each.is_flat, str(each)) for each in growth(name, samples)
        ]
    left = "; ".join(outcome.left_behind) or "no process, no file, no shared memory"
    found.append(Check("nothing is left behind", not outcome.left_behind, left))
    return found
