"""The comparison of two test runs says what differs, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("results", Path(__file__).parents[1] / "results.py")
assert SPEC is not None
assert SPEC.loader is not None
results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results)

PASSED = '<testcase classname="tests.unit.a" name="{}" time="{}"/>'
SKIPPED = '<testcase classname="tests.unit.a" name="{}"><skipped message="needs a GPU"/></testcase>'
FAILED = '<testcase classname="tests.unit.a" name="{}"><failure message="no"/></testcase>'


def run(folder: Path, *cases: str) -> Path:
    folder.mkdir()
    (folder / "unit.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return folder


def test_order_and_durations_make_no_difference(tmp_path: Path) -> None:
    one = run(tmp_path / "one", PASSED.format("x", 1), SKIPPED.format("y"))
    other = run(tmp_path / "other", SKIPPED.format("y"), PASSED.format("x", 2))
    assert results.main([str(one), str(other)]) == 0


def test_every_other_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(tmp_path / "one", PASSED.format("x", 1), PASSED.format("gone", 1), PASSED.format("y", 1))
    other = run(tmp_path / "other", FAILED.format("x"), SKIPPED.format("y"), PASSED.format("new", 1))
    assert results.main([str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "unit::tests.unit.a::gone: passed, then absent",
        "unit::tests.unit.a::new: absent, then passed",
        "unit::tests.unit.a::x: passed, then failed",
        "unit::tests.unit.a::y: passed, then skipped",
    ]


def test_the_reasons_of_skips_are_counted(tmp_path: Path) -> None:
    found = results.read(run(tmp_path / "one", PASSED.format("x", 1), SKIPPED.format("y"), SKIPPED.format("z")))
    assert results.summary(found).splitlines() == ["1 passed, 0 failed, 2 skipped", "    2 skipped: needs a GPU"]


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no JUnit files"):
        results.read(tmp_path)
