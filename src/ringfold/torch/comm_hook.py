"""A communication hook for torch's `DistributedDataParallel`: its buckets are averaged over the peers of a run.

DDP itself then has a process group of one rank, which knows of no other process, so none can break it:

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    model.register_comm_hook(rf.torch.HookState(run), rf.torch.comm_hook)

Without `find_unused_parameters` DDP orders its buckets again after the first pass, by when gradients were ready. A
newcomer has not done that when the others have: the same bytes would be other gradients. So that is an error here.

DDP keeps its own features (bucket views, `no_sync`, its splits of compiled graphs). All buckets of a pass are in flight
while the pass goes on. The hook of the last one waits for all: a step's ops are waited for by the thread that runs the
loop, and after the last bucket there is nothing left to compute.
"""

import torch
import torch.distributed as dist

from ringfold.errors import UsageError
from ringfold.peer.communicator import Communicator
from ringfold.peer.outcome import ReduceInfo
from ringfold.peer.step_ops import StepHandle
from ringfold.torch.data_parallel import check_thread, use_calling_thread

FIRST_TAG = 1 << 61


class HookState:
    """The run that the buckets are averaged over, and the buckets of a pass. `quantize` is that of `all_reduce`.

    Make it in the thread of the loop: from then on `backward()` runs its hooks there, also for tensors on a GPU.
    """

    def __init__(self, run: Communicator, *, quantize: str | None = None) -> None:
        use_calling_thread()
        self.run = run
        self.quantize = quantize
        self.reductions: tuple[ReduceInfo, ...] = ()
        """What became of each bucket in the last pass."""
        self._layout: dict[int, tuple[int, ...]] = {}
        """Which parameters each bucket has, by their identities."""
        self._begun: list[tuple[StepHandle, torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def begin(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        step = self.run.step
        if step is None:
            raise UsageError("gradients can be averaged only inside a step of `for step in run.steps(...)`")
        check_thread(step)
        if bucket.index() == 0:
            self._begun.clear()
        self._check_layout(bucket)
        tensor = bucket.buffer()
        # Where DDP uses the result, its streams follow those in which the future was completed.
        future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
        handle = step.all_reduce_async(tensor, op="avg", tag=FIRST_TAG + bucket.index(), quantize=self.quantize)
        self._begun.append((handle, future, tensor))
        if bucket.is_last():
            self._wait()
        return future

    def _check_layout(self, bucket: dist.GradBucket) -> None:
        layout = tuple(id(parameter) for parameter in bucket.parameters())
        if self._layout.setdefault(bucket.index(), layout) != layout:
            raise UsageError(
                "DistributedDataParallel has ordered its buckets again, and a peer that joins now has other ones: make "
                "it with find_unused_parameters=True, which keeps them"
            )

    def _wait(self) -> None:
        begun, self._begun = self._begun, []
        self.reductions = tuple(handle.wait() for handle, _, _ in begun)
        for _, future, tensor in begun:
            future.set_result(tensor)


def comm_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the peers: `ddp.register_comm_hook(HookState(run), comm_hook)`."""
    return state.begin(bucket)
