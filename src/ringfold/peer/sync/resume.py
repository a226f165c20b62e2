"""What a step loop does when the run has lost its last revision: load the checkpoint that the master requests.

A peer loads its newest checkpoint before it knows the run, so it may be the wrong one: of a branch that the run has
abandoned, or newer than what all members had. With its offer it lists all that it could load. If the master requests
one of them (`StateLost.checkpoint`), the peer that has it loads it, and all sync again. What cannot be loaded is listed
no more, so this comes to an end.
"""

import logging
from collections import Counter
from typing import Protocol

from ringfold.errors import StateError, StateLost
from ringfold.state.ancestry import branch_of, is_past
from ringfold.state.shared import SharedState, lineage_of
from ringfold.wire.messages import Branch, Lineage

_log = logging.getLogger("ringfold.steps")

MAX_REQUESTS = 32
"""How often one checkpoint may be requested, each time after all peers that had loaded it were lost."""


class CheckpointStore(Protocol):
    """As much of `Checkpoints` as the loop calls."""

    def save(self, state: SharedState) -> object: ...
    def load_newest(self, state: SharedState) -> int | None: ...
    def load(self, state: SharedState, revision: int) -> int: ...
    def load_branch(self, state: SharedState, branch: Branch) -> int: ...
    def revisions(self) -> list[int]: ...
    def branches(self) -> list[Branch]: ...


class Resuming:
    """The checkpoints that a loop could go on from. Without a store it has none, and leaves the loading to others."""

    def __init__(self, store: CheckpointStore | None) -> None:
        self._store = store
        self._useless: set[Branch] = set()
        self._loaded: Branch | None = None
        self._asked: Counter[Branch] = Counter()
        self._tried_exactly: set[int] = set()

    def listed(self) -> list[Branch]:
        """What this peer could load, for its offer. A disk that does not answer lists nothing."""
        if self._store is None:
            return []
        try:
            return [branch for branch in self._store.branches() if branch not in self._useless]
        except (StateError, OSError) as error:
            _log.warning("the checkpoints cannot be listed: %s", error)
            return []

    def goes_on(self, state: SharedState, lost: StateLost) -> bool:
        """The run has lost its state: load the requested checkpoint, if it is here. False if another sync is no use."""
        if lost.checkpoint is not None:
            wanted = Branch(*lost.checkpoint)
            self._asked[wanted] += 1
            self._load(state, wanted)
            return self._asked[wanted] < MAX_REQUESTS
        if self._store is None or lost.revision in self._tried_exactly:
            return False
        self._tried_exactly.add(lost.revision)
        self._load_exactly(self._store, state, lost.revision)
        return True

    def _load(self, state: SharedState, wanted: Branch) -> None:
        if self._store is None or wanted not in self.listed():
            return  # another peer has it
        if wanted == self._loaded and _is(state, wanted):
            self._useless.add(wanted)  # it was offered, and did not do
            return
        try:
            self._store.load_branch(state, wanted)
        except (StateError, OSError) as error:
            self._useless.add(wanted)
            _log.warning("revision %d cannot be loaded here: %s", wanted.revision, error)
        else:
            self._loaded = wanted
            _log.info("revision %d was loaded, for the run to go on from", wanted.revision)

    def _load_exactly(self, store: CheckpointStore, state: SharedState, revision: int) -> None:
        """Exactly the lost revision, in files that name no lineage. One peer that has it is enough."""
        try:
            store.load(state, revision)
        except (StateError, OSError) as error:
            _log.warning("revision %d is lost, and cannot be loaded here: %s", revision, error)
        else:
            _log.warning("the run goes on from revision %d, the last one that was synced", revision)


def _is(state: SharedState, branch: Branch) -> bool:
    lineage = lineage_of(state)
    return not state.torn and lineage is not None and branch_of(lineage, state.revision) == branch


def check_used(before: Lineage | None, revision: int, state: SharedState) -> None:
    """Warn of a loaded checkpoint that is not in the past of what the run goes on from."""
    present = lineage_of(state)
    if before is None or present is None or is_past(branch_of(before, revision), present):
        return
    whose = (
        f"run {before.run}, and this is run {present.run}"
        if before.run != present.run
        else ("a branch that the run has abandoned")
    )
    _log.warning("the checkpoint of revision %d that was loaded here is not used: it belongs to %s", revision, whose)
