"""How fast the log of probing is written and read: rows of `ringfold bench rounds`.

The windows are simulated (4 s at the default cadence, four edges), so that every run writes the same bytes.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from ringfold.probe.fit import fit
from ringfold.probe.logs.files import ExportSettings, Log, LogReader
from ringfold.probe.logs.lines import FitLine, Stretch, WindowLine, window_lines
from ringfold.probe.models import MODELS, window
from ringfold.runtime.clock import thread_cpu_ns
from ringfold.tools.bench.report import Row
from ringfold.wire.probing import RoundId

EDGES, PAIRS = 4, 1_000


def log_row(windows: int, *, points: bool) -> Row:
    """Write so many windows of a node, and read them again. Rates are by CPU time: nothing here waits for the disk."""
    model = next(iter(MODELS.values()))
    samples = [window(model, np.random.default_rng(seed), PAIRS) for seed in range(EDGES)]
    edges = [replace(sample.window, src=1, dst=2 + place) for place, sample in enumerate(samples)]
    fits = [fit(each) for each in edges]
    with tempfile.TemporaryDirectory(prefix="ringfold-log-") as directory:
        settings = ExportSettings(directory=Path(directory), points=points, file_bytes=1 << 30)
        with Log(settings, node=1) as log:
            began = thread_cpu_ns()
            for number in range(windows):
                stretch = Stretch(node=1, window=number, begin_ns=0, end_ns=1, utc_ns=0, round_id=RoundId(1, number))
                log.write(window_lines(stretch, edges, fits, points=points))
            wrote_ns = thread_cpu_ns() - began
            size = log.path.stat().st_size
            began = thread_cpu_ns()
            lines = sum(1 for line in LogReader(log.path) if isinstance(line, WindowLine | FitLine))
            read_ns = thread_cpu_ns() - began
    assert lines == 2 * EDGES * windows
    return {
        "kind": "log",
        "points": points,
        "edges": EDGES,
        "pairs": PAIRS,
        "window_bytes": size // windows,
        "edge_bytes": size // windows // EDGES,
        "write_mb_per_s": size / 1e6 / (wrote_ns / 1e9),
        "read_mb_per_s": size / 1e6 / (read_ns / 1e9),
        "write_us": wrote_ns / 1e3 / windows,
    }
