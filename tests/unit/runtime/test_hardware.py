"""The cores that a process may use, by its cgroups."""

import math
from pathlib import Path

import pytest

from ringfold.runtime.hardware import _cpu_quota, usable_cores, whole_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "765000 100000"}, 7.65),
        ({"slice/cpu.max": "400000 100000", "slice/job/cpu.max": "max 100000"}, 4.0),
        ({"slice/cpu.max": "400000 100000", "slice/job/cpu.max": "150000 100000"}, 1.5),
        ({"slice/job/other/cpu.max": "100000 100000"}, math.inf),
        ({"cpu/box/cpu.cfs_quota_us": "250000", "cpu/box/cpu.cfs_period_us": "100000"}, 2.5),
        ({"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, math.inf),
        ({"cpu.max": "100000 0"}, math.inf),
        ({"cpu.max": "garbage"}, math.inf),
    ],
)
def test_the_least_quota_of_a_process_and_the_groups_above_it_counts(
    tmp_path: Path, files: dict[str, str], expected: float
) -> None:
    for name, text in files.items():
        write(tmp_path / "fs" / name, text)
    write(tmp_path / "own", "3:cpu,cpuacct:/box\n0::/slice/job")
    assert _cpu_quota(str(tmp_path / "fs"), str(tmp_path / "own")) == expected


def test_without_a_list_of_groups_the_root_counts(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "200000 100000")
    assert _cpu_quota(str(tmp_path), str(tmp_path / "absent")) == 2.0


def test_threads_get_whole_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("ringfold.runtime.hardware._cpu_quota", lambda: 7.65)
    assert (usable_cores(), whole_cores()) == (8, 7)
    monkeypatch.setattr("ringfold.runtime.hardware._cpu_quota", lambda: 0.5)
    assert (usable_cores(), whole_cores()) == (1, 1)
    monkeypatch.setattr("ringfold.runtime.hardware._cpu_quota", lambda: math.inf)
    assert (usable_cores(), whole_cores()) == (16, 16)
