"""Rounds without a master: the ranks of a process group gather their reports and broadcast the result.

The machines are the same as with a master. Every rank runs a `RoundNode`; rank 0 also runs the `RoundMaster`. Only the
transport differs: one *gather* carries all reports, and one *broadcast* carries all messages of the master. A round is
then, on every rank:

    the window ends by the rank's clock -> fit -> gather -> (rank 0: calculate) -> broadcast -> the next window

A collective is all or nothing. If one rank is dead or later than the timeout, the collective fails on every rank. The
error names the missing ranks as far as they are known: each rank sets a key in the group's store before it gathers. A
broken group stays broken; the node continues alone. The application makes a new group, with the same `RoundNode` if the
process still has it: round ids continue above the highest that any rank has seen.

A rank without a window of its own (a listener, or a node that probes nobody) waits in the collective from the start of
the window on. It waits longer by the longest window, and so does the group.

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
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.rounds.calculation import CalculateRound, DrawGraph, RoundResult
from ringfold.probe.rounds.effects import (
    AdoptClock,
    ConfigureProber,
    ExportWindow,
    LogNote,
    MasterEffect,
    NodeEffect,
    PauseProbing,
    PublishSummary,
    ResumeProbing,
    RotateWindow,
    SendProbeResponse,
    SendToMaster,
    SendToNode,
)
from ringfold.probe.rounds.events import (
    MS,
    CommandReceived,
    FromRoundMaster,
    MasterConnected,
    MasterDisconnected,
    MasterMessageReceived,
    NodeConnected,
    ReportReceived,
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

MAX_SLEEP_S = 1.0
"""A node's machine must see its clock at least this often."""
STORE_TIMEOUT_MS = 2_000
"""The timeout of one call to the store."""
LATE_RANKS_MS = 1_000
"""When a collective fails at once, ranks that are only late get so much time before they are reported as missing."""
MAX_BYTES = 1 << 30


class Collectives(Protocol):
    """What rounds need of a process group. Both calls may raise DeadlineExceeded; then the group is broken."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, content: bytes, timeout_ms: int) -> list[bytes]:
        """The content of all ranks at rank 0, by rank; an empty list at all others."""
        ...

    def broadcast(self, content: bytes, timeout_ms: int) -> bytes:
        """Rank 0's content, at every rank."""
        ...


class RoundProber(Protocol):
    """What rounds need of the prober."""

    def now(self) -> int: ...
    def utc(self) -> int: ...
    def configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None: ...
    def resume(self, gap_us: int, pause_us: int) -> None: ...
    def pause(self) -> None: ...
    def rotate(self) -> list[EdgeWindow]: ...


class RankInfo(msgspec.Struct, frozen=True):
    """What a rank sends about itself when the group is made."""

    facts: Neighbour
    listen_only: bool
    last: RoundId


class GlooBroadcast(msgspec.Struct, frozen=True):
    """What rank 0 sends after a gather: messages for each node, and the summary for all."""

    messages: dict[str, list[FromRoundMaster]]
    """By node id, as text."""
    summary: RoundSummary | None = None


_encode = msgspec.msgpack.Encoder().encode
_rank_info_decoder = msgspec.msgpack.Decoder(RankInfo)
_report_decoder = msgspec.msgpack.Decoder(RoundReport)
_broadcast_decoder = msgspec.msgpack.Decoder(GlooBroadcast)


@dataclass(slots=True)
class GlooRoundResult:
    """The result of one round at this rank. There is no summary if it continued alone."""

    summary: RoundSummary | None = None
    clock: NodeClock | None = None
    exports: list[ExportWindow] = field(default_factory=list)
    windows: list[EdgeWindow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class GlooRounds:
    """One rank's rounds. `node` is the machine of an earlier group, if there was one."""

    def __init__(
        self,
        collectives: Collectives,
        settings: RoundSettings,
        facts: Neighbour,
        prober: RoundProber,
        fit: Callable[[EdgeWindow], EdgeFit],
        draw: DrawGraph,
        calculate: CalculateRound,
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
        self._own_report: RoundReport | None = None
        self._result = GlooRoundResult()
        self._stop_requested = Event()

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed: from then on `round` returns windows of this node alone."""
        return self._is_broken

    def stop(self) -> None:
        """Let a `round` in another thread return without waiting for the end of its window."""
        self._stop_requested.set()

    def join(self) -> None:
        """Exchange addresses with the other ranks, and open the first window together. Raises DeadlineExceeded."""
        timeout_ms = self._settings.gloo_timeout_ms
        about = RankInfo(self._facts, self._listen_only, self.node.last)
        infos = self._call(lambda: self._group.gather(_encode(about), timeout_ms))
        if self._group.rank == 0:
            self._begin([_decode(_rank_info_decoder, one, rank) for rank, one in enumerate(infos)])
        self._is_joined = True
        self._run_effects(self.node.step(self._prober.now(), MasterConnected(self._facts.node)))
        self._broadcast_result(timeout_ms)

    def round(self) -> GlooRoundResult:
        """Probe to the end of the window, and exchange it for the result.

        Raises DeadlineExceeded, which names the missing ranks, within the timeout after the window; at a rank without
        a window, after the longest window there is. The node's own window is exported anyway (`exported`), and the next
        call continues alone.
        """
        if not self._is_joined and not self._is_broken:
            self.join()
        self._result = taken = GlooRoundResult()
        self._own_report = None
        timeout_ms = self._settings.gloo_timeout_ms
        if not self._listen_only:
            self._probe()
        if self._own_report is None:
            timeout_ms += self._settings.longest_window_ms
        if self._stop_requested.is_set() or self._is_broken:
            return taken
        content = _encode(self._own_report) if self._own_report is not None else b""
        started = monotonic_ns()
        reports = self._call(lambda: self._group.gather(content, timeout_ms))
        for rank, one in enumerate(reports):
            if one:
                report = _decode(_report_decoder, one, rank)
                self._master_step(ReportReceived(self._by_rank[rank], report, len(one)))
        self._broadcast_result(max(1, timeout_ms - (monotonic_ns() - started) // MS))
        return taken

    @property
    def exported(self) -> GlooRoundResult:
        """The result of the present or last round so far."""
        return self._result

    # Rank 0

    def _begin(self, ranks: Sequence[RankInfo]) -> None:
        """Use a fence above all that any rank has seen; add all nodes before the first window begins."""
        fence = max(one.last.fence for one in ranks) + 1
        self._master = RoundMaster(self._settings, fence, self._key, self._draw, self._timed)
        self._by_rank = [one.facts.node for one in ranks]
        if len(set(self._by_rank)) < len(ranks):
            raise RemoteProtocolError(f"two ranks have the same node id: {self._by_rank}")
        for one in ranks:
            self._master_step(NodeConnected(one.facts.node, one.facts, one.listen_only, one.last))
        self._master_step(CommandReceived(0, "start"))

    def _timed(self, fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> RoundResult:
        began = monotonic_ns()
        result = self._calculate(fits, utc, history)
        return msgspec.structs.replace(result, took_ns=monotonic_ns() - began)

    def _master_step(self, event: NodeConnected | ReportReceived | CommandReceived) -> None:
        assert self._master is not None
        for effect in self._master.step(monotonic_ns(), event):
            self._send(effect)

    def _send(self, effect: MasterEffect) -> None:
        match effect:
            case SendToNode(node, message):
                self._messages.setdefault(str(node), []).append(message)
            case PublishSummary(summary):
                self._summary = summary
            case LogNote(text):
                self._result.notes.append(text)
            case SendProbeResponse():
                pass
            case _:
                assert_never(effect)

    # Every rank

    def _broadcast_result(self, timeout_ms: int) -> None:
        """The broadcast: rank 0 sends its messages and the summary, and every node receives its part."""
        content = _encode(GlooBroadcast(self._messages, self._summary)) if self._group.rank == 0 else b""
        self._messages, self._summary = {}, None
        outcome = _decode(_broadcast_decoder, self._call(lambda: self._group.broadcast(content, timeout_ms)), 0)
        self._result.summary = outcome.summary
        for message in outcome.messages.get(str(self._facts.node), ()):
            self._run_effects(self.node.step(self._prober.now(), MasterMessageReceived(message)))

    def _probe(self) -> None:
        """Until this rank's window is fitted."""
        while not self._result.exports and not self._stop_requested.is_set():
            due, now = self.node.next_deadline_ns(), self._prober.now()
            if due is None:
                return
            if now < due:
                self._stop_requested.wait(min(MAX_SLEEP_S, (due - now) / 1e9))
            self._run_effects(self.node.step(self._prober.now(), Tick()))

    def _run_effects(self, effects: Sequence[NodeEffect]) -> None:
        for effect in effects:
            match effect:
                case ConfigureProber(key, out, into):
                    self._prober.configure(key, out, into)
                case ResumeProbing(cadence):
                    self._prober.resume(cadence.gap_us, cadence.pause_us)
                case PauseProbing():
                    self._prober.pause()
                case RotateWindow(window):
                    self._rotate(window)
                case AdoptClock(clock):
                    self._result.clock = clock
                case ExportWindow():
                    self._result.exports.append(effect)
                case LogNote(text):
                    self._result.notes.append(text)
                case SendToMaster(message):
                    if isinstance(message, RoundReport):
                        self._own_report = message
                case _:
                    assert_never(effect)

    def _rotate(self, number: int) -> None:
        windows = self._prober.rotate()
        self._result.windows += windows
        end_ns = self._prober.now()
        begin_ns = min((window.begin_ns for window in windows), default=end_ns)
        edges = [self._fit(window) for window in windows]
        now_ns = self._prober.now()
        event = WindowFitted(number, edges, begin_ns, end_ns, self._prober.utc(), now_ns - end_ns)
        self._run_effects(self.node.step(now_ns, event))

    def _call(self, collective: Callable[[], Content]) -> Content:
        """Run a collective; if it fails, this node continues alone."""
        try:
            return collective()
        except DeadlineExceeded:
            self._is_broken = True
            self._run_effects(self.node.step(self._prober.now(), MasterDisconnected("the group is broken")))
            raise


def _decode(decoder: msgspec.msgpack.Decoder[Content], content: bytes, rank: int) -> Content:
    return decode(decoder.decode, content, what=f"rank {rank} sent an invalid message: ")


class TorchCollectives:
    """A Gloo group of `size` ranks. `host:port` is its rendezvous, where rank 0 listens.

    The constructor waits for all ranks, at most `timeout_ms`. A rank may enter a collective up to `window_ms` before
    the others. `interface` is a network interface's name, or empty.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        *,
        interface: str = "",
        timeout_ms: int = 30_000,
        window_ms: int = 0,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not one of {size} ranks")
        dist = _torch_distributed()
        self._rank, self._size, self._step = rank, size, 0
        self._waited = f"the group of {size} ranks at {host}:{port}"
        began = monotonic_ns()
        try:
            self._store = dist.TCPStore(host, port, size, rank == 0, timedelta(milliseconds=timeout_ms))
            # No collective lasts longer than the group's own timeout, whatever the call says.
            self._pg = self._make(dist, interface, timeout_ms + window_ms)
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
        """The content of all ranks at rank 0, by rank; an empty list at all others."""
        return self._run_collective("gather", timeout_ms, lambda until_ns: self._gather(content, until_ns))

    def broadcast(self, content: bytes, timeout_ms: int) -> bytes:
        """Rank 0's content, at every rank."""
        return self._run_collective("broadcast", timeout_ms, lambda until_ns: self._broadcast(content, until_ns))

    def close(self) -> None:
        """Release the group. Collectives that still run end by their timeouts."""
        del self._pg, self._store

    def _make(self, dist: ModuleType, interface: str, timeout_ms: int) -> "ProcessGroupGloo":
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        options._timeout = timedelta(milliseconds=timeout_ms)
        options._threads = 1
        return gloo(dist.PrefixStore("ringfold/rounds", self._store), self._rank, self._size, options)

    def _run_collective(self, what: str, timeout_ms: int, run: Callable[[int], Content]) -> Content:
        began, self._step = monotonic_ns(), self._step + 1
        try:
            self._store.set(self._arrival_key(self._rank), b"1")
            return run(began + timeout_ms * MS)
        except RuntimeError as error:
            waited_ms = (monotonic_ns() - began) // MS
            missing, text = self._missing_ranks(min(LATE_RANKS_MS, timeout_ms - waited_ms))
            text = f"{what} of a gloo round failed after {waited_ms} ms: {text} ({_first_line(error)})"
            raise DeadlineExceeded(f"{what} of a gloo round", missing, waited_ms, text) from error

    def _arrival_key(self, rank: int) -> str:
        return f"ringfold/came/{self._step}/{rank}"

    def _missing_ranks(self, look_ms: int) -> tuple[list[int], str]:
        """The ranks that did not enter this collective, as far as the store at rank 0 knows."""
        marks = [self._arrival_key(rank) for rank in range(self._size)]
        with suppress(RuntimeError):  # some are missing; or the store is gone, which the next call detects
            self._store.wait(marks, timedelta(milliseconds=max(1, look_ms)))
        try:
            missing = [rank for rank in range(self._size) if not self._store.check([self._arrival_key(rank)])]
        except RuntimeError:
            return [0], "rank 0, which has the store, is gone"
        if not missing:
            return [], "all ranks entered it, and one of them was lost then"
        return missing, f"rank {', '.join(map(str, missing))} is missing"

    def _gather(self, content: bytes, until_ns: int) -> list[bytes]:
        torch, dist = _torch(), _torch_distributed()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        own = torch.tensor([len(content)], dtype=torch.int64)
        _wait(self._pg.allgather([lengths], [own]), until_ns)
        sizes = [int(length) for length in lengths]
        longest = _checked_length(max(sizes))
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
        size = _checked_length(int(length))
        if not size:
            return b""
        everything = torch.zeros(size, dtype=torch.uint8)
        if self._rank == 0:
            everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        _wait(self._pg.broadcast([everything], options), until_ns)
        return bytes(everything.numpy())


def _wait(work: "Work", until_ns: int) -> None:
    """Wait for a collective until an instant of the monotonic clock; at the timeout torch raises RuntimeError."""
    left_ms = max(1, (until_ns - monotonic_ns()) // MS)
    if not work.wait(timedelta(milliseconds=left_ms)):
        raise RuntimeError(f"the collective was not finished in {left_ms} ms")


def _checked_length(length: int) -> int:
    if not 0 <= length <= MAX_BYTES:
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
        raise ConfigError("this PyTorch was built without Gloo: install one that has it, or use another kind of round")
    return dist
