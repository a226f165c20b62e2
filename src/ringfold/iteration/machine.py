"""The protocol of one rank: every decision, as steps that yield store operations. Pure.

The five states, and what a rank does in each:

    TRAINING        the iteration was handed to the program; nothing is asked of the store
    READY           its arrival is in the store; it waits for the others, or for a newer record
    CONSENSUS       all that are waited for have arrived: it tries the compare-and-set
    ADVANCE         there is a newer record, its own or somebody else's; it finds its place in it
    NEW_ITERATION   it is a member of that iteration; the number goes to the program

*One write decides.* The record goes from n to n + 1 in one compare-and-set, on condition of the record that the
decision was made on. So of all that try one wins, and whatever changed meanwhile (a rank registered, or left) lets it
fail and be decided again. Nothing is left to be finished by a winner: it may die at once.

*Unknown outcomes.* Each write of the record carries a nonce of its own. Who does not know what became of its write
reads again: its nonce says that it was made; any other record is judged as if somebody else had made it. A write that
arrives late finds another version, and fails.

*Arrivals.* Each incarnation has one key for them, which holds the number of the iteration it has finished: what counts
is a number that is not lower than n, in the key of the incarnation that has the rank's seat. So nobody ever removes the
arrival of somebody alive, a number from the past counts for nothing, and there is nothing to collect per iteration. The
key is written by compare-and-set, too, so that a late write cannot replace a newer one.

*Waiting.* Who has finished writes its arrival, and then looks, so that of several last ones somebody sees all. Who made
the present iteration was the last to finish the one before, and likely is again: it looks first, and if all others have
arrived it advances without an arrival of its own. Who has to wait waits for the record to change, and looks again at a
slow pace: for those who died, and for a last one that died before it tried.

*Members and newcomers.* A rank that is a member of the record's iteration, and has not had it yet, does it. Everybody
else arrives at it at once, without doing it, and is a member of the next. So who restarts while the others still wait
does the iteration again; who was away for longer catches up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ringfold.errors import DeadlineExceeded, StoreUnknown, StoreUnreachable, StoreWentBack, Superseded, UsageError
from ringfold.iteration.liveness import Look, Lookout, Timing, finished_by
from ringfold.iteration.operations import Beat, Call, CompareAndSet, Delete, Get, Ns, Outcome, Pause, Steps, WaitFor
from ringfold.iteration.record import NONE_YET, Advance, Hold, Keys, Record, Rules, Seat, Self, decide, decode, encode
from ringfold.store.base import Entry, Lost, Won, version_of

Value = TypeVar("Value")


class State(StrEnum):
    """Where a rank stands between two iterations."""

    TRAINING = "TRAINING"
    READY = "READY"
    CONSENSUS = "CONSENSUS"
    ADVANCE = "ADVANCE"
    NEW_ITERATION = "NEW_ITERATION"


@dataclass(frozen=True, slots=True)
class Begun:
    """An iteration that was handed out: who is in it, how many passed by without this rank, and whether it won it."""

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
        """Whether the others went on while the rank was away."""
        return self.iteration > self.last


class Machine:
    """One incarnation of one rank.

    Its steps may be taken from two threads, the program's and the one that shows life, as long as they take turns.
    """

    def __init__(self, me: Self, rules: Rules, timing: Timing) -> None:
        if not 0 <= me.rank < rules.world:
            raise UsageError(f"rank {me.rank} is not between 0 and {rules.world - 1} (world is {rules.world})")
        self.me, self.rules, self.timing = me, rules, timing
        self.keys = Keys(me.name)
        self.lookout = Lookout(me, self.keys, timing)
        self.state = State.READY
        self.iteration = NONE_YET
        self.record: Record | None = None
        self.resumed: Resumed | None = None
        self.fence = 0
        self.hold: Hold | None = None
        self.until: int | None = None
        """From here on an iteration is the end, for which nobody has to be a member: the members may be gone."""
        self.error: Exception | None = None
        self.has_left = False
        self._entry: Entry | None = None
        self._arrival: Entry | None = None
        self._arrived = self.keys.arrived(me.rank, me.incarnation)
        self._alive = self.keys.alive(me.rank, me.incarnation)
        self._nonces = 0
        self._won = NONE_YET
        self._is_open = False
        self._before: Seat | None = None

    # What a program calls

    def register(self, now_ns: Ns, timeout_s: float) -> Steps[None]:
        """Take the rank's seat, once in a life."""
        yield from self._guarded(self._register(self._called("register", now_ns, timeout_s)))

    def next(self, now_ns: Ns, timeout_s: float, finished: int = NONE_YET) -> Steps[Begun]:
        """Finish the iteration that was handed out last, if there was one, and wait for the next.

        `finished` is what this rank has finished by other means: its predecessor may have been handed it.
        """
        call = self._called("next", now_ns, timeout_s)
        yield from self._guarded(self._register(call))
        if finished > self.iteration:
            yield from self._guarded(self._take_over(call, finished))
        return (yield from self._guarded(self._next(call)))

    def arrive(self, now_ns: Ns, timeout_s: float) -> Steps[None]:
        """Finish the iteration that was handed out last, and do not wait for the others."""
        call = self._called("arrive", now_ns, timeout_s)
        yield from self._guarded(self._register(call))
        yield from self._guarded(self._arrive(call, self.iteration))

    def leave(self, now_ns: Ns, timeout_s: float) -> Steps[None]:
        """Say that this incarnation goes, so that nobody waits for it. It cannot come back."""
        call = self._called("leave", now_ns, timeout_s)
        self.has_left = True
        while self.fence and self.record is not None and not self.record.roster[self.me.rank].gone:
            outcome = yield from self._write(call, self.record.left(self.me.rank, self._nonce()))
            if isinstance(outcome, StoreUnknown):
                yield from self._read(call)
        for key in (self._alive, self._arrived):
            yield Delete(key)

    def observe(self, now_ns: Ns, timeout_s: float) -> Steps[Look]:
        """Read the record, and look at everybody. Needs no registration."""
        call = self._called("observe", now_ns, timeout_s)
        yield from self._guarded(self._read(call))
        if self.record is None:
            return Look(frozenset(), frozenset())
        return (yield from self._guarded(self.lookout.look_at_all(call, self.record)))

    def pulse(self) -> Steps[None]:
        """Show life again and again, and look at the others meanwhile. It ends when this incarnation may not go on."""
        yield from self._guarded(self._pulse())

    def _pulse(self) -> Steps[None]:
        beat = 0
        while self.error is None and not self.has_left:
            beat += 1
            answer = yield Beat(self._alive, f"{self.me.incarnation} {beat}".encode(), self.timing.inactive_after_s)
            is_heard = not isinstance(answer.outcome, StoreUnknown | StoreUnreachable)
            if is_heard and self.fence and self.error is None and not self.has_left:
                try:
                    yield from self.observe(answer.now_ns, self.timing.heartbeat_s)
                except StoreUnreachable:
                    is_heard = False
            yield Pause(self.timing.heartbeat_s if is_heard else self.timing.heartbeat_s / 5)

    def is_dead(self, rank: int) -> bool:
        """What was seen of a rank so far."""
        seat = None if self.record is None else self.record.roster.get(rank)
        return seat is not None and (seat.gone or self.lookout.watch.is_dead(seat.incarnation))

    # Registering

    def _register(self, call: Call) -> Steps[None]:
        """Whoever registers takes the seat: the newest incarnation speaks."""
        if self.fence:
            return
        yield from self._beat_once(call)
        yield from self._read(call)
        while True:
            base = self.record or Record(self.rules)
            self._check_rules(base)
            seat = base.roster.get(self.me.rank)
            if seat is not None and seat.incarnation == self.me.incarnation:
                break
            yield from self._try_seat(call, base, seat)
        self.fence = seat.fence
        if self._before is not None:
            self.resumed = Resumed(seat.last, base.iteration)
            # What is left of the predecessor counts for nothing any more.
            for key in (self.keys.alive, self.keys.arrived):
                yield Delete(key(self.me.rank, self._before.incarnation))

    def _try_seat(self, call: Call, base: Record, before: Seat | None) -> Steps[None]:
        """Try to register. But once only: after a try of which the outcome is open, somebody new in the seat may be a
        successor, and a superseded incarnation does not register again."""
        if self._is_open and before is not None and before != self._before:
            raise Superseded(self.me.rank, self.me.incarnation, before.incarnation)
        was_open, self._is_open, self._before = self._is_open, True, before
        outcome = yield from self._write(call, base.seated(self.me.rank, self.me.incarnation, self._nonce()))
        if isinstance(outcome, StoreUnknown):
            yield from self._read(call)
        else:
            self._is_open = was_open

    def _check_rules(self, record: Record) -> None:
        if record.rules != self.rules:
            raise UsageError(
                f"rank {self.me.rank} has {_rules(self.rules)}, and the others have {_rules(record.rules)}; "
                "give all the same, or begin a new history with another name or prefix"
            )

    def _beat_once(self, call: Call) -> Steps[None]:
        """First show life, then register: nobody sees a seat without."""
        while True:
            answer = yield Beat(self._alive, f"{self.me.incarnation} 0".encode(), self.timing.inactive_after_s)
            call.now_ns = answer.now_ns
            if not isinstance(answer.outcome, StoreUnknown | StoreUnreachable):
                return
            yield from call.wait_for_store(answer)

    # From one iteration to the next

    def _next(self, call: Call) -> Steps[Begun]:
        while True:
            if self.error is not None:  # the pulse has found that this incarnation may not go on
                raise self.error
            record = self.record
            assert record is not None, "registered without a record"
            if record.iteration > self.iteration:
                self.state = State.ADVANCE
                is_over = self.until is not None and record.iteration >= self.until
                if self.me.rank in record.members or is_over:
                    return self._begun(record)
            if self._won != self.iteration:
                yield from self._arrive(call, record.iteration)
            if self.record is record:  # else the pulse has read a newer one
                yield from self._turn(call, record)

    def _take_over(self, call: Call, finished: int) -> Steps[None]:
        """Go on behind `finished` as if it had been handed out here."""
        yield from self._read(call)
        agreed = NONE_YET if self.record is None else self.record.iteration
        if finished > agreed:
            raise UsageError(
                f"rank {self.me.rank} says that it has finished iteration {finished}, and the ranks have agreed on "
                f"{agreed} so far: its state belongs to another history (another store, prefix or name)"
            )
        self.iteration = finished

    def _begun(self, record: Record) -> Begun:
        self.state = State.NEW_ITERATION
        missed = 0 if self.iteration == NONE_YET else record.iteration - self.iteration - 1
        self.iteration, self.hold = record.iteration, None
        self.state = State.TRAINING
        return Begun(record.iteration, tuple(record.members), missed, self._won == record.iteration)

    def _arrive(self, call: Call, iteration: int) -> Steps[None]:
        """Put into the store that this incarnation has finished `iteration`, or has no part in it."""
        while not self._has_arrived_at(iteration):
            said = CompareAndSet(self._arrived, self._arrival, b"%d" % iteration, lasting=False)
            outcome = yield from call.ask(said)
            match outcome:
                case Won(entry):
                    self._arrival = entry
                case Lost(present):
                    self._arrival = present  # nobody else writes it: an earlier try was made after all
                case _:
                    self._arrival = yield from call.get(self._arrived)
        self.state = State.READY

    def _has_arrived_at(self, iteration: int) -> bool:
        return finished_by(self._arrival) >= iteration

    def _turn(self, call: Call, record: Record) -> Steps[None]:
        """Look; then try to advance, or say that one has arrived, or wait for somebody else to advance."""
        entry, is_written = self._entry, self._has_arrived_at(record.iteration)
        look = yield from self.lookout.look(call, record)
        if self.record is not record:
            return
        decision = self._decide(record, look)
        if isinstance(decision, Advance):
            self.state, self.hold = State.CONSENSUS, None
            yield from self._advance(call, record, decision)
            if self._won > record.iteration:
                for key, stray in look.strays:
                    yield Delete(key, stray)
            return
        self.hold = decision
        if not is_written:
            yield from self._arrive(call, record.iteration)
        elif self.me.rank not in look.arrived:
            self._arrival = None  # it was removed, by whomsoever: write it again
        elif call.is_over:
            raise self._overdue(call, decision)
        else:
            patience_s = min(self.timing.look_s, call.left_s)
            yield from self._read(call, WaitFor(self.keys.record, version_of(entry), patience_s))

    def _decide(self, record: Record, look: Look) -> Advance | Hold:
        return decide(record, look.arrived | {self.me.rank}, look.dead)

    def _advance(self, call: Call, record: Record, decision: Advance) -> Steps[None]:
        wanted = record.advanced(decision.ranks, self.me.rank, self._nonce())
        outcome = yield from self._write(call, wanted)
        if isinstance(outcome, StoreUnknown):
            yield from self._read(call)
        if isinstance(outcome, Won) or (self.record is not None and self.record.nonce == wanted.nonce):
            self._won = wanted.iteration

    def _overdue(self, call: Call, hold: Hold) -> DeadlineExceeded:
        after = "the first iteration" if self.iteration == NONE_YET else f"the one after iteration {self.iteration}"
        text = f"rank {self.me.rank} waited {call.waited_ms / 1000:.1f} s for {after}: {hold.reason}"
        return DeadlineExceeded(call.operation, hold.missing, call.waited_ms, text)

    # The record

    def _read(self, call: Call, operation: Get | WaitFor | None = None) -> Steps[None]:
        """Learn the record as it is now."""
        known = self.record
        outcome = yield from call.ask(operation or Get(self.keys.record))
        assert outcome is None or isinstance(outcome, Entry), "a read was answered with something else"
        self._learn(outcome, known)

    def _write(self, call: Call, wanted: Record) -> Steps[Outcome]:
        """Try to replace the record. Afterwards it is known how it stands, unless the outcome is not."""
        known = self.record
        outcome = yield from call.ask(CompareAndSet(self.keys.record, self._entry, encode(wanted)))
        match outcome:
            case Won(entry):
                self._learn(entry, known)
            case Lost(present):
                self._learn(present, known)
        return outcome

    def _learn(self, entry: Entry | None, known: Record | None) -> None:
        """Take note of a record; `known` is what was known before it was asked for. It must not be older than that."""
        record = None if entry is None else decode(self.me.store, entry.value)
        if known is not None:
            self._check_order(record, known)
        if record is None or (self.record is not None and record.version <= self.record.version):
            return
        if self.fence:
            self._check_seat(record)
        self.record, self._entry = record, entry

    def _check_order(self, record: Record | None, known: Record) -> None:
        if record is None:
            raise StoreWentBack(self.me.store, f"the record is gone; its version was {known.version}")
        if not record.follows(known):
            raise StoreWentBack(
                self.me.store,
                f"the record has version {record.version} and iteration {record.iteration}, and does not come out of "
                f"the one with version {known.version} and iteration {known.iteration} that was there before",
            )

    def _check_seat(self, record: Record) -> None:
        seat = record.roster.get(self.me.rank)
        if seat is None or seat.fence < self.fence:
            raise StoreWentBack(self.me.store, f"the record does not know that rank {self.me.rank} registered")
        if seat.incarnation != self.me.incarnation:
            raise Superseded(self.me.rank, self.me.incarnation, seat.incarnation)

    def _nonce(self) -> str:
        self._nonces += 1
        return f"{self.me.incarnation}:{self._nonces}"

    def _called(self, operation: str, now_ns: Ns, timeout_s: float) -> Call:
        if self.error is not None:
            raise self.error
        if self.has_left:
            raise UsageError("this rank has left; make a new GlobalIteration to come back")
        return Call.of(operation, now_ns, timeout_s)

    def _guarded(self, steps: Steps[Value]) -> Steps[Value]:
        """What ends this incarnation ends it for good: whatever is called later raises the same."""
        try:
            return (yield from steps)
        except (Superseded, StoreWentBack) as error:
            self.error = error
            raise


def _rules(rules: Rules) -> str:
    return f"world={rules.world}, min_ranks={rules.min_ranks}, quorum={rules.quorum!r}"


MachineOf = Callable[[Self, Rules, Timing], Machine]
