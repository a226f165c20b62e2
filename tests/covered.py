"""Which lines the tests ran, Python and native in one table: `covered.py COVERAGE_JSON OBJECTS OUT`.

COVERAGE_JSON is what `coverage json` wrote, OBJECTS the folder of a build with `--coverage`, in which every process
that ended in an orderly manner left its counts. One that was killed leaves none, so the figures are a lower bound.
OUT gets every file with the lines that never ran; the least covered ones and the totals are printed.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 10

Lines = dict[str, dict[int, bool]]
"""For each file, by its path from the root of the project: whether each line of code ran."""


def python_lines(report: Path) -> Lines:
    files: dict[str, Any] = json.loads(report.read_text())["files"]
    return {
        name: {line: True for line in file["executed_lines"]} | {line: False for line in file["missing_lines"]}
        for name, file in files.items()
    }


def native_lines(objects: Path) -> Lines:
    """Merged over all objects, because every object that includes a header has its own counts for the header."""
    notes = sorted(objects.resolve().rglob("*.gcno"))
    command = ["gcov", "--json-format", "--stdout", *map(str, notes)]
    printed = subprocess.run(command, cwd=objects, check=True, capture_output=True, text=True).stdout
    found: Lines = defaultdict(dict)
    for one in printed.splitlines():
        unit = json.loads(one)
        for file in unit["files"]:
            path = (Path(unit["current_working_directory"]) / file["file"]).resolve()
            if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "native" / "tests"):
                continue
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("native/", "include/")):
                continue  # nanobind's and the compiler's own
            for line in file["lines"]:
                number = line["line_number"]
                found[name][number] = found[name].get(number, False) or line["count"] > 0
    return dict(found)


def share(lines: dict[int, bool]) -> float:
    return 100 * sum(lines.values()) / len(lines) if lines else 100.0


def table(kind: str, files: Lines) -> list[str]:
    every = [ran for lines in files.values() for ran in lines.values()]
    least = sorted((name for name in files if files[name]), key=lambda name: (share(files[name]), name))
    width = max(map(len, least[:SHOWN]), default=0)
    shown = [f"{share(files[name]):6.1f} %  {name:{width}}  {len(files[name]):5} lines" for name in least[:SHOWN]]
    total = 100 * sum(every) / max(len(every), 1)
    return [f"{kind}: {total:.1f} % of {len(every)} lines in {len(files)} files; the least covered:", *shown]


def main(report: str, objects: str, out: str) -> int:
    kinds = {"Python": python_lines(Path(report)), "native": native_lines(Path(objects))}
    result = {
        kind.lower(): {
            "lines": sum(map(len, files.values())),
            "covered": sum(sum(lines.values()) for lines in files.values()),
            "files": {
                name: {
                    "lines": len(lines),
                    "percent": round(share(lines), 2),
                    "missing": sorted(line for line, ran in lines.items() if not ran),
                }
                for name, lines in sorted(files.items())
            },
        }
        for kind, files in kinds.items()
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    for kind, files in kinds.items():
        sys.stdout.write("\n".join(table(kind, files)) + "\n")
    sys.stdout.write(f"every file, with the lines that never ran: {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
