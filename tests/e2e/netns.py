"""Network namespaces as machines, joined by a bridge, with cables that can be cut.

A cut is one-directional: the sender's neighbour table gets a hardware address for the other end that nobody has. Frames
then vanish on the bridge without a word to either side, connections stay open, and the other direction still works.
"""

import os
import subprocess
import time

NOBODY = "02:00:00:00:00:99"
PORT = 48148


def _ip(*words: str) -> None:
    ran = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {ran.stderr.strip()}")


class Network:
    """A bridge in a namespace of its own, and hosts around it. Host n has the address 10.77.0.n."""

    def __init__(self) -> None:
        self._prefix = f"rf{os.getpid()}"
        self._spaces: list[str] = []
        self.hub = self._new("hub")
        _ip("-n", self.hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self.hub, "link", "set", "br0", "up")

    def _new(self, name: str) -> str:
        space = f"{self._prefix}{name}"
        _ip("netns", "add", space)
        self._spaces.append(space)
        return space

    def add_host(self, number: int) -> None:
        space = self._new(f"h{number}")
        _ip("-n", self.hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self.hub, "link", "set", f"port{number}", "master", "br0", "up")
        _ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def on(self, number: int) -> list[str]:
        """The prefix of commands that run on a host."""
        return ["ip", "netns", "exec", f"{self._prefix}h{number}"]

    def cut(self, source: int, target: int) -> float:
        """From now on nothing of host `source` reaches host `target`. The time just before."""
        at = time.monotonic()
        table = ("-n", f"{self._prefix}h{source}", "neigh", "replace", f"10.77.0.{target}")
        _ip(*table, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
        return at

    def unplug(self, number: int) -> float:
        """Take a host off the bridge. The time just before."""
        at = time.monotonic()
        _ip("-n", self.hub, "link", "set", f"port{number}", "down")
        return at

    def plug(self, number: int) -> float:
        """Put it back. The time just before."""
        at = time.monotonic()
        _ip("-n", self.hub, "link", "set", f"port{number}", "up")
        return at

    def close(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
