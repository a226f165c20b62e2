"""Processes that have imported what they need when they start: forked from one that has, and does nothing else.

Importing torch takes about two seconds of a core, and Ringfold with NumPy half a second. Tests start some hundred
processes that need the one, and more than two thousand that need the other. A child is a process of its own like any
other, with its own standard streams, and runs its code as `python -c` would. Run as a script,
`fork_server.py DESCRIPTOR PACKAGE`, this file is the process that forks. PACKAGE is "ringfold", or "torch" for both.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

SOURCE = Path(__file__).resolve().parents[2] / "src"
_PRELOADED = (
    "programs",
    "redis",
    "ringfold.cli.master",
    "ringfold.iteration.shell",
    "ringfold.master.server",
    "ringfold.peer.communicator",
    "ringfold.peer.joining",
    "ringfold.state.shared",
    "ringfold.store.client",
    "ringfold.store.etcd",
    "ringfold.store.sqlite",
)
_PRELOADED_WITH_TORCH = ("torch.distributed", "ringfold.probe.rounds.gloo", "ringfold.store.tcp")
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_MAX_REQUEST_BYTES = 1 << 20


class _Child:
    """A child, with as much of `subprocess.Popen` as tests use. Its id is its own until its status was read here."""

    returncode: int | None = None

    def __init__(self, server: "_Server", request: Mapping[str, object], streams: Sequence[int]) -> None:
        self._status, child_status = os.pipe()
        socket.send_fds(server.control, [json.dumps(request).encode()], [*streams, child_status])
        os.close(child_status)
        self.pid = int(server.control.recv(64))

    def poll(self) -> int | None:
        """The exit status as `Popen` has it, or None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status, 64)))
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(_Child):
    """A process with Ringfold or torch, whose lines are written and read here. Its standard error is ours."""

    def __init__(
        self, code: str, *arguments: str, env: Mapping[str, str] | None = None, package: str = "ringfold"
    ) -> None:
        child_in, ours_in = os.pipe()
        ours_out, child_out = os.pipe()
        request = {"code": code, "arguments": arguments, "env": dict(env or {})}
        super().__init__(_server(package), request, [child_in, child_out, 2])
        for one in (child_in, child_out):
            os.close(one)
        self.stdin = os.fdopen(ours_in, "wb", buffering=0)
        self.stdout = os.fdopen(ours_out, "rb")

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        """Close its input, and return its output until it has ended. A second call returns nothing."""
        if self.stdout.closed:
            return b"", None
        deadline = None if timeout is None else time.monotonic() + timeout
        self.stdin.close()
        os.set_blocking(self.stdout.fileno(), True)
        reported = b"".join(self._chunks(deadline))
        self.stdout.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return reported, None

    def _chunks(self, deadline: float | None) -> Iterator[bytes]:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a forked process", left or 0)
            if not (chunk := self.stdout.read1(65_536)):
                return
            yield chunk


class ForkedSession(_Child):
    """A process with Ringfold or torch, in a session of its own, with these streams and without input.

    `{parent}` in an argument stands for the id of the process that has forked it. `namespace` is the name of a network
    namespace; its /sys stays as it is.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        out: BinaryIO,
        log: BinaryIO,
        package: str = "ringfold",
        namespace: str = "",
    ) -> None:
        assert is_preloaded_for(env)
        request = {"code": code, "arguments": list(arguments), "env": dict(env), "session": True}
        request["namespace"] = namespace
        with open(os.devnull, "rb") as nothing:
            super().__init__(_server(package), request, [nothing.fileno(), out.fileno(), log.fileno()])


def is_preloaded_for(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked: only Ringfold's own variables are read after a start."""
    return _others(env) == _others(_environment())


def _others(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("RINGFOLD_")}


@functools.cache
def _environment() -> dict[str, str]:
    from programs import ProgramCluster

    return {**ProgramCluster.clean_environment(), "PYTHONUNBUFFERED": "1"}


@functools.cache
def _server(package: str) -> "_Server":
    # One thread each: what runs there waits for its peers, and several of them share few cores.
    return _Server(package, {**_environment(), "OMP_NUM_THREADS": "1"})


class _Server:
    """The process that forks, and the socket that keeps it alive: it ends, and its children with it, when we do."""

    def __init__(self, package: str, env: Mapping[str, str]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Never waited for: it lives as long as this process.
        command = [sys.executable, __file__, str(theirs.fileno()), package]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=dict(env), stdin=subprocess.DEVNULL)
        process.returncode = 0  # so that the object, when it is collected, does not warn that the process still runs
        theirs.close()
        atexit.register(self.control.close)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork at every request. Returns in the children only, with the request."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    """By process, the pipe that its status is written to."""
    ended: dict[int, int] = {}
    """By the pipe that its status was written to, the process. When it was read, the id may be used again."""
    waiting = select.poll()
    for one in (control.fileno(), woken):
        waiting.register(one, select.POLLIN)
    while True:
        ready = dict(waiting.poll())
        for pipe in ready.keys() & ended.keys():
            waiting.unregister(pipe)
            os.waitpid(ended.pop(pipe), 0)
            os.close(pipe)
        if woken in ready:
            os.read(woken, 4096)
            for pid, pipe in _new_ends(running):
                ended[pipe] = pid
                waiting.register(pipe, 0)  # an error is that of a closed end
        if control.fileno() not in ready:
            continue
        request, streams, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            return _begin_child(control, json.loads(request), streams, [woken, wake, *running.values(), *ended])
        for stream in streams[:3]:
            os.close(stream)
        running[pid] = streams[3]


def _new_ends(running: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The processes that have ended, with the pipes that their statuses were written to."""
    for pid, pipe in list(running.items()):
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            status = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(pipe, str(status).encode())
            yield pid, running.pop(pid)


def _begin_child(
    control: socket.socket, request: dict[str, Any], streams: Sequence[int], others: Sequence[int]
) -> dict[str, Any]:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with_parent()
    if request.get("session"):
        os.setsid()
        os.environ.clear()
    if request.get("namespace"):
        with open(f"/run/netns/{request['namespace']}", "rb") as network:
            assert ctypes.CDLL(None).setns(network.fileno(), _CLONE_NEWNET) == 0
    os.environ.update(request["env"])
    for number, stream in enumerate(streams):
        if number < 3:
            os.dup2(stream, number)
        os.close(stream)
    for one in others:
        os.close(one)
    # Who has asked may send signals from now on.
    control.send(str(os.getpid()).encode())
    control.close()
    return request


if __name__ == "__main__":
    _die_with_parent()
    for name in [*_PRELOADED, *(_PRELOADED_WITH_TORCH if sys.argv[2] == "torch" else ())]:
        importlib.import_module(name)
    gc.freeze()
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = ["-c", *(each.replace("{parent}", str(os.getppid())) for each in _request["arguments"])]
    exec(compile(_request["code"], "<preloaded>", "exec"), {"__name__": "__main__"})
