"""Real masters and real peers for tests: processes that can be told, heard, frozen and killed.

A peer runs a *program*: a function at the top of a test file that takes one `Me`. The program talks to the test in JSON
lines: `me.say("step", number=3)` there is `peer.expect("step", number=3)` here, and `peer.tell("go on")` here is
`me.hear()` there. So a test never sleeps and hopes: it waits for a word, with a deadline, and the error of a wait that
ended quotes the last words and log lines of whom it waited for.

This file is both sides. Run as a script it is a child: it asks the kernel for SIGKILL at its parent's death, loads the
test file and calls the program. Nothing outlives the test: `Cluster.close` kills by pid, and frozen children, too.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

Fact = dict[str, Any]

PATIENCE_S = 30.0
"""The deadline of every wait that a test does not measure: long, because a loaded machine is no failure."""
FAST = {"heartbeat_ms": 50, "suspect_after_ms": 400, "evict_after_ms": 2_000}
"""Liveness settings under which a frozen peer is soon out, and a slow machine does not look like one.

On two cores the scheduler alone kept a runnable engine's thread waiting for up to 120 ms at a load of 8 to 16, and
360 ms at 20. At 24, with compilers at work, it was 2.2 s and 3.8 s once each: no setting helps there.
"""
_PR_SET_PDEATHSIG = 1
_TAIL = 25


class Late(AssertionError):
    """What was waited for did not come in time. The text says what came instead."""


class Lines:
    """Lines of a child's pipe, collected by a thread so that the child never blocks on a full pipe."""

    def __init__(self, stream: Any, parse: Callable[[str], Any]) -> None:  # noqa: ANN401 - any binary file
        self.all: list[Any] = []
        self.ended = False
        self._changed = threading.Condition()
        self._stream, self._parse = stream, parse
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for raw in self._stream:
            line = self._parse(raw.decode(errors="replace").rstrip("\n"))
            with self._changed:
                self.all.append(line)
                self._changed.notify_all()
        with self._changed:
            self.ended = True
            self._changed.notify_all()
        self._stream.close()

    def find(self, wanted: Callable[[Any], bool], begin: int, deadline: float) -> int | None:
        """The index of the first wanted line from `begin` on; None at the deadline, or when no more lines can come."""
        with self._changed:
            while True:
                for index in range(begin, len(self.all)):
                    if wanted(self.all[index]):
                        return index
                begin = len(self.all)
                left = deadline - time.monotonic()
                if self.ended or left <= 0:
                    return None
                self._changed.wait(left)

    def join(self) -> None:
        self._thread.join(5)


class Child:
    """A process of the test. `log` are its lines on standard error."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], parse_log: Callable[[str], Any]
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(env),
        )
        self.pid = self._process.pid
        self.out = Lines(self._process.stdout, _as_fact)
        self.log = Lines(self._process.stderr, parse_log)

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; the time just before, for tests that measure."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def kill(self) -> float:
        return self.signal(signal.SIGKILL)

    def freeze(self) -> float:
        """SIGSTOP, and wait until the kernel has stopped every thread."""
        at = self.signal(signal.SIGSTOP)
        self.wait_frozen()
        return at

    def wait_frozen(self) -> None:
        """Wait until the process is stopped, by whomever."""
        until(lambda: all(state in "TZX" for state in self._thread_states()), f"{self.name} is stopped")

    def thaw(self) -> float:
        return self.signal(signal.SIGCONT)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the process; its exit status."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Late(f"{self.name} did not end within {timeout_s:g} s{self.quote()}") from None

    def destroy(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self.out.join()
        self.log.join()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def quote(self) -> str:
        """The last words and log lines, for the text of an error."""
        said = "\n".join(f"  said {fact}" for fact in self.out.all[-_TAIL:])
        logged = "\n".join(f"  log  {line}" for line in self.log.all[-_TAIL:])
        state = "running" if self.is_running else f"ended with {self._process.returncode}"
        return f"\n{self.name} ({state}):\n{said}\n{logged}"

    # What the kernel knows of it

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"{self.name} has no memory: is it gone?{self.quote()}")

    def _thread_states(self) -> list[str]:
        states = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                states.append(task.joinpath("stat").read_text().rpartition(")")[2].split()[0])
        return states


class Master(Child):
    """`ringfold master` as a process. `log` are JSON objects; those of events have their fields."""

    address = ""

    def listening(self) -> None:
        index = self.out.find(lambda fact: "listening on " in str(fact), 0, time.monotonic() + PATIENCE_S)
        if index is None:
            raise Late(f"the master does not listen{self.quote()}")
        self.address = str(self.out.all[index]["text"]).removeprefix("listening on ").split(",")[0]

    def expect_log(self, words: str, timeout_s: float = PATIENCE_S, begin: int = 0) -> str:
        """The first log line from number `begin` on that contains `words`, now or in time."""
        return _expect_log(self, words, timeout_s, begin)

    def events(self, name: str) -> list[Fact]:
        """The events of this name that it has logged so far."""
        return [line for line in list(self.log.all) if line.get("event") == name]

    def expect_registered(self, count: int) -> None:
        """Wait until so many peers have registered, ever."""
        until(lambda: len(self.events("peer_registered")) >= count, f"{count} peers have registered")


class Peer(Child):
    """A process that runs a program. What it said is heard in order; words that were skipped stay in `out.all`."""

    _heard = 0

    def expect(
        self,
        word: str,
        where: Callable[[Fact], bool] = lambda fact: True,
        timeout_s: float = PATIENCE_S,
        **facts: object,
    ) -> Fact:
        """The next fact of this name that fits; everything before it counts as heard."""

        def wanted(fact: Fact) -> bool:
            return fact.get("say") == word and facts.items() <= fact.items() and where(fact)

        index = self.out.find(wanted, self._heard, time.monotonic() + timeout_s)
        if index is None:
            raise Late(f"{self.name} did not say {word!r} {facts or ''} within {timeout_s:g} s{self.quote()}")
        self._heard = index + 1
        found: Fact = self.out.all[index]
        return found

    def said(self, word: str) -> list[Fact]:
        """Every fact of this name so far."""
        return [fact for fact in list(self.out.all) if fact.get("say") == word]

    def tell(self, word: str = "go on", **facts: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tell": word, **facts}).encode() + b"\n")
        self._process.stdin.flush()

    def expect_log(self, words: str, timeout_s: float = PATIENCE_S, begin: int = 0) -> str:
        return _expect_log(self, words, timeout_s, begin)

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for the good end of the program."""
        if self.end(timeout_s) != 0:
            raise AssertionError(f"{self.name} failed{self.quote()}")


class Command(Child):
    """A `ringfold` command as a process. What it prints are facts if it is JSON, else `{"text": line}`."""

    def expect_text(self, words: str, timeout_s: float = PATIENCE_S) -> str:
        """A printed line that contains `words`, now or in time."""
        index = self.out.find(lambda fact: words in str(fact.get("text")), 0, time.monotonic() + timeout_s)
        if index is None:
            raise Late(f"{self.name} did not print {words!r} within {timeout_s:g} s{self.quote()}")
        return str(self.out.all[index]["text"])

    def expect_log(self, words: str, timeout_s: float = PATIENCE_S) -> str:
        return _expect_log(self, words, timeout_s, 0)


class Cluster:
    """One run: its master and its peers. Use it with `with`, or through the fixture of the same name."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.peers: list[Peer] = []
        self.master: Master | None = None

    def start_master(
        self,
        *,
        listen: str = "127.0.0.1:0",
        arguments: Sequence[str] = (),
        inside: Sequence[str] = (),
        **settings: object,
    ) -> Master:
        """`settings` are Ringfold's. Liveness is fast unless they say otherwise. `inside` is a command's prefix."""
        command = [*inside, *_COMMAND, "master", "--listen", listen, "--log-json", *arguments]
        self.master = Master("the master", command, _settings({**FAST, **settings}), _as_fact)
        self.children.append(self.master)
        self.master.listening()
        return self.master

    def start_command(self, name: str, *arguments: str, **settings: object) -> Command:
        """A `ringfold` command. `settings` are Ringfold's."""
        command = Command(name, [*_COMMAND, *arguments], _settings(settings), str)
        self.children.append(command)
        return command

    def start(
        self,
        program: Callable[["Me"], None],
        count: int = 1,
        *,
        join: Mapping[str, object] | None = None,
        inside: Sequence[str] = (),
        address: str | None = None,
        **options: object,
    ) -> list[Peer]:
        """Start `count` peers that run `program`. `join` are arguments of `ringfold.join`, `options` the program's."""
        where = address or (self.master.address if self.master is not None else "")
        started = []
        for _ in range(count):
            name = f"peer process {len(self.peers)}"
            order = {
                "file": program.__code__.co_filename,
                "program": program.__name__,
                "parent": os.getpid(),
                "address": where,
                "join": {"name": f"p{len(self.peers)}", **(join or {})},
                "options": options,
            }
            command = [*inside, sys.executable, __file__, json.dumps(order)]
            peer = Peer(name, command, {"PYTHONPATH": _path_with_this()}, str)
            self.children.append(peer)
            self.peers.append(peer)
            started.append(peer)
        return started

    def start_one(self, program: Callable[["Me"], None], **options: Any) -> Peer:  # noqa: ANN401 - as `start`
        return self.start(program, **options)[0]

    def close(self) -> None:
        for child in self.children:
            child.destroy()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def by_id(peers: Sequence[Peer]) -> dict[int, Peer]:
    """The peers by their ids in the run, from what they said when they had joined. Processes start in any order."""
    return {peer.expect("joined")["peer"]: peer for peer in peers}


def until(look: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that only looking can tell, such as a number under /proc."""
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() >= deadline:
            raise Late(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)


def _expect_log(child: Child, words: str, timeout_s: float, begin: int) -> str:
    index = child.log.find(lambda line: words in str(line), begin, time.monotonic() + timeout_s)
    if index is None:
        raise Late(f"{child.name} did not log {words!r} within {timeout_s:g} s{child.quote()}")
    return str(child.log.all[index])


_COMMAND = (
    sys.executable,
    "-c",
    "import cluster; cluster.die_with_parent(); from ringfold.cli import main; main()",
)


def _settings(values: Mapping[str, object]) -> dict[str, str]:
    env = {f"RINGFOLD_{name.upper()}": str(value) for name, value in values.items()}
    if not {"store", "journal"} & values.keys():
        env["RINGFOLD_NO_JOURNAL"] = "1"  # a test leaves nothing behind that the next one could find
    return {**env, "PYTHONPATH": _path_with_this()}


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGFOLD_")}
    # BLAS threads of many processes on few cores would be all that a test measures.
    return {**clean, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def _path_with_this() -> str:
    here = str(Path(__file__).parent)
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _as_fact(line: str) -> Fact:
    try:
        fact = json.loads(line)
    except ValueError:
        return {"text": line}
    return fact if isinstance(fact, dict) else {"text": line}


# The child's side


class Me:
    """What a program holds: its orders, and the line to the test."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.address: str = order["address"]
        self.options: dict[str, Any] = order["options"]
        self._join: dict[str, Any] = order["join"]
        self._lock = threading.Lock()
        self._unread = b""

    def join(self, **more: Any) -> Any:  # noqa: ANN401 - as ringfold.join; Ringfold is imported by programs only
        import ringfold

        return ringfold.join(self.address, **{"timeout_s": PATIENCE_S, **self._join, **more})

    def say(self, word: str, **facts: object) -> None:
        line = json.dumps({"say": word, "at": time.monotonic(), **facts}, default=_plain).encode() + b"\n"
        with self._lock:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    def hear(self, word: str | None = None) -> Fact:
        """Block until the test tells something. No deadline here: the test has one, and kills."""
        while (fact := self._next()) is None:
            self._read(None)
        assert word is None or fact["tell"] == word, f"expected {word!r}, was told {fact}"
        return fact

    def told(self) -> bool:
        """Whether the test has told something that was not heard yet. Never blocks."""
        self._read(0)
        return b"\n" in self._unread

    @contextlib.contextmanager
    def failing(self, word: str, **more: object) -> Iterator[Fact]:
        """The body must raise a Ringfold error: it is said under `word`, with its facts and those the body adds."""
        from ringfold import RingfoldError

        began = time.monotonic()
        try:
            yield more
        except RingfoldError as error:
            facts = {name: value for name, value in vars(error).items() if not name.startswith("_")}
            facts |= {"error": type(error).__name__, "words": str(error), "took_s": time.monotonic() - began}
            self.say(word, **facts, **more)
        else:
            raise AssertionError(f"nothing was raised where {word!r} was expected")

    def _next(self) -> Fact | None:
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        fact: Fact = json.loads(line)
        return fact

    def _read(self, timeout_s: float | None) -> None:
        if not select.select([0], [], [], timeout_s)[0]:
            return
        chunk = os.read(0, 65_536)
        if not chunk:
            sys.exit("the test is gone")
        self._unread += chunk


def _plain(value: object) -> object:
    return value.item() if hasattr(value, "item") else str(value)


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when the test's process dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


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
    """pytest for programs: loading it takes a third of a peer's start, and most programs have no use for it."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as pytest
        if name in ("mark", "fixture", "param") or name[0].isupper():
            return _Unused()
        if name.startswith("__"):
            raise AttributeError(name)
        del sys.modules["pytest"]
        self.__dict__.update(vars(importlib.import_module("pytest")))
        return self.__dict__[name]


def _run(order: Mapping[str, Any]) -> None:
    die_with_parent(order["parent"])
    sys.modules["pytest"] = _LazyPytest("pytest")
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    spec = importlib.util.spec_from_file_location("programs", order["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["programs"] = module
    spec.loader.exec_module(module)
    getattr(module, order["program"])(Me(order))


if __name__ == "__main__":
    # Test files import this file by its name, and must find this very module.
    sys.modules["cluster"] = sys.modules["__main__"]
    _run(json.loads(sys.argv[1]))
