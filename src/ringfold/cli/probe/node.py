"""`ringfold probe --master ADDRESS`: be a node of a run that only probes."""

import asyncio
import logging
import os
from pathlib import Path

import typer

from ringfold import config
from ringfold.cli import logs
from ringfold.cli.probe.wish import Wish
from ringfold.config import Resolved
from ringfold.errors import ConfigError
from ringfold.probe.logs.files import ExportSettings, Log
from ringfold.probe.nodes.joined import JoinedNode
from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.events import FromRoundMaster
from ringfold.probe.rounds.node import RoundNode
from ringfold.runtime import network
from ringfold.runtime.process import freeze_garbage_collector, stop_signals
from ringfold.wire.probing import NodeClock, NodeId, RoundStart
from ringfold.wire.proof import run_token

PORT_TRIES = 512

_log = logging.getLogger(__name__)


def run_node(resolved: Resolved, wish: Wish) -> None:
    """Probe until SIGTERM or Ctrl-C."""
    logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    asyncio.run(_run(resolved, wish))


async def _run(resolved: Resolved, wish: Wish) -> None:
    masters = resolved.listed("master")
    host, port = config.split_address(masters[0])
    try:
        local = network.local_address_towards(network.literals(host, port)[0], port)
    except OSError as error:
        raise ConfigError(f"no route to the master at {masters[0]}: {error}") from None
    try:
        advertised = [network.literals(name, 0)[0] for name in resolved.listed("advertise")]
    except OSError as error:
        raise ConfigError(f"advertise: {error}") from None
    bind = local if not advertised else "::" if ":" in local else "0.0.0.0"
    prober = bound(bind, resolved.integer("data_port"), wish)
    name = resolved.text("name") or f"{network.host_name()}:{os.getpid()}"
    stop = asyncio.Event()

    def connected(where: str, node: NodeId) -> None:
        what = "listening at" if wish.listen_only else "probing from"
        typer.echo(f"node {node} ({name}) of the master at {where}, {what} {bind}:{prober.port}")

    def heard(message: FromRoundMaster) -> None:
        if isinstance(message, RoundStart):
            _log.debug("round %s begins", message.round)

    def adopt(clock: NodeClock) -> None:
        _log.debug("the clock is %.1f ppm off, known within %d ns", clock.rate * 1e6, clock.high_ns)

    run = config.check_run_name(resolved.text("run"))
    token = run_token(resolved.token(), run)
    node = JoinedNode(
        masters,
        token,
        name=name,
        host=network.host_name(),
        addresses=advertised or (local,),
        port=prober.port,
        listen_only=wish.listen_only,
        run=run,
        on_connected=connected,
        on_heard=heard,
    )

    def open_log(node_id: NodeId) -> Log | None:
        directory = wish.export or resolved.value("probe_export")
        if not isinstance(directory, Path):
            return None
        settings = ExportSettings(directory=directory, points=wish.points)
        return Log(settings, node=node_id, name=name, host=network.host_name())

    node.shell = NodeShell(
        RoundNode(), prober, node.say, adopt, open_log=open_log, estimator=wish.estimator, token=token
    )
    freeze_garbage_collector()
    with stop_signals(lambda _: stop.set()):
        await node.run(stop)


def bound(bind: str, first_port: int, wish: Wish) -> ProbeSocket:
    """A prober at the first free UDP port."""
    reason: ConfigError | None = None
    for port in range(first_port, min(first_port + PORT_TRIES, 65_536)):
        try:
            return ProbeSocket(0, bind, port, offset_ns=wish.offset_ns, drift_ppb=wish.drift_ppb)
        except ConfigError as error:
            reason = error
    raise ConfigError(f"no free UDP port from {first_port} on: {reason}")
