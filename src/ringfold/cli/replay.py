"""`ringfold replay`: finished runs on the page of the dashboard, with a time slider."""

from pathlib import Path
from typing import Annotated

import typer


def replay(
    directories: Annotated[list[Path], typer.Argument(help="Run directories, up to three.", metavar="DIR...")],
    listen: Annotated[
        str | None,
        typer.Option(help="Address of the page, host:port; by default 127.0.0.1:48150, or the next free port."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Show finished runs on the page of the dashboard, with a time slider; up to three runs side by side.

    A run directory has the records of a run (`events_dir`, `ringfold master --events DIR`). The page needs the token at
    the end of the printed address. Needs `pip install 'ringfold[dashboard]'`.
    """
    import asyncio

    from ringfold import config as settings
    from ringfold.cli.dashboard import check_installed, serve_until_stopped
    from ringfold.errors import UsageError

    check_installed()
    from ringfold.observe.dashboard.finished import MAX_RUNS, FinishedRuns
    from ringfold.observe.dashboard.server import DashboardServer
    from ringfold.runtime.clock import random_bytes

    if len(directories) > MAX_RUNS:
        raise UsageError(f"at most {MAX_RUNS} runs fit side by side, not {len(directories)}")
    resolved = settings.load({"config": config, "dashboard_listen": listen})
    server = DashboardServer(FinishedRuns(directories), random_bytes(20).hex())
    asyncio.run(serve_until_stopped(server, resolved.text("dashboard_listen")))
