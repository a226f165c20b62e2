"""Which history a state belongs to: the run, the lineage, and the lineages that it branched from.

A *lineage* is a sequence of revisions in which each one was made from the one before. A rollback ends it and begins
another one, which branches from a revision of the old one: what comes after that revision in the old lineage is
abandoned. What this means for checkpoints is decided in `state/ancestry.py`.
"""

from msgspec import Struct, field

MAX_ANCESTORS = 64
"""How many lineages back a history is known. What is older is not eligible for a resume."""
MAX_CHECKPOINTS = 64
"""How many checkpoints a peer lists in an offer, the newest ones."""


class Branch(Struct, frozen=True, array_like=True, order=True):
    """One revision of one lineage: where another lineage branches from it, or where a checkpoint belongs."""

    lineage: str
    revision: int


class Lineage(Struct, frozen=True):
    """The history of a state. `run` and `id` are random; `ancestors` are the lineages before it, newest first, each
    with the revision at which it was left."""

    run: str
    id: str
    ancestors: list[Branch] = field(default_factory=list)


class Rollback(Struct, frozen=True):
    """A run goes on from `revision`, which peer `source` had, because nobody has `lost` any more.

    `is_agreed`: all members had said that it may. Otherwise the revision is a checkpoint of the run's own history.
    """

    revision: int
    lost: int
    source: int
    is_agreed: bool = False
