"""The sampler: the queue of a data set as arrays of the shared state.

    state = rf.SharedState(model=weights, data=rf.Sampler(len(dataset), batch_size=32))

The arrays change only at the end of a step, together with the step's number. So at every other moment, and also where
a step waits for peers or SIGTERM interrupts it, they are those of the last step boundary: a sync or a checkpoint in the
middle of a step is one of its beginning.

`members` are those that finished the last step. A step is cut for them, in their order, and after them for the members
that have come since. So a step that waits for peers in its first op has room for newcomers, and the shares that are
taken already stay as they are. `run` stands with them, because the ids of peers mean something in their own run only.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from ringfold.data.order import Indices, permute
from ringfold.data.queue import Pieces, Queue, count
from ringfold.errors import UsageError

MAX_SIZE = 1 << 62
MAX_MEMBERS = 1_024
"""Members of a group that have shares; further ones take part without."""
_HEADER = (
    "size",
    "seed",
    "shuffle",
    "batch_size",
    "next_batch_size",
    "passes_done",
    "cursor",
    "redo",
    "members",
    "run",
)
_PLACE = {name: place for place, name in enumerate(_HEADER)}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step is cut: the members that have shares, and the share of each."""

    queue: Queue
    members: tuple[int, ...]
    batch_size: int
    shares: list[Pieces] = field(repr=False)

    def share_of(self, peer: int) -> Pieces:
        return self.shares[self.members.index(peer)] if peer in self.members else ()

    def settle(self, contributors: Collection[int]) -> Queue:
        """The queue after the step."""
        consumed = {place for place, member in enumerate(self.members) if member in contributors}
        return self.queue.settle(self.shares, consumed)


@dataclass(frozen=True)
class Share:
    """The samples of one peer in one step. `pieces` are their positions in the order of the pass `pass_number`.

    It may be empty, at the end of a pass. It is false then, and the ops of the step contribute nothing.
    """

    pass_number: int
    pieces: Pieces
    _order: "Order" = field(repr=False, compare=False)

    @cached_property
    def positions(self) -> Indices:
        """The positions in the order of the pass."""
        empty = np.empty(0, np.int64)
        return np.concatenate([empty, *(np.arange(first, last, dtype=np.int64) for first, last in self.pieces)])

    @cached_property
    def indices(self) -> Indices:
        """The samples themselves."""
        return self._order.samples(self.pass_number, self.positions)

    @property
    def size(self) -> int:
        """How many samples the whole data set has."""
        return self._order.size

    @property
    def shuffle(self) -> bool:
        return self._order.shuffle

    def __len__(self) -> int:
        return count(self.pieces)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of every pass."""

    size: int
    seed: int
    shuffle: bool

    def samples(self, pass_number: int, positions: Indices) -> Indices:
        return permute(positions, self.size, self.seed, pass_number) if self.shuffle else positions


class Sampler:
    """Gives every sample of a data set to exactly one peer per pass, while peers come and go.

    It is part of the shared state: `SharedState(model=weights, data=Sampler(len(dataset), batch_size=32))`. In a step
    of `run.steps`, `step.shard()` is this peer's share. A sample is consumed if, and only if, its peer contributed to
    the step's last op; the others go back to the queue. The order of a pass depends on `seed` and the number of the
    pass only; without `shuffle` it is that of the data set.

    `batch_size` is the size of a peer's share, the same on all peers; without it, it is that of the first
    `step.shard(n)`. A program may change it as it changes the model: after a step's op, on all peers alike. The next
    step has the new one.
    """

    def __init__(
        self,
        size: int,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        max_members: int = MAX_MEMBERS,
    ) -> None:
        if not 0 < size < MAX_SIZE:
            raise UsageError(f"a data set has at least one sample, and fewer than 2**62, not {size}")
        if not 0 <= seed < 1 << 63:
            raise UsageError(f"a seed is a number from 0 to 2**63 - 1, not {seed}")
        if max_members < 1:
            raise UsageError(f"max_members must be at least 1, not {max_members}")
        self._order = Order(size, seed, shuffle)
        self._max_members = max_members
        self._max_ranges = 2 * max_members + 1
        self._header = np.zeros(len(_HEADER), np.int64)
        self._members = np.zeros(max_members, np.int64)
        self._redo = np.zeros((self._max_ranges, 2), np.int64)
        for name, value in (("size", size), ("seed", seed), ("shuffle", shuffle)):
            self._header[_PLACE[name]] = value
        if batch_size is not None:
            self._header[_PLACE["batch_size"]] = self._header[_PLACE["next_batch_size"]] = _checked_batch(batch_size)

    # What programs use

    @property
    def size(self) -> int:
        """How many samples the data set has."""
        return self._order.size

    @property
    def passes_done(self) -> int:
        """How many passes over the data are complete; the same on all peers at the same step."""
        return self._get("passes_done")

    @property
    def left(self) -> int:
        """How many samples of the present pass are not consumed yet."""
        return self._queue.left

    @property
    def batch_size(self) -> int | None:
        """The size of a share in the next step; None if no step has set it."""
        return self._get("next_batch_size") or None

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._header[_PLACE["next_batch_size"]] = _checked_batch(batch_size)

    def shared_arrays(self) -> Mapping[str, object]:
        """The arrays that belong to the shared state, each with the suffix of its name."""
        return {"position": self._header, "members": self._members, "redo": self._redo}

    def __repr__(self) -> str:
        return f"Sampler({self.size} samples, {self.passes_done} passes done, {self.left} left in this one)"

    # What the step loop uses

    def check_unchanged(self) -> None:
        """After a sync, or after a checkpoint was loaded, the arrays are the run's: it must be of the same data."""
        here = self._order.size, self._order.seed, int(self._order.shuffle)
        there = self._get("size"), self._get("seed"), self._get("shuffle")
        if here != there:
            names = ("size", "seed", "shuffle")
            pairs = zip(names, here, there, strict=True)
            differing = [f"{name} {mine}, and the run's has {run}" for name, mine, run in pairs if mine != run]
            raise UsageError(f"the sampler here has {'; '.join(differing)}: all peers make the same one")

    def table(self, participants: Sequence[int], run: int) -> tuple[int, ...]:
        """The members for which a step is cut, given the participants of the last sync and the run's number.

        Those that finished the last step come first, whether they are still there or not. If none of them is, or the
        run is another one, they do not count.
        """
        known = self._members[: self._get("members")].tolist()
        if self._get("run") != run or not set(known) & set(participants):
            known = []
        return tuple([*known, *sorted(set(participants) - set(known))][: self._max_members])

    def plan(self, members: tuple[int, ...], batch_size: int | None = None) -> Plan | None:
        """How the next step is cut; None as long as the size of a share is not known."""
        each = self._batch_size(batch_size)
        queue = self._queue
        return None if each is None else Plan(queue, members, each, queue.cut(len(members), each, self._max_ranges))

    def plan_after(self, plan: Plan, members: Sequence[int]) -> Plan:
        """How the step after `plan` is cut, if exactly these members contribute to that one, and stay."""
        queue, staying = plan.settle(members), tuple(sorted(members)[: self._max_members])
        each = self._get("next_batch_size") or plan.batch_size
        return Plan(queue, staying, each, queue.cut(len(staying), each, self._max_ranges))

    def share(self, plan: Plan, peer: int) -> Share:
        return Share(plan.queue.passes_done, plan.share_of(peer), self._order)

    def settle(self, queue: Queue, members: Sequence[int], run: int, batch_size: int | None) -> None:
        """A step is over: this is the queue now, and these are the members of the next step."""
        known = sorted(members)[: self._max_members]
        each = self._get("next_batch_size") or self._batch_size(batch_size) or 0
        values = {
            "batch_size": each,
            "next_batch_size": each,
            "passes_done": queue.passes_done,
            "cursor": queue.cursor,
            "redo": len(queue.redo),
            "members": len(known),
            "run": run,
        }
        for name, value in values.items():
            self._header[_PLACE[name]] = value
        self._members[:] = 0
        self._members[: len(known)] = known
        self._redo[:] = 0
        self._redo[: len(queue.redo)] = np.array(queue.redo, np.int64).reshape(-1, 2)

    @property
    def _queue(self) -> Queue:
        ranges = self._redo[: self._get("redo")].tolist()
        return Queue(self.size, self.passes_done, self._get("cursor"), tuple((first, last) for first, last in ranges))

    def _batch_size(self, given: int | None) -> int | None:
        known = self._get("batch_size")
        if known and given not in (None, known):
            how = "set sampler.batch_size after a step's op, on all peers"
            raise UsageError(f"shares have {known} samples in this step, not {given}; to change that, {how}")
        return known or (None if given is None else _checked_batch(given))

    def _get(self, name: str) -> int:
        return int(self._header[_PLACE[name]])


def consumed_positions(sampler: Sampler) -> set[int]:
    """The positions of the present pass that are consumed. For tests: of large sets it is large."""
    queue = sampler._queue
    return set(range(queue.cursor)) - set(chain.from_iterable(range(first, last) for first, last in queue.redo))


def _checked_batch(batch_size: int) -> int:
    if batch_size < 1:
        raise UsageError(f"a share has at least one sample, not {batch_size}")
    return batch_size
