"""Bugs on purpose in how samples are given out and settled; the schedules with samplers must find them all."""

from functools import partial
from typing import cast

from planted import Bug
from ringfold.data.queue import Queue
from ringfold.data.sampler import Plan, Sampler
from ringfold.peer.sampling import Order, Sampling
from ringfold.peer.steps import Loop
from ringfold.testing.blocking import SimRun
from ringfold.testing.peers import SimPeer
from ringfold.testing.sampled import run_samples
from ringfold.testing.simulation import Setup


class _CountsAll(Sampling):
    """A share is consumed although its peer did not contribute."""

    def _settled(self, plan: Plan, contributors: frozenset[int]) -> Queue:
        return plan.settle(plan.members)


class _ForgetsWhatCameBack(Sampling):
    """What came back is lost at the end of a step."""

    def _settled(self, plan: Plan, contributors: frozenset[int]) -> Queue:
        right = plan.settle(contributors)
        return Queue(right.size, right.passes_done, right.cursor)


class _CutsByTheEpoch(Sampling):
    """A step is cut for the members of the epoch that this peer has seen by now."""

    def _table(self, sampler: Sampler) -> tuple[int, ...]:
        loop = cast(Loop, getattr(self._members_of, "__self__", None))
        record = loop._ops.session.machine.record
        return () if record is None else tuple(sorted(member.peer for member in record.members))


class _NewcomersFirst(Sampling):
    """Newcomers inside a step get the first shares, and the others contribute what they have taken before."""

    def _table(self, sampler: Sampler) -> tuple[int, ...]:
        return tuple(sorted(super()._table(sampler), reverse=True))

    @property
    def contributes(self) -> bool:
        return self._taken is None or len(self._taken) > 0


class _CountsTheFirstOp(Sampling):
    """The contributors are those of the first op of a step, not of the last."""

    def _note(self, order: Order, contributors: object, epoch: int | None) -> None:
        if self._last is None:
            super()._note(order, contributors, epoch)  # type: ignore[arg-type]


def _bug(text: str, sampling: type[Sampling]) -> Bug:
    class Run(SimRun):
        _sampling_type = sampling

    class Peer(SimPeer):
        run_type = Run

    return Bug(text, partial(run_samples, base=Setup(peer=Peer)))


BUGS: dict[str, Bug] = {
    "counts_all": _bug("a share counts although its peer did not contribute", _CountsAll),
    "forgets": _bug("what came back to the queue is lost", _ForgetsWhatCameBack),
    "by_epoch": _bug("shares are cut by the present epoch, not by the last sync", _CutsByTheEpoch),
    "stale_shares": _bug("a share that has moved inside a step is contributed", _NewcomersFirst),
    "first_op": _bug("the contributors of a step's first op decide", _CountsTheFirstOp),
}
