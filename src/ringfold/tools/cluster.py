"""A local cluster of processes: masters, agents, peers and workers, for the demo, the soak, benchmarks and tests.

Nothing outlives the parent, however it ends:

* The kernel sends every process SIGKILL at its parent's death (PR_SET_PDEATHSIG, which survives exec). `launch` runs
  this file as a script, which requests that and then becomes the real command. Our own commands call
  `die_with_parent` themselves, which saves the start of an interpreter; so does a grandchild, such as a rank that
  `mpirun` started.
* Every process leads a session of its own, so that a Ctrl-C of the terminal reaches the parent only. The parent ends
  its processes in its own order: first those that clean up after themselves, then all of them by group.
* Sockets, output and scratch files are in one private directory, which is removed with the cluster.

Messages: a process may connect to the cluster's Unix socket (`Channel.connect`) and send its name; from then on both
sides send one JSON object per line. (`mpirun` forwards standard input to one rank only, and a waiting MPI rank spins; a
socket for each process avoids both.) One thread of the cluster receives, so that no process ever blocks in a send. By
convention `what` is the kind of a message, and a message with `error` is a failure of its sender.

Failures: an unexpected end of a process, or a wait that ran into its deadline, raises `ProcessFailed`, with the last
messages and the last output of the process. An end is expected after `kill`, `freeze` and `allow_exit`.

This file imports only the standard library at its top, because the script half runs before any package is importable.
"""

import contextlib
import ctypes
import json
import math
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, BinaryIO, Protocol, Self, TypeVar

Message = dict[str, Any]
_Found = TypeVar("_Found")
_Kind = TypeVar("_Kind", bound="ClusterProcess")

WAIT_S = 30.0
"""The deadline of every wait that is not measured: long, because a loaded machine is no failure."""
START_S = 20.0
MASTER_PORT = 48148
_PR_SET_PDEATHSIG = 1
_MAX_WAIT_S = 1.0
_POLL_S = 0.01
_HELLO_S = 1.0
"""A process that has ended may have sent its name just before: for so long its channel may still appear."""
_TERMINATE_S = 3.0
_TAIL_BYTES = 2_000
_TAIL_LINES = 25
_RINGFOLD = (
    "import sys; from ringfold.tools.cluster import die_with_parent; die_with_parent(int(sys.argv.pop(1)));"
    "from ringfold.cli import main; main()"
)


class ProcessFailed(RuntimeError):
    """A process ended, was silent or reported an error while it was needed. `log` is what it sent and printed last."""

    def __init__(self, name: str, text: str, log: str = "") -> None:
        super().__init__(name, text, log)
        self.name, self.text, self.log = name, text, log

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f"\n{self.log}" if self.log else "")


class ChannelClosed(EOFError):
    """The other end of a channel is gone."""


class Channel:
    """The channel of a process: one JSON object per line, in both directions, over a connected Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._partial = b""
        self._messages: list[Message] = []

    @classmethod
    def connect(cls, address: str, name: str) -> "Channel":
        """A process's end: connect to the cluster at `address` and send its name."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
        channel = cls(connection)
        channel.send({"name": name, "pid": os.getpid()})
        return channel

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message, default: Callable[[Any], Any] | None = None) -> None:
        """Send a message. `default` converts what JSON does not have, as in `json.dumps`."""
        try:
            self._connection.sendall(json.dumps(message, default=default).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None when none came in time. Raises `ChannelClosed` once the other end is gone."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while not self._messages:
                left = max(0.0, deadline - time.monotonic())
                # The interpreter does not notice a signal that comes right before a system call; it does between two.
                if selector.select(min(left, _MAX_WAIT_S)):
                    self.pull()
                elif left <= _MAX_WAIT_S:
                    return None
        return self._messages.pop(0)

    def pull(self) -> None:
        """Read what has arrived, without waiting."""
        try:
            chunk = self._connection.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not chunk:
            raise ChannelClosed("the other end closed")
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        self._messages.extend(json.loads(text) for text in whole)

    def queued(self) -> Message | None:
        """A message that was read already, if there is one."""
        return self._messages.pop(0) if self._messages else None

    def close(self) -> None:
        self._connection.close()


class Output:
    """What a process prints to one of its streams: a file, as lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._offset = 0

    @property
    def lines(self) -> list[str]:
        """All whole lines so far."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        if newline:
            self._lines += whole.decode(errors="replace").split("\n")
        return self._lines

    def text(self) -> str:
        return self._path.read_text(errors="replace")

    def tail(self) -> str:
        return self._path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


class SpawnedProcess(Protocol):
    """A process as `subprocess.Popen` has it: until `poll` or `wait` has returned its status, its id stays its own."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class _Endpoint:
    """The cluster's end of the channel to a process, or to a grandchild: what was received, and what is expected."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channel: Channel | None = None
        self.messages: list[Message] = []
        self.next = 0
        """The index of the first message that no `expect` has passed."""
        self.is_closed = False
        self.closed_because = ""
        """Why it was closed."""
        self.may_exit = False

    def pull(self) -> None:
        """Take in what has arrived, without waiting."""
        if self.channel is None or self.is_closed:
            return
        try:
            self.channel.pull()
        except ChannelClosed as error:
            self.is_closed, self.closed_because = True, str(error)
        while (message := self.channel.queued()) is not None:
            self.messages.append(message)

    def take(self) -> Message | None:
        """The next message, which is then forgotten."""
        return self.messages.pop(self.next) if len(self.messages) > self.next else None


class ClusterProcess:
    """A process of a cluster. `stdout` and `stderr` are what it prints, `messages` what it has sent."""

    def __init__(self, cluster: "LocalCluster", name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name, self._cluster, self.command = name, cluster, tuple(command)
        paths = [cluster.directory / f"{name}.{end}" for end in ("out", "log")]
        self.stdout, self.stderr = map(Output, paths)
        with paths[0].open("wb") as out, paths[1].open("wb") as log:
            self._popen = cluster.spawn(command, env, out, log)
        self.pid = self._popen.pid
        self._endpoint = cluster.endpoint(name)

    # Signals and the end

    def send_signal(self, number: signal.Signals) -> float:
        """Send a signal; the monotonic time (s) just before, for measurements."""
        at_s = time.monotonic()
        os.kill(self.pid, number)
        return at_s

    def kill(self) -> float:
        """SIGKILL; the monotonic time (s) just before."""
        self.allow_exit()
        return self.send_signal(signal.SIGKILL)

    def freeze(self) -> float:
        """SIGSTOP, and wait until the kernel has stopped every thread; the monotonic time (s) just before."""
        self.allow_exit()
        at_s = self.send_signal(signal.SIGSTOP)
        self.wait_frozen()
        return at_s

    def thaw(self) -> float:
        """SIGCONT; the monotonic time (s) just before."""
        return self.send_signal(signal.SIGCONT)

    def allow_exit(self) -> None:
        """From now on its end is not a failure."""
        self._endpoint.may_exit = True

    def wait_frozen(self) -> None:
        """Wait until the kernel has stopped every thread. The signal may come from any process."""
        self._poll(lambda: all(state in "TZX" for state in self._thread_states()) or None, WAIT_S, "is not stopped")

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the end of the process; its exit status. What it has sent is in `messages` then."""
        try:
            status = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {timeout_s:g} s") from None
        self._cluster.drain(self)
        return status

    def wait_success(self, timeout_s: float = WAIT_S) -> None:
        """Wait for the end of the process, with exit status 0."""
        if status := self.wait(timeout_s):
            raise self.failed(f"ended with status {status}")

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the process and all of its session, if it still runs."""
        signal_session(self._popen, number)

    # Messages

    def send(self, what: str = "continue", **fields: object) -> None:
        """Send a message of this kind."""
        self._cluster.wait_connected([self.name], WAIT_S)
        self._cluster.send([self.name], {"what": what, **fields})

    @property
    def messages(self) -> list[Message]:
        """What it has sent, except what `LocalCluster.receive` has taken."""
        return self._endpoint.messages

    def expect(
        self,
        what: str,
        where: Callable[[Message], bool] = lambda message: True,
        timeout_s: float = WAIT_S,
        **fields: object,
    ) -> Message:
        """The next message of this kind with these fields; those before it are skipped, and stay in `messages`."""

        def find() -> Message | None:
            for index in range(self._endpoint.next, len(self.messages)):
                message = self.messages[index]
                if message.get("what") == what and fields.items() <= message.items() and where(message):
                    self._endpoint.next = index + 1
                    return message
            return None

        found = self._cluster.wait_for(find, timeout_s, give_up=self._is_silent)
        if found is None:
            raise self.failed(f"did not send {what!r} {fields or ''} within {timeout_s:g} s")
        return found

    def reports(self, what: str) -> list[Message]:
        """All messages of this kind so far."""
        return [message for message in list(self.messages) if message.get("what") == what]

    # Output

    def expect_output(self, text: str, timeout_s: float = WAIT_S) -> str:
        """The first line on standard output that contains `text`, now or in time."""
        return self._expect_line(self.stdout, text, timeout_s, 0)

    def expect_log(self, text: str, timeout_s: float = WAIT_S, begin: int = 0) -> str:
        """The first line on standard error, from number `begin` on, that contains `text`, now or in time."""
        return self._expect_line(self.stderr, text, timeout_s, begin)

    def failed(self, text: str) -> ProcessFailed:
        """The error to raise, with what the process sent and printed last."""
        return ProcessFailed(self.name, text, self.describe())

    def describe(self) -> str:
        """The state, the last messages and the last output, for the text of an error."""
        state = "running" if self.is_running else f"ended with status {self._popen.returncode}"
        sent = [f"  sent {message}" for message in self.messages[-_TAIL_LINES:]]
        return "\n".join([f"{self.name} ({state})", *sent, self.log_tail()])

    def log_tail(self) -> str:
        """The end of what it printed, on either stream."""
        return "\n".join(filter(None, (self.stdout.tail(), self.stderr.tail())))

    # What the kernel knows of it

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise self.failed("has no memory: is it gone?")

    def _thread_states(self) -> list[str]:
        states = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                states.append(task.joinpath("stat").read_text().rpartition(")")[2].split()[0])
        return states

    def _expect_line(self, output: Output, text: str, timeout_s: float, begin: int) -> str:
        def find() -> str | None:
            return next((line for line in output.lines[begin:] if text in line), None)

        return self._poll(find, timeout_s, f"did not print {text!r}")

    def _poll(self, find: Callable[[], _Found | None], timeout_s: float, what: str) -> _Found:
        """Poll until `find` returns something. A process that has ended will not do it any more."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = self.is_running
            if (found := find()) is not None:
                return found
            if not running or time.monotonic() >= deadline:
                raise self.failed(f"{what} within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _is_silent(self) -> bool:
        """Whether no more messages can come."""
        if self._endpoint.channel is not None:
            return self._endpoint.is_closed
        return not self.is_running


class MasterProcess(ClusterProcess):
    """`ringfold master`. `address` is the first address at which it listens."""

    address = ""
    _logged: Sequence[Message] = ()

    def wait_listening(self) -> None:
        line = self.expect_output("listening on ")
        self.address = line.removeprefix("listening on ").split(",")[0]

    def wait_leading(self, timeout_s: float = START_S) -> None:
        """Wait until it leads and answers at its address."""
        from ringfold.errors import MasterUnreachable
        from ringfold.runtime.master_client import MasterClient

        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with MasterClient(self.address, b"") as connection:
                    connection.status()
            except MasterUnreachable:
                self._cluster.pause(0.05)
            else:
                return
        raise self.failed(f"does not answer at {self.address} after {timeout_s:.0f} s")

    def events(self, name: str) -> list[Message]:
        """The events of this name that it has logged so far, with `--log-json`."""
        new = self.stderr.lines[len(self._logged) :]
        self._logged = [*self._logged, *map(as_message, new)]
        return [event for event in self._logged if event.get("event") == name]

    def expect_events(self, name: str, count: int = 1, timeout_s: float = WAIT_S) -> list[Message]:
        """The events of this name, at least `count`, now or in time: a peer may know of one before it is logged."""

        def logged() -> list[Message] | None:
            events = self.events(name)
            return events if len(events) >= count else None

        return self._poll(logged, timeout_s, f"has not logged {name} {count} times")


class LocalCluster:
    """The processes of one measurement or test, as a context: leaving it ends them and removes the rest.

    `environment` is what every process starts with; by default that of this process.
    """

    master_arguments: Sequence[str] = ("--log-level", "warning")
    master_settings: Mapping[str, object] = {}
    exits_are_failures = True
    """Whether the end of a process is a failure until it is allowed."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        # Short: the path of a Unix socket has at most 107 bytes, and the temporary directory may be a long one.
        self.directory = Path(tempfile.mkdtemp(prefix="rf-cluster-"))
        self.address = str(self.directory / "channel")
        self.processes: dict[str, ClusterProcess] = {}
        self._environment = dict(os.environ if environment is None else environment)
        self._endpoints: dict[str, _Endpoint] = {}
        self._terminate_first: list[ClusterProcess] = []
        self._changed = threading.Condition()
        self._old_handler: Callable[[int, FrameType | None], Any] | int | signal.Handlers | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(256)
        self._woken, self._wake = os.pipe()
        self._receiver: threading.Thread | None = threading.Thread(
            target=self._receive_all, name="ringfold-cluster", daemon=True
        )
        self._receiver.start()

    def __enter__(self) -> Self:
        # A plain kill of the parent should clean up like Ctrl-C does. Only the main thread may set handlers.
        with contextlib.suppress(ValueError):
            self._old_handler = signal.signal(signal.SIGTERM, _exit_on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    # Starting

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, terminate_first: bool = False
    ) -> ClusterProcess:
        """Start any command. One that cleans up after itself (`mpirun`) is terminated first, and gets a moment."""
        process = self._start(ClusterProcess, name, [*_launcher(), *command], env or {})
        if terminate_first:
            self._terminate_first.append(process)
        return process

    def start_worker(
        self,
        name: str,
        script: str | Path,
        *arguments: object,
        inside: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> ClusterProcess:
        """Start a Python file or module that connects here: `SCRIPT ADDRESS NAME ARGUMENT...`."""
        target = [str(script)] if str(script).endswith(".py") else ["-m", str(script)]
        # Without -P the folder of a file would become importable, with everything beside it.
        command = [*inside, sys.executable, "-P", *target, self.address, name, *map(str, arguments)]
        return self.start(name, command, env=env)

    def start_command(
        self, name: str, *arguments: str, inside: Sequence[str] = (), **settings: object
    ) -> ClusterProcess:
        """Start a `ringfold` command. `inside` is a prefix, such as `network.inside(host)`."""
        return self._start(
            ClusterProcess, name, ringfold_command(*arguments, inside=inside), settings_environment(settings)
        )

    def start_master(
        self,
        name: str = "master",
        *,
        listen: str | None = None,
        arguments: Sequence[str] = (),
        inside: Sequence[str] = (),
        wait: bool = True,
        **settings: object,
    ) -> MasterProcess:
        """Start `ringfold master`; `settings` are Ringfold's. It listens when this returns, unless `wait` is false."""
        listen = listen or f"127.0.0.1:{free_port()}"
        command = ringfold_command("master", "--listen", listen, *self.master_arguments, *arguments, inside=inside)
        master = self._start(MasterProcess, name, command, settings_environment({**self.master_settings, **settings}))
        master.address = listen
        if wait:
            master.wait_listening()
        return master

    def start_agent(
        self, name: str, directory: Path, *options: str, inside: Sequence[str] = (), log_level: str = "warning"
    ) -> ClusterProcess:
        """Start `ringfold agent` with a directory of its own."""
        arguments = ["agent", "--dir", str(directory), "--log-level", log_level, *options]
        return self.start_command(name, *arguments, inside=inside)

    def spawn(self, command: Sequence[str], env: Mapping[str, str], out: BinaryIO, log: BinaryIO) -> "SpawnedProcess":
        """Start a process in a session of its own, with these streams and without input."""
        return subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=dict(env), start_new_session=True
        )

    def _start(self, kind: type[_Kind], name: str, command: Sequence[str], env: Mapping[str, str]) -> _Kind:
        assert name not in self.processes, f"{name} was started already"
        process = kind(self, name, command, {**self._environment, "PYTHONUNBUFFERED": "1", **env})
        self.processes[name] = process
        if not self.exits_are_failures:
            process.allow_exit()
        return process

    # Messages

    def wait_connected(self, names: Iterable[str], timeout_s: float) -> None:
        """Wait until each of `names` has a channel here."""
        wanted = list(names)

        def missing() -> list[str]:
            return [name for name in wanted if self.endpoint(name).channel is None]

        def connected() -> bool | None:
            if not missing():
                return True
            self._check_alive()
            return None

        if self.wait_for(connected, timeout_s) is None:
            name = min(missing())
            raise ProcessFailed(name, f"did not connect within {timeout_s:.0f} s", self.log_tail(name))

    def send(self, names: Iterable[str], message: Message) -> None:
        for name in names:
            channel = self.endpoint(name).channel
            assert channel is not None, f"{name} is not connected"
            try:
                channel.send(message)
            except ChannelClosed as error:
                raise ProcessFailed(name, f"is gone: {error}", self.log_tail(name)) from error

    def gather(self, names: Iterable[str], timeout_s: float) -> dict[str, Message]:
        """The next message of each of `names`. Messages of others stay queued."""
        missing, replies = set(names), dict[str, Message]()
        deadline = time.monotonic() + timeout_s
        while missing:
            got = self.receive(max(0.0, deadline - time.monotonic()), missing)
            if got is None:
                name = min(missing)
                raise ProcessFailed(name, f"sent nothing within {timeout_s:.0f} s", self.log_tail(name))
            replies[got[0]] = got[1]
            missing.discard(got[0])
        return replies

    def receive(self, timeout_s: float, names: Iterable[str] | None = None) -> tuple[str, Message] | None:
        """The next message of any process (or of one of `names`), or None when none came in time."""
        wanted = None if names is None else set(names)

        def take() -> tuple[str, Message] | None:
            for endpoint in self._endpoints.values():
                if wanted is not None and endpoint.name not in wanted:
                    continue
                if (message := endpoint.take()) is not None:
                    if "error" in message and not endpoint.may_exit:
                        raise ProcessFailed(endpoint.name, str(message["error"]), self.log_tail(endpoint.name))
                    return endpoint.name, message
            return None

        return self.wait_for(take, timeout_s)

    def pause(self, seconds: float) -> None:
        """Let time pass, and raise the unexpected end of a process."""
        self.receive(seconds, ())
        self._check_alive()

    def wait_for(
        self, find: Callable[[], _Found | None], timeout_s: float, give_up: Callable[[], bool] = lambda: False
    ) -> _Found | None:
        """The first result of `find`, called after every message; None at the deadline, or when `give_up` is true."""
        deadline = time.monotonic() + timeout_s
        give_up_at = None
        with self._changed:
            while True:
                if (found := find()) is not None:
                    return found
                self._raise_unexpected_end()
                now = time.monotonic()
                if now >= deadline or (give_up_at is not None and now >= give_up_at):
                    return None
                if give_up_at is None and give_up():
                    give_up_at = now + _HELLO_S
                self._changed.wait(min(deadline - now, _MAX_WAIT_S if give_up_at is None else _POLL_S))

    def drain(self, process: ClusterProcess) -> None:
        """Take in what a process that has ended had sent."""
        with self._changed:
            self.endpoint(process.name).pull()

    def endpoint(self, name: str) -> _Endpoint:
        return self._endpoints.setdefault(name, _Endpoint(name))

    # Processes by name

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def kill(self, name: str) -> int:
        """SIGKILL a process; the monotonic time (ns) just before."""
        return self._send_signal(name, signal.SIGKILL)

    def freeze(self, name: str) -> int:
        """SIGSTOP a process; the monotonic time (ns) just before."""
        return self._send_signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> int:
        """SIGCONT a frozen process, and expect it to live again; the monotonic time (ns) just before."""
        at_ns = self._send_signal(name, signal.SIGCONT)
        self.endpoint(name).may_exit = False
        return at_ns

    def _send_signal(self, name: str, number: signal.Signals) -> int:
        self.endpoint(name).may_exit = True
        at_ns = time.monotonic_ns()
        os.kill(self.pid(name), number)
        return at_ns

    def allow_exit(self, name: str) -> None:
        """From now on the end of a process is not a failure."""
        self.endpoint(name).may_exit = True

    def wait_exit(self, name: str, timeout_s: float) -> int:
        """Wait for the end of a process; its exit status. Its messages that were not received are discarded."""
        status = self.processes[name].wait(timeout_s)
        with self._changed:
            self.endpoint(name).messages.clear()
            self.endpoint(name).may_exit = True
        return status

    def log_tail(self, name: str) -> str:
        # A rank's output is in that of the `mpirun` that started it: "mpi.0" -> "mpi".
        for stem in (name, name.split(".")[0]):
            if stem in self.processes:
                return self.processes[stem].log_tail()
        return ""

    # The end

    def close(self) -> None:
        """End every process and remove the directory. Safe to call twice."""
        if self._receiver is None:
            return
        for process in self._terminate_first:
            process.end(signal.SIGTERM)
        for process in self._terminate_first:
            with contextlib.suppress(ProcessFailed):
                process.wait(_TERMINATE_S)
        for process in self.processes.values():
            process.end(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        os.write(self._wake, b"x")
        self._receiver.join()
        self._receiver = None
        for endpoint in self._endpoints.values():
            if endpoint.channel is not None:
                endpoint.channel.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._woken)
        shutil.rmtree(self.directory, ignore_errors=True)

    # Receiving, in a thread

    def _receive_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            selector.register(self._woken, selectors.EVENT_READ, self._woken)
            unnamed: list[Channel] = []
            while True:
                for key, _ in selector.select():
                    match key.data:
                        case None:
                            channel = Channel(self._listener.accept()[0])
                            unnamed.append(channel)
                            selector.register(channel, selectors.EVENT_READ, channel)
                        case Channel() as channel:
                            self._introduce(selector, channel, unnamed)
                        case _Endpoint() as endpoint:
                            self._pull(selector, endpoint)
                        case _:
                            for channel in unnamed:
                                channel.close()
                            return

    def _introduce(self, selector: selectors.BaseSelector, channel: Channel, unnamed: list[Channel]) -> None:
        """The first message of a channel is the name of its process."""
        try:
            channel.pull()
        except ChannelClosed:
            selector.unregister(channel)
            unnamed.remove(channel)
            channel.close()
            return
        if (hello := channel.queued()) is None:
            return
        unnamed.remove(channel)
        with self._changed:
            endpoint = self.endpoint(str(hello["name"]))
            endpoint.channel, endpoint.is_closed = channel, False
            selector.modify(channel, selectors.EVENT_READ, endpoint)
            while (message := channel.queued()) is not None:
                endpoint.messages.append(message)
            self._changed.notify_all()

    def _pull(self, selector: selectors.BaseSelector, endpoint: _Endpoint) -> None:
        with self._changed:
            endpoint.pull()
            if endpoint.is_closed:
                assert endpoint.channel is not None
                selector.unregister(endpoint.channel)
            self._changed.notify_all()

    def _raise_unexpected_end(self) -> None:
        for endpoint in self._endpoints.values():
            if endpoint.closed_because and not endpoint.may_exit:
                endpoint.may_exit = True
                raise ProcessFailed(endpoint.name, f"ended: {endpoint.closed_because}", self.log_tail(endpoint.name))

    def _check_alive(self) -> None:
        for name, process in self.processes.items():
            if not self.endpoint(name).may_exit and not process.is_running:
                self.endpoint(name).may_exit = True
                raise ProcessFailed(name, f"ended with status {process.wait()}", process.log_tail())


def launch(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a command, in a session of its own, that the kernel kills when the calling thread ends."""
    return subprocess.Popen(
        [*_launcher(), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )


def signal_session(process: SpawnedProcess, number: signal.Signals) -> None:
    """Send a signal to a process that leads a session, and to everything in it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def ringfold_command(*arguments: str, inside: Sequence[str] = ()) -> list[str]:
    """The command line of a `ringfold` command that dies with this process."""
    return [*inside, sys.executable, "-P", "-c", _RINGFOLD, str(os.getpid()), *arguments]


def settings_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings of Ringfold as environment variables.

    Without a store there is no journal, so that nothing is left behind that the next master could find. And a token of
    the user's own runs has no place here: the peers do not have it.
    """
    env = {f"RINGFOLD_{name.upper()}": str(value) for name, value in settings.items()}
    env.setdefault("RINGFOLD_TOKEN_FILE", "")
    if not {"store", "journal"} & settings.keys():
        env["RINGFOLD_NO_JOURNAL"] = "1"
    return env


def as_message(line: str) -> Message:
    """A printed line: the JSON object that it is, or `{"text": line}`."""
    try:
        message = json.loads(line)
    except ValueError:
        return {"text": line}
    return message if isinstance(message, dict) else {"text": line}


def free_port() -> int:
    """A TCP port of loopback that is free now, and not an ephemeral one, which any connection may take at any time."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process when its parent dies. `parent` closes the race with a death before."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _launcher() -> list[str]:
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _become(arguments: Sequence[str]) -> None:
    """The script half: bind this process to its parent's life, then become the command."""
    parent, *command = arguments
    die_with_parent(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(sys.argv[1:])
