"""`ringfold probe relay`: one connection to the master for all nodes of a region, until it is stopped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.probe.nodes.relay import RelayRequest

Region = Annotated[str, typer.Option(help="The name of the region, which `ringfold probe show` prints.")]
Listen = Annotated[list[str], typer.Option(help="Where the region's nodes connect, `host:port`.")]
Masters = Annotated[
    list[str] | None, typer.Option("--master", help="The root master; standbys after it, separated by commas.")
]
Name = Annotated[str | None, typer.Option(help="This relay's name; by default the host's with the process id.")]
RunName = Annotated[str | None, typer.Option("--run", help="The run, by its name.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the join token of the run.")]
Insecure = Annotated[bool | None, typer.Option("--insecure", help="Listen beyond loopback without a token.")]
Config = Annotated[Path | None, typer.Option(help="Settings file (TOML).")]


def relay(
    region: Region, listen: Listen, master: Masters = None, name: Name = None, run: RunName = None,
    token_file: TokenFile = None, insecure: Insecure = None, config: Config = None,
) -> None:  # fmt: skip
    """Be the relay of a region: its nodes connect here, and the master has one connection for all of them.

    Nodes name the relay before the master: `ringfold probe --master RELAY,MASTER`. It goes on until Ctrl-C or SIGTERM.
    """
    import asyncio
    import os

    from ringfold import config as settings
    from ringfold.cli import logs
    from ringfold.probe.nodes.relay import RelayRequest
    from ringfold.runtime.network import host_name
    from ringfold.wire.proof import run_token

    addresses = None if master is None else [address for each in master for address in each.split(",")]
    given = {"master": addresses, "run": run, "token_file": token_file, "insecure": insecure, "config": config}
    resolved = settings.load({**given, "name": name})
    logs.start(resolved.text("log_level"), as_json=resolved.switch("log_json"))
    run_name = settings.check_run_name(resolved.text("run"))
    request = RelayRequest(
        name=resolved.text("name") or f"{host_name()}:{os.getpid()}",
        region=region,
        listen=[address for each in listen for address in each.split(",")],
        masters=resolved.listed("master"),
        token=run_token(resolved.token(), run_name),
        run=run_name,
        insecure=resolved.switch("insecure"),
    )
    asyncio.run(_serve(request))


async def _serve(request: "RelayRequest") -> None:
    import asyncio

    from ringfold.errors import ConfigError
    from ringfold.probe.nodes.relay import RelayServer
    from ringfold.runtime.process import freeze_garbage_collector, stop_signals

    stop = asyncio.Event()

    def connected(where: str) -> None:
        typer.echo(f"relay {request.name} of region {request.region} is connected to the master at {where}")

    server = RelayServer(request, on_connected=connected)

    def ready() -> None:
        typer.echo(f"relay {request.name} of region {request.region} listens on {', '.join(server.addresses)}")

    freeze_garbage_collector()
    with stop_signals(lambda _: stop.set()):
        try:
            await server.run(stop, ready)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"the relay cannot listen on {', '.join(request.listen)}: {error}") from error
