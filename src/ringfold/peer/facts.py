"""What a peer knows of its epochs that its program's next step depends on. It must be the same on every member.

`are_peers_pending` compares a count that an op brought with the count up to which everybody was settled when the op's
epoch was made; and who is alone, or one of several groups, asks the run instead. Both numbers come from records and
from the answers to calls, never from what this peer merely happened to hear by now.
"""

from dataclasses import dataclass

from ringfold.peer.effects import CallSucceeded
from ringfold.wire.messages import CallDone, Epoch, Record

REMEMBERED_EPOCHS = 1_024


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """What `are_peers_pending` needs to know of an epoch, the same on all its members."""

    registrations: int
    groups: int


class Facts:
    """The facts of the last epochs, and the admission that has yet to be reported to the program."""

    def __init__(self) -> None:
        self.by_epoch: dict[Epoch, EpochFacts] = {}
        self.heard = 0
        """How many registrations the master has told of: what goes into the next op, and decides nothing here."""
        self._admission: Record | None = None  # the last record with newcomers, until an update or the join reports it

    def recorded(self, record: Record) -> None:
        self.by_epoch[record.epoch] = EpochFacts(record.registrations, record.world.groups)
        if record.newcomers:
            self._admission = record
        if len(self.by_epoch) > REMEMBERED_EPOCHS:
            del self.by_epoch[min(self.by_epoch)]

    def joined(self, record: Record) -> Record:
        """The record that this peer joined with; `record` is the newest one.

        The epoch may have changed since; those who voted go by the record with the newcomers, too.
        """
        admission, self._admission = self._admission, None
        return admission or record

    def call_failed(self) -> None:
        self._admission = None

    def call_done(self, done: CallDone, record: Record) -> CallSucceeded:
        """A call is complete. What it answers must be the same on every peer that was in it.

        A newcomer has only the record to go by, so the record's `pending` is the answer of the call that admitted it.
        Neither does it hear how many groups are left when the call is done: a group may have died out since its record.
        All of an admission count as many as the record did, or more; to ask the run once too often does no harm.
        """
        admission, self._admission = self._admission, None
        pending, groups, groups_now = done.pending, done.world.groups, done.world.groups
        if admission is not None:
            pending, groups = admission.pending, max(groups, admission.world.groups)
            groups_now = max(groups_now, record.world.groups)
        settled = record.registrations
        if admission is None and not done.pending:
            # Who registered since the record is gone again.
            settled = max(settled, done.registrations)
        self.by_epoch[record.epoch] = EpochFacts(settled, groups_now)
        return CallSucceeded(pending, groups, done.world)
