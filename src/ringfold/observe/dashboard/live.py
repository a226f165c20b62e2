"""Live runs: each run that a page wants to see is followed in the master that leads, over failovers.

Looks are blocking requests in threads; everything else is on the event loop. A run is followed from when it was first
shown, up to `MAX_RUNS` runs, and the default one from the beginning. A look costs the master as much as one of
`ringfold status`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ringfold import config
from ringfold.errors import ConfigError, MasterUnreachable, RemoteProtocolError
from ringfold.observe.dashboard.channels import PageFeed, RunChannel, encoder
from ringfold.observe.dashboard.server import PageSocket
from ringfold.observe.view import Json, MasterRow, RunView
from ringfold.runtime import master_client
from ringfold.runtime.clock import unix_ns
from ringfold.wire.events import Event
from ringfold.wire.probing import RoundSummary
from ringfold.wire.status import RunInfo, Status

EVERY_S = 0.5
ASK_EVERY_S = 5.0
REQUEST_TIMEOUT_S = 2.0
MAX_RUNS = 12

_log = logging.getLogger(__name__)

Look = tuple[str, Status, list[Event]] | MasterUnreachable
Result = TypeVar("Result")


class _LiveRun:
    def __init__(self, view: RunView) -> None:
        self.view, self.channel = view, RunChannel(view)
        self.task: asyncio.Task[None] | None = None
        self.lost = ""
        """Why no master answers; empty while one does."""


class LiveRuns:
    """The runs of the masters at `addresses`. Use it with `async with`; it follows while it is entered."""

    def __init__(self, addresses: Sequence[str], token: bytes, run: str = "") -> None:
        self._addresses, self._token, self._first = list(addresses), token, run
        self._runs: dict[str, _LiveRun] = {}
        self._pool = ThreadPoolExecutor(max_workers=MAX_RUNS + 2, thread_name_prefix="dashboard")
        self._tasks: list[asyncio.Task[None]] = []
        self._masters: list[MasterRow] = []
        self._infos: list[RunInfo] = []

    async def __aenter__(self) -> "LiveRuns":
        self._run(self._first)
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._ask())]
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = [*self._tasks, *(run.task for run in self._runs.values() if run.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def open(self, page: PageSocket) -> "LiveSession":
        return LiveSession(self, page)

    def channel(self, name: str) -> RunChannel:
        """The channel of a run; it is followed from now on."""
        known = self._runs.get(name) or next((run for run in self._runs.values() if run.view.run == name), None)
        if known is None:
            is_there = name in {info.name for info in self._infos}
            known = self._run(name) if is_there else self._runs[self._first]
        return known.channel

    def _run(self, name: str) -> _LiveRun:
        if len(self._runs) >= MAX_RUNS:
            unseen = [other for other, run in self._runs.items() if other != self._first and not run.channel.pages]
            if not unseen:
                return self._runs[self._first]
            if (task := self._runs.pop(unseen[0]).task) is not None:
                task.cancel()
        run = self._runs[name] = _LiveRun(RunView(name))
        run.task = asyncio.create_task(self._follow(name, run))
        return run

    async def _follow(self, name: str, run: _LiveRun) -> None:
        """Take in looks until cancelled."""
        while True:
            looks = follow(self._addresses, self._token, name)
            try:
                while True:
                    look = await self._in_thread(lambda looks=looks: next(looks))  # type: ignore[misc]
                    self._take(run, look)
            except (MasterUnreachable, ConfigError, RemoteProtocolError) as error:
                self._lose(run, str(error))
            await asyncio.sleep(1.0)

    def _take(self, run: _LiveRun, look: Look) -> None:
        if isinstance(look, MasterUnreachable):
            self._lose(run, str(look))
            return
        address, status, events = look
        if run.lost:
            _log.warning("the master at %s answers again", address)
            run.lost = ""
        run.view.run = status.run
        run.view.look(_now_ms(), status, events)

    def _lose(self, run: _LiveRun, why: str) -> None:
        if run.lost != why:
            _log.warning("%s; trying again", why)
            run.lost = why
        run.view.lose(_now_ms(), why)

    async def _publish(self) -> None:
        """Twice a second a new state for all pages."""
        while True:
            for run in self._runs.values():
                run.channel.publish()
            await asyncio.sleep(EVERY_S)

    async def _ask(self) -> None:
        """What changes seldom: which master leads, which runs there are, the newest probing round."""
        while True:
            self._masters = await self._in_thread(self._ask_masters)
            for run in self._runs.values():
                run.view.masters = self._masters
            with contextlib.suppress(MasterUnreachable, ConfigError, RemoteProtocolError):
                self._infos = (await self._in_thread(self._ask_runs))[:256]
                for run in self._runs.values():
                    run.view.set_runs(self._infos)
            for name, run in list(self._runs.items()):
                with contextlib.suppress(MasterUnreachable, ConfigError, RemoteProtocolError):
                    summary = await self._in_thread(lambda name=name: self._ask_round(name))  # type: ignore[misc]
                    if summary is not None:
                        run.view.round(summary, _now_ms())
            await asyncio.sleep(ASK_EVERY_S)

    def _ask_masters(self) -> list[MasterRow]:
        rows = []
        for address in self._addresses:
            try:
                with master_client.MasterClient(address, self._token, REQUEST_TIMEOUT_S, self._first) as client:
                    status = client.status()
                rows.append(MasterRow(address, "leads", f"fence {status.fence}"))
            except MasterUnreachable as error:
                role = "stands by" if "stands by" in error.reason else "away"
                rows.append(MasterRow(address, role, error.reason))
            except (ConfigError, RemoteProtocolError) as error:
                rows.append(MasterRow(address, "refuses", str(error)))
        return rows

    def _ask_runs(self) -> list[RunInfo]:
        found = master_client.ask(self._addresses, self._token, lambda client: client.runs(), REQUEST_TIMEOUT_S)
        return found.runs

    def _ask_round(self, name: str) -> RoundSummary | None:
        answer = master_client.ask(
            self._addresses, self._token, lambda client: client.probe("show"), REQUEST_TIMEOUT_S, name
        )
        return answer.summary

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class Channels(Protocol):
    """Where a session finds the channel of a run."""

    def channel(self, name: str) -> RunChannel:
        """The channel of this run; of the first one, if there is none of that name."""


class LiveSession:
    """A page that looks at live runs."""

    def __init__(self, runs: Channels, page: PageSocket) -> None:
        self._runs, self._page = runs, page
        self._feed = PageFeed(page.send)

    async def receive(self, message: dict[str, Json]) -> None:
        if isinstance(wanted := message.get("links"), bool):
            self._feed.wants_links = wanted
            self._feed.wake()
        if isinstance(name := message.get("run"), str):
            with contextlib.suppress(ConfigError):
                self._feed.show(self._runs.channel(name and config.check_run_name(name)))

    async def run(self) -> None:
        await self._page.send(encoder.encode({"kind": "hello", "mode": "live"}))
        self._feed.show(self._runs.channel(""))
        await self._feed.run()

    def close(self) -> None:
        self._feed.show(None)


def follow(addresses: Sequence[str], token: bytes, run: str) -> Iterator[Look]:
    """Looks at a run, twice a second."""
    return master_client.follow(addresses, token, EVERY_S, REQUEST_TIMEOUT_S, run)


def _now_ms() -> int:
    return unix_ns() // 1_000_000
