"""The results of test runs: `results.py RUN` sums one up, `results.py RUN OTHER` compares two.

A run is a folder of JUnit files, as `make test` writes them to `build/results`. Two runs are the same if the same tests
had the same outcomes, whatever the order and however long they took; otherwise the command ends with status 1.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

Outcome = tuple[str, str]
"""Whether it passed, and the reason if it was skipped."""


def read(folder: Path) -> dict[str, Outcome]:
    """The outcome of every test of a run by its name; of one that ran several times, the worst."""
    files = sorted(folder.glob("*.xml"))
    if not files:
        raise SystemExit(f"error: no JUnit files in {folder}; `make test` writes them to build/results")
    found: dict[str, Outcome] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            # CTest gives a test's name twice.
            parts = dict.fromkeys((case.get("classname", ""), case.get("name", "")))
            name = "::".join((file.stem, *filter(None, parts)))
            found[name] = min(found.get(name, (PASSED, "")), outcome(case), key=severity)
    return found


def outcome(case: ElementTree.Element) -> Outcome:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED, ""
    skipped = case.find("skipped")
    return (PASSED, "") if skipped is None else (SKIPPED, skipped.get("message", ""))


def severity(one: Outcome) -> int:
    return (FAILED, SKIPPED, PASSED).index(one[0])


def summary(run: dict[str, Outcome]) -> str:
    """How many of each outcome, and why tests were skipped."""
    counts = Counter(state for state, _ in run.values())
    lines = [", ".join(f"{counts[state]} {state}" for state in (PASSED, FAILED, SKIPPED))]
    reasons = Counter(reason for state, reason in run.values() if state == SKIPPED)
    lines += [f"{count:5} skipped: {reason}" for reason, count in sorted(reasons.items())]
    lines += [f"  failed: {name}" for name, (state, _) in sorted(run.items()) if state == FAILED]
    return "\n".join(lines)


def differences(one: dict[str, Outcome], other: dict[str, Outcome]) -> list[str]:
    """A line for each test that is not in both, or ended in another way."""
    absent: Outcome = ("absent", "")
    return [
        f"{name}: {first}, then {second}"
        for name in sorted(one.keys() | other.keys())
        if (first := one.get(name, absent)[0]) != (second := other.get(name, absent)[0])
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parsed = parser.parse_args(arguments)
    run = read(parsed.run)
    sys.stdout.write(summary(run) + "\n")
    if parsed.other is None:
        return 0
    found = differences(run, read(parsed.other))
    sys.stdout.write("\n".join(found) + "\n" if found else f"the same {len(run)} tests with the same outcomes\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
