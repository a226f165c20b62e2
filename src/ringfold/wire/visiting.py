"""What is said on an open visit, beside the blocks and the filler: who wants what, and who has it."""

from ringfold.wire.base import Message
from ringfold.wire.messages import Refused


class HashesWanted(Message, frozen=True, tag="hashes_wanted"):
    """The block hashes of these keys, please."""

    keys: list[int]


class Hashes(Message, frozen=True, tag="hashes"):
    """Per key the hashes of its blocks, one after the other; they must give the key's root."""

    lists: list[tuple[int, bytes]]


class BlocksWanted(Message, frozen=True, tag="blocks_wanted"):
    """These blocks, as (key, block), in this order: each comes in a block frame."""

    blocks: list[tuple[int, int]]


class Have(Message, frozen=True, tag="have"):
    """A receiver has these blocks now, as (key, first, count), and gives them to others."""

    ranges: list[tuple[int, int, int]]


class Rate(Message, frozen=True, tag="rate"):
    """The receiver of filler has seen enough of it."""

    bytes_per_s: float


OnVisit = HashesWanted | Hashes | BlocksWanted | Have | Rate | Refused
