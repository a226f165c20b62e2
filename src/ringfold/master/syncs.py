"""Syncs: from the offers of a group's members to the same state on all of them.

    every member waits in sync_shared_state --elect--> SyncPlan to each --all who fetch are complete--> SyncDone to each
                                                           |
                                                           +-- who is stuck, or at fault --> CallFailed to that one

The election (`state/election.py`) decides at one instant, from the offers and from the last sync that finished. From
then on the sync lives by itself: epochs may change under it, a death takes a peer out of it, and who fetches finds its
way around a holder that is gone: it finds out by itself when nobody is left from whom the rest can be had. A receiver
that is complete counts as a holder.

The sync ends when nobody is unfinished. A peer that is at fault (its revision jumped, its keys differ, its own state
changed while it was sent), or stuck, fails alone, and the others go on without it: it did not take part, so that at the
next sync it has no vote and receives. When all fail because the state is lost, the next sync says so, too.

A sync that finishes says which lineage the state is part of (`state/ancestry.py`). It is the one of the sync before,
unless the run went back, or begins: then a new lineage branches from what the winner brought. Before a run goes back by
itself, it waits for those who may have something newer (`resuming.py`). A run of several groups does not.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from ringfold.errors import RemoteProtocolError
from ringfold.limits import MAX_KEYS
from ringfold.master import life
from ringfold.master.events import Ns
from ringfold.master.resuming import Resuming, asks_for_a_checkpoint, known_as
from ringfold.master.run import Group, Peer, Run, Sync
from ringfold.state.ancestry import new_lineage
from ringfold.state.blocks import digest_bytes
from ringfold.state.election import ElectedState, ElectionResult, FinishedSync, NoWinner, diverged, elect
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.messages import (
    MAX_ANCESTORS,
    MAX_CHECKPOINTS,
    Divergence,
    Lineage,
    Offer,
    PeerId,
    Reason,
    Rollback,
    SyncDone,
    SyncExtended,
    SyncPlan,
    SyncReport,
    SyncVoters,
)
from ringfold.wire.notices import CallRefused, PeerDiverged, StateRolledBack, SyncBegun, SyncEnded
from ringfold.wire.proof import derive

GOES_ON_NS = 2_000_000_000
NAMED_KEYS = 8
"""Of those in which a peer has diverged."""
SHOWN_DIVERGENCES = 8
"""Of a group, in its status."""
ID_DIGITS = 16
MAX_ID_CHARS = 64
"""Of a run or a lineage."""
_U63 = 1 << 63


class Syncs:
    """The syncs of all groups."""

    def __init__(self, run: Run, run_secret: bytes) -> None:
        self._run = run
        self._secret = run_secret
        self._resuming = Resuming(run)

    def begin(self, now: Ns, group: Group) -> bool:
        """Every member of the group has made its offer: decide. False if that has to wait."""
        run = self._run
        members = [peer for peer in run.live(group) if not run.has_no_part(peer)]
        ballots = {peer.id: peer.ballot for peer in members if peer.ballot is not None}
        numbers = {peer: ballot.number for peer, ballot in ballots.items()}
        if self._resuming.is_waiting(now, group, numbers):
            return False
        offers = {peer: ballot.offer for peer, ballot in ballots.items() if ballot.offer is not None}
        present = None if self._must_agree(group) else group.lineage
        decision = self._elect(offers, group.finished, present)
        if self._resuming.waits(now, group, numbers, offers, decision):
            return False
        group.redo.clear()
        if isinstance(decision, NoWinner) and not asks_for_a_checkpoint(decision):
            decision = self._begun_again(group, offers) or decision
        if isinstance(decision, NoWinner):
            if decision.is_lost and self._must_agree(group):
                decision = NoWinner({peer: _of_several_groups(reason) for peer, reason in decision.reasons.items()})
            reasons = life.with_advice(run, decision.reasons)
            self._run.fail_calls(reasons, numbers)
            if not asks_for_a_checkpoint(decision):
                self._tell_once(list(reasons.values()))
            return True
        run.syncs += 1
        voters = SyncVoters(run.syncs, numbers)
        failures = {
            peer_id: self._run.fail_call(run.peers[peer_id], ballots[peer_id].number, reason, of_sync=voters)
            for peer_id, reason in sorted(decision.rejected.items())
        }
        self._tell_once(list(decision.rejected.values()))
        taking_part = {peer: ballot.number for peer, ballot in ballots.items() if peer not in decision.rejected}
        fetching = {peer for peer, keys in decision.fetch.items() if keys}
        sync = Sync(run.syncs, now, decision, taking_part, set(decision.holders), fetching, voters)
        sync.failures, sync.diverged = failures, self._diverged(offers, decision, group.finished)
        sync.savers = {peer for peer, offer in offers.items() if offer.is_saved}
        sync.lineage = self._lineage(group, sync, offers[decision.winner].lineage)
        if decision.rollback and group.finished is not None:
            lost, is_agreed = group.finished.revision, not decision.resumes
            sync.rollback = Rollback(decision.revision, lost, decision.winner, is_agreed)
            run.tell(StateRolledBack(group.id, sync.rollback))
        for peer_id, ballot in taking_part.items():
            run.peers[peer_id].answers(ballot)
        group.sync = sync
        self._send_plans(group, sync)
        run.tell(SyncBegun(group.id, sync.number, decision.revision, sorted(sync.holders), sorted(fetching)))
        return True

    def _begun_again(self, group: Group, offers: Mapping[PeerId, Offer]) -> ElectedState | None:
        """What is done instead if the state was lost with the run's last member, and the run begins again."""
        if not life.begins_again(self._run, group, offers):
            return None
        decision = self._elect(offers, None, None)
        if isinstance(decision, NoWinner):
            return None
        life.begin_again(self._run, group)
        return decision

    def _must_agree(self, group: Group) -> bool:
        """Whether a lost state is more than this group's own matter: shards must go on from the same revision, so one
        of them does not go back by itself."""
        others = (each for each in self._run.groups.values() if each is not group)
        return group.finished is not None and any(each.finished is not None for each in others)

    def _elect(
        self, offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None
    ) -> ElectionResult:
        return elect(offers, last, present)

    def _lineage(self, group: Group, sync: Sync, brought: Lineage | None) -> Lineage:
        """The lineage that goes on, or a new one. The numbers of syncs never come twice, so neither do ids.

        Where the last revision comes from a disk, what peers have saved after it is as good as abandoned.
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
        """Tell those who wait for whom."""
        self._resuming.tick(now)

    def _diverged(
        self, offers: Mapping[PeerId, Offer], plan: ElectedState, last: FinishedSync | None
    ) -> dict[PeerId, Divergence]:
        return {
            found.peer: Divergence(
                found.peer,
                self._run.peers[found.peer].member.name,
                plan.revision,
                found.since,
                found.keys[:NAMED_KEYS],
                len(found.keys),
            )
            for found in diverged(offers, plan, last)
        }

    def _send_plans(self, group: Group, sync: Sync) -> None:
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
        """A peer says how the sync goes there. A report that crossed with the sync's end is void."""
        group = self._run.groups[peer.group]
        sync = group.sync
        if sync is None or sync.number != report.sync or peer.id not in sync.ballots:
            return
        known = sorted({*report.blame} & {*group.ring})
        sync.moved = now
        match report.outcome:
            case "progress":
                self._goes_on(now, sync)
            case "complete":
                sync.unfinished.discard(peer.id)
                sync.holders.add(peer.id)
                if peer.id in sync.diverged:
                    received = max(0, report.received_bytes)
                    sync.diverged[peer.id] = replace(sync.diverged[peer.id], received_bytes=received)
            case "changed":
                text = f"the shared state of peer {peer.id} changed during the sync: {report.text}"
                self._out(group, sync, peer, Reason("hash", text))
            case "stuck":
                self._out(group, sync, peer, self._stuck(sync, peer, known, report.text))
            case "corrupt":
                sync.corrupt.update(known)
                text = f"peer {peer.id} got a wrong block from {list_peers(known)}: {report.text}"
                self._run.tell(CallRefused(known, text))

    def _goes_on(self, now: Ns, sync: Sync) -> None:
        """A large state takes its time: as long as it moves, nobody's call runs out. Told now and then."""
        if now - sync.told < GOES_ON_NS:
            return
        sync.told = now
        for peer, ballot in sorted(sync.ballots.items()):
            self._run.send(self._run.peers[peer], SyncExtended(ballot))

    def _stuck(self, sync: Sync, peer: Peer, blame: list[PeerId], why: str) -> Reason:
        """Why a peer did not get the state: it is lost to all, or those who have it gave it wrongly, or not at all.

        A holder that dies may still count as one here: its visitors often notice before its own connection says so.
        """
        revision = sync.plan.revision
        there = [holder for holder in sync.plan.holders if holder in self._run.peers]
        if not sync.holders and not there:
            text = f"revision {revision} of the shared state is lost: everybody who had it is gone ({why})"
            return Reason("state_lost", text, blame, 0, [revision])
        if not sync.holders:
            text = f"peer {peer.id} could not get revision {revision}: {list_peers(there)} gave the sync up ({why})"
            return Reason("state", text, there)
        text = (
            f"peer {peer.id} could not get revision {revision} from {list_peers(blame or sorted(sync.holders))}: {why}"
        )
        return Reason("hash" if sync.corrupt & {*blame} else "state", text, blame)

    def _out(self, group: Group, sync: Sync, peer: Peer, reason: Reason) -> None:
        """A peer takes no part any more."""
        told = self._run.fail_call(peer, sync.ballots.pop(peer.id), reason, of_sync=sync.voters)
        sync.failures[peer.id] = told
        sync.unfinished.discard(peer.id)
        sync.holders.discard(peer.id)
        self._run.tell(CallRefused(reason.peers or [peer.id], reason.text))

    def withdraw(self, peer: Peer, ballot: int) -> tuple[list[PeerId], str] | None:
        """The peer's time is over. Whom it waits for, and what they did not do; None if it is in no sync."""
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
        """End the syncs in which nobody is unfinished. False if there is none."""
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

    def _finish(self, now: Ns, group: Group, sync: Sync) -> None:
        run, plan = self._run, sync.plan
        names = (known_as(run.peers[peer].member) for peer in sync.ballots if peer in sync.savers)
        group.finished, group.finished_sync = plan.finished(sync.ballots, names), sync.number
        group.lineage, group.finished_rollback = sync.lineage, sync.rollback
        # Two in a row: it has trained with the others in between, as one of them.
        group.incumbents |= group.finished_ballots.keys() & sync.ballots.keys()
        group.finished_ballots, group.finished_failures = dict(sync.ballots), sync.failures
        group.finished_diverged = list(sync.diverged.values())
        group.diverged = [*group.diverged, *group.finished_diverged][-SHOWN_DIVERGENCES:]
        group.divergences += len(sync.diverged)
        for peer, ballot in sorted(sync.ballots.items()):
            run.send(run.peers[peer], done_of(group, ballot, plan.revision))
        for found in group.finished_diverged:
            run.tell(PeerDiverged(group.id, found))
        run.tell(SyncEnded(group.id, sync.number, plan.revision, (now - sync.since) // 1_000_000))

    def _tell_once(self, reasons: list[Reason]) -> None:
        for text in dict.fromkeys(reason.text for reason in reasons):
            peers = sorted({peer for reason in reasons if reason.text == text for peer in reason.peers})
            self._run.tell(CallRefused(peers, text))


def _of_several_groups(reason: Reason) -> Reason:
    why = "The run has several groups, which must go on from the same revision"
    return replace(reason, text=f"{reason.text}. {why}: load it in all of them, with rollback=True")


def done_of(group: Group, ballot: int, revision: int) -> SyncDone:
    """How a participant of the group's last finished sync is told that it is done."""
    what = group.finished_diverged, group.lineage, group.finished_rollback
    return SyncDone(ballot, group.finished_sync, revision, *what)


def check_offer(offer: Offer) -> None:
    """Refuse an offer that no honest peer makes."""
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
        raise RemoteProtocolError("its offer names a lineage that is none")
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
            raise RemoteProtocolError(f"its offer of {key.name!r} makes no sense")
        previous = key.name
