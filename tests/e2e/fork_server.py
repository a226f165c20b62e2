"""Processes that have imported torch when they start: forked from one that has, and does nothing else.

`import torch` takes about two seconds of a core, and tests of the TCP store and of gloo start some seventy processes
that need it. A child is a process of its own like any other, with its own standard streams, and runs its code as
`python -c` would. Run as a script, this file is the process that forks.
"""

import ctypes
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
_PR_SET_PDEATHSIG = 1
_MAX_REQUEST_BYTES = 1 << 20


class Forked:
    """A child, with as much of `subprocess.Popen` as tests use. What it writes to standard error goes to ours."""

    returncode: int | None = None

    def __init__(self, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        child_in, ours_in = os.pipe()
        ours_out, child_out = os.pipe()
        self._status, child_status = os.pipe()
        request = json.dumps({"code": code, "arguments": arguments, "env": dict(env or {})}).encode()
        control = _server()
        socket.send_fds(control, [request], [child_in, child_out, 2, child_status])
        for one in (child_in, child_out, child_status):
            os.close(one)
        self.stdin = os.fdopen(ours_in, "wb", buffering=0)
        self.stdout = os.fdopen(ours_out, "rb")
        self.pid = int(control.recv(64))

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


@functools.cache
def _server() -> socket.socket:
    """The process that forks, by the socket that keeps it alive: it ends, and its children with it, when we do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    # One thread each: what runs here waits for its peers, and several of them share few cores.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Never waited for: it lives as long as this process.
    process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env)
    process.returncode = 0  # so that the object, when it is collected, does not warn that the process still runs
    theirs.close()
    return ours


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork at every request. Returns in the children only, with the request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status_of: dict[int, int] = {}
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report(status_of)
        if control not in ready:
            continue
        request, streams, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with_parent()
            for one in (control.detach(), woken, wake, *status_of.values()):
                os.close(one)
            for number, stream in enumerate(streams):
                if number < 3:
                    os.dup2(stream, number)
                os.close(stream)
            order: dict[str, Any] = json.loads(request)
            return order
        for stream in streams[:3]:
            os.close(stream)
        status_of[pid] = streams[3]
        control.send(str(pid).encode())


def _report(status_of: dict[int, int]) -> None:
    while status_of:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with os.fdopen(status_of.pop(pid), "wb", buffering=0) as pipe:
            pipe.write(str(status).encode())


if __name__ == "__main__":
    _die_with_parent()
    import torch.distributed  # noqa: F401 - this is what it is for

    import ringfold.iteration.shell
    import ringfold.probe.rounds.gloo
    import ringfold.store.tcp  # noqa: F401

    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.update(_request["env"])
    sys.argv = ["-c", *_request["arguments"]]
    exec(compile(_request["code"], "<preloaded>", "exec"), {"__name__": "__main__"})
