"""The weights of a run, computed again in one process from what its members wrote down. Pure, but for the reading.

A step may be in the logs more than once. When all were killed, the run went on from a checkpoint: what a *generation*
of processes made from that revision on replaces what the one before had made beyond it. And a member that was evicted
may have committed an op that the others made again without it; they are the most.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from ringfold.tools.soak.member import COUNT, Floats, StepMade, gradient, learn

Contributors = tuple[int, ...]


def history(logs: Mapping[int, Iterable[Iterable[StepMade]]]) -> dict[int, Contributors]:
    """Who contributed to each step of the run, from the logs of each generation."""
    steps: dict[int, Contributors] = {}
    for _, of_members in sorted(logs.items()):
        said: dict[int, Counter[Contributors]] = {}
        for log in of_members:
            for made in log:
                said.setdefault(made.step, Counter())[made.contributors] += 1
        if said:
            steps = {step: who for step, who in steps.items() if step < min(said)}
            steps |= {step: counts.most_common(1)[0][0] for step, counts in sorted(said.items())}
    return steps


def missing(steps: Mapping[int, Contributors], last: int) -> list[int]:
    """Steps before `last` that nobody wrote down."""
    return [step for step in range(last) if step not in steps]


def replay(steps: Mapping[int, Contributors], last: int) -> Floats:
    """The weights after all steps before `last`."""
    weights = np.zeros(COUNT, np.float32)
    for step in range(last):
        total = np.zeros(COUNT, np.float32)
        for peer in steps[step]:
            total += gradient(peer, step)
        learn(weights, total / np.float32(len(steps[step])) if steps[step] else total)
    return weights


def read(path: Path) -> Iterable[StepMade]:
    """What a member wrote; a kill may have cut the last line short."""
    decode = msgspec.json.Decoder(StepMade).decode
    with path.open("rb") as log:
        for text in log:
            if text.endswith(b"\n"):
                yield decode(text)
