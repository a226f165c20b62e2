"""`make fuzz`: property tests, decoders, machines and live processes under fresh randomness, for so many minutes.

    python -m tests.fuzz --minutes 10
    python -m tests.fuzz --minutes 1 --only master,peer --seed 7

What is found goes into `tests/fuzz/corpus`, which `make test` runs. The exit status is 1 if anything was found.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random, SystemRandom
from typing import NamedTuple

from tests.fuzz.targets import CORPUS, TARGETS, keep, name_of

ROOT = Path(__file__).parents[2]
SHARES = {"properties": 0.3, "live": 0.25}
"""Of the whole time; the rest is for the targets in this process, a second each in turn."""
SLICE_S = 1.0
MAX_END_S = 60.0
"""How long a child may take to end."""


class Progress:
    """One line that is written over on a terminal, and now and then a new one elsewhere."""

    def __init__(self, whole_s: float) -> None:
        self._began, self._whole_s, self._said = time.monotonic(), whole_s, 0.0
        self._is_terminal = sys.stderr.isatty()
        self.findings: list[str] = []

    def say(self, text: str, *, now: bool = False) -> None:
        at = time.monotonic()
        if at - self._said < (0.5 if self._is_terminal else 15.0) and not now:
            return
        self._said = at
        spent = at - self._began
        line = f"fuzz {spent:5.0f} of {self._whole_s:.0f} s, {len(self.findings)} found: {text}"
        sys.stderr.write(f"\r{line[:118]:<118}" if self._is_terminal and not now else f"{line}\n")
        sys.stderr.flush()

    def found(self, what: str) -> None:
        self.findings.append(what)
        self.say(f"FOUND {what}", now=True)


def machines(progress: Progress, seconds: float, names: list[str], rng: Random) -> None:
    """Fresh scripts for each target in turn."""
    until, steps, known = time.monotonic() + seconds, dict.fromkeys(names, 0), set()
    while time.monotonic() < until:
        for name in names:
            end = min(until, time.monotonic() + SLICE_S)
            while time.monotonic() < end:
                script, error = TARGETS[name].drawn(Random(rng.getrandbits(64)))
                steps[name] += len(script)
                if error is not None and name_of(name, error) not in known:
                    known.add(name_of(name, error))
                    progress.found(
                        f"{keep(name, script, error).relative_to(ROOT)}: {type(error).__name__}: {error}"[:300]
                    )
            progress.say(", ".join(f"{each} {count:,} steps" for each, count in steps.items()))
    progress.say(", ".join(f"{each} {count:,} steps" for each, count in steps.items()), now=True)


class Ended(NamedTuple):
    """How a child ended, what it wrote, and whether it was interrupted."""

    status: int
    output: str
    was_asked: bool


def child(progress: Progress, what: str, command: list[str], seconds: float, env: dict[str, str]) -> Ended:
    """Run a child for so long at most, then interrupt it as Ctrl-C does."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, began, was_interrupted = "", time.monotonic(), False
    try:
        while True:
            try:
                output = process.communicate(timeout=1.0)[0]
                return Ended(process.returncode, output, was_interrupted)
            except subprocess.TimeoutExpired:
                spent = time.monotonic() - began
                progress.say(f"{what} {spent:.0f} of {seconds:.0f} s")
                if spent >= seconds and not was_interrupted:
                    was_interrupted = True
                    process.send_signal(signal.SIGINT)
                if spent >= seconds + MAX_END_S:
                    return Ended(
                        -1, f"{what} did not end within {MAX_END_S:.0f} s after it was interrupted", was_interrupted
                    )
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def properties(progress: Progress, seconds: float, rng: Random) -> None:
    """The Hypothesis tests with the profile `fuzz`, again and again, in another order each time."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 5:
        files = sorted(path for folder in ("unit", "native") for path in (ROOT / "tests" / folder).glob("test_*.py"))
        files = [path for path in files if "@given" in path.read_text()]
        rng.shuffle(files)
        seed = rng.getrandbits(32)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "hypothesis", "-p", "no:cacheprovider"]
        command += ["--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}"]
        status, output, was_asked = child(progress, "properties", [*command, *map(str, files)], left, {})
        failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
        if failed and was_asked:
            # The interrupt may have struck where pytest takes it for the test's own exception: only the test can tell.
            status, output, _ = child(progress, f"again: {failed[0]}", [*command, *failed], MAX_END_S, {})
            failed = failed if status == 1 else []
        for node in failed:
            name = "property-" + re.sub(r"\W+", "-", node.rpartition("::")[2]).strip("-")
            path = CORPUS / f"{name}.json"
            CORPUS.mkdir(exist_ok=True)
            path.write_text(json.dumps({"target": "property", "test": node, "seed": seed}) + "\n")
            progress.found(f"{path.relative_to(ROOT)}: {node} with seed {seed}\n{output[-3_000:]}")
        if status not in (0, 2, 5) and not failed:
            progress.found(f"the property tests ended with status {status}:\n{output[-3_000:]}")
            return


def live(progress: Progress, seconds: float, rng: Random) -> None:
    """Real processes under hostile traffic."""
    seed = rng.getrandbits(32)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/e2e/test_hostile.py"]
    env = {"HOSTILE_SECONDS": f"{max(10.0, seconds):.0f}", "HOSTILE_SEED": str(seed)}
    status, output, _ = child(progress, f"live, seed {seed},", command, seconds + 120, env)
    if status:
        CORPUS.mkdir(exist_ok=True)
        path = CORPUS / f"live-{seed}.txt"
        path.write_text(f"HOSTILE_SECONDS={env['HOSTILE_SECONDS']} HOSTILE_SEED={seed}\n{output[-20_000:]}")
        progress.found(f"{path.relative_to(ROOT)}: status {status}\n{output[-3_000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="properties, live, or targets, with commas between")
    parser.add_argument("--seed", type=int, default=None, help="the same scripts again")
    chosen = parser.parse_args()
    only = [name for name in chosen.only.split(",") if name]
    seed = chosen.seed if chosen.seed is not None else SystemRandom().getrandbits(32)
    rng, whole_s = Random(seed), chosen.minutes * 60
    progress = Progress(whole_s)
    progress.say(f"seed {seed}", now=True)
    parts = {name: share for name, share in SHARES.items() if not only or name in only}
    targets = [name for name in TARGETS if not only or name in only]
    unit_s = whole_s / (sum(parts.values()) + (1 - sum(SHARES.values()) if targets else 0))
    try:
        if targets:
            machines(progress, unit_s * (1 - sum(SHARES.values())), targets, rng)
        if "properties" in parts:
            properties(progress, unit_s * parts["properties"], rng)
        if "live" in parts:
            live(progress, unit_s * parts["live"], rng)
    except KeyboardInterrupt:
        progress.say("interrupted", now=True)
        return 1 if progress.findings else 130
    progress.say("; ".join(each.partition("\n")[0] for each in progress.findings) or "nothing", now=True)
    return 1 if progress.findings else 0


if __name__ == "__main__":
    sys.exit(main())
