"""Several hosts on one machine: a network namespace each, joined by a bridge, with links that are shaped and cut.

Needs root and `ip`; shaping needs `tc`. Nothing of it is visible outside: the bridge is in a namespace of its own (the
*hub*), the interfaces are made inside the namespaces, and the network is not connected to the machine's. Leaving the
context removes all of it; the next network removes what a killed process has left behind.

How to use it, together with a cluster of processes:

    if why := missing():
        ...  # show `why`, and skip
    with ShapedNetwork([Shape(up_mbit=200, down_mbit=200)] * 4) as network, LocalCluster() as cluster:
        where = network.start_master(cluster).address
        cluster.start_worker("peer-0", "worker.py", where, inside=network.inside(0))
        cluster.wait_connected(["peer-0"], 20)  # a cluster's channels are Unix sockets, which reach across namespaces
        with network.within(HUB):
            ...  # sockets that this thread makes here belong to the hub

Enter the network before the cluster, as above: then the processes are ended before the namespaces that they run in.

Host n has the address 10.78.0.(n+1), the hub 10.78.0.254, and a host's *uplink* is its link to the bridge. `Shape`
bounds what a host sends (up) and what it receives (down); `pairs` bounds single directions between two hosts besides:
{(0, 1): 50.0} is 50 Mbit/s from host 0 to host 1. What is not given is not shaped. Rates are of Ethernet frames, so TCP
sees about 5 % less. A token bucket lets a burst of 64 KiB go at once, as large as the largest packet that the kernel
hands over in one piece, and 50 ms of the rate wait in its queue before it drops.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ringfold.tools.cluster import MASTER_PORT, LocalCluster, MasterProcess
from ringfold.tools.namespaces import Namespaces, ShapingFailed, missing, run_command

__all__ = ["HUB", "MAX_HOSTS", "Shape", "ShapedNetwork", "ShapingFailed", "missing"]

HUB = -1
"""The namespace with the bridge, as a host number: not shaped, the place for a master."""
MAX_HOSTS = 200
_PREFIX = "ringfold-shaped"
_BURST_BYTES = 65_536 + 1_514
_BURSTS = ("burst", str(_BURST_BYTES), "cburst", str(_BURST_BYTES))
_QUEUE_MS = 50
_UNBOUNDED_MBIT = 100_000.0
_UNUSED_MAC = "02:00:00:00:00:99"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How fast a host's uplink is, in Mbit/s. None: as fast as the machine."""

    up_mbit: float | None = None
    down_mbit: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.up_mbit, self.down_mbit):
            if rate is not None and rate <= 0:
                raise ValueError(f"a rate is a positive number of Mbit/s, not {rate}")


class ShapedNetwork:
    """Hosts around a bridge, as a context. `hosts` has a shape for each; their numbers count from 0."""

    def __init__(self, hosts: Sequence[Shape], pairs: Mapping[tuple[int, int], float] | None = None) -> None:
        if not 1 <= len(hosts) <= MAX_HOSTS:
            raise ValueError(f"a shaped network has 1 to {MAX_HOSTS} hosts, not {len(hosts)}")
        self._shapes, self._pairs = list(hosts), dict(pairs or {})
        for (source, target), rate in self._pairs.items():
            if source == target or not {source, target} <= set(range(len(hosts))) or rate <= 0:
                raise ValueError(f"pairs: {rate} Mbit/s from host {source} to host {target} makes no sense")
        self._namespaces = Namespaces(_PREFIX)
        self._hosts = 0

    def __enter__(self) -> Self:
        self._namespaces.__enter__()
        try:
            hub = self._namespaces.add("hub")
            run_command("ip", "-n", hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
            run_command("ip", "-n", hub, "addr", "add", f"{self.address(HUB)}/24", "dev", "br0")
            run_command("ip", "-n", hub, "link", "set", "br0", "up")
            for shape in self._shapes:
                self.add_host(shape)
        except BaseException:
            self._namespaces.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._namespaces.__exit__(kind, error, trace)

    def address(self, host: int) -> str:
        """The IPv4 address of a host, or of the hub."""
        return "10.78.0.254" if host == HUB else f"10.78.0.{host + 1}"

    def inside(self, host: int, command: Sequence[str] = ()) -> list[str]:
        """The command line that runs `command` on a host, or its prefix. Process and session stay the same."""
        return self._namespaces.inside(_name(host), command)

    def within(self, host: int) -> contextlib.AbstractContextManager[None]:
        """The calling thread moves to a host: sockets that it makes belong there. Other threads stay where they are."""
        return self._namespaces.within(_name(host))

    def start_master(self, cluster: LocalCluster) -> MasterProcess:
        """Start a master in the hub."""
        listen = f"{self.address(HUB)}:{MASTER_PORT}"
        return cluster.start_master(listen=listen, arguments=["--insecure"], inside=self.inside(HUB))

    def add_host(self, shape: Shape | None = None) -> int:
        """Add a host, as long as the network exists; its number."""
        host, shape = self._hosts, shape or Shape()
        self._hosts += 1
        hub, space, port = self._namespaces.name("hub"), self._namespaces.add(_name(host)), _port(host)
        run_command("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        run_command("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
        run_command("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        run_command("ip", "-n", space, "link", "set", "eth0", "up")
        to = {target: rate for (source, target), rate in self._pairs.items() if source == host}
        if to:
            self._shape_by_target(space, shape.up_mbit or _UNBOUNDED_MBIT, to)
        elif shape.up_mbit is not None:
            _token_bucket(space, "eth0", shape.up_mbit)
        if shape.down_mbit is not None:
            _token_bucket(hub, port, shape.down_mbit)
        return host

    def cut(self, source: int, target: int) -> float:
        """From now on no frame of host `source` reaches host `target`; the monotonic time (s) just before.

        The neighbour table of the source gets a hardware address that no host has. Frames then vanish on the bridge,
        neither end is notified, connections stay open, and the other direction still works.
        """
        at_s = time.monotonic()
        entry = ("neigh", "replace", self.address(target), "lladdr", _UNUSED_MAC, "dev", "eth0", "nud", "permanent")
        run_command("ip", "-n", self._namespaces.name(_name(source)), *entry)
        return at_s

    def unplug(self, host: int) -> float:
        """Take a host off the bridge; the monotonic time (s) just before."""
        return self._set_port(host, "down")

    def plug(self, host: int) -> float:
        """Put it back; the monotonic time (s) just before."""
        return self._set_port(host, "up")

    def close(self) -> None:
        """Remove everything. Safe to call twice. Processes inside keep a nameless namespace until they end."""
        self._namespaces.close()

    def _set_port(self, host: int, state: str) -> float:
        at_s = time.monotonic()
        run_command("ip", "-n", self._namespaces.name("hub"), "link", "set", _port(host), state)
        return at_s

    def _shape_by_target(self, space: str, up_mbit: float, to: Mapping[int, float]) -> None:
        """An uplink on which some targets have rates of their own, all below the rate of the uplink."""
        tc = ("tc", "-n", space)
        run_command(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "2")
        whole = ("htb", "rate", _mbit(up_mbit), *_BURSTS)
        run_command(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", *whole)
        leaves = {2: up_mbit, **{16 + target: min(rate, up_mbit) for target, rate in to.items()}}
        for leaf, mbit in leaves.items():
            # Leaves promise themselves little and may take up to their rate: together they share what the uplink has.
            wanted = ("htb", "rate", "100kbit", "ceil", _mbit(mbit), *_BURSTS)
            run_command(*tc, "class", "add", "dev", "eth0", "parent", "1:1", "classid", f"1:{leaf:x}", *wanted)
            queue = ("bfifo", "limit", str(_queue_bytes(mbit)))
            run_command(*tc, "qdisc", "add", "dev", "eth0", "parent", f"1:{leaf:x}", *queue)
        for target in to:
            match = ("u32", "match", "ip", "dst", f"{self.address(target)}/32", "flowid", f"1:{16 + target:x}")
            run_command(*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "prio", "1", *match)


def _token_bucket(space: str, device: str, mbit: float) -> None:
    shaper = ("tbf", "rate", _mbit(mbit), "burst", str(_BURST_BYTES), "limit", str(_queue_bytes(mbit)))
    run_command("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shaper)


def _queue_bytes(mbit: float) -> int:
    return max(4 * _BURST_BYTES, int(mbit * 1e6 / 8 * _QUEUE_MS / 1_000))


def _mbit(rate: float) -> str:
    return f"{round(rate * 1_000)}kbit"


def _name(host: int) -> str:
    return "hub" if host == HUB else str(host)


def _port(host: int) -> str:
    return f"port{host}"
