"""What of a run is written down, and when: the machine's side of the journal. Pure.

What must not be forgotten goes ahead of everything that the same step says (`journal.mark` tells whether there is
anything). What is known about links is written now and then, and nobody waits for it. A run that is ended on purpose
closes its journal first, and then says so: who hears of the end can rely on it.
"""

from ringfold.master.events import Close, Effect, Ended, KeepLinks, Ns, Persist, Send
from ringfold.master.journal import Journal, closed, journal_of, links_of, mark
from ringfold.master.life import stopped
from ringfold.master.liveness import MS
from ringfold.master.run import Run
from ringfold.wire.messages import Refused

LINKS_EVERY_NS = 30_000 * MS


class Keeping:
    """The journal of one master. Without one (`is_on`) nothing is written, and the run ends with its master."""

    def __init__(self, run: Run, fence: int, secret: bytes, leader: str, *, is_on: bool) -> None:
        self._run, self._fence, self._secret, self._leader = run, fence, secret, leader
        self.is_on = is_on
        self._mark = mark(run)
        self._newest_link: Ns | None = None
        self._links_due: Ns = 0

    def journal(self) -> Journal:
        """All that a later master needs to go on from here."""
        return journal_of(self._run, self._fence, self._secret, self._leader)

    def settle(self, out: list[Effect]) -> None:
        """Put the journal ahead of what a step says, if there is news that must not be forgotten."""
        if self.is_on and (changed := mark(self._run)) != self._mark:
            self._mark = changed
            out.insert(0, Persist(self.journal()))

    def tick(self, now: Ns) -> None:
        """Keep what is known about links, if there is anything new."""
        if not self.is_on or now < self._links_due or not len(self._run.links):
            return
        newest = self._run.links.newest_ns
        if newest != self._newest_link:
            self._newest_link, self._links_due = newest, now + LINKS_EVERY_NS
            self._run.out.append(KeepLinks(links_of(self._run, now)))

    def ended(self, event: Ended) -> list[Effect]:
        """The last words of a run that is ended on purpose."""
        journal = closed(self._fence, self._leader, stopped(self._run))
        first: list[Effect] = [Persist(journal)] if self.is_on else []
        last: list[Effect] = []
        for connection in self._run.connections.values():
            if connection.peer is not None:
                last.append(Send(connection.id, Refused(event.reason)))
            last.append(Close(connection.id, event.reason))
        return first + last
