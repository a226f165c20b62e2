"""Syncs: from the offers of a group's members to the same state on all of them.

    every member waits in sync_shared_state --elect--> SyncPlan to each --all receivers complete--> SyncDone to each
                                                           |
                                                           +-- a peer is stuck, or at fault --> CallFailed to that peer

The election (`state/election.py`) decides at one instant, from the offers and from the last sync that finished. From
then on the sync is independent: epochs may change, a peer that dies is out of it, and receivers work around a holder
that is gone: each finds out by itself when no peer is left to fetch the rest from. A receiver that is complete counts
as a holder.

The sync ends when no peer is unfinished. A peer that is at fault (its revision jumped, its keys differ, its own state
changed while it was sent), or stuck, fails alone, and the others continue: it did not take part, so at the next sync it
has no vote and receives. If all fail because the state is lost, the next sync fails with that reason, too.

A sync that finishes sends the lineage of the state (`state/ancestry.py`). It is that of the sync before, unless the run
rolled back, or starts: then a new lineage branches off from what the winner offered.

*Waiting for checkpoints.* Before a run rolls back by itself, it waits for peers that may have a newer checkpoint: the
first peers that return may not have the newest one. Such a sync is decided when all participants of the last sync that
write checkpoints are here again, by name, or when `resume_wait_s` has passed since the first offer. If no participant
wrote checkpoints, there is nothing to wait for. A peer whose name is made of its host and process id returns with
another name: those are counted by host. Only step loops wait: a program that calls its syncs itself chooses by
`update_topology(min_world=...)` which peers it needs. While a group waits, newcomers are admitted without a vote,
because the members that would vote wait here. A run of several groups does not wait.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ringfold.errors import RemoteProtocolError
from ringfold.limits import MAX_KEYS
from ringfold.master import lifecycle
from ringfold.master.events import Ns
from ringfold.master.run import Group, Peer, Run, RunningSync
from ringfold.state.ancestry import new_lineage
from ringfold.state.blocks import digest_bytes
from ringfold.state.election import ElectedState, ElectionResult, FinishedSync, NoWinner, diverged, elect
from ringfold.units import MS
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.messages import (
    MAX_ANCESTORS,
    MAX_CHECKPOINTS,
    Divergence,
    Lineage,
    Member,
    Offer,
    PeerId,
    Reason,
    ResumeWaits,
    Rollback,
    SyncDone,
    SyncExtended,
    SyncPlan,
    SyncReport,
    SyncVoters,
)
from ringfold.wire.notices import CallRefused, PeerDiverged, ResumeDelayed, StateRolledBack, SyncBegun, SyncEnded
from ringfold.wire.proof import derive

EXTEND_INTERVAL_NS = 2_000_000_000
MAX_KEYS_SHOWN = 8
"""Of the keys in which a peer has diverged."""
MAX_DIVERGENCES_SHOWN = 8
"""Of a group, in its status."""
ID_DIGITS = 16
MAX_ID_CHARS = 64
"""Of the id of a run or a lineage."""
_U63 = 1 << 63


RESUME_INTERVAL_NS = 5_000 * MS
"""How often waiting peers are sent the names that they wait for."""
MAX_NAMES_SHOWN = 8


@dataclass(slots=True)
class CheckpointWait:
    """A group whose next sync waits for participants of the last one."""

    since_ns: Ns
    ballots: dict[PeerId, int]
    """The ballots of the calls that wait."""
    missing: list[str]
    last_told_ns: Ns = -RESUME_INTERVAL_NS


def lasting_name(member: Member) -> str:
    """The name by which a peer is recognised after a restart."""
    host, _, process = member.name.rpartition(":")
    return host if host == member.host and process.isdigit() else member.name


def missing_names(last: Iterable[str], here: Iterable[str]) -> list[str]:
    """The participants of the last sync that are not here, each name as often as it is missing."""
    return sorted((Counter(last) - Counter(here)).elements())


def may_wait(decision: ElectionResult, offers: Mapping[PeerId, Offer], last: FinishedSync) -> bool:
    """Whether a decision is about a lost state, another peer may have a newer checkpoint, and these peers can wait."""
    if isinstance(decision, ElectedState):
        is_resume = decision.resumes
    else:
        # Nothing can be newer than the last revision itself.
        requested = {
            reason.checkpoint.revision for reason in decision.reasons.values() if reason.checkpoint is not None
        }
        is_resume = decision.is_lost and last.revision not in requested
    are_loops = all(offer.stepped for offer in offers.values())
    return is_resume and are_loops and not all(offer.rollback for offer in offers.values())


def needs_a_checkpoint(decision: ElectionResult) -> bool:
    """Whether a sync fails only so that a peer loads the checkpoint that it needs."""
    return isinstance(decision, NoWinner) and any(reason.checkpoint is not None for reason in decision.reasons.values())


class CheckpointWaits:
    """The groups that wait for checkpoints."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def is_waiting(self, now: Ns, group: Group, ballots: Mapping[PeerId, int]) -> bool:
        """Whether exactly these calls wait already, and still have to. Then nothing is decided again."""
        waiting = group.resume
        return waiting is not None and waiting.ballots == ballots and not self._is_over(now, waiting)

    def postpones(
        self,
        now: Ns,
        group: Group,
        ballots: dict[PeerId, int],
        offers: Mapping[PeerId, Offer],
        decision: ElectionResult,
    ) -> bool:
        """Whether this decision is postponed. Afterwards `group.resume` is set if, and only if, the group waits."""
        last, since, group.resume = group.finished, group.resume_since_ns, None
        if last is not None and may_wait(decision, offers, last):
            waiting = CheckpointWait(now if since is None else since, ballots, self._missing(group, last))
            if not self._is_over(now, waiting):
                group.resume, group.resume_since_ns = waiting, waiting.since_ns
                self._send_waits(now, group, waiting, last)
                return True
        if isinstance(decision, ElectedState):
            group.resume_since_ns = None
        return False

    def tick(self, now: Ns) -> None:
        """Send waiting peers the names that they wait for, now and then. An empty group does not wait."""
        for _, group in sorted(self._run.groups.items()):
            waiting, last = group.resume, group.finished
            if not group.ring or last is None:
                group.resume = group.resume_since_ns = None
            elif waiting is not None and not self._is_called(waiting):
                group.resume = None  # all calls have timed out
            elif waiting is not None and now - waiting.last_told_ns >= RESUME_INTERVAL_NS and group.change is None:
                self._send_waits(now, group, waiting, last)

    def _is_called(self, waiting: CheckpointWait) -> bool:
        here = (
            (self._run.peers[peer].ballot, number)
            for peer, number in waiting.ballots.items()
            if peer in self._run.peers
        )
        return any(ballot is not None and ballot.number == number for ballot, number in here)

    def _missing(self, group: Group, last: FinishedSync) -> list[str]:
        return missing_names(last.names, (lasting_name(peer.member) for peer in self._run.live(group)))

    def _is_over(self, now: Ns, waiting: CheckpointWait) -> bool:
        return not waiting.missing or now - waiting.since_ns >= self._run.settings.resume_wait_ms * MS

    def _send_waits(self, now: Ns, group: Group, waiting: CheckpointWait, last: FinishedSync) -> None:
        waiting.last_told_ns = now
        left = left_ms(self._run, now, waiting)
        shown = waiting.missing[:MAX_NAMES_SHOWN]
        for peer, ballot in sorted(waiting.ballots.items()):
            if peer in self._run.peers:
                self._run.send(self._run.peers[peer], ResumeWaits(ballot, last.revision, shown, left))
        self._run.notify(ResumeDelayed(group.id, last.revision, shown, left))


def left_ms(run: Run, now: Ns, waiting: CheckpointWait) -> int:
    """For how many milliseconds a group still waits."""
    return max(0, run.settings.resume_wait_ms - (now - waiting.since_ns) // MS)


class Syncs:
    """The syncs of all groups."""

    def __init__(self, run: Run, run_secret: bytes) -> None:
        self._run = run
        self._secret = run_secret
        self._waits = CheckpointWaits(run)

    def begin(self, now: Ns, group: Group) -> bool:
        """Every member of the group has made its offer: decide. False if the decision is postponed."""
        run = self._run
        members = [peer for peer in run.live(group) if not run.is_excluded(peer)]
        ballots = {peer.id: peer.ballot for peer in members if peer.ballot is not None}
        numbers = {peer: ballot.number for peer, ballot in ballots.items()}
        if self._waits.is_waiting(now, group, numbers):
            return False
        offers = {peer: ballot.offer for peer, ballot in ballots.items() if ballot.offer is not None}
        present = None if self._must_agree(group) else group.lineage
        decision = self._elect(offers, group.finished, present)
        if self._waits.postpones(now, group, numbers, offers, decision):
            return False
        group.retrying.clear()
        if isinstance(decision, NoWinner) and not needs_a_checkpoint(decision):
            decision = self._elect_new_start(group, offers) or decision
        if isinstance(decision, NoWinner):
            if decision.is_lost and self._must_agree(group):
                decision = NoWinner({peer: _of_several_groups(reason) for peer, reason in decision.reasons.items()})
            reasons = lifecycle.with_advice(run, decision.reasons)
            self._run.fail_calls(reasons, numbers)
            if not needs_a_checkpoint(decision):
                self._notify_once(list(reasons.values()))
            return True
        run.syncs += 1
        voters = SyncVoters(run.syncs, numbers)
        failures = {
            peer_id: self._run.fail_call(run.peers[peer_id], ballots[peer_id].number, reason, of_sync=voters)
            for peer_id, reason in sorted(decision.rejected.items())
        }
        self._notify_once(list(decision.rejected.values()))
        taking_part = {peer: ballot.number for peer, ballot in ballots.items() if peer not in decision.rejected}
        fetching = {peer for peer, keys in decision.fetch.items() if keys}
        sync = RunningSync(run.syncs, now, decision, taking_part, set(decision.holders), fetching, voters)
        sync.failures, sync.diverged = failures, self._diverged(offers, decision, group.finished)
        sync.savers = {peer for peer, offer in offers.items() if offer.is_saved}
        sync.lineage = self._lineage(group, sync, offers[decision.winner].lineage)
        if decision.rollback and group.finished is not None:
            lost, is_agreed = group.finished.revision, not decision.resumes
            sync.rollback = Rollback(decision.revision, lost, decision.winner, is_agreed)
            run.notify(StateRolledBack(group.id, sync.rollback))
        for peer_id, ballot in taking_part.items():
            run.peers[peer_id].mark_answered(ballot)
        group.sync = sync
        self._send_plans(group, sync)
        run.notify(SyncBegun(group.id, sync.number, decision.revision, sorted(sync.holders), sorted(fetching)))
        return True

    def _elect_new_start(self, group: Group, offers: Mapping[PeerId, Offer]) -> ElectedState | None:
        """The plan if the state was lost with the run's last member, and the run starts again; None if it does not."""
        if not lifecycle.may_start_again(self._run, group, offers):
            return None
        decision = self._elect(offers, None, None)
        if isinstance(decision, NoWinner):
            return None
        lifecycle.start_again(self._run, group)
        return decision

    def _must_agree(self, group: Group) -> bool:
        """Whether a lost state concerns other groups, too: shards must continue from the same revision, so one of them
        does not roll back by itself."""
        others = (each for each in self._run.groups.values() if each is not group)
        return group.finished is not None and any(each.finished is not None for each in others)

    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        return elect(offers, last, present)

    def _lineage(self, group: Group, sync: RunningSync, brought: Lineage | None) -> Lineage:
        """The lineage that continues, or a new one. Sync numbers are never used twice, so neither are ids.

        If the last revision comes from a disk, what peers have saved after it counts as abandoned.
        """
        last = group.finished
        if group.lineage is not None and last is not None and not sync.plan.rollback:
            if sync.plan.winner in last.participants:
                return group.lineage
            brought = group.lineage
        run = derive(self._secret, "run").hex()[:ID_DIGITS]
        id = derive(self._secret, "lineage", sync.number).hex()[:ID_DIGITS]
        return new_lineage(run, id, brought, sync.plan.revision)

    def tick(self, now: Ns) -> None:
        """Send waiting peers the names that they wait for."""
        self._waits.tick(now)

    def _diverged(
        self, offers: Mapping[PeerId, Offer], plan: ElectedState, last: FinishedSync | None
    ) -> dict[PeerId, Divergence]:
        return {
            found.peer: Divergence(
                found.peer,
                self._run.peers[found.peer].member.name,
                plan.revision,
                found.since,
                found.keys[:MAX_KEYS_SHOWN],
                len(found.keys),
            )
            for found in diverged(offers, plan, last)
        }

    def _send_plans(self, group: Group, sync: RunningSync) -> None:
        run, plan = self._run, sync.plan
        secret = derive(self._secret, "sync", sync.number)
        holders = [run.peers[peer].member for peer in sorted(sync.holders)]
        receivers = [run.peers[peer].member for peer in sorted(sync.unfinished)]
        found = list(sync.diverged.values())
        for peer_id, ballot in sorted(sync.ballots.items()):
            fetch = plan.fetch.get(peer_id, [])
            what = list(fetch), sync.voters.ballots, found
            run.send(
                run.peers[peer_id], SyncPlan(ballot, sync.number, plan.revision, secret, holders, receivers, *what)
            )

    def report(self, now: Ns, peer: Peer, report: SyncReport) -> None:
        """A peer reports the state of its sync. A report that was in flight when the sync ended is void."""
        group = self._run.groups[peer.group]
        sync = group.sync
        if sync is None or sync.number != report.sync or peer.id not in sync.ballots:
            return
        known = sorted({*report.blame} & {*group.ring})
        sync.last_progress_ns = now
        match report.outcome:
            case "progress":
                self._extend(now, sync)
            case "complete":
                sync.unfinished.discard(peer.id)
                sync.holders.add(peer.id)
                if peer.id in sync.diverged:
                    received = max(0, report.received_bytes)
                    sync.diverged[peer.id] = replace(sync.diverged[peer.id], received_bytes=received)
            case "changed":
                text = f"the shared state of peer {peer.id} changed during the sync: {report.text}"
                self._exclude(group, sync, peer, Reason("hash", text))
            case "stuck":
                self._exclude(group, sync, peer, self._stuck(sync, peer, known, report.text))
            case "corrupt":
                sync.corrupt.update(known)
                text = f"peer {peer.id} got a wrong block from {list_peers(known)}: {report.text}"
                self._run.notify(CallRefused(known, text))

    def _extend(self, now: Ns, sync: RunningSync) -> None:
        """A large state takes long: while there is progress, the timeouts of all participants start again."""
        if now - sync.last_told_ns < EXTEND_INTERVAL_NS:
            return
        sync.last_told_ns = now
        for peer, ballot in sorted(sync.ballots.items()):
            self._run.send(self._run.peers[peer], SyncExtended(ballot))

    def _stuck(self, sync: RunningSync, peer: Peer, blame: list[PeerId], why: str) -> Reason:
        """Why a peer did not get the state: it is lost to all, or its holders sent wrong blocks, or none.

        A holder that died may still count as one here: its receivers often notice before its control connection closes.
        """
        revision = sync.plan.revision
        there = [holder for holder in sync.plan.holders if holder in self._run.peers]
        if not sync.holders and not there:
            text = f"revision {revision} of the shared state is lost: all peers that had it are gone ({why})"
            return Reason("state_lost", text, blame, 0, [revision])
        if not sync.holders:
            text = f"peer {peer.id} could not get revision {revision}: {list_peers(there)} gave the sync up ({why})"
            return Reason("state", text, there)
        text = (
            f"peer {peer.id} could not get revision {revision} from {list_peers(blame or sorted(sync.holders))}: {why}"
        )
        return Reason("hash" if sync.corrupt & {*blame} else "state", text, blame)

    def _exclude(self, group: Group, sync: RunningSync, peer: Peer, reason: Reason) -> None:
        """A peer is out of the sync."""
        sent = self._run.fail_call(peer, sync.ballots.pop(peer.id), reason, of_sync=sync.voters)
        sync.failures[peer.id] = sent
        sync.unfinished.discard(peer.id)
        sync.holders.discard(peer.id)
        self._run.notify(CallRefused(reason.peers or [peer.id], reason.text))

    def withdraw(self, peer: Peer, ballot: int) -> tuple[list[PeerId], str] | None:
        """The peer's call timed out. Returns which peers it waited for, and for what; None if it is in no sync."""
        sync = self._run.groups[peer.group].sync
        if sync is None or sync.ballots.get(peer.id) != ballot:
            return None
        is_receiver = peer.id in sync.unfinished
        givers = sorted(sync.holders) or [holder for holder in sync.plan.holders if holder in self._run.peers]
        late = (givers, "give it") if is_receiver else (sorted(sync.unfinished), "get")
        del sync.ballots[peer.id]
        sync.unfinished.discard(peer.id)
        sync.holders.discard(peer.id)
        return late

    def settle(self, now: Ns) -> bool:
        """End the syncs in which no peer is unfinished. False if there is none."""
        ended = False
        for _, group in sorted(self._run.groups.items()):
            sync = group.sync
            if sync is None or sync.unfinished:
                continue
            group.sync = None
            ended = True
            if sync.ballots:
                self._finish(now, group, sync)
        return ended

    def _finish(self, now: Ns, group: Group, sync: RunningSync) -> None:
        run, plan = self._run, sync.plan
        names = (lasting_name(run.peers[peer].member) for peer in sync.ballots if peer in sync.savers)
        group.finished, group.finished_sync = plan.finished(sync.ballots, names), sync.number
        group.lineage, group.finished_rollback = sync.lineage, sync.rollback
        # It took part in two syncs in a row: it has trained with the others in between.
        group.incumbents |= group.finished_ballots.keys() & sync.ballots.keys()
        group.finished_ballots, group.finished_failures = dict(sync.ballots), sync.failures
        group.finished_diverged = list(sync.diverged.values())
        group.diverged = [*group.diverged, *group.finished_diverged][-MAX_DIVERGENCES_SHOWN:]
        group.divergences += len(sync.diverged)
        for peer, ballot in sorted(sync.ballots.items()):
            run.send(run.peers[peer], sync_done(group, ballot, plan.revision))
        for found in group.finished_diverged:
            run.notify(PeerDiverged(group.id, found))
        run.notify(SyncEnded(group.id, sync.number, plan.revision, (now - sync.since_ns) // 1_000_000))

    def _notify_once(self, reasons: list[Reason]) -> None:
        for text in dict.fromkeys(reason.text for reason in reasons):
            peers = sorted({peer for reason in reasons if reason.text == text for peer in reason.peers})
            self._run.notify(CallRefused(peers, text))


def _of_several_groups(reason: Reason) -> Reason:
    why = "The run has several groups, which must continue from the same revision"
    return replace(reason, text=f"{reason.text}. {why}: load it in all of them, with rollback=True")


def sync_done(group: Group, ballot: int, revision: int) -> SyncDone:
    """The message to a participant of the group's last finished sync."""
    what = group.finished_diverged, group.lineage, group.finished_rollback, sorted(group.finished_ballots)
    return SyncDone(ballot, group.finished_sync, revision, *what)


def check_offer(offer: Offer) -> None:
    """Refuse an offer that no correct peer makes."""
    if len(offer.checkpoints) > MAX_CHECKPOINTS:
        raise RemoteProtocolError(f"its offer lists {len(offer.checkpoints)} checkpoints (limit {MAX_CHECKPOINTS})")
    if offer.lineage is not None and len(offer.lineage.ancestors) > MAX_ANCESTORS:
        raise RemoteProtocolError(f"its lineage has {len(offer.lineage.ancestors)} ancestors (limit {MAX_ANCESTORS})")
    ids = [] if offer.lineage is None else [offer.lineage.run, offer.lineage.id]
    listed = [] if offer.lineage is None else offer.lineage.ancestors
    for branch in (*listed, *offer.checkpoints):
        ids.append(branch.lineage)
        if not 0 <= branch.revision < _U63:
            raise RemoteProtocolError(f"its offer names revision {branch.revision}")
    if any(not 0 < len(each) <= MAX_ID_CHARS for each in ids):
        raise RemoteProtocolError("its offer names an invalid lineage")
    if not 0 <= offer.revision < _U63:
        raise RemoteProtocolError(f"its offer has revision {offer.revision}")
    if len(offer.keys) > MAX_KEYS:
        raise RemoteProtocolError(f"its offer has {len(offer.keys)} keys (limit {MAX_KEYS})")
    previous = ""
    for key in offer.keys:
        if key.name <= previous:
            raise RemoteProtocolError(f"the keys of its offer are not sorted: {key.name!r} after {previous!r}")
        expected = 0 if key.may_differ else digest_bytes(offer.hash)
        if len(key.root) != expected or any(not 0 <= size < _U63 for size in key.shape):
            raise RemoteProtocolError(f"its offer of {key.name!r} is not valid")
        previous = key.name
