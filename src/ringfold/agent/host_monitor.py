"""What the agent does besides serving clients: watch the interfaces of their flows, report to switches, read feeds.

A thin shell around `watching.py`, `reports.py` and `adapters.py`. What it learns goes to the machine as events; what it
is told are pairs that came and went.
"""

import asyncio
import logging
from collections.abc import Callable

from ringfold.agent.adapters import open_adapter, parse_feed, pump
from ringfold.agent.machine import Event, Observed, Queues
from ringfold.agent.registry import Pair
from ringfold.agent.reports import Reporter, ReportSettings
from ringfold.agent.watching import Nics, NicWatch, pressures
from ringfold.config import TELEMETRY_PORT, split_address
from ringfold.errors import ConfigError
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.datagrams import DatagramSender
from ringfold.runtime.feeds import is_missing
from ringfold.wire.telemetry import FlowAdded, address_number

REPEAT_S = 0.1

_log = logging.getLogger("ringfold.agent")


class Surroundings:
    """`tell` steps the machine with an event, and lets it decide."""

    def __init__(
        self,
        tell: Callable[[Event], None],
        *,
        watch: NicWatch | None,
        report_to: tuple[str, ...] = (),
        reports: ReportSettings | None = None,
        feeds: tuple[str, ...] = (),
    ) -> None:
        self._tell, self._watch = tell, watch
        self._feeds = [(open_adapter(name), where) for name, where in map(parse_feed, feeds)]
        self._reporter = Reporter(unix_ns(), reports) if report_to else None
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
        """Begin, in the running loop."""
        if self._watch is not None:
            self._tasks.append(asyncio.create_task(self._look(self._watch), name="ringfold agent interfaces"))
        elif self._reporter is not None:
            self._tasks.append(asyncio.create_task(self._repeat(), name="ringfold agent reports"))
        for adapter, where in self._feeds:
            if is_missing(where):
                _log.warning("the feed %s is not there; it is read as soon as it is", where)
            self._tasks.append(
                asyncio.create_task(
                    pump(adapter, where, lambda said: self._tell(Observed(unix_ns(), said))), name=f"feed {where}"
                )
            )
        for task in self._tasks:
            task.add_done_callback(_complain)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        for collector in self._collectors:
            collector.close()
        if self._watch is not None:
            self._watch.close()

    def pair_came(self, pair: Pair) -> None:
        self._pairs += 1
        self._has_work.set()
        if self._watch is not None:
            for local, _ in pair.paths:
                self._watch.use(local)
        if self._reporter is not None:
            self._report(self._reporter.flow_added(unix_ns(), _flow(pair)))

    def pair_went(self, pair: Pair) -> None:
        self._pairs -= 1
        if not self._pairs:
            self._has_work.clear()
        if self._watch is not None:
            for local, _ in pair.paths:
                self._watch.leave(local)
        if self._reporter is not None:
            self._report(self._reporter.flow_removed(unix_ns(), _flow(pair)))

    async def _look(self, watch: NicWatch) -> None:
        """Look at the interfaces in their time; a look that was slow makes the next pause longer."""
        told: dict[int, float] = {}
        while True:
            await self._has_work.wait()
            began_ns = monotonic_ns()
            nics = watch.look(began_ns)
            found = pressures(nics)
            if found != told:  # also when it is nothing any more: an interface that is gone presses nobody
                self._tell(Queues(found))
                told = found
            self._report_queues(nics)
            ended_ns = monotonic_ns()
            next_ns = max(watch.next_ns(began_ns), 2 * ended_ns - began_ns)
            await asyncio.sleep((next_ns - ended_ns) / 1e9)

    async def _repeat(self) -> None:
        """Without interfaces to look at, there are still flows to be told of again."""
        while True:
            await self._has_work.wait()
            self._report_queues({})
            await asyncio.sleep(REPEAT_S)

    def _report_queues(self, nics: Nics) -> None:
        if self._reporter is not None:
            self._report(self._reporter.step(monotonic_ns(), unix_ns(), nics))

    def _report(self, packets: list[bytes]) -> None:
        for packet in packets:
            for collector in self._collectors:
                collector.send(packet)


def _flow(pair: Pair) -> FlowAdded:
    ends = (address_number(pair.source), address_number(pair.destination))
    return FlowAdded(*ends, pair.slot, pair.generation, len(pair.paths))


def _complain(task: asyncio.Task[None]) -> None:
    """A feed that cannot be read, or a look that failed, is said once; the agent goes on without it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s ended: %s", task.get_name(), error)
