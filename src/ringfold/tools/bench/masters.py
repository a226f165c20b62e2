"""A master in a process of its own, for benchmarks: the real command, on loopback or in the hub of a shaped network."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from ringfold.errors import MasterUnreachable
from ringfold.runtime.master_client import MasterClient
from ringfold.tools.shaped import HUB, ShapedNetwork
from ringfold.tools.spawn import ChildFailed, Crew, free_port

START_S = 20.0
HUB_PORT = 48148
_MAIN = "from ringfold.cli import main; main()"


def start_master(crew: Crew, name: str, **settings: object) -> str:
    """Start `ringfold master` and return its address once it answers. `settings` go in through its environment."""
    return start_master_at(f"127.0.0.1:{free_port()}", crew, name, **settings)


def start_master_at(address: str, crew: Crew, name: str, **settings: object) -> str:
    """`start_master` at an address, which may be that of one that is gone."""
    launch_master(crew, name, address, **settings)
    wait_for_master(crew, name, address)
    return address


def launch_master(crew: Crew, name: str, address: str, **settings: object) -> None:
    """Start `ringfold master` on this address, and do not wait for it."""
    crew.start(name, _command(address), env=_environment(settings))


def wait_for_master(crew: Crew, name: str, address: str) -> None:
    """Wait until the master at this address leads and answers."""
    _wait(crew, name, address, contextlib.nullcontext)


def master_command(address: str) -> list[str]:
    """The command of a master at an address that is not on loopback; peers wait until it answers."""
    return [*_command(address), "--insecure", "--no-journal"]


def start_master_in(network: ShapedNetwork, crew: Crew, name: str, **settings: object) -> str:
    """`start_master` in the hub of a shaped network. Who is outside asks it `with network.within(HUB)`."""
    address = f"{network.address(HUB)}:{HUB_PORT}"
    crew.start(name, network.inside(HUB, [*_command(address), "--insecure"]), env=_environment(settings))
    _wait(crew, name, address, lambda: network.within(HUB))
    return address


def _command(address: str) -> list[str]:
    return [sys.executable, "-P", "-c", _MAIN, "master", "--listen", address, "--log-level", "warning"]


def _environment(settings: Mapping[str, object]) -> dict[str, str]:
    env = {f"RINGFOLD_{key.upper()}": str(value) for key, value in settings.items()}
    # A token of the user's own runs has no place here: the benchmark's peers do not have it.
    env["RINGFOLD_TOKEN_FILE"] = ""
    if "store" not in settings:
        env["RINGFOLD_NO_JOURNAL"] = "1"
    return env


def _wait(crew: Crew, name: str, address: str, there: Callable[[], AbstractContextManager[None]]) -> None:
    for _ in range(int(START_S / 0.05)):
        try:
            with there():
                registrations(address)
        except MasterUnreachable:
            crew.pause(0.05)
        else:
            return
    raise ChildFailed(name, f"does not answer at {address} after {START_S:.0f} s", crew.log_tail(name))


def registrations(address: str) -> int:
    """How many peers have ever registered in the run."""
    with MasterClient(address, b"") as connection:
        return connection.status().registrations


def wait_registered(crew: Crew, address: str, count: int, timeout_s: float = 60.0) -> None:
    """Wait until `count` peers have ever registered."""
    for _ in range(int(timeout_s / 0.005)):
        if registrations(address) >= count:
            return
        crew.pause(0.005)
    raise ChildFailed("master", f"fewer than {count} peers registered within {timeout_s:.0f} s")
