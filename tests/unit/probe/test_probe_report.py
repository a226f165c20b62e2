"""The report of probing: its figures are those of the logs, and its tables, JSON and pictures come out."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from probe_logs import UNIX_NS, WINDOW_NS, MadeUpRun
from typer.testing import CliRunner, Result

from ringfold.cli import build
from ringfold.cli.probe import spread
from ringfold.cli.probe.report import time
from ringfold.errors import UsageError
from ringfold.probe.logs.files import LogReader
from ringfold.probe.logs.lines import FitLine, round_line
from ringfold.probe.logs.report import Histogram, LogReport, ReportCollector, ahead_ns, collect, delays_of
from ringfold.wire.probing import EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId

RUN = MadeUpRun()
PNG, SVG = b"\x89PNG\r\n\x1a\n", b"<?xml"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """All logs of the made-up run, with points."""
    RUN.write(tmp_path / "logs")
    return tmp_path / "logs"


def probe(*arguments: object) -> Result:
    return CliRunner().invoke(build(["probe"]), ["probe", *map(str, arguments)])


def report_of(*paths: Path) -> LogReport:
    return collect(line for path in paths for line in LogReader(path)).report()


# Figures


def test_delays_and_loss_are_those_of_all_exchanges(logs: Path) -> None:
    report = report_of(logs / "1.jsonl")
    edge = next(edge for edge in report.edges if (edge.src, edge.dst) == (1, 2))
    windows = [RUN.edge_window(1, 2, number) for number in range(RUN.windows)]
    delays = np.concatenate([delays_of(window) for window in windows])
    assert edge.delays is not None
    assert edge.delays.points == delays.size
    assert edge.delays.min_ns == delays.min()
    assert edge.delays.p50_ns == pytest.approx(np.quantile(delays, 0.5), rel=0.025)
    assert edge.delays.p99_ns == pytest.approx(np.quantile(delays, 0.99), rel=0.1)
    assert (edge.sent, edge.lost) == (sum(each.sent for each in windows), sum(each.lost for each in windows))


def test_exchanges_that_lack_a_stamp_have_no_delay() -> None:
    window = RUN.edge_window(1, 2, 0)
    before = len(delays_of(window))
    window.exchanges[3, 5] = 0
    assert len(delays_of(window)) == before - 1


def test_without_points_delays_are_those_of_the_typical_window(tmp_path: Path) -> None:
    RUN.write(tmp_path, points=False, rounds=False)
    edge = report_of(tmp_path / "1.jsonl").edges[0]
    fits = [RUN.true_fit(RUN.edge_window(edge.src, edge.dst, number)) for number in range(RUN.windows)]
    assert edge.delays is not None
    assert edge.delays.points == 0
    assert edge.delays.p25_ns is None
    assert edge.delays.min_ns == min(fit.delay_min_ns for fit in fits)
    assert edge.delays.p50_ns == sorted(fit.delay_p50_ns for fit in fits)[1]


def test_the_line_of_an_edge_is_that_of_the_newest_window_that_has_one() -> None:
    older, good = (RUN.true_fit(RUN.edge_window(1, 2, number)) for number in (0, 1))
    bad = EdgeFit(1, 2, sent=60, lost=57, refused="only 3 pairs")
    place = RUN.stretch(1, 0)
    facts = {name: getattr(place, name) for name in place.__struct_fields__}
    (edge,) = collect(FitLine(**facts, fit=fit) for fit in (older, good, bad)).report().edges
    assert (edge.alpha, edge.beta_ns, edge.t0_ns) == (good.alpha, good.beta_ns, good.t0_ns)
    assert (edge.windows, edge.refused, edge.why_refused) == (3, 1, "only 3 pairs")


def test_an_edge_that_was_never_fitted_has_no_line() -> None:
    place = RUN.stretch(1, 0)
    facts = {name: getattr(place, name) for name in place.__struct_fields__}
    (edge,) = collect([FitLine(**facts, fit=EdgeFit(1, 2, sent=60, lost=60, refused="nothing came"))]).report().edges
    assert (edge.alpha, edge.delays, edge.loss) == (None, None, 1.0)


def test_edges_are_counted_once_where_nodes_and_the_run_tell_of_them(logs: Path) -> None:
    collector = collect(LogReader(logs / "1.jsonl"))
    collector.add(round_line(RUN.summary(0)))
    both = collector.report()
    assert {edge.src: edge.windows for edge in both.edges} == {1: RUN.windows, 2: 1, 3: 1, 4: 1}
    assert [(edge.src, edge.dst) for edge in both.edges] == sorted(RUN.edges)


def test_offset_and_drift_of_a_node_are_those_of_its_clock(logs: Path) -> None:
    report = report_of(logs / "run.jsonl")
    clocks = RUN.clocks
    middle = (RUN.windows - 1) * WINDOW_NS + WINDOW_NS // 2
    for node in report.nodes:
        assert node.drift_ppm == pytest.approx(clocks[node.node].drift_ppb / 1e3, abs=1e-6)
        assert node.offset_ns == pytest.approx(clocks[node.node].at(middle) - clocks[1].at(middle), abs=1_000)
    assert [node.is_reference for node in report.nodes] == [True, False, False, False]


def test_offsets_keep_nanoseconds_however_far_clocks_are_apart() -> None:
    clock = NodeClock(1, t0_ns=7, global_ns=UNIX_NS + 1, rate=0.0, sigma_ns=0, low_ns=0, high_ns=0, growth=0)
    assert ahead_ns(clock, UNIX_NS + 10**9) == 6 - UNIX_NS
    fast = msgspec.structs.replace(clock, rate=-1e-6)
    assert ahead_ns(fast, UNIX_NS + 1 + 10**9) - ahead_ns(fast, UNIX_NS + 1) == 1_000


def test_a_clock_that_began_anew_begins_a_new_track() -> None:
    collector = ReportCollector()
    for number in range(4):
        summary = RUN.summary(number)
        if number >= 2:
            moved = [msgspec.structs.replace(clock, t0_ns=clock.t0_ns - 10**12) for clock in summary.nodes[1:]]
            summary = msgspec.structs.replace(summary, nodes=[summary.nodes[0], *moved])
        collector.add(round_line(summary))
    assert {node: [len(piece) for piece in pieces] for node, pieces in collector.report().tracks.items()} == {
        1: [4],
        2: [2, 2],
        3: [2, 2],
        4: [2, 2],
    }


def test_quantiles_of_the_histogram_are_within_its_bins() -> None:
    values = np.random.default_rng(1).lognormal(10, 2, 20_000).astype(np.int64)
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    assert histogram.least == values.min()
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.03)


# The command


def test_the_report_in_json_has_all_edges_and_nodes(logs: Path) -> None:
    result = probe("--report", logs, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert [(edge["src"], edge["dst"]) for edge in printed["edges"]] == sorted(RUN.edges)
    assert [node["name"] for node in printed["nodes"]] == ["host-1", "host-2", "host-3", "host-4"]
    assert (printed["rounds"], printed["notes"]) == (RUN.windows, [])


def test_the_report_takes_several_logs_after_one_option(logs: Path) -> None:
    result = probe("--report", logs / "1.jsonl", logs / "run.jsonl", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["windows"] == RUN.windows * RUN.degree


def test_words_are_taken_by_the_option_before_them() -> None:
    assert spread(["--report", "a", "b", "--json"], "--report") == ["--report", "a", "--report", "b", "--json"]
    assert spread(["replay", "a"], "--report") == ["replay", "a"]
    assert spread(["--report", "--json"], "--report") == ["--report", "--json"]


def test_the_tables_fit_a_narrow_terminal_and_say_what_stands_out(logs: Path) -> None:
    result = probe("--report", logs)
    assert result.exit_code == 0, result.output
    src, dst = RUN.edges[-1]
    assert f"{src} -> {dst}: dropped in the last round: an outlier by 3 MAD" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("1 -> 2")]
    assert len(rows) == 1
    assert rows[0][3] == str(RUN.windows)


def test_a_incomplete_line_is_reported_on_standard_error(logs: Path) -> None:
    with open(logs / "1.jsonl", "ab") as log:
        log.write(b'{"kind":"fi')
    result = probe("--report", logs, "--json")
    assert "is incomplete" in result.stderr
    assert len(json.loads(result.stdout)["notes"]) == 1


@pytest.mark.parametrize("arguments", [["--report", "/nowhere"], ["--json"], ["--json", "replay", "x"]])
def test_a_wrong_call_is_a_usage_error(arguments: Sequence[str]) -> None:
    assert isinstance(probe(*arguments).exception, UsageError)


@dataclass(frozen=True)
class Clocks:
    """A calculation's result: every node's true clock."""

    nodes: list[NodeClock]
    edges: list[EdgeView]
    reference: NodeId = 1
    loops: list[LoopResidual] = field(default_factory=list)
    missing: Mapping[NodeId, str] = field(default_factory=dict)
    history: None = None


def test_nodes_logs_alone_get_their_clocks_from_the_calculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def calculate(fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: None) -> Clocks:
        asked.append((len(fits), sorted(utc)))
        return Clocks(RUN.summary(len(asked) - 1).nodes, [EdgeView(fit) for fit in fits])

    stand_in = ModuleType("ringfold.probe.graph.clocks")
    stand_in.calculate = calculate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ringfold.probe.graph.clocks", stand_in)
    RUN.write(tmp_path, rounds=False)
    printed = json.loads(probe("--report", tmp_path, "--json").stdout)
    assert asked == [(len(RUN.edges), [1, 2, 3, 4])] * RUN.windows
    assert [node["node"] for node in printed["nodes"]] == [1, 2, 3, 4]


@pytest.fixture
def _true_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimator that knows the truth, in the place of the real ones."""
    names = SimpleNamespace(fit=RUN.true_fit, ESTIMATORS=("auto", "hull"), BASELINES=("min-rtt",))
    monkeypatch.setitem(sys.modules, "ringfold.probe.fit", names)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_true_fits")
def test_replay_in_json_has_old_and_new_of_every_window(logs: Path) -> None:
    result = probe("replay", logs / "1.jsonl", "--estimator", "hull", "--json")
    assert result.exit_code == 0, result.output
    refits: list[dict[str, Any]] = json.loads(result.stdout)["refits"]
    assert len(refits) == RUN.windows * RUN.degree
    assert {refit["old"]["estimator"] for refit in refits} == {"truth"}
    assert {refit["new"]["estimator"] for refit in refits} == {"hull"}


@pytest.mark.usefixtures("_true_fits")
def test_replay_prints_old_and_new_below_each_other(logs: Path) -> None:
    result = probe("replay", logs / "1.jsonl")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("truth") == result.stdout.count("auto") - 1 == RUN.windows * RUN.degree


@pytest.mark.usefixtures("_true_fits")
def test_replay_says_why_a_window_has_no_line(tmp_path: Path) -> None:
    sparse = MadeUpRun(pairs=6, windows=1)
    sparse.write(tmp_path, rounds=False)
    result = probe("replay", tmp_path / "1.jsonl")
    assert "1 -> 2, window 0: refused now: too few pairs" in result.stdout


@pytest.mark.usefixtures("_true_fits")
def test_an_unknown_estimator_is_answered_with_the_known_ones(logs: Path) -> None:
    error = probe("replay", logs / "1.jsonl", "--estimator", "magic").exception
    assert isinstance(error, UsageError)
    assert "auto, hull, min-rtt" in str(error)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(12.34, "12.3 ns"), (-3_412, "-3.412 us"), (51_030_000, "+51.03 ms"), (2.5e9, "+2.5 s"), (0, "0 ns")],
)
def test_times_have_the_unit_that_suits_them(nanoseconds: float, text: str) -> None:
    assert time(nanoseconds, signed=nanoseconds > 1e6) == text


def test_help_of_probe_loads_neither_numpy_nor_matplotlib() -> None:
    program = (
        "import sys\nfrom ringfold.cli import build\ntry:\n    build(['probe'])(['probe', '--help'])\n"
        "except SystemExit:\n    pass\nprint({'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("set()\n")


# Pictures


def pictures(report: LogReport, directory: Path, kind: str = "png") -> dict[str, bytes]:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (ringfold[report])")
    from ringfold.cli.probe.pictures import draw

    return {path.name: path.read_bytes() for path in draw(report, directory, kind)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "start"), [("png", PNG), ("svg", SVG)])
def test_three_pictures_are_written_in_the_format_asked_for(
    logs: Path, tmp_path: Path, kind: str, start: bytes
) -> None:
    drawn = pictures(report_of(*logs.iterdir()), tmp_path / "pictures", kind)
    assert sorted(drawn) == [f"{name}.{kind}" for name in ("delays", "graph", "offsets")]
    assert all(content.startswith(start) and len(content) > 10_000 for content in drawn.values())


def test_the_command_writes_pictures_and_says_where(logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (ringfold[report])")
    result = probe("--report", logs, "--pictures", tmp_path / "new" / "pictures", "--json")
    assert result.exit_code == 0, result.output
    assert "graph.png" in result.stderr
    assert json.loads(result.stdout)["edges"]
    assert len(list((tmp_path / "new" / "pictures").iterdir())) == 3


def test_many_nodes_are_drawn_as_a_mass_with_the_outstanding_named(tmp_path: Path) -> None:
    run = MadeUpRun(nodes=24, windows=2, degree=3, pairs=12)
    collector = ReportCollector()
    for number in range(run.windows):
        collector.add(round_line(run.summary(number)))
    drawn = pictures(collector.report(), tmp_path, "svg")
    assert re.search(rb"(1[6-9]|2[0-2]) others", svg_text(drawn["offsets.svg"]))
    assert b"the 72 edges, by their median" in svg_text(drawn["delays.svg"])


def svg_text(content: bytes) -> bytes:
    """The texts of a picture, which matplotlib notes beside the shapes of their letters."""
    return b"\n".join(line for line in content.splitlines() if line.strip().startswith(b"<!--"))


def test_logs_without_rounds_or_fits_give_pictures_that_say_so(tmp_path: Path) -> None:
    drawn = pictures(ReportCollector().report(), tmp_path, "svg")
    assert b"no rounds in the logs: no offsets" in svg_text(drawn["offsets.svg"])
    assert b"no edges in the logs: no graph" in svg_text(drawn["graph.svg"])


def test_without_matplotlib_the_error_names_the_extra(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = probe("--report", logs, "--pictures", logs / "pictures").exception
    assert isinstance(error, UsageError)
    assert "pip install 'ringfold[report]'" in str(error)


def test_the_made_up_log_is_as_real_ones_are() -> None:
    """No packet arrives before it was sent, as far as the clocks' true difference goes; else the tests prove little."""
    window = RUN.edge_window(1, 2, 0)
    fit = RUN.true_fit(window)
    t1_tx, t1_rx, *_ = window.exchanges.T
    line = fit.beta_ns + np.round(fit.alpha * (t1_tx - fit.t0_ns)).astype(np.int64)
    assert (t1_rx - t1_tx - line).min() > 0
