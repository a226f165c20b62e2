"""How a run ends, and which peers may join after its end. Pure. `states.py` has the diagram and the transitions.

A run has ended when the last member of all its groups is gone:

* *finished*: the last member left by itself, with its program done and the state in its memory;
* *abandoned*: all members were killed, evicted or stopped, or the state was lost before the last one left.

The run named `default` is for peers that give no name. After its end the next peer starts a new *incarnation* of it: at
once if it is finished; if it is abandoned and had a state, at the first sync in which all offers are fresh. Ids and
epochs continue, so that nothing old is taken for something new.

A named run ends once. No peer joins it after it has finished, and a run that was abandoned with its state continues
from that state only. `ringfold runs forget NAME` frees the name.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

from ringfold.config import DEFAULT_RUN
from ringfold.master.states import RunPhase
from ringfold.wire.messages import Offer, PeerId, Reason
from ringfold.wire.notices import RunBegun, RunEnded

if TYPE_CHECKING:
    from ringfold.master.run import Group, Run

_WITH_MEMBERS = (RunPhase.RUNNING, RunPhase.RESUMING)


class Life(Struct, frozen=True):
    """What the journal keeps of a run's life. `since_s` is the wall clock at the last change; it is only shown."""

    end: Literal["", "finished", "abandoned"] = ""
    """How it ended; empty while it has members, or never had any."""
    incarnation: int = 1
    revision: int = 0
    """The revision of the last sync before the end."""
    since_s: int = 0


def finished_text(name: str, life: Life) -> str:
    """The refusal of a peer that wants to join a finished run."""
    when = f" ({datetime.fromtimestamp(life.since_s, UTC):%Y-%m-%d %H:%M} UTC)" if life.since_s else ""
    what = f"run {name} finished at revision {life.revision}{when}"
    return f"{what}: choose another name, or free this one with `ringfold runs forget {name}`"


def refusal(run: "Run") -> str:
    """Why no peer may join the run; empty if peers may."""
    is_over = run.life.end == "finished" and run.name != DEFAULT_RUN
    return finished_text(run.name, run.life) if is_over else ""


def settle(run: "Run") -> None:
    """Detect that the run has ended, or starts again."""
    has_members = _has_members(run)
    known = [group.finished.revision for group in run.groups.values() if group.finished is not None]
    if known:
        run.revision = max(known)
    if run.phase in _WITH_MEMBERS and not has_members:
        _end(run)
        return
    if run.life.end and run.peers and not _is_bound(run):
        _begin(run)
    if has_members and run.phase not in _WITH_MEMBERS:
        run.enter(RunPhase.RESUMING if run.phase is RunPhase.ABANDONED else RunPhase.RUNNING)
    if run.phase is RunPhase.RESUMING and not any(map(is_orphaned, run.groups.values())):
        # A member brought the state back, or all agreed to continue without it.
        run.life = structs.replace(run.life, end="", since_s=run.wall_s())
        run.enter(RunPhase.RUNNING)


def _has_members(run: "Run") -> bool:
    return any(group.ring for group in run.groups.values())


def is_orphaned(group: "Group") -> bool:
    """Whether the group's state was lost with the last member of the run."""
    return group.finished is not None and group.orphaned_sync == group.finished_sync


def stopped(run: "Run") -> Life:
    """The life of a run that its master ends: it stays finished if it was, and its state is given up."""
    if run.life.end or not run.registrations:
        return run.life
    return structs.replace(run.life, end="abandoned", revision=run.revision, since_s=run.wall_s())


def restored(run: "Run") -> None:
    """A run continues from its journal. One of the version before does not say how the run ended: if it has a state
    and no members, it was abandoned."""
    lost = [group for group in run.groups.values() if group.finished is not None]
    if lost and not _has_members(run) and not run.life.end:
        for group in lost:
            group.orphaned_sync = group.finished_sync
        run.life = structs.replace(run.life, end="abandoned", revision=run.revision)
    run.phase = phase_of(run.life, _has_members(run))


def phase_of(life: Life, has_members: bool = False) -> RunPhase:
    """The phase that a run continues in, under another master."""
    if has_members:
        return RunPhase.RESUMING if life.end else RunPhase.RUNNING
    return RunPhase(life.end) if life.end else RunPhase.NEW


def _end(run: "Run") -> None:
    lost = [group for group in run.groups.values() if group.finished is not None]
    for group in lost:
        group.orphaned_sync = group.finished_sync
    how: Literal["finished", "abandoned"] = "abandoned" if lost or not run.left_last else "finished"
    run.life = structs.replace(run.life, end=how, revision=run.revision, since_s=run.wall_s())
    run.enter(RunPhase(how))
    run.notify(RunEnded(run.name, how, run.revision))


def _is_bound(run: "Run") -> bool:
    """Whether newcomers cannot start fresh: the run is named and finished, or its state was lost."""
    return bool(refusal(run)) or any(group.finished is not None for group in run.groups.values())


def _begin(run: "Run") -> None:
    """The peers that are here start a new incarnation."""
    incarnation = run.life.incarnation + 1
    run.revision = 0
    run.life = Life(incarnation=incarnation, since_s=run.wall_s())
    run.enter(RunPhase.RUNNING if run.phase is RunPhase.RESUMING else RunPhase.NEW)
    run.notify(RunBegun(run.name, incarnation))


def may_start_again(run: "Run", group: "Group", offers: Mapping[PeerId, Offer]) -> bool:
    """Whether a sync that found the group's state lost starts a new incarnation instead: only in the default run, if
    all members that had the state were gone at once, and if all offers are fresh."""
    is_fresh = all(offer.revision == 0 for offer in offers.values())
    return run.name == DEFAULT_RUN and is_orphaned(group) and is_fresh


def start_again(run: "Run", group: "Group") -> None:
    """The group's last state is given up."""
    assert group.finished is not None
    lost, group.finished = group.finished.revision, None
    if run.life.end:
        run.life = Life(incarnation=run.life.incarnation + 1, since_s=run.wall_s())
        run.enter(RunPhase.RUNNING)
    run.notify(RunBegun(run.name, run.life.incarnation, lost))


def with_advice(run: "Run", reasons: Mapping[PeerId, Reason]) -> dict[PeerId, Reason]:
    """Why a sync failed; for a lost state of a named run, also how to start it again."""
    if run.name == DEFAULT_RUN:
        return dict(reasons)
    more = f"; to start run {run.name} again: `ringfold runs forget {run.name}`"
    return {
        peer: structs.replace(reason, text=reason.text + more) if reason.kind == "state_lost" else reason
        for peer, reason in reasons.items()
    }
