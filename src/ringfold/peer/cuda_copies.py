"""Copies of the CUDA tensors of an op, in pinned memory of the host.

They run in two streams of their own for each device, so that neither the program's kernels nor the copies of other ops
wait for them:

    program's stream:  kernels that write x ──●·······································●── kernels that read x
    down:                                     └─ x to the host ─●                    │
    engine:                                                     └─ ring ─●           │
    up:                                                                  └─ host to x ┘

So it is as with NCCL: the copy follows what the program's stream had been given when the op was called, and what this
stream is given after `wait` follows the result. The program's thread waits for the ring, never for the copy back.
Pinned memory comes from torch's own pool, which gives a piece to another copy only when the streams are through with
it; the tensors' memory is kept in the same way.

An op that its caller waits for at once has nothing else to hide its copies behind. If it is large, it is *pipelined*:
cut into blocks, and the engine works on a block as soon as it is filled.

    down:    0 ─ 1 ─ 2 ─ 3 ─ ...
    engine:      0 ─ 1 ─ 2 ─ 3 ─ ...           a block is sent, reduced and written when it is filled
    up:              0 ─ 1 ─ 2 ─ 3 ─ ... ─● x  a final block is copied to the device beside x; at the commit, into x

What other members see is the op of any other tensor. Until the commit x is as it was passed in.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ringfold import _native
from ringfold.peer.staging import Array, Event, Tensor, host_view, writing
from ringfold.runtime import threads

MIN_PIPELINED = 8 << 20
"""Bytes of an op. The copies of a smaller one take less time than it takes to cut them."""
MIN_BLOCK = 2 << 20
BLOCKS = 32
"""Of a large op there are so many, longer ones: each costs a few microseconds."""
PARTS = 4
"""Blocks are filled in this many places by turns: as many threads may work on an op, each on its part of all chunks."""
AHEAD = 8
"""Copies to the host that are queued behind the one that is waited for."""
MAX_BESIDE = 512 << 20
"""Bytes on the device for results that are not committed yet. An op with more is copied back after its commit."""
ALIGNMENT = 64
LOOKS = 300
"""At a copy, before its end is waited for with pauses."""
POLL_S = 50e-6
WAIT_S = 1.0


class _Streams(NamedTuple):
    """For the copies of one device: to the host, and back. A device copies in both directions at the same time."""

    down: Any
    up: Any


_streams: dict[object, _Streams] = {}


def _streams_of(device: object) -> _Streams:
    found = _streams.get(device)
    if found is None:
        stream = sys.modules["torch"].cuda.Stream
        found = _streams.setdefault(device, _Streams(stream(device), stream(device)))
    return found


class CudaCopies:
    """Copies of CUDA tensors that are buffers of one op. `arrays` are what the engine works on."""

    def __init__(self, tensors: Sequence[Tensor], *, read: bool) -> None:
        """Unless they are to be `read`, there is nothing to fill."""
        torch = sys.modules["torch"]
        self.tensors = list(tensors)
        self._hosts = _pinned(tensors)
        self.arrays: list[Array] = [host_view(host) for host in self._hosts]
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        self._called = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._must_fill = read
        self._filled: list[Event] | None = None

    # As a whole

    def fill(self) -> None:
        """Begin to copy to the host, unless that has begun."""
        if self._filled is not None:
            return
        self._filled = []
        for device in self._called if self._must_fill else ():
            with self._after_call(_streams_of(device).down, device) as down:
                for tensor, host in self._on(device):
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(down)
                self._filled.append(down.record_event())

    def is_filled(self) -> bool:
        return self._filled is not None and all(event.query() for event in self._filled)

    def wait_filled(self, check: Callable[[], None]) -> None:
        self.fill()
        for event in self._filled or ():
            wait_for(event, check)

    def copy_back(self) -> list[Event]:
        written = []
        for device in self._called:
            with self._after_call(_streams_of(device).up, device) as up:
                for tensor, host in self._on(device):
                    with writing(tensor):
                        tensor.copy_(host, non_blocking=True)
                    tensor.record_stream(up)
                written.append(up.record_event())
        return written

    def _on(self, device: object) -> list[tuple[Tensor, Any]]:
        pairs = zip(self.tensors, self._hosts, strict=True)
        return [(tensor, host) for tensor, host in pairs if tensor.device == device and tensor.numel()]

    def _after_call(self, stream: Any, device: object) -> "_Inside":  # noqa: ANN401  # a stream of torch
        stream.wait_event(self._called[device])
        return _Inside(stream)

    # Block by block

    @property
    def device(self) -> object:
        """The device that all tensors are on; None if they are on several."""
        return next(iter(self._called)) if len(self._called) == 1 else None

    @property
    def must_fill(self) -> bool:
        return self._must_fill

    def begin_down(self) -> "Beside":
        """The elements of each tensor in C order, to be copied to the host in the stream `down`."""
        with self._after_call(_streams_of(self.device).down, self.device) as down:
            flat = [tensor.contiguous().view(-1) for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.record_stream(down)
        self._filled = []
        return Beside(down, flat, [host.view(-1) for host in self._hosts])

    def begin_up(self) -> "Beside | None":
        """Memory on the device beside the tensors, to copy there in the stream `up`; None if there is not enough."""
        torch = sys.modules["torch"]
        if sum(array.nbytes for array in self.arrays) > MAX_BESIDE:
            return None
        with self._after_call(_streams_of(self.device).up, self.device) as up:
            try:
                flat = [torch.empty(host.numel(), dtype=host.dtype, device=self.device) for host in self._hosts]
            except torch.cuda.OutOfMemoryError:
                return None
        return Beside(up, flat, [host.view(-1) for host in self._hosts])

    def commit(self, beside: Sequence[Any]) -> list[Event]:
        """The results are complete beside the tensors, or will be in this stream, `up`: copy them there."""
        up = _streams_of(self.device).up
        for tensor, result in zip(self.tensors, beside, strict=True):
            with writing(tensor):
                tensor.copy_(result.view(tuple(tensor.shape)), non_blocking=True)
            tensor.record_stream(up)
        return [up.record_event()]


def _pinned(tensors: Sequence[Tensor]) -> list[Any]:
    """Memory on the host for each tensor, in C order, in one piece."""
    torch = sys.modules["torch"]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    return [
        memory[place : place + size].view(tensor.dtype).view(tuple(tensor.shape))
        for place, size, tensor in zip(places, sizes, tensors, strict=True)
    ]


def wait_for(event: Event, check: Callable[[], None]) -> None:
    """Until it has happened. Ctrl-C, and an error of `check`, end the wait for a copy that hangs."""
    for _ in range(LOOKS):
        if event.query():
            return
    while not event.query():
        check()
        threads.pause(POLL_S)


class _Inside:
    """`with` a stream of CUDA, which it returns."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401  # a stream of torch
        self._stream = stream
        self._context = sys.modules["torch"].cuda.stream(stream)

    def __enter__(self) -> Any:  # noqa: ANN401
        self._context.__enter__()
        return self._stream

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


# Pipelined ops


class Beside(NamedTuple):
    """Elements in C order on the device and on the host, tensor by tensor, and the stream in which they are copied."""

    stream: Any
    device: list[Any]
    host: list[Any]


class Piece(NamedTuple):
    """Of a block: elements of a staged tensor."""

    tensor: int
    first: int
    last: int


class Layout(NamedTuple):
    """The blocks of an op: where each ends, and which elements of staged tensors it has."""

    ends: list[int]
    pieces: list[list[Piece]]


@lru_cache(256)
def layout_of(arrays: tuple[tuple[int, int, int | None], ...]) -> Layout:
    """Cut an op into blocks. Of each array in order: its bytes, its item size, and the number of its staged tensor.

    Arrays come in the order of their item sizes, the largest first, so no cut is inside an element.
    """
    total = sum(size for size, _, _ in arrays)
    block = max(MIN_BLOCK, -(-total // BLOCKS // ALIGNMENT) * ALIGNMENT)
    ends = [*range(block, total, block), total]
    pieces: list[list[Piece]] = [[] for _ in ends]
    begin = 0
    for size, item, tensor in arrays:
        at, last = begin, begin + size
        while at < last:
            number = at // block
            until = min(last, ends[number])
            if tensor is not None:
                pieces[number].append(Piece(tensor, (at - begin) // item, (until - begin) // item))
            at = until
        begin = last
    return Layout(ends, pieces)


@lru_cache(256)
def fill_order(count: int, rank: int, size: int) -> list[int]:
    """The order in which blocks are filled: as a ring of this size needs them at this rank.

    It sends chunk `rank` of its buffer first, and reduces what comes into those before it, one after the other; a pair
    has one chunk. Several threads work on a chunk, each on a part of it.
    """
    chunks = 1 if size <= 2 else size
    order: list[int] = []
    for turn in range(chunks):
        number = (rank - turn) % chunks
        first, last = count * number // chunks, count * (number + 1) // chunks
        cuts = [first + (last - first) * part // PARTS for part in range(PARTS + 1)]
        parts = [range(low, high) for low, high in pairwise(cuts)]
        longest = max(len(part) for part in parts)
        order += [part[place] for place in range(longest) for part in parts if place < len(part)]
    return order


class Pipeline:
    """The copies of an op, in both directions, while the engine works on it."""

    def __init__(self, layout: Layout, down: CudaCopies | None, up: CudaCopies | None, rank: int, size: int) -> None:
        """`down` has the tensors that the op reads, `up` those that it writes. All are on one device.

        `rank` and `size` are those of the ring, or of one before it: they decide what is copied first.
        """
        self._layout, self._down, self._up = layout, down, up
        self.blocks = _native.Blocks(layout.ends)
        self._give_up: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._order = fill_order(len(layout.ends), rank, size)
        self._sources: Beside | None = None
        self._events: list[Event] = []
        self._targets: Beside | None = None
        self._lock = threads.Lock()
        self._attempt = 0
        self._copied: set[int] = set()
        self._is_over = False

    def begin(self, check: Callable[[], None]) -> None:
        """Begin, and return when the first block is filled. What `check` raises ends that wait.

        From then on the copies take as long as the device's link to the host does: whatever the program had queued
        before is done. So an op whose tensors are never ready is never called, as without blocks.
        """
        if self._down is not None and self._down.must_fill:
            self._sources = self._down.begin_down()
            with _Inside(self._sources.stream):
                self._queue_down(0)
            _in_background(self._watched(self._fill_rest))
        if self._up is not None:
            self._targets = self._up.begin_up()
        if self._targets is not None:
            _in_background(self._watched(self._copy_final))
        if self._sources is None:
            for block in self._order:
                self.blocks.fill(block)
        else:
            wait_for(self._events[0], check)
            self.blocks.fill(self._order[0])

    def _queue_down(self, place: int) -> None:
        assert self._sources is not None
        for tensor, first, last in self._layout.pieces[self._order[place]]:
            device = self._sources.device[tensor][first:last]
            self._sources.host[tensor][first:last].copy_(device, non_blocking=True)
        self._events.append(self._sources.stream.record_event())

    def _fill_rest(self) -> None:
        assert self._sources is not None
        with _Inside(self._sources.stream):
            for place in range(1, len(self._order)):
                while len(self._events) < min(place + AHEAD, len(self._order)):
                    self._queue_down(len(self._events))
                self._events[place].synchronize()
                if self._is_over:
                    return  # the op was given up
                self.blocks.fill(self._order[place])

    def _copy_final(self) -> None:
        assert self._targets is not None
        with _Inside(self._targets.stream):
            while not self._is_over:
                attempt, final = self.blocks.take_final(WAIT_S)
                with self._lock:
                    if not self._is_over:
                        self._copy_up(attempt, final)

    def _copy_up(self, attempt: int, final: Sequence[int]) -> None:
        """Copy final blocks to the device. Of an attempt before this one, nothing counts."""
        if attempt != self._attempt:
            self._attempt, self._copied = attempt, set()
        assert self._targets is not None
        for block in final:
            if block in self._copied:
                continue
            for tensor, first, last in self._layout.pieces[block]:
                host = self._targets.host[tensor][first:last]
                self._targets.device[tensor][first:last].copy_(host, non_blocking=True)
            self._copied.add(block)

    def copy_back(self) -> list[Event]:
        """The op has committed: all blocks are final. What is not on the device yet goes there."""
        self.end()
        if self._up is None:
            return []
        if self._targets is None:
            return self._up.copy_back()
        attempt, _ = self.blocks.take_final(0)
        with _Inside(self._targets.stream):
            self._copy_up(attempt, range(self.blocks.count))
            return self._up.commit(self._targets.device)

    def end(self) -> None:
        """No thread copies any more what nobody wants."""
        self.blocks.close()
        with self._lock:
            self._is_over = True

    def give_up_by(self, give_up: Callable[[], object]) -> None:
        """How to end the op, if a copy fails: blocks that are never filled would keep it for ever."""
        with self._lock:
            self._give_up = give_up
            has_failed = self._error is not None
        if has_failed:
            give_up()

    def check(self) -> None:
        """Raise the error of a copy that has failed."""
        if self._error is not None:
            raise self._error

    def _watched(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                with self._lock:
                    self._error, give_up = error, self._give_up
                if give_up is not None:
                    give_up()

        return run


_idle: list[threads.CallThread] = []
"""Threads of pipelined ops that have ended."""


def _in_background(work: Callable[[], None]) -> None:
    thread = _idle.pop() if _idle else threads.CallThread("ringfold-copies")

    def run() -> None:
        try:
            work()
        finally:
            _idle.append(thread)

    thread.start(run)
