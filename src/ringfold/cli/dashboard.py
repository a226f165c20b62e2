"""`ringfold dashboard`: a web page that shows a run live."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.observe.dashboard.server import DashboardServer


def dashboard(
    address: Annotated[str | None, typer.Argument(help="The master's address.", show_default=False)] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Address of the page, host:port; by default 127.0.0.1:48150, or the next free port."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The run to show first; without it `default`, or the only one.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
) -> None:
    """Serve a web page that shows runs live: the ring, the peers, who is waited for, what happened and what it cost.

    It reads, and changes nothing; its load and its end touch no run. It follows the master that leads. Without an
    address it connects to the masters of the settings (`master`, by default on this machine).

    The page is on loopback by default. If there is a join token, the printed address has a token that is derived from
    it: who has the address may look, and cannot join. Needs `pip install 'ringfold[dashboard]'`.
    """
    import asyncio

    from ringfold import config as settings

    check_installed()
    from ringfold.observe.dashboard.live import LiveRuns
    from ringfold.observe.dashboard.server import DashboardServer
    from ringfold.wire.proof import viewer_token

    arguments = {"master": address, "run": run, "token_file": token_file, "config": config}
    resolved = settings.load({**arguments, "dashboard_listen": listen})
    token = resolved.token()
    source = LiveRuns(resolved.listed("master"), token, resolved.named_run())
    server = DashboardServer(source, viewer_token(token) if token else "")

    async def serve() -> None:
        async with source:
            await serve_until_stopped(server, resolved.text("dashboard_listen"), until_eof=until_eof)

    asyncio.run(serve())


async def serve_until_stopped(server: "DashboardServer", listen: str, *, until_eof: bool = False) -> None:
    """Serve until SIGTERM or Ctrl-C; `until_eof`: or until standard input ends, as when its parent does."""
    import asyncio

    from ringfold.observe.dashboard.child import end_of_input
    from ringfold.observe.dashboard.server import DASHBOARD_PORT
    from ringfold.runtime.process import stop_signals

    await server.start(listen or f"127.0.0.1:{DASHBOARD_PORT}", or_next=not listen)
    stopped = asyncio.Event()
    with stop_signals(lambda signal: stopped.set()):
        typer.echo(f"dashboard at {server.url}")
        if until_eof:
            ended = asyncio.create_task(end_of_input(stopped))
        await stopped.wait()
        if until_eof:
            ended.cancel()
    await server.stop()


def check_installed() -> None:
    """Raise UsageError if the packages of the dashboard are missing."""
    import importlib.util

    from ringfold.errors import UsageError

    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError("the dashboard needs aiohttp: pip install 'ringfold[dashboard]'")
