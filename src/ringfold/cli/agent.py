"""`ringfold agent`: run the transport agent of this host, show its state, and set shares."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringfold.config import TELEMETRY_PORT
from ringfold.limits import MAX_PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfold.agent.client import AgentConsole
    from ringfold.agent.daemon import AgentServer, AgentSettings
    from ringfold.agent.tuning import AgentTuning
    from ringfold.config import Resolved
    from ringfold.wire.agent import AgentStatus, ListedFlow

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)

Directory = Annotated[Path | None, typer.Option("--dir", help="The agent's runtime directory.")]
Config = Annotated[Path | None, typer.Option(help="Settings file (TOML).")]


@app.callback()
def agent(
    context: typer.Context,
    directory: Directory = None,
    policy: Annotated[
        str | None, typer.Option(help="auto, static:SHARE (of the second of two paths) or static:SHARE,SHARE,...")
    ] = None,
    telemetry: Annotated[
        list[str] | None, typer.Option(help="UDP address to receive telemetry at. May be given several times.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Address or network whose telemetry is taken. May be given several times.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key that telemetry must be signed with.")] = None,
    report_to: Annotated[list[str] | None, typer.Option(help="UDP address to report flows and queues to.")] = None,
    forward_port: Annotated[
        int, typer.Option(help="UDP port of other hosts' agents, for telemetry about traffic from there; 0: none.")
    ] = TELEMETRY_PORT,
    feed: Annotated[
        list[str] | None, typer.Option(help="Another feed of telemetry, ADAPTER=WHERE. May be given several times.")
    ] = None,
    monitor: Annotated[list[str] | None, typer.Option(help="A NIC monitor: ebpf, or one of another package.")] = None,
    nics: Annotated[bool, typer.Option("--nics/--no-nics", help="Watch the queues of this host's interfaces.")] = True,
    shared: Annotated[
        bool | None, typer.Option("--shared/--private", help="For all users of this host, or only for this one.")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve metrics for Prometheus at 127.0.0.1:48145, or at --metrics-listen.")
    ] = False,
    metrics_listen: Annotated[
        list[str] | None, typer.Option(help="Address to serve metrics at. May be given several times.")
    ] = None,
    config: Config = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json", help="Log JSON lines.")] = None,
) -> None:
    """Run the transport agent of this host: it measures paths and advises every process how to split its flows.

    One agent serves a host. SIGTERM and Ctrl-C end it cleanly, with exit code 0; the processes then split their flows
    by their own measurements.
    """
    if context.invoked_subcommand is not None:
        context.obj = (directory, config)
        return
    from dataclasses import replace

    from ringfold import config as settings

    arguments: dict[str, object] = {"agent_dir": directory, "agent_policy": policy}
    arguments |= {"agent_telemetry": telemetry or None}
    arguments |= {"agent_allow": allow or None, "agent_key_file": key_file, "agent_report_to": report_to or None}
    arguments |= {"agent_feeds": feed or None, "agent_metrics": metrics_listen or None}
    arguments |= {"config": config, "log_level": log_level, "log_json": log_json}
    resolved = settings.load(arguments)
    _start_logging(resolved)
    if not 0 <= forward_port < 1 << 16:
        raise typer.BadParameter(f"--forward-port is a port, or 0, not {forward_port}")
    chosen = replace(_settings(resolved), is_shared=shared, watch_nics=nics, monitors=tuple(monitor or ()))
    chosen = replace(chosen, forward_port=forward_port)
    _run(chosen, resolved, wants_metrics=metrics)


def _start_logging(resolved: "Resolved") -> None:
    import logging

    from ringfold.cli import logs

    logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    for warning in resolved.warnings:
        logging.getLogger(__name__).warning(warning)


def _run(settings: "AgentSettings", resolved: "Resolved", *, wants_metrics: bool) -> None:
    import asyncio

    asyncio.run(_serve(settings, resolved, wants_metrics=wants_metrics))


def _settings(resolved: "Resolved") -> "AgentSettings":
    from ringfold.agent.daemon import AgentSettings
    from ringfold.agent.registry import Quota
    from ringfold.agent.telemetry import ReportSettings
    from ringfold.runtime.process import raise_open_file_limit
    from ringfold.wire.telemetry import GateSettings

    flows, tuning = resolved.integer("agent_user_flows"), _tuning(resolved)
    # Every connection is an open file: one user must not use them all.
    clients = min(Quota().clients, raise_open_file_limit() // 4)
    keys = _keys(resolved)
    allow = resolved.listed("agent_allow") or (("any",) if keys else GateSettings().allow)
    return AgentSettings(
        directory=_directories(resolved)[0],
        policy=resolved.text("agent_policy"),
        tuning=tuning,
        quota=Quota(clients=clients, flows=flows, slots=min(flows, Quota().slots)),
        telemetry=resolved.listed("agent_telemetry"),
        is_telemetry_optional=not resolved.is_set("agent_telemetry"),
        gate=GateSettings(keys=keys, allow=allow),
        feeds=resolved.listed("agent_feeds"),
        report_to=resolved.listed("agent_report_to"),
        reports=ReportSettings(
            interval_ms=tuning.interval_ms,
            key_id=min(keys, default=None),
            key=keys[min(keys)] if keys else None,
        ),
    )


def _tuning(resolved: "Resolved") -> "AgentTuning":
    from ringfold.agent.tuning import AgentTuning

    return AgentTuning(
        interval_ms=resolved.number("agent_interval_ms"),
        backpressure=resolved.integer("agent_backpressure"),
        release=resolved.integer("agent_release"),
        gain=resolved.number("agent_gain"),
        stale_ms=resolved.integer("agent_stale_ms"),
        smoothing_ms=resolved.number("agent_smoothing_ms"),
        rate_smoothing_ms=resolved.number("agent_rate_smoothing_ms"),
        requests_per_hint=resolved.integer("agent_requests_per_hint"),
    )


def _keys(resolved: "Resolved") -> dict[int, bytes]:
    """The telemetry keys by their ids, if there are any."""
    from ringfold.config import read_keys

    path = resolved.value("agent_key_file")
    assert path is None or isinstance(path, Path)
    return {} if path is None else read_keys(path)


async def _serve(settings: "AgentSettings", resolved: "Resolved", *, wants_metrics: bool) -> None:
    import logging
    from contextlib import ExitStack

    from ringfold.agent.daemon import AgentServer
    from ringfold.runtime.process import freeze_garbage_collector, request_prompt_scheduling, stop_signals

    request_prompt_scheduling()
    server = AgentServer(settings)

    def stop(signal: str) -> None:
        logging.getLogger(__name__).info("%s: the agent stops", signal)
        server.stop()

    with ExitStack() as stack:
        if wants_metrics or resolved.listed("agent_metrics"):
            stack.callback(_serve_metrics(resolved, server))
        freeze_garbage_collector()
        stack.enter_context(stop_signals(stop))
        await server.serve(lambda: typer.echo(f"serving at {server.directory}"))


def _serve_metrics(resolved: "Resolved", server: "AgentServer") -> "Callable[[], None]":
    """Returns what ends it."""
    from ringfold.cli.serving import serve_pages
    from ringfold.config import AGENT_METRICS_PORT
    from ringfold.observe.agent_metrics import agent_pages

    listen = resolved.listed("agent_metrics") or (f"127.0.0.1:{AGENT_METRICS_PORT}",)
    return serve_pages(agent_pages(server.status), listen, resolved, AGENT_METRICS_PORT).stop


def _directories(resolved: "Resolved") -> tuple[Path, ...]:
    from ringfold.config import agent_directories

    chosen = resolved.value("agent_dir")
    assert chosen is None or isinstance(chosen, Path)
    return agent_directories(chosen)


def _find_directories(context: typer.Context, directory: Path | None, config: Path | None) -> tuple[Path, ...]:
    """The directories of the agent. --dir and --config mean the same before and after the name of the command."""
    from ringfold import config as settings

    before = context.obj or (None, None)
    directory, config = directory or before[0], config or before[1]
    return _directories(settings.load({"agent_dir": directory, "config": config}))


@app.command("status")
def status(
    context: typer.Context,
    directory: Directory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    flows: Annotated[bool, typer.Option("--flows/--no-flows", help="List the flows.")] = True,
    config: Config = None,
) -> None:
    """Show the agent of this host: its flows, their shares with the reason, and what it refused."""
    from ringfold.agent.client import AgentConsole
    from ringfold.cli.output import print_json

    with AgentConsole(_find_directories(context, directory, config)) as console:
        found = console.status()
        listed = console.flows() if flows else []
    if as_json:
        import msgspec

        print_json({**msgspec.to_builtins(found), "listed": listed})
    else:
        _render(found, listed)


def _render(found: "AgentStatus", listed: "list[ListedFlow]") -> None:
    from dataclasses import asdict

    from ringfold.agent.tuning import AgentTuning
    from ringfold.cli.output import console, duration, table

    console.print(
        f"agent {found.pid}, up {duration(found.uptime_ms)}, life {found.generation} of its table, "
        f"policy {found.policy}: {found.flows} flows of {found.clients} clients "
        f"in {found.slots_used} of {found.slots} slots; telemetry at {', '.join(found.telemetry) or 'no address'}"
    )
    columns = ["flow", "from", "to", "slot", "client", "shares", "why"]
    if listed:
        console.print(table("flows", columns, (_flow_row(each) for each in listed)))
    changed = {name: value for name, value in found.tuning.items() if value != asdict(AgentTuning())[name]}
    if changed:
        console.print("set: " + ", ".join(f"agent_{name} {value:g}" for name, value in changed.items()))
    for name, why in found.monitors.items():
        if why:
            console.print(f"the NIC monitor {name} is not used: {why}")
    for title, counts in (("counts", found.counts), ("refused", found.refused)):
        if counts:
            console.print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))


def _flow_row(listed: "ListedFlow") -> list[str]:
    flow = listed.flow
    shares = " / ".join(
        f"{100 * share:.1f} %" + (" (held)" if held else "")
        for share, held in zip(listed.shares, listed.backpressure, strict=True)
    )
    return [
        str(listed.number),
        f"{flow.source} {flow.source_host}".strip(),
        f"{flow.destination} {flow.destination_host}".strip(),
        f"{listed.slot}:{listed.generation}",
        f"{listed.client or 'process'} {listed.pid}",
        shares or "local",
        "; ".join(part for part in (listed.why, _rtts(listed)) if part),
    ]


def _rtts(listed: "ListedFlow") -> str:
    """The RTT of each path that the sender measured; empty if it measured none."""
    if not any(listed.srtt_us):
        return ""
    smoothed, lowest = (
        " : ".join(f"{us / 1e3:.1f}" if us else "?" for us in rtts) for rtts in (listed.srtt_us, listed.min_rtt_us)
    )
    return f"RTT {smoothed} ms, minimum {lowest}"


@app.command("set")
def set_shares(
    context: typer.Context,
    flow: Annotated[str, typer.Argument(help="SOURCE,DESTINATION (addresses), or a flow's number in `agent status`.")],
    share: Annotated[
        str, typer.Option(help="The share of the second of two paths (0 to 1), one for each path (0.2,0.8), or auto.")
    ],
    directory: Directory = None,
    config: Config = None,
) -> None:
    """Fix the shares of the flows between two addresses, or let the policy decide again (--share auto)."""
    from ringfold.agent.client import AgentConsole
    from ringfold.agent.steering import parse_policy

    shares = parse_policy(share if share == "auto" else f"static:{share}") or ()
    with AgentConsole(_find_directories(context, directory, config)) as console:
        source, destination = _ends(flow, console)
        slots = console.set_shares(source, destination, shares)
    how = ", ".join(f"{100 * each:g} %" for each in shares) if shares else "decided by the policy"
    typer.echo(f"{source} -> {destination}: {how} ({slots} slot{'' if slots == 1 else 's'})")


def _ends(flow: str, console: "AgentConsole") -> tuple[str, str]:
    """The source and destination of the named flow."""
    from ringfold.errors import UsageError

    if flow.isdecimal():
        found = next((each.flow for each in console.flows() if each.number == int(flow)), None)
        if found is None:
            raise UsageError(f"there is no flow {flow}; `ringfold agent status` lists them")
        return found.source, found.destination
    source, comma, destination = flow.partition(",")
    if not comma:
        raise UsageError(f"{flow!r} is not a flow; write SOURCE,DESTINATION or a number of `ringfold agent status`")
    return source.strip(), destination.strip()


@app.command("inject")
def inject(
    source: Annotated[str, typer.Argument(help="Source of the path: an address, a network, or any.")],
    destination: Annotated[str, typer.Argument(help="Destination of the path: an address, a network, or any.")],
    path: Annotated[int, typer.Option(help="The number of the path, from 0.", min=0, max=MAX_PATHS - 1)],
    congestion: Annotated[int, typer.Option(help="0 is clear, 240 and above is backpressure.", min=0, max=255)],
    depth: Annotated[int, typer.Option(help="Bytes in the queue.", min=0)] = 0,
    to: Annotated[str | None, typer.Option(help="The address at which the agent receives telemetry.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key to sign with.")] = None,
    count: Annotated[int, typer.Option(help="How many packets.", min=1)] = 1,
    every_ms: Annotated[int, typer.Option(help="The pause between two packets.", min=1)] = 100,
    config: Config = None,
) -> None:
    """Send telemetry to an agent, as a switch would: for experiments, and to check that it arrives.

    The agent forgets a report that is not repeated within a second: --count and --every-ms repeat it.
    """
    from ringfold import config as settings
    from ringfold.agent.host_monitor import random_sender
    from ringfold.config import TELEMETRY_PORT, split_address
    from ringfold.errors import UsageError
    from ringfold.runtime import threads
    from ringfold.runtime.clock import unix_ns
    from ringfold.runtime.datagrams import DatagramSender
    from ringfold.wire.telemetry import Congestion, Packet, encode, prefix_number

    resolved = settings.load({"agent_telemetry": [to] if to else None, "agent_key_file": key_file, "config": config})
    keys = _keys(resolved)
    key_id = min(keys) if keys else None
    try:
        ends = [prefix_number(source), prefix_number(destination)]
        sender = DatagramSender(*split_address(resolved.listed("agent_telemetry")[0], TELEMETRY_PORT))
    except (ValueError, IndexError, OSError) as error:
        raise UsageError(f"cannot send this telemetry: {error}") from None
    body = Congestion(ends[0][0], ends[1][0], path, congestion, depth, ends[0][1], ends[1][1])
    sender_number = random_sender()
    with sender:
        for number in range(count):
            if number:
                threads.Event().wait(every_ms / 1_000)
            now_ns = unix_ns()
            packet = Packet(body, now_ns, now_ns, sender_number, key_id)
            sender.send(encode(packet, None if key_id is None else keys[key_id]))
        if sender.lost or sender.was_refused:
            raise UsageError("no agent receives telemetry there")
