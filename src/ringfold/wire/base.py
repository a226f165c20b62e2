"""The base class of all messages, and the types of ids, numbers and choices in them."""

from typing import Literal

from msgspec import Struct

PROTOCOL_VERSION = 3

PeerId = int
Epoch = int
Tag = int
Sequence = int
GroupId = int

VoteKind = Literal["update", "pending", "sync", "optimize"]
EvidenceBy = Literal["ring", "master"]
OpState = Literal["unfinished", "done", "committed"]
ReasonKind = Literal[
    "lost",
    "edge",
    "usage",
    "deadline",
    "evicted",
    "cancelled",
    "state",
    "revision",
    "hash",
    "state_lost",
    "topology",
    "too_few",
]
SyncStrategy = Literal["enforce-popular", "receive-only", "send-only"]
HashKind = Literal["rf64", "blake3"]
Purpose = Literal["state", "measure"]


def is_before(a: Sequence, b: Sequence) -> bool:
    """Whether `a` comes before `b`, of two sequences that are near each other: they wrap around at 2^32."""
    return (a - b) % (1 << 32) >= 1 << 31


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """The base class of all messages. Unknown fields and types are refused."""


class Liveness(Struct, frozen=True):
    """The run's heartbeat settings: when silence becomes suspicion, and suspicion eviction."""

    heartbeat_ms: int = 250
    suspect_after_ms: int = 1_000
    evict_after_ms: int = 5_000
