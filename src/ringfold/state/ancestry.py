"""Which revisions are in the past of a lineage, and which it has abandoned. Pure.

A lineage's past is its own revisions, and of each ancestor the revisions up to where it was left:

    lineage a:   0 ... 100 ... 140 ... 150        150 was saved, and lost with all who had it: the run went back to 140
                                \\
    lineage b:                   140 ... 145      b has the ancestor (a, 140): (a, 150) is abandoned, (a, 100) is not

Ids are random, so that a lineage is found again in the ancestry of a later run, too: a run whose master kept no journal
goes on from a checkpoint of the run before, and that one is its ancestor.
"""

from collections.abc import Iterable

from ringfold.wire.lineage import MAX_ANCESTORS, Branch, Lineage


def branch_of(lineage: Lineage, revision: int) -> Branch:
    return Branch(lineage.id, revision)


def is_past(branch: Branch, present: Lineage, newest: int | None = None) -> bool:
    """Whether this revision is part of the present lineage or of what it was made from.

    `newest` is the last revision of the present lineage that is known to be everybody's; None if that is not known.
    """
    if branch.lineage == present.id:
        return newest is None or branch.revision <= newest
    return any(branch.lineage == old.lineage and branch.revision <= old.revision for old in present.ancestors)


def is_abandoned(branch: Branch, present: Lineage) -> bool:
    """Whether the present lineage has left that one at an earlier revision."""
    return any(branch.lineage == old.lineage and branch.revision > old.revision for old in present.ancestors)


def is_abandoned_by_any(branch: Branch, lineages: Iterable[Lineage]) -> bool:
    return any(is_abandoned(branch, lineage) for lineage in lineages)


def begin(run: str, id: str, parent: Lineage | None, revision: int) -> Lineage:
    """A new lineage that branches from `revision` of `parent`; without one it has no past."""
    if parent is None:
        return Lineage(run, id)
    older = (Branch(old.lineage, min(old.revision, revision)) for old in parent.ancestors)
    return Lineage(run, id, [branch_of(parent, revision), *older][:MAX_ANCESTORS])
