"""`ringfold probe start|stop|round|show`: steer the probing of a run, or look at its newest round."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfold.runtime.master_client import MasterClient
    from ringfold.wire.probing import ProbeAction, ProbeAnswer, RelayInfo, RoundSummary

Address = Annotated[str | None, typer.Argument(help="The master's address.", show_default=False)]
TokenFile = Annotated[Path | None, typer.Option(help="File with the join token of the run.")]
Run = Annotated[str | None, typer.Option(help="The run, by its name; without it `default`, or the only one.")]
Config = Annotated[Path | None, typer.Option(help="Settings file (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Label = Annotated[str, typer.Option(help="A name that summary and logs carry; at most 200 letters.")]

ROUND_S = 660.0
"""A window may take ten minutes, and the command waits for its round."""
WAITING = "waiting for the round: a second or two if a window can be ended, else up to a whole one; Ctrl-C cancels"


def start(
    address: Address = None, label: Label = "", run: Run = None, token_file: TokenFile = None, config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Let all nodes of a run probe, if they do not."""
    _send_command("start", label, address, run, token_file, config, as_json=as_json)


def stop(
    address: Address = None, run: Run = None, token_file: TokenFile = None, config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Stop all probing at once, in the middle of a window if need be."""
    _send_command("stop", "", address, run, token_file, config, as_json=as_json)


def round_(
    address: Address = None, label: Label = "", run: Run = None, token_file: TokenFile = None, config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """End the present window now, or run one if probing is stopped; wait for its round, and show it."""
    _send_command("round", label, address, run, token_file, config, as_json=as_json)


def show(
    address: Address = None, run: Run = None, token_file: TokenFile = None, config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the newest round of a run."""
    _send_command("show", "", address, run, token_file, config, as_json=as_json)


def _send_command(
    action: "ProbeAction", label: str, address: str | None, run: str | None, token_file: Path | None,
    config: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    from ringfold import config as settings
    from ringfold.cli.output import console, error_console, print_json
    from ringfold.runtime import master_client

    resolved = settings.load({"master": address, "run": run, "token_file": token_file, "config": config})
    if action == "round" and not as_json:
        error_console.print(WAITING, style="dim", soft_wrap=True)

    def request(client: "MasterClient") -> "ProbeAnswer":
        if action == "round":
            client.timeout_s = ROUND_S
        return client.probe(action, label)

    answer = master_client.ask(resolved.listed("master"), resolved.token(), request, run=resolved.named_run())
    if as_json:
        print_json(answer)
    else:
        console.print(answer.text)
        if answer.summary is not None and action in ("round", "show"):
            show_summary(answer.summary)
        if answer.relays and action == "show":
            show_relays(answer.relays)
    if not answer.done:
        raise typer.Exit(1)


def show_relays(relays: "Sequence[RelayInfo]") -> None:
    """The relays of a run as a table."""
    from ringfold.cli.output import console, table

    rows = (
        (
            each.region,
            f"{each.name} (silent)" if each.is_suspected else each.name,
            str(each.nodes),
            str(each.batches),
            str(each.reports),
            f"{each.bytes / 1e3:.0f}",
            str(each.refused),
        )
        for each in relays
    )
    console.print(table("relays", ["region", "relay", "nodes", "batches", "reports", "KB", "refused"], rows))


def show_summary(summary: "RoundSummary") -> None:
    """A round as tables."""
    from ringfold.cli.output import console, table

    label = f" {summary.label!r}" if summary.label else ""
    id = summary.round
    length_s = (summary.end_ns - summary.begin_ns) / 1e9
    console.print(f"round {id.sequence}{label} (fence {id.fence}), kind {summary.kind}, a window of {length_s:.3g} s")
    nodes = (
        (
            str(node.node),
            summary.names.get(str(node.node), ""),
            f"{node.rate * 1e6:+z.3f}",
            f"{node.sigma_ns:.0f}",
            f"{node.low_ns} to {node.high_ns}",
        )
        for node in summary.nodes
    )
    console.print(table("nodes", ["node", "name", "drift (ppm)", "+- (ns)", "certified within (ns)"], nodes))
    edges = (
        (
            f"{view.fit.src} -> {view.fit.dst}",
            f"{view.fit.delay_p50_ns / 1e3:.4g}",
            f"{view.fit.lost} of {view.fit.sent}",
            f"{view.alpha * 1e6:+z.3f}",
            f"{view.residual_ns:+z.0f}",
            view.fit.refused or view.dropped or view.fit.estimator,
        )
        for view in summary.edges
    )
    columns = ["edge", "p50 (us)", "lost", "alpha (ppm)", "residual (ns)", "by"]
    console.print(table("edges", columns, edges))
    windows = (
        (
            str(each.node),
            str(each.window),
            f"{each.first_sequence} to {each.last_sequence}" if each.last_sequence else "-",
            f"{(each.end_ns - each.begin_ns) / 1e9:.4g}",
            f"{each.fit_ns / 1e3:.4g}",
            str(each.sent),
            str(each.received),
            str(each.lost),
        )
        for each in summary.windows
    )
    columns = ["node", "window", "sequences", "length (s)", "fit (us)", "sent", "received", "lost"]
    if summary.windows:
        console.print(table("windows (pairs sent, received and lost)", columns, windows))
    for node, sequence in summary.late.items():
        console.print(f"node {node} was late: its report of round {sequence} counts")
    for node, why in summary.excluded.items():
        console.print(f"node {node} is out of the graph: {why}")
    for node, why in summary.missing.items():
        console.print(f"node {node} is missing: {why}")
    if summary.anomaly:
        console.print(f"anomaly: {summary.anomaly}")
