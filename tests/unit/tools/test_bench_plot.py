"""The picture of an all-reduce benchmark: which lines it has, from which reports, and that it comes out."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from ringfold.errors import ConfigError
from ringfold.tools.bench import app, plot, report
from ringfold.tools.bench.plot import Series

SIZES = (4096, 1 << 20, 1 << 28)


def rows(world: int = 2, transport: str = "tcp", *, factor: float = 1.0, **others: float) -> list[report.Row]:
    """A run of Ringfold, and of the libraries in `others`, which are so many times slower."""
    return [
        {
            "world": world,
            "size_bytes": size,
            "threads": "auto",
            "transport": transport,
            "ringfold_median_us": factor * size / 1000,
            **{f"{library}_median_us": times * size / 1000 for library, times in others.items()},
        }
        for size in SIZES
    ]


def saved(directory: Path, name: str, figures: list[report.Row], **changes: object) -> Path:
    """A report as `bench allreduce --json` prints it."""
    written = msgspec.to_builtins(report.report("allreduce", {}, figures, peers=["ringfold", "gloo"]))
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**written, **changes}))
    return path


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib (ringfold[report])")


def test_each_number_of_peers_has_a_panel_and_each_library_and_transport_a_line() -> None:
    found = plot.panels_of([*rows(4, gloo=3.0), *rows(2, gloo=2.0, mpi=2.0), *rows(2, "shm", mpi_shm=2.0)])
    assert list(found) == [2, 4]
    assert [series.label for series in found[2]] == [
        "Ringfold, TCP",
        "Ringfold, shared memory",
        "gloo, TCP",
        "Open MPI, TCP",
        "Open MPI, shared memory",
    ]
    assert [series.label for series in found[4]] == ["Ringfold, TCP", "gloo, TCP"]
    assert found[4][Series("gloo", "tcp")] == {size: 3.0 * size / 1000 for size in SIZES}


def test_what_was_measured_several_times_is_drawn_at_its_median() -> None:
    found = plot.panels_of([*rows(factor=1.0), *rows(factor=5.0), *rows(factor=2.0)])
    assert found[2] == {Series("ringfold", "tcp"): {size: 2.0 * size / 1000 for size in SIZES}}


def test_numbers_of_threads_are_lines_of_their_own() -> None:
    with_threads: list[report.Row] = [{**row, "threads": threads} for threads in ("1", "4") for row in rows()]
    assert [series.label for series in plot.panels_of(with_threads)[2]] == [
        "Ringfold, TCP, threads 1",
        "Ringfold, TCP, threads 4",
    ]


def test_reports_of_a_version_without_transports_are_those_of_tcp() -> None:
    assert list(plot.panels_of([{"world": 2, "size_bytes": 4096, "ringfold_median_us": 9.0}])[2]) == [
        Series("ringfold", "tcp")
    ]


@pytest.mark.parametrize(
    ("smallest", "largest", "ticks"),
    [
        (4096, 1 << 28, [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28]),
        (4096, 1 << 14, [1 << 12, 1 << 13, 1 << 14]),
        (4096, 4096, [4096]),
        (1, 1 << 40, [1 << power for power in (0, 16, 32)]),
    ],
)
def test_sizes_on_the_axis_are_few(smallest: int, largest: int, ticks: list[int]) -> None:
    assert plot.size_ticks(smallest, largest) == ticks


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize(("kind", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_several_reports_become_one_picture(tmp_path: Path, kind: str, begins: bytes) -> None:
    reports = [saved(tmp_path, "tcp", rows(gloo=2.0)), saved(tmp_path, "shm", rows(4, "shm"))]
    picture = tmp_path / "new" / f"picture.{kind}"
    ended = CliRunner().invoke(app, ["plot", *map(str, reports), "-o", str(picture)])
    assert ended.exit_code == 0, ended.output
    assert str(picture) in ended.output
    assert picture.read_bytes().startswith(begins)


@pytest.mark.usefixtures("matplotlib")
def test_the_same_reports_give_the_same_bytes(tmp_path: Path) -> None:
    found = [plot.load(saved(tmp_path, "one", rows(gloo=2.0)))]
    plot.draw(found, tmp_path / "a.svg")
    plot.draw(found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.usefixtures("matplotlib")
def test_the_picture_names_the_machine_the_libraries_and_the_days(tmp_path: Path) -> None:
    """In an SVG each text stands as a comment before its outlines."""
    versions = {"torch": "2.13.0+cpu"}
    first = saved(tmp_path, "first", rows(gloo=2.0), date="2026-11-17", versions=versions)
    second = saved(tmp_path, "second", rows(4, gloo=2.0), date="2026-11-18", versions=versions)
    found = [plot.load(path) for path in (first, second)]
    plot.draw(found, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    machine = found[0].machine
    for shown in (f"{machine.cpu}, {machine.cores} cores", "PyTorch 2.13.0", "2026-11-17 to 2026-11-18"):
        assert shown in text
    for shown in ("2 peers", "4 peers", "gloo, TCP", "4 KiB", "256 MiB", "1 ms", "buffer size", "median time per op"):
        assert f"<!-- {shown} -->" in text


@pytest.mark.usefixtures("matplotlib")
def test_reports_of_different_machines_are_not_mixed(tmp_path: Path) -> None:
    one = plot.load(saved(tmp_path, "one", rows()))
    other = msgspec.structs.replace(one, machine=msgspec.structs.replace(one.machine, cores=999))
    with pytest.raises(ConfigError, match="999 cores"):
        plot.draw([one, other], tmp_path / "picture.svg")


def test_other_files_are_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json"):
        plot.load(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="bench memory"):
        plot.load(saved(tmp_path, "memory", [], bench="memory"))
    assert CliRunner().invoke(app, ["plot", "x.json", "-o", "picture.pdf"]).exit_code == 2


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured() -> None:
    assert CliRunner().invoke(app, ["allreduce", "--plot", "picture.pdf"]).exit_code == 2
