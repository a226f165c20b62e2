"""Calls: `update_topology`, `are_peers_pending` and `optimize_topology` of the run, `sync_shared_state` of a group.

A call completes when every accepted peer of the run (for a sync: of the group) waits in it. A vote counts only in the
epoch in which it was cast (`Run.ballot`), so an epoch change voids the votes of its group without a word, and the peers
cast them again.

An update that completes admits everybody who is registered. The votes that it answers are then used up: they live on in
the `Admission` and are answered when the epochs that it caused are installed, whatever happens on the way. A vote that
asks for more members than its group has is not answered: it stands, and counts in every later call of the run, so that
a group that fills up keeps nobody else waiting, also while its newcomers are registered already. These come in
together, when they are enough.

What a sync that completes goes on to do is told in `syncs.py`, and that of an optimize vote in `topology.py`.
"""

from collections.abc import Collection, Iterator

from msgspec import Struct

from ringfold.errors import RemoteProtocolError
from ringfold.master.disputes import Disputes
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.liveness import MS
from ringfold.master.meeting import Caller, Working, clashing_calls, clashing_ops
from ringfold.master.run import Admission, Ballot, Group, Peer, Run, Standing
from ringfold.master.syncs import Syncs, check_offer
from ringfold.master.topology import Topology
from ringfold.wire.decoding import checked
from ringfold.wire.diagnostics import CALL_NAMES, format_seconds, list_peers, name_op
from ringfold.wire.messages import (
    AdmissionWaits,
    GroupId,
    OpRef,
    PeerId,
    Reason,
    Vote,
    VoteKind,
    VoteWithdrawn,
)
from ringfold.wire.notices import CallRefused

TELL_NS = 1_000 * MS
"""How often newcomers are told what they wait for."""
PEERS_SHOWN = 4
"""Of those whom they wait for, in a sentence."""


class Ready(Struct, frozen=True):
    """The call is complete."""


class Wait(Struct, frozen=True):
    """The call is not complete: why, and whom it waits for."""

    why: str
    missing: list[PeerId]


def completion(run: Run, kind: VoteKind, group: GroupId | None = None) -> Ready | Wait:
    """Decide whether a call of the run, or the sync of a group, is complete, or say what it waits for."""
    members = [peer for peer in run.accepted() if kind != "sync" or peer.group == group]
    if kind == "sync":
        members = [peer for peer in members if not run.has_no_part(peer)]
    if kind in ("pending", "optimize"):
        standing = run.short_of_members()
        members = [peer for peer in members if peer.id not in standing]
    ballots = {peer.id: ballot for peer in members if (ballot := run.ballot(peer)) and ballot.kind == kind}
    missing = [peer.id for peer in members if peer.id not in ballots]
    if missing or not members:
        return Wait(f"{len(missing)} of {len(members)} have not called it: {list_peers(missing)}", missing)
    if kind in ("pending", "sync"):
        return Ready()
    changing = [each.id for each in run.groups.values() if each.change is not None]
    if changing:
        return Wait(f"the epoch of group {changing[0]} is changing", [])
    short = run.short_of_peers()
    if kind == "update" and len(short) == len(members) and not run.admissible(short):
        asking = max(members, key=lambda peer: ballots[peer.id].min_world - run.size(peer.group))
        needed, there = ballots[asking.id].min_world, run.size(asking.group)
        return Wait(f"peer {asking.id} wants {needed} peers in its group, {there} are there", [])
    return Ready()


class Calls:
    """The votes of all peers, and the admission in progress."""

    def __init__(self, run: Run, epochs: Epochs, syncs: Syncs, topology: Topology, disputes: Disputes) -> None:
        self._run, self._disputes = run, disputes
        self._epochs = epochs
        self._syncs = syncs
        self._topology = topology
        self._told: Ns = 0

    def vote(self, now: Ns, peer: Peer, vote: Vote) -> None:
        """A peer waits in a call. A vote that crossed with its answer, or with a newer record, is void."""
        current = self._run.is_current(peer, vote.epoch)
        if (vote.kind == "sync") != (vote.offer is not None):
            raise RemoteProtocolError("its vote has an offer where none belongs, or none where one does")
        if vote.offer is not None:
            checked(check_offer, vote.offer)
        waits_in = self._used_up(peer)
        if not current or vote.ballot in waits_in or vote.ballot <= peer.answered:
            return
        if waits_in:
            # A program waits in one call at a time. What another one completed would be begun twice.
            raise RemoteProtocolError(f"it votes in call {vote.ballot}, but waits in call {waits_in[0]}")
        if vote.kind != "sync":
            self._run.groups[peer.group].redo.discard(peer.id)
        before = peer.ballot
        asked = before.asked if before is not None and before.number == vote.ballot else now
        progress = dict(vote.progress)
        peer.ballot = Ballot(vote.ballot, vote.kind, vote.epoch, vote.min_world, progress, vote.offer, asked, now)

    def _used_up(self, peer: Peer) -> list[int]:
        """The peer's ballot that an admission, a sync or an optimisation in progress will answer, if there is one."""
        sync, running = self._run.groups[peer.group].sync, (self._run.admission, self._run.optimisation)
        return [call.ballots[peer.id] for call in (sync, *running) if call is not None and peer.id in call.ballots]

    def withdraw(self, now: Ns, peer: Peer, message: VoteWithdrawn) -> None:
        """A peer's call ran out of time: tell it who was missing, unless the answer is on its way already."""
        if self._run.away:
            self._run.withdrawn.append((peer.id, message))
            return
        sync = self._run.groups[peer.group].sync
        late = self._syncs.withdraw(peer, message.ballot)
        if late is None and message.ballot <= peer.answered:
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
        elif peer.id in self._run.groups[peer.group].redo:
            redo = self._run.groups[peer.group].redo
            redo.discard(peer.id)
            self._run.groups[peer.group].out_of_redo.add(peer.id)
            missing = sorted(redo)
            text = f"waited {format_seconds(waited)} in sync_shared_state for {list_peers(missing)} to get the state"
        elif self._topology.has_ballot(peer, message.ballot):
            missing, what = self._topology.withdraw(peer)
            text = f"waited {format_seconds(waited)} in optimize_topology {what}"
        else:
            kind: VoteKind = peer.ballot.kind if peer.ballot is not None else "update"
            state = completion(self._run, kind, peer.group)
            missing = self._absent(now, peer, kind, state) if isinstance(state, Wait) else []
            why = f"for {list_peers(missing)}" if missing or isinstance(state, Ready) else f"because {state.why}"
            if kind == "sync" and (waiting := self._run.groups[peer.group].resume) is not None:
                why = f"for {', '.join(map(repr, waiting.missing))} to come back with a checkpoint"
            text = f"waited {format_seconds(waited)} in {CALL_NAMES[kind]} {why}"
            peer.gave_up[kind] = now
        of_sync = sync.voters if sync is not None and late is not None else None
        told = self._run.fail_call(peer, message.ballot, Reason("deadline", text, missing, waited), of_sync=of_sync)
        if sync is not None and late is not None:
            sync.failures[peer.id] = told
        self._run.tell(CallRefused([peer.id], f"peer {peer.id} {text}"))

    def settle_withdrawn(self, now: Ns) -> None:
        """When all are back, calls that ran out of time meanwhile are answered: ahead of the next records, because a
        peer that hears of a new epoch first would call an interrupted sync anew."""
        if self._run.away or not self._run.withdrawn:
            return
        late, self._run.withdrawn = self._run.withdrawn, []
        for voter, message in late:
            if voter in self._run.peers:
                self.withdraw(now, self._run.peers[voter], message)

    def _absent(self, now: Ns, peer: Peer, kind: VoteKind, state: Wait) -> list[PeerId]:
        """Whom a call waited for in vain. Those who waited with it and gave up a moment earlier are not to blame."""
        since = now if peer.ballot is None else peer.ballot.asked
        missing = [late for late in state.missing if late != peer.id]
        return [late for late in missing if self._run.peers[late].gave_up.get(kind, -1) < since] or missing

    def settle(self, now: Ns) -> bool:
        """Answer a call that is complete, or admit whom the facts allow to be admitted. False if there is nothing."""
        run = self._run
        if run.away:
            return False
        if run.admission is not None and self._is_installed(run.admission):
            self._finish(run.admission)
            return True
        if run.peers and all(peer.standing is Standing.REGISTERED for peer in run.peers.values()):
            # An empty run takes everybody at once; so does one whose members have all gone.
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
        if kind == "update" and run.admissible(short):
            self._admit(now, voters, short)
        elif kind == "optimize" and voters:
            self._topology.begin(now, voters)
        elif voters:
            self._run.answer_calls(voters)
        else:
            return False
        return True

    def _admit_to_resume(self, now: Ns) -> bool:
        """Let newcomers in while groups wait for them in a sync: nobody who would vote for it is doing anything else.

        The syncs that wait are voted for again in the next epoch, and the programs do not notice.
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
        self._admit(now, voters)
        return True

    def _fail_small_syncs(self, group: Group) -> bool:
        """Who syncs must wait for peers first if the group has shrunk below what it needs: others saw it already."""
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

    def _admit(self, now: Ns, voters: dict[PeerId, int], short: Collection[PeerId] = ()) -> None:
        """Let everybody in who is registered, all groups together, except where a group waits for still more."""
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
            run.admission = Admission(now, voters, groups, {group: run.groups[group].epoch for group in groups})

    def _note_incumbents(self, group: Group) -> None:
        """Who has done something with the others by now. In a group of strangers all are equal."""
        synced = frozenset[PeerId]() if group.finished is None else group.finished.participants
        for peer in self._run.live(group):
            has_committed = peer.beat.committed > 0 or (peer.ballot is not None and bool(peer.ballot.progress))
            if has_committed or peer.id in synced:
                group.incumbents.add(peer.id)
        group.incumbents &= set(group.ring)

    def _is_installed(self, admission: Admission) -> bool:
        return all(self._run.groups[group].change is None for group in admission.groups)

    def _finish(self, admission: Admission) -> None:
        self._run.admission = None
        self._run.answer_calls(admission.ballots)

    # Calls that can never meet

    def tick(self, now: Ns) -> None:
        """Tell newcomers what they wait for, and decide between calls that can never meet."""
        self._tell_newcomers(now)
        callers = list(self._callers())
        if not callers:
            return
        patience = self._run.settings.meet_ms * MS
        for clash in clashing_ops(callers, list(self._working()), patience):
            self._disputes.clash(now, clash)
        # An eviction ends epochs, and with them the votes that were cast in them.
        clash_of_calls = clashing_calls(now, list(self._callers()), patience)
        if clash_of_calls is not None:
            self._disputes.clash(now, clash_of_calls)

    def _tell_newcomers(self, now: Ns) -> None:
        """Who waits to be admitted hears for whom, now and then: a step of the others may be long."""
        if now - self._told < TELL_NS:
            return
        newcomers = [
            peer
            for peer in self._run.peers.values()
            if now - peer.registered >= TELL_NS and (peer.standing is not Standing.ACCEPTED or self._is_attaching(peer))
        ]
        if newcomers and (waits := self._admission_waits(now)) is not None:
            self._told = now
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
            text = f"the epoch changes, and {list_peers(missing)} {have} not answered yet"
        else:
            state = completion(run, "update")
            if isinstance(state, Ready):
                return None
            missing, text = state.missing, f"{state.why}: start more peers"
            if missing:
                shown = [f"peer {peer} {self._doing(now, run.peers[peer])}" for peer in missing]
                more = f"; and {len(shown) - PEERS_SHOWN} more" if len(shown) > PEERS_SHOWN else ""
                text = f"these have not called update_topology: {'; '.join(shown[:PEERS_SHOWN])}{more}"
        heartbeat_ms = run.settings.liveness.heartbeat_ms
        moving = any(run.peers[peer].pace.is_moving(now, heartbeat_ms) for peer in missing if peer in run.peers)
        return AdmissionWaits(run.named(text), missing, moving)

    def _doing(self, now: Ns, peer: Peer) -> str:
        """What a member does instead of what it is waited for, as far as is known."""
        ballot, sync, ops = self._run.ballot(peer), self._run.groups[peer.group].sync, self._run.announced(peer)
        if ballot is not None:
            return f"waits in {CALL_NAMES[ballot.kind]}"
        if sync is not None and peer.id in sync.ballots:
            return "is in sync_shared_state"
        if ops:
            return f"is in {name_op(OpRef(ops[0].tag, ops[0].sequence))}"
        return f"has been in its own code for {format_seconds((now - peer.pace.moved) // MS)}"

    def _callers(self) -> Iterator[Caller]:
        standing = self._run.short_of_members()
        for peer in self._run.accepted():
            ballot = self._run.ballot(peer)
            if ballot is not None:
                is_short = peer.id in standing
                yield Caller(peer.id, peer.group, ballot.kind, ballot.cast, ballot.progress, is_short)

    def _working(self) -> Iterator[Working]:
        """The ops that heartbeats name in installed epochs. An op cannot be older than the epoch it runs in."""
        for peer in self._run.accepted():
            group = self._run.groups[peer.group]
            if group.change is not None:
                continue
            for op in self._run.announced(peer):
                since = max(group.installed, peer.beat_at - op.age_ms * MS)
                yield Working(peer.id, peer.group, OpRef(op.tag, op.sequence), since, peer.beat_at)
