"""The headers for C programs compile as C and C++ of every standard that they promise, without a warning."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
USES = """#include "ringfold_agent.h"
int use_{number}(void);
int use_{number}(void) {{
  struct ringfold_hints_map map = {{0, 0, 0}};
  ringfold_hints_unguard(&map);
  return ringfold_guard_v2.is_installed;
}}
"""
MAIN = """
int use_1(void);
int use_2(void);
int main(void) { return use_1() + use_2(); }
"""


def compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gcc", ["-std=c99"]),
        ("gcc", ["-std=c11", "-D_POSIX_C_SOURCE=200809L"]),
        ("gcc", ["-std=gnu17"]),
        ("clang", ["-std=c99"]),
        ("g++", ["-x", "c++", "-std=c++11"]),
        ("g++", ["-x", "c++", "-std=c++20"]),
        ("clang++", ["-x", "c++", "-std=c++11"]),
    ],
    ids=lambda each: each if isinstance(each, str) else each[-1],
)
def test_two_files_of_a_program_include_it_and_share_one_guard(tmp_path: Path, name: str, options: list[str]) -> None:
    for number in (1, 2):
        (tmp_path / f"use_{number}.c").write_text(USES.format(number=number))
    (tmp_path / "main.c").write_text(MAIN)
    sources = [str(tmp_path / name) for name in ("use_1.c", "use_2.c", "main.c")]
    program = tmp_path / "program"
    subprocess.run([compiler(name), *options, *FLAGS, *sources, "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True, timeout=60)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_late_callers_refused_flows_and_many_agents(tmp_path: Path, name: str) -> None:
    program, source = tmp_path / "turns", ROOT / "tests" / "native" / "agent_turns.c"
    checks = ["-std=c99", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler(name), *FLAGS, *checks, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], text=True, capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
