"""How a run ends, and who may come after its end. Pure.

A run *lives* while any of its groups has members. When the last member is gone, it has ended in one of two ways:

* *finished*: the last member left of its own accord, with the program done and the state in its hands;
* *abandoned*: everybody was killed, evicted or stopped, or the state was lost before the last one left.

The run named `default` is for peers that name none. After its end the next peer begins a new *incarnation* of it:
at once if it is finished; if it is abandoned and had a state, at the first sync in which nobody brings anything but a
fresh one. The ids and epochs go on, so that nothing old is taken for something new.

A run with a name of its own ends once. Nobody joins it after it has finished, and one that was abandoned with its state
goes on from that state only. `ringfold runs forget NAME` makes the name free again.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, structs

from ringfold.config import DEFAULT_RUN
from ringfold.wire.messages import Offer, PeerId, Reason
from ringfold.wire.notices import RunBegun, RunEnded

if TYPE_CHECKING:
    from ringfold.master.run import Group, Run


class Life(Struct, frozen=True):
    """Where a run stands. `since_s` is the wall clock at the last change, for people; it decides nothing."""

    end: Literal["", "finished", "abandoned"] = ""
    """How its last members went; empty while it has some, or never had any."""
    incarnation: int = 1
    revision: int = 0
    """Of the last sync before the end."""
    since_s: int = 0


def finished_text(name: str, life: Life) -> str:
    """What a newcomer hears of a run that is finished."""
    when = f" ({datetime.fromtimestamp(life.since_s, UTC):%Y-%m-%d %H:%M} UTC)" if life.since_s else ""
    what = f"run {name} finished at revision {life.revision}{when}"
    return f"{what}: choose another name, or free this one with `ringfold runs forget {name}`"


def refusal(run: "Run") -> str:
    """Why nobody may join the run; empty if they may."""
    is_over = run.life.end == "finished" and run.name != DEFAULT_RUN
    return finished_text(run.name, run.life) if is_over else ""


def settle(run: "Run") -> None:
    """Notice that the run has ended, or that it begins again."""
    is_inhabited = any(group.ring for group in run.groups.values())
    known = [group.finished.revision for group in run.groups.values() if group.finished is not None]
    if known:
        run.revision = max(known)
    if run.is_inhabited and not is_inhabited:
        _end(run)
    elif run.life.end and run.peers and not _is_bound(run):
        _begin(run)
    elif run.life.end == "abandoned" and is_inhabited and not any(map(is_orphaned, run.groups.values())):
        # Somebody brought the state back, or all agreed to go on without it.
        run.life = structs.replace(run.life, end="", since_s=run.wall_s())
    run.is_inhabited = is_inhabited


def is_orphaned(group: "Group") -> bool:
    """Whether the group's state was lost with the last member of the run."""
    return group.finished is not None and group.orphaned_sync == group.finished_sync


def stopped(run: "Run") -> Life:
    """The life of a run that its master ends: it stays finished if it was, and its state binds nobody."""
    if run.life.end or not run.registrations:
        return run.life
    return structs.replace(run.life, end="abandoned", revision=run.revision, since_s=run.wall_s())


def restored(run: "Run") -> None:
    """A journal of the version before does not tell how the last members went: they are not here, and left a state."""
    lost = [group for group in run.groups.values() if group.finished is not None]
    if lost and not run.is_inhabited and not run.life.end:
        for group in lost:
            group.orphaned_sync = group.finished_sync
        run.life = structs.replace(run.life, end="abandoned", revision=run.revision)


def _end(run: "Run") -> None:
    lost = [group for group in run.groups.values() if group.finished is not None]
    for group in lost:
        group.orphaned_sync = group.finished_sync
    how: Literal["finished", "abandoned"] = "abandoned" if lost or not run.left_last else "finished"
    run.life = structs.replace(run.life, end=how, revision=run.revision, since_s=run.wall_s())
    run.tell(RunEnded(run.name, how, run.revision))


def _is_bound(run: "Run") -> bool:
    """Whether the past binds newcomers: a finished run with a name of its own, or a state that was lost."""
    return bool(refusal(run)) or any(group.finished is not None for group in run.groups.values())


def _begin(run: "Run") -> None:
    """The peers that are here begin again, and nothing of the past binds them."""
    incarnation = run.life.incarnation + 1
    run.revision = 0
    run.life = Life(incarnation=incarnation, since_s=run.wall_s())
    run.tell(RunBegun(run.name, incarnation))


def begins_again(run: "Run", group: "Group", offers: Mapping[PeerId, Offer]) -> bool:
    """Whether a sync that found the group's state lost begins a new incarnation instead: only in the default run, after
    everybody who had the state was gone at once, and if everything that is offered is fresh."""
    is_fresh = all(offer.revision == 0 for offer in offers.values())
    return run.name == DEFAULT_RUN and is_orphaned(group) and is_fresh


def begin_again(run: "Run", group: "Group") -> None:
    """The group's last state binds nobody any more."""
    assert group.finished is not None
    lost, group.finished = group.finished.revision, None
    if run.life.end:
        run.life = Life(incarnation=run.life.incarnation + 1, since_s=run.wall_s())
    run.tell(RunBegun(run.name, run.life.incarnation, lost))


def with_advice(run: "Run", reasons: Mapping[PeerId, Reason]) -> dict[PeerId, Reason]:
    """Why a sync failed, and for a lost state of a named run how to begin it again."""
    if run.name == DEFAULT_RUN:
        return dict(reasons)
    more = f"; to begin run {run.name} again: `ringfold runs forget {run.name}`"
    return {
        peer: structs.replace(reason, text=reason.text + more) if reason.kind == "state_lost" else reason
        for peer, reason in reasons.items()
    }
