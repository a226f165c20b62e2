"""Many pages of a dashboard in one process: `dashboard_worker.py ADDRESS NAME`.

A page takes what it is sent, as a browser does, and counts it; nothing is drawn, because browsers are other machines.
Every other page wants the links, too.
"""

import asyncio
import sys

import aiohttp

from ringfold.tools.cluster import Channel, ChannelClosed, Message


class Pages:
    """Pages of one dashboard, each with a WebSocket of its own."""

    def __init__(self, url: str) -> None:
        self._url, _, fragment = url.partition("#token=")
        self._token = fragment
        self.messages = self.bytes = self.snapshots = 0

    async def run(self, count: int, seconds: float) -> None:
        """Open so many, and read for so long from when all have their first state."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            ready = [asyncio.Event() for _ in range(count)]
            tasks = [asyncio.create_task(self._page(session, number, event)) for number, event in enumerate(ready)]
            async with asyncio.timeout(60):
                await asyncio.gather(*(event.wait() for event in ready))
            self.messages = self.bytes = self.snapshots = 0
            await asyncio.sleep(seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _page(self, session: aiohttp.ClientSession, number: int, ready: asyncio.Event) -> None:
        async with session.ws_connect(f"{self._url}live", max_msg_size=0) as socket:
            await socket.send_json({"token": self._token})
            if number % 2:
                await socket.send_json({"links": True})
            async for message in socket:
                text = str(message.data)
                self.messages += 1
                self.bytes += len(text)
                if text.startswith('{"kind":"snapshot"'):
                    self.snapshots += 1
                    ready.set()


def main(arguments: list[str]) -> None:
    address, name = arguments
    channel = Channel.connect(address, name)
    try:
        while (order := channel.receive()) is not None:
            channel.send(_read(order))
    except ChannelClosed:
        return
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def _read(order: Message) -> Message:
    pages = Pages(order["url"])
    asyncio.run(pages.run(order["pages"], order["seconds"]))
    return {"messages": pages.messages, "bytes": pages.bytes, "snapshots": pages.snapshots}


if __name__ == "__main__":
    main(sys.argv[1:])
