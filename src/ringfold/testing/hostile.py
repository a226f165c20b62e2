"""Hostile input in the simulation.

`GarbageClient` has no token: it connects to ports of the run and sends garbage. `garbled` is a faulty peer: bad
memory, a bad network card, or malice; only the hashes show it.
"""

from collections.abc import Sequence
from random import Random

import numpy as np

from ringfold.peer.effects import EngineEffect, SendMessage
from ringfold.peer.engine import RawBlock
from ringfold.testing.network import End, Network
from ringfold.testing.scheduler import MS
from ringfold.wire.messages import Hashes

DIAL_NS = 500 * MS


class GarbageClient:
    """Sends a few random bytes, or the beginning of a frame that is too long, or nothing at all."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.host = network.add_host(f"garbage-client-{len(network.hosts)}", self)

    def bother(self, target: str, port: int) -> None:
        self._network.dial(self.host, target, port, DIAL_NS)

    def opened(self, end: End) -> None:
        rng = self._network.scheduler.rng
        too_long, no_message = b"\xff\xff\xff\x7f\x00", b"\x05\x00\x00\x00\x00junk"
        noise = rng.choice((b"", rng.randbytes(200), too_long, no_message, b"GET / HTTP/1.1"))
        self._network.send(end, noise[: end.room])

    def accepted(self, end: End) -> None:
        raise AssertionError("a garbage client is never dialled")

    def received(self, end: End, chunk: bytes) -> None:
        pass

    def writable(self, end: End) -> None:
        pass

    def lost(self, end: End, reason: str) -> None:
        pass

    def woken(self) -> None:
        pass


BAD_BLOCKS = 0.5
"""The share of blocks that a faulty peer garbles,"""
BAD_HASH_LISTS = 0.2
"""and of hash lists."""


def garbled(rng: Random, effect: EngineEffect) -> EngineEffect:
    """The effect with some of its payload changed, where it has any."""
    match effect:
        case SendMessage(conn, Hashes(lists=lists)) if rng.random() < BAD_HASH_LISTS:
            key, hashes = lists[-1]
            return SendMessage(conn, Hashes([*lists[:-1], (key, bytes(len(hashes)))]))
        case _:
            return effect


def garbled_blocks(rng: Random, blocks: Sequence[RawBlock]) -> list[RawBlock]:
    """The blocks with some of them changed."""
    return [_wrong(rng, block) if rng.random() < BAD_BLOCKS else block for block in blocks]


def _wrong(rng: Random, block: RawBlock) -> RawBlock:
    memory, offset, length, _ = block
    copy = np.array(memory[offset : offset + length])
    copy[rng.randrange(length)] ^= 1 << rng.randrange(8)
    return copy, 0, length, None
