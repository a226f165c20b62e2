"""A peer that sends wrong bytes: bad memory, a bad network card, or malice. Only the hashes can tell."""

from random import Random

import numpy as np

from ringfold.peer.effects import Block, EngineEffect, SendBlocks, SendMessage
from ringfold.wire.messages import Hashes

BLOCKS = 0.5
"""The share of blocks that are wrong,"""
HASHES = 0.2
"""and of hash lists."""


def garbled(rng: Random, effect: EngineEffect) -> EngineEffect:
    """The effect with some of its payload changed on the way, where it has any."""
    match effect:
        case SendBlocks(conn, blocks):
            return SendBlocks(conn, tuple(_wrong(rng, block) if rng.random() < BLOCKS else block for block in blocks))
        case SendMessage(conn, Hashes(lists=lists)) if rng.random() < HASHES:
            key, hashes = lists[-1]
            return SendMessage(conn, Hashes([*lists[:-1], (key, bytes(len(hashes)))]))
        case _:
            return effect


def _wrong(rng: Random, block: Block) -> Block:
    memory, offset, length, _ = block
    copy = np.array(memory[offset : offset + length])
    copy[rng.randrange(length)] ^= 1 << rng.randrange(8)
    return copy, 0, length, None
