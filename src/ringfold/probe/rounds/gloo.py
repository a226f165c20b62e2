"""Rounds without a master: the ranks of a process group gather their reports and broadcast the result.

The machines are the same as with a master. Every rank runs a `RoundNode`; rank 0 also runs the `RoundMaster`. Only the
transport differs: one *gather* carries all reports, and one *broadcast* carries all messages of the master. A round is
then, on every rank:

    the window ends by the rank's clock -> fit -> gather -> (rank 0: calculate) -> broadcast -> the next window

A collective is all or nothing. If one rank is dead or later than the timeout, the collective fails on every rank. The
error names the missing ranks as far as they are known: each rank sets a key in the group's store before it gathers. A
broken group stays broken; the node continues alone. The application makes a new group, with the same `RoundNode` if the
process still has it: round ids continue above the highest that any rank has seen.

Cost of a round: two small collectives (lengths) and two with the content; about 300 bytes an edge towards rank 0, and a
summary of about 400 bytes an edge back to every rank.

`TorchCollectives` is the process group: torch.distributed, with bytes instead of tensors. It is a group of its own: the
program's default group, if there is one, is neither used nor changed. The interface is passed to Gloo directly, so no
environment variable is set. A message of any length takes two collectives: all lengths first, then the content, padded
to the longest.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeVar, assert_never

import msgspec

from ringfold.errors import ConfigError, DeadlineExceeded, RemoteProtocolError
from ringfold.probe.fit import EdgeWindow
from ringfold.probe.rounds.events import (
    MS,
    Adopt,
    Answer,
    Calculate,
    Calculated,
    Commanded,
    Configure,
    Connected,
    Disconnected,
    Draw,
    Export,
    FromRoundMaster,
    Heard,
    MasterEffect,
    NodeCame,
    NodeEffect,
    Note,
    PauseProbing,
    Publish,
    Reported,
    Resume,
    Rotate,
    Say,
    SendTo,
    Tick,
    WindowFitted,
)
from ringfold.probe.rounds.master import RoundMaster
from ringfold.probe.rounds.node import RoundNode
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.threads import Event
from ringfold.wire.decoding import decode
from ringfold.wire.probing import EdgeFit, Neighbour, NodeClock, NodeId, RoundId, RoundReport, RoundSummary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, Work

Content = TypeVar("Content")

LONGEST_SLEEP_S = 1.0
"""A node's machine wants to see its clock at least this often."""
STORE_TIMEOUT_MS = 2_000
"""How long the store may take to answer."""
LOOK_MS = 1_000
"""When a collective fails at once, those who are only late get so much time to show up, and are not called missing."""
MOST_BYTES = 1 << 30


class Collectives(Protocol):
    """A process group, as far as rounds need one. Both calls raise DeadlineExceeded, and then the group is broken."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, content: bytes, timeout_ms: int) -> list[bytes]:
        """Everybody's content at rank 0, by rank; elsewhere an empty list."""
        ...

    def broadcast(self, content: bytes, timeout_ms: int) -> bytes:
        """Rank 0's content, everywhere."""
        ...


class Probes(Protocol):
    """The prober, as far as rounds need one."""

    def now(self) -> int: ...
    def utc(self) -> int: ...
    def configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None: ...
    def resume(self, gap_us: int, pause_us: int) -> None: ...
    def pause(self) -> None: ...
    def rotate(self) -> list[EdgeWindow]: ...


class Joining(msgspec.Struct, frozen=True):
    """What a rank says of itself when the group is made."""

    facts: Neighbour
    listen_only: bool
    last: RoundId


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 has to say after a gather: to each node, and to all."""

    messages: dict[str, list[FromRoundMaster]]
    """By node id, as text."""
    summary: RoundSummary | None = None


_encode = msgspec.msgpack.Encoder().encode
_joining = msgspec.msgpack.Decoder(Joining)
_report = msgspec.msgpack.Decoder(RoundReport)
_outcome = msgspec.msgpack.Decoder(Outcome)


@dataclass(slots=True)
class Taken:
    """What one round brought to this rank. Alone, there is no summary."""

    summary: RoundSummary | None = None
    clock: NodeClock | None = None
    exports: list[Export] = field(default_factory=list)
    windows: list[EdgeWindow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class GlooRounds:
    """One rank's rounds. `node` is the machine of an earlier group, if there was one."""

    def __init__(
        self,
        collectives: Collectives,
        settings: RoundSettings,
        facts: Neighbour,
        prober: Probes,
        fit: Callable[[EdgeWindow], EdgeFit],
        draw: Draw,
        calculate: Calculate,
        key: Callable[[int], bytes],
        *,
        listen_only: bool = False,
        node: RoundNode | None = None,
    ) -> None:
        self._group, self._facts, self._listen_only = collectives, facts, listen_only
        self._settings = replace(settings, kind="gloo", is_on=False)
        self._prober, self._fit = prober, fit
        self._draw, self._calculate, self._key = draw, calculate, key
        self.node = node or RoundNode()
        self._master: RoundMaster | None = None
        self._by_rank: list[NodeId] = []
        self._messages: dict[str, list[FromRoundMaster]] = {}
        self._summary: RoundSummary | None = None
        self._is_joined, self._is_broken = False, False
        self._said: RoundReport | None = None
        self._taken = Taken()
        self._stopped = Event()

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed: from then on `round` is about windows of this node alone."""
        return self._is_broken

    def stop(self) -> None:
        """Let a `round` in another thread return soon: it does not wait for the end of its window any more."""
        self._stopped.set()

    def join(self) -> None:
        """Meet the other ranks, and open the first window together. Raises DeadlineExceeded."""
        timeout_ms = self._settings.gloo_timeout_ms
        about = Joining(self._facts, self._listen_only, self.node.last)
        said = self._collect(lambda: self._group.gather(_encode(about), timeout_ms))
        if self._group.rank == 0:
            self._begin([_decoded(_joining, one, rank) for rank, one in enumerate(said)])
        self._is_joined = True
        self._apply(self.node.step(self._prober.now(), Connected(self._facts.node)))
        self._exchange(timeout_ms)

    def round(self) -> Taken:
        """Probe to the end of the window, and exchange it for the result.

        Raises DeadlineExceeded, which names the ranks that did not come, within the timeout after the window. The
        node's own window is exported all the same (`exported`), and the next call goes on alone.
        """
        if not self._is_joined and not self._is_broken:
            self.join()
        self._taken = taken = Taken()
        self._said = None
        waits_ms = self._settings.gloo_timeout_ms
        if self._listen_only:
            waits_ms += self._settings.adaptive.window_max_ms
        else:
            self._probe()
        if self._stopped.is_set() or self._is_broken:
            return taken
        content = _encode(self._said) if self._said is not None else b""
        started = monotonic_ns()
        reports = self._collect(lambda: self._group.gather(content, waits_ms))
        for rank, one in enumerate(reports):
            if one:
                report = _decoded(_report, one, rank)
                self._master_step(Reported(self._by_rank[rank], report, len(one)))
        self._exchange(max(1, waits_ms - (monotonic_ns() - started) // MS))
        return taken

    @property
    def exported(self) -> Taken:
        """What the round under way, or the last one, has brought so far."""
        return self._taken

    # Rank 0

    def _begin(self, ranks: Sequence[Joining]) -> None:
        """A fence above all that any rank has seen; everybody comes before the first window begins."""
        fence = max(one.last.fence for one in ranks) + 1
        self._master = RoundMaster(self._settings, fence, self._key, self._draw, self._timed)
        self._by_rank = [one.facts.node for one in ranks]
        if len(set(self._by_rank)) < len(ranks):
            raise RemoteProtocolError(f"two ranks have the same node id: {self._by_rank}")
        for one in ranks:
            self._master_step(NodeCame(one.facts.node, one.facts, one.listen_only, one.last))
        self._master_step(Commanded(0, "start"))

    def _timed(self, fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> Calculated:
        began = monotonic_ns()
        result = self._calculate(fits, utc, history)
        return replace(result, took_ns=monotonic_ns() - began)

    def _master_step(self, event: NodeCame | Reported | Commanded) -> None:
        assert self._master is not None
        for effect in self._master.step(monotonic_ns(), event):
            self._send(effect)

    def _send(self, effect: MasterEffect) -> None:
        match effect:
            case SendTo(node, message):
                self._messages.setdefault(str(node), []).append(message)
            case Publish(summary):
                self._summary = summary
            case Note(text):
                self._taken.notes.append(text)
            case Answer():
                pass
            case _:
                assert_never(effect)

    # Every rank

    def _exchange(self, timeout_ms: int) -> None:
        """The broadcast: rank 0 says what there is to say, and every node hears its part."""
        content = _encode(Outcome(self._messages, self._summary)) if self._group.rank == 0 else b""
        self._messages, self._summary = {}, None
        outcome = _decoded(_outcome, self._collect(lambda: self._group.broadcast(content, timeout_ms)), 0)
        self._taken.summary = outcome.summary
        for message in outcome.messages.get(str(self._facts.node), ()):
            self._apply(self.node.step(self._prober.now(), Heard(message)))

    def _probe(self) -> None:
        """Until this rank's window is fitted."""
        while not self._taken.exports and not self._stopped.is_set():
            due, now = self.node.next_deadline_ns(), self._prober.now()
            if due is None:
                return
            if now < due:
                self._stopped.wait(min(LONGEST_SLEEP_S, (due - now) / 1e9))
            self._apply(self.node.step(self._prober.now(), Tick()))

    def _apply(self, effects: Sequence[NodeEffect]) -> None:
        for effect in effects:
            match effect:
                case Configure(key, out, into):
                    self._prober.configure(key, out, into)
                case Resume(cadence):
                    self._prober.resume(cadence.gap_us, cadence.pause_us)
                case PauseProbing():
                    self._prober.pause()
                case Rotate(window):
                    self._rotate(window)
                case Adopt(clock):
                    self._taken.clock = clock
                case Export():
                    self._taken.exports.append(effect)
                case Note(text):
                    self._taken.notes.append(text)
                case Say(message):
                    if isinstance(message, RoundReport):
                        self._said = message
                case _:
                    assert_never(effect)

    def _rotate(self, number: int) -> None:
        windows = self._prober.rotate()
        self._taken.windows += windows
        end_ns = self._prober.now()
        begin_ns = min((window.begin_ns for window in windows), default=end_ns)
        edges = [self._fit(window) for window in windows]
        now_ns = self._prober.now()
        event = WindowFitted(number, edges, begin_ns, end_ns, self._prober.utc(), now_ns - end_ns)
        self._apply(self.node.step(now_ns, event))

    def _collect(self, collective: Callable[[], Content]) -> Content:
        """A collective; if it fails, this node goes on alone."""
        try:
            return collective()
        except DeadlineExceeded:
            self._is_broken = True
            self._apply(self.node.step(self._prober.now(), Disconnected("the group is broken")))
            raise


def _decoded(decoder: msgspec.msgpack.Decoder[Content], content: bytes, rank: int) -> Content:
    return decode(decoder.decode, content, what=f"rank {rank} says what nobody understands: ")


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
