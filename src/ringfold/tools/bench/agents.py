"""Agents and telemetry for benchmarks in a lab: the real command in a host's namespace, and a switch's word to it."""

import sys
from pathlib import Path

from ringfold.config import TELEMETRY_PORT
from ringfold.runtime.clock import unix_ns
from ringfold.runtime.datagrams import DatagramSender
from ringfold.tools.lab import Lab
from ringfold.tools.spawn import Crew
from ringfold.wire.telemetry import Congestion, Packet, encode, prefix_number

CONTROL = "control"
_MAIN = "from ringfold.cli import main; main()"


def start_agent(crew: Crew, name: str, lab: Lab, host: int, directory: Path, *, policy: str = "auto") -> None:
    """Start the agent of a host, which takes telemetry on the path `control`.

    It goes by telemetry and measured rates, not by the host's own queues.
    """
    where = f"{lab.address(host, CONTROL)}:{TELEMETRY_PORT}"
    command = [sys.executable, "-P", "-c", _MAIN, "agent", "--dir", str(directory), "--no-nics", "--log-level", "error"]
    command += ["--telemetry", where, "--allow", "0.0.0.0/0", "--policy", policy]
    crew.start(name, lab.inside(host, command))


def send_congestion(lab: Lab, host: int, *, path: int, congestion: int) -> None:
    """Tell a host's agent about a path of all its flows, as a switch would."""
    number, bits = prefix_number("any")
    now_ns = unix_ns()
    packet = Packet(Congestion(number, number, path, congestion, 0, bits, bits), now_ns, now_ns)
    with lab.within(host), DatagramSender(lab.address(host, CONTROL), TELEMETRY_PORT) as sender:
        sender.send(encode(packet, None))
