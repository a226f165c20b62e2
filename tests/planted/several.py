"""Planted bugs of several runs on one master."""

from functools import partial

from planted import Bug
from ringfold.config import DEFAULT_RUN
from ringfold.master.journal import decode
from ringfold.master.requests import RunRequest
from ringfold.master.runs import Runs
from ringfold.testing.masters import SimStore
from ringfold.testing.several import SeveralMaster, run_several
from ringfold.testing.simulation import Setup, Simulation
from ringfold.wire.messages import Resume


class OneJournal(SimStore):
    """All runs but the first have one journal."""

    def write(self, run: str, expected: int, raw: bytes) -> int | None:
        shared = run if run == DEFAULT_RUN else "run-1"
        version = super().write(shared, self.version(shared), raw)
        self.journals.setdefault(run, raw)
        self.journals[run] = self.journals[shared]
        return version


class ForgetsRuns(SimStore):
    """A new leader does not learn of the runs that have names."""

    def take_over(self, fence: int) -> None:
        super().take_over(fence)
        self.journals = {run: raw for run, raw in self.journals.items() if run == DEFAULT_RUN}


class UnfencedRuns(SimStore):
    """Only the default run is fenced: a deposed leader goes on with the others."""

    def write(self, run: str, expected: int, raw: bytes) -> int | None:
        if run != DEFAULT_RUN and decode(raw, "simulated").fence < self.fence:
            return expected + 1  # as if it had been written
        return super().write(run, self.version(run) if run != DEFAULT_RUN else expected, raw)


class _Confused(Runs):
    """A peer that comes back is taken for one of the default run."""

    def _run_name(self, request: RunRequest) -> str:
        return DEFAULT_RUN if isinstance(request, Resume) else super()._run_name(request)


class Confused(SeveralMaster):
    def __init__(self, sim: Simulation, runs: Runs, *rest: object) -> None:
        runs.__class__ = _Confused
        super().__init__(sim, runs, *rest)  # type: ignore[arg-type]


def _bug(text: str, setup: Setup) -> Bug:
    return Bug(text, partial(run_several, base=setup))


BUGS: dict[str, Bug] = {
    "one_journal": _bug("runs with names share a journal", Setup(shell=SeveralMaster, store=OneJournal)),
    "forgotten_runs": _bug("a new leader does not learn of other runs", Setup(shell=SeveralMaster, store=ForgetsRuns)),
    "unfenced_runs": _bug("a deposed leader goes on with other runs", Setup(shell=SeveralMaster, store=UnfencedRuns)),
    "confused_runs": _bug("a peer that comes back to one run is taken for one of another", Setup(shell=Confused)),
}
