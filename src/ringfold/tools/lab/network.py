"""A lab's namespaces, cables and shapers, as a context. `model.py` defines the terms.

Everything is configured with `ip`, `tc` and `bridge`. Hardware addresses, neighbours and the
bridges' tables are fixed beforehand: no ARP gets lost, and no frame is flooded to a host that it is not for.
"""

import contextlib
import fcntl
import itertools
import os
import signal
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from ringfold.runtime.development import require_testing_module
from ringfold.tools import namespaces
from ringfold.tools.cluster import launch, signal_session
from ringfold.tools.lab.model import SWITCH, Cable, Change, Path, Rate, plan
from ringfold.tools.namespaces import CommandBatch, Namespaces, ShapingFailed

TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUNSETCARRIER = 0x400454E2
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000

Key = tuple[int, int]


def tap_missing() -> str | None:
    """Why packets cannot be delayed or lost here, or None when they can (as far as one can tell without trying)."""
    return (
        None if os.path.exists(TUN_DEVICE) else f"delay and loss need {TUN_DEVICE}, which is not there (modprobe tun)"
    )


def open_tap(name: str) -> int:
    """A new TAP device in the namespace of the calling thread, as a descriptor. It is gone when that is closed."""
    descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Relayed:
    """The relayed cables of a lab, by (host, path)."""

    def __init__(self, seed: int) -> None:
        require_testing_module()
        from ringfold._native_testing import Relay

        self._relay, self._seed = Relay(), seed
        self._numbers: dict[Key, int] = {}
        self._ends: dict[Key, tuple[int, int]] = {}

    def lay(self, key: Key, near: int, far: int, cable: Cable) -> None:
        """Join two descriptors, which are ours from now on: `near` is the host's."""
        self._ends[key] = (near, far)
        seed = (self._seed << 16 | key[0] << 8 | key[1]) & (1 << 64) - 1
        self._numbers[key] = self._relay.add(near, far, _delay_ns(cable), cable.loss, seed)

    def set(self, key: Key, cable: Cable) -> None:
        self._relay.set(self._numbers[key], _delay_ns(cable), cable.loss)

    def set_carrier(self, key: Key, up: bool) -> None:
        """Whether the host's interface has a cable in it."""
        fcntl.ioctl(self._ends[key][0], _TUNSETCARRIER, struct.pack("i", up))

    def stats(self, key: Key) -> tuple[dict[str, int], dict[str, int]]:
        """Counts of the packets that went up the cable, and of those that came down."""
        return self._relay.stats(self._numbers[key])

    def close(self) -> None:
        self._relay.close()
        while self._ends:
            for descriptor in self._ends.popitem()[1]:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _delay_ns(cable: Cable) -> int:
    return round(cable.rtt_ms * 1e6 / 4)


PREFIX = "ringfold-lab"
_numbers = itertools.count()
_TAP_QUEUE = 2_000
"""Packets that wait for the relay's next turn, behind the shaper."""


def missing(*, delay: bool = False) -> str | None:
    """Why there can be no lab here (or none with delay and loss), or None when there can, as far as one can tell."""
    return namespaces.missing(("ip", "tc", "bridge")) or (tap_missing() if delay else None)


class Lab:
    """Hosts that meet on paths. Hosts and paths are given by name or number; no host means all hosts.

    `hosts` is a number (they are called h0, h1, ...) or their names. `cables` are exceptions: what one host's cable to
    one path is like, by (host, path). `seed` decides which packets get lost.
    """

    def __init__(
        self,
        hosts: int | Sequence[str] = 2,
        paths: Sequence[Path] = (Path(),),
        *,
        cables: Mapping[tuple[str | int, str | int], Path] | None = None,
        seed: int = 1,
    ) -> None:
        self.plan = plan(hosts if isinstance(hosts, int) else tuple(hosts), tuple(paths))
        self._cables: dict[tuple[int, int], Cable] = {
            (host, path): self.plan.paths[path].cable()
            for host in range(len(self.plan.hosts))
            for path in range(len(self.plan.paths))
        }
        self._is_relayed = [path.is_relayed for path in paths]
        for (name, path), given in (cables or {}).items():
            self._cables[self.plan.host(name), self.plan.path(path)] = given.cable()
            self._is_relayed[self.plan.path(path)] |= given.is_relayed
        self._relayed: Relayed | None = None
        self._seed = seed
        self._cuts: dict[tuple[int, int], str] = {}
        self._namespaces = Namespaces(PREFIX)
        self._children: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if why := missing(delay=any(self._is_relayed)):
            raise ShapingFailed(f"no lab here: {why}")
        self._namespaces.__enter__()
        try:
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
            self._namespaces.__exit__(kind, error, trace)

    @property
    def removed(self) -> list[str]:
        """The names of what earlier labs had left behind, removed when this one was entered."""
        return self._namespaces.removed

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return self.plan.hosts

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the paths."""
        return self.plan.names

    def address(self, host: str | int, path: str | int = 0) -> str:
        """The IPv4 address of a host, or of the switch, on a path: 10.79.(path).(host + 1), the switch 254."""
        return self.plan.address(host, path)

    def addresses(self, host: str | int) -> list[str]:
        """The addresses of a host, one per path."""
        return [self.plan.address(host, path) for path in range(len(self.plan.paths))]

    def inside(self, host: str | int, command: Sequence[str] = ()) -> list[str]:
        """The command line that runs `command` on a host, or its prefix. Process and session stay the same."""
        return self._namespaces.inside(self._name(host), command)

    def within(self, host: str | int) -> contextlib.AbstractContextManager[None]:
        """The calling thread moves to a host: sockets that it makes belong there. Other threads stay where they are."""
        return self._namespaces.within(self._name(host))

    def port(self, host: str | int, path: str | int) -> str:
        """The switch's interface at the end of a host's cable; the host's has the name of the path."""
        return self._port(self.plan.host(host), self.plan.path(path))

    def space(self, host: str | int) -> str:
        """The name of a host's namespace."""
        return self._namespaces.name(self._name(host))

    def _name(self, host: str | int) -> str:
        number = self.plan.host(host)
        return SWITCH if number == len(self.hosts) else self.hosts[number]

    def start(
        self,
        host: str | int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in a session of its own. It ends when the lab ends.

        It also ends with the thread that started it: the kernel ties it to that one.
        """
        child = launch(self.inside(host, command), env=env, stdout=stdout, stderr=stderr)
        self._children = [each for each in self._children if each.poll() is None]
        self._children.append(child)
        return child

    def run(
        self,
        host: str | int,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host to its end; its output. A failure is CalledProcessError, with its output."""
        child = self.start(host, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, errors = child.communicate(timeout=timeout_s)
        except BaseException:
            signal_session(child, signal.SIGKILL)
            child.communicate()
            raise
        ran = subprocess.CompletedProcess(list(command), child.returncode, _text(out), _text(errors))
        ran.check_returncode()
        return ran

    def set_rate(
        self, path: str | int, rate: Rate = None, *, up: Rate = None, down: Rate = None, host: str | int | None = None
    ) -> None:
        """Other rates from now on; what waits in a queue stays there. "none" takes the shaper away."""
        self.apply(Change(path=path, host=host, rate=rate, up=up, down=down))

    def cut(self, path: str | int, *, host: str | int | None = None, unplug: bool = False) -> None:
        """Nothing passes any more. The host is not notified, unless it is unplugged: then its interface goes down."""
        self.apply(Change(path=path, host=host, cut="unplug" if unplug else "silent"))

    def restore(self, path: str | int, *, host: str | int | None = None) -> None:
        """Restore it, however it was cut."""
        self.apply(Change(path=path, host=host, cut="no"))

    def set_distance(
        self,
        path: str | int,
        *,
        rtt_ms: float | None = None,
        loss: float | None = None,
        host: str | int | None = None,
    ) -> None:
        """Another round-trip time or loss, for packets from now on. The path must have had one, or `relay`."""
        self.apply(Change(path=path, host=host, rtt_ms=rtt_ms, loss=loss))

    def apply(self, *changes: Change) -> None:
        """Change the cables of paths, all at once. A change that makes no sense is refused before any is made."""
        cables = [(change, host, self.plan.path(change.path)) for change in changes for host in self._hosts_of(change)]
        batch = CommandBatch()
        for change, host, path in cables:
            before = self._cables[host, path]
            after = self._cables[host, path] = change.applied(before)
            if (before.up_mbit, before.down_mbit) != (after.up_mbit, after.down_mbit):
                self._shape(batch, host, path, before)
            if change.cut is not None:
                self._plug(batch, host, path, change.cut)
            if self._relayed is not None and change.needs_relay:
                self._relayed.set((host, path), after)
        batch.run()

    def _hosts_of(self, change: Change) -> Sequence[int]:
        path = self.plan.path(change.path)
        if change.needs_relay and not self._is_relayed[path]:
            raise ValueError(f"path {self.paths[path]} cannot delay or lose packets: make it with relay=True")
        if change.host is None:
            return range(len(self.hosts))
        if change.host == SWITCH:
            raise ValueError("the switch has no cable: name a host")
        return [self.plan.host(change.host)]

    def close(self) -> None:
        """End what runs inside and remove everything. Safe to call twice."""
        for child in self._children:
            signal_session(child, signal.SIGKILL)
        for child in self._children:
            child.wait()
        self._children.clear()
        if self._relayed is not None:
            # Before the namespaces: a device that is gone would keep the relay's thread awake.
            self._relayed.close()
            self._relayed = None
        self._namespaces.kill_processes()
        self._namespaces.close()

    def _make(self) -> None:
        switch, batch = self._namespaces.add(SWITCH), CommandBatch()
        for name in self.hosts:
            self._namespaces.add(name)
        for path in range(len(self.paths)):
            kind = "type bridge forward_delay 0 mcast_snooping 0"
            batch.add(
                "ip",
                switch,
                f"link add br{path} address {self.plan.hardware(SWITCH, path)} mtu {self._mtu(path)} {kind}",
                f"link set br{path} addrgenmode none",
                f"addr add {self.address(SWITCH, path)}/24 dev br{path}",
                f"link set br{path} up",
            )
        if any(self._is_relayed):
            self._relayed = Relayed(self._seed)
        for host, path in self._cables:
            self._lay(batch, host, path)
        batch.run()
        # From here on there are interfaces to speak of, in all namespaces.
        for host, path in self._cables:
            self._set_up(batch, host, path)
        batch.run()
        for host, path in self._cables:
            # Only a port that is in its bridge can have an entry there.
            known = f"fdb replace {self.plan.hardware(host, path)} dev {self._port(host, path)} master static"
            batch.add("bridge", switch, known)
            self._shape(batch, host, path, Cable())
        for number in range(len(self.hosts)):
            batch.extend("ip", self.space(number), self._neighbours(number))
        batch.extend("ip", switch, self._neighbours(len(self.hosts)))
        batch.run()

    def _lay(self, batch: CommandBatch, host: int, path: int) -> None:
        """The cable of a host to a path: a pair of devices, with our relay between them if need be."""
        port, device, space = self._port(host, path), self.paths[path], self.space(host)
        if not self._is_relayed[path]:
            batch.add("ip", self.space(SWITCH), f"link add {port} type veth peer name {device} netns {space}")
            return
        assert self._relayed is not None
        with self.within(host):
            near = open_tap(device)
        with self.within(SWITCH):
            far = open_tap(port)
        self._relayed.lay((host, path), near, far, self._cables[host, path])
        for where, name in ((space, device), (self.space(SWITCH), port)):
            batch.add("ip", where, f"link set {name} txqueuelen {_TAP_QUEUE}")

    def _set_up(self, batch: CommandBatch, host: int, path: int) -> None:
        """Addresses at the host's end of a cable, the bridge at the other."""
        port, device, mtu = self._port(host, path), self.paths[path], f"mtu {self._mtu(path)}"
        batch.add("ip", self.space(SWITCH), f"link set {port} addrgenmode none {mtu} master br{path} up")
        batch.add(
            "ip",
            self.space(host),
            f"link set {device} addrgenmode none {mtu} address {self.plan.hardware(host, path)}",
            f"addr add {self.address(host, path)}/24 dev {device}",
            f"link set {device} up",
        )

    def _neighbours(self, host: int) -> Iterator[str]:
        """The neighbour entries of one host (or of the switch)."""
        for path, device in enumerate(self.paths):
            for other in range(len(self.hosts) + 1):
                if other != host:
                    name = SWITCH if other == len(self.hosts) else other
                    device_or_bridge = f"br{path}" if host == len(self.hosts) else device
                    known = f"lladdr {self.plan.hardware(name, path)} nud permanent"
                    yield f"neigh replace {self.address(name, path)} dev {device_or_bridge} {known}"

    def _shape(self, batch: CommandBatch, host: int, path: int, before: Cable) -> None:
        cable = self._cables[host, path]
        up, down = (self.space(host), self.paths[path]), (self.space(SWITCH), self._port(host, path))
        for (space, device), was, mbit in (
            (up, before.up_mbit, cable.up_mbit),
            (down, before.down_mbit, cable.down_mbit),
        ):
            if mbit is not None:
                shaper = f"rate {round(mbit * 1_000)}kbit burst {cable.burst_bytes} limit {cable.limit_bytes(mbit)}"
                batch.add("tc", space, f"qdisc replace dev {device} root tbf {shaper}")
            elif was is not None:
                batch.add("tc", space, f"qdisc del dev {device} root")

    def _plug(self, batch: CommandBatch, host: int, path: int, cut: str) -> None:
        port, switch, before = self._port(host, path), self.space(SWITCH), self._cuts.get((host, path), "no")
        match before, cut:
            # Of the two tools only `bridge` sets the state; what the other one sets is undone by the kernel at once.
            case "no", "silent":
                batch.add("bridge", switch, f"link set dev {port} state 0")
            case "silent", "no":
                batch.add("bridge", switch, f"link set dev {port} state 3")
            case (("no" | "silent"), "unplug"):
                batch.add("ip", switch, f"link set {port} down")
            case "unplug", "no":
                # A port that comes up forwards by itself, whatever it was before.
                batch.add("ip", switch, f"link set {port} up")
            case _:  # the same again, or a silent cut of what is unplugged already
                return
        self._cuts[host, path] = cut
        if self._relayed is not None and self._is_relayed[path]:
            self._relayed.set_carrier((host, path), cut != "unplug")

    def _port(self, host: int, path: int) -> str:
        return f"p{path}h{host}"

    def _mtu(self, path: int) -> int:
        return self.plan.paths[path].mtu


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
