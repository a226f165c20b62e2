"""Several runs side by side: figures from the rounds in their logs, and the command that shows them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringfold.cli import build
from ringfold.errors import UsageError
from ringfold.probe.logs.compare import common_edges, figures
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.probe.logs.lines import RoundLine, round_line
from ringfold.wire.probing import EdgeFit, EdgeView, RoundId, RoundMetrics, RoundSummary

S, MS = 1_000_000_000, 1_000_000


def summary(number: int, *fits: EdgeFit, pause_ms: int = 40, **changed: object) -> RoundSummary:
    plain: dict[str, object] = {
        "round": RoundId(1, number),
        "kind": "master",
        "label": "",
        "begin_ns": number * 5 * S,
        "end_ns": number * 5 * S + 4 * S,
        "reference": 1,
        "nodes": [],
        "edges": [EdgeView(fit) for fit in fits],
        "metrics": RoundMetrics(total_ns=pause_ms * MS),
        "names": {"1": "a", "2": "b"},
    }
    return RoundSummary(**(plain | changed))  # type: ignore[arg-type]


def edge(src: int = 1, dst: int = 2, *, ppm: float = 10.0, us: int = 50, lost: int = 0, refused: str = "") -> EdgeFit:
    return EdgeFit(
        src, dst, alpha=ppm / 1e6, delay_p50_ns=us * 1_000, sent=1_000, lost=lost, pairs=900, refused=refused
    )


def lines(*summaries: RoundSummary) -> list[RoundLine]:
    return [round_line(each) for each in summaries]


def test_figures_of_a_run() -> None:
    run = figures("one", lines(summary(1, edge(lost=10)), summary(2, edge(ppm=-30, us=70), pause_ms=80)))
    assert (run.rounds, run.nodes, run.incomplete) == (2, 2, 0)
    assert run.skew_ppm is not None
    assert (run.skew_ppm.p50, run.skew_ppm.max) == pytest.approx((20, 30))
    assert run.latency_us is not None
    assert (run.latency_us.p50, run.latency_us.max) == pytest.approx((60, 70))
    assert run.overhead_ms is not None
    assert (run.overhead_ms.p50, run.overhead_ms.max) == pytest.approx((60, 80))
    assert run.overhead_share == pytest.approx(60 / 4_060)
    assert run.loss == pytest.approx(10 / 2_000)


def test_refused_edges_count_for_the_loss_only() -> None:
    run = figures("one", lines(summary(1, edge(refused="a clock stepped", lost=500), edge(2, 1))))
    assert (run.loss, [(each.src, each.dst) for each in run.edges]) == (0.25, [("b", "a")])


def test_rounds_with_missing_nodes_are_counted() -> None:
    run = figures("one", lines(summary(1, edge(), missing={"3": "no report"}), summary(2, edge())))
    assert run.incomplete == 1


def test_edges_are_matched_by_the_names_of_their_nodes() -> None:
    """A restarted node has another number."""
    one = figures("one", lines(summary(1, edge(), edge(2, 1))))
    other = figures("two", lines(summary(1, edge(7, 9, us=75), names={"7": "a", "9": "b"})))
    ((first, last),) = common_edges([one, other])
    assert (first.latency_us, last.latency_us) == (50, 75)


def test_a_log_without_rounds_is_refused() -> None:
    with pytest.raises(UsageError, match="a log has no rounds"):
        figures("a log", [])


def write(directory: Path, *summaries: RoundSummary) -> Path:
    with ProbeLog(ExportSettings(directory=directory)) as log:
        log.write(lines(*summaries))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(write(tmp_path / f"run{us}", summary(1, edge(us=us)), summary(2, edge(us=us)))) for us in (50, 60, 75)]


def test_the_command_prints_a_column_for_each_run(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(runs[0]).parent)
    names = [Path(run).name for run in runs]
    shown = CliRunner().invoke(build(["probe"]), ["probe", "compare", *names])
    assert shown.exit_code == 0, shown.output
    assert [word for word in shown.output.split() if word in names] == names
    row = next(line for line in shown.output.splitlines() if "a -> b" in line)
    assert [word for word in ("50", "60", "75", "+50%") if word in row] == ["50", "60", "75", "+50%"]


def test_the_command_prints_json(runs: list[str]) -> None:
    shown = CliRunner().invoke(build(["probe"]), ["probe", "compare", "--json", *runs])
    compared = json.loads(shown.output)["runs"]
    assert [run["latency_us"]["p50"] for run in compared] == [50, 60, 75]
    assert compared[0]["edges"] == [{"src": "a", "dst": "b", "skew_ppm": 10.0, "latency_us": 50.0, "loss": 0.0}]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_draws_a_picture(runs: list[str], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "pictures" / f"runs.{suffix}"
    shown = CliRunner().invoke(build(["probe"]), ["probe", "compare", *runs, "--picture", str(file)])
    assert shown.exit_code == 0, shown.output
    assert file.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a"], "needs 2 runs or more, not 1"),
        (["a", "b", "--picture", "runs.gif"], "a .png or .svg file, not 'runs.gif'"),
        (["nowhere", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        CliRunner().invoke(build(["probe"]), ["probe", "compare", *arguments], catch_exceptions=False)
