"""The record that all ranks agree on, how it changes, and the decision when it may advance. Pure.

Terms. A *registration* is a rank's entry in the record: the incarnation that acts for the rank, and the fence that this
incarnation got when it registered. The *roster* is all registrations, of every rank that ever registered. The *members*
are the ranks that take part in the present iteration; the others in the roster are newcomers, or were left behind, and
become members with the next one.

The record changes by compare-and-set only, in four ways, and in each its version grows by one:

    create    there is no record yet: iteration -1 (`NONE_YET`), no members
    register  an incarnation registers, and gets the next fence. It replaces an older one of its rank; where the rank is
              a member, the newcomer is, too, and has to do the present iteration (again)
    leave     an incarnation leaves. Its registration stays, marked as gone
    advance   iteration n becomes n + 1. Its members are all ranks that have arrived and are not known to be dead

Invariants: the version and the fence only grow; the iteration grows by single steps; a member's incarnation is the one
of its registration. So "which incarnation acts for rank r" and "which ranks are waited for in iteration n" have one
answer at any time. An incarnation that finds another one with a higher fence in its place is superseded for good.

A reader compares a record with the last one that it knew: it must be a successor of that. So a store that was restored
to an earlier state, and has been written to since, is detected, even if its versions have overtaken what the reader
knew: the nonces of the last records are in the record.

The rules (`world`, `min_ranks`, `quorum`) are in the record, too: ranks that were started with different ones would
each be right by its own.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ringfold.errors import StoreError, UsageError
from ringfold.wire.decoding import decode as decode_bytes

NONE_YET = -1
"""The iteration of a record before the first agreement."""
FORMAT = 1
TRAIL = 16
"""How many nonces of earlier records a record carries."""

Quorum = Literal["majority"]


class Keys:
    """The keys of one global iteration in the store."""

    def __init__(self, name: str) -> None:
        self.record = f"{name}/record"
        self.ranks = f"{name}/ranks/"
        self._arrivals = f"{name}/arrivals/"

    def arrivals(self, iteration: int) -> str:
        """The counter of the arrivals at an iteration, where the store has counters."""
        return f"{self._arrivals}{iteration}"

    def arrived(self, rank: int, incarnation: str) -> str:
        return f"{self.ranks}{rank}/{incarnation}/arrived"

    def alive(self, rank: int, incarnation: str) -> str:
        return f"{self.ranks}{rank}/{incarnation}/alive"

    def incarnation(self, key: str) -> str:
        """The incarnation that a key below `ranks` belongs to; empty for a foreign key."""
        parts = key.removeprefix(self.ranks).split("/")
        return parts[1] if len(parts) == 3 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """The rank that a machine acts for, and what the store can do. Each process has its own incarnation."""

    rank: int
    incarnation: str
    can_list: bool = True
    has_leases: bool = False
    counts_writes: bool = False
    """Whether a key's version counts all writes to the store: see `Store.counts_writes`."""
    has_counters: bool = False
    name: str = "iteration"
    """The prefix of the keys: several global iterations may share a store."""
    store: str = "the store"


class Rules(Struct, frozen=True, forbid_unknown_fields=True):
    """What an agreement needs. Ranks with different rules cannot register."""

    world: int
    min_ranks: int = 1
    quorum: Quorum | None = None

    def __post_init__(self) -> None:
        if self.world < 1:
            raise UsageError(f"world is the number of ranks, at least 1, not {self.world}")
        if not 1 <= self.min_ranks <= self.world:
            raise UsageError(f"min_ranks is between 1 and world ({self.world}), not {self.min_ranks}")
        if self.quorum not in (None, "majority"):
            raise UsageError(f"quorum is None or 'majority', not {self.quorum!r}")


class Registration(Struct, frozen=True, forbid_unknown_fields=True):
    """The incarnation that acts for a rank, its fence, and the last iteration in which the rank was a member."""

    incarnation: str
    fence: int
    last: int = NONE_YET
    gone: bool = False


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """What is agreed. `winner` is the rank that wrote this iteration, `nonce` identifies this write, and `trail` has
    the nonces of the writes before it."""

    rules: Rules
    iteration: int = NONE_YET
    version: int = 0
    fence: int = 0
    members: dict[int, str] = {}
    roster: dict[int, Registration] = {}
    winner: int | None = None
    nonce: str = ""
    trail: list[str] = []
    format: int = FORMAT

    def follows(self, known: "Record") -> bool:
        """Whether this is `known`, or may be a successor of it. It is certain where the trail reaches back so far."""
        distance = self.version - known.version
        if distance < 0 or self.iteration < known.iteration:
            return False
        if distance == 0:
            return self.nonce == known.nonce
        return distance > len(self.trail) or self.trail[-distance] == known.nonce

    def with_registration(self, rank: int, incarnation: str, nonce: str) -> "Record":
        """The record after this incarnation has registered for the rank."""
        before = self.roster.get(rank)
        seat = Registration(incarnation, self.fence + 1, NONE_YET if before is None else before.last)
        members = {**self.members, rank: incarnation} if rank in self.members else self.members
        roster = dict(sorted({**self.roster, rank: seat}.items()))
        return self._next(nonce, fence=seat.fence, members=members, roster=roster)

    def with_departure(self, rank: int, nonce: str) -> "Record":
        """The record after this rank has left: it is not waited for any more."""
        seat = replace(self.roster[rank], gone=True)
        return self._next(nonce, roster={**self.roster, rank: seat})

    def with_next_iteration(self, ranks: Collection[int], winner: int, nonce: str) -> "Record":
        """The record of the next iteration, with these ranks as its members."""
        iteration = self.iteration + 1
        members = {rank: self.roster[rank].incarnation for rank in sorted(ranks)}
        roster = {
            rank: replace(seat, last=iteration) if rank in members else seat for rank, seat in self.roster.items()
        }
        return self._next(nonce, iteration=iteration, members=members, roster=roster, winner=winner)

    def _next(
        self,
        nonce: str,
        *,
        roster: dict[int, Registration],
        members: dict[int, str] | None = None,
        fence: int | None = None,
        iteration: int | None = None,
        winner: int | None = None,
    ) -> "Record":
        return replace(
            self,
            version=self.version + 1,
            nonce=nonce,
            trail=[*self.trail, self.nonce][-TRAIL:] if self.version else [],
            roster=roster,
            members=self.members if members is None else members,
            fence=self.fence if fence is None else fence,
            iteration=self.iteration if iteration is None else iteration,
            winner=self.winner if winner is None else winner,
        )

    @property
    def present(self) -> list[int]:
        """The members that have not left."""
        return [rank for rank in self.members if not self.roster[rank].gone]


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


_decoder = msgspec.json.Decoder(Record)


def decode(store: str, value: bytes) -> Record:
    """Decode a record that was read from the store with this address. Raises StoreError if it is not one."""
    what = "the key does not contain a record of a global iteration: "
    record = decode_bytes(_decoder.decode, value, partial(StoreError, store), what)
    if record.format != FORMAT:
        raise StoreError(store, f"the record has format {record.format}, and this version of Ringfold reads {FORMAT}")
    if any(rank not in record.roster or record.roster[rank].incarnation != one for rank, one in record.members.items()):
        raise StoreError(store, "the record has a member that is not registered")
    return record


@dataclass(frozen=True, slots=True)
class Advance:
    """The iteration may advance, with these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """The iteration may not advance yet: which ranks it waits for, and why."""

    missing: tuple[int, ...]
    reason: str


def decide(record: Record, arrived: Collection[int], dead: Collection[int]) -> Advance | Hold:
    """Whether iteration n may become n + 1, given the ranks that have arrived at n and those that are known to be dead.

    Every member that is not dead is waited for. Then at least `min_ranks` must continue, and with `quorum` more than
    half of the members of iteration n (ranks are counted, whichever incarnation acts for them). Ranks that left do not
    count. Before the first agreement, it is more than half of the world.
    """
    missing = tuple(rank for rank in record.present if rank not in arrived and rank not in dead)
    if missing:
        return Hold(missing, f"{_ranks(missing)} of {len(record.present)} members have not arrived")
    ranks = tuple(
        rank for rank, seat in record.roster.items() if rank in arrived and rank not in dead and not seat.gone
    )
    rules = record.rules
    absent = tuple(rank for rank in range(rules.world) if rank not in ranks)
    if len(ranks) < rules.min_ranks:
        return Hold(absent, f"{len(ranks)} of at least {rules.min_ranks} ranks are there")
    if rules.quorum == "majority":
        voters = record.present or list(range(rules.world))
        there = [rank for rank in voters if rank in ranks]
        if 2 * len(there) <= len(voters):
            lost = tuple(rank for rank in voters if rank not in ranks)
            return Hold(lost, f"{len(there)} of {len(voters)} agreed members are there, and that is no majority")
    return Advance(ranks)


def _ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
