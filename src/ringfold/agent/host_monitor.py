"""What the agent does besides serving clients: watch the interfaces of flows, report to switches and to the agents of
other hosts, read feeds.

A thin shell around the NIC monitors (`monitors.py`), the reports (`telemetry.py`) and the feeds (`adapters.py`). What
it measures goes to the machine as events. The daemon calls it when a pair gets its first flow and loses its last.
"""

import asyncio
import logging
from collections.abc import Callable

from ringfold.agent.adapters import open_adapter, parse_feed, pump
from ringfold.agent.events import Event, NicQueuesRead, QueueObserved
from ringfold.agent.monitors import Nics, NicWatch, pressures
from ringfold.agent.registry import Pair
from ringfold.agent.telemetry import Reporter, ReportSettings
from ringfold.config import TELEMETRY_PORT, split_address
from ringfold.errors import ConfigError
from ringfold.runtime.clock import monotonic_ns, random_bytes, unix_ns
from ringfold.runtime.datagrams import DatagramSender
from ringfold.runtime.feeds import is_missing
from ringfold.runtime.netlink import interface_index
from ringfold.runtime.network import interfaces
from ringfold.wire.telemetry import SENDER_BYTES, Congestion, FlowAdded, FlowPath, address_number

REPORT_INTERVAL_S = 0.1
"""How often reports are due if no interfaces are watched."""
MAX_AGENTS = 1_024
"""Sockets to the agents of other hosts."""

_log = logging.getLogger("ringfold.agent")


class HostMonitor:
    """Measures and reports while the agent serves. `deliver` steps the machine with an event and lets it decide."""

    def __init__(
        self,
        deliver: Callable[[Event], None],
        *,
        watch: NicWatch | None,
        report_to: tuple[str, ...] = (),
        reports: ReportSettings | None = None,
        feeds: tuple[str, ...] = (),
        forward_port: int = TELEMETRY_PORT,
    ) -> None:
        self._deliver, self._nic_watch = deliver, watch
        self._feeds = [(open_adapter(name), where) for name, where in map(parse_feed, feeds)]
        self._reporter = Reporter(unix_ns(), random_sender(), reports) if report_to else None
        self._forwarder, self._forward_port = Reporter(unix_ns(), random_sender(), reports), forward_port
        self._agents: dict[str, DatagramSender] = {}
        """To the agents of other hosts, by address; the first one was used longest ago."""
        self._collectors: list[DatagramSender] = []
        for address in report_to:
            try:
                self._collectors.append(DatagramSender(*split_address(address, TELEMETRY_PORT)))
            except OSError as error:
                for collector in self._collectors:
                    collector.close()
                raise ConfigError(f"cannot report to {address}: {error.strerror or error}") from None
        self._pairs = 0
        self._has_work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start, in the running event loop."""
        if self._nic_watch is not None:
            self._tasks.append(
                asyncio.create_task(self._watch_interfaces(self._nic_watch), name="ringfold agent interfaces")
            )
        elif self._reporter is not None:
            self._tasks.append(asyncio.create_task(self._repeat_reports(), name="ringfold agent reports"))
        for adapter, where in self._feeds:
            if is_missing(where):
                _log.warning("the feed %s does not exist yet; it is read as soon as it does", where)
            self._tasks.append(
                asyncio.create_task(
                    pump(adapter, where, lambda observation: self._deliver(QueueObserved(unix_ns(), observation))),
                    name=f"feed {where}",
                )
            )
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        for sender in (*self._collectors, *self._agents.values()):
            sender.close()
        if self._nic_watch is not None:
            self._nic_watch.close()

    def forward(self, address: str, report: Congestion, measured_unix_ns: int) -> bool:
        """Send a report to the agent of another host. False: it is lost, or nobody received the one before."""
        if not self._forward_port:
            return False
        sender = self._agents.pop(address, None) or DatagramSender(address, self._forward_port)
        self._agents[address] = sender
        if len(self._agents) > MAX_AGENTS:
            self._agents.pop(next(iter(self._agents))).close()
        lost, was_refused = sender.lost, sender.was_refused
        sender.send(self._forwarder.forwarded(measured_unix_ns, report))
        return sender.lost == lost and not was_refused

    def watch_pair(self, pair: Pair) -> None:
        self._pairs += 1
        self._has_work.set()
        if self._nic_watch is not None:
            for local, _ in pair.paths:
                self._nic_watch.add_address(local)
        if self._reporter is not None:
            self._report(self._reporter.flow_added(unix_ns(), _flow_report(pair), _path_reports(pair)))

    def unwatch_pair(self, pair: Pair) -> None:
        self._pairs -= 1
        if not self._pairs:
            self._has_work.clear()
        if self._nic_watch is not None:
            for local, _ in pair.paths:
                self._nic_watch.remove_address(local)
        if self._reporter is not None:
            self._report(self._reporter.flow_removed(unix_ns(), _flow_report(pair)))

    async def _watch_interfaces(self, watch: NicWatch) -> None:
        """Read the interfaces when they are due. If that fails, old pressures do not steer any more."""
        try:
            await self._read_interfaces(watch)
        except Exception:
            self._deliver(NicQueuesRead({}))
            raise

    async def _read_interfaces(self, watch: NicWatch) -> None:
        """The pause after a read is at least as long as the read."""
        delivered: dict[int, float] = {}
        while True:
            await self._has_work.wait()
            began_ns = monotonic_ns()
            nics = watch.read(began_ns)
            found = pressures(nics)
            if found != delivered:  # also if nothing is left: an interface that was removed has no pressure
                self._deliver(NicQueuesRead(found))
                delivered = found
            self._report_queues(nics)
            ended_ns = monotonic_ns()
            next_ns = max(watch.next_ns(began_ns), 2 * ended_ns - began_ns)
            await asyncio.sleep((next_ns - ended_ns) / 1e9)

    async def _repeat_reports(self) -> None:
        """Without interfaces to read, flows are still reported again."""
        while True:
            await self._has_work.wait()
            self._report_queues({})
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _report_queues(self, nics: Nics) -> None:
        if self._reporter is not None:
            self._report(self._reporter.step(monotonic_ns(), unix_ns(), nics))

    def _report(self, packets: list[bytes]) -> None:
        for packet in packets:
            for collector in self._collectors:
                collector.send(packet)


def random_sender() -> int:
    """A number for a sender of telemetry. Agents and exporters with the same key know nothing of each other."""
    return int.from_bytes(random_bytes(SENDER_BYTES), "big")


def _flow_report(pair: Pair) -> FlowAdded:
    ends = (address_number(pair.source), address_number(pair.destination))
    return FlowAdded(*ends, pair.slot, pair.generation, len(pair.paths))


def _path_reports(pair: Pair) -> list[FlowPath]:
    """Each path of a pair, with the interface of its local address, where this host has it."""
    try:
        names = interfaces()
    except OSError:
        names = {}
    found = []
    for path, (local, remote) in enumerate(pair.paths):
        plain, _, scope = local.partition("%")
        name = scope or names.get(plain, "")
        try:
            index = interface_index(name) if name else 0
        except OSError:
            index = 0
        ends = (address_number(local), address_number(remote))
        found.append(FlowPath(*ends, pair.slot, pair.generation, path, index, name))
    return found


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log once that a feed cannot be read, or that reading interfaces failed; the agent goes on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s ended: %s", task.get_name(), error)
