"""Calls: `update_topology`, `are_peers_pending` and `optimize_topology` of the run, `sync_shared_state` of a group.

A call completes when every member of the run (for a sync: of the group) waits in it. A vote counts only in the epoch in
which it was cast (`Run.ballot`): an epoch change voids the votes of its group, and the peers cast them again.

An update that completes admits all registered peers, and changes to better rings that the moonshot search has found
meanwhile (`topology.py`). Its votes are then used up: they stay in the `Admission`, and get
their result when the epochs that it caused are installed, whatever happens in between. A vote that needs more members
than its group has gets no result: it stands, and counts in every later call of the run, so that a group that fills up
keeps no other group waiting, also while its newcomers are registered already. These are admitted together, when they
are enough.

`syncs.py` continues a sync that completes, and `topology.py` an optimize vote.
"""

from collections.abc import Collection, Iterator

from msgspec import Struct

from ringfold.errors import RemoteProtocolError
from ringfold.master.disputes import Caller, Disputes, Working, find_conflicting_calls, find_conflicting_ops
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.run import Admission, Ballot, Group, Peer, Run
from ringfold.master.states import Membership
from ringfold.master.syncs import Syncs, check_offer
from ringfold.master.topology import Topology
from ringfold.units import MS
from ringfold.wire.decoding import checked
from ringfold.wire.diagnostics import CALL_NAMES, format_seconds, list_peers, name_op
from ringfold.wire.messages import (
    AdmissionWaits,
    CallDone,
    GroupId,
    OpRef,
    PeerId,
    PendingQuestion,
    Reason,
    Vote,
    VoteKind,
    VoteWithdrawn,
)
from ringfold.wire.notices import CallRefused

NEWCOMER_INTERVAL_NS = 1_000 * MS
"""How often newcomers are sent what they wait for."""
MAX_PEERS_SHOWN = 4
"""Of those that newcomers wait for, in a text."""


class Ready(Struct, frozen=True):
    """The call is complete."""


class IncompleteCall(Struct, frozen=True):
    """The call is not complete: why, and which peers it waits for."""

    why: str
    missing: list[PeerId]


def completion(run: Run, kind: VoteKind, group: GroupId | None = None) -> Ready | IncompleteCall:
    """Decide whether a call of the run, or the sync of a group, is complete, or return what it waits for."""
    members = [peer for peer in run.accepted() if kind != "sync" or peer.group == group]
    if kind == "sync":
        members = [peer for peer in members if not run.is_excluded(peer)]
    if kind in ("pending", "optimize"):
        standing = run.short_of_members()
        members = [peer for peer in members if peer.id not in standing]
    ballots = {peer.id: ballot for peer in members if (ballot := run.ballot(peer)) and ballot.kind == kind}
    missing = [peer.id for peer in members if peer.id not in ballots]
    if missing or not members:
        return IncompleteCall(f"{len(missing)} of {len(members)} have not called it: {list_peers(missing)}", missing)
    if kind in ("pending", "sync"):
        return Ready()
    changing = [each.id for each in run.groups.values() if each.change is not None]
    if changing:
        return IncompleteCall(f"the epoch of group {changing[0]} is changing", [])
    short = run.short_of_peers()
    if kind == "update" and len(short) == len(members) and not run.admissible(short):
        unmet = max(members, key=lambda peer: ballots[peer.id].min_world - run.size(peer.group))
        needed, there = ballots[unmet.id].min_world, run.size(unmet.group)
        return IncompleteCall(f"peer {unmet.id} wants {needed} peers in its group, {there} are there", [])
    return Ready()


class Calls:
    """The votes of all peers, and the admission in progress."""

    def __init__(self, run: Run, epochs: Epochs, syncs: Syncs, topology: Topology, disputes: Disputes) -> None:
        self._run, self._disputes = run, disputes
        self._epochs = epochs
        self._syncs = syncs
        self._topology = topology
        self._last_told_ns: Ns = 0

    def vote(self, now: Ns, peer: Peer, vote: Vote) -> None:
        """A peer waits in a call. A vote that was in flight when its result, or a newer record, was sent is void."""
        current = self._run.is_current(peer, vote.epoch)
        if (vote.kind == "sync") != (vote.offer is not None):
            raise RemoteProtocolError("its vote must have an offer if, and only if, it is for a sync")
        if vote.offer is not None:
            checked(check_offer, vote.offer)
        waits_in = self._ballots_in_progress(peer)
        if not current or vote.ballot in waits_in or vote.ballot <= peer.last_answered:
            return
        if vote.question is not None:
            self._answer_question(peer, vote.ballot, vote.question)
            return
        if waits_in:
            # A program waits in one call at a time. What another call completed would be started twice.
            raise RemoteProtocolError(f"it votes in call {vote.ballot}, but waits in call {waits_in[0]}")
        if vote.kind != "sync":
            self._run.groups[peer.group].retrying.discard(peer.id)
        before = peer.ballot
        called_ns = before.called_ns if before is not None and before.number == vote.ballot else now
        progress = dict(vote.progress)
        peer.ballot = Ballot(vote.ballot, vote.kind, vote.epoch, vote.min_world, progress, vote.offer, called_ns, now)

    def _answer_question(self, peer: Peer, ballot: int, question: PendingQuestion) -> None:
        """Answer at once, unless members are away that may know the answer: after that the epoch changes, and the peer
        asks again."""
        run = self._run
        if run.away:
            return
        pending = run.questions.answer(question, run.calls, bool(run.registered()))
        run.send(peer, CallDone(ballot, pending, run.world(), run.registrations, call=run.calls))
        peer.mark_answered(ballot)

    def _ballots_in_progress(self, peer: Peer) -> list[int]:
        """The peer's ballot whose result an admission, a sync or an optimisation in progress will send, if there is
        one."""
        sync, running = self._run.groups[peer.group].sync, (self._run.admission, self._run.optimisation)
        return [call.ballots[peer.id] for call in (sync, *running) if call is not None and peer.id in call.ballots]

    def withdraw(self, now: Ns, peer: Peer, message: VoteWithdrawn) -> None:
        """A peer's call timed out: send it the missing peers, unless the result was sent already."""
        if self._run.away:
            self._run.withdrawn.append((peer.id, message))
            return
        sync = self._run.groups[peer.group].sync
        late = self._syncs.withdraw(peer, message.ballot)
        if late is None and message.ballot <= peer.last_answered:
            return
        waited = max(0, message.waited_ms)
        admission = self._run.admission
        if admission is not None and admission.ballots.get(peer.id) == message.ballot:
            del admission.ballots[peer.id]
            changing = [self._run.groups[group] for group in sorted(admission.groups)]
            missing = sorted({late for group in changing for late in self._epochs.missing(group)})
            text = f"waited {format_seconds(waited)} in update_topology for {list_peers(missing)} to attach"
        elif late is not None:
            missing, what = late
            text = f"waited {format_seconds(waited)} in sync_shared_state for {list_peers(missing)} to {what} the state"
        elif peer.id in self._run.groups[peer.group].retrying:
            redo = self._run.groups[peer.group].retrying
            redo.discard(peer.id)
            self._run.groups[peer.group].excluded_from_retry.add(peer.id)
            missing = sorted(redo)
            text = f"waited {format_seconds(waited)} in sync_shared_state for {list_peers(missing)} to get the state"
        elif self._topology.has_ballot(peer, message.ballot):
            missing, what = self._topology.withdraw(peer)
            text = f"waited {format_seconds(waited)} in optimize_topology {what}"
        else:
            kind: VoteKind = peer.ballot.kind if peer.ballot is not None else "update"
            state = completion(self._run, kind, peer.group)
            missing = self._absent(now, peer, kind, state) if isinstance(state, IncompleteCall) else []
            why = f"for {list_peers(missing)}" if missing or isinstance(state, Ready) else f"because {state.why}"
            if kind == "sync" and (waiting := self._run.groups[peer.group].resume) is not None:
                why = f"for {', '.join(map(repr, waiting.missing))} to return with a checkpoint"
            text = f"waited {format_seconds(waited)} in {CALL_NAMES[kind]} {why}"
            peer.gave_up[kind] = now
        of_sync = sync.voters if sync is not None and late is not None else None
        sent = self._run.fail_call(peer, message.ballot, Reason("deadline", text, missing, waited), of_sync=of_sync)
        if sync is not None and late is not None:
            sync.failures[peer.id] = sent
        self._run.notify(CallRefused([peer.id], f"peer {peer.id} {text}"))

    def settle_withdrawn(self, now: Ns) -> None:
        """When all members have returned, calls that timed out meanwhile get their result: ahead of the next records,
        because a peer that receives a new epoch first would retry an interrupted sync."""
        if self._run.away or not self._run.withdrawn:
            return
        late, self._run.withdrawn = self._run.withdrawn, []
        for voter, message in late:
            if voter in self._run.peers:
                self.withdraw(now, self._run.peers[voter], message)

    def _absent(self, now: Ns, peer: Peer, kind: VoteKind, state: IncompleteCall) -> list[PeerId]:
        """The peers that a call waited for. Those that waited in it, too, and timed out a moment earlier are not at
        fault."""
        since = now if peer.ballot is None else peer.ballot.called_ns
        missing = [late for late in state.missing if late != peer.id]
        return [late for late in missing if self._run.peers[late].gave_up.get(kind, -1) < since] or missing

    def settle(self, now: Ns) -> bool:
        """Send the result of a call that is complete, or admit peers that may be admitted. False if there is nothing
        to do."""
        run = self._run
        if run.away:
            return False
        if run.admission is not None and self._is_installed(run.admission):
            self._finish(run.admission)
            return True
        if run.peers and all(peer.membership is Membership.REGISTERED for peer in run.peers.values()):
            # An empty run admits all peers at once; so does a run whose members are all gone.
            run.calls += 1
            self._admit(now, {})
            return True
        if self._syncs.settle(now) or self._topology.settle(now):
            return True
        return any(self._settle_kind(now, kind) for kind in self._kinds())

    def _kinds(self) -> list[VoteKind]:
        return sorted({peer.ballot.kind for peer in self._run.peers.values() if peer.ballot is not None})

    def _settle_kind(self, now: Ns, kind: VoteKind) -> bool:
        run = self._run
        if kind == "sync":
            groups = [group for _, group in sorted(run.groups.items()) if group.ring and group.sync is None]
            small = [group for group in groups if self._fail_small_syncs(group)]
            whole = [group for group in groups if isinstance(completion(run, "sync", group.id), Ready)]
            begun = [group for group in whole if self._syncs.begin(now, group)]
            return bool(small or begun) or self._admit_to_resume(now)
        if not isinstance(completion(run, kind), Ready):
            return False
        short = run.short_of_peers()
        voters = {
            peer.id: peer.ballot.number
            for peer in run.accepted()
            if peer.ballot is not None and peer.ballot.kind == kind and peer.id not in short
        }
        if kind != "pending" and (voters or run.admissible(short)):
            run.calls += 1
        if kind == "update" and self._update(now, voters, short):
            return True
        if kind == "optimize" and voters:
            self._topology.begin(now, voters)
        elif voters:
            self._run.answer_calls(voters)
        else:
            return False
        return True

    def _update(self, now: Ns, voters: dict[PeerId, int], short: Collection[PeerId]) -> bool:
        """Admit newcomers, and change to better rings that were found. False if there is neither."""
        newcomers = self._run.admissible(short)
        reordered = self._topology.adopt_found_rings(now, voters, {peer.group for peer in newcomers})
        if newcomers or reordered:
            self._admit(now, voters, short, reordered)
        return bool(newcomers or reordered)

    def _admit_to_resume(self, now: Ns) -> bool:
        """Admit newcomers while groups wait for them in a sync: all members that would vote wait there.

        The peers vote for these syncs again in the next epoch, and their programs do not notice.
        """
        run = self._run
        if all(group.resume is None for group in run.groups.values()) or not run.admissible(()):
            return False
        voters: dict[PeerId, int] = {}
        for peer in run.accepted():
            ballot, waiting = run.ballot(peer), run.groups[peer.group].resume
            if ballot is not None and ballot.kind == "update":
                voters[peer.id] = ballot.number
            elif ballot is None or waiting is None or waiting.ballots.get(peer.id) != ballot.number:
                return False
        run.calls += 1
        self._admit(now, voters)
        return True

    def _fail_small_syncs(self, group: Group) -> bool:
        """A sync fails if the group has shrunk below what its voter needs: the voter must first wait for peers."""
        small = [
            peer
            for peer in self._run.live(group)
            if (ballot := self._run.ballot(peer)) and ballot.kind == "sync" and len(group.ring) < ballot.min_world
        ]
        reasons: dict[PeerId, Reason] = {}
        for peer in small:
            assert peer.ballot is not None
            needed = peer.ballot.min_world
            text = f"the group has {len(group.ring)} members and needs {needed}"
            reasons[peer.id] = Reason("too_few", text, [], 0, [len(group.ring), needed])
        self._run.fail_calls(reasons, {peer.id: peer.ballot.number for peer in small if peer.ballot is not None})
        return bool(small)

    def _admit(
        self,
        now: Ns,
        voters: dict[PeerId, int],
        short: Collection[PeerId] = (),
        reordered: Collection[GroupId] = (),
    ) -> None:
        """Admit all registered peers, all groups together, except in a group that waits for still more. The voters get
        the result when these epochs, and those of the groups that get another ring, are installed."""
        run = self._run
        newcomers = run.admissible(short)
        groups = {peer.group for peer in newcomers}
        for group in groups:
            self._note_incumbents(run.groups[group])
        for group in sorted(groups):
            self._epochs.admit(now, run.groups[group], [peer for peer in newcomers if peer.group == group])
        if voters:
            for voter in voters:
                run.peers[voter].ballot = None
            groups |= set(reordered)
            run.admission = Admission(now, voters, groups, {group: run.groups[group].epoch for group in groups})

    def _note_incumbents(self, group: Group) -> None:
        """Mark the members that have done something together by now as incumbents."""
        synced = frozenset[PeerId]() if group.finished is None else group.finished.participants
        for peer in self._run.live(group):
            has_committed = peer.heartbeat.committed > 0 or (peer.ballot is not None and bool(peer.ballot.progress))
            if has_committed or peer.id in synced:
                group.incumbents.add(peer.id)
        group.incumbents &= set(group.ring)

    def _is_installed(self, admission: Admission) -> bool:
        return all(self._run.groups[group].change is None for group in admission.groups)

    def _finish(self, admission: Admission) -> None:
        self._run.admission = None
        self._run.answer_calls(admission.ballots)

    # Time

    def tick(self, now: Ns) -> None:
        """Send newcomers what they wait for, and decide between conflicting calls."""
        self._update_newcomers(now)
        callers = list(self._callers())
        if not callers:
            return
        grace_ns = self._run.settings.meet_ms * MS
        for conflict in find_conflicting_ops(callers, list(self._working()), grace_ns):
            self._disputes.add_conflict(now, conflict)
        # An eviction ends epochs, and voids the votes that were cast in them.
        conflicting_calls = find_conflicting_calls(now, list(self._callers()), grace_ns)
        if conflicting_calls is not None:
            self._disputes.add_conflict(now, conflicting_calls)

    def _update_newcomers(self, now: Ns) -> None:
        """Peers that wait to be admitted get the peers that they wait for, now and then: a step may take long."""
        if now - self._last_told_ns < NEWCOMER_INTERVAL_NS:
            return
        newcomers = [
            peer
            for peer in self._run.peers.values()
            if now - peer.registered_ns >= NEWCOMER_INTERVAL_NS and (not peer.is_member or self._is_attaching(peer))
        ]
        if newcomers and (waits := self._admission_waits(now)) is not None:
            self._last_told_ns = now
            for peer in newcomers:
                self._run.send(peer, waits)

    def _is_attaching(self, peer: Peer) -> bool:
        change = self._run.groups[peer.group].change
        return change is not None and peer.id in change.newcomers

    def _admission_waits(self, now: Ns) -> AdmissionWaits | None:
        run = self._run
        changing = [group for group in run.groups.values() if group.change is not None]
        if changing:
            missing = sorted({peer for group in changing for peer in self._epochs.missing(group)})
            have = "has" if len(missing) == 1 else "have"
            text = f"the epoch changes, and {list_peers(missing)} {have} not responded yet"
        else:
            state = completion(run, "update")
            if isinstance(state, Ready):
                return None
            missing, text = state.missing, f"{state.why}: start more peers"
            if missing:
                shown = [f"peer {peer} {self._current_activity(now, run.peers[peer])}" for peer in missing]
                more = f"; and {len(shown) - MAX_PEERS_SHOWN} more" if len(shown) > MAX_PEERS_SHOWN else ""
                text = f"these have not called update_topology: {'; '.join(shown[:MAX_PEERS_SHOWN])}{more}"
        heartbeat_ms = run.settings.liveness.heartbeat_ms
        moving = any(
            run.peers[peer].step_progress.is_in_time(now, heartbeat_ms) for peer in missing if peer in run.peers
        )
        return AdmissionWaits(run.add_names(text), missing, moving)

    def _current_activity(self, now: Ns, peer: Peer) -> str:
        """What a member does instead of the call that others wait for, as far as is known."""
        ballot, sync, ops = self._run.ballot(peer), self._run.groups[peer.group].sync, self._run.announced(peer)
        if ballot is not None:
            return f"waits in {CALL_NAMES[ballot.kind]}"
        if sync is not None and peer.id in sync.ballots:
            return "is in sync_shared_state"
        if ops:
            return f"is in {name_op(OpRef(ops[0].tag, ops[0].sequence))}"
        return f"has been in its own code for {format_seconds((now - peer.step_progress.last_progress_ns) // MS)}"

    def _callers(self) -> Iterator[Caller]:
        standing = self._run.short_of_members()
        for peer in self._run.accepted():
            ballot = self._run.ballot(peer)
            if ballot is not None:
                is_short = peer.id in standing
                yield Caller(peer.id, peer.group, ballot.kind, ballot.cast_ns, ballot.progress, is_short)

    def _working(self) -> Iterator[Working]:
        """The ops that heartbeats announce in installed epochs. An op cannot be older than its epoch."""
        for peer in self._run.accepted():
            group = self._run.groups[peer.group]
            if group.change is not None:
                continue
            for op in self._run.announced(peer):
                since = max(group.installed_ns, peer.last_heartbeat_ns - op.age_ms * MS)
                yield Working(peer.id, peer.group, OpRef(op.tag, op.sequence), since, peer.last_heartbeat_ns)
