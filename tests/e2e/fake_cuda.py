"""CUDA as a program sees it, on machines without a GPU: tensors on a device, and streams whose copies take their time.

`install()` replaces as much of `torch.cuda` as Ringfold uses, in a process of its own. A tensor of `tensor()` says that
it is on a device. A copy between such a tensor and others is queued in the current stream and done by a thread of that
stream, later and piece by piece; `stall()` is a kernel that ends when the test says so. Memory that nobody has written
yet is full of ones, which are NaNs as floats: what is read too early is seen in the results.

Only copies are queued. All other work on a tensor is done at once, so a program must `synchronize()` before it.
"""

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_real_empty = torch.empty


class Device:
    type = "cuda"

    def __str__(self) -> str:
        return "cuda:0"


DEVICE = Device()


class Event:
    device = DEVICE

    def __init__(self) -> None:
        self._happened = threading.Event()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()

    def happen(self) -> None:
        self._happened.set()


class Stream:
    """Work in the order in which it was given, by a thread."""

    def __init__(self, device: object = DEVICE) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def give(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record_event(self) -> Event:
        event = Event()
        self.give(event.happen)
        return event

    def wait_event(self, event: Event) -> None:
        self.give(event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Current(threading.local):
    stream: Stream | None = None


_default = Stream()
_current = _Current()
slowness_s = 0.0
"""How long a copy takes on the average."""
has_memory = True
"""False: the device has none left."""
fails_at = -1
"""The number of the copy that the device refuses to begin."""
_begun = 0


def current_stream(device: object = None) -> Stream:
    return _current.stream or _default


@contextlib.contextmanager
def in_stream(stream: Stream) -> Iterator[None]:
    before, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = before


class Tensor(torch.Tensor):  # type: ignore[misc]  # torch is not looked at
    """A tensor that says it is on the device."""

    @property
    def device(self) -> Any:  # noqa: ANN401 - of another type than torch's
        return DEVICE

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever torch calls
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, args, kwargs or {})
        global _begun
        _begun += 1
        if _begun == fails_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        target, source = (each.as_subclass(torch.Tensor) for each in args[:2])
        current_stream().give(lambda: _copy(target, source))
        return args[0]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if slowness_s:
        time.sleep(random.uniform(0, 2 * slowness_s))  # a device that is busy
    target.copy_(source)


def begun() -> int:
    """How many copies have been queued."""
    return _begun


def tensor(numbers: torch.Tensor) -> Tensor:
    """A tensor on the device with these numbers."""
    return numbers.clone().as_subclass(Tensor)


def numbers(of: Tensor) -> torch.Tensor:
    """The numbers of a tensor on the device, once its stream is done."""
    current_stream().synchronize()
    return of.as_subclass(torch.Tensor).clone()


def stall() -> Event:
    """A kernel in the current stream, which runs until the event happens."""
    event = Event()
    current_stream().wait_event(event)
    return event


def _empty(*shape: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - those of torch.empty
    pinned, device = options.pop("pin_memory", False), options.pop("device", None)
    if device is DEVICE and not has_memory:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    made = _real_empty(*shape, **options)
    if pinned or device is DEVICE:
        made.view(-1).view(torch.uint8).fill_(0xFF)
    return made.as_subclass(Tensor) if device is DEVICE else made


def install() -> None:
    torch.empty = _empty
    torch.cuda.current_stream = current_stream
    torch.cuda.Stream = Stream
    torch.cuda.stream = in_stream
