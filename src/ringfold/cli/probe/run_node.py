"""`ringfold probe --nodes FILE` and `--master ADDRESS`: run a node until it is stopped.

`probe_alone` probes without a run: each node fits its own windows and logs them. With `--rounds gloo`, `probe_together`
gathers the reports of all nodes after each window, over torch.distributed. Rank 0 is the root of the nodes file, by
default the first node by name. It calculates, and its address (TCP, at the number of its UDP port) is the rendezvous;
every node gets the result. With `--rounds master`, `probe_hosted` runs a master at the root.
`run_node` is a node of a run that only probes.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import typer
from msgspec import structs

from ringfold.cli import logs as cli_logs
from ringfold.cli.output import console, error_console, print_json, table
from ringfold.cli.probe.control import show_summary
from ringfold.config import Resolved, load
from ringfold.errors import ConfigError, DeadlineExceeded, UsageError
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings
from ringfold.probe.fit import fit
from ringfold.probe.graph.draw import draw
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.probe.logs.lines import WindowFields, round_line, window_lines
from ringfold.probe.nodes.alone import StandaloneNode
from ringfold.probe.nodes.callbacks import ProbeWindow
from ringfold.probe.nodes.joined import NodeRequest, make_node
from ringfold.probe.nodes.nodes_file import Nodes, derive_key, read_nodes
from ringfold.probe.rounds.calculation import Calculation
from ringfold.probe.rounds.events import FromRoundMaster
from ringfold.probe.rounds.gloo import GlooRoundResult, GlooRounds, TorchCollectives
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.runtime import network
from ringfold.runtime.process import freeze_garbage_collector, signals_end_at_once, stop_signals, term_is_exit
from ringfold.wire.notices import Notice, RoundDone
from ringfold.wire.probing import EdgeFit, Neighbour, NodeClock, NodeId, RoundId, RoundStart

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """All options of a node, in a run or without one; each mode uses its own."""

    me: str | None = None
    rounds: Literal["local", "gloo", "master"] = "local"
    root: str | None = None
    interface: str = ""
    timeout_s: float = 30.0
    windows: int | None = None
    window_ms: int = 4_000
    listen_only: bool = False
    estimator: str = "auto"
    export: Path | None = None
    points: bool = False
    as_json: bool = False
    offset_ns: int = 0
    drift_ppb: int = 0


def probe_alone(nodes: Path, options: NodeOptions) -> None:
    """Probe one window after another: `windows` of them, or until Ctrl-C or SIGTERM."""
    known = _with_root(read_nodes(nodes), options)
    if options.rounds == "master":
        probe_hosted(known, options)
        return
    prober = StandaloneNode(
        known,
        options.me,
        window_ms=options.window_ms,
        estimator=options.estimator,
        offset_ns=options.offset_ns,
        drift_ppb=options.drift_ppb,
    )
    if options.rounds == "gloo":
        with prober:
            rounds = RoundSettings(
                window_ms=options.window_ms,
                neighbours=prober.nodes.neighbours,
                seed=prober.nodes.seed,
                graph=prober.nodes.graph,
                gloo_interface=options.interface,
                gloo_timeout_ms=round(options.timeout_s * 1_000),
            )
            probe_together(prober, rounds, options)
        return
    with term_is_exit(), prober:
        log = None
        if options.export is not None:
            settings = ExportSettings(directory=options.export, points=options.points)
            log = ProbeLog(settings, node=prober.node, name=prober.me.name, host=network.host_name())
            log.begin(prober.socket.now())
        try:
            _announce(prober, as_json=options.as_json)
            for window in prober.windows():
                if log is not None:
                    log.write(
                        window_lines(_window_fields(prober, window), window.edges, window.fits, points=options.points)
                    )
                _show(prober, window, as_json=options.as_json)
                if window.number == options.windows:
                    return
        except (KeyboardInterrupt, SystemExit):
            return  # both are the normal end
        finally:
            if log is not None:
                log.close()


def _with_root(nodes: Nodes, options: NodeOptions) -> Nodes:
    """The nodes with the root that the command names, if it names one."""
    if options.root is None:
        return nodes
    if options.rounds == "local":
        raise UsageError("--root goes with --rounds gloo or --rounds master: else each node calculates for itself")
    return replace(nodes, root=nodes.named(options.root).node)


def probe_hosted(nodes: Nodes, options: NodeOptions) -> None:
    """Be a node of the master that the root of the nodes hosts; at the root, host it, and show its rounds.

    The master listens at the root's address, TCP, at the number of its UDP port. The nodes need not start in any order.
    """
    me, root = nodes.named(options.me or network.host_name()), nodes.by_id[nodes.root]
    host = f"[{root.address}]" if ":" in root.address else root.address
    resolved = load({"master": [f"{host}:{root.port}"]})
    cli_logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    if me.node != nodes.root:
        asyncio.run(_run_hosted_node(resolved, nodes, me, options))
        return
    rounds = RoundSettings(window_ms=options.window_ms, neighbours=nodes.neighbours, seed=nodes.seed, graph=nodes.graph)
    settings = MasterSettings(rounds=rounds, export=options.export)
    try:
        master = MasterThread(settings, resolved.listed("master"), nodes.token, nodes.insecure, _shown_rounds(options))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the master cannot listen on {resolved.listed('master')[0]}: {error}") from None
    with master:
        asyncio.run(_run_hosted_node(resolved, nodes, me, options))


def _shown_rounds(options: NodeOptions) -> Callable[[Notice], None]:
    """Show the rounds of a master in this process."""

    def on_notice(notice: Notice) -> None:
        if isinstance(notice, RoundDone):
            print_json(notice.summary) if options.as_json else show_summary(notice.summary)

    return on_notice


async def _run_hosted_node(resolved: Resolved, nodes: Nodes, me: Neighbour, options: NodeOptions) -> None:
    stop, seen = asyncio.Event(), 0

    def on_window(window: ProbeWindow) -> None:
        nonlocal seen
        seen += 1
        if seen == options.windows:
            stop.set()

    has_windows = any(src == me.node for src, _ in nodes.edges())
    rounds = None if has_windows or options.windows is None else _WindowsOfOthers(options.windows, stop.set)
    request = NodeRequest(
        name=me.name,
        token=nodes.token,
        address=me.address,
        port=me.port,
        listen_only=me.node in nodes.listeners,
        estimator=options.estimator,
        export=options.export,
        points=options.points,
        offset_ns=options.offset_ns,
        drift_ppb=options.drift_ppb,
    )
    on_message = rounds.on_message if rounds else None
    node = make_node(resolved, request, lambda clock: None, on_window=on_window, on_message=on_message)
    with stop_signals(lambda _: stop.set()):
        await node.run(stop)


class _WindowsOfOthers:
    """Counts windows at a node that has none of its own, in its event loop: `done` is called after `count`.

    A window is over when the next round starts. If none does in time, the other nodes go on alone, and so does this.
    """

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left, self._done = count, done
        self._start: RoundStart | None = None
        self._timer: asyncio.TimerHandle | None = None

    def on_message(self, message: FromRoundMaster) -> None:
        if not isinstance(message, RoundStart) or (self._start is not None and message.round <= self._start.round):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._count()
        self._start = message
        self._wait(max(message.deadline_ms, message.cadence.window_ms))

    def _wait(self, ms: int) -> None:
        self._timer = asyncio.get_running_loop().call_later(ms / 1_000, self._expire)

    def _expire(self) -> None:
        assert self._start is not None
        self._count()
        self._wait(self._start.cadence.window_ms)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._done()


def _announce(prober: StandaloneNode, *, as_json: bool) -> None:
    if as_json:
        return
    names = ", ".join(f"{each.name} ({each.address}:{each.port})" for each in prober.out)
    what = f"probes {names}" if prober.out else "only listens"
    console.print(
        f"node {prober.node} ({prober.me.name}) at {prober.me.address}:{prober.socket.port} {what}",
        soft_wrap=True,
    )


def _window_fields(prober: StandaloneNode, window: ProbeWindow) -> WindowFields:
    return WindowFields(
        node=prober.node,
        window=window.number,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        utc_ns=window.utc_ns,
        round_id=RoundId(0, window.number),
    )


def _show(prober: StandaloneNode, window: ProbeWindow, *, as_json: bool) -> None:
    if as_json:
        print_json({"window": window.number, "begin_ns": window.begin_ns, "end_ns": window.end_ns, "fits": window.fits})
        return
    if prober.is_listener:
        return
    names = {each.node: each.name for each in prober.out}
    rows = (
        (
            names[fit.dst],
            *(f"{ns / 1e3:.4g}" if ns else "-" for ns in (fit.delay_min_ns, fit.delay_p50_ns, fit.delay_p99_ns)),
            f"{fit.lost} of {fit.sent}",
            *_line_cells(fit),
        )
        for fit in window.fits
    )
    columns = ["to", "min", "p50", "p99", "lost", "alpha (ppm)", "beta (ns)", "+-", "by"]
    numbers = {*columns} - {"to", "lost"}
    console.print(table(f"window {window.number} (one-way delay in us)", columns, rows, whole=numbers))
    for each in window.fits:
        if each.refused:
            console.print(f"{names[each.dst]}: refused: {each.refused}", markup=False)


def _line_cells(fit: EdgeFit) -> tuple[str, str, str, str]:
    if fit.refused:
        return "refused", "-", "-", "-"
    return f"{fit.alpha * 1e6:+z.4f}", f"{fit.beta_ns:+,}", f"{fit.sigma_ns:.1f}", fit.estimator


def probe_together(prober: StandaloneNode, settings: RoundSettings, options: NodeOptions) -> None:
    """Run one round after another: `windows` of them, or until Ctrl-C or SIGTERM."""
    ranks = prober.nodes.ranks()
    first = prober.by_id[ranks[0]]
    logs = _Logs(prober, options)
    where = f"{len(ranks)} nodes meet at {first.name} ({first.address}, TCP port {first.port})"
    error_console.print(
        f"{where}; waiting up to {options.timeout_s:g} s for all", style="dim", markup=False, soft_wrap=True
    )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # errors are printed once, without C++ stacks
    with signals_end_at_once():
        group = TorchCollectives(
            ranks.index(prober.node),
            len(ranks),
            first.address,
            first.port,
            interface=settings.gloo_interface,
            timeout_ms=settings.gloo_timeout_ms,
            window_ms=settings.longest_window_ms,
        )
    try:
        rounds = GlooRounds(
            group,
            settings,
            prober.by_id[prober.node],
            prober.socket,
            lambda window: fit(window, options.estimator),
            draw,
            Calculation(settings),
            lambda number: derive_key(prober.nodes.key, b"graph %d" % number),
            listen_only=prober.node in prober.nodes.listeners,
        )
        with term_is_exit():
            _run_rounds(rounds, logs, prober.names, options)
    except (KeyboardInterrupt, SystemExit):
        return  # both are the normal end
    finally:
        group.close()
        logs.close()


def _run_rounds(rounds: GlooRounds, logs: "_Logs", names: Mapping[NodeId, str], options: NodeOptions) -> None:
    done = 0
    while options.windows is None or done < options.windows:
        try:
            result = rounds.round()
        except DeadlineExceeded:
            logs.write(rounds.exported)
            raise
        done += 1
        logs.write(result)
        for note in result.notes:
            console.print(note)
        if result.summary is None:
            continue
        summary = structs.replace(result.summary, names={str(node): name for node, name in names.items()})
        if options.as_json:
            print_json(summary)
        else:
            show_summary(summary)


class _Logs:
    """A node's log, and at rank 0 the log of all rounds; none without `--export`."""

    def __init__(self, prober: StandaloneNode, options: NodeOptions) -> None:
        self._prober = prober
        self._own = self._all = None
        if options.export is None:
            return
        settings = ExportSettings(directory=Path(options.export), points=options.points)
        self._own = ProbeLog(settings, node=prober.node, name=prober.me.name, host=network.host_name())
        if prober.node == prober.nodes.root:
            self._all = ProbeLog(settings, host=network.host_name())

    def write(self, result: GlooRoundResult) -> None:
        if self._own is None:
            return
        for export in result.exports:
            fields = WindowFields(
                node=self._prober.node,
                window=export.window,
                begin_ns=export.begin_ns,
                end_ns=export.end_ns,
                utc_ns=self._prober.socket.utc(),
                round_id=export.round,
                label=export.label,
            )
            lines = window_lines(fields, result.windows, list(export.edges), points=self._own.points)
            self._own.write(lines)
        if self._all is not None and result.summary is not None:
            self._all.write([round_line(result.summary, self._prober.names)])

    def close(self) -> None:
        for log in (self._own, self._all):
            if log is not None:
                log.close()


def run_node(resolved: Resolved, options: NodeOptions) -> None:
    """Probe until SIGTERM or Ctrl-C."""
    cli_logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    asyncio.run(_run_until_stopped(resolved, options))


async def _run_until_stopped(resolved: Resolved, options: NodeOptions) -> None:
    stop = asyncio.Event()

    def connected(where: str, node_id: NodeId) -> None:
        what = "listening at" if options.listen_only else "probing from"
        typer.echo(
            f"node {node_id} ({node.name}) of the master at {where}, {what} {node.bind}:{node.shell.prober.port}"
        )

    def on_message(message: FromRoundMaster) -> None:
        if isinstance(message, RoundStart):
            _log.debug("round %s begins", message.round)

    def adopt(clock: NodeClock) -> None:
        _log.debug("the clock is %.1f ppm off, known within %d ns", clock.rate * 1e6, clock.high_ns)

    request = NodeRequest(
        listen_only=options.listen_only,
        estimator=options.estimator,
        export=options.export,
        points=options.points,
        offset_ns=options.offset_ns,
        drift_ppb=options.drift_ppb,
    )
    node = make_node(resolved, request, adopt, on_connected=connected, on_message=on_message)
    freeze_garbage_collector()
    with stop_signals(lambda _: stop.set()):
        await node.run(stop)
