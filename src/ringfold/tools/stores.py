"""A store in a process of its own, for benchmarks and soaks: the real server, durable as it would have to be."""

import importlib.util
import shutil
import sys

from ringfold.errors import StoreError
from ringfold.store import open_store
from ringfold.tools.cluster import LocalCluster, ProcessFailed, free_port

KINDS = ("sqlite", "redis", "etcd", "tcp")
ANSWER_S = 60.0
_SERVE = "import signal, sys; from ringfold.store import open_store as o; s = o(sys.argv[1], serve=1); signal.pause()"


def missing(kind: str) -> str:
    """Why this machine cannot run a store; empty when it can."""
    program = {"redis": "redis-server", "etcd": "etcd"}.get(kind)
    if program and shutil.which(program) is None:
        return f"needs {program} (Debian: apt install {program if kind == 'redis' else 'etcd-server'})"
    package = {"redis": "redis", "tcp": "torch"}.get(kind)
    if package and importlib.util.find_spec(package) is None:
        return f"needs the package {package} (pip install 'ringfold[{package}]')"
    return ""


class StoreServer:
    """One store, with a folder in the cluster's directory. It may be killed, and started again on the same folder.

    Redis flushes every write to the disk before it answers, as etcd and sqlite do. sqlite has no process: there is
    nothing to start, to freeze or to kill.
    """

    def __init__(self, cluster: LocalCluster, kind: str, name: str = "store") -> None:
        self.kind, self._cluster, self._stem = kind, cluster, name
        self._folder, self._port, self._peer_port = cluster.directory / name, free_port(), free_port()
        self._folder.mkdir()
        self._lives = 0

    @property
    def url(self) -> str:
        if self.kind == "sqlite":
            return f"sqlite://{self._folder}/store.db"
        return f"{self.kind}://127.0.0.1:{self._port}"

    @property
    def name(self) -> str | None:
        """The cluster's name of the process; None where there is none."""
        return f"{self._stem}.{self._lives}" if self._lives else None

    def start(self) -> None:
        if self.kind != "sqlite":
            self._lives += 1
            assert self.name is not None
            self._cluster.start(self.name, self._command())

    def wait(self, timeout_s: float = ANSWER_S) -> None:
        """Return once it answers."""
        try:
            open_store(self.url, prefix="look", timeout_s=timeout_s).close()
        except StoreError as error:
            raise ProcessFailed(self._stem, str(error), self._cluster.log_tail(self.name or self._stem)) from error

    def kill(self) -> None:
        """SIGKILL, and wait for its end, so that its folder is free."""
        assert self.name is not None
        self._cluster.kill(self.name)
        self._cluster.wait_exit(self.name, 10)

    def _command(self) -> list[str]:
        here, folder = f"http://127.0.0.1:{self._port}", str(self._folder)
        match self.kind:
            case "redis":
                settings = f"--port {self._port} --bind 127.0.0.1 --appendonly yes --appendfsync always"
                return ["redis-server", *settings.split(), "--dir", folder, "--save", ""]
            case "etcd":
                peers = f"http://127.0.0.1:{self._peer_port}"
                among = ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
                ours = ["--listen-client-urls", here, "--advertise-client-urls", here]
                return ["etcd", "--name", "m", "--data-dir", folder, "--initial-cluster", f"m={peers}", *among, *ours]
            case _:
                return [sys.executable, "-P", "-c", _SERVE, self.url]
