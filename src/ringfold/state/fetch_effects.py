"""What a receiver lacks, and the effects of its fetch: `fetch.py` decides, `peer/sync/` carries them out. Pure."""

from dataclasses import dataclass

from ringfold.state.blocks import BlockRange
from ringfold.wire.messages import PeerId


@dataclass(frozen=True, slots=True)
class WantedKey:
    """A key to fetch: its root according to the plan, its size, and the hashes of what is here now."""

    key: int
    root: bytes
    nbytes: int
    own: bytes


@dataclass(frozen=True, slots=True)
class RequestHashes:
    """Ask this source for the block hashes of these keys."""

    peer: PeerId
    keys: list[int]


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Ask this source for these blocks, as (key, block), and expect them in this order as one batch."""

    peer: PeerId
    batch: int
    blocks: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AnnounceBlocks:
    """Tell all fellows that these blocks are here now, as (key, first, count). None at all: nothing new will come from
    here, except what other fellows have.
    """

    ranges: list[BlockRange]


@dataclass(frozen=True, slots=True)
class CorruptBlock:
    """A block came wrong, or (without one) the key's list of hashes. It is fetched elsewhere; all should hear of it."""

    peer: PeerId
    key: int
    block: int | None


@dataclass(frozen=True, slots=True)
class DropSource:
    """Close the connection to this source, before anything else: it does not keep to the protocol, or lies."""

    peer: PeerId
    text: str


@dataclass(frozen=True, slots=True)
class FetchComplete:
    """Every block is here and verified. Nothing follows."""


@dataclass(frozen=True, slots=True)
class FetchStuck:
    """Something is missing that nobody has any more. Nothing follows; what was written leaves the state torn."""

    text: str
    blame: list[PeerId]


FetchEffect = RequestHashes | RequestBlocks | AnnounceBlocks | CorruptBlock | DropSource | FetchComplete | FetchStuck
