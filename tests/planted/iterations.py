"""Bugs on purpose in the global iteration: each is one rule of the machine, done wrong."""

from msgspec.structs import replace

from planted import Bug
from planted.classic_iteration import naive
from ringfold.errors import StoreUnknown, Superseded
from ringfold.iteration import liveness
from ringfold.iteration.liveness import LivenessTiming, RankObservation, RankObserver
from ringfold.iteration.machine import BegunIteration, IterationMachine
from ringfold.iteration.operations import (
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
from ringfold.iteration.record import Advance, Hold, RankIdentity, Record, Registration, Rules, decode, encode
from ringfold.store.base import Entry, Generation
from ringfold.store.client import StoreClient
from ringfold.testing.iterating import PREFIX, TIMING, Agreeing, AgreeingOf, RankProcess, Simulated
from ringfold.testing.iterating_schedules import draw


class SetsTheRecord(IterationMachine):
    """Writes the next record without a condition, and takes that for winning."""

    def _advance(self, call: ProgramCall, record: Record, decision: Advance) -> Steps[None]:
        wanted = record.with_next_iteration(decision.ranks, self.me.rank, self._nonce())
        yield from call.execute(Heartbeat(self.keys.record, encode(wanted), 1e6))
        self._won = wanted.iteration
        yield from self._read(call)


class TakesUnknownForWon(IterationMachine):
    """Goes on with what it wanted to write although it is unknown whether it was written."""

    def _write(self, call: ProgramCall, wanted: Record) -> Steps[StoreOutcome]:
        outcome = yield from super()._write(call, wanted)
        if isinstance(outcome, StoreUnknown):
            self.record = wanted
        return outcome


class NeverLooksAgain(IterationMachine):
    """Waits for a newer record, and for nothing else."""

    def _read(self, call: ProgramCall, operation: Get | WaitFor | None = None) -> Steps[None]:
        if isinstance(operation, WaitFor):
            operation = WaitFor(operation.key, operation.seen, 1e5)
        yield from super()._read(call, operation)

    def _send_heartbeats(self) -> Steps[None]:
        while True:  # nothing is read in the background either
            yield Heartbeat(self._alive, b"", self.timing.inactive_after_s)
            yield Pause(self.timing.heartbeat_s)


class LeavesItToOthers(IterationMachine):
    """A rank that has arrived waits for a newer record, and never looks whether all have arrived."""

    def _is_early(self, record: Record) -> bool:
        return True

    def _wait(self, call: ProgramCall, record: Record) -> Steps[None]:
        if call.is_over:
            raise self._timeout_error(call, Hold((), "it leaves it to others"))
        yield from super()._wait(call, record)
        self._waited_in = None


class CountsFirst(IterationMachine):
    """Counts its arrival before it has written it: who gets the highest number cannot see all arrivals yet."""

    def _arrive(self, call: ProgramCall, iteration: int) -> Steps[None]:
        yield from self._count_arrival(call, iteration)
        yield from super()._arrive(call, iteration)


class CountsNobodyElse(IterationMachine):
    """Reads the counter of arrivals, and does not increment it."""

    def _count_arrival(self, call: ProgramCall, iteration: int) -> Steps[None]:
        if self.me.has_counters:
            outcome = yield from call.execute(Increment(self.keys.arrivals(iteration), by=0))
            self._counted = (iteration, outcome if isinstance(outcome, int) else 0)


class ComesBack(IterationMachine):
    """Registers again when another process has registered for its rank."""

    def _check_registration(self, record: Record) -> None:
        try:
            super()._check_registration(record)
        except Superseded:
            self.fence = 0

    def _next(self, call: ProgramCall) -> Steps[BegunIteration]:
        while True:
            yield from self._register(call)
            if self.record is not None and self.record.roster[self.me.rank].incarnation == self.me.incarnation:
                return (yield from super()._next(call))


class DoesNotRepeat(IterationMachine):
    """Replaces its predecessor's registration, and takes the predecessor's iteration for finished."""

    def _register(self, call: ProgramCall) -> Steps[None]:
        was_registered = bool(self.fence)
        yield from super()._register(call)
        if not was_registered and self.resumed is not None and self.record is not None:
            self.iteration = self.record.iteration


class CountsTheDead(IterationMachine):
    """Counts an arrival for a rank, whichever incarnation it is of."""

    def __init__(self, me: RankIdentity, rules: Rules, timing: LivenessTiming) -> None:
        super().__init__(me, rules, timing)
        self.observer = _AnyIncarnation(me, self.keys, timing)


class _AnyIncarnation(RankObserver):
    def _evaluate(self, now_ns: Ns, record: Record, found: dict[str, Entry]) -> RankObservation:
        right = super()._evaluate(now_ns, record, found)
        ranks = {
            int(key.removeprefix(self._keys.ranks).split("/")[0])
            for key, entry in found.items()
            if key.endswith("/arrived") and self.is_arrival(record, entry)
        }
        return RankObservation(right.arrived | ranks, right.dead, ())


class ForgetsItsRules(IterationMachine):
    """Decides as if any live subset would do."""

    def _decide(self, record: Record, look: RankObservation) -> Advance | Hold:
        return super()._decide(replace(record, rules=Rules(record.rules.world)), look)


class JudgesByTheClock(IterationMachine):
    """Counts a gap between two looks in full."""

    def __init__(self, me: RankIdentity, rules: Rules, timing: LivenessTiming) -> None:
        super().__init__(me, rules, timing)
        self.observer.liveness = _Impatient(
            has_leases=me.has_leases, inactive_after_ns=round(timing.inactive_after_s * 1e9), absent_ns=10**9
        )


class _Impatient(liveness.LivenessMonitor):
    def observe(self, now_ns: Ns, incarnation: str, version: int) -> bool:
        before = self._watched.get(incarnation)
        is_dead = super().observe(now_ns, incarnation, version)
        if before is not None and before is self._watched[incarnation]:
            before.watched_ns = now_ns - before.first_ns
            return self.is_dead(incarnation)
        return is_dead


class JudgesAtOnce(IterationMachine):
    """Gives up a rank that is late, even if its heartbeats arrive."""

    def __init__(self, me: RankIdentity, rules: Rules, timing: LivenessTiming) -> None:
        super().__init__(me, rules, timing)
        self.observer.liveness = _Deaf(has_leases=False, inactive_after_ns=3 * 10**9, absent_ns=10**9)


class _Deaf(liveness.LivenessMonitor):
    def observe(self, now_ns: Ns, incarnation: str, version: int) -> bool:
        return super().observe(now_ns, incarnation, 1)


class ForgetsArrivals(IterationMachine):
    """Removes all arrivals after winning, as the classic protocol does."""

    def _advance(self, call: ProgramCall, record: Record, decision: Advance) -> Steps[None]:
        yield from super()._advance(call, record, decision)
        if self._won > record.iteration:
            for rank in decision.ranks:
                yield Delete(self.keys.arrived(rank, record.roster[rank].incarnation))

    def _observe_and_decide(self, call: ProgramCall, record: Record) -> Steps[None]:
        arrival = self._arrival
        yield from super()._observe_and_decide(call, record)
        self._arrival = self._arrival or arrival


class TrustsAnyStore(IterationMachine):
    """Goes on with whatever the store says, also when that is older than what it knows."""

    def _check_order(self, record: Record | None, known: Record) -> None:
        if record is not None and record.version < known.version:
            self.record = None

    def _check_registration(self, record: Record) -> None:
        pass


class SendsNoHeartbeat(IterationMachine):
    """Registers without having shown life, and shows it rarely."""

    def _send_first_heartbeat(self, call: ProgramCall) -> Steps[None]:
        yield from ()

    def _send_heartbeats(self) -> Steps[None]:
        while True:
            yield Pause(2.5 * self.timing.inactive_after_s)
            yield Heartbeat(self._alive, b"", self.timing.inactive_after_s)


class RegistersWithoutCondition(IterationMachine):
    """Registers by writing a fence that another process may have."""

    def _try_register(self, call: ProgramCall, base: Record, before: Registration | None) -> Steps[None]:
        wanted = base.with_registration(self.me.rank, self.me.incarnation, self._nonce())
        yield from call.execute(Heartbeat(self.keys.record, encode(wanted), 1e6))
        entry = yield from call.get(self.keys.record)
        if entry is not None:
            self.record, self._entry = decode("memory:", entry.value), entry


class _Credulous(StoreClient):
    """Holds no answer against what it knew before."""

    @property
    def generation(self) -> Generation:
        return self._driver.ensure_generation(None, self._deadline(None)) or Generation("", 0)

    def _check(self, generation: Generation | None, guard: Generation) -> None:
        pass


def _trusting(sim: Simulated, life: RankProcess) -> Agreeing:
    assert life.driver is not None
    life.client = _Credulous(life.driver, prefix=PREFIX, timeout_s=0.001, now_ns=lambda: 0, nonce="any")
    return TrustsAnyStore(sim.self_of(life), sim.schedule.rules, TIMING)


def _of(machine: type[IterationMachine]) -> AgreeingOf:
    def make(sim: Simulated, life: RankProcess) -> Agreeing:
        return machine(sim.self_of(life), sim.schedule.rules, TIMING)

    return make


def _bug(text: str, agreeing: AgreeingOf) -> Bug:
    return Bug(text, lambda seed: Simulated(draw(seed), agreeing).run())


BUGS: dict[str, Bug] = {
    "naive": _bug("the classic protocol: set, then get == me", naive),
    "no_condition": _bug("the record is written without a condition", _of(SetsTheRecord)),
    "unknown_is_won": _bug("an unknown outcome counts as a win", _of(TakesUnknownForWon)),
    "never_looks_again": _bug("a rank that waits never looks for the dead", _of(NeverLooksAgain)),
    "left_to_others": _bug("a rank that has arrived never looks whether all have", _of(LeavesItToOthers)),
    "counted_first": _bug("an arrival is counted before it is written", _of(CountsFirst)),
    "not_counted": _bug("arrivals are not counted, and the last one does not know that it is", _of(CountsNobodyElse)),
    "comes_back": _bug("a superseded incarnation registers again", _of(ComesBack)),
    "no_repeat": _bug("a restarted rank skips what its predecessor had not finished", _of(DoesNotRepeat)),
    "any_incarnation": _bug("the arrival of a dead incarnation counts", _of(CountsTheDead)),
    "no_rules": _bug("min_ranks and quorum are ignored", _of(ForgetsItsRules)),
    "by_the_clock": _bug("a clock that jumps makes others look dead", _of(JudgesByTheClock)),
    "deaf": _bug("heartbeats are ignored", _of(JudgesAtOnce)),
    "erased_arrivals": _bug("the winner removes arrivals", _of(ForgetsArrivals)),
    "any_store": _bug("a store that went back is believed", _trusting),
    "silent": _bug("a rank does not show that it is alive", _of(SendsNoHeartbeat)),
    "unfenced_seat": _bug("a registration is written without a condition", _of(RegistersWithoutCondition)),
}
