"""The directory in which the demo records its run, and what it writes there for people who want to look at the run."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

from ringfold.config import state_directory
from ringfold.errors import UsageError

KEPT = 4
"""Directories of earlier demos that are kept, of those that nobody chose."""


def new_directory(chosen: Path | None) -> Path:
    """An empty directory: the chosen one, or a new one among the last few. UsageError if the chosen one has files."""
    if chosen is not None:
        if chosen.exists() and (not chosen.is_dir() or any(chosen.iterdir())):
            raise UsageError(f"{chosen} is no empty directory: the events of two runs must not mix")
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen.absolute()
    parent = state_directory() / "demo"
    parent.mkdir(parents=True, exist_ok=True)
    for old in sorted(parent.iterdir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for number in range(1, 100):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory
    raise UsageError(f"{parent} has a hundred demos of this second")


def write_views(events: Path) -> dict[str, str]:
    """Write the report and the trace; say where they are, and which commands show more."""
    from ringfold.observe import trace
    from ringfold.observe.align import align
    from ringfold.observe.processes import gather
    from ringfold.observe.records import read_directory
    from ringfold.observe.report import write_page
    from ringfold.observe.summary import summarise

    report, traced = events / "report.html", events / "trace.json.gz"
    write_page(summarise(read_directory(events)), report)
    processes = [gather(record.name, record.begun, record.events()) for record in read_directory(events)]
    alignment = align(processes)
    built = trace.build(processes, alignment)
    about = {"run": processes[0].begun.run, "left_out": built.left_out, "origin_unix_ns": alignment.origin}
    trace.write(built, traced, about)
    return {
        "report": str(report),
        "trace": f"{traced} (open it at https://ui.perfetto.dev)",
        "events": f"ringfold events {events}",
        "replay": f"ringfold replay {events}",
        "who was slow": f"ringfold trace {events} --why",
    }
