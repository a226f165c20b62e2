"""The step loop's part in sampling: which share is whose in a step, and what was consumed at its end.

What must hold, and why it does:

1. *All members cut a step alike.* They cut it for the members that finished the last step, which the shared state has,
   and for those that have come since: the other participants of the last sync, which all members know from the end of
   that sync (`SyncInfo.participants`). Nothing depends on which epoch a member has seen by now.
2. *A step in progress changes nothing.* The sampler's arrays change at the end of a step only. So members that are
   inside a step, where they wait for peers, have the same state as members that have not begun it, and as newcomers.
3. *A peer contributes only what is its share.* A sync inside a step may bring newcomers. They get shares after all
   others, so that those usually stay as they are. Where they do not (at the end of a pass; if all members of the last
   step are gone), and for a peer that was evicted and has joined again, the share that was taken is not the one that it
   has now: then this peer contributes nothing.
4. *All members settle alike.* The contributors of an op are the same on all members (`ReduceInfo`), and no sync comes
   between the first commit of a step and its end. So the step's end is settled by the cut that the last op was called
   with, and by rule 3 each contributor has contributed its share in it.

The members of the epoch in which the last op was committed are those that have finished the step: one that was lost in
it gets no share in the next step, without another sync.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ringfold.data.queue import Queue
from ringfold.data.sampler import Plan, Sampler, Share
from ringfold.errors import UsageError
from ringfold.state.shared import SharedState, lineage_of

_RUN_BITS = (1 << 63) - 1


def sampler_of(state: SharedState) -> Sampler | None:
    """The sampler in a shared state, if there is one."""
    found = [each for each in state.objects.values() if isinstance(each, Sampler)]
    if len(found) > 1:
        raise UsageError("a shared state has one sampler at most: number the samples of several data sets in one")
    return found[0] if found else None


Order = tuple[int, int]
"""The place of an op among those of its step, the same on all members: the number of the call, and for the ops of one
call that members begin in different orders, the op's own number."""


class _LastOp(NamedTuple):
    order: Order
    contributors: frozenset[int]
    members: tuple[int, ...]


class Sampling:
    """The sampler of one loop, if its state has one."""

    def __init__(self, state: SharedState, peer: Callable[[], int], members_of: Callable[[int], Iterable[int]]) -> None:
        """`members_of` are the members of an epoch that this peer was in."""
        self._state, self._peer, self._members_of = state, peer, members_of
        self.sampler = sampler_of(state)
        self.participants: tuple[int, ...] = ()
        """Of the last sync."""
        self._given: int | None = None
        self._taken: Share | None = None
        self._ops = 0
        self._last: _LastOp | None = None

    def synced(self, participants: tuple[int, ...]) -> None:
        """A sync is done. It may have been inside a step."""
        self.participants = participants
        if self.sampler is not None:
            self.sampler.check_unchanged()

    def begin(self) -> None:
        """A step begins."""
        self._taken = self._given = self._last = None
        self._ops = 0

    def take(self, batch_size: int | None) -> Share:
        """This peer's share of the step."""
        sampler, plan = self._used(), self.plan(batch_size)
        if plan is None:
            raise UsageError("how many samples? Give the sampler a batch_size, or use step.shard(n)")
        if self._taken is None:
            self._given = batch_size
            self._taken = sampler.share(plan, self._peer())
        return self._taken

    def plan(self, batch_size: int | None = None) -> Plan | None:
        """How the step is cut; None as long as the size of a share is not known."""
        sampler = self._used()
        return sampler.plan(self._table(sampler), self._given if batch_size is None else batch_size)

    def predict(self, steps: int) -> list[Share]:
        """This peer's shares of the next steps, if no member comes or goes, and all contribute."""
        sampler, plan, found = self._used(), self.plan(), list[Share]()
        for _ in range(0 if plan is None else steps):
            assert plan is not None
            plan = sampler.plan_after(plan, self.participants)
            found.append(sampler.share(plan, self._peer()))
        return found

    @property
    def contributes(self) -> bool:
        """Rule 3: whether what this peer has taken is its share."""
        if self.sampler is None or self._taken is None:
            return True
        plan = self.plan()
        assert plan is not None
        return len(self._taken) > 0 and self._taken == self.sampler.share(plan, self._peer())

    def called(self, operation: str, *, contribute: bool) -> Order:
        """An op that reduces is called: its place among those of the step."""
        if self.sampler is not None and contribute and self._taken is None:
            raise UsageError(
                f"{operation}: the shared state has a sampler, so a step takes its samples before it reduces: call "
                "step.shard() first, or reduce with contribute=False"
            )
        self._ops += 1
        return self._ops, 0

    def committed(self, order: Order, contributors: Iterable[int], epoch: int) -> None:
        """An op of the step was committed."""
        self._note(order, contributors, epoch)

    def committed_alone(self, order: Order, contributors: Iterable[int]) -> None:
        """An op of the step has ended in a group of one."""
        self._note(order, contributors, None)

    def _note(self, order: Order, contributors: Iterable[int], epoch: int | None) -> None:
        if self.sampler is not None and (self._last is None or order > self._last.order):
            members = (self._peer(),) if epoch is None else tuple(self._members_of(epoch))
            self._last = _LastOp(order, frozenset(contributors), members)

    def finish(self) -> None:
        """A step is over. Without an op that reduces, nothing was consumed."""
        sampler, last = self.sampler, self._last
        plan = None if sampler is None or last is None else self.plan()
        if sampler is None or last is None or plan is None:
            return
        staying = set(self.participants) & set(last.members)
        sampler.settle(self._settled(plan, last.contributors), sorted(staying), self._run, self._given)

    def _settled(self, plan: Plan, contributors: frozenset[int]) -> Queue:
        return plan.settle(contributors)

    def _table(self, sampler: Sampler) -> tuple[int, ...]:
        return sampler.table(self.participants, self._run)

    @property
    def _run(self) -> int:
        """The run as a number: ids of peers are used once in it."""
        lineage = lineage_of(self._state)
        return 0 if lineage is None else int(lineage.run, 16) & _RUN_BITS

    def _used(self) -> Sampler:
        if self.sampler is None:
            raise UsageError("step.shard() needs a sampler in the shared state: SharedState(..., data=Sampler(size))")
        return self.sampler
