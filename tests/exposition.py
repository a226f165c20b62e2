"""Reads the text of Prometheus, for tests, and has it checked by Prometheus's own tool where that is installed."""

import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

import pytest

_SAMPLE = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"(?:,|$)')


class Sample(NamedTuple):
    """One line: the name of the series, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


def read(text: bytes | str) -> list[Sample]:
    """All samples; AssertionError if a line is none."""
    found = []
    for line in (text.decode() if isinstance(text, bytes) else text).splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        labels = match["labels"] or ""
        assert "".join(each.group() for each in _LABEL.finditer(labels)) == labels, line
        found.append(Sample(match["name"], dict(_LABEL.findall(labels)), float(match["value"])))
    return found


def value(text: bytes | str, series: str, /, **labels: str) -> float:
    """The value of the one sample with these labels, and perhaps more."""
    found = [each for each in read(text) if each.name == series and labels.items() <= each.labels.items()]
    assert len(found) == 1, f"{len(found)} samples of {series} with {labels}"
    return found[0].value


def check(text: bytes) -> None:
    """Let promtool look for faults of names, units and help; skips the test where there is no promtool."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    result = subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def get(url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 20.0) -> tuple[int, bytes]:
    """The status and the body of a response."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout_s
        ) as seen:
            return seen.status, seen.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
