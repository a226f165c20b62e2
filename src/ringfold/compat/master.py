"""PCCL's master node: a master in a thread of this process. The process stays up until the master ends.

A PCCL master script ends after `node.run()` and relies on the node's destructor to stay up. There are two cases. A node
in a function is destroyed when the function returns: `__del__` waits there. A node in a module is destroyed after the
interpreter has stopped all other threads, which is too late to serve. So the master's thread is not a daemon, and the
interpreter waits for it before it shuts down.

In both cases SIGINT, SIGTERM or `interrupt()` end the wait, and the script exits with status 0.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from ringfold import config
from ringfold.compat.results import PCCLError, Result
from ringfold.errors import ConfigError
from ringfold.master.server import MasterServer
from ringfold.master.settings import master_settings
from ringfold.runtime import threads
from ringfold.runtime.asyncio_support import LoopThread
from ringfold.runtime.process import stop_at_signals


class MasterNode:
    """A master at `listen_address`: "ip:port", "[IPv6]:port" or a host name. Its destructor waits for its end.

    Beyond loopback a master needs a join token (RINGFOLD_TOKEN_FILE), or RINGFOLD_INSECURE=1.
    """

    def __init__(self, listen_address: str) -> None:
        self._running: _RunningMaster | None = None
        try:
            config.split_address(listen_address)
        except ConfigError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "MasterNode", str(error)) from error
        self._listen_address = listen_address

    @property
    def listen_address(self) -> str:
        """Where it listens; once it runs, with the port that the kernel chose for port 0."""
        return self._listen_address if self._running is None else self._running.server.addresses[0]

    def run(self) -> None:
        """Start to serve, and return. Peers can connect from now on."""
        if self._running is not None:
            raise PCCLError(Result.INVALID_USAGE, "MasterNode.run", "it runs already, or has ended; create another one")
        try:
            self._running = _RunningMaster(config.load({"listen": [self._listen_address]}))
        except ConfigError as error:
            text = f"{error} (RINGFOLD_TOKEN_FILE, or RINGFOLD_INSECURE=1)" if "insecure" in str(error) else str(error)
            raise PCCLError(Result.INVALID_USAGE, "MasterNode.run", text) from error
        except OSError as error:
            text = f"cannot listen on {self._listen_address}: {error.strerror or error}"
            raise PCCLError(Result.MASTER_CONNECTION_FAILED, "MasterNode.run", text) from error

    def interrupt(self) -> None:
        """Stop it, and return at once. May be called from a signal handler, and more than once."""
        if self._running is not None:
            self._running.stop()

    def __del__(self) -> None:
        if self._running is not None and not sys.is_finalizing():
            self._running.wait()


class _RunningMaster:
    """The server and its thread. Waiting for it does not need the node."""

    def __init__(self, settings: config.Resolved) -> None:
        """Returns once it listens."""
        listen, insecure = settings.listed("listen"), settings.switch("insecure")
        self.server = MasterServer(master_settings(settings), listen, settings.token(), insecure)
        self._is_awaited = False
        self._thread = LoopThread("ringfold-master", self.server.serve, daemon=False)
        self._thread.wait_ready()
        stop_at_signals(self.stop, lambda: self._is_awaited or threads.is_main_over())

    def stop(self) -> None:
        self._thread.call(self.server.stop)

    def wait(self) -> None:
        self._is_awaited = True
        try:
            self._thread.join()
        except KeyboardInterrupt:  # the program has a SIGINT handler of its own that raises it
            self.stop()
            self._thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """`pccl_master`: run a master until SIGTERM or Ctrl-C. `ringfold master` has more options."""
    parser = argparse.ArgumentParser("pccl_master", description="Run a master for PCCL programs on Ringfold.")
    parser.add_argument("--listen-address", help="host:port or [IPv6]:port; the default is RINGFOLD_LISTEN")
    parser.add_argument("--token-file", help="file with the join token of the run")
    parser.add_argument("--insecure", action="store_true", default=None, help="listen beyond loopback without a token")
    given = parser.parse_args(arguments)
    try:
        listen = None if given.listen_address is None else [given.listen_address]
        chosen = {"listen": listen, "token_file": given.token_file, "insecure": given.insecure}
        running = _RunningMaster(config.load(chosen))
    except ConfigError as error:
        hint = " (--token-file FILE or --insecure)" if "insecure" in str(error) else ""
        parser.error(f"{error}{hint}")
    except OSError as error:
        parser.error(f"cannot listen on {given.listen_address}: {error.strerror or error}")
    logging.basicConfig(level=logging.INFO)
    sys.stdout.write(f"listening on {', '.join(running.server.addresses)}\n")
    sys.stdout.flush()
    running.wait()
