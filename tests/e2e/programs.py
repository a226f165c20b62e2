"""Functions of test files as processes: peers of a real master, which a test commands and watches.

A *program* is a function at the top of a test file that takes one `ProgramContext`. Messages go in both directions, as
in any cluster of `ringfold.tools.cluster`: `me.report("step", number=3)` there is `peer.expect("step", number=3)` here,
and `peer.send("strike")` here is `me.receive()` there. So a test never sleeps and hopes: it waits for a message, with a
deadline, and the error of a wait that failed has the last messages and log lines of the process.

This file is both sides. Run as a script, `programs.py ADDRESS NAME ORDER`, it is such a process: it loads the test file
and calls the program.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import fork_server

from ringfold.tools.cluster import (
    WAIT_S,
    Channel,
    ChannelClosed,
    ClusterProcess,
    LocalCluster,
    MasterProcess,
    Message,
    ProcessFailed,
    SpawnedProcess,
    die_with_parent,
    ringfold_command,
)

__all__ = [
    "FAST",
    "WAIT_S",
    "Channel",
    "ClusterProcess",
    "MasterProcess",
    "Message",
    "ProcessFailed",
    "ProgramCluster",
    "ProgramContext",
    "by_id",
    "until",
]

FAST = {"heartbeat_ms": 50, "suspect_after_ms": 400, "evict_after_ms": 2_000}
"""Liveness settings under which a frozen peer is soon evicted, and a slow machine does not look like one.

On two cores the scheduler alone kept a runnable engine's thread waiting for up to 120 ms at a load of 8 to 16, and
360 ms at 20. At 24, with compilers at work, it was 2.2 s and 3.8 s once each: no setting helps there.
"""


class ProgramCluster(LocalCluster):
    """A master, commands, and peers that run programs. Use it with `with`, or through the fixture `cluster`.

    No setting of the caller's environment reaches them, and any process may end at any time: tests wait for what they
    need.
    """

    master_arguments = ("--log-json",)
    master_settings = FAST
    exits_are_failures = False
    package = "ringfold"
    """What programs find imported; "torch" if they use it."""

    def __init__(self) -> None:
        super().__init__(self.clean_environment())
        self.peers: list[ClusterProcess] = []
        self.master: MasterProcess | None = None

    @staticmethod
    def clean_environment() -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RINGFOLD_", "PYTEST_"))}
        # BLAS threads of many processes on few cores would be all that a test measures.
        path = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**clean, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}

    def spawn(self, command: Sequence[str], env: Mapping[str, str], out: BinaryIO, log: BinaryIO) -> SpawnedProcess:
        """Programs and commands of Ringfold are forked from a process that has imported it: most of a start is that."""
        code, arguments, package = "", list[str](), "ringfold"
        whole, namespace = command, ""
        if command[:3] == ["ip", "netns", "exec"]:
            namespace, command = command[3], command[4:]
        if command[:2] == [sys.executable, __file__]:
            order = {**json.loads(command[4]), "parent": "{parent}"}
            code, arguments = "import programs; programs.main()", [*command[2:4], json.dumps(order)]
            package = self.package
        elif command[:4] == ringfold_command()[:4]:
            code, arguments = command[3], ["{parent}", *command[5:]]
        if not code or not fork_server.is_preloaded_for(env):
            return super().spawn(whole, env, out, log)
        return fork_server.ForkedSession(code, arguments, env, out, log, package, namespace)

    def start_master(
        self,
        name: str = "master",
        *,
        listen: str | None = "127.0.0.1:0",
        arguments: Sequence[str] = (),
        inside: Sequence[str] = (),
        wait: bool = True,
        **settings: object,
    ) -> MasterProcess:
        """As in a cluster; programs started from now on join it. Liveness is fast unless `settings` change it."""
        more = {"listen": listen, "arguments": arguments, "inside": inside, "wait": wait}
        self.master = super().start_master(self._unused(name), **more, **settings)  # type: ignore[arg-type]
        return self.master

    def start_command(
        self, name: str, *arguments: str, inside: Sequence[str] = (), **settings: object
    ) -> ClusterProcess:
        return super().start_command(self._unused(name), *arguments, inside=inside, **settings)

    def start_program(
        self,
        program: Callable[["ProgramContext"], None],
        count: int = 1,
        *,
        join: Mapping[str, object] | None = None,
        inside: Sequence[str] = (),
        address: str | None = None,
        **options: object,
    ) -> list[ClusterProcess]:
        """Start `count` peers that run `program`. `join` are arguments of `ringfold.join`, `options` the program's."""
        where = address or (self.master.address if self.master is not None else "")
        started = []
        for _ in range(count):
            number = len(self.peers)
            order = {
                "file": program.__code__.co_filename,
                "program": program.__name__,
                "parent": os.getpid(),
                "address": where,
                "join": {"name": f"p{number}", **(join or {})},
                "options": options,
            }
            name = f"peer process {number}"
            command = [*inside, sys.executable, __file__, self.address, name, json.dumps(order)]
            peer = self._start(ClusterProcess, name, command, {})
            self.peers.append(peer)
            started.append(peer)
        return started

    def start_one(self, program: Callable[["ProgramContext"], None], **options: Any) -> ClusterProcess:  # noqa: ANN401 - as `start_program`
        return self.start_program(program, **options)[0]

    def _unused(self, name: str) -> str:
        taken = sum(other == name or other.startswith(f"{name}, ") for other in self.processes)
        return f"{name}, {taken + 1}" if taken else name


def by_id(peers: Sequence[ClusterProcess]) -> dict[int, ClusterProcess]:
    """The peers by their ids in the run, as they reported when they had joined. Processes start in any order."""
    return {peer.expect("joined")["peer"]: peer for peer in peers}


def descriptors_of(pid: int) -> list[str]:
    """What the open descriptors of a process are, as links."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:  # closed meanwhile
            continue
    return links


def until(look: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until `look` is true, such as for a number under /proc."""
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)


# The side of the process


class ProgramContext:
    """What a program gets: the address of the master, its options, and the channel to the test."""

    def __init__(self, channel: Channel, order: Mapping[str, Any]) -> None:
        self.address: str = order["address"]
        self.options: dict[str, Any] = order["options"]
        self._join: dict[str, Any] = order["join"]
        self._channel = channel
        self._lock = threading.Lock()
        self._queued: list[Message] = []

    def join(self, **more: Any) -> Any:  # noqa: ANN401 - as ringfold.join; Ringfold is imported by programs only
        import ringfold

        return ringfold.join(self.address, **{"timeout_s": WAIT_S, **self._join, **more})

    def fileno(self) -> int:
        """The descriptor of the channel."""
        return self._channel.fileno()

    def report(self, what: str, **fields: object) -> None:
        """Send a message to the test, with the time."""
        with self._lock:
            self._channel.send({"what": what, "at": time.monotonic(), **fields}, default=_plain)

    def receive(self, what: str | None = None) -> Message:
        """Wait for a message of the test. There is no deadline here: the test has one, and kills."""
        message = self._queued.pop(0) if self._queued else self._channel.receive()
        assert message is not None
        assert what is None or message["what"] == what, f"expected {what!r}, received {message}"
        return message

    def has_message(self) -> bool:
        """Whether the test has sent a message that was not received yet. Never blocks."""
        if not self._queued and (message := self._channel.receive(0)) is not None:
            self._queued.append(message)
        return bool(self._queued)

    @contextlib.contextmanager
    def failing(self, what: str, **more: object) -> Iterator[Message]:
        """The body must raise a Ringfold error: it is reported as `what`, with its facts and those the body adds."""
        from ringfold import RingfoldError

        began = time.monotonic()
        try:
            yield more
        except RingfoldError as error:
            facts = {name: value for name, value in vars(error).items() if not name.startswith("_")}
            facts |= {"error": type(error).__name__, "message": str(error), "took_s": time.monotonic() - began}
            self.report(what, **facts, **more)
        else:
            raise AssertionError(f"nothing was raised where {what!r} was expected")


def _plain(value: Any) -> object:  # noqa: ANN401 - anything that JSON does not have
    return value.item() if hasattr(value, "item") else str(value)


class _Unused:
    """Stands for a decorator, a mark or a type of pytest in a file of which only a program is run."""

    def __getattr__(self, name: str) -> "_Unused":
        return self

    def __getitem__(self, item: object) -> "_Unused":
        return self

    def __or__(self, other: object) -> "_Unused":
        return self

    __ror__ = __or__

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as a decorator it returns what it got
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else self


class _LazyPytest(ModuleType):
    """pytest for programs: loading it takes a third of a peer's start, and most programs do not use it."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as pytest
        if name in ("mark", "fixture", "param") or name[0].isupper():
            return _Unused()
        if name.startswith("__"):
            raise AttributeError(name)
        del sys.modules["pytest"]
        self.__dict__.update(vars(importlib.import_module("pytest")))
        return self.__dict__[name]


def main() -> None:
    """`programs.py ADDRESS NAME ORDER`."""
    _run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))


def _run(address: str, name: str, order: Mapping[str, Any]) -> None:
    die_with_parent(int(order["parent"]))
    sys.modules["pytest"] = _LazyPytest("pytest")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    spec = importlib.util.spec_from_file_location("programs_of_a_test", order["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["programs_of_a_test"] = module
    spec.loader.exec_module(module)
    try:
        getattr(module, order["program"])(ProgramContext(Channel.connect(address, name), order))
    except ChannelClosed:
        sys.exit("the test is gone")


if __name__ == "__main__":
    # Test files import this file by its name, and must find this very module.
    sys.modules["programs"] = sys.modules["__main__"]
    main()
