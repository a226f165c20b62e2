"""Which revisions are in the past of a lineage, and which it has abandoned. Pure.

The past of a lineage is its own revisions, and the revisions of each ancestor up to where the lineage branched off:

    lineage a:   0 ... 100 ... 140 ... 150        150 was saved, then all peers that had it were lost: the run went
                                                  back to 140
                                \\
    lineage b:                   140 ... 145      b has the ancestor (a, 140): (a, 150) is abandoned, (a, 100) is not

Ids are random, so that a lineage is also recognised as an ancestor of a later run: a run whose master kept no journal
continues from a checkpoint of the run before, which is then its ancestor.
"""

from collections.abc import Iterable

from ringfold.wire.messages import MAX_ANCESTORS, Branch, Lineage


def branch_of(lineage: Lineage, revision: int) -> Branch:
    """This revision of this lineage."""
    return Branch(lineage.id, revision)


def is_past(branch: Branch, present: Lineage, newest: int | None = None) -> bool:
    """Whether this revision belongs to the present lineage, or to an ancestor before the present one branched off.

    `newest` is the last revision of the present lineage that all members are known to have had; None: not known.
    """
    if branch.lineage == present.id:
        return newest is None or branch.revision <= newest
    return any(branch.lineage == old.lineage and branch.revision <= old.revision for old in present.ancestors)


def is_abandoned(branch: Branch, present: Lineage) -> bool:
    """Whether the present lineage branched off from that one at an earlier revision."""
    return any(branch.lineage == old.lineage and branch.revision > old.revision for old in present.ancestors)


def is_abandoned_by_any(branch: Branch, lineages: Iterable[Lineage]) -> bool:
    return any(is_abandoned(branch, lineage) for lineage in lineages)


def new_lineage(run: str, id: str, parent: Lineage | None, revision: int) -> Lineage:
    """A new lineage that branches from `revision` of `parent`; without one it has no past."""
    if parent is None:
        return Lineage(run, id)
    older = (Branch(old.lineage, min(old.revision, revision)) for old in parent.ancestors)
    return Lineage(run, id, [branch_of(parent, revision), *older][:MAX_ANCESTORS])
