"""What the logs of all peers of a run must have in common, whichever master led when. Pure.

A peer writes down each epoch that begins to run in its engine, before any op can end in it, and at the end of each step
the epochs in which the step's ops were committed. A process has one log, through all its memberships. That there is
one history means:

* An epoch number stands for one ring and one leadership, in every log. A leader that was deposed and went on deciding
  would give a number to a second ring.
* In a log epoch numbers grow, and so do steps. With the epoch numbers grow the fences, over all logs: what an old
  leader decided comes before what a new one did.
* An op is committed in an epoch that its peer was in, by as many as that epoch has members; and all peers that made a
  step report the same about its ops.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import Struct


class EpochBegun(Struct, frozen=True, tag="epoch"):
    """An epoch runs in a peer's engine from here on."""

    group: int
    epoch: int
    fence: int
    ring: tuple[int, ...]


class StepCommitted(Struct, frozen=True, tag="step"):
    """All ops of a step are committed, in the order of the program: each one's epoch and number of contributors."""

    step: int
    ops: tuple[tuple[int, int], ...]
    longest_ns: int
    """The longest time between two commits, from the last one of the step before on."""


Line = EpochBegun | StepCommitted


@dataclass(slots=True)
class EpochHistory:
    """What was found: breaches, by what they break, and some figures."""

    going_back: list[str] = field(default_factory=list)
    two_histories: list[str] = field(default_factory=list)
    ops_apart: list[str] = field(default_factory=list)
    epochs: int = 0
    fences: int = 0
    steps: int = 0
    committed: int = 0
    """Ops, each counted once, however many contributed."""
    longest_ns: dict[str, int] = field(default_factory=dict)
    """Per log: the longest time without a committed op."""


def judge(logs: Mapping[str, Iterable[Line]]) -> EpochHistory:
    """Hold the logs of all processes (by name) against each other."""
    found = EpochHistory()
    epochs: dict[tuple[int, int], tuple[EpochBegun, str]] = {}
    steps: dict[int, tuple[StepCommitted, str]] = {}
    for name, log in logs.items():
        mine: dict[int, EpochBegun] = {}
        newest = step = longest_ns = 0
        for line in log:
            match line:
                case EpochBegun():
                    if line.epoch <= newest:
                        found.going_back.append(f"{name}: epoch {newest} is followed by {line.epoch}")
                    newest = max(newest, line.epoch)
                    mine[line.epoch] = line
                    first, whose = epochs.setdefault((line.group, line.epoch), (line, name))
                    if first != line:
                        found.two_histories.append(f"{_shown(first)} at {whose}, {_shown(line)} at {name}")
                case StepCommitted():
                    if line.step < step:
                        found.going_back.append(f"{name}: step {step - 1} is followed by {line.step}")
                    step = max(step, line.step + 1)
                    longest_ns = max(longest_ns, line.longest_ns)
                    _judge_ops(found, name, line, mine)
                    made, whose = steps.setdefault(line.step, (line, name))
                    if made.ops != line.ops:
                        text = f"{_ops(made)} at {whose}, {_ops(line)} at {name}"
                        found.ops_apart.append(f"step {line.step}: {text}")
        found.longest_ns[name] = longest_ns
    for before, after in pairwise(sorted(epochs)):
        if before[0] == after[0] and epochs[before][0].fence > epochs[after][0].fence:
            text = f"{_shown(epochs[before][0])} comes before {_shown(epochs[after][0])}"
            found.two_histories.append(text)
    found.epochs, found.fences = len(epochs), len({line.fence for line, _ in epochs.values()})
    found.steps, found.committed = len(steps), sum(len(line.ops) for line, _ in steps.values())
    return found


def _judge_ops(found: EpochHistory, name: str, line: StepCommitted, mine: Mapping[int, EpochBegun]) -> None:
    for epoch, contributors in line.ops:
        if epoch not in mine:
            found.ops_apart.append(f"{name}, step {line.step}: an op of epoch {epoch}, in which it never was")
        elif len(mine[epoch].ring) != contributors:
            text = f"{contributors} contributors to an op in {_shown(mine[epoch])}"
            found.ops_apart.append(f"{name}, step {line.step}: {text}")


def _shown(line: EpochBegun) -> str:
    return f"epoch {line.epoch} (fence {line.fence}) with ring {list(line.ring)}"


def _ops(line: StepCommitted) -> str:
    return " ".join(f"{epoch}:{contributors}" for epoch, contributors in line.ops)
