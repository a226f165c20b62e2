"""The runs of a master: how they are listed and forgotten. Both prove the master's own token."""

from typing import Literal

from msgspec import Struct, field

from ringfold.wire.base import Message

RunState = Literal["new", "running", "finished", "abandoned", "broken"]


class RunsRequest(Message, frozen=True, tag="runs_request"):
    """Somebody wants to know which runs there are."""

    version: int
    nonce: bytes
    proof: bytes


class ForgetRun(Message, frozen=True, tag="forget_run"):
    """Forget a run that has ended, so that its name is free again. Answered like `RunsRequest`, or refused."""

    version: int
    name: str
    nonce: bytes
    proof: bytes


class RunInfo(Struct, frozen=True):
    """One run. `since_s` is the wall clock of the master when the state began; 0 where it is not known."""

    name: str
    state: RunState
    peers: int = 0
    away: int = 0
    """Members that a new master still waits for."""
    revision: int = 0
    incarnation: int = 1
    since_s: int = 0
    why: str = ""
    """Of a broken one."""


class RunList(Message, frozen=True, tag="run_list"):
    """All runs of a master, by name."""

    runs: list[RunInfo] = field(default_factory=list)
