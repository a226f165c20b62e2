"""Which state wins a sync, which peers fetch what, and which are rejected. Pure: offers in, a decision and reasons out.

Terms. A peer *votes* for its own content by offering it. A *voter* is allowed to; a voter whose revision is valid is a
*candidate*. The candidates at the highest revision, the *expected* one, are counted by content. The largest set wins;
ties go to the set with the lowest id (lower ids joined earlier). A *holder* has the winner's content, a *receiver*
fetches what it lacks. A *rejected* peer takes no part and gets the reason, while the others continue.

Voters. The group remembers its last finished sync: the revision R, the participants, and the digest of the content.

    nothing finished yet       all vote: a loaded checkpoint has a higher revision than a fresh start, and wins
    a participant is present   participants vote; peers that joined since then only receive
    no participant is present  peers with exactly R and exactly its content vote; if there is none, see *resume* below
    all agree to a rollback    and there is no candidate otherwise: as if nothing had finished yet

A participant that is torn no longer has what it took part in, so it counts as absent. `receive-only` never votes.

Resume. All peers that had R are lost, and the run continues from the newest *eligible* checkpoint: one of the group's
present lineage up to R, or of an ancestor up to where the lineage branched off (`ancestry.py`). A checkpoint of an
abandoned branch or of another run is not eligible, nor is a state that is not a checkpoint. Besides their offer, peers
list the checkpoints that they could load. If the newest eligible one is not loaded, no state wins: the reason names the
checkpoint, the peer that has it loads it, and all sync again. If nothing is finished, but a lineage is known, eligible
checkpoints take precedence, too.

Which revisions are valid. A voter may be at R with the content of R (nothing happened since), or at R + 1 (the one
change that all peers make between two syncs), or at any revision from R on if its step loop counted each of them.
Anything else is a violation, and that peer is rejected: it skipped a sync, counted twice, or went back. A voter at R
with other content changed its state without counting; it cannot be known to be right, so it receives.

The highest valid revision wins over the most popular one: a peer at R + 1 has made a change that all make, and the one
at R has not made it yet. Otherwise a change that was agreed upon would be lost.

Invariants: the winner's content is the content of a voter; a rejected peer neither holds nor fetches; the decision
depends on the offers alone, not on their order.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ringfold.state.ancestry import branch_of, is_abandoned, is_abandoned_by_any, is_past
from ringfold.state.blocks import digest_bytes
from ringfold.state.manifest import digest_of, have_one_structure
from ringfold.wire.messages import Branch, KeyOffer, Lineage, Offer, PeerId, Reason


@dataclass(frozen=True, slots=True)
class FinishedSync:
    """The last sync of a group that was completed: what must not be lost."""

    revision: int
    participants: frozenset[PeerId]
    roots: bytes
    """`digest_of` the content."""
    names: tuple[str, ...] = ()
    """The names of the participants that save checkpoints, sorted: a peer that comes back has another id."""


@dataclass(frozen=True, slots=True)
class ElectedState:
    """The state that wins, and the peers that fetch it. `participants` are all peers that are not rejected; one that is
    neither a holder nor in `fetch` has it all, but does not send. `rollback`: the run continues from another revision
    than the one that was finished last. `resumes`: no peer had to agree to that, because it is a checkpoint of the
    run's own lineage.
    """

    revision: int
    roots: bytes
    holders: list[PeerId]
    fetch: dict[PeerId, list[tuple[int, bytes]]]
    """Per receiver the keys that it lacks, by number, each with its root."""
    participants: list[PeerId]
    rejected: dict[PeerId, Reason]
    rollback: bool
    text: str
    winner: PeerId = 0
    resumes: bool = False

    def finished(self, participants: Iterable[PeerId], names: Iterable[str] = ()) -> FinishedSync:
        """What the group remembers when these have reported that they are complete."""
        return FinishedSync(self.revision, frozenset(participants), self.roots, tuple(sorted(names)))


@dataclass(frozen=True, slots=True)
class DivergedPeer:
    """A participant of the last sync that has other content than the winner, at the winner's revision."""

    peer: PeerId
    keys: list[str]
    since: int
    """The revision of the last sync, in which it agreed."""


@dataclass(frozen=True, slots=True)
class NoWinner:
    """No state wins, and no state is changed; the reason for each peer."""

    reasons: dict[PeerId, Reason]

    @property
    def is_lost(self) -> bool:
        """Whether it fails because the state is lost."""
        return any(reason.kind == "state_lost" for reason in self.reasons.values())


ElectionResult = ElectedState | NoWinner


def elect(offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None = None) -> ElectionResult:
    """Decide a sync among these offers, after the group's last finished one, in the group's present lineage."""
    offers = {peer: offers[peer] for peer in sorted(offers)}
    if reason := _mixed_strategies(offers):
        return NoWinner(dict.fromkeys(offers, reason))
    malformed, digests = _check_offers(offers)
    sound = {peer: offer for peer, offer in offers.items() if peer in digests}

    vote = _vote(sound, digests, last, present)
    rejected = {**malformed, **vote.rejected}
    if vote.failure is not None:
        return NoWinner({peer: rejected.get(peer, vote.failure) for peer in offers})

    expected = max(sound[peer].revision for peer in vote.candidates)
    counted = [peer for peer in vote.candidates if sound[peer].revision == expected]
    winners = _most_popular(counted, digests)
    plan = _plan(sound, winners, expected, rejected, digests)
    text = f"{plan.text}; {len(winners)} of {len(counted)} votes at this revision"
    return replace(plan, text=text, rollback=vote.rollback, winner=winners[0], resumes=vote.resumes)


def diverged(offers: Mapping[PeerId, Offer], plan: ElectedState, last: FinishedSync | None) -> list[DivergedPeer]:
    """The members that should have the winning content, and do not.

    A newcomer need not have it, nor a peer that is torn, is a revision behind or only receives; after a rollback, no
    peer need have it.
    """
    if last is None or plan.rollback:
        return []
    return [
        DivergedPeer(peer, [offers[peer].keys[index].name for index, _ in lacking], last.revision)
        for peer, lacking in sorted(plan.fetch.items())
        if peer in last.participants and _should_agree(offers[peer], plan)
    ]


def _should_agree(offer: Offer, plan: ElectedState) -> bool:
    return offer.revision == plan.revision and not offer.torn and offer.strategy != "receive-only"


@dataclass(frozen=True, slots=True)
class _Vote:
    """Which peers may win. A failure goes to all peers that are not rejected for another reason."""

    candidates: list[PeerId]
    rejected: dict[PeerId, Reason]
    failure: Reason | None = None
    rollback: bool = False
    resumes: bool = False


def _vote(
    offers: Mapping[PeerId, Offer], digests: Mapping[PeerId, bytes], last: FinishedSync | None, present: Lineage | None
) -> _Vote:
    """The candidates, before any revision is preferred to another."""
    whole = [peer for peer, offer in offers.items() if not offer.torn]
    if last is None:
        return _first_vote(offers, digests, whole, present)
    there = [peer for peer in whole if peer in last.participants]
    exact = [peer for peer in whole if (offers[peer].revision, digests[peer]) == (last.revision, last.roots)]
    if there:
        vote = _of_participants(offers, _voting(offers, there), set(exact), last)
        eligible = there
    elif exact or present is None:
        vote, eligible = _Vote(_voting(offers, exact), {}), exact
    else:
        vote = _resume(offers, digests, whole, present, last)
        eligible = vote.candidates
    if vote.failure is not None:
        return vote
    if not vote.candidates and offers and all(offer.rollback for offer in offers.values()):
        vote, eligible = _Vote(_voting(offers, whole), {}, rollback=True), whole
    if not vote.candidates and not exact and not there:
        return replace(vote, failure=_lost(offers, last, present))
    return _among_senders(offers, digests, vote, eligible, last)


def _first_vote(
    offers: Mapping[PeerId, Offer], digests: Mapping[PeerId, bytes], whole: list[PeerId], present: Lineage | None
) -> _Vote:
    """Nothing is finished, or the peers that had it left with it. What a known lineage has abandoned cannot win."""
    known = [offer.lineage for offer in offers.values() if offer.lineage is not None]
    known += [] if present is None else [present]
    alive = [peer for peer in whole if (of := _branch(offers[peer])) is None or not is_abandoned_by_any(of, known)]
    if present is not None:
        own = [peer for peer in alive if (of := _branch(offers[peer])) is not None and is_past(of, present)]
        wanted = _newest_listed(offers, present, None)
        if wanted is not None and wanted.revision > max((offers[peer].revision for peer in own), default=-1):
            return _Vote([], {}, failure=_wanted(wanted, None))
        alive = own or alive
    if whole and not alive:
        if not all(offer.rollback for offer in offers.values()):
            return _Vote([], {}, failure=_lost(offers, None, present))
        alive = whole
    return _among_senders(offers, digests, _Vote(_voting(offers, alive), {}), whole, None)


def _resume(
    offers: Mapping[PeerId, Offer],
    digests: Mapping[PeerId, bytes],
    whole: Iterable[PeerId],
    present: Lineage,
    last: FinishedSync,
) -> _Vote:
    """The newest eligible checkpoint wins, if it is loaded; if it is only listed, it has to be loaded first."""

    def is_eligible(peer: PeerId) -> bool:
        of = _branch(offers[peer])
        if of is None or not offers[peer].is_loaded or not is_past(of, present, last.revision):
            return False
        # The last revision with other content was saved before it was compared.
        return of != branch_of(present, last.revision) or digests[peer] == last.roots

    loaded = _voting(offers, (peer for peer in whole if is_eligible(peer)))
    wanted = _newest_listed(offers, present, last.revision)
    if wanted is not None and wanted.revision > max((offers[peer].revision for peer in loaded), default=-1):
        return _Vote([], {}, failure=_wanted(wanted, last))
    return _Vote(loaded, {}, rollback=bool(loaded), resumes=bool(loaded))


def _branch(offer: Offer) -> Branch | None:
    """Which revision of which lineage an offer is."""
    return None if offer.lineage is None else branch_of(offer.lineage, offer.revision)


def _newest_listed(offers: Mapping[PeerId, Offer], present: Lineage, newest: int | None) -> Branch | None:
    """The newest eligible checkpoint that some peer could load."""
    listed = {
        checkpoint
        for offer in offers.values()
        if offer.strategy != "receive-only"
        for checkpoint in offer.checkpoints
        if is_past(checkpoint, present, newest)
    }
    return max(listed, key=lambda checkpoint: (checkpoint.revision, checkpoint.lineage), default=None)


def _voting(offers: Mapping[PeerId, Offer], peers: Iterable[PeerId]) -> list[PeerId]:
    return [peer for peer in peers if offers[peer].strategy != "receive-only"]


def _of_participants(
    offers: Mapping[PeerId, Offer], voters: Iterable[PeerId], exact: Collection[PeerId], last: FinishedSync
) -> _Vote:
    """Which voters are candidates, and which break the rule of one increment."""
    candidates, rejected = [], {}
    for peer in voters:
        offer = offers[peer]
        if offer.revision == last.revision:
            if peer in exact:
                candidates.append(peer)
        elif offer.revision == last.revision + 1 or (offer.stepped and offer.revision > last.revision):
            candidates.append(peer)
        else:
            rejected[peer] = _violation(peer, offer, last)
    return _Vote(candidates, rejected)


def _among_senders(
    offers: Mapping[PeerId, Offer],
    digests: Mapping[PeerId, bytes],
    vote: _Vote,
    eligible: Collection[PeerId],
    last: FinishedSync | None,
) -> _Vote:
    """A sender must win, so all senders must agree, and each must be allowed to vote. And there must be a candidate."""
    senders = [peer for peer, offer in offers.items() if offer.strategy == "send-only"]
    if ineligible := [peer for peer in senders if peer not in eligible]:
        why = "is torn" if offers[ineligible[0]].torn else "took no part in the group's last sync"
        text = f"peer {ineligible[0]} wants to send its state (send-only), but may not: it {why}"
        return replace(vote, failure=Reason("state", text, ineligible))
    sent: dict[tuple[int, bytes], PeerId] = {}
    for peer in (peer for peer in senders if peer not in vote.rejected):
        sent.setdefault((offers[peer].revision, digests[peer]), peer)
    if len(sent) > 1:
        one, other = sorted(sent.values())[:2]
        text = f"peers {one} and {other} both want to send (send-only), but {_difference(offers, one, other)}"
        return replace(vote, failure=Reason("state", text, sorted(sent.values())))
    if not vote.candidates:
        return replace(vote, failure=_no_candidate(offers, vote.rejected, last))
    return vote


def _most_popular(candidates: Iterable[PeerId], digests: Mapping[PeerId, bytes]) -> list[PeerId]:
    sets: dict[bytes, list[PeerId]] = {}
    for peer in candidates:
        sets.setdefault(digests[peer], []).append(peer)
    return max(sets.values(), key=lambda peers: (len(peers), -peers[0]))


def _plan(
    offers: Mapping[PeerId, Offer],
    winners: list[PeerId],
    revision: int,
    rejected: dict[PeerId, Reason],
    digests: Mapping[PeerId, bytes],
) -> ElectedState:
    """Compare all peers with the winner: structure first, then the content of each key that counts."""
    winner = winners[0]
    won = offers[winner]
    holders, participants, fetch = [], [], {}
    rejected = dict(rejected)
    for peer, offer in offers.items():
        if peer in rejected:
            continue
        is_equal = digests[peer] == digests[winner]
        if not is_equal and not have_one_structure(offer, won):
            text = f"peer {peer}: {_other_structure(offer, won, winner)}"
            rejected[peer] = Reason("state", text, [peer])
            continue
        participants.append(peer)
        lacking = [] if is_equal else _lacking(offer, won)
        if lacking:
            fetch[peer] = lacking
        elif offer.strategy != "receive-only":
            holders.append(peer)
    text = f"revision {revision} of {names(winners)} wins"
    if fetch:
        text += f"; {names(fetch)} {'fetches' if len(fetch) == 1 else 'fetch'} what differs"
    if rejected:
        text += f"; without {names(sorted(rejected))}"
    rejected = dict(sorted(rejected.items()))
    return ElectedState(revision, digests[winner], holders, fetch, participants, rejected, rollback=False, text=text)


def _lacking(offer: Offer, winner: Offer) -> list[tuple[int, bytes]]:
    pairs = enumerate(zip(offer.keys, winner.keys, strict=True))
    return [(index, won.root) for index, (own, won) in pairs if not won.may_differ and own.root != won.root]


# Reasons


def names(peers: Iterable[PeerId]) -> str:
    """Peers, as named in a sentence."""
    listed = [str(peer) for peer in peers]
    if len(listed) == 1:
        return f"peer {listed[0]}"
    shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    return f"peers {shown}"


def _mixed_strategies(offers: Mapping[PeerId, Offer]) -> Reason | None:
    used: dict[str, list[PeerId]] = {}
    for peer, offer in offers.items():
        used.setdefault(offer.strategy, []).append(peer)
    if "enforce-popular" not in used or len(used) == 1:
        return None
    listed = "; ".join(f"{strategy} on {names(peers)}" for strategy, peers in sorted(used.items()))
    others = [peer for peer, offer in offers.items() if offer.strategy != "enforce-popular"]
    return Reason("usage", f"enforce-popular is for all peers or for none: {listed}", others)


def _check_offers(offers: Mapping[PeerId, Offer]) -> tuple[dict[PeerId, Reason], dict[PeerId, bytes]]:
    """The peers whose offer makes no sense, and the digests of the others. Equal offers are checked once."""
    malformed: dict[PeerId, Reason] = {}
    digests: dict[PeerId, bytes] = {}
    sound: set[bytes] = set()
    for peer, offer in offers.items():
        digest = digest_of(offer)
        reason = _malformed(peer, offer, check_keys=digest not in sound)
        if reason is None:
            digests[peer] = digest
            sound.add(digest)
        else:
            malformed[peer] = reason
    return malformed, digests


def _malformed(peer: PeerId, offer: Offer, *, check_keys: bool) -> Reason | None:
    """Why an offer cannot be compared; a peer that keeps to the protocol sends no such offer."""
    length = digest_bytes(offer.hash)
    previous = ""
    for key in offer.keys if check_keys else ():
        if key.name <= previous:
            why = f"{key.name!r} is not in order"
        elif min(key.shape, default=0) < 0:
            why = f"{key.name!r} has the shape {key.shape}"
        elif not key.may_differ and len(key.root) != length:
            why = f"the root of {key.name!r} has {len(key.root)} bytes, not {length}"
        else:
            previous = key.name
            continue
        return Reason("state", f"peer {peer}: its manifest makes no sense: {why}", [peer])
    if offer.revision < 0:
        return Reason("state", f"peer {peer}: {offer.revision} is no revision", [peer])
    return None


def _violation(peer: PeerId, offer: Offer, last: FinishedSync) -> Reason:
    text = (
        f"the shared state of peer {peer} has revision {offer.revision}, but revision {last.revision + 1} is next: the "
        f"last sync ended at {last.revision}, and the revision goes up by exactly one between two syncs"
    )
    return Reason("revision", text, [peer], numbers=[last.revision + 1, offer.revision])


def _wanted(checkpoint: Branch, last: FinishedSync | None) -> Reason:
    """A peer has it on disk and is requested to load it. This text is shown only if it cannot be loaded."""
    text = f"{_name(last)} is lost, and revision {checkpoint.revision}, a checkpoint to go on from, is not loaded yet"
    return Reason("state_lost", text, numbers=[0 if last is None else last.revision], checkpoint=checkpoint)


def _lost(offers: Mapping[PeerId, Offer], last: FinishedSync | None, present: Lineage | None) -> Reason:
    found = (f"revision {offer.revision} on peer {peer}{_flaw(offer, last, present)}" for peer, offer in offers.items())
    text = (
        f"{_name(last)} is lost: all peers that had it are gone. What is here cannot replace it "
        f"({'; '.join(found) or 'no offers'}). What to do: if there are checkpoints of this run, start a peer that has "
        f"them, with steps(state, checkpoint=DIR){_or_load(last)}. If there are none, start all peers with "
        "rollback=True: the run then goes on from what they have, which is a fresh start if that is revision 0. To "
        "begin another run instead, join with another run name (run=...)"
    )
    return Reason("state_lost", text, numbers=[0 if last is None else last.revision])


def _name(last: FinishedSync | None) -> str:
    return "the shared state" if last is None else f"revision {last.revision} of the shared state"


def _or_load(last: FinishedSync | None) -> str:
    return "" if last is None else f", or load exactly revision {last.revision}"


def _flaw(offer: Offer, last: FinishedSync | None, present: Lineage | None) -> str:
    of = _branch(offer)
    if offer.torn:
        return ", torn"
    if last is not None and offer.revision == last.revision:
        return ", with other content"
    if of is None or present is None:
        return ""
    if of.lineage == present.id and last is not None and of.revision > last.revision:
        return ", newer than what all had"
    if offer.lineage is not None and not is_past(of, present, None if last is None else last.revision):
        is_foreign = offer.lineage.run != present.run and not is_abandoned(of, present)
        return f", of another run: {offer.lineage.run}" if is_foreign else ", of an abandoned branch"
    return "" if offer.is_loaded else ", not a checkpoint"


def _no_candidate(
    offers: Mapping[PeerId, Offer], rejected: Mapping[PeerId, Reason], last: FinishedSync | None
) -> Reason:
    """Each peer with the reason why its state cannot win."""
    reasons = []
    for peer, offer in offers.items():
        if offer.torn:
            why = "is torn"
        elif offer.strategy == "receive-only":
            why = "only receives"
        elif peer in rejected:
            why = f"has revision {offer.revision}, which is not next"
        elif last is not None and peer not in last.participants:
            why = f"(revision {offer.revision}) took no part in the last sync"
        else:
            why = f"was changed, but still has revision {offer.revision}"
        reasons.append(f"peer {peer} {why}")
    return Reason("state", f"no peer has a state that the others could take: {'; '.join(reasons)}")


def _difference(offers: Mapping[PeerId, Offer], one: PeerId, other: PeerId) -> str:
    here, there = offers[one], offers[other]
    if here.revision != there.revision:
        return f"one has revision {here.revision} and the other {there.revision}"
    if not have_one_structure(here, there):
        return _other_structure(there, here, one)
    index, _ = _lacking(here, there)[0]
    return f"{here.keys[index].name!r} has different content"


def _other_structure(offer: Offer, won: Offer, winner: PeerId) -> str:
    """The first difference of two structures, with both sides."""
    if offer.hash != won.hash:
        return f"its hash is {offer.hash}, but {won.hash} on peer {winner}"
    here = {key.name: key for key in offer.keys}
    there = {key.name: key for key in won.keys}
    for name in sorted(here.keys() | there.keys()):
        if name not in there:
            return f"{name!r} is {_description(here[name])} there, but is not there at all on peer {winner}"
        if name not in here:
            return f"{name!r} is missing there, but is {_description(there[name])} on peer {winner}"
        if _description(here[name]) != _description(there[name]):
            return f"{name!r} is {_description(here[name])} there, but {_description(there[name])} on peer {winner}"
    raise AssertionError("the structures are equal")


def _description(key: KeyOffer) -> str:
    return f"{key.dtype} {list(key.shape)}" + (" and may differ" if key.may_differ else "")
