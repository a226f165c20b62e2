"""What the command line says about the node to be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """All options of a node, of a run or without one; each kind looks at its own."""

    me: str | None = None
    rounds: Literal["local", "gloo"] = "local"
    interface: str = ""
    timeout_s: float = 30.0
    windows: int | None = None
    window_ms: int = 4_000
    listen_only: bool = False
    estimator: str = "auto"
    export: Path | None = None
    points: bool = False
    as_json: bool = False
    offset_ns: int = 0
    drift_ppb: int = 0
