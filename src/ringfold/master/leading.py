"""Which of several masters leads: one lease in the store that they share, and the journal that only the leader writes.

    standby --the lease is free, or its holder's process is gone--> takes the journal over --> leads
       ^                                                                                         |
       +---- the lease ran out, the journal was taken over, or it cannot be written -------------+

The lease decides who *tries*. That two leaders do no harm when it fails (a leader that was asleep, a store that went
away) is the journal's doing, see `keeper.py`; so a lease whose holder has died on this machine is taken at once,
without waiting for its end. By its own clock a leader stops before its lease can have ended: what it would decide
after a long sleep, about peers that have long gone to another, would be wrong more often than not.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ringfold.errors import ConfigError, LeaseLost, StoreError
from ringfold.master.directory import Directory
from ringfold.master.journal import Journal
from ringfold.master.keeper import Deposed, Keeper
from ringfold.runtime.process import process_mark, process_of_mark_is_gone
from ringfold.store.base import Lease, Store, version_of

LEASE_KEY = "master/leader"
LOOK_S = 0.25
"""How often a standby looks whether the leader's process is gone."""
TROUBLE_S = 1.0
"""The pause after a failure of the store."""
_log = logging.getLogger("ringfold.master")


@dataclass(slots=True)
class Leadership:
    """A lease that is held, and the journals that came with it."""

    directory: Directory
    keepers: dict[str, Keeper]
    """By the run's name."""
    journals: dict[str, Journal]
    """Of the runs that have one. A closed one is that of a run that was ended on purpose."""
    links: dict[str, bytes]
    fence: int
    lease: Lease
    keeper_of: Callable[[str], Keeper]
    """Of a run that has no journal yet."""
    trouble: str = ""
    """Why the lease was not renewed the last time."""

    def write(self, run: str, journal: Journal) -> None:
        """Write a run's journal, the first time after its name is in the list of runs; or forget the run.

        Blocks; one call at a time for each run. Raises Deposed if another master has taken over.
        """
        keeper = self.keepers.setdefault(run, self.keeper_of(run))
        if journal.is_forgotten:
            keeper.forget()
            self.directory.remove(run)
            del self.keepers[run]
        else:
            self.directory.add(run)
            keeper.write(journal)

    def is_certain(self) -> bool:
        """Whether nobody else can hold the lease."""
        return self.lease.left_s() > 0


class Candidate:
    """A master on a store: leads when it can, and stands by otherwise.

    One that is `alone` has a journal to itself, and does not stand by: somebody else at it is a mistake.
    """

    def __init__(self, store: Store, where: str, name: str, lease_s: float, *, alone: bool = False) -> None:
        self._store, self._where, self._name, self._lease_s = store, where, name, lease_s
        self._alone = alone
        self._leader = self._trouble = ""

    @property
    def why_not(self) -> str:
        """Why this master does not lead, as far as is known here."""
        if self._trouble:
            return f"this master does not lead: {self._trouble}"
        who = self._leader or "nobody"
        return f"this master {f'waits for its journal ({who} has it)' if self._alone else f'stands by ({who} leads)'}"

    async def lead(self) -> Leadership:
        """Wait until this master leads. Raises ConfigError if its journal is to be its own, and is not."""
        told, self._leader = "", ""
        since = asyncio.get_running_loop().time()
        while True:
            pause_s = 0.0
            try:
                lease = await asyncio.to_thread(self._take_lease)
                if lease is not None:
                    return await self._take_over(lease)
                self._trouble = ""
            except StoreError as error:
                self._leader, self._trouble, pause_s = "", f"the journal cannot be used: {error}", TROUBLE_S
            except Deposed:
                self._trouble, pause_s = "", LOOK_S
            if self._alone and self._leader and asyncio.get_running_loop().time() > since + 2 * self._lease_s:
                raise ConfigError(
                    f"the journal {self._where} is in use by the master at {self._leader}; say --journal for another "
                    "one, or --store on both if one is to stand by for the other"
                )
            if self.why_not != told:
                told = self.why_not
                _log.log(logging.ERROR if self._trouble else logging.INFO, "%s", told)
            await asyncio.sleep(pause_s)

    def trouble(self, reason: str) -> None:
        """It led, and cannot any more, for this reason."""
        self._trouble = reason

    def _take_lease(self) -> Lease | None:
        """The lease; None after a while, if another one has it."""
        value = f"{process_mark()}|{self._name}".encode()
        lease = self._store.lease(LEASE_KEY, value, self._lease_s)
        if lease is not None:
            return lease
        holder, self._leader = self._store.get(LEASE_KEY), ""
        if holder is None:
            return None
        mark, _, leader = holder.value.decode(errors="replace").partition("|")
        # One's own is left where it could not be given back: nobody leads by it.
        if holder.value == value or process_of_mark_is_gone(mark):
            self._store.delete(LEASE_KEY, holder)
            return self._store.lease(LEASE_KEY, value, self._lease_s)
        self._leader = leader
        self._store.wait(LEASE_KEY, version_of(holder), LOOK_S)
        return None

    async def _take_over(self, lease: Lease) -> Leadership:
        try:
            leadership = await asyncio.to_thread(self._read_all, lease)
        except (StoreError, Deposed, asyncio.CancelledError):
            await _give_back(lease)  # who cannot read the journal must not keep it from those who can
            raise
        self._leader, self._trouble = self._name, ""
        return leadership

    def _read_all(self, lease: Lease) -> Leadership:
        """All runs that there are, under a fence that is higher than any before."""
        directory = Directory(self._store, self._where)
        last, names = directory.read()
        keeper_of = partial(Keeper, self._store, self._where)
        keepers = {name: keeper_of(name) for name in names}
        found = {name: keeper.read() for name, keeper in keepers.items()}
        journals = {name: journal for name, journal in found.items() if journal is not None}
        fence = 1 + max([last, *(journal.fence for journal in journals.values())])
        directory.take_over(fence)
        links = {name: keeper.read_links() for name, keeper in keepers.items()}
        return Leadership(directory, keepers, journals, links, fence, lease, keeper_of)

    async def hold(self, leadership: Leadership, lost: Callable[[str], None]) -> None:
        """Renew the lease until it is lost."""
        lease = leadership.lease
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                await asyncio.to_thread(lease.renew)
                leadership.trouble = ""
            except LeaseLost as error:
                lost(str(error))
                return
            except StoreError as error:
                leadership.trouble = f"its lease could not be renewed: {error}"
                _log.warning("%s", leadership.trouble)
                if not leadership.is_certain():
                    lost(leadership.trouble)
                    return

    async def give_up(self, leadership: Leadership) -> None:
        """Let another one lead at once."""
        await _give_back(leadership.lease)


async def _give_back(lease: Lease) -> None:
    try:
        await asyncio.to_thread(lease.release, 1.0)
    except StoreError as error:
        _log.info("the lease was not given back, and ends by itself: %s", error)
