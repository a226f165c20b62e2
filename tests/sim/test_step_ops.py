"""Several ops of a step in flight, in the simulation: seeds that once found something."""

from ringfold.testing.scenario import draw, run_seed
from ringfold.testing.stateful import Looping


def test_sigterm_ends_a_loop_that_waits_for_a_handle() -> None:
    """The op failed because the peer had left for SIGTERM; that is no error of the program's."""
    seed = 830066
    work = draw(seed).work
    assert isinstance(work, Looping)
    assert (work.overlap, work.sigterm) == ("all", "one")
    run_seed(seed)
