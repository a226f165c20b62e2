"""Evidence by the master: collects Done of every member, op by op, in one epoch.

This is the hot path of a run with many members: n Dones in and one evidence out per op, nothing else. A collector
lives from the record of its epoch to its seal, and what it holds then is dropped: the seals say where the ops stand.
"""

from collections.abc import Sequence

from ringfold.errors import RemoteProtocolError
from ringfold.master.events import Conn, SendEvidence
from ringfold.wire.descriptor import fingerprint
from ringfold.wire.frames import Done, Evidence
from ringfold.wire.messages import Epoch, PeerId, is_before

MAX_OPEN_OPS = 65_536
"""Far more ops than a program has in flight: a peer that opens more is lying."""


class Mismatch(Exception):
    """Two members called different things under one (tag, sequence)."""

    def __init__(self, first: PeerId, first_descriptor: bytes) -> None:
        super().__init__(first, first_descriptor)
        self.first, self.first_descriptor = first, first_descriptor


class _Open:
    """One op that some members are done with."""

    __slots__ = ("descriptor", "first", "missing", "payloads", "registrations", "seen")

    def __init__(self, done: Done, members: int) -> None:
        self.descriptor = done.descriptor
        self.first = done.rank
        self.missing = members
        self.seen = [False] * members
        self.payloads: list[bytes | None] = [None] * members
        self.registrations = 0


class Collector:
    """The Dones of one epoch."""

    def __init__(self, epoch: Epoch, ring: Sequence[PeerId], conns: Sequence[Conn]) -> None:
        self._epoch = epoch
        self._ring = list(ring)
        self._ranks = {peer: rank for rank, peer in enumerate(ring)}
        self._conns = tuple(conns)
        self._open: dict[tuple[int, int], _Open] = {}
        self._finished: dict[int, int] = {}

    def add(self, peer: PeerId, done: Done) -> SendEvidence | None:
        """Take one Done of this epoch; the evidence, if it was the last that was missing.

        Raises RemoteProtocolError if the peer lies, and Mismatch if two members disagree about what the op is.
        """
        tag, sequence, rank = done.tag, done.sequence, done.rank
        if self._ranks[peer] != rank:
            raise RemoteProtocolError(f"Done for rank {rank}, but its rank is {self._ranks[peer]}")
        key = (tag, sequence)
        op = self._open.get(key)
        if op is None:
            op = self._begin(key, done)
        if op.seen[rank]:
            raise RemoteProtocolError(f"Done twice for tag {tag} sequence {sequence}")
        if op.descriptor != done.descriptor:
            raise Mismatch(self._ring[op.first], op.descriptor)
        op.seen[rank], op.payloads[rank] = True, done.payload
        op.missing -= 1
        if done.registrations > op.registrations:
            op.registrations = done.registrations
        if op.missing:
            return None
        del self._open[key]
        self._finished[tag] = sequence
        crc = fingerprint(op.descriptor)
        return SendEvidence(self._conns, Evidence(self._epoch, tag, sequence, crc, op.registrations, op.payloads))

    def callers(self, tag: int, sequence: int) -> tuple[bytes, list[PeerId]]:
        """What the first Done of an open op said was called, and who has said the same."""
        op = self._open.get((tag, sequence))
        if op is None:
            return b"", []
        return op.descriptor, [peer for peer, seen in zip(self._ring, op.seen, strict=True) if seen]

    def _begin(self, key: tuple[int, int], done: Done) -> _Open:
        tag, sequence = key
        finished = self._finished.get(tag)
        if finished is not None and not is_before(finished, sequence):
            raise RemoteProtocolError(f"Done for tag {tag} sequence {sequence}, which is long finished")
        if len(self._open) >= MAX_OPEN_OPS or (len(self._finished) >= MAX_OPEN_OPS and tag not in self._finished):
            raise RemoteProtocolError(f"Done for more than {MAX_OPEN_OPS} ops at once")
        op = self._open[key] = _Open(done, len(self._ring))
        return op
