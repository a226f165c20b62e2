"""Data parallel training: gradients are averaged over the peers while the backward pass goes on.

Gradients travel in *buckets*: flat tensors, each with the gradients of some parameters of one dtype and device. When
the last gradient of a bucket is there, its all-reduce begins; the pass goes on meanwhile. At the end of the pass the
program has the averages of all buckets in `p.grad`, which are views of the buckets: nothing is copied back.

    backward:   hook, hook, hook | hook, hook ...      | last hook | the last op
    buckets:                     0 in flight ----------------------->
                                                                   1 ---------->

The bucket that is ready last has nothing to overlap with: its op runs at the end of the pass, and this thread drives it
from its first byte. So a model of one bucket wakes no other thread. (Not on a GPU, nor if a run has several wrappers.)

Every bucket has a tag of its own, so peers need not begin their buckets in the same order: control flow may differ.
Which parameters share a bucket must be the same on all peers. At first the order of the parameters decides it,
reversed: so most models finish their gradients. If the wrapper is part of the shared state (`shared_state(model)`), the
peers agree in their first pass on the order in which gradients really became ready: that of rank 0. It is a tensor of
the shared state, so newcomers have it, too.

A bucket also has a *used* flag for each of its parameters, averaged with the rest. A parameter that no peer has used
ends with `grad` None, as it would in one process, so that no optimizer touches it.

Reentrant activation checkpointing makes several passes of one `backward()`, each with all buckets. The sums are right,
and it is slow: use `checkpoint(..., use_reentrant=False)`.

`backward()` must run in the thread of the loop, hooks included: which ops that thread has seen decides what all peers
do next, SIGTERM and Ctrl-C reach the main thread only, and a wrapper is not for several threads at once. For tensors on
a GPU autograd would use a thread of its own, so the wrapper turns that off for the thread of `forward`. Nothing is lost
by that: kernels are only launched there.

When a peer dies in the middle of a pass, the buckets that were committed have its share, and the others do not: each is
the average of its own contributors, the same on all survivors.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable

from ringfold.errors import UsageError
from ringfold.peer.communicator import Communicator
from ringfold.peer.outcome import ReduceInfo
from ringfold.peer.sampling import Order
from ringfold.peer.staging import host_view
from ringfold.peer.step_ops import StepHandle
from ringfold.peer.steps import Step

FIRST_TAG = 1 << 62
"""The first tag of the first wrapper of a run, far from the tags that programs use."""
TAGS = 1 << 20
"""Of a wrapper: one for the order, then one for each bucket."""
FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the first op begins early."""
BUCKET_BYTES = 16 << 20
NO_TASK = -1
_NUMPY_DTYPES = (torch.float16, torch.float32, torch.float64)
_ALIGNMENT = 16
"""In elements: kernels work on aligned vectors."""


class Bucket:
    """A flat tensor, the parameters whose gradients it has, and the op that it is in."""

    def __init__(self, parameters: Sequence[nn.Parameter], index: int, *, with_flags: bool) -> None:
        self.index, self.parameters = index, list(parameters)
        self.offsets: list[int] = []
        end = 0
        for parameter in self.parameters:
            self.offsets.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        first = self.parameters[0]
        flags = len(self.parameters) if with_flags else 0
        # Those of a device stay in host memory, where looking at them waits for no stream.
        is_apart = first.device.type != "cpu"
        self.flat = torch.zeros(end + (0 if is_apart else flags), dtype=first.dtype, device=first.device)
        self.used = torch.zeros(flags, dtype=first.dtype) if is_apart else self.flat[end:]
        self.arrays = [self.flat, self.used] if is_apart and flags else [self.flat]
        self._used_bits = host_view(self.used) if flags else None
        """The flags for NumPy, which is faster with few numbers than torch. Of bfloat16 it sees the bits."""
        self._one = host_view(torch.ones(1, dtype=first.dtype))[0] if flags else 1
        self.is_on_host = not is_apart
        self.array = self.flat.numpy() if self.is_on_host and first.dtype in _NUMPY_DTYPES else self.flat
        """The same as `arrays`, where that is one: the engine takes a NumPy array without a detour."""
        self.views = [
            self.flat[offset : offset + parameter.numel()].view_as(parameter)
            for parameter, offset in zip(self.parameters, self.offsets, strict=True)
        ]
        self.ready: set[int] = set()
        self.unused: list[int] = []
        self.streams: set[Any] = set()
        """On CUDA: those that gradients of this pass are computed in."""
        self.handle: StepHandle | None = None

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def take(self, place: int) -> None:
        """Move the gradient of a parameter into the bucket, unless it is there; zeros if there is none."""
        parameter, view = self.parameters[place], self.views[place]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad.to_dense() if grad.is_sparse else grad)
        if grad is None:
            self.unused.append(place)
        parameter.grad = view

    def note_stream(self) -> None:
        if self.flat.is_cuda:
            self.streams.add(torch.cuda.current_stream(self.flat.device))

    def follow_streams(self) -> None:
        """What the current stream is given from now on follows all gradients: the op waits for that stream alone."""
        if self.streams:
            current = torch.cuda.current_stream(self.flat.device)
            for stream in self.streams - {current}:
                current.wait_stream(stream)
            self.streams.clear()

    def write_flags(self) -> None:
        """Before the op: which parameters this peer has used."""
        if self._used_bits is not None:
            self._used_bits.fill(self._one)
            for place in self.unused:
                self._used_bits[place] = 0
        self.unused.clear()

    def drop_unused(self) -> None:
        """After the op: a parameter that nobody has used has no gradient."""
        if self._used_bits is None or np.count_nonzero(self._used_bits) == len(self.parameters):
            return
        for place in (self._used_bits == 0).nonzero()[0].tolist():
            self.parameters[place].grad = None


class _Pass:
    """What changes with each pass. (To set an attribute of a module costs more than an op of a few bytes.)"""

    __slots__ = ("begun", "call", "drives_last", "infos", "ready_order", "step", "task")

    def __init__(self) -> None:
        self.step: Step | None = None
        self.call: Order = (0, 0)
        """Its place among the calls of its step."""
        self.task = NO_TASK
        """Autograd's number of it, while it goes on."""
        self.begun = 0
        """How many of its buckets are in flight."""
        self.drives_last = False
        """Whether the bucket that is ready last begins at the end. What is on a device never waits for that: it has to
        be copied. And of two models in one backward pass, which may end in another order on another peer, none may wait
        before the other one has begun."""
        self.ready_order: list[int] = []
        """Parameters in the order of their hooks."""
        self.infos: tuple[ReduceInfo, ...] = ()
        """Of the last one that has ended."""


_live: "weakref.WeakSet[DataParallel]" = weakref.WeakSet()
"""The wrappers whose hooks are on parameters."""


class DataParallel(nn.Module):  # type: ignore[misc]  # torch is not looked at by the type checker
    """Averages the gradients of `module` over the peers of `run`, during `backward()`:

        model = rf.torch.DataParallel(net, run)
        for step in run.steps(state, until=1000):
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    The averages are in `p.grad` when `backward()` returns, and are the same bits on all peers: clip, unscale and step
    afterwards, as in one process. `backward()` must be called inside a step of `run.steps`, the same number of times on
    all peers. A peer that has no batch for a step calls `skip()` instead.

    `bucket_bytes` is how much travels in one op. `quantize` is that of `all_reduce` ("minmax8" and others); parameters
    that no peer has used then get zeros instead of None.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Communicator,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        quantize: str | None = None,
    ) -> None:
        super().__init__()
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes must be at least 1, not {bucket_bytes}")
        self.module = module
        self._run = run
        self._bucket_bytes = bucket_bytes
        self._quantize = quantize
        self._trained = trained_parameters(module)
        self._first_tag = FIRST_TAG + TAGS * _free_number(run, self._trained)
        self.order = torch.full((len(self._trained),), -1)
        """The order of the trained parameters in the buckets; -1 until it is agreed."""
        self.is_order_shared = False
        """Whether `order` is part of the shared state."""
        self._is_on_device = any(parameter.device.type != "cpu" for _, parameter in self._trained)
        self._is_syncing = True
        self._pass = _Pass()
        self._build()
        if self._is_on_device:
            use_calling_thread()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, number))
            for number, (_, parameter) in enumerate(self._trained)
        ]
        _live.add(self)

    def _build(self) -> None:
        self._built_for = self.order.clone()
        order = self.order.tolist() if self._is_order_agreed else reversed(range(len(self._trained)))
        in_order = [self._trained[number] for number in order]
        self._buckets = make_buckets(in_order, self._bucket_bytes, with_flags=self._quantize is None)
        places = [(bucket, place) for bucket in self._buckets for place in range(len(bucket.parameters))]
        found = {id(bucket.parameters[place]): (bucket, place) for bucket, place in places}
        self._places = [found[id(parameter)] for _, parameter in self._trained]

    @property
    def _is_order_agreed(self) -> bool:
        return int(self.order[0]) >= 0

    def forward(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401  # those of the module
        if self._is_on_device:
            use_calling_thread()
        return self.module(*arguments, **named)

    def unwrap(self) -> nn.Module:
        """The module without the hooks of this wrapper: to wrap it again, for another run."""
        for hook in self._hooks:
            hook.remove()
        _live.discard(self)
        return self.module

    @property
    def reductions(self) -> tuple[ReduceInfo, ...]:
        """What became of each bucket in the last pass: its contributors, its epoch, its bytes."""
        return self._pass.infos

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward()` only adds to the gradients of this peer; the next one outside reduces their sum."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def skip(self) -> None:
        """This peer has no gradients for this step: it gets the others' averages, and contributes nothing.

        Also after a `backward()` that has failed half way.
        """
        step = self._step()
        if not self._has_begun(step):
            self._begin_pass(step, NO_TASK, contribute=False)
        rest = [bucket for bucket in self._buckets if bucket.handle is None]
        for bucket in rest:
            for place, parameter in enumerate(bucket.parameters):
                parameter.grad = None
                bucket.take(place)
        self._reduce(step, rest, contribute=False)

    def _ready(self, number: int, parameter: nn.Parameter) -> None:
        """The hook of a parameter: its gradient of this pass is there. Autograd records nothing here."""
        if not self._is_syncing:
            return
        step = self._step()
        task = torch._C._current_graph_task_id()
        this = self._pass
        if task != this.task:
            self._begin_pass(step, task)
            Variable._execution_engine.queue_callback(self._end)
        bucket, place = self._places[number]
        bucket.take(place)
        bucket.note_stream()
        bucket.ready.add(place)
        this.ready_order.append(number)
        if bucket.is_ready and (this.begun < len(self._buckets) - 1 or not (this.drives_last and bucket.is_on_host)):
            self._begin(bucket, step)

    def _step(self) -> Step:
        step = self._run.step
        if step is None:
            raise UsageError(
                "gradients can be averaged only inside a step: call backward() in the body of `for step in run.steps("
                "...)`, or under no_sync()"
            )
        check_thread(step)
        return step

    def _has_begun(self, step: Step) -> bool:
        """Whether buckets of a pass of this step are in flight. Those of an earlier step have ended with it."""
        return self._pass.step is step and self._pass.begun > 0

    def _begin_pass(self, step: Step, task: int, *, contribute: bool = True) -> None:
        if self._has_begun(step):
            raise UsageError(
                "the last backward() of this step failed when some of its gradients were sent already: call skip() "
                "instead of the next one, so that the other peers get the rest"
            )
        this = self._pass
        this.call = step._call_for_buckets(contribute=contribute)
        this.task, this.step = task, step
        this.drives_last = _is_only(self)
        self._end_pass()
        if self.is_order_shared and not torch.equal(self.order, self._built_for):
            self._build()

    def _begin(self, bucket: Bucket, step: Step, *, contribute: bool = True) -> None:
        self._prepare(bucket)
        bucket.handle = step._begin_bucket(
            self._pass.call,
            bucket.index,
            bucket.arrays,
            tag=self._tag_of(bucket),
            quantize=self._quantize,
            contribute=contribute,
        )
        self._pass.begun += 1

    def _prepare(self, bucket: Bucket) -> None:
        bucket.follow_streams()
        bucket.write_flags()

    def _tag_of(self, bucket: Bucket) -> int:
        return self._first_tag + 1 + bucket.index

    def _end(self) -> None:
        """The pass is over. Buckets with parameters that were not used begin now, and the last one."""
        step = self._step()
        rest = [bucket for bucket in self._buckets if bucket.handle is None]
        for bucket in rest:
            if not bucket.is_ready:
                with torch.no_grad():
                    for place in range(len(bucket.parameters)):
                        if place not in bucket.ready:
                            bucket.take(place)
        self._reduce(step, rest)

    def _reduce(self, step: Step, rest: Sequence[Bucket], *, contribute: bool = True) -> None:
        """Reduce the buckets that have not begun, and wait for all."""
        last = rest[-1] if rest and self._pass.drives_last and rest[-1].is_on_host else None
        for bucket in rest:
            if bucket is not last:
                self._begin(bucket, step, contribute=contribute)
        try:
            last_info = None if last is None else self._run_last(last, step, contribute=contribute)
            infos = []
            for bucket in self._buckets:
                infos.append(last_info if bucket is last and last_info is not None else _ended(bucket))
                bucket.drop_unused()
            self._pass.infos = tuple(infos)
            if self.is_order_shared and not self._is_order_agreed:
                self._agree_on_order(step, self._pass.ready_order)
        finally:
            self._pass.task = NO_TASK
            self._end_pass()

    def _run_last(self, bucket: Bucket, step: Step, *, contribute: bool) -> ReduceInfo:
        """All others are in flight: this thread drives this one, and them."""
        self._prepare(bucket)
        return step._reduce_bucket(
            self._pass.call,
            bucket.index,
            bucket.array,
            tag=self._tag_of(bucket),
            quantize=self._quantize,
            contribute=contribute,
        )

    def _end_pass(self) -> None:
        self._pass.ready_order = []
        self._pass.begun = 0
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.unused.clear()
            bucket.streams.clear()
            bucket.handle = None

    def _agree_on_order(self, step: Step, ready: list[int]) -> None:
        rest = [number for number in reversed(range(len(self._trained))) if number not in set(ready)]
        proposed = torch.tensor([*ready, *rest])
        step.broadcast(proposed, root=0, tag=self._first_tag)
        self.order.copy_(proposed)


def _is_only(wrapper: DataParallel) -> bool:
    """Whether no other module of its run is wrapped."""
    return all(each is wrapper or each._run is not wrapper._run for each in _live)


def _ended(bucket: Bucket) -> ReduceInfo:
    assert bucket.handle is not None
    return bucket.handle.wait()


def use_calling_thread() -> None:
    """Let `backward()` of the calling thread run its hooks there, also for tensors on a GPU."""
    if torch._C._is_multithreading_enabled():
        torch.autograd.set_multithreading_enabled(False)


def check_thread(step: Step) -> None:
    if not step._is_here:
        raise UsageError(
            "backward() runs its hooks in another thread than that of the loop: call it there, after "
            "torch.autograd.set_multithreading_enabled(False) if its tensors are on a GPU"
        )


def _free_number(run: Communicator, trained: Sequence[tuple[str, nn.Parameter]]) -> int:
    """The first number that no wrapper of this run has: the same on all peers, if they wrap the same modules."""
    taken = {id(parameter) for wrapper in _live for _, parameter in wrapper._trained}
    if again := [name for name, parameter in trained if id(parameter) in taken]:
        raise UsageError(f"{again[0]!r} is in a DataParallel already: call its unwrap() before you wrap it again")
    numbers = {(wrapper._first_tag - FIRST_TAG) // TAGS for wrapper in _live if wrapper._run is run}
    return next(number for number in count() if number not in numbers)


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    if not trained:
        raise UsageError("the module has no parameters that require gradients")
    if strange := [name for name, each in trained if not each.dtype.is_floating_point]:
        raise UsageError(f"{strange[0]!r} is not of a floating-point dtype, so its gradients cannot be averaged")
    return trained


def make_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int, *, with_flags: bool
) -> list[Bucket]:
    """Buckets of these parameters, in this order: the same on all peers."""
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for _, parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        members = filling.setdefault(kind, [])
        members.append(parameter)
        limit = bucket_bytes if full else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if sum(each.numel() * each.element_size() for each in members) >= limit:
            full.append(filling.pop(kind))
    full += filling.values()
    return [Bucket(members, index, with_flags=with_flags) for index, members in enumerate(full)]
