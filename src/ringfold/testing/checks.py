"""The promises, checked against everything that programs saw.

An op is known by (group, epoch, tag, index): the index-th call on that tag that ended in that epoch at a peer. A peer
*survives* an epoch when it received the verdicts about it, or left cleanly, or is there at the end: what the others
decide about the last epoch of a peer that was killed or evicted does not concern it any more.

Checked at once, so that the trace ends where it went wrong:
- two peers that succeed in an op hold the same bits;
- these are the reduction over what exactly the members of that epoch passed in that contribute, and all name these;
- the calls of an op stand at the same place of the program;
- a buffer of a call that failed is, bit for bit, what was passed in;
- a peer's epochs only grow, and an epoch of a group has the same ring everywhere: in every record of it that the
  master decides on, whatever the cause (a death, a newcomer, a better ring adopted by a call), and at every peer.
Checked at the end, when it is known which peers survived what:
- an op that succeeded at one survivor succeeded at all;
- two survivors that called `are_peers_pending` at the same point of the program got the same answer.
Also at once: a question that the master was asked has one answer, whichever peer asks, in whichever thread.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ringfold.testing.program import Array, Call, Collective, Kind
from ringfold.wire.messages import PendingQuestion

OpKey = tuple[int, int, int, int]
"""Group, epoch, tag, index."""


class Violation(AssertionError):
    """A promise was broken; the simulation adds the seed and the trace."""


@dataclass(slots=True)
class _Peer:
    group: int
    calls: dict[int, list[Call]] = field(default_factory=dict)
    """By tag, in the order they were made."""
    installed: int = 0
    settled: int = 0
    """The newest epoch whose verdicts it received."""
    returned: OpKey | None = None
    pending_calls: int = 0
    """How often it called are_peers_pending since an op returned."""
    gone: bool = False
    """Killed or evicted: it does not survive its last epoch."""
    over: bool = False
    """Out of the run, however it ended."""


class History:
    """Everything the checkers need to know about one run."""

    def __init__(self) -> None:
        self.peers: dict[int, _Peer] = {}
        self.rings: dict[tuple[int, int], list[int]] = {}
        self.committed: dict[OpKey, dict[int, Call]] = {}
        self.answers: dict[tuple[OpKey, int], dict[int, bool]] = {}
        self.answers_of_master: dict[PendingQuestion, dict[int, bool]] = {}
        self.aborted = 0

    # What nodes report

    def joined(self, peer: int, group: int) -> None:
        self.peers[peer] = _Peer(group)

    def settled(self, peer: int, epoch: int) -> None:
        """A peer received the verdicts of an epoch: it survived it."""
        known = self.peers[peer]
        known.settled = max(known.settled, epoch)

    def installed(self, peer: int, epoch: int, ring: list[int]) -> None:
        """A peer begins to work in an epoch."""
        known = self.peers[peer]
        if epoch <= known.installed:
            raise Violation(f"peer {peer} installs epoch {epoch} after epoch {known.installed}")
        known.installed = epoch
        self.recorded(peer, known.group, epoch, ring)

    def recorded(self, peer: int, group: int, epoch: int, ring: list[int]) -> None:
        """A peer is sent the record of an epoch, or installs it."""
        agreed = self.rings.setdefault((group, epoch), ring)
        if agreed != ring:
            raise Violation(f"group {group}, epoch {epoch}: peer {peer} received the ring {ring}, others {agreed}")

    def called(self, peer: int, request: Collective) -> Call:
        group = self.peers[peer].group
        call = Call(peer, group, request, request.array.tobytes())
        self.peers[peer].calls.setdefault(request.tag, []).append(call)
        return call

    def succeeded(self, call: Call, epoch: int, contributors: tuple[int, ...]) -> None:
        call.outcome, call.epoch, call.contributors = "ok", epoch, contributors
        call.result = call.request.array.tobytes()
        calls = self.peers[call.peer].calls[call.tag]
        call.index = sum(one.epoch == epoch for one in calls) - 1
        key = _key(call)
        others = self.committed.setdefault(key, {})
        others[call.peer] = call
        self._check_bits(key, others, call)
        self._check_reduction(key, call)

    def returned(self, call: Call) -> None:
        """The program goes on after a call: this is where it stands now."""
        if call.outcome == "ok":
            known = self.peers[call.peer]
            known.returned, known.pending_calls = _key(call), 0

    def failed(self, call: Call, error: str, epoch: int) -> None:
        self.aborted += 1
        # A call that never started has no epoch of its own: it ended after those before it.
        earlier = self.peers[call.peer].calls[call.tag]
        call.outcome, call.epoch = error, max([epoch, *(one.epoch for one in earlier)])
        if call.request.array.tobytes() != call.given:
            raise Violation(f"{_name(call)} ended with {error} and did not restore the buffer")

    def answered(self, peer: int, pending: bool) -> None:
        """A peer received whether newcomers are pending."""
        known = self.peers[peer]
        if known.returned is not None:
            self.answers.setdefault((known.returned, known.pending_calls), {})[peer] = pending
        known.pending_calls += 1

    def answered_by_master(self, peer: int, question: PendingQuestion, pending: bool) -> None:
        """The master has answered a peer's question."""
        answers = self.answers_of_master.setdefault(question, {})
        answers[peer] = pending
        others = sorted(other for other, answer in answers.items() if answer != pending and not self.peers[other].over)
        if others:
            raise Violation(
                f"question {question.number} since call {question.call}: are_peers_pending answered {pending} at peer "
                f"{peer}, and {not pending} at {others}"
            )

    def ended(self, peer: int, *, gone: bool) -> None:
        """A peer is out: it left cleanly, or it was killed, evicted or cut off (`gone`)."""
        self.peers[peer].gone, self.peers[peer].over = gone, True

    # What holds at the end

    def check_end(self) -> None:
        for (group, epoch, tag, index), successes in sorted(self.committed.items()):
            survivors = self._survivors(group, epoch)
            winners = sorted(survivors & successes.keys())
            losers = sorted(survivors - successes.keys())
            if winners and losers:
                raise Violation(
                    f"the op {index} of tag {tag} in epoch {epoch} of group {group} was committed by {winners} "
                    f"and not by {losers}, and all of them survived that epoch"
                )
        for ((group, epoch, tag, index), _), answers in sorted(self.answers.items()):
            given = {answers[peer] for peer in self._survivors(group, epoch) & answers.keys()}
            if len(given) > 1:
                raise Violation(
                    f"after the op {index} of tag {tag} in epoch {epoch} of group {group}, are_peers_pending answered "
                    f"differently: {dict(sorted(answers.items()))}"
                )

    def _survivors(self, group: int, epoch: int) -> set[int]:
        return {peer for peer in self.rings[group, epoch] if self._survives(peer, epoch)}

    def _survives(self, peer: int, epoch: int) -> bool:
        known = self.peers[peer]
        return epoch <= known.settled or not known.gone

    # What holds at every success

    def _check_bits(self, key: OpKey, others: dict[int, Call], call: Call) -> None:
        for other in others.values():
            if other.result != call.result:
                raise Violation(
                    f"{_name(call)}: peers {call.peer} and {other.peer} hold different bits "
                    f"after the op {key[3]} of epoch {key[1]}"
                )

    def _check_reduction(self, key: OpKey, call: Call) -> None:
        group, epoch, _, index = key
        ring = self.rings.get((group, epoch))
        if ring is None:
            raise Violation(f"{_name(call)} succeeded in epoch {epoch}, which no peer received")
        # The root of a broadcast needs no other peer: if it survives, the op commits, whichever peers called it.
        sources = [ring[call.request.root]] if call.request.kind is Kind.BROADCAST else ring
        theirs = {member: self._made(member, epoch, index, call) for member in sources}
        reduces = call.request.kind is Kind.ALL_REDUCE
        contributors = [one for one in sources if theirs[one].request.contribute] if reduces else ring
        if call.contributors != tuple(sorted(contributors)):
            raise Violation(
                f"{_name(call)}: {call.contributors} are named as contributors, but in epoch {epoch} with the members "
                f"{ring} these are {sorted(contributors)}"
            )
        given = [theirs[member].given for member in sources if member in contributors]
        inputs = [np.frombuffer(one, call.request.array.dtype) for one in given]
        if not _same(call, expected(call.request, inputs)):
            raise Violation(
                f"{_name(call)} succeeded with bits that are not the {call.request.op} over what the members {ring} "
                f"of epoch {epoch} passed in"
            )

    def _made(self, member: int, epoch: int, index: int, call: Call) -> Call:
        """A member's call of the index-th op of the tag in that epoch."""
        calls = self.peers[member].calls.get(call.tag, [])
        before = sum(bool(one.outcome) and one.epoch < epoch for one in calls)
        if before + index >= len(calls):
            raise Violation(f"{_name(call)} succeeded in epoch {epoch}, but its member {member} has not called it")
        theirs = calls[before + index]
        if theirs.request.place != call.request.place and None not in (theirs.request.place, call.request.place):
            raise Violation(
                f"{_name(call)} at {call.request.place} was committed together with peer {member}'s call at "
                f"{theirs.request.place}"
            )
        return theirs


def expected(request: Collective, inputs: list[Array]) -> Array:
    """What an op must give, computed from the inputs of all that contribute, in ring order."""
    if request.kind is Kind.BROADCAST:
        return inputs[0]
    if request.kind is Kind.BARRIER or not request.array.size:
        return request.array.reshape(-1)
    if not inputs:
        return np.zeros(request.array.size, request.array.dtype)
    folds: dict[str, Callable[[Array, Array], Array]] = {
        "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    }  # fmt: skip
    total = inputs[0]
    for one in inputs[1:]:
        if one.shape != total.shape:
            raise Violation(f"an op was committed over inputs of {_sizes(inputs)} elements")
        total = folds[request.op](total, one)
    return (total / len(inputs)).astype(total.dtype) if request.op == "avg" else total


def _same(call: Call, wanted: Array) -> bool:
    got = np.frombuffer(call.result, call.request.array.dtype)
    if got.shape != wanted.shape:
        return False
    if call.request.quantisation:
        error = np.abs(got.astype(np.float64) - wanted).max(initial=0)
        return bool(error <= _quantisation_error(len(call.contributors)))
    # Inputs are small whole numbers, exact in every dtype; only a division may round in its own way.
    return np.allclose(got, wanted, rtol=1e-3) if call.request.op == "avg" else bool(np.array_equal(got, wanted))


def _quantisation_error(members: int) -> float:
    """A partial sum of k numbers up to 23 has steps of at most 23 k / 255 and is off by half of one; float16 rounds."""
    hops = members * (members - 1) / 2 + members
    return hops * 23 / 255 / 2 + 0.1


def _sizes(inputs: Iterable[Array]) -> list[int]:
    return [one.size for one in inputs]


def _key(call: Call) -> OpKey:
    return call.group, call.epoch, call.tag, call.index


def _name(call: Call) -> str:
    request = call.request
    return (
        f"peer {call.peer}'s {request.kind.name.lower()} of {request.array.size} {request.array.dtype} (tag {call.tag})"
    )
