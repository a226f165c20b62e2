"""`optimize_topology`: measure the links that are not known, choose each group's best ring, and change to it.

    all have voted --begin--> rounds of tests --none left--> rings are chosen --the epochs are installed--> CallDone
                                  ^     |                          |
                                  +-----+ the next round,          +-- no ring over known links --> CallFailed
                                          then what failed, from the other end,
                                          then up to REPEATS times what is doubtful

A *test* measures one pair of a group, both directions at once: both ends get `Measure`, one of them dials, and both
report what they received (`LinkMeasured`). A *round* is as many tests as possible without a common peer, over all
groups of the run. It ends when its tests have ended: by both reports, by one that reports a failure, by the deadline,
or because one of the two peers is no longer in the call. Reports are checked, because the master trusts no peer; late
ones are ignored.

A figure is *doubtful* if it is not settled (the arrival rate was never steady for long enough: a busy machine, a
stalled TCP connection), or far below what the link was known to carry. Its pair is measured again after all others. A
link is slowed down by other traffic, and never sped up; so a settled figure counts more than an unsettled one, and of
two of a kind the larger one counts. In the end a figure is used as it is: some links are never steady, and cost
REPEATS * REPEAT_ROUNDS more rounds at most, however many they are.

The figures are in `Run.links`, with those from heartbeats, until they are stale or their peer is gone. So a failed
optimisation is repeated by calling again, and measures only what is still missing.

The rings of all groups are chosen at one instant, when no epoch is changing. If the links of some group are not known
well enough for any ring, nothing is changed, and all voters get the missing pairs. Otherwise a group whose new ring is
better gets it with a new epoch, and the voters get the result when all those epochs are installed. Peers that die
meanwhile are out, as everywhere; a chosen ring is used only if the members are still the same.

Where the solver cannot prove that its ring is the best, the *moonshot search* continues in another process. A better
ring that it finds is adopted at the next call that changes rings, `optimize_topology` or `update_topology`, if the
group still has the same members, no edge of the ring is bad, and it is still better by the figures known then.

Nothing waits for ever: tests and epoch changes have deadlines, and rounds only get fewer.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ringfold.errors import RemoteProtocolError
from ringfold.master.effects import StartMoonshot
from ringfold.master.epochs import Epochs
from ringfold.master.events import Ns
from ringfold.master.run import Group, LinkTest, Optimisation, Peer, Run
from ringfold.master.states import OptimisationStage
from ringfold.master.verdicts import Cause
from ringfold.topology.moonshot import MoonshotRequest
from ringfold.topology.ring import Edge, edges_of
from ringfold.topology.schedule import disjoint_rounds
from ringfold.topology.solve import Figure, NoRing, Solution, best_ring, known_or, ring_value
from ringfold.units import MS
from ringfold.wire.decoding import checked
from ringfold.wire.diagnostics import list_peers
from ringfold.wire.frames import Heartbeat
from ringfold.wire.messages import GroupId, LinkMeasured, Measure, PeerId, Reason
from ringfold.wire.notices import CallRefused, LinksMeasured, RingChosen
from ringfold.wire.proof import derive

GRACE_MS = 1_000
"""How much longer than the peers the master waits for their reports."""
REPEATS = 2
REPEAT_ROUNDS = 4
"""Rounds of one repetition."""
FAR_BELOW = 0.75
FAILED_SHOWN_NS = 60 * 1_000 * MS
"""For how long `status` shows a peer with a link that could not be measured."""
MAX_BYTES_PER_S = 2**48
MAX_ROUND_TRIP_US = 600 * 1_000_000
MAX_FAILURE_CHARS = 200
MAX_PAIRS_SHOWN = 3
FOUND_BY_SEARCH = "found by the moonshot search since the last call"
"""Why a ring is chosen that the solver did not find."""


@dataclass(frozen=True, slots=True)
class RingChoice:
    """A ring for a group; it cannot be used if it has `unknown` links, which have no figure."""

    ring: list[PeerId]
    slowest: float
    kept: bool
    exact: bool
    reason: str
    unknown: list[Edge]


class Topology:
    """The optimisation in progress, if there is one, and what is known about links."""

    def __init__(self, run: Run, epochs: Epochs, run_secret: bytes) -> None:
        self._run = run
        self._epochs = epochs
        self._secret = run_secret

    # The call

    def begin(self, now: Ns, voters: dict[PeerId, int]) -> None:
        """Every member of the run has voted, except those that wait for more members."""
        run = self._run
        assert run.optimisation is None, "a peer in an optimisation has no vote"
        groups = [group for _, group in sorted(run.groups.items()) if group.ring and set(group.ring) <= set(voters)]
        stale = run.settings.stale_s * 1_000 * MS
        missing = [pair for group in groups for pair in run.links.missing(group.ring, now, stale)]
        for voter in voters:
            run.peers[voter].ballot = None
        rounds = disjoint_rounds(missing)
        run.optimisation = Optimisation(now, dict(voters), [group.id for group in groups], rounds)

    def has_ballot(self, peer: Peer, ballot: int) -> bool:
        """Whether this vote is used up by the optimisation in progress."""
        optimisation = self._run.optimisation
        return optimisation is not None and optimisation.ballots.get(peer.id) == ballot

    def withdraw(self, peer: Peer) -> tuple[list[PeerId], str]:
        """The peer's call timed out. Returns which peers it waited for, and for what."""
        optimisation = self._run.optimisation
        assert optimisation is not None
        late = waits_for(self._run, self._epochs, optimisation)
        del optimisation.ballots[peer.id]
        what = "to attach" if optimisation.is_installing else "to be measured"
        return late, f"for {list_peers(late)} {what}"

    def settle(self, now: Ns) -> bool:
        """Take the next step of the optimisation, if the facts allow it. False if nothing changed."""
        run, going = self._run, self._run.optimisation
        if going is None:
            return False
        if not going.ballots:
            run.optimisation = None
            return True
        if going.is_installing:
            if any(run.groups[group].change is not None for group in going.changing):
                return False
            run.optimisation = None
            run.answer_calls(going.ballots)
            return True
        gone = [number for number, test in going.tests.items() if not set(test.pair) <= going.ballots.keys()]
        for number in gone:
            del going.tests[number]
        if going.tests:
            return bool(gone)
        if not going.rounds and going.failed_once:
            going.rounds = disjoint_rounds(pair for pair in going.failed_once if pair not in going.failed)
        if not going.rounds and going.doubtful and going.repeats < REPEATS:
            going.repeats += 1
            going.rounds = disjoint_rounds(going.doubtful)[:REPEAT_ROUNDS]
        if going.rounds:
            self._start_round(now, going, going.rounds.pop(0))
            return True
        if any(run.groups[group].change is not None for group in going.groups):
            return bool(gone)
        self._choose_rings(now, going)
        return True

    # Measuring

    def _start_round(self, now: Ns, going: Optimisation, pairs: list[Edge]) -> None:
        run = self._run
        here = [pair for pair in pairs if set(pair) <= going.ballots.keys()]
        going.begun += bool(here)
        for pair in here:
            run.tests += 1
            # The lower id dials first; after a failure the other end dials. A dialer that succeeded stays.
            dialer = going.doubtful.pop(pair, max(pair) if pair in going.failed_once else min(pair))
            most_ms = run.settings.measure_ms
            going.tests[run.tests] = LinkTest(pair, dialer, now + (most_ms + GRACE_MS) * MS)
            secret = derive(self._secret, "measure", run.tests)
            for me, other in (pair, pair[::-1]):
                to = run.peers[other].member
                run.send(run.peers[me], Measure(run.tests, to, me == dialer, secret, most_ms))
        for pair in pairs:
            if pair not in here:
                going.failed_once.pop(pair, None)
                going.doubtful.pop(pair, None)

    def measured(self, now: Ns, peer: Peer, report: LinkMeasured) -> None:
        """One end of a test reports its figure, or a failure. A report that was in flight when the test ended is
        void."""
        if not 0 < report.test <= self._run.tests:
            raise RemoteProtocolError(f"it reports measurement {report.test}, which was not requested")
        if not report.failed:
            checked(_check_figures, report)
        going = self._run.optimisation
        test = None if going is None else going.tests.get(report.test)
        if going is None or test is None:
            return
        if sorted((peer.id, report.other)) != list(test.pair):
            raise RemoteProtocolError(f"it reports measurement {report.test}, which is not its own")
        if report.failed:
            self._failed(going, report.test, f"peer {peer.id}: {report.failed[:MAX_FAILURE_CHARS]}")
            return
        test.reports[peer.id] = report
        if len(test.reports) == 2:
            del going.tests[report.test]
            going.failed_once.pop(test.pair, None)
            self._take_figures(now, going, test)

    def _take_figures(self, now: Ns, going: Optimisation, test: LinkTest) -> None:
        links = self._run.links
        rtts_us = [each.round_trip_us for each in test.reports.values() if each.round_trip_us]
        for target, each in test.reports.items():
            edge = (each.other, target)
            before, known = going.figures.get(edge), links.get(*edge)
            is_drop = before is None and known is not None and each.bytes_per_s < FAR_BELOW * known.bytes_per_s
            going.figures[edge] = settled, bytes_per_s = max(before or (False, 0.0), (each.settled, each.bytes_per_s))
            links.measured(edge, bytes_per_s, min(rtts_us, default=0), now)
            if is_drop or not settled:
                going.doubtful[test.pair] = test.dialer

    def tick(self, now: Ns) -> None:
        """A test without reports fails at its deadline."""
        run, going = self._run, self._run.optimisation
        if going is not None:
            for number, test in [item for item in going.tests.items() if now >= item[1].deadline_ns]:
                silent = [peer for peer in test.pair if peer not in test.reports]
                self._failed(going, number, f"no report from {list_peers(silent)}")
        shown = [peer for peer, since in run.unmeasured.items() if now - since >= FAILED_SHOWN_NS]
        for peer in shown:
            del run.unmeasured[peer]

    def _failed(self, going: Optimisation, number: int, why: str) -> None:
        test = going.tests.pop(number)
        pair = test.pair
        if pair in going.figures:
            going.doubtful[pair] = test.dialer  # It has a figure, and stays doubtful.
        elif pair in going.failed_once:
            going.failed[pair] = why
        else:
            going.failed_once[pair] = why

    def on_heartbeat(self, now: Ns, peer: Peer, heartbeat: Heartbeat) -> None:
        """Take the rate to the next peer that the collectives of the present ring have reached."""
        group = self._run.groups[peer.group]
        if not heartbeat.out_rate or heartbeat.epoch != group.epoch or len(group.ring) < 2 or peer.id not in group.ring:
            return
        target = group.ring[(group.ring.index(peer.id) + 1) % len(group.ring)]
        if target in self._run.peers:
            self._run.links.observed((peer.id, target), min(heartbeat.out_rate, MAX_BYTES_PER_S), now)

    # Choosing

    def _choose_rings(self, now: Ns, going: Optimisation) -> None:
        run = self._run
        failed = sorted(pair for pair in going.failed if set(pair) <= run.peers.keys())
        run.unmeasured = {peer: now for pair in failed for peer in pair}
        if going.begun:
            took_ms = (now - going.since_ns) // MS
            unsettled = {(min(edge), max(edge)) for edge, (settled, _) in going.figures.items() if not settled}
            run.notify(LinksMeasured(len(going.figures) // 2, going.begun, failed, took_ms, sorted(unsettled)))
        choices = {group: self._choose(run.groups[group]) for group in going.groups if len(run.groups[group].ring) > 1}
        if any(choice.unknown for choice in choices.values()):
            run.optimisation = None
            self._fail(going, choices)
            return
        going.enter(OptimisationStage.INSTALLING)
        for number, choice in choices.items():
            run.notify(RingChosen(number, choice.ring, choice.slowest, choice.kept, choice.reason))
            group = run.groups[number]
            if not choice.exact:
                run.out.append(StartMoonshot(number, self._question(group, choice.ring)))
            if not choice.kept:
                going.changing.add(number)
                self._change_ring(now, group, choice.ring, choice.reason)

    def _fail(self, going: Optimisation, choices: dict[GroupId, RingChoice]) -> None:
        """Nothing is changed. The error names the pairs that failed; if there are none, the links without a figure."""
        unknown = {(min(edge), max(edge)) for choice in choices.values() for edge in choice.unknown}
        why = {pair: going.failed.get(pair, "it was not measured") for pair in sorted(unknown | set(going.failed))}
        shown = "; ".join(f"{a} - {b} ({text})" for (a, b), text in list(why.items())[:MAX_PAIRS_SHOWN])
        more = f"; and {len(why) - MAX_PAIRS_SHOWN} more" if len(why) > MAX_PAIRS_SHOWN else ""
        text = f"no ring over measured links: {shown}{more}; the ring is as it was, call again"
        peers = sorted({peer for pair in why for peer in pair})
        self._run.fail_calls(dict.fromkeys(going.ballots, Reason("topology", text, peers)), going.ballots)
        self._run.notify(CallRefused(peers, text))

    def _choose(self, group: Group) -> RingChoice:
        """The best ring by the figures known now. Among equally good rings, the present one."""
        rate, delay, known = self._figures(group)
        found = best_ring(group.ring, rate, delay, start=group.ring, forbidden=group.edges.bad())
        if isinstance(found, NoRing):
            slowest = ring_value(group.ring, rate, delay)[0]
            return RingChoice(list(group.ring), slowest, True, True, f"kept: {found.reason}", [])
        ring, slowest, kept, reason = list(found.ring), found.slowest, found.kept, found.reason
        shot = self._take_found_ring(group, ring)
        if shot:
            ring, slowest, kept, reason = shot, ring_value(shot, rate, delay)[0], False, FOUND_BY_SEARCH
        unknown = [edge for edge in edges_of(ring) if edge not in known]
        return RingChoice(ring, slowest, kept, found.exact, reason, unknown)

    def _take_found_ring(self, group: Group, than: list[PeerId]) -> list[PeerId]:
        """The ring that the moonshot search has found, if it can be used and is better than `than`; else empty. It is
        considered once."""
        shot, group.moonshot = group.moonshot, []
        rate, delay, known = self._figures(group)
        is_usable = sorted(shot) == sorted(than) and not group.edges.bad() & set(edges_of(shot))
        if not is_usable or any(edge not in known for edge in edges_of(shot)):
            return []
        return shot if ring_value(shot, rate, delay) > ring_value(than, rate, delay) else []

    def adopt_found_rings(self, now: Ns, voters: Collection[PeerId], growing: Collection[GroupId]) -> set[GroupId]:
        """An `update_topology` is complete: change to the better rings that the moonshot search has found. Returns the
        groups that change. A group with newcomers (`growing`) has other members than the ring that was found."""
        run, changing = self._run, set[GroupId]()
        for number, group in sorted(run.groups.items()):
            if not group.moonshot or number in growing or not set(group.ring) <= set(voters):
                continue
            ring = self._take_found_ring(group, group.ring)
            if not ring:
                continue
            rate, delay, _ = self._figures(group)
            run.notify(RingChosen(number, ring, ring_value(ring, rate, delay)[0], False, FOUND_BY_SEARCH))
            self._change_ring(now, group, ring, FOUND_BY_SEARCH)
            changing.add(number)
        return changing

    def _change_ring(self, now: Ns, group: Group, ring: list[PeerId], why: str) -> None:
        group.wanted_ring = ring
        self._epochs.begin(now, group, Cause(Reason("edge", f"a better ring ({why})"), kind="ring"))

    def _figures(self, group: Group) -> tuple[Figure, Figure, Collection[Edge]]:
        """The rate and the delay of every link of the group, and which links are known."""
        known = self._run.links.known(group.ring)
        rate = known_or({edge: entry.bytes_per_s for edge, entry in known.items()}, 0.0)
        delay = known_or({edge: self._delay_us(edge, entry.delay_us) for edge, entry in known.items()}, 0.0)
        return rate, delay, known.keys()

    def _delay_us(self, edge: Edge, measured: int | None) -> float:
        """Probing measures all the time, with kernel timestamps: its figure is preferred, if there is one."""
        probed = self._run.delays.get(edge)
        return float(measured or 0) if probed is None else probed.delay_us

    # The moonshot search

    def _question(self, group: Group, start: list[PeerId]) -> MoonshotRequest:
        known = self._run.links.known(group.ring)
        return MoonshotRequest(
            members=sorted(group.ring),
            rates=[(*edge, entry.bytes_per_s) for edge, entry in known.items()],
            delays=[(*edge, self._delay_us(edge, entry.delay_us)) for edge, entry in known.items()],
            forbidden=sorted(group.edges.bad()),
            start=start,
        )

    def moonshot_finished(self, group: GroupId, solution: Solution) -> None:
        """The moonshot search has a result. The next `update_topology` or `optimize_topology` considers it, if the
        members are still these."""
        known = self._run.groups.get(group)
        if known is not None and not solution.kept and sorted(known.ring) == sorted(solution.ring):
            known.moonshot = list(solution.ring)


def waits_for(run: Run, epochs: Epochs, going: Optimisation) -> list[PeerId]:
    """The peers that the optimisation waits for now."""
    if going.is_installing or not going.tests:
        groups = going.changing if going.is_installing else going.groups
        return sorted({late for group in groups for late in epochs.missing(run.groups[group])})
    return sorted({peer for test in going.tests.values() for peer in test.pair if peer not in test.reports})


def _check_figures(report: LinkMeasured) -> None:
    """Refuse figures that no correct peer reports. NaN fails every comparison."""
    if not (0 < report.bytes_per_s <= MAX_BYTES_PER_S and 0 <= report.round_trip_us <= MAX_ROUND_TRIP_US):
        raise RemoteProtocolError(
            f"it measured {report.bytes_per_s} bytes per second with an RTT of {report.round_trip_us} us"
        )
