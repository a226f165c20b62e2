"""Several hosts on one machine: a network namespace each, joined by a bridge, every link as slow as asked for.

Needs root, `ip` and `tc`. Nothing of it is visible outside: the bridge is in a namespace of its own (the *hub*), the
interfaces are made inside the namespaces, and the network has no way out. Leaving the context removes all of it; what
a process that was killed outright has left behind is removed by the next one that makes a network.

How to use it, together with a cluster of processes:

    if why := missing():
        ...  # say `why`, and skip
    with ShapedNetwork([Shape(up_mbit=200, down_mbit=200)] * 4) as network, Cluster() as cluster:
        cluster.start("master", network.inside(HUB, [... "--listen", f"{network.address(HUB)}:48148", "--insecure"]))
        cluster.start("peer-0", network.inside(0, [...]))
        cluster.wait_connected(["peer-0"], 20)  # a cluster's lines are Unix sockets, which reach across namespaces
        with network.within(HUB):
            ...  # sockets that this thread makes here belong to the hub

Enter the network before the cluster, as above: then the processes are ended before the namespaces that they run in.

The words: host n has the address 10.78.0.(n+1), the hub 10.78.0.254, and a host's *uplink* is its cable to the bridge.
`Shape` bounds what a host sends (up) and what it receives (down); `pairs` bounds single directions between two hosts
besides: {(0, 1): 50.0} is 50 Mbit/s from host 0 to host 1. What is not given is not shaped. Rates are of Ethernet
frames, so TCP sees about 5 % less. A token bucket lets a burst of 64 KiB go at once, as large as the largest packet
that the kernel hands over in one piece, and 50 ms of the rate wait in its queue before it drops.
"""

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ringfold.runtime.process import term_is_exit
from ringfold.tools.cluster import MASTER_PORT, Cluster, MasterProcess
from ringfold.tools.namespaces import ShapingFailed, command, inside, missing, remove, sweep, within

__all__ = ["HUB", "MAX_HOSTS", "Shape", "ShapedNetwork", "ShapingFailed", "missing"]

HUB = -1
"""The namespace with the bridge, as a host number: not shaped, the place for a master."""
MAX_HOSTS = 200
_PREFIX = "ringfold-shaped"
_BURST_BYTES = 65_536 + 1_514
_BURSTS = ("burst", str(_BURST_BYTES), "cburst", str(_BURST_BYTES))
_QUEUE_MS = 50
_UNBOUNDED_MBIT = 100_000.0
_numbers = itertools.count()


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
        self._hosts, self._pairs = list(hosts), dict(pairs or {})
        for (source, target), rate in self._pairs.items():
            if source == target or not {source, target} <= set(range(len(hosts))) or rate <= 0:
                raise ValueError(f"pairs: {rate} Mbit/s from host {source} to host {target} makes no sense")
        self._prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._made: list[str] = []
        self._guard = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._guard.enter_context(term_is_exit())
        try:
            sweep(_PREFIX)
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            self._guard.close()

    def address(self, host: int) -> str:
        """The IPv4 address of a host, or of the hub."""
        return "10.78.0.254" if host == HUB else f"10.78.0.{host + 1}"

    def inside(self, host: int, command: Sequence[str] = ()) -> list[str]:
        """The command line that runs `command` on a host, or its prefix. Process and session stay the same."""
        return inside(self._name(host), command)

    def within(self, host: int) -> contextlib.AbstractContextManager[None]:
        """The calling thread moves to a host: sockets that it makes belong there. Other threads stay where they are."""
        return within(self._name(host))

    def start_master(self, cluster: Cluster) -> MasterProcess:
        """Start a master in the hub."""
        listen = f"{self.address(HUB)}:{MASTER_PORT}"
        return cluster.start_master(listen=listen, arguments=["--insecure"], inside=self.inside(HUB))

    def close(self) -> None:
        """Remove everything. Safe to call twice. Processes still running inside keep a nameless rest until they end."""
        while self._made:
            remove(self._made.pop())

    def _name(self, host: int) -> str:
        return f"{self._prefix}-{'hub' if host == HUB else host}"

    def _make(self) -> None:
        hub = self._new(HUB)
        command("ip", "-n", hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        command("ip", "-n", hub, "addr", "add", f"{self.address(HUB)}/24", "dev", "br0")
        command("ip", "-n", hub, "link", "set", "br0", "up")
        for host, shape in enumerate(self._hosts):
            space, port = self._new(host), f"port{host}"
            command("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            command("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
            command("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            command("ip", "-n", space, "link", "set", "eth0", "up")
            to = {target: rate for (source, target), rate in self._pairs.items() if source == host}
            if to:
                self._shape_by_target(space, shape.up_mbit or _UNBOUNDED_MBIT, to)
            elif shape.up_mbit is not None:
                _token_bucket(space, "eth0", shape.up_mbit)
            if shape.down_mbit is not None:
                _token_bucket(hub, port, shape.down_mbit)

    def _new(self, host: int) -> str:
        space = self._name(host)
        # Noted first: an interrupt after the command must not leave it behind.
        self._made.append(space)
        command("ip", "netns", "add", space)
        command("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def _shape_by_target(self, space: str, up_mbit: float, to: Mapping[int, float]) -> None:
        """An uplink on which some targets have rates of their own, all below the rate of the uplink."""
        tc = ("tc", "-n", space)
        command(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "2")
        whole = ("htb", "rate", _mbit(up_mbit), *_BURSTS)
        command(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", *whole)
        leaves = {2: up_mbit, **{16 + target: min(rate, up_mbit) for target, rate in to.items()}}
        for leaf, mbit in leaves.items():
            # Leaves promise themselves little and may take up to their rate: together they share what the uplink has.
            wanted = ("htb", "rate", "100kbit", "ceil", _mbit(mbit), *_BURSTS)
            command(*tc, "class", "add", "dev", "eth0", "parent", "1:1", "classid", f"1:{leaf:x}", *wanted)
            queue = ("bfifo", "limit", str(_queue_bytes(mbit)))
            command(*tc, "qdisc", "add", "dev", "eth0", "parent", f"1:{leaf:x}", *queue)
        for target in to:
            match = ("u32", "match", "ip", "dst", f"{self.address(target)}/32", "flowid", f"1:{16 + target:x}")
            command(*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "prio", "1", *match)


def _token_bucket(space: str, device: str, mbit: float) -> None:
    shaper = ("tbf", "rate", _mbit(mbit), "burst", str(_BURST_BYTES), "limit", str(_queue_bytes(mbit)))
    command("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shaper)


def _queue_bytes(mbit: float) -> int:
    return max(4 * _BURST_BYTES, int(mbit * 1e6 / 8 * _QUEUE_MS / 1_000))


def _mbit(rate: float) -> str:
    return f"{round(rate * 1_000)}kbit"
