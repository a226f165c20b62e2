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
    """Request the block hashes of these keys from this source."""

    peer: PeerId
    keys: list[int]


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Request these blocks, as (key, block), from this source, and expect them in this order as one batch."""

    peer: PeerId
    batch: int
    blocks: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AnnounceBlocks:
    """Announce to all relays that these blocks are here now, as (key, first, count). An empty list: nothing new will
    come from here, except what other relays have.
    """

    ranges: list[BlockRange]


@dataclass(frozen=True, slots=True)
class CorruptBlock:
    """A block was wrong, or (None) the key's list of hashes. It is fetched elsewhere. Report it to the master."""

    peer: PeerId
    key: int
    block: int | None


@dataclass(frozen=True, slots=True)
class DropSource:
    """Close the connection to this source before the next effect: it breaks the protocol, or lies."""

    peer: PeerId
    text: str


@dataclass(frozen=True, slots=True)
class FetchComplete:
    """Every block is here and verified. Nothing follows."""


@dataclass(frozen=True, slots=True)
class FetchStuck:
    """Something is missing that no source has any more. Nothing follows; what was written leaves the state torn."""

    text: str
    blame: list[PeerId]


FetchEffect = RequestHashes | RequestBlocks | AnnounceBlocks | CorruptBlock | DropSource | FetchComplete | FetchStuck
