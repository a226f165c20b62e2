"""Shared state in simulated runs: what single peers go through, and that runs with syncs keep every promise."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from planted.runs import BUGS, is_stateful

from ringfold.errors import HashMismatch, RevisionViolation, StateDiverged, StateError, StateLost, UsageError
from ringfold.state.shared import MayDiffer
from ringfold.testing import (
    AllReduce,
    Looping,
    Program,
    ProgramOf,
    Self,
    Setup,
    SimPeer,
    SimRun,
    Simulation,
    SimulationFailure,
    Sleep,
    SmallState,
    Sync,
    Syncing,
    UpdateTopology,
    Weather,
    blocking,
    draw,
    looping,
)
from ringfold.testing.program import AGREE_TAG
from ringfold.testing.scenario import run_seed
from ringfold.testing.sync_checks import SyncHistory
from ringfold.wire.messages import SyncDone, SyncStrategy

SLOW = Weather(latency_us=(50, 200), jitter_us=(0, 20), bytes_per_ms=(60, 80), window_bytes=(512, 1_024))
"""A few KiB take some tens of milliseconds."""

Words = npt.NDArray[np.int64]


class Script:
    """A program for a fixed number of members: each syncs once in a round, with what a function says of its state."""

    def __init__(self, members: int, rounds: int = 1, size: int = 500) -> None:
        self.members, self.rounds, self.size = members, rounds, size
        self.ended: dict[tuple[int, int], object] = {}
        """By (place in the ring, round): the SyncInfo, or the error."""
        self.states: dict[int, SmallState] = {}
        self.prepare: Callable[[int, int, Words, SmallState], None] = lambda place, turn, words, state: None
        self.strategy: Callable[[int], SyncStrategy] = lambda place: "enforce-popular"
        self.meddle: Callable[[int, Words], tuple[float, Callable[[], object]] | None] = lambda place, words: None
        self.rollback = False
        self.shape: Callable[[int], int] = lambda place: size

    def __call__(self, me: Self) -> Program:
        while me.world < self.members:
            yield UpdateTopology(min_world=self.members)
        place = sorted(me.members).index(me.peer)
        words = np.zeros(self.shape(place), np.int64)
        state = self.states[place] = SmallState(words=words, own=MayDiffer(np.full(9, me.peer)))
        for turn in range(self.rounds):
            self.prepare(place, turn, words, state)
            meddle = self.meddle(place, words)
            try:
                self.ended[place, turn] = yield Sync(state, self.strategy(place), rollback=self.rollback, meddle=meddle)
            except (StateError, UsageError) as error:
                self.ended[place, turn] = error
            if me.world > 1:
                yield AllReduce(np.zeros(1), tag=AGREE_TAG)

    def words(self, place: int) -> Words:
        words = self.states[place].arrays["words"]
        assert isinstance(words, np.ndarray)
        return words


def run(sim: Simulation, script: Script, *, limit_ms: float = 30_000) -> list[SimPeer]:
    cluster = sim.cluster(peers=script.members, program=script)
    sim.run_until(cluster.finished, limit_ms=limit_ms)
    return cluster.peers


def begins_to_fetch(sim: Simulation, script: Script) -> list[SimPeer]:
    """Run until the first sync is planned in which a peer fetches; the peers by their place."""
    begun: list[int] = []
    sim.at_next_sync.append(lambda holders, receivers: begun.extend(receivers))
    cluster = sim.cluster(peers=script.members, program=script)
    sim.run_until(lambda: bool(begun), limit_ms=10_000)
    return sorted(cluster.peers, key=lambda peer: peer.peer)


def slow_run(seed: int) -> Simulation:
    return Simulation(seed, Setup(weather=SLOW))


def differs_at(*places: int) -> Callable[[int, int, Words, SmallState], None]:
    """The members at these places have other content."""

    def prepare(place: int, turn: int, words: Words, state: SmallState) -> None:
        words += 7 if place in places else 1

    return prepare


def test_the_most_popular_content_wins_and_what_may_differ_stays(sim: Simulation) -> None:
    script = Script(3)
    script.prepare = differs_at(1)
    run(sim, script)
    assert all((script.words(place) == 1).all() for place in range(3))
    assert script.ended[1, 0].rx_bytes == 4_000  # type: ignore[attr-defined]
    owns = [script.states[place].arrays["own"][0] for place in range(3)]  # type: ignore[index]
    assert len(set(owns)) == 3


def test_a_holder_that_dies_costs_only_what_it_owed() -> None:
    sim, script = slow_run(32), Script(3)
    script.prepare = differs_at(2)
    peers = begins_to_fetch(sim, script)
    sim.scheduler.after(20_000_000, peers[0].kill)
    sim.run_until(sim.is_over, limit_ms=30_000)
    assert not peers[0].host.alive
    assert (script.words(2) == 1).all()


def test_the_state_is_lost_when_all_holders_die_and_leaves_the_receiver_torn() -> None:
    sim, script = slow_run(33), Script(3)
    script.prepare = differs_at(2)
    peers = begins_to_fetch(sim, script)
    for holder in peers[:2]:
        sim.scheduler.after(20_000_000, holder.kill)
    sim.run_until(sim.is_over, limit_ms=30_000)
    assert isinstance(script.ended[2, 0], StateLost)
    assert script.states[2].torn


def test_a_cut_from_one_holder_only_delays() -> None:
    sim, script = slow_run(34), Script(3)
    script.prepare = differs_at(2)
    peers = begins_to_fetch(sim, script)
    sim.scheduler.after(25_000_000, lambda: sim.partition(peers[0], peers[2], for_ms=500))  # blocks are on their way
    sim.run_until(sim.is_over, limit_ms=30_000)
    assert (script.words(2) == 1).all()
    assert all(not peer.gone for peer in peers)


def test_one_honest_holder_is_enough() -> None:
    sim, script = slow_run(35), Script(3)
    script.prepare = differs_at(2)
    peers = begins_to_fetch(sim, script)
    peers[0].lies = True
    sim.run_until(sim.is_over, limit_ms=30_000)
    assert (script.words(2) == 1).all()


def test_an_only_holder_that_lies_is_named() -> None:
    """About blocks, which leaves a torn state, or about their hashes, and then nothing is written."""
    torn = set()
    for seed in range(12):
        sim, script = slow_run(seed), Script(2)
        script.prepare = differs_at(1)
        peers = begins_to_fetch(sim, script)
        peers[0].lies = True
        sim.run_until(sim.is_over, limit_ms=30_000)
        error = script.ended[1, 0]
        assert isinstance(error, HashMismatch)
        assert error.peers == (peers[0].peer,)
        torn.add(script.states[1].torn)
    assert torn == {False, True}


def test_receivers_of_a_liar_do_not_wait_for_each_other() -> None:
    """Each got another block wrongly, and the liar was not dropped for it."""
    for seed in range(20):
        sim, script = slow_run(seed), Script(4, size=12)
        script.prepare = differs_at(0, 1, 2)
        script.strategy = lambda place: "send-only" if place == 3 else "receive-only"
        peers = begins_to_fetch(sim, script)
        peers[3].lies = True
        sim.run_until(sim.is_over, limit_ms=30_000)


def test_a_peer_that_writes_to_its_state_during_a_sync_fails_alone() -> None:
    sim, script = slow_run(37), Script(3)
    script.prepare = differs_at(2)

    def meddle(place: int, words: Words) -> tuple[float, Callable[[], object]] | None:
        return (15.0, lambda: words.__setitem__(slice(None), 9)) if place == 0 else None

    script.meddle = meddle
    run(sim, script)
    assert "changed during the sync" in str(script.ended[0, 0])
    assert (script.words(2) == 1).all()


def test_a_revision_that_jumps_is_refused_and_received_the_next_time(sim: Simulation) -> None:
    script = Script(3, rounds=3)

    def prepare(place: int, turn: int, words: Words, state: SmallState) -> None:
        if turn == 1:
            words += 1 + place // 2
            state.revision += 1 + place // 2

    script.prepare = prepare
    run(sim, script)
    error = script.ended[2, 1]
    assert isinstance(error, RevisionViolation)
    assert (error.expected, error.got) == (1, 2)
    assert (script.words(2) == 1).all()
    assert script.states[2].revision == 1


def test_another_shape_is_refused_by_name(sim: Simulation) -> None:
    script = Script(3)
    script.shape = lambda place: 40 + place // 2
    run(sim, script)
    assert "'words' is int64 [41] there" in str(script.ended[2, 0])
    assert script.ended[0, 0].revision == 0  # type: ignore[attr-defined]


def test_strategies_that_do_not_go_together_are_refused_everywhere(sim: Simulation) -> None:
    script = Script(3)
    script.strategy = lambda place: "receive-only" if place == 1 else "enforce-popular"
    run(sim, script)
    assert all(isinstance(script.ended[place, 0], UsageError) for place in range(3))


def test_a_sender_wins_against_any_number(sim: Simulation) -> None:
    script = Script(4)
    script.prepare = differs_at(3)
    script.strategy = lambda place: "send-only" if place == 3 else "receive-only"
    run(sim, script)
    assert all((script.words(place) == 7).all() for place in range(4))


def _newcomer(begin: Callable[[SmallState, Words], None], ends: list[object], *, rollback: bool = False) -> ProgramOf:
    def program(me: Self) -> Program:
        words = np.zeros(500, np.int64)
        state = SmallState(words=words, own=MayDiffer(np.zeros(9, np.int64)))
        begin(state, words)
        try:
            ends.append((yield Sync(state, rollback=rollback)))
        except StateError as error:
            ends.append(error)

    return program


def _all_holders_die(sim: Simulation, run: str = "default") -> None:
    """Three peers finish a sync of revision 5 and are killed."""
    script = Script(3)

    def prepare(place: int, turn: int, words: Words, state: SmallState) -> None:
        words += 3
        state.revision = 5

    script.prepare = prepare
    cluster = sim.cluster(peers=3, program=script, run=run)
    sim.run_until(lambda: len(script.ended) == 3, limit_ms=10_000)
    for peer in cluster.peers:
        sim.crash(peer)


def _older(state: SmallState, words: Words) -> None:
    words += 2
    state.revision = 4


def _exactly(state: SmallState, words: Words) -> None:
    words += 3
    state.revision = 5


def test_an_older_checkpoint_does_not_replace_a_lost_state(sim: Simulation) -> None:
    _all_holders_die(sim)
    ends: list[object] = []
    sim.join(_newcomer(_older, ends), at_ms=sim.now_ms + 100)
    sim.run_until(sim.is_over, limit_ms=10_000)
    (error,) = ends
    assert isinstance(error, StateLost)
    assert error.revision == 5


def test_a_lost_state_stays_lost_when_the_survivors_leave(sim: Simulation) -> None:
    """A peer that finds the state lost exits, and is started again: that is not a fresh start."""
    _all_holders_die(sim)
    ends: list[object] = []
    for wait_ms in (100, 400, 700):
        sim.join(_newcomer(_older, ends), at_ms=sim.now_ms + wait_ms)
    sim.run_until(sim.is_over, limit_ms=10_000)
    assert [type(end) for end in ends] == [StateLost] * 3


def test_newcomers_that_all_begin_afresh_begin_the_default_run_again(sim: Simulation) -> None:
    _all_holders_die(sim)
    ends: list[object] = []
    for _ in range(2):
        sim.join(_newcomer(lambda state, words: None, ends), at_ms=sim.now_ms + 100)
    sim.run_until(sim.is_over, limit_ms=10_000)
    assert [end.revision for end in ends] == [0, 0]  # type: ignore[attr-defined]


def test_newcomers_that_begin_afresh_do_not_replace_the_lost_state_of_a_run_with_a_name(sim: Simulation) -> None:
    _all_holders_die(sim, "nightly-7")
    ends: list[object] = []
    sim.join(_newcomer(lambda state, words: None, ends), at_ms=sim.now_ms + 100, run="nightly-7")
    sim.run_until(sim.is_over, limit_ms=10_000)
    assert isinstance(ends[0], StateLost)


def test_exactly_the_lost_revision_is_taken_from_a_checkpoint(sim: Simulation) -> None:
    _all_holders_die(sim)
    ends: list[object] = []
    sim.join(_newcomer(_exactly, ends), at_ms=sim.now_ms + 100)
    sim.run_until(sim.is_over, limit_ms=10_000)
    assert ends[0].revision == 5  # type: ignore[attr-defined]


def test_a_rollback_goes_on_from_what_there_is(sim: Simulation) -> None:
    _all_holders_die(sim)
    ends: list[object] = []
    sim.join(_newcomer(_older, ends, rollback=True), at_ms=sim.now_ms + 100)
    sim.run_until(sim.is_over, limit_ms=10_000)
    assert ends[0].revision == 4  # type: ignore[attr-defined]
    assert sim.syncs.rollbacks == 1


def test_the_state_is_gone_when_the_last_peer_leaves(sim: Simulation) -> None:
    script = Script(2)
    script.prepare = lambda place, turn, words, state: _exactly(state, words)
    ends: list[object] = []
    sim.join(_newcomer(_older, ends), at_ms=sim.now_ms + 1_000)
    cluster = sim.cluster(peers=2, program=script)
    sim.run_until(cluster.finished, limit_ms=10_000)
    assert ends[0].revision == 4  # type: ignore[attr-defined]


# Programs in blocking code


def test_the_step_loop_itself_runs_in_the_simulation(sim: Simulation) -> None:
    """Five peers, one of which crashes; the others end with the same bits and have counted the same steps."""
    done: dict[int, tuple[int, float]] = {}

    def main(run: SimRun, me: Self) -> None:
        weights = np.zeros(300)
        state = SmallState(weights=weights)
        for step in run.steps(state, until=12, min_world=2, check_every=5):
            me.step_begins(state)
            gradients = np.full(300, float(me.peer))
            step.all_reduce(gradients, op="sum")
            weights += gradients
            run.sleep(3)
        done[me.peer] = state.revision, float(weights.sum())

    cluster = sim.cluster(peers=5, program=blocking(main))
    sim.crash(sim.rng.choice(cluster.peers), within_ms=100)
    sim.run_until(cluster.finished, limit_ms=60_000)
    assert len(cluster.alive) >= 4
    assert len(set(done.values())) == 1
    assert {steps for steps, _ in done.values()} == {12}


def test_a_blocking_program_of_a_killed_peer_ends(sim: Simulation) -> None:
    unwound = []

    def main(run: SimRun, me: Self) -> None:
        try:
            while True:
                run.sleep(5)
        finally:
            unwound.append(me.peer)

    cluster = sim.cluster(peers=1, program=blocking(main))
    sim.run_until(lambda: sim.now_ms > 100, limit_ms=1_000)
    sim.crash(cluster.peers[0])
    assert unwound == [1]


def test_what_a_blocking_program_raises_is_reported() -> None:
    def main(run: SimRun, me: Self) -> None:
        run.update_topology()
        raise ValueError("the program's own")

    sim = Simulation(5)
    cluster = sim.cluster(peers=2, program=blocking(main))
    with pytest.raises(SimulationFailure, match=r"seed 5: ValueError: the program's own"):
        sim.run_until(cluster.finished, limit_ms=5_000)


# Divergence


def test_a_member_that_has_diverged_is_named_on_every_peer(sim: Simulation) -> None:
    script = Script(3, rounds=3)

    def prepare(place: int, turn: int, words: Words, state: SmallState) -> None:
        words += 1
        if turn:
            state.push_revision()
        if (place, turn) == (1, 1):
            words[100] += 1

    script.prepare = prepare
    peers = sorted(peer.peer for peer in run(sim, script))
    for place in range(3):
        first, second, third = (script.ended[place, turn].diverged for turn in range(3))  # type: ignore[attr-defined]
        assert (first, third) == ((), ())
        assert [(each.peer, each.keys, each.key_count) for each in second] == [(peers[1], ["words"], 1)]
        assert [(each.revision, each.since, each.received_bytes) for each in second] == [(1, 0, 64)]


def test_a_newcomer_with_other_content_has_not_diverged(sim: Simulation) -> None:
    script = Script(3)
    script.prepare = differs_at(1)
    run(sim, script)
    assert [script.ended[place, 0].diverged for place in range(3)] == [()] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("flips_in", [4, 9], ids=["between two syncs", "in the last steps"])
def test_a_step_loop_names_a_member_that_computes_something_else(sim: Simulation, flips_in: int) -> None:
    seen: dict[int, tuple[int, int]] = {}
    raised: list[StateDiverged] = []

    def main(run: SimRun, me: Self) -> None:
        weights = np.zeros(300)
        while run.group_size < 4:
            run.update_topology(min_world=4)
        try:
            for step in run.steps(SmallState(w=weights), until=10, min_world=3, check_every=6, on_divergence="raise"):
                seen.update({each.peer: (each.revision, each.since) for each in step.sync.diverged})
                gradients = np.ones(300)
                step.all_reduce(gradients)
                weights += gradients
                weights[7] += me.peer == 4 and step.number == flips_in
                run.sleep(1)
        except StateDiverged as error:
            raised.append(error)

    cluster = sim.cluster(peers=4, program=blocking(main))
    sim.run_until(cluster.finished, limit_ms=60_000)
    facts = {4: (6, 0), 9: (10, 6)}[flips_in]
    assert [(error.peer, error.revision, error.since) for error in raised] == [(4, *facts)]
    assert seen == ({4: facts} if flips_in == 4 else {}), "the other members see it in their next step"


def test_a_member_that_is_overwritten_was_a_newcomer_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In drawn runs, by the bits that each member held when it called: neither one too few nor one too many."""
    found, done = [], SyncHistory.done

    def checked(self: SyncHistory, peer: int, message: SyncDone) -> None:
        sync = self._syncs[message.sync]
        expected = {
            call.peer
            for call in sync.voters.values()
            if sync.last is not None and call.peer in sync.last.participants and call.bits[0] != sync.content
            if call.offer.revision == sync.revision and call.offer.strategy != "receive-only" and not call.is_torn
        }
        is_rollback = sync.goes_back
        assert {each.peer for each in message.diverged} == (set() if is_rollback else expected)
        found.extend(message.diverged)
        done(self, peer, message)

    monkeypatch.setattr(SyncHistory, "done", checked)
    seeds = [seed for seed in range(120) if isinstance(draw(seed).work, Syncing)]
    for seed in seeds[:15]:
        run_seed(seed)
    assert len(found) > 20


# Being stopped


@pytest.mark.parametrize("min_world", [1, 2, 3])
@pytest.mark.parametrize("stopped", [1, 5], ids=["one of five", "all"])
def test_members_that_are_stopped_leave_and_are_not_waited_for(sim: Simulation, min_world: int, stopped: int) -> None:
    ended: dict[int, tuple[int, float]] = {}

    def main(run: SimRun, me: Self) -> None:
        is_stopped = me.peer <= stopped
        run.sigterm_at_ms = 80.0 + me.peer if is_stopped else None
        weights = np.zeros(300)
        state = SmallState(w=weights)
        loop = run.steps(state, until=None if stopped == 5 else 60, min_world=min_world, wait_s=60)
        try:
            for step in loop:
                me.step_begins(state)
                gradients = np.full(300, 1.0)
                step.all_reduce(gradients, op="avg")
                weights += gradients
                run.sleep(1 + me.peer % 3)
        except SystemExit:
            assert is_stopped, "its step could not be ended"
        ended[me.peer] = state.revision, float(weights[0])

    cluster = sim.cluster(peers=5, program=blocking(main))
    sim.run_until(cluster.finished, limit_ms=10_000)
    assert len(ended) == 5
    assert all(revision == weight for revision, weight in ended.values()), "a state that is not of its step"
    if stopped == 1:
        assert {revision for peer, (revision, _) in ended.items() if peer > 1} == {60}


@pytest.mark.parametrize("number", range(8))
def test_an_evicted_peer_comes_back_in_its_loop_and_goes_on_with_the_step_of_the_others(number: int) -> None:
    """Frozen at any time, between steps or in an op: every program comes to the last step with the same weights.

    Any time after all have the state: before that the only two that have it may both be evicted, and it is lost.
    """
    sim = Simulation(number)
    have_state: set[str] = set()
    ended: dict[str, tuple[int, float, list[int]]] = {}

    def main(run: SimRun, me: Self) -> None:
        first, name, weights, numbers = me.peer, run.peer.name, np.zeros(60), []
        state = SmallState(weights=weights)
        for step in run.steps(state, until=80, min_world=2, check_every=5):
            run.sleep(1 + first % 3)
            gradients = np.full(60, 1.0)
            step.all_reduce(gradients, op="max")
            weights += gradients
            numbers.append(step.number)
            have_state.add(name)
        ended[name] = me.peer, float(weights[0]), numbers

    cluster = sim.cluster(peers=4, program=blocking(main))
    sim.touched |= {peer.name for peer in cluster.peers}
    sim.run_until(lambda: len(have_state) == 4, limit_ms=5_000)
    for peer in sim.rng.sample(cluster.peers, 2):
        sim.freeze(peer, for_ms=500, within_ms=100)
    sim.run_until(cluster.finished, limit_ms=20_000)
    assert len(ended) == 4
    assert sorted(peer > 4 for peer, _, _ in ended.values()) == [False, False, True, True], "two have joined again"
    for _, weight, numbers in ended.values():
        assert weight == 80
        assert numbers == sorted(set(numbers)), "no step comes twice, and none after a later one"


# Drawn runs


def test_runs_with_state_are_drawn_in_all_kinds() -> None:
    works = [draw(seed).work for seed in range(400)]
    loops = [work for work in works if isinstance(work, Looping)]
    syncing = [work for work in works if isinstance(work, Syncing)]
    assert min(len(loops), len(syncing)) > 60
    assert {work.min_world for work in loops} == {1, 2, 3}
    assert {work.one_sender for work in syncing} == {True, False}
    assert {work.rejoin for work in loops} == {True, False}
    assert {work.skips > 0 for work in loops} == {True, False}
    assert {work.sigterm for work in loops} == {"", "one", "all"}


def test_a_run_of_the_step_loop_without_faults_has_no_failed_sync(sim: Simulation) -> None:
    work = Looping(seed=sim.seed, until=20, min_world=2, check_every=3, foreign=0.0)
    cluster = sim.cluster(peers=4, program=looping(work))
    sim.run_until(lambda: sim.syncs.finished > 4, limit_ms=20_000)
    late = sim.join()
    sim.run_until(cluster.finished, limit_ms=20_000)
    assert sim.syncs.failed_calls == 0
    assert {peer.digest for peer in [*cluster.peers, late]} == {"20"}


def test_writing_to_a_state_outside_of_a_sync_is_noticed(sim: Simulation) -> None:
    """The checker of states at rest can fail."""
    shared: list[Words] = []

    def program(me: Self) -> Program:
        words = np.zeros(100, np.int64)
        shared.append(words)
        while me.world < 2:
            yield UpdateTopology(min_world=2)
        yield Sync(SmallState(words=words))
        yield Sleep(50)

    cluster = sim.cluster(peers=2, program=program)
    sim.run_until(lambda: sim.syncs.finished == 1, limit_ms=5_000)
    sim.scheduler.after(30_000_000, lambda: shared[0].__setitem__(3, 1))
    with pytest.raises(SimulationFailure, match="written to outside of a sync"):
        sim.run_until(cluster.finished, limit_ms=5_000)


def test_planted_bugs_cover_state() -> None:
    assert sum(bug.concerns is is_stateful for bug in BUGS.values()) >= 10
