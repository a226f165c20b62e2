"""`ringfold bench`: the figures that Ringfold promises, measured on this machine.

Read `report.py` (figures leave as tables or as one JSON object; `sizes.py` writes and reads sizes) and `targets.py`
(they are compared with `benchmarks/targets.toml`), then a benchmark. Each is one file, named after its command:
`allreduce.py` (also `bench memory`; `plot.py` draws its reports), `quantize.py`, `topology.py`, `recovery.py` (also
`bench failover`), `join.py`, `master.py`, `dashboard.py`, `state.py`, `clock.py` (its truth and its estimators are in
`clock_truth.py`), `events.py`, `rounds.py`, `iteration.py`, `hints.py`, `multipath.py`, `wan.py`, `why.py`, and for
PyTorch `ddp.py`, `gpu.py` and `torchft.py`. The processes that they start are in `workers.py`, and for eight of them in
files of their own: `allreduce_worker.py`, `master_worker.py`, `dashboard_worker.py`, `rounds_worker.py`,
`why_worker.py`, `ddp_worker.py`, `gpu_worker.py` and `torchft_worker.py`.
"""

import typer

from ringfold.tools.bench import (
    allreduce,
    clock,
    dashboard,
    ddp,
    events,
    gpu,
    hints,
    iteration,
    join,
    master,
    multipath,
    plot,
    quantize,
    recovery,
    rounds,
    state,
    topology,
    torchft,
    wan,
    why,
)

app = typer.Typer(
    help="Measure Ringfold on this machine; --json prints one object, --check compares with the targets.",
    no_args_is_help=True,
)
app.command("allreduce")(allreduce.command)
app.command("plot")(plot.command)
app.command("quantize")(quantize.command)
app.command("topology")(topology.command)
app.command("recovery")(recovery.command)
app.command("failover")(recovery.failover_command)
app.command("join")(join.command)
app.command("memory")(allreduce.memory_command)
app.command("master")(master.command)
app.command("dashboard")(dashboard.command)
app.command("multipath")(multipath.command)
app.command("state")(state.command)
app.command("clock")(clock.command)
app.command("events")(events.command)
app.command("rounds")(rounds.command)
app.command("iteration")(iteration.command)
app.command("hints")(hints.command)
app.command("ddp")(ddp.command)
app.command("gpu")(gpu.command)
app.command("torchft")(torchft.command)
app.command("wan")(wan.command)
app.command("why")(why.command)
