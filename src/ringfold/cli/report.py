"""`ringfold report`: one HTML page about a run, from its run directory."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    directory: Annotated[Path, typer.Argument(help="The run directory: `events_dir` of the master and the peers.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page to write; `-` is standard output. Without it: report.html in the directory.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object; a page is written only with -o.")
    ] = False,
    run: Annotated[str, typer.Option(help="The run, if the directory has records of several.")] = "",
) -> None:
    """Write one HTML page about a run: what happened, what it cost, who was slow.

    The page needs no network and no scripts: it can be mailed, printed, and opened from a file. It can be written while
    the run goes on, too.
    """
    from ringfold.cli.output import print_json
    from ringfold.observe.records import read_directory
    from ringfold.observe.report import write_page
    from ringfold.observe.summary import summarise

    summary = summarise(read_directory(directory), run)
    if as_json:
        print_json(summary)
    if as_json and output is None:
        return
    path = output or directory / "report.html"
    if path == Path("-"):
        from ringfold.observe.report import page_of

        typer.echo(page_of(summary), nl=False)
        return
    write_page(summary, path)
    if not as_json:
        typer.echo(f"wrote {path}")
