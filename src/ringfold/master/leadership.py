"""Which of several masters leads: one lease in the store that they share, and the journals that only the leader writes.

    standby --the lease is free, or its holder's process is gone--> takes the journals over --> leads
       ^                                                                                          |
       +---- the lease expired, a journal was taken over, or it cannot be written ----------------+

The lease decides which master *tries*. If two masters lead at once (one was suspended, a store was unreachable), the
journal accepts the writes of one of them only, see `journal_store.py`; so a lease whose holder has died on this machine
is taken at once, without waiting for its expiry. By its own clock a leader stops before its lease can have expired:
what it would decide after a long suspension, about peers that have long gone to another master, would mostly be wrong.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ringfold.errors import ConfigError, LeaseLost, StoreError
from ringfold.master.journal import Journal
from ringfold.master.journal_store import Deposed, JournalStore, RunDirectory
from ringfold.runtime.process import is_process_gone, process_identity
from ringfold.store.base import Lease, Store, version_of

LEASE_KEY = "master/leader"
POLL_S = 0.25
"""How often a standby checks whether the leader's process is gone."""
RETRY_S = 1.0
"""The pause after a failure of the store."""
_log = logging.getLogger("ringfold.master")


@dataclass(slots=True)
class Leadership:
    """A lease, and the journals that were taken over with it."""

    directory: RunDirectory
    stores: dict[str, JournalStore]
    """By the run's name."""
    journals: dict[str, Journal]
    """The journals, by the run's name. A closed one is that of a run that was ended on purpose."""
    links: dict[str, bytes]
    fence: int
    lease: Lease
    store_of: Callable[[str], JournalStore]
    """Makes the store of a run that has no journal yet."""
    renewal_error: str = ""
    """Why the last renewal of the lease failed."""

    def write(self, run: str, journal: Journal) -> None:
        """Write a run's journal, after its name is in the list of runs; or forget the run.

        Blocks; one call at a time for each run. Raises Deposed if another master has taken over.
        """
        store = self.stores.setdefault(run, self.store_of(run))
        if journal.is_forgotten:
            store.forget()
            self.directory.remove(run)
            del self.stores[run]
        else:
            self.directory.add(run)
            store.write(journal)

    def is_exclusive(self) -> bool:
        """Whether no other master can hold the lease."""
        return self.lease.left_s() > 0


class Candidate:
    """A master on a store: it leads when it can, and stands by otherwise.

    A master that is `alone` has a journal of its own, and does not stand by: another master on it is a mistake.
    """

    def __init__(self, store: Store, where: str, name: str, lease_s: float, *, alone: bool = False) -> None:
        self._store, self._where, self._name, self._lease_s = store, where, name, lease_s
        self._alone = alone
        self._leader = self._error = ""

    @property
    def why_not(self) -> str:
        """Why this master does not lead, as far as it knows."""
        if self._error:
            return f"this master does not lead: {self._error}"
        leader = self._leader or "no master"
        waits = f"waits for its journal ({leader} has it)" if self._alone else f"stands by ({leader} leads)"
        return f"this master {waits}"

    async def lead(self) -> Leadership:
        """Wait until this master leads. Raises ConfigError if it should be alone with its journal, and is not."""
        logged, self._leader = "", ""
        since = asyncio.get_running_loop().time()
        while True:
            pause_s = 0.0
            try:
                lease = await asyncio.to_thread(self._take_lease)
                if lease is not None:
                    return await self._take_over(lease)
                self._error = ""
            except StoreError as error:
                self._leader, self._error, pause_s = "", f"the journal cannot be used: {error}", RETRY_S
            except Deposed:
                self._error, pause_s = "", POLL_S
            if self._alone and self._leader and asyncio.get_running_loop().time() > since + 2 * self._lease_s:
                raise ConfigError(
                    f"the journal {self._where} is in use by the master at {self._leader}; choose another one with "
                    "--journal, or give --store to both if one is to stand by for the other"
                )
            if self.why_not != logged:
                logged = self.why_not
                _log.log(logging.ERROR if self._error else logging.INFO, "%s", logged)
            await asyncio.sleep(pause_s)

    def set_error(self, reason: str) -> None:
        """Remember why this master stopped leading."""
        self._error = reason

    def _take_lease(self) -> Lease | None:
        """The lease; None after a while, if another master has it."""
        value = f"{process_identity()}|{self._name}".encode()
        lease = self._store.lease(LEASE_KEY, value, self._lease_s)
        if lease is not None:
            return lease
        holder, self._leader = self._store.get(LEASE_KEY), ""
        if holder is None:
            return None
        identity, _, leader = holder.value.decode(errors="replace").partition("|")
        # A lease of this process is left over from before, because it could not be released: no master leads with it.
        if holder.value == value or is_process_gone(identity):
            self._store.delete(LEASE_KEY, holder)
            return self._store.lease(LEASE_KEY, value, self._lease_s)
        self._leader = leader
        self._store.wait(LEASE_KEY, version_of(holder), POLL_S)
        return None

    async def _take_over(self, lease: Lease) -> Leadership:
        try:
            leadership = await asyncio.to_thread(self._read_all, lease)
        except (StoreError, Deposed, asyncio.CancelledError):
            await _release(lease)  # a master that cannot read the journals must not keep others from them
            raise
        self._leader, self._error = self._name, ""
        return leadership

    def _read_all(self, lease: Lease) -> Leadership:
        """Read all runs, and take them over under a fence that is higher than any before."""
        directory = RunDirectory(self._store, self._where)
        last, names = directory.read()
        store_of = partial(JournalStore, self._store, self._where)
        stores = {name: store_of(name) for name in names}
        found = {name: store.read() for name, store in stores.items()}
        journals = {name: journal for name, journal in found.items() if journal is not None}
        fence = 1 + max([last, *(journal.fence for journal in journals.values())])
        directory.take_over(fence)
        links = {name: store.read_links() for name, store in stores.items()}
        return Leadership(directory, stores, journals, links, fence, lease, store_of)

    async def hold(self, leadership: Leadership, lost: Callable[[str], None]) -> None:
        """Renew the lease until it is lost."""
        lease = leadership.lease
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                await asyncio.to_thread(lease.renew)
                leadership.renewal_error = ""
            except LeaseLost as error:
                lost(str(error))
                return
            except StoreError as error:
                leadership.renewal_error = f"its lease could not be renewed: {error}"
                _log.warning("%s", leadership.renewal_error)
                if not leadership.is_exclusive():
                    lost(leadership.renewal_error)
                    return

    async def release(self, leadership: Leadership) -> None:
        """Release the lease, so that another master can lead at once."""
        await _release(leadership.lease)


async def _release(lease: Lease) -> None:
    try:
        await asyncio.to_thread(lease.release, 1.0)
    except StoreError as error:
        _log.info("the lease was not released, and will expire: %s", error)
