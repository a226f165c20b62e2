"""What the logs of all ranks of one store must have in common. Pure.

A log has the lives of one rank, one after the other. Two lives may overlap (a frozen process wakes up and writes what
it was handed before), so lives are put in order by their fence, not by where they stand in the file.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import Struct

MOST_SHOWN = 3


class Entry(Struct, frozen=True):
    """An iteration that was handed to a rank: what it was told about it."""

    iteration: int
    incarnation: str
    fence: int
    members: tuple[int, ...]
    missed: int
    is_winner: bool


@dataclass(slots=True)
class History:
    """What was found: breaches, by what they break, and some figures."""

    going_back: list[str] = field(default_factory=list)
    two_winners: list[str] = field(default_factory=list)
    two_histories: list[str] = field(default_factory=list)
    entries: int = 0
    lives: int = 0
    last: int = -1
    missed: int = 0
    orphaned: int = 0
    """Iterations of which the winner told nobody: it was killed, or frozen and superseded, just after it won."""


def judge(logs: Mapping[int, Sequence[Entry]]) -> History:
    """Hold the logs of one store's ranks (by rank) against each other."""
    found = History()
    winners: dict[int, set[str]] = defaultdict(set)
    members: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for rank, log in logs.items():
        _judge_rank(found, rank, log)
        for entry in log:
            members[entry.iteration].add(entry.members)
            if entry.is_winner:
                winners[entry.iteration].add(entry.incarnation)
            if rank not in entry.members:
                found.two_histories.append(f"rank {rank} was handed {entry.iteration}, which has {entry.members}")
    for number, sets in sorted(members.items()):
        found.last = max(found.last, number)
        if len(sets) > 1:
            found.two_histories.append(f"iteration {number} has members {' and '.join(map(str, sorted(sets)))}")
        if len(winners[number]) > 1:
            found.two_winners.append(f"iteration {number}: {', '.join(sorted(winners[number]))}")
        found.orphaned += not winners[number]
    return found


def _judge_rank(found: History, rank: int, log: Sequence[Entry]) -> None:
    """In one life numbers grow, and skip what was said to be missed; the next life does not begin before the last."""
    lives: dict[tuple[int, str], list[Entry]] = defaultdict(list)
    for entry in log:
        lives[entry.fence, entry.incarnation].append(entry)
    found.entries += len(log)
    found.lives += len(lives)
    reached = -1
    for (fence, incarnation), life in sorted(lives.items()):
        if life[0].iteration < reached:
            text = f"rank {rank}: {incarnation} (fence {fence}) begins at {life[0].iteration}, after {reached}"
            found.going_back.append(text)
        for before, after in pairwise(life):
            found.missed += after.missed
            if after.iteration != before.iteration + 1 + after.missed or after.missed < 0:
                text = f"{before.iteration} is followed by {after.iteration}, with {after.missed} missed"
                found.going_back.append(f"rank {rank}, {incarnation}: {text}")
        reached = max(reached, life[-1].iteration)


def shown(breaches: Sequence[str]) -> str:
    """The first few of many."""
    more = f" and {len(breaches) - MOST_SHOWN} more" if len(breaches) > MOST_SHOWN else ""
    return "; ".join(breaches[:MOST_SHOWN]) + more
