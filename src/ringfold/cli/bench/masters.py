"""A master in a process of its own, for a benchmark: the real command, on a free port of loopback."""

import sys

from ringfold.errors import MasterUnreachable
from ringfold.runtime.ask import StatusConnection
from ringfold.runtime.spawn import ChildFailed, Crew, free_port

START_S = 20.0
_MAIN = "from ringfold.cli import main; main()"


def start_master(crew: Crew, name: str, **settings: object) -> str:
    """Start `ringfold master` and return its address once it answers. `settings` go in through its environment."""
    address = f"127.0.0.1:{free_port()}"
    env = {f"RINGFOLD_{key.upper()}": str(value) for key, value in settings.items()}
    # A token of the user's own runs has no place here: the benchmark's peers do not have it.
    env["RINGFOLD_TOKEN_FILE"] = ""
    command = [sys.executable, "-P", "-c", _MAIN, "master", "--listen", address, "--log-level", "warning"]
    crew.start(name, command, env=env)
    for _ in range(int(START_S / 0.05)):
        try:
            registrations(address)
        except MasterUnreachable:
            crew.pause(0.05)
        else:
            return address
    raise ChildFailed(name, f"does not answer at {address} after {START_S:.0f} s", crew.log_tail(name))


def registrations(address: str) -> int:
    """How many peers have ever registered in the run."""
    with StatusConnection(address, b"") as connection:
        return connection.ask().registrations


def wait_registered(crew: Crew, address: str, count: int, timeout_s: float = 60.0) -> None:
    """Wait until `count` peers have ever registered."""
    for _ in range(int(timeout_s / 0.005)):
        if registrations(address) >= count:
            return
        crew.pause(0.005)
    raise ChildFailed("master", f"fewer than {count} peers registered within {timeout_s:.0f} s")
