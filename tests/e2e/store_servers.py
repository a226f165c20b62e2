"""Real store servers for tests: started on free ports in a temporary folder, and disturbed.

Each kind can be paused and resumed, killed and started again with what it kept, emptied, and put back to an earlier
state, as far as such a store can. sqlite has no server; there the file is what is swapped.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from fork_server import SOURCE, Forked
from ports import free_port, free_ports

Popen = subprocess.Popen[bytes]


def until(condition: Callable[[], object], what: str, timeout_s: float = 20) -> None:
    """Wait for a condition, and fail with `what` if it does not come."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _state(task: Path) -> str:
    """What a thread does, in the kernel's letters."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


class Server:
    """A store and its process. `missing` is why this machine cannot have it; empty when it can."""

    kind = ""
    can_list = True
    has_counters = False
    has_leases = False
    can_pause = True
    can_restart = True
    can_go_back = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: Popen | Forked | None = None
        self.port = free_port()

    @staticmethod
    def missing() -> str:
        return ""

    @property
    def url(self) -> str:
        return f"{self.kind}://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def python(self, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> "Popen | Forked":
        """A Python process that will use this store. Its pipes are binary."""
        return python(code, *arguments, env=env)

    def launch(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=self.folder, stdout=log, stderr=log)

    def start(self) -> None:
        self.launch()
        until(self.is_ready, f"{self.kind} to answer; see {self.folder}/log")

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        return answers(self.port)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        self.kill()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(lambda: {_state(task) for task in tasks.iterdir()} == {"T"}, "all threads of the server to stop")

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill it, and start it with what it had kept."""
        self.kill()
        self.start()

    @property
    def kept(self) -> Path:
        """The folder with what survives the process."""
        return self.folder / "data"

    def snapshot(self) -> None:
        self.kill()
        shutil.copytree(self.kept, self.folder / "snapshot")
        self.start()

    def go_back(self) -> None:
        """Start again from the last snapshot."""
        self.kill()
        shutil.rmtree(self.kept)
        shutil.copytree(self.folder / "snapshot", self.kept)
        self.start()

    def wipe(self) -> None:
        """Start again, empty."""
        self.kill()
        shutil.rmtree(self.kept, ignore_errors=True)
        self.start()


class Sqlite(Server):
    kind = "sqlite"
    can_pause = False
    can_restart = False

    @property
    def url(self) -> str:
        return f"sqlite://{self.kept}/store.db"

    def start(self) -> None:
        self.kept.mkdir(exist_ok=True)

    def wipe(self) -> None:
        shutil.rmtree(self.kept)
        self.kept.mkdir()


class Redis(Server):
    kind = "redis"
    has_leases = True

    @staticmethod
    def missing() -> str:
        if shutil.which("redis-server") is None:
            return "needs redis-server (Debian: apt install redis-server)"
        return "" if has_package("redis") else "needs the package redis (pip install 'ringfold[redis]')"

    def command(self) -> list[str]:
        self.kept.mkdir(exist_ok=True)
        settings = f"--port {self.port} --bind 127.0.0.1 --dir {self.kept} --appendonly yes --appendfsync always"
        return ["redis-server", *settings.split(), "--save", ""]


class Etcd(Server):
    kind = "etcd"
    has_leases = True

    def __init__(self, folder: Path, name: str = "m") -> None:
        super().__init__(folder)
        self.name = name
        self.port, self.peer_port = free_ports(2)
        self.members = f"{name}=http://127.0.0.1:{self.peer_port}"

    @staticmethod
    def missing() -> str:
        return "" if shutil.which("etcd") else "needs etcd (Debian: apt install etcd-server)"

    def command(self) -> list[str]:
        mine, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        clients = ["--listen-client-urls", mine, "--advertise-client-urls", mine]
        among = ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", self.members]
        return ["etcd", "--name", self.name, "--data-dir", str(self.kept), *clients, *among]

    def is_ready(self) -> bool:
        if not super().is_ready():
            return False
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except OSError:
            return False


class EtcdCluster:
    """Three members."""

    def __init__(self, folder: Path) -> None:
        for name in "abc":
            (folder / name).mkdir()
        self.members = [Etcd(folder / name, name) for name in "abc"]
        addresses = ",".join(member.members for member in self.members)
        for member in self.members:
            member.members = addresses
            member.launch()
        until(lambda: all(member.is_ready() for member in self.members), "the members of etcd to find each other", 60)

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in self.members)

    def leader(self) -> Etcd:
        """The leader, as the members report it."""
        for member in self.members:
            if member.process is None:
                continue
            request = urllib.request.Request(f"http://127.0.0.1:{member.port}/v3/maintenance/status", b"{}")
            with urllib.request.urlopen(request, timeout=5) as answer:
                reported = json.load(answer)
            if reported.get("leader") == reported["header"]["member_id"]:
                return member
        raise AssertionError("no member leads")

    def stop(self) -> None:
        for member in self.members:
            member.stop()


SERVE = """
import sys
from ringfold.store import open_store
store = open_store(sys.argv[1], serve=True)
sys.stdin.read()
"""


class Tcp(Server):
    kind = "tcp"
    can_list = False
    has_counters = True
    can_restart = False  # with it goes all that it held
    can_go_back = False

    @staticmethod
    def missing() -> str:
        return "" if has_package("torch") else "needs torch (pip install 'ringfold[torch]')"

    def start(self) -> None:
        self.process = self.python(SERVE, self.url)
        until(self.is_ready, "the TCPStore to answer", 60)

    def python(self, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> Forked:
        return Forked(code, *arguments, env=env, package="torch")

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None
        return answers(self.port)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


SERVERS: dict[str, type[Server]] = {kind.kind: kind for kind in (Sqlite, Redis, Etcd, Tcp)}


def those(*can: str) -> list[str]:
    """The kinds of server that can be treated like this."""
    return sorted(name for name, kind in SERVERS.items() if all(getattr(kind, each) for each in can))


def python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> Popen | Forked:
    """A Python process with the package, whose lines are read from its standard output."""
    whole = {**os.environ, **(env or {})}
    if "LD_PRELOAD" not in whole:  # which only a new program reads
        return Forked(code, *arguments, env=whole)
    path = os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**whole, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
