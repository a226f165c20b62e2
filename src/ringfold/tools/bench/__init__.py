"""`ringfold bench`: the figures that Ringfold promises, measured on this machine.

One file per bench (`allreduce`, `quantize`, `topology`, `recovery`, `failover`, `join`, `master`, `memory`, `state`,
`clock`, `rounds`, `iteration`, `hints`, `multipath`, `wan`); the processes that a bench starts are in the `workers_*`
files, and `masters.py` starts a real master for them. `clock.py` has its nodes in `clock_nodes.py`, their truth in
`clock_truth.py` and the estimators' table in `estimators.py`. `report.py` is how figures leave: tables, or one JSON
object. `targets.py` compares them with `benchmarks/targets.toml`.
"""

import typer

from ringfold.tools.bench import (
    allreduce,
    clock,
    failover,
    hints,
    iteration,
    join,
    master,
    memory,
    multipath,
    quantize,
    recovery,
    rounds,
    state,
    topology,
    wan,
)

app = typer.Typer(
    help="Measure Ringfold on this machine; --json prints one object, --check compares with the targets.",
    no_args_is_help=True,
)
app.command("allreduce")(allreduce.command)
app.command("quantize")(quantize.command)
app.command("topology")(topology.command)
app.command("recovery")(recovery.command)
app.command("failover")(failover.command)
app.command("join")(join.command)
app.command("memory")(memory.command)
app.command("master")(master.command)
app.command("multipath")(multipath.command)
app.command("state")(state.command)
app.command("clock")(clock.command)
app.command("rounds")(rounds.command)
app.command("iteration")(iteration.command)
app.command("hints")(hints.command)
app.command("wan")(wan.command)
