"""The log of probing: it gives back what it was given, and survives kills, full disks and foreign files."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from probe_logs import UNIX_NS, WINDOW_NS, MadeUpRun, emptied

from ringfold.errors import ConfigError, UsageError
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.logs.files import ExportSettings, LogReader, ProbeLog, logs_in
from ringfold.probe.logs.lines import (
    VERSION,
    FitLine,
    HeaderLine,
    Line,
    RoundLine,
    WindowFields,
    WindowLine,
    decode,
    edge_window,
    encode,
    round_line,
    window_lines,
)
from ringfold.probe.logs.pack import MAX_ROWS, pack, unpack
from ringfold.probe.logs.replay import combine, gather, replay
from ringfold.wire.probing import EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId, RoundId

RUN = MadeUpRun()
STAMPS = arrays.arrays(
    np.int64, st.tuples(st.integers(0, 12), st.just(8)), elements=st.integers(-(2**63), 2**63 - 1) | st.just(0)
)


def same(left: EdgeWindow, right: EdgeWindow) -> bool:
    """Whether two windows are equal, down to the types of their arrays."""
    arrays_equal = all(
        getattr(left, name).dtype == getattr(right, name).dtype
        and np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("exchanges", "kept")
    )
    none = {"exchanges": np.zeros((0, 8), np.int64), "kept": np.zeros(0, np.uint8)}
    facts = [str(replace(window, **none)) for window in (left, right)]
    return arrays_equal and facts[0] == facts[1]


def fill(log: ProbeLog, windows: int, node: NodeId = 1) -> None:
    for number in range(windows):
        held = RUN.windows_of(node, number)
        log.window(RUN.stretch(node, number), held, [RUN.true_fit(each) for each in held])


def windows_in(path: Path) -> list[int]:
    return [line.window for line in LogReader(path) if isinstance(line, FitLine)]


# Stamps as bytes


@given(STAMPS)
def test_any_stamps_come_back_exactly(exchanges: np.ndarray) -> None:
    kept = np.arange(len(exchanges), dtype=np.uint8) % 4
    stamps, flags = unpack(pack(exchanges, kept), len(exchanges))
    assert stamps.dtype == np.int64
    assert np.array_equal(stamps, exchanges)
    assert np.array_equal(flags, kept)


def test_an_exchange_takes_less_than_a_third_of_its_stamps() -> None:
    window = MadeUpRun(pairs=1_000).edge_window(1, 2, 0)
    assert len(pack(window.exchanges, window.kept)) < window.exchanges.nbytes / 3


@pytest.mark.parametrize("rows", [59, 61, MAX_ROWS, MAX_ROWS + 1, -1])
def test_a_wrong_number_of_rows_is_refused(rows: int) -> None:
    packed = pack(np.ones((60, 8), np.int64), np.zeros(60, np.uint8))
    with pytest.raises(UsageError, match=r"corrupt|too many"):
        unpack(packed, rows)


@pytest.mark.parametrize("cut", [1, 4, 9, 40])
def test_stamps_that_lack_their_end_are_refused(cut: int) -> None:
    window = RUN.edge_window(1, 2, 0)
    with pytest.raises(UsageError, match="corrupt"):
        unpack(pack(window.exchanges, window.kept)[:-cut], len(window.exchanges))


@given(st.binary(max_size=64), st.integers(0, 100))
def test_bytes_that_are_no_stamps_are_refused(garbage: bytes, rows: int) -> None:
    with pytest.raises(UsageError):
        unpack(garbage, rows)


# Lines


@pytest.mark.parametrize(("src", "dst"), RUN.edges)
def test_a_window_comes_back_exactly(src: NodeId, dst: NodeId) -> None:
    window = replace(RUN.edge_window(src, dst, 1), stepped="it went back by 1 s", stamps="user", duplicates=3)
    (line,) = window_lines(RUN.stretch(src, 1), [window], [], points=True)
    read = decode(encode(line))
    assert isinstance(read, WindowLine)
    restored = edge_window(read)
    assert restored is not None
    assert same(restored, window)


def test_a_window_in_which_nothing_came_back_is_no_window_without_points() -> None:
    window = emptied(RUN.edge_window(1, 2, 0))
    (line,) = window_lines(RUN.stretch(1, 0), [window], [], points=True)
    restored = edge_window(line)
    assert restored is not None
    assert same(restored, window)


def test_without_points_the_counts_are_there_and_the_exchanges_are_not() -> None:
    window = RUN.edge_window(1, 2, 0)
    (line,) = window_lines(RUN.stretch(1, 0), [window], [], points=False)
    assert (line.sent, line.lost, line.filtered, line.rows) == (
        window.sent, window.lost, window.filtered, len(window.exchanges),
    )  # fmt: skip
    assert edge_window(line) is None


def test_fits_and_rounds_come_back_equal() -> None:
    summary = RUN.summary(0)
    line = round_line(summary, {1: "host-1"})
    assert decode(encode(line)) == line
    fit = FitLine(
        round_id=RoundId(2, 7), label="x", begin_ns=1, end_ns=2, node=1, window=3, utc_ns=-5, fit=summary.edges[0].fit
    )
    assert decode(encode(fit)) == fit


def test_every_line_has_round_label_begin_and_end(tmp_path: Path) -> None:
    RUN.write(tmp_path)
    lines = [json.loads(raw) for path in tmp_path.glob("*.jsonl") for raw in path.read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"header", "window", "fit", "round"}
    for line in lines:
        assert line["round_id"][0] == 1
        assert line["label"] == "warm up"
        assert line["end_ns"] - line["begin_ns"] == pytest.approx(WINDOW_NS, rel=1e-3)


def test_corrupt_points_are_named_by_edge_and_window() -> None:
    (line,) = window_lines(RUN.stretch(1, 2), [RUN.edge_window(1, 2, 2)], [], points=True)
    assert line.exchanges is not None
    broken = msgspec.structs.replace(line, exchanges=line.exchanges[:-9])
    with pytest.raises(UsageError, match="window 2 of edge 1 -> 2: the exchanges are corrupt"):
        edge_window(broken)


# Files


def test_a_log_begins_with_its_version_and_the_node(tmp_path: Path) -> None:
    RUN.write(tmp_path, rounds=False)
    header = next(iter(LogReader(tmp_path / "2.jsonl")))
    assert isinstance(header, HeaderLine)
    assert (header.version, header.node, header.name) == (VERSION, 2, "host-2")


def test_a_node_without_lines_has_a_log_with_its_name(tmp_path: Path) -> None:
    with ProbeLog(ExportSettings(directory=tmp_path), node=3, name="gateway") as log:
        log.begin(17)
        log.begin(18)
    (header,) = LogReader(tmp_path / "3.jsonl")
    assert isinstance(header, HeaderLine)
    assert (header.name, header.begin_ns) == ("gateway", 17)


def test_a_incomplete_last_line_is_skipped_with_a_note(tmp_path: Path) -> None:
    RUN.write(tmp_path, rounds=False)
    path = tmp_path / "1.jsonl"
    whole = list(LogReader(path))
    os.truncate(path, path.stat().st_size - 7)
    reader = LogReader(path)
    assert list(reader) == whole[:-1]
    assert len(reader.notes) == 1
    assert "is incomplete" in reader.notes[0]


def test_a_incomplete_line_is_gone_when_the_next_life_goes_on_with_the_file(tmp_path: Path) -> None:
    settings = ExportSettings(directory=tmp_path)
    with ProbeLog(settings, node=1) as log:
        fill(log, 2)
    whole = (tmp_path / "1.jsonl").read_bytes()
    os.truncate(tmp_path / "1.jsonl", len(whole) - 7)
    with ProbeLog(settings, node=1) as log:
        fill(log, 1)
    reader = LogReader(tmp_path / "1.jsonl")
    lines = list(reader)
    assert reader.notes == []
    assert sum(isinstance(line, HeaderLine) for line in lines) == 2
    assert len(windows_in(tmp_path / "1.jsonl")) == 2 * 2 - 1 + 2


def test_a_writer_that_is_killed_leaves_at_most_one_incomplete_line(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from probe_logs import MadeUpRun\n"
        "from ringfold.probe.logs.files import ExportSettings, ProbeLog\n"
        "run = MadeUpRun(); held = run.windows_of(1, 0); fits = [run.true_fit(each) for each in held]\n"
        "log = ProbeLog(ExportSettings(directory=Path(sys.argv[1]), points=True), node=1)\n"
        "while True: log.window(run.stretch(1, 0), held, fits)\n"
    )
    path = tmp_path / "1.jsonl"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=with_path()) as writer:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 200_000:
            assert writer.poll() is None
            assert time.monotonic() < deadline
        writer.kill()
    reader = LogReader(path)
    assert sum(isinstance(line, FitLine) for line in reader) > 10
    assert [note for note in reader.notes if "incomplete" not in note] == []
    assert len(reader.notes) <= 1


def with_path() -> dict[str, str]:
    """The environment of a process that finds what this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_what_was_written_is_in_the_file_at_once(tmp_path: Path) -> None:
    with ProbeLog(ExportSettings(directory=tmp_path), node=1) as log:
        fill(log, 1)
        assert windows_in(tmp_path / "1.jsonl") == [0, 0]


def test_a_corrupt_line_in_the_middle_is_skipped_with_its_number(tmp_path: Path) -> None:
    RUN.write(tmp_path, rounds=False)
    path = tmp_path / "1.jsonl"
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*raw[:2], b'{"kind":"fit","round_id":"soon"}\n', *raw[3:]]))
    reader = LogReader(path)
    assert len(list(reader)) == len(raw) - 1
    assert "line 3 is corrupt" in reader.notes[0]


@pytest.mark.parametrize("extra", ["", ',"round_id":[0,0],"label":"","begin_ns":0,"end_ns":0'])
def test_another_version_is_refused_by_its_number(tmp_path: Path, extra: str) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(f'{{"kind":"header","version":9{extra}}}\n')
    with pytest.raises(UsageError, match=r"1\.jsonl cannot be read: it has version 9 .* reads version 1"):
        list(LogReader(path))


@pytest.mark.parametrize("content", ["hello\n", "{}\n", '{"kind":"fit"}\n'])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not a log of probing"):
        list(LogReader(path))


def test_a_full_disk_ends_the_log_once_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1.jsonl").symlink_to("/dev/full")
    log = ProbeLog(ExportSettings(directory=tmp_path), node=1)
    with caplog.at_level(logging.WARNING):
        fill(log, 3)
        log.round(RUN.summary(0))
    assert "No space left on device" in log.stopped
    assert [record.getMessage() for record in caplog.records] == [log.stopped]


def test_a_half_written_batch_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProbeLog(ExportSettings(directory=tmp_path), node=1) as log:
        fill(log, 1)
        before = (tmp_path / "1.jsonl").read_bytes()
        write = os.write
        left = [100]

        def full_soon(file: int, content: bytes) -> int:
            if not left[0]:
                raise OSError(28, "No space left on device")
            taken = min(left[0], len(content))
            left[0] -= taken
            return write(file, bytes(content)[:taken])

        monkeypatch.setattr(os, "write", full_soon)
        fill(log, 1)
    assert log.stopped
    assert (tmp_path / "1.jsonl").read_bytes() == before


def test_a_log_that_cannot_be_opened_is_an_error_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        ProbeLog(ExportSettings(directory=tmp_path / "file"), node=1)


@pytest.mark.parametrize("wrong", [{"file_bytes": 10}, {"files": 0}])
def test_settings_that_keep_nothing_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ExportSettings(directory=tmp_path, **wrong)


@pytest.mark.parametrize("files", [1, 3])
def test_only_the_newest_files_stay_and_none_is_too_large(tmp_path: Path, files: int) -> None:
    with ProbeLog(ExportSettings(directory=tmp_path, file_bytes=5_000, files=files), node=1) as log:
        fill(log, 20)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == files
    assert max(sizes) <= 5_000
    kept = windows_in(tmp_path / "1.jsonl")
    assert kept == sorted(kept)
    assert kept[-1] == 19
    assert len(kept) < 40


def test_rotation_loses_no_line_that_should_stay(tmp_path: Path) -> None:
    with ProbeLog(ExportSettings(directory=tmp_path, file_bytes=5_000, files=50), node=1) as log:
        fill(log, 20)
    assert len(list(tmp_path.iterdir())) > 3
    assert windows_in(tmp_path / "1.jsonl") == [number for number in range(20) for _ in range(2)]


def test_a_directory_means_all_its_logs_each_once(tmp_path: Path) -> None:
    MadeUpRun(nodes=3, windows=1).write(tmp_path)
    (tmp_path / "2.1.jsonl").write_bytes((tmp_path / "2.jsonl").read_bytes())
    names = [path.name for path in logs_in([tmp_path, tmp_path / "1.jsonl"])]
    assert names == ["run.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no log .*nowhere\.jsonl"):
        logs_in([tmp_path / "nowhere.jsonl"])
    with pytest.raises(UsageError, match="there is no log"):
        logs_in([tmp_path])


def test_the_guide_shows_how_to_read_exchanges_without_ringfold(tmp_path: Path) -> None:
    RUN.write(tmp_path, rounds=False)
    guide = Path(__file__).resolve().parents[3] / "docs" / "guides" / "probe-logs.md"
    program = guide.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    with open(tmp_path / "1.jsonl", encoding="utf-8") as log:
        names: dict[str, object] = {"path": tmp_path / "1.jsonl", "open": lambda _: log}
        exec(program, names)
    stamps = names["stamps"]
    assert isinstance(stamps, list)
    windows = [window for number in range(RUN.windows) for window in sorted_windows(1, number)]
    assert len(stamps) == len(windows)
    assert all(np.array_equal(got, window.exchanges) for got, window in zip(stamps, windows, strict=True))


def sorted_windows(node: NodeId, number: int) -> list[EdgeWindow]:
    return sorted(RUN.windows_of(node, number), key=lambda window: window.dst)


# Replay


def test_replay_agrees_with_a_direct_fit(tmp_path: Path) -> None:
    RUN.write(tmp_path, rounds=False)
    refits = list(replay(LogReader(tmp_path / "1.jsonl"), RUN.true_fit, "other"))
    direct = [RUN.true_fit(window, "other") for number in range(RUN.windows) for window in RUN.windows_of(1, number)]
    assert [refit.new for refit in refits] == sorted(direct, key=lambda fit: (fit.t0_ns, fit.dst))
    assert all(refit.old is not None and refit.old.estimator == "truth" for refit in refits)
    assert [refit.moved_ns for refit in refits] == [0.0] * len(refits)


def test_a_moved_line_is_compared_at_the_old_t0() -> None:
    def shifted(window: EdgeWindow, estimator: str) -> EdgeFit:
        fit = RUN.true_fit(window, estimator)
        later = 10**9
        beta = fit.beta_ns + round(fit.alpha * later) + 40
        return msgspec.structs.replace(fit, t0_ns=fit.t0_ns + later, beta_ns=beta)

    window = RUN.edge_window(1, 2, 0)
    lines = window_lines(RUN.stretch(1, 0), [window], [RUN.true_fit(window)], points=True)
    (refit,) = replay(lines, shifted, "x")
    assert refit.moved_ns == pytest.approx(40, abs=1)


def test_windows_without_an_old_fit_are_fitted_too() -> None:
    windows = [RUN.edge_window(1, 2, number) for number in range(2)]
    lines: list[Line] = [
        line for n, each in enumerate(windows) for line in window_lines(RUN.stretch(1, n), [each], [], points=True)
    ]
    assert [(refit.window, refit.old) for refit in replay(lines, RUN.true_fit, "x")] == [(0, None), (1, None)]


def test_a_log_without_points_cannot_be_replayed(tmp_path: Path) -> None:
    RUN.write(tmp_path, points=False)
    for name, why in (("1.jsonl", "without its points"), ("run.jsonl", "no windows of a node")):
        with pytest.raises(UsageError, match=why):
            list(replay(LogReader(tmp_path / name), RUN.true_fit, "x"))


# Without a master


def fit_lines(run: MadeUpRun) -> list[FitLine]:
    return [
        line
        for node in run.clocks
        for number in range(run.windows)
        for line in window_lines(
            run.stretch(node, number), [], [run.true_fit(each) for each in run.windows_of(node, number)], points=False
        )
        if isinstance(line, FitLine)
    ]


def shifted(line: FitLine, by_ns: int, fit: EdgeFit | None = None) -> FitLine:
    """The same, by a host whose time of day is off."""
    return msgspec.structs.replace(line, utc_ns=line.utc_ns + by_ns, fit=fit or line.fit)


def test_logs_of_several_nodes_come_together_window_by_window() -> None:
    gatherings = gather(reversed(fit_lines(RUN)))
    assert [gathering.round_id.sequence for gathering in gatherings] == [1, 2, 3]
    for number, gathering in enumerate(gatherings):
        assert [(fit.src, fit.dst) for fit in gathering.fits] == sorted(RUN.edges)
        assert gathering.utc == {node: RUN.stretch(node, number).utc_ns for node in RUN.clocks}
        assert gathering.end_ns == UNIX_NS + (number + 1) * WINDOW_NS


def test_windows_that_end_at_different_times_are_still_one_of_each_edge() -> None:
    lines = [shifted(line, 300_000_000 * line.node) for line in fit_lines(RUN)]
    gatherings = gather(lines)
    assert [len(gathering.fits) for gathering in gatherings] == [len(RUN.edges)] * RUN.windows


def test_an_edge_that_fell_silent_counts_for_two_windows_more() -> None:
    run = MadeUpRun(nodes=3, windows=6, degree=1)
    silent = run.edges[-1]
    lines = [line for line in fit_lines(run) if (line.fit.src, line.fit.dst) != silent or line.window < 2]
    there = [silent in {(fit.src, fit.dst) for fit in gathering.fits} for gathering in gather(lines)]
    assert there == [True, True, True, True, False, False]


@dataclass(frozen=True)
class Counted:
    """A calculation's result that only counts how often one was made."""

    history: int
    edges: list[EdgeView]
    reference: NodeId = 1
    nodes: Sequence[NodeClock] = ()
    loops: Sequence[LoopResidual] = ()

    @property
    def missing(self) -> dict[NodeId, str]:
        return {3: "silent"}


def test_each_calculation_gets_the_history_of_the_one_before() -> None:
    def calculate(fits: Sequence[EdgeFit], utc: dict[NodeId, int], history: int | None) -> Counted:
        return Counted((history or 0) + 1, [EdgeView(fit, residual_ns=float(history or 0)) for fit in fits])

    summaries = combine(gather(fit_lines(RUN)), calculate)
    assert [summary.edges[0].residual_ns for summary in summaries] == [0, 1, 2]
    assert summaries[0].missing == {"3": "silent"}
    assert isinstance(decode(encode(round_line(summaries[0]))), RoundLine)


def test_a_stretch_without_a_round_has_the_lowest_id() -> None:
    assert WindowFields(node=1, window=1, begin_ns=0, end_ns=1, utc_ns=0).round_id == RoundId(0, 0)
