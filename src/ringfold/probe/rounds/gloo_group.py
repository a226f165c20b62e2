"""The process group under `gloo` rounds: torch.distributed, with bytes instead of tensors.

The group is its own: the program's default group, if it has one, is neither used nor changed. The interface is given to
Gloo directly, so no environment variable is set either. A message of any length takes two collectives: all lengths
first, then the content, padded to the longest.

When a collective fails (a rank is gone, or the timeout has passed) the marks in the store say who had come this far.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from ringfold.errors import ConfigError, DeadlineExceeded
from ringfold.probe.rounds.events import MS
from ringfold.runtime.clock import monotonic_ns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, Work

Content = TypeVar("Content")

STORE_TIMEOUT_MS = 2_000
"""How long the store may take to answer."""
LOOK_MS = 1_000
"""When a collective fails at once, those who are only late get so much time to show up, and are not called missing."""
MOST_BYTES = 1 << 30


class TorchCollectives:
    """A Gloo group of `size` ranks that meet at `host:port`, where rank 0 listens.

    Making it waits for all ranks, at most `timeout_ms`. `interface` is a network interface's name, or empty.
    """

    def __init__(
        self, rank: int, size: int, host: str, port: int, *, interface: str = "", timeout_ms: int = 30_000
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not one of {size} ranks")
        dist = _torch_distributed()
        self._rank, self._size, self._step = rank, size, 0
        self._waited = f"the group of {size} ranks at {host}:{port}"
        began = monotonic_ns()
        try:
            self._store = dist.TCPStore(host, port, size, rank == 0, timedelta(milliseconds=timeout_ms))
            self._pg = self._make(dist, interface, timeout_ms)
        except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            waited_ms = (monotonic_ns() - began) // MS
            text = f"{self._waited} was not made in {waited_ms} ms: {_first_line(error)}"
            raise DeadlineExceeded("the group of gloo rounds", [], waited_ms, text) from error
        self._store.set_timeout(timedelta(milliseconds=STORE_TIMEOUT_MS))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def gather(self, content: bytes, timeout_ms: int) -> list[bytes]:
        """Everybody's content at rank 0, by rank; elsewhere an empty list."""
        return self._whole("gather", timeout_ms, lambda until_ns: self._gather(content, until_ns))

    def broadcast(self, content: bytes, timeout_ms: int) -> bytes:
        """Rank 0's content, everywhere."""
        return self._whole("broadcast", timeout_ms, lambda until_ns: self._broadcast(content, until_ns))

    def close(self) -> None:
        """Forget the group. Collectives that still run end by their timeouts."""
        del self._pg, self._store

    def _make(self, dist: ModuleType, interface: str, timeout_ms: int) -> "ProcessGroupGloo":
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        options._timeout = timedelta(milliseconds=timeout_ms)
        options._threads = 1
        return gloo(dist.PrefixStore("ringfold/rounds", self._store), self._rank, self._size, options)

    def _whole(self, what: str, timeout_ms: int, run: Callable[[int], Content]) -> Content:
        began, self._step = monotonic_ns(), self._step + 1
        try:
            self._store.set(self._mark(self._rank), b"1")
            return run(began + timeout_ms * MS)
        except RuntimeError as error:
            waited_ms = (monotonic_ns() - began) // MS
            missing, who = self._missing(min(LOOK_MS, timeout_ms - waited_ms))
            text = f"{what} of a gloo round failed after {waited_ms} ms: {who} ({_first_line(error)})"
            raise DeadlineExceeded(f"{what} of a gloo round", missing, waited_ms, text) from error

    def _mark(self, rank: int) -> str:
        return f"ringfold/came/{self._step}/{rank}"

    def _missing(self, look_ms: int) -> tuple[list[int], str]:
        """Who did not come to this collective, as far as the store at rank 0 knows."""
        marks = [self._mark(rank) for rank in range(self._size)]
        with suppress(RuntimeError):  # not all came; or the store is gone, which the next call finds out
            self._store.wait(marks, timedelta(milliseconds=max(1, look_ms)))
        try:
            missing = [rank for rank in range(self._size) if not self._store.check([self._mark(rank)])]
        except RuntimeError:
            return [0], "rank 0, which keeps the store, is gone"
        if not missing:
            return [], "all ranks came, and one of them was lost then"
        return missing, f"rank {', '.join(map(str, missing))} did not come"

    def _gather(self, content: bytes, until_ns: int) -> list[bytes]:
        torch, dist = _torch(), _torch_distributed()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        own = torch.tensor([len(content)], dtype=torch.int64)
        _wait(self._pg.allgather([lengths], [own]), until_ns)
        sizes = [int(length) for length in lengths]
        longest = _sane(max(sizes))
        if not longest:
            return [b""] * self._size if self._rank == 0 else []
        padded = torch.zeros(longest, dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        options = dist.GatherOptions()
        options.rootRank = 0
        if self._rank != 0:
            _wait(self._pg.gather([], [padded], options), until_ns)
            return []
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._size)]
        _wait(self._pg.gather([parts], [padded], options), until_ns)
        return [bytes(part[:size].numpy()) for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, content: bytes, until_ns: int) -> bytes:
        torch, dist = _torch(), _torch_distributed()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        length = torch.tensor([len(content)], dtype=torch.int64)
        _wait(self._pg.broadcast([length], options), until_ns)
        size = _sane(int(length))
        if not size:
            return b""
        everything = torch.zeros(size, dtype=torch.uint8)
        if self._rank == 0:
            everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        _wait(self._pg.broadcast([everything], options), until_ns)
        return bytes(everything.numpy())


def _wait(work: "Work", until_ns: int) -> None:
    """Wait for a collective until an instant of the monotonic clock; torch raises RuntimeError then."""
    left_ms = max(1, (until_ns - monotonic_ns()) // MS)
    if not work.wait(timedelta(milliseconds=left_ms)):
        raise RuntimeError(f"the collective was not finished in {left_ms} ms")


def _sane(length: int) -> int:
    if not 0 <= length <= MOST_BYTES:
        raise RuntimeError(f"a message of {length} bytes was announced")
    return length


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].strip() or type(error).__name__


def _torch() -> ModuleType:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ConfigError("gloo rounds need PyTorch: pip install 'ringfold[torch]'") from error
    module: ModuleType = torch
    return module


def _torch_distributed() -> ModuleType:
    dist: ModuleType = _torch().distributed
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("this PyTorch was built without Gloo: take one that has it, or another kind of round")
    return dist
