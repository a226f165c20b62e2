"""`ringfold probe`: measure links and clocks, and look at what was measured.

`run_node.py` runs a node, in a run or without one. `control.py` starts, stops and shows the rounds of a run.
`relay.py` is the relay of a region. `report.py` summarises logs, `pictures.py` draws them, `compare.py` puts several
runs side by side, and `replay.py` fits one log again.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperGroup

from ringfold.cli.probe import compare, control, relay, replay, report

if TYPE_CHECKING:
    from typer import Context

    from ringfold.cli.probe.run_node import NodeOptions


class ReportArgumentsGroup(TyperGroup):
    """Lets `--report` take all arguments up to the next option, as a shell expands `--report logs/*.jsonl`."""

    # The types of the arguments are click's, which typer vendors under a name that depends on its version.
    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:  # type: ignore[override, unused-ignore]
        """Repeat `--report` before each of its arguments, as the parser expects."""
        return super().parse_args(ctx, spread(args, "--report"))


def spread(arguments: list[str], option: str) -> list[str]:
    """`--x a b --y` becomes `--x a --x b --y`; without arguments the option stays, and the parser reports an error."""
    spread: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        taken = False
        while word == option and rest and not rest[0].startswith("-"):
            spread += [option, rest.pop(0)]
            taken = True
        if not taken:
            spread.append(word)
    return spread


app = typer.Typer(
    cls=ReportArgumentsGroup,
    invoke_without_command=True,
    no_args_is_help=True,
)
app.command("replay")(replay.command)
app.command("start")(control.start)
app.command("stop")(control.stop)
app.command("round")(control.round_)
app.command("show")(control.show)
app.command("compare")(compare.command)
app.command("relay")(relay.relay)


Masters = Annotated[
    list[str] | None,
    typer.Option(
        "--master", help="Be a node of the run of the master at this address; several masters are tried in turn."
    ),
]
NodesFile = Annotated[Path | None, typer.Option(help="Probe the nodes that this TOML file names, without a run.")]
Me = Annotated[str | None, typer.Option(help="With --nodes: which of them this is; by default the host.")]
Name = Annotated[str | None, typer.Option(help="With --master: this node's name.")]
ListenOnly = Annotated[bool, typer.Option("--listen-only", help="With --master: answer probes, and send none.")]
Rounds = Annotated[
    Literal["local", "gloo", "master"],
    typer.Option(
        help="With --nodes: each node for itself; together through torch.distributed; or with a master at the root."
    ),
]
Root = Annotated[
    str | None,
    typer.Option(help="With --rounds gloo or master: the node that calculates; by default that of the nodes file."),
]
Interface = Annotated[str, typer.Option(help="With --rounds gloo: the network interface; empty: Gloo's choice.")]
TimeoutS = Annotated[float, typer.Option(help="With --rounds gloo: how long the nodes wait for each other.", min=0.1)]
Windows = Annotated[int | None, typer.Option(help="With --nodes: end after so many windows.", min=1)]
WindowMs = Annotated[int, typer.Option(help="With --nodes: the length of a window.", min=10)]
Estimator = Annotated[str, typer.Option(help="How lines are fitted: auto, quantile, hull or svm.")]
ExportTo = Annotated[Path | None, typer.Option(help="Write the windows into this directory, as JSON lines.")]
Points = Annotated[bool, typer.Option("--points", help="Write every exchange too, so that it can be replayed.")]
RunName = Annotated[str | None, typer.Option("--run", help="With --master: the run, by its name.")]
TokenFile = Annotated[Path | None, typer.Option(help="With --master: file with the join token of the run.")]
Logs = Annotated[
    list[Path] | None,
    typer.Option("--report", metavar="LOG...", help="Sum up these logs, or all logs in a directory."),
]
Pictures = Annotated[
    Path | None, typer.Option(help="With --report: write pictures into this directory (needs the extra `report`).")
]
PictureFormat = Annotated[Literal["png", "svg"], typer.Option(help="The format of the pictures.")]
LogFits = Annotated[
    bool | None, typer.Option("--log-fits", help="With --master: log alpha and beta of every edge of this node.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --nodes: print an object a window; with --report: one.")]
OffsetNs = Annotated[int, typer.Option(hidden=True, help="Of a virtual clock, for experiments on one machine.")]
DriftPpb = Annotated[int, typer.Option(hidden=True, help="Of a virtual clock, for experiments on one machine.")]


BELONGS_TO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("me", "rounds", "root", "interface", "timeout_s", "windows", "window_ms"), ("--nodes",)),
    **dict.fromkeys(("name", "listen_only", "run", "token_file", "log_fits"), ("--master",)),
    **dict.fromkeys(("estimator", "export", "points"), ("--master", "--nodes")),
    **dict.fromkeys(("pictures", "picture_format"), ("--report",)),
    "as_json": ("--nodes", "--report"),
}
"""Which options belong to which mode."""


@app.callback()
def probe(
    context: typer.Context,
    master: Masters = None,
    nodes: NodesFile = None,
    me: Me = None,
    name: Name = None,
    listen_only: ListenOnly = False,
    rounds: Rounds = "local",
    root: Root = None,
    interface: Interface = "",
    timeout_s: TimeoutS = 30.0,
    windows: Windows = None,
    window_ms: WindowMs = 4_000,
    estimator: Estimator = "auto",
    export: ExportTo = None,
    points: Points = False,
    run: RunName = None,
    token_file: TokenFile = None,
    logs: Logs = None,
    pictures: Pictures = None,
    picture_format: PictureFormat = "png",
    log_fits: LogFits = None,
    as_json: AsJson = False,
    offset_ns: OffsetNs = 0,
    drift_ppb: DriftPpb = 0,
) -> None:
    """Measure links and clocks, and look at what was measured.

    `ringfold probe --master ADDRESS` is a node of a run that only probes. `ringfold probe --nodes FILE` needs no run:
    the file names all nodes, and is the same on each of them. Both go on until Ctrl-C or SIGTERM.

    `ringfold probe --report LOG...` prints edges (delay, loss, alpha, beta) and nodes (offset, drift, uncertainty).
    """
    from ringfold.errors import UsageError

    modes = [word for word, value in (("--master", master), ("--nodes", nodes), ("--report", logs)) if value]
    if context.invoked_subcommand is not None:
        if modes or pictures or as_json:
            raise UsageError(f"write the options of {context.invoked_subcommand!r} after it")
        return
    if len(modes) != 1:
        what = " or ".join(modes) if modes else "--master ADDRESS, --nodes FILE or --report LOG..."
        raise UsageError(f"use one of {what}, or a command (see ringfold probe --help)")
    _refuse_unused_options(context, modes[0])
    if logs:
        report.show(logs, pictures, picture_format, as_json=as_json)
        return
    from ringfold.cli.probe.run_node import NodeOptions

    options = NodeOptions(
        me=me, rounds=rounds, root=root, interface=interface, timeout_s=timeout_s, windows=windows, window_ms=window_ms,
        listen_only=listen_only, estimator=estimator, export=export, points=points, as_json=as_json,
        offset_ns=offset_ns, drift_ppb=drift_ppb,
    )  # fmt: skip
    addresses = None if master is None else [address for each in master for address in each.split(",")]
    given: dict[str, object] = {"master": addresses, "run": run, "token_file": token_file, "name": name}
    given["probe_log_fits"] = log_fits
    _probe(nodes, given, options)


def _refuse_unused_options(context: typer.Context, mode: str) -> None:
    """An option without effect in this mode is an error."""
    from ringfold.errors import UsageError

    for name, places in BELONGS_TO.items():
        source = context.get_parameter_source(name)
        if mode not in places and source is not None and source.name == "COMMANDLINE":
            option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} goes with {' or '.join(places)}, not with {mode}")


def _probe(nodes: Path | None, given: dict[str, object], options: "NodeOptions") -> None:
    if nodes is not None:
        from ringfold.cli.probe.run_node import probe_alone

        probe_alone(nodes, options)
    else:
        from ringfold import config
        from ringfold.cli.probe.run_node import run_node

        run_node(config.load(given), options)
