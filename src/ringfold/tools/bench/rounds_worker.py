"""Nodes of a benchmark about rounds: `rounds_worker.py ADDRESS NAME WHAT ORDER`.

`WHAT` is `nodes` (of a master), `relays` (of regions) or `rank` (of a Gloo group); `ORDER` is JSON. This file is run by
path, without its package, to keep a start short.

A worker is one node that really probes, or many that do not: those have the production machine and the production
connection each, and in place of a prober the fits of windows that were recorded when the worker started. What is
measured are instants of the monotonic clock, which all processes of a machine share: when a message was received, when
a window was closed. They are collected by the rounds' sequence, the earliest and the latest of all nodes here.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.fit import fit
from ringfold.probe.graph.draw import draw
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.probe.nodes.joined import JoinedNode
from ringfold.probe.nodes.prober import ProbeSocket, ProbeStats, raw_now
from ringfold.probe.nodes.relay import RelayRequest, RelayServer
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.calculation import Calculation
from ringfold.probe.rounds.effects import AdoptClock, ConfigureProber, NodeEffect
from ringfold.probe.rounds.events import FromRoundMaster, NodeEvent, ToRoundMaster
from ringfold.probe.rounds.gloo import GlooRounds
from ringfold.probe.rounds.node import RoundNode
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.process import freeze_garbage_collector
from ringfold.runtime.threads import pause
from ringfold.tools.cluster import Channel, ChannelClosed, Message
from ringfold.wire.messages import Message as WireMessage
from ringfold.wire.probing import EdgeFit, Neighbour, NodeClock, NodeId, RoundEnd, RoundReport, RoundStart

HOST = "127.0.0.1"
RECORDED, RECORDED_S = 6, 0.15
"""How many windows are recorded, and for how long each."""
STEP_NS = 1_000_000
STEPPED = 4
"""Every so many nodes has a clock that steps."""
KEY = bytes(range(16))
EXTRA_ROUNDS = 3


class WorkerOrder(msgspec.Struct, frozen=True):
    """What a worker is to be."""

    master: str = ""
    nodes: int = 1
    first: int = 0
    """The number of its first node, over all workers."""
    is_recorded: bool = False
    steps: bool = False
    export: str = ""
    points: bool = False
    relays: list[str] = []
    """The addresses of relays: to listen on, or to connect to in place of the master's, node by node in turn."""
    window_ms: int = 0
    """From here on: of a Gloo group."""
    size: int = 0
    port: int = 0
    probe_ports: list[int] = []


class Mark(msgspec.Struct):
    """Something that happens once a round at each node: when it was sent, and received first and last, by how many."""

    sent_ns: int
    first_ns: int
    last_ns: int
    count: int = 1
    closed_ns: int = 0
    """When the last of these nodes had last closed a window."""

    def add(self, sent_ns: int, at_ns: int, closed_ns: int = 0) -> None:
        self.sent_ns, self.first_ns = min(self.sent_ns, sent_ns), min(self.first_ns, at_ns)
        self.last_ns, self.closed_ns = max(self.last_ns, at_ns), max(self.closed_ns, closed_ns)
        self.count += 1


class Marks(msgspec.Struct):
    """What a worker reports, by the rounds' sequences."""

    ends: dict[int, Mark] = {}
    starts: dict[int, Mark] = {}
    reports: dict[int, Mark] = {}
    """Reports that were handed to the kernel."""
    rotates_ns: list[int] = []
    """How long the prober took to close a window."""
    fits_ns: list[int] = []
    """How long the fits of one window of one node took, those ahead of its end too."""
    messages: int = 0
    """On the connections of these nodes in all requested rounds, sent and received."""
    bytes: int = 0

    def end(self, sequence: int, sent_ns: int) -> None:
        _mark(self.ends, sequence, sent_ns, monotonic_ns(), 0)

    def report(self, sequence: int, at_ns: int) -> None:
        _mark(self.reports, sequence, at_ns, at_ns, 0)

    def start(self, sequence: int, sent_ns: int, closed_ns: int) -> None:
        _mark(self.starts, sequence, sent_ns, monotonic_ns(), closed_ns)


def _mark(marks: dict[int, Mark], sequence: int, sent_ns: int, at_ns: int, closed_ns: int) -> None:
    known = marks.get(sequence)
    if known is None:
        marks[sequence] = Mark(sent_ns, at_ns, at_ns, closed_ns=closed_ns)
    else:
        known.add(sent_ns, at_ns, closed_ns)


class StampedProber(ProbeSocket):
    """A prober that knows when it last closed a window, and how long that took each time."""

    closed_ns = 0
    rotates_ns: list[int]

    def rotate(self) -> list[EdgeWindow]:
        self.closed_ns = monotonic_ns()
        windows = super().rotate()
        self.rotates_ns.append(monotonic_ns() - self.closed_ns)
        return windows


COUNTS = [field for field in ProbeStats.__struct_fields__ if field not in ("stamps", "clock_noise_ns")]
NO_STATS = ProbeStats(**dict.fromkeys(COUNTS, 0), clock_noise_ns=0.0, stamps="kernel")


class NoProber(StampedProber):
    """Probes no node. Its clock is the host's raw one; `step_ns` makes it step."""

    def __init__(self) -> None:
        self.node, self.step_ns = 0, 0
        self.out: list[NodeId] = []

    @property
    def port(self) -> int:
        return 9

    def configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None:
        self.out = [each.node for each in out]

    def resume(self, gap_us: int = 0, pause_us: int = 0) -> None:
        pass

    def pause(self) -> None:
        pass

    def rotate(self) -> list[EdgeWindow]:
        self.closed_ns = monotonic_ns()
        return []

    def so_far(self) -> list[EdgeWindow]:
        return []

    def peek(self, most: int = 0) -> list[EdgeWindow]:
        return []

    def rename(self, node: NodeId) -> None:
        self.node = node

    def now(self) -> int:
        return raw_now() + self.step_ns

    def utc(self) -> int:
        return 0

    def stats(self) -> ProbeStats:
        return NO_STATS

    def pretend_step(self, step_ns: int) -> None:
        self.step_ns += step_ns

    def close(self) -> None:
        pass


class BenchNode(JoinedNode):
    """A node that marks its reports. Once it is stuck, it sends heartbeats and handles no message."""

    marks: Marks
    is_stuck = False

    def send(self, message: ToRoundMaster) -> None:
        super().send(message)
        if isinstance(message, RoundReport):
            self.marks.report(message.round.sequence, monotonic_ns())

    def _receive(self, message: WireMessage) -> None:
        if not self.is_stuck:
            super()._receive(message)


class RealShell(NodeShell):
    """The production shell; it records how long fits take."""

    fits_ns: list[int]

    _ahead_ns = 0

    def _fit_early(self) -> None:
        began = monotonic_ns()
        super()._fit_early()
        self._ahead_ns += monotonic_ns() - began

    def _fit(self, windows: Sequence[EdgeWindow]) -> tuple[list[EdgeFit], int]:
        fits, took_ns = super()._fit(windows)
        self.fits_ns.append(took_ns + self._ahead_ns)
        self._ahead_ns = 0
        return fits, took_ns


class RecordedShell(NodeShell):
    """The production shell, except that fits are there already: those of recorded windows, moved to this one.

    One process has dozens of these nodes, one after the other, where a real node has a process of its own. So what a
    real node does before its window ends is done before it here, too: the lines are there when ROUND_END arrives.
    """

    recorded: Sequence[EdgeFit]
    _lines: Sequence[EdgeFit] = ()

    def _run_effect(self, effect: NodeEffect) -> NodeEvent | None:
        if isinstance(effect, ConfigureProber):
            self._lines = ()
        elif isinstance(effect, AdoptClock):  # in the window, and after all nodes here have begun it
            self._lines = self._recorded_lines()
        return super()._run_effect(effect)

    def due_s(self) -> float | None:
        """Only the machine's own deadlines: there is no open window to check or to fit, and no log."""
        due = self.machine.next_deadline_ns()
        return None if due is None else max(0.0, (due - self.prober.now()) / 1e9)

    def _recorded_lines(self) -> list[EdgeFit]:
        prober = self.prober
        assert isinstance(prober, NoProber)
        now, kept = prober.now(), self.recorded
        return [
            msgspec.structs.replace(kept[(prober.node + dst) % len(kept)], src=prober.node, dst=dst, t0_ns=now)
            for dst in prober.out
        ]

    def _fit(self, windows: Sequence[EdgeWindow]) -> tuple[list[EdgeFit], int]:
        lines, self._lines = self._lines or self._recorded_lines(), ()
        return list(lines), 0


def main(arguments: list[str]) -> None:
    address, name, what, order = arguments
    channel = Channel.connect(address, name)
    decoded = msgspec.json.decode(order, type=WorkerOrder)
    try:
        if what == "rank":
            rank(channel, decoded)
        elif what == "relays":
            asyncio.run(relays(channel, decoded))
        else:
            asyncio.run(Worker(channel, decoded).run())
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


class Worker:
    """Nodes of a master, and the channel to the benchmark."""

    def __init__(self, channel: Channel, order: WorkerOrder) -> None:
        self._channel, self._order = channel, order
        self._marks = Marks()
        self._until = 0
        self._connected = 0
        self._nodes: list[BenchNode] = []
        self._counted = (0, 0)
        self._stop = asyncio.Event()

    def _count(self) -> tuple[int, int]:
        """Messages and bytes on the connections of all nodes, so far."""
        return sum(node.control_messages for node in self._nodes), sum(node.control_bytes for node in self._nodes)

    async def run(self) -> None:
        recorded = record() if self._order.is_recorded else []
        nodes = self._nodes = [self._node(self._order.first + number, recorded) for number in range(self._order.nodes)]
        freeze_garbage_collector()
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive)
        await asyncio.gather(*(node.run(self._stop) for node in nodes))

    def _receive(self) -> None:
        try:
            self._channel.pull()
        except ChannelClosed:
            os._exit(0)
        while (order := self._channel.queued()) is not None:
            if "stuck" in order:
                for node in self._nodes:
                    node.is_stuck = True
                continue
            self._counted = self._count()
            self._until = max(self._marks.starts, default=0) + 1 + int(order["rounds"])

    def _node(self, number: int, recorded: Sequence[EdgeFit]) -> BenchNode:
        order, marks = self._order, self._marks
        prober = NoProber() if order.is_recorded else StampedProber(0, HOST)
        prober.rotates_ns = marks.rotates_ns
        is_stepped = order.steps and number % STEPPED == 1

        def received(message: FromRoundMaster) -> None:
            match message:
                case RoundEnd(round, sent_ns):
                    marks.end(round.sequence, sent_ns)
                case RoundStart(round, sent_ns=sent_ns):
                    marks.start(round.sequence, sent_ns, prober.closed_ns)
                    if is_stepped:
                        prober.pretend_step(STEP_NS if round.sequence % 2 else -STEP_NS)
                    self._report_when_done()

        def connected(_: str, __: NodeId) -> None:
            self._connected += 1
            if self._connected == order.nodes:
                self._channel.send({"connected": order.nodes})

        # Behind a relay it does not know the master: a slow start must not leave it with a connection of its own.
        master = order.relays[number % len(order.relays)] if order.relays else order.master
        node = BenchNode(
            [master], b"", name=f"bench-{number}", host="bench", addresses=[HOST], port=prober.port,
            on_connected=connected, on_message=received,
        )  # fmt: skip
        node.marks = marks
        node.shell = self._shell(node, prober, recorded)
        return node

    def _shell(self, node: JoinedNode, prober: ProbeSocket, recorded: Sequence[EdgeFit]) -> NodeShell:
        if self._order.is_recorded:
            shell = RecordedShell(RoundNode(), prober, node.send, _nothing)
            shell.recorded = recorded
            return shell
        real = RealShell(RoundNode(), prober, node.send, _nothing, open_log=self._log)
        real.fits_ns = self._marks.fits_ns
        return real

    def _log(self, node: NodeId) -> ProbeLog | None:
        return log_of(self._order, node)

    def _report_when_done(self) -> None:
        """Once all nodes here have begun the last round that was requested, send the marks; or some rounds later, if a
        node was not in that one."""
        last = self._marks.starts.get(self._until)
        is_done = last is not None and last.count == self._order.nodes
        if self._until and (is_done or max(self._marks.starts) >= self._until + EXTRA_ROUNDS):
            self._until = 0
            now, then = self._count(), self._counted
            self._marks.messages, self._marks.bytes = now[0] - then[0], now[1] - then[1]
            self._channel.send(as_message(self._marks))


async def relays(channel: Channel, order: WorkerOrder) -> None:
    """Several relays in one process. To every message they respond with what they have sent and received so far."""
    connected = 0

    def accepted(_: str) -> None:
        nonlocal connected
        connected += 1
        if connected == len(servers):
            channel.send({"connected": connected})

    servers = [
        RelayServer(
            RelayRequest(name=f"relay-{address}", region=address, listen=[address], masters=[order.master]),
            on_connected=accepted,
        )
        for address in order.relays
    ]

    def count() -> None:
        try:
            channel.pull()
        except ChannelClosed:
            os._exit(0)
        while channel.queued() is not None:
            messages = sum(server.control_messages for server in servers)
            size = sum(server.control_bytes for server in servers)
            channel.send({"messages": messages, "bytes": size, "nodes": sum(each.machine.nodes for each in servers)})

    freeze_garbage_collector()
    asyncio.get_running_loop().add_reader(channel.fileno(), count)
    stop = asyncio.Event()
    await asyncio.gather(*(server.run(stop) for server in servers))


def _nothing(clock: NodeClock) -> None:
    pass


def log_of(order: WorkerOrder, node: NodeId) -> ProbeLog | None:
    if not order.export:
        return None
    return ProbeLog(ExportSettings(directory=Path(order.export), points=order.points), node=node)


def as_message(marks: Marks) -> Message:
    """The marks as a message."""
    message: Message = msgspec.json.decode(msgspec.json.encode(marks))
    return message


def record() -> list[EdgeFit]:
    """Fits of real windows: two probers in this process probe each other."""
    fits: list[EdgeFit] = []
    with ProbeSocket(1, HOST) as one, ProbeSocket(2, HOST) as two:
        first, second = (Neighbour(each.node, "", HOST, each.port) for each in (one, two))
        one.configure(KEY, [second], [second])
        two.configure(KEY, [first], [first])
        for _ in range(RECORDED):
            for each in (one, two):
                each.resume(200, 1_000)
            pause(RECORDED_S)
            fits += [fit(window) for each in (one, two) for window in each.rotate()]
    good = [each for each in fits if not each.refused]
    if not good:
        raise RuntimeError(f"no window could be recorded: {fits[0].refused}")
    return good


def rank(channel: Channel, order: WorkerOrder) -> None:
    """One rank of a Gloo group, with a real prober. Its window's end and the next one's beginning stand for the marks:
    there is no RoundEnd, and the start comes out of a broadcast."""
    from ringfold.probe.rounds.gloo import TorchCollectives

    number, marks = order.first, Marks()
    prober = StampedProber(number, HOST, order.probe_ports[number])
    prober.rotates_ns = marks.rotates_ns
    settings = RoundSettings(kind="gloo", window_ms=order.window_ms, adaptive=Adaptive(is_on=False))
    calculation = Calculation(settings, now_ns=monotonic_ns)
    group = TorchCollectives(number, order.size, HOST, order.port, interface="lo")
    facts = Neighbour(number, f"bench-{number}", HOST, prober.port)
    rounds = GlooRounds(group, settings, facts, prober, fit, draw, calculation, lambda _: KEY)
    channel.send({"connected": 1})
    log = ProbeLog(ExportSettings(directory=Path(order.export))) if number == 0 and order.export else None
    wanted = channel.receive()
    assert wanted is not None
    for _ in range(int(wanted["rounds"]) + 1):
        taken = rounds.round()
        at_ns = monotonic_ns()
        if taken.summary is None:
            raise RuntimeError("a round came to nothing")
        sequence = taken.summary.round.sequence
        marks.ends[sequence] = Mark(prober.closed_ns, prober.closed_ns, prober.closed_ns)
        marks.starts[sequence + 1] = Mark(at_ns, at_ns, at_ns, closed_ns=prober.closed_ns)
        if log is not None:
            log.round(taken.summary)
    channel.send(as_message(marks))
    channel.receive()


if __name__ == "__main__":
    main(sys.argv[1:])
