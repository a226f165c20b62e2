"""`ringfold master`: run the master until SIGTERM or Ctrl-C."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.config import Resolved


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
    lanes: Annotated[int | None, typer.Option(help="Connections per link.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_json: Annotated[bool | None, typer.Option("--log-json", help="Log JSON lines.")] = None,
) -> None:
    """Run the master: the process that peers join and that keeps their epochs.

    It listens on loopback unless told otherwise; other addresses want --token-file, or --insecure. SIGTERM and Ctrl-C
    end it cleanly, with exit code 0.
    """
    import asyncio
    import logging

    from ringfold import config as settings
    from ringfold.cli import logs
    from ringfold.errors import ConfigError

    arguments: dict[str, object] = {"listen": listen or None, "token_file": token_file, "insecure": insecure}
    arguments |= {"evidence": evidence, "lanes": lanes, "config": config, "log_level": log_level, "log_json": log_json}
    resolved = settings.load(arguments)
    logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    for warning in resolved.warnings:
        logging.getLogger(__name__).warning(warning)
    try:
        asyncio.run(_serve(resolved))
    except OSError as error:
        where = ", ".join(resolved.listed("listen"))
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error


async def _serve(resolved: "Resolved") -> None:
    """Serve until a signal says stop."""
    import logging

    from ringfold.master.server import MasterServer
    from ringfold.master.settings import master_settings
    from ringfold.runtime.process import keep_what_is_there, stop_signals

    log = logging.getLogger(__name__)
    server = MasterServer(
        master_settings(resolved), list(resolved.listed("listen")), resolved.token(), resolved.switch("insecure")
    )

    def stop(signal: str) -> None:
        log.info("%s: the master ends", signal)
        server.stop()

    def ready() -> None:
        # On standard output, apart from the log: a script that chose port 0 reads here where to join.
        typer.echo(f"listening on {', '.join(server.addresses)}")

    keep_what_is_there()
    with stop_signals(stop):
        await server.serve(ready)
