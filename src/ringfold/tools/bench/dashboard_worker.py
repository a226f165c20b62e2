"""The processes around the master in `ringfold bench dashboard`: `dashboard_worker.py ADDRESS NAME WHAT ARGUMENT...`.

*peers*: those of `bench master`, whose heartbeats also carry what peers that train report. One of them can record its
ops, as a peer with `events_dir` does. It is one only, because all peers share this process: the records of 64 would
delay ops here that they do not delay on 64 machines.

*observers*: many pages of a dashboard, and a Prometheus server. A page takes what it is sent, as a browser does, and
counts it; nothing is drawn, because browsers are other machines. Every other page wants the links, too.

Both send `ready` when they are, wait for an order, and reply with what they have counted since.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from pathlib import Path

import aiohttp

from ringfold.peer.recording import Thinning
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.network import host_name
from ringfold.runtime.recorder import Recorder, begun
from ringfold.tools.bench.master_worker import ADMISSION_S, DESCRIPTOR, F32, SUM, ControlPeer, ControlPeers, cpu_ns
from ringfold.tools.cluster import Channel, ChannelClosed, Message
from ringfold.units import S
from ringfold.wire.events import OpEnded, Stamp, encode_event
from ringfold.wire.frames import Heartbeat, decode_master_heartbeat, heartbeat_frame
from ringfold.wire.status import OpTotals, Progress

WARM_UP = 20
OPEN_S = 60.0
SCRAPE_EVERY_S = 1.0
SCRAPE_TIMEOUT_S = 10.0
STEP_BYTES = 4 << 20
LINK_RATE = 1_000_000_000


async def next_order(channel: Channel) -> Message:
    """The next message, while the loop goes on."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel.fileno(), arrived.set)
    try:
        while (order := channel.queued()) is None:
            await arrived.wait()
            arrived.clear()
            channel.pull()
    finally:
        loop.remove_reader(channel.fileno())
    return order


# Peers


class TrainingPeer(ControlPeer):
    """A peer that reports a step, a loss and the totals of its ops with every heartbeat."""

    def _answer_beat(self, body: bytes) -> None:
        self._beats += 1
        step = self._beats
        number, _ = decode_master_heartbeat(body)
        moved = step * STEP_BYTES
        totals = OpTotals(committed=step, bytes=moved, sent_bytes=moved, received_bytes=moved, busy_ns=step * 10**7)
        progress = Progress("bench", step, step, in_step=True, logged={"loss": 1 / step})
        heartbeat = Heartbeat(step, number, self.epoch, out_rate=LINK_RATE + step, totals=totals, progress=progress)
        self.transport.write(heartbeat_frame(heartbeat))


class TrainingPeers(ControlPeers):
    """All peers of a run."""

    async def connect(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(self.size):
            peer = TrainingPeer(self, number)
            self.peers.append(peer)
            await loop.create_connection(lambda peer=peer: peer, host, port)  # type: ignore[misc]
        await asyncio.wait_for(self._over, ADMISSION_S)


class OpRecord:
    """The record of a peer's ops in files. A thread encodes and writes them, and leaves some out if there are many."""

    def __init__(self, directory: Path, peer: ControlPeer) -> None:
        self._ended: deque[OpEnded] = deque()
        self._thinning, self._collected_ns = Thinning(), monotonic_ns()
        about = begun("peer", "default", "bench-0", host_name(), metadata.version("ringfold"))
        self._recorder = Recorder(about, directory, collect=self._lines)
        self._recorder.peer = peer.peer
        self._epoch = peer.epoch

    def ended(self, sequence: int, began_ns: int, ended_ns: int) -> None:
        self._ended.append(
            OpEnded("all_reduce", 0, sequence, self._epoch, "committed", 0, began_ns, began_ns, local_ns=ended_ns)
        )

    def close(self) -> None:
        self._recorder.close()

    def _lines(self) -> list[bytes]:
        ops = [self._ended.popleft() for _ in range(len(self._ended))]
        now_ns = monotonic_ns()
        self._thinning.note(len(ops), (now_ns - self._collected_ns) / S)
        self._collected_ns = now_ns
        peer, keeps = self._recorder.peer, self._thinning.keeps
        return [encode_event(Stamp(op.local_ns, 0, peer), op) for op in ops if keeps(op.sequence)]


async def train(channel: Channel, host: str, port: str) -> Message:
    """Join, wait for the order, run ops for so long, then none for as long."""
    order = await next_order(channel)
    peers = TrainingPeers(order["peers"])
    record: OpRecord | None = None
    try:
        await peers.connect(host, int(port))
        if order["events_dir"]:
            record = OpRecord(Path(order["events_dir"]), peers.peers[0])
        channel.send({"ready": True})
        await next_order(channel)
        return await _measured(peers, order["seconds"], order["master_pid"], record)
    finally:
        if record is not None:
            record.close()
        peers.close()


async def _measured(peers: ControlPeers, seconds: float, master_pid: int, record: OpRecord | None) -> Message:
    descriptor = DESCRIPTOR.pack(0, F32, SUM, 0, 1, 0, 0, 1, 0, 0, 0)
    for sequence in range(WARM_UP):
        await peers.op(sequence, b"", descriptor)
    durations: list[int] = []
    cpu_began, began = cpu_ns(master_pid), monotonic_ns()
    before = began
    while before - began < seconds * S:
        sequence = WARM_UP + len(durations)
        await peers.op(sequence, b"", descriptor)
        after = monotonic_ns()
        durations.append(after - before)
        if record is not None:
            record.ended(sequence, before, after)
            after = monotonic_ns()  # the record is a part of the next op's time: so it is in a program
        before = after
    cpu_idle, idle = cpu_ns(master_pid), monotonic_ns()
    await asyncio.sleep(seconds)
    return {
        "durations_ns": durations,
        "ops_ns": idle - began,
        "ops_cpu_ns": cpu_idle - cpu_began,
        "idle_ns": monotonic_ns() - idle,
        "idle_cpu_ns": cpu_ns(master_pid) - cpu_idle,
    }


# Observers


class Observers:
    """Pages of one dashboard, each with a WebSocket of its own, and a server that scrapes metrics."""

    def __init__(self, url: str, scraped: Sequence[str]) -> None:
        self._url, _, self._token = url.partition("#token=")
        self._scraped = scraped
        self._forget()

    def _forget(self) -> None:
        self.counts = {"messages": 0, "bytes": 0, "scrapes": 0, "scraped_bytes": 0}

    async def run(self, pages: int, until: Callable[[], Coroutine[None, None, None]]) -> None:
        """Open so many pages and scrape until `until` returns, which is called when all have their first content."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            opened = [asyncio.Event() for _ in range(pages + len(self._scraped))]
            tasks = [
                *(asyncio.create_task(self._page(session, number, opened[number])) for number in range(pages)),
                *(
                    asyncio.create_task(self._scrape(session, url, opened[pages + number]))
                    for number, url in enumerate(self._scraped)
                ),
            ]

            async def watch() -> None:
                async with asyncio.timeout(OPEN_S):
                    for event in opened:
                        await event.wait()
                self._forget()
                await until()

            watching = asyncio.create_task(watch())
            done, _ = await asyncio.wait([watching, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, *tasks):
                task.cancel()
            await asyncio.gather(watching, *tasks, return_exceptions=True)
            for task in done:
                task.result()
            if watching not in done:
                raise RuntimeError("the dashboard closed a page")

    async def _page(self, session: aiohttp.ClientSession, number: int, opened: asyncio.Event) -> None:
        async with session.ws_connect(f"{self._url}live", max_msg_size=0) as socket:
            await socket.send_json({"token": self._token})
            if number % 2:
                await socket.send_json({"links": True})
            async for message in socket:
                text = str(message.data)
                self.counts["messages"] += 1
                self.counts["bytes"] += len(text)
                if text.startswith('{"kind":"snapshot"'):
                    opened.set()

    async def _scrape(self, session: aiohttp.ClientSession, url: str, opened: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        due, timeout = loop.time(), aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        while True:
            async with session.get(url, timeout=timeout, raise_for_status=True) as response:
                content = await response.read()
            self.counts["scrapes"] += 1
            self.counts["scraped_bytes"] += len(content)
            opened.set()
            due += SCRAPE_EVERY_S
            await asyncio.sleep(max(0.0, due - loop.time()))


async def observe(channel: Channel) -> Message:
    """Open the pages and scrape, until the second order."""
    order = await next_order(channel)
    observers = Observers(order["url"], order["scraped"])

    async def until() -> None:
        channel.send({"ready": True})
        await next_order(channel)

    await observers.run(order["pages"], until)
    return {**observers.counts}


def main(arguments: list[str]) -> None:
    address, name, what, *rest = arguments
    channel = Channel.connect(address, name)
    try:
        channel.send(asyncio.run(train(channel, *rest) if what == "peers" else observe(channel)))
        channel.receive()  # its end would be taken for a failure
    except ChannelClosed:
        return
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
