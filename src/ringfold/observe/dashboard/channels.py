"""What pages receive: a snapshot, then small updates. Each is encoded once, and the same bytes go to every page.

A page that is behind gets no queue of updates: when it can take something again, it gets the newest state as a whole.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from ringfold.observe.view import Json, RunView, merge_patch

Send = Callable[[bytes], Awaitable[None]]
Look = Callable[[], None]

encoder = msgspec.json.Encoder()


class RunChannel:
    """The pages that look at one run."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.pages: set[PageFeed] = set()
        self.number = 0
        self.update = b""
        """What turns the state before into that of `number`."""
        self._state: dict[str, Json] = {}
        self._snapshot: tuple[int, bytes] = (-1, b"")
        self._links: dict[int, bytes] = {}

    def publish(self) -> None:
        """Make a new state of the view, and wake up the pages. Without pages nothing is made."""
        buckets = self.view.new_buckets()
        if not self.pages:
            self._state = {}
            return
        before, self._state = self._state, self.view.snapshot()
        self.number += 1
        patch = merge_patch(before, self._state) if before else self._state
        self.update = encoder.encode({"kind": "update", "number": self.number, "patch": patch, "buckets": buckets})
        self._links = {}
        for page in self.pages:
            page.wake()

    def add(self, page: "PageFeed") -> None:
        self.pages.add(page)
        if not self._state:
            self.publish()

    def remove(self, page: "PageFeed") -> None:
        self.pages.discard(page)

    def snapshot(self) -> bytes:
        """The whole state of `number`, encoded when the first page needs it."""
        if self._snapshot[0] != self.number:
            series = self.view.all_series()
            message = {"kind": "snapshot", "number": self.number, "page": self._state, "series": series}
            self._snapshot = (self.number, encoder.encode(message))
        return self._snapshot[1]

    def links_since(self, version: int) -> bytes:
        """The links that changed since this version. Pages that had the same version get the same bytes."""
        if version not in self._links:
            self._links[version] = encoder.encode({"kind": "links", **self.view.links_since(version)})
        return self._links[version]


class PageFeed:
    """One page: what it has received of its run, and what it wants."""

    def __init__(self, send: Send) -> None:
        self.wants_links = False
        self._send = send
        self._channel: RunChannel | None = None
        self._sent = -1
        self._links_sent = -1
        self._woken = asyncio.Event()

    def show(self, channel: RunChannel | None) -> None:
        """Show another run, from its next state on."""
        if self._channel is not None:
            self._channel.remove(self)
        self._channel, self._sent, self._links_sent = channel, -1, -1
        if channel is not None:
            channel.add(self)
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Send what is new, until cancelled. While one message is on its way, newer states replace each other."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            channel = self._channel
            if channel is None:
                continue
            if channel.number != self._sent:
                is_next = self._sent >= 0 and channel.number == self._sent + 1
                self._sent, message = channel.number, channel.update if is_next else channel.snapshot()
                await self._send(message)
            if self.wants_links and self._channel is channel and self._links_sent != channel.view.links_version:
                before, self._links_sent = self._links_sent, channel.view.links_version
                await self._send(channel.links_since(before))
