"""The targets by name, how a finding is named and made small, and the corpus of what was found.

A target has `drawn(rng)`, which makes a fresh script and says what it raised, and `replayed(script)`, which raises it
again. A script is JSON, and stays what it is when the generator changes.
"""

import itertools
import json
import re
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fuzz import agent, master, parsers, peer

TARGETS: dict[str, ModuleType] = {"parsers": parsers, "master": master, "peer": peer, "agent": agent}
CORPUS = Path(__file__).parent / "corpus"
SHRINK_S = 20.0
Script = list[list[Any]]


def fault_of(target: str, script: Script) -> BaseException | None:
    """What a script raises."""
    try:
        TARGETS[target].replayed(script)
    except Exception as error:
        return error
    return None


def name_of(target: str, error: BaseException) -> str:
    """The kind of fault and the function that it came from: one name for one bug, as far as that goes."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if "/ringfold/" in frame.filename]
    checks = [frame for frame in frames if Path(frame.filename).parent.name == "fuzz"]
    if checks and frames[-1] is checks[-1]:
        # What holds for every effect was broken; the asserted line says what.
        return f"{target}-{type(error).__name__}-{_words(checks[-1].line or 'invariant')}"
    place = places[-1]
    return f"{target}-{type(error).__name__}-{Path(place.filename).stem}-{place.name.strip('<>_')}"


def _words(line: str) -> str:
    return "-".join(re.findall(r"\w+", line))[:60]


def shrunk(target: str, script: Script, name: str) -> Script:
    """The script without the steps that the fault does not need, as far as the time allows."""
    until = time.monotonic() + SHRINK_S
    size = max(1, len(script) // 2)
    while size and time.monotonic() < until:
        start = 0
        while start < len(script) and time.monotonic() < until:
            rest = script[:start] + script[start + size :]
            error = fault_of(target, rest)
            if error is not None and name_of(target, error) == name:
                script = rest
            else:
                start += size
        size //= 2
    return script


def keep(target: str, script: Script, error: BaseException) -> Path:
    """Write a finding into the corpus, where `make test` runs it from now on. A file of this name that still raises is
    the same finding; one that was fixed is not."""
    name = name_of(target, error)
    for number in itertools.count(1):
        path = CORPUS / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        if not path.exists():
            break
        if fault_of(target, json.loads(path.read_text())["script"]) is not None:
            return path
    script = shrunk(target, script, name)
    CORPUS.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(step) for step in script)
    path.write_text(f'{{"target": "{target}", "script": [\n{lines}\n]}}\n')
    return path
