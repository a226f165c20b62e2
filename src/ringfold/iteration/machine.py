"""The protocol of one rank: every decision, as steps that yield store operations. Pure.

The states, and what a rank does in each (TRANSITIONS has the legal changes):

    TRAINING        the program runs the iteration; the store is not used
    READY           the arrival is in the store; the rank waits for the others, or for a newer record
    CONSENSUS       all ranks that are waited for have arrived: it tries the compare-and-set
    ADVANCE         there is a newer record, written by this rank or by another one
    NEW_ITERATION   this rank is a member of that iteration; `next` returns its number

*One write decides.* The record goes from n to n + 1 in one compare-and-set, on condition of the record that the
decision was made on. So of all ranks that try one wins, and any change in between (a rank registered, or left) makes it
fail, and the decision is made again. A winner has nothing more to do: it may die at once.

*Unknown outcomes.* Each write of the record has a nonce of its own. A rank that does not know the outcome of its write
reads again: its nonce says that the write was made; any other record is treated as written by another rank. A write
that arrives late finds another version, and fails.

*Arrivals.* Each incarnation has one key for its arrivals. It contains the number of the iteration that was finished. It
counts if it is not lower than n, and if the incarnation is the registered one of its rank. So the arrival of a live
rank is never removed, an old number counts for nothing, and there is nothing to clean up per iteration. The key is
written by compare-and-set, too, so that a late write cannot replace a newer one.

*Waiting.* A rank that has finished writes its arrival. If all others may have arrived by then, it observes them, so
that of several last ranks at least one sees all arrivals. A rank that knows that others have not arrived does not look:
one or two ranks observe in an iteration, and what a rank costs the store does not grow with the number of ranks. It
knows the *arrival count*, which is never lower than the number of arrivals that were counted before:
- Where the versions of a store count its writes (`counts_writes`), it is the version of the arrival minus that of the
  record.
- Where the store has atomic counters (`has_counters`), each iteration has one, and a rank increments it *after* it has
  written its arrival. So the rank that gets the highest number can see the arrivals of all that got a lower one.
Both may be too high (a heartbeat is a write, a restarted rank arrives twice): then a rank looks in vain. The count is
too low only for a rank that died between its write and its increment: then the others observe a little later.

The winner of the present iteration was the last to finish the one before, and likely is again: it observes first (where
there is a counter: if that says that it is the last), and if all others have arrived it advances without an arrival of
its own. A rank that has to wait waits for the record to change, and observes again at a low rate: for ranks that died,
and for a last rank that died before it tried. Before enough ranks have registered there is nothing to observe.

*Members and newcomers.* A rank that is a member of the record's iteration, and has not run it yet, runs it. Every other
rank arrives at it at once, without running it, and is a member of the next. So a rank that restarts while the others
still wait runs the iteration again; a rank that was away for longer continues with the present one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ringfold.errors import (
    DeadlineExceeded,
    StoreError,
    StoreUnknown,
    StoreUnreachable,
    StoreWentBack,
    Superseded,
    UsageError,
)
from ringfold.iteration.liveness import LivenessTiming, RankObservation, RankObserver, finished_iteration
from ringfold.iteration.operations import (
    CompareAndSet,
    Delete,
    Get,
    Heartbeat,
    Increment,
    Ns,
    Pause,
    ProgramCall,
    Steps,
    StoreOutcome,
    WaitFor,
)
from ringfold.iteration.record import (
    NONE_YET,
    Advance,
    Hold,
    Keys,
    RankIdentity,
    Record,
    Registration,
    Rules,
    decide,
    decode,
    encode,
)
from ringfold.states import Transitions
from ringfold.store.base import Entry, Lost, Won, version_of

Value = TypeVar("Value")


class State(StrEnum):
    """What a rank is doing; see the head of this file."""

    TRAINING = "TRAINING"
    READY = "READY"
    CONSENSUS = "CONSENSUS"
    ADVANCE = "ADVANCE"
    NEW_ITERATION = "NEW_ITERATION"


@dataclass(frozen=True, slots=True)
class StateChange:
    """A rank's state, and the iteration it is about: the one that it has or had, or, in NEW_ITERATION and TRAINING, the
    one that begins."""

    state: State
    iteration: int


MAX_STATE_CHANGES = 64
"""So many changes of state are remembered."""

TRANSITIONS = Transitions(
    {
        State.READY: {State.READY, State.CONSENSUS, State.ADVANCE},
        State.CONSENSUS: {State.CONSENSUS, State.READY, State.ADVANCE},
        State.ADVANCE: {State.ADVANCE, State.READY, State.CONSENSUS, State.NEW_ITERATION},
        State.NEW_ITERATION: {State.TRAINING},
        State.TRAINING: {State.READY, State.CONSENSUS, State.ADVANCE},
    }
)


@dataclass(frozen=True, slots=True)
class BegunIteration:
    """An iteration that begins: its members, how many passed without this rank, and whether this rank won it."""

    iteration: int
    members: tuple[int, ...]
    missed: int
    is_winner: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a restarted rank finds: the last iteration of its predecessor, and the present one."""

    last: int
    iteration: int

    @property
    def has_moved(self) -> bool:
        """Whether the others advanced while the rank was away."""
        return self.iteration > self.last


class IterationMachine:
    """One incarnation of one rank.

    Two threads may run its steps, the program's and the one that sends heartbeats, as long as they take turns.
    """

    def __init__(self, me: RankIdentity, rules: Rules, timing: LivenessTiming) -> None:
        if not 0 <= me.rank < rules.world:
            raise UsageError(f"rank {me.rank} is not between 0 and {rules.world - 1} (world is {rules.world})")
        self.me = me
        self.rules = rules
        self.timing = timing
        self.keys = Keys(me.name)
        self.observer = RankObserver(me, self.keys, timing)
        self.state = State.READY
        self.changes: deque[StateChange] = deque(maxlen=MAX_STATE_CHANGES)
        """The last changes of state, the oldest first."""
        self.change_count = 0
        """How many there were."""
        self._iteration_version: int | None = None
        """The store's version of the record when it advanced to the present iteration, if this rank saw that."""
        self.iteration = NONE_YET
        self.record: Record | None = None
        self.resumed: Resumed | None = None
        self.fence = 0
        self.hold: Hold | None = None
        self.until: int | None = None
        """From this iteration on `next` returns to non-members, too: the run is over, and the members may be gone."""
        self.error: Exception | None = None
        self.has_left = False
        self._entry: Entry | None = None
        self._arrival: Entry | None = None
        self._counted: tuple[int, int] | None = None
        """The iteration at which this rank counted its arrival last, and the arrival count that it got."""
        self._arrived = self.keys.arrived(me.rank, me.incarnation)
        self._alive = self.keys.alive(me.rank, me.incarnation)
        self._nonces = 0
        self._won = NONE_YET
        self._waited_in: Record | None = None
        """The record for whose successor this rank has waited: it has waited long enough to observe the others."""
        self._is_outcome_unknown = False
        self._before: Registration | None = None

    # What a program calls

    def register(self, now_ns: Ns, timeout_s: float) -> Steps[None]:
        """Register for the rank, once per incarnation."""
        yield from self._guarded(self._register(self._begin_call("register", now_ns, timeout_s)))

    def next(self, now_ns: Ns, timeout_s: float, finished: int = NONE_YET) -> Steps[BegunIteration]:
        """Finish the last iteration that was returned, if there was one, and wait for the next.

        `finished` is an iteration that this rank has finished otherwise: its predecessor may have run it.
        """
        call = self._begin_call("next", now_ns, timeout_s)
        yield from self._guarded(self._register(call))
        if finished > self.iteration:
            yield from self._guarded(self._continue_after(call, finished))
        return (yield from self._guarded(self._next(call)))

    def arrive(self, now_ns: Ns, timeout_s: float) -> Steps[None]:
        """Finish the last iteration that was returned, and do not wait for the others."""
        call = self._begin_call("arrive", now_ns, timeout_s)
        yield from self._guarded(self._register(call))
        yield from self._guarded(self._arrive(call, self.iteration))

    def leave(self, now_ns: Ns, timeout_s: float) -> Steps[None]:
        """Leave, so that no rank waits for this incarnation. It cannot return."""
        call = self._begin_call("leave", now_ns, timeout_s)
        self.has_left = True
        while self.fence and self.record is not None and not self.record.roster[self.me.rank].gone:
            outcome = yield from self._write(call, self.record.with_departure(self.me.rank, self._nonce()))
            if isinstance(outcome, StoreUnknown):
                yield from self._read(call)
        for key in (self._alive, self._arrived):
            yield Delete(key)

    def observe(self, now_ns: Ns, timeout_s: float) -> Steps[RankObservation]:
        """Read the record, and observe all ranks. Needs no registration."""
        call = self._begin_call("observe", now_ns, timeout_s)
        yield from self._guarded(self._read(call))
        if self.record is None:
            return RankObservation(frozenset(), frozenset())
        return (yield from self._guarded(self.observer.observe(call, self.record)))

    def send_heartbeats(self) -> Steps[None]:
        """Send heartbeats periodically, and observe the others. Ends when this incarnation may not continue."""
        yield from self._guarded(self._send_heartbeats())

    def _send_heartbeats(self) -> Steps[None]:
        beat = 0
        while self.error is None and not self.has_left:
            beat += 1
            value = f"{self.me.incarnation} {beat}".encode()
            try:
                reply = yield Heartbeat(self._alive, value, self.timing.inactive_after_s)
                is_sent = not isinstance(reply.outcome, StoreUnknown | StoreUnreachable)
                if is_sent and self.fence and self.error is None and not self.has_left:
                    yield from self.observe(reply.now_ns, self.timing.heartbeat_s)
            except StoreWentBack:
                raise
            except StoreError:
                # Such as a full disk, or a server that is read-only for a while: the next heartbeat may succeed.
                is_sent = False
            yield Pause(self.timing.heartbeat_s if is_sent else self.timing.heartbeat_s / 5)

    def is_dead(self, rank: int) -> bool:
        """Whether a rank is dead, by the observations so far."""
        registration = None if self.record is None else self.record.roster.get(rank)
        if registration is None:
            return False
        return registration.gone or self.observer.liveness.is_dead(registration.incarnation)

    # Registering

    def _register(self, call: ProgramCall) -> Steps[None]:
        """The newest incarnation replaces the registered one."""
        if self.fence:
            return
        yield from self._send_first_heartbeat(call)
        yield from self._read(call)
        while True:
            base = self.record or Record(self.rules)
            self._check_rules(base)
            registration = base.roster.get(self.me.rank)
            if registration is not None and registration.incarnation == self.me.incarnation:
                break
            yield from self._try_register(call, base, registration)
        self.fence = registration.fence
        if self._before is not None:
            self.resumed = Resumed(registration.last, base.iteration)
            # The keys of the predecessor do not count any more.
            for key in (self.keys.alive, self.keys.arrived):
                yield Delete(key(self.me.rank, self._before.incarnation))

    def _try_register(self, call: ProgramCall, base: Record, before: Registration | None) -> Steps[None]:
        """Try to register, but only once. After a try with an unknown outcome, another incarnation may be a successor
        of this one, and a superseded incarnation does not register again."""
        if self._is_outcome_unknown and before is not None and before != self._before:
            raise Superseded(self.me.rank, self.me.incarnation, before.incarnation)
        was_unknown = self._is_outcome_unknown
        self._is_outcome_unknown = True
        self._before = before
        outcome = yield from self._write(call, base.with_registration(self.me.rank, self.me.incarnation, self._nonce()))
        if isinstance(outcome, StoreUnknown):
            yield from self._read(call)
        else:
            self._is_outcome_unknown = was_unknown

    def _check_rules(self, record: Record) -> None:
        if record.rules != self.rules:
            raise UsageError(
                f"rank {self.me.rank} has {_rules(self.rules)}, and the others have {_rules(record.rules)}; "
                "use the same for all, or start a new history with another name or prefix"
            )

    def _send_first_heartbeat(self, call: ProgramCall) -> Steps[None]:
        """The first heartbeat precedes the registration: no rank sees a registration without one."""
        while True:
            reply = yield Heartbeat(self._alive, f"{self.me.incarnation} 0".encode(), self.timing.inactive_after_s)
            call.now_ns = reply.now_ns
            if not isinstance(reply.outcome, StoreUnknown | StoreUnreachable):
                return
            yield from call.wait_for_store(reply)

    # From one iteration to the next

    def _next(self, call: ProgramCall) -> Steps[BegunIteration]:
        # An arrival of an earlier call was perhaps early then: others may have arrived since, without looking.
        has_arrived = self.record is not None and self._has_arrived_at(self.record.iteration)
        self._waited_in = self.record if has_arrived else None
        while True:
            if self.error is not None:  # the heartbeat thread has found that this incarnation may not continue
                raise self.error
            record = self.record
            assert record is not None, "registered without a record"
            if record.iteration > self.iteration:
                self._move_to(State.ADVANCE)
                is_over = self.until is not None and record.iteration >= self.until
                if self.me.rank in record.members or is_over:
                    return self._begun(record)
            if self._won != self.iteration:
                yield from self._arrive(call, record.iteration)
            if self.record is record:  # else the heartbeat thread has read a newer one
                yield from self._observe_and_decide(call, record)

    def _continue_after(self, call: ProgramCall, finished: int) -> Steps[None]:
        """Continue after `finished` as if `next` had returned it here."""
        yield from self._read(call)
        agreed = NONE_YET if self.record is None else self.record.iteration
        if finished > agreed:
            raise UsageError(
                f"rank {self.me.rank} has finished iteration {finished}, but the ranks have only agreed on "
                f"{agreed} so far: its state belongs to another history (another store, prefix or name)"
            )
        self.iteration = finished

    def _begun(self, record: Record) -> BegunIteration:
        missed = 0 if self.iteration == NONE_YET else record.iteration - self.iteration - 1
        self.iteration = record.iteration
        self._move_to(State.NEW_ITERATION)
        self.hold = None
        self._move_to(State.TRAINING)
        return BegunIteration(record.iteration, tuple(record.members), missed, self._won == record.iteration)

    def _arrive(self, call: ProgramCall, iteration: int) -> Steps[None]:
        """Write to the store that this incarnation has finished `iteration`, or is not a member of it."""
        while not self._has_arrived_at(iteration):
            write = CompareAndSet(self._arrived, self._arrival, b"%d" % iteration, lasting=False)
            outcome = yield from call.execute(write)
            match outcome:
                case Won(entry):
                    self._arrival = entry
                case Lost(present):
                    self._arrival = present  # only this incarnation writes it: an earlier try succeeded after all
                case _:
                    self._arrival = yield from call.get(self._arrived)
        yield from self._count_arrival(call, iteration)
        self._move_to(State.READY)

    def _count_arrival(self, call: ProgramCall, iteration: int) -> Steps[None]:
        """Increment the counter of arrivals, once per iteration. With an unknown outcome, it is tried again later."""
        if not self.me.has_counters or (self._counted is not None and self._counted[0] >= iteration):
            return
        outcome = yield from call.execute(Increment(self.keys.arrivals(iteration)))
        if isinstance(outcome, int):
            self._counted = (iteration, outcome)

    def _has_arrived_at(self, iteration: int) -> bool:
        return finished_iteration(self._arrival) >= iteration

    def _observe_and_decide(self, call: ProgramCall, record: Record) -> Steps[None]:
        """Observe; then try to advance, or write the arrival, or wait for another rank to advance."""
        is_written = self._has_arrived_at(record.iteration)
        if is_written and not call.is_over and (hold := self._hold_without_observing(record)) is not None:
            self.hold = hold
            yield from self._wait(call, record)
            return
        if not is_written and (yield from self._are_others_missing(call, record)):
            yield from self._arrive(call, record.iteration)
            return
        observation = yield from self.observer.observe(call, record)
        if self.record is not record:
            return
        decision = self._decide(record, observation)
        if isinstance(decision, Advance):
            self._move_to(State.CONSENSUS)
            self.hold = None
            yield from self._advance(call, record, decision)
            if self._won > record.iteration:
                yield from self._clean_up(record, observation)
            return
        self.hold = decision
        if not is_written:
            yield from self._arrive(call, record.iteration)
        elif self.me.rank not in observation.arrived:
            self._arrival = None  # it was removed by somebody: write it again
        elif call.is_over:
            raise self._timeout_error(call, decision)
        else:
            yield from self._wait(call, record)

    def _clean_up(self, record: Record, observation: RankObservation) -> Steps[None]:
        """Remove what is not needed after this record. Late ranks may still count their arrival at it: its counter is
        removed with the next one."""
        for key, orphan in observation.orphans:
            yield Delete(key, orphan)
        if self.me.has_counters and record.iteration > NONE_YET:
            yield Delete(self.keys.arrivals(record.iteration - 1))

    def _wait(self, call: ProgramCall, record: Record) -> Steps[None]:
        """Wait for a newer record than this, until it is time to observe the others again."""
        self._waited_in = record
        wait_s = min(self.timing.observe_interval_s, call.left_s)
        yield from self._read(call, WaitFor(self.keys.record, version_of(self._entry), wait_s))

    def _hold_without_observing(self, record: Record) -> Hold | None:
        """Why the iteration cannot advance now, where that is certain without an observation."""
        is_early = self._waited_in is not record and self._is_early(record)
        return _hold_at_best(record) or (Hold((), "others have not arrived") if is_early else None)

    def _is_early(self, record: Record) -> bool:
        """Whether others certainly had not arrived when this rank wrote and counted its arrival. The last one gets a
        higher count than that, and observes."""
        count = self._arrival_count(record.iteration)
        return count is not None and count < self._needed(record)

    def _arrival_count(self, iteration: int) -> int | None:
        """At least so many arrivals preceded this rank's own, which is included; None if it is not known."""
        if self._counted is not None and self._counted[0] == iteration:
            return self._counted[1]
        if not self.me.counts_writes or self._iteration_version is None or self._arrival is None:
            return None
        return self._arrival.version - self._iteration_version

    def _are_others_missing(self, call: ProgramCall, record: Record) -> Steps[bool]:
        """Whether it is certain, before this rank has arrived, that others have not arrived either. A counter, where
        there is one, shows it in one request."""
        if _hold_at_best(record) is not None:
            return True
        if not self.me.has_counters:
            return False
        outcome = yield from call.execute(Increment(self.keys.arrivals(record.iteration), by=0))
        return isinstance(outcome, int) and outcome + 1 < self._needed(record)

    def _needed(self, record: Record) -> int:
        """The iteration cannot advance with fewer arrivals than this."""
        waited_for = sum(not self.is_dead(rank) for rank in record.present)
        return max(waited_for, record.rules.min_ranks)

    def _decide(self, record: Record, observation: RankObservation) -> Advance | Hold:
        return decide(record, observation.arrived | {self.me.rank}, observation.dead)

    def _advance(self, call: ProgramCall, record: Record, decision: Advance) -> Steps[None]:
        wanted = record.with_next_iteration(decision.ranks, self.me.rank, self._nonce())
        outcome = yield from self._write(call, wanted)
        if isinstance(outcome, StoreUnknown):
            yield from self._read(call)
        if isinstance(outcome, Won) or (self.record is not None and self.record.nonce == wanted.nonce):
            self._won = wanted.iteration

    def _timeout_error(self, call: ProgramCall, hold: Hold) -> DeadlineExceeded:
        after = "the first iteration" if self.iteration == NONE_YET else f"the one after iteration {self.iteration}"
        text = f"rank {self.me.rank} waited {call.waited_ms / 1000:.1f} s for {after}: {hold.reason}"
        return DeadlineExceeded(call.operation, hold.missing, call.waited_ms, text)

    # The record

    def _read(self, call: ProgramCall, operation: Get | WaitFor | None = None) -> Steps[None]:
        """Read the record."""
        known = self.record
        outcome = yield from call.execute(operation or Get(self.keys.record))
        assert outcome is None or isinstance(outcome, Entry), "the outcome of a read is not an entry"
        self._learn(outcome, known)

    def _write(self, call: ProgramCall, wanted: Record) -> Steps[StoreOutcome]:
        """Try to replace the record. Afterwards the present record is known, unless the outcome is unknown."""
        known = self.record
        outcome = yield from call.execute(CompareAndSet(self.keys.record, self._entry, encode(wanted)))
        match outcome:
            case Won(entry):
                self._learn(entry, known)
            case Lost(present):
                self._learn(present, known)
        return outcome

    def _learn(self, entry: Entry | None, known: Record | None) -> None:
        """Accept a record; `known` is the last one before the request was sent. It must not be older than that."""
        record = None if entry is None else decode(self.me.store, entry.value)
        if known is not None:
            self._check_order(record, known)
        if record is None or (self.record is not None and record.version <= self.record.version):
            return
        if self.fence:
            self._check_registration(record)
        self._note_version(record, entry)
        self.record, self._entry = record, entry

    def _note_version(self, record: Record, entry: Entry | None) -> None:
        """Remember the version at which the iteration began. A change of the record later in the iteration has a higher
        version, which arrivals before it do not count up to."""
        known = self.record
        if known is not None and record.iteration == known.iteration:
            return
        is_seen = known is not None and record.version == known.version + 1
        self._iteration_version = version_of(entry) if is_seen else None

    def _check_order(self, record: Record | None, known: Record) -> None:
        if record is None:
            raise StoreWentBack(self.me.store, f"the record is gone; its version was {known.version}")
        if not record.follows(known):
            raise StoreWentBack(
                self.me.store,
                f"the record has version {record.version} and iteration {record.iteration}, and is not a successor of "
                f"the one with version {known.version} and iteration {known.iteration} that was there before",
            )

    def _check_registration(self, record: Record) -> None:
        registration = record.roster.get(self.me.rank)
        if registration is None or registration.fence < self.fence:
            raise StoreWentBack(self.me.store, f"rank {self.me.rank} has registered, but not in this record")
        if registration.incarnation != self.me.incarnation:
            raise Superseded(self.me.rank, self.me.incarnation, registration.incarnation)

    def _move_to(self, state: State) -> None:
        is_new = state is not self.state
        self.state = TRANSITIONS.move(self.state, state)
        if is_new:
            self.changes.append(StateChange(state, self.iteration))
            self.change_count += 1

    def _nonce(self) -> str:
        self._nonces += 1
        return f"{self.me.incarnation}:{self._nonces}"

    def _begin_call(self, operation: str, now_ns: Ns, timeout_s: float) -> ProgramCall:
        if self.error is not None:
            raise self.error
        if self.has_left:
            raise UsageError("this rank has left; make a new GlobalIteration to return")
        return ProgramCall.of(operation, now_ns, timeout_s)

    def _guarded(self, steps: Steps[Value]) -> Steps[Value]:
        """An error that ends this incarnation ends it for good: every later call raises it again."""
        try:
            return (yield from steps)
        except (Superseded, StoreWentBack) as error:
            self.error = error
            raise


def _hold_at_best(record: Record) -> Hold | None:
    """Why the iteration could not advance even if all registered ranks had arrived: there are too few of them."""
    decision = decide(record, record.roster, ())
    return decision if isinstance(decision, Hold) else None


def _rules(rules: Rules) -> str:
    return f"world={rules.world}, min_ranks={rules.min_ranks}, quorum={rules.quorum!r}"


IterationMachineOf = Callable[[RankIdentity, Rules, LivenessTiming], IterationMachine]
