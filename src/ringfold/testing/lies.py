"""A peer that sends wrong bytes: bad memory, a bad network card, or malice. Only the hashes can tell."""

from collections.abc import Sequence
from random import Random

import numpy as np

from ringfold.peer.effects import EngineEffect, SendMessage
from ringfold.peer.engine import RawBlock
from ringfold.wire.visiting import Hashes

BLOCKS = 0.5
"""The share of blocks that are wrong,"""
HASHES = 0.2
"""and of hash lists."""


def garbled(rng: Random, effect: EngineEffect) -> EngineEffect:
    """The effect with some of its payload changed on the way, where it has any."""
    match effect:
        case SendMessage(conn, Hashes(lists=lists)) if rng.random() < HASHES:
            key, hashes = lists[-1]
            return SendMessage(conn, Hashes([*lists[:-1], (key, bytes(len(hashes)))]))
        case _:
            return effect


def garbled_blocks(rng: Random, blocks: Sequence[RawBlock]) -> list[RawBlock]:
    """The blocks with some of them changed."""
    return [_wrong(rng, block) if rng.random() < BLOCKS else block for block in blocks]


def _wrong(rng: Random, block: RawBlock) -> RawBlock:
    memory, offset, length, _ = block
    copy = np.array(memory[offset : offset + length])
    copy[rng.randrange(length)] ^= 1 << rng.randrange(8)
    return copy, 0, length, None
