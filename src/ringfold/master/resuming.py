"""A sync after all who had the state are gone: for whom it waits, and how long.

The first peers that come back may not have the newest checkpoint. So such a sync is decided when everybody who took
part in the last one, and keeps checkpoints, is there again, by name, or when `resume_wait_s` has passed since the first
offer. Where nobody kept any, there is nothing to wait for. A peer whose name was made of its host and process id comes
back with another one: those are counted by host.

Only step loops wait. A program that calls for its syncs itself says by `update_topology(min_world=...)` whom it wants
there. While a group waits, newcomers are let in without a vote: the members that would vote wait here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ringfold.master.events import Ns
from ringfold.master.liveness import MS
from ringfold.master.run import Group, Run
from ringfold.state.election import ElectedState, ElectionResult, FinishedSync, NoWinner
from ringfold.wire.messages import Member, Offer, PeerId, ResumeWaits
from ringfold.wire.notices import ResumeDelayed

TELL_NS = 5_000 * MS
"""How often those who wait are told for whom."""
NAMES_SHOWN = 8


@dataclass(slots=True)
class ResumeWait:
    """A group whose next sync waits for participants of the last one."""

    since: Ns
    ballots: dict[PeerId, int]
    """The calls that wait."""
    missing: list[str]
    told: Ns = -TELL_NS


def known_as(member: Member) -> str:
    """By what a peer is known again after a restart."""
    host, _, process = member.name.rpartition(":")
    return host if host == member.host and process.isdigit() else member.name


def missing_names(last: Iterable[str], here: Iterable[str]) -> list[str]:
    """Who took part in the last sync and is not here, each name as often as it is missing."""
    return sorted((Counter(last) - Counter(here)).elements())


def may_wait(decision: ElectionResult, offers: Mapping[PeerId, Offer], last: FinishedSync) -> bool:
    """Whether a decision is about a lost state, somebody else may have something newer, and these can wait for it."""
    if isinstance(decision, ElectedState):
        is_resume = decision.resumes
    else:
        # Nothing can be newer than the last revision itself.
        asked = {reason.checkpoint.revision for reason in decision.reasons.values() if reason.checkpoint is not None}
        is_resume = decision.is_lost and last.revision not in asked
    are_loops = all(offer.stepped for offer in offers.values())
    return is_resume and are_loops and not all(offer.rollback for offer in offers.values())


def asks_for_a_checkpoint(decision: ElectionResult) -> bool:
    """Whether a sync fails only for somebody to load the checkpoint that it needs."""
    return isinstance(decision, NoWinner) and any(reason.checkpoint is not None for reason in decision.reasons.values())


class Resuming:
    """The groups that wait."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def is_waiting(self, now: Ns, group: Group, ballots: Mapping[PeerId, int]) -> bool:
        """Whether these very calls wait already, and still have to. Nothing needs to be decided again then."""
        waiting = group.resume
        return waiting is not None and waiting.ballots == ballots and not self._is_over(now, waiting)

    def waits(
        self,
        now: Ns,
        group: Group,
        ballots: dict[PeerId, int],
        offers: Mapping[PeerId, Offer],
        decision: ElectionResult,
    ) -> bool:
        """Whether this decision is put off. Afterwards the group is one that waits, or one that does not."""
        last, since, group.resume = group.finished, group.resume_since, None
        if last is not None and may_wait(decision, offers, last):
            waiting = ResumeWait(now if since is None else since, ballots, self._missing(group, last))
            if not self._is_over(now, waiting):
                group.resume, group.resume_since = waiting, waiting.since
                self._tell(now, group, waiting, last)
                return True
        if isinstance(decision, ElectedState):
            group.resume_since = None
        return False

    def tick(self, now: Ns) -> None:
        """Tell those who wait for whom, now and then. A group that has died out waits no more."""
        for _, group in sorted(self._run.groups.items()):
            waiting, last = group.resume, group.finished
            if not group.ring or last is None:
                group.resume = group.resume_since = None
            elif waiting is not None and not self._is_called(waiting):
                group.resume = None  # all have given up
            elif waiting is not None and now - waiting.told >= TELL_NS and group.change is None:
                self._tell(now, group, waiting, last)

    def _is_called(self, waiting: ResumeWait) -> bool:
        here = (
            (self._run.peers[peer].ballot, number)
            for peer, number in waiting.ballots.items()
            if peer in self._run.peers
        )
        return any(ballot is not None and ballot.number == number for ballot, number in here)

    def _missing(self, group: Group, last: FinishedSync) -> list[str]:
        return missing_names(last.names, (known_as(peer.member) for peer in self._run.live(group)))

    def _is_over(self, now: Ns, waiting: ResumeWait) -> bool:
        return not waiting.missing or now - waiting.since >= self._run.settings.resume_wait_ms * MS

    def _tell(self, now: Ns, group: Group, waiting: ResumeWait, last: FinishedSync) -> None:
        waiting.told = now
        left_ms = left(self._run, now, waiting)
        shown = waiting.missing[:NAMES_SHOWN]
        for peer, ballot in sorted(waiting.ballots.items()):
            if peer in self._run.peers:
                self._run.send(self._run.peers[peer], ResumeWaits(ballot, last.revision, shown, left_ms))
        self._run.tell(ResumeDelayed(group.id, last.revision, shown, left_ms))


def left(run: Run, now: Ns, waiting: ResumeWait) -> int:
    """How many milliseconds a group still waits."""
    return max(0, run.settings.resume_wait_ms - (now - waiting.since) // MS)
