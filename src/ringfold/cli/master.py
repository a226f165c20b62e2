"""`ringfold master`: run the master until SIGTERM or Ctrl-C."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.config import Resolved
    from ringfold.master.server import MasterServer
    from ringfold.observe.dashboard.child import DashboardChild
    from ringfold.observe.master_metrics import MasterCounts
    from ringfold.runtime.http_server import PageServer


def master(
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Address to listen on: host:port, [IPv6]:port or a host name. May be given several times."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Listen beyond loopback without a token.")] = None,
    evidence: Annotated[
        str | None, typer.Option(help="How peers learn that an op is done: auto, ring or master.")
    ] = None,
    lanes: Annotated[int | None, typer.Option(help="Connections per path.")] = None,
    journal: Annotated[Path | None, typer.Option(help="File of the journal, for a restart of the master.")] = None,
    no_journal: Annotated[bool | None, typer.Option("--no-journal", help="Write no journal.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Store for the journal; masters on one store stand by for each other.")
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="Directory in which the events of the runs are recorded (events_dir).")
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve metrics for Prometheus at 127.0.0.1:48146, or at --metrics-listen.")
    ] = False,
    metrics_listen: Annotated[
        list[str] | None, typer.Option(help="Address to serve metrics at. May be given several times.")
    ] = None,
    dashboard: Annotated[
        bool | None, typer.Option("--dashboard", help="Start a web page that shows the runs, in a process of its own.")
    ] = None,
    dashboard_listen: Annotated[str | None, typer.Option(help="Address of the dashboard, host:port.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json", help="Log JSON lines.")] = None,
    log_fits: Annotated[
        bool | None, typer.Option("--log-fits", help="Log alpha and beta of every edge in every probing round.")
    ] = None,
) -> None:
    """Run the master: the process that peers join and that manages their epochs.

    It listens on loopback by default; other addresses need --token-file (a token of 16 bytes or more), or --insecure.
    SIGTERM and Ctrl-C end it cleanly, with exit code 0.

    It writes a journal: a master that was killed can be restarted, and its run goes on. A master that is stopped ends
    its run. With --store several masters share one journal: one leads, and another takes over when it fails or is
    stopped.
    """
    arguments: dict[str, object] = {"listen": listen or None, "token_file": token_file, "insecure": insecure}
    arguments |= {"evidence": evidence, "lanes": lanes, "config": config, "log_level": log_level, "log_json": log_json}
    arguments |= {"dashboard": dashboard, "dashboard_listen": dashboard_listen}
    arguments |= {"journal": journal, "no_journal": no_journal, "store": store, "probe_log_fits": log_fits}
    arguments |= {"events_dir": events, "metrics_listen": metrics_listen or None}
    _run(arguments, wants_metrics=metrics)


def _run(arguments: dict[str, object], *, wants_metrics: bool) -> None:
    """Serve with these arguments, until the end."""
    import asyncio
    import logging

    from ringfold import config as settings
    from ringfold.cli import logs
    from ringfold.errors import ConfigError

    resolved = settings.load(arguments)
    logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    for warning in resolved.warnings:
        logging.getLogger(__name__).warning(warning)
    try:
        asyncio.run(_serve(resolved, _metrics_addresses(resolved, is_wanted=wants_metrics)))
    except (OSError, UnicodeError) as error:
        where, why = ", ".join(resolved.listed("listen")), getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {where}: {why}") from error


def _metrics_addresses(resolved: "Resolved", *, is_wanted: bool) -> tuple[str, ...]:
    """Where metrics are served; empty: nowhere."""
    from ringfold.config import METRICS_PORT

    return resolved.listed("metrics_listen") or ((f"127.0.0.1:{METRICS_PORT}",) if is_wanted else ())


async def _serve(resolved: "Resolved", metrics: tuple[str, ...]) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    import logging
    from contextlib import ExitStack

    from ringfold.cli.dashboard import check_installed
    from ringfold.master.server import MasterServer
    from ringfold.master.settings import master_settings
    from ringfold.runtime.process import freeze_garbage_collector, stop_signals

    log = logging.getLogger(__name__)
    counts = _counts() if metrics else None
    if resolved.switch("dashboard"):
        check_installed()
    dashboards: list[DashboardChild] = []
    server = MasterServer(
        master_settings(resolved),
        list(resolved.listed("listen")),
        resolved.token(),
        resolved.switch("insecure"),
        journal=journal_address(resolved),
        lease_s=resolved.number("lease_s"),
        alone=not resolved.text("store"),
        on_run_notice=counts.observe if counts is not None else None,
    )

    def stop(signal: str) -> None:
        log.info("%s: the master stops", signal)
        server.stop()

    def ready() -> None:
        # On standard output, separate from the log: a script that chose port 0 reads the address here.
        typer.echo(f"listening on {', '.join(server.addresses)}")
        if resolved.switch("dashboard"):
            dashboards.append(_dashboard(resolved, server.addresses))
            dashboards[-1].start()

    with ExitStack() as stack:
        if counts is not None:
            serving = _serve_metrics(resolved, metrics, server, counts)
            stack.callback(serving.stop)
        freeze_garbage_collector()
        stack.enter_context(stop_signals(stop))
        try:
            await server.serve(ready)
        finally:
            for each in dashboards:
                await each.stop()


def _dashboard(resolved: "Resolved", addresses: list[str]) -> "DashboardChild":
    """A dashboard that looks at this master, and at the others of the settings."""
    from ringfold.config import split_address
    from ringfold.observe.dashboard.child import DashboardChild

    near = []
    for address in addresses[:1]:
        host, port = split_address(address)
        near.append(f"127.0.0.1:{port}" if host == "0.0.0.0" else f"[::1]:{port}" if host == "::" else address)
    others = [other for other in resolved.listed("master") if resolved.is_set("master") and other not in near]
    arguments = [",".join([*near, *others])]
    if resolved.text("dashboard_listen"):
        arguments += ["--listen", resolved.text("dashboard_listen")]
    if (token_file := resolved.value("token_file")) is not None:
        arguments += ["--token-file", str(token_file)]
    if resolved.file is not None:
        arguments += ["--config", str(resolved.file)]
    return DashboardChild(arguments, typer.echo)


def _counts() -> "MasterCounts":
    from ringfold.observe.master_metrics import MasterCounts

    return MasterCounts()


def _serve_metrics(
    resolved: "Resolved", listen: tuple[str, ...], server: "MasterServer", counts: "MasterCounts"
) -> "PageServer":
    from ringfold.cli.serving import serve_pages
    from ringfold.config import METRICS_PORT
    from ringfold.observe.master_metrics import master_pages

    return serve_pages(master_pages(server.facts, counts), listen, resolved, METRICS_PORT)


def journal_address(resolved: "Resolved") -> str | None:
    """The address of the store of the journal; None for a master without a journal."""
    from contextlib import suppress

    from ringfold.config import split_address, state_directory
    from ringfold.errors import ConfigError

    store, file = resolved.text("store"), resolved.value("journal")
    if resolved.switch("no_journal"):
        if store or file:
            raise ConfigError("no_journal and a journal exclude each other: leave one out")
        return None
    if store:
        if file:
            raise ConfigError("the journal is in a file or in a store: leave out journal or store")
        if store.startswith("sqlite:"):
            with suppress(OSError):  # opening the store raises a better error
                _make_private(Path(store.partition("?")[0].removeprefix("sqlite:").removeprefix("//")))
        return store
    host, port = split_address(resolved.listed("listen")[0])
    if file is None and port == 0:
        return None
    path = file if isinstance(file, Path) else state_directory() / _journal_name(host, port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(path)
    except OSError as error:
        why = f"no journal can be written in {path.parent}: {error.strerror}"
        raise ConfigError(f"{why}; use --journal, or --no-journal") from error
    return f"sqlite://{path.absolute()}"


def _make_private(path: Path) -> None:
    """Create the file, unless it exists, for its owner only: a reader could impersonate any member."""
    path.touch(mode=0o600)


def _journal_name(host: str, port: int) -> str:
    """One file per machine (home directories may be shared), address and port: no two masters share it by accident."""
    from ringfold.runtime.network import host_name

    parts = "-".join((host_name(), host, str(port)))
    return f"master-{''.join(letter if letter.isalnum() or letter in '.-' else '_' for letter in parts)}.db"
