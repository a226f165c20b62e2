"""Somebody on the network who is not part of the run: connects to its ports and sends bytes that mean nothing there."""

from ringfold.testing.network import End, Network
from ringfold.testing.scheduler import MS

DIAL_NS = 500 * MS


class Stranger:
    """Sends a few random bytes, or the beginning of a frame that is too long, or nothing at all."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.host = network.add_host(f"stranger-{len(network.hosts)}", self)

    def bother(self, target: str, port: int) -> None:
        self._network.dial(self.host, target, port, DIAL_NS)

    def opened(self, end: End) -> None:
        rng = self._network.scheduler.rng
        too_long, no_message = b"\xff\xff\xff\x7f\x00", b"\x05\x00\x00\x00\x00junk"
        noise = rng.choice((b"", rng.randbytes(200), too_long, no_message, b"GET / HTTP/1.1"))
        self._network.send(end, noise[: end.room])

    def accepted(self, end: End) -> None:
        raise AssertionError("nobody dials a stranger")

    def received(self, end: End, chunk: bytes) -> None:
        pass

    def writable(self, end: End) -> None:
        pass

    def lost(self, end: End, reason: str) -> None:
        pass

    def woken(self) -> None:
        pass
