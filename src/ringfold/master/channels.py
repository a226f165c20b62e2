"""How many channels an epoch has: threads of each peer that move and reduce the data of ops. Pure.

All members cut an op alike, so the one that can have the fewest threads decides. A peer that names no number gets its
share of the cores that it may use: the peers of one host share them, also those of other groups.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from ringfold.wire.messages import Member

MAX_AUTO_CHANNELS = 4
"""Unless every member asks for more. TCP on one host gains until four threads."""


class Offer(Protocol):
    """What a peer offers, as in `Hello`."""

    @property
    def member(self) -> Member: ...
    @property
    def cores(self) -> int: ...
    @property
    def threads(self) -> int: ...


def channels_for(members: Sequence[Offer], run: Sequence[Offer]) -> int:
    """The channels of an epoch with these members; `run` are all members of the run.

    Several paths are for networks that are slower than one core: their lanes share one channel.
    """
    if not members or any(peer.member.paths > 1 for peer in members):
        return 1
    here = Counter(peer.member.host for peer in run)
    shares = (min(MAX_AUTO_CHANNELS, peer.cores // max(1, here[peer.member.host])) for peer in members)
    return max(1, min(peer.threads or share for peer, share in zip(members, shares, strict=True)))
