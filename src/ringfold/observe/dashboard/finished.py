"""Finished runs, from their run directories: the same page at any time of them.

One pass over the files makes what belongs to the whole run: its incidents and its series. Statuses are not kept: the
pass only notes where in the files they are, and a page at some time is made of the last few before it, as a live view
would have made it then. So a run of a day needs no more memory than its list of incidents and an index.
"""

import asyncio
import bisect
import logging
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from ringfold.errors import UsageError
from ringfold.observe.dashboard.channels import encoder
from ringfold.observe.dashboard.server import PageSocket
from ringfold.observe.records import read_directory
from ringfold.observe.series import Tier
from ringfold.observe.stream import merged
from ringfold.observe.view import Json, RoundRow, RunView, round_row
from ringfold.wire.base import PeerId
from ringfold.wire.events import OpsLeftOut, PathSharesChanged, StatusSampled, decode_event
from ringfold.wire.notices import RoundDone
from ringfold.wire.status import Status

MAX_RUNS = 3
BUCKETS = 1_200
"""In each series: more than a chart has pixels."""
MIN_BUCKET_MS = 500
BEFORE_MS = 16_000
"""A page is made of the statuses of so long before it: links are recorded every 15 s."""
MAX_ROUNDS = 20_000
MAX_SHARES = 20_000
KEPT_STATUSES = 64
_IS_STATUS = b'"event":"status_sampled"'

_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a recorded status is."""

    at_ms: int
    path: Path
    offset: int


class FinishedRun:
    """One finished run. UsageError if its directory has no record of a master."""

    def __init__(self, directory: Path) -> None:
        self._places = sorted(_places(directory))
        if not self._places:
            raise UsageError(
                f"{directory} has no status of a run: set events_dir (ringfold master --events) at the master"
            )
        self.begin_ms, self.end_ms = self._places[0].at_ms, self._places[-1].at_ms + 1_000
        width_ms = max(MIN_BUCKET_MS, -(-(self.end_ms - self.begin_ms) // BUCKETS // 100) * 100)
        self.directory, self.name = directory, ""
        self._view = RunView("", [Tier(width_ms, 2 * BUCKETS)])
        self._rounds: list[tuple[int, RoundRow]] = []
        self._shares: list[tuple[int, tuple[PeerId, PeerId], list[float]]] = []
        self._decoded: OrderedDict[_Place, Status] = OrderedDict()
        self.left_out = 0
        self._read(directory)
        self.name = self._view.run or directory.name

    def _read(self, directory: Path) -> None:
        """The one pass over all events."""
        for seen in merged(directory):
            at_ms = seen.wall_ns / 1e6
            match seen.notice:
                case StatusSampled(status):
                    if status.peers or self._view.run:
                        self._view.run = status.run
                    self._view.look(int(at_ms), status)
                    continue
                case RoundDone(summary) if len(self._rounds) < MAX_ROUNDS:
                    self._rounds.append((int(at_ms), round_row(summary, int(at_ms))))
                case PathSharesChanged(peer, shares) if len(self._shares) < MAX_SHARES:
                    self._shares.append((int(at_ms), (seen.peer, peer), [round(share, 3) for share in shares]))
                case OpsLeftOut(ops):
                    self.left_out += ops
            self._view.event(seen.event, at_ms)

    def introduction(self) -> dict[str, Json]:
        """What belongs to the whole run, and the page at its begin."""
        page = self.page(self.begin_ms)
        page["incidents"] = {str(each.number): msgspec.to_builtins(each) for each in self._view.incidents.all}
        return {
            "name": self.name,
            "directory": str(self.directory),
            "begin_ms": self.begin_ms,
            "end_ms": self.end_ms,
            "page": page,
            "series": self._view.all_series(with_last=True),
        }

    def page(self, at_ms: int) -> dict[str, Json]:
        """The page at this time, without incidents."""
        page = self._then(at_ms).page()
        page.at_ms = at_ms
        page.rounds = [row for when, row in self._rounds if when <= at_ms][-12:]
        shares = {edge: each for when, edge, each in self._shares if when <= at_ms}
        page.paths = {f"{source}-{target}": each for (source, target), each in shares.items() if each}
        newest = self._view.incidents.newest(at_ms)
        line = page.headline
        if newest is not None:
            line.last_open = newest.is_open or newest.end_ms > at_ms
            cost = "" if line.last_open or not newest.cost else f": {newest.cost}"
            line.last, line.last_ms = f"{newest.title}{cost}", newest.begin_ms if line.last_open else newest.end_ms
        plain = msgspec.to_builtins(page)
        assert isinstance(plain, dict)
        return plain

    def links(self, at_ms: int) -> dict[str, Json]:
        """What was known of the links at this time."""
        return self._then(at_ms).links_since(-1)

    def _then(self, at_ms: int) -> RunView:
        """The view of the last few statuses before this time."""
        last = max(1, bisect.bisect_right(self._places, at_ms, key=lambda place: place.at_ms))
        first = bisect.bisect_left(self._places, at_ms - BEFORE_MS, key=lambda place: place.at_ms)
        view = RunView(self.name, ())
        for place in self._places[min(first, last - 1) : last]:
            status = self._status(place)
            if status is not None:
                view.look(place.at_ms, status)
        return view

    def _status(self, place: _Place) -> Status | None:
        known = self._decoded.get(place)
        if known is not None:
            self._decoded.move_to_end(place)
            return known
        try:
            with place.path.open("rb") as file:
                file.seek(place.offset)
                event = decode_event(file.readline())
        except OSError as error:
            _log.warning("%s cannot be read any more: %s", place.path, error)
            return None
        if event is None or not isinstance(event.notice, StatusSampled):
            return None
        self._decoded[place] = event.notice.status
        while len(self._decoded) > KEPT_STATUSES:
            self._decoded.popitem(last=False)
        return event.notice.status


class FinishedRuns:
    """Up to three finished runs, shown side by side."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self.runs = [FinishedRun(directory) for directory in directories]
        self._introduction = encoder.encode({"kind": "replay", "runs": [run.introduction() for run in self.runs]})

    def open(self, page: PageSocket) -> "ReplaySession":
        return ReplaySession(self, page, self._introduction)

    def frame(self, times: list[int]) -> bytes:
        """The pages of all runs, each at its time, within the run."""
        at = [max(run.begin_ms, min(run.end_ms, when)) for run, when in zip(self.runs, times, strict=True)]
        pages = [run.page(when) for run, when in zip(self.runs, at, strict=True)]
        links = [run.links(when) for run, when in zip(self.runs, at, strict=True)]
        return encoder.encode({"kind": "frame", "at": at, "pages": pages, "links": links})


class ReplaySession:
    """A page that looks at finished runs, at the times that its slider is at."""

    def __init__(self, runs: FinishedRuns, page: PageSocket, introduction: bytes) -> None:
        self._runs, self._page, self._introduction = runs, page, introduction
        self._wanted: list[int] | None = None
        self._woken = asyncio.Event()

    async def receive(self, message: dict[str, Json]) -> None:
        times = message.get("seek")
        if not isinstance(times, list) or len(times) != len(self._runs.runs):
            return
        if all(isinstance(each, int | float) and abs(each) < 1e15 for each in times):
            self._wanted = [int(each) for each in times]
            self._woken.set()

    async def run(self) -> None:
        await self._page.send(self._introduction)
        while True:
            await self._woken.wait()
            self._woken.clear()
            if (times := self._wanted) is not None:
                self._wanted = None
                await self._page.send(await asyncio.to_thread(self._runs.frame, times))

    def close(self) -> None:
        self._wanted = None


def _places(directory: Path) -> Iterable[_Place]:
    """Where the statuses are in the files of masters."""
    for record in read_directory(directory):
        if record.begun.role != "master":
            continue
        for path in record.parts:
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    if _IS_STATUS in line[:200] and (at_ms := _when(line)):
                        yield _Place(at_ms, path, offset)
                    offset += len(line)


def _when(line: bytes) -> int:
    """The wall time of a line, without decoding all of it; 0 if it is cut."""
    head, _, _ = line.partition(b',"event"')
    try:
        return int(msgspec.json.decode(head + b"}").get("wall", 0)) // 1_000_000 if line.endswith(b"\n") else 0
    except (msgspec.DecodeError, AttributeError, TypeError):
        return 0
