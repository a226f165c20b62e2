"""Plain streams between two hosts, in both directions at once: the kernel alone, for benchmarks to compare with.

One side listens and the other one connects: `listening` and `connected` give a stream per path, or with `mptcp` one
Multipath TCP connection that the kernel spreads over the paths itself (`mptcp_commands` configure them).
`saturate` fills all streams for a while and returns the rate of each; `exchange` moves so many bytes both ways.
`send_bursts` is UDP background traffic.
"""

import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MPTCP = 262
"""IPPROTO_MPTCP. The socket module has it only since Python 3.10, and not everywhere."""
_CHUNK = bytes(65_536)
_DONE = b"d"
_DATAGRAM_BYTES = 1_400

Streams = list[socket.socket]


def mptcp_missing() -> str | None:
    """Why there is no Multipath TCP here, or None."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP).close()
    except OSError as error:
        return f"this kernel has no Multipath TCP ({error.strerror})"
    return None


def mptcp_commands(spaces: Sequence[str], addresses: Sequence[str], devices: Sequence[str]) -> Iterator[list[str]]:
    """The `ip` commands for two hosts' namespaces: the first one, which listens, announces its `addresses`."""
    for space in spaces:
        yield ["ip", "-n", space, "mptcp", "limits", "set", "subflow", "8", "add_addr_accepted", "8"]
    for address, device in list(zip(addresses, devices, strict=True))[1:]:
        yield ["ip", "-n", spaces[0], "mptcp", "endpoint", "add", address, "dev", device, "signal"]


@contextmanager
def listening(addresses: Sequence[str], port: int, *, mptcp: bool = False) -> Iterator[list[socket.socket]]:
    """Listeners, one per address, on ports from `port` on (with `mptcp` one in all)."""
    made = [_new(mptcp) for _ in addresses[: 1 if mptcp else None]]
    try:
        for number, (listener, address) in enumerate(zip(made, addresses, strict=False)):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("0.0.0.0" if mptcp else address, port + number))
            listener.listen(1)
        yield made
    finally:
        for listener in made:
            listener.close()


def accepted(listeners: Sequence[socket.socket], *, congestion: str = "cubic") -> Streams:
    return [_ready(listener.accept()[0], congestion) for listener in listeners]


def connected(
    sources: Sequence[str], targets: Sequence[str], port: int, *, mptcp: bool = False, congestion: str = "cubic"
) -> Streams:
    """A stream from each source to its target (with `mptcp` from the first to the first). Congestion "": the host's."""
    made: Streams = []
    for number, (source, target) in enumerate(list(zip(sources, targets, strict=True))[: 1 if mptcp else None]):
        stream = _new(mptcp)
        stream.bind((source, 0))
        stream.connect((target, port + number))
        made.append(_ready(stream, congestion))
    return made


def saturate(streams: Streams, settle_s: float, seconds: float) -> list[float]:
    """Send on all streams for `settle_s` and then `seconds`; bytes per second that came on each in the latter."""
    counts, selector = [0] * len(streams), selectors.DefaultSelector()
    for number, stream in enumerate(streams):
        selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, number)
    began = time.monotonic()
    since: tuple[float, list[int]] | None = None
    while (passed := time.monotonic() - began) < settle_s + seconds:
        if since is None and passed >= settle_s:
            since = (passed, list(counts))
        for key, events in selector.select(0.1):
            stream = streams[key.data]
            if events & selectors.EVENT_READ:
                counts[key.data] += len(stream.recv(1 << 20))
            if events & selectors.EVENT_WRITE:
                _send_some(stream, _CHUNK)
    assert since is not None
    took = time.monotonic() - began - since[0]
    selector.close()
    return [(count - before) / took for count, before in zip(counts, since[1], strict=True)]


def exchange(stream: socket.socket, size: int) -> int:
    """Send `size` bytes and receive as many; nanoseconds until both sides have all of theirs, and know it."""
    began = time.monotonic_ns()
    left, wanted, has_sent_done, has_received_done = size, size, False, False
    selector = selectors.DefaultSelector()
    selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)
    while not (has_sent_done and has_received_done):
        events = selector.select(60)[0][1]
        if events & selectors.EVENT_READ:
            got = len(stream.recv(min(1 << 20, wanted) if wanted else 1))
            if not got:
                raise ConnectionError("the other side is gone")
            has_received_done = not wanted
            wanted -= min(got, wanted)
        if events & selectors.EVENT_WRITE and left:
            left -= _send_some(stream, memoryview(_CHUNK)[: min(left, len(_CHUNK))])
        elif events & selectors.EVENT_WRITE and not wanted and not has_sent_done:
            has_sent_done = _send_some(stream, _DONE) == 1
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if left or (not wanted and not has_sent_done) else 0)
        selector.modify(stream, interest)
    selector.close()
    return time.monotonic_ns() - began


def send_bursts(address: str, port: int, burst_bytes: int, period_us: int) -> None:
    """Send a burst of UDP datagrams in every period, until the process ends.

    A burst larger than a shaper's bucket waits in its queue, and what is sent just after it waits behind it.
    """
    payload, count = bytes(_DATAGRAM_BYTES), max(1, round(burst_bytes / _DATAGRAM_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * burst_bytes)
        begin, number = time.monotonic(), 0
        while True:
            for _ in range(count):
                try:
                    sender.sendto(payload, (address, port))
                except OSError:  # nothing listens there, or the buffer is full: losses do not matter here
                    continue
            number += 1
            time.sleep(max(0.0, begin + number * period_us / 1e6 - time.monotonic()))


def _send_some(stream: socket.socket, chunk: bytes | memoryview) -> int:
    try:
        return stream.send(chunk)
    except BlockingIOError:
        return 0


def _new(mptcp: bool) -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP if mptcp else 0)


def _ready(stream: socket.socket, congestion: str) -> socket.socket:
    if congestion:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setblocking(False)
    return stream
