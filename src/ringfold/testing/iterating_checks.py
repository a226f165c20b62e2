"""What must hold in a simulated global iteration: by what lives were handed, and by every change of the record."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringfold.iteration.model import Begun
from ringfold.iteration.record import Record, Rules, decode
from ringfold.store.base import version_of
from ringfold.store.memory import MemoryServer

if TYPE_CHECKING:
    from ringfold.testing.iterating_parts import Life


class Broken(AssertionError):
    """A promise was broken; the text says which."""


class Checks:
    """The history of one store, as an outsider sees it."""

    def __init__(self, rules: Rules, lives: Sequence["Life"]) -> None:
        self._rules, self._lives = rules, lives
        self._winners: dict[tuple[int, int], str] = {}
        self._members: dict[tuple[int, int], dict[int, str]] = {}
        self._ousted: set[str] = set()
        self._record: Record | None = None
        self._version = 0

    # What lives are handed

    def begun(self, life: "Life", begun: Begun, history: int, *, is_on_its_way: bool) -> None:
        """A life is handed an iteration; perhaps the answer was on its way when the store went back."""
        number, last = begun.iteration, life.log[-1] if life.log else None
        if not self._may_go_on(life, history):
            if not is_on_its_way or (life.history, number) not in self._members:
                raise Broken(f"{life} goes on with {number} although the store went back")
            history = life.history
        life.history = history
        if last is not None and number <= last:
            raise Broken(f"{life} is handed {number} after {last}: a repeated iteration")
        if last is not None and number > last + 1:
            self._skipped(life, range(last + 1, number), history)
        if begun.is_winner:
            other = self._winners.setdefault((history, number), life.incarnation)
            if other != life.incarnation:
                raise Broken(f"iteration {number} has two winners: {other} and {life.incarnation}")
        for one in self._lives:
            is_healthy = one.is_up and not one.is_troubled and one.history == history
            if is_healthy and one.log and one.log[-1] == number - 1 > one.finished:
                raise Broken(f"{life} begins {number}, and {one} has not finished {number - 1}")
        life.log.append(number)
        agreed = self._members.get((history, number))
        if agreed is not None and list(agreed) != list(begun.members):
            raise Broken(f"{life} believes that {begun.members} are in {number}; agreed are {list(agreed)}")

    def _skipped(self, life: "Life", numbers: range, history: int) -> None:
        if not life.is_troubled:
            raise Broken(f"{life} lost iteration {numbers[0]}, and nothing ever happened to it")
        for number in numbers:
            # It may have become a member without noticing, and been given up then: the next one began without it.
            both = (self._members.get((history, one), {}) for one in (number, number + 1))
            if all(members.get(life.rank) == life.incarnation for members in both):
                raise Broken(f"{life} lost iteration {number}, in which the others waited for it")

    def superseded(self, life: "Life") -> None:
        """A life says that somebody else has taken its seat."""
        if not any(one.rank == life.rank and one is not life for one in self._lives):
            raise Broken(f"{life} believes that it was superseded, and there is nobody else")

    def refused(self, life: "Life", history: int) -> None:
        """A life says that the store went back."""
        if life.history == history:
            raise Broken(f"{life} believes that the store went back, and it did not")

    # The record

    def _may_go_on(self, life: "Life", history: int) -> bool:
        """Whether a life knows this store, or an earlier one of which it has seen nothing that was taken back."""
        if life.history == history:
            return True
        return bool(life.log) and self._members.get((history, life.log[-1])) is self._members.get(
            (life.history, life.log[-1]), {}
        )

    def new_history(self, server: MemoryServer, key: str, history: int) -> None:
        """The store went back: what is in it now is where it begins."""
        entry = server.entries.get(key)
        self._ousted.clear()
        self._version = version_of(entry)
        self._record = None if entry is None else decode("memory:", entry.value)
        kept = -1 if self._record is None else self._record.iteration
        past = [(number, members) for (one, number), members in self._members.items() if one == history - 1]
        self._members.update({(history, number): members for number, members in past if number <= kept})

    def look(self, server: MemoryServer, key: str, history: int) -> None:
        """Check the record if it was changed."""
        entry = server.entries.get(key)
        if version_of(entry) == self._version:
            return
        if entry is None:
            raise Broken("the record was removed")
        record, before = decode("memory:", entry.value), self._record or Record(self._rules)
        self._version, self._record = entry.version, record
        if record.version != before.version + 1:
            raise Broken(f"the record's version went from {before.version} to {record.version}")
        if record.fence < before.fence:
            raise Broken(f"the fence went from {before.fence} to {record.fence}")
        self._check_seats(before, record)
        if record.iteration == before.iteration:
            return
        if record.iteration != before.iteration + 1:
            raise Broken(f"the iteration went from {before.iteration} to {record.iteration}")
        self._members[history, record.iteration] = record.members
        self._check_advance(before, record)

    def _check_seats(self, before: Record, record: Record) -> None:
        for rank, seat in before.roster.items():
            now = record.roster.get(rank)
            if now is None:
                raise Broken(f"rank {rank} lost its seat")
            if now.incarnation != seat.incarnation:
                self._ousted.add(seat.incarnation)
                if now.fence <= seat.fence:
                    raise Broken(f"rank {rank} was taken over with fence {now.fence}, after {seat.fence}")
        for seat in record.roster.values():
            if seat.incarnation in self._ousted:
                raise Broken(f"{seat.incarnation} speaks again although it was superseded")

    def _check_advance(self, before: Record, record: Record) -> None:
        lives = {life.incarnation: life for life in self._lives}
        if len(record.members) < self._rules.min_ranks:
            raise Broken(f"iteration {record.iteration} began with {len(record.members)} ranks")
        present = [rank for rank in before.members if not before.roster[rank].gone]
        if self._rules.quorum == "majority":
            voters = present or range(self._rules.world)
            if 2 * sum(rank in record.members for rank in voters) <= len(voters):
                raise Broken(f"iteration {record.iteration} began without a majority of {list(voters)}")
        for rank, incarnation in record.members.items():
            life = lives[incarnation]
            if before.members.get(rank) == incarnation and life.finished < before.iteration:
                raise Broken(f"{life} counts as arrived at {before.iteration}, which it has not finished")
        for rank in present:
            life = lives[before.members[rank]]
            if rank not in record.members and not life.is_troubled:
                raise Broken(f"{life} was left behind in {before.iteration}, and nothing ever happened to it")

    def at_end(self) -> None:
        """Everybody's log once more, as a whole."""
        for life in self._lives:
            if life.log != sorted(set(life.log)):
                raise Broken(f"{life} was handed {life.log}")
